"""Ledger of a client: a record of the privacy budget that each run has consumed.

The ledger is a file with one JSON object per line, in the client's private state and outside the
directories of runs. A line is written and synced to disk before the corresponding release begins.
The ledger is therefore complete even if the process is killed, and may include releases that were
never sent. A site also records runs without privacy, because they void the guarantee of all runs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from fedhet.base.disk import Folder, read_file
from fedhet.base.errors import StateError
from fedhet.privacy.accounting import Release
from fedhet.privacy.noise import CIPHER

FOLDER = "_privacy"
"""Directory of the ledgers within the private state; no run may have this name."""
MAX_BYTES = 256 * 2**20


class Entry(BaseModel):
    """One line of a ledger: a release, or a round of a run without privacy."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    at: str
    """Time in UTC, such as 2026-11-24T08:30:00."""
    run: str
    round: int
    method: str
    client: str
    data: str
    """Digest of the samples, from `digest_of`."""
    noise: float
    """Noise multiplier; 0 for a round without privacy."""
    sampling: float
    count: int
    source: str = ""
    """Source of the noise. In entries from old versions, the source is empty, and an attacker can
    remove the noise."""

    @property
    def release(self) -> Release:
        """The recorded release, with zero noise if an attacker can remove the noise.

        Invalid values such as NaN are kept, because `epsilon_of` returns infinity for them.
        """
        noise = self.noise if self.source == CIPHER else 0.0
        return Release(noise, self.sampling, self.count)

    @property
    def is_private(self) -> bool:
        """Whether the entry belongs to a run with privacy."""
        return self.noise != 0


class Ledger:
    """Privacy ledger of one client."""

    def __init__(self, root: Path, client: str) -> None:
        """Locate the ledger of a client in the directory `root` of private states."""
        self._folder = Folder(root / FOLDER, root, private=True)
        self._name = f"{client}.jsonl"
        self.path = root / FOLDER / self._name

    def charge(
        self, releases: Sequence[Release], check: Callable[[list[Entry]], None], **fields: str | int
    ) -> None:
        """Append entries for `releases`, and sync them to disk.

        `check` is called with all earlier entries, and raises an error to reject the releases.
        `fields` contains the remaining fields of `Entry`. Raises StateError if the file cannot be
        used.
        """
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
        entries = [Entry(at=at, source=CIPHER, **fields, **asdict(each)) for each in releases]
        with self._folder.appending(self._name, MAX_BYTES) as (content, append):
            check(_parsed(content, self.path))
            append(_lines(entries))

    def entries(self) -> list[Entry]:
        """Return all entries, or an empty list if the file does not exist.

        Raises StateError if the file is damaged or too large.
        """
        return read_ledger(self.path) if self.path.exists() else []

    def record_unprotected(self, run: str, round: int, method: str, client: str, data: str) -> None:
        """Record a round in a run without privacy, unless it is already recorded.

        Raises StateError if the file cannot be used.
        """
        fields: dict[str, str | int] = {"run": run, "round": round, "data": data}
        fields |= {"method": method, "client": client}
        recorded = (e.model_dump(include={*fields}) for e in self.entries() if not e.is_private)
        if fields not in recorded:
            self.charge([Release(0.0)], lambda past: None, **fields)

    def merge(self, others: Sequence[Entry]) -> int:
        """Append the entries that another copy of this ledger contains and this copy lacks.

        Entries may have been added to either copy. An entry that occurs several times in one copy
        occurs at least as often in the result. Returns the number of added entries. Raises
        StateError if the file cannot be used.
        """
        with self._folder.appending(self._name, MAX_BYTES) as (content, append):
            missing = Counter(others) - Counter(_parsed(content, self.path))
            append(_lines(missing.elements()))
        return missing.total()


def read_ledger(path: Path) -> list[Entry]:
    """Return all entries of a ledger. Raises StateError if the file is missing or damaged."""
    try:
        content = read_file(path, MAX_BYTES)
    except OSError as error:
        raise StateError(f"{path}: cannot read the file ({error.strerror})") from None
    return _parsed(content, path)


def digest_of(x: Tensor, y: Tensor) -> str:
    """Return an order-independent digest of samples x [N, ...] and their labels y [N]."""
    rows = zip(x.cpu().contiguous().flatten(1).numpy(), y.cpu().tolist(), strict=True)
    digests = sorted(
        hashlib.blake2b(row.tobytes() + str(label).encode(), digest_size=16).digest()
        for row, label in rows
    )
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _lines(entries: Iterable[Entry]) -> bytes:
    return "".join(f"{each.model_dump_json()}\n" for each in entries).encode()


def _parsed(content: bytes, path: Path) -> list[Entry]:
    """Return the entries of all complete lines; the release of an incomplete line has not begun.

    Raises StateError if a line is damaged or the file is too large.
    """
    if len(content) > MAX_BYTES:
        raise StateError(f"{path}: must be at most {MAX_BYTES} bytes")
    entries = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            entries.append(Entry.model_validate_json(line))
        except ValidationError:
            rule = "the consumed budget is unknown, so no further data is released"
            raise StateError(f"{path}: line {number} is damaged; {rule}") from None
    return entries
