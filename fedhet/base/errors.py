"""Errors caused by user input. Each message is one line: what, where, and what is allowed."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

MAX_CHARACTERS = 500
_AT_A_CLIENT = re.compile(
    r"Message contains an Error \(reason: <class '(?:fedhet\.base\.errors\.\w+'>:<'|ray\..*"
    r"ClientAppException occurred\. Message: )(.*)'>\)",
    re.DOTALL,
)
"""How Flower wraps a client's error, in this process and in a Ray worker."""


class FedhetError(Exception):
    """Base of all errors that fedhet raises for bad input; the command line prints the message."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class SettingsError(FedhetError):
    """A setting that does not exist, or a value that is not allowed."""


class DataError(FedhetError):
    """A dataset, partition or site folder that is absent, malformed or too small."""


class ModelError(FedhetError):
    """A model name that does not exist, or a model that does not fit the data."""


class UserModelError(ModelError):
    """A user's own model fails as it is fitted or predicts; the cause is what it raised."""


class PrivacyError(FedhetError):
    """A release that would cost more privacy than a run or a site allows."""


class StateError(FedhetError):
    """A saved state that is absent, truncated, or of another run, method or model."""


class DropOutError(Exception):
    """A client of a simulation drops out of a round, as its settings say: it does not answer."""


class DivergedError(FedhetError):
    """Training of the server's own model that diverged; the model is as it was before."""


class KnowledgeError(FedhetError):
    """A message that violates the contract; names the sender and the field."""

    def __init__(self, sender: str, field: str, fault: str) -> None:
        super().__init__(f"{sender}: {one_line(field)}: {one_line(fault)}")
        self.sender, self.field, self.fault = sender, one_line(field), one_line(fault)

    @property
    def reason(self) -> str:
        """What is wrong, without the sender: its own error, or the field and its fault."""
        return self.fault if self.field == "answer" else f"{self.field}: {self.fault}"


class ReportedError(KnowledgeError):
    """What a client says in place of an answer: an error of its own."""

    def __init__(self, sender: str, fault: str, *, spent: bool = False) -> None:
        """`spent`: it has no privacy left to spend, which is no fault."""
        super().__init__(sender, "answer", fault)
        self.spent = spent


def one_line(text: str) -> str:
    """Return `text`, which a peer may have chosen, as one printable line of bounded length."""
    cut = text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def shown(value: object) -> str:
    """Return `value`, which a peer may have chosen, for an error message."""
    try:
        return one_line(repr(value))
    except ValueError:  # an integer of more digits than Python converts
        return f"{'-' if isinstance(value, int) and value < 0 else ''}a very large number"


def words_of(error: BaseException) -> str:
    """Return an error's message; for our errors raised at a client, without Flower's wrapping."""
    text = str(error)
    wrapped = _AT_A_CLIENT.match(text)
    return one_line(" ".join((wrapped[1] if wrapped else text).split()))


def reason_of(error: BaseException) -> str:
    """Return an error's message; of an error of the system, only its words, without its number."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def typed(error: BaseException) -> str:
    """Return an error's type and message, such as "ValueError: too few samples"."""
    words = words_of(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def place_of(error: BaseException, module: str) -> str:
    """Return " (FILE, line N)" for the last line of a user's package that led to an error, or "".

    `module` is the import path of the module that was being imported.
    """
    package = module.partition(".")[0]
    places = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    own = [each for each in places if package in Path(each[0]).with_suffix("").parts]
    return f" ({own[-1][0]}, line {own[-1][1]})" if own else ""


def where_looked(error: BaseException, path: str) -> str:
    """Return a hint where a module `path` must be if it was not found; "" for another error."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in (path, path.split(".")[0]):
        return ""
    return "; its folder must be in PYTHONPATH, as in `PYTHONPATH=. fedhet run …`"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the existing name closest to `name`, or ""."""
    close = closest(name, names)
    return f"; did you mean '{close}'?" if close else ""


def unknown_name(what: str, name: str, names: Iterable[str], listing: str) -> str:
    """Return "unknown method 'fello'; did you mean 'felo'?", or where the names are listed."""
    hint = nearest(name, names)
    return f"unknown {what} '{one_line(name)}'{hint or f'; {listing}'}"


def closest(name: str, names: Iterable[str]) -> str:
    """Return the existing name closest to `name`, or ""."""
    close = difflib.get_close_matches(name[:200], list(names), n=1, cutoff=0.5)
    return close[0] if close else ""
