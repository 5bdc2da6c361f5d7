"""FedGH: its settings, and the messages between its halves."""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import lg_fedavg
from fedhet.methods.spec import CLASS_SUMS, Protection
from fedhet.settings.schema import Count, Positive
from fedhet.wire.contract import Contract, TensorField, WeightsField


class FedGhSettings(lg_fedavg.LgFedAvgSettings):
    """Settings of FedGH; the head travels to the clients."""

    server_epochs: Count = Field(
        10, description="the server's epochs per round over the clients' class means"
    )
    server_lr: Positive = Field(0.1, description="learning rate of the server's SGD")
    server_batch_size: Count = Field(10, description="class means per minibatch of the server")


SPEC = replace(
    lg_fedavg.SPEC,
    title="one head for all extractors, trained by the server on class means",
    paper="Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header",
    late="kept",
    settings=FedGhSettings,
    instructions=Contract((WeightsField("weights", "the global head, from which clients start"),)),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "the classes present, each once", ids="C"),
            TensorField("features", "float32", ("P", "D"), "mean features of each"),
        )
    ),
    metrics={
        "classes_covered": "classes that the head was trained on in the round",
        "head_loss": "loss of the server's head",
    },
    privacy=Protection(CLASS_SUMS, vectors=1),
)
