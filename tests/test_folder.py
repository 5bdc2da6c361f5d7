"""Writing into an untrusted directory: no symlink in it is followed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from federation import run, small
from interruption import CutError, CutOff, resumed

from fedhet import report
from fedhet.base.errors import FedhetError, StateError
from fedhet.runs.storage import ClientStore

ROUNDS = 3


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The directory of a run without its third round, and its settings."""
    config, directory = small("fedavg", rounds=ROUNDS, clients=2), tmp_path_factory.mktemp("x")
    with pytest.raises(CutError):
        run(config, directory / "run", [CutOff(ROUNDS, "before")])
    return config, directory / "run"


@pytest.fixture
def received(cut, tmp_path):
    """A copy of the run's directory, like a received copy."""
    shutil.copytree(cut[1], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def mine(tmp_path):
    """A directory of the user with files that have the names of a run's files."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("letter.txt", "accuracy.png", "round-000001.safetensors", "0-1.safetensors"):
        (folder / name).write_text(f"my {name}")
    return folder


def content(folder):
    """Return the names and contents of all files below a directory."""
    return {p.relative_to(folder): p.is_file() and p.read_bytes() for p in folder.rglob("*")}


def one_line(error):
    return str(error.value).splitlines() == [str(error.value)]


@pytest.mark.parametrize(
    "name", ["inbox", "state", "checkpoints", "tensorboard", "decoded", "pool", "figures"]
)
def test_symlinked_directory_stops_a_resumed_run(cut, received, mine, name):
    if name != "figures":
        shutil.rmtree(received / name, ignore_errors=True)
        (received / name).symlink_to(mine)
    else:
        (received / name).symlink_to(mine, target_is_directory=True)
    before = content(mine)
    with pytest.raises(StateError, match=f"run/{name}") as error:
        run(resumed(cut[0], received), received)
    assert one_line(error)
    assert content(mine) == before


@pytest.mark.parametrize("name", ["run.lock", "flower.log", "metrics.jsonl", "config.toml"])
def test_symlinked_file_stops_a_resumed_run(cut, received, mine, name):
    theirs = mine / "letter.txt"
    if (received / name).exists():
        theirs.write_bytes((received / name).read_bytes())
        (received / name).unlink()
    (received / name).symlink_to(theirs)
    before = content(mine)
    with pytest.raises(StateError, match=f"run/{name}") as error:
        run(resumed(cut[0], received), received)
    assert one_line(error)
    assert content(mine) == before


def test_symlinked_figures_directory_stops_the_report(received, mine):
    (received / "figures").symlink_to(mine)
    before = content(mine)
    with pytest.raises(StateError, match="run/figures") as error:
        report.write_all(received)
    assert one_line(error)
    assert content(mine) == before


@pytest.mark.parametrize("name", ["report.html", "figures/accuracy.png", "figures/time.svg"])
def test_report_replaces_a_symlinked_file(received, mine, name):
    (received / "figures").mkdir()
    (received / name).symlink_to(mine / "letter.txt")
    before = content(mine)
    report.write_all(received)
    assert content(mine) == before
    assert (received / name).is_file()
    assert not (received / name).is_symlink()


@pytest.mark.parametrize("part", ["run-1", "run-1/client-0"])
def test_symlink_in_the_state_of_a_site_raises(tmp_path, mine, part):
    root = tmp_path / "states"
    (root / part).parent.mkdir(parents=True)
    (root / part).symlink_to(mine)
    before = content(mine)
    store = ClientStore(root, "run-1", "client-0")
    with pytest.raises(StateError, match=f"states/{part}") as error:
        store.save(1, {"w": torch.ones(3)}, {"version": 1})
    assert one_line(error)
    assert content(mine) == before


def test_run_directory_may_be_a_symlink(cut, received, tmp_path):
    """Users may keep runs on another disk."""
    (tmp_path / "short").symlink_to(received)
    summary = run(resumed(cut[0], tmp_path / "short"), tmp_path / "short")
    assert summary["rounds"] == ROUNDS


@pytest.mark.parametrize("kind", ["fifo", "folder"])
@pytest.mark.parametrize("name", ["run.lock", "flower.log"])
def test_special_file_is_not_overwritten(cut, received, kind, name):
    (received / name).unlink(missing_ok=True)
    (os.mkfifo if kind == "fifo" else os.mkdir)(received / name)
    with pytest.raises((FedhetError, OSError), match=name):
        run(resumed(cut[0], received), received)


WATCHED = """
import sys, traceback
from pathlib import Path

ROOT = sys.argv[1]
ROUND = []
OPEN, OTHERS = "open", {"os.rename", "os.remove", "os.link", "os.symlink",
    "os.truncate", "os.chmod", "os.utime", "shutil.copyfile", "shutil.move"}

def inside(path):
    if isinstance(path, bytes):
        path = path.decode()
    return isinstance(path, (str, Path)) and str(path).startswith(ROOT)

def watch(event, given):
    if event == OPEN:
        path, mode, flags = given
        writes = flags & 3 or (isinstance(mode, str) and set(mode) & set("wax+"))
        if not (writes and inside(path)):
            return
    elif event == "os.mkdir":  # a folder of a run itself is no link: it is looked at before
        if not inside(given[0]) or len(Path(given[0]).relative_to(ROOT).parts) < 3:
            return
    elif event not in OTHERS or not any(inside(part) for part in given):
        return
    # Its name has the time and the process in it: no link can wait for it.
    if "events.out.tfevents" in str(given[0]):
        return
    place = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[:-1]]
    ROUND.append(f"{event} {given}: {[line for line in place if 'fedhet' in line][-2:]}")

from federation import run, small
from interruption import CutError, CutOff, resumed
from fedhet import report
from fedhet.inference.client import open_client
from fedhet.inference.export import export
from fedhet.report import compare, write_comparison

root = Path(ROOT)
root.mkdir()
sys.addaudithook(watch)
for method in ("fedavg", "um-pfssl"):
    config, directory = small(method, clients=2, rounds=2, fraction=1.0), root / method
    try:
        run(config, directory, [CutOff(2, "after")])
    except CutError:
        pass
    run(resumed(config, directory), directory)
    report.write_all(directory)
(root / "fedavg" / "note").write_text("this one goes round")
write_comparison(compare([root / "fedavg"]), root / "compared")
export(open_client(root / "fedavg", "client-0"), "safetensors", root / "out" / "model")
print("\\n".join(dict.fromkeys(ROUND)))
"""


def test_all_writes_use_file_descriptors(tmp_path):
    """All writes in a run's directory use file descriptors.

    They open, create, rename, or remove files. The note that the test itself writes shows that
    other writes are found.
    """
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path / "runs")],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = done.stdout.splitlines()
    assert found.startswith(f"open ('{tmp_path}/runs/fedavg/note'")
