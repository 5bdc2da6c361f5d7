"""A client as a run left it: its models, and what they predict."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.base.errors import DataError, ModelError, StateError, nearest, words_of
from fedhet.client_runtime.node import read_node
from fedhet.client_runtime.record import FILE, ClientRecord, read_record
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import DATASETS, check_trusted, read_toml
from fedhet.inference.folders import best_round_of, find_store
from fedhet.learning.training import evaluate, logits_of
from fedhet.models import Refitted
from fedhet.models.registry import Allocation
from fedhet.runs.records import MOST_ROUNDS
from fedhet.runs.storage import ClientStore
from fedhet.wire.identity import client_name

TIMES_ITS_STATE = 8
"""How many times the bytes of a client's state its models may take while they are built."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model predicts for N samples."""

    labels: NDArray[np.int64]
    """The number [N] of each sample's most probable class."""
    probabilities: NDArray[np.float32]
    """The probability [N, C] of each class; 0 for a class outside the client's label space."""
    classes: tuple[str, ...]
    """The names of the classes."""

    def __len__(self) -> int:
        """Return N."""
        return len(self.labels)

    @property
    def names(self) -> list[str]:
        """Return the name of each sample's most probable class."""
        return [self.classes[label] for label in self.labels]

    def to_frame(self, index: Sequence[str] | None = None) -> pd.DataFrame:
        """Return a row a sample: its class, that class's probability, and those of all classes."""
        top = self.probabilities[np.arange(len(self)), self.labels]
        first = pd.DataFrame({"class": self.names, "probability": top}, index=index)
        every = pd.DataFrame(self.probabilities, columns=list(self.classes), index=first.index)
        return pd.concat([first, every], axis=1)

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(max_rows=20, float_format="{:.4f}".format))


@dataclass(frozen=True, eq=False)
class TrainedClient:
    """A client of a run, its models restored."""

    record: ClientRecord
    config: Config
    round: int
    """The round whose state was restored."""
    participations: int
    """The number of rounds in which the client has trained."""
    _half: Any
    """The client half of the run's method."""
    _trust: str = ""
    """The modules that its settings may import."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of model that the client keeps: `private`, with some methods also others."""
        return tuple(self._half.models)

    def model(self, kind: str = "private") -> nn.Module:
        """Return a model in evaluation mode: x [N, *shape], scaled, to logits [N, C].

        The logits of classes outside the client's label space are minus infinity. Raises StateError
        for a kind that the client does not keep.
        """
        if kind not in self.kinds:
            raise StateError(
                f"{self.record.client} keeps no model of kind '{kind}', but "
                f"{', '.join(self.kinds) or 'none'}{nearest(kind, self.kinds)}; models that all "
                "clients share are the server's"
            )
        model: nn.Module = self._half.models[kind]
        if not isinstance(model, Refitted):
            model = self._half.samples.within_space(model)
        return model.eval()

    def network(self, kind: str = "private") -> nn.Module:
        """Return a network as it was trained, without the restriction to the label space."""
        self.model(kind)
        network: nn.Module = self._half.models[kind]
        return network

    def predict(self, x: Tensor, kind: str = "private") -> Predictions:
        """Predict samples x [N, *shape], scaled as in training (`samples_for` scales them)."""
        model, compute = self.model(kind), self._half.compute
        with torch.no_grad():
            if isinstance(model, Refitted):
                found = model.probabilities(x)
                labels = model.predict(x)
            else:
                found = logits_of(model, x, compute).softmax(1)
                labels = found.argmax(1)
        names = tuple(self.record.classes)
        return Predictions(labels.cpu().numpy(), found.cpu().numpy(), names)

    def accuracy(self, kind: str = "private") -> dict[str, float]:
        """Return the model's accuracy on the client's own test split and the common test set.

        It is measured on the data that the run names. Raises DataError if that is not there, and
        SettingsError if it is a function of a module that is not trusted.
        """
        check_trusted(self.record.settings, self._trust, Path(self.record.client))
        kept = self._half.node
        node = self.record.node(self.config, kept.state_dir, data=kept.data)
        tested = self._half.config.method.client(self.config, node)
        if tuple(tested.info.shape) != tuple(self.record.shape):
            raise DataError(f"{self.record.client}: its data differs from what it was trained on")
        model = self.model(kind)
        return {
            protocol: evaluate(model, split.x, split.y, self._half.compute).accuracy
            for protocol, split in tested.tests.items()
        }


def open_client(
    directory: Path | str, client: str, *, best: bool = False, trust: str = ""
) -> TrainedClient:
    """Restore a client's models from a run's directory, or from a site's state folder.

    `best`: as they were after the best round, which takes a run's directory. `trust`: the modules
    that the settings may import (`check_trusted`). A network takes no data. A model without
    gradients is never stored: it is fitted again on what it was fitted on, which must still be
    there. Raises StateError, DataError, or SettingsError for what is not trusted.
    """
    root = Path(directory)
    store = find_store(root, client)
    record = read_record(store.folder) or _record_of(root, store, trust)
    if (record.run, record.client) != (store.run, store.client):
        raise StateError(f"{store.folder} holds the record of {record.client} of {record.run}")
    check_trusted(_without_data(record.settings), trust, store.folder / FILE)
    config = record.config()
    node = record.node(config, store.root)
    round = best_round_of(root, trust) if best else MOST_ROUNDS
    with _within_its_state(store):
        half = config.method.client(config, node, samples=record.without_data(config))
        half.state.restore(store.run, before=round + 1)
    if any(isinstance(model, Refitted) for model in half.models.values()):
        check_trusted(record.settings, trust, store.folder / FILE)
        half = config.method.client(config, node)
        half.state.restore(store.run, before=round + 1)
    if best and not half.state.round:
        raise StateError(
            f"{store.folder} no longer has the models of round {round}, the best one: a run keeps "
            "them with --set keep-best=true"
        )
    return TrainedClient(record, config, half.state.round, half.state.participations, half, trust)


def _without_data(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings without the datasets, which a network does not need."""
    return {name: value for name, value in settings.items() if name not in DATASETS}


@contextlib.contextmanager
def _within_its_state(store: ClientStore) -> Iterator[None]:
    """Raise StateError if models built inside the block take far more than the client's states.

    A record may name any shape; its models cannot be larger than what was saved of them.
    """
    largest = max(store.path(round).stat().st_size for round in store.rounds())
    try:
        with Allocation(TIMES_ITS_STATE * largest + 2**26):
            yield
    except (ModelError, RuntimeError) as error:
        fault = words_of(error)
        raise StateError(
            f"{store.folder / FILE} does not fit the client's states: {fault}"
        ) from None


def _record_of(directory: Path, store: ClientStore, trust: str) -> ClientRecord:
    """Return the record of a client of a run that left none, from the run's settings and data.

    Raises StateError outside a run's directory.
    """
    if not (directory / "config.toml").exists():
        raise StateError(
            f"{store.folder} has no record of the client, as runs of older versions: name the "
            "run's directory instead"
        )
    settings = read_toml(directory / "config.toml")
    check_trusted(settings, trust, directory / "config.toml")
    config = resolve(settings)
    clients = config.run.clients
    names = [client_name(index, clients) for index in range(clients)]
    if store.client not in names:
        raise StateError(f"{directory / 'config.toml'} names no client '{store.client}'")
    place = {"partition-id": names.index(store.client), "num-partitions": clients}
    node = read_node({**place, "device": "cpu"}, config.run, str(store.root))
    half = config.method.client(config, node)
    record: ClientRecord = half.recorder.record(store.run)
    return record
