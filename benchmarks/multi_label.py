"""Macro AUC of the methods that support multi-label classification, relative to local training.

    python -m benchmarks.multi_label --out DIR [--methods fml,fedmd] [--seeds 1,2,3] [--tables]

An image contains one to three of scikit-learn's handwritten digits of different classes, overlaid
at random positions in 12 x 12 pixels; its labels are the ten classes. Test images consist of digits
that are in no training image. A tenth of the labels of the training images is missing. The three
sites have different architectures, or the first architecture if a method requires a single one. The
labels of the sites differ (Dirichlet 0.5 over the rarest label), and a fifth of the training images
is public.

A cell is the paired difference to `local` of the macro AUC in percentage points: the mean over the
seeds, with its standard error. The AUC is the mean over the sites under the method's headline
protocol, after the last round. Existing runs in DIR are reused; with --tables, no run is executed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from sklearn.datasets import load_digits

from benchmarks.malicious import run
from benchmarks.regression import LEFT_OUT
from benchmarks.timing import mean_and_error
from fedhet.base.seeding import numpy_rng
from fedhet.config.resolve import Config, resolve
from fedhet.data.spec import Dataset, Split
from fedhet.data.tasks import MultiLabel
from fedhet.methods.registry import find_method, method_names
from fedhet.runs.directory import read_records
from fedhet.runs.measures import shown_scores

SIDE, TRAIN, TEST, ROUNDS = 12, 1500, 600, 10
POOL = ("cnn2", "cnn3", "mlp")


def overlaid_digits() -> Dataset:
    """Return the dataset of overlaid digits."""
    images, classes = load_digits(return_X_y=True)
    order = numpy_rng(0, "digits").permutation(len(images))
    splits = []
    for part, count in ((order[:1200], TRAIN), (order[1200:], TEST)):
        rng = numpy_rng(0, "overlaid", count)
        x = np.zeros((count, 1, SIDE, SIDE), np.float32)
        y = np.zeros((count, 10), np.float32)
        for row in range(count):
            for label in rng.choice(10, rng.integers(1, 4), replace=False):
                digit = images[rng.choice(part[classes[part] == label])].reshape(8, 8)
                top, left = rng.integers(0, SIDE - 7, 2)
                place = x[row, 0, top : top + 8, left : left + 8]
                np.maximum(place, digit / 8, out=place)
                y[row, label] = 1
        if count == TRAIN:
            y[rng.random(y.shape) < 0.1] = np.nan
        splits.append(Split(torch.from_numpy(x - 1), torch.from_numpy(y)))
    names = tuple(map(str, range(10)))
    name, task = "overlaid-digits", MultiLabel()
    train, test = splits
    return Dataset(name, train, test, names, kind="image", scaled_images=True, task=task)


def config_of(method: str, seed: int, *, one: bool = False) -> Config:
    """Return the settings of a run, with one architecture if `one` is set or required."""
    spec = find_method(method).spec
    changes: dict[str, object] = {
        "method": method,
        "seed": seed,
        "clients": 3,
        "rounds": ROUNDS,
        "evaluate-every": ROUNDS,
        "data.dataset": "python:benchmarks.multi_label:overlaid_digits",
        "data.task": "multi-label",
        "data.alpha": 0.5,
        "data.public-fraction": 0.2,
        "training.local-epochs": 2,
        "engine.backend": "inline",
        "engine.device": "cpu",
        "engine.precision": "float32",
        "models.pool": list(POOL[:1] if one or spec.one_model or spec.submodels else POOL),
    }
    for name in spec.model_settings:  # models shared by clients or used by the server
        changes[f"{method}.{name.replace('_', '-')}"] = POOL[0]
    return resolve(changes)


def score_of(directory: Path, protocol: str) -> float:
    """Return the mean macro AUC after the last round in percent, or NaN if there is no run."""
    if not (directory / "summary.json").exists():
        return float("nan")
    _, scores = shown_scores(read_records(directory / "metrics.jsonl")[0][-1], protocol)
    return 100 * next(iter(scores.values())).mean


def main() -> None:
    """Execute the runs that do not exist, and print the table."""
    able = [m for m in method_names()
            if "multi-label" in find_method(m).spec.tasks and m not in LEFT_OUT]  # fmt: skip
    words = argparse.ArgumentParser(description="multi-label tasks against training alone")
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--methods", default=",".join(able))
    words.add_argument("--seeds", default="1,2,3")
    words.add_argument("--tables", action="store_true")
    chosen = words.parse_args()
    seeds: list[int] = list(map(int, chosen.seeds.split(",")))
    methods = [name for name in chosen.methods.split(",") if name != "local"]
    for seed in () if chosen.tables else seeds:
        run(config_of("local", seed, one=True), chosen.out / f"local-one-{seed}")
        for method in ("local", *methods):
            run(config_of(method, seed), chosen.out / f"{method}-{seed}")
            print(seed, method, flush=True)
    print("| method | protocol | architectures | macro AUC | difference to `local` |")
    print("| --- " * 5 + "|")
    baselines = [("local", p, one) for one in (False, True) for p in ("personal", "common")]
    rows = [(m, find_method(m).spec.headline, None) for m in methods]
    for method, protocol, alone in (*baselines, *rows):
        spec = find_method(method).spec
        one = spec.one_model or spec.submodels if alone is None else alone
        local = [chosen.out / f"local{'-one' * one}-{seed}" for seed in seeds]
        own = local if method == "local" else [chosen.out / f"{method}-{seed}" for seed in seeds]
        scores = [score_of(path, protocol) for path in own]
        gaps = [s - score_of(path, protocol) for s, path in zip(scores, local, strict=True)]
        known = [gap for gap in gaps if gap == gap]
        cells = [f"`{method}`", protocol, "one" if one else "three", f"{np.mean(scores):.1f}"]
        compared = len(known) > 1 and method != "local"
        mean, error = mean_and_error(known) if compared else (0.0, 0.0)
        print(f"| {' | '.join(cells)} | {f'{mean:+.1f} ± {error:.1f}' if compared else '–'} |")


if __name__ == "__main__":
    main()
