"""Centralised training: its settings, and the messages between its halves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedhet.methods.spec import MethodSpec
from fedhet.settings.schema import MethodSettings, ModelName
from fedhet.wire.contract import Contract, WeightsField


class CentralSettings(MethodSettings):
    """Settings of centralised training."""

    trains_on: Literal["clients", "clients+public", "public"] = Field(
        "clients",
        description="the training data: all clients' training samples, these and the labelled "
        "public data, or the public data alone",
    )
    model: ModelName = Field("", description="the one model; empty = that of the first client")

    def uses_public(self) -> bool:
        """Return whether the model is trained on public data."""
        return self.trains_on != "clients"


INSTRUCTIONS = Contract((WeightsField("weights", "the model, to be evaluated", required=False),))
REPLIES = Contract((WeightsField("weights", "the model after training"),))
SPEC = MethodSpec(
    title="one model on all clients' data, in a simulation: the upper bound of every table",
    paper="no paper",
    headline="common",
    settings=CentralSettings,
    kinds=("global",),
    simulation_only=True,
    instructions=INSTRUCTIONS,
    replies=REPLIES,
)
