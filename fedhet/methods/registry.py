"""Registry of built-in and external methods.

A built-in method consists of three modules: its declaration in `fedhet/methods`, its strategy in
`fedhet/strategies` and its client in `fedhet/clients`. The strategy and the client are imported on
first use. If a method extends another method, its declaration sets `EXTENDS` to the name of the
other method. The extending method may then omit its strategy or its client, and uses the class of
the other method instead.

An external method is one module that contains a strategy and a client; the strategy's `spec` is
the declaration, except claims of privacy for another client class. The setting `method` contains
the import path of the module, `package.module`, or the name of an entry point in the group
`fedhet.methods`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from pydantic.fields import FieldInfo

from fedhet.base.errors import (
    SettingsError,
    describe_error,
    error_location,
    import_hint,
    unknown_name,
)
from fedhet.methods.spec import MethodSpec
from fedhet.settings.run import RunSettings

GROUP = "fedhet.methods"
"""Entry-point group in which packages register methods, in the form name = "package.module"."""
PACKAGE = "fedhet.methods"
"""Package that contains the built-in declarations, this module, and `spec`."""
SIDES = ("fedhet.strategies", "fedhet.clients")
"""Packages that contain the built-in strategies and clients."""
BASES = {"HetStrategy": "fedhet.strategies.base", "HetClient": "fedhet.clients.base"}
"""Modules that define the base classes of strategies and clients."""


@dataclass(frozen=True)
class Method:
    """Registered method, with its declaration, its strategy class and its client class."""

    name: str
    spec: MethodSpec = field(hash=False)
    modules: tuple[str, str]
    """Modules that define the strategy and the client."""

    @cached_property
    def strategy(self) -> Any:
        """Strategy class of the method, imported on first use."""
        return _find_class(self.name, self.modules[0], "HetStrategy")

    @cached_property
    def client(self) -> Any:
        """Client class of the method, imported on first use."""
        return _find_class(self.name, self.modules[1], "HetClient")

    @property
    def table(self) -> str:
        """Name of the method's settings table, i.e. the method's name without the package."""
        return _table(self.name)

    def settings(self) -> dict[str, FieldInfo]:
        """Return the method's settings by full name, e.g. `felo.alpha`."""
        return {f"{self.table}.{name}": info for name, info in self.spec.settings.fields().items()}


@cache
def method_names() -> tuple[str, ...]:
    """Return the names of the built-in methods and of the methods in installed packages."""
    return tuple(sorted({*shipped_names(), *_installed()}))


@cache
def shipped_names() -> frozenset[str]:
    """Return the names of the built-in methods, derived from the modules in `fedhet/methods`."""
    package = importlib.import_module(PACKAGE)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return frozenset(name.replace("_", "-") for name in modules - {"registry", "spec"})


def _installed() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP)}


@cache
def all_methods() -> tuple[dict[str, Method], tuple[str, ...]]:
    """Return all methods by name, and an error message for each method that cannot be loaded."""
    methods, errors = {}, []
    for name in method_names():
        try:
            methods[name] = find_method(name)
        except SettingsError as error:  # A broken package must not hide the remaining methods.
            errors.append(str(error))
    return methods, tuple(errors)


@cache
def find_method(name: str) -> Method:
    """Find a method by its name or import path.

    Args:
        name: Name of a built-in or installed method, or the import path of an external method.

    Returns:
        The method. An external method is imported; a built-in method imports its strategy and its
        client on first use.

    Raises:
        SettingsError: If the method is unknown or cannot be loaded, or if its settings table would
            have the same name as a setting or settings table of every run.
    """
    table, reserved = _table(name), {full.partition(".")[0] for full in RunSettings.fields()}
    if table in reserved:
        rule = f"must not be named like the setting or settings table '{table}' of every run"
        raise SettingsError(f"setting 'method': {rule}, got '{name}'")
    if name in shipped_names():
        module = name.replace("-", "_")
        declaration = importlib.import_module(f"{PACKAGE}.{module}")
        strategy, client = (
            f"{side}.{module if find_spec(f'{side}.{module}') else declaration.EXTENDS}"
            for side in SIDES
        )
        return Method(name, declaration.SPEC, (strategy, client))
    if name in _installed() or "." in name:
        return _load_external(name, _installed().get(name, name))
    hint = "`fedhet methods` lists all methods; a custom method is given as package.module"
    raise SettingsError(unknown_name("method", name, method_names(), hint))


def _table(name: str) -> str:
    return name.rpartition(".")[2].replace("_", "-")


def _load_external(name: str, path: str) -> Method:
    try:
        importlib.import_module(path)
    except (Exception, SystemExit) as error:  # A third-party module may raise any exception.
        raise SettingsError(
            f"setting 'method' = '{name}': cannot import '{path}'{error_location(error, path)}: "
            f"{describe_error(error)}{import_hint(error, path)}"
        ) from error
    strategy, client = (_find_class(name, path, base) for base in BASES)
    if not isinstance(spec := getattr(strategy, "spec", None), MethodSpec):
        raise SettingsError(
            f"setting 'method' = '{name}': {path}.{strategy.__name__}.spec must be an instance of "
            f"fedhet.methods.spec.MethodSpec, got {spec!r}"
        )
    spec = spec.claimed_by(f"{client.__module__}.{client.__qualname__}")
    return Method(name, spec, (path, path))


def _find_class(name: str, path: str, base: str) -> Any:
    """Return the only class in a module that extends `base` and has no subclass in the module.

    Compares class names, so that the module that defines `base` need not be imported. Raises
    SettingsError if there is not exactly one such class.
    """
    classes = {
        member for _, member in inspect.getmembers(importlib.import_module(path), inspect.isclass)
    }
    derived = {cls for cls in classes if base in {parent.__name__ for parent in cls.__mro__[1:]}}
    leaves = [cls for cls in derived if not any(cls in other.__mro__[1:] for other in derived)]
    if len(leaves) != 1:
        names = ", ".join(sorted(cls.__name__ for cls in leaves)) or "none"
        raise SettingsError(
            f"setting 'method' = '{name}': expected exactly one subclass of {BASES[base]}.{base} "
            f"in {path}, got {names}"
        )
    # A state that is saved but not restored, or the reverse, would change resumed runs.
    defined = [name for name in ("state_dict", "load_state_dict") if name in vars(leaves[0])]
    if base == "HetStrategy" and len(defined) == 1:
        raise SettingsError(
            f"setting 'method' = '{name}': {leaves[0].__name__} in {path} must define both "
            f"state_dict and load_state_dict, or neither, got only {defined[0]}"
        )
    return leaves[0]
