"""Data sources, i.e. named datasets and data formats with a location.

Each module in this package declares its `SOURCES` and is discovered automatically. Functions that
read data import slow libraries lazily.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from fedhet.base.disk import expanded
from fedhet.base.errors import SettingsError, unknown_name
from fedhet.base.seeding import preserve_global_rng
from fedhet.data.dataset import Dataset, Source
from fedhet.data.spec import DataSpec
from fedhet.data.targets import warn_of_constant_targets
from fedhet.data.texts import WORDS, encoder_directory
from fedhet.kinds import IMAGE, KINDS, Kind
from fedhet.settings.run import DataSettings
from fedhet.settings.schema import invalid_setting
from fedhet.tasks import Classification, find_task

_MODULES = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
_DECLARED: list[Source] = [
    each for name in _MODULES for each in getattr(importlib.import_module(name), "SOURCES", ())
]
SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        each.name: each
        for each in sorted(_DECLARED, key=lambda each: (each.placeholder != "", each.name))
    }
)
"""All sources by name; sources without a location come first."""
_OTHER_TASKS = (
    "table:PATH, imagefolder:PATH with labels.csv, text:PATH, signal:DIR, npz:DIR, or a Python "
    "function"
)
"""Sources whose targets may be numbers."""


def dataset_names() -> list[str]:
    """Return the valid forms of `data.dataset`, with placeholders such as DIR and FILE."""
    return [source.form for source in SOURCES.values()]


def find_source(dataset: str, setting: str = "data.dataset") -> tuple[Source, str]:
    """Split the value of `data.dataset` into its source and its location.

    Raises SettingsError if the source is unknown, or if its location is missing.
    """
    name, _, location = dataset.partition(":")
    if name not in SOURCES or (location and not SOURCES[name].placeholder):
        known, similar = f"expected one of {', '.join(dataset_names())}", [*SOURCES]
        if "/" in name or "." in name:  # The name of a format cannot replace a path.
            similar = []
            known = (
                "a path or a name needs its format, as in table:PATH, text:PATH, imagefolder:PATH, "
                "or hf:NAME; see `fedhet datasets`"
            )
        raise SettingsError(f"'{setting}': {unknown_name('dataset', name, similar, known)}")
    source = SOURCES[name]
    if source.placeholder and not location:
        raise invalid_setting(setting, dataset, source.form)
    return source, location


@preserve_global_rng()
def read_source(spec: DataSpec) -> Dataset:
    """Read and decode the dataset `spec.dataset`. All data of simulations and sites is read here.

    Raises DataError if its files are invalid, and SettingsError if the task differs.
    """
    source, location = find_source(spec.dataset)
    dataset = source.read(location, spec)
    if (task := find_task(spec.task)) is not type(dataset.format.task):
        name = dataset.format.task.name
        raise SettingsError(
            f"data.task: expected {name!r}, the task of data.dataset = {spec.dataset!r}, got "
            f"{spec.task!r}. Set data.task to {name}"
            + (f", or use {_OTHER_TASKS}." if task is not Classification else ".")
        )
    warn_of_constant_targets(dataset)
    return replace(dataset, format=dataset.format.for_run(spec))


def sample_kind(settings: DataSettings) -> Kind:
    """Return the sample kind of a run, from `data.sample-kind` or the dataset."""
    if settings.sample_kind != "auto":
        return KINDS[settings.sample_kind]
    name, _, location = settings.dataset.partition(":")
    source = SOURCES.get(name)
    if source is None:  # `find_source` reports the error.
        return IMAGE
    return source.infer_kind(location) if source.infer_kind and location else source.kind


def paths_of(settings: DataSettings) -> list[Path]:
    """Return the local paths from which the dataset, public data, and tokenizer are read.

    Datasets included in packages, Python functions, and the cache of the Hub have no paths. Raises
    SettingsError or DataError if the encoder of the tokenizer is missing.
    """
    paths = [_path(each, settings)[0] for each in (settings.dataset, settings.public_dataset)]
    if settings.tokenizer != WORDS:
        paths.append(Path(encoder_directory(settings.tokenizer)))
    return [expanded(path).resolve() for path in paths if path is not None]


def absolute(dataset: str, settings: DataSettings) -> str:
    """Make the path in a dataset's name absolute, for processes with another working directory."""
    name, colon, _ = dataset.partition(":")
    path, suffix = _path(dataset, settings)
    return f"{name}:{expanded(path).resolve()}{suffix}" if colon and path else dataset


def _path(dataset: str, settings: DataSettings) -> tuple[Path | None, str]:
    """Return the local path of a dataset, or None, and the suffix of its name, e.g. "@SUBSET"."""
    name, _, location = dataset.partition(":")
    if name not in SOURCES:
        return None, ""
    parsed = SOURCES[name].parse(location)
    return SOURCES[name].files(parsed.path, settings), parsed.suffix
