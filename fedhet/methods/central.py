"""Centralized training: its settings, and the messages between its halves."""

from typing import Literal

from pydantic import Field

from fedhet.methods.spec import MethodSpec, Protection, model_shapes
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import MethodSettings, ModelName
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo, client_name


class CentralSettings(MethodSettings):
    """Settings of centralized training."""

    trains_on: Literal["clients", "clients+public", "public"] = Field(
        "clients",
        description="the training data: all clients' training samples, these and the labeled "
        "public data, or the public data alone",
    )
    model: ModelName = Field("", description="the one model; empty = that of the first client")

    def uses_public(self) -> bool:
        """Return whether the model is trained on public data."""
        return self.trains_on != "clients"


def model_in(run: RunSettings, settings: CentralSettings) -> str:
    """Return the name of the model in a run: by default that of the first client."""
    if settings.model:
        return settings.model
    from fedhet.models import assign  # imports PyTorch

    return assign(run.models.pool, run.clients, run.seed, run.models.assignment)[0]


def sizes_in(run: RunSettings, settings: CentralSettings, client: ClientInfo) -> Sizes:
    """Return the axis C, and the tensor shapes of the model in a run."""
    model = model_shapes(client, model_in(run, settings))
    return Sizes({"C": client.classes}, {"weights": model})


def trainer(run: RunSettings) -> str:
    """Return the name of the client that trains: the first of those that may."""
    from fedhet.settings.run import held_out_clients  # it draws, which needs PyTorch

    unseen = held_out_clients(run)
    first = next(number for number in range(run.clients) if number not in unseen)
    return client_name(first, run.clients)


SPEC = MethodSpec(
    title="one model trained on all clients' data: the upper bound, simulation only",
    paper="no paper",
    headline="common",
    settings=CentralSettings,
    kinds=("global",),
    simulation_only=True,
    instructions=Contract((WeightsField("weights", "the model, to be evaluated", required=False),)),
    replies=Contract((WeightsField("weights", "the model after training"),)),
    privacy=Protection(unsupported="all clients' data is in one place"),
)
