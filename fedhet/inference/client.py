"""Restore a run's trained clients from disk, and predict the classes or targets of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.base.arrays import as_array, grouped
from fedhet.base.errors import (
    DataError,
    FedhetError,
    MissingSamplesError,
    ModelError,
    SettingsError,
    StateError,
    error_text,
    nearest,
    one_line,
)
from fedhet.base.metrics import ACCURACY, CAUSAL_LM, MAX_CONFUSION
from fedhet.client_runtime.node import read_node
from fedhet.client_runtime.samples import (
    FILE,
    ClientRecord,
    ClientSamples,
    ServerRecord,
    read_record,
    read_server_record,
)
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import DATASETS, check_trusted, read_toml
from fedhet.data.dataset import Format, Split
from fedhet.data.folders import Files, Walk
from fedhet.data.rows import ENDINGS, Table, read_table
from fedhet.data.site import known_outputs
from fedhet.data.sources.arrays import read_arrays
from fedhet.data.sources.images import IMAGES, MODES, Form, decode_blocks
from fedhet.data.sources.texts import TEXTS, joined_texts
from fedhet.data.spec import DataSpec, check_max_bytes
from fedhet.data.store import RunData
from fedhet.data.tables import encode
from fedhet.data.texts import tokenize
from fedhet.kinds import IMAGE, KINDS, TABLE, TEXT
from fedhet.learning.devices import Compute, compute_for, scaled
from fedhet.learning.training import logits_of
from fedhet.methods.spec import ENSEMBLE
from fedhet.models import (
    AllocationLimit,
    Ensemble,
    LabelSpaceModel,
    Refitted,
    build,
    evaluate_model,
    evaluate_models,
    load_weights,
)
from fedhet.runs.directory import (
    open_data,
    read_if_exists,
    read_records,
    read_run_name,
    read_validated,
    with_places,
)
from fedhet.runs.measures import best_round, by_score_key
from fedhet.runs.records import COMMON, MAX_ROUNDS, NAN, Headline, Origin, Partition
from fedhet.runs.storage import CHECKPOINTS, Checkpoint, Checkpoints, ClientStore
from fedhet.runs.units import natural
from fedhet.server.codec import without_versions
from fedhet.tasks import CLASSIFICATION, THRESHOLD, MultiLabel, Regression
from fedhet.wire.identity import SERVER, ClientInfo, client_name
from fedhet.wire.knowledge import Knowledge

if TYPE_CHECKING:
    from fedhet.report import Run
    from fedhet.strategies.base import HetStrategy, ServerModel

_AT_SERVER = (
    ". The server stores the other kinds: pass its run directory, and 'server' instead of a client."
)
_CHOOSE = "Pass it with --kind, or as `kind` in Python."
MAX_STATE_FACTOR = 8
"""Maximum memory for building a client's models, as a multiple of the size of a saved state."""
STATE = "state"
"""Subdirectory of a simulated run's directory that contains the client states."""
ROUNDING = 1e-3
"""Tolerance for scaled pixel values outside [-1, 1]."""
MAX_BYTES = 2**29
"""Default maximum size of model inputs in memory, in bytes."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's predictions for N samples."""

    labels: NDArray[np.int64]
    """Index of the most probable class of each sample, of shape [N]."""
    probabilities: NDArray[np.float32]
    """Class probabilities, of shape [N, C]; 0 for classes outside the client's label space."""
    classes: tuple[str, ...]
    """Class names."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    @property
    def names(self) -> list[str]:
        """Name of the most probable class of each sample."""
        return [self.classes[label] for label in self.labels]

    def to_frame(self, index: Sequence[str] | None = None) -> pd.DataFrame:
        """Return a data frame with one row per sample.

        The columns are the predicted class, its probability, and the probability of each class.
        """
        top = self.probabilities[np.arange(len(self)), self.labels]
        frame = pd.DataFrame({"class": self.names, "probability": top}, index=index)
        by_class = pd.DataFrame(self.probabilities, columns=list(self.classes), index=frame.index)
        return pd.concat([frame, by_class], axis=1)

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(max_rows=20, float_format="{:.4f}".format))


@dataclass(frozen=True, eq=False)
class PredictedNumbers:
    """A model's predictions for N samples in a task other than classification."""

    values: NDArray[np.float64]
    """Predicted targets in their units, of shape [N, K]."""
    targets: tuple[str, ...]
    """Names of the targets."""
    quantiles: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0, 0)))
    """Predicted quantiles in the targets' units, of shape [N, K, Q]; empty for other losses."""
    levels: tuple[float, ...] = ()
    """Levels of the Q quantiles, ascending."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.values)

    def to_frame(self, index: Sequence[str] | None = None) -> pd.DataFrame:
        """Return a data frame with one row per sample.

        The columns are the targets, each followed by its quantiles, such as `stay (0.1)`.
        """
        columns = {}
        for place, name in enumerate(self.targets):
            columns[name] = self.values[:, place]
            for number, level in enumerate(self.levels):
                columns[f"{name} ({level:g})"] = self.quantiles[:, place, number]
        return pd.DataFrame(columns, index=index)

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(max_rows=20))


@dataclass(frozen=True, eq=False)
class PredictedLabels(PredictedNumbers):
    """A model's predictions for N samples and L labels; `values` are the probabilities [N, L]."""

    @property
    def labels(self) -> list[list[str]]:
        """Names of the labels with a probability of at least 0.5, for each sample."""
        return [
            [name for name, applies in zip(self.targets, row, strict=True) if applies]
            for row in self.values >= THRESHOLD
        ]

    def to_frame(self, index: Sequence[str] | None = None) -> pd.DataFrame:
        """Return a data frame with one row per sample.

        The columns are the predicted labels, such as `a; b`, and the probability of each label.
        """
        frame = super().to_frame(index)
        listed = ["; ".join(row) for row in self.labels]
        frame.insert(0, "labels", listed, allow_duplicates=True)
        return frame


@dataclass(frozen=True, eq=False)
class TrainedClient:
    """Client of a finished or unfinished run, with restored models."""

    record: ClientRecord
    config: Config
    round: int
    """Round after which the restored state was saved."""
    participations: int
    """Number of rounds in which the client trained."""
    _client: Any
    """Instance of the method's client class."""
    _trust: str = ""
    """Comma-separated modules that the settings may import."""
    _checkpoint: SavedServer | None = None
    """Checkpoint of the server, if the directory of the run is available."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of models: `private`, other kinds of the client, `ensemble`, and server models."""
        ensemble = (ENSEMBLE,) if self._members else ()
        return (*self._client.models, *ensemble, *self._received)

    @property
    def _members(self) -> tuple[str, ...]:
        """Kinds of the models in the ensemble, or () if the method has no ensemble."""
        members: tuple[str, ...] = self.config.method.spec.ensemble
        return members if {*members} <= self._client.models.keys() else ()

    @property
    def default_kind(self) -> str:
        """Kind of model that is used if no kind is given.

        This is the kind of the method's headline score. If the client does not have this kind, such
        as a model of the server, it is "private".
        """
        headline = self.headline_kind
        return headline if headline == "private" or headline in self.kinds else "private"

    @property
    def headline_kind(self) -> str:
        """Kind of model to which the method's headline score belongs."""
        headline = Headline.declared_by(self.config.method.spec)
        return headline.kinds.get(headline.protocol, "private")

    @property
    def compute(self) -> Compute:
        """Device and precision of computations."""
        compute: Compute = self._client.compute
        return compute

    @property
    def missing_headline(self) -> str:
        """Message that the client lacks the headline kind, or "" if it has this kind."""
        name, headline = self.record.client, self.headline_kind
        if name == SERVER or self.default_kind == headline:
            return ""
        return (
            f"{name} does not have the headline kind {headline!r}; using the kind "
            f"{self.default_kind!r}"
        )

    def model(self, kind: str = "") -> nn.Module:
        """Return a model in evaluation mode.

        The model maps scaled inputs of shape [N, *shape] to logits of shape [N, C], or to
        standardized targets of shape [N, K]. Logits of classes outside the client's label space are
        -inf. Raises StateError if this kind of model is not available.
        """
        if kind == ENSEMBLE and self._members:
            members = [self.model(each) for each in self._members]
            return Ensemble(members, self.record.format.task).eval()
        model = self.network(kind)
        if not isinstance(model, Refitted):
            model = self._client.samples.within_space(model)
        return model.eval()

    def network(self, kind: str = "") -> nn.Module:
        """Return the trained network, without the mask for classes outside the label space."""
        kind = kind or self.default_kind
        if kind == ENSEMBLE and self._members:
            return Ensemble([self.network(each) for each in self._members], self.record.format.task)
        if kind not in self._client.models and kind not in self._received:
            missing = "" if self._checkpoint else _AT_SERVER
            raise StateError(
                f"{self.record.client}: kind of model must be one of "
                f"{', '.join(self.kinds) or 'none'}, got '{kind}'{nearest(kind, self.kinds)}"
                f"{missing}"
            )
        network: nn.Module = self._client.models.get(kind) or self._received[kind]
        return network

    def architecture(self, kind: str) -> str:
        """Return the name of a model, as in `models.pool`, or "" if it is unknown."""
        if kind == "private":
            return self.record.model
        saved = self._checkpoint.models(self._client.info) if self._checkpoint else {}
        return saved[kind].architecture if kind in saved else ""

    @cached_property
    def _received(self) -> dict[str, nn.Module]:
        """Server models that the client evaluates, built from the checkpoint, by kind."""
        if self._checkpoint is None:
            return {}
        saved = self._checkpoint.models(self._client.info)
        parts = [grouped(each.field, each.weights) for each in saved.values() if each.field]
        if not parts:
            return {}
        knowledge = Knowledge({name: value for part in parts for name, value in part.items()})
        try:
            models = self._client.eval_models(knowledge)
        except MissingSamplesError:  # The run's data must still exist.
            models = self._with_samples(restored=True).eval_models(knowledge)
        return {
            kind: model.network if isinstance(model, LabelSpaceModel) else model
            for kind, model in models.items()
            if kind not in self._client.models
        }

    def predict(self, x: Tensor, kind: str = "") -> Predictions | PredictedNumbers:
        """Predict the classes or targets of samples [N, *shape] that `samples_for` has scaled.

        Returns labels with their probabilities if the task is multi-label, and numbers for all
        other non-classification tasks.
        """
        model, compute = self.model(kind), self._client.compute
        names, task = self.record.format.classes, self.record.format.task
        if task.name == CAUSAL_LM:
            raise ModelError(
                f"{self.record.client}: a language model predicts texts. Use `fedhet generate`."
            )
        with torch.no_grad():
            if task.name != CLASSIFICATION.name:
                values = task.decode(logits_of(model, x, compute)).double().cpu().numpy()
                if isinstance(task, MultiLabel):
                    return PredictedLabels(values, names)
                if not (isinstance(task, Regression) and task.quantiles):
                    return PredictedNumbers(values, names)
                return PredictedNumbers(task.point(values), names, values, task.quantiles)
            if isinstance(model, Refitted):
                probabilities = model.probabilities(x)
                labels = model.predict(x)
            else:
                probabilities = task.decode(logits_of(model, x, compute))
                labels = probabilities.argmax(1)
        return Predictions(labels.cpu().numpy(), probabilities.cpu().numpy(), names)

    def scores(self, kind: str = "") -> dict[str, dict[str, float]]:
        """Evaluate a model with the run's metrics. Return the scores by test set and metric name.

        The test sets are the client's local test split and the common test set. Loads the data that
        the run's settings name. Raises DataError if the data is not found, and SettingsError if a
        function in an untrusted module would provide the data.
        """
        kind = kind or self.default_kind
        models, metrics = {kind: self.model(kind)}, self.config.run.metrics
        measured = evaluate_models(
            models, self.test_sets(), self._client.compute, metrics, self.record.format.task
        )
        scores: dict[str, dict[str, float]] = {}
        for (metric, protocol, _), value in by_score_key(measured).items():
            scores.setdefault(protocol, {})[metric] = value
        return scores

    def confusion(self, kind: str = "", protocol: str = "") -> pd.DataFrame:
        """Count the samples of each true class (row) and predicted class (column).

        The default test set is the common test set or, if there is none, the client's own test
        split. Raises the same errors as `scores`, and SettingsError if there is no such test set,
        or if the task has no confusion matrix.
        """
        name, described = self.record.client, self.record.format
        task, count = described.task, len(described.classes)
        if task.name != CLASSIFICATION.name:
            raise SettingsError(
                f"{name}: a confusion matrix requires classification, got the task {task.name}"
            )
        if count > MAX_CONFUSION:
            raise SettingsError(
                f"{name}: a confusion matrix has at most {MAX_CONFUSION} classes, got {count}"
            )
        tests = self.test_sets()
        protocol = protocol or (COMMON if COMMON in tests else next(iter(tests), COMMON))
        if protocol not in tests:
            raise SettingsError(
                f"{name}: test set must be one of {', '.join(tests) or 'none'}, got '{protocol}'"
            )
        found = evaluate_model(
            self.model(kind or self.default_kind), tests[protocol], self._client.compute
        )
        return confusion_frame(found.confusion, described.classes)

    def test_sets(self) -> Mapping[str, Split]:
        """Return the test sets by protocol. Loads the data that the run's settings name."""
        tests: Mapping[str, Split] = self._with_samples().tests
        return tests

    def _with_samples(self, *, restored: bool = False) -> Any:
        """Create the client with its samples and, if `restored` is set, with its saved state."""
        check_trusted(self.record.settings, self._trust, Path(self.record.client))
        saved = self._client.node
        node = self.record.node(self.config, saved.state_dir, data=saved.data)
        client = self._client.config.method.client(self.config, node)
        if (shape := client.info.shape) != (known := self.record.format.shape):
            raise DataError(
                f"{self.record.client}: expected data of shape {known} as in training, got {shape}"
            )
        if restored:
            client.state.restore(self.record.run, before=self.round + 1)
        return client

    def accuracy(self, kind: str = "") -> dict[str, float]:
        """Return the accuracy in `scores`, by test set; NaN if the task is not classification."""
        scores = self.scores(kind)
        return {protocol: each.get(ACCURACY, NAN) for protocol, each in scores.items()}


def confusion_frame(counts: Any, classes: Sequence[str]) -> pd.DataFrame:
    """Return a confusion matrix [C, C] with the names of its classes."""
    rows = pd.Index(list(classes), name="true class")
    return pd.DataFrame(counts, rows, pd.Index(list(classes), name="predicted class"))


def recorded_confusion(run: Run, architecture: str = "") -> pd.DataFrame:
    """Return the confusion matrix of a run's headline models, or of one architecture.

    Raises StateError if the run has not recorded the matrix.
    """
    if run.confusion is None:
        from fedhet.report.tables import missing_confusion  # Import lazily: loads Matplotlib.

        reason = missing_confusion(run) or "no scores of classes found, so no confusion matrix"
        raise StateError(f"{run.path}: {reason}")
    found = {each.model: each for each in run.confusion.matrices}
    if architecture and architecture not in found:
        raise StateError(
            f"{run.path}: architecture must be one of {', '.join(found)}, got '{architecture}'"
        )
    chosen = [found[architecture]] if architecture else run.confusion.matrices
    counts = np.sum([each.counts for each in chosen], axis=0)
    return confusion_frame(counts, run.class_names)


@dataclass(frozen=True)
class SavedServer:
    """Checkpoint of a run's server, with the models that it contains."""

    directory: Path
    config: Config
    checkpoint: Checkpoint

    @classmethod
    def read_checkpoint(cls, directory: Path, config: Config, round: int = 0) -> SavedServer | None:
        """Read the checkpoint of a round, or the last checkpoint if `round` is 0.

        Returns None if the directory contains no such checkpoint. Raises StateError if the
        checkpoint is invalid.
        """
        if not (directory / "run.json").exists():
            return None
        identity = {"run": read_run_name(directory), "method": config.method.name}
        checkpoints = Checkpoints(directory, identity)
        rounds = checkpoints.rounds()
        if not rounds or (round and round not in rounds):
            return None
        return cls(directory, config, checkpoints.read_checkpoint(round or rounds[-1]))

    def models(self, client: ClientInfo) -> Mapping[str, ServerModel]:
        """Return the server's models for a client's architecture, by kind.

        Raises StateError if the checkpoint does not match the method.
        """
        state = without_versions(self.checkpoint.tensors)
        strategy: type[HetStrategy] = self.config.method.strategy
        try:
            return strategy.saved_models(self.config, self.directory, state, client)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise StateError(
                f"{self.directory}: the checkpoint of round {self.checkpoint.round} does not match "
                f"the method {self.config.method.name}: {error!r}"
            ) from error


@dataclass(frozen=True)
class _ServerSide:
    """Parts of a client that predictions with the server's models need."""

    samples: ClientSamples
    compute: Compute
    models: Mapping[str, nn.Module] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TrainedServer(TrainedClient):
    """Server of a finished or unfinished run, with restored models."""

    _choices: Mapping[str, Mapping[str, ServerModel]] = field(default_factory=dict)
    """Models by kind and architecture."""
    _networks: dict[str, nn.Module] = field(default_factory=dict)
    """Networks that have been built, by kind."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of models that the server stores."""
        return tuple(self._choices)

    @property
    def default_kind(self) -> str:
        """Kind of model that is used if no kind is given: `server`, `global`, or the only kind.

        Raises StateError if the choice is ambiguous.
        """
        found = [kind for kind in ("server", "global") if kind in self._choices]
        if not found and len(self._choices) > 1:
            kinds = ", ".join(self._choices)
            raise StateError(f"{SERVER}: kind of model must be one of {kinds}, got none. {_CHOOSE}")
        return next(iter(found or self._choices))

    def network(self, kind: str = "") -> nn.Module:
        """Return the trained network.

        Raises StateError if the server has no such model, several architectures, or only a part of
        the model.
        """
        kind = kind or self.default_kind
        if kind not in self._choices:
            raise StateError(
                f"{SERVER}: kind of model must be one of {', '.join(self.kinds)}, got '{kind}'"
                f"{nearest(kind, self.kinds)}"
            )
        if kind not in self._networks:
            self._networks[kind] = self._build(kind)
        return self._networks[kind]

    def architecture(self, kind: str) -> str:
        """Return the name of a model, as in `models.pool`."""
        choices = self._choices[kind]
        if len(choices) > 1:
            names = ", ".join(sorted(choices, key=natural))
            raise StateError(
                f"{SERVER}: architecture must be one of {names}, got none. Pass it with "
                "--architecture, or as `architecture` in Python."
            )
        return next(iter(choices))

    def test_sets(self) -> Mapping[str, Split]:
        """Return the common test set. Raises DataError if there is none."""
        check_trusted(self.record.settings, self._trust, self._server.directory)
        data = open_data(self.config, self._server.directory)
        common = data.common_test_of(self._client.samples.info)
        if common is None:
            raise DataError(f"{self._server.directory}: no common test set")
        return {COMMON: common}

    @property
    def _server(self) -> SavedServer:
        assert self._checkpoint is not None
        return self._checkpoint

    def _build(self, kind: str) -> nn.Module:
        name, record = self.architecture(kind), self.record
        saved, method = self._choices[kind][name], self.config.method.name
        clients = ", ".join(clients_in(self._server.directory)[:1]) or "a client at its site"
        evaluated = kind in self.config.method.spec.kinds
        what = f"the kind '{kind}'" if evaluated else "a model"
        advice = f"Use {what} of a client, such as {clients}."
        if saved.needs_extractor:
            raise StateError(
                f"{SERVER}: the model of {method}'s server maps features of a client's extractor. "
                f"{advice}"
            )
        size = sum(np.asarray(value).nbytes for value in saved.weights.values())
        with AllocationLimit(MAX_STATE_FACTOR * size + 2**26):
            network = build(
                name,
                record.format.shape,
                len(record.space),
                seed=self.config.run.seed,
                kind=record.format.kind,
                feature_dim=saved.width,
            )
        names = network.state_dict().keys()
        if missing := sorted(names - saved.weights.keys(), key=natural):
            raise StateError(
                f"{SERVER}: the server of {method} stores only {len(names) - len(missing)} of the "
                f"{len(names)} tensors of model {name}. The other tensors, such as {missing[0]}, "
                f"stay on the clients. {advice}"
            )
        try:
            return load_weights(network, saved.weights)
        except RuntimeError as error:
            raise StateError(f"{SERVER}: {one_line(str(error))}") from None


def open_models(
    directory: Path | str,
    name: str,
    *,
    architecture: str = "",
    best: bool = False,
    trust: str = "",
) -> TrainedClient:
    """Restore the models of a client or, if `name` is "server", of the run's server.

    Args:
        directory: As in `open_client`; for the server, the directory of the run.
        name: Client name, or "server".
        architecture: Architecture of the server's model, if there are several.
        best: Whether to restore the best round instead of the last round.
        trust: Comma-separated modules that the settings may import.

    Raises:
        SettingsError: If an architecture is given for a client.
        StateError: As in `open_client` and `open_server`.
    """
    if name == SERVER:
        return open_server(directory, architecture=architecture, best=best, trust=trust)
    if architecture:
        raise SettingsError(
            f"architecture: expected none for a client, got '{architecture}'. {name} has one model."
        )
    return open_client(directory, name, best=best, trust=trust)


def open_server(
    directory: Path | str, *, architecture: str = "", best: bool = False, trust: str = ""
) -> TrainedServer:
    """Restore the server's models from a run directory, without reading data.

    In a deployment whose sites have their own data, the server does not know the names of classes
    and columns. To add them, copy the sites' schema.toml or classes.txt into the run directory.

    Args:
        directory: Run directory.
        architecture: Architecture of the model, if the server has several.
        best: Whether to restore the best round instead of the last round.
        trust: Comma-separated modules that the settings may import (see `check_trusted`).

    Raises:
        StateError: If the run has no checkpoint, or if its server has no model.
        SettingsError: If the settings would import untrusted code.
    """
    root = Path(directory)
    record = read_server_record(root)
    if record is None:
        raise StateError(
            f"{root}: expected the directory of a run with a checkpoint of the server; "
            f"{CHECKPOINTS}/server.json not found"
        )
    settings = {k: v for k, v in record.settings.items() if k not in DATASETS}
    check_trusted(settings, trust, root / CHECKPOINTS)
    config = record.config()
    config = config.replacing(training=config.run.training.first())
    round = best_round_of(root, trust) if best else 0
    saved = SavedServer.read_checkpoint(root, config, round)
    if saved is None:
        fix = (
            f"the models of round {round}, the best round, were not kept. Use --set keep-best=true "
            "in the next run."
        )
        raise StateError(f"{root}: {fix if best else 'no round has finished'}")
    if (record.run, record.client) != (read_run_name(root), SERVER):
        raise StateError(f"{root / CHECKPOINTS}: server.json belongs to another run")
    record = _with_names(root, record, config)
    info = replace(record.without_data(config).info, order=record.order)
    names = read_validated(root / "run.json", Origin).models.values()
    choices: dict[str, dict[str, ServerModel]] = {}
    for name in sorted({*names, record.model}, key=natural):
        for kind, model in saved.models(replace(info, model=name)).items():
            choices.setdefault(kind, {})[model.architecture] = model
    if not choices:
        fields = config.method.spec.instructions.fields
        sent = f", but sends: {'; '.join(each.help for each in fields)}" if fields else ""
        first = next(iter(clients_in(root)), "")
        raise StateError(
            f"{root}: the server of {config.method.name} stores no model{sent}. Use a model of a "
            f"client{f', such as {first}' if first else ' at its site'}."
        )
    if architecture:
        known = sorted({name for models in choices.values() for name in models}, key=natural)
        if architecture not in known:
            raise StateError(
                f"{SERVER}: architecture must be one of {', '.join(known)}, got '{architecture}'"
                f"{nearest(architecture, known)}"
            )
        choices = {
            kind: {architecture: models[architecture]}
            for kind, models in choices.items()
            if architecture in models
        }
    engine = config.run.engine.model_copy(update={"device": "cpu"})
    side = _ServerSide(replace(record.without_data(config), info=info), compute_for(engine))
    number = saved.checkpoint.round
    return TrainedServer(record, config, number, number, side, trust, saved, choices)


def _with_names(directory: Path, record: ServerRecord, config: Config) -> ServerRecord:
    """Add the names of the outputs, the schema, and the scale of the targets, if necessary.

    Raises StateError if the scale of the targets is unknown, because predictions would have no
    unit.
    """
    if record.is_complete:
        return record
    described: Format | None = None
    if not record.own_data:
        with suppress(FedhetError):
            described = RunData.for_run(config.run).dataset.format
    else:
        described = known_outputs(directory, record.format)
    completed = record.completed(config, described) if described else None
    if completed is None and described and record.own_data:
        raise StateError(
            f"{directory}: schema.toml or classes.txt differs from the file at the sites. Copy "
            "the file of a site."
        )
    if completed is None and record.format.task.name != CLASSIFICATION.name:
        raise StateError(
            f"{directory}: the server does not know the names and the scale of the targets. Copy "
            "schema.toml of a site into this directory."
        )
    return completed or record


def open_client(
    directory: Path | str, client: str, *, best: bool = False, trust: str = ""
) -> TrainedClient:
    """Restore a client's models from a run directory, or from the state directory of a site.

    Networks are restored without data. Models without gradients are not stored, but refitted on
    their training data, which must still exist.

    Args:
        directory: Run directory, or state directory of a site.
        client: Client name.
        best: Whether to restore the best round instead of the last round; requires a run directory.
        trust: Comma-separated modules that the settings may import (see `check_trusted`).

    Raises:
        StateError: If the client's state is not found or does not match its record.
        DataError: If the data of a model without gradients is not found.
        SettingsError: If the settings would import untrusted code.
    """
    root = Path(directory)
    store = find_store(root, client)
    record = read_record(store.folder) or _rebuild_record(root, store, trust)
    if (record.run, record.client) != (store.run, store.client):
        raise StateError(
            f"{store.folder / FILE}: expected client '{store.client}' of run {store.run}, got "
            f"'{record.client}' of {record.run}"
        )
    settings = {k: v for k, v in record.settings.items() if k not in DATASETS}
    check_trusted(settings, trust, store.folder / FILE)
    config = record.config()
    run_directory = store.root.parent if store.root.name == STATE else root
    node = record.node(config, store.root, data=open_data(config, run_directory))
    round = best_round_of(root, trust) if best else MAX_ROUNDS
    largest = max(store.path(each).stat().st_size for each in store.rounds())
    try:
        # Limit the memory by the size of the saved state, because the record may contain any shape.
        with AllocationLimit(MAX_STATE_FACTOR * largest + 2**26):
            restored = config.method.client(config, node, samples=record.without_data(config))
            restored.state.restore(store.run, before=round + 1)
    except (ModelError, RuntimeError) as error:
        fault = error_text(error)
        raise StateError(
            f"{store.folder / FILE}: does not match the client's saved state: {fault}"
        ) from None
    if any(isinstance(model, Refitted) for model in restored.models.values()):
        check_trusted(record.settings, trust, store.folder / FILE)
        restored = config.method.client(config, node)
        restored.state.restore(store.run, before=round + 1)
    state = restored.state
    if best and not state.round:
        raise StateError(
            f"{store.folder}: the models of round {round}, the best round, were not kept. Use "
            "--set keep-best=true in the next run."
        )
    saved = SavedServer.read_checkpoint(root, config, round if best else 0)
    rounds = state.round, state.participations
    return TrainedClient(record, config, *rounds, restored, trust, saved)


def _rebuild_record(directory: Path, store: ClientStore, trust: str) -> ClientRecord:
    """Rebuild a client's missing record from the settings and the data of its run.

    Raises StateError if `directory` is not a run directory.
    """
    if not (directory / "config.toml").exists():
        raise StateError(f"{store.folder / FILE} not found. Pass the directory of the run instead.")
    config = _config_of(directory, trust)
    clients = config.run.clients
    names = [client_name(index, clients) for index in range(clients)]
    if store.client not in names:
        raise StateError(f"{directory / 'config.toml'}: client '{store.client}' not found")
    partition = {"partition-id": names.index(store.client), "num-partitions": clients}
    data = open_data(config, directory)
    node = read_node({**partition, "device": "cpu"}, config.run, str(store.root), data)
    record: ClientRecord = config.method.client(config, node).record(store.run)
    return record


# --- location of client states: in a run directory, or in the state directory of a site


def find_store(directory: Path, client: str) -> ClientStore:
    """Find the saved states of a client below `directory`.

    `directory` is a run directory, or the state directory of a site, a run, or a client. Raises
    StateError if the states are not found or ambiguous.
    """
    stores = list(_stores(directory))
    matches = [store for store in stores if store.client == client]
    if len(matches) == 1:
        return matches[0]
    if matches:
        runs = ", ".join(sorted(store.run for store in matches))
        raise StateError(
            f"{directory}: expected one run of {client}, got {runs}. Select a run, as in "
            f"{directory / matches[0].run}."
        )
    inside = sorted(path.parent for path in directory.glob("*/run.json"))
    if inside and not (directory / "run.json").exists():
        raise StateError(
            f"{directory}: expected a run directory, got a directory that contains runs. Select a "
            f"run, as in {inside[0]}."
        )
    names = sorted({store.client for store in stores}, key=natural)
    if not names:
        if not directory.is_dir():
            raise StateError(f"directory {directory} not found")
        if (directory / "run.json").exists():
            raise StateError(
                f"{directory}: client states not found. The states of a deployed run are stored at "
                "its sites."
            )
        raise StateError(f"{directory}: expected a run directory or the state directory of a site")
    raise _unknown_client(directory, client, names)


def _unknown_client(directory: Path, client: str, names: Sequence[str]) -> StateError:
    """Return the error for an unknown client; for the name of an owner, it names the client."""
    recorded = read_if_exists(directory / "partition.json", Partition)
    owners = recorded.owners if recorded else {}
    owned = [name for name in names if owners.get(name) == client]
    hint = f". '{one_line(client)}' is the owner of {owned[0]}." if owned else ""
    return StateError(
        f"{directory}: client '{client}' not found, expected one of {', '.join(names)}"
        f"{hint or nearest(client, names)}"
    )


def clients_in(directory: Path) -> list[str]:
    """Return the names of the clients with saved states in a run or state directory."""
    return sorted({store.client for store in _stores(directory)}, key=natural)


def best_round_of(directory: Path, trust: str = "") -> int:
    """Return the round in which a run has the best headline accuracy.

    Raises StateError if `directory` is not the directory of an evaluated run, and SettingsError if
    the method is in an untrusted module.
    """
    if not (directory / "metrics.jsonl").exists():
        raise StateError(f"{directory}: expected a run directory, which records the best round")
    headline = Headline.declared_by(_config_of(directory, trust).method.spec)
    round = best_round(read_records(directory / "metrics.jsonl")[0], headline)
    if not round:
        raise StateError(f"{directory}: no best round, because no round was evaluated")
    return round


def _config_of(directory: Path, trust: str) -> Config:
    """Read the settings of a run, with absolute paths of its data.

    Raises SettingsError if the settings would import untrusted code.
    """
    settings = read_toml(directory / "config.toml")
    check_trusted(settings, trust, directory / "config.toml")
    return with_places(resolve(settings), directory)


def _stores(directory: Path) -> Iterator[ClientStore]:
    """Yield the stores of all clients with a saved state in a run or state directory."""
    root = directory.resolve()
    if (directory / "run.json").exists():
        candidates = sorted((directory / STATE / read_run_name(directory)).glob("*"))
    elif any(directory.glob("round-*.safetensors")):
        candidates = [root]
    else:
        candidates = [*sorted(root.glob("*")), *sorted(root.glob("*/*"))]
    for path in filter(Path.is_dir, candidates):
        try:
            store = ClientStore(path.parents[1], path.parent.name, path.name)
        # Skip the directory, because its name is not a valid name of a run or client.
        except (StateError, IndexError):
            continue
        if store.rounds():
            yield store


# --- test sets


class LabeledSamples(NamedTuple):
    """Test samples of a run, with N rows."""

    x: Tensor
    """Samples as inputs of the models, of shape [N, *shape]; scaled images, or token ids."""
    y: NDArray[Any]
    """Class indices of shape [N], targets [N, K] in their units, or labels [N, L]."""
    classes: tuple[str, ...]
    """Names of the classes, targets or labels."""


def read_test(directory: Path, client: str | None, *, trust: str = "") -> LabeledSamples:
    """Read the common test set of a run, or the test split of a client, from the run's dataset.

    Raises DataError if the data is at the sites or not found, or if there is no such test set;
    StateError if the run contains no such client; and SettingsError for untrusted code.
    """
    if read_validated(directory / "run.json", Origin).own_data:
        raise DataError(
            f"{directory}: the test samples are at the sites and are not available here. Evaluate "
            "at a site with its state directory and its own files, as with `fedhet predict`."
        )
    config = _config_of(directory, trust)
    data = open_data(config, directory)
    if client is None:
        if (split := data.common_test) is None:
            raise DataError(f"{directory}: no common test set. Pass a client, such as client-0.")
    else:
        names = [client_name(index, config.run.clients) for index in range(config.run.clients)]
        if client not in names:
            raise _unknown_client(directory, client, names)
        split = data.client(names.index(client)).test
        if not len(split):
            raise DataError(
                f"{directory}: {client} has no test split. Use the common test set, without a "
                "client."
            )
    task = data.dataset.format.task
    y = task.in_units(split.y) if isinstance(task, Regression) else split.y.numpy()
    return LabeledSamples(scaled(split.x), y, data.dataset.format.classes)


# --- samples to predict


def read_inputs(
    paths: Sequence[Path], record: ClientRecord, *, resize: bool = False, max_bytes: int = MAX_BYTES
) -> tuple[list[str], Tensor]:
    """Read the samples to predict from files, and scale them as in training.

    Args:
        paths: Image or text files, directories of such files, tables, or .npz files with an array
            `x`. Texts are also read from tables, in the run's `data.text-column`.
        record: Record of the client. It contains the kind and the shape of the model's inputs.
        resize: Whether to resize images of another size. `data.image-size` also enables resizing.
        max_bytes: Maximum size of the samples in memory. It replaces the run's `data.max-bytes`,
            because the run's settings may be untrusted.

    Returns:
        The names of the samples, and the samples of shape [N, *shape].

    Raises:
        DataError: If a file is unreadable, unsuitable or too large. The error names the file.
    """
    described = record.format
    bounds = DataSpec.for_run(record.config().run).replace(max_bytes=max_bytes)
    listed = [sorted(path.rglob("*.npz")) if path.is_dir() else [path] for path in paths]
    arrays = [path for each in listed for path in each if path.suffix == ".npz"]
    arrays = [] if described.kind == TEXT.name else arrays
    tables = [] if arrays else _tables_in(paths, described)
    if described.kind == TEXT.name:
        if tables:
            columns = bounds.text_column
            return _each_row(
                tables, bounds, columns,
                lambda table: tokenize(joined_texts(table, columns), bounds, table.path),
            )  # fmt: skip
        texts = _files_in(paths, TEXTS)
        return texts, TEXTS.read(texts, bounds, None)
    if (
        isinstance(record, ServerRecord)
        and not record.is_complete
        and described.kind == TABLE.name
        and not arrays
    ):
        raise DataError(
            f"{paths[0]}: the server does not know the columns. To predict the rows of a table, "
            "copy schema.toml of a site into the run directory."
        )
    if (schema := described.schema) is not None and schema.columns and not arrays:
        return _each_row(tables, bounds, (), lambda table: encode(schema, table))
    if arrays:
        beside = [each for path in paths if path.is_dir() for each in path.rglob("*")]
        if any(path.suffix != ".npz" for each in listed for path in each) or any(
            each.name.lower().endswith(IMAGES.endings) for each in beside
        ):
            raise DataError(f"{arrays[0]}: can be combined only with other .npz files")
        names, parts = list[str](), list[Tensor]()
        for path in arrays:
            array = read_arrays(path, ("x",), bounds, scaled=True)["x"]
            parts.append(samples_for(record, array, str(path)))
            prefix = f"{path}: " if len(arrays) > 1 else ""
            names += [f"{prefix}{row}" for row in range(len(parts[-1]))]
            check_max_bytes(sum(part.nbytes for part in parts), bounds, path)
        return names, torch.cat(parts)
    files = _files_in(paths, IMAGES)
    if described.kind != IMAGE.name or described.shape[0] not in MODES:
        raise DataError(
            f"{files[0]}: {record.client}'s model expects samples of shape "
            f"{list(described.shape)}, got an "
            "image. Use an .npz file with an array x."
        )
    channels, height, width = described.shape
    resize = resize or bool(record.settings.get("data.image-size"))
    rule = f"the input size of the model of {record.client}"
    form = Form(MODES[channels], (width, height), resize, rule, "Use --resize to resize images.")
    check_max_bytes(4 * len(files) * prod(form.shape), bounds, f"{files[0]} and the other images")
    return files, samples_for(record, np.concatenate(list(decode_blocks(files, form))), files[0])


def samples_for(record: ClientRecord, x: Any, where: str = "x") -> Tensor:
    """Convert samples to model inputs: a float32 array of shape [N, *shape], or token ids.

    uint8 values are scaled like the client's images, floats must already be scaled, and texts must
    be a sequence of str. Raises DataError, prefixed with `where`, if the type, shape, or range is
    unsuitable.
    """
    described = record.format
    if described.kind == TEXT.name:
        if isinstance(x, Tensor) and not x.is_floating_point():  # Token ids, as in a test set.
            return scaled(torch.from_numpy(KINDS[described.kind].checked(x.numpy(), where)))
        if isinstance(x, str) or not all(isinstance(text, str) for text in x):
            raise DataError(f"{where}: {record.client}'s model expects texts (a sequence of str)")
        return tokenize(list(x), DataSpec.for_run(record.config().run), where)
    shape = described.shape
    kind = KINDS[described.kind]
    if hasattr(x, "columns"):
        fix = "Use x[COLUMNS].to_numpy(), with the columns in the order of the training samples."
        raise DataError(f"{where}: expected an array, got columns, whose names are unknown. {fix}")
    given = as_array(x)
    if given.dtype.kind in "OSU":
        raise DataError(
            f"{where}: expected an array of numbers, got {given.dtype}. Use `fedhet predict` to "
            "predict files or the rows of a table."
        )
    values, expected = kind.checked(given, where), kind.blank(1, shape).shape[1:]
    if values.shape[1:] != expected:
        raise DataError(
            f"{where}: {record.client}'s model expects samples of shape {list(expected)}, got "
            f"{list(values.shape[1:])}"
        )
    is_bytes = values.dtype == np.uint8
    if is_bytes and described.stored == "given":
        raise DataError(
            f"{where}: expected unscaled float32 in the range of {record.client}'s training "
            "samples, got uint8"
        )
    if (
        not is_bytes
        and described.stored != "given"
        and np.abs(values).max(initial=0) > 1 + ROUNDING
    ):
        raise DataError(
            f"{where}: expected uint8, or floats scaled to [-1, 1], got "
            f"{values.flat[np.abs(values).argmax()]:g}"
        )
    return scaled(torch.from_numpy(values))


def _tables_in(paths: Sequence[Path], described: Format) -> list[Path]:
    """Return the tables in `paths`, including those directly in directories.

    Returns [] if the model's samples are not rows of a table, or texts, or if texts are in files of
    their own. Raises DataError if there are tables and other files, or no table for rows.
    """
    has_columns = described.schema is not None and bool(described.schema.columns)
    if described.kind != TEXT.name and not has_columns:
        return []
    listed = [
        sorted(path.iterdir(), key=lambda each: natural(each.name)) if path.is_dir() else [path]
        for path in paths
    ]
    tables = [path for each in listed for path in each if path.name.lower().endswith(ENDINGS)]
    others = [path for path in paths if not path.is_dir() and path not in tables]
    if (others and tables) or not (tables or described.kind == TEXT.name):
        raise DataError(
            f"{(others or paths)[0]}: expected tables ending in one of {', '.join(ENDINGS)}"
        )
    return tables


def _each_row(
    paths: Sequence[Path],
    bounds: DataSpec,
    texts: Sequence[str],
    encoded: Callable[[Table], Tensor],
) -> tuple[list[str], Tensor]:
    """Return the name of each row of several tables, and the encoded rows [N, ...]."""
    tables: list[Table] = []
    for path in paths:
        tables.append(read_table(path, bounds, tables[-1].size if tables else 0, texts=texts))
    names = [
        f"{f'{table.path}: ' if len(tables) > 1 else ''}row {row}"
        for table in tables
        for row in range(1, len(table) + 1)
    ]
    return names, torch.cat([encoded(table) for table in tables])


def _files_in(paths: Sequence[Path], files: Files) -> list[str]:
    """Return the files in `paths`, and the sample files in directories, in natural order.

    Directories are read recursively. The number of other files is logged. Raises DataError if there
    are no samples.
    """
    names: list[str] = []
    for path in paths:
        if not path.is_dir():
            names.append(str(path))
            continue
        walk = Walk(files)
        names += sorted(walk.below(path), key=natural)
        walk.warn(path)
    if not names:
        raise DataError(f"expected paths of {files.noun}, got none")
    return names
