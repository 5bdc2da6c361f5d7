"""Python API: `fedhet.run`, `fedhet.load`, `fedhet.compare`, and the objects that they return."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from torch import nn

from fedhet import report
from fedhet.base.disk import expanded
from fedhet.base.errors import SettingsError
from fedhet.base.metrics import ACCURACY, CAUSAL_LM
from fedhet.base.seeding import isolated
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import expand_names, override, read_layers, settings_for_method
from fedhet.data.sources.python import USER_CACHES as DATA_CACHES
from fedhet.engines.simulate import baseline_of, resolve_auto, simulate
from fedhet.inference.client import (
    LabeledSamples,
    PredictedNumbers,
    Predictions,
    TrainedClient,
    clients_in,
    open_models,
    read_inputs,
    read_test,
    recorded_confusion,
    samples_for,
)
from fedhet.inference.export import export
from fedhet.inference.generation import add_generated, generate
from fedhet.inference.objects import (
    HERE,
    check_registered,
    dataset_name,
    method_name,
    model_name,
    register,
)
from fedhet.models import USER_CACHES as MODEL_CACHES
from fedhet.report.comparison_report import comparison_cells, paired_cells, to_dict
from fedhet.report.page import render
from fedhet.runs.directory import is_complete
from fedhet.runs.display import display_on
from fedhet.runs.log import Watcher
from fedhet.runs.records import NAN, Summary
from fedhet.runs.units import plural, score
from fedhet.server.app import run_directory
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import flatten

BACKEND = "engine.backend"
LOG = logging.getLogger("fedhet")


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
    """Run a simulation on this machine, like `fedhet run`.

    Arguments override the settings in `config`, which override the settings in `preset`.

    Python objects can replace the names of models, datasets and methods. With the backend "ray",
    such objects must be importable from the top level of a module. With "inline", any object is
    supported; "auto" falls back to "inline" if an object is not importable.

    Args:
        method: Name of a method, a module, or a pair of classes (strategy, client).
        clients: Number of clients.
        rounds: Number of rounds.
        models: Model or list of models, assigned to the clients in turn. A model is a name, or a
            function of (shape, classes) that returns an extractor and a classifier. Text such as
            "cnn2,mlp*3" is also supported.
        dataset: Name of a dataset, a `fedhet.Dataset`, a pair (x, y), a mapping from `train` and
            `test` to such pairs, or a function that returns such data.
        seed: Seed for all random draws.
        backend: "auto", "ray" or "inline".
        out: Run directory; by default a new directory in `runs/`.
        preset: Comma-separated names of presets; later presets override earlier presets.
        config: TOML file with settings.
        resume: Directory of a run to continue after its last complete round, with the settings of
            that run. Arguments can add rounds and change the execution backend.
        trust: Comma-separated modules that the settings of a resumed run may import.
        settings: Any other settings, e.g. `{"training.lr": 0.01}`. A name can be abbreviated to its
            last part if this part is unique.
        against: Baseline method, such as "local", to train afterward in the same way. The report
            shows both runs, and `Result.baseline` returns the baseline's result.
        progress: Whether to show the progress of the run.
        watchers: Additional observers of the run's events; see `fedhet.runs.log.Watcher`.

    Returns:
        The result of the run, which is also stored in the run directory.

    Raises:
        FedhetError: If a setting is invalid, or if this machine cannot execute the run. The error
            is raised before training starts.

    Example:
        >>> import fedhet
        >>> result = fedhet.run("felo", clients=4, rounds=2, models=["mlp", "cnn2"])
        >>> result.history
    """
    for cached in (*DATA_CACHES, *MODEL_CACHES):
        cached.cache_clear()
    keywords = {
        "clients": clients, "rounds": rounds, "models.pool": models, "data.dataset": dataset,
        "seed": seed, BACKEND: backend, "out": out,
    }  # fmt: skip
    arguments = [(name, value) for name, value in keywords.items() if value is not None]
    given = [*arguments, *flatten(settings or {}).items()]
    resolved = _resolve(method, given, preset, _path(config), _path(resume), trust)
    directory = run_directory(resolved)
    baseline = None if against is None else baseline_of(resolved, directory, against)
    may_be_complete = baseline is not None and resolved.run.resume
    if may_be_complete and is_complete(resolve_auto(resolved, directory), directory):
        loaded = report.load_run(directory)  # Only the baseline is missing.
    else:
        with _display(progress) as display:
            loaded = simulate(resolved, directory, [display, *watchers])
        if resolved.run.data.task == CAUSAL_LM:
            loaded = add_generated(loaded)
    if baseline is not None:
        path = Path(baseline.run.out)
        if not is_complete(resolve_auto(baseline, path), path):
            with _display(progress, f"baseline {against}") as display:
                simulate(baseline, path, [display])
        loaded = report.write_all(directory)
    return Result(loaded, trust="*")


def _display(progress: bool, label: str = "") -> contextlib.AbstractContextManager[Watcher]:
    return (
        display_on(Console(emoji=False), label) if progress else contextlib.nullcontext(Watcher())
    )


def load(
    directory: str | Path, *, objects: Mapping[str, Any] | None = None, trust: str = ""
) -> Result:
    """Load the result of a finished or unfinished run from its directory.

    Args:
        directory: Run directory.
        objects: Python objects that were passed to `fedhet.run` in another process, by name, e.g.
            `{"tiny": tiny}` for a model "fedhet.inference.objects:tiny". The objects are needed
            only to use the trained models.
        trust: Comma-separated modules, such as "mymodels", that the run's settings may import to
            restore its models. By default, only fedhet's modules may be imported.

    Returns:
        The result of the run.

    Raises:
        StateError: If `directory` is not a run directory.

    Example:
        >>> result = fedhet.load("runs/felo-digits-s0")
        >>> model = result.model("client-0")
    """
    register(objects or {})
    return Result(report.load_run(expanded(directory)), trust=trust)


def compare(
    runs: Iterable[Result | str | Path] | Result | str | Path,
    *,
    out: str | Path | None = None,
    target: float | None = None,
    kind: str | None = None,
    protocol: str | None = None,
    against: str | None = None,
    metric: str | None = None,
) -> ComparedRuns:
    """Compare runs, like `fedhet compare`.

    Runs that differ only in their seeds form a group.

    Args:
        runs: Results, run directories, or directories that contain runs; or one of these.
        out: Directory for the HTML report and the figures. By default, nothing is written.
        target: Score for the bytes-to-target column, e.g. an accuracy of 0.7.
        kind: Kind of model whose score determines the order, e.g. "private".
        protocol: Test set whose score determines the order, "common" or "personal".
        against: Baseline for the paired differences, as a method or the label of a run.
        metric: Metric to compare; the default is the headline metric of the runs.

    Returns:
        The comparison, with one row per group in `to_frame`.

    Raises:
        FedhetError: If an argument is invalid, or a run cannot be read.

    Example:
        >>> fedhet.compare(["runs/felo", "runs/local"], against="local").to_frame()
    """
    several = [runs] if isinstance(runs, Result | str | Path) else runs
    paths = [each.directory if isinstance(each, Result) else expanded(each) for each in several]
    comparison = report.compare(
        paths, target, kind, protocol=protocol, against=against, metric=metric
    )
    if out is not None:
        report.write_comparison(comparison, expanded(out))
    return ComparedRuns(comparison)


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else expanded(path)


def _resolve(
    method: Any,
    given: Sequence[tuple[str, Any]],
    preset: str | None = None,
    config: Path | None = None,
    resume: Path | None = None,
    trust: str = "",
) -> Config:
    """Resolve the settings of a run, with Python objects replaced by names.

    Raises SettingsError if a setting is invalid or an object cannot be named.
    """
    values = read_layers(preset, config, resume, trust)
    backends = (v for k, v in [*given, *values.items()] if k in (BACKEND, "backend"))
    backend = next(backends, RunSettings().engine.backend)
    inline = backend != "ray"
    if method is not None:
        values = settings_for_method(values, method_name(method, inline=inline))
    name = None if "method" not in values else str(values["method"])
    changes = expand_names(given, name)
    changes = {name: _as_name(name, value, inline) for name, value in changes.items()}
    values = override(values, changes, resume)
    if "method" not in values:
        raise SettingsError("METHOD is missing. Pass it as in fedhet.run('felo', ...).")
    if backend == "auto" and any(HERE in str(value) for value in values.values()):
        values[BACKEND] = "inline"  # Ray's workers cannot import this process's objects.
    return resolve(values)


def _as_name(setting: str, value: Any, inline: bool) -> Any:
    """Replace objects in a setting's value with names, because TOML can store only names."""
    if setting == "data.dataset":
        return dataset_name(value, inline=inline)
    if setting == "models.pool" and not isinstance(value, str):
        pool = value if isinstance(value, list | tuple) else [value]
        return [model_name(each, inline=inline) for each in pool]
    if isinstance(value, list | tuple):
        return [_as_name("", each, inline) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


# --- results


class _Frame(pd.DataFrame):  # type: ignore[misc]
    """Data frame that is printed with all columns; its operations return plain data frames."""

    def __repr__(self) -> str:
        with pd.option_context("display.max_columns", None):
            return str(super().__repr__())


class Result:
    """Result of a run: its records as data frames, and the models of its clients and server.

    `fedhet.run` and `fedhet.load` return this object. Models are loaded from disk on first use.
    """

    def __init__(self, run: report.Run, *, best: bool = False, trust: str = "") -> None:
        self._run, self._best, self._trust = run, best, trust
        self._trained: dict[tuple[str, str], TrainedClient] = {}

    @property
    def directory(self) -> Path:
        """Run directory."""
        return self._run.path

    @property
    def settings(self) -> Mapping[str, object]:
        """Settings of the run, by full name."""
        return self._run.settings

    @property
    def summary(self) -> Summary | None:
        """Content of summary.json, or None if the run is unfinished."""
        return self._run.summary

    @property
    def baseline(self) -> Result | None:
        """Result of the baseline (`against`), or None if the run has no baseline."""
        run = self._run.baseline
        return None if run is None else Result(run, best=self._best, trust=self._trust)

    @property
    def accuracy(self) -> float:
        """Mean headline accuracy in the last evaluation, or NaN without an evaluation.

        The method determines the kind of model and the test set (`headline`). The accuracy is NaN
        if the task is not classification.
        """
        run = self._run.with_metric(ACCURACY)
        return run.last(*run.columns[0]).mean if run.columns else NAN

    @property
    def score(self) -> float:
        """Mean headline score, such as the accuracy or the RMSE, or NaN without an evaluation."""
        return self._run.last(*self._run.columns[0]).mean if self._run.columns else NAN

    @property
    def headline(self) -> tuple[str, str] | None:
        """Test set and kind of model of `accuracy` and `score`, e.g. ("common", "global").

        None without an evaluation.
        """
        return self._run.columns[0] if self._run.columns else None

    @cached_property
    def history(self) -> pd.DataFrame:
        """Data frame with one row per round: mean scores, mean loss, bytes, and seconds."""
        columns = {
            ".".join((metric, *column)): view.curve(*column)["mean"]
            for metric, view in self._views()
            for column in dict.fromkeys(
                each[:2] for r in self._run.records for each in r.each(metric)
            )
        }
        costs = self._run.costs[["bytes_up", "bytes_down", "seconds"]]
        scores = pd.DataFrame(columns, index=costs.index)
        return _Frame(scores.assign(loss=self._run.mean_loss).join(costs))

    def to_frame(self) -> pd.DataFrame:
        """Return the scores of every client in every evaluated round as a data frame.

        Returns:
            One row per round, client, protocol (test set) and kind of model. The column `accuracy`
            (or `rmse` for regression) and one column per additional metric contain the scores, or
            NaN if they are undefined.

        Example:
            >>> frame = result.to_frame()
            >>> frame[frame["kind"] == "private"].groupby("round")["accuracy"].mean()
        """
        keys = ["round", "client", "model", "protocol", "kind"]
        (headline, first), *others = self._views()
        frame = pd.DataFrame(self._rows(first), columns=[*keys, headline])
        for metric, view in others:
            frame = frame.merge(pd.DataFrame(self._rows(view), columns=[*keys, metric]), "left")
        return frame

    def _rows(self, view: report.Run) -> list[tuple[object, ...]]:
        return [
            (record.round, client, self._run.models.get(client, ""), protocol, kind, value)
            for record in view.records
            for protocol, kind, score in record.each(view.metric)
            for client, value in score.per_client.items()
        ]

    def _views(self) -> list[tuple[str, report.Run]]:
        """Return a view of the run for each metric, with the headline metric first."""
        headline = self._run.headline_metric
        names = dict.fromkeys(name for record in self._run.records for name in record.scores)
        return [(name, self._run.with_metric(name)) for name in {headline: None, **names}]

    @cached_property
    def clients(self) -> pd.DataFrame:
        """Data frame with one row per client: model, samples, replies, and last loss and scores.

        The column `owner` exists if the person or site of each client is known.
        """
        run = self._run
        owners = run.partition.owners if run.partition else {}
        index = pd.Index(run.clients, name="client")
        answered = [sum(name in each.answered for each in run.records) for name in run.clients]
        columns = {
            **({"owner": [owners.get(name, "") for name in run.clients]} if owners else {}),
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
        return _Frame({**columns, **loss, **scores}, index=index)

    @property
    def method_metrics(self) -> pd.DataFrame:
        """Data frame with one row per round and one column per method metric."""
        return self._run.method_metrics

    @property
    def plots(self) -> dict[str, Path]:
        """Paths of the images in the run's report, by name."""
        return {path.stem: path for path in sorted((self.directory / "figures").glob("*.png"))}

    def best(self) -> Result:
        """Return this result with the models from the best round instead of the last round.

        The run must have used the setting `keep-best`; otherwise, `model` raises StateError.
        """
        return Result(self._run, best=True, trust=self._trust)

    @isolated()
    def kinds(self, client: str | int) -> tuple[str, ...]:
        """Return the kinds of models of a client or of the server, e.g. ("private", "global").

        Raises the same errors as `model`.
        """
        return self._models(client).kinds

    @isolated()
    def model(self, client: str | int, kind: str = "", architecture: str = "") -> nn.Module:
        """Return a trained model of a client or of the server.

        Args:
            client: Client name, e.g. "client-0", index of a client, or "server".
            kind: Kind of model, one of `kinds`. The default for a client is the kind of the
                headline score (`headline`), or "private" if the client does not have this kind. For
                the server, it is "server", "global", or the only kind.
            architecture: Architecture of the server's model, e.g. "cnn2", if there are several.

        Returns:
            Module in evaluation mode on the CPU. It maps inputs of shape [N, *shape], scaled as in
            training, to logits of shape [N, C], or to standardized targets if the task is
            regression. Logits of classes outside the client's label space are -inf.

        Raises:
            StateError: If the run contains no such client or model. The message lists the choices.
            SettingsError: If `client` is neither a name nor an index.

        Example:
            >>> result.model("server")
            >>> result.model("server", architecture="cnn2")
        """
        return self._models(client, architecture).model(kind)

    @isolated()
    def predict(
        self, client: str | int, x: Any, kind: str = "", architecture: str = ""
    ) -> Predictions | PredictedNumbers:
        """Predict the classes or the numeric targets of samples.

        Args:
            client: Client, or "server", as in `model`.
            x: Array or tensor of shape [N, *shape], texts, or the paths of files (`pathlib.Path`)
                as for `fedhet predict`. uint8 values are scaled as in training; floats must already
                be scaled.
            kind: Kind of model, as in `model`.
            architecture: Architecture of the server's model, as in `model`.

        Returns:
            The predicted classes and their probabilities, or numbers in the target's unit.

        Raises:
            StateError: If the run contains no such client or model.
            SettingsError: If `client` is neither a name nor an index.
            DataError: If the model does not support the samples.

        Example:
            >>> predictions = result.predict("client-0", images)
            >>> predictions.names[:3]
        """
        trained = self._models(client, architecture)
        if not kind and (missing := trained.missing_headline):
            LOG.warning("%s", missing)
        paths = [x] if isinstance(x, Path) else x
        if isinstance(paths, list | tuple) and paths and all(isinstance(p, Path) for p in paths):
            samples = read_inputs([expanded(path) for path in paths], trained.record)[1]
        else:
            samples = samples_for(trained.record, x)
        return trained.predict(samples, kind)

    @isolated()
    def generate(
        self,
        client: str | int,
        prompt: str,
        *,
        kind: str = "",
        architecture: str = "",
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Continue a prompt with a language model of a client or of the server.

        Args:
            client: Client, or "server", as in `model`.
            prompt: Text to continue, or the message of a user if the run trained on instructions
                and the tokenizer has a chat template.
            kind: Kind of model, as in `model`.
            architecture: Architecture of the server's model, as in `model`.
            max_tokens: Maximum number of generated tokens.
            temperature: Temperature of sampling; 0 = the most likely token at each position.
            seed: Seed for sampling.

        Returns:
            The generated text, without the prompt.

        Raises:
            ModelError: If the model is not a causal language model, or the prompt is too long.
            StateError: If the run contains no such client or model.
        """
        return generate(
            self._models(client, architecture), prompt, kind,
            max_tokens=max_tokens, temperature=temperature, seed=seed,
        )  # fmt: skip

    @isolated()
    def export(
        self,
        client: str | int,
        out: str | Path,
        *,
        form: str = "",
        kind: str = "",
        architecture: str = "",
    ) -> Path:
        """Export a model of a client or of the server to a file, with a model card next to it.

        Args:
            client: Client, or "server", as in `model`.
            out: Output file or directory.
            form: "safetensors", "pt2", "onnx", "peft" or "merged". The default is the extension of
                `out`.
            kind: Kind of model, as in `model`.
            architecture: Architecture of the server's model, as in `model`.

        Returns:
            Path of the model card, i.e. `out` with the additional extension .json.

        Raises:
            SettingsError: If the format is unknown.
            ModelError: If the format does not support the model.
            StateError: If the model is not found, or if the file cannot be written.
        """
        path = expanded(out)
        trained = self._models(client, architecture)
        return export(trained, form or path.suffix.lstrip("."), path, kind)

    @isolated()
    def test(self, client: str | int | None = None) -> LabeledSamples:
        """Return the common test set, or the test split of a client.

        Reads the data that the run's settings name, which must be on this machine.

        Args:
            client: Client name or index, or None for the common test set.

        Returns:
            The samples as inputs of the models, the labels or targets, and the names of the
            classes or targets.

        Raises:
            DataError: If the data is at the sites of a deployment, or is not found.
            StateError: If the run contains no such client.

        Example:
            >>> x, y, classes = result.test("client-0")
            >>> (result.predict("client-0", x).labels == y).mean()
        """
        check_registered(self.settings)
        name = None if client is None else self._name(client)
        return read_test(self.directory, name, trust=self._trust)

    @isolated()
    def confusion(
        self,
        client: str | int | None = None,
        kind: str = "",
        architecture: str = "",
        *,
        protocol: str = "",
    ) -> pd.DataFrame:
        """Return a confusion matrix: the number of samples by true and predicted class.

        Args:
            client: Client, or "server", as in `model`. The default is the matrix of the headline
                models, which the run has recorded after its last round.
            kind: Kind of model, as in `model`.
            architecture: Architecture of the model, if there are several.
            protocol: Test set, "common" or "personal". The default is the common test set or, if
                there is none, the client's own test split.

        Returns:
            Data frame with a row for each true class and a column for each predicted class. Without
            a client, the counts are sums over the headline models of all clients; global models
            that are the same on all clients are counted once.

        Raises:
            StateError: If the run contains no such client or model, or has not recorded a matrix.
            SettingsError: If the task is not classification, or if there is no such test set.
            DataError: If the test samples are not found.

        Example:
            >>> result.confusion("client-0")
            >>> result.confusion().to_csv("confusion.csv")
        """
        if client is not None:
            return self._models(client, architecture).confusion(kind, protocol)
        return recorded_confusion(self._run, architecture)

    def _models(self, client: str | int, architecture: str = "") -> TrainedClient:
        key = self._name(client), architecture
        if key not in self._trained:
            check_registered(self.settings)
            self._trained[key] = open_models(
                self.directory,
                key[0],
                architecture=architecture,
                best=self._best,
                trust=self._trust,
            )
        return self._trained[key]

    def _name(self, client: str | int) -> str:
        """Return the name of a client. Raises SettingsError if an index is out of range."""
        if isinstance(client, str):
            return client
        names = self._run.clients
        if isinstance(client, bool) or not isinstance(client, int | np.integer):
            expected = "a client name such as 'client-0', an index, or 'server'"
            raise SettingsError(f"client: expected {expected}, got {client!r:.100}")
        if not 0 <= client < len(names):
            raise SettingsError(f"client: index must be from 0 to {len(names) - 1}, got {client}")
        return names[client]

    def __repr__(self) -> str:
        run = self._run
        state = "" if run.finished else ", unfinished"
        model = ", ".join(self.headline or ())
        number = f"{run.metric_title} ({model}) {score(self.score)}" if model else ""
        progress = f"{plural(len(run.clients), 'client')}, round {run.done} of {run.planned}{state}"
        return f"<Result of {run.method} on {run.dataset}: {progress}; {number or 'not evaluated'}>"

    def _repr_html_(self) -> str:
        return render("card.html", run=self._run, models=clients_in(self.directory))


class ComparedRuns:
    """Comparison of groups of runs with different seeds, as returned by `fedhet.compare`."""

    def __init__(self, comparison: report.Comparison) -> None:
        self.comparison = comparison

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row per group, with the best group first.

        The columns contain the mean and the standard deviation of the metric for each test set and
        kind of model, and the mean bytes and seconds.
        """
        content: Any = to_dict(self.comparison)
        metric, rows = content["metric"], []
        for group in content["groups"]:
            row = {name: group[name] for name in ("method", "dataset", "headline_kind")}
            row["seeds"] = len(group["seeds"])
            for protocol, kinds in group[metric].items():
                for kind, spread in kinds.items():
                    for statistic in ("mean", "std"):
                        row[f"{metric}.{protocol}.{kind}.{statistic}"] = spread[statistic]
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
