"""FedKD, client half: a mentor of the client's own and the mentee, which teach each other."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor, nn

from fedhet.algorithms.distillation import Adapting, View, mutual_losses
from fedhet.algorithms.weights import changed, energy_kept, factors
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
"""The group of kept tensors, and the fact, of the mentee with which the last round began."""


class Mentor(HetModel):
    """A client's own model, with the matrix W^h from the mentee's features to its own."""

    def __init__(self, model: HetModel, mentee_dim: int) -> None:
        super().__init__(model.extractor, model.classifier, model.feature_dim)
        self.bridge = nn.Linear(mentee_dim, model.feature_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [N, C] of x [N, ...], for which the matrix is not needed."""
        logits: Tensor = self.classifier(self.extractor(x))
        return logits


class FedKdClient(HetClient):
    """Trains mentor and mentee on each other; sends the mentee's change at low rank."""

    settings: FedKdSettings
    _begun: weakref.ref[Knowledge] | None = None
    """The instruction with which the last round began: it is evaluated on it, too."""

    def setup(self) -> dict[str, nn.Module]:
        """Build the mentor, which is the private model, and the mentee."""
        mentee = self._new_mentee()
        with seeded(self.run.seed, "bridge"):
            mentor = Mentor(self.build_model(), mentee.feature_dim)
        return {"private": mentor, "proxy": mentee}

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the mentor, the mentee after training, and the server's as last received."""
        models = dict(self.models)
        if knowledge.tensors:
            received = load_weights(self._new_mentee(), self._received(knowledge))
            models["global"] = self.compute.place(received)
        return {kind: self.samples.within_space(model) for kind, model in models.items()}

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Start from the server's mentee, train both models, and return the mentee's change.

        Both learn for the local epochs, on the sum of their losses (Eqs. 6 and 7).
        """
        mentee, start = self.models["proxy"], self._received(knowledge)
        assert isinstance(mentee, HetModel)
        load_weights(mentee, start)
        mentee.train()
        mentor, own = self.network.train(), self.settings
        assert isinstance(mentor, Mentor)
        how = Adapting(own.intensity == "sample", own.intensity_learned, own.hidden_weight)
        means = EpochMeans(("intensity",), self.compute.device)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            hidden, logits = mentor.features_and_logits(x)
            other_hidden, other_logits = mentee.features_and_logits(x)
            logits, target = self.own_classes(logits, y)
            other_logits, _ = self.own_classes(other_logits, y)
            views = View(logits, hidden), View(other_logits, mentor.bridge(other_hidden))
            first, second, intensity = mutual_losses(*views, target, how)
            means.add(intensity.unsqueeze(0), len(y))
            return first + second

        optimizing = self.optimization(mentor.parameters(), mentee.parameters())
        batches = self.generator(round, "batches")
        self.train_own(loss_of, self.private, optimizing, batches, before_epoch=means.clear)

        # Keep the mentee with which the round began: the next change will be added to it.
        self._begun = weakref.ref(knowledge)
        copies = {name: torch.tensor(value) for name, value in start.items()}
        kept = all_to_device(copies, self.compute.device)
        self.state.tensors = {**self.state.tensors, **grouped(MENTEE, kept)}
        self.state.metadata[MENTEE] = round

        change = {name: value - start[name] for name, value in to_arrays(mentee).items()}
        energy = energy_kept(round, self.run.rounds, own.energy_start, own.energy_end)
        sent = packed(change, partial(factors, energy=energy))
        sizes = [sum(value.size for value in part.values()) for part in (sent, change)]
        return Knowledge(grouped("update", sent), {**means.read(), "sent_up": sizes[0] / sizes[1]})

    def _new_mentee(self) -> HetModel:
        return self.build_model(name=self.settings.mentee)

    def _received(self, knowledge: Knowledge) -> dict[str, Array]:
        """Return the server's mentee: as it came, or the last one with the change that came.

        Raises KnowledgeError if the change is of another one than the client holds, as after its
        state was lost; the server then sends the mentee itself.
        """
        if weights := knowledge.group("weights"):
            return dict(weights)
        last = to_host_arrays(group(self.state.tensors, MENTEE))
        if self._begun is not None and self._begun() is knowledge:
            return last
        held, base = self.state.metadata.get(MENTEE), knowledge.scalars.get("base")
        if held != base:
            fault = f"changes the mentee of round {base}, the client holds that of {held or 'none'}"
            raise KnowledgeError(SERVER, "update", fault)
        shapes = self.sizes().models["update"]
        return changed(last, unpacked(knowledge.group("update"), shapes))
