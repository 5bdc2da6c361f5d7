"""The Python interface, as used in a script or a notebook."""

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import PIL.Image
import pytest
import torch
from federation import SMALL, permitted, without_figures
from torch import nn

import fedhet
from fedhet.base.errors import DataError, FedhetError, SettingsError, StateError
from fedhet.clients.local import LocalClient
from fedhet.config.resolve import resolve
from fedhet.data.sources import dataset_names, sample_kind
from fedhet.data.store import RunData
from fedhet.inference import api
from fedhet.kinds import TABLE
from fedhet.runs.display import in_notebook, notebook_display
from fedhet.runs.measures import spread
from fedhet.runs.records import RoundRecord, RunSeconds, Summary
from fedhet.settings.run import DataSettings
from fedhet.strategies.local import LocalStrategy

ROOT = Path(__file__).parents[1]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)
QUICK = {"training.local-epochs": 1, "data.partition": "iid", "engine.precision": "float32"}


def tiny(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 8), nn.ReLU()), nn.Linear(8, classes)


def tabular():
    return X, Y


class OwnStrategy(LocalStrategy):
    pass


class OwnClient(LocalClient):
    pass


def quick(method="local", **given):
    """Run a federation of two clients and one round, without output."""
    usual = {"clients": 2, "rounds": 1, "backend": "inline", "settings": QUICK, "progress": False}
    with without_figures():
        return fedhet.run(method, **{**usual, **given})


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("api") / "felo"
    settings = {name: value for name, value in SMALL.items() if "." in name}
    return fedhet.run("felo", clients=4, rounds=2, settings=settings, out=out, progress=False)


def test_import_is_light_and_lists_public_names():
    code = (
        "import sys, fedhet; heavy = {'torch', 'flwr', 'pandas', 'ray'} & set(sys.modules); "
        "print(heavy or 'light', 'run' in dir(fedhet))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == ["light", "True"]
    with pytest.raises(AttributeError, match="'trian'"):
        _ = fedhet.trian


def test_frames_equal_the_files(result):
    records = [json.loads(line) for line in (result.directory / "metrics.jsonl").open()]
    summary = json.loads((result.directory / "summary.json").read_text())
    history = result.history
    assert history.index.tolist() == [1, 2]
    for record in records:
        row = history.loc[record["round"]]
        for protocol, kinds in record["accuracy"].items():
            for kind, scores in kinds.items():
                assert row[f"accuracy.{protocol}.{kind}"] == pytest.approx(scores["mean"])
        assert row["loss"] == pytest.approx(record["loss"]["mean"])
        assert row["bytes_up"] == record["bytes_up"]
    for frame in (result.history, result.clients, fedhet.compare([result]).to_frame()):
        assert set(frame.columns) <= set(str(frame).split())  # not cut at the terminal's width
    tidy = result.to_frame()
    wanted = {
        (r["round"], client, protocol, kind): value
        for r in records
        for protocol, kinds in r["accuracy"].items()
        for kind, scores in kinds.items()
        for client, value in scores["per_client"].items()
    }
    rows = tidy[["round", "client", "protocol", "kind"]].itertuples(index=False, name=None)
    found = dict(zip(rows, tidy["accuracy"], strict=True))
    assert found == pytest.approx(wanted)
    clients = result.clients
    assert clients["model"].to_dict() == summary["models"]
    assert clients["answered"].tolist() == [2, 2, 2, 2]
    last = summary["accuracy"]["personal"]["private"]["per_client"]
    assert clients["accuracy.personal.private"].to_dict() == pytest.approx(last)
    assert result.headline == ("common", "global")
    assert result.accuracy == pytest.approx(summary["accuracy"]["common"]["global"]["mean"])
    assert result.score == result.accuracy
    assert result.summary.bytes_up == summary["bytes_up"]
    assert result.method_metrics["classes_covered"].tolist() == [
        r["method"]["classes_covered"] for r in records
    ]
    assert result.plots["accuracy"].exists()


def test_models_and_predictions(result, tmp_path):
    model = result.model("client-1")
    assert isinstance(model, nn.Module)
    assert not model.training
    x = np.zeros((2, 1, 8, 8), np.uint8)
    with torch.no_grad():
        wanted = model(torch.full((2, 1, 8, 8), -1.0)).softmax(1).numpy()
    assert np.allclose(result.predict("client-1", x).probabilities, wanted, atol=1e-6)
    assert result.kinds("client-1") == ("private", "global")
    assert result.export("client-1", tmp_path / "m.safetensors").name == "m.safetensors.json"
    with pytest.raises(StateError, match="'client-9'"):
        result.model("client-9")
    with pytest.raises(SettingsError, match="safetensors, pt2, onnx"):
        result.export("client-1", tmp_path / "m.bin")


def test_loaded_run_equals_the_result(result, tmp_path):
    again = fedhet.load(str(result.directory))
    pd.testing.assert_frame_equal(again.history, result.history)
    assert repr(again) == repr(result)
    assert "felo on digits: 4 clients, round 2 of 2; accuracy (common, global) 0." in repr(again)
    with pytest.raises(StateError):
        fedhet.load(tmp_path / "nowhere")


def test_run_continues(tmp_path):
    whole = quick(models=["mlp", "mlp3"], dataset=tabular, rounds=2, out=tmp_path / "whole")
    out = tmp_path / "run"
    quick(models=["mlp", "mlp3"], dataset=tabular, rounds=1, out=out)
    options = {"clients": None, "settings": None, "trust": "test_api"}
    longer = quick(None, resume=out, rounds=2, **options)
    scores = longer.to_frame()
    pd.testing.assert_frame_equal(scores, whole.to_frame())
    assert longer.directory == out
    assert len(longer.history) == 2
    with pytest.raises(StateError, match="complete"):
        quick(None, resume=out, rounds=2, **options)
    elsewhere = {"out": str(tmp_path / "b")}
    for other in (elsewhere, {"settings": elsewhere}, {"preset": "demo"}, {"config": "c.toml"}):
        with pytest.raises(SettingsError, match="preset, config"):
            quick(None, resume=out, rounds=3, **{**options, **other})
    with pytest.raises(StateError, match=r"'seed' = 0.*1"):
        quick(None, resume=out, rounds=3, seed=1, **options)
    with pytest.raises(StateError, match=r"config\.toml"):
        quick(None, resume=tmp_path, rounds=3, **options)


def test_baseline_continues_with_its_run(tmp_path):
    found = quick("fedavg", out=tmp_path / "run", against="local")
    alone = quick("local", out=tmp_path / "alone", models="cnn2")
    assert found.baseline.settings["method"] == "local"
    assert found.baseline.accuracy == alone.accuracy
    assert fedhet.load(tmp_path / "run").baseline.accuracy == alone.accuracy
    assert alone.baseline is None
    more = fedhet.run(resume=tmp_path / "run", rounds=3, against="local", progress=False)
    assert len(more.history) == len(more.baseline.history) == 3
    with pytest.raises(SettingsError, match="method"):
        quick("fedavg", out=tmp_path / "other", against="fedavg")
    assert not (tmp_path / "other").exists()


def test_card_escapes_html(result, tmp_path):
    import shutil

    evil = "<script>alert(1)</script>"
    copy = tmp_path / "run"
    shutil.copytree(result.directory, copy)
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps({**summary, "method": evil, "dataset": evil}))
    html = fedhet.load(copy)._repr_html_()
    assert "<script>" not in html
    assert html.count("&lt;script&gt;") == 2
    assert f"{result.accuracy:.4f}" in html
    assert "<script>" not in fedhet.compare([copy])._repr_html_()


def test_single_run_or_directory_is_compared(result):
    expected = fedhet.compare([result]).to_frame()
    for runs in (result, result.directory, str(result.directory)):
        pd.testing.assert_frame_equal(fedhet.compare(runs).to_frame(), expected)


def test_compare(result, tmp_path):
    found = fedhet.compare([result, result.directory.parent], out=tmp_path / "c")
    row = found.to_frame().iloc[0]
    assert (row["method"], row["headline_kind"]) == ("felo", "global")
    assert row["accuracy.common.global.mean"] == pytest.approx(result.accuracy)
    assert (tmp_path / "c" / "compare.html").exists()
    assert "<table>" in found._repr_html_()


def test_model_of_a_script_and_a_lambda(tmp_path):
    def local(shape, classes):
        return tiny(shape, classes)

    models = [local, lambda shape, classes: tiny(shape, classes)]
    found = quick(models=models, dataset=tabular, out=tmp_path / "run")
    assert found.clients["model"].tolist() == [
        "fedhet.inference.objects:local",
        "fedhet.inference.objects:lambda",
    ]
    assert found.settings["data.dataset"] == "python:test_api:tabular"  # it can be imported
    with torch.no_grad():
        wanted = found.model("client-0")(torch.from_numpy(X)).softmax(1).numpy()
    assert np.allclose(found.predict("client-0", X).probabilities, wanted, atol=1e-6)
    named = quick(models=[tiny, "mlp"], dataset=tabular, out=tmp_path / "named")
    assert named.settings["models.pool"] == ["test_api:tiny", "mlp"]


@pytest.mark.slow
def test_resuming_in_another_process_needs_the_objects(tmp_path):
    def mine(shape, classes):
        return tiny(shape, classes)

    out = tmp_path / "run"
    found = quick(models=[mine], dataset=(X, Y), out=out)
    wanted = found.predict("client-0", X).names[:3]
    code = (
        "import sys; sys.path.insert(0, 'tests'); import fedhet, test_api as t\n"
        f"out = {str(out)!r}\n"
        "try: fedhet.load(out).model('client-0')\n"
        "except fedhet.base.errors.FedhetError as error: print(error)\n"
        "again = fedhet.load(out, objects={'mine': t.tiny, 'data': (t.X, t.Y)})\n"
        "print(again.predict('client-0', t.X).names[:3])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    said = done.stdout.strip().splitlines()
    assert "fedhet.load(DIR, objects={'data': ..., 'mine': ...})" in said[0], done.stderr
    assert said[-1] == str(wanted)


def test_data_of_every_form(tmp_path):
    data = {"train": (X, Y), "test": (torch.from_numpy(X[:30]), Y[:30]), "classes": list("abc")}
    found = quick(models="mlp", dataset=data, out=tmp_path / "run")
    assert {"accuracy.common.private", "accuracy.personal.private"} <= set(found.clients)
    assert set(found.predict("client-0", X).names) <= {"a", "b", "c"}
    assert sample_kind(DataSettings(dataset=str(found.settings["data.dataset"]))) is TABLE
    split = fedhet.Split(torch.from_numpy(X), torch.from_numpy(Y))
    form = fedhet.Format("table", X.shape[1:], ("a", "b", "c"))
    whole = fedhet.Dataset("mine", split, None, form)
    assert quick(models="mlp", dataset=whole, out=tmp_path / "whole").accuracy > 0
    assert "python:module:function" in dataset_names()


FEW = {**QUICK, "min-samples": 2}


def run_data(found):
    """Return the data that the settings of a result name."""
    return RunData.for_run(resolve(dict(found.settings)).run)


class Counted(torch.utils.data.Dataset):
    """Map-style dataset of images that counts how often each sample is read."""

    classes = ("even", "odd")

    def __init__(self, first, count=20):
        self.first, self.reads = first, [0] * count

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, row):
        self.reads[row] += 1
        pixels = np.full((8, 9, 3), self.first + row, np.uint8)
        return PIL.Image.fromarray(pixels), (self.first + row) % 2


def test_pytorch_dataset_is_read_once(tmp_path):
    data = Counted(0, 60)
    found = quick(models="cnn2", dataset=data, out=tmp_path / "run", settings=FEW)
    assert data.reads == [1] * 60
    whole = run_data(found).dataset
    assert (whole.format.kind, whole.format.shape) == ("image", (3, 8, 9))
    assert (whole.format.classes, whole.format.stored) == (("even", "odd"), "bytes")
    assert whole.train.x[:, 0, 0, 0].tolist() == list(range(60))
    assert whole.train.y.tolist() == [0, 1] * 30


def test_list_has_the_data_of_each_client(tmp_path):
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(X[:40]), torch.from_numpy(Y[:40]))
    held_out = {"train": (X[40:70], Y[40:70]), "test": (X[70:], Y[70:])}
    data = [tensors, held_out, torch.utils.data.Subset(tensors, range(0, 40, 2))]
    found = quick(models="mlp", dataset=data, out=tmp_path / "run", clients=3)
    own = [run_data(found).client(index) for index in range(3)]
    assert [(len(each.train), len(each.test)) for each in own] == [(32, 8), (30, 20), (16, 4)]
    for each, rows in zip(own, (slice(40), slice(40, 90), slice(0, 40, 2)), strict=True):
        samples = torch.cat([each.train.x, each.test.x]).tolist()
        assert sorted(samples) == sorted(torch.from_numpy(X[rows]).float().tolist())
    with pytest.raises(SettingsError, match=r"data\.max-samples"):
        quick(
            models="mlp",
            dataset=data,
            out=tmp_path / "few",
            clients=3,
            settings={**FEW, "max-samples": 20},
        )
    with pytest.raises(DataError, match=r"clients.*3"):
        quick(models="mlp", dataset=data, out=tmp_path / "more", clients=4)


def test_mapping_may_state_the_kind_of_its_samples(tmp_path):
    x = np.random.default_rng(0).random((60, 2, 16), np.float32)
    data = {"train": (x, np.arange(60) % 2), "kind": "signal"}
    found = quick(dataset=data, out=tmp_path / "run", settings=FEW)
    assert run_data(found).dataset.format.kind == "signal"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((X, Y[:5]), "the same length, got 90 and 5"),
        ({"train": (X, Y), "classes": ["a", "b"]}, "expected 3 different class names"),
        ({"tran": (X, Y)}, "got tran"),
        ({"train": (X, Y), "kind": "sound"}, "kind: expected one of image, .* got 'sound'"),
        ([(X, Y), (X[:, :2], Y)], r"client 1: train: samples must have shape \(\d+,\)"),
        ([(X, Y), (X[:0], Y[:0])], "client 1: train: no samples"),
        ({"train": (X, Y), "test": (X[:, :2], Y)}, "samples must have shape"),
        ((X, Y.astype(float)), "y must be integers"),
        (lambda: 1 / 0, "the function failed: ZeroDivisionError"),
        (3, "got int"),
    ],
)
def test_invalid_data_raises(tmp_path, data, says):
    with pytest.raises(DataError, match=says) as fault:
        quick(models="mlp", dataset=data, out=tmp_path / "run")
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("given", [(OwnStrategy, OwnClient), "module"])
def test_method_as_a_pair_of_classes_and_as_a_module(tmp_path, given):
    if given == "module":
        given = ModuleType("own_module")
        given.OwnStrategy, given.OwnClient = OwnStrategy, OwnClient
    found = quick(given, models="mlp", dataset=tabular, out=tmp_path / "run")
    assert found.settings["method"] in (
        "fedhet.inference.objects.own",
        "fedhet.inference.objects.own_module",
    )
    assert found.predict("client-1", X).probabilities.shape == (90, 3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"models": [lambda s, c: tiny(s, c)]}, "models: Ray's workers cannot import '<lambda>'"),
        ({"dataset": (X, Y)}, "dataset: Ray's workers cannot import 'data'"),
        ({"method": (OwnStrategy, OwnClient)}, "method: Ray's workers cannot import 'own'"),
        ({"models": [nn.Linear(2, 2)]}, "models: expected names, or .* got Linear"),
        ({"method": 3}, "method: expected a name, .* got int"),
        ({"method": None}, "METHOD is missing"),
        ({"method": "fello"}, "did you mean 'felo'"),
        ({"settings": {"rounds": 3}}, "'rounds': duplicate"),
        ({"settings": {"training": {"lr": -1.0}}}, "'training.lr': expected number > 0"),
        ({"settings": {"locl-epochs": 1}}, "did you mean 'training.local-epochs'"),
    ],
)
def test_invalid_arguments_raise(given, says):
    with pytest.raises(FedhetError, match=says) as fault:
        fedhet.run(**{"method": "felo", "rounds": 1, "backend": "ray", **given})
    assert "\n" not in str(fault.value)


def test_unimportable_object_trains_in_this_process():
    given = [("models.pool", [lambda shape, classes: tiny(shape, classes)])]
    assert api._resolve("felo", given).run.engine.backend == "inline"
    assert api._resolve("felo", []).run.engine.backend == "auto"


def test_arguments_override_files_and_presets(tmp_path, monkeypatch):
    seen = []
    run = SimpleNamespace(path=tmp_path)
    monkeypatch.setattr(
        "fedhet.inference.api.simulate", lambda config, *_: seen.append(config) or run
    )
    (tmp_path / "c.toml").write_text("rounds = 7\n[training]\nlr = 0.5\n[data]\nalpha = 0.3\n")
    fedhet.run(
        "local", preset="demo", config=tmp_path / "c.toml", rounds=3, models=["mlp", "cnn2"],
        settings={"training.lr": [0.25, 0.5]}, out=tmp_path / "run",
    )  # fmt: skip
    (config,) = seen
    assert (config.run.rounds, config.run.data.alpha, config.method.name) == (3, 0.3, "local")
    assert (config.run.training.lr, config.run.models.pool) == ((0.25, 0.5), ("mlp", "cnn2"))


def test_site_imports_only_allowed_data():
    settings = {"method": "local", "models.pool": "mlp", "data.dataset": "python:evil:load"}
    node = {"partition-id": 0, "num-partitions": 2}
    with pytest.raises(SettingsError, match="'evil:load'"):
        permitted(node, settings)
    assert permitted({**node, "allow-models": "evil"}, settings)["data.dataset"]
    settings["data.public-dataset"] = "python:worse:load"
    with pytest.raises(SettingsError, match="'worse:load'"):
        permitted({**node, "allow-models": "evil"}, settings)


class Page(ModuleType):
    """Replacement for the part of IPython.display that the display uses."""

    def __init__(self):
        super().__init__("IPython.display")
        self.shown = []

    def HTML(self, text):
        return text

    def display(self, content, display_id):
        self.shown.append(content)
        return SimpleNamespace(update=self.shown.append)


def test_progress_in_a_notebook(monkeypatch):
    page = Page()
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    assert not in_notebook()
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert in_notebook()
    from federation import small

    display = notebook_display()
    display.run_started(small("local"), Path("run"), {"client-0": "<b>mlp</b>"}, "digits")
    display.round_started(1, ["client-0"])
    record = RoundRecord(1, accuracy={"common": {"private": spread({"client-0": 0.5})}})
    display.round_finished(record)
    display.notice("client <i>x</i>")
    seconds = RunSeconds(total=1.5)
    display.run_finished(
        Summary(method="local", dataset="digits", seed=0, rounds=2, seconds=seconds)
    )
    assert 'value="0" max="2"' in page.shown[0]
    assert "1 client train" in page.shown[1]
    assert 'value="1" max="2"' in page.shown[2]
    assert "accuracy (common, private) 0.5000" in page.shown[2]
    assert "client &lt;i&gt;x" in page.shown[3]
    assert page.shown[4].endswith("(1.5 s)<br>note: client &lt;i&gt;x&lt;/i&gt;")
