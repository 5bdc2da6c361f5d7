"""Tables without given models: the default models of each method, and a run."""

from dataclasses import replace

import numpy as np
import pytest
from federation import Server, each, fast, records
from typer.testing import CliRunner

from fedhet.base.errors import SettingsError
from fedhet.cli import app
from fedhet.config.resolve import check, resolve, resolve_flower
from fedhet.config.sources import (
    all_settings,
    defaults,
    read_preset,
    read_toml,
    to_flower,
)
from fedhet.data.sources import sample_kind
from fedhet.kinds import IMAGE, TABLE
from fedhet.methods.registry import find_method, method_names
from fedhet.settings.run import DataSettings, RunSettings

SETTINGS = {
    "data.dataset": "breast-cancer",
    "clients": 3,
    "training.local-epochs": 1,
    "engine.backend": "inline",
}
SCIKIT = ("sk-tree", "sk-svm", "sk-gam", "sk-mlp")


@pytest.mark.parametrize("name", each(method_names()))
def test_every_method_runs_on_a_table(name, tmp_path):
    config = resolve({"method": name, **SETTINGS, **fast(name, models=False)})
    check(config)
    server = Server(config, tmp_path / "run")
    for number in (1, 2):
        server.play(number)
        server.close(number)
    record = records(tmp_path / "run")[-1]
    assert record["failed"] == {}
    kind = find_method(name).spec.kinds[0]
    found = record["accuracy"]["common"][kind]["per_client"]
    assert len(found) == 3
    assert max(found.values()) > 0.6


@pytest.mark.parametrize("name", ["felo", "cofed", "fedtype", "fedgems", "um-pfssl"])
def test_chosen_models_are_in_the_config_and_resolve_to_themselves(name, tmp_path):
    config = resolve({"method": name, "data.dataset": "breast-cancer"})
    assert resolve(config.flat()) == config
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert read_toml(path)["models.pool"] == list(config.run.models.pool)
    assert resolve(read_toml(path)) == config
    # As Flower's run config has it: every setting is there, at its default.
    everything = {key: info.default for key, info in all_settings().items()}
    listed = {**everything, "method": name, "data.dataset": "breast-cancer"}
    assert resolve_flower(to_flower(listed)) == config


def test_pool_follows_from_the_method():
    def pool(method, **changes):
        return resolve(
            {"method": method, "data.dataset": "breast-cancer", **changes}
        ).run.models.pool

    assert (
        pool("cofed")
        == pool("local")
        == pool("felo")
        == pool("velo")
        == pool("fedtype")
        == pool("fedgems")
        == ("mlp", "mlp2", "mlp3")
    )
    assert pool("um-pfssl") == ("mlp-dropout",)
    assert pool("cofed", **{"models.pool": "mlp3"}) == ("mlp3",)
    assert pool("cofed", **{"models.pool": ",".join(SCIKIT)}) == SCIKIT
    adult = read_preset("cofed-adult") | {"data.dataset": "breast-cancer"}
    assert resolve(adult).run.models.pool == SCIKIT, "the preset keeps the paper's models"
    for dataset in ("digits", "cifar10", "imagefolder:DIR", "npz:DIR"):
        run = resolve({"method": "cofed", "data.dataset": dataset}).run
        assert run.models.pool == RunSettings().models.pool


def test_method_with_one_model_has_one_for_tables():
    spec = find_method("um-pfssl").spec
    assert replace(spec, client_model="").pool(TABLE) == ("mlp",)
    assert replace(spec, client_model="", any_model="loss").pool(TABLE) == ("mlp",)
    assert replace(spec, client_model="large_model").pool(TABLE) == ("mlp3",)
    assert replace(spec, one_model=False, client_model="").pool(TABLE) == ("mlp", "mlp2", "mlp3")


def test_method_models_follow_the_kind_of_data():
    def own(method, **changes):
        return resolve(
            {"method": method, "data.dataset": "breast-cancer", **changes}
        ).method_settings

    assert own("fedtype").proxy == "mlp"
    assert own("fedtype", **{"fedtype.proxy": "mlp2"}).proxy == "mlp2"
    assert own("fedgems").server_model == "mlp3"
    assert own("fedgems", **{"fedgems.server-model": "mlp"}).server_model == "mlp"
    assert resolve({"method": "fedtype"}).method_settings.proxy == "cnn2"
    assert resolve({"method": "fedgems"}).method_settings.server_model == "cnn4"


@pytest.mark.parametrize(
    ("method", "setting", "model"),
    [
        ("fedtype", "fedtype.proxy", "cnn2"),  # as is the default, for images
        ("fedtype", "fedtype.proxy", "lenet5"),
        ("fml", "fml.meme", "cnn2"),
        ("ds-fl", "ds-fl.server-model", "cnn2"),
        ("fedgems", "fedgems.server-model", "cnn4"),
    ],
)
def test_method_model_for_images_raises_for_a_table(method, setting, model):
    config = resolve({"method": method, **SETTINGS, setting: model})
    with pytest.raises(SettingsError) as caught:
        check(config)
    assert str(caught.value).startswith(f"setting '{setting}' = '{model}': model ")


def test_complete_run_config_keeps_default_models():
    given = {**to_flower(defaults()), "method": "fedtype", "data.dataset": "breast-cancer"}
    assert resolve_flower(given).method_settings.proxy == "mlp"


@pytest.mark.parametrize(
    ("shape", "expected"), [((6, 5), True), ((6, 5, 5), False), ((6, 1, 5, 5), False)]
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_file_headers_determine_the_kind(tmp_path, shape, expected, save):
    (tmp_path / "train").mkdir()
    save(tmp_path / "train" / "0.npz", x=np.zeros(shape, np.float32), y=np.zeros(6, int))
    assert (sample_kind(DataSettings(dataset=f"npz:{tmp_path}")) is TABLE) is expected
    pool = resolve({"method": "felo", "data.dataset": f"npz:{tmp_path}"}).run.models.pool
    assert pool == (("mlp", "mlp2", "mlp3") if expected else RunSettings().models.pool)


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_unreadable_file_counts_as_images(tmp_path, content):
    if content is not None:
        (tmp_path / "train").mkdir()
        (tmp_path / "train" / "0.npz").write_bytes(content)
    assert sample_kind(DataSettings(dataset=f"npz:{tmp_path}")) is IMAGE


def test_archive_without_valid_x_counts_as_images(tmp_path):
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "0.npz", y=np.zeros(3))
    assert sample_kind(DataSettings(dataset=f"npz:{tmp_path}")) is IMAGE
    np.savez(tmp_path / "train" / "0.npz", x=np.zeros((3, 2)))
    whole = (tmp_path / "train" / "0.npz").read_bytes()
    (tmp_path / "train" / "0.npz").write_bytes(whole.replace(b"NUMPY", b"NUMPX"))
    assert sample_kind(DataSettings(dataset=f"npz:{tmp_path}")) is IMAGE


def test_commands_list_models():
    def shown(*words):
        return " ".join(CliRunner().invoke(app, words).output.replace("\u2502", " ").split())

    said = shown("methods", "fedtype")
    assert "for tables, mlp,mlp2,mlp3, and fedtype.proxy = mlp;" in said
    assert "for tables, mlp,mlp2,mlp3;" in shown("methods", "cofed")
    assert "shows a method's defaults for all kinds of data" in shown("run", "--help")
