"""A dataset of the user's own, from Python: `python:module:function`.

The function takes nothing and returns a `Dataset`, a pair (x, y) of arrays, or a mapping of `train`
and, if there are, `test` to such pairs, and `classes` to their names. Arrays are as in .npz files.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fedhet.base.errors import DataError, nearest
from fedhet.data.npz import checked_labels
from fedhet.data.spec import Dataset, Source, Split, nowhere
from fedhet.kinds import IMAGE, KINDS, Kind

NAME, PLACE = "python", "module:function"
_KEYS = ("train", "test", "classes")
_ALLOWED = (
    "must be a fedhet.Dataset, a pair (x, y), or a mapping of train and test to such pairs and of "
    "classes to names"
)


@lru_cache(maxsize=4)
def read_user_dataset(path: str) -> Dataset:
    """Import and call the function named by `path`, module:function. Raises DataError; cached."""
    name = f"{NAME}:{path}"
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise DataError(f"data.dataset = {name!r}: is not of the form {NAME}:{PLACE}")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a module of the user's may raise anything
        raise DataError(f"data.dataset = {name!r}: cannot import '{module}': {error!r}") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        hint = nearest(attribute, vars(found))
        raise DataError(f"data.dataset = {name!r}: {module} has no function '{attribute}'{hint}")
    try:
        made = function()
    except Exception as error:
        raise DataError(f"data.dataset = {name!r}: the function failed: {error!r}") from error
    return dataset_of(name, made)


def dataset_of(name: str, made: Any) -> Dataset:
    """Return what a user gives as data as a `Dataset`. Raises DataError, which names `name`."""
    match made:
        case Dataset():
            return made
        case Mapping():
            parts: Mapping[str, Any] = made
        case (x, y):
            parts = {"train": (x, y)}
        case _:
            hint = "; write it by to_csv, and give 'table:FILE'" if hasattr(made, "to_csv") else ""
            raise DataError(f"{name}: {_ALLOWED}; it is a {type(made).__name__}{hint}")
    if "train" not in parts or not set(parts) <= set(_KEYS):
        raise DataError(f"{name}: {_ALLOWED}; it has {', '.join(map(str, parts)) or 'nothing'}")
    train = _split(f"{name}: train", parts["train"])
    given = parts.get("test")
    test = None if given is None else _split(f"{name}: test", given)
    if test is not None and (test.x.shape[1:], test.x.dtype) != (train.x.shape[1:], train.x.dtype):
        raise DataError(f"{name}: the samples of test have another shape or type than train's")
    least = 1 + max(int(split.y.max()) for split in (train, test) if split is not None)
    classes = tuple(map(str, parts.get("classes") or range(least)))
    if len(classes) < least or len(set(classes)) < len(classes):
        raise DataError(f"{name}: has {least} classes in y, but {len(classes)} names: {classes}")
    return Dataset(name, train, test, classes)


def _split(where: str, pair: Any) -> Split:
    try:
        x, y = map(np.asarray, pair)
    except Exception as error:
        raise DataError(f"{where}: must be a pair (x, y) of arrays ({error})") from error
    samples, labels = IMAGE.checked(x, where), checked_labels(y, where)
    if len(samples) != len(labels) or not len(labels):
        raise DataError(f"{where}: x has {len(samples)} rows and y has {len(labels)}")
    return Split(torch.from_numpy(samples).clone(), torch.from_numpy(labels).clone())


def _found_kind(path: str) -> Kind:
    with contextlib.suppress(DataError):  # reading the dataset reports it
        return KINDS[read_user_dataset(path).kind]
    return IMAGE


SOURCES = (
    Source(
        NAME,
        "a function of yours that returns arrays",
        lambda path, spec: read_user_dataset(path),
        PLACE,
        found_kind=_found_kind,
        files=nowhere,
        imports=True,
    ),
)
