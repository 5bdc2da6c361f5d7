"""Only `fedhet` is imported, so users may have their own `clients` and `strategies`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedhet.methods.registry import shipped_names

ROOT = Path(__file__).parent.parent
OWN = "print('own', __name__)\n"
PACKAGES = {f"{name}/__init__.py": OWN for name in ("clients", "strategies")}
MODULES = {f"{name}.py": OWN for name in ("clients", "strategies")}
COMMAND = ["-P", "-c", "from fedhet.cli import main; main()"]
"""The installed command: unlike `python -m`, it does not search the working folder."""
SCRIPT = """
import clients, fedhet, strategies
few = {"data.max-samples": 60, "data.min-samples": 4, "training.local-epochs": 1}
fedhet.run("felo", clients=2, rounds=1, models="mlp", backend="inline", out="run", settings=few)
"""


def run(folder, *words, before):
    """Run Python in a directory; `before` precedes fedhet on its path."""
    path = os.pathsep.join([*map(str, before), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("words", "own", "before"),
    [
        (COMMAND, PACKAGES, ["."]),
        (COMMAND, MODULES, ["site"]),
        (["-m", "fedhet"], PACKAGES, ["site"]),
        (["-m", "fedhet"], MODULES, []),
    ],
)
def test_all_methods_are_listed(tmp_path, words, own, before):
    write(tmp_path, own)
    write(tmp_path / "site", PACKAGES)  # as if others had installed theirs
    said = run(tmp_path, *words, "methods", before=before)
    assert {line.split(" ")[0] for line in said.splitlines()} >= {*shipped_names()}
    assert "own clients" not in said


@pytest.mark.parametrize("how", [pytest.param("command", marks=pytest.mark.slow), "script"])
def test_run_ignores_directories_named_like_packages(tmp_path, how):
    """A script imports its own `clients` as well as fedhet."""
    write(tmp_path, {**PACKAGES, "clients.py": OWN, "train.py": SCRIPT})
    few = [f"--set={pair}" for pair in ("max-samples=60", "min-samples=4", "local-epochs=1")]
    few += ["--clients", "2", "--rounds", "1", "--models", "mlp", "--backend", "inline"]
    command = ["-m", "fedhet", "run", "felo", *few, "--out", "run"]
    said = run(tmp_path, *(command if how == "command" else ["train.py"]), before=["."])
    assert ("own clients" in said) == (how == "script")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["method"] == "felo"
