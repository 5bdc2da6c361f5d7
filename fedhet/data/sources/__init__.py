"""Where data comes from: datasets by name, and formats in which it is read from a place.

Each module of this package declares its `SOURCES`; a new one is found by being here. Libraries that
take long to import are imported by the functions that read.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from fedhet.base.disk import expanded
from fedhet.base.errors import SettingsError, unknown_name
from fedhet.data.spec import Source
from fedhet.data.texts import WORDS, encoder_folder
from fedhet.kinds import IMAGE, KINDS, Kind
from fedhet.settings.run import DataSettings
from fedhet.settings.schema import invalid_setting

_MODULES = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
_DECLARED: list[Source] = [
    each for name in _MODULES for each in getattr(importlib.import_module(name), "SOURCES", ())
]
SOURCES: Mapping[str, Source] = MappingProxyType(
    {each.name: each for each in sorted(_DECLARED, key=lambda each: (each.place != "", each.name))}
)
"""Every source by its name, those without a place first."""


def dataset_names() -> list[str]:
    """Return the allowed values of `dataset`; DIR, FILE and the like stand for the user's own."""
    return [source.form for source in SOURCES.values()]


def find_source(dataset: str, setting: str = "data.dataset") -> tuple[Source, str]:
    """Return the source that a dataset's name begins with, and the place that it names.

    Raises SettingsError for an unknown source, or one that lacks its place.
    """
    name, _, place = dataset.partition(":")
    if name not in SOURCES or (place and not SOURCES[name].place):
        known = f"it is one of {', '.join(dataset_names())}"
        raise SettingsError(f"'{setting}': {unknown_name('dataset', name, SOURCES, known)}")
    source = SOURCES[name]
    if source.place and not place:
        raise invalid_setting(setting, dataset, source.form)
    return source, place


def sample_kind(table: DataSettings) -> Kind:
    """Return the kind of a run's samples, as `data.sample-kind` or the name of the dataset says."""
    if table.sample_kind != "auto":
        return KINDS[table.sample_kind]
    name, _, place = table.dataset.partition(":")
    source = SOURCES.get(name)
    if source is None:  # another error reports it
        return IMAGE
    return source.infer_kind(place) if source.infer_kind and place else source.kind


def paths_of(table: DataSettings) -> list[Path]:
    """Return the files and folders from which a dataset, public data and a tokenizer are read.

    Data that comes with a package, from Python or from a cache of the Hub has none. Raises
    SettingsError or DataError if the tokenizer's encoder is not there.
    """
    found = [_path(each, table)[0] for each in (table.dataset, table.public_dataset)]
    if table.tokenizer != WORDS:
        found.append(Path(encoder_folder(table.tokenizer)))
    return [expanded(path).resolve() for path in found if path is not None]


def absolute(dataset: str, table: DataSettings) -> str:
    """Return a dataset's name with an absolute path, for processes with another working folder."""
    name, colon, _ = dataset.partition(":")
    path, rest = _path(dataset, table)
    return f"{name}:{expanded(path).resolve()}{rest}" if colon and path else dataset


def _path(dataset: str, table: DataSettings) -> tuple[Path | None, str]:
    """Return the file or folder that a dataset is read from, if there is one, and what follows."""
    name, _, place = dataset.partition(":")
    if name not in SOURCES:
        return None, ""
    found = SOURCES[name].parse(place)
    return SOURCES[name].files(found.path, table), found.rest
