"""One .npz file for each client: `npz:DIR`, with images or the rows of a table."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, SettingsError
from fedhet.data.npz import read_npz, same_form
from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec, Split, refuse_more
from fedhet.kinds import IMAGE, TABLE, Kind

_PARTS = ("train", "test")


def read_clients(folder: str, spec: DataSpec, kind: Kind = IMAGE) -> Dataset:
    """Read DIR/train/<k>.npz, DIR/test/<k>.npz and, if present, DIR/common.npz as one dataset.

    Each client's rows are contiguous, training before test; `Dataset.parts` holds the counts.
    """
    if spec.max_samples:
        raise SettingsError(
            f"data.max-samples = {spec.max_samples}: must be 0 with "
            f"data.dataset = {spec.dataset!r}, whose files are whole clients"
        )
    root = expanded(folder)
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


def kind_of_clients(folder: str) -> Kind:
    """Return the kind of DIR/train/0.npz, rows x [N, F] or images; only its head is read."""
    path = expanded(folder) / "train" / "0.npz"
    try:
        with zipfile.ZipFile(path) as file, file.open("x.npy") as x:
            if np.lib.format.read_magic(x) != (1, 0):  # heads of later versions may be large
                return IMAGE
            shape, _, _ = np.lib.format.read_array_header_1_0(x)
    except Exception:  # reading the file reports what is wrong with it
        return IMAGE
    return TABLE if len(shape) == 2 else IMAGE


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


SOURCES = (
    Source(
        "npz",
        "images or rows, one file for each client",
        read_clients,
        "DIR",
        found_kind=kind_of_clients,
        whole_clients=True,
    ),
)
