"""Trackers: sent values, and runs that do not depend on them."""

import json
import sys
from types import SimpleNamespace

import pytest
from federation import run, small

from fedhet.base.errors import SettingsError
from fedhet.inference import api
from fedhet.runs.log import Watcher, trackers_of
from fedhet.runs.measures import headline_column, scalars, spread
from fedhet.runs.records import Headline, RoundRecord


class Fake:
    """Replaces either library, and records its calls."""

    def __init__(self, fails=""):
        self.calls, self.fails = [], fails

    def __getattr__(self, name):
        def call(*args, **options):
            if name == self.fails:
                raise ConnectionError("no network\nat all")
            self.calls.append((name, args, options))
            return self

        return call


@pytest.fixture(params=["wandb", "mlflow"])
def tracker(request, monkeypatch):
    def put(fails=""):
        fake = Fake(fails)
        monkeypatch.setitem(sys.modules, request.param, fake)
        return fake

    return request.param, put


def tracked(name, **changes):
    return small("local", clients=2, rounds=2, track=name, **changes)


def test_settings_and_numbers_are_sent(tracker, tmp_path):
    name, put = tracker
    fake = put()
    summary = run(tracked(name, metrics="auc"), tmp_path / "run")
    names = [call for call, _, _ in fake.calls]
    expected = {
        "wandb": ["init", "log", "log", "finish"],
        "mlflow": ["set_experiment", "start_run", "log_params", "log_metrics", "log_metrics",
                   "end_run"],
    }  # fmt: skip
    assert names == expected[name]
    sent = [(args[0], options["step"]) for call, args, options in fake.calls if call in
            ("log", "log_metrics")]  # fmt: skip
    assert [step for _, step in sent] == [1, 2]
    last = sent[-1][0]
    assert last["accuracy-common-private/mean"] == summary["accuracy"]["common"]["private"]["mean"]
    assert last["auc-common-private/mean"] == summary["metrics"]["auc"]["common"]["private"]["mean"]
    assert not any("client-" in key for key in last)  # none of a single client
    headline = summary["accuracy"]["common"]["private"]
    assert [last[f"headline/{name}"] for name in ("mean", "std", "worst")] == [
        headline[name] for name in ("mean", "std", "worst")
    ]
    settings = next(
        options["config"] if call == "init" else args[0]
        for call, args, options in fake.calls
        if call in ("init", "log_params")
    )
    assert str(settings["training.lr"]) == "0.001"
    if name == "wandb":
        _, _, options = fake.calls[0]
        known = json.loads((tmp_path / "run" / "run.json").read_text())["run"]
        assert (options["id"], options["resume"]) == (known, "allow")


@pytest.mark.parametrize("place", [0, 1])
def test_failing_tracker_does_not_end_the_run(tracker, tmp_path, caplog, place):
    name, put = tracker
    fails = {"wandb": ("init", "log"), "mlflow": ("start_run", "log_metrics")}[name][place]
    put(fails)
    assert run(tracked(name), tmp_path / "run")["rounds"] == 2
    said = [
        record.getMessage() for record in caplog.records if "is disabled" in record.getMessage()
    ]
    assert len(said) == 1
    assert len(said[0].splitlines()) == 1


def test_prometheus_file_has_metrics_of_the_last_round(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    summary = run(tracked("prometheus"), tmp_path / "run")
    text = (tmp_path / "run" / "metrics.prom").read_text()
    found = {
        sample.name: (sample.labels, sample.value)
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert {labels["run"] for labels, _ in found.values()} == {"run"}
    values = {name: value for name, (_, value) in found.items()}
    assert (values["fedhet_round"], values["fedhet_rounds"]) == (2, 2)
    assert (values["fedhet_finished"], values["fedhet_clients_answered"]) == (1, 2)
    last = summary["accuracy"]["personal"]["private"]["mean"]
    assert values["fedhet_accuracy_personal_private_mean"] == pytest.approx(last)


def test_missing_library_raises(tracker, monkeypatch, tmp_path):
    name, _ = tracker
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=f"'{name}'"):
        run(tracked(name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_several_trackers_receive_the_headline_of_the_method(monkeypatch, tmp_path):
    fakes = {name: Fake() for name in ("wandb", "mlflow")}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    config = small("fedavg", clients=2, rounds=2, models="mlp", track=["wandb", "mlflow"])
    summary = run(config, tmp_path / "run")
    mean = summary["accuracy"]["common"]["global"]["mean"]
    assert mean != summary["accuracy"]["common"]["private"]["mean"]
    for name, call in (("wandb", "log"), ("mlflow", "log_metrics")):
        sent = [args[0] for each, args, _ in fakes[name].calls if each == call]
        assert len(sent) == 2
        assert sent[-1]["headline/mean"] == sent[-1]["accuracy-common-global/mean"] == mean
    with pytest.raises(SettingsError, match="list"):
        small("felo", track=["wandb", "wandb"])


def test_headline_series_does_not_change_its_kind():
    """A kind that is missing in a round has a gap, and no other kind fills it."""
    headline = Headline(protocol="common", kinds={"common": "global"})
    records = [
        RoundRecord(number, accuracy={"common": {kind: spread({"a": 0.5}) for kind in kinds}})
        for number, kinds in enumerate((["private"], ["private", "global"], ["private"]), 1)
    ]
    columns = [headline_column(records[:end], headline) for end in (1, 2, 3)]
    assert columns == [("common", "private"), ("common", "global"), ("common", "global")]
    sent = [
        dict(scalars(record, "m", column)) for record, column in zip(records, columns, strict=True)
    ]
    assert ["headline/mean" in each for each in sent] == [True, True, False]


def test_no_tracker_by_default():
    assert trackers_of(small("local")) == []


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(tracked("wandb"), tmp_path / "run")
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    summary = run(tracked("mlflow"), tmp_path / "run")
    (found,) = mlflow.search_runs(experiment_names=["fedhet"], output_format="list")
    mean = summary["accuracy"]["common"]["private"]["mean"]
    assert found.data.metrics["accuracy-common-private/mean"] == mean
    assert found.data.params["training.lr"] == "0.001"
    assert found.info.status == "FINISHED"


def test_custom_watcher(tmp_path):
    rounds = []
    own = SimpleNamespace(
        **{name: lambda *_: None for name in vars(Watcher) if not name.startswith("_")}
    )
    own.round_finished = lambda record: rounds.append(record.round)
    api.run(
        "local", clients=2, rounds=2, models="mlp", backend="inline", out=tmp_path / "run",
        settings={"data.max-samples": 200, "training.local-epochs": 1}, progress=False,
        watchers=[own],
    )  # fmt: skip
    assert rounds == [1, 2]
