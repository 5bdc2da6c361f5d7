"""Accuracy of every method with its default settings, against local training and a related method.

    python -m benchmarks.defaults [--methods felo,velo] [--data digits-10] [--seeds 0,1,2]
        [--out runs/defaults] [--jobs 1]

The clients, their data, their models, and the number of epochs are equal for the three runs of a
row; the related method has its own models if it does not support these. The score is the method's
headline score. Finished runs are kept, so that the same command continues. Run this again when a
default changes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd

from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.experiments.making import Wanted, make_runs
from fedhet.experiments.plan import PlannedRun, Values, each_once, finished_run, seeded
from fedhet.methods.registry import shipped_names
from fedhet.report.differences import Difference, paired_difference, spread_of
from fedhet.report.tables import MARK, Cell, Cells, markdown
from fedhet.runs.directory import make_directory
from fedhet.runs.units import ABSENT, plus_minus

RELATED = {
    "cofed": "ds-fl",
    "cronus": "fedmd",
    "ditto": "pfedme",
    "ds-fl": "fedmd",
    "fccl": "fedmd",
    "fd": "fedproto",
    "fedavg": "lg-fedavg",
    "fedbn": "fedavg",
    "feddf": "fedavg",
    "fedgems": "fedmd",
    "fedgen": "fedavg",
    "fedgh": "fedproto",
    "fedgkt": "fedgems",
    "fedhe": "fd",
    "fedkd": "fml",
    "fedmd": "ds-fl",
    "fedmrl": "fml",
    "fedper": "fedavg",
    "fedprox": "fedavg",
    "fedproto": "fedhe",
    "fedrep": "fedper",
    "fedtgp": "fedproto",
    "fedtype": "fml",
    "felo": "fedavg",
    "fml": "fedkd",
    "heterofl": "felo",
    "kt-pfl": "fedmd",
    "lg-fedavg": "fedper",
    "pfedbayes": "pfedme",
    "pfedme": "fedavg",
    "rhfl": "fedmd",
    "um-pfssl": "fedper",
    "velo": "felo",
}
"""The method that each method is compared with. Methods for adapters, and those that need all data
in one place, are not in the table."""
DATA = {
    "digits-10": {"data.dataset": "digits", "clients": 10},
    "digits-20": {"data.dataset": "digits", "clients": 20},
    "table-10": {"data.dataset": "breast-cancer", "clients": 10},
}
"""Settings of the data, by name. Ten clients are the default."""
BASELINE = "local"


@dataclass(frozen=True)
class Row:
    """A method on some data, with the runs of the method, of local training, and of a relative."""

    method: str
    data: str
    ours: Sequence[PlannedRun]
    local: Sequence[PlannedRun]
    related: Sequence[PlannedRun]
    """Empty if the related method does not support the data."""


def main() -> None:
    """Execute the missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", default=",".join(RELATED))
    parser.add_argument("--data", default=",".join(DATA))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print finished rows only")
    given = parser.parse_args()
    methods, places = given.methods.split(","), given.data.split(",")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    assert set(methods) <= RELATED.keys() <= set(shipped_names())
    make_directory(given.out)
    rows = [*planned(methods, places, seeds, given.out)]
    if not given.show:
        runs = [run for row in rows for run in (*row.ours, *row.local, *row.related)]
        by_seed = sorted(each_once(runs), key=lambda run: seeds.index(int(str(run.values["seed"]))))
        wanted = Wanted("tiny", seeds, given.out, {}, jobs=given.jobs)
        for name, fault in make_runs("defaults", by_seed, wanted).items():
            print(f"{name}: {fault}")
    print(markdown(table(rows)))


def planned(
    methods: Sequence[str], places: Sequence[str], seeds: Sequence[int], out: Path
) -> Iterator[Row]:
    """Yield the rows that can run, and print why other rows cannot."""
    for place, method in product(places, methods):
        values: Values = {"method": method, "engine.backend": "inline", **DATA[place]}
        try:
            run = resolve(values).run
        except SettingsError as error:
            print(f"{method}, {place}: {error}")
            continue
        data = {"data.public-fraction": run.data.public_fraction}
        data |= {"data.labeled-alpha": run.data.labeled_alpha} if run.data.labeled_alpha else {}
        pool = {"models.pool": [*run.models.pool]}
        related: Values = {**values, **data, **pool, "method": RELATED[method]}
        if run.data.labeled_alpha:  # As in the papers, its relatives also use unlabeled samples.
            related["training.semi"] = "fixmatch"
        runs = [values, {**values, **data, **pool, "method": BASELINE}, supported(related)]
        label = f"{method}, {place}"
        ours, local, other = (
            [*seeded(label, each, seeds, out).values()] if each else [] for each in runs
        )
        yield Row(method, place, ours, local, other)


def supported(values: Values) -> Values:
    """Return settings that the method supports: the given ones, or with its own models."""
    for left_out in ((), ("models.pool",)):
        chosen = {name: value for name, value in values.items() if name not in left_out}
        try:
            resolve(chosen)
        except SettingsError:
            continue
        return chosen
    return {}


def table(rows: Sequence[Row]) -> Cells:
    """Return the table of the finished rows, in percent and percentage points."""
    shown = [row for row in rows if all(run.finished for run in (*row.ours, *row.local))]
    columns: dict[str, list[Cell]] = {
        title: []
        for title in ("data", "method", "score", "accuracy", "- local", "related", "- related")
    }
    for row in shown:
        ours, protocol, kind = scores(row.ours, "")
        local, *_ = scores(row.local, protocol)
        spread = spread_of(ours)
        columns["data"].append(Cell(row.data))
        columns["method"].append(Cell(row.method))
        columns["score"].append(Cell(f"{protocol}, {kind}"))
        columns["accuracy"].append(Cell(plus_minus(spread.mean, spread.std, 1), spread.mean))
        columns["- local"].append(difference(ours, local, row.ours, protocol))
        is_known = row.related and all(run.finished for run in row.related)
        columns["related"].append(Cell(RELATED[row.method] if is_known else ABSENT))
        columns["- related"].append(
            difference(ours, scores(row.related, protocol)[0], row.ours, protocol)
            if is_known
            else Cell(ABSENT, math.nan)
        )
    return Cells({title: [*cells] for title, cells in columns.items()})


def scores(runs: Sequence[PlannedRun], protocol: str) -> tuple[pd.Series, str, str]:
    """Return the headline scores in the last round in percent, by seed, and what they measure.

    An empty `protocol` stands for the method's headline protocol.
    """
    by_seed = {}
    kind = ""
    for planned_run in runs:
        run = finished_run(planned_run.directory)
        protocol = protocol or run.headline
        kind = next(iter(run.kinds(protocol)), "")
        by_seed[planned_run.values["seed"]] = 100 * run.last(protocol, kind).mean
    return pd.Series(by_seed), protocol, kind


def difference(
    ours: pd.Series, theirs: pd.Series, runs: Sequence[PlannedRun], protocol: str
) -> Cell:
    """Return the mean paired difference in points, with its standard error."""
    tested = []
    for planned_run in runs:
        run = finished_run(planned_run.directory)
        tested.append(run.test_samples(protocol, next(iter(run.kinds(protocol)), "")))
    known = [count for count in tested if count is not None]
    gain: Difference = paired_difference(ours, theirs, min(known, default=None), 100.0)
    text = f"{gain.mean:+.1f} ± {gain.se:.1f}".replace("-", "\N{MINUS SIGN}")
    return Cell(f"{text}{MARK if gain.is_clear else ''}", gain.mean)


if __name__ == "__main__":
    main()
