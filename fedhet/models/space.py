"""A network in a client's own label space: some of the run's classes."""

from __future__ import annotations

from torch import Tensor, nn


class Within(nn.Module):
    """A network whose logits [N, C] are those of its own classes; the others can never be chosen.

    Trained through this face, a network learns to tell its own classes apart and nothing else:
    the outputs of the others get no gradient.
    """

    def __init__(self, network: nn.Module, outside: Tensor) -> None:
        """Hold the network, and which classes [C], as truths, are not the client's."""
        super().__init__()
        self.network = network
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [N, C], minus infinity for a class outside."""
        logits: Tensor = self.network(x)
        return logits.masked_fill(self.outside, float("-inf"))
