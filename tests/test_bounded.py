"""Untrusted files: reading them uses bounded memory and time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from federation import run, small
from interruption import CutError, CutOff

from fedhet.runs.storage import load, save

COMMANDS = {
    "report": ["report", "{run}"],
    "compare": ["compare", "{run}", "--out", "{out}"],
    "resume": ["run", "--resume", "{run}"],
    "predict": ["predict", "{run}", "client-0", "{run}/nothing.npz"],
    "export": ["export", "{run}", "client-0", "--format", "safetensors", "--out", "{out}/model"],
}
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 2 * 2**30))
from fedhet.cli import main
sys.argv = ["fedhet", *sys.argv[1:]]
main()
"""


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """An interrupted run before its second round."""
    directory = tmp_path_factory.mktemp("cut") / "run"
    config = small("local", rounds=2, clients=2, models="mlp")
    with pytest.raises(CutError):
        run(config, directory, [CutOff(2, "before")])
    return directory


@pytest.fixture
def received(cut, tmp_path):
    shutil.copytree(cut, tmp_path / "run")
    return tmp_path / "run"


def words_of(received, command):
    places = {"run": received, "out": received.parent / "out"}
    return [word.format(**places) for word in COMMANDS[command]]


def line_of(status, error):
    """Return the single line of output of a failed command."""
    assert status == 2
    (line,) = (line for line in error.splitlines() if line.startswith("fedhet: "))
    assert "Traceback" not in error
    return line


@pytest.fixture
def in_one_line(call):
    """A function that runs a command in this process, and returns its single line of output."""

    def run(received, command):
        status, _, error = call(*words_of(received, command))
        return line_of(status, error)

    return run


def within_two_gigabytes(received, command, seconds=60):
    """Run a command within 2 GB of memory, and return its single line of output."""
    words = words_of(received, command)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *words], capture_output=True, text=True, check=False,
        timeout=seconds, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )  # fmt: skip
    return line_of(done.returncode, done.stderr)


def state_of(received):
    (path,) = (received / "state").glob("*/client-0")
    return path


@pytest.mark.parametrize("command", ["report", "resume", "compare"])
@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_key_with_many_parts_raises(received, in_one_line, command, quote):
    (received / "config.toml").write_text(".".join([f"{quote}a{quote}"] * 20_000) + " = 1\n")
    assert "expected keys of at most 32 parts" in in_one_line(received, command)


def test_oversized_files_raise_within_2_gb(received):
    (received / "config.toml").write_text(".".join("a" * 50_000) + " = 1\n")
    assert "expected keys of at most 32 parts" in within_two_gigabytes(received, "report")


def test_values_may_contain_any_number_of_dots(received, in_one_line):
    config = received / "config.toml"
    config.write_text(config.read_text() + "x = [" + "0.5, " * 1000 + "]\ny = '... '\n")
    assert "not one of 'x'" not in in_one_line(received, "resume")


FIFOS = {
    "config.toml": ("report", "resume"),
    "metrics.jsonl": ("report", "resume", "compare"),
    "partition.json": ("report",),
    "run.json": ("resume", "predict"),
    "state": ("predict", "export"),
    "client.json": ("predict", "export"),
    "checkpoint": ("resume",),
}


@pytest.mark.parametrize(
    ("name", "command"), [(name, each) for name, some in FIFOS.items() for each in some]
)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_not_read(received, name, command, kind, in_one_line):
    places = {
        "state": state_of(received) / "round-000001.safetensors",
        "client.json": state_of(received) / "client.json",
        "checkpoint": received / "checkpoints" / "round-000001.safetensors",
    }
    path = places.get(name, received / name)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    in_one_line(received, command)


@pytest.mark.parametrize("text", ["[],", "{},", '{"round":1}\n'], ids=["lists", "objects", "lines"])
def test_oversized_records_raise(received, text, in_one_line):
    (received / "metrics.jsonl").write_text(text * 9_000_000)
    assert "expected at most 8,000,000 values" in in_one_line(received, "report")


def test_oversized_client_record_raises(received, in_one_line):
    (state_of(received) / "client.json").write_bytes(b" " * 2**25)
    assert "too large" in in_one_line(received, "predict")


HUGE = {
    "shapes of 10^18": {"format": {"shape": [10**18, 2]}},
    "negative shapes": {"format": {"shape": [-1, 8, 8]}},
    "a shape of nothing": {"format": {"shape": [0]}},
    "large shapes": {"format": {"shape": [1000, 100_000, 1000]}},
    "a negative number of samples": {"samples": -5},
    "a number beyond any": {"samples": 10**400},
    "a partition of another": {"partition": -7},
}


@pytest.mark.parametrize("case", HUGE)
@pytest.mark.parametrize("command", ["predict", "export"])
def test_client_record_with_invalid_numbers_raises(received, case, command, in_one_line):
    path = state_of(received) / "client.json"
    record, changes = json.loads(path.read_text()), HUGE[case]
    changes = {**changes, "format": {**record["format"], **changes.get("format", {})}}
    path.write_text(json.dumps({**record, **changes}))
    assert "client.json" in in_one_line(received, command)


@pytest.mark.parametrize("command", ["predict", "export"])
def test_sparse_state_file_raises(received, command, in_one_line):
    path = state_of(received) / "round-000001.safetensors"
    size = 6 * 10**10
    header = {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    header["__metadata__"] = {"fedhet": json.dumps({"version": 1})}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    assert "for a sparse file" in in_one_line(received, command)


@pytest.mark.parametrize("odd", ["integers", "text for a number", "negative version"])
def test_invalid_checkpoint_or_state_is_skipped(received, odd, in_one_line):
    """The weights are integers, or the metadata contains no numbers."""
    path = state_of(received) / "round-000001.safetensors"
    tensors, facts = load(path)
    tensors = {k: v.to(torch.int64) if odd == "integers" else v for k, v in tensors.items()}
    facts |= {"participations": "many"} if odd == "text for a number" else {}
    facts |= {"version": -3} if odd == "negative version" else {}
    save(path, tensors, facts)
    assert "round-000001.safetensors" in in_one_line(received, "export")
