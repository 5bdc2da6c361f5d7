"""What clients measure and report, and statistics over a round's clients and over the rounds.

A client's measurements are sent as flat metric names; they are checked and bounded here.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from fedhet.base.errors import KnowledgeError, nearest, shown
from fedhet.base.metrics import ACCURACY, MIN_ACCURACY, metric_of
from fedhet.runs.records import (
    KINDS,
    NAN,
    PROTOCOLS,
    ByPlace,
    FinalScore,
    FinalScores,
    Ratio,
    RoundRecord,
    Score,
    Scores,
)
from fedhet.runs.units import position

if TYPE_CHECKING:
    from fedhet.learning.training import Evaluation

P = ParamSpec("P")
Result = TypeVar("Result")
MAX_REPORTED = 1e15
"""The largest loss, time or size that a client may report; keeps sums and squares finite."""
ScoreKey = tuple[str, str, str]
"""A metric, the protocol of the test split, and the kind of model."""
BUDGET_EXHAUSTED = "spent"
"""Set beside an error: the client has no privacy left to spend."""
MISSING_BASE = "lacks"
"""Set beside an error: the client does not have the weights on which its instruction builds."""
SEMI_METRICS = ("pseudo_labels", "pseudo_error")
"""With `training.semi`: the share of predictions that became pseudo-labels, and of these that are
wrong, where the truth is known."""
WORK = "work"
"""With a simulated clock: the training samples that a client has used, each time it was used."""
MAJORITY = "majority"
"""Before a protocol: the accuracy of always predicting the most frequent class there."""
MEASURES = (
    "loss", "epsilon", "seconds.train", "seconds.evaluate", "memory", WORK, *SEMI_METRICS,
    *(f"{MAJORITY}.{protocol}" for protocol in PROTOCOLS),
)  # fmt: skip
"""The names of `write_measures` besides the scores."""
TAIL = 5
"""The tail of a run is one round in this many: the last fifth."""


def mean_metrics(said: Sequence[Mapping[str, bool | int | float | str]]) -> dict[str, float]:
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


def reset_peak_memory() -> None:
    """Let this process's peak memory begin at what it uses now, where the system allows that.

    Otherwise the peak of a run would be that of the largest before it in the same process.
    """
    with contextlib.suppress(OSError):  # Linux alone has it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def timed(work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> tuple[Result, float]:
    """Return what `work` returns, and the seconds that it took."""
    started = time.perf_counter()
    return work(*args, **kwargs), time.perf_counter() - started


@dataclass(frozen=True)
class Measured:
    """A client's measurements in one message."""

    scores: dict[ScoreKey, float]
    """What the models score; those of a model include its accuracy."""
    loss: float | None = None
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    memory_mb: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of `SEMI_METRICS`, those that there are; each in [0, 1]."""
    epsilon: float | None = None
    """What the run has cost the client's samples so far; None: they are not protected."""
    majority: dict[str, float] = field(default_factory=dict)
    """By protocol, the accuracy of always predicting the test split's most frequent class."""


def placed(scores: Mapping[tuple[str, str], Evaluation]) -> dict[ScoreKey, float]:
    """Return the metrics in scores by (protocol, kind of model)."""
    return {
        (metric, *place): value
        for place, score in scores.items()
        for metric, value in (score.metrics | {ACCURACY: score.accuracy}).items()
    }


def write_measures(measured: Measured) -> dict[str, float]:
    """Return the measurements by flat metric names; `read_measures` is the inverse."""
    flat = {".".join(place): value for place, value in measured.scores.items()}
    sometimes = {"loss": measured.loss, "epsilon": measured.epsilon}
    flat |= {name: value for name, value in sometimes.items() if value is not None}
    flat["seconds.train"] = measured.train_seconds
    flat["seconds.evaluate"] = measured.evaluate_seconds
    flat["memory"] = measured.memory_mb
    flat |= {f"{MAJORITY}.{protocol}": share for protocol, share in measured.majority.items()}
    return flat | measured.metrics


def read_measures(
    sender: str, metrics: Mapping[str, object], kinds: Sequence[str], wanted: Sequence[str]
) -> Measured:
    """Return a client's measurements of models of the method's `kinds`.

    `wanted`: the names under which the run's metrics are reported. Raises KnowledgeError naming the
    sender and the metric, for any other metric too.
    """
    number = partial(_number, sender, metrics)
    if WORK in metrics:
        number(WORK)
    places = {".".join(place): place for place in product(wanted, PROTOCOLS, kinds)}
    known = (*places, *MEASURES)
    for name in metrics:
        if name not in known:
            fault = f"is not a metric of this method{nearest(name, known)}"
            raise KnowledgeError(sender, name, fault)
    scores: dict[ScoreKey, float] = {}
    for name in filter(metrics.__contains__, places):
        metric, accuracy = metric_of(places[name][0]), ".".join((ACCURACY, *places[name][1:]))
        if accuracy not in metrics:
            raise KnowledgeError(sender, name, f"comes without {accuracy}")
        scores[places[name]] = value = number(name, metric.lowest, metric.highest)
        if 0 < value < metric.min_positive:
            fault = f"is {value}, must be 0 or from {metric.min_positive:g} to {metric.highest:g}"
            raise KnowledgeError(sender, name, fault)
    return Measured(
        scores,
        number("loss", low=-MAX_REPORTED) if "loss" in metrics else None,
        number("seconds.train"),
        number("seconds.evaluate"),
        number("memory"),
        {name: number(name, high=1.0) for name in SEMI_METRICS if name in metrics},
        number("epsilon") if "epsilon" in metrics else None,
        {
            protocol: number(name, high=1.0)
            for protocol in PROTOCOLS
            if (name := f"{MAJORITY}.{protocol}") in metrics
        },
    )


def _number(
    sender: str,
    metrics: Mapping[str, object],
    name: str,
    low: float = 0.0,
    high: float = MAX_REPORTED,
) -> float:
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise KnowledgeError(sender, name, f"is {shown(value)}, must be a finite number")
    if not low <= value <= high:
        raise KnowledgeError(sender, name, f"is {shown(value)}, must be from {low:g} to {high:g}")
    return float(value)


@dataclass(frozen=True)
class Tail:
    """A mean accuracy over the last rounds of a run, and the rounds that it is over."""

    mean: float = NAN
    rounds: tuple[int, ...] = ()


def spread(per_client: Mapping[str, float], *, lower_is_better: bool = False) -> Score:
    """Return mean, standard deviation, worst and the values; all clients have equal weight."""
    values = np.array([per_client[name] for name in sorted(per_client)])
    return Score(
        mean=float(values.mean()),
        std=float(values.std()),
        worst=float(values.max() if lower_is_better else values.min()),
        per_client={name: float(per_client[name]) for name in sorted(per_client)},
    )


def summarize(
    values: ByPlace, without: Collection[str] = (), *, lower_is_better: bool = False
) -> Scores:
    """Return `spread` for each protocol and kind that has values, without some clients."""
    found: Scores = {}
    for protocol, kinds in sorted(values.items()):
        for kind, per_client in sorted(kinds.items()):
            if kept := {name: v for name, v in per_client.items() if name not in without}:
                score = spread(kept, lower_is_better=lower_is_better)
                found.setdefault(protocol, {})[kind] = score
    return found


def relative(accuracy: ByPlace, without: Collection[str] = ()) -> dict[str, Ratio]:
    """Return, by protocol, `spread` and the best of each client's private / local accuracy.

    Only for clients that reported both; a client whose local accuracy is 0 has no ratio, nor has
    one whose accuracy is below any that a test set can give.
    """
    found: dict[str, Ratio] = {}
    for protocol, kinds in sorted(accuracy.items()):
        before, after = kinds.get("local", {}), kinds.get("private", {})
        ratios = {
            name: after[name] / before[name]
            for name in (before.keys() & after.keys()) - set(without)
            if before[name] >= MIN_ACCURACY
        }
        if ratios:
            found[protocol] = Ratio(best=max(ratios.values()), **dict(spread(ratios)))
    return found


def shown_scores(record: RoundRecord | None, protocol: str) -> tuple[str, dict[str, Score]]:
    """Return the protocol to show, and its scores by kind of model, the private models' first.

    It is `protocol`, or another one if only that was evaluated; without scores the dict is empty.
    """
    found = record.accuracy if record else {}
    shown = next((p for p in (protocol, *PROTOCOLS) if found.get(p)), protocol)
    kinds = found.get(shown, {})
    order = sorted(kinds, key=lambda kind: (kind == "local", position(kind, KINDS)))
    return shown, {kind: kinds[kind] for kind in order}


def headline_mean(record: RoundRecord, protocol: str) -> float | None:
    """Return the headline number of a round; None if it was not evaluated."""
    _, kinds = shown_scores(record, protocol)
    return next((score.mean for score in kinds.values()), None)


def best_round(records: Sequence[RoundRecord], protocol: str) -> int:
    """Return the first round with the highest headline number; 0 if none was evaluated."""
    means = {record.round: headline_mean(record, protocol) for record in records}
    known = {number: mean for number, mean in means.items() if mean is not None and mean == mean}
    return max(known, key=lambda number: known[number], default=0)


def tail_of(
    records: Sequence[RoundRecord], protocol: str, kind: str, metric: str = ACCURACY
) -> Tail:
    """Return the mean of the last fifth of the rounds: of `ceil(rounds / 5)`, at least one.

    It is the mean of the rounds' own means over clients, each evaluated round counting once. If
    none of these rounds was evaluated, the last one before them that was counts alone. A round's
    mean is over all clients whose current models have been evaluated, whether they were sampled
    in that round or not; see `fedhet.server.round.RoundState.close`.
    """
    means = {
        record.round: score.mean
        for record in records
        if (score := record.score(metric, protocol, kind))
    }
    known = {number: mean for number, mean in means.items() if not math.isnan(mean)}
    if not known:
        return Tail()
    first = tail_begins(records[-1].round)
    chosen = [number for number in known if number >= first] or [max(known)]
    return Tail(float(np.mean([known[number] for number in chosen])), tuple(chosen))


def tail_begins(rounds: int) -> int:
    """Return the first of the last fifth of the rounds."""
    return rounds - math.ceil(rounds / TAIL) + 1


def final_scores(records: Sequence[RoundRecord]) -> dict[str, FinalScores]:
    """Return the scores of the last of all rounds by metric, each with its tail."""
    found: dict[str, FinalScores] = {}
    for metric in records[-1].scores if records else ():
        scores = found.setdefault(metric, {})
        for protocol, kind, score in records[-1].each(metric):
            tail = tail_of(records, protocol, kind, metric).mean
            clients = 0 if kind == "server" else len(score.per_client)
            final = FinalScore(**dict(score), tail=tail, clients=clients)
            scores.setdefault(protocol, {})[kind] = final
    return found


def scalars(
    record: RoundRecord, method: str, *, clients: bool = False
) -> Iterator[tuple[str, float]]:
    """Yield a round's metrics by their TensorBoard names, with those of each client if wanted."""
    for metric in record.scores:
        for protocol, kind, score in record.each(metric):
            name = f"{metric}-{protocol}-{kind}"
            for statistic in ("mean", "std", "worst"):
                yield f"{name}/{statistic}", getattr(score, statistic)
            for client, value in score.per_client.items() if clients else ():
                yield f"{name}/clients/{client}", value
    for protocol, ratio in record.relative.items():
        for statistic in ("mean", "best", "worst"):
            yield f"relative-{protocol}/{statistic}", getattr(ratio, statistic)
    if record.loss:
        yield "loss/mean", record.loss.mean
    for name in ("asked", "answered", "failed", "absent"):
        yield f"clients/{name}", len(getattr(record, name))
    yield "bytes/up", record.bytes_up
    yield "bytes/down", record.bytes_down
    for name, value in record.method.items():
        yield f"{method}/{name}", value
    for name, value in record.seconds:
        yield f"seconds/{name}", value
