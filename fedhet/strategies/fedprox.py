"""FedProx, server half: FedAvg's.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar and Virginia Smith,
Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from fedhet.methods.fedprox import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class FedProxStrategy(FedAvgStrategy):
    """Averages by samples; what differs from FedAvg is the clients' loss."""

    spec = SPEC
