"""Statistics of a run's records: over the clients of a round, and over the rounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedhet.base.metrics import ACCURACY, LEAST_ACCURACY
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

TAIL = 5
"""The tail of a run is one round in this many: the last fifth."""


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


def summarise(
    values: ByPlace, without: Collection[str] = (), *, lower_is_better: bool = False
) -> Scores:
    """Return `spread` for each protocol and kind that has values, without some clients."""
    found: Scores = {}
    for protocol, kinds in sorted(values.items()):
        for kind, per_client in sorted(kinds.items()):
            kept = {name: value for name, value in per_client.items() if name not in without}
            if kept:
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
            if before[name] >= LEAST_ACCURACY
        }
        if ratios:
            found[protocol] = Ratio(best=max(ratios.values()), **dict(spread(ratios)))
    return found


def headline_scores(record: RoundRecord, protocol: str) -> tuple[str, Score] | None:
    """Return the private models' accuracies, and their protocol; None if they were not evaluated.

    They are those under `protocol`, or under the other if only that was evaluated; of a method
    without private models, those of the first kind that it has.
    """
    shown = next((p for p in (protocol, *PROTOCOLS) if p in record.accuracy), protocol)
    kind = next((k for k in KINDS if k in record.accuracy.get(shown, {})), "private")
    scores = record.score(ACCURACY, shown, kind)
    return None if scores is None else (shown, scores)


def headline_mean(record: RoundRecord, protocol: str) -> float | None:
    """Return the headline number of a round; None if it was not evaluated."""
    found = headline_scores(record, protocol)
    return found[1].mean if found else None


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
