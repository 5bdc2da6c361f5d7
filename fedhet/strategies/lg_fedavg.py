"""LG-FedAvg strategy: FedAvg of the heads.

Paul Pu Liang, Terrance Liu, Liu Ziyin, Nicholas B. Allen, Randy P. Auerbach, David Brent, Ruslan
Salakhutdinov and Louis-Philippe Morency, Think Locally, Act Globally: Federated Learning with Local
and Global Representations, arXiv:2001.01523.
"""

from fedhet.methods.lg_fedavg import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class LgFedAvgStrategy(FedAvgStrategy):
    """Strategy that averages the heads; the extractors, which may differ, stay on the clients."""

    spec = SPEC
