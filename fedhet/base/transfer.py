"""Tensors on their way between the processor and an accelerator: in one piece, and without waiting.

A copy to a GPU of which nothing is said makes the host wait for all that the GPU has been given; so
does each copy back. On a processor nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")
PINNED_FROM = 2**16
"""Bytes from which a tensor is copied by way of pinned memory; below, that is no faster."""
DRAWN = 4096
"""Numbers drawn at a time for an accelerator."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`; the host does not wait for a GPU to take it.

    A GPU fetches large tensors from pinned memory while the host goes on. From a GPU to the host it
    waits, as the values may be read at once.
    """
    if device.type != "cuda":
        return x.to(device)
    if x.device.type == "cpu" and x.nbytes >= PINNED_FROM:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows], where `x` [N, ...] is: either may be on the host, or on a device."""
    return x[to_device(rows, x.device)]


def all_to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return tensors on `device`, without gradients: one copy for all of a type.

    Those that are there already are returned as they are, others are contiguous.
    """
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    away = {
        name: each
        for name, each in found.items()
        if each.device.type != device.type or device.index not in (None, each.device.index)
    }
    for kind in dict.fromkeys(each.dtype for each in away.values()):
        named = {name: each for name, each in away.items() if each.dtype == kind}
        block = to_device(torch.cat([each.reshape(-1) for each in named.values()]), device)
        pieces = torch.split(block, [each.numel() for each in named.values()])
        for (name, each), piece in zip(named.items(), pieces, strict=True):
            found[name] = piece.view(each.shape)
    return found


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device as one vector, if that is an accelerator.

    There, an operation on many small tensors takes as long as the operations' starts. Gradients
    pass through. On a processor the tensors are returned as they are.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    return [torch.cat([each.reshape(-1) for each in tensors])]


def separated(joint: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of which `joined` made `joint`, with the shapes of `like`."""
    if len(joint) == len(like):
        pieces = list(joint)
    else:
        pieces = list(torch.split(joint[0], [each.numel() for each in like]))
    return [piece.view(each.shape) for piece, each in zip(pieces, like, strict=True)]


class Numbers:
    """Random numbers of the host on a device: for an accelerator, many are copied at a time."""

    def __init__(self, draw: Callable[[int], Tensor], device: torch.device) -> None:
        """`draw` returns so many numbers, [N], as if they were drawn one after the other."""
        self._draw, self._device = draw, device
        self._left: Tensor | None = None

    def take(self, count: int) -> Tensor:
        """Return the next `count` numbers, [count]: the same ones on every device."""
        if self._device.type == "cpu":
            return self._draw(count)
        left = self._left
        if left is None or len(left) < count:
            drawn = to_device(self._draw(max(count, DRAWN)), self._device)
            left = drawn if left is None else torch.cat([left, drawn])
        found, self._left = left[:count], left[count:]
        return found

    def get_state(self) -> Tensor | None:
        """Return the numbers that are drawn and not taken; the generator has a state of its own."""
        return self._left

    def set_state(self, state: Tensor | None) -> None:
        """Restore what `get_state` returned."""
        self._left = state
