"""Finds a method's two halves by name: strategies/<m>.py and clients/<m>.py.

The only room of `fedhet` that knows there are methods; it knows none of them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from fedhet.config.schema import MethodSettings
from fedhet.errors import SettingsError, nearest
from fedhet.wire.contract import Contract

_SHARED_ROOMS = frozenset({"base", "courier", "roster"})


@dataclass(frozen=True)
class Method:
    """A method: the classes of its server half and of its client half."""

    name: str
    strategy: Any
    client: Any

    @property
    def title(self) -> str:
        """Return one line on what the method does."""
        return str(self.strategy.title)

    @property
    def paper(self) -> str:
        """Return the citation."""
        return str(self.strategy.paper)

    @property
    def headline(self) -> str:
        """Return the protocol of the method's headline number: personal or common."""
        return str(self.strategy.headline)

    @property
    def needs_public(self) -> bool:
        """Tell whether the method works on public data."""
        return bool(self.strategy.needs_public)

    @property
    def any_model(self) -> bool:
        """Tell whether its clients may have models without gradients."""
        return bool(self.client.any_model)

    def fixed_rounds(self, settings: MethodSettings) -> int | None:
        """Return the rounds that the method takes by its own server settings; None: any."""
        return self.strategy.fixed_rounds(settings)  # type: ignore[no-any-return]

    @property
    def needs_unlabelled(self) -> bool:
        """Tell whether the method works on samples without labels."""
        return bool(self.strategy.needs_unlabelled)

    @property
    def default_model(self) -> str:
        """Return the model of all clients where none is chosen; empty: the usual pool."""
        return str(self.strategy.default_model)

    @property
    def server_settings(self) -> type[MethodSettings]:
        """Return the settings that the server half reads."""
        return self.strategy.settings_type  # type: ignore[no-any-return]

    @property
    def client_settings(self) -> type[MethodSettings]:
        """Return the settings that the client half reads."""
        return self.client.settings_type  # type: ignore[no-any-return]

    @property
    def server_sends(self) -> Contract:
        """Return the fields of the server's messages."""
        return self.strategy.sends  # type: ignore[no-any-return]

    @property
    def client_sends(self) -> Contract:
        """Return the fields of the clients' messages."""
        return self.client.sends  # type: ignore[no-any-return]

    def settings(self) -> dict[str, FieldInfo]:
        """Return the settings of both halves under their full names, e.g. `felo.alpha`.

        Raises TypeError if both halves declare a setting, but not the same.
        """
        server, client = self.server_settings.fields(), self.client_settings.fields()
        for name in server.keys() & client.keys():
            if repr(server[name]) != repr(client[name]):
                raise TypeError(f"{self.name}: the halves declare '{name}' differently")
        return {f"{self.name}.{name}": info for name, info in {**server, **client}.items()}


@cache
def method_names() -> tuple[str, ...]:
    """Return the names of all methods that have both halves."""
    halves = [
        {m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)}
        for package in ("strategies", "clients")
    ]
    return tuple(sorted(n.replace("_", "-") for n in (halves[0] & halves[1]) - _SHARED_ROOMS))


@cache
def find_method(name: str) -> Method:
    """Return the method of that name. Raises SettingsError naming the nearest that exists."""
    if name not in method_names():
        known = ", ".join(method_names())
        raise SettingsError(
            f"setting 'method' = '{name}' does not exist: it takes one of {known}"
            f"{nearest(name, method_names())}"
        )
    module = name.replace("-", "_")
    return Method(
        name,
        strategy=_half(f"strategies.{module}", "HetStrategy"),
        client=_half(f"clients.{module}", "HetClient"),
    )


def _half(module_name: str, base: str) -> type:
    """Return the one class of a module that extends `base`."""
    module = importlib.import_module(module_name)
    halves = [
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module_name and base in {c.__name__ for c in found.__mro__[1:]}
    ]
    if len(halves) != 1:
        raise TypeError(f"{module_name} must define one {base}, it defines {len(halves)}")
    return halves[0]
