"""Flower's entry point for clients."""

from __future__ import annotations

from functools import lru_cache

from flwr.client import Client, ClientApp
from flwr.common import Context

from fedhet.client_runtime.cache import open_client
from fedhet.client_runtime.node import read_node
from fedhet.client_runtime.permissions import permitted
from fedhet.config.resolve import resolve_items
from fedhet.data import DataSpec, RunData


def client_fn(context: Context) -> Client:
    """Return this node's client in a deployed run, as far as the site allows what it asks."""
    settings = permitted(context.node_config, context.run_config)
    config = resolve_items(tuple(settings.items()))
    data = data_of(DataSpec.of(config.run))
    node = read_node(context.node_config, config.run, data=data)
    return open_client(config, node).to_client()


@lru_cache(maxsize=1)
def data_of(spec: DataSpec) -> RunData:
    """Return the store of a run's data: one for all clients that Flower calls in this process."""
    return RunData(spec)


app = ClientApp(client_fn=client_fn)
