"""FedBN, client half: FedAvg's; batch norms stay at the client (Algorithm 1).

Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp and Qi Dou, FedBN: Federated Learning on
Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

from __future__ import annotations

from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.fedbn import FedBnSettings


class FedBnClient(FedAvgClient):
    """Trains the whole model, and sends all tensors but those of batch norms."""

    settings: FedBnSettings
