"""The cells of tables, which the terminal and the page share, and tables in Markdown and LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedhet.base.metrics import is_shown
from fedhet.report.comparison import Comparison, Difference
from fedhet.report.groups import Spread
from fedhet.report.run import MEANING, STATISTICS, Run, highest, lowest
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

SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "<": r"\textless{}", ">": r"\textgreater{}",
        "±": r"$\pm$", MARK: r"$^\dagger$", "–": "--", "−": "$-$", "τ": r"$\tau$",
        "ε": r"$\varepsilon$",
    }
)  # fmt: skip
"""What LaTeX reads as something else, or does not have in every font."""
DAGGER = SPECIAL[ord(MARK)]
LATEX_HEAD = "% \\usepackage{booktabs}\n"
MAX_COLUMNS = 6
"""Number of columns that fit the width of a paper."""


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
        counts = [run.samples.get(name) for name in run.clients]
        about["samples"] = [Cell(ABSENT, 0) if n is None else Cell(f"{n:,}", n) for n in counts]
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
    spent = any(group.spent().n for group in groups)
    simulated = {}
    if comparison.has_clock:
        simulated["simulated time"] = [_timed(group.clock()) for group in groups]
        simulated[f"simulated time to {comparison.said_target}"] = [
            _timed(comparison.to_target(group, "clock"), len(group.runs)) for group in groups
        ]
    columns |= {
        "tail": [_accuracy(group.tail(headline)) for group in groups],
        "worst client": [_accuracy(group.worst(headline)) for group in groups],
        **({"epsilon": [_number(group.spent().mean) for group in groups]} if spent else {}),
        "bytes up": [_sized(group.total("bytes_up")) for group in groups],
        "bytes down": [_sized(group.total("bytes_down")) for group in groups],
        f"bytes to {comparison.said_target}": [
            _sized(comparison.to_target(group, "bytes"), len(group.runs)) for group in groups
        ],
        **simulated,
        "time": [_timed(group.total("seconds")) for group in groups],
        "start": [_timed(group.total("start")) for group in groups],
        "per round": [_timed(group.seconds_a_round()) for group in groups],
    }
    return Cells(columns, words=2)


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
    against = [  # with the kind of model of a baseline if that is another
        pair.baseline.label
        + (f" ({pair.baseline_column[1]})" if pair.baseline_column != pair.column else "")
        for pair in pairs
    ]
    columns = {
        "run": [Cell(printable(pair.group.label)) for pair in pairs],
        "against": [Cell(printable(label)) for label in against],
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


def _difference(found: Difference, absent: str) -> Cell:
    """Return a difference with its standard error, marked if it is clear, or the text `absent`."""
    if found.n < 2:
        return Cell(absent, NAN)
    text = f"{found.mean:+.4f} ± {found.se:.4f}"
    return Cell(f"{text} {MARK}" if found.clear else text, found.mean)


# --- as text ---------------------------------------------------------------------------------


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


def escaped(text: str) -> str:
    """Return text as LaTeX shows it."""
    return text.translate(SPECIAL)


def tabular(
    cells: Cells, better: Mapping[str, int] | None = None, marked: Collection[int] = ()
) -> str:
    """Return a table in LaTeX.

    `better`: for the columns, by header, in which the best and the second are marked, 1 if higher
    numbers are better or -1 if lower ones are. The first of these columns has a dagger in the rows
    `marked`.
    """
    better = better or {}
    columns = []
    for header, column in cells.columns.items():
        known = {c.value for c in column if c.value is not None and math.isfinite(c.value)}
        sign, looks = better.get(header, 0), dict[float, str]()
        if sign and len(known) > 1:
            best, second = sorted(known, key=lambda value: -sign * value)[:2]
            looks = {best: r"\textbf{%s}", second: r"\underline{%s}"}
        daggers = marked if header == next(iter(better), "") else ()
        texts = []
        for row, cell in enumerate(column):
            text = escaped(cell.text) + (DAGGER if row in daggers else "")
            look = "%s" if cell.value is None else looks.get(cell.value, "%s")
            texts.append(look.replace("%s", text))
        columns.append(texts)
    layout = "".join("l" if place < cells.words else "r" for place in range(len(columns)))
    rows = [[escaped(header) for header in cells.headers], *zip(*columns, strict=True)]
    head, *body = [" & ".join(row) + r" \\" for row in rows]
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def comparison_latex(comparison: Comparison) -> str:
    """Return a comparison's table, and that of the paired differences if there are any.

    The table has at most `MAX_COLUMNS` columns, since a paper is no wider: the label, the data set
    if there are several, the headline score, epsilon if it is known, the worst client, the bytes,
    and further scores as far as there is room. A comment names the columns that are omitted.
    """
    found = comparison_cells(comparison).columns
    headline, *others = [" ".join(column) for column in comparison.columns]
    several = len({group.dataset for group in comparison.groups}) > 1
    about = ["run", "data set"] if several else ["run"]
    costs = ("bytes up", "bytes down")
    wanted = [*about, headline, "epsilon", "worst client", *costs, *others, "tail"]
    chosen = [header for header in wanted if header in found][:MAX_COLUMNS]
    kept = Cells({h: found[h] for h in found if h in chosen}, words=len(about))
    omitted = [header for header in found if header not in (*chosen, "run", "data set")]
    notes = f"% Omitted here, but in compare.json: {', '.join(omitted)}\n" if omitted else ""
    sign = -1 if comparison.metric.lower_is_better else 1
    scores = [
        header for header in (headline, *others, "tail", "worst client") if header in kept.columns
    ]
    clear = {pair.group.label for pair in comparison.pairs if pair.last.clear}
    marked = [row for row, group in enumerate(comparison.groups) if group.label in clear]
    parts = [LATEX_HEAD + notes, tabular(kept, dict.fromkeys(scores, sign), marked)]
    if (paired := paired_cells(comparison)) is not None:
        parts.append(tabular(paired))
    return "\n".join(parts)
