"""A site limits what a run may request."""

import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federation import Server, client_of, permitted, small
from flwr.common import parameters_to_ndarrays
from rounds import reply_of

from fedhet.base.errors import FedhetError, SettingsError
from fedhet.client_runtime.app import SiteClient, client_fn, within_limits, without_paths
from fedhet.client_runtime.node import NodeSettings
from fedhet.config import resolve as resolving
from fedhet.methods.registry import find_method, shipped_names

SENDS_CLASS_MEANS = [n for n in sorted(shipped_names()) if find_method(n).spec.privacy.vectors]
SHIPPED = {"method": "felo", "models.pool": "mlp,cnn2", "data.dataset": "digits"}
PARTITION = {"partition-id": 0, "num-partitions": 4}


@pytest.mark.parametrize(
    ("setting", "value"),
    [("engine.device", "cuda:9"), ("engine.ray-address", "10.0.0.1:6379"), ("out", "a:b")],
)
def test_device_address_and_directory_are_no_imports(setting, value):
    run = {**SHIPPED, setting: value}
    assert permitted(PARTITION, run) == run


@pytest.mark.parametrize("setting", ["data.label-column", "fedtype.proxy", "central.model"])
def test_unknown_settings_may_be_imports(setting):
    with pytest.raises(SettingsError, match="'evil:f'"):
        permitted(PARTITION, {**SHIPPED, setting: "evil:f"})


def asked(node=None, **run):
    """Return Flower's input for a site: the node's settings, and the settings of a run."""
    settings = {**SHIPPED, "clients": 4, **{k.replace("__", "."): v for k, v in run.items()}}
    return SimpleNamespace(node_config={**PARTITION, **(node or {})}, run_config=settings)


@pytest.mark.parametrize(
    ("run", "limit"),
    [
        ({"training__local-epochs": 10**6}, "'max-epochs' = 1000"),
        ({"method": "cofed", "cofed__update-epochs": 10**6}, "'max-epochs' = 1000"),
        ({"models__num-classes": 100_000}, "'max-model-bytes'"),
    ],
)
def test_settings_beyond_the_limits_of_a_site_raise_one_line(run, limit):
    with pytest.raises(SettingsError, match=limit):
        client_fn(asked(**run))


def test_message_checks_the_settings_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path))
    counts = Counter()

    def counted(owner, name):
        function = getattr(owner, name)

        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, call)

    counted(NodeSettings, "model_validate")
    counted(resolving, "validate")
    counted(resolving, "complete")
    client_fn(asked(models__pool="mlp,mlp2"))
    assert counts == {"model_validate": 1, "validate": 1, "complete": 1}


def test_run_cannot_set_the_limits_of_a_site(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path))
    with pytest.raises(SettingsError, match="'max-epochs' = 2"):
        client_fn(asked({"max-epochs": 2}, **{"training__local-epochs": 3}))
    np.savez(tmp_path / "train.npz", x=np.zeros((40, 8, 8), np.uint8), y=np.arange(40) % 2)
    node = {"data": f"npz:{tmp_path}", "name": "site-a", "max-data-bytes": 1000}
    with pytest.raises(FedhetError, match=r"data.max-bytes"):
        client_fn(asked(node, **{"models__num-classes": 2}))


def test_site_downloads_only_with_permission(tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    tried = []
    monkeypatch.setattr(MNIST, "download", lambda self: tried.append(self.root))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path))
    run = {"data__dataset": "mnist", "data__download": True}
    with pytest.raises(FedhetError):
        client_fn(asked(**run))
    assert not tried
    with pytest.raises(FedhetError):
        client_fn(asked({"allow-downloads": True}, **run))
    assert tried


def test_error_sent_to_the_server_contains_no_path_of_the_site(tmp_path):
    site = tmp_path / "secret place"
    site.mkdir()
    (site / "train.npz").write_bytes(b"nothing")
    node = {"data": f"npz:{site}", "name": "site-a", "state-dir": str(tmp_path)}
    with pytest.raises(FedhetError) as error:
        client_fn(asked(node, **{"models__num-classes": 10}))
    assert "not a readable .npz file" in str(error.value)
    for part in ("secret", "place", str(tmp_path), "/"):
        assert part not in str(error.value)
    with pytest.raises(SettingsError) as error:
        client_fn(asked({"allow-paths": "/srv/hidden"}, data__dataset="npz:/etc"))
    assert "hidden" not in str(error.value)


def test_oversized_model_raises_before_allocation():
    from fedhet.models import AllocationLimit, build

    started = time.perf_counter()
    with pytest.raises(FedhetError, match="1,000,000"), AllocationLimit(10**6):
        build("mlp", (1, 8, 8), 10, seed=0, feature_dim=10**9)
    assert time.perf_counter() - started < 5


def test_round_beyond_max_seconds_stops():
    class Endless:
        def fit(self, parameters, config):
            while True:
                time.sleep(0.01)

    client, started = SiteClient(Endless(), NodeSettings(max_seconds=1)), time.perf_counter()
    with pytest.raises(FedhetError, match="'max-seconds' = 1"):
        client.fit([], {})
    assert 0.9 < time.perf_counter() - started < 5


def test_client_continues_unchanged_after_a_stopped_round(tmp_path):
    """After half of the steps, neither the state in memory nor random draws may remain."""
    config = small("local", clients=2)
    server = Server(config, tmp_path)
    proxy, ins = server.instruct(1)[0]
    client = client_of(proxy)
    arrays, site = parameters_to_ndarrays(ins.parameters), SiteClient(client, NodeSettings())
    whole, _, _ = site.fit(arrays, dict(ins.config))
    trained, state = client.train, {k: v.clone() for k, v in client.network.state_dict().items()}
    for path in tmp_path.rglob("round-*.safetensors"):
        path.unlink()

    def too_long(round, knowledge):
        trained(round, knowledge)
        time.sleep(30)

    client.train = too_long
    limited = SiteClient(client, NodeSettings(max_seconds=1))
    _, samples, said = limited.fit(arrays, dict(ins.config))
    assert samples == 0
    assert "'max-seconds' = 1" in said["error"]
    assert not list(tmp_path.rglob("round-*.safetensors"))
    client.train = trained
    again, _, _ = limited.fit(arrays, dict(ins.config))
    assert all((a == b).all() for a, b in zip(whole, again, strict=True))
    assert all(torch.equal(state[k], v) for k, v in client.network.state_dict().items())


@pytest.mark.parametrize("method", SENDS_CLASS_MEANS)
@pytest.mark.parametrize("by_site", [False, True])
def test_means_of_few_samples_are_not_sent(tmp_path, method, by_site):
    """The larger limit of the run and the site applies."""
    least = 9
    limits = (1, least) if by_site else (least, 1)
    run = small(method, clients=2, alpha=0.3, rounds=1, min_samples_per_class=limits[0])
    site = NodeSettings(min_samples_per_class=limits[1])
    config = within_limits(run, site)
    few = 0
    for proxy, result in Server(config, tmp_path).play(1)[1]:
        counts = np.bincount(client_of(proxy).y.numpy(), minlength=10)
        tensors = reply_of(result).tensors
        sent = np.flatnonzero(tensors["labels"]) if method == "fedre" else tensors["classes"]
        assert sent.tolist() == np.flatnonzero(counts >= least).tolist()
        few += (counts > 0).sum() - len(sent)
    assert few


def test_client_with_only_small_classes_sends_none(tmp_path):
    server = Server(small("felo", clients=2, min_samples_per_class=10_000), tmp_path)
    server.play(1)
    _, replies = server.play(2)
    assert [len(reply_of(result).tensors["classes"]) for _, result in replies] == [0, 0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/a b/train.csv: no rows", "(a path of this site): no rows"),
        ("1/2 of '/etc/a b', /etc/passwd: missing", "1/2 of '(a path of this site)', (a path of "
         "this site): missing"),
        ("/srv/study 7/Anna Müller, 2024 (1).png: broken", "(a path of this site): broken"),
        ("wards/anna.png: broken, 1 / samples = 0.1", "(a path of this site): broken, 1 / samples "
         "= 0.1"),
    ],
)  # fmt: skip
def test_paths_of_a_site_are_redacted(text, told):
    site = NodeSettings(data="npz:/srv/a b", name="ward")
    assert without_paths(text, site) == told
