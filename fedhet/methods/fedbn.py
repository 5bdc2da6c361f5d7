"""Declaration of FedBN: settings and messages."""

from dataclasses import replace
from typing import ClassVar

from fedhet.algorithms import Part
from fedhet.methods import fedavg
from fedhet.methods.spec import Protection


class FedBnSettings(fedavg.FedAvgSettings):
    """Settings of FedBN, the same as for FedAvg."""

    part: ClassVar[Part] = "all-but-norms"


SPEC = replace(
    fedavg.SPEC,
    title="FedAvg with local batch normalization",
    paper="Li et al., FedBN: Federated Learning on Non-IID Features",
    headline="personal",
    settings=FedBnSettings,
    privacy=Protection(
        unsupported="the method needs batch normalization, which mixes the samples of a batch"
    ),
)
