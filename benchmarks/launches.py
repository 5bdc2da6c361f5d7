"""Kernel launches, copies and waits per training step on a GPU, by method.

    python -m benchmarks.launches [--before CHECKOUT] [--only felo,fedtype] [--lines 10]

The operations are counted on the simulated device of `benchmarks/pretended_gpu.py`, in a small run
with two clients, `cnn2` and batches of 16. All operations of the run, including evaluation and
states, are divided by the number of optimizer steps. A launch takes about 5 microseconds on the
host; a wait blocks the host until the device has finished all work. `--before` also counts the
operations of another checkout, and `--lines` prints the lines of the project with the most copies
and waits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
SETTINGS = {
    "clients": 2,
    "rounds": 2,
    "models.pool": ["cnn2"],
    "data.max-samples": 400,
    "data.max-test-samples": 100,
    "data.partition": "iid",
    "training.local-epochs": 2,
    "training.batch-size": 16,
    "engine.backend": "inline",
    "engine.device": "cuda",
    "engine.precision": "float32",
}
OWN: dict[str, dict[str, object]] = {
    "cofed": {"cofed.search": "none"},
    "fedgems": {"fedgems.server-model": "cnn2"},
    "fedtype": {"fedtype.proxy": "cnn2"},
    "fml": {"fml.meme": "cnn2"},
    "fedgkt": {"fedgkt.server-epochs": 1},
    "um-pfssl": {
        "models.pool": ["cnn2-dropout"], "um-pfssl.warm-up": 1, "um-pfssl.passes": 3,
    },
    "velo": {"velo.epochs": 3, "velo.min-separation": 0},
}  # fmt: skip
PROGRAM = """
import json, sys, tempfile
from pathlib import Path
sys.path.append(sys.argv[1])
import pretended_gpu
import fedhet.report
from fedhet.learning import training
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate
from fedhet.methods.registry import method_names

for name in ("write_figures", "write_report"):
    setattr(fedhet.report, name, lambda run: None)
steps, plain = [0], training.Optimization.step

def step(self, loss, *others):
    steps[0] += loss is not None
    return plain(self, loss, *others)

training.Optimization.step = step
for method, settings in json.load(sys.stdin).items():
    if method not in method_names():  # of a checkout from before it
        continue
    steps[0] = 0
    with tempfile.TemporaryDirectory() as folder, pretended_gpu.pretended() as gpu:
        simulate(resolve({"method": method, **settings}), Path(folder) / "run")
        counts = [[*key, times] for key, times in gpu.counts.items()]
    found = {"method": method, "steps": steps[0], "counts": counts}
    print("counted:" + json.dumps(found), flush=True)
"""
COLUMNS = ("launches", "to the device", "to the host", "waits")


def main() -> None:
    """Count the operations, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--lines", type=int, default=0)
    chosen = parser.parse_args()
    checkouts = [*([chosen.before.resolve()] if chosen.before else []), HERE]
    found = [counted(checkout, methods(chosen.only)) for checkout in checkouts]
    print("| method | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
    for method in found[-1]:
        each = [per_step(run[method]) for run in found if method in run]
        rows = [shown([row[column] for row in each], column) for column in COLUMNS]
        print(f"| {method} | " + " | ".join(rows) + " |")
        for line in worst(found[-1][method], chosen.lines):
            print(line)


def methods(only: str) -> dict[str, dict[str, object]]:
    """Return the settings of each method's run."""
    from fedhet.methods.registry import method_names

    names = only.split(",") if only else method_names()
    return {name: SETTINGS | OWN.get(name, {}) for name in names}


def counted(checkout: Path, runs: dict[str, dict[str, object]]) -> dict[str, dict[str, Any]]:
    """Execute the runs in a checkout, and return the counts by method."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(HERE / "benchmarks")],
        input=json.dumps(runs), text=True, capture_output=True, cwd="/", check=False,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    if ended.returncode:
        sys.stderr.write(ended.stderr)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("counted:")]
    rows = [json.loads(line.removeprefix("counted:")) for line in lines]
    return {row["method"]: row for row in rows}


def per_step(found: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of launches, copies and waits per optimizer step."""
    kinds = [kind for kind, _, _, times in found["counts"] for _ in range(times)]
    return {
        "launches": sum(kind != "up" for kind in kinds) / found["steps"],
        "to the device": sum(kind.startswith("up") for kind in kinds) / found["steps"],
        "to the host": sum(kind.startswith("down") for kind in kinds) / found["steps"],
        "waits": sum("wait" in kind for kind in kinds) / found["steps"],
    }


def shown(values: list[float], column: str) -> str:
    """Format the numbers of a table cell: before and after, or a single number."""
    digits = 0 if column == "launches" else 2
    return " → ".join(f"{value:.{digits}f}" for value in values)


def worst(found: dict[str, Any], most: int) -> list[str]:
    """Format the `most` lines of the project with the most copies and waits."""
    slow = sorted((row for row in found["counts"] if row[0] != "launch"), key=lambda row: -row[3])
    return [f"    {row[3]:6} {row[0]:14} {row[1]:22} {row[2]}" for row in slow[:most]]


if __name__ == "__main__":
    main()
