"""Named numpy arrays: how models and messages are held wherever they are not tensors.

A model's tensors in a larger set stand under `<group>/<name in the state dict>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Names of a model's tensors to (shape, numpy dtype)."""

T = TypeVar("T")


def grouped(name: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return `values` under the names `name/<key>`; `group` takes them apart again."""
    return {f"{name}/{key}": value for key, value in values.items()}


def group(values: Mapping[str, T], name: str) -> dict[str, T]:
    """Return the values `name/<key>` by their keys."""
    start = name + "/"
    return {key[len(start) :]: v for key, v in values.items() if key.startswith(start)}


def groups(values: Mapping[str, T], name: str) -> dict[str, dict[str, T]]:
    """Return the values `name/<group>/<key>` by group and key; no group's name has a slash."""
    inner = group(values, name)
    return {first: group(inner, first) for first in sorted({key.split("/")[0] for key in inner})}
