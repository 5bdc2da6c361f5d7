"""Means over the samples of an epoch of what a method measures of its own training."""

from __future__ import annotations

import torch
from torch import Tensor


class EpochMeans:
    """Named sums over an epoch's batches, which stay on the device until they are read."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self._names, self._count = names, 0
        self._sums = torch.zeros(len(names), device=device)

    def clear(self, epoch: int = 0) -> None:
        """Begin an epoch: forget all batches."""
        self._count = 0
        self._sums.zero_()

    @torch.no_grad()
    def add(self, means: Tensor, samples: int) -> None:
        """Add a batch of `samples`, by its means of each of the names."""
        self._count += samples
        self._sums += means.detach().float() * samples

    def read(self) -> dict[str, float]:
        """Return the means by name; nothing if there was no batch."""
        if not self._count:
            return {}
        return dict(zip(self._names, (self._sums / self._count).tolist(), strict=True))
