"""FedGen strategy: FedAvg of the heads, and a feature generator trained on the heads.

Zhuangdi Zhu, Junyuan Hong and Jiayu Zhou, Data-Free Knowledge Distillation for Heterogeneous
Federated Learning, ICML 2021, Algorithm 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedhet.algorithms.classwise import cap_counts
from fedhet.algorithms.feature_models import (
    Generator,
    agreement,
    ensemble,
    label_weights,
    train_generator,
)
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.seeding import seeded, torch_generator
from fedhet.learning.training import all_finite
from fedhet.methods.fedgen import SPEC, FedGenSettings
from fedhet.models import load_weights, to_arrays
from fedhet.strategies.base import Reply
from fedhet.strategies.fedavg import FedAvgStrategy
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedGenStrategy(FedAvgStrategy):
    """Strategy that averages the heads and trains a feature generator on their ensemble."""

    spec = SPEC
    settings: FedGenSettings

    def init(self) -> None:
        """Build a new head and an untrained generator, which is not sent before training."""
        settings, classes = self.settings, self.reference_client.classes
        with seeded(self.run.seed, SERVER, "generator"):
            self.generator = Generator(
                classes, settings.noise_dim, settings.hidden_dim, settings.feature_dim
            )
        self.prior = np.zeros(classes, np.float32)
        """Class probabilities p(y) [C] in the last round; zeros before the first round."""
        super().init()

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the averaged head."""
        return self._eval_instruction

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the reply, with class counts capped at the client's number of samples."""
        sent = reply.knowledge.tensors
        if "counts" not in sent:
            return reply
        counts = cap_counts(sent["counts"], reply.samples)
        return reply.with_knowledge(reply.knowledge.replacing({"counts": counts}))

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train the generator on the clients' heads, and average the heads."""
        metrics = self._train(round, replies)
        super().aggregate(round, replies)
        return metrics

    def state_dict(self) -> dict[str, Array]:
        """Return the head, the generator and p(y)."""
        generator = {name: value.copy() for name, value in to_arrays(self.generator).items()}
        head = grouped("weights", self.averaged["weights"])
        return {**head, **grouped("generator", generator), "prior": self.prior}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        load_weights(self.generator, group(state, "generator"))
        self.prior = state["prior"]
        super().load_state_dict(state)

    def _train(self, round: int, replies: Sequence[Reply]) -> dict[str, float]:
        """Train the generator (Eq. 4), and return its metrics, or {} if training diverged."""
        settings, before = self.settings, copy.deepcopy(self.generator.state_dict())
        counts = self._counts(replies)
        heads = [reply.knowledge.group("weights") for reply in replies]
        names = ("classifier.weight", "classifier.bias")
        weights = label_weights(counts if settings.weighting == "labels" else np.ones_like(counts))
        head = ensemble(weights, *([tensors[name] for tensors in heads] for name in names))
        totals = counts.sum(0)
        if settings.prior == "uniform":
            totals = (totals > 0).astype(float)
        probabilities = totals / totals.sum()
        prior = torch.tensor(probabilities)
        draws = torch_generator(self.run.seed, SERVER, round, "noise")
        loss = train_generator(
            self.generator,
            head,
            prior,
            draws,
            steps=settings.server_steps,
            batch_size=settings.server_batch_size,
            lr=settings.generator_lr,
            diversity=settings.diversity,
        )
        if not all_finite(self.generator):
            self.generator.load_state_dict(before)
            self.log.notice(f"round {round}: the generator diverged; its previous weights are kept")
            return {}
        self.prior = probabilities.astype(np.float32)
        return {"generator_loss": loss, "agreement": agreement(self.generator, head, prior, draws)}

    def _counts(self, replies: Sequence[Reply]) -> Array:
        """Return the clients' class counts [K, C], or ones if no client sends counts."""
        counts = np.zeros((len(replies), self.reference_client.classes))
        for row, reply in zip(counts, replies, strict=True):
            sent = reply.knowledge.tensors
            if self.settings.sends_counts and "classes" in sent:
                row[sent["classes"]] = sent["counts"]
        return counts if counts.any() else np.ones_like(counts)

    def _set_averages(self, averaged: dict[str, dict[str, Array]]) -> None:
        """Build the instructions for evaluation (head) and training (head and generator)."""
        super()._set_averages(averaged)
        self._eval_instruction = self.instruction
        if self.prior.any():
            generator = grouped("generator", to_arrays(self.generator))
            tensors = {**self._eval_instruction.tensors, **generator, "prior": self.prior}
            self.instruction = Knowledge(tensors)
