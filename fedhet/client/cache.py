"""Cache of open clients: a worker process keeps the data and models of clients it has trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from flwr.client import Client

from fedhet.client.node import Node
from fedhet.config.resolve import Config

MOST_BYTES = 2 * 2**30
"""Limit on the tensors of cached clients in one process, besides the client in use."""


class OpenClient(Protocol):
    """A method's client half, as its worker process uses it."""

    def held_bytes(self) -> int:
        """Return the bytes of the tensors that the client holds in memory."""

    def to_client(self) -> Client:
        """Return the client as Flower's `Client`."""


Key = tuple[Config, Node]


class OpenClients:
    """Clients whose tensors take no more than `most` bytes, besides the one in use.

    For room those of other runs are closed, the oldest first, and then the one that was used last:
    rounds go through a run's clients, so that it will be needed later than all others. To close the
    oldest would leave none that is needed next, as soon as they do not all fit.

    A client is measured when the next one is opened: only the one in use grows or shrinks, and to
    measure all of them each time would take the square of their number.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._clients: dict[Key, OpenClient] = {}
        """In the order of their last use."""
        self._bytes: dict[Key, int] = {}
        self._total = 0

    def open(self, key: Key, new: Callable[[], OpenClient]) -> OpenClient:
        """Return the client of `key`, a new one if it is not kept; close others for room."""
        if self._clients:
            self._measure(next(reversed(self._clients)))
        self._total -= self._bytes.pop(key, 0)
        client = self._clients.pop(key, None) or new()
        while self._total > self.most:
            self._close(self._least_needed(key[0]))
        self._clients[key] = client
        return client

    def _measure(self, key: Key) -> None:
        size = self._clients[key].held_bytes()
        self._total += size - self._bytes.get(key, 0)
        self._bytes[key] = size

    def _least_needed(self, run: Config) -> Key:
        others = (key for key in self._clients if key[0] != run)
        return next(others, None) or next(reversed(self._clients))

    def _close(self, key: Key) -> None:
        del self._clients[key]
        self._total -= self._bytes.pop(key)


_open = OpenClients(MOST_BYTES)


def open_client(config: Config, node: Node) -> OpenClient:
    """Return the client of `node`, from the cache if this process still has it.

    Its state in memory is checked against its state on disk before each use, since another process
    may have trained the client meanwhile.
    """
    torch.set_num_threads(config.run.engine.threads)
    return _open.open((config, node), lambda: config.method.client(config, node))
