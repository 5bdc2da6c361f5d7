"""Trackers: a run's numbers in Weights & Biases or MLflow, besides its own files.

A tracker is a watcher of the run. What goes wrong with it once the run has started costs its
numbers, with a warning, and not the run.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedhet.config.resolve import Config
from fedhet.errors import SettingsError, one_line
from fedhet.runs.directory import read_run_name
from fedhet.runs.log import Watcher
from fedhet.runs.records import RoundRecord, Summary
from fedhet.runs.scalars import scalars

LOG = logging.getLogger("fedhet")
PROJECT = "fedhet"


class Tracker(Watcher):
    """Base of the trackers: calls of the library that fail switch it off."""

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
            LOG.warning("%s is off from here on: %s", type(self).__name__, fault)


class Wandb(Tracker):
    """Sends a run to Weights & Biases; `WANDB_MODE=offline` keeps it in the run's directory."""

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


TRACKERS: Mapping[str, type[Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}


def trackers_of(config: Config) -> list[Watcher]:
    """Return the run's trackers. Raises SettingsError if the library is not installed."""
    name = config.run.engine.track
    if name == "none":
        return []
    try:
        library = importlib.import_module(name)
    except ImportError:
        raise SettingsError(
            f"setting 'engine.track' = {name!r}: needs the package '{name}': "
            f"pip install 'fedhet[{name}]'"
        ) from None
    return [TRACKERS[name](library)]
