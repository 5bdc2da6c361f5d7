"""Parses the values that `fedhet sweep` gives to a setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import product
from math import prod

from fedhet.base.errors import SettingsError
from fedhet.config.sources import full_name
from fedhet.methods.registry import find_method
from fedhet.settings.run import RunSettings
from fedhet.settings.text import as_text, read_text

MOST_VALUES = 1000
OF_EACH_RUN = {
    "seed": "give its seeds by --seeds",
    "out": "give its directory by --out",
    "resume": "finished runs are kept, and interrupted ones continue",
}
"""The settings that a command of many runs gives to each of them itself."""


def refuse_of_each_run(names: Iterable[str]) -> None:
    """Raise SettingsError for a setting that a command of many runs gives to each itself."""
    for name in names:
        if name in OF_EACH_RUN:
            raise SettingsError(f"the setting '{name}' is each run's own: {OF_EACH_RUN[name]}")


def read_sweep(text: str, method: str) -> tuple[str, list[object]]:
    """Return the setting and values of "KEY=a,b,c" or "KEY=START:STOP:STEP", both ends included.

    Raises SettingsError for another form, an unknown setting, or a repeated value.
    """
    name, sign, spelled = text.partition("=")
    known = RunSettings.fields() | find_method(method).settings()
    if not sign or not spelled:
        raise SettingsError(f"expected KEY=START:STOP:STEP or KEY=a,b,c, got '{text}'")
    name = full_name(name.strip(), known)
    if name not in known:
        raise SettingsError(f"setting '{name}' is not one of {method}, the run's method")
    refuse_of_each_run([name])
    parts = _steps(text, spelled.split(":")) if ":" in spelled else spelled.split(",")
    values = [_one(read_text(name, known[name], part.strip())) for part in parts]
    if len(set(map(str, values))) != len(values):
        raise SettingsError(f"sweep '{text}' gives a value twice")
    return name, values


def read_grid(texts: Sequence[str], method: str) -> dict[str, list[object]]:
    """Return the settings of a sweep with their values, of which it runs all combinations.

    Raises SettingsError as `read_sweep` does, for a setting that is given twice, and for more
    points than a sweep may have.
    """
    grid: dict[str, list[object]] = {}
    for text in texts:
        name, values = read_sweep(text, method)
        if name in grid:
            raise SettingsError(f"sweep '{text}' gives '{name}' a second time")
        grid[name] = values
    if (points := prod(map(len, grid.values()))) > MOST_VALUES:
        raise SettingsError(f"a sweep has at most {MOST_VALUES} points; this one has {points}")
    return grid


def check_names(grid: Mapping[str, Sequence[object]]) -> None:
    """Raise SettingsError if two points of a sweep have the same name as a folder."""
    points = list(product(*grid.values()))
    if len(set(map(point_name, points))) < len(points):
        raise SettingsError("two values of the sweep would have the same folder")


def point_name(point: Sequence[object]) -> str:
    """Return a combination of values as a valid folder name."""
    return "_".join(map(folder_name, point))


def folder_name(value: object) -> str:
    """Return a value as a valid folder name."""
    text = as_text(value) if isinstance(value, tuple) else str(value)
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in text)
    return kept.lstrip("._-")[:60] or "empty"


def _one(value: object) -> object:
    """Return the value of a list of one, which the setting accepts too."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _steps(text: str, ends: list[str]) -> list[str]:
    """Return START, START + STEP, ... up to STOP, in decimal arithmetic: 0.3 is exactly 0.3."""
    try:
        start, stop, step = (Decimal(end.strip()) for end in ends)
        if not all(each.is_finite() for each in (start, stop, step)):
            raise ValueError(text)
    except (ValueError, InvalidOperation):
        raise SettingsError(f"sweep '{text}': START:STOP:STEP must be three numbers") from None
    if not (step > 0 and start <= stop and (stop - start) / step < MOST_VALUES):
        raise SettingsError(f"sweep '{text}' must ascend, by 1 to {MOST_VALUES} values")
    return [str(start + n * step) for n in range(int((stop - start) / step) + 1)]
