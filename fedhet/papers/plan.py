"""Plans a table of a paper: the runs that its cells need, and their directories."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic.fields import FieldInfo

from fedhet.config.sources import of_method, read_preset
from fedhet.methods.registry import find_method
from fedhet.papers.source import Change, Line, PaperTable, Row, Size
from fedhet.runs.statistics import tail_begins
from fedhet.settings.run import PLACE, RunSettings
from fedhet.settings.schema import is_machine, plain
from fedhet.settings.text import as_text

if TYPE_CHECKING:
    from fedhet.config.resolve import Config

Values = dict[str, object]


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
        from fedhet.config.resolve import resolve  # PyTorch: a list of the runs needs none

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
    """Return the plan of a table in a size, with its runs in the folder `out`.

    A run's directory is named after all of its settings, so that tables share the runs that they
    have in common. `over` are settings that all runs have instead of the table's. Raises
    SettingsError for presets and methods that do not exist.
    """
    cells = tuple(
        _cell(table, row, column, size, seeds, out, over or {})
        for row in table.rows_in(size)
        for column in table.columns_in(size)
    )
    return Plan(name, table, size, tuple(seeds), cells, over or {})


def _cell(
    table: PaperTable,
    row: Row,
    column: Line,
    size: Size,
    seeds: Iterable[int],
    out: Path,
    over: Mapping[str, object],
) -> PlannedCell:
    values = layered(table.changes(row, column, size), over, row.method)
    runs = seeded(f"{row.name}, {column.name}", values, seeds, out)
    printed = row.printed.get(column.name)
    both = printed if isinstance(printed, list) else [printed]
    metric = row.metric or column.metric or table.metric
    return PlannedCell(row, column, metric, runs, both[0], both[1] if len(both) > 1 else None)


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
    """Return a run of these settings for each seed, in the folder `out`."""
    folder = out / f"{values['method']}-{_digest(values)}"
    return {
        seed: PlannedRun(label, {**values, "seed": seed}, folder / f"seed-{seed}") for seed in seeds
    }


def _digest(values: Values) -> str:
    """Return a short name of what the settings compute, wherever and on whatever it runs.

    Settings at their defaults have no part in it, so that a new one leaves the names as they are.
    """
    known = RunSettings.fields()
    every = known | find_method(str(values["method"])).settings()
    kept = {
        name: value
        for name, value in values.items()
        if not (name in known and is_machine(known[name])) and not _is_default(value, every[name])
    }
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _is_default(value: object, info: FieldInfo) -> bool:
    return bool(plain(value) == plain(info.get_default(call_default_factory=True)))
