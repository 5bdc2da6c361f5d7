"""Runs on a local Ray cluster: start, end, and lost workers, with a real Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from federation import run, small, without_times
from typer.testing import CliRunner

from fedhet.base.errors import DataError, FedhetError, SettingsError
from fedhet.cli import app
from fedhet.engines import connection
from fedhet.engines.connection import KEEPING_PAGES
from fedhet.runs.log import Watcher


class Assassin(Watcher):
    """Kills one of Ray's workers at the end of the first round."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.said: list[str] = []

    def round_finished(self, record) -> None:
        if not self.killed:
            worker = self._worker()
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait(30)
            self.killed.append(worker.pid)

    def _worker(self) -> psutil.Process:
        """Wait for a worker that has started, whose process has the name of no call."""
        deadline = time.monotonic() + 30
        while True:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name() == "ray::Worker":
                        return process
            assert time.monotonic() < deadline, "no worker of Ray was found within 30 s"
            time.sleep(0.1)

    def notice(self, text: str) -> None:
        self.said.append(text)


def test_killed_worker_does_not_change_metrics(tmp_path):
    assassin = Assassin()
    on_ray = run(small(backend="ray", clients=6, rounds=3), tmp_path / "ray", [assassin])
    assert assassin.killed
    (lost,) = [line for line in assassin.said if "is lost" in line]
    assert "is called on another worker" in lost
    inline = run(small(clients=6, rounds=3), tmp_path / "inline")
    assert without_times(on_ray) == without_times(inline)
    assert not psutil.pid_exists(assassin.killed[0])


INTRUDER = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
print("carried out:", ray.get(ray.remote(num_cpus=0)(lambda: "my own function").remote()))
"""


class Bystander(Watcher):
    """Observes a run in progress like another user of the machine, or another machine."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {}

    def round_finished(self, record) -> None:
        import ray

        address = ray.get_runtime_context().gcs_address
        mine = {name: value for name, value in os.environ.items() if "RAY_AUTH" not in name}
        if address.startswith("127."):  # else Ray looks for the other address of this machine
            mine["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        intruder = subprocess.run(
            [sys.executable, "-c", INTRUDER, address],
            capture_output=True, text=True, timeout=100, check=False, env=mine,
        )  # fmt: skip
        rays = [p for p in psutil.Process().children(recursive=True) if "python" not in p.name()]
        ports = [c.laddr for p in rays for c in p.net_connections() if c.status == "LISTEN"]
        token = rays[0].environ().get("RAY_AUTH_TOKEN", "none")
        folder = Path(ray._private.worker._global_node.get_temp_dir_path())
        self.found = {
            "intruder": intruder.stdout,
            "addresses": {address.ip.removeprefix("::ffff:") for address in ports},
            "token": token,
            "on a command line": [p for p in rays if token in " ".join(p.cmdline())],
            "in a file": [p for p in folder.rglob("*") if p.is_file() and holds(p, token)],
            "folder": folder,
            "mode": folder.parent.stat().st_mode & 0o777,
            "allocator": ray.get(
                ray.remote(num_cpus=0)(lambda: os.environ.get("GLIBC_TUNABLES")).remote()
            ),
        }


def holds(path: Path, text: str) -> bool:
    return text.encode() in path.read_bytes()


def test_other_users_cannot_reach_the_cluster(tmp_path, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    bystander = Bystander()
    run(small("fedavg", backend="ray", clients=2, rounds=1), tmp_path / "run", [bystander])
    found = bystander.found
    assert found["intruder"] == ""
    assert found["addresses"] == {"127.0.0.1"}
    assert len(found["token"]) == 64
    assert (found["on a command line"], found["in a file"]) == ([], [])
    assert found["mode"] == 0o700
    assert not found["folder"].parent.exists(), "its logs end with the run"
    assert found["allocator"] == KEEPING_PAGES


def test_early_errors_stop_a_starting_ray(tmp_path):
    import ray

    with pytest.raises(DataError, match="nowhere"):
        run(small(backend="ray", dataset=f"imagefolder:{tmp_path}/nowhere"), tmp_path / "run")
    assert not ray.is_initialized()
    assert not [p for p in psutil.Process().children() if "gcs_server" in p.name()]
    with pytest.raises(SettingsError, match=r"'engine\.cpus-per-client'.*5000"):
        run(small(backend="ray", cpus_per_client=5000.0), tmp_path / "run")
    assert not ray.is_initialized()
    assert not (tmp_path / "run").exists()


def test_failed_start_of_ray_raises_one_line(tmp_path, monkeypatch):
    def fails(**_):
        raise RuntimeError("no room\nin /dev/shm")

    monkeypatch.setattr("ray.init", fails)
    with pytest.raises(FedhetError) as error:
        run(small(backend="ray"), tmp_path / "run")
    assert str(error.value).startswith("cannot start Ray on this machine (")
    assert "no room" in str(error.value)
    assert "--backend inline" in str(error.value)
    assert "\n" not in str(error.value)


def test_each_cluster_has_its_own_token(monkeypatch):
    tokens = []
    monkeypatch.setattr("ray.init", lambda **_: tokens.append(os.environ["RAY_AUTH_TOKEN"]))
    for _ in range(2):
        connection.start()
        connection.leave()
    assert len(set(tokens)) == 2
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize("before", [None, "/of/the/user"])
def test_environment_of_ray_is_restored(monkeypatch, tmp_path, before):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = {}

    def starts(**given):
        seen.update(given, path=os.environ["PYTHONPATH"].split(os.pathsep))

    monkeypatch.setattr("ray.init", starts)
    connection.start()
    assert seen["address"] == "local"  # though there may be a cluster, or RAY_ADDRESS
    assert seen["path"][0] == str(tmp_path)
    assert os.environ.get("PYTHONPATH") == before


def test_existing_ray_is_unchanged(monkeypatch, tmp_path):
    ended = []
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: ended.append(True))
    with pytest.raises(FedhetError, match=r"ray\.shutdown"):
        run(small(backend="ray"), tmp_path / "run")
    assert not ended


def test_starting_ray_is_awaited_or_stopped(monkeypatch):
    done = []
    monkeypatch.setattr("ray.init", lambda **_: done.append("started"))
    monkeypatch.setattr("ray.shutdown", lambda: done.append("ended"))
    with connection.starting():
        connection.start()
        assert done == ["started"]
    assert done == ["started"], "who waited for it ends it"

    def fails_when_it_has_started():
        connection.BACKGROUND.submit(int).result()
        raise SettingsError("before anything waited for it")

    with pytest.raises(SettingsError), connection.starting():
        fails_when_it_has_started()
    assert done == ["started", "started", "ended"]
    connection.start()
    assert done[3:] == ["started"]


def test_error_does_not_wait_for_a_ray_that_is_starting(tmp_path):
    slow = "import ray, sys, time; ray.init = lambda **_: time.sleep(300); "
    words = ["fedhet", "run", "local", "--dataset", f"imagefolder:{tmp_path}/nowhere"]
    command = f"{slow}from fedhet.cli import main; sys.argv = {words!r}; main()"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "nowhere" in done.stderr


def test_error_does_not_wait_for_workers_that_are_starting(tmp_path):
    slow = (
        "import ray, sys, time; ray.init = lambda **_: None; "
        "from fedhet.engines import cluster; "
        "cluster.running_machines = lambda: time.sleep(300); "
    )
    words = ["fedhet", "run", "local", "--dataset", "breast-cancer", "--models", "cnn2"]
    command = f"{slow}from fedhet.cli import main; sys.argv = {words!r}; main()"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "cnn2" in done.stderr


def test_missing_data_raises_before_workers_start(tmp_path, monkeypatch, call):
    started = []
    monkeypatch.setattr(connection, "_start", lambda: None)
    monkeypatch.setattr("fedhet.engines.simulate.cluster_for", lambda *_: started.append("one"))
    words = ["run", "local", "--dataset=mnist", f"--set=data.data-dir={tmp_path}"]
    status, _, fault = call(*words, f"--out={tmp_path / 'run'}")
    assert (status, started) == (2, [])
    assert "not found" in fault


def test_waiting_for_a_failed_ray_raises(monkeypatch):
    def fails(**_):
        raise RuntimeError("no room")

    monkeypatch.setattr("ray.init", fails)
    with pytest.raises(FedhetError, match="Ray"), connection.starting():
        connection.start()
    with connection.starting():
        pass  # nobody waits: there is nobody to tell


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (("--backend", "ray"), 1),
        ((), 0),  # only when the work is found to be worth it
        (("--backend", "inline"), 0),
        (("--backend", "ray", "--set", "engine.ray-address=auto"), 0),
    ],
)
def test_runs_that_start_ray_early(monkeypatch, tmp_path, words, begins):
    seen = []
    monkeypatch.setattr(connection, "_start", lambda: seen.append("begun"))
    monkeypatch.setattr(connection, "leave", lambda: seen.append("ended"))
    monkeypatch.setattr("fedhet.cli.training.train_one", lambda *_: None)
    result = CliRunner().invoke(app, ["run", "local", "--out", str(tmp_path / "run"), *words])
    assert result.exit_code == 0, result.output
    assert seen == ["begun", "ended"] * begins
