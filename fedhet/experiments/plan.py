"""Tables: their declarations in TOML files, and the plans of the runs that their cells need.

A paper's table, `tables/NAME.toml`, has rows, columns, sizes, printed numbers and claims. A cell is
one run per seed. Its settings are those of the size, then of the column, of the row, and
of the place where they meet, if there is one; of each, its presets come first. Cells with equal
settings share their runs, so that several kinds of model of one run can be rows or columns of their
own. The table of all methods, `field.toml`, crosses architectures with splits of the data.

A run's directory is named after all of its settings, so that tables share the runs that they have
in common.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedhet.base.errors import SettingsError, unknown_name
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import of_method, read_preset
from fedhet.methods.registry import all_methods, find_method, shipped_names
from fedhet.report.run import Run, load_run
from fedhet.runs.measures import tail_begins
from fedhet.runs.records import PROTOCOLS
from fedhet.settings.run import PLACE, RunSettings
from fedhet.settings.schema import is_machine, plain
from fedhet.settings.text import as_text

FILES = resources.files("fedhet.experiments") / "tables"
Values = dict[str, object]
Place = tuple[str, str]
"""A cell's place: the names of its row and column, or of its architectures and split."""
FIELD = "field"
"""The name of the table of all methods."""
Size = Literal["tiny", "small", "paper"]
SIZES: tuple[Size, ...] = get_args(Size)
"""Digits, in minutes; the paper's federation with small networks; as in the paper."""
STATISTICS = ("mean", "std", "tail", "worst")
DIRECTIONS = ("up", "down")
RATIOS = ("mean", "best", "worst")


def _is_metric(text: str) -> str:
    first, second, *rest = (*text.split("/"), "")
    third = rest[0] or "mean" if rest else "mean"
    accuracy = first in PROTOCOLS and second and third in STATISTICS
    relative = first == "relative" and second in PROTOCOLS and third in RATIOS
    bytes_sent = first == "bytes" and second in DIRECTIONS and not rest[:-1]
    figure = first == "figure" and second
    if len(rest) > 2 or not (accuracy or relative or bytes_sent or figure):
        raise ValueError(
            "it takes PROTOCOL/KIND[/mean|std|tail|worst], relative/PROTOCOL[/mean|best|worst], "
            "bytes/up|down, or figure/NAME"
        )
    return text


Metric = Annotated[str, AfterValidator(_is_metric)]
"""The metric that a cell shows, such as `common/global`, `relative/common/best`, `figure/tau`.

`bytes/up` is the mean per round of what all clients send together, in KiB.
"""
Printed = float | Annotated[list[float], Field(min_length=1, max_length=2)]
"""A number of the paper, or a number and its spread."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Change(_Part):
    """Settings that override earlier ones: those of presets, then individual ones."""

    preset: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)


class Scale(Change):
    """A size of the table: the settings that all its runs share."""

    says: str
    """A description, and what was cut from the paper's experiment."""


class Line(_Part):
    """A row or a column."""

    name: str
    every: Change = Change()
    """Its settings in every size."""
    tiny: Change | None = None
    small: Change | None = None
    paper: Change | None = None
    sizes: list[Size] = Field(default_factory=lambda: list(SIZES), min_length=1)
    """The sizes that have it."""
    metric: Metric = ""

    def changes(self, size: Size) -> list[Change]:
        """Return its settings in a size, the later ones over the earlier."""
        own: Change | None = getattr(self, size)
        return [self.every, *([own] if own else [])]


class Row(Line):
    """A row: a method, or a variant of one."""

    method: str
    printed: dict[str, Printed] = Field(default_factory=dict)
    """The paper's numbers by column."""

    def printed_in(self, column: str) -> tuple[float | None, float | None]:
        """Return the number that the paper prints in a column, and its spread, or None."""
        printed = self.printed.get(column)
        if isinstance(printed, list):
            return printed[0], printed[1] if len(printed) > 1 else None
        return printed, None


class PlaceSettings(Line):
    """Settings of a row, which is named, in some of the columns."""

    columns: list[str] = Field(min_length=1)


class Claim(_Part):
    """A claim of the paper: each of `above` is greater than each of `below`."""

    says: str
    above: list[str] = Field(min_length=1)
    below: list[str] = Field(min_length=1)
    of: Literal["rows", "columns"] = "rows"
    """Whether the names are of rows, compared in each column, or of columns, in each row."""
    where: list[str] = Field(default_factory=list)
    """The columns (or rows) in which the paper claims it; none: in all."""


class PaperTable(_Part):
    """A table of a paper."""

    title: str
    source: str
    """The paper, and the table or figure."""
    metric: Metric
    """What a cell shows, unless its row or column overrides it."""
    unit: Literal["percent", "ratio"] = "percent"
    """The unit of the printed numbers; accuracies are measured as shares."""
    notes: list[str] = Field(default_factory=list)
    """Notes on the table, such as rows of the paper that are left out, and why."""
    sizes: dict[Size, Scale]
    rows: list[Row] = Field(min_length=1)
    columns: list[Line] = Field(min_length=1)
    places: list[PlaceSettings] = Field(default_factory=list)
    claims: list[Claim] = Field(default_factory=list)

    def rows_in(self, size: Size) -> list[Row]:
        """Return the rows of a size."""
        return [row for row in self.rows if size in row.sizes]

    def columns_in(self, size: Size) -> list[Line]:
        """Return the columns of a size."""
        return [column for column in self.columns if size in column.sizes]

    def changes(self, row: Row, column: Line, size: Size) -> list[Change]:
        """Return the settings of a cell in a size, the later ones over the earlier."""
        found = [self.sizes[size], *column.changes(size), *row.changes(size)]
        for place in self.places:
            if place.name == row.name and column.name in place.columns:
                found += place.changes(size)
        return found

    @model_validator(mode="after")
    def _names_are_known(self) -> PaperTable:
        rows, columns = ([line.name for line in part] for part in (self.rows, self.columns))

        def all_in(names: Iterable[str], known: list[str], where: str) -> None:
            for name in names:
                if name not in known:
                    raise ValueError(f"{where}: {name!r} is none of {', '.join(known)}")

        for names in (rows, columns):
            if len(set(names)) < len(names):
                raise ValueError(f"a name occurs twice in {names}")
        for row in self.rows:
            all_in(row.printed, columns, f"row {row.name!r}, printed")
        for place in self.places:
            all_in([place.name], rows, "places, name")
            all_in(place.columns, columns, f"places, {place.name!r}")
        for claim in self.claims:
            ours, theirs = (rows, columns) if claim.of == "rows" else (columns, rows)
            all_in([*claim.above, *claim.below], ours, f"claim {claim.says!r}")
            all_in(claim.where, theirs, f"claim {claim.says!r}, where")
        return self


class Architectures(Line):
    """A pool of models."""

    instead: list[Line] = Field(default_factory=list)
    """What a method that cannot train the pool has instead of it; the name is the method's."""

    def of(self, method: str, size: Size) -> list[Change]:
        """Return a method's settings in a size, the later ones over the earlier."""
        own = (line for line in self.instead if line.name == method)
        return [*self.changes(size), *(change for line in own for change in line.changes(size))]


class FieldTable(_Part):
    """A table whose rows are all methods, and whose cells are architectures by splits."""

    title: str
    notes: list[str] = Field(default_factory=list)
    sizes: dict[Size, Scale]
    architectures: list[Architectures] = Field(min_length=1)
    splits: list[Line] = Field(min_length=1)


def read_field() -> FieldTable:
    """Return the table of all methods."""
    file = resources.files("fedhet.experiments") / f"{FIELD}.toml"
    return FieldTable.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))


def table_names() -> list[str]:
    """Return the names of all tables."""
    return sorted(
        file.name.removesuffix(".toml") for file in FILES.iterdir() if file.name.endswith(".toml")
    )


def tables_of(word: str) -> list[str]:
    """Return the names of the tables that a word means: "all", one, or those of a paper ("felo").

    Raises SettingsError that suggests the nearest name.
    """
    known = table_names()
    found = [name for name in known if word == "all" or f"{name}-".startswith(f"{word}-")]
    if not found:
        raise SettingsError(unknown_name("table", word, known, "`fedhet table` lists all"))
    return found


def paper_of(name: str) -> str:
    """Return the word for a table's paper: the method that the paper is about."""
    return next(method for method in shipped_names() if name.startswith(f"{method}-"))


def read_table(name: str) -> PaperTable:
    """Return one of `table_names`. Raises SettingsError that says what is wrong with its file."""
    text = (FILES / f"{name}.toml").read_text(encoding="utf-8")
    try:
        return PaperTable.model_validate(tomllib.loads(text))
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"table '{name}': {where}: {first['msg']}") from None


# --- plans -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """One run: its settings, and its directory."""

    label: str
    values: Values
    directory: Path

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return (self.directory / "summary.json").exists()

    @property
    def config(self) -> Config:
        """Return its settings, which resume what is in its directory. Raises SettingsError.

        Only the last fifth of the rounds, which a table shows, is evaluated, unless the settings
        say from when, or an earlier round's accuracy ends the run, is kept, or is what later ones
        are divided by.
        """
        found = resolve({**self.values, "out": str(self.directory.resolve()), "resume": True})
        run = found.run
        earlier = run.early_stopping or run.keep_best or "local" in found.method.spec.kinds
        if earlier or "evaluate-from" in self.values:
            return found
        return found.replacing(evaluate_from=tail_begins(run.rounds))

    @property
    def command(self) -> str:
        """Return the command that makes only this run."""
        chosen = {k: v for k, v in self.values.items() if k not in (*PLACE, "method")}
        return " ".join(["fedhet run", str(self.values["method"]), *as_options(chosen)])


@dataclass(frozen=True)
class PlannedCell:
    """A cell: the runs over seeds whose `metric` it shows, and what the paper prints."""

    row: Row
    column: Line
    metric: str
    runs: Mapping[int, PlannedRun]
    printed: float | None
    printed_spread: float | None


@dataclass(frozen=True)
class Plan:
    """A table in one of its sizes."""

    name: str
    table: PaperTable
    size: Size
    seeds: tuple[int, ...]
    cells: tuple[PlannedCell, ...]
    over: Mapping[str, object] = field(default_factory=dict)
    """The settings that all runs have instead of the table's."""

    @property
    def runs(self) -> list[PlannedRun]:
        """The runs of all cells, each once, in the order of rows, columns and seeds."""
        return self.runs_of(())

    @property
    def replaced(self) -> list[str]:
        """What `over` changes of the settings of rows, columns and places, one of each in words."""
        lines: list[Line] = [*self.table.rows_in(self.size), *self.table.columns_in(self.size)]
        lines += self.table.places
        return [
            f"'{line.name}' has {name} = {as_text(self.over[name])} instead of its own {own}"
            for line in lines
            for change in line.changes(self.size)
            for name in sorted(change.settings.keys() & self.over.keys())
            if (own := as_text(change.settings[name])) != as_text(self.over[name])
        ]

    def runs_of(self, rows: Sequence[str]) -> list[PlannedRun]:
        """Return the `runs` of the rows whose names begin with one of these; of all, if none."""
        wanted = [cell for cell in self.cells if not rows or cell.row.name.startswith((*rows,))]
        return each_once(run for cell in wanted for run in cell.runs.values())


def as_options(settings: Mapping[str, object]) -> list[str]:
    """Return the words of a command that give it these settings."""
    return [f"--set {shlex.quote(f'{name}={as_text(v)}')}" for name, v in settings.items()]


def each_once(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the runs in their order, those of one directory once, as the first of them."""
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
    """Return the plan of a paper's table in a size, with its runs in the folder `out`.

    `over` are settings that all runs have instead of the table's. Raises SettingsError for presets
    and methods that do not exist.
    """
    cells = []
    for row, column in product(table.rows_in(size), table.columns_in(size)):
        values = layered(table.changes(row, column, size), over or {}, row.method)
        runs = seeded(f"{row.name}, {column.name}", values, seeds, out)
        metric = row.metric or column.metric or table.metric
        cells.append(PlannedCell(row, column, metric, runs, *row.printed_in(column.name)))
    return Plan(name, table, size, tuple(seeds), tuple(cells), over or {})


def layered(changes: Iterable[Change], over: Mapping[str, object], method: str) -> Values:
    """Return a method's settings: those of the changes, later ones over earlier, then `over`.

    Raises SettingsError for presets and methods that do not exist.
    """
    values: Values = {}
    for change in changes:
        values |= read_preset(change.preset) if change.preset else {}
        values |= change.settings
    return of_method({**values, **over}, method)


def seeded(label: str, values: Values, seeds: Iterable[int], out: Path) -> dict[int, PlannedRun]:
    """Return a run of these settings for each seed, in the folder `out`.

    The name of their directory is a digest of what the settings compute, wherever and on whatever
    it runs. Settings at their defaults have no part in it, so that a new one leaves the names as
    they are.
    """
    known = RunSettings.fields()
    every = known | find_method(str(values["method"])).settings()
    kept = {
        name: value
        for name, value in values.items()
        if not (name in known and is_machine(known[name]))
        and plain(value) != plain(every[name].get_default(call_default_factory=True))
    }
    text = json.dumps(kept, sort_keys=True, default=str)
    folder = out / f"{values['method']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    return {
        seed: PlannedRun(label, {**values, "seed": seed}, folder / f"seed-{seed}") for seed in seeds
    }


@dataclass(frozen=True)
class FieldCell:
    """A method on some architectures and a split: its runs by seed, or why it has none."""

    method: str
    cell: Place
    runs: Mapping[int, PlannedRun]
    refused: str = ""
    """Why the method cannot run here, as its settings say; empty: it can."""


@dataclass(frozen=True)
class FieldPlan:
    """The table of all methods in one of its sizes."""

    table: FieldTable
    size: Size
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    every: tuple[FieldCell, ...]
    """A method's cells, one method after the other."""
    over: Mapping[str, object] = field(default_factory=dict)
    """The settings that all runs have instead of the table's."""
    name: str = FIELD

    @property
    def cells(self) -> list[Place]:
        """The architectures and splits, in the table's order."""
        return [
            (architectures.name, split.name)
            for architectures, split in product(self.table.architectures, self.table.splits)
        ]

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs: those of the first seed, then those of the second, and so on."""
        return [each.runs[s] for s in self.seeds for each in self.every if not each.refused]


def plan_field(
    table: FieldTable,
    size: Size,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    over: Mapping[str, object] | None = None,
) -> FieldPlan:
    """Return the plan of the table of all methods in a size, with its runs in the folder `out`.

    `over` are settings that all runs have instead of the table's. Raises SettingsError for a method
    that does not exist, and if no method can run in any cell.
    """
    every = []
    for method, architectures, split in product(methods, table.architectures, table.splits):
        changes = [table.sizes[size], *architectures.of(method, size), *split.changes(size)]
        values, refused = _fitted(layered(changes, over or {}, method))
        label = f"{method}, {architectures.name}, {split.name}"
        runs = {} if refused else seeded(label, values, seeds, out)
        every.append(FieldCell(method, (architectures.name, split.name), runs, refused))
    if all(each.refused for each in every):
        raise SettingsError(every[0].refused)
    return FieldPlan(table, size, tuple(seeds), tuple(methods), tuple(every), over or {})


def _fitted(values: Values) -> tuple[Values, str]:
    """Return settings with the rounds that the method takes, and why it cannot run, or "".

    Where it fixes their number, the local epochs are as many in all as they would have been.
    """
    try:
        free = resolve({name: value for name, value in values.items() if name != "rounds"})
        if (fixed := free.own.fixed_rounds()) is not None:
            planned = resolve({**values, "rounds": fixed}).run.training.local_epochs
            epochs = int(values["rounds"]) * int(planned) // fixed  # type: ignore[call-overload]
            values = {**values, "rounds": fixed, "training.local-epochs": max(1, epochs)}
        resolve(values)
    except SettingsError as error:
        return values, str(error)
    return values, ""


def about(plan: FieldPlan, finished: int) -> str:
    """Return a line on the size, the finished runs, and the seeds of the table of all methods."""
    says = plan.table.sizes[plan.size].says
    runs = f"{finished} of {len(plan.runs)} runs are finished"
    return f"Size {plan.size}: {says} {runs}, seeds {', '.join(map(str, plan.seeds))}."


def command_of(plan: FieldPlan) -> str:
    """Return the command that makes the table of all methods."""
    seeds = ",".join(map(str, plan.seeds))
    words = [f"fedhet table {plan.name} --size {plan.size} --seeds {seeds}"]
    if set(plan.methods) != set(all_methods()[0]):
        words.append(f"--methods {','.join(plan.methods)}")
    return " ".join([*words, *as_options(plan.over)])


@lru_cache(maxsize=4096)
def finished_run(directory: Path) -> Run:
    """Return a finished run, which does not change any more."""
    return load_run(directory)
