"""Runs on a Ray cluster of this machine, and of two machines that are network namespaces.

In Ray's view, every machine has its own CPUs. The second machine may have a separate file system in
place of the directory for runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from federation import records, run, small, without_times
from namespaces import SUBNET, TAG, host, ip, namespaces, processes

from fedhet.config.resolve import Config, resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent
RAY = Path(sys.executable).parent / "ray"
HEAD, SECOND, PORT = f"{SUBNET}.1", f"{SUBNET}.2", 6379
PATIENCE = 400.0
ENVIRONMENT = {
    **os.environ,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else workers starve where anything else is going on
    # Else a machine that a test has killed is still listed when the next one asks all machines.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


def call(
    *words: str, private: Path | None = None, within: str = "", environment: dict | None = None
) -> None:
    """Run a command on a host, with an empty file system at `private`."""
    command = list(words)
    if private is not None:
        mount = f"mount -t tmpfs tmpfs {shlex.quote(str(private))} && exec {shlex.join(words)}"
        command = ["unshare", "--mount", "sh", "-c", mount]
    before = ["ip", "netns", "exec", host(within)] if within else []
    subprocess.run(
        [*before, *command],
        check=True,
        capture_output=True,
        env={**ENVIRONMENT, **(environment or {})},
        timeout=PATIENCE,
    )


def kill(numbers: Sequence[int]) -> None:
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


@contextlib.contextmanager
def short_folder() -> Iterator[str]:
    """A directory for Ray's sockets, whose paths may have at most 107 characters."""
    folder = tempfile.mkdtemp(prefix="fhray")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """Two connected hosts, with Ray's head on the first host (one CPU)."""
    with namespaces(("head", "second")), short_folder() as sockets:
        near, far = f"{TAG}a", f"{TAG}b"
        ip("link", "add", near, "netns", host("head"), "type", "veth",
           "peer", "name", far, "netns", host("second"))  # fmt: skip
        for name, device, address in (("head", near, HEAD), ("second", far, SECOND)):
            ip("addr", "add", f"{address}/24", "dev", device, within=name)
            ip("link", "set", device, "up", within=name)
        try:
            call(
                str(RAY), "start", "--head", f"--node-ip-address={HEAD}", f"--port={PORT}",
                "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={sockets}",
                within="head",
            )  # fmt: skip
            yield f"{HEAD}:{PORT}"
        finally:
            kill(processes("head"))


@contextlib.contextmanager
def second(
    address: str, private: Path | None = None, environment: dict | None = None
) -> Iterator[None]:
    """The second machine of the cluster, with one CPU."""
    try:
        call(
            str(RAY), "start", f"--address={address}", f"--node-ip-address={SECOND}",
            "--num-cpus=1", private=private, within="second", environment=environment,
        )  # fmt: skip
        yield
    finally:
        kill(processes("second"))


def started(
    config: Config, address: str, out: Path, environment: dict | None = None
) -> subprocess.Popen[str]:
    """Start a run on the first machine with the command line."""
    settings = out.parent / f"{out.name}.toml"
    settings.write_text(config.to_toml())
    words = [
        "ip", "netns", "exec", host("head"), sys.executable, "-m", "fedhet", "run",
        "--config", str(settings), "--out", str(out), "--set", f"engine.ray-address={address}",
    ]  # fmt: skip
    pipe = subprocess.PIPE
    both = {**ENVIRONMENT, **(environment or {})}
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=both)


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=PATIENCE)
    finally:
        process.kill()


def summary(directory: Path) -> dict:
    return without_times(json.loads((directory / "summary.json").read_text()))


def test_joined_machine_gives_identical_metrics(tmp_path):
    ports = free_ports(3)
    with short_folder() as sockets, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of no account where the run names another
        ray = subprocess.Popen(
            [
                str(RAY), "start", "--head", "--block", "--node-ip-address=127.0.0.1",
                f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}",
                f"--dashboard-agent-listen-port={ports[2]}", "--num-cpus=2",
                "--include-dashboard=false", f"--temp-dir={sockets}",
            ],
            env={k: v for k, v in ENVIRONMENT.items() if k != "RAY_ADDRESS"},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_for(ports[0])
            address = f"127.0.0.1:{ports[0]}"
            joined = small(backend="ray", ray_address=address)
            for name in ("first", "again"):  # the run has left, the cluster is still there
                run(joined, tmp_path / name)
        finally:
            kill([child.pid for child in psutil.Process(ray.pid).children(recursive=True)])
            ray.kill()
            ray.wait()
    run(small(), tmp_path / "inline")
    assert summary(tmp_path / "first") == summary(tmp_path / "inline")
    assert summary(tmp_path / "again") == summary(tmp_path / "inline")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        taken = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]


def wait_for(port: int) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        time.sleep(0.2)
    raise AssertionError("Ray has not started")


def test_two_machines_give_identical_metrics(head, tmp_path):
    with second(head):
        said, faults = ended(started(small(backend="ray"), head, tmp_path / "run"))
    assert "starting with 2 workers on 2 machines" in said, faults
    run(small(), tmp_path / "inline")
    assert summary(tmp_path / "run") == summary(tmp_path / "inline")


def test_machine_receives_fedhet_and_user_modules(head, tmp_path):
    """The code directories of the first machine are empty on the second machine."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    shutil.copytree(ROOT / "fedhet", mine / "fedhet")
    shutil.copy(ROOT / "examples" / "mymodels.py", mine / "mymodels.py")
    (other / "fedhet").mkdir(parents=True)
    (other / "fedhet" / "__init__.py").write_text("raise ImportError('another version')")
    config = small(backend="ray", models=["mlp", "cnn2"])
    settings = {**config.flat(), "models.pool": ["mymodels:tiny", "mlp"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(mine))
        config = resolve({**settings, "method": "felo"})
        run(config.replacing(engine=small().run.engine), tmp_path / "inline")
    with second(head, private=mine, environment={"PYTHONPATH": str(other)}):
        process = started(config, head, tmp_path / "run", {"PYTHONPATH": str(mine)})
        said, faults = ended(process)
    assert "starting with 2 workers on 2 machines" in said, faults
    assert process.returncode == 0, faults
    assert "no worker can start" not in said
    assert summary(tmp_path / "run") == summary(tmp_path / "inline")


def test_missing_shared_directory_raises(head, tmp_path):
    """The second machine sees neither the run's directory nor the data."""
    mine = tmp_path / "mine"
    (mine / "data").mkdir(parents=True)
    example = [sys.executable, "-m", "fedhet", "example-data", "text", str(mine / "data" / "texts")]
    call(*example)
    config = small(backend="ray", dataset=f"text:{mine}/data/texts", models="text-bag")
    (tmp_path / "runs").mkdir()
    with second(head, private=mine):
        alone = started(config, head, mine / "run")
        _, both = ended(alone)
        elsewhere = started(config, head, tmp_path / "runs" / "run")
        _, one = ended(elsewhere)
    assert (alone.returncode, elsewhere.returncode) == (2, 2)
    unseen = f"{SECOND}: data {mine}/data/texts not found"
    *lines, last = [line for line in both.splitlines() if line.startswith((SECOND, "fedhet:"))]
    assert lines == [
        f"{SECOND}: does not share the run's directory {mine}/run with this machine (No such file "
        "or directory). Set 'out' to a directory that all machines share.",
        unseen,
    ]
    assert last.startswith("fedhet: 1 of 2 machines of the Ray cluster cannot take part")
    assert f"fedhet: {unseen}" in one.splitlines()
    assert not (mine / "run").exists()
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs" / "run.toml"]


def test_killed_machine_does_not_change_metrics(head, tmp_path):
    slow = small(backend="ray", rounds=4, stragglers=1.0, slowdown=60.0)
    out = tmp_path / "run"
    with second(head):
        process = started(slow, head, out)
        end = time.monotonic() + PATIENCE
        while not ((out / "metrics.jsonl").exists() and records(out)):
            assert time.monotonic() < end
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        time.sleep(1.0)  # both machines train now
        kill(processes("second"))
        said, faults = ended(process)
    assert process.returncode == 0, faults
    assert f"on {SECOND} is lost" in said
    assert [record["round"] for record in records(out)] == [1, 2, 3, 4]
    assert not any(record["failed"] for record in records(out))
    run(small(rounds=4), tmp_path / "inline")
    assert summary(out) == summary(tmp_path / "inline")
