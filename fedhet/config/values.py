"""A first check of a run's settings, which imports neither PyTorch nor a built-in method.

A mistyped name or a value out of range is thus refused at once; `resolve` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedhet.config.declared import Declared, declared
from fedhet.config.sources import all_settings
from fedhet.errors import SettingsError
from fedhet.settings.portable import has_several_types
from fedhet.settings.run import RENAMED, RunSettings
from fedhet.settings.schema import build, refused, unknown


@dataclass(frozen=True)
class Values:
    """A run's settings as they were given, sorted."""

    method: str
    run: RunSettings
    own: Mapping[str, object]
    """The method's own, by the last part of their names; their types and ranges are checked."""


def read_values(values: Mapping[str, object]) -> Values:
    """Sort settings by their full names. Raises SettingsError with a one-line message.

    A setting of another method is allowed only at its default, because Flower's run config lists
    the settings of every method.
    """
    method = declared(_text("method", values.get("method", RunSettings().method)))
    own: dict[str, object] = {}
    shared: dict[str, object] = {}
    for name, value in values.items():
        if name in method.settings():
            own[name.partition(".")[2]] = value
        elif name in RunSettings.fields():
            shared[name] = value
        else:
            _refuse_unless_default(name, value, method)
    run = build(RunSettings, shared)
    build(method.schema, _of_one_type(own, method), f"{method.table}.")
    return Values(method.name, run, own)


def _of_one_type(own: Mapping[str, object], method: Declared) -> dict[str, object]:
    """Return the settings of a single type; the rules of the others are code, and say more."""
    known = method.settings()
    return {k: v for k, v in own.items() if not has_several_types(known[f"{method.table}.{k}"])}


def _refuse_unless_default(name: str, value: object, method: Declared) -> None:
    known = all_settings()
    if name in RENAMED:
        raise SettingsError(f"unknown setting '{name}': it is '{RENAMED[name]}'")
    if name not in known:
        shared = RunSettings.fields()
        in_a_table = any(full.endswith(f".{name}") for full in shared)
        raise unknown(name, shared if in_a_table else known)
    if value != known[name].default or isinstance(value, bool) != (known[name].annotation is bool):
        raise SettingsError(
            f"setting '{name}' = {value!r} is not of this run's method, which is {method.name}"
        )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "text in quotes")
    return value
