"""How each client has fared round after round, and who is asked because of it.

A client whose replies are refused several rounds running is set aside for the rest of the run. One
that is silent, or answers with errors, is asked again only now and then. What either contributed
before is not kept. All of it is saved with each checkpoint, so that a resumed run asks the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from fedhet.errors import FedhetError

Outcome = Literal["silent", "error", "refused"]
"""No answer; an answer with an error of the client's own; a reply that the server refuses."""
LONGEST_REST = 16
"""The most rounds between two attempts to ask a client that does not answer."""


class ClientHealth:
    """Counts, by client, the rounds running without a usable reply."""

    def __init__(self, refusals: int, silences: int, notice: Callable[[str], None]) -> None:
        """`refusals`, `silences`: rounds running until a client is set aside, or rests.

        0 is never.
        """
        self._most_refused, self._most_silent, self._notice = refusals, silences, notice
        self._refused: dict[str, int] = {}
        self._silent: dict[str, tuple[int, int]] = {}
        """The rounds running without an answer, and the last of them."""
        self._gone: dict[str, int] = {}
        """The rounds running in which a former member was not connected."""

    def eligible(self, round: int, names: Collection[str]) -> list[str]:
        """Return, in their order, the clients that may be asked in a round.

        If all that are left rest, they are asked nevertheless: somebody must be. Raises FedhetError
        if all are set aside.
        """
        left = [name for name in names if not self._is_aside(name)]
        if not left:
            raise FedhetError(
                f"round {round} has nobody to ask: the replies of all {len(names)} clients were "
                f"refused {self._most_refused} rounds running ('engine.refusals')"
            )
        return [name for name in left if not self._rests(round, name)] or left

    def rests(self, round: int, name: str) -> bool:
        """Tell whether a client may not be asked in a round while there are others."""
        return self._is_aside(name) or self._rests(round, name)

    def enter(
        self, round: int, outcomes: Mapping[str, Outcome | None], members: Collection[str]
    ) -> list[str]:
        """Enter how each asked client fared (None: well); return whom the method must forget."""
        before = self._forgettable()
        for name in sorted(outcomes):
            self._enter(round, name, outcomes[name])
        self._enter_gone(members)
        for name in sorted(self._forgettable() - before):
            self._notice(self._verdict(name))
        return sorted(self._forgettable() - before)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts, as JSON holds them."""
        silent = {name: count for name, (count, _) in self._silent.items()}
        last = {name: round for name, (_, round) in self._silent.items()}
        return {"refused": self._refused, "silent": silent, "last": last, "gone": self._gone}

    def load_dict(self, known: Mapping[str, Mapping[str, int]]) -> None:
        """Restore what `to_dict` returned. Raises ValueError, KeyError or TypeError."""
        self._refused, self._gone = dict(known["refused"]), dict(known["gone"])
        self._silent = {name: (n, known["last"][name]) for name, n in known["silent"].items()}

    def _enter(self, round: int, name: str, outcome: Outcome | None) -> None:
        refused, (silent, _) = self._refused.pop(name, 0), self._silent.pop(name, (0, 0))
        if outcome == "refused":
            self._refused[name] = refused + 1
        elif outcome is not None:
            self._silent[name] = (silent + 1, round)
            if refused:  # silence does not clear a client whose replies were refused
                self._refused[name] = refused

    def _enter_gone(self, members: Collection[str]) -> None:
        """Count the rounds without each former member; one that has left starts anew when back."""
        for name in members:
            self._gone[name] = 0
        for name in self._gone.keys() - set(members):
            self._gone[name] += 1
            self._silent.pop(name, None)

    def _is_aside(self, name: str) -> bool:
        return 0 < self._most_refused <= self._refused.get(name, 0)

    def _is_silent(self, name: str) -> bool:
        return 0 < self._most_silent <= self._silent.get(name, (0, 0))[0]

    def _rests(self, round: int, name: str) -> bool:
        if not self._is_silent(name):
            return False
        count, last = self._silent[name]
        return round < last + min(1 << (count - self._most_silent + 1), LONGEST_REST)

    def _forgettable(self) -> set[str]:
        """Return the clients whose earlier contributions must not count any longer."""
        known = {*self._refused, *self._silent}
        gone = {name for name, count in self._gone.items() if 0 < self._most_silent <= count}
        return gone | {name for name in known if self._is_aside(name) or self._is_silent(name)}

    def _verdict(self, name: str) -> str:
        if self._is_aside(name):
            count = self._refused[name]
            return (
                f"client {name} is set aside: its replies were refused {count} rounds running "
                "('engine.refusals'); what it contributed before is dropped"
            )
        if self._is_silent(name):
            count = self._silent[name][0]
            return (
                f"client {name} has not answered {count} rounds running: it is asked again only "
                "now and then ('engine.silences'); what it contributed before is dropped"
            )
        return f"client {name} has left; what it contributed before is dropped"
