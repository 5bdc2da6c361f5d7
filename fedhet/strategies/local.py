"""Local-training baseline: each client trains alone, and the server only records scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhet.methods.local import SPEC
from fedhet.strategies.base import HetStrategy, Reply


class LocalStrategy(HetStrategy):
    """Strategy that exchanges no knowledge; clients train as long as with other methods."""

    spec = SPEC

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Return no metrics, because the replies are empty."""
        return {}
