"""Plans of tables: the runs that the cells need, and their directories.

A run's directory is named after all of its settings, so that tables share the runs that they have
in common.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from fedhet.base.errors import SettingsError
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import of_method, read_preset
from fedhet.experiments.declaration import FIELD, Change, FieldTable, Line, PaperTable, Row, Size
from fedhet.methods.registry import all_methods, find_method
from fedhet.runs.measures import tail_begins
from fedhet.settings.run import PLACE, RunSettings
from fedhet.settings.schema import is_machine, plain
from fedhet.settings.text import as_text

Values = dict[str, object]
Place = tuple[str, str]
"""A cell's place: the names of its row and column, or of its architectures and split."""


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

        Only rounds that a table shows are evaluated, unless the settings say from when.
        """
        found = resolve({**self.values, "out": str(self.directory.resolve()), "resume": True})
        late = "evaluate-from" not in self.values and shows_its_end(found)
        return found.replacing(evaluate_from=tail_begins(found.run.rounds)) if late else found

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

    @property
    def command(self) -> str:
        """The command that makes the table."""
        seeds = ",".join(map(str, self.seeds))
        words = [f"fedhet table {self.name} --size {self.size} --seeds {seeds}"]
        return " ".join([*words, *as_options(self.over)])

    def runs_of(self, rows: Sequence[str]) -> list[PlannedRun]:
        """Return the `runs` of the rows whose names begin with one of these; of all, if none."""
        wanted = [cell for cell in self.cells if not rows or cell.row.name.startswith((*rows,))]
        return each_once(run for cell in wanted for run in cell.runs.values())


def shows_its_end(config: Config) -> bool:
    """Return whether a run's last fifth of rounds has all that a table may show of it.

    Not if an earlier round's accuracy ends the run, is kept, or is what later ones are divided by.
    """
    run = config.run
    return not (run.early_stopping or run.keep_best or "local" in config.method.spec.kinds)


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
        printed = row.printed.get(column.name)
        number, *spread = printed if isinstance(printed, list) else [printed]
        metric = row.metric or column.metric or table.metric
        cells.append(PlannedCell(row, column, metric, runs, number, spread[0] if spread else None))
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

    @property
    def command(self) -> str:
        """The command that makes the table."""
        seeds = ",".join(map(str, self.seeds))
        words = [f"fedhet table {FIELD} --size {self.size} --seeds {seeds}"]
        if set(self.methods) != set(all_methods()[0]):
            words.append(f"--methods {','.join(self.methods)}")
        return " ".join([*words, *as_options(self.over)])


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


def about(plan: Plan | FieldPlan, finished: int) -> str:
    """Return a line on a table's size, its seeds, and how many of its runs are finished."""
    says = plan.table.sizes[plan.size].says
    runs = f"{finished} of {len(plan.runs)} runs are finished"
    return f"Size {plan.size}: {says} {runs}, seeds {', '.join(map(str, plan.seeds))}."
