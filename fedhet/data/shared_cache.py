"""Decoded datasets on disk: a simulation reads once what its workers then map into memory.

The workers of a machine so share one copy, and none of them decodes images or reads texts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedhet.data.client_shards import take_arranged, write_arranged
from fedhet.data.datasets import key_of, load, take_from
from fedhet.data.partition import partition, take_partition
from fedhet.data.public import public_source
from fedhet.data.spec import Dataset, DataSpec, Index, Split
from fedhet.errors import StateError

TREE = "imagefolder"
"""The kind of datasets whose decoded images are mapped from a cache of their own."""
_PARTITION = "partition.safetensors"
_SAMPLES = "samples.npy"
_PARTS = ("train", "test", "public")
_FACTS = TypeAdapter(
    tuple[str, tuple[str, ...], tuple[tuple[int, int], ...] | None, tuple[int, ...], int, bool]
)


def write_decoded(spec: DataSpec, folder: Path) -> None:
    """Write the datasets that a run's clients read, their rows and samples. Raises StateError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place, each in enumerate(_sources(spec)):
            write_dataset(load(each, least_classes=1), folder / f"{place}.safetensors")
        _write_partition(partition(spec), folder / _PARTITION)
        write_arranged(spec, folder / _SAMPLES)
    except OSError as error:
        raise StateError(f"cannot write the decoded data into {folder}: {error}") from None


def use_decoded(spec: DataSpec, folder: Path) -> None:
    """Let this process take what `write_decoded` has written into a folder from there.

    Drawing a partition takes little, but importing flwr-datasets for it more than a second.
    """
    take_partition(spec, lambda: _read_partition(folder / _PARTITION))
    take_arranged(spec, folder / _SAMPLES)
    for place, each in enumerate(_sources(spec)):
        path = folder / f"{place}.safetensors"
        take_from(key_of(each), lambda path=path: read_dataset(path))  # type: ignore[misc]


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
        dataset.name, dataset.classes, dataset.parts, dataset.columns, dataset.vocabulary,
        dataset.scaled_images,
    )  # fmt: skip
    save_file(tensors, path, {"facts": _FACTS.dump_json(facts).decode()})


def read_dataset(path: Path) -> Dataset:
    """Return a dataset whose arrays are mapped from a file, not read. Raises StateError."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = _FACTS.validate_json(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors has an error type of its own
        raise StateError(f"cannot read the decoded data in {path}: {error}") from None
    train, test, public = (
        Split(tensors[f"{part}.x"], tensors[f"{part}.y"]) if f"{part}.x" in tensors else None
        for part in _PARTS
    )
    assert train is not None
    subclasses, groups = (
        tensors[name].numpy() if name in tensors else None for name in ("subclasses", "groups")
    )
    name, classes, parts, columns, vocabulary, scaled_images = facts
    return Dataset(
        name, train, test, classes, parts, public, columns, subclasses, vocabulary, groups,
        scaled_images,
    )  # fmt: skip


def _write_partition(parts: Sequence[Index], path: Path) -> None:
    rows = torch.from_numpy(np.concatenate(parts))
    save_file({"rows": rows, "ends": torch.tensor([len(part) for part in parts]).cumsum(0)}, path)


def _read_partition(path: Path) -> tuple[Index, ...]:
    try:
        found = load_file(path)
    except Exception as error:  # safetensors has an error type of its own
        raise StateError(f"cannot read the clients' rows in {path}: {error}") from None
    return tuple(np.split(found["rows"].numpy(), found["ends"].numpy()[:-1]))


def _sources(spec: DataSpec) -> list[DataSpec]:
    """Return the datasets to share; folders of images have a cache, which is mapped as it is."""
    public = public_source(spec)
    every = [spec] if public is None else [spec, public]
    return [each for each in every if not each.dataset.startswith(f"{TREE}:")]
