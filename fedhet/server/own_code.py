"""Errors of the code that a simulation's clients run: where they arose, and what follows.

A method or a model of one's own may have a mistake that shows only in training. Its traceback is
shown once, shortened to the frames of one's own files; the whole of it is in the run's flower.log.
"""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from fedhet.base.errors import DropOutError, FedhetError, OwnModelError, StateError, typed, words_of

LOG = logging.getLogger("flwr")
NOT_OF_CODE = (FedhetError, DropOutError, MemoryError, OSError, torch.OutOfMemoryError)
"""Errors that the machine or the settings cause: the client is dropped, and the run continues."""
_LIBRARIES = [
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
]


LAST = 3
"""Frames that are shown of a traceback without any file of one's own."""


def is_of_code(error: BaseException) -> bool:
    """Return whether an error is one of a client's code, a user's own model included."""
    if isinstance(error, OwnModelError):
        return not isinstance(error.__cause__, MemoryError)
    return not isinstance(error, NOT_OF_CODE)


@dataclass(frozen=True)
class CodeFault:
    """An error of a client's code in words, since not every exception travels to a process."""

    reason: str
    """Type, message, file and line."""
    short: str
    """The traceback's frames in one's own files."""
    whole: str

    @classmethod
    def of(cls, error: BaseException) -> CodeFault:
        """Return the fault of an error that has been raised."""
        of_model = isinstance(error, OwnModelError)
        raised = error.__cause__ if of_model else error
        frames = traceback.extract_tb(raised.__traceback__) if raised else []
        own = [frame for frame in frames if _is_own(frame.filename)] or frames[-LAST:]
        place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        return cls(
            f"{words_of(error) if of_model else typed(error)}{place}",
            "".join(traceback.format_list(own)).rstrip(),
            "".join(traceback.format_exception(error)),
        )


class ClientCodeError(Exception):
    """A client of a simulation failed by an error of its code."""

    def __init__(self, fault: CodeFault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


class CodeFaults:
    """What follows from errors of the clients' code: the first of each kind is shown."""

    def __init__(self, notice: Callable[[str], None], *, strict: bool) -> None:
        """`strict`: the first one ends the run."""
        self._notice, self._strict = notice, strict
        self._shown: set[str] = set()

    def enter(self, errors: Iterable[object]) -> None:
        """Show what is new among the errors of a round. Raises StateError if it ends the run."""
        causes = (getattr(error, "__cause__", None) or error for error in errors)
        for fault in [cause.fault for cause in causes if isinstance(cause, ClientCodeError)]:
            if fault.reason in self._shown:
                continue
            self._shown.add(fault.reason)
            LOG.error("%s", fault.whole)
            if self._strict:
                raise _ends_the_run(fault)
            for line in [*fault.short.splitlines(), fault.reason]:
                self._notice(line)


def _ends_the_run(fault: CodeFault) -> StateError:
    error = StateError(
        f"a client's code failed: {fault.reason}; the whole traceback is in the run's flower.log, "
        "and --no-strict lets a run go on without such clients"
    )
    if fault.short:
        error.add_note(fault.short)
    return error


def _is_own(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_file() and not any(path.is_relative_to(folder) for folder in _LIBRARIES)
