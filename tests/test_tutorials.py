"""The commands of the tutorials for simulations, with fewer rounds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
INSTALLATION = re.compile(r"^(make|source|python3 -m venv|pip) ")
SMALL = {
    "start.md": "--rounds 1 --backend inline --set max-samples=200 --models cnn2,mlp",
    "own-data.md": "--rounds 1 --backend inline",
    "regression.md": "--rounds 1 --backend inline",
}
"""Options that are added to every run of a page."""
LEFT_BEHIND = {
    "start.md": ["runs/felo/seed-2/summary.json", "runs/compare/compare.html"],
    "own-data.md": ["runs/patients/report.html", "runs/seeds/seed-2/summary.json", "schema.toml"],
    "regression.md": [
        "runs/stay/report.html",
        "runs/seeds/seed-2/summary.json",
        "data/stay/schema.toml",
    ],
}


def commands(page: str) -> str:
    """Return the commands of a page as a script, without the installation."""
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^( *)```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(textwrap.dedent(block) for _, block in blocks).replace("\\\n", " ")
    kept = [line for line in lines.splitlines() if not INSTALLATION.match(line)]
    runs = re.compile(r"^(fedhet run .*)$")
    return "\n".join(runs.sub(rf"\1 {SMALL[page]}", line) for line in kept)


@pytest.mark.usefixtures("pages_alone")
def test_commands_of_the_tutorial_on_own_data_print_its_table(tmp_path, monkeypatch, call):
    """The commands run in this process; the page shows the first rows and the column types."""
    monkeypatch.chdir(tmp_path)
    shown = ""
    for line in filter(None, commands("own-data.md").splitlines()):
        if line.startswith("fedhet "):
            status, said, fault = call(*shlex.split(line)[1:])
            assert status == 0, fault
            shown += said
        else:
            printed = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
            shown += printed.stdout
    assert shown.count("client-0") > 2
    assert_left_behind("own-data.md", tmp_path)
    lines = [line for line in shown.splitlines() if not line.startswith("fedhet ")]
    page = (DOCS / "own-data.md").read_text()
    assert [line for line in lines[:6] if line not in page] == []


def assert_left_behind(page, directory):
    assert [name for name in LEFT_BEHIND[page] if not (directory / name).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", LEFT_BEHIND)
def test_commands_of_a_tutorial_run(page, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", commands(page)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_left_behind(page, tmp_path)
