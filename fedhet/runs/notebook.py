"""Display of a run's progress in a notebook: one cell's output, updated after each round."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedhet.config.resolve import Config
from fedhet.runs.display import MOST_NOTICES, headline_of, title
from fedhet.runs.log import Watcher
from fedhet.runs.records import RoundRecord, Summary
from fedhet.runs.units import plural, printable


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook, which can show HTML."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None


class NotebookDisplay(Watcher):
    """A bar of the rounds, the last accuracy, and notices."""

    def __init__(self) -> None:
        self._page: Any = importlib.import_module("IPython.display")
        self._shown: Any = None
        self._title, self._headline = "", "common"
        self._rounds, self._done = 0, 0
        self._last = ""
        self._notices: list[str] = []

    def waiting(self, what: str) -> None:
        """Show what the run waits for before its first round."""
        self._title = what
        self._show()

    def run_started(self, config: Config, directory: Path, models: Mapping[str, str]) -> None:
        """Show the run's title, and an empty bar."""
        self._title, self._headline = title(config, models), config.method.spec.headline
        self._rounds = config.run.rounds
        self._show()

    def round_started(self, number: int, asked: Sequence[str]) -> None:
        """Show which round goes on."""
        self._last = self._last or f"round {number}: {plural(len(asked), 'client')} train"
        self._show()

    def round_finished(self, record: RoundRecord) -> None:
        """Advance the bar, and show the round's accuracy."""
        _, text = headline_of(record, self._headline)
        self._done = record.round
        self._last = f"round {record.round}: {text}"
        self._show()

    def notice(self, text: str) -> None:
        """Show a notice below the bar."""
        self._notices = [*self._notices, text][-MOST_NOTICES:]
        self._show()

    def run_finished(self, summary: Summary) -> None:
        """Show how long the run took."""
        self._last += f" ({summary.seconds.total:.1f} s)"
        self._show()

    def _show(self) -> None:
        content = self._page.HTML(self.html())
        if self._shown is None:
            self._shown = self._page.display(content, display_id=True)
        else:
            self._shown.update(content)

    def html(self) -> str:
        """Return what is shown; texts of clients and files are escaped."""
        lines = [f"<b>{_safe(self._title)}</b>"]
        lines.append(
            f'<progress value="{self._done}" max="{max(1, self._rounds)}"></progress> '
            f"{self._done}/{self._rounds} rounds"
        )
        lines += [_safe(self._last), *(f"note: {_safe(text)}" for text in self._notices)]
        return "<br>".join(line for line in lines if line)


def _safe(text: str) -> str:
    return escape(printable(text))
