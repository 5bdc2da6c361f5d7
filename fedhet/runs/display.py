"""The displays of a run's progress: a terminal, plain lines, or a notebook's cell."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from html import escape
from typing import Any

from rich.console import Console

from fedhet.runs.live import LiveDisplay
from fedhet.runs.progress import Progress, State, accuracies_of
from fedhet.runs.repeated import Repeated
from fedhet.runs.units import make_output_lenient, plural, printable

LINE_SECONDS = 10.0
"""Between two lines on a round that is under way."""


@contextlib.contextmanager
def display_on(console: Console, label: str = "") -> Iterator[Progress]:
    """Show a run where this process can: in the notebook, on the terminal, or line by line.

    Lines, and the terminal's first one, begin with the label, if there is one.
    """
    make_output_lenient()
    if in_notebook():
        yield notebook_display()
    elif console.is_terminal:
        with LiveDisplay(console, label) as live:
            yield live.progress
    else:
        yield line_display(console, label)


def line_display(console: Console, label: str = "") -> Progress:
    """Return a progress that prints a line for each event: for logs and pipes."""

    def show(line: str) -> None:
        if line:
            text = f"{label}: {line}" if label else line
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    return Progress(show)


def round_lines(console: Console, seconds: float = LINE_SECONDS) -> Progress:
    """Return a progress that says who has answered and who is awaited, in rounds that last.

    At most one line in so many seconds, for the log of a deployment whose sites take minutes.
    """

    def show() -> None:
        awaited = progress.count(State.WAITING) + progress.count(State.TRAINING)
        if progress.goes_on and 0 < awaited < progress.asked:
            console.print(progress.in_words(), highlight=False, markup=False, soft_wrap=True)

    lines = Repeated(show, seconds)
    progress = Progress(changed=lines.note)
    return progress


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook, which can show HTML."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None


def notebook_display() -> Progress:
    """Return a progress that is shown as one cell's output, updated after each event."""
    page: Any = importlib.import_module("IPython.display")
    cell: list[Any] = []

    def show(line: str) -> None:
        content = page.HTML(html_of(progress))
        if cell:
            cell[0].update(content)
        else:
            cell.append(page.display(content, display_id=True))

    progress = Progress(show)
    return progress


def html_of(progress: Progress) -> str:
    """Return a bar of the rounds, the last accuracy, and notices; all texts are escaped."""
    record, done = progress.ended, progress.ended.round if progress.ended else 0
    news = f"round {done}: {accuracies_of(record, progress.protocol)}" if record else ""
    if not news and progress.round:
        news = f"round {progress.round}: {plural(progress.asked, 'client')} train"
    if progress.summary:
        news += f" ({progress.summary.seconds.total:.1f} s)"
    lines = [
        f"<b>{_safe(progress.title or progress.phase)}</b>",
        f'<progress value="{done}" max="{max(1, progress.rounds)}"></progress> '
        f"{done}/{progress.rounds} rounds",
        _safe(news),
        *(f"note: {_safe(text)}" for text in progress.notices),
    ]
    return "<br>".join(line for line in lines if line)


def _safe(text: str) -> str:
    return escape(printable(text))
