"""FedLoRA client: local training of adapters, with optional pruning of ranks (HetLoRA)."""

from __future__ import annotations

import numpy as np
from torch import nn

from fedhet.algorithms import LORA_A, LORA_B, MERGED_A, MERGED_B, Aggregation
from fedhet.algorithms.adapters import PrunedModel, factors_of, levels, padded, renamed
from fedhet.algorithms.local_models import LocalModel
from fedhet.algorithms.weights import cut_submodel
from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.base.errors import KnowledgeError
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.fedlora import (
    MERGING,
    FedLoraSettings,
    merged_digest,
    rank_in,
    received_rank,
    sent_sizes,
    with_rank,
)
from fedhet.models import HetModel, draw_rows, to_arrays
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import SERVER
from fedhet.wire.knowledge import Knowledge


class FedLoraClient(FedAvgClient):
    """Client that trains adapters of its model's rank, starting from part of the server's adapters.

    Pruning does not change the rank of the model, which is in the model's name. Pruned rank levels
    are zero in both factors, so they have no effect and no gradient, and are not sent.

    With `flora` and `fedex`, the model also contains factors that are merged into its frozen
    weights. An instruction extends the factors that the client keeps.
    """

    settings: FedLoraSettings

    @property
    def rule(self) -> Aggregation:
        """The run's aggregation rule."""
        return self.settings.rule(is_private=self.run.privacy.is_on)

    def build_model(self, feature_dim: int | None = None, *, name: str = "") -> HetModel:
        """Build a new network; with `freeze-a`, its factors A are constant."""
        model = super().build_model(feature_dim, name=name)
        if self.rule == "freeze-a":
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(not key.endswith(LORA_A))
        return model

    def sizes(self) -> Sizes:
        """Return the shapes of the tensors that are exchanged under the aggregation rule."""
        return sent_sizes(self.settings, self.info, self.rule)

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the private model, and the model that the instruction describes."""
        return super().eval_models(self._completed(knowledge))

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, starting from the server's weights."""
        reply = super().train(round, self._completed(knowledge, round))
        if self.rule in MERGING:
            return Knowledge(reply.tensors, {"base": merged_digest(self._merged())})
        return reply

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the private model, with a loss term for pruning its rank if `prune` is set."""
        self.rank = received_rank(knowledge.group("weights"))
        if not (self.settings.prune and self.rank > 1):
            return LocalModel(self.network, self.anchor())
        settings, anchor = self.settings, self.anchor()
        return PrunedModel(self.network, anchor, self.rank, settings.prune, settings.prune_weight)

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Return the tensors to send, with the rank after pruning."""
        rank = local.rank if isinstance(local, PrunedModel) else self.rank
        sent = group(super().reply(local), "weights")
        shapes = sent_sizes(self.settings, self.info, self.rule, reply=True).models["weights"]
        return grouped("weights", cut_submodel(sent, with_rank(shapes, rank)))

    def _joined(self, model: HetModel, weights: Arrays) -> HetModel:
        """Load `weights` into `model`, padded with zeros up to the model's rank."""
        own = to_arrays(model)
        whole = {
            n: padded(v, own[n].shape) if n.endswith((LORA_A, LORA_B)) else v
            for n, v in weights.items()
        }
        return super()._joined(model, whole)

    def _merged(self) -> dict[str, Array]:
        """Return the factors that are merged into the frozen weights of the private model."""
        own = to_arrays(self.network)
        adapters = {n: v for n, v in own.items() if n.endswith((LORA_A, LORA_B))}
        return levels(adapters, 0, 0) | renamed(own, (MERGED_A, MERGED_B), (LORA_A, LORA_B))

    def _completed(self, knowledge: Knowledge, round: int = 0) -> Knowledge:
        """Add the merged factors and, with `flora`, new adapters to the weights in an instruction.

        The rows of A are drawn from the seed, the client, and `round`, if it is not 0. Raises
        KnowledgeError if the client lacks the factors that the instruction extends.
        """
        if not {"start", "base"} <= knowledge.scalars.keys():
            return knowledge
        start, base = (int(knowledge.scalars[name]) for name in ("start", "base"))
        kept, received = levels(self._merged(), 0, start), knowledge.group("merged")
        if (received_rank(kept), merged_digest(kept)) != (start, base):
            fault = f"the client lacks the {start} rank levels that the instruction extends"
            raise KnowledgeError(SERVER, "base", fault)
        rank, limit = start + received_rank(received), rank_in(self.sizes().models["merged"])
        if rank > limit:
            fault = f"rank must be at most {limit} in total, got {rank}"
            raise KnowledgeError(SERVER, "merged", fault)
        merged = kept | {
            name: np.concatenate([kept[name], value], axis=int(name.endswith(LORA_B)))
            for name, value in received.items()
        }
        weights = renamed(merged, (LORA_A, LORA_B), (MERGED_A, MERGED_B))
        if self.rule == "flora":
            for path, (b, a) in factors_of(to_arrays(self.network)).items():
                weights[path + LORA_B] = np.zeros_like(b)
                if round:
                    draws = self.generator(round, f"adapter {path}")
                    weights[path + LORA_A] = draw_rows(len(a), a.shape[1], draws).numpy()
        return Knowledge(grouped("weights", {**knowledge.group("weights"), **weights}))
