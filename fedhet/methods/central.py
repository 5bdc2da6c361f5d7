"""Declaration of centralized training: settings and messages."""

from typing import Literal

from pydantic import Field

from fedhet.methods.spec import AVERAGED_MODEL, MethodSpec, Protection, Sums, model_shapes
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import MethodSettings, ModelName
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo, client_name


class CentralSettings(MethodSettings):
    """Settings of centralized training."""

    trains_on: Literal["clients", "clients+public", "public"] = Field(
        "clients",
        description="training data: all clients' samples, all clients' samples plus labeled "
        "public data, or public data alone",
    )
    model: ModelName = Field("", description="model to train; empty = model of the first client")

    def uses_public(self) -> bool:
        """Return whether the training data includes public data."""
        return self.trains_on != "clients"


def model_in(run: RunSettings, settings: CentralSettings) -> str:
    """Return the name of the model to train, by default the first client's model."""
    if settings.model:
        return settings.model
    from fedhet.models import assign  # Import lazily, because the module imports PyTorch.

    return assign(run.models.pool, run.clients, run.seed, run.models.assignment)[0]


def sizes_in(run: RunSettings, settings: CentralSettings, client: ClientInfo) -> Sizes:
    """Return the size of axis C (classes) and the tensor shapes of the trained model."""
    model = model_shapes(client, model_in(run, settings))
    return Sizes({"C": client.classes}, {"weights": model})


def trainer(run: RunSettings) -> str:
    """Return the name of the client that trains: the first client that is not held out."""
    from fedhet.settings.run import held_out_clients

    held_out = held_out_clients(run)
    first = next(number for number in range(run.clients) if number not in held_out)
    return client_name(first, run.clients)


SPEC = MethodSpec(
    title="one model trained on all clients' data: the upper bound, for simulations only",
    paper="no paper",
    needs_task="loss",
    headline="common",
    deployed=AVERAGED_MODEL,
    paper_model="no paper; the model trained on all data",
    settings=CentralSettings,
    kinds=("global",),
    simulation_only=True,
    instructions=Contract((WeightsField("weights", "the model to evaluate", required=False),)),
    replies=Contract((WeightsField("weights", "the model after training"),)),
    privacy=Protection(unsupported="the method collects the data of all clients in one place"),
    sums=Sums(unsupported="the server collects the samples"),
)
