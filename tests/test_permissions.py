"""Imports and files that a server can request from a site, by default only the site's own."""

import sys
from types import SimpleNamespace

import pytest
from federation import permitted

from fedhet.base.errors import DataError, SettingsError
from fedhet.client_runtime.app import client_fn
from fedhet.config.resolve import resolve
from fedhet.data.spec import DataSpec
from fedhet.data.store import load

SHIPPED = {"method": "felo", "models.pool": "mlp,cnn2", "data.dataset": "digits"}
PARTITION = {"partition-id": 0, "num-partitions": 4}
EVIL = """
from pathlib import Path

Path({mark!r}).touch()

def f(shape, classes):
    raise AssertionError
"""


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module that leaves a mark if it is imported."""
    mark = tmp_path / "imported"
    (tmp_path / "evil_module.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    return mark


def context(node, **run):
    settings = {**SHIPPED, "clients": 4, **{k.replace("__", "."): v for k, v in run.items()}}
    return SimpleNamespace(node_config=node, run_config=settings)


def test_unreadable_pool_raises_at_a_site(evil):
    with pytest.raises(SettingsError, match=r"'models\.pool'.*evil_module:f\*x"):
        client_fn(context(PARTITION, models__pool="evil_module:f*x"))
    assert not evil.exists()


@pytest.mark.parametrize(
    "asked",
    [
        {"models__pool": "evil_module:f"},
        {"models__pool": "mlp, evil_module:f"},
        {"models__pool": "mlp,evil_module:f*3"},
        {"models__pool": "evil_module:f * 3"},
        {"models__pool": '["mlp", "evil_module:f"]'},
        {"method": "fedtype", "fedtype__proxy": "evil_module:f x"},
        {"method": "fedtype", "fedtype__proxy": "evil_module:f:g"},
        {"method": "fedtype", "fedtype__proxy": "evil_module:f*x"},
        {"method": "evil_module.x"},
        {"method": "fedtype", "fedtype__proxy": "evil_module:f"},
        {"method": "fedgems", "fedgems__server-model": "evil_module:f"},
    ],
)
def test_server_cannot_make_a_site_import_a_module(evil, asked):
    for node in (PARTITION, {**PARTITION, "allow-models": "other,evil_modul,evil_module.f"}):
        with pytest.raises(SettingsError, match="evil_module"):
            client_fn(context(node, **asked))
    assert not evil.exists()


def test_allowed_model_permits_no_other_model_in_the_pool(evil):
    with pytest.raises(SettingsError, match="import 'evil_module:f'"):
        client_fn(
            context({**PARTITION, "allow-models": "json"}, models__pool="json:f,evil_module:f")
        )
    assert not evil.exists()


def test_site_with_its_own_model_does_not_import_the_pool(evil):
    client = client_fn(context({**PARTITION, "model": "mlp"}, models__pool="cnn2,evil_module:f"))
    assert client is not None
    assert not evil.exists()


@pytest.mark.parametrize("allowed", ["evil_module", "evil_module:f", "a, evil_module:f", "*"])
def test_allowed_modules_are_imported(evil, allowed):
    node = {**PARTITION, "allow-models": allowed}
    taken = permitted(node, {**SHIPPED, "models.pool": "evil_module:f"})
    assert taken["models.pool"] == "evil_module:f"
    resolve(taken)
    assert evil.exists()


def test_sites_own_model_needs_no_permission():
    taken = permitted({**PARTITION, "model": "evil_module:f"}, SHIPPED)
    assert taken == {**SHIPPED, "models.pool": "evil_module:f"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("data.dataset", "imagefolder:/etc"),
        ("data.dataset", "npz:relative"),
        ("data.public-dataset", "imagefolder:/etc"),
        ("data.public-dataset", "adult:{site}/../secret"),
        ("data.public-dataset", "imagefolder:{site}/link"),
        ("data.data-dir", "/etc"),
        ("data.data-dir", "~"),
        ("data.dataset", "hf:{site}/../secret@default"),
        ("data.public-dataset", "hf:/etc@x/../{site}"),
        ("data.public-dataset", "hf:{site}/..@default"),
        ("data.public-dataset", "hf:ylecun/mnist"),
        ("data.public-dataset", "hf:evil/ds@x/../../{site}"),
        ("data.public-dataset", "hf:~/secret"),
        ("data.public-dataset", "hf:./secret"),
        ("data.public-dataset", "npz:{site}/deep/../data"),
    ],
)
def test_server_cannot_make_a_site_read_other_files(setting, value, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "secret").mkdir()
    (site / "link").symlink_to(tmp_path / "secret")
    path = value.format(site=site)
    for node in (PARTITION, {"name": "site-a", "data": f"npz:{site}", "allow-paths": "/nowhere"}):
        with pytest.raises(SettingsError) as caught:
            permitted(node, {**SHIPPED, setting: path})
        assert str(caught.value).startswith(f"'{setting}': this site does not permit a run to read")
        assert "passwd" not in str(caught.value), "nor does the error say what is there"


def test_site_reads_its_data_and_allowed_paths(tmp_path, monkeypatch):
    node = {"name": "site-a", "data": f"npz:{tmp_path / 'data'}"}
    run = {**SHIPPED, "data.public-dataset": f"npz:{tmp_path}/data/public"}
    assert permitted(node, run) == run
    run["data.data-dir"] = str(tmp_path / "more" / "deeper")
    with pytest.raises(SettingsError):
        permitted(node, run)
    assert permitted({**node, "allow-paths": f"/x, {tmp_path}/more"}, run) == run
    monkeypatch.setenv("FEDHET_ALLOW_PATHS", str(tmp_path))
    assert permitted(node, run) == run


def test_dataset_of_the_hub_is_allowed_by_its_name(tmp_path):
    """A directory with this name has no effect, and the subset does not matter."""
    node = {"name": "site-a", "data": f"npz:{tmp_path}", "allow-paths": f"hf:a/b, {tmp_path}/hub"}
    for place in ("a/b", "a/b@part", f"{tmp_path}/hub@part"):
        run = {**SHIPPED, "data.public-dataset": f"hf:{place}"}
        assert permitted(node, run) == run
    (tmp_path / "a" / "c").mkdir(parents=True)
    for place in ("a/c", "a", "a/b/c", "b", f"{tmp_path}/../hub"):
        with pytest.raises(SettingsError, match="allow-paths"):
            permitted(node, {**SHIPPED, "data.public-dataset": f"hf:{place}"})


def test_permission_and_reading_agree(tmp_path, monkeypatch):
    """The library receives the directory or name that the site has checked."""
    import flwr_datasets

    sampled = []

    class Recording:
        def __init__(self, dataset, subset, **options):
            sampled.append((dataset, subset))
            raise DataError("recorded")

    monkeypatch.setattr(flwr_datasets, "FederatedDataset", Recording)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for place in ("a/b@x/../c", "a/b@../c", "a/b/c", "a/../b@c", "@x"):
        with pytest.raises(DataError, match="hf:NAME@SUBSET"):
            load(DataSpec(dataset=f"hf:{place}"))
    for place in ("a/b@c.d", f"{tmp_path}/a@b", "./a"):
        with pytest.raises(DataError, match="recorded"):
            load(DataSpec(dataset=f"hf:{place}"))
    assert sampled == [(f"{tmp_path}/a/b", "c.d"), (f"{tmp_path}/a", "b"), (f"{tmp_path}/a", None)]


def test_other_settings_need_no_permission():
    for run in (
        {**SHIPPED, "data.public-dataset": "generated", "data.data-dir": "data"},
        {**SHIPPED, "engine.device": "cuda:9", "engine.ray-address": "host:6379"},
        {**SHIPPED, "method": "cofed", "cofed.credibility": "site-a=2,site-b=0.5"},
        {**SHIPPED, "data.superclasses": "0+1,2+3", "data.label-space": "6-8", "rounds": 3},
    ):
        assert permitted(PARTITION, run) == run
