"""Log of a run: writes the run's files and notifies watchers, such as displays and trackers.

Files in the run's directory:

config.toml  run.json  partition.json  metrics.jsonl (one record per round)  summary.json
confusion.json (classification)  tensorboard/
checkpoints/ (server states of the last rounds, from which a run can be resumed)

A tracker is a watcher that sends metrics to Weights & Biases, MLflow or Prometheus. If a tracker
fails after the start of the run, it is disabled with a warning, and the run continues.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from fedhet.base import commit, versions
from fedhet.base.arrays import Array
from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import (
    FedhetError,
    SettingsError,
    StateError,
    describe_error,
    one_line,
)
from fedhet.base.metrics import ACCURACY, metric_of
from fedhet.config.resolve import Config
from fedhet.config.sources import read_toml
from fedhet.learning.devices import hardware
from fedhet.runs.directory import (
    append,
    check_same,
    create,
    last_round,
    lock,
    read_if_exists,
    read_records,
    read_run_name,
    read_validated,
    record_line,
    summary_text,
    with_given_places,
)
from fedhet.runs.measures import (
    best_round,
    final_scores,
    headline_column,
    peak_memory_mb,
    scalars,
    selection_basis,
)
from fedhet.runs.records import (
    COMMON,
    MAX_BYTES,
    OWN_DATA,
    Confusion,
    ConfusionMatrix,
    ConsumedBudget,
    Headline,
    Origin,
    Partition,
    PastRound,
    RoundRecord,
    RunSeconds,
    Summary,
)
from fedhet.runs.storage import OPEN, Checkpoint, Checkpoints, ClientStore
from fedhet.settings.run import RunSettings, without_effect
from fedhet.settings.schema import Scalar
from fedhet.wire.identity import SERVER, ClientInfo

LOG = logging.getLogger("fedhet")
PROJECT = "fedhet"
"""Project name in W&B and experiment name in MLflow."""


class Watcher:
    """Base class for observers of a run. Methods must return quickly and must not raise.

    Each method does nothing by default.
    """

    def waiting(self, phase: str) -> None:
        """Called when the run waits before its first round, e.g. with the phase "starting Ray"."""

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Called when the run starts. `models` maps client names to model names."""

    def clients_excluded(self, clients: Mapping[str, str]) -> None:
        """Called before a round. `clients` maps each excluded client to its `State`."""

    def round_started(self, number: int, asked: Sequence[str]) -> None:
        """Called when a round starts. `asked` lists the sampled clients."""

    def client_started(self, client: str) -> None:
        """Called when a client probably starts to train (see `RunLog.client_answered`)."""

    def client_answered(self, client: str, error: str) -> None:
        """Called when a client has replied or, if `error` is not empty, has failed."""

    def round_finished(self, record: RoundRecord) -> None:
        """Called when a round has been aggregated and evaluated."""

    def notice(self, text: str) -> None:
        """Called when there is a message for the user."""

    def rounds_restored(self, records: Sequence[RoundRecord]) -> None:
        """Called when a run resumes, with the records of its earlier rounds."""

    def run_finished(self, summary: Summary) -> None:
        """Called after the last round."""

    def run_failed(self, reason: str) -> None:
        """Called when the run has failed. `reason` is a single line."""


class RunLog:
    """Log of one run: writes the run's files and passes events to watchers."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        *,
        workers: int,
        watchers: Iterable[Watcher] = (),
        begun: float | None = None,
        deployed: bool = False,
    ) -> None:
        """Create the run's directory, or prepare to resume the run in it.

        `workers` clients train at the same time. `begun` is the start time of the run as returned
        by `time.perf_counter`, by default now. `deployed` is set for runs over a network. Raises
        StateError if the directory is unusable or the run cannot be resumed.
        """
        self.config, self.directory, self.watchers = config, directory, tuple(watchers)
        self.models: dict[str, str] = {}
        self.training: dict[str, str] = {}
        """Training settings of each client, as text."""
        self.resumed: Checkpoint | None = None
        """Checkpoint from which the run resumes, or None for a new run."""
        self.workers = workers
        self.server_confusion: Mapping[str, Array | None] = {}
        """Confusion matrices of the server's own models in the last evaluation, by kind."""
        self._queue: OrderedDict[str, None] = OrderedDict()
        """Clients sampled in this round that have not started to train."""
        self._queue_lock = threading.Lock()
        """Lock for `_queue`, because clients reply in several threads."""
        self._origin = Origin(deployed=deployed, headline=Headline.declared_by(config.method.spec))
        self._history: list[RoundRecord] = []
        self._seconds = RunSeconds()
        self._begun = time.perf_counter() if begun is None else begun
        self._earlier = 0.0
        """Duration of the rounds before the run was resumed, in seconds."""
        if config.run.resume and (directory / "config.toml").exists():
            check_same(config, directory)
            self._lock_file = lock(directory)
            self._resume()
        else:
            create(directory)
            self._lock_file = lock(directory)
            # The name has a constant length, so that it does not affect byte counts. The random
            # part does not affect any results.
            self._origin.run = f"{config.method.name}-{secrets.token_hex(6)}"
            self._origin.started = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
            self._write_origin()
            write_text(directory / "config.toml", config.to_toml())
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=self.done + 1)

    @property
    def run_name(self) -> str:
        """Name of the run, as used in messages."""
        return self._origin.run

    @property
    def is_deployed(self) -> bool:
        """Whether the run is deployed over a network rather than simulated."""
        return self._origin.deployed

    @property
    def done(self) -> int:
        """Number of rounds that were completed before this process started."""
        return self.resumed.round if self.resumed else 0

    @property
    def checkpoints(self) -> Checkpoints:
        """Server checkpoints of the last rounds."""
        identity = {"run": self.run_name, "method": self.config.method.name}
        return Checkpoints(self.directory, identity)

    def _resume(self) -> None:
        """Resume the run after the last round with a valid record and checkpoint."""
        origin = read_validated(self.directory / "run.json", Origin)
        name = read_run_name(self.directory)
        current = {"deployed": self._origin.deployed, "headline": self._origin.headline}
        self._origin = origin.model_copy(update={**current, "run": name, "fault": ""})
        self._write_origin()
        metrics = self.directory / "metrics.jsonl"
        records = read_records(metrics)[0] if metrics.exists() else []
        recorded = [record for number, record in enumerate(records, 1) if record.round == number]
        self.resumed = self.checkpoints.newest(self.notice, len(recorded))
        self.checkpoints.hide_after(self.done)
        is_open = self.resumed is not None and OPEN in self.resumed.metadata
        self._history = recorded[: self.done - is_open]
        write_text(metrics, "".join(map(record_line, self._history)))
        for record in self._history:
            self._seconds.add(record.seconds)
        self._earlier = self._seconds.total
        old_rounds = read_toml(self.directory / "config.toml").get("rounds")
        text = with_given_places(self.config, self.directory).to_toml()
        write_text(self.directory / "config.toml", text)
        Folder(self.directory).remove(["summary.json", "confusion.json"])
        self.notice(f"resuming after round {self.done} of {self.config.run.rounds}")
        schedule = self.config.run.training.follows_rounds
        if schedule and old_rounds != self.config.run.rounds:
            self.notice(
                f"the learning rate schedule ({schedule}) changes from {old_rounds} rounds to "
                f"{self.config.run.rounds} rounds"
            )

    def _write_origin(self) -> None:
        write_text(self.directory / "run.json", self._origin.model_dump_json())

    @property
    def best_round_config(self) -> dict[str, Scalar]:
        """Config entry that makes clients keep their models from the best round.

        The entry contains the round with the best headline score so far, or 0 if no round was
        evaluated. Without `keep-best`, the result is empty.
        """
        return {"best": self.best_round} if self.config.run.keep_best else {}

    @property
    def best_round(self) -> int:
        """Round with the best headline score so far, or 0 if there is none, or no `keep-best`."""
        if not self.config.run.keep_best:
            return 0
        return best_round(self._history, Headline.declared_by(self.config.method.spec))

    def with_last_round(self, run: RunSettings) -> RunSettings:
        """Return the settings of the run, with fewer `rounds` if the run ends early.

        In this case, watchers also receive a notice.
        """
        if (last := self.last_round) >= run.rounds:
            return run
        metric = metric_of(run.metrics[0])
        better = "decreased" if metric.lower_is_better else "increased"
        basis = selection_basis(self._history, run.data.validation_fraction)
        self.notice(
            f"round {last} is the last, because the {metric.title} has not {better} for "
            f"{run.early_stopping} evaluations ('early-stopping' on {basis})"
        )
        return run.model_copy(update={"rounds": last})

    @property
    def last_round(self) -> int:
        """Number of the last round. Early stopping can reduce this number during the run."""
        return last_round(self._history, self.config)

    def begin(
        self,
        clients: Iterable[ClientInfo],
        classes: Sequence[str] = (),
        *,
        has_common_test: bool = True,
    ) -> None:
        """Record the initial clients and, if known, the class names, and notify watchers.

        `has_common_test` tells whether models are evaluated on a common test set.
        """
        initial = list(clients)
        self.clients_joined(initial)
        self._origin.own_data = any(client.own_data for client in initial)
        self._origin.classes = list(classes)
        self._write_origin()
        for watcher in self.watchers:
            watcher.run_started(self.config, self.directory, self.models, self.dataset)
            if self._history:
                watcher.rounds_restored(self._history)
        privacy = self.config.run.privacy
        if privacy.is_on:
            self.notice(privacy.describe_budget(self.config.run.rounds))
        if privacy.secure_aggregation:
            self.notice("secure aggregation (experimental): the server receives only sums")
        run, has_scores = self.config.run, has_common_test or not privacy.hides_samples
        if privacy.hides_samples:
            reported = "scores on the common test set"
            if not has_common_test:
                reported = "no scores, because there is no common test set"
            hidden = "scores on the clients' own samples stay at the clients"
            self.notice(f"{hidden}; the run reports {reported}")
        for message in without_effect(run, has_scores=has_scores):
            self.notice(message)
        has_validation = run.data.validation and not privacy.hides_samples
        if has_scores and (run.early_stopping or run.keep_best) and not has_validation:
            self.notice(
                "'early-stopping' and 'keep-best' select rounds on test data, so the scores of the "
                "selected rounds are optimistic ('data.validation-fraction')"
            )
        if warning := self.config.method.spec.warning:
            self.notice(warning)

    @property
    def dataset(self) -> str:
        """Name of the dataset, or a description if the clients read their own data."""
        return OWN_DATA if self._origin.own_data else self.config.run.data.dataset

    def clients_joined(self, clients: Iterable[ClientInfo]) -> None:
        """Record the models and training settings of clients that joined the run."""
        new = list(clients)
        models = self.models | {client.name: client.model for client in new}
        training = self.training | {client.name: client.training for client in new}
        self.models, self.training = dict(sorted(models.items())), dict(sorted(training.items()))
        if self._origin.models != self.models:
            self._origin.models = self.models
            self._write_origin()

    def round_started(
        self, number: int, asked: Sequence[str], excluded: Mapping[str, str] | None = None
    ) -> None:
        """Notify watchers of the start of a round and of the excluded clients."""
        if math.isnan(self._seconds.start):
            self._seconds.start = time.perf_counter() - self._begun
        for watcher in self.watchers:
            watcher.clients_excluded(excluded or {})
            watcher.round_started(number, asked)
        with self._queue_lock:
            first, self._queue = asked[: self.workers], OrderedDict.fromkeys(asked[self.workers :])
        self._started(first)

    def waiting(self, phase: str) -> None:
        """Notify watchers that the run waits before its first round."""
        for watcher in self.watchers:
            watcher.waiting(phase)

    def client_answered(self, client: str, error: str = "") -> None:
        """Notify watchers that a client has replied, and that the next client starts to train.

        Assumes that `workers` clients train at the same time, in the order in which they are
        called.
        """
        for watcher in self.watchers:
            watcher.client_answered(client, one_line(error))
        with self._queue_lock:
            if client in self._queue:  # The client replied before its expected start.
                del self._queue[client]
                return
            following = [self._queue.popitem(last=False)[0]] if self._queue else []
        self._started(following)

    def _started(self, clients: Iterable[str]) -> None:
        for client in clients:
            for watcher in self.watchers:
                watcher.client_started(client)

    def notice(self, text: str) -> None:
        """Pass a notice to watchers as one printable line, because parts of it may be untrusted."""
        for watcher in self.watchers:
            watcher.notice(one_line(text))

    def round_finished(self, record: RoundRecord) -> None:
        """Write the record of a round and notify watchers."""
        self._history.append(record)
        self._seconds.add(record.seconds)
        append(self.directory / "metrics.jsonl", record_line(record))
        column = headline_column(self._history, Headline.declared_by(self.config.method.spec))
        for name, value in scalars(record, self.config.method.name, column, clients=True):
            self._board.add_scalar(name, value, record.round)
        for watcher in self.watchers:
            watcher.round_finished(record)

    def finish(self) -> Summary:
        """Write summary.json, notify watchers, and return the summary."""
        self._board.close()
        summary = self._summary()
        if (confusion := self._confusion()) is not None:
            write_text(self.directory / "confusion.json", confusion.model_dump_json())
        write_text(self.directory / "summary.json", summary_text(summary))
        for watcher in self.watchers:
            watcher.run_finished(summary)
        self.close()
        return summary

    def fail(self, error: Exception) -> None:
        """Record the error of a failed run in run.json, and notify watchers."""
        self._origin.fault = str(error) if isinstance(error, FedhetError) else describe_error(error)
        self._write_origin()
        for watcher in self.watchers:
            watcher.run_failed(self._origin.fault)

    def close(self) -> None:
        """Close the TensorBoard file and release the lock, so that the run can be resumed."""
        self._board.close()
        self._lock_file.close()

    def missing_result(self) -> str:
        """Return the reason why the run has no result, or "" if it has a result.

        A run has no result if no client sent a valid reply in the last rounds, or if no model could
        be evaluated.
        """
        asked = [record for record in self._history if record.asked]
        last = list(takewhile(lambda record: not record.answered, reversed(asked)))
        if not last:
            record = self._history[-1] if self._history else RoundRecord(0)
            if record.scores or not self._history:
                return ""
            if self.config.run.privacy.hides_samples and not record.unevaluated:
                return ""  # Scores on the sites' own samples stay at the sites.
            title = metric_of(self.config.run.metrics[0]).title
            reasons = sorted({**record.failed, **record.unevaluated}.items())
            example = f"; no client has test samples that define the {title}"
            if reasons:
                example = f"; client {reasons[0][0]}: {reasons[0][1]}"
            return f"no client could be evaluated in round {record.round}{example}"
        failures = [f"{name}: {reason}" for name, reason in sorted(last[0].failed.items())]
        since = "in any round" if len(last) == len(asked) else f"since round {last[-1].round}"
        example = failures[0] if failures else "see the notices"
        return f"no client has sent a valid reply {since}: {example}"

    def _confusion(self) -> Confusion | None:
        """Return the confusion matrices of the headline models on the common test set, if known.

        A client's matrix is used only if it belongs to the recorded accuracy.
        """
        last = self._history[-1] if self._history else RoundRecord(0)
        headline = Headline.declared_by(self.config.method.spec)
        if not (scores := last.accuracy.get(COMMON, {})):
            return None
        kind = headline.ordered_kinds(COMMON, scores)[0]
        found: dict[str, list[tuple[str, int, Array]]] = {}
        without = []
        for name, accuracy in scores[kind].per_client.items():
            counts = self.server_confusion.get(kind)
            if name != SERVER:
                store = ClientStore(self.directory / "state", self.run_name, name)
                counts = None if self.is_deployed else store.confusion()
            samples = last.tested.get(COMMON, {}).get(name, 0)
            if counts is None or not samples or abs(np.trace(counts) / samples - accuracy) > 1e-9:
                without.append(name)
                continue
            found.setdefault(self.models.get(name, ""), []).append((name, samples, counts))
        matrices = []
        for model, parts in sorted(found.items()):
            names, sizes, each = zip(*parts, strict=True)
            if kind == "global" and all(np.array_equal(matrix, each[0]) for matrix in each):
                sizes, each = sizes[:1], each[:1]  # All clients have the same model.
            total = np.sum(each, axis=0, dtype=np.int64).tolist()
            matrices.append(
                ConfusionMatrix(model=model, clients=list(names), samples=sum(sizes), counts=total)
            )
        if not matrices:
            return None
        partition = self._partition()
        classes = self._origin.classes or (partition.classes if partition else [])
        return Confusion(kind=kind, classes=classes, matrices=matrices, without=without)

    def _partition(self) -> Partition | None:
        with contextlib.suppress(StateError):  # A damaged file must not prevent the summary.
            return read_if_exists(self.directory / "partition.json", Partition)
        return None

    def _summary(self) -> Summary:
        history, last = self._history, self._history[-1] if self._history else RoundRecord(0)
        total = self._earlier + time.perf_counter() - self._begun
        scores = final_scores(history)
        headline = Headline.declared_by(self.config.method.spec)
        evaluated = last.scores.get(last.metric, {})
        protocol, _ = headline.column(evaluated) or (headline.protocol, "")
        partition = self._partition()
        return Summary(
            method=self.config.method.name,
            dataset=self.dataset,
            seed=self.config.run.seed,
            rounds=len(history),
            clients=len(self.models),
            models=self.models,
            owners=partition.owners if partition else {},
            training=self.training,
            test_samples=partition.test_samples if partition else {},
            headline=protocol,
            headline_kinds={
                name: headline.ordered_kinds(name, kinds)[0]
                for name, kinds in evaluated.items()
                if kinds
            },
            metric="" if last.metric == ACCURACY else last.metric,
            accuracy=scores.pop(ACCURACY, {}),
            relative=last.relative,
            metrics=scores,
            privacy={
                name: ConsumedBudget(epsilon=epsilon, delta=self.config.run.privacy.delta)
                for name, epsilon in last.epsilon.items()
            },
            history=[PastRound.from_record(record) for record in history],
            # The sums may exceed the limit if a user has edited the records.
            bytes_up=min(sum(each.bytes_up for each in history), MAX_BYTES),
            bytes_down=min(sum(each.bytes_down for each in history), MAX_BYTES),
            bytes_evaluation=min(sum(each.bytes_evaluation for each in history), MAX_BYTES),
            seconds=self._seconds.model_copy(update={"total": total}).rounded(),
            peak_memory_mb=round(
                max([peak_memory_mb(), *(each.peak_memory_mb for each in history)]), 1
            ),
            versions=versions(),
            commit=commit(),
            hardware=hardware(self.config.run.engine.device),
        )


# --- trackers

Opened = tuple[Callable[[dict[str, float], int], object], Callable[[], object]]
"""Two functions: the first sends a round's metrics, and the second closes the run."""


def wandb(library: Any, config: Config, directory: Path) -> Opened:
    """Open a run in Weights & Biases. A resumed run continues its earlier W&B run.

    With `WANDB_MODE=offline`, the metrics are stored in the run's directory.
    """
    run = library.init(
        project=PROJECT, name=directory.name, id=read_run_name(directory), dir=str(directory),
        config=config.flat(), resume="allow",
    )  # fmt: skip
    return lambda metrics, round: run.log(metrics, step=round), run.finish


def mlflow(library: Any, config: Config, directory: Path) -> Opened:
    """Open a new MLflow run at `MLFLOW_TRACKING_URI`, even if fedhet's run is resumed."""
    library.set_experiment(PROJECT)
    library.start_run(run_name=directory.name, tags={"fedhet.run": read_run_name(directory)})
    library.log_params({name: str(value)[:500] for name, value in config.flat().items()})
    return lambda metrics, round: library.log_metrics(metrics, step=round), library.end_run


def prometheus(library: Any, config: Config, directory: Path) -> Opened:
    """Write the last round's metrics to metrics.prom, for node_exporter's textfile collector.

    Does not open a port.
    """
    labels = {"run": directory.name, "method": config.method.name}
    values: dict[str, float] = {"rounds": config.run.rounds, "finished": 0}

    def write_metrics(changed: Mapping[str, float]) -> None:
        values.update(changed)
        registry = library.CollectorRegistry()
        for name, value in values.items():
            metric = f"fedhet_{re.sub('[^a-zA-Z0-9]+', '_', name)}"
            help = f"{name} of a run's last round"
            gauge = library.Gauge(metric, help, list(labels), registry=registry)
            gauge.labels(**labels).set(value)
        write_text(directory / "metrics.prom", library.generate_latest(registry).decode())

    def send(metrics: dict[str, float], round: int) -> None:
        write_metrics({**metrics, "round": round, "round_ended_timestamp_seconds": time.time()})

    return send, lambda: write_metrics({"finished": 1})


TRACKERS: Mapping[str, tuple[Callable[[Any, Config, Path], Opened], str]] = {
    "wandb": (wandb, "wandb"),
    "mlflow": (mlflow, "mlflow"),
    "prometheus": (prometheus, "prometheus_client"),
}
"""Function that opens a run, and the package that it requires, by name in `engine.track`."""


class Tracker(Watcher):
    """Watcher that sends each round's metrics to a tracking service, until the first error."""

    def __init__(self, name: str, library: Any) -> None:
        self._name, self._library, self._is_disabled = name, library, False
        self._records: list[RoundRecord] = []

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Open the run in the tracking service, and send the run's settings."""
        self._method, self._headline = config.method.name, Headline.declared_by(config.method.spec)

        def begin() -> None:
            self._send, self._close = TRACKERS[self._name][0](self._library, config, directory)

        self._try(begin)

    def rounds_restored(self, records: Sequence[RoundRecord]) -> None:
        """Store the records of the earlier rounds, which determine the kind of the headline."""
        self._records = list(records)

    def round_finished(self, record: RoundRecord) -> None:
        """Send the metrics of the round."""
        self._records.append(record)
        column = headline_column(self._records, self._headline)
        metrics = {n: v for n, v in scalars(record, self._method, column) if math.isfinite(v)}
        self._try(lambda: self._send(metrics, record.round))

    def run_finished(self, summary: Summary) -> None:
        """Close the run at the tracking service."""
        self._try(lambda: self._close())

    def _try(self, call: Callable[[], object]) -> None:
        if self._is_disabled:
            return
        try:
            call()
        except Exception as error:  # The library or the network may raise any exception.
            self._is_disabled = True
            name, fault = self._name.capitalize(), one_line(str(error))[:200]
            LOG.warning("%s is disabled for the rest of the run: %s", name, fault)


def trackers_of(config: Config) -> list[Watcher]:
    """Create the run's trackers. Raises SettingsError if the library is not installed."""
    trackers: list[Watcher] = []
    for name in config.run.engine.track:
        package = TRACKERS[name][1]
        try:
            trackers.append(Tracker(name, importlib.import_module(package)))
        except ImportError:
            raise SettingsError(
                f"setting 'engine.track' = {name!r}: package '{package}' not found. Install it "
                f"with pip install 'fedhet[{name}]'."
            ) from None
    return trackers
