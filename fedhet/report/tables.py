"""The cells of tables, which the terminal, the page and Markdown share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedhet.base.metrics import is_shown
from fedhet.report.comparison import Comparison
from fedhet.report.frames import STATISTICS
from fedhet.report.groups import Group, Spread
from fedhet.report.paired import Difference, Pair
from fedhet.report.run import MEANING, Run, highest, lowest
from fedhet.runs.records import NAN
from fedhet.runs.units import (
    ABSENT,
    human_bytes,
    human_seconds,
    plural,
    plus_minus,
    printable,
    score,
    spans,
)

MARK = "†"
TESTS = {"t": "paired t-test", "wilcoxon": "Wilcoxon's signed-rank test"}
TAIL_OF = "tail: mean of the last fifth of the rounds, of"
MAJORITY = "majority: always predicting the most frequent class of the test set"
NAMED = 3
"""Models that are named in a sentence, at most."""
PAIRED = (
    "Difference for the same seed: mean ± standard error over the n seeds that "
    f"both have. {MARK}: beyond two standard errors."
)


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, and the number to sort by if it has one."""

    text: str
    value: float | None = None

    @property
    def key(self) -> float | str:
        """The sort key: the number, or the text."""
        if self.value is None:
            return self.text
        return self.value if math.isfinite(self.value) else ""


Row = tuple[Cell, ...]


@dataclass(frozen=True)
class Cells:
    """A table: its columns by their headers; the first `words` columns are text."""

    columns: Mapping[str, Sequence[Cell]]
    foot: Sequence[Sequence[str]] = ()
    words: int = 1

    @property
    def headers(self) -> tuple[str, ...]:
        """The columns' headers."""
        return tuple(self.columns)

    @property
    def rows(self) -> list[Row]:
        """The cells row by row."""
        return list(zip(*self.columns.values(), strict=True))


def client_cells(run: Run, *, besides: bool = True) -> Cells:
    """Return one row per client: model, samples, last accuracy by protocol and kind.

    The metrics `besides` accuracy follow, under each protocol and kind.
    """
    about = {"client": [Cell(printable(name)) for name in run.clients]}
    if run.models:
        about["model"] = [Cell(run.models.get(name, ABSENT)) for name in run.clients]
    words = len(about)
    if run.samples:
        about["samples"] = [_count(run.samples.get(name)) for name in run.clients]
    if run.epsilon:
        about["epsilon"] = [_number(run.epsilon.get(name, NAN)) for name in run.clients]
    shown = [(run, column, " ".join(column)) for column in run.columns]
    for title, view in run.besides if besides else ():
        shown += [(view, column, f"{title}, {' '.join(column)}") for column in view.columns]
    if run.baseline and run.against:
        title = f"{run.baseline.method} {' '.join(run.against)}"
        shown.append((run.baseline, run.against, title))
    scores = {title: view.last(*column) for view, column, title in shown}
    values = {
        title: [_number(each.per_client.get(name, NAN)) for name in run.clients]
        for title, each in scores.items()
    }
    blank = [""] * (len(about) - 1)
    foot = [
        [statistic, *blank, *(score(getattr(each, statistic)) for each in scores.values())]
        for statistic in STATISTICS
    ]
    foot.append(["tail", *blank, *(score(view.tail(*column).mean) for view, column, _ in shown)])
    majority = [view.majority_mean(protocol) for view, (protocol, _), _ in shown]
    if not all(map(math.isnan, majority)):
        foot.append(["majority", *blank, *map(score, majority)])
    foot.append(["clients", *blank, *(view.counted(*column) for view, column, _ in shown)])
    return Cells({**about, **values}, foot if scores else [], words)


def metric_cells(run: Run) -> Cells | None:
    """Return one row per metric besides accuracy, protocol and kind, over the clients; or None."""
    rows = [
        (title, column, view.last(*column), view.tail(*column).mean)
        for title, view in run.besides
        for column in view.columns
    ]
    if not rows:
        return None
    words = {
        "metric": [Cell(title) for title, _, _, _ in rows],
        "of": [Cell(" ".join(column)) for _, column, _, _ in rows],
    }
    numbers = {
        name: [_number(getattr(last, name)) for _, _, last, _ in rows] for name in STATISTICS
    }
    return Cells({**words, **numbers, "tail": [_number(tail) for *_, tail in rows]}, words=2)


def _number(value: float) -> Cell:
    return Cell(score(value), value)


def recall_cells(run: Run) -> Cells | None:
    """Return one row per class with its recall by protocol and kind; None if it is not measured.

    A class's recall is the mean over the clients whose test data has the class, with the worst.
    """
    names = [name for name in run.metrics if not is_shown(name)]
    if not names:
        return None
    labels = [int(name.rpartition(".")[2]) for name in names]
    known = run.partition.classes if run.partition else run.origin.classes
    views = [run.measuring(name) for name in names]
    columns: dict[str, list[Cell]] = {
        "class": [Cell(printable(known[n]) if n < len(known) else str(n)) for n in labels]
    }
    for column in run.columns:
        last = [view.last(*column) for view in views]
        title = " ".join(column)
        columns[title] = [_number(each.mean) for each in last]
        if column[1] != "server":
            columns[f"{title}, worst client"] = [_number(each.worst) for each in last]
            counts = [len(each.per_client) for each in last]
            columns[f"{title}, clients"] = [Cell(str(count), count) for count in counts]
    return Cells(columns)


def _count(number: int | None) -> Cell:
    return Cell(ABSENT, 0) if number is None else Cell(f"{number:,}", number)


def legend(run: Run) -> str:
    """Return a line that says what the columns of a run's table are."""
    names = [protocol for protocol, _ in run.columns] + [kind for _, kind in run.columns]
    known = [f"{name}: {MEANING[name]}" for name in dict.fromkeys(names) if name in MEANING]
    if known and any(run.majority(protocol) for protocol in run.protocols):
        known.append(MAJORITY)
    return "; ".join([*known, "tail: mean of the last fifth of the rounds"]) if known else ""


def majority_line(run: Run) -> str:
    """Return a sentence on the models that are below the majority class; "" if there are none."""
    below = [
        f"{name} ({protocol} {kind})"
        for protocol, kind in run.columns
        for name, accuracy in run.last(protocol, kind).per_client.items()
        if accuracy < run.majority(protocol).get(name, 0.0)
    ]
    if not below:
        return ""
    more = f" and {len(below) - NAMED} more" if len(below) > NAMED else ""
    names = ", ".join(below[:NAMED])
    return f"less accurate than always predicting the most frequent class: {names}{more}"


def away_lines(run: Run) -> list[str]:
    """Return a sentence on each client that was not connected, or late, in some rounds."""
    lines = [
        f"{name} was {what} in {'rounds' if len(rounds) > 1 else 'round'} {spans(rounds)}"
        for what, found in (("not connected", run.away), ("late", run.late))
        for name, rounds in found.items()
    ]
    if run.offers_nothing:
        lines.append(f"{run.method} offers a client nothing with which nobody has trained")
    if run.missing:
        whole = plural(len(run.clients) + run.missing, "client")
        lines.append(f"{run.missing} of {whole} never took part: the run's log says why")
    return lines


def baseline_line(run: Run) -> str:
    """Return a sentence that compares a run with its baseline; "" without one."""
    if run.baseline is None or run.against is None:
        return ""
    own, other = run.last(*run.columns[0]), run.baseline.last(*run.against)
    both = own.per_client.keys() & other.per_client.keys()
    better = sum(own.per_client[name] > other.per_client[name] for name in both)
    return (
        f"against {run.baseline.method}: {own.mean - other.mean:+.4f} ({score(own.mean)}, "
        f"{score(other.mean)}), {better} of {plural(len(both), 'client')} better"
    )


def relative_line(run: Run) -> str:
    """Return a sentence on the clients' gains over local training; "" if not measured."""
    if run.relative is None:
        return ""
    protocol, ratio = run.relative
    best = f"{score(ratio.best)} ({highest(ratio.per_client)})"
    worst = f"{score(ratio.worst)} ({lowest(ratio.per_client)})"
    mean = score(ratio.mean)
    return f"relative to training alone, {protocol}: mean {mean}, best {best}, worst {worst}"


def comparison_cells(comparison: Comparison) -> Cells:
    """Return one row per group, in the order of `Comparison`."""
    groups, headline = comparison.groups, comparison.headline
    names = [printable(group.label) + ("" if group.finished else " *") for group in groups]
    columns = {
        "run": [Cell(name) for name in names],
        "data set": [Cell(printable(group.dataset)) for group in groups],
        "n": [Cell(str(len(group.runs)), len(group.runs)) for group in groups],
    }
    for column in comparison.columns:
        columns[" ".join(column)] = [_accuracy(group.score(column)) for group in groups]
    columns |= {
        "tail": [_accuracy(group.tail(headline)) for group in groups],
        "worst client": [_accuracy(group.worst(headline)) for group in groups],
        **_spent(groups),
        "bytes up": [_sized(group.total("bytes_up")) for group in groups],
        "bytes down": [_sized(group.total("bytes_down")) for group in groups],
        f"bytes to {comparison.said_target}": [
            _sized(comparison.bytes_to_target(group), len(group.runs)) for group in groups
        ],
        **_simulated(comparison),
        "time": [_timed(group.total("seconds")) for group in groups],
        "start": [_timed(group.total("start")) for group in groups],
        "per round": [_timed(group.seconds_a_round()) for group in groups],
    }
    return Cells(columns, words=2)


def _spent(groups: Sequence[Group]) -> dict[str, list[Cell]]:
    """Return the largest epsilon of any client, over the runs; nothing if none is known."""
    found = [group.spent() for group in groups]
    if not any(spread.n for spread in found):
        return {}
    return {"epsilon": [Cell(score(spread.mean), spread.mean) for spread in found]}


def _simulated(comparison: Comparison) -> dict[str, list[Cell]]:
    """Return the simulated time of each group, and to the target; nothing without such a clock."""
    if not comparison.has_clock:
        return {}
    groups = comparison.groups
    return {
        "simulated time": [_timed(group.clock()) for group in groups],
        f"simulated time to {comparison.said_target}": [
            _timed(comparison.clock_to_target(group), len(group.runs)) for group in groups
        ],
    }


def _accuracy(spread: Spread) -> Cell:
    return Cell(plus_minus(spread.mean, spread.std), spread.mean)


def _timed(spread: Spread, runs: int = 0) -> Cell:
    return Cell(human_seconds(spread.mean) + _some(spread, runs), spread.mean)


def _sized(spread: Spread, runs: int = 0) -> Cell:
    return Cell(human_bytes(spread.mean) + _some(spread, runs), spread.mean)


def _some(spread: Spread, runs: int) -> str:
    """Return how many of the `runs` a number covers, if not all of them."""
    return f" ({spread.n} of {runs})" if 0 < spread.n < runs else ""


def paired_cells(comparison: Comparison) -> Cells | None:
    """Return one row per pair, or None if no pair has two seeds."""
    pairs = comparison.pairs
    if all(pair.fault for pair in pairs):
        return None
    columns = {
        "run": [Cell(printable(pair.group.label)) for pair in pairs],
        "against": [Cell(printable(_baseline(pair))) for pair in pairs],
        "n": [Cell(str(pair.last.n), pair.last.n) for pair in pairs],
        "last round": [_difference(pair.last, pair.fault) for pair in pairs],
        "tail": [_difference(pair.tail, ABSENT) for pair in pairs],
    }
    if comparison.test != "none":
        columns["p"] = [_number(pair.p) for pair in pairs]
    return Cells(columns, words=2)


def paired_legend(comparison: Comparison) -> str:
    """Return what the columns of the paired differences are."""
    if comparison.test == "none":
        return PAIRED
    return (
        f"{PAIRED} p: {TESTS[comparison.test]} of the last round, two-sided, with Holm's "
        "correction over the rows."
    )


def _baseline(pair: Pair) -> str:
    """Return the baseline's label, with its kind of model if that is another."""
    other = pair.baseline_column != pair.column
    return f"{pair.baseline.label} ({pair.baseline_column[1]})" if other else pair.baseline.label


def _difference(found: Difference, absent: str) -> Cell:
    """Return a difference with its standard error, marked if it is clear, or the text `absent`."""
    if found.n < 2:
        return Cell(absent, NAN)
    text = f"{found.mean:+.4f} ± {found.se:.4f}"
    return Cell(f"{text} {MARK}" if found.clear else text, found.mean)


def markdown(cells: Cells) -> str:
    """Return a table in Markdown."""
    rule = ["---" if place < cells.words else "---:" for place in range(len(cells.columns))]
    rows = [[plain(cell.text) for cell in row] for row in cells.rows]
    lines = [[plain(header) for header in cells.headers], rule, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain(text: str) -> str:
    """Return text escaped for Markdown."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\|*_`\[])", r"\\\1", escaped)
