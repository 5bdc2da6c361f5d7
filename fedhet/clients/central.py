"""Centralized training, client side: one client trains on the data of all clients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fedhet.base.arrays import grouped
from fedhet.clients.local import LocalClient
from fedhet.data.dataset import Split
from fedhet.data.partition import concatenate_splits
from fedhet.methods.central import CentralSettings, model_in, sizes_in, trainer
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.wire.contract import Sizes
from fedhet.wire.knowledge import Knowledge


class CentralClient(LocalClient):
    """Client that trains like a `local` client, but on the samples of all clients.

    Only one client, the trainer, trains; the remaining clients only evaluate.
    """

    settings: CentralSettings

    def prepare(self) -> None:
        """Load the training data of all clients if this client is the trainer."""
        self.client_samples = self.samples
        """The client's own samples; the evaluation uses their label space."""
        if self.info.name != trainer(self.run):
            return
        compute, data = self.compute, self.node.data

        def on_device(split: Split) -> Split:
            return Split(compute.to_device(split.x), split.y.to(compute.device))

        own, unlabeled = map(on_device, data.pooled_parts())
        space = sorted({c for k in data.spec.training_clients for c in data.label_space(k)})
        self.samples = replace(self.samples, own=own, unlabeled=unlabeled)
        # `public_set` raises DataError if the public set contains samples of any client.
        if self.settings.uses_public():
            public = on_device(self.public_set(labeled=True))
            alone, space = self.settings.trains_on == "public", list(range(self.info.classes))
            own = public if alone else concatenate_splits([own, public])
            unlabeled = unlabeled.take(torch.arange(0)) if alone else unlabeled
        self.unlabeled, self.space = unlabeled, torch.tensor(space, device=compute.device)
        self.samples = replace(self.samples, own=own, unlabeled=unlabeled, space=self.space)

    def setup(self) -> dict[str, nn.Module]:
        """Build the model if this client is the trainer."""
        return {"private": self._new_model()} if self.info.name == trainer(self.run) else {}

    def sizes(self) -> Sizes:
        """Return the size of axis C (classes) and the shapes of the trained model's tensors."""
        return sizes_in(self.run, self.settings, self.info)

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, and return the model."""
        super().train(round, knowledge)
        return Knowledge(grouped("weights", to_arrays(self.network)))

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the server's model, if it was received."""
        weights = knowledge.group("weights")
        if not weights:
            return {}
        model = self.compute.place(load_weights(self._new_model(), weights))
        return {"global": self.client_samples.within_space(model)}

    def _new_model(self) -> HetModel:
        return self.build_model(name=model_in(self.run, self.settings))
