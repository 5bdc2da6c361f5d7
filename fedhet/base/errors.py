"""Errors caused by user input or by messages from a peer.

Each message is a single line that names the setting or file, the problem, and what was expected.
"""

from __future__ import annotations

import difflib
import inspect
import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

MAX_CHARACTERS = 500
_AT_A_CLIENT = re.compile(
    r"Message contains an Error \(reason: <class '(?:fedhet\.base\.errors\.\w+'>:<'|ray\..*"
    r"ClientAppException occurred\. Message: )(.*)'>\)",
    re.DOTALL,
)
"""Pattern for the text that Flower wraps around a client's error, in this process and in Ray."""


REPLY = "reply"
"""Value of `KnowledgeError.field` if the fault concerns the whole reply."""


class FedhetError(Exception):
    """Base class for errors caused by invalid input. The command line prints the message."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class SettingsError(FedhetError):
    """Raised if a setting is unknown or its value is invalid."""


class DataError(FedhetError):
    """Raised if a dataset, partition or site directory is missing, malformed or too small."""


class ModelError(FedhetError):
    """Raised if a model is unknown or does not fit the data."""


class UserModelError(ModelError):
    """Raised from the original error if a user's model fails in training or prediction."""


class PrivacyError(FedhetError):
    """Raised if a release would exceed the privacy budget of the run or of the site."""


class MaskingError(FedhetError):
    """Raised if a request violates the rules of secure aggregation.

    The message reveals no private data.
    """


class StateError(FedhetError):
    """Raised if a saved state is missing, truncated, or from another run, method or model."""


class InvalidInstructionError(StateError):
    """Raised if a strategy returns an instruction that violates the method's contract."""


class MissingSamplesError(StateError):
    """Raised if a model needs samples of a client that was restored without its data."""


class DropOutError(Exception):
    """Raised if a client drops out of a round because of the simulation's `pace.drop-outs`."""


class DivergedError(FedhetError):
    """Raised if training of the server's model diverges; the model is then unchanged."""


class KnowledgeError(FedhetError):
    """Raised if a message violates its contract. The error names the sender and the field."""

    def __init__(self, sender: str, field: str, fault: str) -> None:
        super().__init__(f"{sender}: {one_line(field)}: {one_line(fault)}")
        self.sender, self.field, self.fault = sender, one_line(field), one_line(fault)

    @property
    def reason(self) -> str:
        """The fault, preceded by the field unless the fault concerns the whole reply."""
        return self.fault if self.field == REPLY else f"{self.field}: {self.fault}"


def one_line(text: str) -> str:
    """Return untrusted `text` as one printable line of at most `MAX_CHARACTERS` characters."""
    cut = text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def safe_repr(value: object) -> str:
    """Return the printable representation of an untrusted value, for an error message."""
    try:
        return one_line(repr(value))
    except ValueError:  # The integer has more digits than Python converts.
        return f"{'-' if isinstance(value, int) and value < 0 else ''}a very large number"


def error_text(error: BaseException) -> str:
    """Return the message of an error, without the text that Flower wraps around client errors."""
    text = str(error)
    wrapped = _AT_A_CLIENT.match(text)
    return one_line(" ".join((wrapped[1] if wrapped else text).split()))


def error_reason(error: BaseException) -> str:
    """Return the message of an error, without the error number of an OSError."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def describe_error(error: BaseException) -> str:
    """Return the type and message of an error, e.g. "ValueError: too few samples"."""
    message = error_text(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def error_location(error: BaseException, module: str) -> str:
    """Return " (FILE, line N)" for a traceback's innermost line in the user's package, or "".

    `module` is the dotted path of the module being imported.
    """
    package = module.partition(".")[0]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    in_package = [each for each in places if package in Path(each[0]).with_suffix("").parts]
    return f" ({in_package[-1][0]}, line {in_package[-1][1]})" if in_package else ""


def definition_of(function: Callable[..., object]) -> str:
    """Return the qualified name, file, and line of a function, e.g. "A.train (a.py, line 3)"."""
    code = inspect.unwrap(function).__code__
    return f"{function.__qualname__} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def import_hint(error: BaseException, path: str) -> str:
    """Return a hint about PYTHONPATH if the module `path` was not found, or ""."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in (path, path.split(".")[0]):
        return ""
    return "; add its directory to PYTHONPATH, as in `PYTHONPATH=. fedhet run …`"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'X'?" for the name in `names` closest to `name`, or ""."""
    close = closest(name, names)
    return f"; did you mean '{close}'?" if close else ""


def unknown_name(kind: str, name: str, names: Iterable[str], listing: str) -> str:
    """Return a message such as "unknown method 'fello'; did you mean 'felo'?".

    `listing` replaces the suggestion if no name is similar, e.g. "see `fedhet methods`".
    """
    hint = nearest(name, names)
    return f"unknown {kind} '{one_line(name)}'{hint or f'; {listing}'}"


def closest(name: str, names: Iterable[str]) -> str:
    """Return the name in `names` closest to `name`, or "" if no name is similar."""
    close = difflib.get_close_matches(name[:200], list(names), n=1, cutoff=0.5)
    return close[0] if close else ""
