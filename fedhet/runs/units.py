"""Formatting of numbers and names for users: on the page, in the terminal and in Markdown."""

from __future__ import annotations

import codecs
import io
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ABSENT = "—"
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


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
    """Return a path as text, with escapes such as `\\xff` for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


_IN_ASCII = {"±": "+-", "…": "...", "—": "-", "–": "-", "×": "x", "→": "->", "≥": ">=", "≤": "<="}


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
            stream.reconfigure(errors=_LENIENT)


def _replacement(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII text for the characters that could not be encoded.

    A byte of a file name that is not UTF-8 is shown as a backslash escape, such as `\\xff`.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    marks = error.object[error.start : error.end]
    escaped = (
        f"\\x{ord(mark) - 0xDC00:02x}" if "\udc80" <= mark <= "\udcff" else _IN_ASCII.get(mark, "?")
        for mark in marks
    )
    return "".join(escaped), error.end


_LENIENT = "fedhet.lenient"
codecs.register_error(_LENIENT, _replacement)


def plural(count: int, noun: str) -> str:
    """Return "1 client", "2 clients"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")
