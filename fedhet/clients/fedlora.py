"""FedLoRA client: local training of adapters, with optional pruning of ranks (HetLoRA)."""

from __future__ import annotations

from fedhet.algorithms import LORA_A, Aggregation
from fedhet.algorithms.adapters import PrunedModel, padded
from fedhet.algorithms.local_models import LocalModel
from fedhet.algorithms.weights import cut_submodel
from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.fedlora import FedLoraSettings, received_rank, sent_sizes, with_rank
from fedhet.models import HetModel, to_arrays
from fedhet.wire.contract import Sizes
from fedhet.wire.knowledge import Knowledge


class FedLoraClient(FedAvgClient):
    """Client that trains adapters of its model's rank, starting from part of the server's adapters.

    Pruning does not change the rank of the model, which is in the model's name. Pruned rank levels
    are zero in both factors, so they have no effect and no gradient, and are not sent.
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
        return grouped(
            "weights", cut_submodel(sent, with_rank(self.sizes().models["weights"], rank))
        )

    def _joined(self, model: HetModel, weights: Arrays) -> HetModel:
        """Load `weights` into `model`, padded with zeros up to the model's rank."""
        own = to_arrays(model)
        whole = {n: padded(value, own[n].shape) for n, value in weights.items()}
        return super()._joined(model, whole)
