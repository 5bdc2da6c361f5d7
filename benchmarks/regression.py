"""Errors of the methods that support regression, relative to local training.

    python -m benchmarks.regression --out DIR [--tasks diabetes,signal] [--methods fml,fedmd]
        [--seeds 1,2,3] [--tables]

The three sites have different architectures, or the first architecture if a method requires a
single one. The sites' targets differ (Dirichlet 0.5 over tenths of the target), and a fifth of the
training rows is public. The tasks are scikit-learn's diabetes data; its `make_friedman1`, because
its California housing data must be downloaded; the frequency of a noisy wave in two channels; and
the total area of the disks in an image of 16 x 16 pixels.

A cell is the relative difference between the method's RMSE and the RMSE of `local` in percent: the
mean of the paired differences over the seeds, with its standard error. The RMSE is the mean over
the sites under the method's headline protocol, after the last round. Existing runs in DIR are
reused, so that the script can be stopped and restarted; with --tables, no run is executed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes, make_friedman1

from benchmarks.malicious import run
from benchmarks.timing import mean_and_error
from fedhet.base.seeding import numpy_rng
from fedhet.config.resolve import Config, resolve
from fedhet.data.spec import Dataset, Split
from fedhet.data.tasks import Regression
from fedhet.methods.registry import find_method, method_names
from fedhet.runs.directory import read_records
from fedhet.runs.measures import shown_scores

ROUNDS = 10
LEFT_OUT = {
    "fedlora": "needs a pretrained encoder",
    "fedsa": "needs a pretrained encoder",
    "fedbn": "equals FedAvg without batch norms",
}
Samples = tuple[NDArray[np.float64], NDArray[np.float64]]


def _diabetes() -> Samples:
    x, y = load_diabetes(return_X_y=True)
    order = numpy_rng(0, "diabetes").permutation(len(x))
    return x[order] / x.std(0), y[order]


def _friedman() -> Samples:
    x, y = make_friedman1(1200, noise=1.0, random_state=0)
    return (x - 0.5) * np.sqrt(12), y


def _signal() -> Samples:
    """Return waves [N, 2, 64] with noise, and their numbers of periods."""
    rng = numpy_rng(0, "waves")
    periods, start = rng.uniform(2, 8, 900), rng.uniform(0, 2 * np.pi, (900, 1))
    phase = 2 * np.pi * periods[:, None] * np.linspace(0, 1, 64) + start
    x = np.stack([np.sin(phase), np.cos(phase)], 1)
    return x + rng.normal(0, 0.5, x.shape), periods


def _image() -> Samples:
    """Return images [N, 1, 16, 16] of up to three disks with noise, and the disks' total area."""
    rng, (row, column) = numpy_rng(0, "disks"), np.mgrid[:16, :16]
    images, areas = [], []
    for _ in range(900):
        disks = np.zeros((16, 16), bool)
        for _ in range(rng.integers(1, 4)):
            (a, b), radius = rng.uniform(3, 13, 2), rng.uniform(1.5, 4)
            disks |= (row - a) ** 2 + (column - b) ** 2 <= radius**2
        images.append(disks * 1.0 + rng.normal(0, 0.3, disks.shape))
        areas.append(float(disks.sum()))
    return np.stack(images)[:, None], np.array(areas)


MADE: dict[str, tuple[str, Callable[[], Samples], tuple[str, ...]]] = {
    "diabetes": ("table", _diabetes, ("mlp", "mlp2", "mlp3")),
    "friedman": ("table", _friedman, ("mlp", "mlp2", "mlp3")),
    "signal": ("signal", _signal, ("signal-cnn2", "signal-cnn3", "signal-gru")),
    "image": ("image", _image, ("cnn2", "cnn3", "mlp")),
}
"""Kind of samples, function that creates the samples, and architectures, by task."""


def dataset(name: str) -> Dataset:
    """Return the dataset of a task; the last third is the common test set."""
    kind, make, _ = MADE[name]
    x, y = make()
    count = 2 * len(x) // 3
    mean, deviation = float(y[:count].mean()), float(y[:count].std())
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor((y[:, None] - mean) / deviation, dtype=torch.float32)
    train, test = (Split(inputs[rows], targets[rows])
                   for rows in (slice(count), slice(count, None)))  # fmt: skip
    task, scaled = Regression((mean,), (deviation,)), kind == "image"
    return Dataset(name, train, test, ("target",), kind=kind, scaled_images=scaled, task=task)


def diabetes() -> Dataset:
    """Return the task `diabetes`."""
    return dataset("diabetes")


def friedman() -> Dataset:
    """Return the task `friedman`."""
    return dataset("friedman")


def signal() -> Dataset:
    """Return the task `signal`."""
    return dataset("signal")


def image() -> Dataset:
    """Return the task `image`."""
    return dataset("image")


def config_of(method: str, task: str, seed: int, *, one: bool = False) -> Config:
    """Return the settings of a run, with one architecture if `one` is set or required."""
    spec, pool = find_method(method).spec, MADE[task][2]
    changes: dict[str, object] = {
        "method": method,
        "seed": seed,
        "clients": 3,
        "rounds": ROUNDS,
        "evaluate-every": ROUNDS,
        "data.dataset": f"python:benchmarks.regression:{task}",
        "data.task": "regression",
        "data.alpha": 0.5,
        "data.public-fraction": 0.2,
        "training.local-epochs": 2,
        "engine.backend": "inline",
        "engine.device": "cpu",
        "engine.precision": "float32",
        "models.pool": list(pool[:1] if one or spec.one_model or spec.submodels else pool),
    }
    for name in spec.model_settings:  # models shared by clients or used by the server
        changes[f"{method}.{name.replace('_', '-')}"] = pool[0]
    return resolve(changes)


def place(out: Path, method: str, task: str, seed: int, *, one: bool = False) -> Path:
    """Return the directory of a run."""
    return out / f"{method}{'-one' if one else ''}-{task}-{seed}"


def error_of(directory: Path, protocol: str, kind: str = "") -> tuple[float, str] | None:
    """Return the mean RMSE after the last round and the kind of model, or None without a run."""
    if not (directory / "summary.json").exists():
        return None
    _, scores = shown_scores(read_records(directory / "metrics.jsonl")[0][-1], protocol)
    kind = kind or next(iter(scores))
    return scores[kind].mean, kind


def cell(out: Path, method: str, task: str, seeds: Sequence[int]) -> str:
    """Format the mean paired difference to `local` in percent, with its standard error."""
    spec, found = find_method(method).spec, []
    for seed in seeds:
        one = spec.one_model or spec.submodels
        own = error_of(place(out, method, task, seed), spec.headline)
        alone = error_of(place(out, "local", task, seed, one=one), spec.headline)
        if own and alone:
            found.append(100 * (own[0] / alone[0] - 1))
    if len(found) < len(seeds):
        return "–"
    mean, error = mean_and_error(found)
    return f"{mean:+.1f} ± {error:.1f}"


def table(out: Path, tasks: Sequence[str], methods: Sequence[str], seeds: Sequence[int],
          ) -> Iterator[str]:  # fmt: skip
    """Yield the lines of the table in Markdown."""
    yield f"| method | protocol | {' | '.join(tasks)} |"
    yield "| --- " * (2 + len(tasks)) + "|"
    for protocol in ("personal", "common"):
        for one, label in ((False, "three architectures"), (True, "one architecture")):
            cells = []
            for task in tasks:
                errors = [error_of(place(out, "local", task, seed, one=one), protocol)
                          for seed in seeds]  # fmt: skip
                known = [error[0] for error in errors if error]
                cells.append(f"{np.mean(known):.3g}" if known else "–")
            yield f"| RMSE of `local`, {label} | {protocol} | {' | '.join(cells)} |"
    for method in methods:
        cells = [cell(out, method, task, seeds) for task in tasks]
        yield f"| `{method}` | {find_method(method).spec.headline} | {' | '.join(cells)} |"


def main() -> None:
    """Execute the runs that do not exist, and print the table."""
    able = [m for m in method_names()
            if "regression" in find_method(m).spec.tasks and m not in LEFT_OUT]  # fmt: skip
    words = argparse.ArgumentParser(description="regression against training alone")
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--tasks", default=",".join(MADE))
    words.add_argument("--methods", default=",".join(able))
    words.add_argument("--seeds", default="1,2,3")
    words.add_argument("--tables", action="store_true")
    chosen = words.parse_args()
    tasks, methods = chosen.tasks.split(","), chosen.methods.split(",")
    seeds: list[int] = list(map(int, chosen.seeds.split(",")))
    for task in () if chosen.tables else tasks:
        for seed in seeds:
            run(config_of("local", task, seed, one=True),
                place(chosen.out, "local", task, seed, one=True))  # fmt: skip
            for method in ("local", *methods):
                run(config_of(method, task, seed), place(chosen.out, method, task, seed))
                print(task, seed, method, flush=True)
    compared = [method for method in methods if method != "local"]
    print("\n".join(table(chosen.out, tasks, compared, seeds)))


if __name__ == "__main__":
    main()
