"""Secure aggregation in a deployment: sites that are killed in each phase of a round.

The oracle of a sum is the average of the models that the sites have saved, with equal weights.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from federation import records, small
from interruption import messages_of, until
from safetensors.numpy import load_file
from test_faults import bring_back, kill_node, placed, training

from fedhet.base.errors import FedhetError
from fedhet.config.secure import simulated_files, write_simulated
from fedhet.data.store import RunData
from fedhet.deployment.control import submit
from fedhet.deployment.local import LocalDeployment, site_name
from fedhet.engines.simulate import peers_of
from fedhet.wire.identity import client_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
ROUNDS, LONG = 40, 200
"""More rounds than needed, and local epochs that hold a round open."""


class Sites(LocalDeployment):
    """Sites with keys."""

    def __init__(self, root: Path, nodes: int, config) -> None:
        super().__init__(root, nodes, secure=True)
        write_simulated(root, *peers_of(RunData.for_run(config.run)))

    def start_node(self, index: int, **options: object) -> None:
        peers, key = simulated_files(self.root, client_name(index, self.nodes))
        config = (
            f'partition-id={index} num-partitions={self.nodes} peers="{peers}" peers-key="{key}"'
        )
        super().start_node(index, **{"node-config": config, **options})


class Going:
    """A masked run on a deployment, followed in a thread while the test kills sites."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.directory, self.nodes = root / "run", nodes
        settings = {
            "clients": nodes,
            "models": ["cnn2"],
            "rounds": ROUNDS,
            "evaluate-every": ROUNDS,
            "local_epochs": LONG,
            "batch_size": 8,
            "privacy.secure-aggregation": True,
            "join-timeout": 200.0,
            "round-timeout": 240.0,
        }
        config = placed(small("fedavg", **settings), self.directory)
        self.sites = Sites(root / "deployment", nodes, config)
        self.said: list[str] = []

        def follow() -> None:
            try:
                submit(config, self.sites.connection, self.said.append)
            except FedhetError as error:
                self.said.append(f"ended: {error}")

        self._thread = threading.Thread(target=follow, daemon=True)

    def __enter__(self) -> Going:
        self.sites.__enter__()
        self._thread.start()
        self.wait_for_sum()
        return self

    def __exit__(self, *_: object) -> None:
        self.sites.__exit__()
        sys.stdout.write("\n".join(self.said))

    @property
    def rounds(self) -> list[dict]:
        """Records of the finished rounds."""
        return records(self.directory) if (self.directory / "metrics.jsonl").exists() else []

    def wait_for_sum(self, of: int | None = None) -> int:
        """Wait until a further round has a sum of all sites; return the round that has begun."""
        done = len(self.rounds)

        def is_summed() -> bool:
            return any(len(each["answered"]) == (of or self.nodes) for each in self.rounds[done:])

        until(is_summed, 900)
        return len(self.rounds) + 1

    def finish(self, round: int) -> list[str]:
        """Wait until a round has ended; return the clients in its sum."""
        until(lambda: len(self.rounds) >= round, 600)
        return self.rounds[round - 1]["answered"]

    def names(self, *without: int) -> list[str]:
        return [client_name(k, self.nodes) for k in range(self.nodes) if k not in without]

    def lines(self, round: int) -> list[str]:
        """Return the lines of the log about the sums of a round."""
        return [line for line in self.said if f"round {round}" in line]

    def has_replied(self, index: int) -> bool:
        """Return whether a site's reply of the current round is on the server's disk."""
        return (self.directory / "inbox" / client_name(index, self.nodes)).exists()

    def wait_for_first_reply(self, index: int) -> None:
        """Wait until a site has replied, while the processes of the other sites are suspended."""
        suspended: dict[int, psutil.Process] = {}

        def has_replied() -> bool:
            for other in set(range(self.nodes)) - {index}:
                node = self.sites.processes[site_name(other)]
                for each in messages_of(node):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if each.pid not in suspended:
                            each.suspend()
                            suspended[each.pid] = each
            return self.has_replied(index)

        try:
            until(has_replied)
        finally:
            for each in suspended.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.resume()

    def wait_for_training(self, round: int, index: int) -> None:
        """Wait until a site trains in a round."""
        until(lambda: self.group(round) is not None)
        training(self.sites, index)

    def group(self, round: int) -> list | None:
        """Return the server's request of a round, once it is written."""
        try:
            saved = json.loads((self.directory / "secure-aggregation.json").read_text())
            return saved[str(round)][1][0]
        except (OSError, LookupError, ValueError):
            return None

    def survivors(self, round: int) -> list[str]:
        """Return the sites whose shares the server requests, once it has written them."""
        *_, survivors, _ = self.group(round) or [[], False]
        return survivors

    def check_sum(self, round: int, *without: int) -> None:
        """Compare the server's weights after a round with the mean of the sites' own models."""
        path = self.directory / "checkpoints" / f"round-{round:06d}.safetensors"
        server = until(lambda: load_file(path) if path.exists() else None, 60)
        mean: dict[str, np.ndarray] = {}
        kept = [k for k in range(self.nodes) if k not in without]
        for k in kept:
            states = self.sites.root / "state" / site_name(k)
            (state,) = states.glob(f"*/{client_name(k, self.nodes)}/round-{round:06d}.safetensors")
            for name, value in load_file(state).items():
                mean[name] = mean.get(name, 0.0) + value.astype(np.float64) / len(kept)
        compared = 0
        for name, value in server.items():
            if name.endswith("num_batches_tracked"):  # Sums contain the counters of the server.
                assert value == 0
                continue
            (found,) = (each for each in mean if each.endswith(name.partition("/")[2]))
            bound = 2e-6 if value.dtype.kind == "f" else 0.5 + 1e-9  # integers are rounded
            assert np.abs(value - mean[found]).max() <= bound, name
            compared += value.size
        assert compared > 1000


@pytest.mark.parametrize("nodes", [3])
def test_three_sites_of_which_one_is_killed_in_each_phase(tmp_path, nodes):
    """Three sites tolerate no loss, unless the site is back in time."""
    with Going(tmp_path, nodes) as going:
        # Before its reply: the round has no sum, and the next round waits for it.
        round = len(going.rounds) + 1
        going.wait_for_training(round, 0)
        kill_node(going.sites, 0)
        assert going.finish(round) == []
        bring_back(going.sites, 0)
        until(lambda: any("lost" in line for line in going.lines(round)), 120)  # the log is late
        round = going.wait_for_sum()
        # After its reply: it is back before the others have replied, or soon after.
        going.wait_for_first_reply(2)
        kill_node(going.sites, 2)
        bring_back(going.sites, 2)
        assert going.finish(round) == going.names(), going.lines(round)
        going.check_sum(round)
        # During the request for its shares.
        round = going.wait_for_sum()
        until(lambda: going.survivors(round))
        kill_node(going.sites, 1)
        bring_back(going.sites, 1)
        assert going.finish(round) == going.names(), going.lines(round)
        going.check_sum(round)


@pytest.mark.parametrize("nodes", [5])
def test_five_sites_of_which_one_is_lost_in_each_phase(tmp_path, nodes):
    """Five sites tolerate one loss in any phase: the sum is correct, without waiting for it."""
    with Going(tmp_path, nodes) as going:
        round = len(going.rounds) + 1
        going.wait_for_training(round, 0)
        kill_node(going.sites, 0)
        assert going.finish(round) == going.names(0), going.lines(round)
        going.check_sum(round, 0)
        bring_back(going.sites, 0)
        round = going.wait_for_sum()
        going.wait_for_first_reply(4)
        kill_node(going.sites, 4)
        assert going.finish(round) == going.names(), going.lines(round)
        going.check_sum(round)
        bring_back(going.sites, 4)
        round = going.wait_for_sum()
        until(lambda: going.survivors(round))
        kill_node(going.sites, 1)
        assert going.finish(round) == going.names(), going.lines(round)
        going.check_sum(round)
