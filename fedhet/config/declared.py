"""What the methods declare, without importing them: PyTorch and Flower take seconds to import.

For the built-in methods it is read from a file, which `make reference` writes from the code; a test
compares them. A method of another package is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pydantic.fields import FieldInfo

from fedhet.errors import SettingsError
from fedhet.kinds import Kind
from fedhet.methods.registry import (
    Method,
    find_method,
    method_names,
    shipped_names,
    table_of_method,
)
from fedhet.settings.portable import from_data, to_data
from fedhet.settings.schema import MethodSettings, kebab
from fedhet.wire.contract import Contract

FILE = resources.files("fedhet") / "_generated" / "methods.json"


@dataclass(frozen=True)
class Declared:
    """What a method declares, for lists and for a first check of settings."""

    name: str
    title: str
    paper: str
    headline: str
    models: str
    """The default models, in a sentence."""
    any_model: bool
    schema: type[MethodSettings]
    """The method's settings; a built-in one's without the rules that are code."""
    server_sends: tuple[tuple[str, str, str], ...]
    """Name, type and description of each field of the server's messages."""
    client_sends: tuple[tuple[str, str, str], ...]

    @property
    def table(self) -> str:
        """Return the name of the method's settings table."""
        return table_of_method(self.name)

    def settings(self) -> dict[str, FieldInfo]:
        """Return the method's settings by their full names, e.g. `felo.alpha`."""
        return {f"{self.table}.{name}": info for name, info in self.schema.fields().items()}


@cache
def declared(name: str) -> Declared:
    """Return what the method of that name declares. Raises SettingsError as `find_method` does."""
    written = _written().get(name)
    if written is None:
        return declared_by(find_method(name))
    return Declared(
        name=name,
        title=written["title"],
        paper=written["paper"],
        headline=written["headline"],
        models=written["models"],
        any_model=written["any_model"],
        schema=from_data(name, written["settings"]),
        server_sends=tuple((field, kind, line) for field, kind, line in written["server_sends"]),
        client_sends=tuple((field, kind, line) for field, kind, line in written["client_sends"]),
    )


@cache
def declared_methods() -> tuple[dict[str, Declared], tuple[str, ...]]:
    """Return what all methods declare that can be loaded, and what is wrong with the others."""
    found, faults = {}, []
    for name in method_names():
        try:
            found[name] = declared(name)
        except SettingsError as error:  # of an installed package; it must not hinder the others
            faults.append(str(error))
    return found, tuple(faults)


def declared_by(method: Method) -> Declared:
    """Return what an imported method declares."""
    spec = method.spec
    return Declared(
        method.name,
        spec.title,
        spec.paper,
        spec.headline,
        _default_models(method),
        spec.any_model,
        spec.settings,
        _rows(method.spec.instructions),
        _rows(method.spec.replies),
    )


def declarations_json() -> str:
    """Return the text of the file, from the built-in methods' code."""
    found = {name: _to_data(declared_by(find_method(name))) for name in sorted(shipped_names())}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _to_data(method: Declared) -> dict[str, Any]:
    return {
        "title": method.title,
        "paper": method.paper,
        "headline": method.headline,
        "models": method.models,
        "any_model": method.any_model,
        "settings": to_data(method.schema),
        "server_sends": method.server_sends,
        "client_sends": method.client_sends,
    }


@cache
def _written() -> Mapping[str, Mapping[str, Any]]:
    """Return the file's content, by method."""
    return json.loads(FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _rows(contract: Contract) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        (field.name, field.describe(), field.help + ("" if field.required else " (optional)"))
        for field in contract.fields
    )


def _default_models(method: Method) -> str:
    """Return the method's default models in a sentence, by the kind of data."""
    others: list[tuple[str, Kind]] = [("a table", "table"), ("text", "text"), ("signals", "signal")]
    parts = [f"where the data is {words}, {_models(method, kind)}" for words, kind in others]
    return f"Models, if none are given: {'; '.join([method.spec.pool('image'), *parts])}."


def _models(method: Method, kind: Kind) -> str:
    own = method.spec.own_models(kind)
    named = [f"{method.table}.{kebab(name)} = {model}" for name, model in own.items()]
    return ", and ".join([method.spec.pool(kind), *named])
