"""Datasets of the Hugging Face Hub: `hf:NAME` or `hf:NAME@SUBSET`, read through flwr-datasets.

NAME may also be a folder on this machine that the library `datasets` can read, if it begins with
`/`, `~` or `.`, which no name of the Hub does. The split `train` is
the training set; `test`, or else `validation`, is the common test set. Nothing is executed that
comes with a dataset: the library reads data files alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.data.images import Form, pixels_of
from fedhet.data.sources.base import Place, Source
from fedhet.data.spec import Dataset, DataSpec, Split, refuse_more
from fedhet.data.texts import class_names
from fedhet.data.tokens import shape_of_texts, tokenized
from fedhet.disk.folder import expanded
from fedhet.errors import DataError
from fedhet.kinds import TEXT
from fedhet.settings.data import DataSettings

TESTS = ("test", "validation")
"""Splits that may be the common test set; the first one that exists is taken."""
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SUBSET = re.compile(r"\w[\w.-]*")


def read_hub(name: str, spec: DataSpec) -> Dataset:
    """Read the dataset, from this machine if it is there, else with `data.download`.

    Its samples are images, or texts with `data.sample-kind` = text. Raises DataError if it cannot
    be read, or has no such columns.
    """
    splits = _splits(name, spec)
    train = splits["train"]
    label = _label_column(train.features, name, spec)
    test = next((splits[part] for part in TESTS if part in splits), None)
    classes, places = _classes(train, test, label, name)
    found = [_split(rows, label, places, name, spec) for rows in (train, test) if rows is not None]
    if found[-1].x.shape[1:] != found[0].x.shape[1:]:
        raise DataError(f"hf:{name}: the images of its test split have another shape than train's")
    shape = shape_of_texts(spec) if spec.sample_kind == TEXT.name else ()
    return Dataset(
        spec.dataset, found[0], found[1] if test is not None else None, classes, shape=shape
    )


def parse(place: str) -> Place:
    """Return the folder or the name of the Hub that a place begins with, and its `@SUBSET`."""
    name, sign, subset = place.partition("@")
    if name.startswith(("/", "~", ".")):
        return Place(path=name, rest=sign + subset)
    return Place(hub=name, rest=sign + subset)


def _splits(name: str, spec: DataSpec) -> dict[str, Any]:
    """Return the dataset's splits by name."""
    from flwr_datasets import FederatedDataset

    place = parse(name)
    where = str(expanded(place.path).resolve()) if place.path else place.hub
    subset = place.rest.removeprefix("@") or None
    if not (place.path or _NAME.fullmatch(place.hub)) or not _SUBSET.fullmatch(subset or "x"):
        raise DataError(f"data.dataset = 'hf:{name}': not a NAME or NAME@SUBSET of the Hub")
    federated = FederatedDataset(
        dataset=where, subset=subset, partitioners={"train": 1}, shuffle=False
    )
    with _offline(unless=spec.download):
        try:
            splits = {"train": federated.load_split("train")}
        except Exception as error:  # the libraries' own, for each fault of a dataset or the network
            raise DataError(_absent(name, spec, error)) from error
    for part in TESTS:
        with contextlib.suppress(ValueError):  # the split does not exist
            splits[part] = federated.load_split(part)
    return splits


def _absent(name: str, spec: DataSpec, error: Exception) -> str:
    fault = " ".join(str(error).split())[:200] or type(error).__name__
    if spec.download:
        return f"data.dataset = 'hf:{name}': cannot be read or downloaded: {fault}"
    return (
        f"data.dataset = 'hf:{name}': is not on this machine, or cannot be read ({fault}); "
        "--set download=true downloads it from the Hugging Face Hub"
    )


@contextlib.contextmanager
def _offline(*, unless: bool) -> Iterator[None]:
    """Keep the libraries from the network inside the block."""
    import datasets.config
    import huggingface_hub.constants

    switches = ((datasets.config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE"))
    before = [(module, name, getattr(module, name)) for module, name in switches]
    try:
        for module, name, value in before:
            setattr(module, name, value or not unless)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _label_column(features: Any, name: str, spec: DataSpec) -> str:
    """Return `data.label-column` if there is one, or else the only column of class labels."""
    if spec.label_column in features:
        return spec.label_column
    found = [key for key, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    if len(found) == 1:
        return str(found[0])
    raise DataError(
        f"hf:{name}: has no column {spec.label_column!r}, but {', '.join(features)}: "
        "'data.label-column' says which holds the classes"
    )


def _classes(
    train: Any, test: Any, label: str, name: str
) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Return the names of the classes, and the place of each value of the label column."""
    feature = train.features[label]
    if type(feature).__name__ == "ClassLabel":
        names = tuple(map(str, feature.names))
        return names, {number: number for number in range(len(names))}
    values = [*train[label], *(test[label] if test is not None else ())]
    if not all(isinstance(value, str | int) for value in values):
        raise DataError(f"hf:{name}: column {label!r} must hold a whole number or a word for each")
    names = class_names([str(value) for value in values], Path(name))
    places = {class_name: place for place, class_name in enumerate(names)}
    return names, {value: places[str(value)] for value in set(values)}


def _split(rows: Any, label: str, places: dict[Any, int], name: str, spec: DataSpec) -> Split:
    labels = [places.get(value, -1) for value in rows[label]]
    if not labels or min(labels) < 0:
        raise DataError(f"hf:{name}: has no samples, or samples without a class, in {label!r}")
    return Split(_samples(rows, name, spec), torch.tensor(labels, dtype=torch.int64))


def _samples(rows: Any, name: str, spec: DataSpec) -> Tensor:
    if spec.sample_kind == TEXT.name:
        if absent := [column for column in spec.text_column if column not in rows.features]:
            raise DataError(
                f"hf:{name}: has no column {absent[0]!r} ('data.text-column'), but "
                f"{', '.join(rows.features)}"
            )
        parts = zip(*(rows[column] for column in spec.text_column), strict=True)
        return tokenized([" ".join(map(str, part)) for part in parts], spec, f"hf:{name}")
    columns = [key for key, feature in rows.features.items() if type(feature).__name__ == "Image"]
    if len(columns) != 1:
        hint = (
            "; texts need --set sample-kind=text" if {*spec.text_column} & {*rows.features} else ""
        )
        raise DataError(
            f"hf:{name}: has {len(columns)} columns of images, one is needed, among "
            f"{', '.join(rows.features)}{hint}"
        )
    return _images(rows[columns[0]], name, spec)


def _images(images: Sequence[Any], name: str, spec: DataSpec) -> Tensor:
    """Return PIL images as [N, C, H, W] uint8: resized to `data.image-size`, or all of one size."""
    grey = all(image.mode in ("1", "L") for image in images)
    form = Form.of(images[0].size, grey, spec.image_size)
    refuse_more(len(images) * prod(form.shape), spec, f"hf:{name}")
    found = np.empty((len(images), *form.shape), np.uint8)
    for number, image in enumerate(images):
        found[number] = pixels_of(image, form, f"hf:{name}: image {number}")
    return torch.from_numpy(found)


def _folder(path: str, table: DataSettings) -> Path | None:
    return expanded(path) if path else None


SOURCES = (
    Source(
        "hf",
        "images or texts of the Hugging Face Hub",
        read_hub,
        "NAME",
        files=_folder,
        parse=parse,
    ),
)
