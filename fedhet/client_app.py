"""Flower's entry point for clients."""

from __future__ import annotations

from functools import partial

from flwr.client import Client, ClientApp
from flwr.common import Context

from fedhet.client.cache import open_client
from fedhet.client.node import read_node
from fedhet.client.permissions import permitted
from fedhet.config.resolve import Config, resolve_items


def client_fn(context: Context) -> Client:
    """Return this node's client in a deployed run, as far as the site allows what it asks."""
    settings = permitted(context.node_config, context.run_config)
    return _client(resolve_items(tuple(settings.items())), "", context)


def simulated_app(config: Config, state_dir: str) -> ClientApp:
    """Return a simulation's app, bound to its settings: a simulation has no run config."""
    return ClientApp(client_fn=partial(_client, config, state_dir))


def _client(config: Config, state_dir: str, context: Context) -> Client:
    node = read_node(context.node_config, config.run, state_dir)
    return open_client(config, node).to_client()


app = ClientApp(client_fn=client_fn)
