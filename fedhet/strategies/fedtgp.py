"""FedTGP strategy: trainable global prototypes (Algorithm 1, lines 8 and 9).

Jianqing Zhang, Yang Liu, Yang Hua and Jian Cao, FedTGP: Trainable Global Prototypes with
Adaptive-Margin-Enhanced Contrastive Learning for Data and Model Heterogeneity in Federated
Learning, AAAI 2024, arXiv:2401.03230.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedhet.algorithms.feature_models import (
    TrainablePrototypes,
    adaptive_margin,
    nearest_distances,
    train_prototypes,
)
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.errors import DivergedError
from fedhet.base.seeding import seeded, torch_generator
from fedhet.learning.training import all_finite
from fedhet.methods.fedtgp import SPEC, FedTgpSettings
from fedhet.models import load_weights, to_arrays
from fedhet.strategies.base import HetStrategy, Reply
from fedhet.wire.contract import MAX_MAGNITUDE
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedTgpStrategy(HetStrategy):
    """Strategy that trains prototypes close to the clients' prototypes and far from other classes.

    Prototypes of all classes are trained, but the server sends only the prototypes of classes for
    which clients have sent prototypes.
    """

    spec = SPEC
    settings: FedTgpSettings

    def init(self) -> None:
        """Initialize the prototypes. They are sent only after training."""
        with seeded(self.run.seed, SERVER, "prototypes"):
            self.model = TrainablePrototypes(
                self.reference_client.classes, self.settings.feature_dim
            )
        self._set_known(np.zeros(0, np.int64))

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the trained prototypes, if they exist."""
        return self.instruction if len(self.known) else None

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train on all prototypes received in the round.

        Raises DivergedError if training diverged; the prototypes are then unchanged.
        """
        sent = [reply.knowledge.tensors for reply in replies]
        features = torch.tensor(np.concatenate([tensors["features"] for tensors in sent]))
        labels = torch.tensor(np.concatenate([tensors["classes"] for tensors in sent]))
        if len(labels) < 2:
            return {"classes_covered": float(len(self.known))}
        settings, before = self.settings, copy.deepcopy(self.model.state_dict())
        margin = adaptive_margin(features, labels, settings.max_margin, settings.margin)
        loss = train_prototypes(
            self.model,
            features,
            labels,
            margin=margin,
            epochs=settings.server_epochs,
            batch_size=settings.server_batch_size,
            lr=settings.server_lr,
            generator=torch_generator(self.run.seed, SERVER, round, "prototypes"),
        )
        with torch.no_grad():
            is_bounded = bool((self.model().abs() <= MAX_MAGNITUDE).all())  # NaN is not bounded.
        if not (is_bounded and all_finite(self.model)):
            self.model.load_state_dict(before)
            raise DivergedError(f"training of the prototypes diverged: their loss is {loss:.3g}")
        self._set_known(np.union1d(self.known, labels.numpy()))
        distances = nearest_distances(torch.tensor(self.instruction.tensors["features"]))
        return {
            "classes_covered": float(len(self.known)),
            "prototype_loss": loss,
            "margin": margin,
            "separation": distances.mean().item() if len(distances) > 1 else 0.0,
        }

    def state_dict(self) -> dict[str, Array]:
        """Return the trained prototypes and the classes that are sent."""
        return {"known": self.known, **grouped("prototypes", to_arrays(self.model))}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        load_weights(self.model, group(state, "prototypes"))
        self._set_known(state["known"])

    @torch.no_grad()
    def _set_known(self, known: Array) -> None:
        """Set the classes [P] that are sent, and build the instruction for all clients."""
        self.known = known
        self.instruction = Knowledge()
        if len(known):
            features = self.model().numpy()[known]
            self.instruction = Knowledge({"classes": known, "features": features})
