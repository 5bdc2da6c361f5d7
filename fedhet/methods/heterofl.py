"""Declaration of HeteroFL: settings and messages."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedhet.algorithms import Part
from fedhet.methods.fedavg import FedAvgSettings, part_sizes
from fedhet.methods.spec import AVERAGED_MODEL, DP_SGD, MethodSpec, Sums
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Listed
from fedhet.wire.contract import Contract, Sum, TensorField, WeightsField

Level = Literal["a", "b", "c", "d", "e"]
WIDTHS: dict[Level, float] = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
"""Fraction of each layer's channels in a submodel, by the level's name in the paper."""


class HeteroFlSettings(FedAvgSettings):
    """Settings of HeteroFL."""

    part: ClassVar[Part] = "trained"

    levels: Annotated[tuple[Level, ...], Listed, Field(min_length=1)] = Field(
        ("a", "b", "c"),
        description="levels, assigned to the clients in turn; a to e have 1, 1/2, 1/4, 1/8, and "
        "1/16 of the channels",
    )
    weighting: Literal["clients", "samples"] = Field(
        "clients",
        description="weights of the clients in averages: equal, or by number of samples",
    )
    scaler: bool = Field(
        True,
        description="whether to divide the features of narrow models by their width during "
        "training",
    )
    masked: bool = Field(
        True,
        description="whether to set the logits of a client's missing classes to 0 in the loss",
    )

    @property
    def widths(self) -> list[float]:
        """Widths of the levels in `levels`, as fractions of the channels."""
        return [WIDTHS[level] for level in self.levels]

    def width_of(self, client: int) -> float:
        """Return the width of client number `client`.

        Sites with their own data have a negative number and the first width.
        """
        return self.widths[max(client, 0) % len(self.widths)]


SPEC = MethodSpec(
    title="submodels of several widths, averaged where they overlap",
    paper="Diao et al., HeteroFL: Computation and Communication Efficient Federated Learning",
    headline="common",
    deployed=AVERAGED_MODEL,
    paper_model="the widest submodel (kind `server`); a client can only deploy its own submodel",
    needs_task="outputs",
    only_tasks="models of this task have no narrower variants",
    # Evaluation omits the scaler, so a narrow model would predict numbers that are too small. This
    # does not affect predicted classes, which depend only on the order of the outputs.
    without_classes={"masked": (False,), "scaler": (False,)},
    late="averaged",
    settings=HeteroFlSettings,
    sizes=part_sizes,
    kinds=("private", "global", "server"),
    submodels=True,
    semi=False,  # Pseudo-labels need running statistics, which batch norms lack during training.
    client_model="model",
    defenses=ROBUST,
    instructions=Contract((WeightsField("weights", "client's part of the global weights"),)),
    replies=Contract(
        (
            WeightsField("weights", "weights of the submodel after training", nested=True),
            TensorField(
                "labels",
                "int64",
                ("P",),
                "classes of the client, with heterofl.masked",
                required=False,
                ids="C",
            ),
        )
    ),
    privacy=replace(
        DP_SGD, needs={"masked": (False,)}, reason="the mask reveals the client's label set"
    ),
    sums=Sums(
        (Sum(("weights",), within="architecture", server="malicious"),),
        needs={"weighting": ("samples",), "masked": (False,)},
    ),
)
