"""The privacy ledger of a client: the budget that each run has consumed, over all runs.

The ledger is a file with one JSON object per line, in the client's private state and outside all
runs. A line is written and synced before the step that it accounts for begins. So the ledger is
complete whenever a process is killed; it also counts releases that were never sent. At a site, runs
without privacy are recorded too, since they void the guarantee of all runs in the ledger.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from fedhet.base.disk import Folder
from fedhet.base.errors import StateError, words_of
from fedhet.privacy.accounting import Release
from fedhet.privacy.noise import CIPHER

FOLDER = "_privacy"
"""The folder of the ledgers in a folder of private state; no run has this name."""
MAX_BYTES = 256 * 2**20


class Entry(BaseModel):
    """One line of a ledger: a release, or a round of a run without privacy."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    at: str
    """When, in UTC: 2026-11-24T08:30:00."""
    run: str
    round: int
    method: str
    client: str
    data: str
    """A digest of the samples (`digest_of`)."""
    noise: float
    """0 for a round without privacy."""
    sampling: float
    count: int
    source: str = ""
    """The source of the noise; empty in entries of versions whose noise can be removed."""

    @property
    def release(self) -> Release:
        """Return the release that was paid for, without noise if the noise can be removed.

        Values that no accountant takes, such as NaN, are kept: `epsilon_of` is infinite for them.
        """
        noise = self.noise if self.source == CIPHER else 0.0
        return Release(noise, self.sampling, self.count)

    @property
    def is_private(self) -> bool:
        """Whether the entry belongs to a run with privacy."""
        return self.noise != 0


class Ledger:
    """The ledger of one client."""

    def __init__(self, root: Path, client: str) -> None:
        """`root` is the folder of private state; the file is made with the first entry."""
        self._folder = Folder(root / FOLDER, root, private=True)
        self._name = f"{client}.jsonl"
        self.path = root / FOLDER / self._name

    def charge(
        self, releases: Sequence[Release], check: Callable[[list[Entry]], None], **about: str | int
    ) -> None:
        """Append entries for `releases`, and return once they are on the disk.

        `check` is called with all earlier entries, and may refuse by raising. `about` are the
        fields of `Entry` besides the releases. Raises StateError if the file cannot be used.
        """
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
        entries = [Entry(at=at, source=CIPHER, **about, **asdict(each)) for each in releases]
        with self._locked() as (past, append):
            check(past)
            append(entries)

    def entries(self) -> list[Entry]:
        """Return all entries; none if nothing was ever spent. Raises StateError."""
        return read_ledger(self.path) if self.path.exists() else []

    def record_unprotected(self, run: str, round: int, method: str, client: str, data: str) -> None:
        """Record a round of a run without privacy, once. Raises StateError."""
        about: dict[str, str | int] = {"run": run, "round": round, "data": data}
        about |= {"method": method, "client": client}
        known = (e.model_dump(include={*about}) for e in self.entries() if not e.is_private)
        if about not in known:
            self.charge([Release(0.0)], lambda past: None, **about)

    def merge(self, others: Sequence[Entry]) -> int:
        """Append the entries of another copy of this ledger that are missing here.

        Both copies may have grown since one was made from the other. An entry that occurs several
        times in one copy occurs as often in the result. Returns the number of entries added. Raises
        StateError.
        """
        with self._locked() as (own, append):
            missing = [*(Counter(others) - Counter(own)).elements()]
            append(missing)
        return len(missing)

    @contextmanager
    def _locked(self) -> Iterator[tuple[list[Entry], Callable[[Sequence[Entry]], None]]]:
        """Lock the file; yield its entries, and a function that appends entries, all or none.

        The end of a line that was never finished is cut off: what it was to pay for has not begun.
        """
        try:
            file = self._folder.open(self._name, os.O_RDWR | os.O_APPEND, 0o600)
        except OSError as error:
            raise StateError(f"{self.path}: cannot be written ({error.strerror})") from None

        def append(entries: Sequence[Entry]) -> None:
            lines = "".join(f"{each.model_dump_json()}\n" for each in entries).encode()
            before = os.fstat(file).st_size
            try:
                fault = "" if os.write(file, lines) == len(lines) else "the disk is full"
                os.fsync(file)
            except OSError as error:
                fault = words_of(error)
            if fault:
                os.ftruncate(file, before)
                raise StateError(f"{self.path}: cannot be written ({fault})")

        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = os.pread(file, MAX_BYTES + 1, 0)
            entries, whole = _parsed(found, self.path)
            if whole < len(found):
                os.ftruncate(file, whole)
            yield entries, append
        finally:
            os.close(file)
        with self._folder.opened() as folder:  # the file may be new
            os.fsync(folder)


def read_ledger(path: Path) -> list[Entry]:
    """Return all entries of a ledger. Raises StateError if it is absent or damaged."""
    try:
        with path.open("rb") as file:
            found = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise StateError(f"{path}: cannot be read ({error.strerror})") from None
    return _parsed(found, path)[0]


def digest_of(x: Tensor, y: Tensor) -> str:
    """Return a digest of samples x [N, ...] and their classes y [N], whatever their order."""
    rows = zip(x.cpu().contiguous().flatten(1).numpy(), y.cpu().tolist(), strict=True)
    each = sorted(
        hashlib.blake2b(row.tobytes() + str(label).encode(), digest_size=16).digest()
        for row, label in rows
    )
    return hashlib.blake2b(b"".join(each), digest_size=16).hexdigest()


def _parsed(found: bytes, path: Path) -> tuple[list[Entry], int]:
    """Return the entries of all lines that end, and the length of these lines in bytes.

    Raises StateError for a damaged line, and if there may be more than what was `found`.
    """
    if len(found) > MAX_BYTES:
        raise StateError(f"{path}: is larger than {MAX_BYTES} bytes")
    whole, entries = found.rfind(b"\n") + 1, []
    for number, line in enumerate(found[:whole].splitlines(), 1):
        try:
            entries.append(Entry.model_validate_json(line))
        except ValidationError:
            rule = "what was spent is unknown, so nothing more is released"
            raise StateError(f"{path}: line {number} is damaged: {rule}") from None
    return entries, whole
