"""Faults in a real deployment: processes that are killed, hang, or return."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from federation import records, run, small, without_times
from interruption import is_worker, messages_of, until

from fedhet.base.errors import FedhetError
from fedhet.config.resolve import Config, resolve
from fedhet.deployment import certs
from fedhet.deployment.control import submit
from fedhet.deployment.local import LocalDeployment, members_of, site_name
from fedhet.runs.progress import read_status
from fedhet.runs.storage import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
# Flower gives a client's process up after a minute without a sign of life; a round must wait for
# the others no longer than its own timeout.
ROUNDS, PATIENCE = 3, 240.0


@pytest.fixture
def deployment(tmp_path):
    with LocalDeployment(tmp_path / "deployment", nodes=3) as running:
        yield running


class Run:
    """A run on a deployment, which a thread follows while the test causes faults."""

    def __init__(self, deployment: LocalDeployment, directory: Path, **changes: object) -> None:
        self.deployment, self.directory = deployment, directory
        self.said: list[str] = []
        self.fault: list[FedhetError] = []
        settings = {
            "clients": 3,
            "models": ["mlp", "cnn2", "cnn3"],
            "rounds": ROUNDS,
            "local-epochs": 250,
            "min-clients": 2,
            "join-timeout": 300.0,
            "round-timeout": PATIENCE,
            **changes,
        }
        self.config = placed(small("felo", **settings), directory)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            submit(self.config, self.deployment.connection, self.said.append)
        except FedhetError as error:
            self.fault.append(error)

    def end(self, seconds: float = 1200.0) -> list[dict]:
        """Wait for the end, and return the records."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), self.said
        assert not self.fault, (self.fault, self.said)
        return records(self.directory)

    def rounds_done(self) -> int:
        path = self.directory / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_round(self, number: int) -> None:
        """Wait until round `number` has begun.

        Clients evaluate the round before in round `number`, so it may have no record yet.
        """
        until(lambda: (self.directory / "status.json").exists())
        until(lambda: read_status(self.directory).round >= number)


def placed(config: Config, directory: Path, resume: bool = False) -> Config:
    return resolve({**config.flat(), "out": str(directory), "resume": resume})


def training(deployment: LocalDeployment, index: int) -> psutil.Process:
    """Wait until a site's client process trains, and return it.

    A client records each training in its privacy ledger before the first epoch.
    """
    ledger = deployment.root / "state" / site_name(index) / "_privacy" / f"client-{index}.jsonl"

    def at_work():
        node = deployment.processes[site_name(index)]  # anew: it may be restarted meanwhile
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            for process in messages_of(node):
                if ledger.stat().st_mtime > process.create_time():
                    return process
        return None

    return until(at_work)


def states(deployment: LocalDeployment, index: int) -> list[str]:
    folder = deployment.root / "state" / site_name(index)
    return sorted(path.name for path in folder.rglob("round-*.safetensors"))


def kill_node(deployment: LocalDeployment, index: int) -> None:
    """Kill -9 a node and its child processes, like a power cut."""
    kill_tree(deployment.processes.pop(site_name(index)))


def kill_tree(node: psutil.Popen) -> None:
    """Kill -9 a node and its child processes; it ends like a container whose first process ends."""
    for process in [*members_of(node.pid), node]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def bring_back(deployment: LocalDeployment, index: int) -> None:
    """Start a node repeatedly until the server accepts it, after its old session has expired."""
    for _ in range(60):
        if taken_in(deployment, index):
            return
    raise AssertionError("it does not come back")


def taken_in(deployment: LocalDeployment, index: int, **options: object) -> bool:
    """Start a node, and return whether the server accepted it."""
    name = site_name(index)
    said = len(deployment.log_of(name))
    deployment.start_node(index, **options)
    node = deployment.processes[name]
    until(lambda: ended(node) or "SuperNode ID" in deployment.log_of(name)[said:])
    if ended(node):
        del deployment.processes[name]
    return not ended(node)


def ended(node: psutil.Popen) -> bool:
    return node.poll() is not None


@contextlib.contextmanager
def restarted_at_once(deployment: LocalDeployment, index: int) -> Iterator[None]:
    """Restart a site's node whenever it ends, like Docker and systemd."""

    def keep() -> None:
        while not over.wait(3.0):
            if ended(deployment.processes[site_name(index)]):
                deployment.start_node(index)

    over = threading.Event()
    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def failed(record: dict) -> set[str]:
    return set(record["failed"])


def test_client_killed_in_training_is_named_and_rejoins(deployment, tmp_path):
    going = Run(deployment, tmp_path / "run")
    going.wait_for_round(2)
    training(deployment, 1).kill()
    recorded = going.end()
    assert len(recorded) == ROUNDS
    assert failed(recorded[1]) == {"client-1"}
    assert recorded[1]["answered"] == ["client-0", "client-2"]
    assert any("client-1 is dropped from round 2" in line for line in going.said)
    assert recorded[-1]["answered"] == ["client-0", "client-1", "client-2"]
    # It trained on from what round 1 left it; round 2 left nothing.
    assert "round-000002.safetensors" not in states(deployment, 1)
    assert "round-000001.safetensors" in states(deployment, 1)


def test_killed_worker_changes_no_result(deployment, tmp_path):
    going = Run(deployment, tmp_path / "run")
    going.wait_for_round(2)
    message = training(deployment, 1)
    killed = message.parent()
    killed.kill()
    recorded = going.end()
    assert not any(map(failed, recorded))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    whole = run(placed(going.config, tmp_path / "whole"), tmp_path / "whole")
    assert without_times(summary) == without_times(whole)
    assert "no worker" not in deployment.log_of(site_name(1))
    (worker,) = filter(is_worker, members_of(deployment.processes[site_name(1)].pid))
    assert worker.pid != killed.pid


def test_runs_in_turn_have_the_permissions_of_their_time(deployment, tmp_path):
    """A site restarts with stricter permissions, and then with the former permissions."""
    node_config = "partition-id=1 num-partitions=3 "
    refused = []
    for number, permission in enumerate(("", "max-epochs=1", "")):
        deployment.stop(site_name(1))
        options = {"node-config": node_config + permission}
        until(lambda options=options: taken_in(deployment, 1, **options))
        directory = tmp_path / f"run-{number}"
        going = Run(deployment, directory, rounds=1, local_epochs=2, min_clients=2)
        going.end()
        refused.append(any("max-epochs" in line for line in going.said))
    assert refused == [False, True, False]


def test_site_resumes_after_power_loss(deployment, tmp_path):
    going = Run(deployment, tmp_path / "run", rounds=5)
    going.wait_for_round(2)
    training(deployment, 1)
    kill_node(deployment, 1)
    before = states(deployment, 1)
    bring_back(deployment, 1)
    recorded = going.end()
    assert len(recorded) == 5
    assert "client-1" in failed(recorded[1])
    assert all({"client-0", "client-2"} <= set(record["answered"]) for record in recorded)
    assert "client-1" in recorded[-1]["answered"]
    assert before == ["round-000001.safetensors"]
    assert states(deployment, 1)[-1] == "round-000005.safetensors"
    assert not any("left out" in line and "another task" in line for line in going.said)


def test_killed_and_restarted_site_does_not_stall_a_round(deployment, tmp_path):
    """The server accepts the new session after up to 57 s.

    Flower may not notice the failure before.
    """
    crashes, rounds = 2, 7  # rounds may begin without it: it is away, or it backs off
    going = Run(deployment, tmp_path / "run", rounds=rounds, local_epochs=500, round_timeout=3600.0)
    going.wait_for_round(2)
    with restarted_at_once(deployment, 1):
        for _ in range(crashes):
            training(deployment, 1)
            number = read_status(going.directory).round
            kill_tree(deployment.processes[site_name(1)])
            going.wait_for_round(number + 1)  # a crash a round
        recorded = going.end()
    usual = recorded[0]["seconds"]["total"]
    waited = [record["seconds"]["total"] for record in recorded]
    assert len(recorded) == rounds
    assert max(waited) < 60 + 60 + 2 * usual, waited
    felt = [
        failed(r) == {"client-1"} or t > min(waited) + 30
        for r, t in zip(recorded, waited, strict=True)
    ]
    assert sum(felt) >= crashes / 2, "the crashes cost nothing?"
    assert all({"client-0", "client-2"} <= set(record["answered"]) for record in recorded)
    assert "client-1" in recorded[-1]["answered"]


def test_round_with_a_hanging_client_ends_at_the_timeout(deployment, tmp_path):
    going = Run(deployment, tmp_path / "run", round_timeout=100.0)
    going.wait_for_round(2)
    hanging = training(deployment, 2)
    hanging.suspend()
    going.wait_for_round(3)
    with contextlib.suppress(psutil.NoSuchProcess):
        hanging.resume()  # and now it answers late
    recorded = going.end()
    assert failed(recorded[1]) == {"client-2"}
    assert recorded[1]["seconds"]["total"] < 160
    assert recorded[-1]["answered"] == ["client-0", "client-1", "client-2"]


@pytest.mark.parametrize("clients_too", [False, True], ids=["the server", "server and clients"])
def test_killed_server_resumes_with_identical_metrics(deployment, tmp_path, clients_too):
    going = Run(deployment, tmp_path / "run", local_epochs=100)
    going.wait_for_round(2)
    training(deployment, 0)
    server = deployment.processes.pop("server")
    for process in [server, *members_of(server.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait()  # until then, its port accepts connections
    assert not (tmp_path / "run" / "summary.json").exists()
    if clients_too:
        for k in range(3):
            kill_node(deployment, k)
    deployment.start_server()
    if clients_too:
        for k in range(3):
            bring_back(deployment, k)
    said: list[str] = []
    submit(placed(going.config, tmp_path / "run", resume=True), deployment.connection, said.append)
    assert any("resuming after round 1 of 3" in line for line in said)
    resumed = json.loads((tmp_path / "run" / "summary.json").read_text())
    whole = run(placed(going.config, tmp_path / "whole"), tmp_path / "whole")
    assert without_times(resumed) == without_times(whole)


def test_deployment_resumes_from_a_backup_with_a_renewed_certificate(deployment, tmp_path):
    going = Run(deployment, tmp_path / "run", local_epochs=100)
    going.wait_for_round(2)
    training(deployment, 0)
    deployment.stop("server")  # before the sites: rounds without them would count
    deployment.stop()
    fault = until(lambda: going.fault, 300.0)[0]
    assert "stopped during run" in str(fault)
    assert any("does not reply; waiting for it" in line for line in going.said), going.said
    other = tmp_path / "other"
    for each in (tmp_path / "run", deployment.root):
        shutil.copytree(each, other / each.name)
        shutil.rmtree(each)
    certs.renew(other / "deployment" / "certs", [], 10)
    moved, said = LocalDeployment(other / "deployment", nodes=3), []
    try:
        moved.connection.prepare()
        moved.start_server()
        for k in range(3):
            bring_back(moved, k)
        submit(placed(going.config, other / "run", resume=True), moved.connection, said.append)
    finally:
        moved.stop()
    assert any("resuming after round 1 of 3" in line for line in said)
    resumed = json.loads((other / "run" / "summary.json").read_text())
    whole = run(placed(going.config, tmp_path / "whole"), tmp_path / "whole")
    assert without_times(resumed) == without_times(whole)


def test_full_disk_ends_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    def full(self, round, *state):
        if round == 3:
            raise OSError(28, "No space left on device")
        return keep(self, round, *state)

    keep = Checkpoints.write_checkpoint
    config = small("felo", rounds=4)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "write_checkpoint", full)
        with pytest.raises(OSError, match="No space left"):
            run(config, tmp_path / "run")
    assert len(list((tmp_path / "run" / "checkpoints").glob("round-*"))) == 2
    resumed = run(placed(config, tmp_path / "run", resume=True), tmp_path / "run")
    assert without_times(resumed) == without_times(run(config, tmp_path / "whole"))


def is_alive(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_suspended_site_continues_after_90_seconds(deployment, tmp_path):
    """All of its processes are suspended like on a sleeping machine, and then continue."""
    rounds = 40  # so that the run lasts until the site's session has expired
    going = Run(deployment, tmp_path / "run", rounds=rounds)
    going.wait_for_round(2)
    training(deployment, 1)
    node = deployment.processes[site_name(1)]
    asleep = [node, *members_of(node.pid)]
    for process in asleep:
        process.suspend()
    time.sleep(90)
    for process in asleep:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    recorded = going.end()
    assert len(recorded) == rounds
    assert all({"client-0", "client-2"} <= set(record["answered"]) for record in recorded)
    assert all(failed(record) <= {"client-1"} for record in recorded)
    assert "client-1" in recorded[-1]["answered"]


def test_suspended_site_replies_late(deployment, tmp_path):
    """Rounds close with two of three replies. A short suspension costs no round.

    A node sends a heartbeat every 21 to 27 s, and Flower gives it up 60 s after its last heartbeat.
    """
    going = Run(deployment, tmp_path / "run", rounds=14, min_replies=2.0, local_epochs=60)
    for _ in range(2):
        process = training(deployment, 2)
        node = deployment.processes[site_name(2)]
        asleep = [node, *members_of(node.pid)]
        for each in asleep:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
        time.sleep(25)
        for each in asleep:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()
        until(lambda process=process: not is_alive(process) or going.rounds_done() == 14)
    recorded = going.end()
    assert len(recorded) == 14
    assert not any(map(failed, recorded))
    assert any("client-2" in record.get("late", []) for record in recorded)
    assert any("client-2" in record.get("ages", {}) for record in recorded)
    assert all(len(record["answered"]) >= 2 for record in recorded)
    said = " ".join(going.said)
    assert "closed without client-2 (late: still training)" in said
    assert "client client-2's reply for round" in said


def test_sites_reject_a_million_epochs(deployment, tmp_path):
    said: list[str] = []
    config = small("felo", clients=3, local_epochs=10**6, join_timeout=120.0)
    config = placed(config, tmp_path / "r")
    with pytest.raises(FedhetError):
        submit(config, deployment.connection, said.append)
    assert "exceeds this site's limit (node-config 'max-epochs' = 1000)" in " ".join(said)
    at_work = [
        process
        for name in map(site_name, range(3))
        for process in messages_of(deployment.processes[name])
    ]
    until(lambda: not any(is_alive(process) for process in at_work))
    shutil.rmtree(tmp_path / "r", ignore_errors=True)
    submit(placed(small("felo", clients=3), tmp_path / "next"), deployment.connection, said.append)
    assert len(records(tmp_path / "next")) == 2
