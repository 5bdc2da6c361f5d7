"""A node's settings, and the clients that its process has open.

The settings come from Flower's command line or from the node's place in a simulation. A worker
process keeps the data and models of clients that it has trained.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import torch
from flwr.client import Client
from pydantic import Field

from fedhet.base.disk import expanded
from fedhet.base.errors import SettingsError
from fedhet.config.resolve import Config
from fedhet.data.site import Declaration, site_data
from fedhet.data.spec import ClientData
from fedhet.data.store import RunData
from fedhet.models import assign
from fedhet.settings.defense import PrivacySettings
from fedhet.settings.run import RunSettings, TrainingSettings, training_of
from fedhet.settings.schema import Bytes, Count, CountOrNone, NonNegative, Schema, build
from fedhet.wire.identity import client_name

STATE_DIR_VARIABLE = "FEDHET_STATE_DIR"
ALLOW_MODELS_VARIABLE = "FEDHET_ALLOW_MODELS"
ALLOW_PATHS_VARIABLE = "FEDHET_ALLOW_PATHS"
OWN_TRAINING = ("optimizer", "lr", "local_epochs", "batch_size")
"""The training settings that a node may override."""
MAX_BYTES = 2 * 2**30
"""Limit on the tensors of cached clients in one process, besides the client in use."""
_assigned = lru_cache(maxsize=1)(assign)
"""The clients' models, cached because each of many clients asks for its own."""


@dataclass(frozen=True)
class Budget:
    """What the samples of a site may cost over all runs."""

    epsilon: float
    delta: float

    @classmethod
    def read(cls, text: str) -> Budget:
        """Return the budget that a text like `epsilon=8 delta=1e-5` names. Raises SettingsError."""
        try:
            pairs = (each.split("=") for each in text.split())
            given = {name: float(value) for name, value in pairs}
            budget = cls(given.pop("epsilon"), given.pop("delta", PrivacySettings().delta))
        except (ValueError, KeyError):
            given, budget = {"": 0.0}, cls(0, 0)
        if given or not 0 < budget.epsilon < math.inf or not 0 < budget.delta < 0.1:
            raise SettingsError(
                f"node-config 'privacy' = '{text}': expected 'epsilon=8 delta=1e-5', with epsilon "
                "above 0 and delta between 0 and 0.1"
            )
        return budget


class NodeSettings(Schema):
    """The settings in `--node-config`. The first two are Flower's own."""

    partition_id: int = Field(-1, ge=-1, description="which client of the partition this node is")
    num_partitions: CountOrNone = Field(0, description="number of nodes, which Flower sets")
    name: str = Field("", description="the client's name; empty = client-<partition-id>")
    data: str = Field("", description="the site's own data folder, instead of a partition")
    model: str = Field("", description="the site's model; empty = the pool's, as assigned")
    optimizer: Literal["", "adam", "adamw", "sgd"] = Field(
        "", description="the site's optimizer; empty = the run's"
    )
    lr: NonNegative = Field(0.0, description="the site's learning rate; 0 = the run's")
    local_epochs: CountOrNone = Field(0, description="the site's epochs a round; 0 = the run's")
    batch_size: CountOrNone = Field(0, description="samples in a minibatch; 0 = the run's")
    device: str = Field("", description="the site's device; empty = the run's")
    state_dir: str = Field("", description=f"private state; empty = ${STATE_DIR_VARIABLE}")
    allow_models: str = Field(
        "", description="modules, or module:function, that a run may import here; * = any"
    )
    allow_paths: str = Field("", description="folders that a run may read here, besides 'data'")
    allow_downloads: bool = Field(False, description="whether a run may download data here")
    min_samples_per_class: Count = Field(
        1, description="samples of a class below which its means are not sent, if the run has fewer"
    )
    max_seconds: Count = Field(21_600, description="seconds of one round or evaluation")
    max_epochs: Count = Field(1000, description="epochs of a round")
    max_model_bytes: Bytes = Field(2 * 2**30, description="bytes of the client's models")
    max_data_bytes: Bytes = Field(8 * 2**30, description="bytes of a dataset")

    privacy: str = Field(
        "",
        description="what the site's samples may cost over all runs, such as epsilon=8 delta=1e-5; "
        "a run without privacy is then refused; empty = what the run says",
    )

    def budget(self) -> Budget | None:
        """Return what `privacy` says; None: nothing. Raises SettingsError."""
        return Budget.read(self.privacy) if self.privacy else None

    def training(self, run: RunSettings) -> TrainingSettings:
        """Return the client's training settings: the run's, overridden by its own."""
        own = {name: getattr(self, name) for name in OWN_TRAINING}
        assigned = training_of(run, self.partition_id)
        return assigned.model_copy(update={name: value for name, value in own.items() if value})


@dataclass(frozen=True)
class Node:
    """A client's identity, model, training, device and state directory, and its run's data."""

    name: str
    partition: int
    folder: str
    model: str
    training: TrainingSettings
    device: str
    state_dir: Path
    data: RunData = field(compare=False, repr=False)
    max_model_bytes: int = 2**60
    budget: Budget | None = None
    """What its samples may cost over all runs; None: what each run says."""
    declared: Declaration | None = None
    """How a private site reads its own directory; None for all other clients."""
    is_site: bool = False
    """Whether its private state outlives the run, unlike that of a simulated client."""

    def load_data(self, config: Config) -> ClientData:
        """Return the client's data: from its own folder, or its partition of the run's dataset.

        Raises DataError if the folder cannot be read, or the client has too few samples.
        """
        if self.declared is not None:
            return self.declared.read_data(self.folder, self.name)
        if self.folder:
            return site_data(
                self.folder,
                spec=self.data.spec,
                classes=config.run.models.num_classes,
                name=self.name,
                unlabeled=config.uses_unlabeled,
            )
        return self.data.client(self.partition)


def read_node(
    config: Mapping[str, object], run: RunSettings, state_dir: str = "", data: RunData | None = None
) -> Node:
    """Return the node that `config` (Flower's node config) describes. Reads no samples.

    `data` is the store of the run's data in this process; None creates one. Raises SettingsError,
    and DataError if the node is a private site that does not declare its data.
    """
    settings = build(NodeSettings, config, prefix="node-config ")
    has_partition = 0 <= settings.partition_id < run.clients
    if not has_partition and not (settings.data and settings.name):
        raise SettingsError(
            f"node-config 'partition-id' = {settings.partition_id}: it takes 0 to "
            f"{run.clients - 1}; a site with its own data needs 'data' and 'name' instead"
        )
    name = settings.name or client_name(settings.partition_id, run.clients)
    model, declared = settings.model, None
    if not model:
        pool, rule = tuple(run.models.pool), run.models.assignment
        assigned = _assigned(pool, run.clients, run.seed, rule)
        model = assigned[settings.partition_id % len(assigned)]
    if settings.data and run.privacy.is_on:
        declared = Declaration.read(settings.data, settings.max_data_bytes)
        declared.check(run)
    return Node(
        name=name,
        partition=settings.partition_id,
        folder=settings.data,
        model=model,
        training=settings.training(run),
        device=settings.device or run.engine.device,
        state_dir=_state_dir(settings.state_dir or state_dir),
        max_model_bytes=settings.max_model_bytes,
        budget=settings.budget(),
        declared=declared,
        is_site=not state_dir,
        data=data or RunData.of(run),
    )


def _state_dir(given: str) -> Path:
    named = given or os.environ.get(STATE_DIR_VARIABLE)
    remedy = f"set node-config 'state-dir' or the environment variable {STATE_DIR_VARIABLE}"
    return expanded(named or "~/.local/state/fedhet", remedy)


class CachedClient(Protocol):
    """A method's client half, as its worker process uses it."""

    def held_bytes(self) -> int:
        """Return the bytes of the tensors that the client holds in memory."""

    def to_client(self) -> Client:
        """Return the client as Flower's `Client`."""


class ClientCache:
    """Clients whose tensors take no more than `most` bytes, besides the one in use.

    To make room, clients of other runs are closed first, beginning with the oldest, and then the
    most recently used client of this run. Rounds visit a run's clients in turn, so that this one is
    needed last; if they do not all fit, closing the oldest would always close the one needed next.

    A client is measured when the next one is opened, since only the client in use changes its size.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._runs: dict[Hashable, dict[Hashable, CachedClient]] = {}
        """Each run's clients; both in the order of their last use."""
        self._bytes: dict[tuple[Hashable, Hashable], int] = {}
        self._total = 0

    def open(self, run: Hashable, name: Hashable, new: Callable[[], CachedClient]) -> CachedClient:
        """Return a run's client, a new one if it is not kept; close others to make room."""
        if self._runs:  # measure the client that was in use
            last, clients = next(reversed(self._runs.items()))
            used, held = next(reversed(clients.items()))
            size = held.held_bytes()
            self._total += size - self._bytes.get((last, used), 0)
            self._bytes[last, used] = size
        clients = self._runs.get(run, {})
        self._total -= self._bytes.pop((run, name), 0)
        client = clients.pop(name, None) or new()
        self._runs.pop(run, None)
        self._runs[run] = clients
        while self._total > self.most:  # close a client
            oldest, others = next(iter(self._runs.items()))
            closed = next(reversed(others) if oldest == run else iter(others))
            del others[closed]
            self._total -= self._bytes.pop((oldest, closed))
            if not others and oldest != run:
                del self._runs[oldest]
        clients[name] = client
        return client

    def clear(self) -> None:
        """Close all clients."""
        self._runs.clear()
        self._bytes.clear()
        self._total = 0

    def kept(self) -> set[tuple[Hashable, Hashable]]:
        """Return what is open: pairs of a run and a client."""
        return {(run, name) for run, clients in self._runs.items() for name in clients}


_open = ClientCache(MAX_BYTES)


def close_clients() -> None:
    """Close this process's clients: their states on disk are all that they need."""
    _open.clear()


def open_client(config: Config, node: Node) -> CachedClient:
    """Return the client of `node`, from the cache if this process still has it.

    Its state in memory is checked against its state on disk before each use, since another process
    may have trained the client meanwhile.
    """
    torch.set_num_threads(config.run.engine.threads)
    return _open.open(config, node, lambda: config.method.client(config, node))
