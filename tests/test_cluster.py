"""Ray clusters without Ray: settings, requests, faults, and the worker pool."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import flwr
import pytest
from federation import small

from fedhet.base.errors import FedhetError, SettingsError, StateError
from fedhet.cli import main
from fedhet.config.resolve import absolute, resolve
from fedhet.config.sources import read_toml
from fedhet.data.sources import paths_of
from fedhet.engines import cluster, inspection
from fedhet.engines.cluster import (
    ReachableClients,
    WorkerProxy,
    _created,
    check_machines,
    joined_workers,
    needs_of,
    place_workers,
    running_machines,
    usable_machines,
)
from fedhet.engines.connection import code_of, connect, for_workers
from fedhet.engines.inspection import faults, listing
from fedhet.engines.workers import Failed, LostError, Machine, Worker, WorkerPool
from fedhet.runs.directory import check_same
from fedhet.settings.engine import EngineSettings
from fedhet.settings.run import DataSettings, where_it_ran

ADDRESS = "engine.ray-address"
A, B = Machine("node-a", "10.0.0.1", 4.0, 1.0), Machine("node-b", "10.0.0.2", 2.0, 0.0)

# --- the setting ----------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "auto", "10.0.0.1:6379", "head.lab:1", "[::1]:65535"])
def test_valid_address_is_accepted(address):
    assert resolve({"method": "felo", ADDRESS: address}).run.engine.ray_address == address


@pytest.mark.parametrize(
    "address", ["head", "head:", ":6379", "head:0", "head:65536", "a b:1", "http://head:1", "AUTO"]
)
def test_invalid_address_raises(address):
    with pytest.raises(SettingsError, match="HOST:PORT") as error:
        resolve({"method": "felo", ADDRESS: address})
    assert f"got {address!r}" in str(error.value)


def test_ray_client_address_raises():
    with pytest.raises(SettingsError, match="HOST:PORT"):
        resolve({"method": "felo", ADDRESS: "ray://head:10001"})


def test_address_with_inline_backend_raises():
    with pytest.raises(SettingsError, match=r"engine\.backend.*inline"):
        resolve({"method": "felo", ADDRESS: "auto", "engine.backend": "inline"})


def test_address_may_change_on_resume(tmp_path):
    assert ADDRESS in where_it_ran()
    before = small("felo", backend="ray", ray_address="auto")
    (tmp_path / "config.toml").write_text(before.to_toml())
    assert read_toml(tmp_path / "config.toml")[ADDRESS] == "auto"
    check_same(small("felo", backend="ray"), tmp_path)
    with pytest.raises(StateError):
        check_same(small("felo", backend="ray", seed=1), tmp_path)


# --- what the workers get -------------------------------------------------------------------


def test_workers_get_only_the_listed_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDHET_CACHE_DIR", "/cache")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = for_workers()
    assert found["FEDHET_CACHE_DIR"] == "/cache"
    assert found["OMP_NUM_THREADS"] == "3"
    assert "secret" not in found.values()
    first, *_, last = found["PYTHONPATH"].split(":")
    assert (first, last) == (str(tmp_path), "${PYTHONPATH}")
    assert "site-packages" not in found["PYTHONPATH"]
    assert os.path.dirname(os.__file__) not in found["PYTHONPATH"].split(":")


def test_user_code_is_sent_and_the_standard_library_is_not(monkeypatch, tmp_path):
    (tmp_path / "mypack" / "inner").mkdir(parents=True)
    (tmp_path / "mypack" / "__init__.py").touch()
    (tmp_path / "mymodule.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    named = ["fedhet", "fedhet.strategies.felo", "mypack.inner.deep", "mymodule", "os", "json"]
    fedhet = Path(inspection.__file__).parents[1]
    found = [str(fedhet), str(tmp_path / "mypack"), str(tmp_path / "mymodule.py")]
    assert code_of([*named, "flwr", "nowhere"]) == [*found, str(Path(flwr.__file__).parent)]


# --- what a machine needs -------------------------------------------------------------------


def needs(directory, **changes):
    wanted = needs_of(absolute(small("felo", backend="ray")), directory)
    wanted = replace(wanted, **changes)
    (directory / wanted.token).write_text(wanted.token)
    return wanted


def test_complete_machine_has_no_faults_and_no_leftovers(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b.bin").write_bytes(b"4567")
    path = str(tmp_path / "data")
    wanted = needs(tmp_path, data={path: listing(path), "/nowhere": None})
    assert faults(wanted) == []
    assert len(list(tmp_path.iterdir())) == 2  # what was written to try is gone


def test_listing_digests_names_and_sizes_of_all_files(tmp_path):
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "train" / "a.bin").write_bytes(b"123")
    (tmp_path / "data" / "b.bin").write_bytes(b"4567")
    names = hashlib.blake2b(b"b.bin\0004\n" + b"train/a.bin\0003\n", digest_size=16).hexdigest()
    assert listing(str(tmp_path / "data")) == (2, 7, names)
    assert listing(str(tmp_path / "data" / "b.bin"))[:2] == (1, 4)
    assert listing("/nowhere") is None


DATA = "data"
"""A folder of two files of 7 bytes together."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "1.0"}, "PyTorch must be 1.0 as on this machine, got {torch}"),
        ({"token": ".of-another-run"}, "does not share the run's directory {run} with"),
        ({"device": "mps"}, "device mps not found"),
        ({"data": {"/nowhere": (2, 7, "d")}}, "data /nowhere not found"),
        ({"data": {DATA: (1, 7, "d")}}, "2 files of 7 bytes there, 1 file of 7 bytes here"),
        ({"data": {DATA: None}}, "{data} differs: 2 files of 7 bytes there, nothing here"),
        ({"data": {DATA: (2, 7, "d")}}, "differs in the names or sizes of its files"),
        ({"modules": ("os", "nomod.x")}, "module 'nomod.x' not found"),
    ],
)
def test_each_fault_is_one_line(change, words, tmp_path):
    data = tmp_path / DATA
    data.mkdir()
    (data / "a").write_bytes(b"123")
    (data / "b").write_bytes(b"4567")
    wanted = needs(tmp_path)
    if DATA in change.get("data", {}):
        change = {"data": {str(data): change["data"][DATA]}}
    (line,) = faults(replace(wanted, **change))
    assert words.format(torch=wanted.torch, run=tmp_path, data=data) in line
    assert "\n" not in line


def test_directory_with_another_token_is_a_fault(tmp_path):
    wanted = needs(tmp_path)
    (tmp_path / wanted.token).write_text("of another run")
    (line,) = faults(wanted)
    assert "a file with other content" in line


def test_unwritable_directory_is_a_fault(tmp_path, monkeypatch):
    wanted = needs(tmp_path)

    def readable(path, mode="r", **given):
        if mode == "x":
            raise OSError(30, "Read-only file system")
        return Path(path).open(mode, **given)

    monkeypatch.setattr(inspection, "open", readable, raising=False)
    (line,) = faults(wanted)
    assert line.startswith(f"cannot write to the run's directory {tmp_path} (Read-only")


def test_inspection_imports_only_the_standard_library():
    root = Path(inspection.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import fedhet.engines.inspection"],
        cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_needs_contain_data_modules_and_device(tmp_path):
    (tmp_path / "images").mkdir()
    chosen = {"data.dataset": f"imagefolder:{tmp_path}/images", "models.pool": ["os:getcwd", "mlp"]}
    config = absolute(resolve({"method": "felo", **chosen}))
    wanted = needs_of(config, tmp_path / "run")
    assert wanted.data == {f"{tmp_path}/images": listing(str(tmp_path / "images"))}
    assert wanted.modules[-3:] == ("fedhet.strategies.felo", "fedhet.clients.felo", "os")
    assert {"torch", "flwr"} < set(wanted.modules), "what is not sent must be installed"
    assert wanted.device in ("cpu", "cuda", "mps")
    assert wanted.directory == str(tmp_path / "run")


def test_packages_missing_here_are_not_required(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "REQUIRED", ("flwr", "nomod"))
    wanted = needs_of(absolute(small("felo", backend="ray")), tmp_path)
    assert "flwr" in wanted.modules
    assert "nomod" not in wanted.modules


def test_paths_of_datasets(tmp_path):
    (tmp_path / "hub").mkdir()

    def of(dataset, **others):
        return [str(path) for path in paths_of(DataSettings(dataset=dataset, **others))]

    assert of("digits") == of("python:module:function") == of("hf:a/b") == []
    assert of("cifar10", data_dir=str(tmp_path)) == [str(tmp_path / "cifar-10-batches-py")]
    assert of(f"hf:{tmp_path}/hub@part") == [str(tmp_path / "hub")]
    assert of("imagefolder:/a", public_dataset="text:/b") == ["/a", "/b"]
    assert of("digits", public_dataset="generated") == []


# --- the faults of all machines -------------------------------------------------------------


def answering(monkeypatch, **replies):
    """Let a task on a machine return the result for its address."""
    pinned = lambda machine: SimpleNamespace(remote=lambda _: machine.address)  # noqa: E731
    ray = SimpleNamespace(
        remote=lambda **_: (
            lambda _: SimpleNamespace(options=lambda scheduling_strategy: scheduling_strategy)
        ),
        wait=lambda refs, num_returns, timeout: (refs, []),
        get=replies.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "pinned", pinned)


def test_several_faults_are_notes_of_the_error(tmp_path, monkeypatch, capsys):
    wanted = needs_of(absolute(small("felo", backend="ray")), tmp_path)
    machines = [replace(A, address="a"), replace(B, address="b")]
    answering(monkeypatch, a=[], b=["has PyTorch\n1.0"])
    with pytest.raises(FedhetError, match=r"^b: has PyTorch\\n1\.0$") as one:
        check_machines(machines, wanted, 1.0)
    assert not getattr(one.value, "__notes__", [])
    answering(monkeypatch, a=["is mute"], b=["has PyTorch 1.0", "has no device cuda"])
    with pytest.raises(FedhetError, match="2 of 2") as several:
        check_machines(machines, wanted, 1.0)
    assert [note.partition(":")[0] for note in several.value.__notes__] == ["a", "b", "b"]
    assert list(tmp_path.iterdir()) == []

    def fails():
        raise several.value

    monkeypatch.setattr("fedhet.cli.app", fails)
    with pytest.raises(SystemExit, match="2"):
        main()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == several.value.__notes__
    assert lines[3] == f"fedhet: {several.value}"


# --- the machines ---------------------------------------------------------------------------


def node(name, address, alive=True, **has):
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": has}


def test_running_machines_are_listed(monkeypatch):
    nodes = [
        node("b", "10.0.0.2", CPU=2.0, memory=5.0),
        node("dead", "10.0.0.3", alive=False),
        node("a", "10.0.0.1", CPU=4.0, GPU=1.0),
    ]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))
    assert running_machines() == [
        Machine("a", "10.0.0.1", 4.0, 1.0), Machine("b", "10.0.0.2", 2.0, 0.0)
    ]  # fmt: skip
    nodes.append(node("second-one", "10.0.0.2", CPU=1.0))
    assert [m.address for m in running_machines()] == [
        "10.0.0.1", "10.0.0.2 (Ray node b)", "10.0.0.2 (Ray node second-o)"
    ]  # fmt: skip


def test_machines_without_cpus_are_not_used():
    head = Machine("head", "10.0.0.9", 0.0, 0.0)
    assert usable_machines([head, A, B], EngineSettings(cpus_per_client=2.0)) == [A, B]
    assert usable_machines([head, A, B], EngineSettings(cpus_per_client=3.0)) == [A]
    with pytest.raises(SettingsError, match="4"):
        usable_machines([head, A, B], EngineSettings(cpus_per_client=5.0))


def test_workers_are_placed_round_robin():
    engine = EngineSettings()
    assert place_workers([A, B], engine, 100, on_gpu=False) == [A, B, A, B, A, A]
    assert place_workers([A, B], engine, 3, on_gpu=False) == [A, B, A]
    halves = EngineSettings(gpus_per_client=0.4)
    assert place_workers([A, B], halves, 100, on_gpu=True) == [A, A]
    two = Machine("c", "10.0.0.3", 16.0, 2.0)  # 5 x 0.4 is 2, but no worker has parts of two GPUs
    assert place_workers([two], halves, 100, on_gpu=True) == [two] * 4
    with pytest.raises(FedhetError, match="GPU"):
        place_workers([B], halves, 100, on_gpu=True)


# --- the pool, on a Ray that is played ------------------------------------------------------


class Actor:
    """Fake actor, whose reference to `is_ready` is itself."""

    def __init__(self, machine):
        self.machine = machine
        self.is_ready = SimpleNamespace(remote=lambda: self)
        self.release_memory = SimpleNamespace(remote=count_release)


def count_release():
    sys.modules["ray"].released += 1


class Ray:
    """Fake Ray: tasks finish when a caller waits for them, and a machine may be lost."""

    class exceptions:  # noqa: N801
        class RayError(Exception): ...

        class GetTimeoutError(RayError): ...

    def __init__(self):
        self.gone: set[Machine] = set()
        self.killed: list[Actor] = []
        self.started: list[Actor] = []
        self.released = 0

    def start(self, machine):
        actor = Actor(machine)
        self.started.append(actor)
        return actor

    def wait(self, refs, num_returns, timeout):
        return refs, []

    def get(self, ref, timeout=None):
        if isinstance(ref, Exception):
            raise ref
        if isinstance(ref, Actor) and ref.machine in self.gone:
            raise self.exceptions.RayError("the machine is gone")
        return ref

    def kill(self, actor, no_restart):
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch):
    played = Ray()
    monkeypatch.setitem(sys.modules, "ray", played)
    return played


def pool(ray, *machines):
    said: list[str] = []
    return WorkerPool(machines, ray.start, said.append), said


def test_client_out_of_memory_is_called_alone(ray):
    """The other clients finish first and release their memory. No client starts before it ends."""
    workers, said = pool(ray, A, B)
    events, free, first = [], threading.Event(), threading.Event()

    def busy(_):
        first.set()
        free.wait(10)
        events.append("another ends")

    def alone(_):
        events.append("alone begins")
        later.start()
        time.sleep(0.2)
        events.append("alone ends")
        return "reply"

    before = threading.Thread(target=workers.run, args=("client-1", busy, None))
    later = threading.Thread(
        target=workers.run, args=("client-2", lambda _: events.append("a third"), None)
    )
    before.start()
    first.wait(10)
    with pytest.raises(TimeoutError):  # and nobody waits for it any more
        workers.run("client-3", lambda _: events.append("never"), 0.05, alone=True)
    threading.Timer(0.2, free.set).start()
    assert workers.run("client-0", alone, None, alone=True) == "reply"
    before.join()
    later.join()
    assert events == ["another ends", "alone begins", "alone ends", "a third"]
    assert ray.released == 1  # the other one; its own is made room in by the task
    again = "ran out of GPU memory and is called again without other clients"
    assert said == [f"client-3 {again}", f"client-0 {again}"]


def lost(*_):
    return Ray.exceptions.RayError("died")


def test_client_of_a_lost_worker_is_called_on_another(ray):
    workers, said = pool(ray, A, B)
    used = []

    def task(actor):
        used.append(actor)
        return lost() if len(used) == 1 else "reply"

    assert workers.run("client-0", task, None) == "reply"
    assert [actor.machine for actor in used] == [A, B]
    assert ray.killed == [used[0]]
    (line,) = said
    assert line.startswith("the worker of client-0 on 10.0.0.1 is lost (RayError)")
    assert "is called on another worker" in line


def test_client_fails_after_two_lost_workers(ray):
    workers, said = pool(ray, A, B)
    with pytest.raises(LostError, match="RayError"):
        workers.run("client-0", lost, None)
    assert len(ray.killed) == 2
    assert "fails in this round" in said[-1]
    used = []
    workers.run("client-1", used.append, None)
    assert used[0] not in ray.killed
    assert len(ray.started) == 4  # both have been started again, where they were
    assert [actor.machine for actor in ray.started] == [A, B, A, B]


def test_dead_worker_is_not_used_again(ray):
    workers, said = pool(ray, A, B)
    ray.gone = {A}
    for _ in range(6):
        used = []
        workers.run("client-0", used.append, 5.0)
        assert used[0].machine is B
    assert not workers.is_lost
    assert sum("no worker can start on 10.0.0.1" in line for line in said) == 1


def test_run_ends_if_all_machines_are_lost(ray):
    workers, _ = pool(ray, A, B)
    clients = ReachableClients(workers, 0)
    assert clients.all() == {}
    ray.gone = {A, B}
    with pytest.raises(LostError):
        workers.run("client-0", lost, None)
    assert workers.is_lost
    with pytest.raises(LostError, match="worker"):
        workers.run("client-0", lost, None)
    with pytest.raises(FedhetError, match="--resume"):
        clients.all()


def test_late_worker_is_replaced(ray):
    workers, _ = pool(ray, A)
    with pytest.raises(TimeoutError):
        workers.run("client-0", lambda _: Ray.exceptions.GetTimeoutError(), 1.0)
    assert len(ray.killed) == 1
    used = []
    workers.run("client-0", used.append, 1.0)
    assert used[0] is ray.started[1]


def test_each_worker_runs_one_task_at_a_time(ray):
    workers, _ = pool(ray, A, B)
    working, most, lock = [], [], threading.Lock()

    def task(actor):
        with lock:
            assert actor not in working
            working.append(actor)
            most.append(len(working))
        time.sleep(0.01)
        with lock:
            working.remove(actor)

    threads = [threading.Thread(target=workers.run, args=("c", task, 30.0)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 12
    assert max(most) == 2


def test_wait_for_a_busy_worker_times_out(ray):
    workers, _ = pool(ray, A)
    held, free = threading.Event(), threading.Event()

    def hold(_):
        held.set()
        free.wait(10)

    thread = threading.Thread(target=workers.run, args=("c", hold, None))
    thread.start()
    assert held.wait(10)
    with pytest.raises(TimeoutError, match="worker"):
        workers.run("other", lambda _: None, 0.05)
    free.set()
    thread.join()
    assert workers.run("other", lambda _: "reply", 5.0) == "reply"


def test_busy_cluster_raises(ray, monkeypatch):
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: ([], refs))
    workers, _ = pool(ray, A)
    with pytest.raises(FedhetError, match=r"0\.05 s"):
        workers.wait(0.05)


# --- the workers ----------------------------------------------------------------------------


def test_failed_client_reports_reason_and_traceback(tmp_path, ray):
    worker = Worker(small("felo"), str(tmp_path))
    failed = worker.call(0, "no_such_method", None)
    assert isinstance(failed, Failed)
    assert "no_such_method" in failed.reason
    assert "Traceback" in failed.traceback
    workers, _ = pool(ray, A)
    proxy = WorkerProxy("client-0", 0, workers)
    ray.started[0].call = SimpleNamespace(remote=worker.call)
    with pytest.raises(Exception, match="no_such_method"):
        proxy.call("no_such_method", None, 5.0)
    assert not ray.killed


# --- joining --------------------------------------------------------------------------------


def test_rejected_run_leaves_no_directory(tmp_path):
    (tmp_path / "there").mkdir()
    directory = tmp_path / "there" / "a" / "run"
    seen = []

    def refused():
        with _created(directory, resume=False):
            seen.append(directory.is_dir())
            raise FedhetError("no")

    with pytest.raises(FedhetError, match="no"):
        refused()
    assert seen == [True]
    assert list((tmp_path / "there").iterdir()) == []


def test_existing_run_is_unchanged(tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(StateError), _created(tmp_path, resume=False):
        raise AssertionError("not reached")
    with pytest.raises(FedhetError, match="no"), _created(tmp_path, resume=True):
        raise FedhetError("no")
    assert (tmp_path / "config.toml").exists()


def test_unreachable_cluster_raises(tmp_path):
    config = small("felo", backend="ray", ray_address="127.0.0.1:1")
    with (
        pytest.raises(FedhetError, match=r"127\.0\.0\.1:1"),
        joined_workers(config, tmp_path / "run", print),
    ):
        raise AssertionError("not reached")
    assert list(tmp_path.iterdir()) == []


def test_joining_twice_raises(monkeypatch):
    joined_ray = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ray", joined_ray)
    with pytest.raises(FedhetError, match=r"ray\.shutdown"):
        connect("auto", [])
