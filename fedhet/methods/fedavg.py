"""Declaration of FedAvg: settings and messages."""

from dataclasses import replace
from typing import ClassVar

from fedhet.algorithms import Part
from fedhet.methods.spec import (
    AVERAGED_MODEL,
    DP_SGD,
    SUM_OF_ALL_WEIGHTS,
    MethodSpec,
    default_sizes,
    model_shapes,
)
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import MethodSettings
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo


class FedAvgSettings(MethodSettings):
    """Settings of FedAvg. Methods that average only a part of the model override `part`."""

    part: ClassVar[Part] = "all"
    """Part of the model that is sent and averaged."""
    averaged_by: ClassVar[str] = ""
    """Setting that names the averaged model, or "" for the clients' own model."""

    averaged_kind: ClassVar[str] = "global"
    """Kind of the averaged model, as evaluated on the clients."""

    @property
    def averaged(self) -> str:
        """Name of the averaged model, or "" for the clients' own model."""
        return str(getattr(self, self.averaged_by)) if self.averaged_by else ""

    @property
    def width(self) -> int | None:
        """Width of the features before the head, or None for the model's default."""
        return None


def part_sizes(settings: FedAvgSettings, client: ClientInfo) -> Sizes:
    """Return the axis sizes and the tensor shapes of the averaged part of the model."""
    shapes = model_shapes(client, settings.averaged, part=settings.part, feature_dim=settings.width)
    return replace(default_sizes(settings, client), models={"weights": shapes})


REPLIES = Contract((WeightsField("weights", "tensors to average, after training"),))
SPEC = MethodSpec(
    title="weighted average of one model",
    paper="McMahan et al., Communication-Efficient Learning of Deep Networks",
    needs_task="loss",
    headline="common",
    deployed=AVERAGED_MODEL,
    paper_model="the averaged model",
    late="averaged",
    settings=FedAvgSettings,
    sizes=part_sizes,
    kinds=("private", "global"),
    one_model=True,
    defenses=ROBUST,
    instructions=Contract((WeightsField("weights", "averaged tensors, from which clients start"),)),
    replies=REPLIES,
    privacy=DP_SGD,
    sums=SUM_OF_ALL_WEIGHTS,
)
