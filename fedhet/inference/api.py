"""fedhet from Python: `fedhet.run`, `fedhet.load` and `fedhet.compare`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedhet import report
from fedhet.base.errors import SettingsError
from fedhet.base.metrics import ACCURACY
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import Layers, by_full_name
from fedhet.engines.simulate import baseline_of, settled_for, simulate
from fedhet.inference.objects import HERE, dataset_name, hold, method_name, model_name
from fedhet.inference.result import ComparedRuns, Result
from fedhet.runs.directory import is_complete
from fedhet.runs.display import display_on
from fedhet.runs.log import Watcher
from fedhet.server.app import run_directory
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import flatten

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
    trust: str = "",
    settings: Mapping[str, Any] | None = None,
    against: str | None = None,
    progress: bool = True,
    watchers: Iterable[Watcher] = (),
) -> Result:
    """Train a federation on this machine, as `fedhet run` does, and return its result.

    `settings` has all other settings by their names, such as `{"training.lr": 0.01}`; the last part
    of a name is enough where it is unique. Arguments take precedence over `config`, a TOML file,
    which takes precedence over `preset`.

    Python objects may stand for names. `models` is a model or a list of models: names,
    also as text such as "cnn2,mlp*3", and functions (shape, classes) that return an extractor and a
    classifier. `dataset` may be a
    `fedhet.Dataset`, a pair (x, y), a mapping of `train` and `test` to such pairs, or a function
    that returns one of these. `method` may be a module, or a pair of classes (strategy, client).
    With the backend "ray", such an object must be at the top level of a module, from which the
    workers import it. With "inline" it can be any object, and "auto" then trains in this process.

    `resume` is the directory of a run to continue after its last complete round, with its own
    settings. The arguments may add rounds, and change where it runs. Modules of your own that these
    settings name are imported if `trust` names them, comma-separated.

    `against` names a method, such as "local", that is trained on the same after it: the page shows
    both, and the result has it as `baseline`.

    `progress` shows each round as it ends. `watchers` receive the run's events too; see
    `fedhet.runs.log.Watcher`. Raises FedhetError, with one line that says what is wrong, before any
    training if this machine cannot run it.
    """
    keywords = {
        "clients": clients, "rounds": rounds, "models.pool": models, "data.dataset": dataset,
        "seed": seed, BACKEND: backend, "out": out,
    }  # fmt: skip
    given = [(name, value) for name, value in keywords.items() if value is not None]
    layers = Layers(preset, _path(config), _path(resume), trust)
    chosen = _resolved(method, [*given, *flatten(settings or {}).items()], layers)
    directory = run_directory(chosen)
    beside = None if against is None else baseline_of(chosen, directory, against)
    with _shown(progress) as display:
        found = simulate(chosen, directory, [display, *watchers])
    if beside is not None:
        place = Path(beside.run.out)
        if not is_complete(settled_for(beside, place), place):
            with _shown(progress, f"baseline {against}") as display:
                simulate(beside, place, [display])
        found = report.write(directory)
    return Result(found, trust="*")


def _shown(progress: bool, label: str = "") -> contextlib.AbstractContextManager[Watcher]:
    return display_on(Console(), label) if progress else contextlib.nullcontext(Watcher())


def load(
    directory: str | Path, *, objects: Mapping[str, Any] | None = None, trust: str = ""
) -> Result:
    """Return the result of a run from its directory; of an interrupted one, what it has recorded.

    `objects` has the Python objects that the run was given, by the names that it has for them, such
    as `{"tiny": tiny}` for a model "fedhet.inference.objects:tiny". Another process than the run's
    needs them to use the models. `trust` names the modules that the run's settings may import for
    that, comma-separated ("mymodels"); by default none but fedhet's. Raises StateError if it is
    not a run's directory.
    """
    hold(objects or {})
    return Result(report.load_run(Path(directory)), trust=trust)


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
    found = report.compare(places, target, kind, protocol=protocol, against=against, metric=metric)
    if out is not None:
        report.write_comparison(found, out)
    return ComparedRuns(found)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _resolved(method: Any, given: Sequence[tuple[str, Any]], layers: Layers) -> Config:
    """Return the run's settings, Python objects replaced by names. Raises SettingsError."""
    backend = _backend([*given, *layers.values().items()])
    inline = backend != "ray"

    def named(method: str | None) -> dict[str, object]:
        values = by_full_name(given, method)
        return {name: _named(name, value, inline) for name, value in values.items()}

    values = layers.under(named, None if method is None else method_name(method, inline=inline))
    if "method" not in values:
        raise SettingsError("METHOD is missing, as in fedhet.run('felo', ...)")
    if backend == "auto" and any(HERE in str(value) for value in values.values()):
        values[BACKEND] = "inline"  # Ray's workers cannot import an object of this process
    return resolve(values)


def _backend(given: Iterable[tuple[str, Any]]) -> object:
    """Return the backend that is named first."""
    named = (value for name, value in given if name in (BACKEND, "backend"))
    return next(named, RunSettings().engine.backend)


def _named(setting: str, value: Any, inline: bool) -> Any:
    """Return a setting's value with names for objects, as TOML could have it."""
    if setting == "data.dataset":
        return dataset_name(value, inline=inline)
    if setting == "models.pool" and not isinstance(value, str):
        several = value if isinstance(value, list | tuple) else [value]
        return [model_name(each, inline=inline) for each in several]
    return str(value) if isinstance(value, Path) else value
