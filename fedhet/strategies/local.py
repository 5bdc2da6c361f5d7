"""Each client trains alone: the baseline of every table. The server only records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhet.methods.local import SPEC
from fedhet.strategies.base import HetStrategy, Reply


class LocalStrategy(HetStrategy):
    """Exchanges no knowledge; clients, partition and epochs are the same as with a method."""

    spec = SPEC

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Aggregate nothing."""
        return {}
