"""Mappings of named NumPy arrays: the format of models and messages outside of PyTorch.

In a mapping with several groups, such as models, keys have the form `<group>/<key>`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Mapping from tensor names to (shape, NumPy dtype name)."""

T = TypeVar("T")
_CHUNK = 2**20
"""Number of bytes that are read at a time."""
_HEADER = re.compile(
    rb" *\{'descr': '([^'\\]+)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\),? ?\} *\n?"
)
"""Pattern of .npy headers, except headers of structured dtypes."""


def as_array(value: Any) -> Array:
    """Convert data to a NumPy array in which NaN marks each missing number.

    A number is missing if a mask hides it, as in `numpy.ma`, or if it is None, `pandas.NA`, or NaT.
    """
    plain = int, float, str, np.generic
    if isinstance(value, list | tuple) and not all(isinstance(each, plain) for each in value):
        return np.array([as_array(each) for each in value])
    array, mask = np.asarray(value), getattr(value, "mask", None)
    if array.dtype == object:
        import pandas as pd

        mask = np.asarray(pd.isna(array))
        if mask.any():
            with contextlib.suppress(TypeError, ValueError):
                array = np.where(mask, np.nan, array).astype(np.float64)
        return array
    if isinstance(mask, np.ndarray | np.bool_) and array.dtype.kind in "biuf" and mask.any():
        array = np.where(mask, np.nan, array.astype(np.float64))
    return array


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


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape, the Fortran order, and the dtype after the magic string of .npy version 1.0.

    Unlike NumPy, the function does not parse ordinary headers with `ast`. Before Python 3.11.8,
    `ast` may raise SystemError if several threads use it at the same time (python/cpython#106905).
    """
    start = file.tell()
    length = int.from_bytes(file.read(2), "little")
    if found := _HEADER.fullmatch(file.read(length)):
        shape = tuple(int(side) for side in found[3].split(b",") if side.strip())
        with contextlib.suppress(TypeError):
            return shape, found[2] == b"True", np.dtype(found[1].decode("latin1"))
    file.seek(start)
    return np.lib.format.read_array_header_1_0(file)


def read_npy(file: IO[bytes]) -> Array:
    """Read an array from a file in .npy format, without pickle and usually without `ast`."""
    start = file.tell()
    if np.lib.format.read_magic(file) == (1, 0):
        shape, is_fortran, dtype = read_header(file)
        if dtype.itemsize and not dtype.hasobject:
            flat = np.empty(math.prod(shape), dtype)
            view, end = memoryview(flat.view(np.uint8)), 0  # type: ignore[arg-type]
            while size := file.readinto(view[end : end + _CHUNK]):  # type: ignore[attr-defined]
                end += size
            if end < flat.nbytes:
                raise ValueError(f"expected {flat.nbytes} bytes of data, got {end}")
            return flat.reshape(shape, order="F" if is_fortran else "C")
    file.seek(start)
    return np.lib.format.read_array(file, allow_pickle=False)
