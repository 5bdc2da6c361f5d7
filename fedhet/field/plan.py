"""Plans the table of all methods: the runs of each cell, or why a method has none there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.field.declaration import NAME, Architectures, FieldTable
from fedhet.methods.registry import all_methods
from fedhet.papers.plan import PlannedRun, Values, as_options, layered, seeded
from fedhet.papers.source import Line, Size

Cell = tuple[str, str]
"""The names of the architectures and of the split."""


@dataclass(frozen=True)
class FieldCell:
    """A method on some architectures and a split: its runs by seed, or why it has none."""

    method: str
    cell: Cell
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
    def cells(self) -> list[Cell]:
        """The architectures and splits, in the table's order."""
        return list(_crossed(self.table))

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs: those of the first seed, then those of the second, and so on."""
        return [each.runs[s] for s in self.seeds for each in self.every if not each.refused]

    @property
    def command(self) -> str:
        """The command that makes the table."""
        seeds = ",".join(map(str, self.seeds))
        words = [f"fedhet table {NAME} --size {self.size} --seeds {seeds}"]
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
    """Return the plan of the table in a size, with its runs in the folder `out`.

    `over` are settings that all runs have instead of the table's. Raises SettingsError for a method
    that does not exist, and if no method can run in any cell.
    """
    every = [
        _cell(method, table, size, (architectures, split), seeds, out, over or {})
        for method in methods
        for architectures, split in product(table.architectures, table.splits)
    ]
    if all(each.refused for each in every):
        raise SettingsError(every[0].refused)
    return FieldPlan(table, size, tuple(seeds), tuple(methods), tuple(every), over or {})


def _crossed(table: FieldTable) -> Iterator[Cell]:
    for architectures, split in product(table.architectures, table.splits):
        yield architectures.name, split.name


def _cell(
    method: str,
    table: FieldTable,
    size: Size,
    lines: tuple[Architectures, Line],
    seeds: Sequence[int],
    out: Path,
    over: Mapping[str, object],
) -> FieldCell:
    architectures, split = lines
    changes = [table.sizes[size], *architectures.of(method, size), *split.changes(size)]
    values, refused = _fitted(layered(changes, over, method))
    label = f"{method}, {architectures.name}, {split.name}"
    runs = {} if refused else seeded(label, values, seeds, out)
    return FieldCell(method, (architectures.name, split.name), runs, refused)


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
