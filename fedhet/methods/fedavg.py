"""FedAvg: its settings, and the messages between its halves."""

from __future__ import annotations

from typing import ClassVar

from fedhet.algorithms.choices import Part
from fedhet.methods.spec import DP_SGD, MethodSpec, model_shapes
from fedhet.settings.defence import ROBUST
from fedhet.settings.schema import MethodSettings
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo


class FedAvgSettings(MethodSettings):
    """Settings of FedAvg; a method that averages a part of the model overrides `part`."""

    part: ClassVar[Part] = "all"
    """The part of the model that travels."""

    @property
    def width(self) -> int | None:
        """Return the width of the features before the head; None: the model's own."""
        return None


def part_sizes(settings: FedAvgSettings, client: ClientInfo) -> Sizes:
    """Return the axis C, and the shapes of the part that travels."""
    part = model_shapes(
        client,
        part=settings.part,
        feature_dim=settings.width,
    )
    return Sizes({"C": client.classes}, {"weights": part})


INSTRUCTIONS = Contract(
    (WeightsField("weights", "the averaged tensors, from which clients start"),)
)
REPLIES = Contract((WeightsField("weights", "the tensors that are averaged, after training"),))
SPEC = MethodSpec(
    title="one model, averaged by samples",
    paper="McMahan et al., Communication-Efficient Learning of Deep Networks",
    headline="common",
    late="averaged",
    settings=FedAvgSettings,
    sizes=part_sizes,
    kinds=("private", "global"),
    one_model=True,
    defences=ROBUST,
    instructions=INSTRUCTIONS,
    replies=REPLIES,
    privacy=DP_SGD,
)
