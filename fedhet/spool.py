"""Payloads put on disk as they come in, so that a server does not hold every client's at once."""

from __future__ import annotations

from pathlib import Path

from flwr.common import Parameters


class Spooled(Parameters):
    """A payload that lies on disk; `take` reads it back, once."""

    def __init__(self, path: Path, parameters: Parameters) -> None:
        super().__init__(tensors=[], tensor_type=parameters.tensor_type)
        self._path = path
        self._sizes = [len(tensor) for tensor in parameters.tensors]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.writelines(parameters.tensors)

    def take(self) -> Parameters:
        """Return the payload and remove it from disk."""
        with self._path.open("rb") as file:
            tensors = [file.read(size) for size in self._sizes]
        self._path.unlink()
        return Parameters(tensors=tensors, tensor_type=self.tensor_type)
