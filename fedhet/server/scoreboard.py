"""What the clients' models score, by the latest evaluation of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from fedhet.base.metrics import ACCURACY, in_order, metric_of
from fedhet.runs.measures import Place, relative, summarise
from fedhet.runs.records import ByMetric, RoundRecord


class Scoreboard:
    """The latest scores of all clients, also of those that were not asked since."""

    def __init__(self) -> None:
        self._scores: ByMetric = {}
        self._outdated: set[str] = set()
        """Clients whose models have changed since their last evaluation."""
        self._majority: dict[str, dict[str, float]] = {}
        """The accuracy of the majority class by protocol and client."""

    def outdate(self, names: Iterable[str]) -> None:
        """Record that these clients' models have changed since their last evaluation."""
        self._outdated |= set(names)

    def is_outdated(self, name: str) -> bool:
        """Return whether a client's models have changed since their last evaluation."""
        return name in self._outdated

    def enter(
        self, name: str, scores: Mapping[Place, float], majority: Mapping[str, float]
    ) -> None:
        """Record a client's scores, and the majority class's; earlier ones of a model are void."""
        for protocol, share in majority.items():
            self._majority.setdefault(protocol, {})[name] = share
        for known in self._scores.values():
            for _, protocol, kind in scores:
                known.get(protocol, {}).get(kind, {}).pop(name, None)
        for (metric, protocol, kind), value in scores.items():
            kinds = self._scores.setdefault(metric, {}).setdefault(protocol, {})
            kinds.setdefault(kind, {})[name] = value
        if scores:
            self._outdated.discard(name)

    def write(self, record: RoundRecord) -> None:
        """Write the scores of all metrics into a record; statistics leave out outdated ones."""
        record.majority = {protocol: dict(each) for protocol, each in self._majority.items()}
        record.relative = relative(self._scores.get(ACCURACY, {}), without=self._outdated)
        for metric in sorted(self._scores, key=in_order):
            lower = metric_of(metric).lower_is_better
            values, old = self._scores[metric], self._outdated
            record.set_scores(metric, summarise(values, old, lower_is_better=lower))

    def to_dict(self) -> dict[str, Any]:
        """Return the scores for a checkpoint, as JSON has them."""
        outdated = sorted(self._outdated)
        return {"scores": self._scores, "changed": outdated, "majority": self._majority}

    def load_dict(self, known: Mapping[str, Any]) -> None:
        """Restore what `to_dict` returned. Raises ValueError, KeyError or TypeError."""
        self._scores = TypeAdapter(ByMetric).validate_python(known["scores"])
        self._outdated = set(TypeAdapter(list[str]).validate_python(known["changed"]))
        self._majority = TypeAdapter(dict[str, dict[str, float]]).validate_python(
            known.get("majority", {})  # earlier versions did not record it
        )
