"""Accuracy that honest clients lose if one of five clients is malicious, by aggregation rule.

    python -m benchmarks.malicious --out DIR [--methods a,b] [--averages mean,filter]
        [--seeds 3,4,5] [--attacks none,flip] [--tables]

Every method trains small models on digits, without an attack and with one malicious client. This
client multiplies its replies by -1, 10 or 900, or alternately by 3 and -3, or lets them drift. In
the column "refused", its replies are so large that they are rejected. This shows how much accuracy
the client's data contributes. Existing runs in DIR are reused, so that the script can be stopped
and restarted. With --tables, no run is executed.

A cell is the loss of accuracy of the honest clients in percentage points, relative to the run with
the same seed that uses the mean and has no attack: the mean over the seeds, with its standard
error. If a method has several kinds of models, the cell shows the kind with the largest loss, under
the method's headline protocol.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.timing import mean_and_error
from fedhet.base.errors import FedhetError
from fedhet.config.resolve import Config, resolve
from fedhet.engines.simulate import simulate
from fedhet.kinds import IMAGE
from fedhet.methods.registry import find_method, method_names
from fedhet.server.attacks import malicious_clients
from fedhet.wire.contract import floating

CLIENTS, ROUNDS = 5, 5
ATTACKS: dict[str, dict[str, object]] = {
    "none": {},
    "refused": {"attack.kind": "scale", "attack.scale": 1e6},
    "x -1": {"attack.kind": "sign-flip"},
    "x 10": {"attack.kind": "scale", "attack.scale": 10.0},
    "alternating": {"attack.kind": "alternating", "attack.scale": 3.0},
    "drift": {"attack.kind": "drift", "attack.scale": 3.0},
    "x 900": {"attack.kind": "scale", "attack.scale": 900.0},
}
SMALL: dict[str, object] = {
    "clients": CLIENTS,
    "rounds": ROUNDS,
    "evaluate-every": ROUNDS,
    "data.alpha": 1.0,
    "training.local-epochs": 2,
    "engine.backend": "inline",
    "engine.device": "cpu",
    "engine.precision": "float32",
    "models.pool": ["cnn2", "mlp"],
}
OWN: dict[str, dict[str, object]] = {
    "cofed": {"rounds": 2},
    "fedgems": {"fedgems.server-model": "cnn2"},
    "um-pfssl": {"um-pfssl.warm-up": 5, "um-pfssl.passes": 3},
    "velo": {"velo.epochs": 10},
}


def config_of(method: str, attack: str, average: str, seed: int) -> Config:
    """Return the settings of a run. Raises SettingsError if the average is unsupported."""
    own = {**SMALL, **OWN.get(method, {}), **ATTACKS[attack]}
    if len(pool := find_method(method).spec.pool(IMAGE)) == 1:
        own["models.pool"] = list(pool)
    return resolve({**own, "method": method, "seed": seed, "defense.average": average})


def can_be_struck(method: str, attack: str) -> bool:
    """Return whether an attack can change a tensor in the replies of the method's clients."""
    return attack == "none" or (
        bool(floating(find_method(method).spec.replies)) and method != "central"
    )


def run(config: Config, directory: Path) -> None:
    """Execute a run unless it exists."""
    if (directory / "summary.json").exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.ExitStack() as without:
        for name in ("write_figures", "write_report"):
            without.enter_context(patch(f"fedhet.report.{name}", lambda run: None))
        simulate(config, directory)
    for name in ("checkpoints", "state", "tensorboard", "pool"):
        shutil.rmtree(directory / name, ignore_errors=True)


def place(out: Path, method: str, attack: str, average: str, seed: int) -> Path:
    """Return the directory of a run."""
    return out / f"{method}-{attack.replace(' ', '')}-{average}-{seed}"


def honest(out: Path, method: str, attack: str, average: str, seed: int) -> dict[str, float] | None:
    """Return honest clients' mean accuracy in percent by kind of model, or None without a run."""
    file = place(out, method, attack, average, seed) / "summary.json"
    if not file.exists():
        return None
    accuracy: dict[str, Any] = json.loads(file.read_text())["accuracy"]
    malicious = malicious_clients(seed, [f"client-{k}" for k in range(CLIENTS)], 1)
    found = accuracy[find_method(method).spec.headline]
    each = {
        kind: [v for n, v in of["per_client"].items() if n not in malicious]
        for kind, of in found.items()
    }
    return {kind: 100 * fmean(values) for kind, values in each.items() if values}


def losses(out: Path, method: str, attack: str, average: str, seeds: Sequence[int]) -> list[float]:
    """Return the loss of each seed in percentage points, for the kind with the largest loss."""
    pairs = [
        (honest(out, method, "none", "mean", seed), honest(out, method, attack, average, seed))
        for seed in seeds
    ]
    both = [(before, after) for before, after in pairs if before and after]
    kinds = set.intersection(*({*a} & {*b} for a, b in both)) if both else set()
    by_kind = [[before[kind] - after[kind] for before, after in both] for kind in sorted(kinds)]
    return max(by_kind, key=fmean, default=[])


def cell(values: Sequence[float]) -> str:
    """Format the mean of the losses, with its standard error."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return "{:.1f} ± {:.1f}".format(*mean_and_error([*values]))


def table(
    out: Path, methods: Sequence[str], averages: Sequence[str], seeds: Sequence[int]
) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    yield f"| method | average | {' | '.join(ATTACKS)} |"
    yield "|---|---|" + "---|" * len(ATTACKS)
    for method, average in product(methods, averages):
        cells = [cell(losses(out, method, attack, average, seeds)) for attack in ATTACKS]
        if any(each != "–" for each in cells):
            yield f"| `{method}` | {average} | {' | '.join(cells)} |"


def main() -> None:
    """Execute the missing runs, and print the table."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--methods", default=",".join(method_names()))
    words.add_argument("--averages", default="mean,filter")
    words.add_argument("--attacks", default=",".join(ATTACKS))
    words.add_argument("--seeds", default="3,4,5")
    words.add_argument("--tables", action="store_true")
    given = words.parse_args()
    methods, averages = given.methods.split(","), given.averages.split(",")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    wanted = [] if given.tables else product(seeds, given.attacks.split(","), averages, methods)
    for seed, attack, average, method in wanted:
        if can_be_struck(method, attack):
            with contextlib.suppress(FedhetError):
                config = config_of(method, attack, average, seed)
                run(config, place(given.out, method, attack, average, seed))
    print("\n".join(table(given.out, methods, averages, seeds)))


if __name__ == "__main__":
    main()
