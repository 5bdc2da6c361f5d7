"""Clients kept open: a worker process that has trained a client keeps its data and models."""

from __future__ import annotations

from collections import OrderedDict

import torch

from clients.base import HetClient
from fedhet.client.node import Node
from fedhet.config.resolve import Config

MOST_BYTES = 2 * 2**30
"""Of the tensors of clients that are kept open in one process, besides the one in use."""

_open: OrderedDict[tuple[Config, Node], HetClient] = OrderedDict()


def open_client(config: Config, node: Node) -> HetClient:
    """Return the client of `node`, the one from before if this process still has it.

    What it holds in memory is checked against its state on disk before each use, since another
    process may have trained it meanwhile.
    """
    torch.set_num_threads(config.run.engine.threads)
    key = (config, node)
    client: HetClient | None = _open.pop(key, None)
    if client is None:
        client = config.method.client(config, node)
    while _open and sum(kept.held_bytes() for kept in _open.values()) > MOST_BYTES:
        _open.popitem(last=False)
    _open[key] = client
    return client
