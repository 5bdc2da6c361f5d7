"""Efficient transfer of tensors between CPU and accelerator.

By default, a copy to or from a GPU blocks the host until the GPU has finished all queued work. The
functions in this module combine copies and avoid blocking. On a CPU, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")
MIN_PINNED_BYTES = 2**16
"""Minimum size of tensors that are copied via pinned memory; smaller tensors do not benefit."""
DRAW_CHUNK = 4096
"""Number of random values copied to an accelerator at a time."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move `x` to `device`, without blocking the host during a copy to a GPU.

    A copy from a GPU to the host does block, because the values may be read immediately.
    """
    if device.type != "cuda":
        return x.to(device)
    if x.device.type == "cpu" and x.nbytes >= MIN_PINNED_BYTES:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows] on the device of `x` [N, ...]. The indices may be on another device."""
    return x[to_device(rows, x.device)]


def all_to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move detached tensors to `device`, with a single copy per dtype.

    Tensors that are already on the device are unchanged; moved tensors are contiguous.
    """
    moved = {name: tensor.detach() for name, tensor in tensors.items()}
    remote = {
        name: each
        for name, each in moved.items()
        if each.device.type != device.type or device.index not in (None, each.device.index)
    }
    for kind in dict.fromkeys(each.dtype for each in remote.values()):
        named = {name: each for name, each in remote.items() if each.dtype == kind}
        block = to_device(torch.cat([each.reshape(-1) for each in named.values()]), device)
        pieces = torch.split(block, [each.numel() for each in named.values()])
        for (name, each), piece in zip(named.items(), pieces, strict=True):
            moved[name] = piece.view(each.shape)
    return moved


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate tensors on an accelerator into one vector, to reduce kernel launches.

    The operation supports gradients. On a CPU, the tensors are returned unchanged.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    return [torch.cat([each.reshape(-1) for each in tensors])]


def separated(joint: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Split the result of `joined` into tensors with the shapes of `like`."""
    if len(joint) == len(like):
        pieces = list(joint)
    else:
        pieces = list(torch.split(joint[0], [each.numel() for each in like]))
    return [piece.view(each.shape) for piece, each in zip(pieces, like, strict=True)]


class Numbers:
    """Stream of random numbers drawn on the host, and copied to an accelerator in chunks.

    `draw(N)` must return the next N numbers, regardless of the sizes of earlier draws.
    """

    def __init__(self, draw: Callable[[int], Tensor], device: torch.device) -> None:
        self._draw, self._device = draw, device
        self._buffer: Tensor | None = None

    def take(self, count: int) -> Tensor:
        """Return the next `count` numbers, of shape [count]. They do not depend on the device."""
        if self._device.type == "cpu":
            return self._draw(count)
        buffer = self._buffer
        if buffer is None or len(buffer) < count:
            chunk = to_device(self._draw(max(count, DRAW_CHUNK)), self._device)
            buffer = chunk if buffer is None else torch.cat([buffer, chunk])
        numbers, self._buffer = buffer[:count], buffer[count:]
        return numbers

    def get_state(self) -> Tensor | None:
        """Return the buffered numbers, but not the state of the generator."""
        return self._buffer

    def set_state(self, state: Tensor | None) -> None:
        """Restore the state returned by `get_state`."""
        self._buffer = state
