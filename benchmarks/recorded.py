"""Server whose clients immediately repeat the recorded replies of a real client."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    GetPropertiesRes,
    Parameters,
    Status,
    ndarray_to_bytes,
    parameters_to_ndarrays,
)

from fedhet._generated import knowledge_pb2 as wire
from fedhet.client_runtime.node import read_node
from fedhet.config.resolve import Config, resolve
from fedhet.engines.simulate import InlineProxy
from fedhet.runs.log import Watcher
from fedhet.server.app import components
from fedhet.server.calls import DirectProxy
from fedhet.server.federation import FederationServer
from fedhet.wire.identity import client_name


class Recording(InlineProxy):
    """Real client whose properties and replies are written to a directory."""

    def __init__(self, config: Config, folder: Path) -> None:
        node_config = {"partition-id": 0, "num-partitions": config.run.clients}
        super().__init__(config, read_node(node_config, config.run, str(folder / "state")))
        self.folder = folder

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the real client, and write its first reply."""
        result = super().call(name, instruction, timeout)
        said = result.properties if name == "get_properties" else result.metrics
        if not (path := self.folder / f"{name}.json").exists():
            path.write_text(json.dumps(said))
        if name == "fit":
            for number, part in enumerate(result.parameters.tensors):
                (self.folder / f"{number:04d}.npy").write_bytes(part)
        return result


def record(config: Config, folder: Path) -> None:
    """Train a real client of a federation, and write its replies to `folder`."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    one = resolve({**config.flat(), "clients": 1, "rounds": 1})
    server = components(one, folder / "recorded", workers=1, watchers=[]).server
    assert isinstance(server, FederationServer)
    server.client_manager().register(Recording(config, folder))
    server.set_max_workers(1)
    server.fit(1, None)


def parts_in(folder: Path) -> list[bytes]:
    """Return the parts of the recorded reply, starting with its manifest."""
    return [path.read_bytes() for path in sorted(folder.glob("*.npy"))]


class Repeating(DirectProxy):
    """Client that immediately returns the recorded replies under its own name."""

    def __init__(
        self, name: str, run: str, said: dict[str, Any], parts: Callable[[], list[bytes]]
    ) -> None:
        super().__init__(name)
        self.run, self.said, self.parts, self.round = run, said, parts, 0

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Return the recorded reply with this client's name and round."""
        said, done = self.said[name], Status(Code.OK, "")
        if name == "get_properties":
            return GetPropertiesRes(done, {**said, "name": self.cid})
        if name == "evaluate":
            return EvaluateRes(done, 0.0, 1, said)
        self.round += 1
        part, *tensors = self.parts()
        (whole,) = parameters_to_ndarrays(Parameters([part], ""))
        manifest = wire.Manifest()
        manifest.ParseFromString(whole.tobytes())
        manifest.run, manifest.sender, manifest.round = self.run, self.cid, self.round
        head = np.frombuffer(manifest.SerializeToString(deterministic=True), np.uint8)
        return FitRes(done, Parameters([ndarray_to_bytes(head), *tensors], ""), 1, said)


def server_with(
    config: Config,
    run: Path,
    recorded: Path,
    parts: Callable[[], list[bytes]],
    watchers: list[Watcher],
) -> FederationServer:
    """Return a server in the directory `run` whose clients repeat the replies in `recorded`."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    server = components(config, run, workers=1, watchers=watchers).server
    assert isinstance(server, FederationServer)
    name = json.loads((run / "run.json").read_text())["run"]
    said = {path.stem: json.loads(path.read_text()) for path in recorded.glob("*.json")}
    for number in range(config.run.clients):
        proxy = Repeating(client_name(number, config.run.clients), name, said, parts)
        server.client_manager().register(proxy)
    return server
