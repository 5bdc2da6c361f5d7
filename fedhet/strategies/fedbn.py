"""FedBN strategy: FedAvg without the batch-norm tensors.

Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp and Qi Dou, FedBN: Federated Learning on
Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

from fedhet.methods.fedbn import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class FedBnStrategy(FedAvgStrategy):
    """Strategy that averages all tensors except the tensors of batch-norm layers."""

    spec = SPEC
