"""What a client costs the server alone: milliseconds of a round for each, at every count.

    python -m benchmarks.server_scale [--counts 100,1000,5000,10000] [--methods felo,fedavg]
        [--rounds 4] [--repeats 3]

The clients answer at once what a real one has answered, in their own names; so nothing is left of
a round but the server's own work, of which a cost that grows with the square of the clients shows.
Processor time; the counts take turns, each in a process of its own; printed are the median over
the repeats and the least and the most. Bound: 1.2 of the first count's. Besides: how long the
clients' introductions and the end of the run take for each, and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import resource
import tempfile
import time
from copy import copy
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from flwr.common import (
    Code,
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
from fedhet.engines.backend import InlineProxy
from fedhet.runs.log import Watcher
from fedhet.runs.records import RoundRecord
from fedhet.server.app import FederationServer, components
from fedhet.server.calls import DirectProxy
from fedhet.wire.identity import client_name

BOUND, MODEL = 1.2, "mlp"


class ProcessTimes(Watcher):
    """Notes the process's CPU time at the start of the first round and at the end of each."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def round_started(self, *args: Any) -> None:
        """Note the time of the first."""
        if not self.at:
            self.at.append(time.process_time())

    def round_finished(self, record: RoundRecord) -> None:
        """Note the time."""
        assert not record.failed, record.failed
        self.at.append(time.process_time())


class Recorded:
    """What a real client has answered: its description, and its reply in parts."""

    def __init__(self, config: Config, folder: Path) -> None:
        one = resolve({**config.flat(), "clients": 1, "rounds": 1})
        server = components(one, folder / "recorded", workers=1, watchers=[]).server
        assert isinstance(server, FederationServer)
        node_config = {"partition-id": 0, "num-partitions": config.run.clients}
        node = read_node(node_config, config.run, str(folder / "state"))
        self.said: dict[str, Any] = {}
        server.client_manager().register(Listened(config, node, self.said))
        server.set_max_workers(1)
        server.fit(1, None)
        answer = self.said["fit"]
        self.manifest = wire.Manifest()
        (whole,) = parameters_to_ndarrays(Parameters(answer.parameters.tensors[:1], ""))
        self.manifest.ParseFromString(whole.tobytes())
        self.tensors, self.metrics = answer.parameters.tensors[1:], answer.metrics


class Listened(InlineProxy):
    """A real client whose answers are kept."""

    def __init__(self, config: Config, node: Any, said: dict[str, Any]) -> None:
        super().__init__(config, node)
        self.said = said

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the real client, and keep what it answers."""
        result = super().call(name, instruction, timeout)
        self.said.setdefault(name, copy(result))  # the server moves the parts of a reply to disk
        return result


class Answering(DirectProxy):
    """A client that answers at once what the recorded one has answered, in its own name."""

    def __init__(self, name: str, run: str, recorded: Recorded) -> None:
        super().__init__(name)
        self.run, self.recorded, self.round = run, recorded, 0

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Answer."""
        recorded, done = self.recorded, Status(Code.OK, "")
        if name == "get_properties":
            said = recorded.said["get_properties"].properties
            return GetPropertiesRes(done, {**said, "name": self.cid})
        self.round += 1
        manifest = wire.Manifest()
        manifest.CopyFrom(recorded.manifest)
        manifest.run, manifest.sender, manifest.round = self.run, self.cid, self.round
        head = np.frombuffer(manifest.SerializeToString(deterministic=True), np.uint8)
        return FitRes(
            done, Parameters([ndarray_to_bytes(head), *recorded.tensors], ""), 1, recorded.metrics
        )


def cost(clients: int, method: str, rounds: int) -> dict[str, float]:
    """Return a client's milliseconds of the server: in a round, before, after; the memory in MB."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {
            "method": method, "clients": clients, "rounds": rounds, "out": str(folder / "run"),
            "evaluate-every": rounds + 1, "models.pool": MODEL, "training.local-epochs": 1,
            "data.partition": "iid", "data.min-samples": 1, "data.test-fraction": 0.0,
            "data.max-test-samples": 20, "engine.backend": "inline",
        }  # fmt: skip
        config = resolve(settings)
        recorded = Recorded(resolve({**settings, "clients": 20}), folder)
        times = ProcessTimes()
        server = components(config, folder / "run", workers=1, watchers=[times]).server
        assert isinstance(server, FederationServer)
        run = json.loads((folder / "run" / "run.json").read_text())["run"]
        for number in range(clients):
            proxy = Answering(client_name(number, clients), run, recorded)
            server.client_manager().register(proxy)
        server.set_max_workers(2)
        begun = time.process_time()
        server.fit(rounds, None)
        ended = time.process_time()
    each = 1000 / clients
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "round": each * float(median(np.diff(times.at)[1:-1])),
        "introduction": each * (times.at[0] - begun),
        "end": each * (ended - times.at[-1]),
        "megabytes": peak,
    }


def apart(*args: Any) -> dict[str, float]:
    """Return `cost` of these arguments, from a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found: dict[str, float] = pool.apply(cost, args)
        return found


def main() -> None:
    """Print the costs by method and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", default="100,1000,5000,10000")
    parser.add_argument("--methods", default="felo,fedavg,fedproto,fedhe,local")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    counts = [int(count) for count in chosen.counts.split(",")]
    for method in chosen.methods.split(","):
        found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
        for _, count in product(range(chosen.repeats), counts):
            found[count].append(apart(count, method, chosen.rounds))
        first = median(each["round"] for each in found[counts[0]])
        for count in counts:
            print(line_of(method, count, found[count], first), flush=True)


def line_of(method: str, count: int, found: list[dict[str, float]], first: float) -> str:
    """Return what a count costs, in one line."""
    times = sorted(each["round"] for each in found)
    ratio = median(times) / first
    verdict = "holds" if ratio <= BOUND else "DOES NOT HOLD"
    middle = {name: median(each[name] for each in found) for name in found[0]}
    return (
        f"{method}, {count} clients: {median(times):.2f} ms ({times[0]:.2f} to {times[-1]:.2f}) a "
        f"client and round, {ratio:.2f} of the first (bound {BOUND} {verdict}); introductions "
        f"{middle['introduction']:.2f} ms, end {middle['end']:.2f} ms each; "
        f"{middle['megabytes']:.0f} MB"
    )


if __name__ == "__main__":
    main()
