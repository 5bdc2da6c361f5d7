"""Who may not take part in a deployment, or asks too much of a site: real processes over gRPC."""

import contextlib
import shutil
import time

import psutil
import pytest
from federation import records, small
from test_faults import Run, ended, failed, placed, training, until

from fedhet.deployment import certs
from fedhet.deployment.flower_cli import submit
from fedhet.deployment.local import LocalDeployment, site_name
from fedhet.errors import FedhetError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def deployment(tmp_path):
    with LocalDeployment(tmp_path / "deployment", nodes=3) as running:
        yield running


def stranger(deployment, index, **options):
    """Start node `index` anew with other options; return its process."""
    deployment.stop(site_name(index))
    deployment.start_node(index, **options)
    return deployment.processes[site_name(index)]


def is_alive(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_strangers_take_no_part(deployment, tmp_path):
    """A key that is not registered, another authority's certificate, and no TLS at all."""
    others = tmp_path / "others"
    certs.make(others, ["127.0.0.1"], ["site-2"], days=1)
    unregistered = {"auth-supernode-private-key": others / certs.NODES / "site-2"}
    ways = [
        unregistered,
        {"root-certificates": others / certs.CA_CERTIFICATE},
        {"root-certificates": None, "insecure": ""},
        {"root-certificates": None, "auth-supernode-private-key": None, "insecure": ""},
    ]
    for options in ways:
        said = len(deployment.log_of(site_name(2)))
        process = stranger(deployment, 2, **options)
        end = time.monotonic() + 20
        while time.monotonic() < end and not ended(process):
            time.sleep(0.5)
        assert "SuperNode ID" not in deployment.log_of(site_name(2))[said:], options
    stranger(deployment, 2, **unregistered)
    going = Run(deployment, tmp_path / "run", local_epochs=1, join_timeout=45.0)
    found = going.end()
    assert all(record["answered"] == ["client-0", "client-1"] for record in found)


def test_a_site_that_stands_still_for_ninety_seconds(deployment, tmp_path):
    """All of its processes stop, as those of a machine that sleeps; then they go on."""
    going = Run(deployment, tmp_path / "run", rounds=4)
    going.wait_for_round(2)
    training(deployment, 1)
    node = deployment.processes[site_name(1)]
    asleep = [node, *psutil.Process(node.pid).children(recursive=True)]
    for process in asleep:
        process.suspend()
    time.sleep(90)
    for process in asleep:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    found = going.end()
    assert len(found) == 4
    assert all({"client-0", "client-2"} <= set(record["answered"]) for record in found)
    assert all(failed(record) <= {"client-1"} for record in found)
    assert "client-1" in found[-1]["answered"]


def test_a_million_epochs_are_refused_by_the_sites_and_end_with_the_run(deployment, tmp_path):
    said: list[str] = []
    config = placed(small("felo", clients=3, local_epochs=10**6, join_timeout=20.0), tmp_path / "r")
    with pytest.raises(FedhetError):
        submit(config, deployment.connection, said.append)
    assert "this site's limit 'most-epochs' is 1000" in " ".join(said)
    at_work = [
        process
        for name in map(site_name, range(3))
        for process in psutil.Process(deployment.processes[name].pid).children(recursive=True)
        if "clientapp" in process.name()
    ]
    until(lambda: not any(is_alive(process) for process in at_work))
    shutil.rmtree(tmp_path / "r", ignore_errors=True)
    submit(placed(small("felo", clients=3), tmp_path / "next"), deployment.connection, said.append)
    assert len(records(tmp_path / "next")) == 2
