"""A client's state across rounds: its models, and what a method keeps besides them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedhet.arrays import group, grouped
from fedhet.devices import Compute
from fedhet.errors import StateError
from fedhet.models import Refitted
from fedhet.storage import ClientStore

BESIDE_MODELS = "kept"
"""The group of the state's tensors that belong to no model; no model has this name."""
UNSAVED = -1


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
        self.facts: dict[str, int | float | str] = {}
        """Scalars and texts that a method keeps."""
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
        return int(self.facts.get("participations", 0))

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

        A server that resumes may ask again for a round that this client has completed. Raises
        StateError if a state cannot be read, or belongs to another method, model or task.
        """
        store = ClientStore(self._root, run, self._client)
        last = max((known for known in store.rounds() if known < before), default=None)
        version = 0 if last is None else _version_of(store, last)
        self._newest = _newest_version(store)
        if (store, version) == (self._store, self._version):
            return
        self._version = UNSAVED
        self.models, self.tensors, self.facts = self._setup(), {}, {}
        if last is not None:
            self._load(store, last)
        for model in self.models.values():
            self._compute.place(model)
            if isinstance(model, Refitted) and self.participations:
                model.fit_later(*self._training_set())
        self._store, self._version = store, version

    def begin_round(self) -> None:
        """Mark the state as changing: unless it is saved, it is read from disk the next time."""
        self._version = UNSAVED

    def save(self, round: int) -> None:
        """Save the state as of the end of `round`.

        Raises StateError if another process has saved a newer state since `restore`.
        """
        store = self._opened
        if _newest_version(store) != self._newest:
            raise StateError(
                f"{store.folder} was written by another worker meanwhile: round {round} "
                "came too late, and the newer state stands"
            )
        version = self._newest + 1
        tensors: dict[str, Tensor] = {}
        for kind, model in self.models.items():
            tensors |= grouped(kind, model.state_dict())
        tensors |= grouped(BESIDE_MODELS, self.tensors)
        store.save(round, tensors, {**self.facts, **self._identity, "version": version})
        self._version = self._newest = version

    def _load(self, store: ClientStore, round: int) -> None:
        tensors, facts = store.load(round, torch.device("cpu"))
        path = store.path(round)
        for name, value in self._identity.items():
            if facts.get(name) != value:
                raise StateError(
                    f"{path} is of {name} {facts.get(name)!r}, this client's is {value!r}"
                )
        for kind, model in self.models.items():
            try:
                model.load_state_dict(group(tensors, kind))
            except RuntimeError as error:
                raise StateError(f"{path} does not fit the model {kind}: {error}") from None
        beside = group(tensors, BESIDE_MODELS)
        self.tensors = {name: value.to(self._compute.device) for name, value in beside.items()}
        self.facts = {k: v for k, v in facts.items() if k not in {*self._identity, "version"}}

    @property
    def _opened(self) -> ClientStore:
        assert self._store is not None, "restore comes first"
        return self._store


def _newest_version(store: ClientStore) -> int:
    """Return the version of the last round's state; 0: there is none."""
    rounds = store.rounds()
    return _version_of(store, rounds[-1]) if rounds else 0


def _version_of(store: ClientStore, round: int) -> int:
    return int(store.facts(round).get("version", 0))
