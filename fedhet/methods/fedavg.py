"""FedAvg: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import ClassVar

from fedhet.algorithms import Part
from fedhet.methods.spec import DP_SGD, MethodSpec, default_sizes, model_shapes
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import MethodSettings
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo


class FedAvgSettings(MethodSettings):
    """Settings of FedAvg; a method that averages a part of the model overrides `part`."""

    part: ClassVar[Part] = "all"
    """The part of the model that travels."""
    averaged_by: ClassVar[str] = ""
    """The setting that names the model that is averaged; empty: the clients' own model is."""

    @property
    def averaged(self) -> str:
        """Return the name of the model that is averaged; empty: the clients' own."""
        return str(getattr(self, self.averaged_by)) if self.averaged_by else ""

    @property
    def width(self) -> int | None:
        """Return the width of the features before the head; None: the model's own."""
        return None


def part_sizes(settings: FedAvgSettings, client: ClientInfo) -> Sizes:
    """Return the axes, and the shapes of the part that travels."""
    own, width = settings, settings.width
    part = model_shapes(client, own.averaged, part=own.part, feature_dim=width)
    return replace(default_sizes(settings, client), models={"weights": part})


REPLIES = Contract((WeightsField("weights", "the tensors that are averaged, after training"),))
SPEC = MethodSpec(
    title="one model, averaged by number of samples",
    paper="McMahan et al., Communication-Efficient Learning of Deep Networks",
    headline="common",
    late="averaged",
    settings=FedAvgSettings,
    sizes=part_sizes,
    kinds=("private", "global"),
    one_model=True,
    defenses=ROBUST,
    instructions=Contract(
        (WeightsField("weights", "the averaged tensors, from which clients start"),)
    ),
    replies=REPLIES,
    privacy=DP_SGD,
)
