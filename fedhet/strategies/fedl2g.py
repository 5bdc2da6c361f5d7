"""FedL2G strategy: guiding vectors trained with the gradients of the clients.

Jianqing Zhang, Yang Liu, Yang Hua, Jian Cao and Qiang Yang, FedL2G: Learning to Guide Local
Training in Heterogeneous Federated Learning, arXiv:2410.06490.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.algorithms.classwise import class_average
from fedhet.base.arrays import Array
from fedhet.base.seeding import numpy_rng
from fedhet.methods.fedl2g import SPEC, FedL2gSettings
from fedhet.strategies.base import HetStrategy, Reply
from fedhet.wire.identity import SERVER
from fedhet.wire.knowledge import Knowledge

MAX_NORM = 100.0
"""Maximum norm of the averaged gradient, as in the authors' code."""


class FedL2gStrategy(HetStrategy):
    """Strategy that updates the guiding vectors by SGD with the mean gradient of each class.

    The mean is over the clients whose study batch has the class. All other vectors are unchanged.
    """

    spec = SPEC
    settings: FedL2gSettings

    def init(self) -> None:
        """Draw the guiding vectors from N(0, 1)."""
        client = self.reference_client
        axes = self.spec.sizes(self.settings, client).axes
        draws = numpy_rng(self.run.seed, SERVER, "vectors").standard_normal((axes["C"], axes["W"]))
        self._set_vectors(draws.astype(np.float32))

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Update the guiding vectors, after clipping the gradient."""
        parts = []
        for reply in replies:
            tensors = reply.knowledge.tensors
            weights = np.full(len(tensors["classes"]), reply.freshness)
            parts.append((tensors["classes"], tensors["gradients"], weights))
        classes, gradients = class_average(parts)
        norm = float(np.linalg.norm(gradients.astype(np.float64)))
        step = self.settings.rate * min(1.0, MAX_NORM / norm if norm else 1.0)
        vectors = self.vectors.copy()
        vectors[classes] -= np.float32(step) * gradients
        self._set_vectors(vectors)
        return {"classes_covered": float(len(classes)), "gradient_norm": norm}

    def state_dict(self) -> dict[str, Array]:
        """Return the guiding vectors."""
        return {"vectors": self.vectors}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._set_vectors(state["vectors"])

    def _set_vectors(self, vectors: Array) -> None:
        """Set the guiding vectors [C, W], and build the instruction for all clients."""
        self.vectors, self.instruction = vectors, Knowledge({"vectors": vectors})
