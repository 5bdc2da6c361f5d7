"""Flower's entry point for clients."""

from __future__ import annotations

from functools import lru_cache

from flwr.client import Client, ClientApp
from flwr.common import Context

from fedhet.client_runtime.cache import open_client
from fedhet.client_runtime.limits import SiteClient, told_without_paths, within_limits
from fedhet.client_runtime.node import NodeSettings, read_node
from fedhet.client_runtime.permissions import permitted
from fedhet.client_runtime.privacy import told_the_type_alone
from fedhet.config.resolve import resolve_items
from fedhet.config.sources import CLIENTS, FOLLOW
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.runs.logs import configure
from fedhet.settings.schema import build


def client_fn(context: Context) -> Client:
    """Return this node's client in a deployed run, as far as the site allows what it asks."""
    site = build(NodeSettings, context.node_config, prefix="node-config ")
    with told_without_paths(site):
        configure()
        settings = permitted(context.node_config, context.run_config)
        if settings.get(CLIENTS) == FOLLOW and site.num_partitions:
            settings[CLIENTS] = site.num_partitions
        config = within_limits(resolve_items(tuple(settings.items())), site)
        data = data_of(DataSpec.of(config.run))
        node = read_node(context.node_config, config.run, data=data)
    # From here on, samples are read: what the server is told must not depend on them.
    with told_the_type_alone() if config.run.privacy.is_on else told_without_paths(site):
        return SiteClient(open_client(config, node), site).to_client()


@lru_cache(maxsize=1)
def data_of(spec: DataSpec) -> RunData:
    """Return the store of a run's data: one for all clients that Flower calls in this process."""
    return RunData(spec)


app = ClientApp(client_fn=client_fn)
