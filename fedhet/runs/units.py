"""Formatting of numbers and names, robust standard streams, and logging in deployments.

A deployed server or site logs plain lines or JSON. FEDHET_LOG=json writes each line as an object
with `time` (UTC), `level`, `logger` and `message`, for log collectors. FEDHET_LOG_LEVEL sets the
minimum level, such as WARNING.
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
"""Width of progress lines on a deployed server, in columns."""


def human_bytes(count: float) -> str:
    """Format a number of bytes with three significant digits, e.g. "12.3 MB" (10^6 bytes)."""
    if not math.isfinite(count):
        return ABSENT
    power = 0
    while abs(count) >= 999.5 and power < len(_BYTES) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or abs(count) >= 99.95 else 1 if abs(count) >= 9.995 else 2
    return f"{count:.{digits}f} {_BYTES[power]}"


def human_seconds(seconds: float) -> str:
    """Format a duration, e.g. "0.42 s", "12.3 s", "4 min 05 s" or "2 h 13 min"."""
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
    """Format a count with a noun, e.g. "1 client" or "2 clients"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def time_left(seconds: float) -> str:
    """Format an estimated remaining time, e.g. "about 7 s left" or "about 4 min 05 s left"."""
    rough = f"{round(seconds)} s" if seconds < 59.5 else human_seconds(round(seconds))
    return f"about {rough} left"


def human_number(value: float) -> str:
    """Format a number of any magnitude with four significant digits, and integers in full."""
    if not math.isfinite(value):
        return ABSENT
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:.4g}"


def score(value: float, metric: str = "accuracy", decimals: int = 4) -> str:
    """Format a score of a metric, e.g. "0.7312".

    Scores with the unit of a target have four significant digits, and at least their integer part.
    """
    from fedhet.base.metrics import metric_of  # needs NumPy, which a new machine may lack

    if not math.isfinite(value):
        return ABSENT
    if not metric_of(metric).has_unit:
        return f"{value:.{decimals}f}"
    return f"{value:.0f}" if 999.95 <= abs(value) < 1e15 else f"{value:#.4g}"


def difference(value: float, metric: str = "accuracy") -> str:
    """Format a difference of two scores with its sign, e.g. "+0.0312"."""
    text = score(value, metric)
    return text if text.startswith(("-", ABSENT)) else f"+{text}"


def percent(fraction: float) -> str:
    """Format a fraction as a percentage without trailing zeros, e.g. 0.613 as "61.3 %"."""
    return f"{100 * fraction:.4g} %"


def plus_minus(mean: float, std: float, digits: int = 4, metric: str = "accuracy") -> str:
    """Format "mean ± std" of a metric, or only the mean if `std` is not finite."""
    spread = f" ± {score(std, metric, digits)}" if math.isfinite(std) else ""
    return score(mean, metric, digits) + (spread if math.isfinite(mean) else "")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a natural sort key, which sorts client-2 before client-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts)


def position(name: str, order: Sequence[object]) -> tuple[int, str]:
    """Return a sort key: names in `order` come first, followed by all other names from A to Z."""
    return (order.index(name) if name in order else len(order)), name


def printable(text: str) -> str:
    """Replace control characters, so that untrusted text cannot control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def spans(numbers: Iterable[int]) -> str:
    """Format sorted numbers as ranges, e.g. [1, 2, 3, 7] as "1–3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def shown_path(path: Path | None) -> str:
    """Format a path, relative to the working directory if the path is below it."""
    inside = path is not None and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if path and inside else path)


def path_text(path: Path) -> str:
    r"""Convert a path to text, with escapes such as `\xff` for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def make_output_lenient() -> None:
    """Configure the standard streams to replace characters that they cannot encode.

    Otherwise, a run would fail if its terminal or log is limited to ASCII. A closed standard stream
    is replaced with the null device, because the next opened file would otherwise receive its
    output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # The null device gets the lowest free descriptor, i.e. that of a closed stream. If a
            # program has only removed the object, its descriptor remains open.
            opened = os.open(os.devnull, os.O_RDWR)
            mode = "w" if descriptor else "r"
            setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8", closefd=False))
            continue
        strict = name != "stdin" and stream.errors in ("strict", "surrogateescape")
        if strict and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fedhet.lenient")


def _replacement(error: UnicodeError) -> tuple[str, int]:
    r"""Return an ASCII replacement for characters that could not be encoded.

    Bytes in file names that are not UTF-8 are replaced with backslash escapes such as `\xff`.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    chars = error.object[error.start : error.end]
    replaced = (
        f"\\x{ord(char) - 0xDC00:02x}" if "\udc80" <= char <= "\udcff" else _IN_ASCII.get(char, "?")
        for char in chars
    )
    return "".join(replaced), error.end


codecs.register_error("fedhet.lenient", _replacement)


def _log_form() -> tuple[bool, int]:
    """Return whether the log is written as JSON, and the minimum level.

    Raises SettingsError if FEDHET_LOG or FEDHET_LOG_LEVEL is invalid.
    """
    form, level = os.environ.get(FORM, "text"), os.environ.get(LEVEL, "INFO").upper()
    for name, value, choices in ((FORM, form, ("text", "json")), (LEVEL, level, LEVELS)):
        if value not in choices:
            raise SettingsError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return form == "json", int(getattr(logging, level))


def json_line(level: str, logger: str, message: str, at: float | None = None) -> str:
    """Format a log line as JSON; `at` is the time in seconds since 1970, by default now."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return json.dumps({"time": stamp, "level": level, "logger": logger, "message": message})


def message_of(line: str) -> str:
    """Extract the message from a JSON log line; other lines are returned unchanged."""
    if not line.startswith('{"time": '):
        return line
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line


class JsonFormatter(logging.Formatter):
    """Log formatter that writes each record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, with the traceback as part of the message."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, message, record.created)


class _JsonLines(io.TextIOBase):
    """Stream that converts each line to a line of JSON."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._begun = out, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            print(json_line("INFO", "fedhet", line.rstrip()), file=self._out, flush=True)
        return len(text)


def configure_logs() -> None:
    """Configure the loggers of this process from the environment.

    Raises SettingsError if FEDHET_LOG or FEDHET_LOG_LEVEL is invalid.
    """
    as_json, level = _log_form()
    fedhet, flower = logging.getLogger("fedhet"), logging.getLogger("flwr")
    fedhet.setLevel(level)
    if not fedhet.handlers:
        fedhet.addHandler(logging.StreamHandler())
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        fedhet.handlers[0].setFormatter(formatter)
    for handler in [*fedhet.handlers, *flower.handlers] if as_json else ():
        handler.setFormatter(JsonFormatter())


def console_for(stream: TextIO | None = None) -> Console:
    """Create the console that logs a deployed server's progress at the level INFO.

    Raises SettingsError if FEDHET_LOG or FEDHET_LOG_LEVEL is invalid.
    """
    # Import lazily, because machines of a cluster import this module and may lack `rich`.
    from rich.console import Console

    make_output_lenient()
    configure_logs()
    as_json, level = _log_form()
    out = stream or sys.stdout
    file: Any = _JsonLines(out) if as_json else out
    return Console(file=io.StringIO() if level > logging.INFO else file, width=WIDTH, emoji=False)


def log_error(error: FedhetError) -> None:
    """Log an error as one line, and prevent Flower from logging its traceback."""
    message = f"error: {error}"
    line = json_line("ERROR", "fedhet", message) if os.environ.get(FORM) == "json" else message
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

    def without_traceback(record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], FedhetError):
            record.exc_info = None
        return True

    logging.getLogger("flwr").addFilter(without_traceback)
