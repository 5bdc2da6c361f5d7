"""FedProx strategy, identical to the FedAvg strategy.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar and Virginia Smith,
Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from fedhet.methods.fedprox import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class FedProxStrategy(FedAvgStrategy):
    """Strategy that averages the clients' weights as in FedAvg; only the clients' loss differs."""

    spec = SPEC
