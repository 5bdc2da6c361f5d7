"""States on disk: client states, server checkpoints, and stored models.

Each state is a safetensors file with tensors and metadata. It is written under a temporary name,
synced and renamed (`fedhet.base.disk`), so that readers never see a partial state.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedhet.algorithms.uncertainty import Key
from fedhet.base.arrays import Array, read_npy
from fedhet.base.disk import Folder, check_mappable, parse_json, read_file
from fedhet.base.errors import StateError, error_reason
from fedhet.base.metrics import MAX_CONFUSION
from fedhet.base.transfer import HOST, all_to_device
from fedhet.wire.identity import is_name

Metadata = Mapping[str, int | float | str]
Loaded = tuple[dict[str, Tensor], dict[str, int | float | str]]
_KEY = "fedhet"
_ROUND = re.compile(r"round-([0-9]{1,18})\.safetensors")
_MODEL = re.compile(r"([0-9]{1,18})-([0-9]{1,18})\.safetensors")
CHECKPOINTS = "checkpoints"
"""Subdirectory of a run's directory that contains the server's checkpoints."""
OPEN = "open"
"""Checkpoint metadata key for the record of a round that has not been evaluated yet."""
KEPT_STATES = 3
"""Number of states to keep per client, so that the server can resume from an earlier round."""
KEPT_CHECKPOINTS = 2
"""Number of checkpoints that the server keeps."""
CONFUSION_FILE = "confusion.npy"
"""Name of the file with a simulated client's confusion matrix, next to its states."""


@dataclass(frozen=True)
class ClientStore:
    """A client's private states in a run: ROOT/<run>/<client>/round-<n>.safetensors.

    A state is saved at the end of each of the client's rounds; only the last few states are kept.
    """

    root: Path
    run: str
    client: str

    def __post_init__(self) -> None:
        for part in (self.run, self.client):
            if not is_name(part):
                raise StateError(f"invalid directory name {part!r} for private state")

    @property
    def folder(self) -> Path:
        """Directory of the states."""
        return self.root / self.run / self.client

    def path(self, round: int) -> Path:
        """Return the path of the state saved after `round`."""
        return path_in(self.folder, round)

    def rounds(self) -> list[int]:
        """Return the rounds with a saved state, in ascending order."""
        return rounds_in(self.folder)

    def save(
        self, round: int, tensors: Mapping[str, Tensor], metadata: Metadata, best_round: int = 0
    ) -> None:
        """Save the state after `round` atomically, and delete old states.

        Keeps the last few states, and the newest state up to `best_round`. States from later rounds
        are deleted, because the server has resumed from an earlier round.
        """
        save(self.path(round), tensors, metadata, self.root)
        rounds = self.rounds()
        past = [number for number in rounds if number <= round]
        kept = {*past[-KEPT_STATES:], *[number for number in past if number <= best_round][-1:]}
        deleted = sorted(set(rounds) - kept)
        Folder(self.folder, self.root).remove(self.path(number).name for number in deleted)

    def load(self, round: int) -> Loaded:
        """Load the tensors and metadata of the state saved after `round`."""
        return load(self.path(round))

    def metadata(self, round: int) -> dict[str, int | float | str]:
        """Return the metadata of the state saved after `round`, without loading its tensors."""
        return load_metadata(self.path(round))

    def write_confusion(self, counts: Array) -> None:
        """Write the confusion matrix of the last evaluation.

        The file is not synced, because it is written in every round, and a damaged file is ignored.
        """
        file, flags = io.BytesIO(), os.O_WRONLY | os.O_TRUNC
        np.save(file, counts.astype(np.int32))
        descriptor = Folder(self.folder, self.root).open(CONFUSION_FILE, flags, 0o600)
        with os.fdopen(descriptor, "wb") as target:
            target.write(file.getbuffer())

    def confusion(self) -> Array | None:
        """Return the confusion matrix of the last evaluation, or None without a valid file."""
        try:
            content = read_file(self.folder / CONFUSION_FILE, 8 * MAX_CONFUSION**2)
            counts = read_npy(io.BytesIO(content))
        except (OSError, StateError, ValueError, EOFError):
            return None
        is_square = counts.ndim == 2 and counts.shape[0] == counts.shape[1]
        return counts if is_square and counts.dtype == np.int32 and (counts >= 0).all() else None


@dataclass(frozen=True)
class Checkpoint:
    """Server state after `round`."""

    round: int
    tensors: Mapping[str, Array]
    metadata: Metadata


class Checkpoints:
    """Server checkpoints of a run."""

    def __init__(self, directory: Path, identity: Mapping[str, str]) -> None:
        """Set the directory, and the `identity` that every checkpoint must contain."""
        self._run, self._folder = directory, directory / CHECKPOINTS
        self._identity, self._writable = identity, Folder(self._folder, self._run)

    def write_checkpoint(
        self,
        round: int,
        tensors: Mapping[str, Array],
        metadata: Metadata,
        kept: Collection[int] = (),
    ) -> None:
        """Save the checkpoint of `round`, and delete old checkpoints.

        Keeps the last two checkpoints and the checkpoints of the rounds in `kept`. Raises
        StateError if the checkpoint cannot be written.
        """
        writable = {
            name: torch.from_numpy(np.require(value, requirements="W"))
            for name, value in tensors.items()
        }
        all_metadata = {**metadata, **self._identity, "round": round}
        save(path_in(self._folder, round), writable, all_metadata, self._run)
        old = {*self.rounds()[:-KEPT_CHECKPOINTS]} - {*kept}
        with contextlib.suppress(OSError):
            self._writable.remove(path_in(self._folder, number).name for number in old)

    def rounds(self) -> list[int]:
        """Return the rounds with a checkpoint, in ascending order."""
        return rounds_in(self._folder)

    def read_checkpoint(self, round: int) -> Checkpoint:
        """Read the checkpoint of `round`.

        Raises StateError if the checkpoint is invalid or from another run.
        """
        path = path_in(self._folder, round)
        tensors, metadata = load(path)
        refuse_other(path, metadata, {**self._identity, "round": round})
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise StateError(f"{path}: {name} contains NaN or infinity")
        return Checkpoint(
            round, {name: tensor.numpy() for name, tensor in tensors.items()}, metadata
        )

    def newest(self, notice: Callable[[str], None], recorded: int) -> Checkpoint | None:
        """Return the last valid checkpoint up to round `recorded`, or None if no checkpoint exists.

        The checkpoint of the next round is also valid if it contains the record of this round.
        Checkpoints that cannot be read, contain NaN or infinity, or belong to another run are
        skipped with a notice. Raises StateError if checkpoints are missing, or if no checkpoint is
        valid.
        """
        all_rounds = rounds_in(self._folder)
        rounds = [number for number in all_rounds if number <= recorded]
        records = f"{self._run / 'metrics.jsonl'} contains {recorded} complete rounds"
        with contextlib.suppress(StateError):
            if recorded + 1 in all_rounds:
                following = self.read_checkpoint(recorded + 1)
                if OPEN in following.metadata:
                    return following
        if not rounds and any(number > 1 for number in all_rounds):
            raise StateError(
                f"cannot resume the run: {records}, but the last checkpoint is from round "
                f"{all_rounds[-1]}"
            )
        if not all_rounds and recorded > 1:
            raise StateError(
                f"cannot resume the run: {records}, but its models and checkpoints were not kept"
            )
        for number in reversed(rounds):
            try:
                return self.read_checkpoint(number)
            except StateError as error:
                notice(f"{error}; trying the previous checkpoint")
        if rounds:
            raise StateError(f"{self._folder}: none of the {len(rounds)} checkpoints is valid")
        return None

    def hide_after(self, round: int) -> None:
        """Rename the unreadable checkpoints after `round`, so that they are ignored."""
        for number in rounds_in(self._folder):
            if number > round:
                path = path_in(self._folder, number)
                self._writable.rename(path.name, path.with_suffix(".unreadable").name)


@dataclass(frozen=True)
class ModelStore:
    """Directory of models, each in a safetensors file; no model is kept in memory."""

    folder: Path
    within: Path | None = None
    """Directory below which symlinks are rejected; None means `folder` itself."""

    def put(self, key: Key, weights: Mapping[str, Array]) -> None:
        """Write a model atomically. Raises StateError if it cannot be written."""
        tensors = {name: torch.tensor(np.asarray(value)) for name, value in weights.items()}
        save(self._path(key), tensors, {}, self.within)

    def get(self, key: Key) -> dict[str, Array]:
        """Load the tensors of a model. Raises StateError if the file is missing or damaged."""
        tensors, _ = load(self._path(key))
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    def __contains__(self, key: Key) -> bool:
        return self._path(key).exists()

    def contents(self) -> list[Key]:
        """Return the sorted keys of all models."""
        names = (_MODEL.fullmatch(path.name) for path in self.folder.glob("*-*.safetensors"))
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def trim(self, number: int, newest: int) -> None:
        """Delete all but the latest `newest` versions of a model."""
        versions = sorted(key for key in self.contents() if key[0] == number)
        self._remove(versions[:-newest])

    def keep(self, keys: Collection[Key]) -> None:
        """Delete all models except the models with the given keys."""
        self._remove(set(self.contents()) - set(keys))

    def _remove(self, keys: Collection[Key]) -> None:
        if keys:
            Folder(self.folder, self.within).remove(self._path(key).name for key in keys)

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]}-{key[1]}.safetensors"


def refuse_other(
    path: Path, metadata: Metadata, identity: Mapping[str, str | int], whose: str = "this run's"
) -> None:
    """Check the metadata of `path`. Raises StateError if it does not contain `identity`."""
    for name, value in identity.items():
        if metadata.get(name) != value:
            raise StateError(
                f"{path}: {name} is {metadata.get(name)!r}, expected {whose} {value!r}"
            )


def path_in(directory: Path, round: int) -> Path:
    """Return the path of the state saved after `round`."""
    return directory / f"round-{round:06d}.safetensors"


def rounds_in(directory: Path) -> list[int]:
    """Return the rounds with a state in a directory, in ascending order. Ignores other files."""
    names = {path.name for path in directory.glob("round-*.safetensors")}
    numbers = [int(match[1]) for name in names if (match := _ROUND.fullmatch(name))]
    return sorted(number for number in numbers if path_in(directory, number).name in names)


def save(
    path: Path, tensors: Mapping[str, Tensor], metadata: Metadata, within: Path | None = None
) -> None:
    """Write tensors and metadata to `path` atomically.

    Raises StateError if the file cannot be written, or if there is a symlink below `within`.
    """
    directory = Folder(path.parent, within)
    with directory.replacing(path.name, private=True) as temporary:
        directory.remove_stale_temporaries(path.suffix)
        save_file(unshared(tensors), temporary, metadata={_KEY: json.dumps(dict(metadata))})


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors to contiguous CPU tensors that share no memory, with copies if necessary."""
    result: dict[str, Tensor] = {}
    pointers: set[int] = set()
    for name, tensor in all_to_device(tensors, HOST).items():
        separate = tensor.contiguous()
        if separate.untyped_storage().data_ptr() in pointers:
            separate = separate.clone()
        pointers.add(separate.untyped_storage().data_ptr())
        result[name] = separate
    return result


def load(path: Path) -> Loaded:
    """Load the tensors (onto the CPU) and the metadata of `path`.

    Raises StateError if the file is invalid.
    """
    with _opened(path) as (file, metadata):
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def load_metadata(path: Path) -> dict[str, int | float | str]:
    """Load the metadata of `path` without reading its tensors.

    Raises StateError if the file is invalid.
    """
    with _opened(path) as (_, metadata):
        return metadata


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, int | float | str]]]:
    """Open a state file, and read its metadata."""
    try:
        check_mappable(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            try:
                metadata = parse_json((file.metadata() or {})[_KEY])
            except (KeyError, ValueError, RecursionError):
                metadata = None
            if not isinstance(metadata, dict) or not all(
                isinstance(value, int | float | str) for value in metadata.values()
            ):
                raise StateError(f"{path} is not a state saved by fedhet")
            yield file, metadata
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot read {path}: {error_reason(error)}") from error
