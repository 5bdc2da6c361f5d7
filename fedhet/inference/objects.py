"""Python objects in place of names: models, a dataset or a method that a user passes to `run`.

Settings hold names, so that an object gets one: its import path if it can be imported, and else,
in this process alone, an attribute of this module.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from fedhet.base.errors import SettingsError
from fedhet.data.sources.files import PYTHON

HERE = __name__
_held: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    if name in _held:
        return _held[name]
    if name.startswith("_"):
        raise AttributeError(name)
    raise _missing([name])


def check_held(settings: Mapping[str, object]) -> None:
    """Raise SettingsError if settings name objects that this process does not hold."""
    named = re.findall(rf"{re.escape(HERE)}[:.](\w+)", " ".join(map(str, settings.values())))
    if lost := [name for name in dict.fromkeys(named) if name not in _held]:
        raise _missing(lost)


def _missing(names: Sequence[str]) -> SettingsError:
    them = "a Python object" if len(names) == 1 else "Python objects"
    given = ", ".join(f"'{name}': ..." for name in names)
    return SettingsError(
        f"the run was given {them} that only its own process holds: give them again, by "
        f"fedhet.load(DIR, objects={{{given}}})"
    )


def model_name(given: object, *, inline: bool) -> str:
    """Return the name of a model in a pool: a name as it is, or that of a function.

    Raises SettingsError for anything else and, unless the run is `inline`, for a function that
    workers cannot import.
    """
    if isinstance(given, str):
        return given
    if not callable(given) or hasattr(given, "parameters"):
        raise SettingsError(
            f"models: {type(given).__name__} is not a model: give names, and functions of "
            "(shape, classes) that return an extractor and a classifier"
        )
    return _path_of(given) or _held_as(given, "models", inline)


def dataset_name(given: object, *, inline: bool) -> str:
    """Return the name of a dataset: a name as it is, or that of a function or of data.

    Raises SettingsError as `model_name` does; workers cannot import data itself.
    """
    if isinstance(given, str):
        return given
    path = _path_of(given) if callable(given) else ""
    return f"{PYTHON}:{path or _held_as(_function(given), 'dataset', inline)}"


def method_name(given: object, *, inline: bool) -> str:
    """Return the name of a method: a name as it is, a module's, or that of a pair of classes.

    The pair is the server half, which extends HetStrategy, and the client half, which extends
    HetClient. Raises SettingsError as `model_name` does.
    """
    if isinstance(given, str):
        return given
    if isinstance(given, ModuleType) and "." in given.__name__:
        return given.__name__
    if isinstance(given, ModuleType):
        halves, like = [v for v in vars(given).values() if isinstance(v, type)], given.__name__
    else:
        halves = list(given) if isinstance(given, tuple | list) else []
        like = getattr(next(iter(halves), None), "__name__", "").removesuffix("Strategy").lower()
    if not halves or not all(isinstance(half, type) for half in halves):
        raise SettingsError(
            f"method: {type(given).__name__} is not a method: give a name, a module, or the two "
            "classes (strategy, client)"
        )
    module = _module_of(halves)
    name = _held_as(module, "method", inline, like).partition(":")[2]
    hold({name: module})
    return f"{HERE}.{name}"


def hold(objects: Mapping[str, Any]) -> None:
    """Hold objects under the names that an earlier process gave them.

    A method is a module or a pair of classes; data is what a function of it would return.
    """
    for name, given in objects.items():
        pair = isinstance(given, tuple) and all(isinstance(half, type) for half in given)
        held = _module_of(list(given)) if pair else given
        if isinstance(held, ModuleType):
            sys.modules[f"{HERE}.{name}"] = held
        _held[name] = held if isinstance(held, ModuleType) else _function(held)


class _Data:
    """Data as a function that returns it."""

    __name__ = "data"

    def __init__(self, given: Any) -> None:
        self.given = given

    def __call__(self) -> Any:
        return self.given


def _function(given: Any) -> Callable[[], Any]:
    """Return a function that returns the data: the given one, or one that holds the data."""
    if callable(given):
        return given  # type: ignore[no-any-return]
    held = (each for each in _held.values() if isinstance(each, _Data) and each.given is given)
    return next(held, None) or _Data(given)


def _module_of(halves: list[type]) -> ModuleType:
    """Return a module with the halves of a method: the one that has them already, or a new one."""
    for module in _held.values():
        if isinstance(module, ModuleType) and set(halves) <= set(vars(module).values()):
            return module
    module = ModuleType("method")
    for half in halves:
        setattr(module, half.__name__, half)
    return module


def _path_of(given: Any) -> str:
    """Return module:function if importing it gives this very object, or ""."""
    module, name = getattr(given, "__module__", ""), getattr(given, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return ""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception:  # what cannot be imported has no path
        return ""
    return f"{module}:{name}" if found is given else ""


def _held_as(given: Any, what: str, inline: bool, like: str = "") -> str:
    """Hold an object; return the path by which this process finds it."""
    own: str = like or getattr(given, "__name__", type(given).__name__)
    if not inline:
        raise SettingsError(
            f"{what}: '{own}' cannot be used on Ray, whose workers import what they use: put it "
            "at the top level of a module (module:function), or give backend='inline'"
        )
    base = re.sub(r"\W+", "", own, flags=re.ASCII) or "object"
    names = itertools.chain([base], (f"{base}_{n}" for n in itertools.count(2)))
    return f"{HERE}:{next(name for name in names if _held.setdefault(name, given) is given)}"
