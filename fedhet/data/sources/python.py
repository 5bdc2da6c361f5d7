"""Source `python:module:function`: data of a user's function, or data that a run was given.

The function takes no arguments. It returns one of the following values:

- a pair (x, y) of arrays or tensors;
- a map-style `torch.utils.data.Dataset` of pairs, such as a `TensorDataset`;
- a mapping with such data for `train` and optionally `test`, and optionally `classes` and `kind`;
- a list of such data, one item for each client;
- a `Dataset`.

Each sample is read once in a process, before the run, so random transforms in a dataset are drawn
once.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.masked import MaskedTensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from fedhet.base.arrays import as_array
from fedhet.base.errors import DataError, describe_error, nearest
from fedhet.data.dataset import Dataset, Format, Source, Split, no_path
from fedhet.data.sources.arrays import (
    check_no_subset,
    check_same_form,
    concatenate_clients,
    infer_array_targets,
    make_split,
    numbered_classes,
)
from fedhet.data.sources.images import Form, to_pixels
from fedhet.data.spec import DataSpec
from fedhet.kinds import IMAGE, KINDS, TEXT, Kind, kind_of_arrays

PYTHON = "python"
Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]
_EXPECTED = (
    "a fedhet.Dataset, a pair (x, y), a map-style torch Dataset, a mapping with train, test, "
    "classes, and kind, or a list of them, one for each client"
)
_KEYS = ("train", "test", "classes", "kind")


@dataclass(frozen=True)
class _Parts:
    """Training and test arrays of each client, or of all clients together."""

    train: list[Arrays]
    test: list[Arrays | None]
    classes: tuple[str, ...]
    kind: Kind | None
    is_partitioned: bool

    @property
    def sample_kind(self) -> Kind:
        """Kind of the samples."""
        return self.kind or kind_of_arrays(self.train[0][0].shape[1:])


@lru_cache(maxsize=4)
def _call(path: str) -> Dataset | _Parts:
    """Import and call the function `path` ("module:function"), and read all samples once.

    Raises DataError if the function cannot be called or returns an invalid value.
    """
    name = f"{PYTHON}:{path}"
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise DataError(f"data.dataset: expected {PYTHON}:module:function, got {name!r}")
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # A user's module may raise any exception.
        raise DataError(f"data.dataset = {name!r}: cannot import '{module}': {error!r}") from error
    function = getattr(imported, attribute, None)
    if not callable(function):
        hint = nearest(attribute, vars(imported))
        raise DataError(
            f"data.dataset = {name!r}: function '{attribute}' not found in {module}{hint}"
        )
    try:
        result = function()
    except (Exception, SystemExit) as error:
        raise DataError(f"data.dataset = {name!r}: the function failed: {error!r}") from error
    if isinstance(result, Dataset):
        return _checked(result, name)
    if not (isinstance(result, list) and result and all(map(_is_data, result))):
        return _read_mapping(result, name)
    clients = [_read_mapping(item, f"{name}: client {k}") for k, item in enumerate(result)]
    return _Parts(
        [client.train[0] for client in clients],
        [client.test[0] for client in clients],
        next((client.classes for client in clients if client.classes), ()),
        clients[0].kind,
        is_partitioned=True,
    )


def _checked(dataset: Dataset, name: str) -> Dataset:
    """Return a user's dataset. Raises DataError unless its samples and labels match its format."""
    format, count = dataset.format, len({*dataset.format.classes})
    is_text, is_class = format.kind == TEXT.name, format.task.targets == "class"
    shape = format.shape[1:2] if is_text else format.shape
    types = (torch.int64,) if is_text else (torch.float32, torch.uint8)
    if count < len(format.classes):
        raise DataError(f"{name}: expected different class names, got {format.classes}")
    splits = {part: split for part in _KEYS[:2] if (split := getattr(dataset, part)) is not None}
    for part, split in splits.items():
        for each in (split.x, split.y):
            if isinstance(each, MaskedTensor) or getattr(each, "is_nested", False):
                rule = "must be plain tensors. Remove the samples with missing values"
                raise DataError(f"{name}: {part}: x and y {rule}, got {type(each).__name__}.")
        x, y = (torch.as_tensor(each).detach() for each in (split.x, split.y))
        rows = [len(x)] if is_class else [len(x), count]
        is_right = y.dtype == (torch.int64 if is_class else torch.float32) and [*y.shape] == rows
        if is_class and is_right and len(y):
            is_right = 0 <= int(y.min()) <= int(y.max()) < count
        if not is_right:
            each = f"labels from 0 to {count - 1}" if is_class else "one column for each class"
            rule = f"{'int64' if is_class else 'float32'} {rows}, {each}"
            raise DataError(f"{name}: {part}.y must be {rule}, got {y.dtype} {y[:5].tolist()} ...")
        if x.dtype not in types or tuple(x.shape[1:]) != shape or not x.isfinite().all():
            rule = f"finite {' or '.join(map(str, types))} {['N', *shape]}"
            raise DataError(f"{name}: {part}.x must be {rule}, got {x.dtype} {[*x.shape]}")
        splits[part] = Split(x, y)
    return replace(dataset, **splits)


def _is_data(value: object) -> bool:
    """Return whether an item of a list is the data of a client, rather than an array."""
    return isinstance(value, tuple | list | Mapping | TorchDataset)


def _read_mapping(value: Any, where: str) -> _Parts:
    """Read a mapping of data, or data without a test set."""
    content = value if isinstance(value, Mapping) else {"train": value}
    if "train" not in content or not content.keys() <= {*_KEYS}:
        keys = ", ".join(map(str, content)) or "an empty mapping"
        raise DataError(f"{where}: expected {_EXPECTED}, got {keys}")
    train, test, stated = content["train"], content.get("test"), content.get("kind")
    if stated is not None and stated not in KINDS:
        known = ", ".join(KINDS)
        raise DataError(f"{where}: kind: expected one of {known}, got {stated!r}")
    names = content.get("classes")
    if names is None:  # A dataset's attribute may be something else, such as their number.
        names = getattr(train, "classes", ())
        names = names if isinstance(names, list | tuple) else ()
    if not isinstance(names, list | tuple | np.ndarray):
        rule = "expected a list of names in the order of the labels"
        raise DataError(f"{where}: classes: {rule}, got {type(names).__name__} {names!r:.80}")
    return _Parts(
        [_read_samples(train, where if content is not value else f"{where}: train")],
        [_read_samples(test, f"{where}: test") if test is not None else None],
        tuple(map(str, names)),
        KINDS[stated] if stated else None,
        is_partitioned=False,
    )


def _read_samples(data: Any, where: str) -> Arrays:
    """Read a pair of arrays or a map-style dataset of pairs, and copy the samples."""
    if isinstance(data, IterableDataset):
        raise DataError(f"{where}: expected {_EXPECTED}, got an iterable dataset without a length")
    pair = data.tensors if isinstance(data, TensorDataset) else data
    try:
        if isinstance(pair, TorchDataset):
            rows: Any = pair
            samples = [_sample(rows, row, where) for row in range(len(rows))]
            inputs, y = [x for x, _ in samples], as_array([y for _, y in samples])
            if all(hasattr(image, "getbands") for image in inputs):
                form = Form.of_images(lambda: inputs)
                named = ((image, f"{where}: sample {row}:") for row, image in enumerate(inputs))
                inputs = [to_pixels(image, form, name) for image, name in named]
            x = np.stack([as_array(each) for each in inputs])
        else:  # Copy the arrays, because the user may modify them.
            x, y = (np.array(as_array(part)) for part in pair)
    except DataError:
        raise
    except Exception as error:  # A user's data may raise any exception.
        got, hint = type(data).__name__, ""
        if hasattr(data, "to_csv"):
            hint = ". Save it with to_csv, and use data.dataset = 'table:FILE'."
        raise DataError(f"{where}: expected {_EXPECTED}, got {got} ({error}){hint}") from error
    return x, y


def _sample(rows: Any, row: int, where: str) -> tuple[Any, Any]:
    """Return a sample and its label from a user's dataset, which may raise any exception."""
    try:
        sample = rows[row]
    except Exception as error:
        raise DataError(f"{where}: sample {row}: {describe_error(error)}") from error
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        got = f"{type(sample).__name__} {sample!r:.80}"
        raise DataError(f"{where}: sample {row}: expected a pair (x, y), got {got}")
    return sample[0], sample[1]


@lru_cache(maxsize=4)
def _to_dataset(path: str, task: str, target: str) -> Dataset:
    """Convert the value of the function `path` to a dataset.

    `task` and `target` are settings in `[data]`. Raises DataError if the value is invalid.
    """
    parts, name = _call(path), f"{PYTHON}:{path}"
    if isinstance(parts, Dataset):
        return parts
    spec = DataSpec(task=task, target=target or ",".join(parts.classes))

    def where(place: int, part: str) -> str:
        return f"{name}: client {place}: {part}" if parts.is_partitioned else f"{name}: {part}"

    labels = ((where(k, "train"), y) for k, (_, y) in enumerate(parts.train))
    schema = infer_array_targets(Path(name), labels, spec)

    def split(arrays: Arrays | None, place: int, part: str) -> Split | None:
        if arrays is None:
            return None
        source = where(place, part)
        samples = make_split(*arrays, source, parts.sample_kind, schema=schema)
        if not len(samples):
            raise DataError(f"{source}: no samples found")
        return samples

    clients: list[tuple[Split, Split | None]] = []
    for place, arrays in enumerate(zip(parts.train, parts.test, strict=True)):
        train, test = (split(each, place, part) for each, part in zip(arrays, _KEYS, strict=False))
        assert train is not None
        clients.append((train, test))
        for other, part in ((train, "train"), (test, "test")):
            if other is not None:
                check_same_form(clients[0][0], other, where(0, "train"), where(place, part))
    names = schema.outputs if schema else parts.classes
    if schema is None:
        own, tests = zip(*clients, strict=True)
        every = [each for each in (*own, *tests) if each is not None]
        # Stated classes may lack training samples, as at a site.
        labeled = enumerate(tests) if not names else ()
        numbers = numbered_classes(
            own if not names else every, ((where(k, "test"), test) for k, test in labeled), name
        )
        names = names or numbers
        if len(names) < len(numbers) or len(set(names)) < len(names):
            raise DataError(
                f"{name}: expected {len(numbers)} different class names, one for each label in y, "
                f"got {names}"
            )
    format = Format.from_samples(clients[0][0].x, names, parts.sample_kind, schema=schema)
    if parts.is_partitioned:
        return concatenate_clients(name, clients, None, format)
    return Dataset(name, *clients[0], format)


USER_CACHES = (_call, _to_dataset)
"""Caches of results that depend on a user's code, which may change between two runs."""


def read_user_data(path: str, spec: DataSpec) -> Dataset:
    """Read the data that the function `path` returns, and cache it.

    Raises DataError if the function cannot be called or returns an invalid value, and SettingsError
    if `data.max-samples` is set for data of separate clients.
    """
    dataset = _to_dataset(path, spec.task, spec.target)
    if dataset.parts is not None:
        check_no_subset(spec)
    return dataset


def _kind_of_function(path: str) -> Kind:
    with contextlib.suppress(DataError):  # The error is reported when the dataset is read.
        result = _call(path)
        return KINDS[result.format.kind] if isinstance(result, Dataset) else result.sample_kind
    return IMAGE


SOURCES = (
    Source(
        PYTHON,
        "a Python function that returns arrays or PyTorch datasets",
        read_user_data,
        "module:function",
        infer_kind=_kind_of_function,
        files=no_path,
        imports=True,
    ),
)
