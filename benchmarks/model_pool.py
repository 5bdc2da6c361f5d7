"""Memory of UM-pFSSL's server with 20 and 100 clients, and the traffic of a run.

    python -m benchmarks.model_pool [--model resnet9] [--rounds 3]

The clients are stubs that do not train. They maintain their lists of helpers with Algorithms 2 and
3, using synthetic relations, and reply with models of the right size. Bound: the server's peak
memory with 100 clients is at most 1.5 times the peak with 20 clients, although the pool is five
times as large. The benchmark then compares the traffic with Eqs. 27 and 28 in the paper's setting
(100 clients, 200 rounds), using a small model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.algorithms.uncertainty import (
    CANDIDATE,
    FILL,
    REFRESH,
    Helper,
    filled,
    refreshed,
    replaced,
    to_arrays,
)
from fedhet.base.arrays import Shapes, grouped
from fedhet.base.seeding import numpy_rng
from fedhet.config.resolve import Config, resolve
from fedhet.models import shapes
from fedhet.runs.log import RunLog
from fedhet.runs.measures import peak_memory_mb
from fedhet.server.calls import RoundResults
from fedhet.server.federation import MethodStrategy
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Envelope, Knowledge, decode, encode

OK = Status(Code.OK, "")
SHAPE, CLASSES = (3, 32, 32), 10


class Stub(ClientProxy):
    """UM-pFSSL client with a list of helpers, but without data."""

    def __init__(self, info: ClientInfo, settings: Any) -> None:
        super().__init__(info.name)
        self.info = info
        self.settings = settings
        self.helpers: list[Helper] = []
        self.received: list[tuple[int, int]] = []
        """(number, version) of every received model."""
        self._version = 0

    def get_properties(self, ins: GetPropertiesIns, timeout: Any, group_id: Any) -> Any:
        """Return the client's properties."""
        return GetPropertiesRes(OK, {**self.info.properties()})

    def fit(self, ins: FitIns, timeout: Any, group_id: Any) -> FitRes:
        """Receive models, update the list of helpers, and reply."""
        asked, message = decode(parameters_to_ndarrays(ins.parameters), "server")
        own, train = int(message.scalars["own"]), bool(message.scalars["train"])
        changes = train or self._version == 0
        if changes:
            self._version = asked.round
        answer = self._search(own, train, message, asked.round if changes else 0)
        envelope = Envelope(asked.run, asked.method, asked.round, self.info.name)
        measures = {"seconds.train": 0.0, "seconds.evaluate": 0.0, "memory": 0.0}
        return FitRes(OK, ndarrays_to_parameters(encode(envelope, answer)), 1, {**measures})

    def _search(self, own: int, train: bool, message: Knowledge, changed: int) -> Knowledge:
        sent: dict[int, list[Helper]] = {CANDIDATE: [], FILL: [], REFRESH: []}
        if "numbers" in message.tensors:
            columns = (message.tensors[key].tolist() for key in ("numbers", "versions", "roles"))
            for number, version, role in zip(*columns, strict=True):
                self.received.append((number, version))
                sent[role].append(self._helper(number, version))
        me = self._helper(own, self._version)
        helpers = [me, *(h for h in self.helpers if h.number != own)]
        helpers = replaced(helpers, sent[CANDIDATE], own, self.settings.replace)
        helpers = refreshed(helpers, {helper.number: helper for helper in sent[REFRESH]})
        self.helpers = filled(helpers, sent[FILL], self.settings.helpers) if train else helpers
        tensors = to_arrays(self.helpers)
        if changed:
            tensors |= grouped("weights", made_up(self.info.model, changed))
        return Knowledge(tensors, {"replaced": 0, "relation": 0.5})

    def _helper(self, number: int, version: int) -> Helper:
        relation = numpy_rng(0, "relation", self.info.name, number, version).random()
        return Helper(number, version, float(relation))

    def evaluate(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        """Raise NotImplementedError, because a stub has nothing to evaluate."""
        raise NotImplementedError

    get_parameters = reconnect = evaluate


def made_up(model: str, seed: int) -> dict[str, Any]:
    """Return random weights with a model's shapes. All are nonnegative, as variances must be."""
    rng = np.random.default_rng(seed)
    return {
        name: np.abs(rng.normal(size=shape)).astype(dtype)
        for name, (shape, dtype) in _shapes(model).items()
    }


def _shapes(model: str) -> Shapes:
    return shapes(model, SHAPE, CLASSES)


class Pool:
    """Server side of a run, with stubs as clients."""

    def __init__(self, config: Config, directory: Path) -> None:
        self.config = config
        self.log = RunLog(config, directory, workers=2)
        run, (model,) = config.run, config.run.models.pool
        self.flower = MethodStrategy(config, self.log)
        self.strategy = self.flower.method
        self.manager = SimpleClientManager()
        self.stubs = [
            Stub(
                ClientInfo(f"client-{k:03d}", model, 10, CLASSES, "image", SHAPE),
                config.method_settings,
            )
            for k in range(run.clients)
        ]
        for stub in self.stubs:
            self.manager.register(stub)
        self.flower.begin(self.manager)

    def play(self, round: int) -> dict[str, int]:
        """Execute one round; return its traffic and the number of called clients."""
        asked = self.flower.configure_fit(round, self.manager)
        with ThreadPoolExecutor(self.config.run.clients) as pool:
            outcomes = pool.map(lambda call: call[0].send(call[1], None, round), asked)
            self.flower.aggregate_fit(round, RoundResults([*outcomes]))
        record = self.flower.state.record
        assert not record.failed, record.failed
        return {"up": record.bytes_up, "down": record.bytes_down, "asked": len(asked)}


def settings(model: str, clients: int, rounds: int, **own: int) -> Config:
    """Return the paper's settings with another model and other numbers of clients and rounds."""
    method = {f"um-pfssl.{name}": value for name, value in own.items()}
    return resolve(
        {
            "method": "um-pfssl",
            "clients": clients,
            "models.pool": model,
            "rounds": rounds,
            "fraction": 0.1,
            "evaluate-every": rounds,
            **method,
        }
    )


def greedy_cost(clients: int, fraction: float, rounds: int) -> float:
    """Return the traffic in models if sampled clients download all models each round (Eq. 27)."""
    return fraction * clients**2 * rounds


def bounded_cost(
    clients: int,
    fraction: float,
    rounds: int,
    *,
    helpers: int,
    replace: int,
    search_rounds: int,
    refresh: int,
) -> float:
    """Return the maximum traffic of the helper protocol in a run, in models (Eq. 28)."""
    refreshes = clients * helpers * rounds / refresh
    return refreshes + search_rounds * replace * clients + fraction * clients * rounds


def measure_memory(model: str, clients: int, rounds: int) -> None:
    """Print the peak memory of this process before and after the rounds in MB, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(settings(model, clients, rounds, refresh=4), Path(folder) / "run")
        size = sum(value.nbytes for value in made_up(model, 0).values())
        before = peak_memory_mb()
        for number in range(1, rounds + 1):
            pool.play(number)
        found = {"before": before, "peak": peak_memory_mb(), "pool": clients * size / 1e6}
    print(json.dumps(found))


def traffic(model: str, clients: int, rounds: int) -> tuple[float, float, float]:
    """Return the traffic of a run of Algorithm 1 and the bounds of Eqs. 28 and 27, in models."""
    config = settings(model, clients, rounds + 1)  # the first round is the warm-up
    own: Any = config.method_settings
    fraction = config.run.fraction
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(config, Path(folder) / "run")
        played = [pool.play(number) for number in range(1, rounds + 2)]
    for stub in pool.stubs:
        assert len(set(stub.received)) == len(stub.received), "a version came twice"
        assert len(stub.helpers) <= own.helpers
    size = sum(value.nbytes for value in made_up(model, 0).values())
    sent = sum(part["up"] + part["down"] for part in played) / size
    bound = bounded_cost(
        clients,
        fraction,
        rounds,
        helpers=own.helpers,
        replace=own.replace,
        search_rounds=own.search_rounds,
        refresh=own.refresh_rounds(fraction),
    )
    return sent, bound, greedy_cost(clients, fraction, rounds)


def main() -> None:
    """Print the memory with 20 and 100 clients, and the traffic in the paper's setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--traffic-rounds", type=int, default=200)
    parser.add_argument("--memory-of", type=int, default=0, help="clients; measure these alone")
    chosen = parser.parse_args()
    if chosen.memory_of:
        measure_memory(chosen.model, chosen.memory_of, chosen.rounds)
        return
    peaks = []
    for clients in (20, 100):
        # Use a separate process for each number, because a peak never decreases.
        command = [sys.executable, "-m", "benchmarks.model_pool", f"--memory-of={clients}"]
        command += [f"--model={chosen.model}", f"--rounds={chosen.rounds}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        peaks.append(found["peak"])
        print(
            f"{clients:>4} clients: server's peak {found['peak']:.0f} MB, {found['before']:.0f} MB "
            f"before round 1; the pool is {found['pool']:.0f} MB on disk"
        )
    ratio = peaks[1] / peaks[0]
    print(f"peak of 100 / of 20: {ratio:.2f}  bound 1.50 {_verdict(ratio <= 1.5)}")
    sent, bound, greedy = traffic("cnn2-dropout", 100, chosen.traffic_rounds)
    print(
        f"100 clients, {chosen.traffic_rounds} rounds: {sent:.0f} models sent, Eq. 28 allows "
        f"{bound:.0f} {_verdict(sent <= bound)}; {1 - sent / greedy:.1%} below Eq. 27's "
        f"{greedy:.0f}  bound 80 % {_verdict(sent <= 0.2 * greedy)}"
    )


def _verdict(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"


if __name__ == "__main__":
    main()
