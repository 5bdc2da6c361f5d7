"""Strategy of FedBN: FedAvg of all tensors except the tensors of batch norms.

Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp and Qi Dou, FedBN: Federated Learning on
Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

from fedhet.methods.fedbn import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class FedBnStrategy(FedAvgStrategy):
    """Averages all tensors except the tensors of batch norms."""

    spec = SPEC
