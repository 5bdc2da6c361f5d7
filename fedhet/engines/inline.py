"""A federation in this process: its clients are called one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.server import Server, ServerAppComponents, ServerConfig

from fedhet.client_runtime.cache import open_client
from fedhet.client_runtime.node import Node, read_node
from fedhet.config.resolve import Config
from fedhet.data.store import RunData
from fedhet.engines.gpu_memory import ASKED_ALONE, make_room, too_small
from fedhet.server.direct_proxy import DirectProxy
from fedhet.server.own_code import ClientCodeError, CodeFault, is_of_code


def run_inline(
    config: Config,
    data: RunData,
    state_dir: Path,
    parts: ServerAppComponents,
    notice: Callable[[str], None],
) -> None:
    """Run the federation; its clients keep their states in `state_dir`.

    `notice` is called for each client for which others had to make room on the GPU.
    """
    server, rounds = parts.server, parts.config
    assert isinstance(server, Server)
    assert isinstance(rounds, ServerConfig)
    server.set_max_workers(1)
    for partition in range(config.run.clients):
        node_config = {"partition-id": partition, "num-partitions": config.run.clients}
        node = read_node(node_config, config.run, str(state_dir), data)
        server.client_manager().register(InlineProxy(config, node, notice))
    server.fit(rounds.num_rounds, rounds.round_timeout)


class InlineProxy(DirectProxy):
    """A client in this process."""

    # Flower's server calls clients from several threads, but torch's generators and the data caches
    # are shared by the process: call one client at a time.
    _one_at_a_time = threading.Lock()

    def __init__(
        self, config: Config, node: Node, notice: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(node.name)
        self._config, self._node, self._notice = config, node, notice

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`, without a time limit. Raises ClientCodeError."""
        try:
            with self._one_at_a_time:
                return self._called(name, instruction)
        except Exception as error:
            if not is_of_code(error):
                raise
            raise ClientCodeError(CodeFault.of(error)) from error

    def _called(self, name: str, instruction: Any) -> Any:
        """Call the client; if the GPU's memory does not suffice, once more without the others."""
        try:
            return self._call(name, instruction)
        except torch.OutOfMemoryError:
            self._notice(f"{self.cid} {ASKED_ALONE}")
        make_room()
        try:
            return self._call(name, instruction)
        except torch.OutOfMemoryError as error:
            raise too_small(error) from error

    def _call(self, name: str, instruction: Any) -> Any:
        client = open_client(self._config, self._node).to_client()
        return getattr(client, name)(instruction)
