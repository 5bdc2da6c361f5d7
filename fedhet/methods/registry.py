"""Finds methods by name: the classes of their server and client halves.

A built-in method is fedhet/strategies/<m>.py and fedhet/clients/<m>.py. An external method is a
module that holds both halves, named by its import path, `package.module`, or by an entry point of
the group `fedhet.methods`. This package imports methods by name and depends on none of them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pydantic.fields import FieldInfo

from fedhet.errors import SettingsError, nearest, where_looked
from fedhet.kinds import Kind
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import MethodSettings
from fedhet.wire.contract import Sizes

if TYPE_CHECKING:  # imports Flower, which the commands that only list methods do without
    from fedhet.wire.identity import ClientInfo

GROUP = "fedhet.methods"
"""The entry-point group by which a package adds methods: name = "package.module"."""
PACKAGES = ("fedhet.strategies", "fedhet.clients")
"""The packages that hold the halves of the built-in methods."""
TABLE_POOL = "mlp,mlp2,mlp3"
"""The default pool of models where the data is a table."""
TABLE_MODEL = "mlp"
"""The same for a method whose clients must have one architecture."""
TABLE_POOL_OF_ANY = "sk-tree,sk-svm,sk-gam,sk-mlp"
"""The same for a method whose models need no gradients: CoFED's four kinds, Section 5.7."""
TEXT_POOL = "text-bag,text-cnn,text-gru,text-lstm,text-transformer"
"""The default pool of models of texts."""
TEXT_MODEL = "text-cnn"
"""The same for a method whose clients must have one architecture."""
SIGNAL_POOL = "signal-cnn2,signal-cnn3,signal-gru,signal-resnet,mlp"
"""The default pool of models of signals."""
SIGNAL_MODEL = "signal-cnn2"
"""The same for a method whose clients must have one architecture."""
HALVES = {"HetStrategy": "fedhet.strategies.base", "HetClient": "fedhet.clients.base"}
"""The base class of each half, and its module."""


def plain_sizes(settings: Any, client: ClientInfo) -> Sizes:
    """Return the sizes of messages without features or weights: C, the number of classes."""
    return Sizes({"C": client.classes})


@dataclass(frozen=True)
class MethodSpec:
    """A method's declaration."""

    title: str
    """One line on what the method does."""
    paper: str
    headline: Literal["personal", "common"]
    """The protocol of the method's headline number."""
    settings: type[MethodSettings] = MethodSettings
    """The method's settings; both halves read them."""
    sizes: Callable[[Any, ClientInfo], Sizes] = plain_sizes
    """Returns the sizes of messages that follow from the method's settings and a client."""
    kinds: tuple[str, ...] = ("private",)
    """The kinds of model that the method's clients evaluate."""
    needs_public: bool = False
    """Whether the method needs public data."""
    needs_unlabelled: bool = False
    """Whether the method needs unlabelled samples of the clients' own."""
    semi: bool = True
    """Whether its clients may learn from unlabelled samples as `training.semi` says."""
    one_model: bool = False
    """Whether all clients must have the same architecture."""
    default_model: str = ""
    """The default model of all clients; empty: the usual pool."""
    table_model: str = ""
    """The default model of all clients where the data is a table; empty: as for other methods."""
    table_settings: Mapping[str, str] = field(default_factory=dict)
    """Defaults of the method's own settings where the data is a table, by name: its models."""
    text_model: str = ""
    """As `table_model`, where the data is text."""
    text_settings: Mapping[str, str] = field(default_factory=dict)
    """As `table_settings`, where the data is text."""
    signal_model: str = ""
    """As `table_model`, where the data is signals."""
    signal_settings: Mapping[str, str] = field(default_factory=dict)
    """As `table_settings`, where the data is signals."""
    any_model: bool = False
    """Whether only `fit_private` trains a client's model, so that it needs no gradients."""
    large_messages: bool = False
    """Whether each client's messages are large and its own, such as models.

    If so, an instruction is made just before it is sent, and replies are stored on disk.
    """
    simulation_only: bool = False
    """Whether the method runs in a simulation alone, as it needs all clients' data in one place."""

    def pool(self, kind: Kind) -> str:
        """Return the default pool of models for a kind of data."""
        if kind == "image":
            return self.default_model or RunSettings().models.pool
        own, model, pool = {
            "table": (self.table_model, TABLE_MODEL, TABLE_POOL),
            "text": (self.text_model, TEXT_MODEL, TEXT_POOL),
            "signal": (self.signal_model, SIGNAL_MODEL, SIGNAL_POOL),
        }[kind]
        usual = TABLE_POOL_OF_ANY if kind == "table" and self.any_model else pool
        return own or (model if self.one_model else usual)

    def own_models(self, kind: Kind) -> Mapping[str, str]:
        """Return the defaults of the method's own settings that name models, for a kind of data."""
        own = {
            "table": self.table_settings,
            "text": self.text_settings,
            "signal": self.signal_settings,
        }
        return own.get(kind, {})


@dataclass(frozen=True)
class Method:
    """A method: the classes of its server half and of its client half."""

    name: str
    strategy: Any
    client: Any

    @property
    def spec(self) -> MethodSpec:
        """Return the method's declaration."""
        return self.strategy.spec  # type: ignore[no-any-return]

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
    """Return the names of the built-in methods."""
    halves = [
        {m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)}
        for package in PACKAGES
    ]
    return frozenset(name.replace("_", "-") for name in (halves[0] & halves[1]) - {"base"})


def _installed() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP)}


@cache
def find_method(name: str) -> Method:
    """Return the method of that name. Raises SettingsError if it cannot be found or loaded."""
    module, table = name.replace("-", "_"), table_of_method(name)
    if table in {full.partition(".")[0] for full in RunSettings.fields()}:
        rule = f"'{table}' is the name of a table of settings, or of a setting, of every run"
        raise SettingsError(f"setting 'method' = '{name}' is not allowed: {rule}")
    if name in shipped_names():
        modules = [importlib.import_module(f"{half}.{module}") for half in PACKAGES]
    elif name in _installed() or "." in name:
        modules = [_imported(name, _installed().get(name, name))]
    else:
        known = ", ".join(method_names())
        raise SettingsError(
            f"setting 'method' = '{name}' does not exist: it takes one of {known}, or a module's "
            f"name, package.module{nearest(name, method_names())}"
        )
    return Method(name, *(_half(name, modules, base) for base in HALVES))


def table_of_method(name: str) -> str:
    """Return the name of a method's settings table: the method's name without its package."""
    return name.rpartition(".")[2].replace("_", "-")


def _imported(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:  # a third-party module may raise anything
        raise SettingsError(
            f"setting 'method' = '{name}': cannot import '{path}': {error!r}"
            f"{where_looked(error, path)}"
        ) from error


def _half(name: str, modules: list[ModuleType], base: str) -> type:
    """Return the one class in the modules that extends `base` and has no subclass among them."""
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
