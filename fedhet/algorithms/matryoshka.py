"""FedMRL: representations nested like Matryoshka dolls, and their loss.

Liping Yi et al., Federated Model Heterogeneous Matryoshka Representation Learning, NeurIPS 2024,
Section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projector(nn.Linear):
    """P: the features of the shared and of the own model -> the fused representation [N, d2]."""

    def __init__(self, shared_dim: int, own_dim: int) -> None:
        """`shared_dim` is d1, `own_dim` d2 >= d1: the widths of the two models' features."""
        super().__init__(shared_dim + own_dim, own_dim)
        self.coarse_dim = shared_dim

    def fuse(self, shared: Tensor, own: Tensor) -> Tensor:
        """Return P([shared, own]) [N, d2] of features [N, d1] and [N, d2] (Section 4.1)."""
        fused: Tensor = self(torch.cat([shared, own], dim=1))
        return fused

    def coarse(self, fused: Tensor) -> Tensor:
        """Return the inner doll [N, d1]: the first components of the fused ones (Section 4.2)."""
        return fused[:, : self.coarse_dim]


def matryoshka_losses(fine: Tensor, coarse: Tensor, labels: Tensor) -> Tensor:
    """Return [2]: the cross-entropy of the own head and that of the shared head (Section 4.2).

    Logits [N, C] of the own head on all fused features, and of the shared head on the coarse part.
    """
    losses = [F.cross_entropy(logits.float(), labels) for logits in (fine, coarse)]
    return torch.stack(losses)
