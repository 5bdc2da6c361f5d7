"""fedhet from Python: `fedhet.run`, `fedhet.load` and `fedhet.compare`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fedhet import report
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import full_name, layered, of_method, of_run, overlaid
from fedhet.errors import SettingsError
from fedhet.inference.result import ComparedRuns, Result
from fedhet.methods.registry import find_method
from fedhet.metrics import ACCURACY
from fedhet.objects import dataset_name, hold, method_name, model_name
from fedhet.runs.display import display_on
from fedhet.runs.log import Watcher
from fedhet.server_app import run_directory
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import flatten
from fedhet.simulate import simulate

BACKEND = "engine.backend"


def run(
    method: Any = None,
    *,
    clients: int | None = None,
    rounds: int | None = None,
    models: Any = None,
    dataset: Any = None,
    seed: int | None = None,
    backend: str | None = None,
    out: str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    resume: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
    watchers: Iterable[Watcher] = (),
) -> Result:
    """Train a federation on this machine, as `fedhet run` does, and return its result.

    `settings` are others by their names, such as `{"training.lr": 0.01}`; a name's last part is
    enough where it is unique. What is given here takes precedence over `config`, a TOML file, and
    that over `preset`.

    Python objects may stand for names. `models` is one or a list of names, and of functions
    (shape, classes) that return an extractor and a classifier. `dataset` may be a `fedhet.Dataset`,
    a pair (x, y), a mapping of `train` and `test` to such pairs, or a function that returns one of
    these. `method` may be a module, or a pair of classes (strategy, client). With the backend
    "ray" such an object must be at the top level of a module, from which the workers import it;
    with "inline" it may be any.

    `resume` is the directory of a run that goes on after its last whole round, with its own
    settings; what is given here may add rounds, and change where it runs.

    `progress` shows the rounds as they end. `watchers` are told of the run's events too; see
    `fedhet.runs.log.Watcher`. Raises FedhetError, with one line that says what is
    wrong, before any training if this machine cannot run it.
    """
    given = {
        "clients": clients, "rounds": rounds, "models.pool": models, "data.dataset": dataset,
        "seed": seed, BACKEND: backend, "out": None if out is None else str(out),
    }  # fmt: skip
    sources = _Sources(preset, config, resume)
    chosen = _resolved(method, given, sources, flatten(settings or {}))
    with display_on(Console()) if progress else contextlib.nullcontext(Watcher()) as display:
        return Result(simulate(chosen, run_directory(chosen), [display, *watchers]))


def load(directory: str | Path, *, objects: Mapping[str, Any] | None = None) -> Result:
    """Return the result of a run from its directory; of an interrupted one, what there is.

    `objects`: the Python objects that the run was given, by the names it has for them, such as
    `{"tiny": tiny}` for a model "fedhet.objects:tiny"; they are needed in another process than the
    run's, and only for what uses the models. Raises StateError if it is no run's directory.
    """
    hold(objects or {})
    return Result(report.load_run(Path(directory)))


def compare(
    runs: Iterable[Result | str | Path],
    *,
    out: str | Path | None = None,
    target: float | None = None,
    kind: str | None = None,
    protocol: str | None = None,
    against: str | None = None,
    metric: str = ACCURACY,
) -> ComparedRuns:
    """Compare runs, as `fedhet compare` does; runs of several seeds are grouped.

    `runs` are results, or directories of runs. With `out` the page and the figure are written
    there. For the others see `fedhet.report.compare`, whose errors it raises.
    """
    places = [each.directory if isinstance(each, Result) else each for each in runs]
    return ComparedRuns(
        report.compare(places, out, target, kind, protocol=protocol, against=against, metric=metric)
    )


@dataclass(frozen=True)
class _Sources:
    """Where settings come from beside what is given by name."""

    preset: str | None
    config: str | Path | None
    resume: str | Path | None

    def values(self, method: str | None) -> dict[str, object]:
        """Return their settings, as a run of `method` has them. Raises FedhetError."""
        if self.resume is None:
            path = None if self.config is None else Path(self.config)
            return layered(self.preset, path, method)
        values = of_run(Path(self.resume))
        return values if method is None else of_method(values, method)


def _resolved(
    method: Any,
    given: Mapping[str, Any],
    sources: _Sources,
    settings: Mapping[str, Any],
) -> Config:
    """Return the run's settings, Python objects replaced by names. Raises SettingsError."""
    inline = _backend(given, settings, sources.values(None)) == "inline"
    named = None if method is None else method_name(method, inline=inline)
    values = sources.values(named)
    if "method" not in values:
        raise SettingsError("which method? fedhet.run('felo', ...); `fedhet methods` lists them")
    known = RunSettings.fields() | find_method(str(values["method"])).settings()
    chosen = {name: value for name, value in given.items() if value is not None}
    for key, value in settings.items():
        name = full_name(key, known)
        if name in chosen:
            raise SettingsError(f"setting '{name}' is given twice, the second time as {value!r}")
        chosen[name] = value
    if sources.resume is not None and (sources.preset or sources.config or "out" in chosen):
        raise SettingsError(
            "resume takes the settings from the run's directory: preset, config and out do not go "
            "with it"
        )
    return resolve(overlaid(values, {k: _named(k, v, inline) for k, v in chosen.items()}))


def _backend(*sources: Mapping[str, Any]) -> object:
    """Return the backend that the first of the sources names."""
    for source in sources:
        for name in (BACKEND, "backend"):
            if source.get(name) is not None:
                return source[name]
    return RunSettings().engine.backend


def _named(setting: str, value: Any, inline: bool) -> Any:
    """Return a setting's value with names for objects, as TOML could have it."""
    if setting == "data.dataset":
        return dataset_name(value, inline=inline)
    if setting == "models.pool":
        several = value if isinstance(value, list | tuple) else [value]
        return [model_name(each, inline=inline) for each in several]
    return str(value) if isinstance(value, Path) else value
