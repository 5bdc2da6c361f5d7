"""What is measured in a round and in a run, as plain data that can be written as JSON."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fedhet.errors import KnowledgeError

Accuracy = dict[str, dict[str, dict[str, float]]]
"""protocol ("personal", "common") -> kind ("private", "proxy", …) -> client -> accuracy."""

PROTOCOLS = ("personal", "common")
MOST = 1e15
"""The largest loss, time or size that a client may report; sums and squares of it are finite."""
KINDS = ("private", "local", "proxy", "global", "server")
"""`local`: the private model as it was after training alone, before anything was learned."""


def metric_name(protocol: str, kind: str) -> str:
    """Return the name under which a client reports an accuracy."""
    return f"accuracy.{protocol}.{kind}"


def spread(per_client: Mapping[str, float]) -> dict[str, Any]:
    """Return mean, standard deviation, worst and the values, each client counting once."""
    values = np.array([per_client[name] for name in sorted(per_client)])
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "worst": float(values.min()),
        "per_client": {name: float(per_client[name]) for name in sorted(per_client)},
    }


def summarise(
    accuracy: Accuracy, without: Collection[str] = ()
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return `spread` for each protocol and kind that somebody has, some clients left out."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for protocol, kinds in sorted(accuracy.items()):
        for kind, per_client in sorted(kinds.items()):
            kept = {name: value for name, value in per_client.items() if name not in without}
            if kept:
                found.setdefault(protocol, {})[kind] = spread(kept)
    return found


def relative(accuracy: Accuracy, without: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return, by protocol, each client's private over its local accuracy: `spread`, and the best.

    Of the clients that reported both; one that was never right alone has no ratio.
    """
    found: dict[str, dict[str, Any]] = {}
    for protocol, kinds in sorted(accuracy.items()):
        before, after = kinds.get("local", {}), kinds.get("private", {})
        ratios = {
            name: after[name] / before[name]
            for name in (before.keys() & after.keys()) - set(without)
            if before[name] > 0
        }
        if ratios:
            found[protocol] = {"best": max(ratios.values()), **spread(ratios)}
    return found


@dataclass
class Seconds:
    """Where time went. `train` and `evaluate` are sums over clients; the others are wall time."""

    total: float = 0.0
    train: float = 0.0
    evaluate: float = 0.0
    server: float = 0.0
    overhead: float = 0.0

    def add(self, other: Seconds) -> None:
        """Add another account to this one."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class RoundRecord:
    """One line of metrics.jsonl."""

    round: int
    asked: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    accuracy: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    relative: dict[str, dict[str, Any]] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    peak_memory_mb: float = 0.0
    method: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain data; `from_json` takes it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RoundRecord:
        """Return the record that `as_json` wrote. Raises TypeError if it did not."""
        return cls(**{**record, "seconds": Seconds(**record["seconds"])})


def mean_figures(said: Sequence[Mapping[str, bool | int | float | str]]) -> dict[str, float]:
    """Return the mean of each number that clients report, over those who report it."""
    names = sorted({name for scalars in said for name in scalars})
    return {
        name: float(np.mean([float(scalars[name]) for scalars in said if name in scalars]))
        for name in names
    }


def peak_memory_mb() -> float:
    """Return the most memory that this process has held, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


@dataclass(frozen=True)
class Measured:
    """What a client measured of itself in one message."""

    accuracy: dict[tuple[str, str], float]
    """(protocol, kind) -> accuracy in [0, 1]."""
    loss: float | None
    train_seconds: float
    evaluate_seconds: float
    memory_mb: float


def write_measures(measured: Measured) -> dict[str, float]:
    """Return the measures under the flat names that travel; `read_measures` takes them back."""
    flat = {metric_name(*key): value for key, value in measured.accuracy.items()}
    if measured.loss is not None:
        flat["loss"] = measured.loss
    flat["seconds.train"] = measured.train_seconds
    flat["seconds.evaluate"] = measured.evaluate_seconds
    flat["memory"] = measured.memory_mb
    return flat


def read_measures(sender: str, metrics: Mapping[str, object]) -> Measured:
    """Return what a client says it measured. Raises KnowledgeError naming it and the figure."""
    accuracy = {
        (protocol, kind): _number(sender, metrics, metric_name(protocol, kind), high=1.0)
        for protocol in PROTOCOLS
        for kind in KINDS
        if metric_name(protocol, kind) in metrics
    }
    return Measured(
        accuracy,
        _number(sender, metrics, "loss", low=-MOST) if "loss" in metrics else None,
        _number(sender, metrics, "seconds.train"),
        _number(sender, metrics, "seconds.evaluate"),
        _number(sender, metrics, "memory"),
    )


def _number(
    sender: str,
    metrics: Mapping[str, object],
    name: str,
    low: float = 0.0,
    high: float = MOST,
) -> float:
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise KnowledgeError(sender, name, f"is {value!r}, must be a finite number")
    if not low <= value <= high:
        raise KnowledgeError(sender, name, f"is {value}, must be from {low:g} to {high:g}")
    return float(value)
