"""Mappings of named NumPy arrays: the format of models and messages outside of PyTorch.

In a mapping with several groups, such as models, keys have the form `<group>/<key>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Mapping from tensor names to (shape, NumPy dtype name)."""

T = TypeVar("T")


def grouped(name: str, values: Mapping[str, T]) -> dict[str, T]:
    """Prefix the keys of `values` with `name/` (inverse of `group`)."""
    return {f"{name}/{key}": value for key, value in values.items()}


def group(values: Mapping[str, T], name: str) -> dict[str, T]:
    """Select the values whose keys start with `name/`, and remove this prefix from the keys."""
    start = name + "/"
    return {key[len(start) :]: v for key, v in values.items() if key.startswith(start)}


def groups(values: Mapping[str, T], name: str) -> dict[str, dict[str, T]]:
    """Return the values `name/<group>/<key>` by group and key. Group names contain no slash."""
    inner = group(values, name)
    return {first: group(inner, first) for first in sorted({key.split("/")[0] for key in inner})}


class OnDemand(Mapping[str, Array]):
    """Mapping of named arrays, some of which are loaded on every access to save memory.

    `sources` contains arrays, or functions that load them.
    """

    def __init__(self, sources: Mapping[str, Array | Callable[[], Array]]) -> None:
        self.sources = sources

    def __getitem__(self, name: str) -> Array:
        source = self.sources[name]
        return source() if callable(source) else source

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def group(self, name: str) -> OnDemand:
        """Return the arrays `name/<key>` by key, without loading them."""
        return OnDemand(group(self.sources, name))

    def replacing(self, values: Arrays) -> OnDemand:
        """Return a copy in which `values` replace the arrays with the same names."""
        return OnDemand({**self.sources, **values})


def group_of(values: Arrays, name: str) -> Arrays:
    """Return the arrays `name/<key>` by key, without loading arrays of an `OnDemand` mapping."""
    return values.group(name) if isinstance(values, OnDemand) else group(values, name)


def check_dtypes(saved: Mapping[str, Array], fresh: Mapping[str, Array]) -> None:
    """Raise TypeError if a saved array and the fresh array of the same name differ in dtype."""
    for name in saved.keys() & fresh.keys():
        if (dtype := np.asarray(saved[name]).dtype) != (expected := np.asarray(fresh[name]).dtype):
            raise TypeError(f"{name}: expected dtype {expected}, got {dtype}")
