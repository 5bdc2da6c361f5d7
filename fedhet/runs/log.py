"""Writes a run's files, and notifies watchers of its events: displays, trackers, and users' own.

config.toml  run.json  partition.json  metrics.jsonl (a record a round)  summary.json  tensorboard/
checkpoints/ (the server's state after the last rounds, from which a run can be resumed)

A tracker is a watcher that sends a run's numbers to Weights & Biases, MLflow or Prometheus. What
goes wrong with it once the run has started costs its numbers, with a warning, and not the run.
"""

from __future__ import annotations

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

from torch.utils.tensorboard import SummaryWriter

from fedhet.base import versions
from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import FedhetError, SettingsError, one_line, typed
from fedhet.base.metrics import ACCURACY
from fedhet.config.resolve import Config
from fedhet.config.sources import read_toml
from fedhet.runs.directory import (
    append,
    check_same,
    claimed,
    create,
    last_round,
    read_records,
    read_run_name,
    read_validated,
    record_line,
    summary_text,
)
from fedhet.runs.measures import best_round, final_scores, peak_memory_mb, scalars
from fedhet.runs.records import (
    MAX_BYTES,
    OWN_DATA,
    Origin,
    PastRound,
    RoundRecord,
    RunSeconds,
    Spent,
    Summary,
)
from fedhet.runs.storage import Checkpoint, Checkpoints
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import Scalar
from fedhet.wire.identity import ClientInfo

LOG = logging.getLogger("fedhet")
PROJECT = "fedhet"
"""The project of W&B, and the experiment of MLflow, that runs are sent to."""


class Watcher:
    """Is notified of a run's events; calls must be short and must not fail. By default a no-op."""

    def waiting(self, what: str) -> None:
        """What the run waits for before its first round, such as "starting Ray"."""

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """The run has started; `models` maps client names to models."""

    def set_aside(self, clients: Mapping[str, str]) -> None:
        """Clients that the next round leaves out: each "late", "resting", "excluded" or "away"."""

    def round_started(self, number: int, asked: Sequence[str]) -> None:
        """A round has started; `asked` are its clients."""

    def client_started(self, client: str) -> None:
        """A client trains now, as far as the server can tell; see `RunLog.client_answered`."""

    def client_answered(self, client: str, error: str) -> None:
        """A client has replied or, if `error` is not empty, has failed."""

    def round_finished(self, record: RoundRecord) -> None:
        """The round has been aggregated and evaluated."""

    def notice(self, text: str) -> None:
        """A message for the user."""

    def rounds_restored(self, records: Sequence[RoundRecord]) -> None:
        """The run resumes after these rounds, which an earlier process recorded."""

    def run_finished(self, summary: Summary) -> None:
        """The last round has ended."""

    def run_failed(self, reason: str) -> None:
        """The run has ended without a result; `reason` is one line."""


class RunLog:
    """Writes a run's files and passes its events to watchers."""

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
        """`begun`: when the run began, by `time.perf_counter`; None: now.

        `deployed`: its clients are reached over the network.
        """
        self.config, self.directory, self.watchers = config, directory, tuple(watchers)
        self.models: dict[str, str] = {}
        self.training: dict[str, str] = {}
        """What each client trains with, in words."""
        self.resumed: Checkpoint | None = None
        """The checkpoint from which the run resumes; None for a new run."""
        self.workers = workers
        """Number of clients that train at once."""
        self._queue: OrderedDict[str, None] = OrderedDict()
        """The clients that were asked in this round and have not begun to train."""
        self._queue_lock = threading.Lock()
        """Clients answer in several threads."""
        self._origin = Origin(deployed=deployed)
        self._history: list[RoundRecord] = []
        self._seconds = RunSeconds()
        self._begun = time.perf_counter() if begun is None else begun
        self._earlier = 0.0
        """Seconds of the rounds before the run was resumed."""
        if config.run.resume and (directory / "config.toml").exists():
            check_same(config, directory)
            self._claim = claimed(directory)
            self._resume()
        else:
            create(directory)
            self._claim = claimed(directory)
            # Of fixed length, so that it does not affect byte counts. No result depends on it.
            self._origin.run = f"{config.method.name}-{secrets.token_hex(6)}"
            self._origin.started = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
            self._write_origin()
            write_text(directory / "config.toml", config.to_toml())
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=self.done + 1)

    @property
    def run_name(self) -> str:
        """The run's name, as clients know it."""
        return self._origin.run

    @property
    def done(self) -> int:
        """The number of rounds completed before this process started."""
        return self.resumed.round if self.resumed else 0

    @property
    def checkpoints(self) -> Checkpoints:
        """The server's states after the last rounds, from which the run can be resumed."""
        identity = {"run": self.run_name, "method": self.config.method.name}
        return Checkpoints(self.directory, identity)

    def _resume(self) -> None:
        """Resume the run after the last round of which record and checkpoint are whole."""
        origin = read_validated(self.directory / "run.json", Origin)
        now = {"run": read_run_name(self.directory), "deployed": self._origin.deployed, "fault": ""}
        self._origin = origin.model_copy(update=now)
        self._write_origin()
        metrics = self.directory / "metrics.jsonl"
        found = read_records(metrics)[0] if metrics.exists() else []
        recorded = [record for number, record in enumerate(found, 1) if record.round == number]
        self.resumed = self.checkpoints.newest(self.notice, len(recorded))
        self.checkpoints.forget_after(self.done)
        self._history = recorded[: self.done]
        write_text(metrics, "".join(map(record_line, self._history)))
        for record in self._history:
            self._seconds.add(record.seconds)
        self._earlier = self._seconds.total
        before = read_toml(self.directory / "config.toml").get("rounds")
        write_text(self.directory / "config.toml", self.config.to_toml())
        Folder(self.directory).remove(["summary.json"])
        self.notice(f"resuming after round {self.done} of {self.config.run.rounds}")
        schedule = self.config.run.training.follows_rounds
        if schedule and before != self.config.run.rounds:
            self.notice(
                f"the learning rate ({schedule}) was scheduled for {before} rounds; from now on "
                f"it is scheduled for {self.config.run.rounds}"
            )

    def _write_origin(self) -> None:
        write_text(self.directory / "run.json", self._origin.model_dump_json())

    @property
    def kept_too(self) -> dict[str, Scalar]:
        """What a client is told of the models that it is to keep besides the last ones.

        These are those of the round with the best headline accuracy so far; 0: none was evaluated.
        """
        best = best_round(self._history, self.config.method.spec.headline)
        return {"best": best} if self.config.run.keep_best else {}

    def ending(self, run: RunSettings) -> RunSettings:
        """Return the run's settings with the last round as it is known now; tell if it is new."""
        if (last := self.last_round) >= run.rounds:
            return run
        self.notice(
            f"round {last} is the last: the accuracy has not risen for {run.early_stopping} "
            "evaluations ('early-stopping')"
        )
        return run.model_copy(update={"rounds": last})

    @property
    def last_round(self) -> int:
        """The last round, as far as it is known now: early stopping may bring it forward."""
        return last_round(self._history, self.config)

    def begin(self, clients: Iterable[ClientInfo], classes: Sequence[str] = ()) -> None:
        """Record the clients that the run starts with, and the class names if they are known."""
        found = list(clients)
        self.joined(found)
        self._origin.own_data = any(client.own_data for client in found)
        self._origin.classes = list(classes)
        self._write_origin()
        for watcher in self.watchers:
            watcher.run_started(self.config, self.directory, self.models, self.dataset)
            if self._history:
                watcher.rounds_restored(self._history)
        privacy = self.config.run.privacy
        if privacy.is_on:
            self.notice(privacy.describe_budget(self.config.run.rounds))
        if warning := self.config.method.spec.warning:
            self.notice(warning)

    @property
    def dataset(self) -> str:
        """The data set, in words if the clients have their own."""
        return OWN_DATA if self._origin.own_data else self.config.run.data.dataset

    def joined(self, clients: Iterable[ClientInfo]) -> None:
        """Record clients that have joined since."""
        found = list(clients)
        models = self.models | {client.name: client.model for client in found}
        training = self.training | {client.name: client.training for client in found}
        self.models, self.training = dict(sorted(models.items())), dict(sorted(training.items()))
        if self._origin.models != self.models:
            self._origin.models = self.models
            self._write_origin()

    def round_started(
        self, number: int, asked: Sequence[str], aside: Mapping[str, str] | None = None
    ) -> None:
        """Notify watchers of the start of a round, and of the clients that it leaves out."""
        if math.isnan(self._seconds.start):
            self._seconds.start = time.perf_counter() - self._begun
        for watcher in self.watchers:
            watcher.set_aside(aside or {})
            watcher.round_started(number, asked)
        with self._queue_lock:
            first, self._queue = asked[: self.workers], OrderedDict.fromkeys(asked[self.workers :])
        self._started(first)

    def waiting(self, what: str) -> None:
        """Tell watchers what the run waits for before its first round."""
        for watcher in self.watchers:
            watcher.waiting(what)

    def client_answered(self, client: str, error: str = "") -> None:
        """Notify watchers of a client's reply, and that the next one has begun to train.

        `workers` clients train at once, roughly in the order in which they are asked.
        """
        for watcher in self.watchers:
            watcher.client_answered(client, one_line(error))
        with self._queue_lock:
            if client in self._queue:  # it was earlier than its turn
                del self._queue[client]
                return
            following = [self._queue.popitem(last=False)[0]] if self._queue else []
        self._started(following)

    def _started(self, clients: Iterable[str]) -> None:
        for client in clients:
            for watcher in self.watchers:
                watcher.client_started(client)

    def notice(self, text: str) -> None:
        """Pass a notice to watchers, as one printable line: a peer may have chosen its words."""
        for watcher in self.watchers:
            watcher.notice(one_line(text))

    def round_finished(self, record: RoundRecord) -> None:
        """Write a round's record and notify watchers."""
        self._history.append(record)
        self._seconds.add(record.seconds)
        append(self.directory / "metrics.jsonl", record_line(record))
        for name, value in scalars(record, self.config.method.name, clients=True):
            self._board.add_scalar(name, value, record.round)
        for watcher in self.watchers:
            watcher.round_finished(record)

    def finish(self) -> Summary:
        """Write summary.json and pass the summary to watchers; return it."""
        self._board.close()
        summary = self._summary()
        write_text(self.directory / "summary.json", summary_text(summary))
        for watcher in self.watchers:
            watcher.run_finished(summary)
        self._claim.close()
        return summary

    def fail(self, error: Exception) -> None:
        """Record why the run failed, in run.json, and notify watchers."""
        self._origin.fault = str(error) if isinstance(error, FedhetError) else typed(error)
        self._write_origin()
        for watcher in self.watchers:
            watcher.run_failed(self._origin.fault)

    def missing_result(self) -> str:
        """Return why the run has no result, or "" if it has one.

        It has none if no client has answered in the last rounds, or if no model could be evaluated.
        """
        asked = [record for record in self._history if record.asked]
        last = list(takewhile(lambda record: not record.answered, reversed(asked)))
        if not last:
            record = self._history[-1] if self._history else RoundRecord(0)
            if record.accuracy or not self._history:
                return ""
            found = {**record.failed, **record.unevaluated}
            why = [f"; client {name}: {reason}" for name, reason in sorted(found.items())]
            return f"no client could be evaluated in round {record.round}{why[0] if why else ''}"
        why = [f"{name}: {reason}" for name, reason in sorted(last[0].failed.items())]
        since = "in any round" if len(last) == len(asked) else f"since round {last[-1].round}"
        return f"no client has answered {since}: {why[0] if why else 'see the notices'}"

    def _summary(self) -> Summary:
        history, last = self._history, self._history[-1] if self._history else RoundRecord(0)
        total = self._earlier + time.perf_counter() - self._begun
        scores = final_scores(history)
        headline: str = self.config.method.spec.headline
        if last.accuracy and headline not in last.accuracy:  # only the other one has a test set
            headline = min(last.accuracy)
        return Summary(
            method=self.config.method.name,
            dataset=self.dataset,
            seed=self.config.run.seed,
            rounds=len(history),
            clients=len(self.models),
            models=self.models,
            training=self.training,
            headline=headline,
            accuracy=scores.pop(ACCURACY, {}),
            relative=last.relative,
            metrics=scores,
            privacy={
                name: Spent(epsilon=epsilon, delta=self.config.run.privacy.delta)
                for name, epsilon in last.epsilon.items()
            },
            history=[PastRound.of(record) for record in history],
            # Sums of records that were tampered with may exceed what fits.
            bytes_up=min(sum(each.bytes_up for each in history), MAX_BYTES),
            bytes_down=min(sum(each.bytes_down for each in history), MAX_BYTES),
            bytes_evaluation=min(sum(each.bytes_evaluation for each in history), MAX_BYTES),
            seconds=self._seconds.model_copy(update={"total": total}).rounded(),
            peak_memory_mb=round(
                max([peak_memory_mb(), *(each.peak_memory_mb for each in history)]), 1
            ),
            versions=versions(),
        )


# --- trackers

Opened = tuple[Callable[[dict[str, float], int], object], Callable[[], object]]
"""What sends a round's numbers, and what closes the run."""


def wandb(library: Any, config: Config, directory: Path) -> Opened:
    """Open a run at Weights & Biases, where a resumed one continues.

    `WANDB_MODE=offline` keeps it in the run's directory.
    """
    run = library.init(
        project=PROJECT, name=directory.name, id=read_run_name(directory), dir=str(directory),
        config=config.flat(), resume="allow",
    )  # fmt: skip
    return lambda found, round: run.log(found, step=round), run.finish


def mlflow(library: Any, config: Config, directory: Path) -> Opened:
    """Open a run at `MLFLOW_TRACKING_URI`; a resumed one is another there."""
    library.set_experiment(PROJECT)
    library.start_run(run_name=directory.name, tags={"fedhet.run": read_run_name(directory)})
    library.log_params({name: str(value)[:500] for name, value in config.flat().items()})
    return lambda found, round: library.log_metrics(found, step=round), library.end_run


def prometheus(library: Any, config: Config, directory: Path) -> Opened:
    """Write the last round's numbers into metrics.prom, for node_exporter's textfile collector.

    Nothing listens: what gathers the file is the machine's own.
    """
    labels = {"run": directory.name, "method": config.method.name}
    values: dict[str, float] = {"rounds": config.run.rounds, "finished": 0}

    def write(changed: Mapping[str, float]) -> None:
        values.update(changed)
        registry = library.CollectorRegistry()
        for name, value in values.items():
            metric = f"fedhet_{re.sub('[^a-zA-Z0-9]+', '_', name)}"
            words = f"{name} of a run's last round"
            gauge = library.Gauge(metric, words, list(labels), registry=registry)
            gauge.labels(**labels).set(value)
        write_text(directory / "metrics.prom", library.generate_latest(registry).decode())

    def send(found: dict[str, float], round: int) -> None:
        write({**found, "round": round, "round_ended_timestamp_seconds": time.time()})

    return send, lambda: write({"finished": 1})


TRACKERS: Mapping[str, tuple[Callable[[Any, Config, Path], Opened], str]] = {
    "wandb": (wandb, "wandb"),
    "mlflow": (mlflow, "mlflow"),
    "prometheus": (prometheus, "prometheus_client"),
}
"""By the value of `engine.track`: what opens a run, and the package that it is given."""


class Tracker(Watcher):
    """Sends each round's numbers to a tracker; the first call that fails switches it off."""

    def __init__(self, name: str, library: Any) -> None:
        self._name, self._library, self._off = name, library, False

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Open the run at the tracker, with its settings."""
        self._method = config.method.name

        def begin() -> None:
            self._send, self._close = TRACKERS[self._name][0](self._library, config, directory)

        self._try(begin)

    def round_finished(self, record: RoundRecord) -> None:
        """Send the round's numbers."""
        found = {n: v for n, v in scalars(record, self._method) if math.isfinite(v)}
        self._try(lambda: self._send(found, record.round))

    def run_finished(self, summary: Summary) -> None:
        """Close the run at the tracker."""
        self._try(lambda: self._close())

    def _try(self, call: Callable[[], object]) -> None:
        if self._off:
            return
        try:
            call()
        except Exception as error:  # the library's own, and the network's
            self._off = True
            name, fault = self._name.capitalize(), one_line(str(error))[:200]
            LOG.warning("%s is switched off for the rest of the run: %s", name, fault)


def trackers_of(config: Config) -> list[Watcher]:
    """Return the run's trackers. Raises SettingsError if the library is not installed."""
    name = config.run.engine.track
    if name == "none":
        return []
    package = TRACKERS[name][1]
    try:
        return [Tracker(name, importlib.import_module(package))]
    except ImportError:
        raise SettingsError(
            f"setting 'engine.track' = {name!r}: needs the package '{package}': "
            f"pip install 'fedhet[{name}]'"
        ) from None
