"""Client measurements, and their statistics over clients and over rounds.

This module validates the metrics that clients send under flat names, such as
`accuracy.common.private`.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from fedhet.base.errors import KnowledgeError, nearest, safe_repr
from fedhet.base.metrics import ACCURACY, MIN_ACCURACY, metric_of
from fedhet.runs.records import (
    EVALUATED,
    NAN,
    VALIDATION,
    ByPlace,
    FinalScore,
    FinalScores,
    Headline,
    Ratio,
    RoundRecord,
    Score,
    Scores,
)

if TYPE_CHECKING:
    from fedhet.learning.training import Evaluation

P = ParamSpec("P")
Result = TypeVar("Result")
MAX_REPORTED = 1e15
"""Maximum loss, time or size that a client may report. With this limit, sums and squares are
finite."""
MAX_TESTED = 1e9
"""Maximum number of test samples that a client may report."""
ScoreKey = tuple[str, str, str]
"""Key of a score: metric, protocol (test set), and kind of model."""
BUDGET_EXHAUSTED = "spent"
"""Metric that accompanies an error if the client's privacy budget is exhausted."""
EVALUATES_FIRST = "evaluates-first"
"""Config entry of an instruction to train with the number of arrays, at its start, that belong to
an instruction to evaluate before the training."""
EVALUATION = "evaluation."
"""Prefix of the metrics of an evaluation before the training."""
MISSING_BASE = "lacks"
"""Metric that accompanies an error if the client lacks the base weights of its instruction."""
SEMI_METRICS = ("pseudo_labels", "pseudo_error")
"""Metrics for `training.semi`: the fraction of predictions that became pseudo-labels, and the error
rate of pseudo-labels whose true label is known."""
WORK = "work"
"""Metric for a simulated clock: number of training samples processed; a sample counts once per
epoch."""
MAJORITY = "majority"
"""Prefix of the metric for the headline score of a constant prediction, such as the most frequent
class. The protocol follows the prefix."""
TESTED = "tested"
"""Prefix of the metric for the number of test samples. The protocol follows the prefix."""
MEASURES = (
    "loss", "epochs", "epsilon", "seconds.train", "seconds.evaluate", "memory", WORK, *SEMI_METRICS,
    *(f"{prefix}.{protocol}" for prefix in (MAJORITY, TESTED) for protocol in EVALUATED),
)  # fmt: skip
"""Metric names written by `write_measures`, other than scores."""
TAIL = 5
"""Inverse of the fraction of a run's rounds that form its tail (the last fifth)."""


def mean_metrics(reported: Sequence[Mapping[str, bool | int | float | str]]) -> dict[str, float]:
    """Return the mean of each scalar over the clients that report it."""
    names = sorted({name for scalars in reported for name in scalars})
    return {
        name: float(np.mean([float(scalars[name]) for scalars in reported if name in scalars]))
        for name in names
    }


def peak_memory_mb() -> float:
    """Return the peak memory usage of this process, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def reset_peak_memory() -> None:
    """Reset the peak memory of this process to its current usage, if supported (Linux).

    Otherwise, the peak would include earlier runs in the same process.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def timed(function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> tuple[Result, float]:
    """Call a function, and return its result and duration in seconds."""
    started = time.perf_counter()
    return function(*args, **kwargs), time.perf_counter() - started


@dataclass(frozen=True)
class Measured:
    """A client's measurements in one message."""

    scores: dict[ScoreKey, float]
    """Scores of the evaluated models. Each model has a score for the headline metric."""
    loss: float | None = None
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    memory_mb: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Reported metrics among `SEMI_METRICS`, each in [0, 1]."""
    epsilon: float | None = None
    """Privacy budget consumed by the run so far, or None without differential privacy."""
    majority: dict[str, float] = field(default_factory=dict)
    """Headline score of a constant prediction on the test split, by protocol."""
    tested: dict[str, int] = field(default_factory=dict)
    """Number of test samples, by protocol."""
    epochs: float = 0.0
    """Number of passes over the client's own labeled samples."""


def by_score_key(scores: Mapping[tuple[str, str], Evaluation]) -> dict[ScoreKey, float]:
    """Convert evaluations keyed by (protocol, kind) to values keyed by (metric, protocol, kind)."""
    return {
        (metric, *place): value
        for place, score in scores.items()
        for metric, value in (score.metrics | {ACCURACY: score.accuracy}).items()
        if metric != ACCURACY or not math.isnan(value)  # Only classification has accuracy.
    }


def count_tested(scores: Mapping[tuple[str, str], Evaluation]) -> dict[str, int]:
    """Return the number of test samples, by protocol, of evaluations keyed by (protocol, kind)."""
    return {protocol: score.samples for (protocol, _), score in scores.items() if score.samples}


def write_measures(measured: Measured) -> dict[str, float]:
    """Convert measurements to flat metric names (inverse of `read_measures`)."""
    flat = {".".join(key): value for key, value in measured.scores.items()}
    optional = {"loss": measured.loss, "epsilon": measured.epsilon}
    flat |= {name: value for name, value in optional.items() if value is not None}
    flat |= {"epochs": measured.epochs} if measured.epochs else {}
    flat["seconds.train"] = measured.train_seconds
    flat["seconds.evaluate"] = measured.evaluate_seconds
    flat["memory"] = measured.memory_mb
    flat |= {f"{MAJORITY}.{protocol}": value for protocol, value in measured.majority.items()}
    flat |= {f"{TESTED}.{protocol}": count for protocol, count in measured.tested.items()}
    return flat | measured.metrics


def read_measures(
    sender: str, metrics: Mapping[str, object], kinds: Sequence[str], score_names: Sequence[str]
) -> Measured:
    """Validate the metrics in a client's message. Raises KnowledgeError if a metric is invalid.

    `kinds` contains the kinds of models that the method evaluates, and `score_names` the names of
    the run's score metrics, with the headline metric first. All other metrics are rejected.
    """
    number = partial(_number, sender, metrics)
    if WORK in metrics:
        number(WORK)
    keys = {".".join(key): key for key in product(score_names, EVALUATED, kinds)}
    valid_names = (*keys, *MEASURES)
    for name in metrics:
        if name not in valid_names:
            fault = f"not a metric of this method{nearest(name, valid_names)}"
            raise KnowledgeError(sender, name, fault)
    scores: dict[ScoreKey, float] = {}
    for name in filter(metrics.__contains__, keys):
        metric, headline = metric_of(keys[name][0]), ".".join((score_names[0], *keys[name][1:]))
        if headline not in metrics:
            raise KnowledgeError(sender, name, f"reported without {headline}")
        scores[keys[name]] = value = number(name, metric.lowest, metric.highest)
        if 0 < value < metric.min_positive:
            rule = f"must be 0 or from {metric.min_positive:g} to {metric.highest:g}"
            raise KnowledgeError(sender, name, f"{rule}, got {value}")
    return Measured(
        scores,
        number("loss", low=-MAX_REPORTED) if "loss" in metrics else None,
        number("seconds.train"),
        number("seconds.evaluate"),
        number("memory"),
        {name: number(name, high=1.0) for name in SEMI_METRICS if name in metrics},
        number("epsilon") if "epsilon" in metrics else None,
        {
            protocol: number(name, high=metric_of(score_names[0]).highest)
            for protocol in EVALUATED
            if (name := f"{MAJORITY}.{protocol}") in metrics
        },
        {
            protocol: int(number(name, low=1.0, high=MAX_TESTED))
            for protocol in EVALUATED
            if (name := f"{TESTED}.{protocol}") in metrics
        },
        number("epochs") if "epochs" in metrics else 0.0,
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
        raise KnowledgeError(sender, name, f"must be a finite number, got {safe_repr(value)}")
    if not low <= value <= high:
        raise KnowledgeError(
            sender, name, f"must be from {low:g} to {high:g}, got {safe_repr(value)}"
        )
    return float(value)


@dataclass(frozen=True)
class Tail:
    """Mean score over the last rounds of a run, and the numbers of these rounds."""

    mean: float = NAN
    rounds: tuple[int, ...] = ()


def spread(
    per_client: Mapping[str, float],
    *,
    lower_is_better: bool = False,
    weights: Mapping[str, float] | None = None,
) -> Score:
    """Compute the mean, standard deviation and worst value over clients.

    The mean is weighted with the clients' `weights`, if given.
    """
    values = np.array([per_client[name] for name in sorted(per_client)])
    shares = [weights[name] for name in sorted(per_client)] if weights else None
    return Score(
        mean=float(values.mean() if shares is None else np.average(values, weights=shares)),
        std=float(values.std()),
        worst=float(values.max() if lower_is_better else values.min()),
        per_client={name: float(per_client[name]) for name in sorted(per_client)},
    )


def summarize(
    values: ByPlace,
    without: Collection[str] = (),
    *,
    lower_is_better: bool = False,
    weights: Mapping[str, float] | None = None,
) -> Scores:
    """Compute the `spread` of each protocol and kind over the clients that are not in `without`.

    `weights` contains the weights of the clients in means over validation samples. All other means,
    and means over a client without a known weight, have equal weights.
    """
    scores: Scores = {}
    for protocol, kinds in sorted(values.items()):
        for kind, per_client in sorted(kinds.items()):
            if included := {name: v for name, v in per_client.items() if name not in without}:
                known = weights is not None and included.keys() <= weights.keys()
                weighted = weights if known and protocol == VALIDATION else None
                score = spread(included, lower_is_better=lower_is_better, weights=weighted)
                scores.setdefault(protocol, {})[kind] = score
    return scores


def relative(accuracy: ByPlace, without: Collection[str] = ()) -> dict[str, Ratio]:
    """Compute statistics of the clients' ratios of private to local accuracy, by protocol.

    Omits clients that did not report both accuracies, and clients whose local accuracy is zero
    (below `MIN_ACCURACY`).
    """
    statistics: dict[str, Ratio] = {}
    for protocol, kinds in sorted(accuracy.items()):
        before, after = kinds.get("local", {}), kinds.get("private", {})
        ratios = {
            name: after[name] / before[name]
            for name in (before.keys() & after.keys()) - set(without)
            if before[name] >= MIN_ACCURACY
        }
        if ratios:
            statistics[protocol] = Ratio(best=max(ratios.values()), **dict(spread(ratios)))
    return statistics


def shown_scores(record: RoundRecord, headline: Headline) -> tuple[str, dict[str, Score]]:
    """Return the protocol to show, and its scores by kind of model, the headline kind first.

    The scores are empty if the round was not evaluated.
    """
    scores = record.scores.get(record.metric, {})
    if (column := headline.column(scores)) is None:
        return headline.protocol, {}
    kinds = scores[column[0]]
    return column[0], {kind: kinds[kind] for kind in headline.ordered_kinds(column[0], kinds)}


def selection_means(records: Sequence[RoundRecord], headline: Headline) -> dict[int, float]:
    """Return the score that selects rounds, for each round in which it was evaluated.

    It is the headline score on validation samples or, if no round has validation scores, on test
    samples. The scores of all rounds have the same protocol and kind. A kind that was not evaluated
    in some rounds, such as an average that does not exist yet, is not replaced in these rounds.
    """
    if (column := headline.selection(_evaluated(records))) is None:
        return {}
    scores = {record.round: record.score(record.metric, *column) for record in records}
    return {number: score.mean for number, score in scores.items() if score is not None}


def headline_column(records: Iterable[RoundRecord], headline: Headline) -> tuple[str, str] | None:
    """Return the protocol and the kind of the headline score in all rounds, or None without any."""
    return headline.column(_evaluated(records))


def _evaluated(records: Iterable[RoundRecord]) -> dict[str, set[str]]:
    """Return the kinds with scores for the headline metric in any round, by protocol."""
    evaluated: dict[str, set[str]] = {}
    for record in records:
        for protocol, kind, _ in record.each(record.metric):
            evaluated.setdefault(protocol, set()).add(kind)
    return evaluated


def best_round(records: Sequence[RoundRecord], headline: Headline) -> int:
    """Return the first round with the best score, or 0 if no round was evaluated.

    The scores are `selection_means`.
    """
    means = selection_means(records, headline)
    valid = {number: mean for number, mean in means.items() if not math.isnan(mean)}
    lower = any(metric_of(record.metric).lower_is_better for record in records)
    best = min if lower else max
    return best(valid, key=lambda number: valid[number], default=0)


def selection_basis(records: Sequence[RoundRecord], fraction: object) -> str:
    """Describe the samples on which rounds and runs are selected, such as "test data".

    `fraction` is the value of `data.validation-fraction`.
    """
    if not any(record.scores.get(record.metric, {}).get(VALIDATION) for record in records):
        return "test data"
    percent = f"{100 * fraction:g} %" if isinstance(fraction, int | float) else "a fraction"
    return f"validation, {percent} of each client's training samples"


def tail_of(
    records: Sequence[RoundRecord], protocol: str, kind: str, metric: str = ACCURACY
) -> Tail:
    """Compute the mean score over the last `ceil(rounds / 5)` rounds.

    The result is the average over the means of the evaluated rounds. If none of the last rounds was
    evaluated, the last evaluated round is used. The mean of a round includes all clients whose
    current models have been evaluated, even if they were not sampled (see
    `fedhet.server.round.RoundState.finish`).
    """
    means = {
        record.round: score.mean
        for record in records
        if (score := record.score(metric, protocol, kind))
    }
    valid = {number: mean for number, mean in means.items() if not math.isnan(mean)}
    if not valid:
        return Tail()
    first = tail_start(records[-1].round)
    tail = [number for number in valid if number >= first] or [max(valid)]
    return Tail(float(np.mean([valid[number] for number in tail])), tuple(tail))


def tail_start(rounds: int) -> int:
    """Return the first round of the tail, i.e. of the last fifth of a run."""
    return rounds - math.ceil(rounds / TAIL) + 1


def final_scores(records: Sequence[RoundRecord]) -> dict[str, FinalScores]:
    """Return the scores in the last round, with their tail means, by metric."""
    by_metric: dict[str, FinalScores] = {}
    for metric in records[-1].scores if records else ():
        scores = by_metric.setdefault(metric, {})
        for protocol, kind, score in records[-1].each(metric):
            tail = tail_of(records, protocol, kind, metric).mean
            clients = 0 if kind == "server" else len(score.per_client)
            final = FinalScore(**dict(score), tail=tail, clients=clients)
            scores.setdefault(protocol, {})[kind] = final
    return by_metric


def scalars(
    record: RoundRecord,
    method: str,
    column: tuple[str, str] | None = None,
    *,
    clients: bool = False,
) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each metric in a round, for TensorBoard and trackers.

    `column` contains the protocol and the kind of the headline score, whose statistics have the
    prefix `headline` in addition. With `clients`, also yields the scores of each client.
    """
    if column and (score := record.score(record.metric, *column)) is not None:
        for statistic in ("mean", "std", "worst"):
            yield f"headline/{statistic}", getattr(score, statistic)
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
