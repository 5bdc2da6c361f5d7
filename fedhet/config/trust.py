"""Code that settings name, and whether those of somebody else may import it.

The settings of a run come from a server, or from a folder that may have been received. They may
name modules: a method, models, a dataset from Python. None is imported unless whoever uses the
settings has named it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedhet.base.errors import SettingsError
from fedhet.config.sources import from_flower, known_settings
from fedhet.methods.registry import method_names
from fedhet.settings.schema import A_DATASET, A_MODEL, names

TRUST_VARIABLE = "FEDHET_TRUST"
OBJECTS = "fedhet.inference.objects"
"""The module of objects that this process was given: naming them imports nothing."""
METHOD = "method"
DATASETS = ("data.dataset", "data.public-dataset")
"""The settings that name datasets."""


def code_named(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield every setting that names code to import, with what it names.

    A method in a module of its own comes first: the rest needs its settings, and imports it.
    """
    # These import PyTorch, which a command that takes its settings from nowhere else does without.
    from fedhet.data.sources import SOURCES
    from fedhet.models.user_model import is_user_model

    if (method := str(values.get(METHOD, ""))) and method not in method_names():
        yield METHOD, method
    settings = from_flower(values)
    known = known_settings(settings)
    for setting, value in settings.items():
        what = names(known[setting]) if setting in known else ""
        if what == A_DATASET:
            source, _, place = str(value).partition(":")
            if source in SOURCES and SOURCES[source].imports:
                yield setting, place
        elif what in ("", A_MODEL):  # a setting that does not say may be used as a model's name
            yield from ((setting, name) for name in _texts(value) if is_user_model(name))


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a setting's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value:
            yield from _texts(each)


def is_named(name: str, allowed: str) -> bool:
    """Return whether a comma-separated list names a module, a function of it, or everything: *."""
    listed = [each.strip() for each in allowed.split(",")]
    return "*" in listed or name in listed or name.partition(":")[0] in listed


def check_trusted(values: Mapping[str, object], trust: str, where: Path) -> None:
    """Raise SettingsError if settings that were read `where` would import what nobody trusts.

    `trust` is a list as `is_named` takes it; the environment variable FEDHET_TRUST may name more.
    """
    allowed = f"{trust},{os.environ.get(TRUST_VARIABLE, '')}"
    for setting, name in code_named(values):
        module = name.partition(":")[0]
        if module != OBJECTS and not is_named(name, allowed):
            raise SettingsError(
                f"{where}: '{setting}' names code to import, {name!r}: if you trust it, say so by "
                f"--trust {module}, in Python by trust={module!r}, or by {TRUST_VARIABLE}={module}"
            )
