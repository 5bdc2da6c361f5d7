"""What a client measures and reports beside its knowledge: accuracies, losses, times and memory.

It travels as flat metric names; what comes from a client is checked and bounded here.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedhet.errors import KnowledgeError, nearest, shown
from fedhet.runs.records import LEAST_ACCURACY, PROTOCOLS
from fedhet.settings.metrics import ACCURACY, metric_of

MOST = 1e15
"""The largest loss, time or size that a client may report; keeps sums and squares finite."""


def metric_name(protocol: str, kind: str, metric: str = ACCURACY) -> str:
    """Return the name under which a client reports an accuracy, or another metric."""
    return f"{metric}.{protocol}.{kind}"


def mean_figures(said: Sequence[Mapping[str, bool | int | float | str]]) -> dict[str, float]:
    """Return the mean of each scalar that clients report, over the clients that report it."""
    names = sorted({name for scalars in said for name in scalars})
    return {
        name: float(np.mean([float(scalars[name]) for scalars in said if name in scalars]))
        for name in names
    }


def peak_memory_mb() -> float:
    """Return the peak memory of this process, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


@dataclass(frozen=True)
class Measured:
    """A client's measurements in one message."""

    accuracy: dict[tuple[str, str], float]
    """(protocol, kind) -> accuracy in [0, 1]."""
    loss: float | None
    train_seconds: float
    evaluate_seconds: float
    memory_mb: float
    figures: dict[str, float] = field(default_factory=dict)
    """Of `FIGURES`, those that there are; each in [0, 1]."""
    metrics: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """(metric, protocol, kind) -> value, of the metrics that the run asks for."""


def write_measures(measured: Measured) -> dict[str, float]:
    """Return the measurements by flat metric names; `read_measures` is the inverse."""
    flat = {metric_name(*key): value for key, value in measured.accuracy.items()}
    if measured.loss is not None:
        flat["loss"] = measured.loss
    flat["seconds.train"] = measured.train_seconds
    flat["seconds.evaluate"] = measured.evaluate_seconds
    flat["memory"] = measured.memory_mb
    return flat | measured.figures | {".".join(key): v for key, v in measured.metrics.items()}


FIGURES = ("pseudo_labels", "pseudo_error")
"""With `training.semi`: the share of predictions that became pseudo-labels, and of these that are
wrong, where the truth is known."""
MEASURES = ("loss", "seconds.train", "seconds.evaluate", "memory", *FIGURES)
"""The metric names of `write_measures` besides the accuracies."""


def read_measures(
    sender: str,
    metrics: Mapping[str, object],
    kinds: Sequence[str],
    wanted: Sequence[str] = (),
) -> Measured:
    """Return a client's measurements of models of the method's `kinds`.

    `wanted`: the names of the metrics that the run asks for beside accuracy. Raises KnowledgeError
    naming the sender and the metric, for any other metric too.
    """
    names = {
        metric_name(protocol, kind): (protocol, kind) for protocol in PROTOCOLS for kind in kinds
    }
    others = {
        metric_name(protocol, kind, metric): (metric, protocol, kind)
        for metric in wanted
        for protocol, kind in names.values()
    }
    known = (*names, *MEASURES, *others)
    for name in metrics:
        if name not in known:
            raise KnowledgeError(sender, name, f"is no metric of this method{nearest(name, known)}")
    return Measured(
        {key: _accuracy(sender, metrics, name) for name, key in names.items() if name in metrics},
        _number(sender, metrics, "loss", low=-MOST) if "loss" in metrics else None,
        _number(sender, metrics, "seconds.train"),
        _number(sender, metrics, "seconds.evaluate"),
        _number(sender, metrics, "memory"),
        {name: _number(sender, metrics, name, high=1.0) for name in FIGURES if name in metrics},
        {
            key: _metric(sender, metrics, name, key)
            for name, key in others.items()
            if name in metrics
        },
    )


def _metric(
    sender: str, metrics: Mapping[str, object], name: str, key: tuple[str, str, str]
) -> float:
    """Return a metric of a model; its accuracy on the same test set must be there too."""
    metric, *where = key
    if (beside := metric_name(*where)) not in metrics:
        raise KnowledgeError(sender, name, f"has no {beside} beside it")
    return _number(sender, metrics, name, high=metric_of(metric).highest)


def _accuracy(sender: str, metrics: Mapping[str, object], name: str) -> float:
    value = _number(sender, metrics, name, high=1.0)
    if 0 < value < LEAST_ACCURACY:
        fault = f"is {value}, must be 0 or from {LEAST_ACCURACY:g} to 1"
        raise KnowledgeError(sender, name, fault)
    return value


def _number(
    sender: str,
    metrics: Mapping[str, object],
    name: str,
    low: float = 0.0,
    high: float = MOST,
) -> float:
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise KnowledgeError(sender, name, f"is {shown(value)}, must be a finite number")
    if not low <= value <= high:
        raise KnowledgeError(sender, name, f"is {shown(value)}, must be from {low:g} to {high:g}")
    return float(value)
