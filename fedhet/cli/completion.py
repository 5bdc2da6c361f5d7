"""Shell completion: methods, presets, and settings with their values."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args, get_origin

from fedhet.config.sources import all_settings, preset_names
from fedhet.methods.registry import all_methods

Found = list[tuple[str, str]]
"""The completions, each with its description."""


def methods(incomplete: str) -> Found:
    """Return the methods whose names start with `incomplete`."""
    known = all_methods()[0].values()
    return [(each.name, each.spec.title) for each in known if each.name.startswith(incomplete)]


def presets(incomplete: str) -> Found:
    """Return the presets whose names start with the last in a comma-separated text."""
    before, comma, last = incomplete.rpartition(",")
    return [
        (f"{before}{comma}{name}", line)
        for name, line in preset_names().items()
        if name.startswith(last)
    ]


def settings(incomplete: str) -> Found:
    """Return the settings as `KEY=` or, after the sign, the values of a setting that has few."""
    name, sign, value = incomplete.partition("=")
    known = all_settings()
    if not sign:
        leaves = Counter(full.rpartition(".")[2] for full in known)
        named = {leaf: full for full in known if leaves[leaf := full.rpartition(".")[2]] == 1}
        named |= {full: full for full in known}
        return [
            (f"{short}=", known[full].description or "")
            for short, full in named.items()
            if short.startswith(name)
        ]
    ending = [full for full in known if full == name or full.endswith(f".{name}")]
    kind = known[ending[0]].annotation if len(ending) == 1 else None
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    choices = ("true", "false") if kind is bool else choices
    return [(f"{name}={each}", "") for each in choices if str(each).startswith(value)]
