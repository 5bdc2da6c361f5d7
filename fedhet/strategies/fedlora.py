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
- flora: Ziyao Wang et al., FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
  Low-Rank Adaptations, NeurIPS 2024. The rule follows the authors' code.
- fedex: Raghav Singhal et al., FedEx-LoRA: Exact Aggregation for Federated and Efficient
  Fine-Tuning of Foundation Models, arXiv 2410.09432, 2024. The rule follows the authors' code.

The rules flora and fedex change the frozen weights. The server keeps all merged factors, and sends
each client the factors that the client lacks.

Unlike in the papers, the head is trained and averaged, weighted by each client's number of samples.
Except with the rule svd, a rank level that no reply contains keeps its previous value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.algorithms import LORA_A, LORA_B, MERGED_A, MERGED_B
from fedhet.algorithms.adapters import (
    Factors,
    compacted,
    factors_of,
    level_average,
    levels,
    padded_average,
    product_average,
    product_norm,
    renamed,
    residual,
    stacked,
    top_energy,
)
from fedhet.algorithms.weights import average_weights, cut_submodel
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.errors import KnowledgeError
from fedhet.config.resolve import Config
from fedhet.methods.fedlora import (
    MERGING,
    SPEC,
    FedLoraSettings,
    merged_digest,
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
INCOMPARABLE = {
    "sparsity": "a client could increase its weight with large adapters",
    "flora": "adapters cannot be compared, because each client draws new adapters",
}
"""Rules that do not support robust averages, with the reason."""


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
        if self.settings.prune and self.rule in ("freeze-a", *MERGING):
            raise invalid_setting("fedlora.prune", self.settings.prune, f"0 with {self.rule}")
        average, encoding = self.run.defense.average, self.run.wire.encoding
        setting = problem = ""
        if average != "mean" and self.rule in INCOMPARABLE:
            setting, problem = f"'defense.average' = {average}", INCOMPARABLE[self.rule]
        elif encoding != "float32" and self.rule in MERGING:
            setting = f"'wire.encoding' = {encoding}"
            problem = "the frozen weights of all clients must be equal"
        elif self.run.engine.base_precision != "full" and self.rule in MERGING:
            setting = f"'engine.base-precision' = {self.run.engine.base_precision}"
            problem = "factors cannot be merged into weights of 4 bits"
        elif self.run.privacy.is_on and self.rule in MERGING:
            setting = "'privacy.epsilon'"
            problem = "products of noisy factors amplify the noise in the frozen weights"
        if problem:
            expected = f"another rule with {setting}"
            raise invalid_setting("fedlora.aggregation", self.rule, expected, problem)
        if not is_adapted(self.model):
            self.log.notice(
                f"model {self.model} has no adapters, so fedlora averages the whole model like "
                "fedavg; models with adapters have names such as encoder-1-lora8:NAME"
            )
        self.ranks: dict[str, int] = {}
        """Current ranks of the clients that have pruned their adapters, by client name."""
        self.held: dict[str, int] = {}
        """Digest of the merged factors in each client's state, by client name."""
        weights = part_arrays(self.build_model(self.model), "all")
        adapters = {n: v for n, v in weights.items() if n.endswith((LORA_A, LORA_B))}
        self.merged = levels(adapters if self.rule in MERGING else {}, 0, 0)
        """Factors merged into the frozen weights since the start of the run."""
        self.marks = {0: 0}
        """Rank of the merged factors after each round, by their digest."""
        self._keep(weights)

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the shapes of a client's tensors, given its rank after pruning."""
        sizes = sent_sizes(self.settings, client, self.rule, reply=True)
        rank = self.ranks.get(client.name, rank_in(sizes.models["weights"]))
        return replace(sizes, models={"weights": with_rank(sizes.models["weights"], rank)})

    def instruction_sizes(self, client: ClientInfo) -> Sizes:
        """Return the shapes of the tensors that are exchanged under the aggregation rule."""
        return sent_sizes(self.settings, client, self.rule)

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the same tensors as for evaluation.

        If the client does not reply, it may have lost its state, and next receives all merged
        factors.
        """
        instruction = self.eval_instruction(round, client)
        self.held.pop(client.name, None)
        return instruction

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the head, the adapters with the client's rank, and the missing merged factors."""
        shapes = self.sizes(client).models["weights"]
        start = self.marks.get(self.held.get(client.name, 0), 0)
        key = client.model, rank_in(shapes), start
        if key not in self._parts:
            sent = self.instruction_sizes(client).models["weights"]
            weights = cut_submodel(self.weights, {n: s for n, s in shapes.items() if n in sent})
            tensors, scalars = grouped("weights", weights), {}
            if self.rule in MERGING:
                scalars = {"start": start, "base": self.held[client.name] if start else 0}
                lacked = levels(self.merged, start)
                tensors |= grouped("merged", lacked if received_rank(lacked) else {})
            self._parts[key] = Knowledge(tensors, scalars)
        return self._parts[key]

    def accept(self, round: int, reply: Reply) -> Reply:
        """Check the rank of the reply's adapters, and record what the client keeps.

        Raises KnowledgeError if the rank is smaller than expected although pruning is off.
        """
        rank = received_rank(reply.knowledge.group("weights"))
        expected = rank_in(self.sizes(reply.client).models["weights"])
        if rank < expected:
            if not self.settings.prune:
                fault = f"expected adapters of rank {expected}, got {rank}"
                raise KnowledgeError(reply.client.name, "weights", fault)
            self.ranks[reply.client.name] = rank
        if self.rule in MERGING:
            self.held[reply.client.name] = int(reply.knowledge.scalars["base"])
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
        merged: dict[str, Array] = {}
        for path, before in layers.items():
            parts = [(each[path], w) for each, w in zip(clients, weights, strict=True)]
            after = self._average(parts, before)
            averaged[path + LORA_B], averaged[path + LORA_A] = after
            if self.rule in MERGING:
                b, a = stacked(parts) if self.rule == "flora" else residual(parts, after)
                merged[path + LORA_B] = np.concatenate([self.merged[path + LORA_B], b], axis=1)
                merged[path + LORA_A] = np.concatenate([self.merged[path + LORA_A], a])
        self._merge(merged)
        self._keep({name: averaged[name] for name in self.weights})
        smallest = min(rank_of(name) for name in self.run.models.pool)
        return {"top_energy": top_energy(self._changes(), smallest)}

    def forget(self, client: str) -> None:
        """Discard the recorded rank of a client, and the digest of its merged factors."""
        self.ranks.pop(client, None)
        self.held.pop(client, None)

    def state_dict(self) -> dict[str, Array]:
        """Return the server's weights, and the records of clients and of merged factors."""
        ranks = {name: np.array(rank) for name, rank in self.ranks.items()}
        state = grouped("weights", self.weights) | grouped(RANKS, ranks)
        if self.rule in MERGING:
            held = {name: np.array(self.marks.get(each, 0)) for name, each in self.held.items()}
            state |= grouped("merged", self.merged) | grouped("held", held)
            state["marks"] = np.array([*self.marks.values()])
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore the state, and compute the digests again."""
        self.ranks = {name: int(rank) for name, rank in group(state, RANKS).items()}
        if self.rule in MERGING:
            self.merged = group(state, "merged")
            digests = {int(r): merged_digest(levels(self.merged, 0, r)) for r in state["marks"]}
            self.marks = {digest: rank for rank, digest in digests.items()}
            self.held = {name: digests[int(rank)] for name, rank in group(state, "held").items()}
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
        merged = renamed(group(state, "merged"), (LORA_A, LORA_B), (MERGED_A, MERGED_B))
        return {"global": ServerModel(weights | merged, client.model)}

    def _factors(self, sent: Mapping[str, Array], path: str) -> Factors:
        """Return a client's factors for a layer; with freeze-a, A is taken from the server."""
        b = sent[path + LORA_B]
        a = self.weights[path + LORA_A][: b.shape[1]]
        return b, (a if self.rule == "freeze-a" else sent[path + LORA_A])

    def _average(self, parts: Sequence[tuple[Factors, float]], before: Factors) -> Factors:
        if self.rule == "flora":
            return before
        if self.rule == "svd":
            return product_average(parts, before)
        if self.rule == "rank-partition":
            return level_average(parts, before)
        rank = max(a.shape[0] for (_, a), _ in parts)
        b = padded_average([(b, weight) for (b, _), weight in parts], before[0], 1, rank)
        if self.rule == "freeze-a":
            return b, before[1]
        return b, padded_average([(a, weight) for (_, a), weight in parts], before[1], 0, rank)

    def _merge(self, merged: dict[str, Array]) -> None:
        """Store the merged factors, with a lower rank if the rank exceeds its limit."""
        if not merged:
            return
        limit = rank_in(self.instruction_sizes(self.reference_client).models["merged"])
        if received_rank(merged) > limit:
            merged, self.marks = compacted(merged, limit // 2), {0: 0}
        self.merged = merged
        self.marks[merged_digest(merged)] = received_rank(merged)

    def _changes(self) -> list[Factors]:
        """Return factors of the change of each base weight: merged factors and adapters."""
        adapters = factors_of(self.weights)
        for path, (b, a) in factors_of(self.merged).items():
            left, right = adapters[path]
            adapters[path] = np.concatenate([b, left], axis=1), np.concatenate([a, right])
        return list(adapters.values())

    def _keep(self, weights: dict[str, Array]) -> None:
        self.weights = weights
        """Head, and adapters of the largest rank."""
        self._parts: dict[tuple[str, int, int], Knowledge] = {}
        """Cached instructions, by model, rank, and rank of the client's merged factors."""
