"""Models without PyTorch's compiler, whose import takes longer than all that they need.

One of torchvision's operations, which none of its classifiers has, asks the compiler what it can
do; and so do random draws on the meta device.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_COMPILER, _ASKED = "torch._dynamo", "torch._dynamo.utils"


def torchvision_models() -> Any:
    """Return the module `torchvision.models`."""
    with _without_compiler():
        from torchvision import models

    return models


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Let torchvision be imported before the compiler, which is imported once it is needed."""
    if "torchvision" in sys.modules or _COMPILER in sys.modules:
        yield
        return
    asked = ModuleType(_ASKED)
    asked.is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
    sys.modules |= {_COMPILER: ModuleType(_COMPILER), _ASKED: asked}
    try:
        yield
    finally:
        del sys.modules[_COMPILER], sys.modules[_ASKED]  # a later import finds the true ones


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Let modules be built on the meta device inside the block: without memory, and undrawn."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Leaves tensors as they are where random numbers would be drawn into them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, unless it draws."""
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0]
        return func(*args, **(kwargs or {}))


def _is_compile_supported(device_type: str) -> bool:
    from torch._dynamo.utils import is_compile_supported

    return bool(is_compile_supported(device_type))
