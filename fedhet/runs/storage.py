"""State on disk: tensors and a few metadata in one safetensors file, written atomically.

For clients (private states), servers (one checkpoint per round), and models (a store).

A file is written under a temporary name, synced and renamed (`fedhet.base.disk`), so that readers
find either the old state or the new one, never a partial one.
"""

from __future__ import annotations

import contextlib
import json
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
from fedhet.base.arrays import Array
from fedhet.base.disk import Folder, check_mappable, parse_json
from fedhet.base.errors import StateError, reason_of
from fedhet.base.transfer import HOST, all_to_device
from fedhet.wire.identity import is_name

Metadata = Mapping[str, int | float | str]
Loaded = tuple[dict[str, Tensor], dict[str, int | float | str]]
_KEY = "fedhet"
_ROUND = re.compile(r"round-([0-9]{1,18})\.safetensors")
_MODEL = re.compile(r"([0-9]{1,18})-([0-9]{1,18})\.safetensors")
KEPT_STATES = 3
"""States kept per client, so that a server that resumes from an earlier round finds its state."""
KEPT_CHECKPOINTS = 2
"""Checkpoints kept per server."""


@dataclass(frozen=True)
class ClientStore:
    """One client's private states in one run: ROOT/<run>/<client>/round-<n>.safetensors.

    A state is saved when the client finishes its part of a round; the last few are kept.
    """

    root: Path
    run: str
    client: str

    def __post_init__(self) -> None:
        for part in (self.run, self.client):
            if not is_name(part):
                raise StateError(f"{part!r} cannot name a folder of private state")

    @property
    def folder(self) -> Path:
        """The folder of the states."""
        return self.root / self.run / self.client

    def path(self, round: int) -> Path:
        """Return the path of the state at the end of `round`."""
        return path_in(self.folder, round)

    def rounds(self) -> list[int]:
        """Return the rounds of which a state is saved, ascending."""
        return rounds_in(self.folder)

    def save(
        self, round: int, tensors: Mapping[str, Tensor], metadata: Metadata, kept_too: int = 0
    ) -> None:
        """Save the state of `round` atomically.

        Then remove the states of later rounds, which a server that resumed from an earlier round
        discards, and all others but the last few and the one in use after round `kept_too`.
        """
        save(self.path(round), tensors, metadata, self.root)
        rounds = self.rounds()
        past = [known for known in rounds if known <= round]
        wanted = {*past[-KEPT_STATES:], *[known for known in past if known <= kept_too][-1:]}
        unwanted = sorted(set(rounds) - wanted)
        Folder(self.folder, self.root).remove(self.path(number).name for number in unwanted)

    def load(self, round: int) -> Loaded:
        """Return the tensors and metadata of the state of `round`."""
        return load(self.path(round))

    def metadata(self, round: int) -> dict[str, int | float | str]:
        """Return only the metadata of the state of `round`."""
        return load_metadata(self.path(round))


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `round`."""

    round: int
    tensors: Mapping[str, Array]
    metadata: Metadata


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, identity: Mapping[str, str]) -> None:
        """`identity`: the run and the method, which each checkpoint states; others are refused."""
        self._run, self._folder = directory, directory / "checkpoints"
        self._identity, self._writable = identity, Folder(self._folder, self._run)

    def write(
        self, round: int, tensors: Mapping[str, Array], metadata: Metadata, kept_too: int = 0
    ) -> None:
        """Save the checkpoint of `round`, then remove all but the last two and that of `kept_too`.

        Raises StateError.
        """
        kept = {
            name: torch.from_numpy(np.require(value, requirements="W"))
            for name, value in tensors.items()
        }
        whole = {**metadata, **self._identity, "round": round}
        save(path_in(self._folder, round), kept, whole, self._run)
        old = {*rounds_in(self._folder)[:-KEPT_CHECKPOINTS]} - {kept_too}
        with contextlib.suppress(OSError):
            self._writable.remove(path_in(self._folder, number).name for number in old)

    def read(self, round: int) -> Checkpoint:
        """Return the checkpoint of `round`. Raises StateError unless it is whole and this run's."""
        path = path_in(self._folder, round)
        tensors, metadata = load(path)
        refuse_other(path, metadata, {**self._identity, "round": round})
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise StateError(f"{path}: {name} holds NaN or infinity")
        return Checkpoint(
            round, {name: tensor.numpy() for name, tensor in tensors.items()}, metadata
        )

    def newest(self, notice: Callable[[str], None], recorded: int) -> Checkpoint | None:
        """Return the last whole checkpoint of this run, or None if there are none.

        Those after round `recorded`, the last one with a record, do not count. One that cannot be
        read, is of another run, method or round, or holds NaN is skipped with a notice. Raises
        StateError if there are checkpoints, but none is whole.
        """
        every = rounds_in(self._folder)
        rounds = [number for number in every if number <= recorded]
        held = f"{self._run / 'metrics.jsonl'} holds {recorded} whole rounds"
        if not rounds and any(number > 1 for number in every):
            raise StateError(
                f"{held}, the last checkpoint is of round {every[-1]}: the run cannot be resumed"
            )
        if not every and recorded > 1:
            raise StateError(
                f"{held}, and there is no checkpoint: the models of the run were not kept, so it "
                "cannot be resumed"
            )
        for number in reversed(rounds):
            try:
                return self.read(number)
            except StateError as error:
                notice(f"{error}; the checkpoint before it is tried")
        if rounds:
            raise StateError(f"{self._folder}: none of {len(rounds)} checkpoints can be read")
        return None

    def forget_after(self, round: int) -> None:
        """Rename the unreadable checkpoints after `round`, so that they are ignored."""
        for number in rounds_in(self._folder):
            if number > round:
                path = path_in(self._folder, number)
                self._writable.rename(path.name, path.with_suffix(".unreadable").name)


@dataclass(frozen=True)
class ModelStore:
    """A folder of models, one safetensors file each; none is kept in memory."""

    folder: Path
    within: Path | None = None
    """The folder above it below which no link is followed."""

    def put(self, key: Key, weights: Mapping[str, Array]) -> None:
        """Write a model atomically. Raises StateError."""
        tensors = {name: torch.tensor(np.asarray(value)) for name, value in weights.items()}
        save(self._path(key), tensors, {}, self.within)

    def get(self, key: Key) -> dict[str, Array]:
        """Return a model's tensors. Raises StateError if it is missing."""
        tensors, _ = load(self._path(key))
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    def __contains__(self, key: Key) -> bool:
        return self._path(key).exists()

    def contents(self) -> list[Key]:
        """Return the keys of all models, sorted."""
        names = (_MODEL.fullmatch(path.name) for path in self.folder.glob("*-*.safetensors"))
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def trim(self, number: int, newest: int) -> None:
        """Remove all but the newest versions of a model."""
        versions = sorted(key for key in self.contents() if key[0] == number)
        self._remove(versions[:-newest])

    def keep(self, wanted: Collection[Key]) -> None:
        """Remove all but `wanted`."""
        self._remove(set(self.contents()) - set(wanted))

    def _remove(self, keys: Collection[Key]) -> None:
        if keys:
            Folder(self.folder, self.within).remove(self._path(key).name for key in keys)

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]}-{key[1]}.safetensors"


def refuse_other(
    path: Path, metadata: Metadata, identity: Mapping[str, str | int], whose: str = "this run's"
) -> None:
    """Raise StateError unless the metadata of `path` hold every entry of `identity`."""
    for name, value in identity.items():
        if metadata.get(name) != value:
            raise StateError(f"{path} is of {name} {metadata.get(name)!r}, {whose} is {value!r}")


def path_in(folder: Path, round: int) -> Path:
    """Return the path of the state of `round` in a folder of states."""
    return folder / f"round-{round:06d}.safetensors"


def rounds_in(folder: Path) -> list[int]:
    """Return the rounds of which a folder holds a state, ascending; other files are ignored."""
    names = {path.name for path in folder.glob("round-*.safetensors")}
    numbers = [int(found[1]) for name in names if (found := _ROUND.fullmatch(name))]
    return sorted(number for number in numbers if path_in(folder, number).name in names)


def save(
    path: Path, tensors: Mapping[str, Tensor], metadata: Metadata, within: Path | None = None
) -> None:
    """Write `tensors` and `metadata` to `path` atomically; follow no link below `within`.

    Raises StateError.
    """
    folder = Folder(path.parent, within)
    with folder.replacing(path.name, private=True) as temporary:
        folder.remove_stale_temporaries(path.suffix)
        save_file(apart(tensors), temporary, metadata={_KEY: json.dumps(dict(metadata))})


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU that share no memory."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in all_to_device(tensors, HOST).items():
        own = tensor.contiguous()
        if own.untyped_storage().data_ptr() in taken:
            own = own.clone()
        taken.add(own.untyped_storage().data_ptr())
        apart[name] = own
    return apart


def load(path: Path) -> Loaded:
    """Return the tensors, on the CPU, and metadata of `path`. Raises StateError."""
    with _opened(path) as (file, metadata):
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def load_metadata(path: Path) -> dict[str, int | float | str]:
    """Return the metadata of `path` without reading its tensors. Raises StateError."""
    with _opened(path) as (_, metadata):
        return metadata


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, int | float | str]]]:
    """Yield an open state and its metadata."""
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
                raise StateError(f"{path} is not a state that fedhet saved")
            yield file, metadata
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot read {path}: {reason_of(error)}") from error
