"""The instructions that clients were sent, as they decode them."""

from __future__ import annotations

import threading

from fedhet.wire.knowledge import Knowledge


class SentInstructions:
    """What each client was sent to train on in a round, until it is forgotten; from any thread.

    An object that several clients share is kept once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_client: dict[str, dict[int, Knowledge]] = {}

    def keep(self, client: str, round: int, knowledge: Knowledge) -> None:
        """Keep the instruction of a round; one that is sent again replaces the earlier."""
        with self._lock:
            self._by_client.setdefault(client, {})[round] = knowledge

    def get(self, client: str, round: int) -> Knowledge | None:
        """Return the instruction of a round; None: there was none, or it is forgotten."""
        with self._lock:
            return self._by_client.get(client, {}).get(round)

    def forget(self, client: str, round: int) -> None:
        """Forget the instruction of a round, if it is kept."""
        with self._lock:
            rounds = self._by_client.get(client, {})
            rounds.pop(round, None)
            if not rounds:
                self._by_client.pop(client, None)
