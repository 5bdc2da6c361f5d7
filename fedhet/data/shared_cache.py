"""A run's decoded data on disk: a simulation reads once what its workers then map into memory.

So the workers of a machine share one copy, however many they are and whichever clients each of
them trains; none of them decodes images or reads texts again. A folder holds the datasets, the
clients' rows, and the clients' samples, those of each client after those of the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedhet.base.disk import Folder
from fedhet.base.errors import StateError, reason_of
from fedhet.data.spec import Dataset, Index, Split
from fedhet.data.tables import TableSchema

_PARTITION = "partition.safetensors"
_SAMPLES = "samples.npy"
_PARTS = ("train", "test", "public")
_FACTS = TypeAdapter(
    tuple[
        str,
        tuple[str, ...],
        tuple[tuple[int, int], ...] | None,
        tuple[int, ...],
        tuple[int, ...],
        bool,
        TableSchema | None,
    ]
)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Make the folder, and yield where to write into it.

    Raises a StateError for what cannot be written inside the block.
    """
    try:
        with Folder(folder, folder.parent).writing() as place:
            yield place
    except OSError as error:
        raise StateError(
            f"cannot write the decoded data into {folder}: {reason_of(error)}"
        ) from None


def write_dataset(dataset: Dataset, path: Path) -> None:
    """Write a dataset's arrays and facts into one file."""
    tensors: dict[str, Tensor] = {}
    for part in _PARTS:
        split: Split | None = getattr(dataset, part)
        if split is not None:
            tensors |= {f"{part}.x": split.x.contiguous(), f"{part}.y": split.y.contiguous()}
    for name in ("subclasses", "groups"):
        if (rows := getattr(dataset, name)) is not None:
            tensors[name] = torch.from_numpy(rows).contiguous()
    facts = (
        dataset.name, dataset.classes, dataset.parts, dataset.columns, dataset.shape,
        dataset.scaled_images, dataset.schema,
    )  # fmt: skip
    save_file(tensors, path, {"facts": _FACTS.dump_json(facts).decode()})


def read_dataset(path: Path) -> Dataset:
    """Return a dataset whose arrays are mapped from a file, not read. Raises StateError."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = _FACTS.validate_json(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors has an error type of its own
        raise StateError(f"cannot read the decoded data in {path}: {reason_of(error)}") from None
    train, test, public = (
        Split(tensors[f"{part}.x"], tensors[f"{part}.y"]) if f"{part}.x" in tensors else None
        for part in _PARTS
    )
    assert train is not None
    subclasses, groups = (
        tensors[name].numpy() if name in tensors else None for name in ("subclasses", "groups")
    )
    name, classes, parts, columns, shape, scaled_images, schema = facts
    return Dataset(
        name, train, test, classes, parts, public, columns, subclasses, shape, groups,
        scaled_images, schema,
    )  # fmt: skip


def write_rows(parts: Sequence[Index], folder: Path) -> None:
    """Write the rows of each client."""
    rows = torch.from_numpy(np.concatenate(parts))
    ends = torch.tensor([len(part) for part in parts]).cumsum(0)
    save_file({"rows": rows, "ends": ends}, folder / _PARTITION)


def read_rows(folder: Path) -> tuple[Index, ...]:
    """Return the rows of each client. Raises StateError."""
    path = folder / _PARTITION
    try:
        found = load_file(path)
    except Exception as error:  # safetensors has an error type of its own
        raise StateError(f"cannot read the clients' rows in {path}: {reason_of(error)}") from None
    return tuple(np.split(found["rows"].numpy(), found["ends"].numpy()[:-1]))


def write_samples(x: Tensor, count: int, parts: Iterable[Index], folder: Path) -> None:
    """Write the samples of x [N, ...] in the rows of `parts`, `count` in all, one after another."""
    header = {
        "descr": np.lib.format.dtype_to_descr(x[:0].numpy().dtype),
        "fortran_order": False,
        "shape": (count, *x.shape[1:]),
    }
    with (folder / _SAMPLES).open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for rows in parts:
            file.write(x[torch.from_numpy(rows)].numpy().tobytes())


def map_samples(folder: Path) -> Tensor:
    """Map what `write_samples` has written. Raises StateError."""
    path = folder / _SAMPLES
    try:
        # "c": a change would stay in this process, and torch takes no read-only arrays.
        return torch.from_numpy(np.load(path, mmap_mode="c"))
    except (OSError, ValueError, EOFError) as error:
        raise StateError(
            f"cannot read the clients' samples in {path}: {reason_of(error)}"
        ) from None
