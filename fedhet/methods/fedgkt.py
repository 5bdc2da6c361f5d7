"""FedGKT: its settings, and the messages between its halves."""

from pydantic import Field

from fedhet.base.errors import ModelError
from fedhet.methods.spec import MethodSpec, Protection
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, MethodSettings, ModelName, NonNegative, Positive, refused
from fedhet.wire.contract import Contract, Sizes, TensorField, WeightsField
from fedhet.wire.identity import ClientInfo


class FedGktSettings(MethodSettings):
    """Settings of FedGKT."""

    feature_dim: Count = Field(64, description="width of the features that travel, D")
    server_model: ModelName = Field(
        "mlp3", description="the server's model, of feature vectors: an mlp, or your own"
    )
    server_epochs: Count = Field(
        10, description="the server's epochs per round, over all clients' features"
    )
    temperature: Positive = Field(
        3.0, description="T of the divergences between the logits of edge and server"
    )
    alpha: NonNegative = Field(
        1.0, description="weight of the divergence added to cross-entropy, at clients and server"
    )


def gkt_sizes(settings: FedGktSettings, client: ClientInfo) -> Sizes:
    """Return the axes C and D (feature width), and the shapes of the server's model."""
    width = settings.feature_dim
    from fedhet.models import shapes  # imports PyTorch

    model = shapes(settings.server_model, (width,), client.classes)
    return Sizes({"C": client.classes, "D": width}, {"server": model})


def check_server_model(settings: FedGktSettings, client: ClientInfo) -> None:
    """Raise SettingsError for a server model that does not take vectors of the features' width."""
    try:
        gkt_sizes(settings, client)
    except ModelError as error:
        rule = f"a model of feature vectors: {error}"
        raise refused("fedgkt.server-model", settings.server_model, rule) from None


SPEC = MethodSpec(
    title="large server model, trained on features and labels of small edge models",
    paper="He et al., Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge",
    headline="common",
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
                "the server's, of the client's training samples",
                required=False,
            ),
            WeightsField("server", "the server's model, for evaluation", required=False),
        )
    ),
    replies=Contract(
        (
            TensorField("features", "float32", ("N", "D"), "of each training sample"),
            TensorField("logits", "float32", ("N", "C"), "of each training sample"),
            TensorField("labels", "uint", ("N",), "of each training sample", numbers="C"),
        )
    ),
    metrics={"server_accuracy": "accuracy of the server's model on clients' features"},
    warning="fedgkt sends the features and the class of every training sample to the server",
    privacy=Protection(unsupported="it sends the features and the class of every sample"),
)
