"""KT-pFL strategy: FedMD with a personal combination of the clients' soft predictions.

Jie Zhang, Song Guo, Xiaosong Ma, Haozhao Wang, Wenchao Xu and Feijie Wu, Parameterized Knowledge
Transfer for Personalized Federated Learning, NeurIPS 2021.

The server learns a matrix of knowledge coefficients. Row n contains the weights of all clients in
the soft predictions from which client n learns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedhet.algorithms.consensus import mean_scores, updated_coefficients, weighted_scores
from fedhet.base.arrays import Array, group, grouped
from fedhet.methods.kt_pfl import SPEC, KtPflSettings
from fedhet.strategies.base import Reply
from fedhet.strategies.fedmd import FedMdStrategy


class KtPflStrategy(FedMdStrategy):
    """Strategy that combines the clients' soft predictions with learned coefficients."""

    spec = SPEC
    settings: KtPflSettings
    personalized = True

    def init(self) -> None:
        """Start with equal coefficients for all clients."""
        super().init()
        self.names: list[str] = []
        """Names of the clients that have replied, sorted."""
        self.coefficients = np.ones((0, 0))
        """Knowledge coefficients [N, N] of these clients, relative to the mean of their row."""

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the soft predictions, and update the coefficients of the clients that replied.

        Coefficients are normalized over the clients that replied. The coefficients of clients
        without a reply are unchanged. With replies from all clients, this is the paper's update.
        """
        super().aggregate(round, replies)
        self._admit(self.scores)
        rows = [self.names.index(client) for client in sorted(self.scores)]
        old, square = self._normalized(rows, rows), np.ix_(rows, rows)
        rate, rho = self.settings.coefficient_lr, self.settings.rho
        new = updated_coefficients(old, self._stacked(), rate, rho)
        self.coefficients[square] = new * self.coefficients[square].sum(1, keepdims=True)
        return {"own_coefficient": float(new.diagonal().mean())}

    def consensus_for(self, client: str, scores: Array) -> Array:
        """Return the personalized soft predictions [R, C] of a client."""
        if client not in self.names:
            return mean_scores(scores)
        others = [self.names.index(name) for name in sorted(self.scores)]
        coefficients = self._normalized([self.names.index(client)], others)[0]
        return weighted_scores(scores, np.broadcast_to(coefficients[:, None], scores.shape[:2]))

    def forget(self, client: str) -> None:
        """Discard a client's soft predictions, and all coefficients that belong to the client."""
        super().forget(client)
        if client in self.names:
            row = self.names.index(client)
            self.names.remove(client)
            self.coefficients = np.delete(np.delete(self.coefficients, row, 0), row, 1)

    def state_dict(self) -> dict[str, Array]:
        """Return the latest soft predictions, and each client's coefficients [N]."""
        rows = dict(zip(self.names, self.coefficients, strict=True))
        return super().state_dict() | grouped("coefficients", rows)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict(state)
        rows = group(state, "coefficients")
        self.names = sorted(rows)
        self.coefficients = np.array([rows[name] for name in self.names]).reshape(len(rows), -1)

    def _admit(self, clients: Iterable[str]) -> None:
        """Add new clients. Their coefficients, and the coefficients for them, are means of rows."""
        names = sorted({*self.names, *clients})
        known = [names.index(name) for name in self.names]
        coefficients = np.ones((len(names), len(names)))
        coefficients[np.ix_(known, known)] = self.coefficients
        self.names, self.coefficients = names, coefficients

    def _normalized(self, rows: Sequence[int], columns: Sequence[int]) -> Array:
        """Return the coefficients in `rows` for the clients in `columns`, with row sums of 1."""
        part = self.coefficients[np.ix_(rows, columns)]
        total = part.sum(1, keepdims=True)
        equal = np.full_like(part, 1 / len(columns))
        normalized: Array = np.divide(part, total, out=equal, where=total > 0)
        return normalized
