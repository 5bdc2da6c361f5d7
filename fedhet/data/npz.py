"""Arrays in .npz files: reading without pickle, bounded before anything is unpacked."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.errors import DataError, reason_of
from fedhet.data.spec import DataSpec, Index, Split, numbered, refuse_more
from fedhet.kinds import IMAGE, Kind

MAX_CLASSES = 65_536  # the largest label sets this count: a stray one must not cost memory
_READ_AS = {"x": 4, "y": 8}  # bytes a value, as float32 and int64
Arrays = dict[str, npt.NDArray[Any]]


def read_arrays(
    path: Path,
    names: Sequence[str],
    spec: DataSpec,
    *,
    hint: str = "",
    source: str = "",
    scaled: bool = False,
) -> Arrays:
    """Return these arrays of a file as they are; pickled ones are refused, not loaded.

    Raises DataError for any fault of the file, and if they take more than `data.max-bytes`; bytes
    that will be `scaled` count as float32. `hint` is added to the message if an array is absent,
    `source` if the file is.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()]
            for name in names:
                if name not in there:
                    others = ", ".join(there) or "none"
                    raise DataError(f"{path}: has no array {name!r}, only {others}{hint}")
            refuse_more(
                sum(_array_bytes(archive, name, path, scaled) for name in names), spec, path
            )
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file{source}") from error
    except DataError:
        raise
    except Exception as error:  # zipfile, zlib, lzma, tokenize and numpy have each their own
        fault = f"{type(error).__name__}: {reason_of(error)}"
        raise DataError(f"{path}: not a readable .npz file ({fault})") from error


def _array_bytes(archive: zipfile.ZipFile, name: str, path: Path, scaled: bool) -> int:
    """Return the bytes that an array takes as it is, or as what it becomes if that is more.

    Nothing is unpacked but its header. Raises DataError for an array of objects, and for a header
    that does not agree with the size in the archive's index.
    """
    with archive.open(member := f"{name}.npy") as file:
        if (version := np.lib.format.read_magic(file)) != (1, 0):
            raise DataError(f"{path}: {member} is an .npy of version {version}, not (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if dtype.hasobject:
            raise DataError(
                f"{path}: pickled objects are refused, save plain numeric arrays x and y"
            )
        size = math.prod(shape) * dtype.itemsize
        if file.tell() + size != archive.getinfo(member).file_size:
            claim = f"claims {dtype} {list(shape)}, which is not what it holds"
            raise DataError(f"{path}: {member} {claim}")
    read = 1 if name == "x" and dtype == np.uint8 and not scaled else _READ_AS.get(name, 8)
    return max(size, read * math.prod(shape))


def read_npz(path: Path, spec: DataSpec, kind: Kind = IMAGE) -> Split:
    """Read a file's arrays x and y, as the kind of samples has them (`Kind.checked`).

    Rows of tables are read as images are. Raises DataError for any fault of the file, and if it
    takes more than `data.max-bytes`.
    """
    arrays = read_arrays(path, ("x", "y"), spec)
    labels = checked_labels(arrays["y"], path)
    samples = kind.checked(arrays["x"], path)
    if len(samples) != len(labels):
        raise DataError(f"{path}: x has {len(samples)} rows and y has {len(labels)}")
    return Split(torch.from_numpy(samples), torch.from_numpy(labels))


def read_owners(path: Path, name: str, spec: DataSpec) -> Index:
    """Return whose each of a file's samples is, as places [N] among the sorted owners.

    Raises DataError unless the array `name` holds a whole number or a word for each.
    """
    arrays = read_arrays(path, (name, "y"), spec, hint=" (data.by)")
    owners, samples = arrays[name], len(arrays["y"])
    if owners.shape != (samples,) or owners.dtype.kind not in "iuU":
        raise DataError(
            f"{path}: {name} must be whole numbers or words [{samples}], is {owners.dtype} "
            f"{list(owners.shape)}"
        )
    return numbered(owners)


def same_form(first: Split, other: Split, where: str, path: Path) -> None:
    """Raise DataError unless `path`'s samples have the same shape and type as those of `where`."""
    for what, left, right in (
        ("shape", tuple(first.x.shape[1:]), tuple(other.x.shape[1:])),
        ("type", first.x.dtype, other.x.dtype),
    ):
        if left != right:
            raise DataError(f"{path}: samples have {what} {right}, those of {where} {left}")


def checked_labels(y: npt.NDArray[Any], path: Path | str) -> npt.NDArray[np.int64]:
    """Return labels [N] as int64. Raises DataError, which names `path`, unless they are."""
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{path}: y must be whole numbers [N], is {y.dtype} {list(y.shape)}")
    labels = y.astype(np.int64)
    if len(labels) and not 0 <= labels.min() <= labels.max() < MAX_CLASSES:
        odd = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(f"{path}: y holds the label {odd}, allowed are 0 to {MAX_CLASSES - 1}")
    return labels
