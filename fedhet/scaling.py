"""Images as they are stored, in bytes, and as models take them."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(x: Tensor) -> Tensor:
    """Return `x` as models expect it: uint8 becomes x/127.5 - 1 in float32, others are kept."""
    return x.to(torch.float32).div_(127.5).sub_(1.0) if x.dtype == torch.uint8 else x
