"""The clock of a simulation: how long each client takes, so that rounds close as in the field.

A client's time for a round is its work divided by its speed, plus the bytes that it receives and
sends divided by its bandwidth. It depends on the seed, the client and the round alone: a resumed
run is equal, and so is one on more workers.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhet.base.errors import SettingsError, nearest, one_line
from fedhet.base.seeding import numpy_rng
from fedhet.settings.engine import DRAWN_CLOCK, PaceSettings

SAMPLE_MS, MBIT, CLIENT = "sample-ms", "mbit", "client"
COLUMNS = (SAMPLE_MS, MBIT, CLIENT)
MOST_BYTES = 64 * 2**20
"""The largest file of measured devices."""


@dataclass(frozen=True)
class Device:
    """What a client computes and sends with."""

    sample_ms: float
    """Milliseconds per training sample."""
    mbit: float
    """Bandwidth, in Mbit per second, either way."""

    def seconds(self, work: float, size: int) -> float:
        """Return the seconds for `work` samples and for `size` bytes."""
        return work * self.sample_ms / 1e3 + size * 8 / (self.mbit * 1e6)


class SimulatedClock:
    """The devices of a simulation's clients."""

    def __init__(self, pace: PaceSettings, seed: int) -> None:
        """Raises SettingsError if the file of measured devices cannot be used."""
        self._pace, self._seed = pace, seed
        self._rows = [] if pace.clock == DRAWN_CLOCK else read_devices(Path(pace.clock))
        self._named = {name: device for name, device in self._rows if name}

    def seconds(self, client: str, round: int, work: float, size: int) -> float:
        """Return how long a client takes for a round; a straggler, 'pace.slowdown' times as long.

        `work` is the number of training samples, each counted as often as it was used; `size` the
        bytes of the two messages.
        """
        taken = self.device(client).seconds(work, size)
        return taken * (self._pace.slowdown if self._straggles(client, round) else 1.0)

    def device(self, client: str) -> Device:
        """Return a client's device. Raises SettingsError if the file names others only."""
        if self._named:
            return self._of_name(client)
        if self._rows:
            row = int(numpy_rng(self._seed, client, "device").integers(len(self._rows)))
            return self._rows[row][1]
        speed, bandwidth = numpy_rng(self._seed, client, "device").standard_normal(2)
        spread = self._pace.spread
        return Device(
            self._pace.sample_ms * math.exp(spread * speed),
            self._pace.mbit * math.exp(spread * bandwidth),
        )

    def _of_name(self, client: str) -> Device:
        if client not in self._named:
            hint = nearest(client, self._named)
            raise SettingsError(f"{self._pace.clock}: has no row for the client {client!r}{hint}")
        return self._named[client]

    def _straggles(self, client: str, round: int) -> bool:
        share = self._pace.stragglers
        return share > 0 and numpy_rng(self._seed, client, round, "straggler").random() < share


def read_devices(path: Path) -> list[tuple[str, Device]]:
    """Return the devices of a CSV file, each with the client that it names, or "".

    Its header names the columns `sample-ms` and `mbit`, and may name `client`. Raises SettingsError
    that names the line and what is allowed.
    """
    where = f"setting 'pace.clock' = {str(path)!r}"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SettingsError(f"{where} is larger than {MOST_BYTES >> 20} MB")
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            _check_header(where, lines.fieldnames or ())
            rows = [_device(f"{where}, line {lines.line_num}", row) for row in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        rule = "it takes none, log-normal, or a CSV file of devices"
        raise SettingsError(f"{where} cannot be read ({one_line(str(error))}): {rule}") from None
    if not rows:
        raise SettingsError(f"{where} has no device: it takes a row for each")
    return rows


def _check_header(where: str, names: Sequence[str]) -> None:
    if not {SAMPLE_MS, MBIT} <= set(names) or not set(names) <= set(COLUMNS):
        found = ", ".join(map(str, names)) or "nothing"
        rule = f"it takes {SAMPLE_MS} and {MBIT}, and {CLIENT} if its rows are of named clients"
        raise SettingsError(f"{where} has the columns {one_line(found)}: {rule}")


def _device(where: str, row: Mapping[str, str | None]) -> tuple[str, Device]:
    numbers = [_positive(where, name, row.get(name)) for name in (SAMPLE_MS, MBIT)]
    return (row.get(CLIENT) or "").strip(), Device(*numbers)


def _positive(where: str, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise SettingsError(f"{where}: {name} is {one_line(repr(text))}, it takes a number > 0")
    return value
