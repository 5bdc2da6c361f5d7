"""One of Ray's workers, and what it returns of a client that failed."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedhet.client_runtime.cache import open_client
from fedhet.client_runtime.meeting import meet
from fedhet.client_runtime.node import read_node
from fedhet.config.resolve import Config
from fedhet.data import RunData
from fedhet.server.own_code import NOT_OF_CODE, CodeFault


@dataclass(frozen=True)
class Failed:
    """A client's error. It travels in words: not every exception can be unpickled again."""

    reason: str
    trace: str
    of_code: CodeFault | None = None
    """The fault of the client's code, if that is the cause."""


class Worker:
    """Runs any client of a run, one at a time; Ray makes an actor of it.

    `decoded` is the folder from which it maps the run's data, if there is one on its machine; it
    may be written after the worker has started.
    """

    def __init__(self, config: Config, state_dir: str, decoded: Path | None = None) -> None:
        self._config, self._state_dir = config, state_dir
        self._data = RunData.of(config.run, shared=decoded)

    def fit_together(self, partitions: Sequence[int], instructions: Sequence[Any]) -> list[Any]:
        """Let clients train at once; return the result of each, or `Failed`."""
        pairs = zip(partitions, instructions, strict=True)
        return meet([partial(self.call, partition, "fit", each) for partition, each in pairs])

    def call(self, partition: int, name: str, instruction: Any) -> Any:
        """Call the method `name` of a client; return its result, or `Failed`."""
        node_config = {"partition-id": partition, "num-partitions": self._config.run.clients}
        try:
            node = read_node(node_config, self._config.run, self._state_dir, self._data)
            client = open_client(self._config, node).to_client()
            return getattr(client, name)(instruction)
        except NOT_OF_CODE as error:
            return Failed(str(error), traceback.format_exc())
        except Exception as error:
            return Failed(str(error), traceback.format_exc(), CodeFault.of(error))

    def is_ready(self) -> bool:
        """Return True: the process has started, and has imported what it needs."""
        return True
