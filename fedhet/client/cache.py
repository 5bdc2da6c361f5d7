"""Cache of open clients: a worker process keeps the data and models of clients it has trained."""

from __future__ import annotations

from collections import OrderedDict
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


_open: OrderedDict[tuple[Config, Node], OpenClient] = OrderedDict()


def open_client(config: Config, node: Node) -> OpenClient:
    """Return the client of `node`, from the cache if this process still has it.

    Its state in memory is checked against its state on disk before each use, since another process
    may have trained the client meanwhile.
    """
    torch.set_num_threads(config.run.engine.threads)
    key = (config, node)
    client = _open.pop(key, None) or config.method.client(config, node)
    while _open and sum(kept.held_bytes() for kept in _open.values()) > MOST_BYTES:
        _open.popitem(last=False)
    _open[key] = client
    return client
