"""HeteroFL: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedhet.algorithms import Part
from fedhet.methods.fedavg import FedAvgSettings, part_sizes
from fedhet.methods.spec import DP_SGD, MethodSpec
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Listed
from fedhet.wire.contract import Contract, TensorField, WeightsField

Level = Literal["a", "b", "c", "d", "e"]
WIDTHS: dict[Level, float] = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
"""The share of each layer's channels that a sub-model has, by the paper's name of its level."""


class HeteroFlSettings(FedAvgSettings):
    """Settings of HeteroFL."""

    part: ClassVar[Part] = "trained"

    levels: Annotated[tuple[Level, ...], Listed, Field(min_length=1)] = Field(
        ("a", "b", "c"),
        description="the clients' levels, assigned in turn: a has all channels of the model, b "
        "1/2, c 1/4, d 1/8, e 1/16; a level that is listed twice has twice as many clients",
    )
    weighting: Literal["clients", "samples"] = Field(
        "clients", description="does a client count once in a mean, or by its samples?"
    )
    scaler: bool = Field(
        True, description="divide the features of narrow models by their width while they train"
    )
    masked: bool = Field(
        True,
        description="cross-entropy with 0 for the outputs of classes that a client has no samples "
        "of; a class's rows of the head are averaged over the clients that report some",
    )

    @property
    def widths(self) -> list[float]:
        """Return the width of each level, in turn."""
        return [WIDTHS[level] for level in self.levels]

    def width_of(self, client: int) -> float:
        """Return the width of client number `client`; for a site without number, the first."""
        return self.widths[max(client, 0) % len(self.widths)]


SPEC = MethodSpec(
    title="submodels of several widths, averaged where they overlap",
    paper="Diao et al., HeteroFL: Computation and Communication Efficient Federated Learning",
    headline="common",
    late="averaged",
    settings=HeteroFlSettings,
    sizes=part_sizes,
    kinds=("private", "global", "server"),
    submodels=True,
    semi=False,  # its batch norms have no statistics to predict with until training is over
    models={"image": "cnn2", "table": "mlp", "text": "text-cnn", "signal": "signal-cnn2"},
    defenses=ROBUST,
    instructions=Contract((WeightsField("weights", "the client's part of the global weights"),)),
    replies=Contract(
        (
            WeightsField("weights", "the sub-model's weights, after training", nested=True),
            TensorField(
                "labels",
                "int64",
                ("P",),
                "with heterofl.masked: the classes that it has samples of",
                required=False,
                ids="C",
            ),
        )
    ),
    privacy=replace(DP_SGD, needs={"masked": (False,)}, reason="the mask is the label set"),
)
