"""Declaration of FedGH: settings and messages."""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import lg_fedavg
from fedhet.methods.spec import CLASS_SUMS, Protection, Sums
from fedhet.settings.schema import Count, Positive
from fedhet.wire.contract import Contract, TensorField, WeightsField


class FedGhSettings(lg_fedavg.LgFedAvgSettings):
    """Settings of FedGH."""

    server_epochs: Count = Field(10, description="server training epochs per round")
    server_lr: Positive = Field(0.1, description="learning rate for training on the server (SGD)")
    server_batch_size: Count = Field(
        10, description="batch size for training on the server, in received means or mixtures"
    )


SPEC = replace(
    lg_fedavg.SPEC,
    title="one head for all extractors, trained by the server on class means",
    paper="Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header",
    paper_model="each client's model",
    late="kept",
    needs_task="classes",
    only_tasks="its server trains a head on mean features of each class",
    settings=FedGhSettings,
    instructions=Contract((WeightsField("weights", "global head, from which clients start"),)),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "classes of the client", ids="C"),
            TensorField("features", "float32", ("P", "D"), "mean features of each class"),
        )
    ),
    metrics={
        "classes_covered": "classes on which the head was trained in the round",
        "head_loss": "loss of the global head",
    },
    privacy=Protection(CLASS_SUMS, vectors=1),
    sums=Sums(unsupported="the server trains on the class means of individual clients"),
)
