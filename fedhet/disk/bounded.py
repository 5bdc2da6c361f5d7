"""Reading of files that may come from somebody else, within bounds on size, parts and depth.

A parser may need a thousand times the bytes of a file. So what a file would take is bounded before
it is parsed, and only a regular file is read: a pipe never ends, and a device may not either.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from fedhet.errors import StateError, one_line

MOST_BYTES = 2**29
MOST_TOML_BYTES = 2**20
MOST_PARTS = 8_000_000
"""Values, lists and objects of a JSON file: each takes some two hundred bytes in memory."""
MOST_IN_A_KEY = 32
"""Parts of a dotted key in TOML, whose memory grows with their square."""
LARGE = 2**28
"""Bytes of a file that may be mapped however few of them are on the disk."""
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MOST_IN_A_KEY}}}")


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError, and StateError if it is too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise StateError(f"{path} is not a regular file: it is not read")
        if found.st_size > most:
            raise StateError(f"{path} is larger than such a file can be: at most {most:,} bytes")
        return file.read(found.st_size)


def refuse_odd(path: Path) -> None:
    """Raise StateError unless a file that is to be mapped is a regular one, and is on the disk.

    One of many bytes of which few are on the disk would fill the memory all the same. Raises
    OSError if there is none.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise StateError(f"cannot read {path}: it is not a regular file")
    if found.st_size > LARGE and found.st_blocks * 512 < found.st_size / 16:
        raise StateError(
            f"cannot read {path}: of its {found.st_size:,} bytes, only few are on the disk"
        )


def refuse_parts(path: Path, content: bytes, more: int = 0) -> None:
    """Raise StateError if JSON has too many parts, with `more` that do not show in its marks."""
    if sum(map(content.count, (b",", b"[", b"{"))) + more > MOST_PARTS:
        raise StateError(f"{path} has more parts than such a file can have: {MOST_PARTS:,}")


def parsed(text: str) -> Any:
    """Return what JSON holds. Raises ValueError or RecursionError, also for half a character.

    JSON may escape the halves of a surrogate pair one by one; no file or hash takes half of one.
    """
    found = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(found, ensure_ascii=False).encode()
    return found


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return what a JSON file holds. Raises OSError, and StateError that names the file."""
    content = read_file(path, most)
    refuse_parts(path, content)
    try:
        return parsed(content.decode())
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path}: truncated or not valid JSON: {error}") from None


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises OSError, and StateError that names the file."""
    content = read_file(path, MOST_TOML_BYTES)
    try:
        text = content.decode()
        if _LONG_KEY.search(text):
            raise ValueError(f"a key has more than {MOST_IN_A_KEY} parts")
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise StateError(f"{path}: unreadable: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, deep nesting
        raise StateError(f"{path}: not valid TOML: {one_line(str(error))}") from None
