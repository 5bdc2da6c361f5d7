"""Formatting of numbers and names for users, the standard streams, and the logs of a deployment.

A deployed server and a site's process log plain lines or JSON. FEDHET_LOG=json writes each line as
an object with `time` (UTC), `level`, `logger` and `message`, for programs that gather logs;
FEDHET_LOG_LEVEL=WARNING leaves out what is not at least that.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fedhet.base.errors import FedhetError, SettingsError

if TYPE_CHECKING:
    from rich.console import Console

ABSENT = "—"
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_IN_ASCII = {"±": "+-", "…": "...", "—": "-", "–": "-", "×": "x", "→": "->", "≥": ">=", "≤": "<="}
FORM, LEVEL = "FEDHET_LOG", "FEDHET_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
WIDTH = 160
"""Columns of a deployed server's progress lines."""


def human_bytes(count: float) -> str:
    """Return a number of bytes with three significant digits, in powers of 1000: "12.3 MB"."""
    if not math.isfinite(count):
        return ABSENT
    power = 0
    while abs(count) >= 999.5 and power < len(_BYTES) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or abs(count) >= 99.95 else 1 if abs(count) >= 9.995 else 2
    return f"{count:.{digits}f} {_BYTES[power]}"


def human_seconds(seconds: float) -> str:
    """Return a duration: "0.42 s", "12.3 s", "4 min 05 s" or "2 h 13 min"."""
    if not math.isfinite(seconds):
        return ABSENT
    if seconds < 59.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def plural(count: int, noun: str) -> str:
    """Return "1 client", "2 clients"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def time_left(seconds: float) -> str:
    """Return an estimate in whole seconds: "about 7 s left", "about 4 min 05 s left"."""
    rough = f"{round(seconds)} s" if seconds < 59.5 else human_seconds(round(seconds))
    return f"about {rough} left"


def human_number(value: float) -> str:
    """Return a number of any magnitude with four significant digits; integers in full."""
    if not math.isfinite(value):
        return ABSENT
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:.4g}"


def score(value: float) -> str:
    """Return an accuracy with four digits: "0.7312"."""
    return f"{value:.4f}" if math.isfinite(value) else ABSENT


def percent(fraction: float) -> str:
    """Return a fraction as a percentage without superfluous digits: 0.613 is "61.3 %"."""
    return f"{100 * fraction:.4g} %"


def plus_minus(mean: float, std: float, digits: int = 4) -> str:
    """Return "mean ± std", or the mean alone without a standard deviation."""
    if not math.isfinite(mean):
        return ABSENT
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if math.isfinite(std) else "")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts client-2 before client-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts)


def position(name: str, order: Sequence[object]) -> tuple[int, str]:
    """Return a sort key: names in the given order come first, then the others by name."""
    return (order.index(name) if name in order else len(order)), name


def printable(text: str) -> str:
    """Return text without control characters, so that names cannot control the terminal."""
    return "".join(mark if mark.isprintable() else "\N{REPLACEMENT CHARACTER}" for mark in text)


def spans(numbers: Iterable[int]) -> str:
    """Return sorted numbers as ranges: [1, 2, 3, 7] is "1–3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def shown_path(path: Path | None) -> str:
    """Return a path, from the working folder if it is in it."""
    inside = path is not None and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if path and inside else path)


def path_text(path: Path) -> str:
    r"""Return a path as text, with escapes such as `\xff` for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def make_output_lenient() -> None:
    """Let the standard streams replace characters that their encoding lacks.

    A scheduler's log or a terminal may be limited to ASCII, and no run must end because a line
    cannot be printed. A standard stream that is closed is opened as the null device, because
    otherwise the next file to be opened would receive its output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            mode = "w" if descriptor else "r"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
            continue
        strict = name != "stdin" and stream.errors in ("strict", "surrogateescape")
        if strict and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fedhet.lenient")


def _replacement(error: UnicodeError) -> tuple[str, int]:
    r"""Return ASCII text for the characters that could not be encoded.

    A byte of a file name that is not UTF-8 is shown as a backslash escape, such as `\xff`.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    marks = error.object[error.start : error.end]
    escaped = (
        f"\\x{ord(mark) - 0xDC00:02x}" if "\udc80" <= mark <= "\udcff" else _IN_ASCII.get(mark, "?")
        for mark in marks
    )
    return "".join(escaped), error.end


codecs.register_error("fedhet.lenient", _replacement)


def _log_form() -> tuple[bool, int]:
    """Return whether the log is JSON, and its lowest level. Raises SettingsError."""
    form, level = os.environ.get(FORM, "text"), os.environ.get(LEVEL, "INFO").upper()
    for name, value, allowed in ((FORM, form, ("text", "json")), (LEVEL, level, LEVELS)):
        if value not in allowed:
            raise SettingsError(f"{name}={value!r} is not allowed: it takes {', '.join(allowed)}")
    return form == "json", int(getattr(logging, level))


def json_line(level: str, logger: str, message: str, at: float | None = None) -> str:
    """Return a line of a log in JSON, `at` seconds since 1970."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return json.dumps({"time": stamp, "level": level, "logger": logger, "message": message})


def message_of(line: str) -> str:
    """Return the message of a line that may be of JSON; another line as it is."""
    if not line.startswith('{"time": '):
        return line
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line; a traceback is part of the message."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, message, record.created)


class _JsonLines(io.TextIOBase):
    """A stream that writes each line that it is given as one of JSON."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._begun = out, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            print(json_line("INFO", "fedhet", line.rstrip()), file=self._out, flush=True)
        return len(text)


def configure_logs() -> None:
    """Let this process's own loggers write as the environment says, once. Raises SettingsError."""
    as_json, level = _log_form()
    own, flower = logging.getLogger("fedhet"), logging.getLogger("flwr")
    own.setLevel(level)
    if not own.handlers:
        own.addHandler(logging.StreamHandler())
        own.handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for handler in [*own.handlers, *flower.handlers] if as_json else ():
        handler.setFormatter(JsonFormatter())


def console_for(stream: TextIO | None = None) -> Console:
    """Return where a deployed server shows its run's progress, which is on the level INFO.

    Raises SettingsError for a form or a level that there is not.
    """
    from rich.console import Console  # a machine that is only inspected may lack it

    make_output_lenient()
    configure_logs()
    as_json, level = _log_form()
    out = stream or sys.stdout
    file: Any = _JsonLines(out) if as_json else out
    return Console(file=io.StringIO() if level > logging.INFO else file, width=WIDTH)


def log_error(error: FedhetError) -> None:
    """Write an error of this process as one line, and keep Flower from writing its traceback."""
    message = f"error: {error}"
    line = json_line("ERROR", "fedhet", message) if os.environ.get(FORM) == "json" else message
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

    def without_traceback(record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], FedhetError):
            record.exc_info = None
        return True

    logging.getLogger("flwr").addFilter(without_traceback)
