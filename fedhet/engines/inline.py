"""A federation in this process: its clients are called one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from flwr.common import FitIns, FitRes
from flwr.server import Server, ServerAppComponents, ServerConfig

from fedhet.client_runtime.cache import open_client
from fedhet.client_runtime.meeting import meet
from fedhet.client_runtime.node import Node, read_node
from fedhet.config.resolve import Config
from fedhet.data import RunData
from fedhet.server.direct_proxy import DirectProxy
from fedhet.server.own_code import NOT_OF_CODE, ClientCodeError, CodeFault


def run_inline(config: Config, data: RunData, state_dir: Path, parts: ServerAppComponents) -> None:
    """Run the federation; its clients keep their states in `state_dir`."""
    server, rounds = parts.server, parts.config
    assert isinstance(server, Server)
    assert isinstance(rounds, ServerConfig)
    server.set_max_workers(1)
    for partition in range(config.run.clients):
        node_config = {"partition-id": partition, "num-partitions": config.run.clients}
        node = read_node(node_config, config.run, str(state_dir), data)
        server.client_manager().register(InlineProxy(config, node))
    server.fit(rounds.num_rounds, rounds.round_timeout)


class InlineProxy(DirectProxy):
    """A client in this process."""

    # Flower's server calls clients from several threads, but torch's generators and the data caches
    # are shared by the process: call one client at a time.
    _one_at_a_time = threading.Lock()

    def __init__(self, config: Config, node: Node) -> None:
        super().__init__(node.name)
        self._config = config
        self._node = node

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`, without a time limit. Raises ClientCodeError."""
        with self._one_at_a_time:
            return self._calling(name, instruction)()

    @classmethod
    def fit_together(
        cls, proxies: Sequence[Self], instructions: Sequence[FitIns], timeout: float | None
    ) -> Sequence[FitRes | Exception]:
        """Let clients train at once, without a time limit."""
        with cls._one_at_a_time:
            pairs = zip(proxies, instructions, strict=True)
            return meet([proxy._calling("fit", instruction) for proxy, instruction in pairs])

    def _calling(self, name: str, instruction: Any) -> Callable[[], Any]:
        """Return the call of the client's method, whose errors name the client's code."""

        def call() -> Any:
            try:
                client = open_client(self._config, self._node).to_client()
                return getattr(client, name)(instruction)
            except NOT_OF_CODE:
                raise
            except Exception as error:
                raise ClientCodeError(CodeFault.of(error)) from error

        return call
