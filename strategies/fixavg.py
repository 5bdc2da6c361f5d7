"""FixAvg, server half: FedAvg of clients that train by FixMatch; the baseline of UM-pFSSL, Table I.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data; Sohn et
al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from fedhet.algorithms.averaging import average_weights
from fedhet.algorithms.fixmatch import augmentations
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
    """What FixAvg lets a user choose."""

    threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.95, description="likelihood from which a prediction becomes a pseudo-label"
    )
    unlabelled_weight: NonNegative = Field(
        1.0, description="weight of an unlabelled sample against a labelled one"
    )


def model_sizes(settings: FixAvgSettings, client: ClientInfo) -> Sizes:
    """Return C, and the tensors of the one architecture."""
    return Sizes(
        {"C": client.classes}, {"weights": shapes(client.model, client.shape, client.classes)}
    )


class FixAvgStrategy(HetStrategy):
    """Averages the models of all clients by their samples, labelled or not."""

    spec = MethodSpec(
        title="FedAvg with FixMatch on the unlabelled part; the baseline of um-pfssl",
        paper="McMahan et al., FedAvg, with Sohn et al., FixMatch",
        headline="personal",
        settings=FixAvgSettings,
        sizes=model_sizes,
        kinds=("private", "global"),
        needs_unlabelled=True,
        one_model=True,
        default_model="cnn2-dropout",
    )
    settings: FixAvgSettings
    sends = Contract((WeightsField("weights", "the averaged model, from which clients start"),))

    def init(self) -> None:
        """Start from a new model. Raises DataError for what is no image."""
        task = self.task
        augmentations(task.shape)
        self._instruct_all(
            to_arrays(build(task.model, task.shape, task.classes, seed=self.run.seed))
        )

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send the averaged model."""
        return self._instruction

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the last average; before the last round, each evaluates what it started from."""
        return self._instruction if round == self.run.rounds else None

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average the models by samples."""
        self._instruct_all(
            average_weights([(r.knowledge.group("weights"), r.samples) for r in replies])
        )
        return mean_figures([reply.knowledge.scalars for reply in replies])

    def state_dict(self) -> dict[str, Array]:
        """Return the averaged model."""
        return dict(self._instruction.tensors)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take back what `state_dict` returned."""
        self._instruct_all(group(state, "weights"))

    def _instruct_all(self, weights: Mapping[str, Array]) -> None:
        """Make the one instruction for all clients."""
        self._instruction = Knowledge(grouped("weights", weights))
