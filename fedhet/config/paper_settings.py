"""The settings of the papers' own experiments, and where the defaults differ from them.

`paper_settings.toml` has the values, each with its place in the paper or in the authors' code.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedhet.base.errors import SettingsError, unknown_name
from fedhet.config.sources import preset_names
from fedhet.config.values import validated
from fedhet.methods.registry import find_method, shipped_names
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import plain, unknown

FILE = resources.files("fedhet") / "config" / "paper_settings.toml"
REASONS = "why"
"""The table of reasons that hold for every method."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Printed(_Part):
    """A setting in a paper: a value, or words where no value of the setting is the paper's."""

    value: Any = None
    words: str = ""
    source: str = Field(min_length=1)
    """The section or table of the paper, or the file of the authors' code."""
    why: str = ""
    """Why the default differs; empty: the reason that holds for every method."""

    @model_validator(mode="after")
    def _is_a_value_or_words(self) -> Printed:
        if (self.value is None) == (not self.words):
            raise ValueError("expected either 'value' or 'words'")
        return self

    def describe(self) -> str:
        """Return the value and its source in Markdown."""
        return f"{self.words or _literal(self.value)} ({self.source})"


class Experiment(_Part):
    """One of a paper's experiments, as its method's page compares it with the defaults."""

    what: str = Field(min_length=1)
    """The data, the clients and the models, and the section or table of the paper."""
    preset: str = ""
    """The presets that run it, comma-separated."""
    without: str = ""
    """Why no preset runs it."""
    settings: dict[str, Printed] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_a_preset_or_a_reason(self) -> Experiment:
        if bool(self.preset) == bool(self.without):
            raise ValueError("expected either 'preset' or 'without'")
        return self

    def values(self) -> dict[str, object]:
        """Return the settings that have a value, by name."""
        return {name: each.value for name, each in self.settings.items() if not each.words}


@cache
def experiments() -> dict[str, Experiment]:
    """Return the experiments by their methods. Raises SettingsError for a fault in the file."""
    return {name: _experiment(name, table) for name, table in _tables().items() if name != REASONS}


def differences(name: str) -> list[tuple[str, str, str, str]]:
    """Return a row for each setting whose default differs: its name, the default, the paper, why.

    Raises SettingsError for a difference without a reason, and for a reason without a difference.
    """
    # Import lazily: the defaults of models need PyTorch, which `fedhet methods` does without.
    from fedhet.config.resolve import resolve

    defaults, printed = resolve({"method": name}).flat(), experiments()[name].settings
    rows = []
    for setting in filter(printed.__contains__, defaults):
        each, default = printed[setting], defaults[setting]
        if not each.words and plain(each.value) == default:
            if each.why:
                raise _fault(name, setting, "'why' must be absent, because the default is the same")
            continue
        why = each.why or str(_tables().get(REASONS, {}).get(setting, ""))
        if not why:
            raise _fault(name, setting, f"expected 'why', because the default is {default!r}")
        rows.append((f"`{setting}`", _literal(default), each.describe(), why))
    return rows


def _experiment(name: str, table: Mapping[str, Any]) -> Experiment:
    if name not in shipped_names():
        listing = f"{FILE.name} has methods and the table '{REASONS}'"
        raise SettingsError(unknown_name("method", name, shipped_names(), listing))
    try:
        found = Experiment.model_validate(table)
    except ValidationError as error:
        first: Any = error.errors()[0]
        place = first["loc"][1] if len(first["loc"]) > 2 else ".".join(map(str, first["loc"]))
        raise _fault(name, str(place), first["msg"]) from None
    for preset in filter(None, found.preset.split(",")):
        if preset not in preset_names():
            raise SettingsError(unknown_name("preset", preset, preset_names(), FILE.name))
    known = RunSettings.fields() | find_method(name).settings()
    for setting in found.settings:
        if setting not in known:
            raise unknown(setting, known)
    validated({**found.values(), "method": name})
    return found


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def _literal(value: object) -> str:
    return f"`{json.dumps(plain(value), ensure_ascii=False)}`"


def _fault(name: str, place: str, rule: str) -> SettingsError:
    return SettingsError(f"{FILE.name}: '{name}', '{place}': {rule}")
