"""The clients with which nobody trains (`data.unseen`): they are asked once, after the last round.

They are members that no hook of a method sees, except for the instruction to evaluate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedhet.methods.spec import MethodSpec
from fedhet.runs.records import UNSEEN, UNSEEN_EPOCH
from fedhet.server.members import Member
from fedhet.settings.run import RunSettings, unseen_clients
from fedhet.wire.identity import ClientInfo, client_name
from fedhet.wire.knowledge import Knowledge

KINDS = (UNSEEN, UNSEEN_EPOCH)
"""The kinds of model that they evaluate."""


class HeldBack:
    """The members that are held back, and what they are sent."""

    def __init__(self, run: RunSettings, spec: MethodSpec) -> None:
        self.names = frozenset(client_name(k, run.clients) for k in unseen_clients(run))
        self.members: dict[str, Member] = {}
        self._method, self._offers = run.method, spec.offers

    def taken_from(self, members: Mapping[str, Member]) -> dict[str, Member]:
        """Return the members that may train; the others are kept apart."""
        self.members = {name: each for name, each in members.items() if name in self.names}
        return {name: each for name, each in members.items() if name not in self.names}

    def beside(self, members: Mapping[str, Member]) -> dict[str, Member]:
        """Return all that may be asked to evaluate: the members, and those held back."""
        return {**members, **self.members}

    def member(self, name: str, members: Mapping[str, Member]) -> Member:
        """Return one of those that may be asked to evaluate."""
        return self.members[name] if name in self.members else members[name]

    def kinds_of(self, name: str, spec: MethodSpec) -> Sequence[str]:
        """Return the kinds of model that a client evaluates."""
        return KINDS if name in self.names else spec.kinds

    def tell(self, notice: Callable[[str], None]) -> None:
        """Say what the user must know before the first round, if clients are held back."""
        if self.names:
            notice(self._notice)

    def instructions(
        self, instruction: Callable[[ClientInfo], Knowledge | None]
    ) -> dict[str, Knowledge]:
        """Return what each of them is sent to evaluate; nothing if the method offers nothing."""
        if not self._offers:
            return {}
        made = {name: instruction(each.info) for name, each in self.members.items()}
        return {name: knowledge for name, knowledge in made.items() if knowledge is not None}

    @property
    def _notice(self) -> str:
        names = ", ".join(sorted(self.names))
        fate = (
            "they judge the global model after the last round"
            if self._offers
            else f"{self._method} offers them nothing, as it forms no model that all clients share"
        )
        return f"nobody trains with {names} ('data.unseen'): {fate}"
