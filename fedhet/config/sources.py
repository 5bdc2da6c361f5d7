"""Sources of settings: `KEY=VALUE` on a command line, TOML files, named presets."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from fedhet.base.disk import read_tables
from fedhet.base.errors import SettingsError, StateError, reason_of, unknown_name
from fedhet.methods.registry import all_methods, find_method, shipped_names
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import Scalar, flatten, plain, table_of, unknown
from fedhet.settings.text import as_text, holds_several, read_text

PRESETS = resources.files("fedhet") / "presets"
CLIENTS, FOLLOW = "clients", 0
"""In Flower's run config, `clients = 0` follows the number of nodes of a simulated federation."""


def all_settings() -> dict[str, FieldInfo]:
    """Return the settings of every run and of every method, by full name."""
    return _with_settings_of(all_methods()[0])


def defaults() -> dict[str, object]:
    """Return all settings at their defaults, those of the built-in methods too."""
    found = _with_settings_of(sorted(shipped_names()))
    return {name: plain(info.default) for name, info in found.items()}


def to_flower(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return settings as Flower's run config has them: lists and maps as text."""
    return {k: as_text(v) if isinstance(v, list | dict) else v for k, v in values.items()}


def from_flower(values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of Flower's run config: the inverse of `to_flower`.

    `clients` = 0 becomes the default. Imports the run's method. Raises SettingsError.
    """
    values = {k: v for k, v in values.items() if (k, v) != (CLIENTS, FOLLOW)}
    known = known_settings(values)
    several = {k: known[k] for k, v in values.items() if k in known and isinstance(v, str)}
    read = {
        k: read_text(k, info, str(values[k])) for k, info in several.items() if holds_several(info)
    }
    return {**values, **read}


def known_settings(values: Mapping[str, object]) -> dict[str, FieldInfo]:
    """Return the settings that a run with these values may have, its method's among them."""
    method = str(values.get("method", RunSettings().method))
    return all_settings() | find_method(method).settings()


def _with_settings_of(names: Iterable[str]) -> dict[str, FieldInfo]:
    found = RunSettings.fields()
    for name in names:
        found |= find_method(name).settings()
    return found


def parse_pairs(pairs: Iterable[str], method: str | None = None) -> dict[str, object]:
    """Return settings from `KEY=VALUE` texts, as `by_full_name` does. Raises SettingsError."""
    texts = [pair.partition("=") for pair in pairs]
    for key, sign, _ in texts:
        if not sign:
            raise SettingsError(f"expected KEY=VALUE, got '{key}'")
    given = by_full_name(((key.strip(), text.strip()) for key, _, text in texts), method)
    known = all_settings() | (find_method(method).settings() if method else {})
    return {name: read_text(name, known.get(name), str(text)) for name, text in given.items()}


def by_full_name(given: Iterable[tuple[str, object]], method: str | None) -> dict[str, object]:
    """Return settings by their full names.

    They are given so, or by the last part if that is unique among the shared settings and those of
    `method`. Raises SettingsError for any other name, and for a setting that is given twice.
    """
    known = RunSettings.fields() | (find_method(method).settings() if method else {})
    values: dict[str, object] = {}
    for key, value in given:
        name = full_name(key, known)
        if name in values:
            raise SettingsError(f"setting '{name}' is given twice; the second value is {value!r}")
        values[name] = value
    return values


def full_name(key: str, known: Mapping[str, FieldInfo]) -> str:
    """Return the full name of a setting that may be given by its last part alone.

    Raises SettingsError if several match, naming them, and if it is the name of a table.
    """
    if key in known:
        return key
    if inside := [name for name in known if name.startswith(f"{key}.")]:
        raise SettingsError(f"'{key}' is a table of settings: {', '.join(inside)}")
    ending = [name for name in known if name.endswith(f".{key}")]
    if len(ending) > 1:
        raise SettingsError(f"'{key}' is ambiguous: {' or '.join(ending)}")
    if not ending and key not in all_settings():
        raise unknown(key, {**known, **all_settings()})
    return ending[0] if ending else key


def read_toml(path: Path) -> dict[str, object]:
    """Return the settings in a TOML file, by their full names. Raises SettingsError."""
    try:
        return flatten(read_tables(path))
    except StateError as error:  # names the file
        raise SettingsError(f"cannot read settings from {error}") from None
    except (OSError, RecursionError) as error:
        raise SettingsError(f"cannot read settings from {path}: {reason_of(error)}") from None


def of_method(values: Mapping[str, object], method: str) -> dict[str, object]:
    """Return the settings that a run of `method` has, with that method: none of another's own.

    Raises SettingsError for the table of none.
    """
    tables = {"", find_method(method).table, *(table_of(name) for name in RunSettings.fields())}
    first = find_method(str(values.get("method", method)))
    known = all_settings().keys() | _with_settings_of([first.name]).keys()
    for name in values:
        if table_of(name) not in tables and name not in known:
            raise unknown(name, known)
    return {k: v for k, v in values.items() if table_of(k) in tables} | {"method": method}


@cache
def preset_names() -> dict[str, str]:
    """Return the presets by name, each with the first line of its file."""
    files = sorted((f for f in PRESETS.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    first = {f.name: f.read_text(encoding="utf-8").splitlines()[0] for f in files}
    return {name.removesuffix(".toml"): line.lstrip("# ") for name, line in first.items()}


def read_preset(names: str) -> dict[str, object]:
    """Return the settings of a preset, or of several, comma-separated: later ones override.

    Raises SettingsError that suggests the nearest name.
    """
    values: dict[str, object] = {}
    for name in names.split(","):
        if name not in preset_names():
            listing = "`fedhet presets` lists all"
            raise SettingsError(unknown_name("preset", name, preset_names(), listing))
        text = (PRESETS / f"{name}.toml").read_text(encoding="utf-8")
        values |= flatten(tomllib.loads(text))
    return values
