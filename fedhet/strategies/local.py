"""Strategy of the baseline in which each client trains alone; the server only records scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhet.methods.local import SPEC
from fedhet.strategies.base import HetStrategy, Reply


class LocalStrategy(HetStrategy):
    """Exchanges no knowledge; clients, partition and epochs are the same as for a method."""

    spec = SPEC

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Aggregate nothing."""
        return {}
