"""Layers of settings: a preset, a file over it, and over both what is given by name.

The command line and `fedhet.run` both build a run's settings here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedhet.base.errors import SettingsError, StateError
from fedhet.config.sources import of_method, read_preset, read_toml
from fedhet.config.trust import check_trusted

PUBLIC_SOURCES = ("data.public-dataset", "data.public-fraction")


@dataclass(frozen=True)
class Layers:
    """Where settings come from, besides those that are given by name."""

    preset: str | None = None
    """The names of presets, comma-separated."""
    config: Path | None = None
    """A TOML file."""
    resume: Path | None = None
    """The directory of a resumed run, in place of the other two."""
    trust: str = ""
    """The modules that a resumed run's settings may import; see `check_trusted`."""

    def values(self, method: str | None = None) -> dict[str, object]:
        """Return the layers' settings as a run of `method` has them. Raises FedhetError."""
        if self.resume is not None:
            found = _of_run(self.resume, self.trust)
        else:
            found = read_preset(self.preset) if self.preset is not None else {}
            found |= read_toml(self.config) if self.config is not None else {}
        # So that `run local --preset felo-…` is the baseline of that experiment.
        return found if method is None else of_method(found, method)

    def under(
        self, given: Callable[[str | None], Mapping[str, object]], method: str | None
    ) -> dict[str, object]:
        """Return the layers' settings with those that are given over them.

        `given` returns settings by their full names, for the name of the run's method, or None if
        neither a layer nor `method` names it. Raises FedhetError.
        """
        values = self.values(method)
        chosen = given(str(values["method"]) if "method" in values else None)
        if self.resume is not None and (self.preset or self.config or "out" in chosen):
            raise SettingsError(
                "resume takes its settings from the run's directory, and cannot be combined with "
                "preset, config or out"
            )
        return _overlaid(values, chosen)


def _of_run(directory: Path, trust: str) -> dict[str, object]:
    path = directory / "config.toml"
    if not path.exists():
        raise StateError(f"{directory} holds no run to resume: it has no config.toml")
    found = read_toml(path)
    check_trusted(found, trust, path)
    return {**found, "resume": True, "out": str(directory)}


def _overlaid(values: Mapping[str, object], chosen: Mapping[str, object]) -> dict[str, object]:
    """Return `chosen` over `values`; a source of public data replaces the other one."""
    kept = dict(values)
    for name, rival in (PUBLIC_SOURCES, PUBLIC_SOURCES[::-1]):
        if chosen.get(name):
            kept.pop(rival, None)
    return kept | dict(chosen)
