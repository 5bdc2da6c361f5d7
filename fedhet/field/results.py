"""Collects what the runs of the table of all methods have measured, and ranks the methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import pandas as pd

from fedhet.field.plan import Cell, FieldCell, FieldPlan
from fedhet.field.ranks import Ranking, ranked
from fedhet.methods.registry import find_method
from fedhet.report.run import Run, load_run
from fedhet.runs.records import NAN, PROTOCOLS
from fedhet.runs.units import position

KINDS = {"personal": ("private", "global", "server"), "common": ("global", "server", "private")}
"""Whose accuracy is a method's under a protocol: the first kind of model that it has."""
CEILING = "central"
SHARE = 0.9
"""The share of the ceiling's accuracy whose cost is told."""
ACCURACIES = ("personal", "worst client", "common", "common, own models")
EVERYWHERE = "all"
"""The scope of the ranks over all architectures."""
Value = float | int | str


@dataclass(frozen=True)
class FieldResults:
    """The table of all methods, as far as its runs have finished."""

    plan: FieldPlan
    runs: pd.DataFrame
    """A row for each finished run: method, architectures, split, seed, and what it measured."""

    @property
    def finished(self) -> int:
        """The number of finished runs."""
        return len(self.runs)

    def by_seed(self, method: str, cell: Cell, measure: str) -> pd.Series:
        """Return a measure of a method in a cell, by seed."""
        found = self.runs
        if found.empty:
            return pd.Series(dtype=float)
        rows = (found["method"] == method) & _in_cell(found, cell)
        return found[rows].set_index("seed")[measure].astype(float)

    @property
    def ranked_methods(self) -> list[str]:
        """The methods that compete: all but those that need all data in one place."""
        return [name for name in self.plan.methods if not find_method(name).spec.simulation_only]

    @property
    def scopes(self) -> dict[str, list[Cell]]:
        """The cells over which methods are ranked: all, and those of each of the architectures."""
        names = [line.name for line in self.plan.table.architectures]
        each = {name: [cell for cell in self.plan.cells if cell[0] == name] for name in names}
        return {EVERYWHERE: self.plan.cells, **each}

    @cached_property
    def rankings(self) -> Mapping[tuple[str, str], Ranking]:
        """The ranks by protocol and scope, of the methods that have run in all its cells."""
        found = {
            (protocol, scope): ranked(self._means(protocol, cells), len(self.plan.seeds))
            for protocol in PROTOCOLS
            for scope, cells in self.scopes.items()
        }
        return {place: ranking for place, ranking in found.items() if ranking is not None}

    def _means(self, protocol: str, cells: Sequence[Cell]) -> pd.DataFrame:
        """Return the means over seeds [cells, methods]; only a method with all its seeds counts."""
        count = len(self.plan.seeds)
        means = {
            method: [
                values.mean() if values.count() == count else NAN
                for cell in cells
                for values in [self.by_seed(method, cell, protocol)]
            ]
            for method in self.ranked_methods
        }
        return pd.DataFrame(means, index=pd.MultiIndex.from_tuples(cells))


def _in_cell(runs: pd.DataFrame, cell: Cell) -> pd.Series:
    return (runs["architectures"] == cell[0]) & (runs["split"] == cell[1])


def collect(plan: FieldPlan) -> FieldResults:
    """Return the results of a plan's finished runs. Raises StateError for a damaged run."""
    rows: list[dict[str, Value]] = []
    done = list(_finished(plan))
    ceilings = {
        (each.cell, seed): _accuracies(_run(path))
        for each, seed, path in done
        if each.method == CEILING
    }
    for each, seed, path in done:
        run = _run(path)
        found = _measured(run, ceilings.get((each.cell, seed), {}))
        place: dict[str, Value] = {"architectures": each.cell[0], "split": each.cell[1]}
        rows.append({"method": each.method, **place, "seed": seed, **found})
    return FieldResults(plan, pd.DataFrame(rows))


def _finished(plan: FieldPlan) -> Iterator[tuple[FieldCell, int, Path]]:
    for each in plan.every:
        for seed, run in each.runs.items():
            if run.finished:
                yield each, seed, run.directory


@lru_cache(maxsize=4096)
def _run(path: Path) -> Run:
    """Return a finished run, which does not change any more."""
    return load_run(path)


def kind_of(run: Run, protocol: str) -> str:
    """Return the kind of model whose accuracy is the method's under a protocol; "" without any."""
    kinds = sorted(run.kinds(protocol), key=lambda kind: position(kind, KINDS[protocol]))
    return next(iter(kinds), "")


def _measured(run: Run, ceiling: Mapping[str, Value]) -> dict[str, Value]:
    """Return all that is told of a run: accuracies, costs, costs up to a share of the ceiling."""
    federated = not find_method(run.method).spec.simulation_only
    sent = run.totals["bytes_up"] + run.totals["bytes_down"]
    costs: dict[str, Value] = {
        "bytes": float(sent) if federated else NAN,
        "seconds": float(run.totals["seconds"]),
        "simulated seconds": float(run.costs["clock"].iloc[-1]),
        "memory": run.summary.peak_memory_mb * 1e6 if run.summary else NAN,
    }
    return {**_accuracies(run), **costs, **_until(run, ceiling, federated=federated)}


def _accuracies(run: Run) -> dict[str, Value]:
    personal, common = (kind_of(run, protocol) for protocol in PROTOCOLS)
    own = run.last("personal", personal)
    return {
        "personal": own.mean,
        "worst client": own.worst,
        "common": run.last("common", common).mean,
        "common, own models": run.last("common", personal).mean,
        "personal model": personal,
        "common model": common,
    }


def _until(run: Run, ceiling: Mapping[str, Value], *, federated: bool) -> dict[str, Value]:
    """Return bytes and seconds until a model first reaches its share of the ceiling's accuracy."""
    found: dict[str, Value] = {}
    elapsed = run.costs["clock"] if run.has_clock else run.costs["seconds"].cumsum()
    for protocol in PROTOCOLS:
        means = run.curve(protocol, kind_of(run, protocol))["mean"]
        reached = means.index[means >= SHARE * float(ceiling.get(protocol, NAN))]
        first = reached[0] if len(reached) else None
        sent = NAN if first is None else float(run.costs["bytes"][first])
        found[f"bytes to 90 %, {protocol}"] = sent if federated else NAN
        found[f"time to 90 %, {protocol}"] = NAN if first is None else float(elapsed[first])
    return found
