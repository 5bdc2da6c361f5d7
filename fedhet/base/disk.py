"""Files that may come from somebody else: read within bounds, written without following links.

A parser may need a thousand times the bytes of a file. So what a file would take is bounded before
it is parsed, and only a regular file is read: a pipe never ends, and a device may not either.

A run's folder, or a client's state, may have been received. A link in it would otherwise lead
what is written, renamed or removed here to other files of whoever opens it. So a folder is opened
name by name without following links, and what happens in it happens by its descriptor.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fedhet.base.errors import SettingsError, StateError, one_line, reason_of

MAX_BYTES = 2**29
MAX_TOML_BYTES = 2**20
MAX_PARTS = 8_000_000
"""Values, lists and objects of a JSON file: each takes some two hundred bytes in memory."""
MAX_IN_A_KEY = 32
"""Parts of a dotted key in TOML, whose memory grows with their square."""
LARGE = 2**28
"""Bytes of a file that may be mapped however few of them are on the disk."""
LEFT_BEHIND = 3600.0
"""Seconds after which a temporary file belongs to a writer that was killed."""
_OPEN_FOLDERS = Path("/proc/self/fd")
_UNFOLLOWED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_IN_A_KEY}}}")


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
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
    if sum(map(content.count, (b",", b"[", b"{"))) + more > MAX_PARTS:
        raise StateError(f"{path} has more parts than such a file can have: {MAX_PARTS:,}")


def parsed(text: str) -> Any:
    """Return what JSON holds. Raises ValueError or RecursionError, also for half a character.

    JSON may escape the halves of a surrogate pair one by one; no file or hash takes half of one.
    """
    found = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(found, ensure_ascii=False).encode()
    return found


def read_json(path: Path, most: int = MAX_BYTES) -> Any:
    """Return what a JSON file holds. Raises OSError, and StateError that names the file."""
    content = read_file(path, most)
    refuse_parts(path, content)
    try:
        return parsed(content.decode())
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path}: truncated or not valid JSON: {error}") from None


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises OSError, and StateError that names the file."""
    content = read_file(path, MAX_TOML_BYTES)
    try:
        text = content.decode()
        if _LONG_KEY.search(text):
            raise ValueError(f"a key has more than {MAX_IN_A_KEY} parts")
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise StateError(f"{path}: unreadable: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, deep nesting
        raise StateError(f"{path}: not valid TOML: {one_line(str(error))}") from None


def expanded(path: str | Path, remedy: str = "give an absolute path") -> Path:
    """Return `path` with a leading `~` replaced by the home directory.

    Only such a path needs a home directory, which a container's user may not have. Raises
    SettingsError, with the `remedy`, if no home directory is known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(
            f"{path}: home directory not found, expected it in HOME or in the user database. "
            f"Set HOME, or {remedy}."
        ) from None


class Folder:
    """A folder to write into. It is made, with those above it, when it is first written into."""

    def __init__(self, path: Path, within: Path | None = None, *, private: bool = False) -> None:
        """`within`: the folder below which no name on the way to `path` may be a link.

        By default it is `path` itself, which may be a link that its user has made. Only the owner
        may enter a private folder that is made here.
        """
        self.path, self._within = path, within or path
        self._mode = 0o700 if private else 0o777

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Yield a path of the folder for files that are neither kept nor replaced, as `opened`."""
        with self.opened() as folder:
            yield self._place(folder)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the folder. Raises OSError, and StateError that names a link."""
        self._within.mkdir(self._mode, parents=True, exist_ok=True)
        here, descriptor = self._within, os.open(self._within, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in self.path.relative_to(self._within).parts:
                here /= name
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, self._mode, dir_fd=descriptor)
                outer, flags = descriptor, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                try:
                    descriptor = os.open(name, flags, dir_fd=outer)
                except OSError:
                    _refuse_link(here)
                    raise
                os.close(outer)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def replacing(self, name: str, *, private: bool = False) -> Iterator[Path]:
        """Yield a temporary path; if the block succeeds, sync it and rename it to `name`.

        Only its owner can read a private file. Raises StateError.
        """
        written, flags = f".{name}.{secrets.token_hex(6)}", os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with self.opened() as folder:
                os.close(os.open(written, flags, 0o600, dir_fd=folder))
                try:
                    yield self._place(folder) / written
                    flags = os.O_RDONLY | _UNFOLLOWED
                    with os.fdopen(os.open(written, flags, dir_fd=folder), "rb") as file:
                        os.fchmod(file.fileno(), 0o600 if private else 0o644)
                        os.fsync(file.fileno())
                    os.replace(written, name, src_dir_fd=folder, dst_dir_fd=folder)
                    os.fsync(folder)
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(written, dir_fd=folder)
        except (OSError, SafetensorError) as error:
            raise StateError(
                f"cannot write {self.path / name}: {reason_of(error)}; the file before it is "
                "unchanged"
            ) from error

    def open(self, name: str, flags: int, mode: int = 0o644) -> int:
        """Return a descriptor of a file in the folder, which is made if it is absent.

        Raises OSError, and StateError if it is a link, or no file that can be written.
        """
        with self.opened() as folder:
            try:
                found = os.open(name, flags | _UNFOLLOWED | os.O_CREAT, mode, dir_fd=folder)
            except OSError:
                _refuse_link(self.path / name)
                raise
        if not stat.S_ISREG(os.fstat(found).st_mode):
            os.close(found)
            raise StateError(f"{self.path / name} is not a regular file: nothing is written")
        return found

    def rename(self, name: str, new: str) -> None:
        """Rename a file of the folder. Raises OSError or StateError."""
        with self.opened() as folder:
            os.replace(name, new, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of the folder, as far as they are there. Raises OSError or StateError."""
        with self.opened() as folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)

    def clear(self) -> None:
        """Remove all files of the folder, if it is there. Raises OSError or StateError."""
        if os.path.lexists(self.path):
            self.remove(sorted(path.name for path in self.path.iterdir()))

    def remove_left_behind(self, suffix: str) -> None:
        """Remove what killed writers of files with this suffix have left, after an hour.

        Raises OSError or StateError.
        """
        with self.opened() as folder, os.scandir(folder) as found:
            for entry in found:
                temporary = entry.name.startswith(".") and f"{suffix}." in entry.name
                if temporary or entry.name.startswith(".tmp"):  # of save_file
                    with contextlib.suppress(OSError):
                        if time.time() - entry.stat(follow_symlinks=False).st_mtime > LEFT_BEHIND:
                            os.unlink(entry.name, dir_fd=folder)

    def _place(self, descriptor: int) -> Path:
        """Return a path of the open folder for libraries that take no descriptor."""
        open_folder = _OPEN_FOLDERS / str(descriptor)
        return open_folder if open_folder.exists() else self.path


def write_text(path: Path, text: str, *, within: Path | None = None, private: bool = False) -> Path:
    """Write a text atomically, as `Folder.replacing` does, and return its path."""
    with Folder(path.parent, within).replacing(path.name, private=private) as temporary:
        temporary.write_text(text, "utf-8")
    return path


def refuse_links(folder: Path) -> None:
    """Raise StateError, which names the link, if an entry of the folder is one."""
    for path in sorted(folder.iterdir()):
        _refuse_link(path)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise StateError(
            f"{path} is a link: nothing is written through a link in a folder of a run; remove it"
        )
