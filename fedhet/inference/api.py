"""fedhet from Python: `fedhet.run`, `fedhet.load`, `fedhet.compare`, and what they return."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from torch import nn

from fedhet import report
from fedhet.base.errors import SettingsError
from fedhet.base.metrics import ACCURACY
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import by_full_name, laid_over, layered, of_method
from fedhet.engines.simulate import baseline_of, settled_for, simulate
from fedhet.inference.client import (
    Predictions,
    TrainedClient,
    clients_in,
    open_client,
    samples_for,
)
from fedhet.inference.export import export
from fedhet.inference.objects import HERE, check_held, dataset_name, hold, method_name, model_name
from fedhet.report.comparison_report import comparison_cells, paired_cells, to_dict
from fedhet.report.page import render
from fedhet.runs.directory import is_complete
from fedhet.runs.display import display_on
from fedhet.runs.log import Watcher
from fedhet.runs.records import NAN, Summary
from fedhet.runs.units import score
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
    named = [*given, *flatten(settings or {}).items()]
    chosen = _resolved(method, named, preset, _path(config), _path(resume), trust)
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


def _resolved(
    method: Any,
    given: Sequence[tuple[str, Any]],
    preset: str | None = None,
    config: Path | None = None,
    resume: Path | None = None,
    trust: str = "",
) -> Config:
    """Return the run's settings, Python objects replaced by names. Raises SettingsError."""
    values = layered(preset, config, resume, trust)
    everything = [*given, *values.items()]
    named_first = (value for name, value in everything if name in (BACKEND, "backend"))
    backend = next(named_first, RunSettings().engine.backend)
    inline = backend != "ray"
    if method is not None:
        values = of_method(values, method_name(method, inline=inline))
    named = None if "method" not in values else str(values["method"])
    chosen = by_full_name(given, named)
    chosen = {name: _named(name, value, inline) for name, value in chosen.items()}
    values = laid_over(values, chosen, resume)
    if "method" not in values:
        raise SettingsError("METHOD is missing, as in fedhet.run('felo', ...)")
    if backend == "auto" and any(HERE in str(value) for value in values.values()):
        values[BACKEND] = "inline"  # Ray's workers cannot import an object of this process
    return resolve(values)


def _named(setting: str, value: Any, inline: bool) -> Any:
    """Return a setting's value with names for objects, as TOML could have it."""
    if setting == "data.dataset":
        return dataset_name(value, inline=inline)
    if setting == "models.pool" and not isinstance(value, str):
        several = value if isinstance(value, list | tuple) else [value]
        return [model_name(each, inline=inline) for each in several]
    return str(value) if isinstance(value, Path) else value


# --- results: frames, models, and a small card


class _Frame(pd.DataFrame):  # type: ignore[misc]
    """A data frame that is printed with all its columns; what is derived from it is a plain one."""

    def __repr__(self) -> str:
        with pd.option_context("display.max_columns", None):
            return str(super().__repr__())


class Result:
    """A run on disk: its records as data frames, and its clients' models."""

    def __init__(self, run: report.Run, *, best: bool = False, trust: str = "") -> None:
        """Take what was read of the run; models are read when they are asked for.

        `best`: those after the best round, and not after the last. `trust`: see `fedhet.load`.
        """
        self._run, self._best, self._trust = run, best, trust
        self._open: dict[str, TrainedClient] = {}

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._run.path

    @property
    def settings(self) -> Mapping[str, object]:
        """The run's settings by their full names."""
        return self._run.settings

    @property
    def summary(self) -> Summary | None:
        """The content of summary.json; None if the run is unfinished."""
        return self._run.summary

    @property
    def baseline(self) -> Result | None:
        """The run that was trained beside it (`against`), or None."""
        found = self._run.baseline
        return None if found is None else Result(found, best=self._best, trust=self._trust)

    @property
    def accuracy(self) -> float:
        """The headline number: the private models' mean accuracy after the last round; or NaN."""
        return self._run.last(self._run.headline, "private").mean

    @cached_property
    def history(self) -> pd.DataFrame:
        """A row per round: means of scores and losses over the clients, bytes and seconds."""
        columns = {
            ".".join((metric, *column)): view.curve(*column)["mean"]
            for metric, view in self._views()
            for column in dict.fromkeys(
                each[:2] for r in self._run.records for each in r.each(metric)
            )
        }
        costs = self._run.costs[["bytes_up", "bytes_down", "seconds"]]
        found = pd.DataFrame(columns, index=costs.index)
        return _Frame(found.assign(loss=self._run.mean_loss).join(costs))

    def to_frame(self) -> pd.DataFrame:
        """Return a row per round, client, protocol and kind of model, with its accuracy.

        The metrics besides accuracy are further columns, NaN where a client has none.
        """
        place = ["round", "client", "model", "protocol", "kind"]
        (_, first), *others = self._views()
        found = pd.DataFrame(self._rows(first), columns=[*place, ACCURACY])
        for metric, view in others:
            found = found.merge(pd.DataFrame(self._rows(view), columns=[*place, metric]), "left")
        return found

    def _rows(self, view: report.Run) -> list[tuple[object, ...]]:
        return [
            (record.round, client, self._run.models.get(client, ""), protocol, kind, value)
            for record in view.records
            for protocol, kind, found in record.each(view.metric)
            for client, value in found.per_client.items()
        ]

    def _views(self) -> list[tuple[str, report.Run]]:
        """Return the run by what was measured: accuracy first, then the metrics besides it."""
        names = dict.fromkeys(name for record in self._run.records for name in record.metrics)
        return [(name, self._run.measuring(name)) for name in (ACCURACY, *names)]

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row per client: model, samples, rounds answered, its last loss, and its last scores."""
        run = self._run
        index = pd.Index(run.clients, name="client")
        answered = [sum(name in each.answered for each in run.records) for name in run.clients]
        about = {
            "model": [run.models.get(name, "") for name in run.clients],
            "samples": [run.samples.get(name) for name in run.clients],
            "answered": answered,
        }
        losses = run.losses.ffill()
        last = losses.iloc[-1].to_dict() if len(losses) else {}
        scores = {
            ".".join((metric, *column)): [
                view.last(*column).per_client.get(name, NAN) for name in run.clients
            ]
            for metric, view in self._views()
            for column in view.columns
        }
        loss = {"loss": [last.get(name, NAN) for name in run.clients]}
        return _Frame({**about, **loss, **scores}, index=index)

    @property
    def figures(self) -> pd.DataFrame:
        """The method's own numbers, a row per round and a column each."""
        return self._run.figures

    @property
    def plots(self) -> dict[str, Path]:
        """The images of the run's report, by name."""
        return {path.stem: path for path in sorted((self.directory / "figures").glob("*.png"))}

    def best(self) -> Result:
        """Return the same result with the clients' models as they were after the best round.

        The run must have kept them ('keep-best'); StateError is raised when one is missing.
        """
        return Result(self._run, best=True, trust=self._trust)

    def kinds(self, client: str) -> tuple[str, ...]:
        """Return the kinds of model that a client keeps. Raises as `model` does."""
        return self._client(client).kinds

    def model(self, client: str, kind: str = "private") -> nn.Module:
        """Return a client's model, as a module in evaluation mode on the processor.

        It takes x [N, *shape], scaled as in training, and returns logits [N, C], which are minus
        infinity for classes outside the client's label space. Raises StateError for a client or a
        kind that is not there.
        """
        return self._client(client).model(kind)

    def predict(self, client: str, x: Any, kind: str = "private") -> Predictions:
        """Predict samples x [N, *shape], an array or a tensor, with a client's model.

        Bytes (uint8) are scaled as in training; floats must be scaled already. Raises as `model`
        does, and DataError for samples that the model does not take.
        """
        trained = self._client(client)
        return trained.predict(samples_for(trained.record, x), kind)

    def export(
        self, client: str, out: str | Path, *, form: str = "", kind: str = "private"
    ) -> Path:
        """Write a client's model to `out` and its card next to it; return the card's path.

        `form` is safetensors, pt2 or onnx, by default as the name of `out` ends. Raises as
        `fedhet.inference.export` does.
        """
        path = Path(out)
        return export(self._client(client), form or path.suffix.lstrip("."), path, kind)

    def _client(self, name: str) -> TrainedClient:
        if name not in self._open:
            check_held(self.settings)
            self._open[name] = open_client(self.directory, name, best=self._best, trust=self._trust)
        return self._open[name]

    def __repr__(self) -> str:
        run = self._run
        state = "" if run.finished else ", unfinished"
        number = f"accuracy ({run.headline}) {score(self.accuracy)}" if run.headline else ""
        said = f"{len(run.clients)} clients, round {run.done} of {run.planned}{state}"
        return f"<Result of {run.method} on {run.dataset}: {said}; {number or 'not evaluated'}>"

    def _repr_html_(self) -> str:
        return render("card.html", run=self._run, models=clients_in(self.directory))


class ComparedRuns:
    """Runs side by side, grouped over their seeds."""

    def __init__(self, comparison: report.Comparison) -> None:
        """Take a comparison of runs."""
        self.comparison = comparison

    def to_frame(self) -> pd.DataFrame:
        """Return a row per group, best first: mean and std of its accuracies, and its cost."""
        content: Any = to_dict(self.comparison)
        metric, rows = content["metric"], []
        for group in content["groups"]:
            row = {name: group[name] for name in ("method", "dataset")}
            row["seeds"] = len(group["seeds"])
            for protocol, kinds in group[metric].items():
                for kind, spread in kinds.items():
                    for which in ("mean", "std"):
                        row[f"{metric}.{protocol}.{kind}.{which}"] = spread[which]
            costs = ("bytes_up", "bytes_down", "seconds")
            rows.append(row | {name: group[name]["mean"] for name in costs})
        labels = [group["label"] for group in content["groups"]]
        return _Frame(rows, index=pd.Index(labels, name="run"))

    def __repr__(self) -> str:
        return str(self.to_frame())

    def _repr_html_(self) -> str:
        tables = [comparison_cells(self.comparison), paired_cells(self.comparison)]
        notes = self.comparison.notes
        return render("cards.html", tables=[table for table in tables if table], notes=notes)
