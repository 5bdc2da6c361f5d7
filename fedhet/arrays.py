"""Named numpy arrays, which hold models and messages outside of torch.

In a larger mapping, a model's tensors are named `<group>/<name in the state dict>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Names of a model's tensors to (shape, numpy dtype name)."""

T = TypeVar("T")


def grouped(name: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return `values` under the names `name/<key>`; `group` is the inverse."""
    return {f"{name}/{key}": value for key, value in values.items()}


def group(values: Mapping[str, T], name: str) -> dict[str, T]:
    """Return the values `name/<key>` by key."""
    start = name + "/"
    return {key[len(start) :]: v for key, v in values.items() if key.startswith(start)}


def groups(values: Mapping[str, T], name: str) -> dict[str, dict[str, T]]:
    """Return the values `name/<group>/<key>` by group and key; group names have no slash."""
    inner = group(values, name)
    return {first: group(inner, first) for first in sorted({key.split("/")[0] for key in inner})}
