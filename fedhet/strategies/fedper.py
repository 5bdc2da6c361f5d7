"""FedPer, server half: FedAvg's, of the base layers (the extractor).

Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh and Sunav Choudhary, Federated
Learning with Personalization Layers, arXiv:1912.00818.
"""

from fedhet.methods.fedper import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class FedPerStrategy(FedAvgStrategy):
    """Averages the base layers (the extractor) by samples."""

    spec = SPEC
