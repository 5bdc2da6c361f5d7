"""FML strategy: FedAvg of the memes.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu and Chao Wu,
Federated Mutual Learning, arXiv:2006.16765.

In regression (not in the paper), both models learn the targets and each other's outputs with
squared errors of standardized values, as in `Regression.divergence`.
"""

from fedhet.methods.fml import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class FmlStrategy(FedAvgStrategy):
    """Strategy that averages the memes; the private models may differ and stay on the clients."""

    spec = SPEC
