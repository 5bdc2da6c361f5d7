"""The server's checkpoints: one a round in DIR/checkpoints, the last two kept.

Each holds what the strategy keeps over rounds, as tensors, and what the books say, as facts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedhet.contract import Array
from fedhet.errors import StateError
from fedhet.state import Facts, load, round_of, save

KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A run as it was after `round`."""

    round: int
    tensors: Mapping[str, Array]
    facts: Facts


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "checkpoints"

    def write(self, round: int, tensors: Mapping[str, Array], facts: Facts) -> None:
        """Add the checkpoint of `round`, then remove all but the last two. Raises StateError."""
        kept = {
            name: torch.from_numpy(np.require(value, requirements="W"))
            for name, value in tensors.items()
        }
        save(self._folder / f"round-{round:06d}.safetensors", kept, facts)
        for old in self._files()[:-KEPT]:
            with contextlib.suppress(OSError):
                old.unlink()

    def newest(self, notice: Callable[[str], None]) -> Checkpoint | None:
        """Return the last whole checkpoint, or None where there never was one.

        One that cannot be read is passed over with a notice. Raises StateError if there are
        checkpoints, but none is whole.
        """
        files = self._files()
        for path in reversed(files):
            try:
                tensors, facts = load(path, torch.device("cpu"))
            except StateError as error:
                notice(f"{error}; the checkpoint before it is tried")
                continue
            found = {name: tensor.numpy() for name, tensor in tensors.items()}
            return Checkpoint(round_of(path), found, facts)
        if files:
            raise StateError(f"{self._folder}: none of {len(files)} checkpoints can be read")
        return None

    def forget_after(self, round: int) -> None:
        """Put the checkpoints after `round`, which could not be read, out of the way."""
        for path in self._files():
            if round_of(path) > round:
                path.replace(path.with_suffix(".unreadable"))

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("round-*.safetensors"))
