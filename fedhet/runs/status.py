"""The status of a run under way: status.json, which is written while rounds go on.

Others read it: `fedhet status`, and the pages of `fedhet watch`. Whether the run's process is still
alive is not in the file, which a killed process could not change; the lock of the run tells.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from fedhet.base.disk import write_text
from fedhet.base.errors import StateError
from fedhet.runs.directory import is_claimed
from fedhet.runs.files import read_validated
from fedhet.runs.progress import ClientProgress, Progress
from fedhet.runs.records import LARGEST, NAN, READING, Number, Round, Text
from fedhet.runs.repeated import Repeated
from fedhet.runs.units import human_bytes, natural, score, time_left

FILE = "status.json"
SECONDS = 1.0
"""Between two writings of the file, at least."""
Stage = Literal["starting", "running", "finished", "stopped"]
"""Of a run; it has stopped if its process has ended before its last round."""


class ClientStatus(BaseModel):
    """A client in the current round; NaN, in the file null, is what is not known."""

    model_config = READING

    name: Text
    model: Text = ""
    state: Text = ""
    """done, failed, training, waiting, late, not asked, resting, excluded, away."""
    accuracy: Number = NAN
    loss: Number = NAN
    seconds: Number = NAN
    """For how long it has been training, or trained last."""
    line: Text = ""
    """Its last answer, or why there was none."""

    @classmethod
    def of(cls, client: ClientProgress, seconds: float) -> ClientStatus:
        """Return the status of a client as a display shows it."""
        return cls(
            name=client.name,
            model=client.model,
            state=client.state.words,
            accuracy=client.accuracy,
            loss=client.loss,
            seconds=round(seconds, 1),
            line=client.line,
        )


class Status(BaseModel):
    """status.json: where a run is, and what its clients do."""

    model_config = READING

    title: Text = ""
    stage: Stage = "starting"
    phase: Text = ""
    """What the run waits for before its first round."""
    round: Round = 0
    rounds: Round = 0
    seconds_left: Number = NAN
    bytes: Number = Field(default=0.0, ge=0)
    """Sent up, and down to train, in all rounds that have ended."""
    mean: Number = NAN
    """The mean accuracy of the last round that was evaluated."""
    clients: list[ClientStatus] = []
    notices: list[Text] = []
    fault: Text = ""
    """Why the run failed."""
    updated: Number = 0.0
    """When this was written, in seconds since 1970."""

    @classmethod
    def of(cls, progress: Progress) -> Status:
        """Return the status of a run that `progress` follows."""
        everyone = sorted(progress.clients.values(), key=lambda client: natural(client.name))
        stage: Stage = "running" if progress.round else "starting"
        stage = "stopped" if progress.fault else stage
        return cls(
            title=progress.title,
            stage="finished" if progress.summary else stage,
            phase=progress.phase,
            round=progress.round,
            rounds=progress.rounds,
            seconds_left=progress.seconds_left,
            bytes=min(progress.bytes_moved, LARGEST),
            mean=progress.means[-1] if progress.means else NAN,
            clients=[ClientStatus.of(each, progress.seconds_of(each)) for each in everyone],
            notices=list(progress.notices),
            fault=progress.fault,
            updated=time.time(),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the content of status.json, with None for NaN, which JSON does not have."""
        found: dict[str, Any] = json.loads(self.model_dump_json())
        return found

    @property
    def in_words(self) -> str:
        """Where the run is, in one line."""
        if self.stage == "starting":
            return f"starting: {self.phase or 'its clients load data and models'}"
        if self.stage == "stopped" and self.fault:
            where = f" in round {self.round} of {self.rounds}" if self.round else ""
            return f"failed{where}: {self.fault}"
        parts = [f"{self.stage}: round {self.round} of {self.rounds}"]
        if math.isfinite(self.mean):
            parts.append(f"mean accuracy {score(self.mean)}")
        parts.append(f"{human_bytes(self.bytes)} sent")
        if self.stage == "running" and math.isfinite(self.seconds_left):
            parts.append(time_left(self.seconds_left))
        return " · ".join(parts)


class StatusFile:
    """Writes the status of a run into its directory as it changes, from a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._changed = directory, Repeated(self._write, SECONDS)
        self.progress = Progress(changed=self._note)
        """What is to watch the run."""

    def _note(self) -> None:
        self._changed.note()
        if self.progress.summary or self.progress.fault:
            self._changed.end()

    def _write(self) -> None:
        # A folder that cannot be written ends the run where its records are written.
        with contextlib.suppress(StateError, OSError):
            write_text(self._directory / FILE, Status.of(self.progress).model_dump_json())


def read_status(directory: Path) -> Status:
    """Return the status of a run, as of now. Raises StateError."""
    if not (directory / "config.toml").exists():
        raise StateError(f"{directory} holds no run: it has no config.toml")
    path = directory / FILE
    status = read_validated(path, Status) if path.exists() else Status()
    if (directory / "summary.json").exists():
        return status.model_copy(update={"stage": "finished"})
    if not is_claimed(directory):
        return status.model_copy(update={"stage": "stopped", "seconds_left": math.nan})
    return status
