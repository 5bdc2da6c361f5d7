"""Flower's entry point for clients."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from flwr.client import Client, ClientApp
from flwr.common import Context

from fedhet.client.cache import open_client
from fedhet.client.node import read_node
from fedhet.client.permissions import permitted
from fedhet.config.resolve import Config, resolve_items
from fedhet.data import DataSpec
from fedhet.data.decoded import use_decoded


def client_fn(context: Context) -> Client:
    """Return this node's client in a deployed run, as far as the site allows what it asks."""
    settings = permitted(context.node_config, context.run_config)
    return _client(resolve_items(tuple(settings.items())), "", context)


def simulated_app(config: Config, state_dir: str, decoded: Path) -> ClientApp:
    """Return a simulation's app, bound to its settings: a simulation has no run config.

    `decoded` is the folder from which its processes map the run's data.
    """
    return ClientApp(client_fn=partial(_simulated, config, state_dir, decoded))


def _simulated(config: Config, state_dir: str, decoded: Path, context: Context) -> Client:
    use_decoded(DataSpec.of(config.run), decoded)
    return _client(config, state_dir, context)


def _client(config: Config, state_dir: str, context: Context) -> Client:
    node = read_node(context.node_config, config.run, state_dir)
    return open_client(config, node).to_client()


app = ClientApp(client_fn=client_fn)
