"""FedDF, client half: local training from the fused model of the client's architecture.

Tao Lin, Lingjing Kong, Sebastian U. Stich and Martin Jaggi, Ensemble Distillation for Robust Model
Fusion in Federated Learning, NeurIPS 2020.
"""

from __future__ import annotations

from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.feddf import FedDfSettings


class FedDfClient(FedAvgClient):
    """Trains as in FedAvg; in the first round, when the server has no model, from a new one."""

    settings: FedDfSettings
