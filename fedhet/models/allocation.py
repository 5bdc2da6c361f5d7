"""A bound on what a model may take, before it is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedhet.base.errors import ModelError

_aten = torch.ops.aten
_MAKES = {_aten.empty, _aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn}
_BYTES = 4
T = TypeVar("T")


class Allocation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to make tensors of more than `most` bytes in all inside the block: ModelError."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most, self._left = most, most

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation of PyTorch, unless it would make too much."""
        if func.overloadpacket in _MAKES and args and isinstance(args[0], list | tuple):
            self._left -= _BYTES * math.prod(args[0])
            if self._left < 0:
                raise ModelError(f"the model would take more than {self._most:,} bytes")
        return func(*args, **(kwargs or {}))


def allocating(most: int, make: Callable[[], T]) -> T:
    """Return what `make` returns; raises ModelError before it takes more than `most` bytes."""
    with Allocation(most):
        return make()
