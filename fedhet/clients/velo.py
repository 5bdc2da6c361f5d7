"""Velo, client half: "Client processes" of Algorithm 2, the same as Felo's."""

from __future__ import annotations

from fedhet.algorithms.classwise import Teacher, VariedTeacher
from fedhet.clients.felo import FeloClient
from fedhet.methods.velo import VeloSettings
from fedhet.wire.knowledge import Knowledge


class VeloClient(FeloClient):
    """Trains on Eq. 1; each sample is paired with one of its class's synthetic features."""

    settings: VeloSettings

    def read_teacher(self, round: int, knowledge: Knowledge) -> Teacher | None:
        """Return the server's averages, with S features per class, or None if it sent none."""
        teacher = super().read_teacher(round, knowledge)
        if teacher is None:
            return None
        return VariedTeacher(teacher, self.generator(round, "features"))
