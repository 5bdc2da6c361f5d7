"""Knowledge distillation between logits [N, C]."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def distillation_loss(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) of logits [N, C], averaged over samples: FedType's Eq. 1.

    No gradient flows into the teacher.
    """
    target = teacher.detach().float().log_softmax(1)
    own = student.float().log_softmax(1)
    return F.kl_div(own, target, reduction="batchmean", log_target=True)
