"""`fedhet doctor`: it finds each problem, and reports no other problems."""

from __future__ import annotations

import datetime
import http.server
import json
import pwd
import shutil
import ssl
import threading
from email.utils import format_datetime

import numpy as np
import pytest
from typer.testing import CliRunner

from fedhet.cli import app
from fedhet.config import secure
from fedhet.deployment import certs, doctor


def person(uid, name="root", shell="/bin/bash"):
    return pwd.struct_passwd((name, "x", uid, uid, "", "/", shell))


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """Keys that are owned by root, regardless of the user who runs the test."""
    monkeypatch.setattr(doctor.pwd, "getpwuid", lambda uid: person(0))
    certs.make(tmp_path / "keys", [], ["site-a"], 365)
    return tmp_path / "keys"


def amiss(found):
    return [f"{each.level}: {each.text}" for each in found if each.level != "ok"]


def test_valid_keys_have_no_problems(keys):
    (keys / "notes.txt").write_text("for all to read")
    assert amiss(doctor.check_keys(keys)) == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda keys: (keys / "server.key").chmod(0o644),
            "server.key: can be read by other users (644)",
        ),
        (
            lambda keys: (keys / "nodes/site-a").chmod(0o604),
            "site-a: can be read by other users (604)",
        ),
        (
            lambda keys: (keys / "ca.crt").write_text("none"),
            "ca.crt: expected a certificate in PEM format",
        ),
        (lambda keys: certs.renew(keys, [], 20), "warning: "),
        (
            lambda keys: certs.renew(keys, [], 0),
            "1 day ago. Renew it with `fedhet certs DIR --renew`",
        ),
    ],
)
def test_problems_with_keys_are_named(keys, spoil, says):
    spoil(keys)
    assert any(says in each for each in amiss(doctor.check_keys(keys)))


@pytest.mark.parametrize(
    ("owner", "says"),
    [
        (person(998, "fedhet-server"), "error: {}: belongs to the service user 'fedhet-server'"),
        (person(1001, "fedhet", "/usr/sbin/nologin"), "error: {}: belongs to the service user"),
        (person(1001, "ada"), "warning: {}: belongs to 'ada', expected root. Use `chown root: {}`"),
        (None, "warning: {}: belongs to the unknown user"),
    ],
)
def test_key_of_the_authority_must_belong_to_root(keys, owner, says, monkeypatch):
    def known(uid):
        assert uid == (keys / "ca.key").stat().st_uid
        if owner is None:
            raise KeyError(uid)
        return owner

    monkeypatch.setattr(doctor.pwd, "getpwuid", known)
    (found,) = amiss(doctor.check_keys(keys))
    assert found.startswith(says.replace("{}", str(keys / "ca.key")))


def test_keys_of_other_users_are_recognized(keys, tmp_path):
    certs.make(tmp_path / "other", [], ["site-a"], 365)
    shutil.copy(tmp_path / "other/nodes/site-a.pub", keys / "nodes/site-a.pub")
    shutil.copy(tmp_path / "other/ca.crt", keys / "ca.crt")
    found = amiss(doctor.check_keys(keys))
    assert any("site-a.pub is not the public key of site-a" in each for each in found)
    assert any("is not signed by ca.crt" in each for each in found)


class Late(http.server.BaseHTTPRequestHandler):
    """A server whose clock shows another time."""

    seconds = 0.0
    date = ""

    def do_GET(self):
        now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.seconds)
        self.send_response_only(404)
        self.send_header("Date", self.date or format_datetime(now, usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def served(keys):
    def serve(seconds, date=""):
        handler = type("Handler", (Late,), {"seconds": seconds, "date": date})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.pem", keys / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"127.0.0.1:{server.server_port}"

    started = []
    yield serve
    for server in started:
        server.shutdown()
        server.server_close()


def test_clock_difference_of_an_hour_is_reported(keys, served):
    assert amiss(doctor.check_server(served(0.0), keys / "ca.crt")) == []
    (found,) = amiss(doctor.check_server(served(3600.0), keys / "ca.crt"))
    assert "seconds. Synchronize the clocks with NTP." in found


@pytest.mark.parametrize("date", ["soon", "2026-11-25", "Wed, 99 Nov 2026 10:00:00 GMT"])
def test_invalid_date_gives_no_clock_difference(keys, served, date):
    found = list(doctor.check_server(served(0.0, date), keys / "ca.crt"))
    assert [each.subject for each in found] == ["server"]


def test_date_without_a_time_zone_is_utc(keys, served):
    (found,) = amiss(doctor.check_server(served(0.0, "Mon, 01 Jan 2001 00:00:00"), keys / "ca.crt"))
    assert "Synchronize the clocks with NTP" in found


def test_server_of_another_authority_is_rejected(keys, served, tmp_path):
    certs.make(tmp_path / "other", [], [], 365)
    (found,) = amiss(doctor.check_server(served(0.0), tmp_path / "other/ca.crt"))
    assert "certificate rejected" in found
    (silent,) = amiss(doctor.check_server("127.0.0.1:9", keys / "ca.crt"))
    assert "no server found at 127.0.0.1:9 (Connection refused)" in silent


def test_failing_check_does_not_stop_other_checks(tmp_path, monkeypatch):
    what = [each.subject for each in doctor.check_machine(tmp_path)]
    assert {"packages", "memory", "disk", "ports"} <= {*what}
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: 1 / 0)
    found = [*doctor.check_machine(tmp_path)]
    assert any("ZeroDivisionError" in each.text for each in found)
    assert any(each.subject == "disk" for each in found)


def test_outdated_package_is_named(tmp_path, monkeypatch):
    version = doctor.metadata.version
    monkeypatch.setattr(
        doctor.metadata, "version", lambda name: "1.0" if name == "flwr" else version(name)
    )
    assert any(
        "flwr must be " in each and "got 1.0" in each
        for each in amiss(doctor.check_machine(tmp_path))
    )


@pytest.fixture
def site(tmp_path):
    """A function that writes a site with peers, and returns the value of its --node-config."""

    def written(declared="", classes=("0", "1", "2"), count=40, name="site-a", **more):
        names = ["site-a", "site-b", "site-c"]
        peers, private = secure.simulated_peers(names, classes=dict.fromkeys(names, classes))
        secure.write_simulated(tmp_path / "state", peers, private)
        (data := tmp_path / "data").mkdir()
        x = np.random.default_rng(0).random((count, 1, 4, 4), dtype=np.float32)
        np.savez(data / "train.npz", x=x, y=np.arange(count) % 3)
        text = declared or "num-classes = 3\nshape = [1, 4, 4]\nrows = 30\n"
        (data / "site.toml").write_text(text)
        file, key = secure.simulated_files(tmp_path / "state", "site-a")
        values = {"name": name, "data": f"npz:{data}", "peers": file, "peers-key": key, **more}
        texts = {k: v if isinstance(v, int) else f'"{v}"' for k, v in values.items()}
        return " ".join(f"{k}={text}" for k, text in texts.items() if text != '"None"')

    return written


@pytest.mark.parametrize("more", [{}, {"privacy": "epsilon=8"}, {"peers": None, "peers-key": None}])
def test_valid_site_has_no_problems(site, more):
    found = list(doctor.check_site(site(**more)))
    assert amiss(found) == []
    assert found[-1].subject == "data"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": "x"}, ["'node-config lr': expected number >= 0"]),
        ({"count": 2}, ["expected at least 2 training samples"]),
        ({"name": "site-d"}, ["peers: site 'site-d' not found in the peers file"]),
        ({"name": "site-b"}, ["expected the private key that matches 'site-b'"]),
        ({"name": None}, ["node-config 'name': not set, expected both 'name' and 'data'"]),
        ({"peers": "none.toml"}, ["none.toml: cannot read the file"]),
        ({"peers-key": None}, ["node-config 'peers-key': not set, expected both files"]),
        ({"optimizer": "sgd"}, ["node-config 'optimizer': must not be set with secure aggregat"]),
        ({"privacy": "8"}, ["node-config 'privacy': expected a budget such as"]),
        ({"declared": "shape = [1, 4, 4]"}, ["site.toml: num-classes: expected an integer"]),
        (
            {"declared": "num-classes = 3\nshape = [1, 4, 5]"},
            ["site.toml: shape: expected the shape of the data, [1, 4, 4], got [1, 4, 5]"],
        ),
        (
            {"declared": "num-classes = 3\nshape = [1, 4, 4]", "privacy": "epsilon=8"},
            ["site.toml: rows: not found, expected the public approximate number"],
        ),
        (
            {"declared": "num-classes = 3\nshape = [1, 4, 4]\nrows = 9", "privacy": "epsilon=8"},
            ["rows = 9, but the site has 32 training samples"],
        ),
        ({"privacy": "epsilon=8 delta=0.05"}, ["'privacy': delta must be below 1 / samples"]),
        ({"classes": ("0", "3")}, ["classes listed for site-a: expected classes below 3"]),
        ({"min-samples-per-class": 20}, ["expected at least 20 training samples of each class"]),
        (
            {"optimizer": "sgd", "peers-key": "none", "declared": "classes = 3"},
            [
                "node-config 'optimizer': must not be set",
                "none: cannot read the file",
                "site.toml: classes: unknown setting",
            ],
        ),
    ],
)
def test_each_problem_of_a_site_is_one_line(site, changes, says):
    found = amiss(doctor.check_site(site(**changes)))
    assert len(found) == len(says), found
    for line, text in zip(found, says, strict=True):
        assert text in line
        assert "\n" not in line


def test_command_checks_a_site(site, tmp_path):
    config = site()
    done = CliRunner().invoke(app, ["doctor", "--site", config, "--json"])
    assert {"peers", "declaration", "data"} <= {each["subject"] for each in json.loads(done.output)}
    assert done.exit_code == 0
    (tmp_path / "data" / "site.toml").unlink()
    done = CliRunner().invoke(app, ["doctor", "--site", config])
    assert done.exit_code == 1
    assert "site.toml: file not found. A site with 'peers' or 'privacy' declares" in done.output
    (invalid,) = amiss(doctor.check_site("name=a"))
    assert "The provided configuration string is in an invalid format" in invalid


def test_command_fails_if_a_check_fails(keys):
    done = CliRunner().invoke(app, ["doctor", str(keys), "--json"])
    assert (done.exit_code, {each["level"] for each in json.loads(done.output)} - {"warning"}) == (
        0,
        {"ok"},
    )
    (keys / "ca.key").chmod(0o644)
    assert CliRunner().invoke(app, ["doctor", str(keys)]).exit_code == 1
    assert CliRunner().invoke(app, ["doctor", str(keys / "none")]).exit_code == 2


def test_missing_authority_differs_from_a_silent_server(keys, served):
    absent = keys / "absent.crt"
    (found,) = amiss(doctor.check_server(served(0.0), absent))
    assert found.endswith(f"{absent}: file not found, expected the CA's certificate")
