"""FedMRL, server half: FedAvg's, of the shared models.

Liping Yi, Han Yu, Chao Ren, Gang Wang, Xiaoguang Liu and Xiaoxiao Li, Federated Model Heterogeneous
Matryoshka Representation Learning, NeurIPS 2024.
"""

from fedhet.methods.fedmrl import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class FedMrlStrategy(FedAvgStrategy):
    """Averages the shared models by samples; own models and projectors stay at the clients."""

    spec = SPEC
