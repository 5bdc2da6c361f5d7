"""Magnitude of honest replies, as a multiple of the other clients' median.

    python -m benchmarks.honest_sizes [--methods a,b] [--seeds 0,1,2] [--device cpu]

Every method trains small models on digits with eight clients, without an attack and without
clipping. The data is IID or Dirichlet (concentrations 0.5 and 0.1). The pools are the method's
default pool and two other pools, one of which contains residual networks. The benchmark prints the
maximum ratio of each part of a reply over all rounds, and then the maximum over all methods. A part
with a ratio above 'defense.clip-factor' would be scaled down.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.malicious import OWN, can_be_struck
from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate
from fedhet.kinds import IMAGE
from fedhet.methods.registry import find_method, shipped_names
from fedhet.server import steps
from fedhet.server.reply import Reply

POOLS = {
    "perceptrons and small convolutions": ["mlp", "mlp2", "cnn2", "cnn3", "cnn3"],
    "residual networks": ["resnet10", "cnn3", "resnet18", "mlp", "resnet10"],
}
PARTITIONS: dict[str, dict[str, object]] = {
    "iid": {"data.partition": "iid"},
    "0.5": {"data.alpha": 0.5},
    "0.1": {"data.alpha": 0.1},
}
SMALL: dict[str, object] = {
    "clients": 8,
    "rounds": 5,
    "evaluate-every": 5,
    "data.min-samples": 4,
    "training.local-epochs": 3,
    "engine.backend": "inline",
    "engine.precision": "float32",
    "defense.clip-factor": 0.01,
}


def largest(method: str, settings: Mapping[str, object]) -> dict[str, float]:
    """Run a method, and return the maximum ratio of each part of its replies."""
    maxima: dict[str, float] = defaultdict(float)

    def measured(
        replies: Iterable[Reply], *, contract: Any, sizes: Any, **_: Any
    ) -> Iterator[Reply]:
        replies = list(replies)
        for parts in steps.magnitude_ratios(replies, contract, sizes).values():
            for part, ratio in parts.items():
                maxima[part] = max(maxima[part], ratio)
        yield from replies

    config = resolve({**SMALL, **OWN.get(method, {}), **settings, "method": method})
    with tempfile.TemporaryDirectory() as folder, patch.object(steps, "clip", measured):
        simulate(config, Path(folder) / "run")
    return maxima


def main() -> None:
    """Print a line for each method, pool and partition."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(sorted(shipped_names())))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    all_ratios: list[float] = []
    for method in chosen.methods.split(","):
        if not can_be_struck(method, "x 10"):
            continue
        own = find_method(method).spec.pool(IMAGE)
        pools = {"its own models": list(own), **(POOLS if len(own) > 1 else {})}
        for (pool, models), (name, partition) in (
            (pool, partition) for pool in pools.items() for partition in PARTITIONS.items()
        ):
            maxima: dict[str, float] = defaultdict(float)
            for seed in map(int, chosen.seeds.split(",")):
                settings = {"models.pool": models, "seed": seed, "engine.device": chosen.device}
                with contextlib.suppress(SettingsError):  # skip unsupported pools
                    for part, ratio in largest(method, {**settings, **partition}).items():
                        maxima[part] = max(maxima[part], ratio)
                        all_ratios.append(ratio)
            each = ", ".join(f"{part} {ratio:.2f}" for part, ratio in sorted(maxima.items()))
            print(f"{method}, {pool}, {name}: {each}", flush=True)
    print(f"largest {max(all_ratios):.2f}; above 4: {sum(r > 4 for r in all_ratios)} of", end=" ")
    print(f"{len(all_ratios)} parts of runs, above 10: {sum(r > 10 for r in all_ratios)}")


if __name__ == "__main__":
    main()
