"""Display of a run's progress in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedhet.config.resolve import Config
from fedhet.runs.log import Watcher
from fedhet.runs.records import PROTOCOLS, RoundRecord, Score, Summary, headline_scores
from fedhet.runs.units import human_bytes, plural

MOST_CLIENTS = 24
MOST_NOTICES = 6


class LineDisplay(Watcher):
    """One plain line per event: for logs and pipes. Each begins with the label, if there is one."""

    def __init__(self, console: Console, label: str = "") -> None:
        self._console, self._label = console, f"{label}: " if label else ""
        self._headline = "common"

    def run_started(self, config: Config, directory: Path, models: Mapping[str, str]) -> None:
        """Print the run's title and directory."""
        self._headline = config.method.spec.headline
        self._print(f"{title(config, models)} -> {directory}")

    def round_finished(self, record: RoundRecord) -> None:
        """Print the round's headline numbers."""
        _, text = headline_of(record, self._headline)
        answered = f"{len(record.answered)}/{len(record.asked)} clients"
        bytes_moved = human_bytes(record.bytes_up + record.bytes_down)
        loss = f"train loss {record.loss.mean:.4f}  " if record.loss else ""
        self._print(
            f"round {record.round:>3}  {text}  {loss}{answered}  {bytes_moved}  "
            f"{record.seconds.total:.1f} s"
        )

    def notice(self, text: str) -> None:
        """Print a notice."""
        self._print(f"note: {text}")

    def run_finished(self, summary: Summary) -> None:
        """Print the run's duration."""
        self._print(duration(summary))

    def _print(self, text: str) -> None:
        self._console.print(self._label + text, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay(Watcher):
    """A live display of the rounds, and of every client's model, state and accuracy."""

    def __init__(self, console: Console, label: str = "") -> None:
        self._label = f"{label}: " if label else ""
        self._console = console
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("waiting for the clients", total=None)
        self._title = ""
        self._protocol = "common"
        self._models: dict[str, str] = {}
        self._state: dict[str, Text] = {}
        self._last: RoundRecord | None = None
        self._trace: list[float] = []
        self._notices: list[str] = []
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def run_started(self, config: Config, directory: Path, models: Mapping[str, str]) -> None:
        """Start the table of clients."""
        self._title = f"{self._label}{title(config, models)} -> {directory}"
        self._protocol = config.method.spec.headline
        self._models = dict(models)
        self._state = {name: Text("waiting", style="dim") for name in models}
        self._last, self._trace, self._notices = None, [], []
        self._bar.update(self._task, description=config.method.name, total=config.run.rounds)

    def round_started(self, number: int, asked: Sequence[str]) -> None:
        """Mark the clients that were asked."""
        for name in self._models:
            asked_now = name in asked
            self._state[name] = (
                Text("training", style="yellow") if asked_now else Text("not asked", style="dim")
            )

    def client_answered(self, client: str, error: str) -> None:
        """Mark a client as done or failed."""
        self._state[client] = Text("failed", "bold red") if error else Text("done", "green")

    def round_finished(self, record: RoundRecord) -> None:
        """Advance the bar, and show the round's accuracies."""
        self._last = record
        for name in record.failed:
            self._state[name] = Text("failed", style="bold red")
        value, _ = headline_of(record, self._protocol)
        if value is not None:
            self._trace.append(value)
        self._bar.update(self._task, completed=record.round)

    def notice(self, text: str) -> None:
        """Show a notice under the table."""
        self._notices = [*self._notices, text][-MOST_NOTICES:]

    def run_finished(self, summary: Summary) -> None:
        """Print the run's duration above the table."""
        self._console.print(f"{self._label}{duration(summary)}", highlight=False, markup=False)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._title, style="bold"), self._bar]
        if self._models:
            parts.append(self._clients())
        if self._trace:
            mean = " ".join(f"{value:.3f}" for value in self._trace[-12:])
            parts.append(Text(f"mean accuracy ({self._protocol}) by round: {mean}", style="cyan"))
        parts += [Text(f"note: {text}", style="yellow") for text in self._notices]
        return Group(*parts)

    def _clients(self) -> Table:
        table = Table(box=None, padding=(0, 2), show_edge=False)
        for name in ("client", "model", "state"):
            table.add_column(name, no_wrap=True)
        table.add_column("accuracy", justify="right")
        table.add_column("train loss", justify="right")
        accuracy = _private(self._last, self._protocol)
        losses = self._last.loss.per_client if self._last and self._last.loss else {}
        for name in list(self._models)[:MOST_CLIENTS]:
            table.add_row(
                name,
                self._models[name],
                self._state.get(name, Text("")),
                _number(accuracy.get(name)),
                _number(losses.get(name)),
            )
        if len(self._models) > MOST_CLIENTS:
            table.add_row(f"and {len(self._models) - MOST_CLIENTS} more", "", "", "", "")
        return table


def title(config: Config, models: Mapping[str, str]) -> str:
    """Return a one-line title of a run."""
    counts = [
        plural(len(models), "client"),
        plural(len(set(models.values())), "architecture"),
        plural(config.run.rounds, "round"),
        f"seed {config.run.seed}",
    ]
    return f"{config.method.name} on {config.run.data.dataset}: {', '.join(counts)}"


def duration(summary: Summary) -> str:
    """Return how long a run took, with its start and its rounds apart."""
    seconds = summary.seconds
    text = f"{plural(summary.rounds, 'round')} in {seconds.total:.1f} s"
    rounds = [past.seconds for past in summary.history if math.isfinite(past.seconds)]
    if math.isnan(seconds.start) or not rounds:
        return text
    return f"{text}: {seconds.start:.1f} s to start, {fmean(rounds):.1f} s a round"


def headline_of(record: RoundRecord, protocol: str) -> tuple[float | None, str]:
    """Return the private models' mean accuracy and a text that shows it.

    It is that under `protocol`, or under the other if only that was evaluated.
    """
    found = headline_scores(record, protocol)
    if found is None:
        return None, "not evaluated"
    shown, scores = found
    text = f"accuracy ({shown}) {scores.mean:.4f} ± {scores.std:.4f}"
    return scores.mean, f"{text}, worst {scores.worst:.4f}"


def _private(record: RoundRecord | None, protocol: str) -> Mapping[str, float]:
    if record is None:
        return {}
    found = record.accuracy
    kinds = next((found[p] for p in (protocol, *PROTOCOLS) if p in found), {})
    return kinds.get("private", Score()).per_client


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
