"""Data of a site in a deployment."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedhet.base.disk import expanded, read_text
from fedhet.base.errors import DataError
from fedhet.data.dataset import ClientData, Format
from fedhet.data.folders import CLASSES_FILE
from fedhet.data.partition import split_rows
from fedhet.data.schemas import SCHEMA, find_schema
from fedhet.data.sources import find_source, read_source
from fedhet.data.spec import DataSpec, Expected, no_test_error, reading
from fedhet.settings.run import DataSettings
from fedhet.tasks import Classification, find_task

if TYPE_CHECKING:
    from fedhet.data.declaration import Declaration

LOG = logging.getLogger("fedhet")


def site_data(
    dataset: str,
    *,
    spec: DataSpec,
    classes: int,
    name: str,
    unlabeled: bool = False,
    declared: Declaration | None = None,
) -> ClientData:
    """Read the data of a site, with the same readers as the dataset of a simulation.

    Without test samples, `spec.test_fraction` of the samples is held out. Then, a fraction
    `spec.validation` of the training samples is held out for validation.

    schema.toml describes the columns of a table or, for tasks other than classification, the
    targets. classes.txt lists the classes of the run in order, one per line; it is required only if
    the site does not have samples of all classes. Both files are next to the data.

    Args:
        dataset: Data of the site, in the form of `data.dataset`.
        spec: Data settings.
        classes: Number of classes in the run.
        name: Name of the site.
        unlabeled: Whether to read the samples without a label.
        declared: Declaration of the site, which defines all class names and the shape, or None if
            the settings of the run apply.

    Raises:
        DataError: If the data is invalid or has too few samples.
    """
    root, task = directory_of(dataset, spec), find_task(spec.task)
    is_classification = task is Classification
    if root is not None and not root.is_dir():
        raise DataError(f"{root}: file or directory not found (data of {name})")
    if classes < 2 and is_classification:
        raise DataError(
            f"{dataset}: models.num-classes must be the number of classes, at least 2, got "
            f"{classes}"
        )
    has_scale = task.targets in ("numbers", "labels")
    if has_scale and root is not None and not (root / SCHEMA).exists():
        raise DataError(
            f"{root / SCHEMA}: file not found, expected the scale of the targets, which all sites "
            f"share (data.task = {spec.task!r}). Create it with `fedhet schema`."
        )
    expected = Expected(classes, reads_unlabeled=unlabeled)
    if declared is not None:
        expected = replace(expected, shape=declared.shape)
    if is_classification:
        names = declared.names if declared else read_class_names(root, classes)
        expected = replace(expected, classes=names)
    ignored = {"by": "", "max_samples": 0, "exclude": ()}
    data = read_source(spec.replace(dataset=dataset, expected=expected, **ignored))
    format, source = data.format, declared.path if declared else dataset
    expected.check_outputs(len(format.classes), dataset, root or Path())
    if format.shape != (expected.shape or format.shape):
        rule = f"expected the shape of the data, {list(format.shape)}"
        raise DataError(f"{source}: shape: {rule}, got {list(expected.shape)}. Correct it.")
    if data.parts is not None or data.groups is not None:
        raise DataError(
            f"{dataset}: expected the data of one site, got one file for each client. Set data to "
            "the directory or file of this site."
        )
    held_out = spec
    if data.test is not None:
        held_out = spec.replace(test_fraction=0.0)
    elif not spec.test_fraction:
        raise no_test_error(dataset, spec)
    rows = split_rows(data, np.arange(len(data.train)), held_out, name)
    train, test, validation = (
        data.train if len(part) == len(data.train) else data.train.take(part) for part in rows
    )
    test = test if data.test is None else data.test
    if not len(test):
        raise DataError(f"{dataset}: expected at least 1 test sample, got 0")
    if spec.validation and not len(validation):
        LOG.warning(
            "%s: no validation samples, because data.validation-fraction = %g of %d training "
            "samples is less than one sample",
            name, spec.validation, len(train),
        )  # fmt: skip
    # The label space of a site contains the classes of its samples; the run may have more classes.
    space = tuple(range(len(format.classes)))
    if is_classification and declared is None:
        space = tuple(torch.unique(torch.cat([data.train.y, test.y])).tolist())
    unlabeled_split = data.unlabeled
    if unlabeled_split is None and (data.num_unlabeled or declared):
        unlabeled_split = train.take(torch.arange(0))
    return ClientData(
        name, format, train, test, None, space, validation, unlabeled_split, data.num_unlabeled
    )


def directory_of(dataset: str, spec: DataSettings) -> Path | None:
    """Return the directory of a site's data, or None if a Python function or the Hub provides it.

    Raises SettingsError if `dataset` does not have the form of `data.dataset`.
    """
    source, location = find_source(dataset, "node-config 'data'")
    path = source.files(source.parse(location).path, spec)
    if path is None:
        return None
    path = expanded(path)
    return path.parent if path.is_file() else path


def known_outputs(root: Path, format: Format) -> Format | None:
    """Complete a format with the outputs in schema.toml or classes.txt, if one of them exists.

    Raises DataError if the file is invalid.
    """
    if schema := find_schema(root, shared=True):
        task = schema.task_object
        return replace(format, classes=schema.outputs, schema=schema, task=task)
    names = read_class_names(root, None)
    return replace(format, classes=names) if names else None


def read_class_names(root: Path | None, classes: int | None) -> tuple[str, ...]:
    """Return the names in classes.txt, or () if the file does not exist.

    Raises DataError if there are not exactly `classes` names, or if `classes` is None and there are
    fewer than two names.
    """
    if root is None or not os.path.lexists(path := root / CLASSES_FILE):
        return ()
    with reading(path, "text file"):
        lines = read_text(path).splitlines()
    names = tuple(line.strip() for line in lines if line.strip())
    classes = classes or max(2, len(names))
    if len(names) != classes or len(set(names)) != classes:
        raise DataError(
            f"{path}: expected {classes} different class names, one per line, in the run's class "
            f"order, got {len(names)} names ({len(set(names))} different)"
        )
    for name in names:
        if not name.isprintable():
            raise DataError(f"{path}: class name {name!r} must be printable text")
    return names
