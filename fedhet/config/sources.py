"""A run's settings as they are given, up to their validation, without PyTorch.

Sources are `KEY=VALUE` on a command line, TOML files, named presets, and Flower's run config. The
command line and `fedhet.run` both lay them over each other (`layered`). Settings from somebody else
may name code to import, which `check_trusted` refuses. `validated` checks names, types and ranges,
so that commands refuse a mistyped setting at once; `resolve` checks the rest and adds defaults.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from fedhet.base.disk import read_tables
from fedhet.base.errors import SettingsError, StateError, reason_of, unknown_name
from fedhet.methods.registry import (
    Method,
    all_methods,
    find_method,
    method_names,
    shipped_names,
)
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import (
    A_DATASET,
    A_MODEL,
    MethodSettings,
    Scalar,
    build,
    flatten,
    is_assigned,
    names,
    plain,
    refused,
    table_of,
    unknown,
)
from fedhet.settings.text import as_text, holds_several, read_text

PRESETS = resources.files("fedhet") / "presets"
CLIENTS, FOLLOW = "clients", 0
"""In Flower's run config, `clients = 0` follows the number of nodes of a simulated federation."""
PUBLIC_SOURCES = (
    ("data.public-dataset", "data.public-fraction"),
    ("data.public-fraction", "data.public-dataset"),
)
RESUMED_ALONE = (
    "resume takes its settings from the run's directory, and cannot be combined with preset, "
    "config or out"
)
TRUST_VARIABLE = "FEDHET_TRUST"
OBJECTS = "fedhet.inference.objects"
"""The module of objects that this process was given: naming them imports nothing."""
METHOD = "method"
DATASETS = ("data.dataset", "data.public-dataset")
"""The settings that name datasets."""


def settings_of(*methods: str) -> dict[str, FieldInfo]:
    """Return the settings of every run and of these methods, by full name."""
    found = RunSettings.fields()
    for name in methods:
        found |= find_method(name).settings()
    return found


def all_settings() -> dict[str, FieldInfo]:
    """Return the settings of every run and of every method, by full name."""
    return settings_of(*all_methods()[0])


def defaults() -> dict[str, object]:
    """Return all settings at their defaults, those of the built-in methods too."""
    return {
        name: plain(info.default) for name, info in settings_of(*sorted(shipped_names())).items()
    }


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


def parse_pairs(pairs: Iterable[str], method: str | None = None) -> dict[str, object]:
    """Return settings from `KEY=VALUE` texts, as `by_full_name` does. Raises SettingsError."""
    texts = []
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise SettingsError(f"expected KEY=VALUE, got '{key}'")
        texts.append((key.strip(), text.strip()))
    known = all_settings() | settings_of(*([method] if method else []))
    given = by_full_name(texts, method)
    return {name: read_text(name, known.get(name), str(text)) for name, text in given.items()}


def by_full_name(given: Iterable[tuple[str, object]], method: str | None) -> dict[str, object]:
    """Return settings by their full names.

    They are given so, or by the last part if that is unique among the shared settings and those of
    `method`. Raises SettingsError for any other name, and for a setting that is given twice.
    """
    known = settings_of(*([method] if method else []))
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
    known = all_settings() | settings_of(first.name)
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


def layered(
    preset: str | None = None,
    config: Path | None = None,
    resume: Path | None = None,
    trust: str = "",
) -> dict[str, object]:
    """Return the settings of presets (comma-separated names) with those of a TOML file over them.

    `resume` is the directory of a run to resume, whose settings are taken in place of both; they
    may import the modules of `trust`, see `check_trusted`. Raises FedhetError.
    """
    if resume is None:
        found = read_preset(preset) if preset is not None else {}
        return found | (read_toml(config) if config is not None else {})
    if preset or config:
        raise SettingsError(RESUMED_ALONE)
    path = resume / "config.toml"
    if not path.exists():
        raise StateError(f"{resume} holds no run to resume: it has no config.toml")
    found = read_toml(path)
    check_trusted(found, trust, path)
    return found | {"resume": True, "out": str(resume)}


def laid_over(
    values: Mapping[str, object], chosen: Mapping[str, object], resume: Path | None
) -> dict[str, object]:
    """Return `values`, which `layered` has returned, with the `chosen` settings over them."""
    if resume is not None and "out" in chosen:
        raise SettingsError(RESUMED_ALONE)
    # A source of public data replaces the other one.
    replaced = {rival for name, rival in PUBLIC_SOURCES if chosen.get(name)}
    return {k: v for k, v in values.items() if k not in replaced} | dict(chosen)


# --- code that settings name


def code_named(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield every setting that names code to import, with what it names.

    A method in a module of its own comes first: the rest needs its settings, and imports it.
    """
    # These import PyTorch, which a command that takes its settings from nowhere else does without.
    from fedhet.data.sources import SOURCES
    from fedhet.models import is_user_model

    if (method := str(values.get(METHOD, ""))) and method not in method_names():
        yield METHOD, method
    settings = from_flower(values)
    known = known_settings(settings)
    for setting, value in settings.items():
        what = names(known[setting]) if setting in known else ""
        if what == A_DATASET:
            source, _, place = str(value).partition(":")
            if source in SOURCES and SOURCES[source].imports:
                yield setting, place
        elif what in ("", A_MODEL):  # a setting that does not say may be used as a model's name
            yield from ((setting, name) for name in _texts(value) if is_user_model(name))


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a setting's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value:
            yield from _texts(each)


def is_named(name: str, allowed: str) -> bool:
    """Return whether a comma-separated list names a module, a function of it, or everything: *."""
    listed = [each.strip() for each in allowed.split(",")]
    return "*" in listed or name in listed or name.partition(":")[0] in listed


def check_trusted(values: Mapping[str, object], trust: str, where: Path) -> None:
    """Raise SettingsError if settings that were read `where` would import what nobody trusts.

    `trust` is a list as `is_named` takes it; the environment variable FEDHET_TRUST may name more.
    """
    allowed = f"{trust},{os.environ.get(TRUST_VARIABLE, '')}"
    for setting, name in code_named(values):
        module = name.partition(":")[0]
        if module != OBJECTS and not is_named(name, allowed):
            raise SettingsError(
                f"{where}: '{setting}' names code to import, {name!r}: if you trust it, say so by "
                f"--trust {module}, in Python by trust={module!r}, or by {TRUST_VARIABLE}={module}"
            )


# --- validation


@dataclass(frozen=True)
class Given:
    """A run's settings as they are given: its method, those of every run, and the method's own."""

    method: Method
    run: RunSettings
    own: MethodSettings
    chosen: frozenset[str]
    """The names of the given settings, whose values stay even if they are the defaults."""


def validated(values: Mapping[str, object]) -> Given:
    """Validate settings by their full names. Raises SettingsError with a one-line message.

    A setting of another method is allowed only at its default, because Flower's run config lists
    the settings of every method.
    """
    named = values.get("method", RunSettings().method)
    if not isinstance(named, str):
        raise refused("method", named, "text in quotes")
    method = find_method(named)
    of_method, of_all = method.settings(), RunSettings.fields()
    own: dict[str, object] = {}
    shared: dict[str, object] = {}
    foreign: dict[str, object] = {}
    for name, value in values.items():
        info = (of_all | of_method).get(name)
        # Accept a list as text, "cnn2,mlp", from Python and TOML, as the command line does.
        if isinstance(value, str) and info is not None and holds_several(info):
            value = read_text(name, info, value) if "," in value or not is_assigned(info) else value
        if name in of_method:
            own[name.partition(".")[2]] = value
        else:
            (shared if name in of_all else foreign)[name] = value
    known = all_settings() if foreign else {}
    for name, value in foreign.items():
        if name not in known:
            in_a_table = any(full.endswith(f".{name}") for full in of_all)
            raise unknown(name, of_all if in_a_table else known)
        is_bool = known[name].annotation is bool
        if plain(value) != plain(known[name].default) or isinstance(value, bool) != is_bool:
            raise SettingsError(
                f"setting '{name}' = {value!r} is not one of {method.name}, the run's method"
            )
    run = build(RunSettings, shared)
    own_settings = build(method.spec.settings, own, f"{method.table}.")
    return Given(method, run, own_settings, frozenset(values))
