"""How clients fare: the outcomes of their rounds, and the errors of the code that they run.

A client whose replies are refused in several consecutive rounds is excluded for the rest of the
run. One that is silent, or replies with errors, is asked again less and less often. What either has
contributed is dropped. The counts are part of each checkpoint: a resumed run asks the same clients.

A method or a model of one's own may have a mistake that shows only in training. Its traceback is
shown once, shortened to the frames of one's own files; the whole of it is in the run's flower.log.
"""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fedhet.base.errors import DropOutError, FedhetError, OwnModelError, StateError, typed, words_of

Outcome = Literal["silent", "error", "refused"]
"""No answer; an answer with an error of the client's own; a reply that the server refuses."""
LONGEST_PAUSE = 16
"""The most rounds between two attempts to reach a client or a node that does not answer."""


def pause_after(failures: int) -> int:
    """Return the rounds to wait before the next attempt: twice as many after each failure."""
    return min(1 << failures, LONGEST_PAUSE)


class ClientHealth:
    """Counts each client's consecutive rounds without a usable reply."""

    def __init__(self, refusals: int, silences: int, notice: Callable[[str], None]) -> None:
        """`refusals`, `silences`: consecutive rounds until a client is excluded, or pauses.

        0: never.
        """
        self._most_refused, self._most_silent, self._notice = refusals, silences, notice
        self._refused: dict[str, int] = {}
        self._silent: dict[str, tuple[int, int]] = {}
        """The consecutive rounds without an answer, and the last of them."""
        self._gone: dict[str, int] = {}
        """The consecutive rounds in which a former member was not connected."""

    def eligible(self, round: int, names: Collection[str]) -> list[str]:
        """Return, in their order, the clients that may be asked in a round.

        If all of them pause, all are asked: a round needs clients. Raises FedhetError if all are
        excluded.
        """
        left = [name for name in names if not self._is_aside(name)]
        if not left:
            raise FedhetError(
                f"no client is left to be asked in round {round}: the replies of all "
                f"{len(names)} clients were refused in {self._most_refused} consecutive rounds "
                "('engine.refusals')"
            )
        return [name for name in left if not self.left_out(round, name)] or left

    def left_out(self, round: int, name: str) -> str:
        """Return why a client is not asked in a round: "excluded", "resting", or ""."""
        if self._is_aside(name):
            return "excluded"
        if not self._is_silent(name):
            return ""
        count, last = self._silent[name]
        return "resting" if round < last + pause_after(count - self._most_silent + 1) else ""

    def enter(
        self, round: int, outcomes: Mapping[str, Outcome | None], members: Collection[str]
    ) -> list[str]:
        """Record the asked clients' outcomes (None: usable); return whom the method must forget."""
        before = self._forgettable()
        for name in sorted(outcomes):
            refused, (silent, _) = self._refused.pop(name, 0), self._silent.pop(name, (0, 0))
            if outcomes[name] == "refused":
                self._refused[name] = refused + 1
            elif outcomes[name] is not None:
                self._silent[name] = (silent + 1, round)
                if refused:  # silence does not clear a client whose replies were refused
                    self._refused[name] = refused
        # Former members: one that returns starts from zero.
        self._gone |= dict.fromkeys(members, 0)
        for name in self._gone.keys() - set(members):
            self._gone[name] += 1
            self._silent.pop(name, None)
        forgotten = sorted(self._forgettable() - before)
        for name in forgotten:
            if self._is_aside(name):
                fault = (
                    f"is excluded: its replies were refused in {self._refused[name]} consecutive "
                    "rounds ('engine.refusals')"
                )
            elif self._is_silent(name):
                fault = (
                    f"has not answered in {self._silent[name][0]} consecutive rounds: it is asked "
                    "again only now and then ('engine.silences')"
                )
            else:
                fault = "has left"
            self._notice(f"client {name} {fault}; what it contributed before is dropped")
        return forgotten

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts, as JSON holds them."""
        silent = {name: count for name, (count, _) in self._silent.items()}
        last = {name: round for name, (_, round) in self._silent.items()}
        return {"refused": self._refused, "silent": silent, "last": last, "gone": self._gone}

    def load_dict(self, known: Mapping[str, Mapping[str, int]]) -> None:
        """Restore what `to_dict` returned. Raises ValueError, KeyError or TypeError."""
        self._refused, self._gone = dict(known["refused"]), dict(known["gone"])
        self._silent = {name: (n, known["last"][name]) for name, n in known["silent"].items()}

    def _is_aside(self, name: str) -> bool:
        return 0 < self._most_refused <= self._refused.get(name, 0)

    def _is_silent(self, name: str) -> bool:
        return 0 < self._most_silent <= self._silent.get(name, (0, 0))[0]

    def _forgettable(self) -> set[str]:
        """Return the clients whose earlier contributions must not count any longer."""
        known = {*self._refused, *self._silent}
        gone = {name for name, count in self._gone.items() if 0 < self._most_silent <= count}
        return gone | {name for name in known if self._is_aside(name) or self._is_silent(name)}


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
        paths = [Path(frame.filename).resolve() for frame in frames]
        own = [
            frame
            for frame, path in zip(frames, paths, strict=True)
            if path.is_file() and not any(path.is_relative_to(each) for each in _LIBRARIES)
        ] or frames[-LAST:]
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
                error = StateError(
                    f"a client's code failed: {fault.reason}; the whole traceback is in the run's "
                    "flower.log, and --no-strict lets a run go on without such clients"
                )
                if fault.short:
                    error.add_note(fault.short)
                raise error
            for line in [*fault.short.splitlines(), fault.reason]:
                self._notice(line)
