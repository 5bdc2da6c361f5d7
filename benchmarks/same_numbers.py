"""Check that two checkouts of the project compute bitwise equal numbers.

    python -m benchmarks.same_numbers OTHER [--backends inline,ray] [--only felo,texts] [--out DIR]

OTHER is a checkout of another commit (`git worktree add ../before COMMIT`). Both checkouts execute
a small run of every method, and of the data kinds, partitions, attacks and training options below.
Each round's records without times and memory, the summary's accuracies, and every tensor of the
server's checkpoints and of the clients' states must be equal. The exit status is 1 if anything
differs. Existing runs in --out are reused, so that comparing a third checkout takes less time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fedhet.methods.registry import find_method, shipped_names

HERE = Path(__file__).resolve().parent.parent
SMALL = (
    "--clients 4 --rounds 2 --set data.max-samples=400 --set data.max-test-samples=100 "
    "--set data.min-samples=20 --set training.local-epochs=1"
)
TWO = "--models mlp,cnn2"
ONE = "--models cnn2"
OPTIONS = {
    "central": ONE,
    "velo": f"{TWO} --set velo.epochs=3 --set velo.min-separation=0",
    "fedgems": f"{TWO} --set fedgems.server-model=mlp2",
    "um-pfssl": "--models cnn2-dropout --set um-pfssl.warm-up=1 --set um-pfssl.passes=3 --rounds 4",
    "fedbn": "--models resnet10 --set data.max-samples=200",
    "fedlora": ONE,
    "pfedme": f"{ONE} --set pfedme.steps=2",
    "fedkd": f"{TWO} --rounds 3",
    "fedtgp": f"{TWO} --set fedtgp.server-epochs=3",
    "feddf": f"{TWO} --set feddf.epochs=1",
    "fedmd": f"{TWO} --set fedmd.public-epochs=1",
    "ds-fl": f"{TWO} --set ds-fl.server-model=mlp",
    "fedgkt": f"{TWO} --set fedgkt.server-epochs=1",
}
"""Options of methods whose defaults take long, or skip code that is to be compared."""


def models_of(name: str) -> str:
    """Return the models option of a run: two models, or one if the method requires equal models."""
    spec = find_method(name).spec
    return ONE if spec.one_model or spec.submodels else TWO


RUNS = {
    **{name: f"{name} {OPTIONS.get(name) or models_of(name)}" for name in sorted(shipped_names())},
    # Kinds and sources of data.
    "tables": "felo --dataset breast-cancer --models mlp,mlp2 --set data.min-samples=10",
    "classical": "cofed --dataset breast-cancer --models sk-tree,sk-svm,sk-gam,sk-mlp "
    "--set cofed.search=none",
    "generated": "cofed --dataset breast-cancer --models mlp,mlp2 "
    "--set data.public-dataset=generated --set data.public-samples=60",
    "texts": "felo --dataset text:{data}/text --models text-cnn,text-bag "
    "--set data.max-samples=200 --set data.min-samples=5",
    "signals": "fedhe --dataset signal:{data}/signal --models signal-cnn2,signal-gru "
    "--set data.max-samples=200 --set data.min-samples=5",
    # Partitions.
    "iid": f"felo {TWO} --set data.partition=iid",
    "shards": f"fedproto {TWO} --set data.partition=shards",
    "classes": f"fedavg {ONE} --set data.partition=classes",
    "superclasses": f"cofed {TWO} --set data.partition=superclasses "
    "--set data.superclasses=0+1,2+3,4+5,6+7,8+9 --set data.label-space=2-3 "
    "--set data.subclasses=1-2 --set data.samples-per-class=8 --set data.max-samples=0",
    "public": f"fedgems {TWO} --set fedgems.server-model=mlp2 --set data.public-dataset=unused "
    "--set data.public-samples=100",
    # Attacks and faults.
    "paf": f"fedgems {TWO} --set fedgems.server-model=mlp2 --set attack.kind=paf",
    "lie": f"fedmd {TWO} --set fedmd.public-epochs=1 --set attack.kind=lie",
    "ofom": f"fedavg {ONE} --set attack.kind=ofom",
    "faults": f"felo {TWO} --rounds 4 --set pace.drop-outs=0.3 --set fraction=0.7",
    # Late replies, and encoded messages.
    "late": f"fedavg {ONE} --clients 6 --rounds 5 --set pace.clock=log-normal --set pace.spread=1 "
    "--set pace.min-replies=0.5",
    "late-classes": f"felo {TWO} --clients 6 --rounds 5 --set pace.clock=log-normal "
    "--set pace.spread=1 --set pace.over-selection=0.5 --set fraction=0.5",
    "asynchronous": f"fedkd {TWO} --clients 6 --rounds 6 --set pace.clock=log-normal "
    "--set pace.spread=1 --set pace.mode=asynchronous --set pace.min-replies=2",
    "encoded": f"fedavg {ONE} --clients 6 --rounds 5 --set pace.clock=log-normal "
    "--set pace.spread=1 --set pace.mode=asynchronous --set pace.min-replies=2 "
    "--set wire.encoding=int8",
    # Privacy and secure aggregation.
    "private": "felo --models mlp,cnn2-gn --set privacy.noise-multiplier=1",
    "summed": f"fedavg {ONE} --set privacy.secure-aggregation=true",
    "private-sums": "fedavg --models mlp --set privacy.noise-multiplier=1 "
    "--set privacy.secure-aggregation=true",
    # Training and evaluation options.
    "semi": f"fedavg {ONE} --set training.semi=fixmatch --set training.semi-threshold=0.3",
    "assigned": f"felo {TWO} --set training.lr=0.01,0.001 --set training.batch-size=16,32",
    "schedule": f"fedavg {ONE} --rounds 3 --set training.schedule=step "
    "--set training.milestones=1,2 --set training.optimizer=sgd --set training.keep-optimizer=true",
    "plateau": f"felo {TWO} --rounds 4 --set training.schedule=plateau --set training.patience=0",
    "augment": f"felo {TWO} --set training.augment=randaugment",
    "metrics": f"felo {TWO} --set metrics=auc,macro-f1,test-loss,recall,calibration-error",
    "early": f"local {TWO} --rounds 5 --set early-stopping=1 --set keep-best=true "
    "--set training.lr=1e-6",
}
UNEQUAL = {"seconds", "peak_memory_mb", "versions", "commit"}
"""Fields of the records that depend on the machine or name the checkout."""
PROGRAM = """
import json, os, random, secrets, sys
import fedhet.report
from fedhet.cli import app
for name in ("write_figures", "write_report"):
    assert hasattr(fedhet.report, name), name
    setattr(fedhet.report, name, lambda run: None)
for words in json.load(sys.stdin):
    draws = random.Random(0)  # Otherwise, noise and masks would differ between two runs.
    secrets.token_bytes, secrets.randbelow = draws.randbytes, draws.randrange
    secrets.token_hex = lambda size: os.urandom(size).hex()  # names of temporary files
    try:
        app(words, standalone_mode=False)
    except BaseException as error:
        print(" ".join(words), "FAILED:", repr(error), file=sys.stderr)
"""


def main() -> None:
    """Execute the runs of both checkouts, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--backends", default="inline,ray")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("build/same-numbers"))
    chosen = parser.parse_args()
    names = chosen.only.split(",") if chosen.only else list(RUNS)
    out, differing = chosen.out.resolve(), 0
    for backend in chosen.backends.split(","):
        before, now = (
            make(checkout.resolve(), out, backend, names) for checkout in (chosen.other, HERE)
        )
        for name in names:
            found = list(differences(before / name, now / name))
            differing += bool(found)
            print(f"{backend:7} {name:13}", "equal" if not found else "; ".join(found[:3]))
    print(f"{differing} of {len(names) * len(chosen.backends.split(','))} comparisons differ")
    raise SystemExit(1 if differing else 0)


def make(checkout: Path, out: Path, backend: str, names: list[str]) -> Path:
    """Execute the missing runs of a checkout, and return the directory that contains all runs."""
    folder = out / f"{_commit(checkout)}-{backend}"
    missing = [name for name in names if not (folder / name / "summary.json").exists()]
    for name in missing:  # remove the files of failed runs
        shutil.rmtree(folder / name, ignore_errors=True)
    data = _example_data(out)
    each = [_words(name, data, backend, folder / name) for name in missing]
    if each:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("w") as log:
            subprocess.run(
                [sys.executable, "-c", PROGRAM],
                input=json.dumps(each), text=True, stdout=log, stderr=log, cwd=out, check=True,
                env={**os.environ, "PYTHONPATH": str(checkout)},
            )  # fmt: skip
    return folder


def _words(name: str, data: Path, backend: str, out: Path) -> list[str]:
    method, *own = RUNS[name].format(data=data).split()
    chosen = _without_doubles([*SMALL.split(), *own])
    return ["run", method, *chosen, "--backend", backend, "--out", str(out)]


def _without_doubles(words: list[str]) -> list[str]:
    """Return pairs of option and value, with only the last pair for each setting."""
    last: dict[str, tuple[str, str]] = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        last[value.partition("=")[0] if option == "--set" else option] = (option, value)
    return [word for pair in last.values() for word in pair]


def _example_data(out: Path) -> Path:
    """Return a directory with a small dataset of texts and a small dataset of signals."""
    for kind in ("text", "signal"):
        folder = out / "data" / kind
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            words = [sys.executable, "-m", "fedhet", "example-data", kind, str(folder)]
            subprocess.run(words, check=True, capture_output=True, cwd=HERE)
    return out / "data"


def _commit(checkout: Path) -> str:
    """Return a name for the state of a checkout's files."""
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def differences(before: Path, now: Path) -> Iterator[str]:
    """Yield a line for each difference between the directories of two runs."""
    for run in (before, now):
        if not (run / "summary.json").exists():
            yield f"{run} was not made"
            return
    yield from _unequal("metrics.jsonl", _records(before), _records(now))
    yield from _unequal("summary.json", _summary(before), _summary(now))
    paths = [{_relative(run, p): p for p in run.rglob("*.safetensors")} for run in (before, now)]
    if set(paths[0]) != set(paths[1]):
        yield f"files: {sorted(set(paths[0]) ^ set(paths[1]))}"
    for path in sorted(set(paths[0]) & set(paths[1])):
        yield from _unequal_tensors(path, load_file(paths[0][path]), load_file(paths[1][path]))


def _relative(run: Path, path: Path) -> str:
    """Return a file's path in a run's directory, without the run's random name."""
    parts = path.relative_to(run).parts
    return "/".join(
        part for place, part in enumerate(parts) if not (parts[0] == "state" and place == 1)
    )


def _records(run: Path) -> list[Any]:
    return [_kept(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _summary(run: Path) -> Any:
    return _kept(json.loads((run / "summary.json").read_text()))


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _kept(each) for k, each in value.items() if k not in UNEQUAL}
    return [_kept(each) for each in value] if isinstance(value, list) else value


def _unequal(where: str, before: Any, now: Any) -> Iterator[str]:
    """Yield the differences of two JSON values. NaN equals NaN, and the order of keys matters."""
    if isinstance(before, dict) and isinstance(now, dict) and list(before) == list(now):
        for key in before:
            yield from _unequal(f"{where}.{key}", before[key], now[key])
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _unequal(f"{where}[{place}]", one, other)
    elif json.dumps(before) != json.dumps(now):
        yield f"{where}: {json.dumps(before)[:80]} -> {json.dumps(now)[:80]}"


def _unequal_tensors(
    path: str, before: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray]
) -> Iterator[str]:
    if set(before) != set(now):
        yield f"{path}: tensors {sorted(set(before) ^ set(now))[:4]}"
    for name in sorted(set(before) & set(now)):
        if before[name].dtype != now[name].dtype or before[name].tobytes() != now[name].tobytes():
            yield f"{path}: {name}"


if __name__ == "__main__":
    main()
