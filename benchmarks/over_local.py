"""CPU time of a method's round (clients and server), relative to a round of `local`.

    python -m benchmarks.over_local [--methods fml,fedmrl,fedkd,fedgen] [--pairs 5]

Three clients with different architectures train on digits for two epochs. Rounds of the method and
of `local` alternate in one process. The first round is excluded, so that clients receive all
knowledge that a method's server sends. There is no evaluation.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flwr.server.client_manager import SimpleClientManager

from benchmarks.timing import ratios, show
from fedhet.client_runtime.node import Node, read_node
from fedhet.config.resolve import Config, resolve
from fedhet.engines.simulate import InlineProxy
from fedhet.runs.log import RunLog
from fedhet.server.calls import RoundResults
from fedhet.server.federation import MethodStrategy

SETTINGS = {
    "clients": 3,
    "rounds": 1000,
    "models.pool": ["cnn2", "cnn3", "mlp"],
    "training.local-epochs": 2,
    "engine.backend": "inline",
}
METHODS = "fml,lg-fedavg,fedmrl,fedkd,fedgen"


def federation(config: Config, folder: Path) -> tuple[Callable[[], None], list[Node]]:
    """Return a function that executes the next round without evaluation, and the client nodes."""
    strategy = MethodStrategy(config, RunLog(config, folder, workers=1))
    manager, nodes = SimpleClientManager(), []
    for k in range(config.run.clients):
        place = {"partition-id": k, "num-partitions": config.run.clients}
        nodes.append(read_node(place, config.run, str(folder / "state"), strategy.method.data))
        manager.register(InlineProxy(config, nodes[-1]))
    strategy.begin(manager)
    numbers = iter(range(1, 1000))

    def play() -> None:
        number = next(numbers)
        asked = strategy.configure_fit(number, manager)
        outcomes = [proxy.send(ins, None, number) for proxy, ins in asked]
        strategy.aggregate_fit(number, RoundResults(outcomes))

    return play, nodes


def rounds_of(method: str, folder: Path) -> Callable[[], None]:
    """Return a function that executes the next round of a method's federation."""
    play, _ = federation(resolve({**SETTINGS, "method": method}), folder)
    return play


def main() -> None:
    """Print a line for each method."""
    words = argparse.ArgumentParser(description="a round over one of local")
    words.add_argument("--methods", default=METHODS)
    words.add_argument("--pairs", type=int, default=5)
    chosen = words.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        alone = rounds_of("local", Path(folder, "local"))
        for method in chosen.methods.split(","):
            play = rounds_of(method, Path(folder, method))
            play()
            found = ratios(play, alone, chosen.pairs, time.process_time)
            show(f"{method} / local, a round", found)


if __name__ == "__main__":
    main()
