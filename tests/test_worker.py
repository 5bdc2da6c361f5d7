"""The worker of a site, which forks for each message, and the program that Flower starts."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from flwr.supernode import start_client_internal

from fedhet.deployment import processes, worker

PROGRAM = Path(worker.__file__).with_name("programs") / worker.COMMAND
COMMAND = """
    import contextlib, json, os, signal, sys, time
    messages = []
    kept = bytearray()

    def command():
        messages.append(sys.argv)
        action, _, value = sys.argv[1].partition("=")
        if action == "show":
            fields = {
                "argv": sys.argv, "cwd": os.getcwd(), "count": len(messages), "kept": len(kept),
                "permission": os.environ.get("PERMISSION"), "only": os.environ.get("ONLY"),
                "served": os.environ.get("SERVED"), "random": os.urandom(8).hex(),
                "parent": os.getppid(),
                "stdin": sys.stdin.read(), "files": len(os.listdir("/proc/self/fd")),
            }
            print(json.dumps(fields))
            print("a line of the log", file=sys.stderr)
        elif action == "exit":
            sys.exit(int(value))
        elif action == "raise":
            raise RuntimeError("the client app failed")
        elif action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "keep":
            kept.extend(bytes(int(value)))
        elif action == "wait":
            def stop(*_):
                open(value + ".stopped", "w").close()
                sys.exit(7)
            signal.signal(signal.SIGTERM, stop)
            open(value, "w").write(str(os.getpid()))
            while not os.path.exists(value + ".finish"):
                time.sleep(0.02)
            open(value + ".finished", "w").close()
"""
SERVE = textwrap.dedent(COMMAND) + textwrap.dedent("""
    from fedhet.deployment import worker
    worker.OWNER_SECONDS = 0.1

    def load():
        while os.path.exists("importing"):
            time.sleep(0.02)
        return command

    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job ignores it.
    with contextlib.suppress(KeyboardInterrupt):
        worker.serve(load, int(sys.argv[1]))
""")


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
    return value


class Site:
    """A directory with a worker whose command is `command` above."""

    def __init__(self, root: Path) -> None:
        self.directory, self.root, self.processes = root / "state" / "_worker", root, []
        self.output, self.errors = root / "output", root / "errors"
        self.environment = worker.with_worker({**os.environ, "PERMISSION": "none"}, root / "state")

    def serve(self, owner: int = 0, *, importing: bool = False) -> psutil.Popen:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "socket").unlink(missing_ok=True)
        if importing:
            (self.directory / "importing").touch()
        command = [sys.executable, "-c", SERVE, str(owner or os.getpid())]
        environment = {**os.environ, "SERVED": "yes"}
        process = psutil.Popen(command, cwd=self.directory, env=environment)
        self.processes.append(process)
        wait_for((self.directory / "socket").exists)
        return process

    def start(self, *arguments: str, **environment: str) -> psutil.Popen:
        # Files rather than pipes, because a worker keeps the output of the program that starts it.
        with self.output.open("w") as output, self.errors.open("w") as errors:
            process = psutil.Popen(
                [worker.COMMAND, *arguments],
                cwd=self.root,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        self.processes.append(process)
        return process

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        status = self.start(*arguments, **environment).wait(60)
        texts = self.output.read_text(), self.errors.read_text()
        return subprocess.CompletedProcess(arguments, status, *texts)

    def close(self) -> None:
        for process in self.processes:
            if process.is_running():
                process.kill()
                process.wait()


@pytest.fixture
def site(tmp_path, monkeypatch):
    site = Site(tmp_path)
    # `subprocess` searches the program in the PATH of this process.
    monkeypatch.setenv("PATH", site.environment["PATH"])
    yield site
    site.close()


def test_message_has_arguments_environment_directory_and_output_of_program(site):
    served = site.serve()
    done = site.run("show", "--token", "a b")
    fields = json.loads(done.stdout)
    assert fields["argv"] == [worker.COMMAND, "show", "--token", "a b"]
    assert fields["cwd"] == str(site.root)
    assert fields["parent"] == served.pid
    assert fields["permission"] == "none"
    assert done.stderr == "a line of the log\n"
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("action", "status"), [("exit=0", 0), ("exit=3", 3), ("raise", 1), ("die", worker.FAILED)]
)
def test_program_exits_with_status_of_message(site, action, status):
    site.serve()
    assert site.run(action).returncode == status


def test_nothing_of_a_message_remains_for_the_next_run(site):
    site.serve()
    first = json.loads(site.run("show", PERMISSION="everything", ONLY="first").stdout)
    site.run("keep=1000")
    second = json.loads(site.run("show").stdout)
    assert (first["permission"], first["only"]) == ("everything", "first")
    assert (second["permission"], second["only"], second["served"]) == ("none", None, None)
    assert (second["count"], second["kept"]) == (1, 0)
    assert first["files"] == second["files"]
    assert first["random"] != second["random"]


def test_memory_of_messages_is_freed(site):
    served = site.serve()
    site.run("keep=1000")
    before = served.memory_info().rss
    for _ in range(4):
        assert site.run(f"keep={100 * 2**20}").returncode == 0
    assert served.memory_info().rss < before + 20 * 2**20


def test_only_owner_can_access_socket(site):
    site.serve()
    site.run("exit=0")
    assert (site.directory / "socket").stat().st_mode & 0o777 == 0o600
    assert site.directory.stat().st_mode & 0o777 == 0o700


def test_killed_program_ends_its_message(site):
    site.serve()
    mark = site.root / "mark"
    program = site.start(f"wait={mark}")
    wait_for(lambda: mark.exists() and mark.read_text())
    program.kill()
    wait_for(Path(f"{mark}.stopped").exists)
    assert site.run("exit=5").returncode == 5


def test_message_outlives_killed_worker(site):
    served, mark = site.serve(), site.root / "mark"
    program = site.start(f"wait={mark}")
    wait_for(lambda: mark.exists() and mark.read_text())
    served.kill()
    served.wait()
    site.serve()
    assert site.run("exit=5").returncode == 5
    Path(f"{mark}.finish").touch()
    wait_for(Path(f"{mark}.finished").exists)
    assert program.wait(30) == worker.FAILED  # Its status is unknown, but it is not repeated.


def test_message_whose_program_has_ended_is_not_processed(site):
    """Such a program executes Flower's own command, so the message would be processed twice."""
    served, mark = site.serve(), site.root / "mark"
    served.suspend()
    program = site.start(f"wait={mark}")
    wait_for(lambda: psutil.Process(program.pid).net_connections("unix"))
    time.sleep(0.2)
    program.kill()
    program.wait()
    served.resume()
    assert site.run("exit=5").returncode == 5
    assert not mark.exists()


def test_two_messages_at_the_same_time_have_separate_processes(site):
    site.serve()
    marks = [site.root / name for name in ("first", "second")]
    programs = [site.start(f"wait={mark}") for mark in marks]
    for mark in marks:
        wait_for(lambda mark=mark: mark.exists() and mark.read_text())
    assert marks[0].read_text() != marks[1].read_text()
    Path(f"{marks[1]}.finish").touch()
    assert programs[1].wait(30) == 0
    assert programs[0].poll() is None
    Path(f"{marks[0]}.finish").touch()
    assert programs[0].wait(30) == 0


def test_second_worker_of_a_directory_ends(site):
    served = site.serve()
    second = psutil.Popen([sys.executable, "-c", SERVE, "1"], cwd=site.directory)
    assert second.wait(30) == 0
    assert served.is_running()
    assert site.run("exit=5").returncode == 5


def test_worker_ends_with_all_sites_that_use_it(site):
    """The owner of a message is the process that started the program, here a shell."""
    first = psutil.Popen(["sleep", "60"])
    shell = f"{worker.COMMAND} exit=0; sleep 60"
    served = site.serve(owner=first.pid)
    second = psutil.Popen(["sh", "-c", shell], env=site.environment)
    site.processes += [first, second]
    wait_for(lambda: any(each.name() == "sleep" for each in second.children()))
    first.kill()
    first.wait()
    time.sleep(0.5)
    assert served.is_running()
    for process in (*second.children(), second):
        process.kill()
    second.wait()
    assert served.wait(30) == 0


def test_worker_ends_with_a_site_whose_parent_waits_for_the_output(site):
    owner = subprocess.Popen(["sleep", "0.2"])  # It is a zombie until it is waited for.
    served = site.serve(owner=owner.pid)
    try:
        assert served.wait(30) == 0
    finally:
        owner.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_worker_leaves_no_socket(site, number, capfd):
    served = site.serve()
    site.run("exit=0")
    served.send_signal(number)
    assert served.wait(30) == 0
    assert {path.name for path in site.directory.iterdir()} == {"lock"}
    assert capfd.readouterr().err == ""


def test_stopped_worker_lets_its_message_end(site):
    served, mark = site.serve(), site.root / "mark"
    program = site.start(f"wait={mark}")
    wait_for(lambda: mark.exists() and mark.read_text())
    served.terminate()
    wait_for(lambda: not (site.directory / "socket").exists())
    site.serve()
    assert site.run("exit=5").returncode == 5
    Path(f"{mark}.finish").touch()
    wait_for(Path(f"{mark}.finished").exists)
    assert program.wait(30) == worker.FAILED
    assert served.wait(30) == 0


def test_worker_does_not_follow_a_symlink(site):
    target = site.root / "target"
    target.mkdir(mode=0o755)
    site.directory.parent.mkdir()
    site.directory.symlink_to(target)
    assert "no worker" in site.run("--help").stderr
    assert list(target.iterdir()) == []
    assert target.stat().st_mode & 0o777 == 0o755


def test_program_without_worker_executes_command_of_flower(site):
    """The directory cannot be created here, so no worker can start."""
    blocked = site.root / "file"
    blocked.touch()
    done = site.run("--help", FEDHET_WORKER_DIR=str(blocked / "_worker"))
    assert done.returncode == 0
    assert "Run a Flower ClientApp" in done.stdout
    assert "no worker" in done.stderr


def test_program_starts_worker_with_command_of_flower(site):
    done = site.run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Run a Flower ClientApp" in done.stdout
    (served,) = [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(site.directory) and process.pid != os.getpid()
    ]
    site.processes.append(served)
    assert served.num_threads() <= 2, "only OpenBLAS may have a thread"
    again = site.run("--no-such-option")
    assert again.returncode == 2
    assert served.is_running()


def test_node_polls_after_a_tenth_of_the_time_waited(monkeypatch):
    now, slept = 100.0, []

    def sleep(seconds):
        nonlocal now
        now += seconds
        slept.append(round(seconds, 3))

    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    poll = processes.polling_sleep()
    for _ in range(60):
        poll(3.0)
    assert slept[:10] == [0.1] * 10
    assert slept[10:] == sorted(slept[10:])
    assert slept[-1] == 3.0
    waited = 0.0
    for seconds in slept:
        assert seconds <= max(0.1, 0.1 * waited + 0.001)
        waited += seconds
    slept.clear()
    poll(0.5)  # a message has arrived, and the node waits for the reply
    poll(3.0)
    assert slept == [0.1, 0.1]
    for _ in range(60):
        poll(0.5)
    assert slept[-1] == 0.5


def test_pulls_are_repeated_soon():
    """An object is available at the fourth attempt; Flower would wait for 1, 2, and 4 seconds."""
    program = """
        import threading
        from flwr.supercore.inflatable import inflatable_utils
        from fedhet.server import nodes

        waited, attempts = [], []
        threading.Event.wait = lambda self, seconds=None: waited.append(seconds)

        def pull(name):
            attempts.append(name)
            if len(attempts) < 4:
                raise inflatable_utils.ObjectUnavailableError(name)
            return b"content"

        nodes.retry_pulls_soon()
        print(inflatable_utils.pull_objects(["a"], pull)["a"].decode())
        print(*[each for each in waited if each is not None and each < 10])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    content, waits = done.stdout.splitlines()
    seconds = [float(each) for each in waits.split()]
    assert content == "content"
    assert [round(each / 0.1 / 2**k) for k, each in enumerate(seconds)] == [1, 1, 1]


def test_services_find_the_programs_of_flower_without_path(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin"})
    processes._prepare_environment()
    assert shutil.which("flower-superexec", path=os.environ["PATH"])


def test_node_of_flower_polls_with_the_module_that_is_replaced():
    source = inspect.getsource(start_client_internal)
    assert "time.sleep(3)" in source
    assert "time.sleep(0.5)" in source
    assert start_client_internal.time is time


def test_worker_can_be_switched_off(tmp_path):
    environment = {"PATH": "/usr/bin", worker.WORKER_VARIABLE: "0"}
    assert worker.with_worker(environment, tmp_path) == environment
    del environment[worker.WORKER_VARIABLE]
    assert worker.with_worker(environment, tmp_path)["PATH"] == f"{PROGRAM.parent}:/usr/bin"
