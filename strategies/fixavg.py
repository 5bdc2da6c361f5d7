"""FixAvg, server half: FedAvg of clients that train by FixMatch; the baseline of UM-pFSSL, Table I.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data; Sohn et
al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from fedhet.algorithms.averaging import average_weights
from fedhet.algorithms.fixmatch import check_shape
from fedhet.arrays import Array, group, grouped
from fedhet.config.methods import MethodSpec
from fedhet.models import build, shapes, to_arrays
from fedhet.runs.records import mean_figures
from fedhet.settings.schema import MethodSettings, NonNegative
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge
from strategies.base import HetStrategy, Reply


class FixAvgSettings(MethodSettings):
    """Settings of FixAvg."""

    threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.95, description="likelihood from which a prediction becomes a pseudo-label"
    )
    unlabelled_weight: NonNegative = Field(
        1.0, description="weight of the unlabelled samples' mean loss against that of labelled ones"
    )


def model_sizes(settings: FixAvgSettings, client: ClientInfo) -> Sizes:
    """Return the axis C, and the tensor shapes of the architecture."""
    return Sizes(
        {"C": client.classes}, {"weights": shapes(client.model, client.shape, client.classes)}
    )


class FixAvgStrategy(HetStrategy):
    """Averages the models of all clients, weighted by their samples, labelled and unlabelled."""

    spec = MethodSpec(
        title="FedAvg with FixMatch on the unlabelled part; the baseline of um-pfssl",
        paper="McMahan et al., FedAvg, with Sohn et al., FixMatch",
        headline="personal",
        settings=FixAvgSettings,
        sizes=model_sizes,
        kinds=("private", "global"),
        needs_unlabelled=True,
        augments=True,
        one_model=True,
        default_model="cnn2-dropout",
    )
    settings: FixAvgSettings
    sends = Contract((WeightsField("weights", "the averaged model, from which clients start"),))

    def init(self) -> None:
        """Start from a new model. Raises DataError if the samples are not images."""
        task = self.task
        check_shape(task.shape)
        self._instruct_all(
            to_arrays(build(task.model, task.shape, task.classes, seed=self.run.seed))
        )

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send the averaged model."""
        return self._instruction

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the last round's average; earlier, clients evaluate the one they started from."""
        return self._instruction if round == self.run.rounds else None

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average the models, weighted by samples."""
        self._instruct_all(
            average_weights([(r.knowledge.group("weights"), r.samples) for r in replies])
        )
        return mean_figures([reply.knowledge.scalars for reply in replies])

    def state_dict(self) -> dict[str, Array]:
        """Return the averaged model."""
        return dict(self._instruction.tensors)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` returned."""
        self._instruct_all(group(state, "weights"))

    def _instruct_all(self, weights: Mapping[str, Array]) -> None:
        """Build the one instruction that all clients share."""
        self._instruction = Knowledge(grouped("weights", weights))
