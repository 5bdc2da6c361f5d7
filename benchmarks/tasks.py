"""Improvement of the methods over local training, in regression and multi-label classification.

    python -m benchmarks.tasks --out DIR [--tasks diabetes,digits] [--methods fml,fedmd]
        [--seeds 1,2,3] [--kind private] [--set rounds=40] [--workers 2] [--tables]

Regression tasks are scikit-learn's diabetes data; scikit-learn's `make_friedman1`, because the
California housing data must be downloaded; the frequency of a noisy wave in two channels
(`signal`); and the total area of the disks in an image of 16 x 16 pixels (`image`). In the
multi-label task `digits`, an image contains one to three of scikit-learn's handwritten digits of
different classes, overlaid at random positions in 12 x 12 pixels. Its labels are the ten classes,
and a tenth of the labels of the training images is missing. Test images consist of digits that are
in no training image.

The three sites have different architectures, or the first architecture if a method requires a
single one. FedBN trains networks with batch normalization, and methods with adapters train a vision
transformer that is pretrained on the positions of disks. The targets of the sites differ: a
Dirichlet(0.5) partition is based on tenths of the target, or on the rarest label. A fifth of the
training samples is public.

A cell is the improvement over `local` with the same architectures: the reduction of the RMSE in
percent, or the gain of the macro AUC in percentage points. It is the mean of the paired differences
over the seeds, with its standard error. The score is the mean over the sites under the method's
headline protocol, after the last round. It belongs to the models of --kind, by default to each
method's headline models. --set changes a setting of all runs, or of all runs of a method
(`--set pfedme.rate=0.05`). Existing runs in DIR are reused, so that the script can be stopped and
restarted; runs with other settings need another DIR. With --tables, no run is executed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes, load_digits, make_friedman1
from torch import nn

from benchmarks.malicious import run
from benchmarks.timing import mean_and_error
from fedhet.base.seeding import numpy_rng
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import parse_pairs
from fedhet.data.dataset import Dataset, Format, Split
from fedhet.data.texts import VARIABLE
from fedhet.kinds import IMAGE, KINDS
from fedhet.methods.registry import find_method, method_names
from fedhet.runs.directory import read_records
from fedhet.runs.measures import shown_scores
from fedhet.runs.records import KINDS as MODEL_KINDS
from fedhet.runs.records import Headline
from fedhet.tasks import MultiLabel, Regression

ROUNDS = 10
IMAGES, TABLES = ("cnn2", "cnn3", "mlp"), ("mlp", "mlp2", "mlp3")
POOLS = {
    "diabetes": TABLES,
    "friedman": TABLES,
    "signal": ("signal-cnn2", "signal-cnn3", "signal-gru"),
    "image": IMAGES,
    "digits": IMAGES,
}
"""Three architectures for each task."""
IMAGE_POOLS = {
    "batch norm": ("resnet10",),
    "three ranks": tuple(f"encoder-1-lora{rank}:disks" for rank in (2, 4, 8)),
    "one rank": ("encoder-1-lora8:disks",),
}
"""Pools for methods that need certain models, in the tasks with images."""
POOL_NAMES = {"fedbn": "batch norm", "fedlora": "three ranks", "fedsa": "one rank"}
"""Name of the pool, by method, for methods that need certain models."""
Run = tuple[str, str, str, int]
"""Method, name of the pool, task, and seed of a run."""


def regression(name: str, kind: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> Dataset:
    """Return a dataset for regression; the last third is the common test set."""
    count = 2 * len(x) // 3
    mean, deviation = float(y[:count].mean()), float(y[:count].std())
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor((y[:, None] - mean) / deviation, dtype=torch.float32)
    train, test = (Split(inputs[rows], targets[rows])
                   for rows in (slice(count), slice(count, None)))  # fmt: skip
    task = Regression((mean,), (deviation,))
    form = Format.from_samples(inputs, ("target",), KINDS[kind], task=task, scaled=kind == "image")
    return Dataset(name, train, test, form)


def diabetes() -> Dataset:
    """Return scikit-learn's diabetes data."""
    x, y = load_diabetes(return_X_y=True)
    order = numpy_rng(0, "diabetes").permutation(len(x))
    return regression("diabetes", "table", x[order] / x.std(0), y[order])


def friedman() -> Dataset:
    """Return scikit-learn's first Friedman problem."""
    x, y = make_friedman1(1200, noise=1.0, random_state=0)
    return regression("friedman", "table", (x - 0.5) * np.sqrt(12), y)


def signal() -> Dataset:
    """Return waves [N, 2, 64] with noise, and their numbers of periods."""
    rng = numpy_rng(0, "waves")
    periods, start = rng.uniform(2, 8, 900), rng.uniform(0, 2 * np.pi, (900, 1))
    phase = 2 * np.pi * periods[:, None] * np.linspace(0, 1, 64) + start
    x = np.stack([np.sin(phase), np.cos(phase)], 1)
    return regression("signal", "signal", x + rng.normal(0, 0.5, x.shape), periods)


def image() -> Dataset:
    """Return images of disks, and the total area of the disks in each image."""
    images, disks = _disks(900, "disks")
    return regression("image", "image", images, disks.sum((1, 2)).astype(float))


def _disks(count: int, use: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return images [N, 1, 16, 16] of up to three disks with noise, and without noise."""
    rng, (row, column) = numpy_rng(0, use), np.mgrid[:16, :16]
    images, disks = np.zeros((count, 1, 16, 16)), np.zeros((count, 16, 16), bool)
    for place in range(count):
        for _ in range(rng.integers(1, 4)):
            (a, b), radius = rng.uniform(3, 13, 2), rng.uniform(1.5, 4)
            disks[place] |= (row - a) ** 2 + (column - b) ** 2 <= radius**2
        images[place] = disks[place] * 1.0 + rng.normal(0, 0.3, disks[place].shape)
    return images, disks


def digits() -> Dataset:
    """Return images of overlaid digits, with several labels per image."""
    images, classes = load_digits(return_X_y=True)
    order, side, rows = numpy_rng(0, "digits").permutation(len(images)), 12, 1500
    splits = []
    for part, count in ((order[:1200], rows), (order[1200:], 600)):
        rng = numpy_rng(0, "overlaid", count)
        x = np.zeros((count, 1, side, side), np.float32)
        y = np.zeros((count, 10), np.float32)
        for row in range(count):
            for label in rng.choice(10, rng.integers(1, 4), replace=False):
                digit = images[rng.choice(part[classes[part] == label])].reshape(8, 8)
                top, left = rng.integers(0, side - 7, 2)
                place = x[row, 0, top : top + 8, left : left + 8]
                np.maximum(place, digit / 8, out=place)
                y[row, label] = 1
        if count == rows:
            y[rng.random(y.shape) < 0.1] = np.nan
        splits.append(Split(torch.from_numpy(x - 1), torch.from_numpy(y)))
    names = tuple(map(str, range(10)))
    train, test = splits
    form = Format.from_samples(train.x, names, IMAGE, task=MultiLabel(), scaled=True)
    return Dataset("digits", train, test, form)


def pretrain(directory: Path) -> None:
    """Save a small vision transformer that predicts the center of the disks, unless it exists."""
    if (directory / "model.safetensors").exists():
        return
    from transformers import ViTConfig, ViTModel

    images, disks = _disks(3000, "pretraining")
    x = torch.tensor(images, dtype=torch.float32)
    centers = [[np.mean(each) for each in disk.nonzero()] for disk in disks]
    y = torch.tensor(np.array(centers) / 8 - 1, dtype=torch.float32)
    torch.manual_seed(0)
    network = ViTModel(
        ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                  image_size=16, patch_size=4, num_channels=1),
        add_pooling_layer=False,
    )  # fmt: skip
    head = nn.Linear(32, 2)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], 2e-3)
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(64):
            centered = head(network(pixel_values=x[rows]).last_hidden_state[:, 0])
            loss = nn.functional.mse_loss(centered, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.save_pretrained(directory)


def pool_name(method: str) -> str:
    """Return the name of the pool of a method."""
    spec = find_method(method).spec
    return POOL_NAMES.get(method, "one" if spec.one_model or spec.submodels else "three")


def pools(task: str) -> dict[str, tuple[str, ...]]:
    """Return the pools of a task by name."""
    own = IMAGE_POOLS if POOLS[task] == IMAGES else {}
    return {"three": POOLS[task], "one": POOLS[task][:1], **own}


def runs(tasks: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Return the runs of the methods, and the runs of `local` with the pools of the methods."""
    found: dict[Run, None] = {}
    for seed, task, method in product(seeds, tasks, methods):
        pool, supported = pool_name(method), find_method(method).spec.tasks
        if task_name(task) in supported and pool in pools(task):
            found |= {("local", pool, task, seed): None, (method, pool, task, seed): None}
    return list(found)


def task_name(task: str) -> str:
    """Return the value of `data.task` for a task."""
    return "multi-label" if task == "digits" else "regression"


def config_of(
    method: str, pool: str, task: str, seed: int, given: Mapping[str, object] | None = None
) -> Config:
    """Return the settings of a run; `given` contains the values of --set, by full name."""
    models = pools(task)[pool]
    changes: dict[str, object] = {
        "method": method,
        "seed": seed,
        "clients": 3,
        "rounds": ROUNDS,
        "evaluate-every": ROUNDS,
        "data.dataset": f"python:benchmarks.tasks:{task}",
        "data.task": task_name(task),
        "data.alpha": 0.5,
        "data.public-fraction": 0.2,
        "training.local-epochs": 2,
        "engine.backend": "inline",
        "engine.device": "cpu",
        "engine.precision": "float32",
        "models.pool": list(models),
    }
    for name in find_method(method).spec.model_settings:  # shared models, or models of the server
        changes[f"{method}.{name.replace('_', '-')}"] = models[0]
    others = {*method_names()} - {method}
    own = {name: v for name, v in (given or {}).items() if name.partition(".")[0] not in others}
    return resolve(changes | own)


def execute(out: Path, given: Mapping[str, object], each: Run) -> str:
    """Execute a run unless it exists, and return its description, with the error if it failed."""
    torch.set_num_threads(1)
    described = " ".join(map(str, each))
    try:
        run(config_of(*each, given), place(out, each))
    except Exception as error:  # A failed run must not end the other runs.
        return f"{described} FAILED: {error!r}"
    return described


def place(out: Path, run: Run) -> Path:
    """Return the directory of a run."""
    return out / "-".join(map(str, run)).replace(" ", "-")


def score_of(out: Path, run: Run, protocol: str, kind: str = "") -> float | None:
    """Return the mean score after the last round, or None if the run does not exist.

    The score belongs to the models of the kind `kind`, or else to the run's headline models.
    """
    directory = place(out, run)
    if not (directory / "summary.json").exists():
        return None
    headline = Headline.declared_by(find_method(run[0]).spec).model_copy(
        update={"protocol": protocol} | ({"kinds": {protocol: kind}} if kind else {})
    )
    _, scores = shown_scores(read_records(directory / "metrics.jsonl")[0][-1], headline)
    return next(iter(scores.values())).mean


def cell(out: Path, method: str, task: str, seeds: Sequence[int], kind: str = "") -> str:
    """Format the mean improvement over `local`, with its standard error."""
    pool, protocol, found = pool_name(method), find_method(method).spec.headline, []
    for seed in seeds:
        own = score_of(out, (method, pool, task, seed), protocol, kind)
        alone = score_of(out, ("local", pool, task, seed), protocol)
        if own is not None and alone is not None:
            gain = own - alone if task_name(task) == "multi-label" else 1 - own / alone
            found.append(100 * gain)
    if len(found) < len(seeds):
        return "–"
    mean, error = mean_and_error(found)
    return f"{mean:+.1f} ± {error:.1f}".replace("-", "−")


def table(
    out: Path, tasks: Sequence[str], methods: Sequence[str], seeds: Sequence[int], kind: str = ""
) -> Iterator[str]:
    """Yield the lines of the table in Markdown: the scores of `local`, and the improvements."""
    yield f"| method | protocol | {' | '.join(tasks)} |"
    yield "| --- " * (2 + len(tasks)) + "|"
    compared = {(pool_name(m), find_method(m).spec.headline): None for m in methods}
    for pool, protocol in sorted(compared):
        cells = []
        for task in tasks:
            scores = [score_of(out, ("local", pool, task, seed), protocol) for seed in seeds]
            known = [score for score in scores if score is not None]
            cells.append(f"{fmean(known):.3g}" if known else "–")
        yield f"| `local`, {pool} | {protocol} | {' | '.join(cells)} |"
    for method in methods:
        cells = [cell(out, method, task, seeds, kind) for task in tasks]
        yield f"| `{method}` | {find_method(method).spec.headline} | {' | '.join(cells)} |"


def main() -> None:
    """Execute the runs that do not exist, and print the table."""
    able = [m for m in method_names() if m != "local" and "regression" in find_method(m).spec.tasks]
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--tasks", default=",".join(POOLS))
    words.add_argument("--methods", default=",".join(able))
    words.add_argument("--seeds", default="1,2,3")
    words.add_argument("--kind", default="", choices=["", *MODEL_KINDS])
    words.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="pairs")
    words.add_argument("--workers", type=int, default=1)
    words.add_argument("--tables", action="store_true")
    chosen = words.parse_args()
    tasks, methods = chosen.tasks.split(","), chosen.methods.split(",")
    seeds: list[int] = list(map(int, chosen.seeds.split(",")))
    given: dict[str, object] = {}
    for pair in chosen.pairs:
        table_name = pair.partition(".")[0]
        given |= parse_pairs([pair], table_name if table_name in method_names() else None)
    if not chosen.tables:
        bases = chosen.out / "bases"
        pretrain(bases / "disks")
        os.environ[VARIABLE] = str(bases.resolve())
        work = partial(execute, chosen.out, given)
        # Start the longest runs first, so that they do not run alone at the end.
        wanted = sorted(runs(tasks, methods, seeds), key=lambda each: each[1] != "batch norm")
        with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
            for done in pool.imap_unordered(work, wanted):
                print(done, flush=True)
    print("\n".join(table(chosen.out, tasks, methods, seeds, chosen.kind)))


if __name__ == "__main__":
    main()
