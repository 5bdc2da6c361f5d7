"""Small federations for tests: real clients, strategies, and Flower, without a network."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.client_runtime import app
from fedhet.client_runtime.node import NodeSettings, open_client, read_node
from fedhet.clients.base import HetClient
from fedhet.config.resolve import Config, resolve
from fedhet.config.secure import write_simulated
from fedhet.config.sources import full_name
from fedhet.data.store import RunData
from fedhet.engines import simulate as simulation
from fedhet.kinds import IMAGE
from fedhet.methods.registry import find_method
from fedhet.runs.log import RunLog
from fedhet.server.calls import NOTHING, CallOutcome, NamedProxy, RoundResults
from fedhet.server.federation import MethodStrategy
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import build, kebab
from fedhet.strategies.base import HetStrategy
from fedhet.wire.identity import ClientInfo, client_name

SMALL = {
    "clients": 4,
    "rounds": 2,
    "data.max-samples": 400,
    "data.max-test-samples": 100,
    "data.min-samples": 20,
    "models.pool": ["mlp", "cnn2"],
    "training.local-epochs": 1,
    "engine.backend": "inline",
    "engine.precision": "float32",  # as the references compute; `auto` is the machine's choice
}


def client_info(
    kind: str, shape: tuple[int, ...], classes: int = 10, order: str = ""
) -> ClientInfo:
    """Return the description of a client with samples of a kind and shape."""
    return ClientInfo("client", "mlp", 1, classes, kind, shape, order)


def permitted(node: dict[str, object], run: dict[str, object]) -> dict[str, object]:
    """Return the settings that a site reads from Flower's run config, if it permits them."""
    return app.permitted(build(NodeSettings, node, prefix="node-config "), run)


def each(names: Iterable[str]) -> list[object]:
    """Return methods as test parameters; a method that shares a round is marked slow.

    Its server keeps state and its clients train like the method that it extends. The ordinary tests
    of that method therefore cover it.
    """

    def shares(name: str) -> bool:
        strategy, client = find_method(name).strategy, find_method(name).client
        extends = HetStrategy not in strategy.__bases__ and HetClient not in client.__bases__
        return extends and "state_dict" not in vars(strategy) and "train" not in vars(client)

    return [pytest.param(n, marks=[pytest.mark.slow] if shares(n) else []) for n in names]


LONG = ("epochs", "steps", "passes", "warm-up")
"""The ends of the names of settings that say for how long a method trains by itself."""


def fast(method: str, *, models: bool = True) -> dict[str, object]:
    """Return settings with few epochs and small models, so that a method trains quickly.

    They follow from the declaration of the method. Without `models`, the method uses its default
    models.
    """
    found, chosen = find_method(method), {}
    own = {f"{found.table}.{kebab(name)}" for name in found.spec.model_settings if models}
    for name, info in found.settings().items():
        if name in own:
            chosen[name] = "mlp3"
        elif name.endswith(LONG) and isinstance(info.default, int):
            chosen[name] = min(info.default, 2)
    return chosen


def settings(method: str, **changes: object) -> dict[str, object]:
    """Return settings by their full names; `local_epochs=1` is `training.local-epochs`."""
    known = RunSettings.fields() | find_method(method).settings()
    aliases = {"models": "models.pool", "attack": "attack.kind", "alpha": "data.alpha"}
    named = {aliases.get(name, name.replace("_", "-")): value for name, value in changes.items()}
    return {"method": method} | {full_name(name, known): value for name, value in named.items()}


def small(method: str = "felo", **changes: object) -> Config:
    """Return the settings of a federation that trains in a second."""
    if len(pool := find_method(method).spec.pool(IMAGE)) == 1:  # all clients have one
        changes = {"models": pool, **changes}
    return resolve({**SMALL, **settings(method, **changes)})


def training(run: RunSettings, **changes: object) -> RunSettings:
    """Return the settings of a run with changed training settings."""
    table = {name: getattr(run.training, name) for name in changes}  # each is there
    assert table
    return run.model_copy(update={"training": run.training.model_copy(update=changes)})


@contextlib.contextmanager
def without_figures() -> Iterator[None]:
    """Let runs end without figures and reports, which take longer than such a small run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_figures", "write_report"):
            patch.setattr(f"fedhet.report.{name}", lambda run: None)
        yield


def run(config: Config, directory: Path, watchers=(), *, report: bool = False) -> dict:
    """Run a simulation; return its summary."""
    with contextlib.nullcontext() if report else without_figures():
        simulation.simulate(config, directory, watchers)
    return json.loads((directory / "summary.json").read_text())


def records(directory: Path) -> list[dict]:
    """Return the rounds of metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_times(summary: dict) -> dict:
    """Return the part of a summary that must not depend on the machine, its speed, and its backend.

    The server of a deployment does not know the number of test samples at its sites.
    """
    varying = {"seconds", "peak_memory_mb", "test_samples"}
    kept = {k: v for k, v in summary.items() if k not in varying}
    rounds = [{k: v for k, v in r.items() if k != "seconds"} for r in kept["history"]]
    return {**kept, "history": rounds}


class Server:
    """A server and its clients, which a test drives round by round.

    `flower` is the server's side of the run, and `strategy` the method that it calls.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        clients: int | None = None,
        proxies: Iterable[ClientProxy] | None = None,
    ) -> None:
        """Register `proxies`, or by default simulated clients with partitions of the dataset."""
        self.log = RunLog(config, directory, workers=1)
        self.flower = MethodStrategy(config, self.log)
        self.strategy: HetStrategy = self.flower.method
        self.manager = SimpleClientManager()
        for proxy in self._simulated(config, directory, clients) if proxies is None else proxies:
            self.manager.register(proxy)
        self.flower.begin(self.manager)

    def _simulated(
        self, config: Config, directory: Path, clients: int | None
    ) -> Iterator[ClientProxy]:
        if config.run.privacy.secure_aggregation:
            write_simulated(directory / "state", *simulation.peers_of(self.strategy.data))
        for k in range(config.run.clients if clients is None else clients):
            node_config = {"partition-id": k, "num-partitions": config.run.clients}
            node = read_node(node_config, config.run, str(directory / "state"), self.strategy.data)
            yield simulation.InlineProxy(config, node)

    def instruct(self, round: int) -> list[tuple[NamedProxy, FitIns]]:
        """Return the instructions of a round."""
        return self.flower.configure_fit(round, self.manager)

    def close(self, round: int) -> None:
        """End a round, and let the sampled clients evaluate."""
        if instructions := self.flower.configure_evaluate(round):
            outcomes = [proxy.send(ins, None, round) for proxy, ins in instructions]
            self.flower.aggregate_evaluate(outcomes)

    def play(self, round: int):
        """Run a round without its evaluation; return the instructions and the replies."""
        instructions = self.instruct(round)
        replies = self.train(instructions)
        self.aggregate(round, replies)
        return instructions, replies

    def train(self, instructions) -> list[tuple[NamedProxy, FitRes]]:
        """Let every client train, and return the replies in Flower's format."""
        return [(proxy, proxy.request(ins, None, 0)) for proxy, ins in instructions]

    def aggregate(self, round: int, replies: Iterable[tuple[NamedProxy, FitRes]]) -> None:
        """Let replies arrive at the server, and aggregate them."""
        outcomes = [arrived(proxy, result, round) for proxy, result in replies]
        self.flower.aggregate_fit(round, RoundResults(outcomes))


def weighed_by_samples(data: RunData, *, peers_of=simulation.peers_of):
    """Give each simulated client its number of samples as its public weight, as in a plain run."""
    peers, keys = peers_of(data)
    clients = len(peers.peers)
    weights = {client_name(k, clients): len(data.split_rows(k)[0]) for k in range(clients)}
    sites = tuple(replace(peer, weight=weights[peer.name]) for peer in peers.peers)
    return replace(peers, peers=sites), keys


def arrived(proxy: NamedProxy, result: FitRes | EvaluateRes, round: int) -> CallOutcome:
    """Return the outcome of a call for which the client returns `result`."""
    ins = FitIns(NOTHING, {}) if isinstance(result, FitRes) else EvaluateIns(NOTHING, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxy, "request", lambda *_: result)
        return proxy.send(ins, None, round)


def client_of(proxy) -> HetClient:
    """Return the client behind a strategy's proxy in this process."""
    return open_client(proxy._proxy._config, proxy._proxy._node)
