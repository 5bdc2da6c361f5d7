"""FedKD client: mutual distillation between a private mentor and the shared mentee."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor, nn

from fedhet.algorithms.distillation import AdaptiveIntensity, Outputs, mutual_losses
from fedhet.algorithms.weights import add_update, energy_kept, factors
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.errors import KnowledgeError
from fedhet.base.seeding import seeded
from fedhet.base.transfer import all_to_device
from fedhet.client_runtime.local_training import EpochMeans
from fedhet.clients.base import HetClient
from fedhet.methods.fedkd import FedKdSettings
from fedhet.models import HetModel, load_weights, to_arrays, to_host_arrays
from fedhet.wire.factors import packed, unpacked
from fedhet.wire.identity import SERVER
from fedhet.wire.knowledge import Knowledge

MENTEE = "mentee"
"""State key for the mentee with which the last round started, and for the number of that round."""


class Mentor(HetModel):
    """Private model with the matrix W^h, which maps the mentee's features to the mentor's width."""

    def __init__(self, model: HetModel, mentee_dim: int) -> None:
        super().__init__(model.extractor, model.classifier, model.feature_dim)
        self.bridge = nn.Linear(mentee_dim, model.feature_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [N, C] of samples x [N, ...]. They do not depend on W^h."""
        logits: Tensor = self.classifier(self.extractor(x))
        return logits


class FedKdClient(HetClient):
    """Client that distills mentor and mentee into each other and sends a low-rank mentee update."""

    settings: FedKdSettings
    _applied: weakref.ref[Knowledge] | None = None
    """Instruction of the last round. The evaluation after training uses the same instruction."""

    def setup(self) -> dict[str, nn.Module]:
        """Build the mentor, as the private model, and the mentee, as the proxy."""
        mentee = self._new_mentee()
        with seeded(self.run.seed, "bridge"):
            mentor = Mentor(self.build_model(), mentee.feature_dim)
        return {"private": mentor, "proxy": mentee}

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the mentor, the trained mentee, and the server's mentee."""
        models = dict(self.models)
        if knowledge.tensors:
            received = load_weights(self._new_mentee(), self._received(knowledge))
            models["global"] = self.compute.place(received)
        return {kind: self.samples.within_space(model) for kind, model in models.items()}

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Start from the server's mentee, train both models, and return the mentee's update.

        Both models train for the local epochs on the sum of their losses (Eqs. 6 and 7).
        """
        mentee, start = self.models["proxy"], self._received(knowledge)
        assert isinstance(mentee, HetModel)
        load_weights(mentee, start)
        mentee.train()
        mentor, settings = self.network.train(), self.settings
        assert isinstance(mentor, Mentor)
        options = AdaptiveIntensity(
            settings.intensity == "sample", settings.intensity_learned, settings.hidden_weight
        )
        task_loss = self.task.loss("none" if options.by_sample else "mean")
        divergence = self.task.divergence("none")
        means = EpochMeans(("intensity",), self.compute.device)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            hidden, logits = mentor.features_and_logits(x)
            other_hidden, other_logits = mentee.features_and_logits(x)
            logits, target = self.own_classes(logits, y)
            other_logits, _ = self.own_classes(other_logits, y)
            outputs = Outputs(logits, hidden), Outputs(other_logits, mentor.bridge(other_hidden))
            mentor_loss, mentee_loss, intensity = mutual_losses(
                *outputs, target, options, task_loss, divergence
            )
            means.add(intensity.unsqueeze(0), len(y))
            return mentor_loss + mentee_loss

        optimizing = self.optimization(mentor.parameters(), mentee.parameters())
        batches = self.generator(round, "batches")
        self.train_own(loss_of, self.private, optimizing, batches, before_epoch=means.clear)

        # Keep the mentee with which the round started, because the next update applies to it.
        self._applied = weakref.ref(knowledge)
        copies = {name: torch.tensor(value) for name, value in start.items()}
        base = all_to_device(copies, self.compute.device)
        self.state.tensors = {**self.state.tensors, **grouped(MENTEE, base)}
        self.state.metadata[MENTEE] = round

        update = {name: value - start[name] for name, value in to_arrays(mentee).items()}
        energy = energy_kept(round, self.run.rounds, settings.energy_start, settings.energy_end)
        sent = packed(update, partial(factors, energy=energy))
        sizes = [sum(value.size for value in part.values()) for part in (sent, update)]
        return Knowledge(
            grouped("update", sent), {**means.by_name(), "sent_up": sizes[0] / sizes[1]}
        )

    def _new_mentee(self) -> HetModel:
        return self.build_model(name=self.settings.mentee)

    def _received(self, knowledge: Knowledge) -> dict[str, Array]:
        """Return the server's mentee, either as received or computed from the received update.

        Raises KnowledgeError if the update does not apply to the client's mentee, e.g. because the
        client lost its state. The server then sends the full mentee.
        """
        if weights := knowledge.group("weights"):
            return dict(weights)
        previous = to_host_arrays(group(self.state.tensors, MENTEE))
        if self._applied is not None and self._applied() is knowledge:
            return previous
        own_base, base = self.state.metadata.get(MENTEE), knowledge.scalars.get("base")
        if own_base != base:
            fault = (
                f"expected an update of the mentee of round {own_base or 'none'}, got round {base}"
            )
            raise KnowledgeError(SERVER, "update", fault)
        shapes = self.sizes().models["update"]
        return add_update(previous, unpacked(knowledge.group("update"), shapes))
