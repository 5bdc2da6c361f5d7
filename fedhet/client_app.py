"""Flower's entry point for clients."""

from __future__ import annotations

from flwr.client import Client, ClientApp
from flwr.common import Context

from fedhet.client_runtime.cache import open_client
from fedhet.client_runtime.node import read_node
from fedhet.client_runtime.permissions import permitted
from fedhet.config.resolve import resolve_items


def client_fn(context: Context) -> Client:
    """Return this node's client in a deployed run, as far as the site allows what it asks."""
    settings = permitted(context.node_config, context.run_config)
    config = resolve_items(tuple(settings.items()))
    return open_client(config, read_node(context.node_config, config.run)).to_client()


app = ClientApp(client_fn=client_fn)
