"""A run's progress in plain lines, and the words that all displays share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from rich.console import Console

from fedhet.config.resolve import Config
from fedhet.runs.log import Watcher
from fedhet.runs.progress import shown_scores
from fedhet.runs.records import RoundRecord, Summary
from fedhet.runs.units import human_bytes, plural

MOST_NOTICES = 6


class LineDisplay(Watcher):
    """One plain line per event: for logs and pipes. Each begins with the label, if there is one."""

    def __init__(self, console: Console, label: str = "") -> None:
        self._console, self._label = console, f"{label}: " if label else ""
        self._headline = "common"

    def waiting(self, what: str) -> None:
        """Print what the run waits for before its first round."""
        self._print(what)

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
    """Return the mean accuracy of the first kind of model and a text that shows all kinds.

    It is that of the private models if there are any, under `protocol`, or under the other if only
    that was evaluated.
    """
    _, kinds = shown_scores(record, protocol)
    if not kinds:
        return None, "not evaluated"
    return next(iter(kinds.values())).mean, accuracies_of(record, protocol)


def accuracies_of(record: RoundRecord, protocol: str) -> str:
    """Return a text that shows the mean accuracy of each kind of model, of the first in full."""
    shown, kinds = shown_scores(record, protocol)
    (kind, scores), *others = kinds.items()
    named = shown if kind == "private" else f"{shown}, {kind}"
    text = f"accuracy ({named}) {scores.mean:.4f} ± {scores.std:.4f}, worst {scores.worst:.4f}"
    return "".join([text, *(f", {name} {each.mean:.4f}" for name, each in others)])
