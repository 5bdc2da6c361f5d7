"""Declaration of FedGKT: settings and messages."""

from pydantic import Field

from fedhet.base.errors import ModelError, SettingsError
from fedhet.methods.spec import MethodSpec, Protection, Sums
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import (
    Count,
    MethodSettings,
    ModelName,
    NonNegative,
    Positive,
    invalid_setting,
)
from fedhet.wire.contract import Contract, Sizes, TensorField, WeightsField
from fedhet.wire.identity import ClientInfo


class FedGktSettings(MethodSettings):
    """Settings of FedGKT."""

    feature_dim: Count = Field(64, description="width D of the features that clients send")
    server_model: ModelName = Field(
        "mlp3", description="server model, which must accept feature vectors, e.g. an mlp"
    )
    server_epochs: Count = Field(
        10, description="server training epochs on the features of all clients, per round"
    )
    temperature: Positive = Field(
        3.0, description="temperature T of the divergence between edge and server logits"
    )
    alpha: NonNegative = Field(
        1.0, description="weight of the divergence in the losses of clients and server"
    )


def gkt_sizes(settings: FedGktSettings, client: ClientInfo) -> Sizes:
    """Return the sizes of axes C (classes) and D (feature width), and the server model's shapes."""
    width = settings.feature_dim
    from fedhet.models import shapes  # Import lazily, because the module imports PyTorch.

    model = shapes(settings.server_model, (width,), client.classes)
    return Sizes({"C": client.classes, "D": width}, {"server": model})


def check_server_model(settings: FedGktSettings, client: ClientInfo) -> None:
    """Check the server model. Raises SettingsError if it does not accept vectors of width D."""
    try:
        gkt_sizes(settings, client)
    except ModelError as error:
        name, expected = "fedgkt.server-model", "a model for feature vectors"
        invalid = invalid_setting(name, settings.server_model, expected)
        raise SettingsError(f"{invalid}: {error}") from None


SPEC = MethodSpec(
    title="large server model, trained on labels and on features from small edge models",
    paper="He et al., Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge",
    headline="common",
    deployed={"personal": "server", "common": "server"},
    paper_model="each client's extractor with the server's model",
    settings=FedGktSettings,
    sizes=gkt_sizes,
    check_model=check_server_model,
    kinds=("private", "server"),
    large_messages=True,
    semi=False,
    defenses=CHOOSING,
    instructions=Contract(
        (
            TensorField(
                "logits",
                "float32",
                ("N", "C"),
                "server logits of the client's training samples",
                required=False,
            ),
            WeightsField("server", "server model, for evaluation", required=False),
        )
    ),
    replies=Contract(
        (
            TensorField("features", "float32", ("N", "D"), "features of each training sample"),
            TensorField("logits", "float32", ("N", "C"), "logits of each training sample"),
            TensorField("labels", "uint", ("N",), "label of each training sample", numbers="C"),
        )
    ),
    metrics={"server_accuracy": "accuracy of the server model on the clients' features"},
    warning="fedgkt sends the features and the label of every training sample to the server",
    privacy=Protection(unsupported="clients send the features and the label of every sample"),
    sums=Sums(unsupported="the server trains on the features of each sample"),
)
