"""Trackers: a run's numbers in Weights & Biases, MLflow or Prometheus, besides its own files.

A tracker is a watcher of the run. What goes wrong with it once the run has started costs its
numbers, with a warning, and not the run.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedhet.base.disk import write_text
from fedhet.base.errors import SettingsError, one_line
from fedhet.config.resolve import Config
from fedhet.runs.directory import read_run_name
from fedhet.runs.log import Watcher
from fedhet.runs.measures import scalars
from fedhet.runs.records import RoundRecord, Summary

LOG = logging.getLogger("fedhet")
PROJECT = "fedhet"


class Tracker(Watcher):
    """Base of the trackers: calls of the library that fail switch it off."""

    package = ""
    """The package that it needs, as it is imported."""

    def __init__(self, library: Any) -> None:
        self._library, self._method, self._off = library, "", False

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Open the run at the tracker, with its settings."""
        self._method = config.method.name
        self._try(lambda: self.open(config, directory))

    def round_finished(self, record: RoundRecord) -> None:
        """Send the round's numbers."""
        found = {n: v for n, v in scalars(record, self._method) if math.isfinite(v)}
        self._try(lambda: self.send(found, record.round))

    def run_finished(self, summary: Summary) -> None:
        """Close the run at the tracker."""
        self._try(self.close)

    def open(self, config: Config, directory: Path) -> None:
        """Open the run."""
        raise NotImplementedError

    def send(self, found: Mapping[str, float], round: int) -> None:
        """Send numbers by their names."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the run."""
        raise NotImplementedError

    def _try(self, call: Callable[[], None]) -> None:
        if self._off:
            return
        try:
            call()
        except Exception as error:  # the library's own, and the network's
            self._off = True
            fault = one_line(str(error))[:200]
            LOG.warning(
                "%s is switched off for the rest of the run: %s", type(self).__name__, fault
            )


class Wandb(Tracker):
    """Sends a run to Weights & Biases; `WANDB_MODE=offline` keeps it in the run's directory."""

    package = "wandb"

    def open(self, config: Config, directory: Path) -> None:
        """Open the run; a resumed one continues."""
        self._run = self._library.init(
            project=PROJECT, name=directory.name, id=read_run_name(directory), dir=str(directory),
            config=config.flat(), resume="allow",
        )  # fmt: skip

    def send(self, found: Mapping[str, float], round: int) -> None:
        """Send a round's numbers as one step."""
        self._run.log(dict(found), step=round)

    def close(self) -> None:
        """Close the run."""
        self._run.finish()


class Mlflow(Tracker):
    """Sends a run to MLflow, where `MLFLOW_TRACKING_URI` says."""

    package = "mlflow"

    def open(self, config: Config, directory: Path) -> None:
        """Open a run, also where a run is resumed."""
        self._library.set_experiment(PROJECT)
        tags = {"fedhet.run": read_run_name(directory)}
        self._library.start_run(run_name=directory.name, tags=tags)
        params = {name: str(value)[:500] for name, value in config.flat().items()}
        self._library.log_params(params)

    def send(self, found: Mapping[str, float], round: int) -> None:
        """Send a round's numbers as one step."""
        self._library.log_metrics(dict(found), step=round)

    def close(self) -> None:
        """Close the run."""
        self._library.end_run()


class Prometheus(Tracker):
    """Writes the last round's numbers into metrics.prom, for node_exporter's textfile collector.

    Nothing listens: what gathers the file is the machine's own.
    """

    package = "prometheus_client"

    def open(self, config: Config, directory: Path) -> None:
        """Take note of where the file goes and whose numbers it has."""
        self._file = directory / "metrics.prom"
        self._labels = {"run": directory.name, "method": config.method.name}
        self._values: dict[str, float] = {"rounds": config.run.rounds, "finished": 0}

    def send(self, found: Mapping[str, float], round: int) -> None:
        """Write a round's numbers, and when it ended."""
        self._values |= found
        self._values |= {"round": round, "round_ended_timestamp_seconds": time.time()}
        self._write()

    def close(self) -> None:
        """Write that the run has finished."""
        self._values["finished"] = 1
        self._write()

    def _write(self) -> None:
        registry = self._library.CollectorRegistry()
        for name, value in self._values.items():
            metric = f"fedhet_{re.sub('[^a-zA-Z0-9]+', '_', name)}"
            words = f"{name} of a run's last round"
            gauge = self._library.Gauge(metric, words, list(self._labels), registry=registry)
            gauge.labels(**self._labels).set(value)
        write_text(self._file, self._library.generate_latest(registry).decode())


TRACKERS: Mapping[str, type[Tracker]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "prometheus": Prometheus,
}


def trackers_of(config: Config) -> list[Watcher]:
    """Return the run's trackers. Raises SettingsError if the library is not installed."""
    name = config.run.engine.track
    if name == "none":
        return []
    package = TRACKERS[name].package
    try:
        library = importlib.import_module(package)
    except ImportError:
        raise SettingsError(
            f"setting 'engine.track' = {name!r}: needs the package '{package}': "
            f"pip install 'fedhet[{name}]'"
        ) from None
    return [TRACKERS[name](library)]
