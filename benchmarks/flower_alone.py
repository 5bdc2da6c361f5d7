"""Throughput and memory of Flower without fedhet, for a payload in both directions.

python -m benchmarks.flower_alone [MB]

The deployment is the same as in `benchmarks.payload`, but its apps only send an array and return
it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tomli_w
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.client import ClientApp
from flwr.server import Grid, ServerApp

from benchmarks.payload import MB, watched
from fedhet.deployment.control import CONNECTION
from fedhet.deployment.local import LocalDeployment

server = ServerApp()
client = ClientApp()


@server.main()  # type: ignore[untyped-decorator]
def send(grid: Grid, context: Context) -> None:
    """Send the array to the only node twice, and print the throughput of each exchange."""
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(1.0)
    mb = float(context.run_config["mb"])
    array = np.random.default_rng(0).random(int(mb * MB / 4), dtype=np.float32)
    for number in (1, 2):
        begun = time.perf_counter()
        content = RecordDict({"arrays": ArrayRecord([array])})
        (reply,) = grid.send_and_receive([Message(content, nodes[0], "train")])
        seconds = time.perf_counter() - begun
        assert not reply.has_error()
        print(f"round {number}: {2 * mb:.0f} MB in {seconds:.1f} s: {2 * mb / seconds:.0f} MB/s")


@client.train()  # type: ignore[untyped-decorator]
def answer(message: Message, context: Context) -> Message:
    """Return the content of the message to the server."""
    return Message(message.content, reply_to=message)


def main() -> None:
    """Run the deployment, and print the throughput and the peak memory."""
    mb = float(sys.argv[1]) if len(sys.argv) > 1 else 500.0
    os.environ |= {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    ours = "benchmarks.flower_alone"
    parts = {"serverapp": f"{ours}:server", "clientapp": f"{ours}:client"}
    app = {"publisher": "fedhet", "components": parts, "config": {"mb": mb}}
    project = {"name": "flower-alone", "version": "1.0.0", "dependencies": []}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "app"
        home.mkdir()
        content = {"project": project, "tool": {"flwr": {"app": app}}}
        (home / "pyproject.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
        deployment = LocalDeployment(Path(folder) / "deployment", nodes=1)
        with deployment, watched() as peaks:
            connection = deployment.connection
            run = connection.flwr("run", home, CONNECTION, "--format", "json")
            connection.follow(str(json.loads(run)["run-id"]), print)
    for name, peak in sorted(peaks.items()):
        print(f"{name}: peak {peak / MB:.0f} MB, {peak / MB / mb:.1f} x the payload")


if __name__ == "__main__":
    main()
