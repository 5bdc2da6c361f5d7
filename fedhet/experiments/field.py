"""Table of all methods: its results, the methods' mean ranks, and the output formats.

Ranks are averaged over cells and compared using Friedman's test and Nemenyi's critical difference
(Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 2006). SciPy is
imported only when ranks are computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, Field

from fedhet.base.disk import Folder, write_text
from fedhet.experiments.plan import (
    FIELD,
    FieldPlan,
    Place,
    Size,
    about,
    command_of,
    finished_run,
    plan_field,
    read_field,
)
from fedhet.methods.registry import find_method
from fedhet.report.differences import (
    Difference,
    paired_difference,
    samples_text,
    spread_of,
)
from fedhet.report.page import render
from fedhet.report.run import Run
from fedhet.report.tables import (
    LATEX_HEAD,
    MARK,
    Cell,
    Cells,
    captioned,
    escape_markdown,
    markdown,
    mean_cell,
    tabular,
)
from fedhet.runs.directory import read_if_exists
from fedhet.runs.records import NAN, PROTOCOLS, Origin
from fedhet.runs.units import ABSENT, human_bytes, human_seconds, plural, plus_minus

OWN = "private"
"""Kind of each client's own model, which is shown in addition to the headline models."""
CEILING = "central"
SHARE = 0.9
"""Fraction of the accuracy of the method `CEILING`. The table shows the costs of reaching this
fraction."""
TESTED = {protocol: f"test samples, {protocol}" for protocol in PROTOCOLS}
"""Names of the numbers of test samples behind a run's mean accuracies, by protocol."""
ACCURACIES = ("personal", "worst client", "common", "common, own models")
EVERYWHERE = "all"
"""Name of the scope that contains all cells."""
ALPHA = 0.05
"""Significance level of the critical difference."""
Value = float | int | str
TITLES = {
    "personal": "Accuracy on each client's own test split",
    "common": "Accuracy on the common test set",
    "worst client": "Accuracy of the worst client on its own test split",
}
COSTS: Mapping[str, Callable[[float], str]] = {
    "bytes": human_bytes,
    **{f"bytes to 90 %, {protocol}": human_bytes for protocol in PROTOCOLS},
    **{f"time to 90 %, {protocol}": human_seconds for protocol in PROTOCOLS},
    "seconds": human_seconds,
    "memory": human_bytes,
}
"""Costs of a run, each with the function that formats it."""
FEWEST = "Test samples: the smallest number behind the mean accuracy of a run."
LEGEND = "Percent, mean over clients in the last round; mean ± standard deviation over seeds."
RANKS = (
    "Mean rank over cells (1 = best), for the methods that run in all cells; the number of cells "
    f"is in parentheses. {MARK}: worse than the best method by more than Nemenyi's critical "
    f'difference at the level {ALPHA:g}. "Seeds apart": the critical difference if seeds counted '
    "as independent data sets. p: p-value of Friedman's test of equal methods."
)
DIFFERENCES = (
    "Difference in accuracy from local, in percentage points, with one architecture (three cells) "
    "and with several architectures (six cells): mean over the cells. ±: standard error over seeds "
    "and test samples. "
    f"{MARK}: the 95 % confidence interval (Student's t) excludes zero."
)
COST = (
    "Means over the cells and seeds in which the method runs. To 90 %: until the accuracy first "
    "reaches 90 % of that of central in the same cell and seed, with the number of runs that reach "
    "it in parentheses if some runs do not reach it. Time is simulated if the runs have a "
    "simulated clock. Seconds and peak memory were measured on this machine."
)


# --- ranks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """Mean ranks of k methods over N cells; lower ranks are better."""

    ranks: pd.Series
    """Mean rank of each method, ascending. Methods that tie in a cell share their mean rank."""
    cells: int
    p: float
    """p-value of Friedman's test of the hypothesis that all methods are equal."""
    critical: float
    """Critical difference between two mean ranks (Demšar, Section 3.2.2)."""
    critical_by_seed: float
    """Critical difference if each seed in a cell counted as an independent dataset."""
    spread: pd.Series = field(repr=False)
    """Standard deviation of each method's ranks over the cells."""

    def behind(self, method: str) -> bool:
        """Return whether a method is significantly worse than the best method."""
        return bool(self.ranks[method] - self.ranks.iloc[0] > self.critical)


def ranked(scores: pd.DataFrame, seeds: int = 1) -> Ranking | None:
    """Rank methods by their scores; higher scores are better.

    Args:
        scores: Scores with one row per cell and one column per method. Methods with a missing score
            are excluded.
        seeds: Number of runs over which each score is averaged.

    Returns:
        The ranking, or None for fewer than three methods or fewer than two cells.
    """
    from scipy import stats

    known = scores.dropna(axis="columns")
    count, cells = known.shape[1], len(known)
    if count < 3 or cells < 2:
        return None
    each = known.rank(axis="columns", ascending=False)
    ranks = each.mean().sort_values(kind="stable")
    p = float(stats.friedmanchisquare(*(known[name] for name in known)).pvalue)
    differences = critical(count, cells), critical(count, cells * seeds)
    return Ranking(ranks, cells, p, *differences, spread=each.std())


def critical(methods: int, cells: int) -> float:
    """Return Nemenyi's critical difference for k methods and N cells: q sqrt(k (k + 1) / (6 N)).

    q is the (1 - ALPHA) quantile of the studentized range distribution for k groups and infinite
    degrees of freedom, divided by sqrt(2).
    """
    from scipy import stats

    q = float(stats.studentized_range.ppf(1 - ALPHA, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * cells))


# --- measurements from the runs --------------------------------------------------------------


@dataclass(frozen=True)
class FieldResults:
    """Results of the finished runs in the table of all methods."""

    plan: FieldPlan
    runs: pd.DataFrame
    """One row per finished run: method, architectures, split, seed, and measurements."""
    made: str = ""
    """Date on which the last run started, as YYYY-MM-DD."""
    hardware: str = ""
    """Machine on which the runs were executed, as entered by hand."""

    @property
    def finished(self) -> int:
        """Number of finished runs."""
        return len(self.runs)

    def by_seed(self, method: str, cell: Place, measure: str) -> pd.Series:
        """Return a measurement of a method in a cell, by seed."""
        rows = self._groups.get((method, *cell))
        return pd.Series(dtype=float) if rows is None else rows[measure].astype(float)

    @cached_property
    def _groups(self) -> dict[Any, pd.DataFrame]:
        """Measurements of the runs by seed, by method, architectures, and split."""
        if self.runs.empty:
            return {}
        by_run = self.runs.set_index("seed").groupby(["method", "architectures", "split"])
        return dict(iter(by_run))

    @property
    def ranked_methods(self) -> list[str]:
        """Methods to rank, i.e. all methods that do not need all data in one place."""
        return [name for name in self.plan.methods if not find_method(name).spec.simulation_only]

    @cached_property
    def rankings(self) -> Mapping[tuple[str, str], Ranking]:
        """Rankings by protocol and by scope (all cells, or the cells of one set of architectures).

        A ranking contains the methods that have finished all seeds in all cells of its scope.
        """
        plan, count = self.plan, len(self.plan.seeds)
        scopes = {EVERYWHERE: plan.cells}
        for line in plan.table.architectures:
            scopes[line.name] = [cell for cell in plan.cells if cell[0] == line.name]
        rankings = {}
        for protocol, (scope, cells) in product(PROTOCOLS, scopes.items()):
            means = pd.DataFrame(index=pd.MultiIndex.from_tuples(cells))
            for method in self.ranked_methods:
                each = [self.by_seed(method, cell, protocol) for cell in cells]
                means[method] = [v.mean() if v.count() == count else NAN for v in each]
            if ranking := ranked(means, count):
                rankings[protocol, scope] = ranking
        return rankings


BASELINE = "local"
MAX_RECOMMENDED = 3
"""Maximum number of methods that a row of `recommendations` names."""
MAX_UNCLEAR = 2
"""Maximum number of methods within noise that a row of `recommendations` names."""


class FieldRecord(BaseModel, frozen=True, extra="forbid"):
    """Measurements of the table of all methods, stored in field-SIZE.json."""

    size: Size
    seeds: list[int] = Field(min_length=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings that override the table's settings in all runs."""
    made: str = ""
    hardware: str = ""
    columns: list[str]
    """Names of the measurements in `rows`."""
    rows: list[list[str | float | None]]
    """One row per finished run."""

    @classmethod
    def from_results(cls, results: FieldResults) -> FieldRecord:
        """Return the record of the results."""
        plan, runs = results.plan, results.runs
        rows: list[list[str | float | None]] = [
            [None if isinstance(v, float) and math.isnan(v) else _short(v) for v in row]
            for row in runs.itertuples(index=False)
        ]
        return cls(
            size=plan.size,
            seeds=[*plan.seeds],
            settings=dict(plan.over),
            made=results.made,
            hardware=results.hardware,
            columns=[*runs.columns],
            rows=rows,
        )

    @property
    def results(self) -> FieldResults:
        """Results of the recorded runs, for all methods that have run."""
        runs = pd.DataFrame(self.rows, columns=self.columns)
        methods = [*dict.fromkeys(runs["method"])]
        plan = plan_field(read_field(), self.size, methods, self.seeds, Path(), self.settings)
        return FieldResults(plan, runs, self.made, self.hardware)

    def to_json(self) -> str:
        """Serialize to JSON, with one line per run."""
        short = json.dumps(self.model_dump(exclude={"rows"}), indent=1).removesuffix("\n}")
        lines = ",\n  ".join(json.dumps(row) for row in self.rows)
        return f'{short},\n "rows": [\n  {lines}\n ]\n}}\n'


def _short(value: str | float) -> str | float:
    """Return a measurement with at most six significant digits."""
    return value if isinstance(value, str | int) else float(f"{value:.6g}")


def difference(
    results: FieldResults, method: str, protocol: str, cells: Sequence[Place]
) -> Difference:
    """Return the difference in accuracy between a method and local training, in points.

    The difference is the mean over the cells, and is paired by seed. The errors are those of
    `fedhet.report.differences`. The cells are not a sample of other cells, so the errors do not
    include the differences between cells. The result is NaN unless both methods have finished all
    seeds in all cells.
    """
    means: list[pd.Series] = []
    samples = []
    for name in (method, BASELINE):
        runs = [results.by_seed(name, cell, protocol) for cell in cells]
        table = pd.DataFrame(runs).reindex(columns=list(results.plan.seeds))
        means.append(100 * table.mean(skipna=False))
        for cell in cells:
            samples += [*results.by_seed(name, cell, TESTED[protocol]).dropna()]
    ours, baseline = means
    if (ours - baseline).isna().any():
        return Difference()
    return paired_difference(ours, baseline, min(samples, default=None), 100.0)


@dataclass(frozen=True)
class Situation:
    """Row of `recommendations`: clients for which methods are compared with local training."""

    says: str
    architectures: tuple[str, ...]
    """Model pools of the cells."""
    public: bool
    """Whether public data exists. Methods that need it are compared only if it does."""
    without_weights: bool = False
    """Whether only methods whose messages contain no weights of models are compared."""

    def cells(self, plan: FieldPlan) -> list[Place]:
        """Return the cells with the model pools of this situation."""
        return [cell for cell in plan.cells if cell[0] in self.architectures]

    def admits(self, method: str) -> bool:
        """Return whether a method is compared in this situation."""
        spec = find_method(method).spec
        weights = bool(spec.instructions.weights or spec.replies.weights)
        own_data = spec.needs_unlabeled or spec.simulation_only or method == BASELINE
        return not (
            own_data or spec.needs_public != self.public or (self.without_weights and weights)
        )


SEVERAL = ("three", "nine")
SITUATIONS = (
    Situation("one architecture, no public data", ("homogeneous",), public=False),
    Situation("several architectures, no public data", SEVERAL, public=False),
    Situation(
        "several architectures, no public data, messages without weights",
        SEVERAL,
        public=False,
        without_weights=True,
    ),
    Situation("one architecture, public data", ("homogeneous",), public=True),
    Situation("several architectures, public data", SEVERAL, public=True),
)


def recommendations(results: FieldResults) -> Cells:
    """Build the table of the methods to try first, by situation and by test set.

    A row names the methods with the largest differences from local training whose confidence
    intervals are above zero. It shows each difference with its standard error and the kind of the
    model. A separate column names methods with an even larger difference that is within noise,
    which more seeds may confirm.
    """
    rows = []
    for situation, protocol in product(SITUATIONS, PROTOCOLS):
        cells = situation.cells(results.plan)
        admitted = [name for name in results.ranked_methods if situation.admits(name)]
        each = {name: difference(results, name, protocol, cells) for name in admitted}
        measured = {name: d for name, d in each.items() if not math.isnan(d.mean)}
        better = [name for name in measured if measured[name].outcome() == "holds"]
        better.sort(key=lambda name: -measured[name].mean)
        kinds = results.runs.groupby("method")[f"{protocol} model"].first()
        texts = [
            f"{name} {_points(measured[name])} ({kinds[name]})" for name in better[:MAX_RECOMMENDED]
        ]
        text = ", ".join(texts) or f"{BASELINE} (no method is clearly better)"
        least = max((measured[name].mean for name in better), default=0.0)
        unclear = [n for n in measured if measured[n].mean > least and n not in better]
        unclear.sort(key=lambda name: -measured[name].mean)
        noisy = ", ".join(f"{n} {_points(measured[n])}" for n in unclear[:MAX_UNCLEAR]) or ABSENT
        runs = len(cells) * len(results.plan.seeds)
        count = f"{len(better)} of {len(measured)}"
        rows.append((situation.says, protocol, text, noisy, count, runs))
    above, noise = f"points above {BASELINE}", "larger, but within noise"
    titles = ("situation", "test set", above, noise, "better", "runs")
    return Cells(
        {title: [Cell(str(row[i])) for row in rows] for i, title in enumerate(titles)}, words=3
    )


def differences(results: FieldResults) -> Cells:
    """Build the table of differences to local training, by test set and by number of models."""
    names = [name for name in results.ranked_methods if name != BASELINE]
    columns: dict[str, Sequence[Cell]] = {"method": [Cell(name) for name in names]}
    for protocol, pools in product(PROTOCOLS, (("homogeneous",), SEVERAL)):
        cells = [cell for cell in results.plan.cells if cell[0] in pools]
        gains = [difference(results, name, protocol, cells) for name in names]
        title = f"{protocol}, {'one' if len(pools) == 1 else 'several'}"
        columns[title] = [
            Cell(ABSENT, math.nan)
            if math.isnan(each.mean)
            else Cell(f"{_points(each)}{MARK if each.is_clear else ''}", each.mean)
            for each in gains
        ]
    return Cells(columns)


def _points(gain: Difference) -> str:
    return f"{gain.mean:+.1f} ± {gain.se:.1f}".replace("-", "\N{MINUS SIGN}")


def collect(plan: FieldPlan) -> FieldResults:
    """Return the results of a plan's finished runs. Raises StateError if a run is damaged."""
    rows: list[dict[str, Value]] = []
    done = [
        (each, seed, run.directory)
        for each in plan.every
        for seed, run in each.runs.items()
        if run.finished
    ]
    ceilings = {
        (each.cell, seed): _accuracies(finished_run(path))
        for each, seed, path in done
        if each.method == CEILING
    }
    for each, seed, path in done:
        run = finished_run(path)
        measured = _measured(run, ceilings.get((each.cell, seed), {}))
        place: dict[str, Value] = {"architectures": each.cell[0], "split": each.cell[1]}
        rows.append({"method": each.method, **place, "seed": seed, **measured})
    origins = [read_if_exists(path / "run.json", Origin) or Origin() for _, _, path in done]
    made = max((origin.started for origin in origins), default="")[: len("2026-11-24")]
    return FieldResults(plan, pd.DataFrame(rows), made)


def kind_of(run: Run, protocol: str) -> str:
    """Return the headline kind of a run in a protocol, or "" if there are no scores."""
    return next(iter(run.kinds(protocol)), "")


def _measured(run: Run, ceiling: Mapping[str, Value]) -> dict[str, Value]:
    """Return a run's accuracies and costs, including the costs to reach 90 % of `ceiling`."""
    federated = not find_method(run.method).spec.simulation_only
    sent, until = run.totals["bytes_up"] + run.totals["bytes_down"], dict[str, Value]()
    elapsed = run.costs["clock"] if run.has_clock else run.costs["seconds"].cumsum()
    for protocol in PROTOCOLS:
        means = run.curve(protocol, kind_of(run, protocol))["mean"]
        reached = means.index[means >= SHARE * float(ceiling.get(protocol, NAN))]
        first = reached[0] if len(reached) else None
        so_far = NAN if first is None or not federated else float(run.costs["bytes"][first])
        until[f"bytes to 90 %, {protocol}"] = so_far
        until[f"time to 90 %, {protocol}"] = NAN if first is None else float(elapsed[first])
    return {
        **_accuracies(run),
        "bytes": float(sent) if federated else NAN,
        "seconds": float(run.totals["seconds"]),
        "simulated seconds": float(run.totals["clock"]),
        "memory": run.summary.peak_memory_mb * 1e6 if run.summary else NAN,
        **until,
    }


def _accuracies(run: Run) -> dict[str, Value]:
    personal, common = (kind_of(run, protocol) for protocol in PROTOCOLS)
    own, kinds = run.last("personal", personal), run.kinds("common")
    return {
        "personal": own.mean,
        "worst client": own.worst,
        "common": run.last("common", common).mean,
        "common, own models": run.last("common", OWN if OWN in kinds else common).mean,
        "personal model": personal,
        "common model": common,
        **{
            name: NAN if (count := run.test_samples(protocol, kind)) is None else count
            for (protocol, name), kind in zip(TESTED.items(), (personal, common), strict=True)
        },
    }


# --- output formats --------------------------------------------------------------


def write_field(results: FieldResults, out: Path) -> Path:
    """Write field-SIZE.md, .html, .csv, .json to a directory. Return the path of the HTML file."""
    plan = results.plan
    stem = f"{FIELD}-{plan.size}"
    write_text(out / f"{stem}.md", as_markdown(results))
    if results.finished:
        write_text(out / f"{stem}.json", FieldRecord.from_results(results).to_json())
    with Folder(out).replacing(f"{stem}.csv") as path:
        results.runs.to_csv(path, index=False)
    matrices = {
        title: (matrix(results, measure), tested_line(results, measure))
        for measure, title in TITLES.items()
    }
    runs = plural(results.finished, "finished run")
    page = render(
        "field.html",
        "fedhet.experiments",
        title=plan.table.title,
        facts=(f"size {plan.size}", runs, plural(len(plan.methods), "method")),
        about=about(plan, results.finished),
        command=command_of(plan),
        every=every(results),
        matrices=matrices,
        legend=LEGEND,
        ranks=ranks(results),
        ranks_legend=RANKS,
        cost_legend=f"{FEWEST} {COST}",
        refusals=refusals(results),
        notes=plan.table.notes,
    )
    return write_text(out / f"{stem}.html", page)


def write_latex(results: FieldResults, out: Path) -> Path:
    """Write accuracies, ranks, and costs to field-SIZE.tex, and return the file's path."""
    parts = [LATEX_HEAD]
    for measure in PROTOCOLS:
        scores = matrix(results, measure)
        table = tabular(scores, dict.fromkeys(scores.headers[1:], 1))
        caption = f"{TITLES[measure]}. {LEGEND} {tested_line(results, measure)}"
        parts.append(captioned(table, caption.strip()))
    parts += [captioned(tabular(ranks(results)), RANKS), captioned(tabular(costs(results)), COST)]
    return write_text(out / f"{FIELD}-{results.plan.size}.tex", "\n".join(parts))


def as_markdown(results: FieldResults) -> str:
    """Return the table of all methods as a Markdown section."""
    parts = [
        f"## {escape_markdown(results.plan.table.title)}\n",
        f"{escape_markdown(about(results.plan, results.finished))}\n",
        f"```bash\n{command_of(results.plan)}\n```\n",
    ]
    for measure, title in TITLES.items():
        note = f"{LEGEND} {tested_line(results, measure)}".strip()
        parts += [f"### {title}\n", markdown(matrix(results, measure)), f"{note}\n"]
    parts += ["### Ranks\n", markdown(ranks(results)), f"{RANKS}\n"]
    parts += ["### Costs\n", markdown(costs(results)), f"{COST}\n"]
    if unsupported := refusals(results):
        parts += ["### Where a method cannot run\n", markdown(unsupported)]
    parts += ["\n", *(f"- {escape_markdown(note)}\n" for note in results.plan.table.notes)]
    return "\n".join(parts)


def matrix(results: FieldResults, measure: str) -> Cells:
    """Build a table of accuracies in percent, with one row per method and one column per cell."""
    methods = results.plan.methods
    columns = {
        ", ".join(place): [_accuracy(results.by_seed(name, place, measure)) for name in methods]
        for place in results.plan.cells
    }
    return Cells({"method": [Cell(name) for name in methods], **columns})


def every(results: FieldResults) -> Cells:
    """Build a table with one row per method and cell.

    A row contains all measurements, or the reason why the method does not support the cell.
    """
    cells = results.plan.every
    columns: dict[str, Sequence[Cell]] = {
        "method": [Cell(each.method) for each in cells],
        "architectures": [Cell(each.cell[0]) for each in cells],
        "split": [Cell(each.cell[1]) for each in cells],
        "why not": [Cell(each.refused) for each in cells],
    }
    for measure in (*ACCURACIES, *COSTS):
        each_cell = [results.by_seed(each.method, each.cell, measure) for each in cells]
        columns[measure] = [
            _cost(values, COSTS[measure]) if measure in COSTS else _accuracy(values)
            for values in each_cell
        ]
        if measure in TESTED:
            counts = [results.by_seed(each.method, each.cell, TESTED[measure]) for each in cells]
            columns[TESTED[measure]] = [_fewest(values) for values in counts]
    return Cells(columns, words=4)


def ranks(results: FieldResults, *, spread: bool = False) -> Cells:
    """Build the table of the methods' mean ranks, with one column per protocol and scope.

    A scope is all cells, or the cells of one set of architectures. The methods are sorted by their
    mean ranks in the first column. With `spread`, the table shows the standard deviation of a
    method's ranks over the cells.
    """
    rankings = results.rankings
    leading = next(iter(rankings.values())).ranks.index if rankings else []
    methods = sorted(results.ranked_methods, key=[*leading, *results.ranked_methods].index)
    ends = ("critical difference", "seeds apart", "p")
    columns: dict[str, Sequence[Cell]] = {"method": [Cell(name) for name in (*methods, *ends)]}
    for (protocol, scope), ranking in rankings.items():
        values = (ranking.critical, ranking.critical_by_seed, ranking.p)
        shown = [
            Cell(f"{ranking.ranks[name]:.2f}{f' ± {ranking.spread[name]:.1f}' if spread else ''}"
                 f"{f' {MARK}' if ranking.behind(name) else ''}",
                 float(ranking.ranks[name]))
            if name in ranking.ranks else Cell(ABSENT, math.nan)
            for name in methods
        ]  # fmt: skip
        columns[f"{protocol}, {scope} ({ranking.cells})"] = [
            *shown, *(Cell(f"{value:.2g}", math.nan) for value in values)
        ]  # fmt: skip
    return Cells(columns)


def costs(results: FieldResults) -> Cells:
    """Build a table of each method's costs, averaged over the method's finished runs."""
    methods, places = results.plan.methods, results.plan.cells
    columns = {
        measure: [
            _cost(pd.concat([results.by_seed(name, place, measure) for place in places]), shown)
            for name in methods
        ]
        for measure, shown in COSTS.items()
    }
    return Cells({"method": [Cell(name) for name in methods], **columns})


def refusals(results: FieldResults) -> Cells | None:
    """Build a table of unsupported cells by method, with the reasons.

    Returns None if all methods support all cells.
    """
    cells: dict[tuple[str, str], list[Place]] = {}
    for each in results.plan.every:
        if each.refused:
            cells.setdefault((each.method, each.refused), []).append(each.cell)
    if not cells:
        return None
    return Cells(
        {
            "method": [Cell(method) for method, _ in cells],
            "where": [
                Cell(", ".join(dict.fromkeys(architectures for architectures, _ in places)))
                for places in cells.values()
            ],
            "why": [Cell(why) for _, why in cells],
        },
        words=3,
    )


def tested_line(results: FieldResults, measure: str) -> str:
    """Describe the numbers of test samples behind the mean accuracies in the table of a measure."""
    if measure not in TESTED or not results.finished:
        return ""
    counts = results.runs[TESTED[measure]]
    text = samples_text((None if math.isnan(count) else count for count in counts), measure)
    return f"Each accuracy of a run has {text}."


def _fewest(values: pd.Series) -> Cell:
    least = values.min() if len(values) and values.notna().all() else NAN
    return Cell(ABSENT if math.isnan(least) else f"{least:,.0f}", least)


def _accuracy(values: pd.Series) -> Cell:
    spread = spread_of(100 * values)
    return Cell(plus_minus(spread.mean, spread.std, 1), spread.mean)


def _cost(values: pd.Series, shown: Callable[[float], str]) -> Cell:
    return mean_cell(spread_of(values), shown, len(values))
