"""Accuracy of every method with its default settings, against local training and a related method.

    python -m benchmarks.defaults [--methods felo,velo] [--data digits-10] [--seeds 0,1,2]
        [--data-dir DIR] [--out runs/defaults] [--jobs 1] [--write]

The clients, their data, their models, and the number of epochs are equal for the three runs of a
row; the related method has its own models if it does not support these. Methods that permit
different models have small networks, because the default models include two ResNets, with which
the table takes days. The score is the method's headline score. Finished runs are kept, so that the
same command continues. --write stores their scores in benchmarks/measured/defaults.json, and the
rows of docs/defaults.md, which `python -m tools.results` writes. A stored score is used again
until one of the settings that affect it changes, so run this again when a default changes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from fedhet.base.disk import write_text
from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.experiments.making import Wanted, make_runs
from fedhet.experiments.plan import PlannedRun, Values, each_once, finished_run, seeded
from fedhet.methods.registry import shipped_names
from fedhet.report.differences import paired_difference, spread_of
from fedhet.report.tables import MARK, Cell, Cells, markdown
from fedhet.runs.directory import make_directory
from fedhet.runs.records import PROTOCOLS
from fedhet.runs.units import ABSENT, plus_minus
from fedhet.settings.run import PLACE

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
    "fedgkt": "fd",
    "fedhe": "fd",
    "fedkd": "fml",
    "fedl2g": "fedproto",
    "fedmd": "ds-fl",
    "fedmrl": "fml",
    "fedper": "fedavg",
    "fedproto": "fedhe",
    "fedprox": "fedavg",
    "fedre": "fedgh",
    "fedrep": "fedper",
    "fedrolex": "heterofl",
    "fedtgp": "fedproto",
    "fedtype": "fml",
    "felo": "fedavg",
    "fml": "fedkd",
    "heterofl": "felo",
    "kt-pfl": "fedmd",
    "lg-fedavg": "fedper",
    "moon": "fedprox",
    "pfedbayes": "pfedme",
    "pfedme": "fedavg",
    "rhfl": "fedmd",
    "scaffold": "fedavg",
    "um-pfssl": "fedper",
    "velo": "felo",
}
"""The method that each method is compared with. Methods for adapters, and those that need all data
in one place, are not in the table."""
POOL = "cnn2,cnn4,mlp"
TITLES = {
    "digits-10": "Digits, ten clients",
    "digits-20": "Digits, 20 clients",
    "table-10": "A table: breast cancer, ten clients",
    "fashion-10": "1,500 images of Fashion-MNIST, ten clients",
}
"""Titles of the sections of docs/defaults.md."""
DATA: dict[str, dict[str, str | int]] = {
    "digits-10": {"data.dataset": "digits", "clients": 10, "models.pool": POOL},
    "digits-20": {"data.dataset": "digits", "clients": 20, "models.pool": POOL},
    "table-10": {"data.dataset": "breast-cancer", "clients": 10},
    "fashion-10": {
        "data.dataset": "fashion-mnist",
        "data.max-samples": 1500,
        "data.max-test-samples": 500,
        "clients": 10,
        "models.pool": "cnn2,mlp",
    },
}
"""Settings of the data and models, by name. Ten clients are the default."""
COLUMNS = ("method", "score", "accuracy", "- local", "related", "- related")
BASELINE = "local"
ESSENTIAL = {"data", "models", "training", "rounds", "clients", "method"}
"""Settings that affect a result. The method's settings are added to them."""
RECORDS = Path(__file__).parent / "measured" / "defaults.json"


@dataclass(frozen=True)
class Result:
    """Scores of a finished run in the last round."""

    headline: str
    """Protocol of the headline score, such as `personal`."""
    scores: dict[str, list[object]]
    """By protocol: the main kind of model, its mean score in percent, and its test samples."""


@cache
def stored() -> dict[str, Result]:
    """Return the results in benchmarks/measured/defaults.json, by key."""
    return {key: Result(**result) for key, result in read_records()["scores"].items()}


def read_records() -> dict[str, Any]:
    """Return the stored scores by key, and the rows of docs/defaults.md."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {"scores": {}, "rows": []}


def shown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a section with a Markdown table for each data."""
    sections = []
    for place, title in TITLES.items():
        if not (own := [row for row in rows if row["data"] == place]):
            continue
        header = " | ".join(column.replace("-", "\N{MINUS SIGN}") for column in COLUMNS)
        lines = [f"| {header} |", "| --- | --- | ---: | ---: | --- | ---: |"]
        for row in own:
            link = f"[{row['method']}](methods/{row['method']}.md)"
            lines.append(f"| {' | '.join([link, *(row[column] for column in COLUMNS[1:])])} |")
        made = sorted({row["made"] for row in own})
        command = f"`python -m benchmarks.defaults --data {place}"
        if DATA[place]["data.dataset"] == "fashion-mnist":
            command += f" --methods {','.join(row['method'] for row in own)} --data-dir DIR"
        about = f"({command}`, {' to '.join((made[0], made[-1])[: len(made)])}.)"
        sections.append("\n".join([f"## {title}\n", f"{about}\n", *lines, ""]))
    return "\n".join(sections)


def key_of(run: PlannedRun) -> str:
    """Return the key of a run's result: its label, seed, and a digest of its settings."""
    config = run.config
    kept = {k: v for k, v in config.flat().items() if k.partition(".")[0] in ESSENTIAL}
    kept |= {name: config.flat()[name] for name in run.values}
    kept = {name: value for name, value in kept.items() if name not in {*PLACE, "data.data-dir"}}
    own = config.method_settings.flat()
    text = json.dumps([kept, own], sort_keys=True, default=str)
    name = f"{run.values['method']}, {run.values['data.dataset']}, seed {run.values['seed']}"
    return f"{name}, {hashlib.sha256(text.encode()).hexdigest()[:10]}"


def result_of(run: PlannedRun) -> Result | None:
    """Return a run's result if the run has finished, or if its result is stored."""
    if not run.finished:
        return stored().get(key_of(run))
    finished = finished_run(run.directory)
    scores: dict[str, list[object]] = {}
    for protocol in PROTOCOLS:
        if kind := next(iter(finished.kinds(protocol)), ""):
            mean = round(100 * finished.last(protocol, kind).mean, 3)
            scores[protocol] = [kind, mean, finished.test_samples(protocol, kind)]
    return Result(finished.headline, scores)


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
    """Execute the missing runs, print the table, and store the results if requested."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", default=",".join(RELATED))
    parser.add_argument("--data", default=",".join(DATA))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data-dir", default="", help="directory of Fashion-MNIST's files")
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print finished rows only")
    parser.add_argument("--write", action="store_true", help="store the scores of finished runs")
    given = parser.parse_args()
    methods, places = given.methods.split(","), given.data.split(",")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    assert set(methods) <= RELATED.keys() <= set(shipped_names())
    make_directory(given.out)
    if given.data_dir:
        DATA["fashion-10"]["data.data-dir"] = given.data_dir
    rows = [*planned(methods, places, seeds, given.out)]
    runs = each_once(run for row in rows for run in (*row.ours, *row.local, *row.related))
    if not given.show:
        missing = [run for run in runs if result_of(run) is None]
        missing.sort(key=lambda run: seeds.index(int(str(run.values["seed"]))))
        wanted = Wanted("tiny", seeds, given.out, {}, jobs=given.jobs)
        for name, fault in make_runs("defaults", missing, wanted).items():
            print(f"{name}: {fault}")
    made = table(rows)
    if given.write:
        finished = {key_of(run): result_of(run) for run in runs if run.finished}
        known = {key: asdict(result) for key, result in (stored() | finished).items() if result}
        kept = {(row["data"], row["method"]): row for row in read_records()["rows"]}
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        for number in range(len(made.rows)):
            row = {title: cells[number].text for title, cells in made.columns.items()}
            before = kept.get(key := (row["data"], row["method"]), {})
            kept[key] = row | {"made": before["made"] if before.items() >= row.items() else date}
        lines = [json.dumps(kept[key], ensure_ascii=False) for key in sorted(kept)]
        scored = [f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known)]
        parts = ",\n".join(lines), ",\n".join(scored)
        write_text(RECORDS, '{{"rows": [\n{}\n],\n"scores": {{\n{}\n}}}}\n'.format(*parts))
    print(markdown(made))


def planned(
    methods: Sequence[str], places: Sequence[str], seeds: Sequence[int], out: Path
) -> Iterator[Row]:
    """Yield the rows that can run, and print why other rows cannot."""
    for place, method in product(places, methods):
        values: Values = {"method": method, "engine.backend": "inline", **DATA[place]}
        if not (values := supported(values)):
            continue
        run = resolve(values).run
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
    """Return settings that the method supports: the given ones, or with its own models.

    If it supports neither, print why, and return no settings.
    """
    own = {name: value for name, value in values.items() if name != "models.pool"}
    for chosen in (values, own):
        try:
            resolve(chosen)
        except SettingsError as error:
            problem = error
        else:
            return chosen
    print(f"{values['method']}, {values['data.dataset']}: {problem}")
    return {}


def table(rows: Sequence[Row]) -> Cells:
    """Return the table of the finished rows, in percent and percentage points."""
    columns: dict[str, list[Cell]] = {title: [] for title in ("data", *COLUMNS)}
    for row in rows:
        ours, local, related = (results(runs) for runs in (row.ours, row.local, row.related))
        if not ours or not local:
            continue
        protocol = next(iter(ours.values())).headline
        spread = spread_of(scores(ours, protocol))
        kind, *_ = next(iter(ours.values())).scores[protocol]
        columns["data"].append(Cell(row.data))
        columns["method"].append(Cell(row.method))
        columns["score"].append(Cell(f"{protocol}, {kind}"))
        columns["accuracy"].append(Cell(plus_minus(spread.mean, spread.std, 1), spread.mean))
        columns["- local"].append(difference(ours, local, protocol))
        columns["related"].append(Cell(RELATED[row.method] if related else ABSENT))
        columns["- related"].append(
            difference(ours, related, protocol) if related else Cell(ABSENT, math.nan)
        )
    return Cells({title: [*cells] for title, cells in columns.items()})


def results(runs: Sequence[PlannedRun]) -> dict[int, Result]:
    """Return the results by seed, or nothing if one of them is missing."""
    known = {int(str(run.values["seed"])): result_of(run) for run in runs}
    return {seed: result for seed, result in known.items() if result} if all(known.values()) else {}


def scores(by_seed: Mapping[int, Result], protocol: str) -> pd.Series:
    """Return the mean scores under a protocol in percent, by seed."""
    return pd.Series({seed: result.scores[protocol][1] for seed, result in by_seed.items()})


def difference(ours: Mapping[int, Result], theirs: Mapping[int, Result], protocol: str) -> Cell:
    """Return the mean paired difference in points, with its standard error."""
    tested = [result.scores[protocol][2] for result in ours.values()]
    known = [float(str(count)) for count in tested if count is not None]
    pair = scores(ours, protocol), scores(theirs, protocol)
    gain = paired_difference(*pair, min(known, default=None), 100.0)
    text = f"{gain.mean:+.1f} ± {gain.se:.1f}".replace("-", "\N{MINUS SIGN}")
    return Cell(f"{text}{MARK if gain.is_clear else ''}", gain.mean)


if __name__ == "__main__":
    main()
