"""Helpers to watch runs, wait for them, interrupt them like a crash, and resume them."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import psutil
import pytest
from federation import records, run, without_times

from fedhet.config.resolve import Config, resolve
from fedhet.deployment.local import members_of
from fedhet.runs.log import Watcher


def until(condition, seconds=600.0):
    """Wait until `condition` returns a true value, and return this value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)  # looking is not free: some conditions search directories
    return found


def is_worker(process: psutil.Process | None) -> bool:
    """Return whether a process is a site's worker, or the process of a message."""
    with contextlib.suppress(psutil.NoSuchProcess):  # A zombie has no command line.
        return process is not None and "fedhet.deployment.worker" in process.cmdline()
    return False


def messages_of(node: psutil.Popen) -> list[psutil.Process]:
    """Return the processes in which a site processes messages."""
    messages = []
    for process in filter(is_worker, members_of(node.pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            messages += [process] if is_alive and is_worker(process.parent()) else []
    return messages


class Notices(Watcher):
    """Stores the notices of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


class CutError(Exception):
    """Raised in place of a crash of the server."""


class CutOff(Notices):
    """Ends the run at a given point of a given round, like a crash."""

    def __init__(self, round: int, moment: str) -> None:
        super().__init__()
        self.round, self.moment = round, moment

    def round_started(self, number, asked):
        if (number, self.moment) == (self.round, "before"):
            raise CutError

    def round_finished(self, record):
        # The record is written, the checkpoint is not.
        if (record.round, self.moment) == (self.round, "after"):
            raise CutError


def resumed(config: Config, directory: Path) -> Config:
    return resolve({**config.flat(), "out": str(directory), "resume": True})


def same_but_for_the_name(directory, other):
    """Compare all files of two runs, except times."""
    one, two = (json.loads((d / "summary.json").read_text()) for d in (directory, other))
    assert without_times(one) == without_times(two)
    for left, right in zip(records(directory), records(other), strict=True):
        aside = {"seconds": None, "peak_memory_mb": None}
        assert {**left, **aside} == {**right, **aside}


def cut_and_resumed(
    config: Config, directory: Path, round: int = 3, moment: str = "before", watchers=()
) -> dict[str, object]:
    """Compare an uninterrupted run with an interrupted and resumed run; return the summary.

    They are in the directories `whole` and `cut` of `directory`.
    """
    summary = run(config, directory / "whole", watchers)
    with pytest.raises(CutError):
        run(config, directory / "cut", [CutOff(round, moment)])
    run(resumed(config, directory / "cut"), directory / "cut")
    same_but_for_the_name(directory / "whole", directory / "cut")
    return summary
