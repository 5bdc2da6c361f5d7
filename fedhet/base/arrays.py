"""Named numpy arrays, which hold models and messages outside of torch.

In a larger mapping, a model's tensors are named `<group>/<name in the state dict>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
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


class OnDemand(Mapping[str, Array]):
    """Named arrays, some of which are read again at each use and not kept in memory."""

    def __init__(self, sources: Mapping[str, Array | Callable[[], Array]]) -> None:
        """`sources`: the arrays, or for those that are read when they are used, what reads them."""
        self.sources = sources

    def __getitem__(self, name: str) -> Array:
        source = self.sources[name]
        return source() if callable(source) else source

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def group(self, name: str) -> OnDemand:
        """Return the arrays `name/<key>` by key; none is read."""
        return OnDemand(group(self.sources, name))

    def replacing(self, values: Arrays) -> OnDemand:
        """Return these arrays, with `values` replacing those of the same names."""
        return OnDemand({**self.sources, **values})


def group_of(values: Arrays, name: str) -> Arrays:
    """Return the arrays `name/<key>` by key; of those that are read when used, none is read."""
    return values.group(name) if isinstance(values, OnDemand) else group(values, name)


def refuse_other_types(saved: Mapping[str, Array], fresh: Mapping[str, Array]) -> None:
    """Raise TypeError for arrays of another type than the method's own of that name."""
    for name in saved.keys() & fresh.keys():
        if (found := np.asarray(saved[name]).dtype) != (own := np.asarray(fresh[name]).dtype):
            raise TypeError(f"{name} is {found}, not {own}")
