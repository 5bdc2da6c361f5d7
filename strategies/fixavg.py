"""FixAvg, server half: FedAvg of clients that train by FixMatch; the baseline of UM-pFSSL, Table I.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data; Sohn et
al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhet.algorithms.averaging import average_weights
from fedhet.algorithms.fixmatch import augmentations
from fedhet.arrays import Array, Shapes, group, grouped
from fedhet.models import build, shapes
from fedhet.runs.records import mean_figures
from fedhet.wire.contract import Contract, WeightsField
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
        default_model="cnn2-dropout",
    )
    settings: FixAvgSettings
    sends = Contract((WeightsField("weights", "the averaged model, from which clients start"),))

    def init(self) -> None:
        """Start from a new model.

        Raises SettingsError for clients whose models differ, DataError for what is no image.
        """
        augmentations(self.task.shape)
        self.model = self.one_model()
        new = build(self.model, self.task.shape, self.classes, seed=self.run.seed)
        self._tell({name: tensor.numpy() for name, tensor in new.state_dict().items()})

    def shapes(self, client: ClientInfo) -> dict[str, Shapes]:
        """Return the tensors of the run's one architecture."""
        return {"weights": shapes(self.model, self.task.shape, self.classes)}

    def configure(self, round: int, client: ClientInfo) -> Knowledge:
        """Send the averaged model."""
        return self._told

    def judge(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the last average, to be measured; before, each round measures what it began with."""
        return self._told if round == self.run.rounds else None

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average the models by samples."""
        self._tell(average_weights([(r.knowledge.group("weights"), r.samples) for r in replies]))
        return mean_figures([reply.knowledge.scalars for reply in replies])

    def saved(self) -> dict[str, Array]:
        """Return the averaged model."""
        return dict(self._told.tensors)

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Take back what `saved` returned."""
        self._tell(group(saved, "weights"))

    def _tell(self, weights: Mapping[str, Array]) -> None:
        self._told = Knowledge(grouped("weights", weights))
