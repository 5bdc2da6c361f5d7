"""Settings of a node, and the cache of clients in a worker process.

Node settings come from Flower's `--node-config` or, in a simulation, from the client's index. A
worker process caches the data and models of the clients that it has trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.client import Client
from pydantic import Field

from fedhet.base.disk import STATE_DIR_VARIABLE, state_directory
from fedhet.base.errors import SettingsError
from fedhet.config.resolve import Config
from fedhet.config.secure import Peers, own_key, read_peers, simulated_files
from fedhet.data.declaration import Declaration
from fedhet.data.store import RunData
from fedhet.models import assign
from fedhet.settings.defense import PrivacySettings
from fedhet.settings.run import RunSettings, TrainingSettings, training_of
from fedhet.settings.schema import Bytes, Count, CountOrNone, NonNegative, Schema, build, kebab
from fedhet.wire.identity import client_name

ALLOW_MODELS_VARIABLE = "FEDHET_ALLOW_MODELS"
ALLOW_PATHS_VARIABLE = "FEDHET_ALLOW_PATHS"
OWN_TRAINING = ("optimizer", "lr", "local_epochs", "batch_size")
"""Training settings that a node may override."""
MAX_BYTES = 2 * 2**30
"""Maximum total size of the tensors in a process's cached clients, in bytes.

The client in use is not counted."""
_cached_assign = lru_cache(maxsize=1)(assign)
"""Cached version of `assign`, which is called with the same arguments for each client."""


@dataclass(frozen=True)
class Budget:
    """Privacy budget for a site's samples over all runs."""

    epsilon: float
    delta: float

    @classmethod
    def from_text(cls, text: str) -> Budget:
        """Parse a budget such as `epsilon=8 delta=1e-5`. Raises SettingsError if it is invalid."""
        try:
            pairs = (each.split("=") for each in text.split())
            values = {name: float(value) for name, value in pairs}
            budget = cls(values.pop("epsilon"), values.pop("delta", PrivacySettings().delta))
        except (ValueError, KeyError):
            values, budget = {"": 0.0}, cls(0, 0)
        if values or not 0 < budget.epsilon < math.inf or not 0 < budget.delta < 0.1:
            raise SettingsError(
                "node-config 'privacy': expected a budget such as 'epsilon=8 delta=1e-5' with "
                f"epsilon > 0 and 0 < delta < 0.1, got '{text}'"
            )
        return budget


class NodeSettings(Schema):
    """Settings in `--node-config`. The first two settings are defined by Flower."""

    partition_id: int = Field(-1, ge=-1, description="index of the node's data partition")
    num_partitions: CountOrNone = Field(0, description="number of nodes; set by Flower")
    name: str = Field("", description="client name; empty = client-<partition-id>")
    data: str = Field(
        "",
        description="data of the site in the form of data.dataset, such as table:/srv/data, used "
        "instead of a partition",
    )
    model: str = Field("", description="model of the site; empty = assigned from the run's pool")
    optimizer: Literal["", "adam", "adamw", "sgd"] = Field(
        "", description="optimizer of the site; empty = as in the run"
    )
    lr: NonNegative = Field(0.0, description="learning rate of the site; 0 = as in the run")
    local_epochs: CountOrNone = Field(0, description="local epochs per round; 0 = as in the run")
    batch_size: CountOrNone = Field(0, description="batch size of the site; 0 = as in the run")
    device: str = Field("", description="device of the site; empty = as in the run")
    state_dir: str = Field(
        "", description=f"directory of the private state; empty = ${STATE_DIR_VARIABLE}"
    )
    allow_models: str = Field(
        "", description="modules or functions (module:function) that a run may import; * = any"
    )
    allow_paths: str = Field(
        "", description="directories that a run may read in addition to 'data', comma-separated"
    )
    allow_downloads: bool = Field(False, description="whether a run may download data")
    min_samples_per_class: Count = Field(
        1,
        description="minimum number of samples in a class for sending its mean; a run may "
        "require more, except at a site with 'peers'",
    )
    max_seconds: Count = Field(21_600, description="maximum duration of a round, in seconds")
    max_epochs: Count = Field(1000, description="maximum number of epochs per round")
    max_model_bytes: Bytes = Field(2 * 2**30, description="maximum model size, in bytes")
    max_data_bytes: Bytes = Field(8 * 2**30, description="maximum dataset size, in bytes")

    privacy: str = Field(
        "",
        description="privacy budget over all runs, e.g. epsilon=8 delta=1e-5; runs without privacy "
        "are rejected; empty = only the run's limit",
    )
    peers: str = Field(
        "",
        description="peers file for secure aggregation; runs without it are rejected; empty = none",
    )
    peers_key: str = Field(
        "", description="private key file that matches the site's entry in the peers file"
    )

    def budget(self) -> Budget | None:
        """Return the site's privacy budget, or None if the site has no budget.

        Raises SettingsError if the setting is invalid.
        """
        return Budget.from_text(self.privacy) if self.privacy else None

    def check_training(self) -> None:
        """Raise SettingsError if a training setting is set, although the site has peers.

        With settings under which only this site trains, a server would learn its update.
        """
        if own := [name for name in OWN_TRAINING if getattr(self, name)]:
            raise SettingsError(
                f"node-config '{kebab(own[0])}': must not be set with secure aggregation, which "
                "requires the same training settings at all sites. Remove it, or set it in the run."
            )

    def training(self, run: RunSettings) -> TrainingSettings:
        """Return the training settings of the run, overridden by the node's settings."""
        overrides = {name: value for name in OWN_TRAINING if (value := getattr(self, name))}
        return training_of(run, self.partition_id).model_copy(update=overrides)


@dataclass(frozen=True)
class Node:
    """A client's identity, model, training settings, device and directories."""

    name: str
    partition: int
    source: str
    """Data of the site, in the form of `data.dataset`, or "" for a partition of the run's
    dataset."""
    model: str
    training: TrainingSettings
    device: str
    state_dir: Path
    data: RunData = field(compare=False, repr=False)
    max_model_bytes: int = 2**60
    budget: Budget | None = None
    """Privacy budget over all runs, or None if only the budget of each run applies."""
    declared: Declaration | None = None
    """Declared data format of a site in a run that hides its samples, or None for all other
    clients."""
    pool: str = ""
    """Setting `models.pool` as the server sent it, before the site's own model replaces it."""
    peers: Peers | None = None
    """Sites of a run with secure aggregation, or None for other runs."""
    peers_key: X25519PrivateKey | None = field(default=None, compare=False, repr=False)
    is_site: bool = False
    """Whether the client's private state outlives the run, unlike the state of a simulated
    client."""


def read_node(
    config: Mapping[str, object], run: RunSettings, state_dir: str = "", data: RunData | None = None
) -> Node:
    """Create a node from Flower's node config, like `create_node`."""
    return create_node(build(NodeSettings, config, prefix="node-config "), run, state_dir, data)


def create_node(
    settings: NodeSettings, run: RunSettings, state_dir: str = "", data: RunData | None = None
) -> Node:
    """Create a node without reading any samples.

    `state_dir` is set only in a simulation. `data` is shared by all clients in this process; if it
    is None, a new store is created. Raises SettingsError if a node setting is invalid, and
    DataError if a site does not declare its data format, but the run hides the samples.
    """
    has_partition = 0 <= settings.partition_id < run.clients
    if not has_partition and not (settings.data and settings.name):
        raise SettingsError(
            f"node-config 'partition-id': must be from 0 to {run.clients - 1}, got "
            f"{settings.partition_id}. A site with its own data must set 'data' and 'name' instead."
        )
    name = settings.name or client_name(settings.partition_id, run.clients)
    model, declared = settings.model, None
    if not model:
        pool, rule = tuple(run.models.pool), run.models.assignment
        models = _cached_assign(pool, run.clients, run.seed, rule)
        model = models[settings.partition_id % len(models)]
    if settings.data and run.privacy.hides_samples:
        declared = Declaration.from_files(settings.data, settings.max_data_bytes)
        declared.check(run)
    peers, peers_key = None, None
    if run.privacy.secure_aggregation:
        files = settings.peers, settings.peers_key
        if state_dir:
            files = simulated_files(state_dir, name)
        if not all(files):
            raise SettingsError(
                "node-config 'peers', 'peers-key': not set, expected the files of this site, "
                "because the run uses secure aggregation. Create them with `fedhet certs` and "
                "`fedhet peers`."
            )
        settings.check_training()
        peers = read_peers(files[0])
        peers_key = own_key(peers, name, files[1])
    return Node(
        name=name,
        partition=settings.partition_id,
        source=settings.data,
        model=model,
        training=settings.training(run),
        device=settings.device or run.engine.device,
        state_dir=state_directory(settings.state_dir or state_dir),
        max_model_bytes=settings.max_model_bytes,
        budget=settings.budget(),
        declared=declared,
        pool=", ".join(run.models.pool),
        peers=peers,
        peers_key=peers_key,
        is_site=not state_dir,
        data=data or RunData.for_run(run),
    )


class CachedClient(Protocol):
    """Interface of the clients that `ClientCache` holds."""

    def held_bytes(self) -> int:
        """Return the size in bytes of the tensors that the client holds in memory."""

    def to_client(self) -> Client:
        """Convert the client to Flower's `Client`."""


class ClientCache:
    """Cache of clients whose tensors use at most `max_bytes`, excluding the client in use.

    Clients of other runs are evicted first, in least-recently-used order. Within the current run,
    the most recently used client is evicted. Rounds visit the clients in turn, so this client will
    be needed last, and the oldest client will be needed next.

    The size of a client is updated when the next client is opened, because only the client in use
    changes its size.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._runs: dict[Hashable, dict[Hashable, CachedClient]] = {}
        """Clients by run. Runs and clients are both in the order of their last use."""
        self._bytes: dict[tuple[Hashable, Hashable], int] = {}
        self._total = 0

    def open(self, run: Hashable, name: Hashable, new: Callable[[], CachedClient]) -> CachedClient:
        """Return a client from the cache, or create it and evict other clients if necessary."""
        if self._runs:  # Update the size of the client that was in use.
            last_run, clients = next(reversed(self._runs.items()))
            last_name, last_client = next(reversed(clients.items()))
            size = last_client.held_bytes()
            self._total += size - self._bytes.get((last_run, last_name), 0)
            self._bytes[last_run, last_name] = size
        clients = self._runs.get(run, {})
        self._total -= self._bytes.pop((run, name), 0)
        client = clients.pop(name, None) or new()
        self._runs.pop(run, None)
        self._runs[run] = clients
        while self._total > self.max_bytes:  # Evict clients until the rest fits.
            oldest, candidates = next(iter(self._runs.items()))
            evicted = next(reversed(candidates) if oldest == run else iter(candidates))
            del candidates[evicted]
            self._total -= self._bytes.pop((oldest, evicted))
            if not candidates and oldest != run:
                del self._runs[oldest]
        clients[name] = client
        return client

    def clear(self) -> None:
        """Evict all clients."""
        self._runs.clear()
        self._bytes.clear()
        self._total = 0

    def keys(self) -> set[tuple[Hashable, Hashable]]:
        """Return the (run, client) pairs in the cache."""
        return {(run, name) for run, clients in self._runs.items() for name in clients}


_cache = ClientCache(MAX_BYTES)


def close_clients() -> None:
    """Evict all clients in this process. They can be restored from their states on disk."""
    _cache.clear()


def open_client(config: Config, node: Node) -> CachedClient:
    """Return the client of `node`, from this process's cache if possible.

    Before each use, the client compares its state in memory with its state on disk, because another
    process may have trained it in the meantime.
    """
    torch.set_num_threads(config.run.engine.threads)
    return _cache.open(config, node, lambda: config.method.client(config, node))
