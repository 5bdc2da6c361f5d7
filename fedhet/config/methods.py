"""Finds methods: the two halves of each by class, wherever they live.

A method that ships is strategies/<m>.py and clients/<m>.py. One from outside is a module that holds
both halves, named by where it is, `package.module`, or by an entry point of the group
`fedhet.methods`. This room imports methods by name and knows none of them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Literal

from pydantic.fields import FieldInfo

from fedhet.errors import SettingsError, nearest
from fedhet.settings.schema import MethodSettings
from fedhet.settings.tables import RunSettings
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo

GROUP = "fedhet.methods"
"""The entry points by which a package adds methods: name = "package.module"."""
PACKAGES = ("strategies", "clients")
"""Where the halves of the methods that ship are."""
HALVES = {"HetStrategy": "strategies.base", "HetClient": "clients.base"}
"""The base of each half, and where it is."""


def plain_sizes(settings: Any, client: ClientInfo) -> Sizes:
    """Return the sizes of messages that hold neither features nor weights: C, the classes."""
    return Sizes({"C": client.classes})


@dataclass(frozen=True)
class MethodSpec:
    """What a method declares of itself."""

    title: str
    """One line on what it does."""
    paper: str
    headline: Literal["personal", "common"]
    """The protocol of its headline number."""
    settings: type[MethodSettings] = MethodSettings
    """What it lets a user choose; both halves read it."""
    sizes: Callable[[Any, ClientInfo], Sizes] = plain_sizes
    """From its settings and a client: the sizes of messages, as far as these fix them."""
    kinds: tuple[str, ...] = ("private",)
    """The kinds of model that its clients evaluate."""
    needs_public: bool = False
    """Does it work on data that no client owns?"""
    needs_unlabelled: bool = False
    """Does it work on samples of the clients' own that have no label?"""
    one_model: bool = False
    """Must all of its clients have the same model?"""
    default_model: str = ""
    """The model of all clients where the user chooses none; empty: the usual pool."""
    any_model: bool = False
    """Does it train a client's model by `fit_private` alone, so that it needs no gradients?"""
    large_messages: bool = False
    """Is each client sent, and does it send, something large of its own, such as models?

    Then instructions are made when a client's turn has come, and replies wait on disk.
    """


@dataclass(frozen=True)
class Method:
    """A method: the classes of its server half and of its client half."""

    name: str
    strategy: Any
    client: Any

    @property
    def spec(self) -> MethodSpec:
        """Return what the method declares of itself."""
        return self.strategy.spec  # type: ignore[no-any-return]

    @property
    def table(self) -> str:
        """Return the name of the table of its settings."""
        return _table_of(self.name)

    def settings(self) -> dict[str, FieldInfo]:
        """Return its settings under their full names, e.g. `felo.alpha`."""
        return {f"{self.table}.{name}": info for name, info in self.spec.settings.fields().items()}


@cache
def method_names() -> tuple[str, ...]:
    """Return the names of all methods: those that ship, and those of installed packages."""
    return tuple(sorted({*_shipped(), *_installed()}))


def _shipped() -> set[str]:
    halves = [
        {m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)}
        for package in PACKAGES
    ]
    return {name.replace("_", "-") for name in (halves[0] & halves[1]) - {"base"}}


def _installed() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP)}


@cache
def find_method(name: str) -> Method:
    """Return the method of that name. Raises SettingsError for one that cannot be had."""
    module, table = name.replace("-", "_"), _table_of(name)
    if table in {full.partition(".")[0] for full in RunSettings.fields()}:
        rule = f"'{table}' is the name of a table of settings, or of a setting, of every run"
        raise SettingsError(f"setting 'method' = '{name}' is not allowed: {rule}")
    if name in _shipped():
        modules = [
            importlib.import_module(f"{half}.{module}") for half in ("strategies", "clients")
        ]
    elif name in _installed() or "." in name:
        modules = [_imported(name, _installed().get(name, name))]
    else:
        known = ", ".join(method_names())
        raise SettingsError(
            f"setting 'method' = '{name}' does not exist: it takes one of {known}, or a module's "
            f"name, package.module{nearest(name, method_names())}"
        )
    return Method(name, *(_half(name, modules, base) for base in HALVES))


def _table_of(name: str) -> str:
    """Return the name of the table of a method's settings: its own, without its package's."""
    return name.rpartition(".")[2].replace("_", "-")


def _imported(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:  # whatever a module of somebody else's raises
        raise SettingsError(
            f"setting 'method' = '{name}': cannot import '{path}': {error!r}"
        ) from error


def _half(name: str, modules: list[ModuleType], base: str) -> type:
    """Return the class of the modules that extends `base` and that no other of them extends."""
    found = {
        half
        for module in modules
        for _, half in inspect.getmembers(module, inspect.isclass)
        if base in {c.__name__ for c in half.__mro__[1:]}
    }
    last = [half for half in found if not any(half in other.__mro__[1:] for other in found)]
    if len(last) != 1:
        names = ", ".join(sorted(half.__name__ for half in last)) or "none"
        raise SettingsError(
            f"setting 'method' = '{name}': {modules[0].__name__} must hold one class that extends "
            f"{base} of {HALVES[base]}, it holds {names}"
        )
    return last[0]
