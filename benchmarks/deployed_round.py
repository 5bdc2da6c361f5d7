"""Time of a deployed round, and CPU time of a message, with and without a warm worker.

    python -m benchmarks.deployed_round [--sites 3] [--rounds 5] [--pairs 1]

A server and sites run on this machine, with gRPC and TLS, and train Felo on a few digits. The
contenders alternate, each in a separate deployment:

    cold      Flower's SuperNode, which starts a process for each message, and polls every 3 s
    worker    the same with a warm worker
    node      `fedhet node`, i.e. also with polls after a tenth of the time waited

The first round is excluded, because it starts the workers. The CPU time of a message excludes the
time that the clients report for training and evaluation, and the imports of a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil

from benchmarks.timing import records_of
from fedhet.config.resolve import Config, resolve
from fedhet.deployment.control import submit
from fedhet.deployment.local import LocalDeployment, members_of, site_name
from fedhet.deployment.worker import WORKER_VARIABLE, with_worker

CONTENDERS = ("cold", "worker", "node")
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


class Deployment(LocalDeployment):
    """Deployment whose sites may use the SuperNode of Flower instead of `fedhet node`."""

    contender = "node"

    def _start(self, name, executable, *words, environment=None):  # type: ignore[no-untyped-def]
        if words and words[0] == "node" and self.contender != "node":
            executable, words = "flower-supernode", words[1:]
            environment = {**self.connection.environment(), **environment}
            environment = with_worker(environment, self.root / "state" / name)
        super()._start(name, executable, *words, environment=environment)


def main() -> None:
    """Run the deployments, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=1)
    given = parser.parse_args()
    measured: dict[str, list[tuple[list[float], float, float]]] = {name: [] for name in CONTENDERS}
    for pair in range(given.pairs):
        for contender in CONTENDERS if pair % 2 == 0 else CONTENDERS[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                measured[contender].append(
                    measure(contender, Path(folder), given.sites, given.rounds)
                )
    print(f"{given.sites} sites, {given.rounds} rounds, {given.pairs} deployments of each kind")
    print(f"{'':8} {'round':>8} {'(min, max)':>16} {'ratio':>6} {'CPU/message':>12} {'start':>8}")
    base = median(s for seconds, *_ in measured["cold"] for s in seconds)
    for contender, results in measured.items():
        rounds = sorted(s for seconds, *_ in results for s in seconds)
        middle, span = median(rounds), f"({rounds[0]:.1f}, {rounds[-1]:.1f})"
        message = median(cpu for _, cpu, _ in results)
        start = median(start for *_, start in results)
        ratio = f"{middle / base:6.2f} {message:10.2f} s {start:6.1f} s"
        print(f"{contender:8} {middle:6.1f} s {span:>16} {ratio}")


def measure(
    contender: str, folder: Path, sites: int, rounds: int
) -> tuple[list[float], float, float]:
    """Run a deployment.

    Returns:
        The seconds of each round but the first, the CPU seconds of a message, and the CPU seconds
        of a site's worker itself.
    """
    config = settings(folder, sites, rounds)
    deployment = Deployment(folder / "deployment", nodes=sites)
    deployment.contender = contender
    with environment_of(contender), deployment:
        submit(config, deployment.connection, lambda line: None)
        cpu, own = zip(*(cpu_seconds(deployment, k) for k in range(sites)), strict=True)
    records = records_of(folder / "run")
    seconds = [record["seconds"] for record in records]
    trained = sum(each["train"] + each["evaluate"] for each in seconds)
    messages = sites * (rounds + 2)  # and the client's properties, and the last evaluation
    return (
        [each["total"] for each in seconds[1:]],
        (sum(cpu) - trained) / messages,
        sum(own) / sites,
    )


def settings(folder: Path, sites: int, rounds: int) -> Config:
    """Return the settings of a small run."""
    return resolve(
        {
            "method": "felo",
            "clients": sites,
            "rounds": rounds,
            "data.max-samples": 100 * sites,
            "data.partition": "iid",
            "models.pool": ["mlp"],
            "training.local-epochs": 1,
            "out": str(folder / "run"),
        }
    )


@contextlib.contextmanager
def environment_of(contender: str) -> Iterator[None]:
    """Set the environment of a contender's sites."""
    os.environ |= {"OMP_NUM_THREADS": "1", WORKER_VARIABLE: "0" if contender == "cold" else "1"}
    os.environ[POLL] = "1.0" if contender == "cold" else "0.1"
    yield
    for name in (WORKER_VARIABLE, POLL):
        del os.environ[name]


def cpu_seconds(deployment: LocalDeployment, index: int) -> tuple[float, float]:
    """Return the CPU seconds of a site's messages, and of its worker without the messages."""
    messages = own = 0.0
    for process in members_of(deployment.processes[site_name(index)].pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            if process.status() == psutil.STATUS_ZOMBIE:
                messages += times.user + times.system
                continue
            command = " ".join(process.cmdline())
            is_worker = "fedhet.deployment.worker" in command
            if is_worker or "flower-superexec" in command:
                # The messages' processes that have ended, as seen by the process that started them.
                messages += times.children_user + times.children_system
                own += times.user + times.system if is_worker else 0.0
    return messages, own


if __name__ == "__main__":
    main()
