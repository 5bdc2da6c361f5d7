"""Reading and validation of settings, without importing PyTorch.

Settings come from `KEY=VALUE` arguments, TOML files, presets, and Flower's run config. `gather`
merges them. Untrusted settings may name code to import, which `check_trusted` rejects. `validate`
checks names, types and ranges, so that commands report a mistyped setting immediately.
`fedhet.config.resolve` checks the rules across tables and adds the method's defaults.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from fedhet.base.disk import read_toml_tables
from fedhet.base.errors import SettingsError, StateError, error_reason, unknown_name
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
    as_text,
    build,
    flatten,
    invalid_setting,
    plain,
    read_collection,
    read_text,
    referent,
    table_of,
    unknown,
)

PRESETS = resources.files("fedhet") / "presets"
CLIENTS, FOLLOW = "clients", 0
"""Setting in Flower's run config, and the value that stands for the number of simulated nodes."""
PUBLIC_SOURCES = (
    ("data.public-dataset", "data.public-fraction"),
    ("data.public-fraction", "data.public-dataset"),
)
RESUME_CONFLICT = (
    "resume: cannot be combined with preset, config, or out, because the run directory determines "
    "the settings"
)
TRUST_VARIABLE = "FEDHET_TRUST"
OBJECTS = "fedhet.inference.objects"
"""Module with objects registered in this process; naming these objects imports no other code."""
METHOD = "method"
DATASETS = ("data.dataset", "data.public-dataset")
"""Settings that name datasets."""


FLAGS = {
    "dataset": "data.dataset",
    "clients": "clients",
    "models": "models.pool",
    "rounds": "rounds",
    "seed": "seed",
    "backend": "engine.backend",
    "strict": "engine.strict",
    "out": "out",
}
"""Settings that have a command-line option, by option name."""


def settings_of(*methods: str) -> dict[str, FieldInfo]:
    """Return the fields of the shared settings and of the given methods, by full name."""
    fields = RunSettings.fields()
    for name in methods:
        fields |= find_method(name).settings()
    return fields


def all_settings() -> dict[str, FieldInfo]:
    """Return the fields of the shared settings and of all methods, by full name."""
    return settings_of(*all_methods()[0])


def defaults() -> dict[str, object]:
    """Return the default of every setting, including the settings of built-in methods."""
    return {
        name: plain(info.default) for name, info in settings_of(*sorted(shipped_names())).items()
    }


def to_flower(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Convert settings to Flower's run config, with lists and mappings as text."""
    return {k: as_text(v) if isinstance(v, list | dict) else v for k, v in values.items()}


def known_settings(values: Mapping[str, object]) -> dict[str, FieldInfo]:
    """Return the fields of all settings, including the settings of the method in `values`."""
    method = str(values.get("method", RunSettings().method))
    return all_settings() | find_method(method).settings()


def parse_pairs(pairs: Iterable[str], method: str | None = None) -> dict[str, object]:
    """Parse `KEY=VALUE` arguments as settings by full name.

    Raises SettingsError if an argument is malformed or its name is unknown.
    """
    texts = []
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise SettingsError(f"expected KEY=VALUE, got '{key}'")
        texts.append((key.strip(), text.strip()))
    known = all_settings() | settings_of(*([method] if method else []))
    given = expand_names(texts, method)
    return {name: read_text(name, known.get(name), str(text)) for name, text in given.items()}


def expand_names(given: Iterable[tuple[str, object]], method: str | None) -> dict[str, object]:
    """Return settings by full name.

    A name may be abbreviated to its last part if this part is unique among the shared settings and
    the settings of `method`. Raises SettingsError if a name is unknown, ambiguous, or duplicate.
    """
    known = settings_of(*([method] if method else []))
    values: dict[str, object] = {}
    for key, value in given:
        name = full_name(key, known)
        if name in values:
            raise SettingsError(f"setting '{name}': duplicate, got a second value {value!r}")
        values[name] = value
    return values


def full_name(key: str, known: Mapping[str, FieldInfo]) -> str:
    """Return the full name of a setting. `key` may be abbreviated to its last part.

    Raises SettingsError if the name is unknown, ambiguous, or the name of a table.
    """
    if key in known:
        return key
    if inside := [name for name in known if name.startswith(f"{key}.")]:
        raise SettingsError(f"'{key}' is a table, expected a setting: {', '.join(inside)}")
    matches = [name for name in known if name.endswith(f".{key}")]
    if len(matches) > 1:
        raise SettingsError(f"setting '{key}' is ambiguous, expected {' or '.join(matches)}")
    if not matches and key not in all_settings():
        raise unknown(key, {**known, **all_settings()})
    return matches[0] if matches else key


def read_toml(path: Path) -> dict[str, object]:
    """Read settings by full name from a TOML file.

    Raises SettingsError if the file is unreadable or a setting is unknown.
    """
    try:
        return flatten(read_toml_tables(path))
    except StateError as error:  # The error names the file.
        raise SettingsError(f"cannot read settings from {error}") from None
    except (OSError, RecursionError) as error:
        raise SettingsError(f"cannot read settings from {path}: {error_reason(error)}") from None


def settings_for_method(values: Mapping[str, object], method: str) -> dict[str, object]:
    """Return the settings for a run of `method`, without the tables of other methods.

    Raises SettingsError if a table belongs to no method.
    """
    tables = {"", find_method(method).table, *(table_of(name) for name in RunSettings.fields())}
    known = known_settings({"method": method, **values})
    for name in values:
        if table_of(name) not in tables and name not in known:
            raise unknown(name, known)
    return {k: v for k, v in values.items() if table_of(k) in tables} | {"method": method}


@cache
def preset_names() -> dict[str, str]:
    """Return the presets by name, each with the first line of its file as a description."""
    files = sorted((f for f in PRESETS.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    titles = {f.name: f.read_text(encoding="utf-8").splitlines()[0] for f in files}
    return {name.removesuffix(".toml"): line.lstrip("# ") for name, line in titles.items()}


def read_preset(names: str) -> dict[str, object]:
    """Return the settings in comma-separated presets; later presets override earlier presets.

    Raises SettingsError if a preset is unknown.
    """
    values: dict[str, object] = {}
    for name in names.split(","):
        if name not in preset_names():
            message = unknown_name("preset", name, preset_names(), "see `fedhet presets`")
            raise SettingsError(message)
        text = (PRESETS / f"{name}.toml").read_text(encoding="utf-8")
        values |= flatten(tomllib.loads(text))
    return values


def read_layers(
    preset: str | None = None,
    config: Path | None = None,
    resume: Path | None = None,
    trust: str = "",
) -> dict[str, object]:
    """Return the settings in comma-separated presets, overridden by a TOML file's settings.

    If `resume` is a run's directory, the run's settings are used instead; they may import the
    modules in `trust` (see `check_trusted`). Raises FedhetError if the settings are unreadable or
    untrusted.
    """
    if resume is None:
        values = read_preset(preset) if preset is not None else {}
        return values | (read_toml(config) if config is not None else {})
    if preset or config:
        raise SettingsError(RESUME_CONFLICT)
    path = resume / "config.toml"
    if not path.exists():
        raise StateError(f"cannot resume {resume}: config.toml not found")
    values = read_toml(path)
    check_trusted(values, trust, path)
    return values | {"resume": True, "out": str(resume)}


def override(
    values: Mapping[str, object], changes: Mapping[str, object], resume: Path | None
) -> dict[str, object]:
    """Return the settings `values`, as returned by `read_layers`, overridden by `changes`."""
    if resume is not None and "out" in changes:
        raise SettingsError(RESUME_CONFLICT)
    # The two sources of public data are mutually exclusive, so setting one unsets the other.
    replaced = {other for name, other in PUBLIC_SOURCES if changes.get(name)}
    return {k: v for k, v in values.items() if k not in replaced} | dict(changes)


def gather(
    method: str | None = None,
    preset: str | None = None,
    config: Path | None = None,
    set_: list[str] | None = None,
    resume: Path | None = None,
    trust: str | None = None,
    **flags: str | bool | None,
) -> dict[str, object]:
    """Merge the settings from presets, a file, and options such as `--set`, in that order.

    If `resume`, a run directory, is given, the settings of that run replace presets and the file.
    Raises SettingsError if a setting is unknown or invalid.
    """
    options = [f"{FLAGS[k]}={as_text(value)}" for k, value in flags.items() if value is not None]
    pairs = [*(set_ or []), *options]
    values = read_layers(preset, config, resume, trust or "")
    # The method overrides the preset's method, e.g. `run local --preset felo-...` for a baseline.
    if method is not None:
        values = settings_for_method(values, method)
    name = values.get("method")
    return override(values, parse_pairs(pairs, None if name is None else str(name)), resume)


# --- code named by settings


def check_imports(values: Mapping[str, object], check: Callable[[str, str], None]) -> None:
    """Check the code that settings import.

    `check` is called with the name and the module path of every setting that names code, before the
    code is imported. Raises SettingsError if a list is malformed.
    """
    # Import lazily: these modules load PyTorch, which commands without untrusted settings do not
    # need.
    from fedhet.data.sources import SOURCES
    from fedhet.models import is_user_model

    if (method := str(values.get(METHOD, ""))) and method not in method_names():
        check(METHOD, method)
    known = known_settings(values)  # This imports an external method.
    for setting, value in values.items():
        kind = referent(known[setting]) if setting in known else ""
        if kind == A_DATASET:
            source, _, place = str(value).partition(":")
            if source in SOURCES and SOURCES[source].imports:
                check(setting, place)
        elif kind in ("", A_MODEL):  # Text in other settings might name a model.
            read = read_collection(setting, known[setting], value) if setting in known else value
            for name in filter(is_user_model, _texts(read)):
                check(setting, name)


def _texts(value: object) -> Iterator[str]:
    """Yield every string in a setting's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value:
            yield from _texts(each)


def is_listed(name: str, allowed: str) -> bool:
    """Return whether a comma-separated list contains `name`, its module, or `*`."""
    listed = [each.strip() for each in allowed.split(",")]
    return "*" in listed or name in listed or name.partition(":")[0] in listed


def check_trusted(values: Mapping[str, object], trust: str, where: Path) -> None:
    """Raise SettingsError if the settings read from `where` would import untrusted code.

    `trust` and the environment variable FEDHET_TRUST are comma-separated lists of trusted modules.
    """
    allowed = f"{trust},{os.environ.get(TRUST_VARIABLE, '')}"

    def check(setting: str, name: str) -> None:
        module = name.partition(":")[0]
        if module != OBJECTS and not is_listed(name, allowed):
            raise SettingsError(
                f"{where}: setting '{setting}' would import untrusted code, {name!r}. If you "
                f"trust it, use --trust {module}, trust={module!r} in Python, or "
                f"{TRUST_VARIABLE}={module}."
            )

    check_imports(values, check)


# --- validation


@dataclass(frozen=True)
class GivenSettings:
    """Validated settings of a run, before the method's defaults are added."""

    method: Method
    run: RunSettings
    method_settings: MethodSettings
    explicit: frozenset[str]
    """Names of the given settings, which the method's defaults do not replace."""


def validate(values: Mapping[str, object]) -> GivenSettings:
    """Validate the names, types and ranges of settings given by full name.

    Settings of other methods must have their default values, because Flower's run config contains
    the settings of every method. Raises SettingsError if a setting is unknown or invalid.
    """
    method_name = values.get("method", RunSettings().method)
    if not isinstance(method_name, str):
        raise invalid_setting("method", method_name, "string")
    method = find_method(method_name)
    method_fields, run_fields = method.settings(), RunSettings.fields()
    own: dict[str, object] = {}
    shared: dict[str, object] = {}
    foreign: dict[str, object] = {}
    for name, value in values.items():
        if name in method_fields:
            own[name.partition(".")[2]] = value
        else:
            (shared if name in run_fields else foreign)[name] = value
    known = all_settings() if foreign else {}
    for name, value in foreign.items():
        if name not in known:
            is_abbreviated = any(full.endswith(f".{name}") for full in run_fields)
            raise unknown(name, run_fields if is_abbreviated else known)
        is_bool = known[name].annotation is bool
        read = plain(read_collection(name, known[name], value))
        if read != plain(known[name].default) or isinstance(value, bool) != is_bool:
            raise SettingsError(
                f"setting '{name}': unsupported by method '{method.name}', got {value!r}"
            )
    run = build(RunSettings, shared)
    method_settings = build(method.spec.settings, own, f"{method.table}.")
    return GivenSettings(method, run, method_settings, frozenset(values))
