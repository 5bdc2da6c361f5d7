"""Tests that take minutes: `make slow`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from federation import run

from fedhet.config.resolve import resolve
from fedhet.config.sources import read_preset

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


def means(method, directory, protocol, kind="private", **changes):
    """Return the mean accuracies of the last round over three seeds of the demo."""
    found = []
    for seed in (0, 1, 2):
        named = {"method": method, "engine.backend": "inline", "seed": seed, **changes}
        summary = run(resolve({**read_preset("demo"), **named}), directory / f"{method}-{seed}")
        found.append(summary["accuracy"][protocol][kind]["mean"])
    return np.array(found)


@pytest.mark.timeout(1800)
def test_felo_is_well_above_training_alone(tmp_path):
    felo = means("felo", tmp_path, "common")
    local = means("local", tmp_path, "common")
    assert (felo > local).all()
    assert felo.mean() - local.mean() > 0.08


@pytest.fixture
def flower(tmp_path):
    """Provide an environment for `flwr`, and stop the SuperLink that it starts."""
    home = tmp_path / "flower"
    yield {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FEDHET_STATE_DIR": str(tmp_path / "state"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"FLWR_HOME={home}".encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        if ours:
            os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.timeout(600)
def test_flwr_run_leaves_a_run(tmp_path, flower):
    def flwr(*words):
        command = ["flwr", *words]
        return subprocess.run(command, cwd=ROOT, env=flower, capture_output=True, text=True)

    nodes = ["--num-supernodes", "3", "--client-resources-num-cpus", "1"]
    flwr("federation", "simulation-config", "@none/default", "local", *nodes)
    out = tmp_path / "run"
    config = f'method="felo" rounds=2 training.local-epochs=1 clients=3 out="{out}"'
    done = flwr("run", ".", "--stream", "--run-config", config)
    assert (out / "summary.json").exists(), done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert len(summary["accuracy"]["common"]["private"]["per_client"]) == 3
    kept = (tmp_path / "state").glob("*/*/round-*.safetensors")
    rounds = ("round-000001.safetensors", "round-000002.safetensors")
    expected = [(f"client-{k}", name) for k in range(3) for name in rounds]
    assert sorted((path.parent.name, path.name) for path in kept) == expected
    report = subprocess.run(
        [sys.executable, "-c", "from fedhet.cli import main; main()", "report", str(out)],
        check=True,
    )
    assert report.returncode == 0
    assert (out / "report.html").exists()
