"""FedLoRA strategy: aggregation of LoRA adapters with different ranks on one foundation model.

The setting `fedlora.aggregation` selects the rule:

- average: Jianyi Zhang et al., Towards Building the FederatedGPT: Federated Instruction Tuning
  (FedIT), ICASSP 2024. With equal ranks, this rule is FedAvg.
- sparsity: Yae Jee Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
  Models (HetLoRA), EMNLP 2024. The pruning of ranks also follows this paper.
- svd: Jiamu Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks
  and Client Resources (FlexLoRA), NeurIPS 2024.
- rank-partition: Fei Wu et al., Preventing Rank Collapse in Federated Low-Rank Adaptation with
  Client Heterogeneity (raFLoRA), arXiv 2602.13486, 2026. The rule follows a third-party
  implementation.
- freeze-a: Youbang Sun et al., Improving LoRA in Privacy-preserving Federated Learning (FFA-LoRA),
  ICLR 2024.

Unlike in the papers, the head is trained and averaged, weighted by each client's number of samples.
Except with the rule svd, a rank level that no reply contains keeps its previous value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.algorithms import LORA_A, LORA_B
from fedhet.algorithms.adapters import (
    Factors,
    factors_of,
    level_average,
    padded_average,
    product_average,
    product_norm,
    top_energy,
)
from fedhet.algorithms.weights import average_weights, cut_submodel
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.errors import KnowledgeError
from fedhet.config.resolve import Config
from fedhet.methods.fedlora import (
    SPEC,
    FedLoraSettings,
    rank_in,
    received_rank,
    sent_sizes,
    with_rank,
)
from fedhet.models import is_adapted, part_arrays, rank_of, without_rank
from fedhet.settings.schema import invalid_setting
from fedhet.strategies.base import HetStrategy, Reply, ServerModel
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

RANKS = "ranks"
"""Checkpoint group that contains the clients' ranks."""


class FedLoraStrategy(HetStrategy):
    """Strategy that stores adapters of the largest rank, and truncates them for each client."""

    spec = SPEC
    settings: FedLoraSettings

    def init(self) -> None:
        """Build a new model of the largest rank.

        Raises SettingsError unless the models of the pool differ only in rank, and the rule suits
        the other settings.
        """
        pool = self.run.models.pool
        self.rule = self.settings.rule(is_private=self.run.privacy.is_on)
        self.model = max(pool, key=rank_of)
        """Name of the model with the largest rank."""
        if len({without_rank(name) for name in pool}) > 1:
            expected = "models that differ only in rank, such as encoder-1-lora4:NAME and "
            raise invalid_setting("models.pool", pool, f"{expected}encoder-1-lora8:NAME")
        if self.settings.prune and self.rule == "freeze-a":
            raise invalid_setting("fedlora.prune", self.settings.prune, "0 with freeze-a")
        average = self.run.defense.average
        if self.rule == "sparsity" and average != "mean":
            expected = f"another rule with 'defense.average' = {average}"
            problem = "a client could increase its weight with large adapters"
            raise invalid_setting("fedlora.aggregation", self.rule, expected, problem)
        if not is_adapted(self.model):
            self.log.notice(
                f"model {self.model} has no adapters, so fedlora averages the whole model like "
                "fedavg; models with adapters have names such as encoder-1-lora8:NAME"
            )
        self.ranks: dict[str, int] = {}
        """Current ranks of the clients that have pruned their adapters, by client name."""
        self._keep(part_arrays(self.build_model(self.model), "all"))

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the shapes of a client's tensors, given its rank after pruning."""
        sizes = sent_sizes(self.settings, client, self.rule)
        rank = self.ranks.get(client.name, rank_in(sizes.models["weights"]))
        return replace(sizes, models={"weights": with_rank(sizes.models["weights"], rank)})

    def instruction_sizes(self, client: ClientInfo) -> Sizes:
        """Return the shapes of the tensors that are exchanged under the aggregation rule."""
        return sent_sizes(self.settings, client, self.rule)

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the head and the adapters, truncated to the client's rank."""
        shapes = self.sizes(client).models["weights"]
        key = client.model, rank_in(shapes)
        if key not in self._parts:
            self._parts[key] = Knowledge(grouped("weights", cut_submodel(self.weights, shapes)))
        return self._parts[key]

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the same head and adapters as for training."""
        return self.instruct(round, client)

    def accept(self, round: int, reply: Reply) -> Reply:
        """Check the rank of the reply's adapters, and record it if the client has pruned them.

        Raises KnowledgeError if the rank is smaller than expected although pruning is off.
        """
        rank = received_rank(reply.knowledge.group("weights"))
        expected = rank_in(self.sizes(reply.client).models["weights"])
        if rank < expected:
            if not self.settings.prune:
                fault = f"expected adapters of rank {expected}, got {rank}"
                raise KnowledgeError(reply.client.name, "weights", fault)
            self.ranks[reply.client.name] = rank
        return reply

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average the heads, weighted by samples, and aggregate the adapters with the rule."""
        sent = [(reply.knowledge.group("weights"), reply.weight) for reply in replies]
        is_head = [name for name in self.weights if not name.endswith((LORA_A, LORA_B))]
        heads = [({name: each[name] for name in is_head}, weight) for each, weight in sent]
        averaged = average_weights(heads)
        layers = factors_of(self.weights)
        clients = [{path: self._factors(each, path) for path in layers} for each, _ in sent]
        weights = [weight for _, weight in sent]
        if self.rule == "sparsity":
            norms = [product_norm(list(each.values())) for each in clients]
            weights = norms if any(norms) else weights
        for path, before in layers.items():
            parts = [(each[path], w) for each, w in zip(clients, weights, strict=True)]
            averaged[path + LORA_B], averaged[path + LORA_A] = self._average(parts, before)
        self._keep({name: averaged[name] for name in self.weights})
        smallest = min(rank_of(name) for name in self.run.models.pool)
        return {"top_energy": top_energy(list(factors_of(self.weights).values()), smallest)}

    def forget(self, client: str) -> None:
        """Discard the recorded rank of a client."""
        self.ranks.pop(client, None)

    def state_dict(self) -> dict[str, Array]:
        """Return the server's weights and the ranks of clients that have pruned adapters."""
        ranks = {name: np.array(rank) for name, rank in self.ranks.items()}
        return grouped("weights", self.weights) | grouped(RANKS, ranks)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore the weights and the ranks."""
        self.ranks = {name: int(rank) for name, rank in group(state, RANKS).items()}
        self._keep(group(state, "weights"))

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the head and the adapters, truncated to the rank of the model."""
        settings: Any = config.method_settings
        shapes = SPEC.sizes(settings, client).models["weights"]
        rank = group(state, RANKS).get(client.name)  # A client may have pruned its adapters.
        shapes = shapes if rank is None else with_rank(shapes, int(rank))
        weights = cut_submodel(group(state, "weights"), shapes)
        return {"global": ServerModel(weights, client.model)}

    def _factors(self, sent: Mapping[str, Array], path: str) -> Factors:
        """Return a client's factors for a layer; with freeze-a, A is taken from the server."""
        b = sent[path + LORA_B]
        a = self.weights[path + LORA_A][: b.shape[1]]
        return b, (a if self.rule == "freeze-a" else sent[path + LORA_A])

    def _average(self, parts: Sequence[tuple[Factors, float]], before: Factors) -> Factors:
        if self.rule == "svd":
            return product_average(parts, before)
        if self.rule == "rank-partition":
            return level_average(parts, before)
        rank = max(a.shape[0] for (_, a), _ in parts)
        b = padded_average([(b, weight) for (b, _), weight in parts], before[0], 1, rank)
        if self.rule == "freeze-a":
            return b, before[1]
        return b, padded_average([(a, weight) for (_, a), weight in parts], before[1], 0, rank)

    def _keep(self, weights: dict[str, Array]) -> None:
        self.weights = weights
        """Head, and adapters of the largest rank."""
        self._parts: dict[tuple[str, int], Knowledge] = {}
        """Cached instructions, by model and rank."""
