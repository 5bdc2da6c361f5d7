"""Names for models, datasets and methods that a user passes to `fedhet.run` as objects.

Settings can store only names. The name of an importable object is its import path. Any other object
is registered as an attribute of this module, for this process only.
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
from fedhet.data.sources.python import PYTHON

HERE = __name__
_registry: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    if name in _registry:
        return _registry[name]
    if name.startswith("_"):
        raise AttributeError(name)
    raise _missing([name])


def check_registered(settings: Mapping[str, object]) -> None:
    """Raise SettingsError if an object that the settings name is not registered."""
    names = re.findall(rf"{re.escape(HERE)}[:.](\w+)", " ".join(map(str, settings.values())))
    if missing := [name for name in dict.fromkeys(names) if name not in _registry]:
        raise _missing(missing)


def _missing(names: Sequence[str]) -> SettingsError:
    objects = "object" if len(names) == 1 else "objects"
    items = ", ".join(f"'{name}': ..." for name in names)
    return SettingsError(
        f"Python {objects} of the run: not found in this process. Pass the {objects} again with "
        f"fedhet.load(DIR, objects={{{items}}})."
    )


def model_name(model: object, *, inline: bool) -> str:
    """Return the name of a model that is given as a name or as a function.

    Raises SettingsError if `model` is another object, or if it is a function that workers cannot
    import and the run is not `inline`.
    """
    if isinstance(model, str):
        return model
    if not callable(model) or hasattr(model, "parameters"):
        raise SettingsError(
            "models: expected names, or functions of (shape, classes) that return an extractor and "
            f"a classifier, got {type(model).__name__}"
        )
    return _import_path(model) or _registered_path(model, "models", inline)


def dataset_name(data: object, *, inline: bool) -> str:
    """Return the name of a dataset that is given as a name, as data, or as a function.

    Unless the run is `inline`, raises SettingsError for data, and for functions that workers cannot
    import.
    """
    if isinstance(data, str):
        return data
    path = _import_path(data) if callable(data) else ""
    return f"{PYTHON}:{path or _registered_path(_loader(data), 'dataset', inline)}"


def method_name(method: object, *, inline: bool) -> str:
    """Return the name of a method that is given as a name, a module, or a pair of classes.

    The pair consists of subclasses of HetStrategy and HetClient. Raises SettingsError if the method
    is another object, or if workers cannot import it and the run is not `inline`.
    """
    if isinstance(method, str):
        return method
    if isinstance(method, ModuleType) and "." in method.__name__:
        return method.__name__
    if isinstance(method, ModuleType):
        classes, label = [v for v in vars(method).values() if isinstance(v, type)], method.__name__
    else:
        classes = list(method) if isinstance(method, tuple | list) else []
        label = getattr(next(iter(classes), None), "__name__", "").removesuffix("Strategy").lower()
    if not classes or not all(isinstance(each, type) for each in classes):
        raise SettingsError(
            "method: expected a name, a module, or a pair of classes (strategy, client), got "
            f"{type(method).__name__}"
        )
    module = _module_with(classes)
    name = _registered_path(module, "method", inline, label).partition(":")[2]
    register({name: module})
    return f"{HERE}.{name}"


def register(objects: Mapping[str, Any]) -> None:
    """Register objects under the names that they had in an earlier process.

    A method is a module or a pair of classes; a dataset is data or a function that returns data.
    """
    for name, value in objects.items():
        is_pair = isinstance(value, tuple) and all(isinstance(each, type) for each in value)
        entry = _module_with(list(value)) if is_pair else value
        if isinstance(entry, ModuleType):
            sys.modules[f"{HERE}.{name}"] = entry
        _registry[name] = entry if isinstance(entry, ModuleType) else _loader(entry)


class _Data:
    """Callable that returns the given data."""

    __name__ = "data"

    def __init__(self, data: Any) -> None:
        self.data = data

    def __call__(self) -> Any:
        return self.data


def _loader(data: Any) -> Callable[[], Any]:
    """Return a function that returns the data, i.e. `data` itself if callable, or a wrapper."""
    if callable(data):
        return data  # type: ignore[no-any-return]
    entries = (each for each in _registry.values() if isinstance(each, _Data) and each.data is data)
    return next(entries, None) or _Data(data)


def _module_with(classes: list[type]) -> ModuleType:
    """Return the registered module that contains a method's classes, or a new module."""
    for module in _registry.values():
        if isinstance(module, ModuleType) and set(classes) <= set(vars(module).values()):
            return module
    module = ModuleType("method")
    for each in classes:
        setattr(module, each.__name__, each)
    return module


def _import_path(target: Any) -> str:
    """Return the path "module:function" of an importable object, or "" for other objects."""
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return ""
    try:
        imported = getattr(importlib.import_module(module), name, None)
    except Exception:  # A user's module may raise any exception.
        return ""
    return f"{module}:{name}" if imported is target else ""


def _registered_path(target: Any, argument: str, inline: bool, label: str = "") -> str:
    """Register an object and return its path. Raises SettingsError unless the run is inline."""
    title: str = label or getattr(target, "__name__", type(target).__name__)
    if not inline:
        raise SettingsError(
            f"{argument}: Ray's workers cannot import '{title}'. Define it at the top level of a "
            "module (module:function), or use backend='inline'."
        )
    base = re.sub(r"\W+", "", title, flags=re.ASCII) or "object"
    names = itertools.chain([base], (f"{base}_{n}" for n in itertools.count(2)))
    return f"{HERE}:{next(name for name in names if _registry.setdefault(name, target) is target)}"
