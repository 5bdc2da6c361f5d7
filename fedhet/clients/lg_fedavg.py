"""LG-FedAvg, client half: FedAvg's; the extractor, its local representation, stays (Algorithm 1).

Paul Pu Liang, Terrance Liu, Liu Ziyin, Nicholas B. Allen, Randy P. Auerbach, David Brent, Ruslan
Salakhutdinov and Louis-Philippe Morency, Think Locally, Act Globally: Federated Learning with Local
and Global Representations, arXiv:2001.01523.
"""

from __future__ import annotations

from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.lg_fedavg import LgFedAvgSettings


class LgFedAvgClient(FedAvgClient):
    """Trains extractor and head together, and sends the head."""

    settings: LgFedAvgSettings
