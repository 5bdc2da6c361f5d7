"""Declaration of FedRE: settings and messages."""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import fedgh
from fedhet.methods.spec import Sums
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, Positive
from fedhet.wire.contract import Contract, TensorField, all_or_none


class FedReSettings(fedgh.FedGhSettings):
    """Settings of FedRE."""

    server_epochs: Count = Field(1, description="server training epochs per round")
    server_lr: Positive = Field(0.01, description="learning rate for training on the server (SGD)")
    server_batch_size: Count = Field(
        32, description="batch size for training on the server, in received means or mixtures"
    )


SPEC = replace(
    fedgh.SPEC,
    title="one head for all extractors, trained by the server on a random mixture per client",
    paper="Yao et al., FedRE: A Representation Entanglement Framework for Model-Heterogeneous FL",
    only_tasks="its clients mix mean features of each class",
    settings=FedReSettings,
    defenses=CHOOSING,
    replies=Contract(
        all_or_none(
            TensorField("representation", "float32", ("D",), "random mixture of class means"),
            TensorField(
                "labels", "float32", ("C",), "weight of each class in it", distribution=True
            ),
        )
    ),
    sums=Sums(unsupported="the server trains on the representations of individual clients"),
)
