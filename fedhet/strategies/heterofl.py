"""HeteroFL strategy: submodels of one global model, averaged where they overlap.

Enmao Diao, Jie Ding and Vahid Tarokh, HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients, ICLR 2021, Algorithm 1, with the scaler, static batch norm and
masked cross-entropy of Section 3.

Details that the paper does not specify follow the authors' published code: widths are rounded up,
clients have equal weights, and each class's row of the head is averaged over the clients that have
samples of the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhet.algorithms.weights import SubModel, average_overlaps, cut_submodel, is_submodel
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.errors import KnowledgeError
from fedhet.config.resolve import Config
from fedhet.methods.heterofl import SPEC, WIDTHS, HeteroFlSettings
from fedhet.models import is_registered, narrow_name, part_arrays
from fedhet.settings.schema import invalid_setting
from fedhet.strategies.base import HetStrategy, Reply, Selection, ServerModel
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class HeteroFlStrategy(HetStrategy):
    """Strategy that sends each client a submodel of the global model and averages the submodels.

    The global model has the width of the widest level.
    """

    spec = SPEC
    settings: HeteroFlSettings

    def init(self) -> None:
        """Build a new model. Raises SettingsError if it does not support several widths."""
        (name,) = self.run.models.pool
        self.model = narrow_name(name, max(self.settings.widths))
        """Name of the global model."""
        self.narrowest = narrow_name(name, WIDTHS["e"])
        """Name of the narrowest submodel, whose level may be unused."""
        if not is_registered(self.narrowest):
            expected = "a model with several widths, such as mlp, cnn2, or text-cnn"
            raise invalid_setting("models.pool", self.run.models.pool, expected)
        self._set_weights(part_arrays(self.build_model(self.model), self.settings.part))

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select clients whose model is a submodel of the global model."""
        return super().select(round, [member for member in members if self._has_submodel(member)])

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the client's submodel of the global weights."""
        if client.model not in self._parts:
            shapes = self.sizes(client).models["weights"]
            self._parts[client.model] = Knowledge(
                grouped("weights", cut_submodel(self.weights, shapes))
            )
        return self._parts[client.model]

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the client's submodel of the global model, or None if it has no submodel."""
        return self.instruct(round, client) if self._has_submodel(client) else None

    def accept(self, round: int, reply: Reply) -> Reply:
        """Check the reply. Raises KnowledgeError if the client's classes are missing."""
        if self.settings.masked and not len(reply.knowledge.tensors.get("labels", ())):
            raise KnowledgeError(reply.client.name, "labels", "missing or empty")
        return reply

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average each element over the clients that trained it; keep all other elements."""
        models = []
        for reply in replies:
            labels = reply.knowledge.tensors["labels"] if self.settings.masked else None
            by_samples = self.settings.weighting == "samples"
            weight = reply.weight if by_samples else reply.update_factor
            models.append(SubModel(reply.knowledge.group("weights"), weight, labels))
        self._set_weights(average_overlaps(self.weights, models))
        return {}

    def state_dict(self) -> dict[str, Array]:
        """Return the global weights."""
        return grouped("weights", self.weights)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._set_weights(group(state, "weights"))

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return a submodel, as kind "global", and the full model, as kind "server"."""
        settings: Any = config.method_settings
        (base,) = config.run.models.pool
        full = narrow_name(base, max(settings.widths))
        shapes = config.method.spec.sizes(settings, client).models["weights"]
        part = ServerModel(cut_submodel(group(state, "weights"), shapes), client.model)
        return {"global": part, **({"server": part} if client.model == full else {})}

    def _set_weights(self, weights: dict[str, Array]) -> None:
        self.weights = weights
        """Parameters of the global model."""
        self._parts: dict[str, Knowledge] = {}
        """Cached instructions, by submodel."""

    def _has_submodel(self, client: ClientInfo) -> bool:
        """Return whether a client's model is a submodel of the global model."""
        full = self.sizes(replace(client, model=self.model)).models["weights"]
        return is_submodel(self.sizes(client).models["weights"], full)
