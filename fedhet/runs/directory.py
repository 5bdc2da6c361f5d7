"""A run's directory: created for a new run, or reopened to resume one."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from fedhet.base.disk import Folder, read_json, refuse_links
from fedhet.base.errors import StateError, reason_of
from fedhet.config.resolve import Config
from fedhet.config.sources import read_toml
from fedhet.runs.files import read_records
from fedhet.runs.records import RoundRecord
from fedhet.runs.statistics import headline_mean
from fedhet.settings.run import ENDS, PLACE, where_it_ran
from fedhet.wire.identity import is_name

MOST_BYTES = 2**16
"""A longer run.json is refused."""
LOCK = "run.lock"
"""The file that a run's process locks."""
LOCK_PAUSES = (0.05, 0.05, 0.0)
"""Seconds after each try to lock it: who asks for a run's status has it locked for a moment."""
WITH_MODELS = ("state", "checkpoints", "inbox", "pool")
"""The folders of a run's directory that hold models: most of what it takes on disk."""


def make_empty(directory: Path) -> None:
    """Create the directory of a new run. Raises StateError if it is not empty."""
    if (directory / "config.toml").exists():
        raise StateError(
            f"{directory} already contains a run: give another directory with --out, or resume "
            "the run with --resume (in a deployment: --set resume=true)"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise StateError(f"{directory} is not empty; give another directory with --out")
    except OSError as error:
        raise StateError(
            f"cannot make the run's directory {directory}: {reason_of(error)}"
        ) from None


def make_parent(directory: Path) -> None:
    """Create the folder of several runs, unless it exists. Raises StateError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"cannot make the folder {directory}: {reason_of(error)}") from None


def forget_models(directory: Path) -> None:
    """Remove a run's models and what it would resume from; what it measured stays."""
    for name in WITH_MODELS:
        shutil.rmtree(directory / name, ignore_errors=True)


def claimed(directory: Path) -> IO[str]:
    """Return an open lock file of the directory; the system releases it when the process ends.

    Raises StateError if another process has locked the run, or if a link lies in its directory.
    """
    refuse_links(directory)
    file = os.fdopen(Folder(directory).open(LOCK, os.O_RDWR), "r+")
    for pause in LOCK_PAUSES:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        time.sleep(pause)
    file.close()
    raise StateError(f"the run in {directory} is still running in another process")


def is_claimed(directory: Path) -> bool:
    """Return whether a process has locked the run in a directory: it is under way."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_same(config: Config, directory: Path) -> None:
    """Raise StateError unless `directory` holds a run of the same experiment that can be resumed.

    What is not part of the experiment may differ: where and on what it runs, and when it ends. A
    complete run can be resumed with more rounds.
    """
    if is_complete(config, directory):
        stopped = len(read_records(directory / "metrics.jsonl")[0]) < config.run.rounds
        advice = (
            "it was stopped early, and can be resumed with --set early-stopping=0"
            if stopped
            else "it can be resumed with more --rounds"
        )
        raise StateError(
            f"the run in {directory} is complete; there is nothing to resume: {advice}"
        )


def is_complete(config: Config, directory: Path) -> bool:
    """Return whether `directory` holds a run of the same experiment that has no rounds left.

    Raises StateError if it is of another experiment, or was to have more rounds.
    """
    if not (directory / "config.toml").exists():
        return False
    _check_experiment(config, directory)
    if not (directory / "summary.json").exists():
        return False
    found = read_records(directory / "metrics.jsonl")[0]
    return len(found) >= last_round(found, config)


def _check_experiment(config: Config, directory: Path) -> None:
    there = read_toml(directory / "config.toml")
    here = {name: value for name, value in config.flat().items() if name not in PLACE}
    for name in sorted(here.keys() | there.keys(), key=lambda name: (name != "method", name)):
        if here.get(name) != there.get(name) and name not in where_it_ran() | ENDS:
            raise StateError(
                f"{directory} contains a run with '{name}' = {there.get(name)!r}, not "
                f"{here.get(name)!r}: resume it with its own settings, or start another run in "
                "another directory"
            )
    rounds, planned = config.run.rounds, there.get("rounds")
    if isinstance(planned, int) and rounds < planned:
        raise StateError(
            f"{directory} contains a run with 'rounds' = {planned}, not {rounds}: a run can be "
            "resumed with more rounds, not with fewer"
        )


def last_round(records: Sequence[RoundRecord], config: Config) -> int:
    """Return the last round of a run, as far as it is known after `records`.

    With early stopping it is the one after that in which the headline accuracy has not risen for so
    many evaluations. It follows from the records alone, so that a run that was cut off ends alike.
    """
    rounds, patience = config.run.rounds, config.run.early_stopping
    best, waited = -math.inf, 0
    for record in records if patience else ():
        mean = headline_mean(record, config.method.spec.headline)
        if mean is None:
            continue
        best, waited = (mean, 0) if mean > best else (best, waited + 1)
        if waited >= patience:
            return min(record.round + 1, rounds)
    return rounds


def read_run_name(directory: Path) -> str:
    """Return the run's name, as clients know it. Raises StateError."""
    path = directory / "run.json"
    try:
        name = read_json(path, MOST_BYTES)["run"]
    except (OSError, KeyError, TypeError) as error:
        raise StateError(f"cannot read {path}: {error!r}") from None
    if not isinstance(name, str) or not is_name(name):
        raise StateError(f"{path}: {name!r} cannot name a run")
    return name


def whole_rounds(path: Path) -> list[RoundRecord]:
    """Return the records of the rounds from 1 on without a gap. Raises StateError."""
    found = read_records(path)[0] if path.exists() else []
    return [record for number, record in enumerate(found, 1) if record.round == number]
