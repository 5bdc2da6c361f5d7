"""Signed apps: sites with trusted publishers run only apps that such a publisher signed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from federation import small
from flwr.proto.control_pb2 import StartRunRequest, StartRunResponse
from flwr.proto.fab_pb2 import Fab as FabMessage
from flwr.supercore.fab import Fab
from typer.testing import CliRunner

from fedhet.base.errors import FedhetError, SettingsError
from fedhet.cli import app
from fedhet.config.resolve import resolve
from fedhet.deployment import certs, control, doctor
from fedhet.deployment.control import build_app, submit
from fedhet.deployment.local import LocalDeployment
from fedhet.deployment.processes import UNPROTECTED, forwarding, run_node
from fedhet.deployment.transport import FLOWER
from fedhet.server.nodes import UNSIGNED

FEDHET = (sys.executable, "-m", "fedhet")
REFUSALS = ("The FAB could not be verified", "FAB verification failed")
APP = b"the bytes of an app"


@pytest.fixture(scope="module")
def publisher(tmp_path_factory):
    """The private key of a publisher, and the file of a site that trusts the publisher."""
    folder = tmp_path_factory.mktemp("publisher")
    return certs.make_publisher_key(folder, "hospital")


# --- keys and signatures ------------------------------------------------------------------------


def test_publisher_files_are_a_key_pair_with_a_secret_private_key(publisher):
    private, public = publisher
    assert (private.name, public.name) == ("hospital.publisher.key", "hospital.publisher.yaml")
    assert [path.stat().st_mode & 0o777 for path in publisher] == [0o600, 0o644]
    ((name, text),) = yaml.safe_load(public.read_text()).items()
    key = load_ssh_private_key(private.read_bytes(), None)
    assert load_ssh_public_key(text.encode()) == key.public_key()
    assert name == "ed25519-" + hashlib.sha256(key.public_key().public_bytes_raw()).hexdigest()[:32]
    assert certs.read_publishers(public) == {name: text}
    assert certs.read_publisher_key(private).public_key() == key.public_key()


def test_second_publisher_key_raises(tmp_path):
    words = ["certs", str(tmp_path / "new"), "--publisher", "lab"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "lab.publisher.key",
        "lab.publisher.yaml",
    }
    assert "keep lab.publisher.key secret, and off the server" in done.output
    assert isinstance(CliRunner().invoke(app, words).exception, FedhetError)
    for others in (["--key", "a"], ["--peer", "a"], ["--renew"], ["--nodes", "2"], ["--host", "h"]):
        done = CliRunner().invoke(app, [*words, *others])
        assert isinstance(done.exception, SettingsError), others


def test_signature_covers_time_and_digest(publisher):
    private, public = publisher
    verifications = certs.sign_app(certs.read_publisher_key(private), APP)
    assert verifications.pop("valid_license"), "a SuperNode refuses apps without it"
    ((name, text),) = verifications.items()
    values = json.loads(text)
    signature = base64.urlsafe_b64decode(values["signature"] + "==")
    key = load_ssh_public_key(yaml.safe_load(public.read_text())[name].encode())
    message = struct.pack(">Q", values["signed_at"]) + hashlib.sha256(APP).digest()
    key.verify(signature, message)
    with pytest.raises(InvalidSignature):
        key.verify(signature, message[:-1] + bytes([message[-1] ^ 1]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected at least one publisher, got none"),
        ("{}", "expected at least one publisher, got none"),
        ("- a", "expected at least one publisher, got a list"),
        ("a: [", "cannot read the publishers"),
        ("a: 3", "'a': expected an id and an Ed25519 public key"),
        ("a: ssh-ed25519 AAAA", "'a': expected an id and an Ed25519 public key"),
        ("EC", "'a': expected an id and an Ed25519 public key"),
    ],
)
def test_file_without_trusted_publishers_raises(tmp_path, content, message):
    """Flower takes an empty mapping for no file at all, and runs unsigned apps."""
    path = tmp_path / "publishers.yaml"
    if content == "EC":
        certs.make_node_key(tmp_path / "node")
        content = "a: " + (tmp_path / "node.pub").read_text()
    path.write_text(content)
    with pytest.raises(SettingsError, match=message):
        certs.read_publishers(path)
    findings = [each for each in doctor.check_keys(tmp_path) if each.subject == "publishers"]
    assert [each.level for each in findings] == ["error"]
    with pytest.raises(SettingsError, match=message):
        run_node(["--trusted-entities", str(path)], pytest.fail)


def test_doctor_counts_the_publishers_that_a_site_trusts(tmp_path, publisher):
    certs.make_publisher_key(tmp_path, "other")
    both = publisher[1].read_text() + (tmp_path / "other.publisher.yaml").read_text()
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "publishers.yaml").write_text(both)
    (found,) = doctor.check_keys(tmp_path)
    assert found.level == "ok"
    assert found.text.endswith("publishers.yaml trusts 2 publishers of signed apps")


def test_invalid_or_readable_signing_key_raises(tmp_path):
    private, _ = certs.make_publisher_key(tmp_path, "lab")
    private.chmod(0o644)
    with pytest.raises(SettingsError, match=r"lab\.publisher\.key.*644"):
        certs.read_publisher_key(private)
    node, _ = certs.make_node_key(tmp_path / "node")
    with pytest.raises(SettingsError, match="Ed25519"):
        certs.read_publisher_key(node)
    with pytest.raises(SettingsError, match="absent"):
        certs.read_publisher_key(tmp_path / "absent")


# --- the site's start, and the server's reply ----------------------------------------------------


def node(*words):
    """Run `fedhet node` with options that make Flower exit at once."""
    command = [*FEDHET, "node", *map(str, words), "--version"]
    environment = {**os.environ, "COLUMNS": "80", "FEDHET_WARM_WORKER": "0"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_site_without_trusted_publishers_warns(publisher):
    done = node()
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, UNPROTECTED)
    assert f"Flower version: {FLOWER}" in done.stdout, "Flower's node runs with the same options"
    done = node(f"--trusted-entities={publisher[1]}")
    assert done.returncode == 0
    assert "warning" not in done.stderr


class State:
    """A state of a SuperLink that records the apps that it stores."""

    federation = "default"

    def __init__(self):
        self.apps = []

    def store_app(self, fab, **details):
        self.apps.append((fab, details))
        return fab.hash_str


def started(request, state):
    """Store the app of a request as Flower 1.39's `start_run` does, without its signatures."""
    assert state.federation == "default"
    state.store_app(fab=Fab("hash", request.fab.content, {}), app_id="@a/b")
    return StartRunResponse(run_id=7)


def test_server_keeps_signatures_of_a_submitted_app():
    handler = forwarding(lambda request, account, state, *rest, source: started(request, state))
    for given in ({}, {"key": "a signature"}):
        state = State()
        request = StartRunRequest(fab=FabMessage(content=APP, verifications=given))
        reply = handler(request, None, state, "grpc-rere", source="unknown")
        ((fab, details),) = state.apps
        assert (fab.content, fab.verifications, details) == (APP, given, {"app_id": "@a/b"})
        assert reply.note == (control.FORWARDED if given else "")


def test_run_on_a_server_that_drops_signatures_is_stopped(monkeypatch, tmp_path, publisher):
    stopped = []
    client = SimpleNamespace(
        StartRun=lambda request: StartRunResponse(run_id=7),
        StopRun=lambda request: stopped.append(request.run_id),
        close=lambda: None,
    )
    monkeypatch.setattr(
        "flwr.supercore.control.ControlHttpClient.from_server_address", lambda **options: client
    )
    certs.make(tmp_path, [], [], 1)
    place = control.Connection(tmp_path, "localhost:8000", tmp_path / "ca.crt")
    assert control._start_run(place, APP, None) == "7"
    assert stopped == []
    with pytest.raises(FedhetError, match="fedhet server"):
        control._start_run(place, APP, certs.read_publisher_key(publisher[0]))
    assert stopped == [7]


# --- a deployment --------------------------------------------------------------------------------


def refusals(deployment):
    """Return how often the first site's node, which is Flower's program, refused an app."""
    log = deployment.log_of("site-0")
    return sum(log.count(words) for words in REFUSALS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sites_train_a_signed_app_and_refuse_unsigned_foreign_and_changed_apps(
    monkeypatch, tmp_path, publisher
):
    """Flower's server and nodes; the server is honest, so this test changes what it is sent."""
    key = certs.read_publisher_key(publisher[0])
    stranger = certs.read_publisher_key(certs.make_publisher_key(tmp_path, "stranger")[0])
    sign = certs.sign_app

    def config(name, timeout):
        run = small("fedavg", clients=2, models=["mlp"], rounds=1, join_timeout=timeout)
        return resolve({**run.flat(), "out": str(tmp_path / name)})

    deployment = LocalDeployment(tmp_path / "deployment", nodes=2)
    deployment.prepare()
    deployment.start_server()
    try:
        for k in range(2):
            deployment.register(k)
            deployment.start_node(k, **{"trusted-entities": publisher[1]})
        said = []
        submit(config("signed", 300.0), deployment.connection, said.append, key)
        assert (tmp_path / "signed" / "summary.json").exists(), "\n".join(said)
        for name, signer, signed in (
            ("unsigned", None, None),
            ("foreign", stranger, None),
            ("changed", key, build_app(config("signed", 300.0))),
        ):
            monkeypatch.setattr(
                control, "sign_app", lambda k, content, signed=signed: sign(k, signed or content)
            )
            said, before = [], refusals(deployment)
            with pytest.raises(FedhetError, match="ended with status"):
                submit(config(name, 20.0), deployment.connection, said.append, signer)
            assert any(UNSIGNED in line for line in said), "\n".join(said)
            assert refusals(deployment) > before, "the node itself refuses the app"
            assert not (tmp_path / name / "summary.json").exists()
            states = {path.parent.name for path in tmp_path.rglob("client-0") if path.is_dir()}
            assert name not in states
    finally:
        deployment.stop()
