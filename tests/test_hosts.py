"""A deployment across hosts: network namespaces with addresses, and a broken link."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pytest
from federation import records, small
from interruption import until
from namespaces import SUBNET, TAG, host, ip, namespaces

from fedhet.config.resolve import resolve
from fedhet.deployment.control import submit
from fedhet.deployment.local import LocalDeployment

SERVER = f"{SUBNET}.254"
"""The server's address, which all reach over links of their own."""
NAMES = ("site-0", "site-1", "site-2")
CUT_SECONDS = 20


@contextlib.contextmanager
def hosts():
    """Namespaces for the server and each site, with links between them."""
    with namespaces(("server", *NAMES)):
        ip("addr", "add", f"{SERVER}/32", "dev", "lo", within="server")
        join("", 0)  # this process, which starts the run
        for number, name in enumerate(NAMES):
            join(name, 1 + number)
        yield


def join(name: str, number: int) -> None:
    """Connect a site, or this process's own network, to the server."""
    near, far = f"{TAG}n{number}", link(name)
    ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", host("server"))
    if name:
        ip("link", "set", near, "netns", host(name))
    ends = f"{SUBNET}.{4 * number + 1}", f"{SUBNET}.{4 * number + 2}"
    for place, device, address in ((name, near, ends[0]), ("server", far, ends[1])):
        ip("addr", "add", f"{address}/30", "dev", device, within=place)
        ip("link", "set", device, "up", within=place)
    ip("route", "add", SERVER, "via", ends[1], within=name)


def link(name: str) -> str:
    """Return the server's end of the link to a site."""
    return f"to-{name or 'here'}"


@pytest.mark.timeout(900)
@pytest.mark.slow  # it waits for connections that time out
def test_client_reconnects_after_a_cut_link(tmp_path):
    out = tmp_path / "run"
    with (
        hosts(),
        LocalDeployment(
            tmp_path / "deployment",
            nodes=3,
            host=SERVER,
            command_prefix=lambda name: ("ip", "netns", "exec", host(name)),
        ) as deployment,
    ):
        config = small(
            clients=3,
            models=["mlp", "cnn2", "cnn3"],
            rounds=3,
            local_epochs=5,
            join_timeout=300.0,
            round_timeout=200.0,
            min_clients=3,
        )
        placed = resolve({**config.flat(), "out": str(out)})
        said: list[str] = []
        run = threading.Thread(
            target=submit, args=(placed, deployment.connection, said.append), daemon=True
        )
        run.start()
        until((out / "metrics.jsonl").exists)
        ip("link", "set", link("site-1"), "down", within="server")
        time.sleep(CUT_SECONDS)
        ip("link", "set", link("site-1"), "up", within="server")
        run.join(500)
        assert not run.is_alive(), said
    found = records(out)
    assert [record["round"] for record in found] == [1, 2, 3]
    assert all({"client-0", "client-2"} <= set(record["answered"]) for record in found)
    assert "client-1" in found[-1]["answered"]
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["models"]) == {f"client-{k}" for k in range(3)}
