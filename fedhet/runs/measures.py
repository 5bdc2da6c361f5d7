"""What a client measures and reports besides its knowledge: scores, losses, times and memory.

It travels as flat metric names; what comes from a client is checked and bounded here.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from fedhet.base.errors import KnowledgeError, nearest, shown
from fedhet.base.metrics import ACCURACY, metric_of
from fedhet.learning.training import Evaluation
from fedhet.runs.records import PROTOCOLS

P = ParamSpec("P")
Result = TypeVar("Result")
MOST = 1e15
"""The largest loss, time or size that a client may report; keeps sums and squares finite."""


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


def forget_peak() -> None:
    """Let this process's peak memory begin at what it uses now, where the system allows that.

    Otherwise the peak of a run would be that of the largest before it in the same process.
    """
    with contextlib.suppress(OSError):  # Linux alone has it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def timed(work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> tuple[Result, float]:
    """Return what `work` returns, and the seconds that it took."""
    started = time.perf_counter()
    return work(*args, **kwargs), time.perf_counter() - started


Place = tuple[str, str, str]
"""A metric, the protocol of the test split, and the kind of model."""


@dataclass(frozen=True)
class Measured:
    """A client's measurements in one message."""

    scores: dict[Place, float]
    """What the models score; those of a model include its accuracy."""
    loss: float | None = None
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    memory_mb: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    """Of `FIGURES`, those that there are; each in [0, 1]."""
    epsilon: float | None = None
    """What the run has cost the client's samples so far; None: they are not protected."""
    majority: dict[str, float] = field(default_factory=dict)
    """By protocol, the accuracy of always predicting the test split's most frequent class."""


def placed(scores: Mapping[tuple[str, str], Evaluation]) -> dict[Place, float]:
    """Return the metrics in scores by (protocol, kind of model)."""
    return {
        (metric, *place): value
        for place, score in scores.items()
        for metric, value in (score.metrics | {ACCURACY: score.accuracy}).items()
    }


def write_measures(measured: Measured) -> dict[str, float]:
    """Return the measurements by flat metric names; `read_measures` is the inverse."""
    flat = {".".join(place): value for place, value in measured.scores.items()}
    if measured.loss is not None:
        flat["loss"] = measured.loss
    if measured.epsilon is not None:
        flat["epsilon"] = measured.epsilon
    flat["seconds.train"] = measured.train_seconds
    flat["seconds.evaluate"] = measured.evaluate_seconds
    flat["memory"] = measured.memory_mb
    flat |= {f"{MAJORITY}.{protocol}": share for protocol, share in measured.majority.items()}
    return flat | measured.figures


SPENT = "spent"
"""Set beside an error: the client has no privacy left to spend."""
LACKS = "lacks"
"""Set beside an error: the client does not have the weights on which its instruction builds."""
FIGURES = ("pseudo_labels", "pseudo_error")
"""With `training.semi`: the share of predictions that became pseudo-labels, and of these that are
wrong, where the truth is known."""
WORK = "work"
"""With a simulated clock: the training samples that a client has used, each time it was used."""
MAJORITY = "majority"
"""Before a protocol: the accuracy of always predicting the most frequent class there."""
MEASURES = (
    "loss", "epsilon", "seconds.train", "seconds.evaluate", "memory", WORK, *FIGURES,
    *(f"{MAJORITY}.{protocol}" for protocol in PROTOCOLS),
)  # fmt: skip
"""The names of `write_measures` besides the scores."""


def read_measures(
    sender: str, metrics: Mapping[str, object], kinds: Sequence[str], wanted: Sequence[str]
) -> Measured:
    """Return a client's measurements of models of the method's `kinds`.

    `wanted`: the names under which the run's metrics are reported. Raises KnowledgeError naming the
    sender and the metric, for any other metric too.
    """
    if WORK in metrics:
        _number(sender, metrics, WORK)
    places = {".".join(place): place for place in product(wanted, PROTOCOLS, kinds)}
    known = (*places, *MEASURES)
    for name in metrics:
        if name not in known:
            raise KnowledgeError(
                sender, name, f"is not a metric of this method{nearest(name, known)}"
            )
    return Measured(
        {places[name]: _score(sender, metrics, places[name]) for name in places if name in metrics},
        _number(sender, metrics, "loss", low=-MOST) if "loss" in metrics else None,
        _number(sender, metrics, "seconds.train"),
        _number(sender, metrics, "seconds.evaluate"),
        _number(sender, metrics, "memory"),
        {name: _number(sender, metrics, name, high=1.0) for name in FIGURES if name in metrics},
        _number(sender, metrics, "epsilon") if "epsilon" in metrics else None,
        {
            protocol: _number(sender, metrics, name, high=1.0)
            for protocol in PROTOCOLS
            if (name := f"{MAJORITY}.{protocol}") in metrics
        },
    )


def _score(sender: str, metrics: Mapping[str, object], place: Place) -> float:
    """Return a metric of a model; its accuracy on the same test set must be there too."""
    name, accuracy = ".".join(place), ".".join((ACCURACY, *place[1:]))
    if accuracy not in metrics:
        raise KnowledgeError(sender, name, f"comes without {accuracy}")
    metric = metric_of(place[0])
    value = _number(sender, metrics, name, high=metric.highest)
    if 0 < value < metric.least:
        fault = f"is {value}, must be 0 or from {metric.least:g} to {metric.highest:g}"
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
