"""Declarations of tables in TOML files, and the runs that their cells need.

The file of a paper's table, `tables/NAME.toml`, declares rows, columns, sizes, published numbers,
and claims. A cell has one run per seed. The settings of the size are overridden by the settings of
the column, the row, and the entry in `places` for this row and column, in this order. At each
level, presets are applied before individual settings. Cells with equal settings share their runs,
so rows or columns can show different models from the same run. The table of all methods,
`field.toml`, combines model architectures with splits of the data.

The name of a run's directory is a hash of its settings, so that different tables share runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedhet.base.errors import SettingsError, unknown_name
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import read_preset, settings_for_method
from fedhet.methods.registry import all_methods, find_method, shipped_names
from fedhet.report.run import Run, load_run
from fedhet.runs.measures import tail_start
from fedhet.runs.records import EVALUATED
from fedhet.settings.run import PLACE, RunSettings
from fedhet.settings.schema import as_text, is_machine, plain

FILES = resources.files("fedhet.experiments") / "tables"
Values = dict[str, object]
Place = tuple[str, str]
"""Position of a cell, i.e. its row and column, or its architectures and split."""
FIELD = "field"
"""Name of the table of all methods."""
Size = Literal["tiny", "small", "paper"]
SIZES: tuple[Size, ...] = get_args(Size)
"""Sizes of a table: runs on digits that take minutes, the paper's federation with small networks,
and the paper's settings."""
STATISTICS = ("mean", "std", "tail", "worst")
DIRECTIONS = ("up", "down", "both")
RATIOS = ("mean", "best", "worst")
ROUND = re.compile(r"[1-9]\d*|(?:[1-9]\d?|100)%")
"""Round of a metric, as a number or as a percentage of the run's rounds."""


def _is_metric(text: str) -> str:
    name, at, number = text.partition("@")
    first, second, *rest = (*name.split("/"), "")
    third = rest[0] or "mean" if rest else "mean"
    accuracy = first in EVALUATED and second and third in STATISTICS
    relative = first == "relative" and second in EVALUATED and third in RATIOS
    bytes_sent = first == "bytes" and second in DIRECTIONS and not rest[:-1]
    figure = first == "figure" and second and rest in ([""], ["mean", ""])
    target = first == "target" and second in EVALUATED and any(rest[:1]) and _is_score(rest[1:2])
    if len(rest) > 2 + bool(target) or not (accuracy or relative or bytes_sent or figure or target):
        raise ValueError(
            "expected PROTOCOL/KIND[/mean|std|tail|worst], relative/PROTOCOL[/mean|best|worst], "
            f"bytes/up|down|both, figure/NAME[/mean], or target/PROTOCOL/KIND/SCORE, got {text!r}"
        )
    has_rounds = (figure and rest == [""]) or (accuracy and third != "tail")
    if at and not (has_rounds and ROUND.fullmatch(number)):
        raise ValueError(
            "expected @ROUND or @PERCENT% after an accuracy other than tail, or after "
            f"figure/NAME, got {text!r}"
        )
    return text


def _is_partial_metric(text: str) -> str:
    _is_metric(f"figure/any{text}" if text.startswith("@") else text)
    return text


def _is_score(words: Sequence[str]) -> bool:
    return any(re.fullmatch(r"0?\.\d+", word) for word in words)


Metric = Annotated[str, AfterValidator(_is_metric)]
"""Metric of a cell, such as `common/global`, `relative/common/best`, or `figure/tau`.

`bytes/up` is the mean number of KiB that all clients together send per round. A metric belongs to
the last round. `figure/eta@20` belongs to round 20, and `figure/eta@50%` to half of the rounds.
`figure/eta/mean` is the mean over all rounds. `target/common/private/0.8` is the number of MiB that
all clients together have sent when their mean accuracy first reaches 0.8, or NaN if it exceeds 0.8
in the first evaluation and earlier rounds were not evaluated.
"""
PartialMetric = Annotated[str, AfterValidator(_is_partial_metric)]
"""Metric of a row or column, or only a round such as `@20`, if another part states the metric."""
Printed = float | Annotated[list[float], Field(min_length=1, max_length=2)]
"""Number printed in the paper, or a number and its spread."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Change(_Part):
    """Settings that override earlier settings: first presets, and then individual settings."""

    preset: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)


class Scale(Change):
    """Size of a table, with the settings that all of its runs share."""

    says: str
    """Description of the experiment and of its differences from the paper's experiment."""


class Line(_Part):
    """Row or column of a table."""

    name: str
    every: Change = Change()
    """Settings that apply at every size."""
    tiny: Change | None = None
    small: Change | None = None
    paper: Change | None = None
    sizes: list[Size] = Field(default_factory=lambda: list(SIZES), min_length=1)
    """Sizes that contain this row or column."""
    metric: PartialMetric = ""

    def changes(self, size: Size) -> list[Change]:
        """Return the settings for a size; later settings override earlier settings."""
        own: Change | None = getattr(self, size)
        return [self.every, *([own] if own else [])]


class Row(Line):
    """Row of a table, i.e. a method or a variant of a method."""

    method: str
    printed: dict[str, Printed] = Field(default_factory=dict)
    """Printed numbers, by column."""

    def printed_in(self, column: str) -> tuple[float | None, float | None]:
        """Return the number printed in a column and its spread, each None if it is missing."""
        printed = self.printed.get(column)
        if isinstance(printed, list):
            return printed[0], printed[1] if len(printed) > 1 else None
        return printed, None


class Column(Line):
    """Column of a table."""

    percent_of: str = ""
    """Row whose value is 100 % in this column, or "" if the column has other units."""


class PlaceSettings(Line):
    """Settings for the row `name` that apply only in the given columns."""

    columns: list[str] = Field(min_length=1)


class Claim(_Part):
    """Claim of the paper: a sentence, and bounds that make the sentence a test.

    The bounds apply to the difference between each value in `above` and each value in `below`, to
    their ratio, or, without `below`, to each value in `above` itself. A claim without bounds states
    a direction: each value in `above` is greater. Claims with the same sentence have one verdict.
    """

    says: str
    above: list[str] = Field(default_factory=list)
    below: list[str] = Field(default_factory=list)
    ascending: list[str] = Field(default_factory=list)
    """Names in the order of their values, instead of `above` and `below`. Each name is compared
    with the previous name."""
    together: bool = False
    """Whether the values in `above` are added, and the values in `below`, before the comparison."""
    ratio: bool = False
    """Whether the bounds apply to the ratio of the values instead of their difference."""
    at_least: float | None = None
    """Lower bound, in the unit of the published numbers (or a ratio)."""
    at_most: float | None = None
    """Upper bound, in the unit of the published numbers (or a ratio)."""
    holds_in: Literal["all", "most"] | None = None
    """Whether the sentence says that the claim holds in all of its comparisons, or in more than
    half of them. Without such words, it must hold in all comparisons."""
    of: Literal["rows", "columns"] = "rows"
    """Whether rows are compared within each column, or columns within each row."""
    where: list[str] = Field(default_factory=list)
    """Columns (or rows) for which the paper makes the claim; an empty list means all of them."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound."""
        if self.at_least is None and self.at_most is None:
            return float(self.ratio), math.inf
        low, high = self.at_least, self.at_most
        return -math.inf if low is None else low, math.inf if high is None else high

    @property
    def bound(self) -> str:
        """Bounds in words, e.g. "at least 6", "-13 to 0", or "ratio 0.06 to 0.1"."""
        low, high = self.bounds
        if math.isinf(high):
            words = f"{'above' if self.at_least is None else 'at least'} {low:g}"
        else:
            words = f"at most {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"
        quantity = "ratio " if self.ratio else "" if self.below or self.ascending else "value "
        places = f"in {self.holds_in} comparisons" if self.holds_in else ""
        sums = "for sums" if self.together else "at each step" if self.ascending else ""
        return ", ".join(filter(None, (f"{quantity}{words}", sums, places)))

    @property
    def pairs(self) -> list[tuple[list[str], list[str]]]:
        """Names whose values are added on each side of each comparison."""
        if self.ascending:
            return [([above], [below]) for below, above in pairwise(self.ascending)]
        if self.together:
            return [(self.above, self.below)]
        sides = [[name] for name in self.above], [[name] for name in self.below] or [[]]
        return [(above, below) for above, below in product(*sides) if above != below]

    @model_validator(mode="after")
    def _is_a_test(self) -> Claim:
        where = f"claim {self.says!r}"
        low, high = self.bounds
        if not low < high:
            raise ValueError(f"{where}: expected at_least < at_most, got {low:g} and {high:g}")
        if bool(self.above) == bool(self.ascending) or (self.below and self.ascending):
            raise ValueError(f"{where}: expected either above (and below) or ascending")
        if len(self.ascending) == 1:
            raise ValueError(f"{where}: expected at least 2 names in ascending, got 1")
        if self.above and not self.below and (self.ratio or (low, high) == (0, math.inf)):
            raise ValueError(f"{where}: expected below, or a bound of the values in above")
        return self


class PaperTable(_Part):
    """Table of a paper."""

    title: str
    source: str
    """Paper, and the table or figure in the paper."""
    metric: Metric
    """Metric of cells whose row and column do not set a metric."""
    unit: Literal["percent", "ratio"] = "percent"
    """Unit of the published numbers; accuracies are measured as fractions."""
    notes: list[str] = Field(default_factory=list)
    """Notes on the table, such as omitted rows and the reasons."""
    curves: bool = False
    """Whether to draw each column's metric over rounds and over bytes, as in the paper's figure."""
    sizes: dict[Size, Scale]
    rows: list[Row] = Field(min_length=1)
    columns: list[Column] = Field(min_length=1)
    places: list[PlaceSettings] = Field(default_factory=list)
    claims: list[Claim] = Field(default_factory=list)

    def rows_in(self, size: Size) -> list[Row]:
        """Return the table's rows for a size."""
        return [row for row in self.rows if size in row.sizes]

    def columns_in(self, size: Size) -> list[Column]:
        """Return the table's columns for a size."""
        return [column for column in self.columns if size in column.sizes]

    def changes(self, row: Row, column: Line, size: Size) -> list[Change]:
        """Return the settings of a cell for a size; later settings override earlier settings."""
        found = [self.sizes[size], *column.changes(size), *row.changes(size)]
        for place in self.places:
            if place.name == row.name and column.name in place.columns:
                found += place.changes(size)
        return found

    @property
    def sentences(self) -> dict[str, list[Claim]]:
        """Claims by sentence."""
        claims: dict[str, list[Claim]] = {}
        for claim in self.claims:
            claims.setdefault(claim.says, []).append(claim)
        return claims

    def metric_of(self, row: Row, column: Line) -> Metric:
        """Return the metric of a cell: the name and the round that the first part states."""
        own = [p.metric for p in self.places if p.name == row.name and column.name in p.columns]
        parts = (*own, row.metric, column.metric, self.metric)
        stated = [part.partition("@")[::2] for part in parts]
        name = next(name for name, _ in stated if name)
        number = next((number for _, number in stated if number), "")
        return f"{name}@{number}" if number else name

    def legend(self, size: Size) -> str:
        """Return a sentence about the numbers, and about the rounds to which they belong."""
        last: list[str] = []
        tail: list[str] = []
        stated = False
        for row in self.rows_in(size):
            metrics = [self.metric_of(row, column) for column in self.columns_in(size)]
            if all(each.startswith("figure/") and each.endswith("/mean") for each in metrics):
                continue
            stated = stated or any("@" in metric for metric in metrics)
            is_tail = any(metric.endswith("/tail") for metric in metrics)
            (tail if is_tail else last).append(row.name)
        rounds = "of each run's mean over the last fifth of the rounds"
        if not tail:
            rounds = "in the last round"
            rounds += ", unless a row or column states another round" if stated else ""
        elif last:
            rounds += f" (in the last round for {', '.join(last)})"
        return (
            f"Mean ± standard deviation over the seeds, {rounds}; the paper's numbers in "
            "parentheses."
        )

    @model_validator(mode="after")
    def _names_are_known(self) -> PaperTable:
        rows, columns = ([line.name for line in part] for part in (self.rows, self.columns))

        def all_in(names: Iterable[str], known: list[str], where: str) -> None:
            for name in names:
                if name not in known:
                    raise ValueError(f"{where}: expected one of {', '.join(known)}, got {name!r}")

        for names in (rows, columns):
            if len(set(names)) < len(names):
                raise ValueError(f"names must be unique, got {names}")
        for row in self.rows:
            all_in(row.printed, columns, f"row {row.name!r}, printed")
            for column in self.columns:
                _is_metric(self.metric_of(row, column))
        for column in self.columns:
            all_in(filter(None, [column.percent_of]), rows, f"column {column.name!r}, percent_of")
        for place in self.places:
            all_in([place.name], rows, "places, name")
            all_in(place.columns, columns, f"places, {place.name!r}")
        for claim in self.claims:
            ours, theirs = (rows, columns) if claim.of == "rows" else (columns, rows)
            names = [*claim.above, *claim.below, *claim.ascending]
            all_in(names, ours, f"claim {claim.says!r}")
            all_in(claim.where, theirs, f"claim {claim.says!r}, where")
        for says, claims in self.sentences.items():
            if len({claim.holds_in for claim in claims}) > 1:
                raise ValueError(f"claim {says!r}: expected one value of holds_in")
        return self


class Architectures(Line):
    """Model pool: one set of architectures in the table of all methods."""

    instead: list[Line] = Field(default_factory=list)
    """Pools for methods that cannot train this pool; `name` is the method."""

    def changes_for(self, method: str, size: Size) -> list[Change]:
        """Return the settings of a method for a size; later settings override earlier settings."""
        own = (line for line in self.instead if line.name == method)
        return [*self.changes(size), *(change for line in own for change in line.changes(size))]


class FieldTable(_Part):
    """Table of all methods, with one cell per method, set of architectures, and split."""

    title: str
    notes: list[str] = Field(default_factory=list)
    sizes: dict[Size, Scale]
    architectures: list[Architectures] = Field(min_length=1)
    splits: list[Line] = Field(min_length=1)
    excluded: list[str] = Field(default_factory=list)
    """Methods that run only if the user names them, because their models are not in this table."""

    def methods(self) -> list[str]:
        """Return the names of the methods that are run by default, including custom methods."""
        return [name for name in all_methods()[0] if name not in self.excluded]


def read_field() -> FieldTable:
    """Read the declaration of the table of all methods."""
    file = resources.files("fedhet.experiments") / f"{FIELD}.toml"
    return FieldTable.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))


def table_names() -> list[str]:
    """Return the names of all papers' tables."""
    return sorted(
        file.name.removesuffix(".toml") for file in FILES.iterdir() if file.name.endswith(".toml")
    )


def tables_of(word: str) -> list[str]:
    """Return the tables selected by a word.

    The word is "all", a table's name, a paper such as "felo", or another word in the names of
    tables, such as "adapters" in `fedlora-adapters-agnews`. Raises SettingsError, with the closest
    known name, if no table matches.
    """
    known = table_names()
    found = [name for name in known if word == "all" or f"{name}-".startswith(f"{word}-")]
    if not found and word.replace("-", "").isalpha():
        found = [name for name in known if f"-{word}-" in f"{name}-"]
    if not found:
        raise SettingsError(unknown_name("table", word, known, "`fedhet table` lists all"))
    return found


def paper_of(name: str) -> str:
    """Return the short name of a table's paper, i.e. the name of the paper's method."""
    return next(method for method in shipped_names() if name.startswith(f"{method}-"))


def read_table(name: str) -> PaperTable:
    """Read the declaration of a table. Raises SettingsError if its file is invalid."""
    text = (FILES / f"{name}.toml").read_text(encoding="utf-8")
    try:
        return PaperTable.model_validate(tomllib.loads(text))
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"table '{name}': {where}: {first['msg']}") from None


def is_spread(metric: str) -> bool:
    """Return whether a metric is a standard deviation over clients."""
    return metric.partition("@")[0].endswith("/std")


def round_of(metric: str, rounds: int) -> int:
    """Return the round of a metric in a run of so many rounds; by default, the last round."""
    number = metric.partition("@")[2] or "100%"
    return math.ceil(int(number[:-1]) * rounds / 100) if number.endswith("%") else int(number)


# --- plans -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """Planned run, with its settings and its directory."""

    label: str
    values: Values
    directory: Path

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return (self.directory / "summary.json").exists()

    @property
    def config(self) -> Config:
        """Resolved settings, with `resume` enabled. Raises SettingsError if they are invalid.

        To save time, only the last fifth of the rounds is evaluated. All rounds are evaluated if
        earlier accuracies matter (early stopping, the best round, relative accuracy), unless
        `evaluate-from` is set.
        """
        found = resolve({**self.values, "out": str(self.directory.resolve()), "resume": True})
        run = found.run
        earlier = run.early_stopping or run.keep_best or "local" in found.method.spec.kinds
        if earlier or "evaluate-from" in self.values:
            return found
        return found.replacing(evaluate_from=tail_start(run.rounds))

    @property
    def command(self) -> str:
        """Command that executes only this run."""
        chosen = {k: v for k, v in self.values.items() if k not in (*PLACE, "method")}
        return " ".join(["fedhet run", str(self.values["method"]), *as_options(chosen)])


@dataclass(frozen=True)
class PlannedCell:
    """Planned cell, with its metric, its runs by seed, and the number printed in the paper."""

    row: Row
    column: Line
    metric: str
    runs: Mapping[int, PlannedRun]
    printed: float | None
    printed_spread: float | None


@dataclass(frozen=True)
class Plan:
    """Plan of the runs for a paper's table at one size."""

    name: str
    table: PaperTable
    size: Size
    seeds: tuple[int, ...]
    cells: tuple[PlannedCell, ...]
    over: Mapping[str, object] = field(default_factory=dict)
    """Settings that override the table's settings in all runs."""

    @property
    def runs(self) -> list[PlannedRun]:
        """Runs of all cells without duplicates, ordered by row, column, and seed."""
        return self.runs_of(())

    @property
    def replaced(self) -> list[str]:
        """Messages about the settings that `over` overrides in rows, columns, and `places`."""
        lines: list[Line] = [*self.table.rows_in(self.size), *self.table.columns_in(self.size)]
        lines += self.table.places
        return [
            f"'{line.name}' has {name} = {as_text(self.over[name])} instead of {own}"
            for line in lines
            for change in line.changes(self.size)
            for name in sorted(change.settings.keys() & self.over.keys())
            if (own := as_text(change.settings[name])) != as_text(self.over[name])
        ]

    def digest(self, row: str, columns: Iterable[str]) -> str:
        """Return a digest of the settings of a row's cells in the given columns.

        The digest includes the defaults of the method's settings, so that it changes with them.
        """
        content = {}
        for cell in (cell for cell in self.cells if cell.row.name == row):
            run = next(iter(cell.runs.values()))
            known = find_method(str(run.values["method"])).settings()
            defaults = {k: f.get_default(call_default_factory=True) for k, f in known.items()}
            own = {k: plain(run.values.get(k, default)) for k, default in defaults.items()}
            others = _kept(run.values, omitted={"seed", "evaluate-from", *own})
            content[cell.column.name] = [others, own]
        chosen = [content.get(column) for column in columns]
        text = json.dumps(chosen, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def runs_of(self, rows: Sequence[str]) -> list[PlannedRun]:
        """Return the runs of rows whose names start with one of `rows`.

        If `rows` is empty, all runs are returned.
        """
        wanted = [cell for cell in self.cells if not rows or cell.row.name.startswith((*rows,))]
        return each_once(run for cell in wanted for run in cell.runs.values())


def as_options(settings: Mapping[str, object]) -> list[str]:
    """Return the `--set` options for the settings."""
    return [f"--set {shlex.quote(f'{name}={as_text(v)}')}" for name, v in settings.items()]


def each_once(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the runs in order, with only the first run in each directory."""
    found: dict[Path, PlannedRun] = {}
    for run in runs:
        found.setdefault(run.directory, run)
    return list(found.values())


def plan(
    name: str,
    table: PaperTable,
    size: Size,
    seeds: Sequence[int],
    out: Path,
    over: Mapping[str, object] | None = None,
) -> Plan:
    """Plan a paper's table at one size.

    Args:
        name: Name of the table.
        table: Declaration of the table.
        size: Size, one of `SIZES`.
        seeds: Seeds of each cell.
        out: Directory for the runs.
        over: Settings that override the table's settings in all runs.

    Raises:
        SettingsError: If a preset or method does not exist.
    """
    cells = []
    for row, column in product(table.rows_in(size), table.columns_in(size)):
        # The papers weight clients by all their samples.
        over_defaults = {"engine.samples-cap": 0.0, **(over or {})}
        values = layered(table.changes(row, column, size), over_defaults, row.method)
        runs = seeded(f"{row.name}, {column.name}", values, seeds, out)
        metric = table.metric_of(row, column)
        cells.append(PlannedCell(row, column, metric, runs, *row.printed_in(column.name)))
    return Plan(name, table, size, tuple(seeds), tuple(cells), over or {})


def layered(changes: Iterable[Change], over: Mapping[str, object], method: str) -> Values:
    """Apply changes in order, then `over`, and return the settings of a method.

    Raises SettingsError if a preset or method does not exist.
    """
    values: Values = {}
    for change in changes:
        values |= read_preset(change.preset) if change.preset else {}
        values |= change.settings
    return settings_for_method({**values, **over}, method)


def seeded(label: str, values: Values, seeds: Iterable[int], out: Path) -> dict[int, PlannedRun]:
    """Return one run per seed with the given settings, in the directory `out`.

    Runs are stored under a hash of the settings that affect results. Settings with default values
    are not hashed, so existing directories keep their names when a setting is added to fedhet.
    `evaluate-from` is hashed if it is set, because other runs lack the scores of earlier rounds.
    """
    text = json.dumps(_kept(values), sort_keys=True, default=str)
    folder = out / f"{values['method']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    return {
        seed: PlannedRun(label, {**values, "seed": seed}, folder / f"seed-{seed}") for seed in seeds
    }


def _kept(values: Values, omitted: Collection[str] = ()) -> Values:
    """Return the settings that differ from their defaults and affect the recorded results."""
    known = RunSettings.fields()
    every = known | find_method(str(values["method"])).settings()

    def is_kept(name: str, value: object) -> bool:
        if name == "evaluate-from":
            return True
        if name in known and is_machine(known[name]):
            return False
        return bool(plain(value) != plain(every[name].get_default(call_default_factory=True)))

    return {k: v for k, v in values.items() if k not in omitted and is_kept(k, v)}


@dataclass(frozen=True)
class FieldCell:
    """Cell of the table of all methods: its runs, keyed by seed, or the reason for missing runs."""

    method: str
    cell: Place
    runs: Mapping[int, PlannedRun]
    refused: str = ""
    """Reason why the method does not support this cell, or "" if the method supports it."""


@dataclass(frozen=True)
class FieldPlan:
    """Plan of the runs for the table of all methods at one size."""

    table: FieldTable
    size: Size
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    every: tuple[FieldCell, ...]
    """All cells, ordered by method."""
    over: Mapping[str, object] = field(default_factory=dict)
    """Settings that override the table's settings in all runs."""
    name: str = FIELD

    @property
    def cells(self) -> list[Place]:
        """Pairs of architectures and split, in the table's order."""
        return [
            (architectures.name, split.name)
            for architectures, split in product(self.table.architectures, self.table.splits)
        ]

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, ordered by seed."""
        return [each.runs[s] for s in self.seeds for each in self.every if not each.refused]


def plan_field(
    table: FieldTable,
    size: Size,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    over: Mapping[str, object] | None = None,
) -> FieldPlan:
    """Plan the table of all methods at one size, with its runs in the directory `out`.

    The settings `over` override the table's settings. Raises SettingsError if a method does not
    exist, or if no method supports any cell.
    """
    every = []
    for method, architectures, split in product(methods, table.architectures, table.splits):
        pool = architectures.changes_for(method, size)
        changes = [table.sizes[size], *pool, *split.changes(size)]
        values, refused = _fitted(layered(changes, over or {}, method))
        label = f"{method}, {architectures.name}, {split.name}"
        runs = {} if refused else seeded(label, values, seeds, out)
        every.append(FieldCell(method, (architectures.name, split.name), runs, refused))
    if all(each.refused for each in every):
        raise SettingsError(every[0].refused)
    return FieldPlan(table, size, tuple(seeds), tuple(methods), tuple(every), over or {})


def _fitted(values: Values) -> tuple[Values, str]:
    """Adapt the settings to the method.

    Returns the settings and an error message, which is "" if the method supports the settings. If
    the method fixes the number of rounds, the total number of local epochs is preserved.
    """
    try:
        free = resolve({name: value for name, value in values.items() if name != "rounds"})
        if (fixed := free.method_settings.fixed_rounds()) is not None:
            planned = resolve({**values, "rounds": fixed}).run.training.local_epochs
            epochs = int(values["rounds"]) * int(planned) // fixed  # type: ignore[call-overload]
            values = {**values, "rounds": fixed, "training.local-epochs": max(1, epochs)}
        resolve(values)
    except SettingsError as error:
        return values, str(error)
    return values, ""


def about(plan: FieldPlan, finished: int) -> str:
    """Return a line on the table's size, its finished runs, and its seeds."""
    says = plan.table.sizes[plan.size].says
    runs = f"{finished} of {len(plan.runs)} runs are finished"
    return f"Size {plan.size}: {says} {runs}, seeds {', '.join(map(str, plan.seeds))}."


def command_of(plan: FieldPlan) -> str:
    """Return the command that creates the table of all methods."""
    seeds = ",".join(map(str, plan.seeds))
    words = [f"fedhet table {plan.name} --size {plan.size} --seeds {seeds}"]
    if set(plan.methods) != set(plan.table.methods()):
        words.append(f"--methods {','.join(plan.methods)}")
    return " ".join([*words, *as_options(plan.over)])


@lru_cache(maxsize=4096)
def finished_run(directory: Path) -> Run:
    """Load a finished run. Loaded runs are cached, because finished runs do not change."""
    return load_run(directory)
