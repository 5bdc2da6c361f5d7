"""FedMRL strategy: FedAvg of the shared models.

Liping Yi, Han Yu, Chao Ren, Gang Wang, Xiaoguang Liu and Xiaoxiao Li, Federated Model Heterogeneous
Matryoshka Representation Learning, NeurIPS 2024.

In regression (not in the paper), both heads learn the targets with squared errors.
"""

from fedhet.methods.fedmrl import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class FedMrlStrategy(FedAvgStrategy):
    """Strategy that averages the shared models; local models and projectors stay on the clients."""

    spec = SPEC
