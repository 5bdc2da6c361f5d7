"""FedRE strategy: a global head trained on one entangled representation per client.

Yuan Yao, Lixu Wang, Jiaqi Wu, Jin Song, Simin Chen, Zehua Wang, Zijian Tian, Wei Chen, Huixia Li
and Xiaoxiao Li, FedRE: A Representation Entanglement Framework for Model-Heterogeneous Federated
Learning, CVPR 2026, arXiv:2511.22265.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedhet.algorithms.entanglement import train_entangled
from fedhet.methods.fedre import SPEC, FedReSettings
from fedhet.strategies.base import Reply
from fedhet.strategies.fedgh import FedGhStrategy


class FedReStrategy(FedGhStrategy):
    """Strategy that trains a global head on the entangled representations, and sends the head."""

    spec = SPEC
    settings: FedReSettings

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train the head on the entangled representations received in the round.

        Raises DivergedError if training diverged; the head is then unchanged.
        """
        # A reply is empty if every class has too few samples to be sent.
        sent = [tensors for reply in replies if (tensors := reply.knowledge.tensors)]
        if not sent:
            return {"classes_covered": 0.0}
        representations, labels = (
            torch.tensor(np.stack([tensors[name] for tensors in sent]))
            for name in ("representation", "labels")
        )
        return {
            "classes_covered": float((labels > 0).any(0).sum()),
            "head_loss": self.train_head(round, train_entangled, representations, labels),
        }
