"""One of Ray's workers, and what it returns of a client that failed."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedhet.client_runtime.cache import open_client
from fedhet.client_runtime.node import read_node
from fedhet.config.resolve import Config
from fedhet.data.store import RunData
from fedhet.engines.gpu_memory import make_room, set_share, too_small
from fedhet.learning.devices import find_device
from fedhet.server.own_code import CodeFault, is_of_code


@dataclass(frozen=True)
class Failed:
    """A client's error. It travels in words: not every exception can be unpickled again."""

    reason: str
    trace: str
    of_code: CodeFault | None = None
    """The fault of the client's code, if that is the cause."""
    of_memory: bool = False
    """Whether the GPU's memory did not suffice."""


class Worker:
    """Runs any client of a run, one at a time; Ray makes an actor of it.

    `decoded` is the folder from which it maps the run's data, if there is one on its machine; it
    may be written after the worker has started.
    """

    def __init__(self, config: Config, state_dir: str, decoded: Path | None = None) -> None:
        self._config, self._state_dir = config, state_dir
        self._data = RunData.of(config.run, shared=decoded)
        self._share(config.run.engine.gpus_per_client)

    def call(self, partition: int, name: str, instruction: Any, *, alone: bool = False) -> Any:
        """Call the method `name` of a client; return its result, or `Failed`.

        `alone`: no other worker computes meanwhile, and this one may take the whole GPU.
        """
        if not alone:
            return self._called(partition, name, instruction)
        make_room()
        self._share(1.0)
        try:
            return self._called(partition, name, instruction)
        finally:
            make_room()
            self._share(self._config.run.engine.gpus_per_client)

    def make_room(self) -> None:
        """Give back the GPU's memory that this worker does not need at the moment."""
        make_room()

    def _called(self, partition: int, name: str, instruction: Any) -> Any:
        node_config = {"partition-id": partition, "num-partitions": self._config.run.clients}
        try:
            node = read_node(node_config, self._config.run, self._state_dir, self._data)
            client = open_client(self._config, node).to_client()
            return getattr(client, name)(instruction)
        except torch.OutOfMemoryError as error:
            return Failed(str(too_small(error)), traceback.format_exc(), of_memory=True)
        except Exception as error:
            fault = CodeFault.of(error) if is_of_code(error) else None
            return Failed(str(error), traceback.format_exc(), fault)

    def _share(self, share: float) -> None:
        """Bound this worker's part of its GPU, if it has one."""
        if find_device(self._config.run.engine.device).type == "cuda":
            set_share(share or 1.0)

    def is_ready(self) -> bool:
        """Return True: the process has started, and has imported what it needs."""
        return True
