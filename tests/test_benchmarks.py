"""Check that benchmarks that are rarely run still work."""

import re
import subprocess
import sys

import pytest

from benchmarks.gpu import PIECES


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_piece_for_an_accelerator_runs_on_a_processor():
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("equal to the last bit\n") == 2
    assert "DIFFERENT" not in ended.stdout
    for piece in PIECES:
        assert f"\n{piece}: " in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "felo", "fedtype"])
def test_the_memory_of_a_server_is_measured_with_weights_that_arrive(method):
    command = [sys.executable, "-m", "benchmarks.server_memory", "--mb", "4", "--clients", "3"]
    ended = subprocess.run(
        [*command, "--methods", method], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(rf"{method}, 3 clients: ([\d.]+) MB, peak ([\d.]+) x that\n", ended.stdout)
    assert found
    assert 3.8 < float(found[1]) < 4.8  # what a client sent is the model
