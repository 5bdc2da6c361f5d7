"""The environment of processes that train."""

import contextlib
import io
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml
from rich.console import Console

from fedhet import base
from fedhet.base.disk import expanded, state_directory
from fedhet.base.errors import FedhetError, SettingsError
from fedhet.cli import training
from fedhet.cli.options import loading
from fedhet.cli.training import error_of, exit_on_signal, run_parallel
from fedhet.config.resolve import resolve
from fedhet.data.sources.images import _cache_file
from fedhet.engines.connection import KEEPING_PAGES, for_training, for_workers, inherited
from fedhet.runs.units import make_output_lenient
from fedhet.server.app import run_directory

ROOT = Path(__file__).parent.parent
FAULTS = """
import resource
def steps():
    for _ in range(50):  # 48 MB a step, of which glibc by itself gives the pages back
        freed = [bytearray(6_000_000) for _ in range(8)]
        del freed
steps()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def tunables(_):
    return os.environ.get("GLIBC_TUNABLES", "")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_pages_are_kept():
    plain = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    faults = [
        int(subprocess.check_output([sys.executable, "-c", FAULTS], env={**plain, **ours}))
        for ours in ({}, {"GLIBC_TUNABLES": KEEPING_PAGES})
    ]
    assert faults[1] < 1000 < faults[0], faults


def test_training_processes_inherit_tunables_unless_set(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert for_workers()["GLIBC_TUNABLES"] == KEEPING_PAGES
    assert [found for _, found in run_parallel([1], 1, tunables)] == [KEEPING_PAGES]
    assert "GLIBC_TUNABLES" not in os.environ
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    assert for_training() == {}
    assert for_workers()["GLIBC_TUNABLES"] == "glibc.malloc.tcache_count=0"


def ends_itself(item):
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ""


def test_killed_worker_does_not_stop_the_command():
    found = dict(run_parallel([0, 1, 2], 1, ends_itself))
    assert found.keys() == {0, 1, 2}
    assert found[0] == ""
    assert "a worker process was killed" in found[1]


def process_of(_):
    return str(os.getpid())


def test_processes_are_replaced_after_their_number_of_runs(monkeypatch):
    monkeypatch.setattr(training, "RUNS_PER_PROCESS", 2)
    processes = dict(run_parallel(range(5), 1, process_of))
    assert [*processes] == [*range(5)]
    assert sorted(Counter(processes.values()).values()) == [1, 2, 2]


PARALLEL = """
import os, signal, sys, time
from pathlib import Path
from fedhet.cli.training import exit_on_signal, run_parallel

def endless(path):
    Path(path).write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    with exit_on_signal(str):
        list(run_parallel(sys.argv[1:], 2, endless))
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_workers_end_with_the_command(tmp_path, number):
    (tmp_path / "parallel.py").write_text(PARALLEL)
    files = [tmp_path / "first", tmp_path / "second", tmp_path / "never"]
    command = [sys.executable, str(tmp_path / "parallel.py"), *map(str, files)]
    process = psutil.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 100
        while not all(file.exists() and file.read_text() for file in files[:2]):
            assert time.monotonic() < end
            time.sleep(0.1)
        workers = [psutil.Process(int(file.read_text())) for file in files[:2]]
        # A terminal sends Ctrl-C to the workers, too.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert psutil.wait_procs(workers, timeout=30)[1] == []
        assert b"Traceback" not in process.communicate(timeout=30)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert not files[2].exists()


def test_unexpected_error_affects_one_run(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("fedhet.cli.training.train", broken)
    assert error_of(None, None, report=False) == "RuntimeError: CUDA out of memory"
    assert "Traceback" in capsys.readouterr().err


def test_compose_file_and_docs_agree_on_tunables():
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    found = {name: s.get("environment", {}).get("GLIBC_TUNABLES") for name, s in services.items()}
    assert {name for name, value in found.items() if value} == {"site-0", "site-1", "site-2"}
    assert set(filter(None, found.values())) == {KEEPING_PAGES}
    assert f"GLIBC_TUNABLES={KEEPING_PAGES}\n" in (ROOT / "docs" / "operation.md").read_text()


def test_inherited_restores_the_environment(monkeypatch):
    monkeypatch.setenv("FEDHET_A", "1")
    with inherited({"FEDHET_A": "2", "FEDHET_B": "3"}):
        assert (os.environ["FEDHET_A"], os.environ["FEDHET_B"]) == ("2", "3")
    assert os.environ["FEDHET_A"] == "1"
    assert "FEDHET_B" not in os.environ


@pytest.fixture
def homeless(monkeypatch):
    """A user without HOME and without an entry in the user database, as in many containers."""

    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "FEDHET_STATE_DIR", "FEDHET_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
def test_home_directory_is_needed_only_for_paths_below_it(monkeypatch):
    assert state_directory("/srv/state") == Path("/srv/state")
    assert expanded("/srv/~x") == Path("/srv/~x")
    monkeypatch.setenv("FEDHET_STATE_DIR", "/srv/other")
    assert state_directory("") == Path("/srv/other")
    monkeypatch.setenv("FEDHET_CACHE_DIR", "/srv/cache")
    spec = type("Spec", (), {"image_size": 0})
    assert _cache_file([], spec, None).parent == Path("/srv/cache")


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        (lambda: state_directory(""), "set node-config 'state-dir' or .* FEDHET_STATE_DIR"),
        (lambda: _cache_file([], type("Spec", (), {"image_size": 0}), None), "FEDHET_CACHE_DIR"),
        (lambda: expanded("~/data"), "^~/data: home .* Set HOME, or use an absolute path"),
        (lambda: expanded("~no-such-user/data"), "use an absolute path"),
    ],
)
def test_missing_home_directory_raises(path, remedy):
    with pytest.raises(SettingsError, match=remedy):
        path()


@pytest.mark.parametrize(
    ("encoding", "errors", "expected"),
    [
        ("ascii", "strict", b"0.5 +- 0.1... ? \\xff"),
        ("ascii", "surrogateescape", b"0.5 +- 0.1... ? \\xff"),
        ("cp1252", "strict", b"0.5 \xb1 0.1\x85 ? \\xff"),
        ("latin-1", "strict", b"0.5 \xb1 0.1... ? \\xff"),
        ("utf-8", "strict", "0.5 ± 0.1… ○ \\xff".encode()),
        ("ascii", "ignore", b"0.5  0.1  "),
    ],
)
def test_output_is_printed_in_every_encoding(monkeypatch, encoding, errors, expected):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, errors))
    make_output_lenient()
    sys.stdout.write("0.5 ± 0.1… ○ \udcff")
    sys.stdout.flush()
    assert written.getvalue() == expected


@pytest.mark.parametrize("columns", ["0", "-1", "²", "wide"])
def test_closed_streams_and_odd_variables_do_not_end_a_command(tmp_path, columns):
    """A file that the command opens must not get the number of a closed standard stream."""
    command = f"{sys.executable} -m fedhet presets >&- 2>&- <&-"
    odd = {
        "COLUMNS": columns,
        "LINES": columns,
        "TZ": "No/Where",
        "PYTHONSAFEPATH": "1",
        "PYTHONWARNINGS": "error",  # Typer issues a warning when it is imported
        "LC_ALL": "C",  # the presets are not ASCII
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    environment = {**os.environ, **odd, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(["sh", "-c", command], env=environment, check=False).returncode == 0


def test_deleted_working_directory_raises(tmp_path):
    """Without the check, oneMKL would end the process."""
    command = f"mkdir x && cd x && rmdir ../x && exec {sys.executable} -m fedhet methods"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("fedhet: working directory: not found")
    assert done.stderr.count("\n") == 1


def test_failed_import_raises_one_line():
    line = r"^cannot load PyTorch: ValueError: Invalid log settings: bad\. Check the .*\.$"
    with pytest.raises(FedhetError, match=line), loading("PyTorch"):
        raise ValueError("\nInvalid log settings:\nbad")


def test_path_outside_utf_8_raises(tmp_path, monkeypatch):
    """Without the check, TensorBoard would end the run with a traceback."""
    (odd := tmp_path / "a\udcff").mkdir()
    monkeypatch.chdir(odd)
    for out in ("", "run"):
        with pytest.raises(SettingsError, match=r"^out: .* valid UTF-8, got '.*\\udcff/"):
            run_directory(resolve({"method": "local", "out": out}))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_run_with_one_line(monkeypatch, capsys, number):
    ended: list[int] = []
    over = threading.Event()
    monkeypatch.setattr("fedhet.cli.training.os._exit", lambda s: (ended.append(s), over.set()))
    monkeypatch.setattr("fedhet.cli.training.errors", Console(file=(written := io.StringIO())))
    of_tests = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    try:
        with exit_on_signal(lambda: "`fedhet run --resume x` resumes it"):
            os.kill(os.getpid(), number)
            assert over.wait(10)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, of_tests)
    assert ended == [128 + number]
    line = f"fedhet: stopped by {number.name}; `fedhet run --resume x` resumes it"
    assert written.getvalue().strip() == line


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signal(str):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "src" / "fedhet" / "base"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(Path(base.__file__).read_text())
    shown = [sys.executable, "-c", "from fedhet.base import commit; print(commit())"]

    def found():
        done = subprocess.run(shown, cwd=tmp_path / "src", capture_output=True, check=True)
        return done.stdout.decode().strip()

    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *author, "-C", tmp_path / "src", *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout.decode().strip()

    assert found() == "", "an installed package has no commit"
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert found() == git("rev-parse", "HEAD")[:12]
    (package / "__init__.py").write_text(Path(base.__file__).read_text() + "\n")
    assert found() == git("rev-parse", "HEAD")[:12] + "+"
