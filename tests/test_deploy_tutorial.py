"""The commands of docs/deploy.md, in order, as one script on this machine."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedhet.deployment.local import free_port

PAGE = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_of_the_tutorial_lead_to_a_report_and_predictions(tmp_path):
    (python,) = blocks("python")
    (tmp_path / "make_sites.py").write_text(python)
    script = "\n".join(block for block in blocks("bash") if "deploy-local" not in block)
    server = "fedhet server keys"
    assert server in script
    defaults = f"{server} --address 127.0.0.1:9092 --control 127.0.0.1:8000"
    script = script.replace(server, defaults)
    ports = {port: str(free_port()) for port in ("8000", "9092", "9094", "9095", "9096")}
    script = re.sub("|".join(ports), lambda found: ports[found[0]], script)
    shell = subprocess.Popen(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}",
            "FLWR_HOME": str(tmp_path / "flower"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = shell.communicate()
    finally:  # After a failure, the server and the sites are still running.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
    assert shell.returncode == 0, printed
    summary = json.loads((tmp_path / "runs/first/summary.json").read_text())
    assert summary["models"] == {"site-a": "mlp", "site-b": "cnn2", "site-c": "cnn3"}
    assert (tmp_path / "runs/first/report.html").exists()
    (line,) = [line for line in printed.splitlines() if line.startswith("0  ")]
    assert line.split()[1] == "0", "the first digit is a zero"
