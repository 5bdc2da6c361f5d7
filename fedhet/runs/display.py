"""Displays of a run's progress: live on a terminal, as lines of text, or in a notebook cell."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from fedhet.base.metrics import ACCURACY
from fedhet.runs.progress import Progress, State, Throttled, accuracies_of
from fedhet.runs.units import (
    human_bytes,
    human_seconds,
    make_output_lenient,
    plural,
    printable,
    score,
    shown_path,
    time_left,
)

COLORS = {
    State.FAILED: "bold red", State.TRAINING: "yellow", State.WAITING: "dim", State.LATE: "yellow",
    State.DONE: "green", State.NOT_SAMPLED: "dim", State.BACKING_OFF: "dim",
    State.EXCLUDED: "red", State.OFFLINE: "dim",
}  # fmt: skip
MIN_ROWS = 3
"""Minimum number of clients to show; on a small terminal, notices are truncated instead."""
TRACE = 20
"""Maximum number of rounds for which mean accuracies are listed."""


class LiveDisplay:
    """Live terminal display of the rounds and of each client's model, state and accuracy."""

    def __init__(self, console: Console, label: str = "") -> None:
        self.progress = Progress(self._print_lasting)
        self._console, self._label = console, f"{label}: " if label else ""
        self._printed = False
        """Whether the run's directory has been printed."""
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            console=console,
        )
        self._start = Bar(SpinnerColumn(), TextColumn("{task.description}"), console=console)
        self._task, self._phase = self._bar.add_task("", total=None), self._start.add_task("")
        self._live = Live(
            console=console, get_renderable=lambda: self, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _print_lasting(self, line: str) -> None:
        """Print lines that stay on the terminal: the run's directory and, later, the duration."""
        run = self.progress
        if run.directory and not self._printed:
            self._printed, line = True, f"run: {shown_path(run.directory)}"
        elif not run.summary:
            return
        print_line(self._console, self._label + printable(line))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the summary lines, and as many clients and notices as fit on the terminal."""
        run = self.progress
        num_clients, done = len(run.clients), run.status.round - run.is_in_round
        phase = printable(run.status.phase).replace("[", r"\[")  # Escape rich's markup.
        self._start.update(self._phase, description=phase)
        self._bar.update(
            self._task, description=run.method, total=run.status.rounds or None, completed=done
        )
        top = self._summary(options.max_width) if num_clients else [self._start]
        notes: list[RenderableType] = [
            Text(f"note: {printable(text)}", "yellow") for text in run.status.notices
        ]
        free = console.size.height - 1 - _num_lines(console, options, top)
        if _num_lines(console, options, notes) + num_clients >= free:
            notes = [_truncated(f"note: {text}", "yellow") for text in run.status.notices]
            kept = min(len(notes), max(0, free - MIN_ROWS - 2), max(1, free // 3))
            notes = notes[len(notes) - kept :]
        yield from top
        yield from self._clients(free - _num_lines(console, options, notes)) if num_clients else ()
        yield from notes

    def _summary(self, width: int) -> list[RenderableType]:
        """Return the lines that summarize the run."""
        run = self.progress
        training, waiting = run.count(State.TRAINING), run.count(State.WAITING)
        if not run.status.round:
            now = f"{plural(len(run.clients), 'client')} waiting for round 1"
        elif not run.is_in_round:
            now = f"round {run.status.round} finished"
        else:
            failed, replied = run.count(State.FAILED), run.asked - training - waiting
            now = f"round {run.status.round}: {replied} of {plural(run.asked, 'client')} replied"
            now += f", {failed} failed" if failed else ""
            server = " · the server aggregates and evaluates"
            now += f" · {training} training" if training + waiting else server
        heading = _truncated(self._label + run.status.title, "bold")
        lines: list[RenderableType] = [heading, self._bar, _truncated(now)]
        if run.last:
            lines.append(_truncated(accuracies_of(run.last, run.headline), "cyan"))
            start = "mean by round:"
            fitting = max(1, (width - len(start)) // len(" 0.000"))
            means = (f"{mean:.3f}" for mean in run.means[-min(TRACE, fitting) :])
            lines.append(_truncated(" ".join([start, *means]), "cyan"))
        if not math.isnan(run.seconds_per_round):
            sent, each = human_bytes(run.status.bytes), human_seconds(run.seconds_per_round)
            left = f" · {time_left(run.seconds_left)}" if run.seconds_left > 0 else ""
            lines.append(_truncated(f"{sent} sent · {each} per round{left}"))
        return lines

    def _clients(self, max_lines: int) -> Iterator[RenderableType]:
        """Yield the table of clients and, if not all fit, a line about the hidden clients."""
        run = self.progress
        table = Table(box=None, padding=(0, 1), show_edge=False, pad_edge=False)
        table.add_column("client", no_wrap=True, max_width=24)
        table.add_column("model", no_wrap=True, max_width=18)
        table.add_column("state", no_wrap=True)
        # The summary above names the headline kind, so name only another kind here.
        is_headline = not run.client_kind or run.status.headline.endswith(f", {run.client_kind}")
        of_kind = "" if is_headline else f" ({run.client_kind})"
        for name in (f"{run.metric.title}{of_kind}", "train loss", "seconds"):
            table.add_column(name, justify="right", no_wrap=True)
        rows = max(MIN_ROWS, max_lines - 1)
        num_clients = len(run.clients)
        shown = run.clients_to_show(rows if num_clients <= rows else rows - 1)
        for client in shown:
            table.add_row(
                Text(printable(client.name)),
                Text(printable(client.model)),
                Text(client.state, style=COLORS[State(client.state)]),
                Text(_number(client.accuracy, 4, run.metric.name)),
                Text(_number(client.loss, 4)),
                Text(_number(run.seconds_of(client), 1)),
            )
        yield table
        if len(shown) < num_clients:
            names = {client.name for client in shown}
            states = [c.state for c in [*run.clients.values()] if c.name not in names]
            counts = [f"{states.count(state)} {state}" for state in State if state in states]
            hidden = f"and {len(states)} more: {', '.join(counts)}"
            yield _truncated(f"{hidden} (shown: least accurate and slowest)", "dim")


def _num_lines(console: Console, options: ConsoleOptions, parts: Sequence[RenderableType]) -> int:
    return len(console.render_lines(Group(*parts), options, pad=False))


def _truncated(text: str, style: str = "") -> Text:
    """Return a line of text, truncated to the width of the terminal."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _number(value: float, digits: int, metric: str = ACCURACY) -> str:
    return "" if math.isnan(value) else score(value, metric, digits)


@contextlib.contextmanager
def display_on(console: Console, label: str = "") -> Iterator[Progress]:
    """Show a run's progress in the notebook, on the terminal, or as lines of text.

    `label` is the prefix of each line or, on a terminal, of the title.
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
    """Return a `Progress` that prints a line for each event, for logs and pipes."""

    def show(line: str) -> None:
        if line:
            print_line(console, f"{label}: {line}" if label else line)

    return Progress(show)


def print_line(console: Console, text: str) -> None:
    """Print text without markup, highlighting, or line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def round_lines(console: Console, seconds: float = 10.0) -> Progress:
    """Return a `Progress` that prints the states of the clients during long rounds.

    Prints at most one line every `seconds` seconds. This display is for the log of a deployment.
    """

    def show() -> None:
        pending = progress.count(State.WAITING) + progress.count(State.TRAINING)
        if progress.is_in_round and 0 < pending < progress.asked:
            print_line(console, progress.clients_by_state())

    lines = Throttled(show, seconds)
    progress = Progress(changed=lines.trigger)
    return progress


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook and can thus display HTML."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None


def notebook_display() -> Progress:
    """Return a `Progress` that is shown in the output of a cell and updated after each event."""
    ipython: Any = importlib.import_module("IPython.display")
    cell: list[Any] = []

    def show(line: str) -> None:
        content = ipython.HTML(html_of(progress))
        if cell:
            cell[0].update(content)
        else:
            cell.append(ipython.display(content, display_id=True))

    progress = Progress(show)
    return progress


def html_of(progress: Progress) -> str:
    """Return HTML with a progress bar, the last accuracy, and notices, with all text escaped."""
    record, done = progress.ended, progress.ended.round if progress.ended else 0
    latest = f"round {done}: {accuracies_of(record, progress.headline)}" if record else ""
    if not latest and progress.status.round:
        latest = f"round {progress.status.round}: {plural(progress.asked, 'client')} training"
    if progress.summary:
        latest += f" ({progress.summary.seconds.total:.1f} s)"
    lines = [
        f"<b>{_escaped(progress.status.title or progress.status.phase)}</b>",
        f'<progress value="{done}" max="{max(1, progress.status.rounds)}"></progress> '
        f"{done}/{progress.status.rounds} rounds",
        _escaped(latest),
        *(f"note: {_escaped(text)}" for text in progress.status.notices),
    ]
    return "<br>".join(line for line in lines if line)


def _escaped(text: str) -> str:
    return escape(printable(text))
