"""The instructions that clients were sent, as they decode them."""

from __future__ import annotations

import threading

from fedhet.wire.knowledge import Knowledge


class SentInstructions:
    """What each client was sent to train on in a round, until it is forgotten; from any thread.

    An object that several clients share is kept once.
    """

    def __init__(self, *, last_alone: bool = False) -> None:
        """`last_alone`: all instructions are forgotten when those of another round are kept."""
        self._lock, self._last_alone, self._round = threading.Lock(), last_alone, 0
        self._by_client: dict[str, dict[int, tuple[Knowledge, int]]] = {}

    def keep(self, client: str, round: int, knowledge: Knowledge, digest: int = 0) -> None:
        """Keep the instruction of a round; one that is sent again replaces the earlier.

        `digest` is that of its weights, 0: no reply can build on them.
        """
        with self._lock:
            if self._last_alone and round != self._round:
                self._by_client.clear()
            self._round = round
            self._by_client.setdefault(client, {})[round] = knowledge, digest

    def get(self, client: str, round: int) -> tuple[Knowledge, int] | None:
        """Return the instruction of a round, and the digest of its weights.

        None: there was none, or it is forgotten.
        """
        with self._lock:
            return self._by_client.get(client, {}).get(round)

    def forget(self, client: str, round: int) -> None:
        """Forget the instruction of a round, if it is kept."""
        with self._lock:
            rounds = self._by_client.get(client, {})
            rounds.pop(round, None)
            if not rounds:
                self._by_client.pop(client, None)
