"""DS-FL, client half: FedMD's round, with probabilities on unlabelled public data.

Sohei Itahara, Takayuki Nishio, Yusuke Koda, Masahiro Morikura and Koji Yamamoto,
Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative
Training with Non-IID Private Data, IEEE Transactions on Mobile Computing, arXiv:2008.06180.
"""

from __future__ import annotations

from fedhet.clients.fedmd import FedMdClient
from fedhet.methods.ds_fl import DsFlSettings


class DsFlClient(FedMdClient):
    """Distils the sharpened mean ("Distillation"), trains ("Update"), and predicts."""

    settings: DsFlSettings
