"""Velo client: Algorithm 2, "Client processes", as in Felo."""

from __future__ import annotations

from fedhet.algorithms.classwise import Teacher, VariedTeacher
from fedhet.clients.felo import FeloClient
from fedhet.methods.velo import VeloSettings
from fedhet.wire.knowledge import Knowledge


class VeloClient(FeloClient):
    """Client that compares each sample with a synthetic feature of its class (Eq. 1)."""

    settings: VeloSettings

    def read_teacher(self, round: int, knowledge: Knowledge) -> Teacher | None:
        """Return S synthetic features per class as a teacher, or None if the server sent none."""
        teacher = super().read_teacher(round, knowledge)
        if teacher is None:
            return None
        return VariedTeacher(teacher, self.generator(round, "features"))
