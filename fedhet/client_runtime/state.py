"""A client's state across rounds: its models, and what a method keeps besides them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fedhet.base.arrays import group, grouped
from fedhet.base.errors import StateError
from fedhet.base.transfer import HOST, all_to_device
from fedhet.learning.devices import Compute, move
from fedhet.models import Refitted
from fedhet.runs.storage import ClientStore, Metadata, refuse_other

BESIDE_MODELS = "kept"
"""The group of the state's tensors that belong to no model; no model has this name."""
UNSAVED = -1
LOG = logging.getLogger("fedhet")


class ClientState:
    """A client's private state: in memory while the client is open, on disk after each round.

    The state in memory is reused only if it is the one on disk, since another process may have
    trained the client meanwhile. A state's version is the number of saves in the run, from 1.
    """

    def __init__(
        self,
        root: Path,
        client: str,
        identity: Mapping[str, str],
        compute: Compute,
        *,
        setup: Callable[[], dict[str, nn.Module]],
        training_set: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        """Start empty; call `restore` first.

        A saved state must match `identity`; `setup` makes new models, and `training_set` returns
        the x and y on which a model without gradients was last fitted.
        """
        self.models: dict[str, nn.Module] = {}
        """The client's models by kind, on the device."""
        self.tensors: dict[str, Tensor] = {}
        """Tensors that a method keeps besides its models, on the device."""
        self.metadata: dict[str, int | float | str] = {}
        """Scalars and texts that a method keeps."""
        self.round = 0
        """The round of the state that was restored; 0: none, the models are new."""
        self._root, self._client, self._identity = root, client, identity
        self._compute, self._setup, self._training_set = compute, setup, training_set
        self._store: ClientStore | None = None
        self._version = UNSAVED
        """The version of the state in memory; 0 means new models."""
        self._newest = 0
        """The newest version on disk when the state was restored; 0: none."""

    @property
    def participations(self) -> int:
        """Return the number of rounds in which the client has trained."""
        return int(self.metadata.get("participations", 0))

    @property
    def folder(self) -> Path:
        """Return the folder of the client's private files of this run."""
        return self._opened.folder

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the state."""
        for model in self.models.values():
            yield from model.state_dict().values()
        yield from self.tensors.values()

    def restore(self, run: str, before: int) -> None:
        """Restore the state of the last round before round `before`, or start a new one.

        A server that resumes may ask again for a round that this client has completed. A state that
        is damaged, not finite, or of another run, client, method, model or task is skipped with
        a warning. Raises StateError if no state can be read, though there are some.
        """
        store = ClientStore(self._root, run, self._client)
        self._newest = _newest_version(store)
        past = [known for known in store.rounds() if known < before]
        version = _version_of(store, past[-1]) if past else 0
        readable = version > 0 or not past
        if readable and (store, version) == (self._store, self._version):
            if self._compute.device.type != "cpu":  # where it is already
                self._place()
            return
        self._store, self._version = store, UNSAVED
        version = self._load_last(past)
        self._place()
        for model in self.models.values():
            if isinstance(model, Refitted) and self.participations:
                model.fit_later(*self._training_set())
        self._version = version

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Leave an accelerator's memory to other clients after the block, until `restore`."""
        try:
            yield
        finally:
            if self._compute.device.type != "cpu":
                for model in self.models.values():
                    move(model, HOST)
                self.tensors = all_to_device(self.tensors, HOST)
            if self._compute.device.type == "cuda":
                torch.cuda.empty_cache()

    def _place(self) -> None:
        """Put the state on the device."""
        for model in self.models.values():
            self._compute.place(model)
        self.tensors = all_to_device(self.tensors, self._compute.device)

    def begin_round(self) -> None:
        """Mark the state as changing; unless it is saved, `restore` reads it from disk again."""
        self._version = UNSAVED

    def save(self, round: int, kept_too: int = 0) -> None:
        """Save the state after `round`, and keep that after `kept_too`.

        Raises StateError if another process has saved a newer state since `restore`.
        """
        store = self._opened
        if _newest_version(store) != self._newest:
            raise StateError(
                f"{store.folder} was written by another worker meanwhile: round {round} "
                "came too late, and the newer state is kept"
            )
        version = self._newest + 1
        metadata = {**self.metadata, **self._identity_in(store, round), "version": version}
        tensors: dict[str, Tensor] = {}
        for kind, model in self.models.items():
            tensors |= grouped(kind, model.state_dict())
        tensors |= grouped(BESIDE_MODELS, self.tensors)
        store.save(round, tensors, metadata, kept_too)
        self._version = self._newest = version

    def _load_last(self, rounds: Sequence[int]) -> int:
        """Load the last whole state of `rounds`; return its version, or 0 for new models."""
        faults: dict[int, StateError] = {}
        for round in reversed(rounds):
            self._begin_anew(round)
            try:
                version = self._load(self._opened, round)
            except StateError as error:
                faults[round] = error
                continue
            for fault in faults.values():
                LOG.warning("%s: %s; the state of round %d is used", self._client, fault, round)
            return version
        if faults:
            raise faults[rounds[-1]]
        self._begin_anew(0)
        return 0

    def _begin_anew(self, round: int) -> None:
        self.models, self.tensors, self.metadata, self.round = self._setup(), {}, {}, round

    def _load(self, store: ClientStore, round: int) -> int:
        tensors, metadata = store.load(round)
        path, identity = store.path(round), self._identity_in(store, round)
        refuse_other(path, metadata, identity, "this client's")
        for kind, model in self.models.items():
            weights = group(tensors, kind)
            for name, own in model.state_dict().items():  # PyTorch would convert types silently
                if name in weights and (dtype := weights[name].dtype) != own.dtype:
                    fault = f"{name} of the model {kind} is {dtype}, not {own.dtype}"
                    raise StateError(f"{path}: {fault}")
            try:
                model.load_state_dict(weights)
            except RuntimeError as error:
                raise StateError(f"{path} does not fit the model {kind}: {error}") from None
            if not all(bool(value.isfinite().all()) for value in weights.values()):
                raise StateError(f"{path}: the model {kind} holds NaN or infinity")
        self.tensors = group(tensors, BESIDE_MODELS)
        self.metadata = {k: v for k, v in metadata.items() if k not in {*identity, "version"}}
        version = _version_in(metadata)
        if not version or not isinstance(metadata.get("participations", 0), int):
            raise StateError(f"{path} holds a version or a number of rounds that is not a number")
        return version

    def _identity_in(self, store: ClientStore, round: int) -> dict[str, str | int]:
        """Return the metadata by which a state names its client, run and round."""
        return {**self._identity, "run": store.run, "client": store.client, "round": round}

    @property
    def _opened(self) -> ClientStore:
        assert self._store is not None, "restore comes first"
        return self._store


def _newest_version(store: ClientStore) -> int:
    """Return the version of the last round's state that can be read; 0: there is none."""
    return next((v for round in reversed(store.rounds()) if (v := _version_of(store, round))), 0)


def _version_of(store: ClientStore, round: int) -> int:
    """Return the version of a round's state, from 1; 0: it cannot be read."""
    try:
        return _version_in(store.metadata(round))
    except StateError:
        return 0


def _version_in(metadata: Metadata) -> int:
    version = metadata.get("version")
    return version if isinstance(version, int) and version > 0 else 0
