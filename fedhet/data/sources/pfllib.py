"""Source `pfllib:DIR`: a federation as PFLlib and HtFLlib store it.

DIR/train/<k>.npz and DIR/test/<k>.npz belong to client k. Each file contains a pickled dictionary
`data` with `x` and `y`. DIR/config.json states the numbers of clients and classes; some datasets
have no such file.

A pickle can run any code, so the unpickler here imports and calls nothing. It records the calls
that would create arrays, and the arrays are then created from their shapes, dtypes, and bytes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedhet.base.arrays import read_header
from fedhet.base.disk import expanded, parse_json, read_text
from fedhet.base.errors import DataError, describe_error
from fedhet.data.dataset import Dataset, Source
from fedhet.data.folders import TRAIN
from fedhet.data.sources.arrays import BYTES_PER_VALUE, MAX_CLASSES, Arrays, client_files, read_npz
from fedhet.data.spec import DataSpec, Expected, check_max_bytes, reading
from fedhet.kinds import IMAGE, KINDS, SIGNAL, TABLE, Kind
from fedhet.tasks import Classification, find_task

MAX_OPERATIONS = 2**21
"""Maximum number of operations in a pickle, because each may allocate about 100 bytes. Two arrays
need about 160 operations, and a list of arrays needs about 25 for each array."""
MAX_CONFIG_BYTES = 2**24
_OPERATIONS = frozenset(
    "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE "
    "BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINBYTES BINBYTES BINBYTES8 SHORT_BINUNICODE "
    "BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT "
    "SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD".split()
)
_NAMES = frozenset(
    f"numpy{name}"
    for core in (".core", "._core")  # NumPy 1 and 2
    for name in (
        ".ndarray",
        ".dtype",
        f"{core}.multiarray._reconstruct",
        f"{core}.multiarray.scalar",
    )
)
_DTYPE = re.compile(r"[biuf][1248]")


class _ContentError(ValueError):
    """Raised if a pickle contains anything other than arrays, containers, and numbers."""


@dataclass
class _Call:
    """Record of a name, or of a call of this name with its later state. Nothing is called."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def __call__(self, *args: Any) -> _Call:
        return _Call(self.name, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that replaces each permitted name with a record."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NAMES:
            raise _ContentError(f"a reference to {module}.{name}")
        return _Call(name)


def read_pickle(content: bytes) -> Any:
    """Read a pickle with arrays (as `_Call`), dictionaries, lists, tuples, text, and numbers.

    Raises _ContentError for other content, and many exception types if the pickle is damaged.
    """
    for count, (operation, arg, _) in enumerate(pickletools.genops(content)):
        if operation.name not in _OPERATIONS:
            raise _ContentError(f"the operation {operation.name}")
        # Python would allocate memory for all numbers of stored objects up to a large one.
        is_far = operation.name in ("BINPUT", "LONG_BINPUT") and (arg or 0) > count
        if count == MAX_OPERATIONS or is_far:
            raise _ContentError(f"more than {MAX_OPERATIONS:,} operations or stored objects")
        if isinstance(arg, int) and not -(2**63) <= arg < 2**63:
            raise _ContentError("an integer of more than 64 bits")
    return _Unpickler(io.BytesIO(content)).load()


def _array(value: Any, spec: DataSpec, where: object, *, is_item: bool = False) -> npt.NDArray[Any]:
    """Convert an array, a number, or a list of arrays or numbers to an array.

    Raises DataError if a list exceeds `data.max-bytes`: it may contain the same array many times.
    """
    shape: tuple[Any, ...] = ()
    is_fortran = False
    match value:
        case bool() | int() | float():
            return np.asarray(value)
        case list() | tuple() if value and not is_item:
            items = [_array(each, spec, where, is_item=True) for each in value]
            check_max_bytes(sum(each.nbytes for each in items), spec, where)
            return np.stack(items)
        case _Call("scalar", (form, bytes() as content)):
            pass
        case _Call("_reconstruct", _, (1, tuple() as shape, form, is_fortran, content)):
            pass
        case _:
            raise _ContentError(f"{type(value).__name__} instead of an array or a number")
    match form:
        case _Call("dtype", (str() as code, *_), (_, "<" | ">" | "|" as order, *_)) if (
            _DTYPE.fullmatch(code)
        ):
            dtype = np.dtype(order + code)
        case _:
            raise _ContentError("an array of objects, or of other values than numbers")
    sides_are_valid = all(type(side) is int and side >= 0 for side in shape)
    if not sides_are_valid or math.prod(shape) * dtype.itemsize != len(content):
        raise _ContentError(f"{dtype} {list(shape)}, which does not match the size of the data")
    return np.ndarray(shape, dtype, content, order="F" if is_fortran else "C")


def read_data(path: Path, names: Sequence[str], spec: DataSpec) -> Arrays:
    """Read arrays from the dictionary `data` of a file. Signals [N, C, 1, T] become [N, C, T].

    The size is checked before decompression. Raises DataError if the file is invalid, or if it
    exceeds `data.max-bytes`, either in the file or after conversion.
    """
    with reading(path, ".npz file", describe=describe_error), zipfile.ZipFile(path) as archive:
        if "data.npy" not in (available := archive.namelist()):
            got = ", ".join(name.removesuffix(".npy") for name in available) or "none"
            hint = ". Use npz:DIR for arrays x and y." if "x.npy" in available else ""
            raise DataError(f"{path}: array 'data' not found, got {got}{hint}")
        # Reading stops after the stated size, so a false statement does not exceed the limit.
        check_max_bytes(archive.getinfo("data.npy").file_size, spec, path)
        with archive.open("data.npy") as file:
            try:
                if np.lib.format.read_magic(file) != (1, 0) or not read_header(file)[2].hasobject:
                    raise _ContentError("an array without a pickle, or an unsupported version")
                match read_pickle(file.read()):
                    case _Call("_reconstruct", _, (1, (), _, _, [{"x": _, "y": _} as data])):
                        arrays = {
                            name: np.require(_array(data[name], spec, path), requirements="W")
                            for name in names
                        }
                    case _:
                        raise _ContentError("other content")
            except _ContentError as error:
                rule = "data must be a pickled dictionary with x and y, NumPy arrays of numbers"
                raise DataError(
                    f"{path}: {rule}, got {error}. fedhet runs no code from pickles."
                ) from None
    if (x := arrays.get("x")) is not None:
        if x.dtype.kind in "iu" and x.dtype != np.uint8:
            fix = "For texts, use text:PATH or shakespeare:DIR."
            raise DataError(
                f"{path}: x must be floats or uint8, got {x.dtype} {list(x.shape)}. {fix}"
            )
        arrays["x"] = x[:, :, 0] if x.ndim == 4 and x.shape[2] == 1 < x.shape[3] else x
    for name, each in arrays.items():
        item_bytes = 1 if each.dtype == np.uint8 else BYTES_PER_VALUE[name]
        check_max_bytes(max(each.nbytes, each.size * item_bytes), spec, path)
    return arrays


def kind_of_data(directory: str) -> Kind:
    """Return the kind of the first client's samples: rows [F], signals [C, T], or images."""
    try:
        x = read_data(expanded(directory) / TRAIN / "0.npz", ("x",), DataSpec())["x"]
    except Exception:  # The error is reported when the file is read.
        return IMAGE
    return {2: TABLE, 3: SIGNAL}.get(x.ndim, IMAGE)


def read_pfllib(location: str, spec: DataSpec) -> Dataset:
    """Read the training and test samples of each client, and DIR/config.json if it exists.

    Raises DataError if a file is missing or invalid, exceeds `data.max-bytes`, or contradicts
    config.json, and SettingsError if `data.max-samples` or `data.by` is set.
    """
    root = expanded(location)
    path, clients = root / "config.json", len(client_files(root)[TRAIN])
    if os.path.lexists(path):
        with reading(path, "JSON file"):
            config = dict(parse_json(read_text(path, MAX_CONFIG_BYTES)))
        classes = config.get("num_classes", 0)  # Earlier versions do not state it.
        if (stated := config.get("num_clients")) != clients:
            rule = f"num_clients must be {clients}, the number of files in {root / TRAIN}"
            raise DataError(f"{path}: {rule}, got {stated!r}")
        if type(classes) is not int or not 0 <= classes <= MAX_CLASSES:
            raise DataError(f"{path}: num_classes must be 1 to {MAX_CLASSES}, got {classes!r}")
        if classes and spec.expected is None and find_task(spec.task) is Classification:
            spec = spec.replace(expected=Expected(outputs=classes))
    kind = KINDS.get(spec.sample_kind) or kind_of_data(location)
    return read_npz(location, spec, kind, read=read_data)


SOURCES = (
    Source(
        "pfllib",
        "the clients in a dataset of PFLlib or HtFLlib",
        read_pfllib,
        "DIR",
        infer_kind=kind_of_data,
        whole_clients=True,
    ),
)
