"""Samples in .npz files, one client per file: reading without pickle, and validation."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.data.spec import Dataset, DataSpec, Index, Split, refuse_more
from fedhet.errors import DataError, SettingsError
from fedhet.kinds import IMAGE, Kind

MAX_CLASSES = 65_536  # the largest label sets this count: a stray one must not cost memory
_PARTS = ("train", "test")
_READ_AS = {"x.npy": 4, "y.npy": 8}  # bytes a value, as float32 and int64


def read_npz(path: Path, spec: DataSpec, kind: Kind = IMAGE) -> Split:
    """Read a file's arrays x and y, as the kind of samples has them (`Kind.checked`).

    Rows of tables are read as images are. Raises DataError for any fault of the file, and if it
    takes more than `data.max-bytes`.
    """
    x, y = _arrays(path, spec)
    labels = checked_labels(y, path)
    samples = kind.checked(x, path)
    if len(samples) != len(labels):
        raise DataError(f"{path}: x has {len(samples)} rows and y has {len(labels)}")
    return Split(torch.from_numpy(samples), torch.from_numpy(labels))


def read_owners(path: Path, name: str, spec: DataSpec) -> Index:
    """Return whose each of a file's samples is, as places [N] among the sorted owners.

    Raises DataError unless the array `name` holds a whole number or a word for each.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if f"{name}.npy" not in archive.namelist():
                keys = ", ".join(key.removesuffix(".npy") for key in archive.namelist())
                raise DataError(f"{path}: has no array {name!r} (data.by), only {keys}")
            refuse_more(array_bytes(archive, f"{name}.npy", path), spec, path)
        with np.load(path, allow_pickle=False) as file:
            owners, samples = file[name], len(file["y"])
    except DataError:
        raise
    except Exception as error:  # as in `_arrays`
        raise unreadable(path, error) from error
    if owners.shape != (samples,) or owners.dtype.kind not in "iuU":
        raise DataError(
            f"{path}: {name} must be whole numbers or words [{samples}], is {owners.dtype} "
            f"{list(owners.shape)}"
        )
    return np.unique(owners, return_inverse=True)[1].astype(np.int64)


def same_form(first: Split, other: Split, where: str, path: Path) -> None:
    """Raise DataError unless `path`'s samples have the same shape and type as those of `where`."""
    for what, left, right in (
        ("shape", tuple(first.x.shape[1:]), tuple(other.x.shape[1:])),
        ("type", first.x.dtype, other.x.dtype),
    ):
        if left != right:
            raise DataError(f"{path}: samples have {what} {right}, those of {where} {left}")


def read_clients(folder: str, spec: DataSpec, kind: Kind = IMAGE) -> Dataset:
    """Read DIR/train/<k>.npz, DIR/test/<k>.npz and, if present, DIR/common.npz as one dataset.

    Each client's rows are contiguous, training before test; `Dataset.parts` holds the counts.
    """
    if spec.max_samples:
        raise SettingsError(
            f"data.max-samples = {spec.max_samples}: must be 0 with "
            f"data.dataset = {spec.dataset!r}, whose files are whole clients"
        )
    root = Path(folder).expanduser()
    files = [root / part / f"{k}.npz" for k in range(_count(root)) for part in ("train", "test")]
    splits = _read_all(files, spec, kind)
    common = None
    if (root / "common.npz").exists():
        common = read_npz(root / "common.npz", spec, kind)
    every = [*zip(files, splits, strict=True)]
    every += [(root / "common.npz", common)] if common is not None else []
    for path, split in every:
        same_form(splits[0], split, files[0].name, path)
        least = 2 if path.parent.name == "train" else 1
        if len(split) < least:
            raise DataError(f"{path}: has {len(split)} samples, at least {least} are needed")
    train = Split(torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits]))
    parts = tuple((len(a), len(b)) for a, b in zip(splits[::2], splits[1::2], strict=True))
    classes = 1 + max(int(split.y.max()) for _, split in every)
    return Dataset(spec.dataset, train, common, tuple(map(str, range(classes))), parts)


def has_rows(folder: str) -> bool:
    """Tell whether DIR/train/0.npz holds rows of a table, x [N, F]; only its head is read."""
    path = Path(folder).expanduser() / "train" / "0.npz"
    try:
        with zipfile.ZipFile(path) as file, file.open("x.npy") as x:
            if np.lib.format.read_magic(x) != (1, 0):  # heads of later versions may be large
                return False
            shape, _, _ = np.lib.format.read_array_header_1_0(x)
    except Exception:  # what is wrong with the file is said when it is read
        return False
    return len(shape) == 2


def _count(root: Path) -> int:
    """Return the number K of clients in `root`; both parts must hold 0.npz to K-1.npz."""
    names = {part: {path.name for path in (root / part).glob("*.npz")} for part in _PARTS}
    for part, found in names.items():
        if not found:
            raise DataError(f"{root}: no .npz files in {root / part} (expected 0.npz, ...)")
    clients = len(names["train"])
    expected = {f"{k}.npz" for k in range(clients)}
    for part, found in names.items():
        odd = sorted(found ^ expected)
        if odd:
            fault = "is missing" if odd[0] in expected else "is not expected"
            raise DataError(
                f"{root / part / odd[0]}: {fault}; train and test must each hold one file a "
                f"client, 0.npz to {clients - 1}.npz"
            )
    return clients


def _read_all(files: list[Path], spec: DataSpec, kind: Kind) -> list[Split]:
    """Read files that together may take `data.max-bytes`."""
    splits: list[Split] = []
    for path in files:
        splits.append(read_npz(path, spec, kind))
        refuse_more(sum(split.x.nbytes + split.y.nbytes for split in splits), spec, path.parents[1])
    return splits


def _arrays(path: Path, spec: DataSpec) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the file's arrays x and y unchanged; pickled arrays are refused, not loaded."""
    try:
        refuse_more(_unpacked(path), spec, path)
        with np.load(path, allow_pickle=False) as file:
            return file["x"], file["y"]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except DataError:
        raise
    except Exception as error:  # zipfile, zlib, lzma, tokenize and numpy have each their own
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that is no .npz file, or a broken one."""
    return DataError(f"{path}: not a readable .npz file ({type(error).__name__}: {error})")


def _unpacked(path: Path) -> int:
    """Return the bytes that x and y take as they are, or as float32 if that is more.

    Nothing is unpacked but the headers, which must agree with the sizes in the archive's index.
    """
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        if not {"x.npy", "y.npy"} <= sizes.keys():
            keys = ", ".join(name.removesuffix(".npy") for name in sorted(sizes)) or "none"
            raise DataError(f"{path}: needs the arrays x and y, has {keys}")
        return sum(array_bytes(archive, f"{key}.npy", path) for key in ("x", "y"))


def array_bytes(archive: zipfile.ZipFile, member: str, path: Path) -> int:
    """Return the bytes that an array takes once it is read, as its header says.

    Raises DataError for an array of objects, and for a header that is not of what it heads.
    """
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
        if header is None:
            raise DataError(f"{path}: {member} is an .npy of version {version}, not (1, 0)")
        shape, _, dtype = header(file)
        if dtype.hasobject:
            raise DataError(
                f"{path}: pickled objects are refused, save plain numeric arrays x and y"
            )
        size = math.prod(shape) * dtype.itemsize
        if file.tell() + size != archive.getinfo(member).file_size:
            claim = f"claims {dtype} {list(shape)}, which is not what it holds"
            raise DataError(f"{path}: {member} {claim}")
    read = 1 if member == "x.npy" and dtype == np.uint8 else _READ_AS.get(member, 8)
    return max(size, read * math.prod(shape))


def checked_labels(y: npt.NDArray[Any], path: Path | str) -> npt.NDArray[np.int64]:
    """Return labels [N] as int64. Raises DataError, which names `path`, unless they are."""
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{path}: y must be whole numbers [N], is {y.dtype} {list(y.shape)}")
    labels = y.astype(np.int64)
    if len(labels) and not 0 <= labels.min() <= labels.max() < MAX_CLASSES:
        odd = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(f"{path}: y holds the label {odd}, allowed are 0 to {MAX_CLASSES - 1}")
    return labels
