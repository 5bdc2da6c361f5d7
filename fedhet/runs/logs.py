"""The log of a deployed server's and a site's own process: plain lines, or JSON.

FEDHET_LOG=json writes each line as an object with `time` (UTC), `level`, `logger` and `message`, as
programs that gather logs read it; FEDHET_LOG_LEVEL=WARNING leaves out what is not at least that.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
from typing import Any, TextIO

from rich.console import Console

from fedhet.base.errors import FedhetError, SettingsError
from fedhet.runs.units import make_output_lenient

FORM, LEVEL = "FEDHET_LOG", "FEDHET_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
WIDTH = 160
PLAIN = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line; a traceback is part of the message."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, message, record.created)


def json_line(level: str, logger: str, message: str, at: float | None = None) -> str:
    """Return a line of a log in JSON, `at` seconds since 1970."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return json.dumps({"time": stamp, "level": level, "logger": logger, "message": message})


def console_for(stream: TextIO | None = None) -> Console:
    """Return where a deployed server shows its run's progress, which is on the level INFO.

    Raises SettingsError for a form or a level that there is not.
    """
    make_output_lenient()
    configure()
    out = stream or sys.stdout
    if _level() > logging.INFO:
        return Console(file=io.StringIO(), width=WIDTH)
    file: Any = _JsonLines(out) if _is_json() else out
    return Console(file=file, width=WIDTH)


class _JsonLines(io.TextIOBase):
    """A stream that writes each line that it is given as one of JSON."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._begun = out, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            print(json_line("INFO", "fedhet", line.rstrip()), file=self._out, flush=True)
        return len(text)


def message_of(line: str) -> str:
    """Return the message of a line that may be of JSON; another line as it is."""
    if not line.startswith('{"time": '):
        return line
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line


def configure() -> None:
    """Let this process's own loggers write as the environment says, once. Raises SettingsError."""
    for name in ("fedhet", "flwr"):
        logger = logging.getLogger(name)
        logger.setLevel(_level() if name == "fedhet" else logger.level)
        if name == "fedhet" and not logger.handlers:
            logger.addHandler(logging.StreamHandler())
            logger.handlers[0].setFormatter(logging.Formatter(PLAIN))
        for handler in logger.handlers if _is_json() else ():
            handler.setFormatter(JsonFormatter())


def log_error(error: FedhetError) -> None:
    """Write an error of this process as one line, and keep Flower from writing its traceback."""
    message = f"error: {error}"
    line = json_line("ERROR", "fedhet", message) if _is_json() else message
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    logging.getLogger("flwr").addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Drop the traceback of a FedhetError: `log_error` has written its message."""
    if record.exc_info and isinstance(record.exc_info[1], FedhetError):
        record.exc_info = None
    return True


def _is_json() -> bool:
    form = os.environ.get(FORM, "text")
    if form not in ("text", "json"):
        raise SettingsError(f"{FORM}={form!r} is not allowed: it takes text or json")
    return form == "json"


def _level() -> int:
    level = os.environ.get(LEVEL, "INFO").upper()
    if level not in LEVELS:
        raise SettingsError(f"{LEVEL}={level!r} is not allowed: it takes {', '.join(LEVELS)}")
    return int(getattr(logging, level))
