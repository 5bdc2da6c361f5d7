"""Decoded data of a run in a directory, which the processes of a machine map into memory.

The main process writes the files, and the workers share one copy of the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedhet.base.disk import Folder, map_npy
from fedhet.base.errors import StateError, error_reason
from fedhet.data.dataset import Dataset, Format, Split
from fedhet.data.spec import Index

_PARTITION, _SAMPLES = "partition.safetensors", "samples.npy"
_PARTS = ("train", "test", "public")


@contextlib.contextmanager
def _mapping(what: str, path: Path) -> Iterator[None]:
    """Convert exceptions raised in the block to StateError."""
    try:
        yield
    except Exception as error:  # safetensors raises its own exception type.
        raise StateError(f"cannot read the {what} in {path}: {error_reason(error)}") from None


@dataclass(frozen=True)
class SharedCopy:
    """Directory with the datasets of a run, its partition, and the samples by client."""

    folder: Path

    def write(
        self,
        datasets: Mapping[int, Dataset],
        x: Tensor,
        partition: Sequence[Index],
        parts: Iterable[Index],
    ) -> None:
        """Write all files. Raises StateError if a file cannot be written.

        Args:
            datasets: Datasets by number.
            x: Training samples.
            partition: Rows of each client in `x`.
            parts: Rows of each client's splits in `x`, in the order in which they are stored.
        """
        try:
            with Folder(self.folder, self.folder.parent).writing() as written:
                for number, dataset in datasets.items():
                    write_dataset(dataset, written / f"{number}.safetensors")
                ends = torch.tensor([len(rows) for rows in partition]).cumsum(0)
                rows = {"rows": torch.from_numpy(np.concatenate(partition)), "ends": ends}
                save_file(rows, written / _PARTITION)
                header = {
                    "descr": np.lib.format.dtype_to_descr(x[:0].numpy().dtype),
                    "fortran_order": False,
                    "shape": (int(ends[-1]), *x.shape[1:]),
                }
                with (written / _SAMPLES).open("wb") as file:
                    np.lib.format.write_array_header_1_0(file, header)
                    for part in parts:
                        file.write(x[torch.from_numpy(part)].numpy().tobytes())
        except OSError as error:
            fault = f"cannot write the decoded data to {self.folder}: {error_reason(error)}"
            raise StateError(fault) from None

    def dataset(self, number: int) -> Dataset:
        """Map a dataset into memory. Raises StateError if its file is unreadable or invalid."""
        return read_dataset(self.folder / f"{number}.safetensors")

    def partition(self) -> tuple[Index, ...]:
        """Read the rows of each client. Raises StateError if the file is unreadable."""
        with _mapping("rows of the clients", path := self.folder / _PARTITION):
            tensors = load_file(path)
        return tuple(np.split(tensors["rows"].numpy(), tensors["ends"].numpy()[:-1]))

    def samples(self) -> Tensor:
        """Map the training samples into memory, in the order in which they are stored.

        Raises StateError if the file is unreadable.
        """
        with _mapping("samples of the clients", path := self.folder / _SAMPLES):
            return torch.from_numpy(map_npy(path))


@dataclass(frozen=True)
class _Metadata:
    """Fields of a `Dataset`, except its arrays."""

    name: str
    format: Format
    parts: tuple[tuple[int, int], ...] | None
    columns: tuple[int, ...]
    group_names: tuple[str, ...]


_METADATA = TypeAdapter(_Metadata)


def write_dataset(dataset: Dataset, path: Path) -> None:
    """Write a dataset's arrays and metadata to a safetensors file."""
    tensors: dict[str, Tensor] = {}
    for part in _PARTS:
        split: Split | None = getattr(dataset, part)
        if split is not None:
            tensors |= {f"{part}.x": split.x.contiguous(), f"{part}.y": split.y.contiguous()}
    for name in ("subclasses", "groups"):
        if (rows := getattr(dataset, name)) is not None:
            tensors[name] = torch.from_numpy(rows).contiguous()
    metadata = _Metadata(**{each.name: getattr(dataset, each.name) for each in fields(_Metadata)})
    save_file(tensors, path, {"dataset": _METADATA.dump_json(metadata).decode()})


def read_dataset(path: Path) -> Dataset:
    """Map a dataset written by `write_dataset` into memory.

    Raises StateError if the file is unreadable or invalid.
    """
    with _mapping("decoded data", path), safe_open(path, framework="pt") as file:
        metadata = _METADATA.validate_json(file.metadata()["dataset"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    train, test, public = (
        Split(tensors[f"{part}.x"], tensors[f"{part}.y"]) if f"{part}.x" in tensors else None
        for part in _PARTS
    )
    assert train is not None
    subclasses, groups = (
        tensors[name].numpy() if name in tensors else None for name in ("subclasses", "groups")
    )
    return Dataset(
        **vars(metadata),
        train=train,
        test=test,
        public=public,
        subclasses=subclasses,
        groups=groups,
    )
