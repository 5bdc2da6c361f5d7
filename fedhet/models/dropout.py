"""Dropout with masks that are cheap to draw on a CPU, as Monte-Carlo dropout draws many."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEVELS = 256
"""The number of values of a random byte."""


class Dropout(nn.Dropout):
    """`nn.Dropout`, which on a CPU decides by one random byte for each element.

    torch draws a whole random number for each, which takes several times as long as the layer
    before it. Elsewhere, and for a `p` that is not a multiple of 1/256, it is torch's own.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x with each element zeroed with probability p, the others scaled by 1/(1 - p)."""
        threshold = self.p * LEVELS
        if not self.training or x.device.type != "cpu" or threshold not in range(1, LEVELS):
            return super().forward(x)
        return x * random_bytes(x).ge_(threshold).div_(1 - self.p)


def random_bytes(like: Tensor) -> Tensor:
    """Return integers from 0 to 255 as a tensor of the shape, type and layout of `like`.

    They are drawn from torch's global generator, eight at a time.
    """
    drawn = torch.empty(-(-like.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
    found = torch.empty_like(like, requires_grad=False)
    in_memory = found.as_strided((found.numel(),), (1,))
    in_memory.copy_(drawn.view(torch.uint8)[: found.numel()])
    return found
