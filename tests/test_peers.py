"""Peers file of secure aggregation: its rules, digest and keys, and a node's settings."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import tempfile
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from federation import small
from typer.testing import CliRunner

from fedhet.base.errors import SettingsError
from fedhet.cli import app
from fedhet.client_runtime.app import within_limits
from fedhet.client_runtime.node import NodeSettings, read_node
from fedhet.config import secure
from fedhet.config.secure import Peer, Peers, read_key, read_peers, read_public, write_key
from fedhet.deployment.local import LocalDeployment

KEYS = [X25519PrivateKey.generate().public_key().public_bytes_raw() for _ in range(6)]
SITES = tuple(Peer(f"site-{k}", KEYS[k], ("0", "10")) for k in range(5))


def public(key):
    return key.public_key().public_bytes_raw()


def command(*words):
    return CliRunner().invoke(app, [*map(str, words)])


@pytest.mark.parametrize("colluding", [1, 2, 3])
def test_threshold_leaves_two_honest_sites_in_every_sum(colluding):
    """Bonawitz et al. 2017, section 6.2: t > (n + c) / 2, here by one more; and t > 2n / 3."""
    for n in range(colluding + 2, 60):
        peers = Peers(
            tuple(Peer(f"s{k}", k.to_bytes(2) + KEYS[0][2:]) for k in range(n)), colluding
        )
        t = peers.threshold(n)
        assert t == max(ceil((n + colluding) / 2) + 1, 2 * n // 3 + 1)
        assert t <= n
        assert 2 * t - n - colluding >= 2
        assert 3 * t > 2 * n
        assert 2 * peers.least > n
        assert peers.least >= peers.smallest == max(3, colluding + 2)


def test_thresholds_are_those_of_the_documentation():
    peers = Peers(SITES)
    assert [peers.threshold(n) for n in (3, 4, 5, 10, 50)] == [3, 4, 4, 7, 34]


def test_peers_file_round_trips(tmp_path):
    weighty = replace(SITES[4], weight=4)
    peers = Peers((weighty, *SITES[3::-1]), colluding=2, least=4, server="malicious")
    secure.write_peers(tmp_path / "peers.toml", peers)
    found = read_peers(tmp_path / "peers.toml")
    assert found == peers
    assert found.names == tuple(f"site-{k}" for k in range(5))
    assert found.digest == peers.digest
    with pytest.raises(SettingsError, match="already exists"):
        secure.write_peers(tmp_path / "peers.toml", peers)


def test_digest_covers_every_value():
    base = Peers(SITES, 1, 3)
    sites = [[f"site-{k}", KEYS[k].hex(), ["0", "10"], 1] for k in range(5)]
    expected = b"fedhet peers\0" + json.dumps([2, 1, 3, "curious", sites]).encode()
    assert base.digest == hashlib.sha256(expected).digest()
    others = [
        Peers(SITES, 2, 4), Peers(SITES, 1, 4), Peers(SITES, 1, 3, "malicious"),
        Peers(SITES[:4], 1, 3),
        Peers((*SITES[:4], Peer("site-5", KEYS[4], ("0", "10"))), 1, 3),
        Peers((*SITES[:4], Peer("site-4", KEYS[5], ("0", "10"))), 1, 3),
        Peers((*SITES[:4], Peer("site-4", KEYS[4], ("0", "1"))), 1, 3),
        Peers((*SITES[:4], Peer("site-4", KEYS[4])), 1, 3),
        Peers((*SITES[:4], Peer("site-4", KEYS[4], ("0", "10"), 2)), 1, 3),
    ]  # fmt: skip
    assert len({base.digest, *(each.digest for each in others)}) == len(others) + 1
    assert Peers(SITES[::-1], 1, 3).digest == base.digest


LOW_ORDER = "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"
P = (2**255 - 19).to_bytes(32, "little").hex()
RULES = 'colluding = 1\nleast = 3\nserver = "curious"\n'
BAD = {
    "colluding = 1\nleast = 3\n": "server: not found",
    "colluding = 1\nleast = 0\nserver = 'curious'\n": "least: expected an integer from 1",
    "colluding = true\nleast = 3\nserver = 'curious'\n": "sites: expected an integer from 3",
    RULES: "sites: expected an integer from 3 to 1000, got 0",
    f"{RULES}site = 4\n": r"site: expected \[\[site\]\] tables",
    f"{RULES}minimum = 1\n": "minimum: unknown",
    f"{RULES}[[site]]\nname = 'a'\n": "a: key: expected an X25519",
    f"{RULES}[[site]]\nname = 'a'\nkey = '{KEYS[0].hex()}'\nweight = 'x'\n": "a: weight: expected",
    "colluding = 1\nleast": "not valid TOML",
}


@pytest.mark.parametrize(("text", "fault"), BAD.items(), ids=BAD.values())
def test_damaged_file_raises_with_its_name(tmp_path, text, fault):
    path = tmp_path / "peers.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=fault) as caught:
        read_peers(path)
    assert str(path) in str(caught.value)
    with pytest.raises(SettingsError, match=r"absent\.toml"):
        read_peers(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("sites", "rules", "fault"),
    [
        (SITES[:2], {}, "sites: expected an integer from 3 to 1000, got 2"),
        ((*SITES, SITES[0]), {}, "'site-0' twice"),
        ((*SITES, ("b", KEYS[0])), {}, "same key twice"),
        ((*SITES, ("server", KEYS[5])), {}, "name: expected letters"),
        ((*SITES, ("../b", KEYS[5])), {}, "name: expected letters"),
        ((*SITES, ("b", KEYS[5][:31])), {}, "b: key: expected an X25519 public key"),
        ((*SITES, ("b", bytes(32))), {}, "b: key"),  # of low order: no secret
        ((*SITES, ("b", bytes.fromhex(LOW_ORDER))), {}, "b: key"),
        ((*SITES, ("b", bytes.fromhex(P))), {}, "b: key"),
        ((*SITES, ("b", (2**255 - 9).to_bytes(32, "little"))), {}, "b: key"),
        (SITES, {"colluding": 0}, "colluding: expected an integer from 1 to 3, got 0"),
        (SITES, {"colluding": 4}, "colluding: expected an integer from 1 to 3, got 4"),
        (SITES, {"least": 2}, "least: expected an integer from 3 to 5, got 2"),
        (SITES, {"colluding": 3, "least": 4}, "least: expected an integer from 5 to 5, got 4"),
        (SITES, {"least": 6}, "least: expected an integer from 3 to 5, got 6"),
        (SITES, {"server": "honest"}, "server: expected curious or malicious, got 'honest'"),
        ((*SITES, ("b", KEYS[5], (), 0)), {}, "b: weight: expected an integer from 1 to 1000"),
        ((*SITES, ("b", KEYS[5], (), 1001)), {}, "b: weight: expected an integer from 1 to 1000"),
        ((*SITES, ("b", KEYS[5], (), 6)), {}, "no site with more weight than the other sites"),
    ],
)
def test_ineffective_rule_raises(sites, rules, fault):
    with pytest.raises(SettingsError, match=fault):
        Peers(tuple(site if isinstance(site, Peer) else Peer(*site) for site in sites), **rules)


def test_unknown_site_raises():
    with pytest.raises(SettingsError, match="site-9"):
        Peers(SITES).peer("site-9")


def test_holders_of_a_class_are_the_sites_that_list_it():
    peers = Peers((*SITES[:4], Peer("b", KEYS[5], ("1",))))
    assert peers.holders == {0: {*peers.names} - {"b"}, 10: {*peers.names} - {"b"}, 1: {"b"}}


def test_key_readable_by_others_raises(tmp_path):
    private, shared = write_key(tmp_path / "keys", "site-0", ["3", "1"])
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(private.parent.stat().st_mode) == 0o700
    key, peer = read_key(private), read_public(shared)
    assert peer == Peer("site-0", public(key), ("1", "3"))
    other = X25519PrivateKey.generate()  # it is a key that agrees on secrets
    secret = other.exchange(X25519PublicKey.from_public_bytes(peer.key))
    assert key.exchange(other.public_key()) == secret
    assert b"PRIVATE" not in shared.read_bytes()
    with pytest.raises(SettingsError, match="already exists"):
        write_key(tmp_path / "keys", "site-0")
    private.chmod(0o644)
    rule = r"only its owner and this process's groups can read, got mode 644, .*\. Use `chmod 600"
    with pytest.raises(SettingsError, match=rule):
        read_key(private)


@pytest.mark.parametrize(
    ("mode", "owner", "group", "accepted"),
    [
        (0o600, "self", "own", True),
        (0o400, "self", "own", True),
        (0o440, "root", "own", True),  # a secret in Kubernetes, with fsGroup
        (0o640, "root", "own", True),  # a secret of Docker Compose
        (0o440, "root", "root", True),  # a credential of systemd with an access control list
        (0o440, "self", "own", True),
        (0o440, "self", "root", True),
        (0o440, "self", "other", False),
        (0o440, "root", "other", False),
        (0o440, "other", "own", False),
        (0o660, "root", "own", False),
        (0o620, "self", "own", False),
        (0o650, "root", "own", False),
        (0o444, "root", "own", False),
        (0o604, "self", "own", False),
        (0o602, "self", "own", False),
        (0o601, "self", "own", False),
    ],
)
def test_key_may_be_readable_by_a_group_of_the_process(
    monkeypatch, tmp_path, mode, owner, group, accepted
):
    """The process runs as user 4001 with the groups 4001 and 10001."""
    private, _ = write_key(tmp_path, "site-0")
    monkeypatch.setattr(os, "geteuid", lambda: 4001)
    monkeypatch.setattr(os, "getegid", lambda: 4001)
    monkeypatch.setattr(os, "getgroups", lambda: [10001])
    real = Path.stat

    def seen(path, **options):
        if path != private:
            return real(path, **options)
        user = {"self": 4001, "root": 0, "other": 4002}[owner]
        members = {"own": 10001, "root": 0, "other": 4003}[group]
        return os.stat_result((stat.S_IFREG | mode, 1, 1, 1, user, members, 1, 0, 0, 0))

    monkeypatch.setattr(Path, "stat", seen)
    if accepted:
        assert read_key(private)
        return
    with pytest.raises(SettingsError, match=rf"site-0\.peer\.key: .*{mode:o}") as caught:
        read_key(private)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "accepted"),
    [((2, 4, os.geteuid()), True), ((2, 4, 12345), False), ((2, 0, 12345), True),
     ((8, 4, 12345), False), ((8, 4, os.getegid()), True)],
)  # fmt: skip
def test_key_opened_by_an_acl_raises(tmp_path, monkeypatch, entry, accepted):
    private, _ = write_key(tmp_path, "site-0")
    anyone = 2**32 - 1
    entries = sorted([(1, 6, anyone), entry, (4, 0, anyone), (16, 4, anyone), (32, 0, anyone)])
    packed = b"".join(struct.pack("<HHI", *each) for each in entries)
    lists = {(private, "system.posix_acl_access"): struct.pack("<I", 2) + packed}
    monkeypatch.setattr(os, "getxattr", lambda *sampled: lists[sampled], raising=False)
    if accepted:
        assert read_key(private)
        return
    with pytest.raises(SettingsError, match="setfacl -b"):
        read_key(private)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_unprivileged_process_reads_the_key_that_a_container_runtime_mounts(tmp_path):
    """The files are real: a key of root, in a group that the reader has."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folder is root's alone
        Path(folder).chmod(0o755)
        private = Path(folder) / "site-0.peer.key"
        private.write_bytes(write_key(tmp_path, "site-0")[0].read_bytes())
        results = []
        for group, mode in ((10001, 0o440), (4001, 0o440), (4003, 0o440), (10001, 0o444)):
            os.chown(private, 0, group)
            private.chmod(mode)
            if (child := os.fork()) == 0:
                with contextlib.suppress(BaseException):
                    os.setgroups([10001])
                    os.setgid(4001)
                    os.setuid(4001)
                    read_key(private)
                    os._exit(0)
                os._exit(1)
            results.append(os.waitpid(child, 0)[1] == 0)
    assert results == [True, True, False, False]


def test_file_without_a_valid_key_raises(tmp_path):
    path = tmp_path / "a.key"
    path.write_bytes(b"nothing")
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=r"a\.key"):
        read_key(path)
    assert command("certs", tmp_path / "node", "--key", "site-0").exit_code == 0
    with pytest.raises(SettingsError, match="site-0"):
        read_key(tmp_path / "node" / "site-0")
    with pytest.raises(SettingsError, match="absent"):
        read_key(tmp_path / "absent")


def test_simulated_clients_have_new_keys_each_time_and_keep_them(tmp_path):
    names = ["a", "b", "c"]
    first, keys = secure.simulated_peers(names, classes={"a": ["4"]})
    second, _ = secure.simulated_peers(names, classes={"a": ["4"]})
    assert first.names == second.names
    assert not {peer.key for peer in first.peers} & {peer.key for peer in second.peers}
    assert first.peer("a").classes == ("4",)
    assert {name: public(key) for name, key in keys.items()} == {p.name: p.key for p in first.peers}
    secure.write_simulated(tmp_path, first, keys)
    secure.write_simulated(tmp_path, second, keys)  # a resumed run
    for name in names:
        file, key = secure.simulated_files(tmp_path, name)
        assert read_peers(file) == first
        assert public(read_key(key)) == first.peer(name).key


def test_sites_join_their_files_and_see_one_digest(tmp_path):
    for k in range(3):
        words = ["certs", tmp_path / str(k), "--peer", f"site-{k}", "--classes", "0-2,5"]
        words += ["--weight", 2] if k == 2 else []
        assert command(*words).exit_code == 0
    files = [tmp_path / str(k) / f"site-{k}.peer.toml" for k in range(3)]
    outs = [tmp_path / "first.toml", tmp_path / "second.toml"]
    shown = []
    for out, order in zip(outs, (files, files[::-1]), strict=True):
        result = command("peers", *order, "--out", out)
        assert result.exit_code == 0, result.output
        shown.append(result.output.splitlines()[1:])
    assert shown[0] == shown[1] == command("peers", outs[0]).output.splitlines()
    peers = read_peers(outs[0])
    assert (peers.colluding, peers.least, peers.server) == (1, 3, "curious")
    assert [peer.weight for peer in peers.peers] == [1, 1, 2]
    assert peers.peer("site-1").classes == ("0", "1", "2", "5")
    digest = next(line for line in shown[0] if line.startswith("digest: "))
    assert digest.removeprefix("digest: ").replace(" ", "") == peers.digest.hex()
    assert any("0–2, 5" in line for line in shown[0])
    assert secure.class_numbers("0–2, 5") == ["0", "1", "2", "5"], "as printed"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["peers", "a", "b"], "--out: not set"),
        (["peers", "a", "--server", "malicious"], "--out: not set"),
        (["peers", "absent", "--out", "b"], "absent: cannot read the file"),
        (["certs", "x", "--weight", "3"], "expected --peer NAME"),
        (["certs", "x", "--peer", "a", "--weight", "1001"], "a: weight: expected an integer"),
        (["certs", "x", "--classes", "1"], "expected --peer NAME"),
        (["certs", "x", "--peer", "a", "--classes", "3-1"], "expected a list such as 0-3,7"),
        (["certs", "x", "--peer", "a", "--key", "a"], "cannot be combined"),
        (["certs", "x", "--peer", "a", "--nodes", "2"], "cannot be combined"),
        (["certs", "x", "--peer", "/a"], "name: expected letters"),
    ],
)
def test_invalid_options_raise(tmp_path, monkeypatch, words, fault):
    monkeypatch.chdir(tmp_path)
    result = command(*words)
    assert result.exit_code
    assert fault in " ".join(result.output.split()) or fault in str(result.exception)
    assert not list(tmp_path.iterdir())


def node_of(tmp_path, name="site-0", **changes):
    peers, keys = secure.simulated_peers(["site-0", "site-1", "site-2"])
    secure.write_simulated(tmp_path, peers, keys)
    file, key = secure.simulated_files(tmp_path, name)
    return {"partition-id": 0, "name": "site-0", "peers": file, "peers-key": key, **changes}, peers


def test_site_with_peers_rejects_other_runs(tmp_path):
    values, _ = node_of(tmp_path)
    settings = NodeSettings.model_validate(values)
    masked = small("fedavg", clients=3, **{"privacy.secure-aggregation": True})
    assert within_limits(masked, settings)
    with pytest.raises(SettingsError, match="'peers'"):
        within_limits(small("fedavg", clients=3), settings)


def test_site_with_peers_ignores_the_limit_of_a_run_for_class_means(tmp_path, caplog):
    values, _ = node_of(tmp_path, **{"min-samples-per-class": 3})
    for limit in (1, 3, 50):
        changes = {"privacy.secure-aggregation": True, "engine.min-samples-per-class": limit}
        run = small("felo", clients=3, **changes)
        with caplog.at_level("INFO", "fedhet"):
            config = within_limits(run, NodeSettings.model_validate(values))
        assert config.run.engine.min_samples_per_class == 3
    assert [each.split(" is ignored")[0] for each in caplog.messages] == [
        f"the run's engine.min-samples-per-class = {limit}" for limit in (1, 50)
    ]


def test_sites_of_a_local_deployment_have_the_limit_of_its_run(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        LocalDeployment, "_start", lambda self, *words, **rest: started.append(words)
    )
    LocalDeployment(tmp_path, 3, secure=True, min_samples=5).start_node(0)
    ((*_, config),) = started
    assert "min-samples-per-class=5 peers=" in config


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.5), ("optimizer", "sgd"), ("local-epochs", 2), ("batch-size", 8)]
)
def test_site_with_peers_has_no_training_settings_of_its_own(tmp_path, name, value):
    """If only this site trained, a server would learn its update from the sum."""
    values, _ = node_of(tmp_path)
    masked = small("fedavg", clients=3, **{"privacy.secure-aggregation": True}).run
    assert read_node(values, masked)
    with pytest.raises(SettingsError, match=f"'{name}'"):
        read_node({**values, name: value}, masked)


def test_node_key_must_match_the_peers_file(tmp_path):
    masked = small("fedavg", clients=3, **{"privacy.secure-aggregation": True}).run
    values, peers = node_of(tmp_path)
    node = read_node(values, masked)
    assert node.peers == peers
    assert public(node.peers_key) == peers.peer("site-0").key
    assert "X25519" not in repr(node)
    with pytest.raises(SettingsError, match="'site-0'"):
        read_node(node_of(tmp_path, "site-1")[0], masked)
    with pytest.raises(SettingsError, match="'stranger'"):
        read_node({**values, "name": "stranger"}, masked)
    for missing in ("peers", "peers-key"):
        with pytest.raises(SettingsError, match="'peers', 'peers-key'"):
            read_node({**values, missing: ""}, masked)
