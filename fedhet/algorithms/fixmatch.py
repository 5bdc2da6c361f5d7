"""FixMatch (Sohn et al. 2020): pseudo-labels, and the loss of unlabelled samples.

N samples, C classes. The weak and strong changes of samples are their kind's (`fedhet.kinds`).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def confident_labels(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the likeliest class [N], and whether its likelihood reaches `threshold`, bool [N]."""
    likelihood, labels = logits.detach().float().softmax(1).max(1)
    return labels, likelihood >= threshold


def unlabelled_loss(logits: Tensor, labels: Tensor, confident: Tensor) -> Tensor:
    """Return FixMatch's loss of unlabelled images (Eq. 4), a scalar: a mean over all N of them.

    It is the cross-entropy of the logits [N, C] of strong images with pseudo-labels [N], and 0 for
    images whose pseudo-label is not `confident` [N].
    """
    each = F.cross_entropy(logits.float(), labels, reduction="none")
    return (each * confident).sum() / len(labels)
