"""A batch's loss as a module: the networks that it trains are its submodules.

What the server has sent, and what is gathered on the way, are its buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Objective(nn.Module):
    """The loss that a client's local epochs minimise: implement `loss`."""

    def loss(self, x: Tensor, y: Tensor, *drawn: Tensor) -> Tensor:
        """Return the mean loss of a batch x [N, ...], y [N], a scalar with gradient."""
        raise NotImplementedError

    def drawn(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return what is drawn at random for a batch from a generator of the client's own."""
        return ()

    def penalty(self) -> Tensor | float:
        """Return the term of the loss that depends on the weights alone, a scalar."""
        return 0.0

    def forward(self, x: Tensor, y: Tensor, *drawn: Tensor) -> Tensor:
        """Return the loss of a batch, with what was drawn for it before, or is now."""
        return self.loss(x, y, *(drawn or self.drawn(y)))


class CrossEntropy(Objective):
    """Supervised training: the cross-entropy of a network's logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, x: Tensor, y: Tensor, *drawn: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(self.model(x).float(), y)


class OwnClasses(nn.Module):
    """A client's label space: selects the columns of its classes, and numbers the labels by them.

    A loss of these leaves the outputs of other classes without a gradient.
    """

    space: Tensor

    def __init__(self, space: Tensor) -> None:
        """`space` [S]: the client's classes, ascending."""
        super().__init__()
        self.register_buffer("space", space, persistent=False)

    def forward(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of logits [N, C] of the classes, and y [N] as their numbers."""
        return self.columns(logits), torch.searchsorted(self.space, y)

    def columns(self, logits: Tensor) -> Tensor:
        """Return the columns of logits [N, C] of the classes, [N, S]."""
        whole = self.space.shape[-1] == logits.shape[-1]
        return logits if whole else logits[:, self.space]
