"""Centralized training, client half: the first client trains on all clients' data."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fedhet.base.arrays import grouped
from fedhet.clients.local import LocalClient
from fedhet.data.partition import stacked
from fedhet.data.spec import Split
from fedhet.methods.central import CentralSettings, model_in, sizes_in, trainer
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.wire.contract import Sizes
from fedhet.wire.knowledge import Knowledge


class CentralClient(LocalClient):
    """Trains like a `local` client, but on all clients' samples; the others only evaluate."""

    settings: CentralSettings

    def prepare(self) -> None:
        """Let the trainer read all clients' training samples, or the public ones."""
        self.tested = self.samples
        """The client's own samples, in whose label space it evaluates."""
        if self.info.name != trainer(self.run):
            return
        compute, data = self.compute, self.node.data

        def placed(split: Split) -> Split:
            return Split(compute.to_device(split.x), split.y.to(compute.device))

        own, unlabeled = map(placed, data.pooled_parts())
        space = sorted({c for k in data.spec.training_clients for c in data.label_space(k)})
        self.samples = replace(self.samples, own=own, unlabeled=unlabeled)
        if self.settings.uses_public():  # refused if it holds any client's samples
            public = placed(self.public_set(labeled=True))
            alone, space = self.settings.trains_on == "public", list(range(self.info.classes))
            own = public if alone else stacked([own, public])
            unlabeled = unlabeled.take(torch.arange(0)) if alone else unlabeled
        self.unlabeled, self.space = unlabeled, torch.tensor(space, device=compute.device)
        self.samples = replace(self.samples, own=own, unlabeled=unlabeled, space=self.space)

    def setup(self) -> dict[str, nn.Module]:
        """Build the trainer's model; the other clients have none."""
        return {"private": self._new_model()} if self.info.name == trainer(self.run) else {}

    def sizes(self) -> Sizes:
        """Return the axis C, and the shapes of the one model."""
        return sizes_in(self.run, self.settings, self.info)

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs; return the model."""
        super().train(round, knowledge)
        return Knowledge(grouped("weights", to_arrays(self.network)))

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the model that the server sent, if any."""
        weights = knowledge.group("weights")
        if not weights:
            return {}
        model = self.compute.place(load_weights(self._new_model(), weights))
        return {"global": self.tested.within_space(model)}

    def _new_model(self) -> HetModel:
        return self.build_model(name=model_in(self.run, self.settings))
