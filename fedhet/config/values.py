"""Validates a run's settings without PyTorch, so that commands refuse a mistyped one at once.

What needs the data and the models, `resolve` checks and completes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedhet.base.errors import SettingsError
from fedhet.config.sources import all_settings
from fedhet.methods.registry import Method, find_method
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import MethodSettings, build, is_assigned, plain, refused, unknown
from fedhet.settings.text import holds_several, read_text


@dataclass(frozen=True)
class Given:
    """A run's settings as they are given: its method, those of every run, and the method's own."""

    method: Method
    run: RunSettings
    own: MethodSettings


def validated(values: Mapping[str, object]) -> Given:
    """Validate settings by their full names. Raises SettingsError with a one-line message.

    A setting of another method is allowed only at its default, because Flower's run config lists
    the settings of every method.
    """
    method = find_method(_text("method", values.get("method", RunSettings().method)))
    own: dict[str, object] = {}
    shared: dict[str, object] = {}
    of_method, of_all = method.settings(), RunSettings.fields()
    foreign: dict[str, object] = {}
    for name, value in values.items():
        info = (of_all | of_method).get(name)
        # Accept a list as text, "cnn2,mlp", from Python and TOML, as the command line does.
        if isinstance(value, str) and info is not None and holds_several(info):
            value = read_text(name, info, value) if "," in value or not is_assigned(info) else value
        if name in of_method:
            own[name.partition(".")[2]] = value
        elif name in of_all:
            shared[name] = value
        else:
            foreign[name] = value
    if foreign:
        _refuse_unless_default(foreign, method)
    run = build(RunSettings, shared)
    return Given(method, run, build(method.spec.settings, own, f"{method.table}."))


def _refuse_unless_default(values: Mapping[str, object], method: Method) -> None:
    known = all_settings()
    for name, value in values.items():
        if name not in known:
            shared = RunSettings.fields()
            in_a_table = any(full.endswith(f".{name}") for full in shared)
            raise unknown(name, shared if in_a_table else known)
        is_bool = known[name].annotation is bool
        if plain(value) != plain(known[name].default) or isinstance(value, bool) != is_bool:
            raise SettingsError(
                f"setting '{name}' = {value!r} is not one of {method.name}, the run's method"
            )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "text in quotes")
    return value
