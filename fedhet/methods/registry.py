"""Finds methods by name.

A built-in method is fedhet/methods/<m>.py, its declaration, with its halves strategies/<m>.py and
clients/<m>.py, which are imported on first use. An external method is a module that holds both
halves, named by its import path, `package.module`, or by an entry point of the group
`fedhet.methods`; it declares itself by its strategy's `spec`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import Any

from pydantic.fields import FieldInfo

from fedhet.base.errors import SettingsError, place_of, typed, unknown_name, where_looked
from fedhet.methods.spec import MethodSpec
from fedhet.settings.run import RunSettings

GROUP = "fedhet.methods"
"""The entry-point group by which a package adds methods: name = "package.module"."""
PACKAGES = ("fedhet.methods", "fedhet.strategies", "fedhet.clients")
"""The packages that hold the built-in methods: their declarations, and both halves."""
HALVES = {"HetStrategy": "fedhet.strategies.base", "HetClient": "fedhet.clients.base"}
"""The base class of each half, and its module."""


@dataclass(frozen=True)
class Method:
    """A method: its declaration, and the classes of its halves, imported on first use."""

    name: str
    spec: MethodSpec = field(hash=False)
    modules: tuple[str, str]
    """The modules of the server half and of the client half."""

    @cached_property
    def strategy(self) -> Any:
        """Return the class of the server half."""
        return _half(self.name, self.modules[0], "HetStrategy")

    @cached_property
    def client(self) -> Any:
        """Return the class of the client half."""
        return _half(self.name, self.modules[1], "HetClient")

    @property
    def table(self) -> str:
        """Return the name of the method's settings table."""
        return table_of_method(self.name)

    def settings(self) -> dict[str, FieldInfo]:
        """Return the method's settings by their full names, e.g. `felo.alpha`."""
        return {f"{self.table}.{name}": info for name, info in self.spec.settings.fields().items()}


@cache
def method_names() -> tuple[str, ...]:
    """Return the names of all methods: built-in, and of installed packages."""
    return tuple(sorted({*shipped_names(), *_installed()}))


@cache
def shipped_names() -> frozenset[str]:
    """Return the names of the built-in methods: of the modules that all PACKAGES have."""
    modules = [
        {found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__)}
        for package in PACKAGES
    ]
    return frozenset(name.replace("_", "-") for name in set.intersection(*modules))


def _installed() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP)}


@cache
def all_methods() -> tuple[dict[str, Method], tuple[str, ...]]:
    """Return all methods that can be loaded, by name, and what is wrong with the others."""
    found, faults = {}, []
    for name in method_names():
        try:
            found[name] = find_method(name)
        except SettingsError as error:  # of an installed package; it must not hinder the others
            faults.append(str(error))
    return found, tuple(faults)


@cache
def find_method(name: str) -> Method:
    """Return the method of that name. Raises SettingsError if it cannot be found or loaded."""
    table, taken = table_of_method(name), {full.partition(".")[0] for full in RunSettings.fields()}
    if table in taken:
        rule = f"'{table}' is the name of a table of settings, or of a setting, of every run"
        raise SettingsError(f"setting 'method' = '{name}' is not allowed: {rule}")
    if name in shipped_names():
        declared, *halves = (f"{package}.{name.replace('-', '_')}" for package in PACKAGES)
        return Method(name, importlib.import_module(declared).SPEC, (halves[0], halves[1]))
    if name in _installed() or "." in name:
        return _external(name, _installed().get(name, name))
    listing = "`fedhet methods` lists all, and package.module names one of your own"
    raise SettingsError(unknown_name("method", name, method_names(), listing))


def table_of_method(name: str) -> str:
    """Return the name of a method's settings table: the method's name without its package."""
    return name.rpartition(".")[2].replace("_", "-")


def _external(name: str, path: str) -> Method:
    """Return the method in a module of its own, which is imported."""
    try:
        importlib.import_module(path)
    except Exception as error:  # a third-party module may raise anything
        raise SettingsError(
            f"setting 'method' = '{name}': cannot import '{path}'{place_of(error, path)}: "
            f"{typed(error)}{where_looked(error, path)}"
        ) from error
    strategy, _ = (_half(name, path, base) for base in HALVES)
    if not isinstance(spec := getattr(strategy, "spec", None), MethodSpec):
        raise SettingsError(
            f"setting 'method' = '{name}': {strategy.__name__} of {path} must set 'spec' to a "
            "MethodSpec of fedhet.methods.spec"
        )
    return Method(name, spec, (path, path))


def _half(name: str, path: str, base: str) -> Any:
    """Return the one class in a module that extends `base` and has no subclass in it.

    The module of `base` is not imported for it.
    """
    classes = {
        half for _, half in inspect.getmembers(importlib.import_module(path), inspect.isclass)
    }
    found = {half for half in classes if base in {c.__name__ for c in half.__mro__[1:]}}
    last = [half for half in found if not any(half in other.__mro__[1:] for other in found)]
    if len(last) != 1:
        names = ", ".join(sorted(half.__name__ for half in last)) or "none"
        raise SettingsError(
            f"setting 'method' = '{name}': {path} must hold one class that extends "
            f"{base} of {HALVES[base]}, it holds {names}"
        )
    return last[0]
