"""FedPer strategy: FedAvg of the base layers, i.e. the extractor.

Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh and Sunav Choudhary, Federated
Learning with Personalization Layers, arXiv:1912.00818.
"""

from fedhet.methods.fedper import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class FedPerStrategy(FedAvgStrategy):
    """Strategy that averages the base layers; the heads stay on the clients."""

    spec = SPEC
