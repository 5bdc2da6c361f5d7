"""A client as a run left it: where its states are, its models, and what they predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from fedhet.client_runtime.samples import FILE, ClientRecord, read_record
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import DATASETS, check_trusted, read_toml
from fedhet.learning.training import evaluate, logits_of
from fedhet.models import Allocation, Refitted
from fedhet.runs.directory import read_records, read_run_name
from fedhet.runs.measures import best_round
from fedhet.runs.records import MOST_ROUNDS
from fedhet.runs.storage import ClientStore
from fedhet.runs.units import natural
from fedhet.wire.identity import client_name

TIMES_ITS_STATE = 8
"""How many times the bytes of a client's state its models may take while they are built."""
STATE = "state"
"""The folder of the private states in the directory of a simulated run."""


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
    settings = {k: v for k, v in record.settings.items() if k not in DATASETS}
    check_trusted(settings, trust, store.folder / FILE)
    config = record.config()
    node = record.node(config, store.root)
    round = best_round_of(root, trust) if best else MOST_ROUNDS
    largest = max(store.path(each).stat().st_size for each in store.rounds())
    try:
        # A record may name any shape; its models cannot be larger than what was saved of them.
        with Allocation(TIMES_ITS_STATE * largest + 2**26):
            half = config.method.client(config, node, samples=record.without_data(config))
            half.state.restore(store.run, before=round + 1)
    except (ModelError, RuntimeError) as error:
        fault = words_of(error)
        raise StateError(
            f"{store.folder / FILE} does not fit the client's states: {fault}"
        ) from None
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
    record: ClientRecord = half.record(store.run)
    return record


# --- where a client's states are: in a run's directory, or in a site's own state folder


def find_store(directory: Path, client: str) -> ClientStore:
    """Return the states of `client`.

    `directory` is a run's, or a folder of states: one that holds runs, that of one run, or that of
    one client. Raises StateError, with the clients that are there, if there is not exactly one.
    """
    stores = list(_stores(directory))
    found = [store for store in stores if store.client == client]
    if len(found) == 1:
        return found[0]
    if found:
        runs = ", ".join(sorted(store.run for store in found))
        raise StateError(
            f"{directory} holds {client} of several runs: {runs}; name one of them, as in "
            f"{directory / found[0].run}"
        )
    names = sorted({store.client for store in stores}, key=natural)
    if not names:
        if not directory.is_dir():
            raise StateError(f"{directory}: no such folder")
        if (directory / "run.json").exists():
            raise StateError(
                f"{directory} holds no states of clients: those of a deployed run are at its "
                "sites, in their own state folders"
            )
        raise StateError(f"{directory} holds no clients' states and is not a run's directory")
    raise StateError(
        f"{directory} holds no client '{client}', but {', '.join(names)}{nearest(client, names)}"
    )


def clients_in(directory: Path) -> list[str]:
    """Return the names of the clients whose states are in a run's directory, or state folder."""
    return sorted({store.client for store in _stores(directory)}, key=natural)


def best_round_of(directory: Path, trust: str = "") -> int:
    """Return the round with the best headline accuracy of a run.

    Raises StateError, and SettingsError if the method is in a module that `trust` does not name.
    """
    if not (directory / "metrics.jsonl").exists():
        raise StateError(f"{directory} is not a run's directory, which names the best round")
    settings = read_toml(directory / "config.toml")
    check_trusted(settings, trust, directory / "config.toml")
    config = resolve(settings)
    records, _ = read_records(directory / "metrics.jsonl")
    found = best_round(records, config.method.spec.headline)
    if not found:
        raise StateError(f"{directory}: no round was evaluated, so there is no best one")
    return found


def _stores(directory: Path) -> Iterator[ClientStore]:
    """Yield the clients that have a state, in a folder of any of the four kinds."""
    if (directory / "run.json").exists():
        run = read_run_name(directory)
        yield from _of_run(directory / STATE / run)
        return
    here = directory.resolve()
    if any(directory.glob("round-*.safetensors")):
        yield from _trained([here])
        return
    yield from _of_run(here)
    for run_folder in _folders(here):
        yield from _of_run(run_folder)


def _of_run(folder: Path) -> Iterator[ClientStore]:
    yield from _trained(_folders(folder))


def _trained(folders: list[Path]) -> Iterator[ClientStore]:
    for folder in folders:
        try:
            store = ClientStore(folder.parents[1], folder.parent.name, folder.name)
        except (StateError, IndexError):  # a folder whose name no run or client can have
            continue
        if store.rounds():
            yield store


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_dir())
