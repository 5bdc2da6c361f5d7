"""Benchmarks that need what the tests' machine has not: do they run?"""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_piece_for_an_accelerator_runs_on_a_processor():
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("equal to the last bit\n") == 2
    assert "DIFFERENT" not in ended.stdout
    for piece in (
        "resume",
        "precision",
        "shared",
        "conformal",
        "vmap",
        "memory",
        "fedtype",
        "felo",
    ):
        assert f"\n{piece}: " in ended.stdout
