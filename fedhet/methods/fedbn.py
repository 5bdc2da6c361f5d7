"""Declaration of FedBN: FedAvg without the batch-norm tensors, which stay on the clients.

Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp and Qi Dou, FedBN: Federated Learning on
Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

from dataclasses import replace
from typing import ClassVar

from fedhet.algorithms import Part
from fedhet.methods import fedavg
from fedhet.methods.spec import SUM_OF_WEIGHTS, Protection

EXTENDS = "fedavg"
"""Method whose strategy and client FedBN uses."""


class FedBnSettings(fedavg.FedAvgSettings):
    """Settings of FedBN, identical to the settings of FedAvg."""

    part: ClassVar[Part] = "all-but-norms"


SPEC = replace(
    fedavg.SPEC,
    title="FedAvg with local batch normalization",
    paper="Li et al., FedBN: Federated Learning on Non-IID Features",
    headline="personal",
    paper_model="the averaged weights with each client's own batch normalization",
    settings=FedBnSettings,
    privacy=Protection(
        unsupported="the method needs batch normalization, which mixes the samples of a batch"
    ),
    sums=SUM_OF_WEIGHTS,
)
