"""Safe access to untrusted files and directories.

Reading is bounded: a parser may need a thousand times the size of a file, so files are checked
before they are parsed. Only regular files are read, because pipes and devices may never end.

Writing does not follow symlinks: in a run directory from another user, a symlink could redirect
writes to any file of the current user. Directories are therefore opened component by component, and
files are created, renamed and removed relative to a directory descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import struct
import time
import tomllib
import zipfile
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from safetensors import SafetensorError

from fedhet.base.arrays import Array, read_header, read_npy
from fedhet.base.errors import SettingsError, StateError, error_reason, error_text, one_line

T = TypeVar("T")
STATE_DIR_VARIABLE = "FEDHET_STATE_DIR"
MAX_BYTES = 2**29
MAX_TOML_BYTES = 2**20
MAX_PEM_BYTES = 2**20
MAX_PARTS = 8_000_000
"""Maximum number of values, lists and objects in a JSON file. A parsed value takes about 200 bytes
of memory."""
MAX_KEY_PARTS = 32
"""Maximum number of parts in a dotted TOML key; memory use grows with the square of this number."""
MAX_SPARSE_BYTES = 2**28
"""Maximum size in bytes of a file that allocates less than 1/16 of its size on disk."""
MAX_TEMPORARY_AGE = 3600.0
"""Age in seconds after which a temporary file is removed, because its writer was probably
killed."""
_ACL_USER, _ACL_GROUP = 2, 8
"""Tags of access control lists for named users and groups."""
_DESCRIPTORS = Path("/proc/self/fd")
_NO_FOLLOW = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PEM_LABEL = re.compile(rb"-----BEGIN ([A-Z0-9 ]{1,40})-----")
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_KEY_PARTS}}}")


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file.

    Raises OSError if it cannot be read, and StateError if it is too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        file = os.fdopen(descriptor, "rb")
    except IsADirectoryError as error:  # The error names the descriptor, which is still open.
        os.close(descriptor)
        raise IsADirectoryError(error.errno, error.strerror, str(path)) from None
    with file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StateError(f"{path}: expected a regular file")
        if status.st_size > max_bytes:
            raise StateError(
                f"{path}: too large, expected at most {max_bytes:,} bytes, got {status.st_size:,}"
            )
        return file.read(status.st_size)


def is_special(path: object) -> bool:
    """Return whether a path is a pipe, a socket, or a device, which a reader may never finish."""
    try:
        mode = os.stat(str(path)).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def is_secret(path: Path) -> bool:
    """Return whether no other user can access a file. Raises OSError if it does not exist.

    A group may read the file if root or this process's user owns it. The group must be root's or
    one of this process's groups. Container runtimes provide keys with these modes. The same holds
    for users and groups that an access control list names, as in the credentials of systemd.
    """
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    users, groups = {0, os.geteuid()}, {0, os.getegid(), *os.getgroups()}
    if any(name not in (users if is_user else groups) for is_user, name in _named_readers(path)):
        return False
    if not mode & 0o077:
        return True
    return not mode & 0o037 and status.st_uid in users and status.st_gid in groups


def _named_readers(path: Path) -> Iterator[tuple[bool, int]]:
    """Yield each user (True) and group (False) that a POSIX access control list names, on Linux.

    Entries without permissions are omitted. An entry consists of a tag, permissions, and an id.
    """
    try:
        entries = os.getxattr(path, "system.posix_acl_access")[4:]
    except (AttributeError, OSError):  # no list, or no such attributes on this system
        return
    for tag, permissions, name in struct.iter_unpack("<HHI", entries[: len(entries) // 8 * 8]):
        if tag in (_ACL_USER, _ACL_GROUP) and permissions:
            yield tag == _ACL_USER, name


def check_secret(path: Path) -> None:
    """Check that no other user can access a key. Raises SettingsError, or OSError if it is absent.

    `is_secret` states the rule.
    """
    if not is_secret(path):
        status = path.stat()
        owner = f"user {status.st_uid}, group {status.st_gid}"
        access = f"mode {stat.S_IMODE(status.st_mode):o}, {owner}"
        command = "chmod 600"
        if any(_named_readers(path)):
            access, command = f"{access}, and an access control list", "setfacl -b"
        raise SettingsError(
            f"{path}: expected a file that only its owner and this process's groups can read, got "
            f"{access}. Use `{command} {path}`."
        )


def check_mappable(path: Path) -> None:
    """Check that a file can be mapped into memory.

    Raises OSError if it does not exist, and StateError if it is not a regular file or is a large
    sparse file, which would fill the memory.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise StateError(f"cannot read {path}: expected a regular file")
    if status.st_size > MAX_SPARSE_BYTES and status.st_blocks * 512 < status.st_size / 16:
        raise StateError(
            f"cannot read {path}: expected at most {MAX_SPARSE_BYTES:,} bytes for a sparse file, "
            f"got {status.st_size:,}"
        )


def check_json_size(path: Path, content: bytes, extra: int = 0) -> None:
    """Raise StateError if JSON text has too many values, counting `extra` additional values."""
    if sum(map(content.count, (b",", b"[", b"{"))) + extra > MAX_PARTS:
        raise StateError(f"{path}: expected at most {MAX_PARTS:,} values")


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError or RecursionError if it is invalid.

    Unpaired surrogates are also invalid, because they could not be encoded in UTF-8 later.
    """
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read a JSON file.

    Raises OSError if it cannot be read, and StateError with its path if it is invalid.
    """
    content = read_file(path, max_bytes)
    check_json_size(path, content)
    try:
        return parse_json(decode_text(content))
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path}: truncated or not valid JSON: {error}") from None


def read_toml_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises OSError if it cannot be read, and StateError with its path if it is invalid.
    """
    text = read_text(path, MAX_TOML_BYTES)
    try:
        if _LONG_KEY.search(text):
            raise ValueError(f"expected keys of at most {MAX_KEY_PARTS} parts")
        return tomllib.loads(text)
    # Too many digits raise ValueError, and deep nesting raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path}: not valid TOML: {one_line(str(error))}") from None


_MARKS = {  # UTF-32 comes first, because its byte order mark starts with the UTF-16 mark.
    BOM_UTF8: "utf-8-sig", BOM_UTF32_LE: "utf-32", BOM_UTF32_BE: "utf-32",
    BOM_UTF16_LE: "utf-16", BOM_UTF16_BE: "utf-16",
}  # fmt: skip


def encoding_of(content: bytes) -> str:
    """Return the encoding of the byte order mark, as Windows' editors write, or else "utf-8"."""
    return next((name for mark, name in _MARKS.items() if content.startswith(mark)), "utf-8")


def decode_text(content: bytes) -> str:
    """Decode text. Raises UnicodeDecodeError if it is not valid in `encoding_of` the content."""
    return content.decode(encoding_of(content))


def text_in(content: bytes, path: Path) -> str:
    """Decode the content of a user's text file. Raises StateError for another encoding."""
    try:
        text = decode_text(content)
    except UnicodeDecodeError as error:
        fault = f"not valid {error.encoding.upper()} ({error})"
    else:
        if "\0" not in text:
            return text
        # UTF-16 without a byte order mark may be valid UTF-8.
        fault = "null characters, as in a binary file or in UTF-16 without a byte order mark"
    raise StateError(f"{path}: {fault}. Save the file in UTF-8")


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Read a user's text file. Raises the errors of `read_file` and `text_in`."""
    return text_in(read_file(path, max_bytes), path)


def read_pem(path: Path, parse: Callable[[bytes], T], rule: str, *, secret: bool = False) -> T:
    """Read a key or a certificate, in PEM or OpenSSH format, with a function of cryptography.

    Raises StateError, with the `rule` for the content, if the file is unreadable or invalid, and
    SettingsError if it is `secret` and other users can access it.
    """
    try:
        if secret:
            check_secret(path)
        content = read_file(path, MAX_PEM_BYTES)
    except OSError as error:
        raise StateError(f"{path}: cannot read the file ({error_reason(error)})") from None
    try:
        return parse(content)
    except Exception as error:  # cryptography raises many exception types.
        label = _PEM_LABEL.search(content)
        got = "other content" if content else "an empty file"
        got = f"a damaged or unsupported {label[1].decode()!r}" if label else got
        reason = str(error).partition(". See https")[0]
        raise StateError(f"{path}: expected {rule}, got {got} ({reason})") from None


def expanded(path: str | Path, remedy: str = "use an absolute path") -> Path:
    """Replace a leading `~` in `path` with the home directory.

    Raises SettingsError if the path is invalid, and, with the `remedy`, if the home directory is
    unknown, e.g. in a container.
    """
    if "\0" in str(path):
        raise SettingsError(f"{path}: a path must not contain a null character")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(
            f"{path}: home directory not found in HOME or the user database. Set HOME, or {remedy}."
        ) from None


def state_directory(setting: str = "") -> Path:
    """Return the directory of a site's private state: `setting`, or the default if it is empty.

    Raises SettingsError if the default is in the home directory, and the latter is unknown.
    """
    path = setting or os.environ.get(STATE_DIR_VARIABLE) or "~/.local/state/fedhet"
    remedy = f"set node-config 'state-dir' or the environment variable {STATE_DIR_VARIABLE}"
    return expanded(path, remedy)


class Folder:
    """Directory for writing files without following symlinks. It is created on first use."""

    def __init__(self, path: Path, within: Path | None = None, *, private: bool = False) -> None:
        """Describe a directory without creating it.

        Args:
            path: Path of the directory.
            within: Parent of `path`, below which no component of the path may be a symlink. The
                default is `path` itself, which may be a symlink created by the user.
            private: Whether only the owner can access directories created here.
        """
        self.path, self._within = path, within or path
        self._mode = 0o700 if private else 0o777

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Yield a path for writing files in the directory. Raises the same errors as `opened`."""
        with self.opened() as directory:
            yield self._path_of(directory)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the directory, after creating it and its parents if necessary.

        Raises OSError if it cannot be opened, and StateError if a component is a symlink.
        """
        self._within.mkdir(self._mode, parents=True, exist_ok=True)
        current, descriptor = self._within, os.open(self._within, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in self.path.relative_to(self._within).parts:
                current /= name
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, self._mode, dir_fd=descriptor)
                outer, flags = descriptor, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                try:
                    descriptor = os.open(name, flags, dir_fd=outer)
                except OSError:
                    _check_no_symlink(current)
                    raise
                os.close(outer)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def replacing(self, name: str, *, private: bool = False) -> Iterator[Path]:
        """Yield a temporary path; if the block succeeds, sync the file and rename it to `name`.

        Only the owner can read a `private` file. Raises StateError if the file cannot be written.
        """
        temporary, flags = f".{name}.{secrets.token_hex(6)}", os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with self.opened() as directory:
                os.close(os.open(temporary, flags, 0o600, dir_fd=directory))
                try:
                    yield self._path_of(directory) / temporary
                    flags = os.O_RDONLY | _NO_FOLLOW
                    with os.fdopen(os.open(temporary, flags, dir_fd=directory), "rb") as file:
                        os.fchmod(file.fileno(), 0o600 if private else 0o644)
                        os.fsync(file.fileno())
                    os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
                    os.fsync(directory)
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(temporary, dir_fd=directory)
        except (OSError, SafetensorError) as error:
            raise StateError(
                f"cannot write {self.path / name}: {error_reason(error)}; the file is unchanged"
            ) from error

    def open(self, name: str, flags: int, mode: int = 0o644) -> int:
        """Open a file in the directory, creating it if necessary, and return its descriptor.

        Raises OSError if the file cannot be opened, and StateError if it is a symlink or not a
        regular file.
        """
        with self.opened() as directory:
            try:
                descriptor = os.open(name, flags | _NO_FOLLOW | os.O_CREAT, mode, dir_fd=directory)
            except OSError:
                _check_no_symlink(self.path / name)
                raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StateError(f"cannot write {self.path / name}: expected a regular file")
        return descriptor

    @contextlib.contextmanager
    def appending(
        self, name: str, max_bytes: int
    ) -> Iterator[tuple[bytes, Callable[[bytes], None]]]:
        """Lock a private text file, and yield its content and a function that appends lines.

        The function syncs the lines to disk, or raises StateError and leaves the file unchanged. It
        replaces an incomplete last line, which a killed process has left behind. At most
        `max_bytes` + 1 bytes are read. Raises StateError if the file cannot be opened.
        """
        path = self.path / name
        try:
            file = self.open(name, os.O_RDWR | os.O_APPEND, 0o600)
        except OSError as error:
            raise StateError(f"{path}: cannot write the file ({error.strerror})") from None

        def append(lines: bytes) -> None:
            complete = content.rfind(b"\n") + 1
            os.ftruncate(file, complete)
            try:
                fault = "" if os.write(file, lines) == len(lines) else "the disk is full"
                os.fsync(file)
            except OSError as error:
                fault = error_text(error)
            if fault:
                os.ftruncate(file, complete)
                raise StateError(f"{path}: cannot write the file ({fault})")

        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = os.pread(file, max_bytes + 1, 0)
            yield content, append
        finally:
            os.close(file)
        with self.opened() as directory:  # Sync the directory, because the file may be new.
            os.fsync(directory)

    def rename(self, name: str, new: str) -> None:
        """Rename a file in the directory. Raises OSError or StateError if that fails."""
        with self.opened() as directory:
            os.replace(name, new, src_dir_fd=directory, dst_dir_fd=directory)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the directory, if they exist.

        Raises OSError or StateError if that fails.
        """
        with self.opened() as directory:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)

    def clear(self) -> None:
        """Remove all files in the directory, if it exists.

        Raises OSError or StateError if that fails.
        """
        if os.path.lexists(self.path):
            self.remove(sorted(path.name for path in self.path.iterdir()))

    def remove_stale_temporaries(self, suffix: str) -> None:
        """Remove old temporary files with this suffix that killed processes have left behind.

        Raises OSError or StateError if that fails.
        """
        with self.opened() as directory, os.scandir(directory) as entries:
            for entry in entries:
                is_temporary = entry.name.startswith(".") and f"{suffix}." in entry.name
                if is_temporary or entry.name.startswith(".tmp"):  # safetensors uses .tmp.
                    with contextlib.suppress(OSError):
                        modified = entry.stat(follow_symlinks=False).st_mtime
                        if time.time() - modified > MAX_TEMPORARY_AGE:
                            os.unlink(entry.name, dir_fd=directory)

    def _path_of(self, descriptor: int) -> Path:
        """Return a path of the open directory, for libraries that need a path."""
        path = _DESCRIPTORS / str(descriptor)
        return path if path.exists() else self.path


def write_text(path: Path, text: str, *, within: Path | None = None, private: bool = False) -> Path:
    """Write a text file atomically with `Folder.replacing`, and return its path."""
    with Folder(path.parent, within).replacing(path.name, private=private) as temporary:
        temporary.write_text(text, "utf-8")
    return path


def check_no_symlinks(directory: Path) -> None:
    """Raise StateError if an entry of a directory is a symlink."""
    for path in sorted(directory.iterdir()):
        _check_no_symlink(path)


def _check_no_symlink(path: Path) -> None:
    if path.is_symlink():
        raise StateError(f"{path} is a symlink, expected a file or directory. Remove the symlink.")


def load_npz(path: Path, names: Iterable[str] | None = None) -> dict[str, Array]:
    """Read arrays from an .npz file without pickle. The default is to read all arrays."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        if names is None:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
        for name in names:
            with archive.open(f"{name}.npy") as file:
                arrays[name] = read_npy(file)
    return arrays


def map_npy(path: Path) -> Array:
    """Map an .npy file of version 1.0 into memory, copy-on-write.

    Torch accepts the array without a warning, and writes never reach the file.
    """
    with path.open("rb") as file:
        if (version := np.lib.format.read_magic(file)) != (1, 0):
            raise ValueError(f"unsupported .npy version, expected (1, 0), got {version}")
        shape, is_fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError("pickled objects are unsupported")
        order: Literal["C", "F"] = "F" if is_fortran else "C"
        return np.memmap(file, dtype, "c", file.tell(), shape, order)
