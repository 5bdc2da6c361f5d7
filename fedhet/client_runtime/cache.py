"""Cache of open clients: a worker process keeps the data and models of clients it has trained."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from flwr.client import Client

from fedhet.client_runtime.node import Node
from fedhet.config.resolve import Config

MOST_BYTES = 2 * 2**30
"""Limit on the tensors of cached clients in one process, besides the client in use."""


class OpenClient(Protocol):
    """A method's client half, as its worker process uses it."""

    def held_bytes(self) -> int:
        """Return the bytes of the tensors that the client holds in memory."""

    def to_client(self) -> Client:
        """Return the client as Flower's `Client`."""


class OpenClients:
    """Clients whose tensors take no more than `most` bytes, besides the one in use.

    To make room, clients of other runs are closed first, beginning with the oldest, and then the
    most recently used client of this run. Rounds visit a run's clients in turn, so that this one is
    needed last; if they do not all fit, closing the oldest would always close the one needed next.

    A client is measured when the next one is opened, since only the client in use changes its size.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._runs: dict[Hashable, dict[Hashable, OpenClient]] = {}
        """Each run's clients; both in the order of their last use."""
        self._bytes: dict[tuple[Hashable, Hashable], int] = {}
        self._total = 0

    def open(self, run: Hashable, name: Hashable, new: Callable[[], OpenClient]) -> OpenClient:
        """Return a run's client, a new one if it is not kept; close others to make room."""
        self._measure_last()
        clients = self._runs.get(run, {})
        self._total -= self._bytes.pop((run, name), 0)
        client = clients.pop(name, None) or new()
        self._runs.pop(run, None)
        self._runs[run] = clients
        while self._total > self.most:
            self._close_one(run)
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

    def _measure_last(self) -> None:
        if not self._runs:
            return
        run, clients = next(reversed(self._runs.items()))
        name, client = next(reversed(clients.items()))
        size = client.held_bytes()
        self._total += size - self._bytes.get((run, name), 0)
        self._bytes[run, name] = size

    def _close_one(self, current: Hashable) -> None:
        run, clients = next(iter(self._runs.items()))
        name = next(reversed(clients) if run == current else iter(clients))
        del clients[name]
        self._total -= self._bytes.pop((run, name))
        if not clients and run != current:
            del self._runs[run]


_open = OpenClients(MOST_BYTES)


def close_clients() -> None:
    """Close this process's clients: their states on disk are all that they need."""
    _open.clear()


def open_client(config: Config, node: Node) -> OpenClient:
    """Return the client of `node`, from the cache if this process still has it.

    Its state in memory is checked against its state on disk before each use, since another process
    may have trained the client meanwhile.
    """
    torch.set_num_threads(config.run.engine.threads)
    return _open.open(config, node, lambda: config.method.client(config, node))
