"""Benchmarks that need an accelerator. Each takes a few minutes, and none needs external data.

    make gpu                                      # all benchmarks, one after another
    python -m benchmarks.gpu precision compile    # some benchmarks
    python -m benchmarks.gpu --device cpu --quick # a short test on the CPU

All runs use the backend `inline` and synthetic images of ten classes. An image is the pattern of
its class plus noise. The accuracies are comparable only with each other, not with results on
CIFAR-10.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import fedhet
from benchmarks import conformal_step
from benchmarks.pretended_gpu import PRETENDED
from benchmarks.same_numbers import OPTIONS, models_of
from benchmarks.timing import ratios, show
from fedhet.base.errors import SettingsError
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import parse_pairs, read_preset
from fedhet.engines.simulate import simulate
from fedhet.inference.objects import dataset_name
from fedhet.learning.devices import Compute, compute_for, find_device
from fedhet.learning.training import CrossEntropy, optimization_for, train_epochs
from fedhet.methods.registry import shipped_names
from fedhet.models import build
from fedhet.runs.log import Watcher
from fedhet.runs.records import RoundRecord
from fedhet.settings.engine import ComputeSettings
from fedhet.settings.run import TrainingSettings

SHAPE, CLASSES = (3, 32, 32), 10


@dataclass(frozen=True)
class Where:
    """Options of all benchmarks, such as the device and a `quick` mode that takes only seconds."""

    device: str
    quick: bool
    folder: Path
    """Temporary directory for the files of all runs."""
    seconds: float = 120.0
    """Time limit of a preset at the paper's size, in seconds."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds for the comparison of precisions."""
    rounds: int = 4
    """Number of rounds of the small federation."""

    def choose(self, usual: Any, quick: Any) -> Any:
        """Return the value `quick` for quick benchmarks, otherwise `usual`."""
        return quick if self.quick else usual

    def wait(self) -> None:
        """Wait until the accelerator has finished all queued work."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()


def made_images(train: int, test: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return noisy uint8 images [N, 3, 32, 32] with a pattern per class, and labels [N]."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, (CLASSES, *SHAPE)).astype(np.float32)

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(CLASSES, size=count)
        noise = rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
        return (0.12 * patterns[y] + 0.88 * noise).astype(np.uint8), y

    return {"train": part(train), "test": part(test)}


def settings_of(where: Where, method: str, **settings: Any) -> Config:
    """Return the settings of a small federation with four architectures."""
    images = made_images(*where.choose((4000, 1000), (200, 50)))
    usual = {
        "method": method,
        "clients": where.choose(4, 2),
        "rounds": where.choose(where.rounds, 2),
        "models.pool": where.choose(["cnn2", "resnet10", "vgg11", "mlp"], ["cnn2", "mlp"]),
        "data.dataset": dataset_name(images, inline=True),
        "training.local-epochs": 2,
        "engine.backend": "inline",
        "engine.device": where.device,
    }
    return resolve({**usual, **settings})


def finished(config: Config, folder: Path, *watchers: Watcher) -> fedhet.Result:
    """Run a federation, and return its result."""
    return fedhet.Result(simulate(config, folder, watchers))


def common(result: fedhet.Result) -> float:
    """Return the mean accuracy of the headline models on the common test set."""
    summary = result.summary
    assert summary is not None
    return summary.accuracy["common"][summary.headline_kinds["common"]].mean


def methods(where: Where) -> None:
    """Accuracies of small runs of every method on the device, compared with the CPU."""
    apart: list[float] = []
    for name in islice(sorted(shipped_names()), where.choose(None, 2)):
        options = shlex.split(OPTIONS.get(name) or models_of(name))
        at = options.index("--models") if "--models" in options else None
        models = [] if at is None else options[at + 1].split(",")
        values = {
            "models.pool": models or ["mlp", "cnn2"],
            "clients": 4,
            **({} if name == "cofed" else {"rounds": where.choose(5, 2)}),
            "data.max-samples": 800,
            "data.max-test-samples": 300,
            "data.min-samples": 20,
            "training.local-epochs": 2,
            **parse_pairs([word for word in options if "=" in word], name),
            "method": name,
            "engine.backend": "inline",
        }
        scores = []
        for number, device in enumerate((where.device, "cpu")):
            config = resolve({**values, "engine.device": device})
            summary = finished(config, where.folder / f"{name}-{number}").summary
            assert summary is not None
            scores.append(summary.accuracy)
        here, there = scores
        each = {f"{p}/{k}": here[p][k].mean - there[p][k].mean for p in here for k in here[p]}
        apart += each.values()
        print(f"{name}: {', '.join(f'{place} {by:+.3f}' for place, by in each.items())}")
    sizes = np.abs(apart)
    print(
        f"{len(sizes)} accuracies: {np.mean(apart):+.4f} on average, {sizes.mean():.4f} apart, "
        f"median {np.median(sizes):.4f}, at most {sizes.max():.3f}"
    )


def resume(where: Where) -> None:
    """Whether a repeated run and a resumed run are bitwise equal to the first run."""
    config = settings_of(where, "felo", rounds=4)
    whole, again = (finished(config, where.folder / name) for name in ("whole", "again"))
    with contextlib.suppress(TimeIsUpError):
        finished(config, where.folder / "cut", Until(rounds=2))
    on = resolve({**config.flat(), "out": str(where.folder / "cut"), "resume": True})
    cut = finished(on, where.folder / "cut")
    for name, other in (("made twice", again), ("cut off and resumed", cut)):
        print(f"{name}: {'equal to the last bit' if same(whole, other) else 'DIFFERENT'}")


def same(one: fedhet.Result, other: fedhet.Result) -> bool:
    """Return whether all clients' models have equal tensors in both results."""
    assert one.summary is not None
    clients = sorted(one.summary.models)
    pairs = ((one.model(c).state_dict(), other.model(c).state_dict()) for c in clients)
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def precision(where: Where) -> None:
    """Accuracy and time of Felo in bfloat16, float16 and channels-last, relative to float32."""
    seeds = where.choose(where.seeds, (0,))
    kinds = [{"engine.precision": p} for p in ("float32", "bfloat16", "float16")]
    kinds += [{"engine.precision": "float32", "engine.channels-last": "true"}]
    accuracy, seconds = {}, {}
    finished(settings_of(where, "felo", rounds=1), where.folder / "warm-up")
    for kind in kinds:
        if kind["engine.precision"] == "float16" and where.device == "cpu":
            continue
        name = ", ".join(kind.values())
        started = time.perf_counter()
        settings = {"engine.channels-last": "false", **kind}
        configs = [settings_of(where, "felo", seed=seed, **settings) for seed in seeds]
        runs = [finished(config, where.folder / name / str(config.run.seed)) for config in configs]
        accuracy[name] = [common(run) for run in runs]
        seconds[name] = time.perf_counter() - started
    plain, time_of_plain = np.array(accuracy["float32"]), seconds["float32"]
    for name, found in accuracy.items():
        apart = np.array(found) - plain
        error = apart.std(ddof=1) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        print(
            f"{name:24} accuracy {np.mean(found):.4f} ({apart.mean():+.4f} ± {error:.4f}), "
            f"time {seconds[name] / time_of_plain:.2f} of float32's"
        )


def trained_steps(name: str, batch: int, where: Where) -> Iterator[int]:
    """Train a model on random images, and yield the number of samples after each step."""
    compute = compute_for(ComputeSettings(device=where.device, precision="auto"))
    model = build(name, SHAPE, CLASSES, seed=0).train()
    compute.place(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = compute.to_inputs(torch.randn(batch, *SHAPE))
    y = torch.zeros(batch, dtype=torch.int64, device=compute.device)
    while True:
        with compute.autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield batch


def one_of_many(where: Where, ready: Any, samples: Queue[int], seconds: float) -> None:
    """Train for `seconds` once all processes are ready, and report the number of samples."""
    torch.set_num_threads(1)
    steps = trained_steps("resnet18", 16, where)
    for _ in islice(steps, 3):
        pass
    where.wait()
    ready.wait()
    end, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        done += sum(islice(steps, 5))
        where.wait()
    samples.put(done)


def deterministic(where: Where) -> None:
    """Time of a run with `engine.deterministic`, relative to a run without it."""
    seconds = {}
    for chosen in (True, False, True, False):  # the first run of each kind warms up
        if not chosen:
            torch.use_deterministic_algorithms(False)
        settings = {"engine.deterministic": chosen, "models.pool": ["resnet10"]}
        config = settings_of(where, "felo", **settings)
        folder = where.folder / f"deterministic-{chosen}-{len(list(where.folder.iterdir()))}"
        started = time.perf_counter()
        finished(config, folder)
        seconds[chosen] = time.perf_counter() - started
    print(f"deterministic / not: {seconds[True] / seconds[False]:.2f}")


ASKED = {
    "launches": ("LaunchKernel",),
    "copies": ("MemcpyAsync",),
    "waits": ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize"),
}
"""Operations that the host requests from CUDA, with parts of the names of CUDA's functions."""


def waits(where: Where) -> None:
    """Launches, copies and waits per step of several methods, counted by PyTorch's profiler."""
    if torch.device(where.device).type != "cuda" or torch.cuda.get_device_name() == PRETENDED:
        print("nothing to profile: not a GPU; python -m benchmarks.launches counts without one")
        return
    alone: dict[str, float] = {}
    for method in ("local", "felo", "fedtype", "fedgems", "pfedbayes"):
        config = settings_of(where, method, rounds=2)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        # Clients train in threads of the server, which PyTorch otherwise ignores.
        threads = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, experimental_config=threads) as profiler:
            finished(config, where.folder / f"waits-{method}")
        calls = {event.key: event.count for event in profiler.key_averages()}
        steps = sum(count for name, count in calls.items() if name.startswith("Optimizer.step#"))
        found = {
            what: sum(n for name, n in calls.items() if any(part in name for part in parts)) / steps
            for what, parts in ASKED.items()
        }
        alone = alone or found
        each = [f"{what} {n:.2f} ({n / alone[what]:.2f} of local)" for what, n in found.items()]
        print(f"{method}, in a step: {', '.join(each)}")


def shared(where: Where) -> None:
    """Total samples per second if 1, 2, 4 or 8 clients train concurrently on one accelerator."""
    processes, seconds = multiprocessing.get_context("spawn"), where.choose(10.0, 1.0)
    alone = 0.0
    for clients in where.choose((1, 2, 4, 8), (1, 2)):
        ready, samples = processes.Barrier(clients), processes.Queue()
        args = (where, ready, samples, seconds)
        started = [processes.Process(target=one_of_many, args=args) for _ in range(clients)]
        for process in started:
            process.start()
        rate = sum(samples.get() for _ in started) / seconds
        for process in started:
            process.join()
        alone = alone or rate
        print(f"{clients} at a time: {rate:.0f} samples/s, {rate / alone:.2f} of one alone")


def conformal(where: Where) -> None:
    """Time of FedType's conformal step, as in `benchmarks.conformal_step`."""
    batches = where.choose((16, 128), (16,))
    conformal_step.measure(where.choose(2800, 24), where.choose(5, 1), where.device, batches)


def compiled(where: Where) -> None:
    """Time of an epoch with `torch.compile` (`engine.compile`), relative to an uncompiled epoch."""
    for name in where.choose(("mlp", "cnn2", "resnet10"), ("mlp",)):
        epochs = {}
        for compiles in (True, False):
            settings = ComputeSettings(device=where.device, precision="float32", compile=compiles)
            try:
                compute = compute_for(settings)
            except SettingsError as error:  # No compiler is installed.
                print(error)
                return
            epochs[compiles] = epoch_of(where, name, compute)
        show(
            f"compiled / as it is, {name}", ratios(epochs[True], epochs[False], where.choose(9, 1))
        )


def epoch_of(where: Where, name: str, compute: Compute) -> Callable[[], None]:
    """Return a function that trains a model for an epoch, and waits until the device is done."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (320, 1, 28, 28), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, CLASSES, (320,), generator=rng).to(compute.device)
    model = compute.place(build(name, (1, 28, 28), CLASSES, seed=0)).train()
    optimizing = optimization_for(model.parameters(), TrainingSettings(), compute)
    loss_of = CrossEntropy(model)

    def train() -> None:
        there = x.to(compute.device)
        train_epochs(
            there, y, loss_of, optimizing, epochs=1, batch_size=32, generator=rng, compute=compute
        )
        where.wait()

    return train


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Make one training step."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def memory(where: Where) -> None:
    """Peak memory of the accelerator while a model is trained, in MB."""
    if torch.device(where.device).type != "cuda":
        print("nothing to measure: not a GPU")
        return
    for name in ("cnn2", "resnet18", "resnet50", "vgg19"):
        for batch in (16, 128, 1024):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            for _ in islice(trained_steps(name, batch, where), 3):
                pass
            print(f"{name}, batch {batch}: {torch.cuda.max_memory_allocated() / 1e6:.0f} MB")


def fedtype(where: Where) -> None:
    """FedType with the models of Table 1, two clients per round, on synthetic images."""
    as_many_rounds_as_fit(where, "table1-cifar10")


def felo(where: Where) -> None:
    """Felo with the models of Section 4, two clients per round, on synthetic images."""
    as_many_rounds_as_fit(where, "felo-cifar10")


def as_many_rounds_as_fit(where: Where, preset: str) -> None:
    """Run a preset for a limited time, and compare its last round with a plain PyTorch loop."""
    images = made_images(*where.choose((50_000, 10_000), (400, 50)))
    values = read_preset(preset)
    if where.quick:
        values |= {"clients": 2, "models.pool": "mlp", "data.min-samples": 2}
        values |= {"fedtype.proxy": "mlp"} if preset == "table1-cifar10" else {}
    here = {
        "data.partition": "iid",  # Clients of equal size, so that rounds take the same time.
        "fraction": 2 / int(str(values["clients"])),
        "evaluate-from": values["rounds"],
        "data.dataset": dataset_name(images, inline=True),
        "engine.backend": "inline",
        "engine.device": where.device,
    }
    config = resolve(values | here)
    rounds = Until(seconds=where.choose(where.seconds, 1.0))
    with contextlib.suppress(TimeIsUpError):
        finished(config, where.folder / preset, rounds)
    plain = plain_round(config, rounds.last_models, images["train"], where)
    last = rounds.seconds[-1]
    print(
        f"last round ({', '.join(rounds.last_models)}) / the clients' epochs with a DataLoader: "
        f"{last / plain:.2f} ({last:.1f} s, {plain:.1f} s)"
    )


def plain_round(
    config: Config, models: list[str], train: tuple[np.ndarray, np.ndarray], where: Where
) -> float:
    """Return the seconds that a plain PyTorch loop needs for the epochs of a round's clients.

    Each model is trained for one epoch on a client's number of images, and its time is multiplied
    by the number of epochs. Nothing is sent or evaluated.
    """
    run = config.run
    each = int(len(train[1]) / run.clients * (1 - run.data.test_fraction))
    x = torch.from_numpy(train[0][:each]).float().div_(127.5).sub_(1.0)
    y = torch.from_numpy(train[1][:each])
    seconds = 0.0
    for name in models:
        batches = DataLoader(
            TensorDataset(x, y), run.training.batch_size, shuffle=True, drop_last=True
        )
        model = build(name, SHAPE, CLASSES, seed=0)
        seconds += plain_epoch(model.to(where.device), batches, where)
    return seconds * run.training.local_epochs


def plain_epoch(model: nn.Module, batches: Any, where: Where) -> float:
    """Return the seconds of one epoch of a plain PyTorch loop."""
    optimizer = torch.optim.Adam(model.parameters())
    started = time.perf_counter()
    for x, y in batches:
        descend(model, optimizer, x.to(where.device), y.to(where.device))
    where.wait()
    return time.perf_counter() - started


class TimeIsUpError(Exception):
    """Raised if a run has reached its maximum number of rounds, or its time limit."""


class Until(Watcher):
    """Watcher that prints each round's time, and ends the run after `rounds` or `seconds`."""

    def __init__(self, rounds: int = 1_000_000, seconds: float = 1e9) -> None:
        self.rounds, self.end = rounds, time.perf_counter() + seconds
        self.seconds: list[float] = []
        self.models: dict[str, str] = {}
        self.last_models: list[str] = []
        """Models of the clients that were trained in the last round."""

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Store the clients' models."""
        self.models = dict(models)

    def round_finished(self, record: RoundRecord) -> None:
        """Print the round's time. Raises TimeIsUpError if a limit is reached."""
        self.seconds.append(record.seconds.total)
        self.last_models = [self.models[client] for client in record.answered]
        print(f"round {record.round}: {record.seconds.total:.1f} s", flush=True)
        if record.round >= self.rounds or time.perf_counter() > self.end:
            raise TimeIsUpError


PIECES = {
    "methods": methods,
    "resume": resume,
    "deterministic": deterministic,
    "precision": precision,
    "waits": waits,
    "shared": shared,
    "conformal": conformal,
    "compile": compiled,
    "memory": memory,
    "fedtype": fedtype,
    "felo": felo,
}


def main() -> None:
    """Run the named benchmarks, or all benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pieces", nargs="*", choices=[[], *PIECES], help="default: all")
    parser.add_argument("--device", default="auto", help="as engine.device; default: a GPU")
    parser.add_argument("--seconds", type=float, default=120.0, help="of fedtype and of felo")
    parser.add_argument("--seeds", default="0,1,2", help="of precision")
    parser.add_argument("--rounds", type=int, default=4, help="of deterministic and of precision")
    parser.add_argument("--quick", action="store_true", help="a few seconds each: do they run?")
    chosen = parser.parse_args()
    device = find_device(chosen.device)
    if chosen.device == "auto" and device.type == "cpu":
        raise SystemExit("no accelerator is here; --device cpu runs the pieces on the processor")
    named = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    print(f"{named}, PyTorch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        seeds = tuple(map(int, chosen.seeds.split(",")))
        where = Where(str(device), chosen.quick, Path(folder), chosen.seconds, seeds, chosen.rounds)
        for name in chosen.pieces or PIECES:
            piece, started = PIECES[name], time.perf_counter()
            print(f"\n{name}: {piece.__doc__}", flush=True)
            piece(where)
            print(f"({time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
