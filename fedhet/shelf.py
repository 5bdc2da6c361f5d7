"""Models on disk by number and version: the server's pool, and a client's copies of its helpers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedhet.contract import Array
from fedhet.helpers import Key
from fedhet.state import load, save


@dataclass(frozen=True)
class Shelf:
    """A folder of models, one safetensors file each; none stays in memory."""

    folder: Path

    def put(self, key: Key, weights: Mapping[str, Array]) -> None:
        """Write a model in one atomic step. Raises StateError."""
        tensors = {name: torch.tensor(np.asarray(value)) for name, value in weights.items()}
        save(self._path(key), tensors, {})

    def get(self, key: Key) -> dict[str, Array]:
        """Return a model's tensors. Raises StateError where it is not there."""
        tensors, _ = load(self._path(key), torch.device("cpu"))
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    def __contains__(self, key: Key) -> bool:
        return self._path(key).exists()

    def contents(self) -> list[Key]:
        """Return what is there, sorted."""
        names = (path.stem.split("-") for path in self.folder.glob("*-*.safetensors"))
        return sorted((int(number), int(version)) for number, version in names)

    def trim(self, number: int, newest: int) -> None:
        """Remove all but the newest versions of a model."""
        versions = sorted(key for key in self.contents() if key[0] == number)
        for key in versions[:-newest]:
            self._path(key).unlink(missing_ok=True)

    def keep(self, wanted: Collection[Key]) -> None:
        """Remove all but `wanted`."""
        for key in set(self.contents()) - set(wanted):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]}-{key[1]}.safetensors"
