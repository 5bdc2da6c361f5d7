"""The model whose score represents a method: declaration, selection, comparison, ensembles."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import fast, records, run, small
from synthetic import make
from torch import nn
from torch.nn import functional as F

from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.inference import api
from fedhet.inference.client import open_client
from fedhet.methods.registry import find_method, shipped_names
from fedhet.methods.spec import MethodSpec
from fedhet.models import Ensemble
from fedhet.report import compare, load_run, sweep, write_sweep
from fedhet.report.comparison import choose_columns
from fedhet.report.comparison_report import paired_cells, to_dict
from fedhet.report.tables import better_kind_line, final_table
from fedhet.runs.directory import last_round
from fedhet.runs.measures import best_round, selection_means
from fedhet.runs.records import Headline, RoundRecord, Score
from fedhet.tasks import CLASSIFICATION, MultiLabel, Regression

METHODS = sorted(shipped_names())
NEEDS_PUBLIC = {name for name in METHODS if find_method(name).spec.needs_public}


def of_kinds(number, **means):
    kinds = {kind: Score(mean=mean, per_client={"a": mean}) for kind, mean in means.items()}
    return RoundRecord(number, accuracy={"common": kinds})


# --- declarations


@pytest.mark.parametrize("name", METHODS)
def test_every_method_evaluates_the_model_that_it_declares(name, tmp_path):
    spec = find_method(name).spec
    assert spec.paper_model, "the table of headline models would have an empty cell"
    changes = {"rounds": 2, "clients": 3, "max_samples": 240, **fast(name)}
    changes |= {"public_samples": 40} if name in NEEDS_PUBLIC else {}
    summary = run(small(name, **changes), tmp_path / "run")
    assert summary["headline"] == spec.headline
    assert summary["headline_kinds"] == dict(spec.deployed)
    for protocol, kind in spec.deployed.items():
        assert kind in summary["accuracy"][protocol]
    loaded = load_run(tmp_path / "run")
    assert loaded.columns[0] == (spec.headline, spec.deployed[spec.headline])
    assert set(loaded.kinds("personal")) <= {*spec.kinds, "server"}
    assert {name for record in loaded.records for name in record.method} <= set(spec.metrics)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deployed": {"common": "private"}}, "must have the keys personal and common, got common"),
        (
            {"deployed": {"common": "global", "personal": "private"}},
            "kinds in private, server, got",
        ),
        ({"kinds": ("private", "ensemble")}, "must be declared together"),
        ({"ensemble": ("private", "proxy")}, "must be declared together"),
    ],
)
def test_declaration_of_an_unknown_kind_is_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        MethodSpec(**{"title": "x", "paper": "y", "headline": "personal", **changes})


# --- selection


def test_missing_kind_or_protocol_is_replaced_by_the_next():
    headline = Headline(protocol="personal", kinds={"common": "global", "personal": "proxy"})
    assert headline.column({"common": ["private", "global"]}) == ("common", "global")
    assert headline.column({"personal": ["local", "private"]}) == ("personal", "private")
    assert headline.column({"personal": [], "common": ["private"]}) == ("common", "private")
    assert headline.column({}) is None
    assert headline.ordered_kinds("personal", ["local", "global", "proxy", "private"]) == (
        "proxy", "private", "global", "local"
    )  # fmt: skip


def test_early_stopping_and_the_best_round_use_one_kind():
    # The private models are best in round 1, the averaged model in round 3. Round 2 has no average.
    rounds = [
        of_kinds(1, private=0.9, **{"global": 0.1}),
        of_kinds(2, private=0.8),
        of_kinds(3, private=0.7, **{"global": 0.6}),
        of_kinds(4, private=0.6, **{"global": 0.5}),
    ]
    averaged = Headline(kinds={"common": "global"})
    assert selection_means(rounds, averaged) == {1: 0.1, 3: 0.6, 4: 0.5}
    assert best_round(rounds, averaged) == 3
    assert best_round(rounds, Headline()) == 1
    stopping = {"early-stopping": 1, "rounds": 9}
    assert last_round(rounds, resolve({"method": "fedavg", **stopping})) == 5
    assert last_round(rounds, resolve({"method": "local", **stopping})) == 3
    assert last_round(rounds[:3], resolve({"method": "fedavg", **stopping})) == 9


def test_kept_models_are_from_the_best_round_of_the_headline_kind(tmp_path):
    config = small("fedavg", rounds=4, keep_best=True, validation_fraction=0.0)
    run(config, tmp_path / "run")
    means = [
        (each["accuracy"]["common"]["global"]["mean"], -each["round"])
        for each in records(tmp_path / "run")
    ]
    best = -max(means)[1]
    assert "validation" not in records(tmp_path / "run")[0]["accuracy"]
    assert open_client(tmp_path / "run", "client-0", best=True).round == best


# --- comparison


def runs_of(root, method, seeds, **means):
    """Write synthetic runs whose last round has the given means of kinds, plus seed / 1000."""
    paths = [make(root / f"{method}-{seed}", method=method, seed=seed, rounds=3) for seed in seeds]
    for path, seed in zip(paths, seeds, strict=True):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((path / "summary.json").read_text())
        for line in lines:
            names = line["asked"]
            line["accuracy"] = {
                "common": {
                    kind: {
                        "mean": mean + seed / 1000, "std": 0.0, "worst": mean,
                        "per_client": dict.fromkeys(names, mean + seed / 1000),
                    }
                    for kind, mean in means.items()
                }
            }  # fmt: skip
        summary["accuracy"] = lines[-1]["accuracy"]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (path / "summary.json").write_text(json.dumps(summary))
    return paths


def test_comparison_with_local_uses_the_averaged_model(tmp_path):
    seeds = (0, 1, 2)
    paths = runs_of(tmp_path, "local", seeds, private=0.46)
    paths += runs_of(tmp_path, "fedavg", seeds, private=0.44, **{"global": 0.82})
    found = compare(paths)
    assert [group.method for group in found.groups] == ["fedavg", "local"]
    content = to_dict(found)
    assert [group["headline_kind"] for group in content["groups"]] == ["global", "private"]
    (pair,) = content["paired"]
    assert (pair["kind"], pair["against_kind"]) == ("global", "private")
    assert pair["last"]["mean"] == pytest.approx(0.36)
    cells = paired_cells(found).columns
    assert [cells[name][0].text for name in ("run", "against")] == [
        "fedavg (global)", "local (private)"
    ]  # fmt: skip
    assert choose_columns(found.groups, kind="private")[0] == ("common", "private")
    same = compare(paths, kind="private")
    assert [group.method for group in same.groups] == ["local", "fedavg"]
    assert same.pairs[0].last.mean == pytest.approx(-0.02)
    with pytest.raises(SettingsError, match="kind: "):
        compare(paths, kind="headline")


def test_same_headline_kind_has_one_column(tmp_path):
    paths = runs_of(tmp_path, "fedprox", (0, 1), private=0.5, **{"global": 0.7})
    paths += runs_of(tmp_path, "fedavg", (0, 1), private=0.4, **{"global": 0.8})
    assert compare(paths).columns == (("common", "global"), ("common", "private"))


def test_sweep_recommends_the_setting_with_the_best_averaged_model(tmp_path):
    low = runs_of(tmp_path / "low", "fedavg", (0,), private=0.5, **{"global": 0.376})
    high = runs_of(tmp_path / "high", "fedavg", (0,), private=0.4, **{"global": 0.652})
    results = sweep(("training.lr",), {(0.0003,): low, (0.003,): high})
    page = write_sweep(results, tmp_path / "out").read_text()
    assert results.results.columns[0] == "accuracy, common, global"
    assert "accuracy, common test set, global, highest mean over seeds" in page
    assert "training.lr = 0.003" in page or "<dd>0.003</dd>" in page


def test_result_and_its_baseline_use_their_own_kinds(tmp_path):
    (path,) = runs_of(tmp_path, "fedavg", (0,), private=0.44, **{"global": 0.82})
    (baseline,) = runs_of(tmp_path, "local", (0,), private=0.46)
    baseline.rename(path / "baseline")
    result = api.load(path)
    assert (result.accuracy, result.headline) == (pytest.approx(0.82), ("common", "global"))
    assert load_run(path).baseline_column == ("common", "private")
    caption = final_table(load_run(path)).caption
    assert "headline: accuracy 0.8200, global models on the common test set" in caption
    assert "against local (global against private): +0.3600" in caption


def test_another_kind_with_a_clearly_higher_score_is_named(tmp_path):
    (path,) = runs_of(tmp_path, "fedavg", (0,), private=0.6, **{"global": 0.5})
    loaded = load_run(path)
    clients = loaded.last("common", "global").per_client
    # All clients share n test samples. A difference of 0.1 has an error of about sqrt(0.1 / n).
    for count, is_named in ((20, False), (1000, True), (0, False)):
        lines = [
            replace(record, tested={"common": dict.fromkeys(clients, count)} if count else {})
            for record in loaded.records
        ]
        settings = {**loaded.settings, "data.dataset": "own"}  # of unknown size
        line = better_kind_line(replace(loaded, records=tuple(lines), settings=settings))
        wanted = "the kind private has a higher score than the headline kind global"
        assert (wanted in line) is is_named, count


# --- ensembles


class Fixed(nn.Module):
    """Model with fixed outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = torch.tensor(outputs)

    def forward(self, x):
        return self.outputs[: len(x)]


def drawn(*shape):
    return np.random.default_rng(0).normal(0, 3, shape).astype(np.float32)


def ensemble_of(outputs, task):
    with torch.no_grad():
        combined = Ensemble([Fixed(each) for each in outputs], task)(torch.zeros(len(outputs[0])))
        return task.decode(combined).double().numpy()


def test_ensemble_averages_class_probabilities():
    outputs = drawn(2, 7, 4)
    outputs[:, :, 3] = -np.inf  # A class outside the client's label space.
    exponentials = np.exp(outputs.astype(np.float64))
    expected = (exponentials / exponentials.sum(2, keepdims=True)).mean(0)
    np.testing.assert_allclose(ensemble_of(outputs, CLASSIFICATION), expected, atol=1e-6)


def test_ensemble_averages_label_probabilities():
    outputs = drawn(2, 7, 4)
    expected = (1 / (1 + np.exp(-outputs.astype(np.float64)))).mean(0)
    np.testing.assert_allclose(ensemble_of(outputs, MultiLabel()), expected, atol=1e-6)


def test_ensemble_averages_numbers_and_quantiles():
    outputs = drawn(2, 7, 4)
    task = Regression(means=(1.0,) * 4, deviations=(2.0,) * 4)
    expected = outputs.astype(np.float64).mean(0) * 2 + 1
    np.testing.assert_allclose(ensemble_of(outputs, task), expected, atol=1e-5)
    quantiles = Regression(
        means=(1.0, 1.0), deviations=(2.0, 2.0), loss_name="quantile", quantiles=(0.1, 0.9)
    )
    ascending = np.sort(outputs.astype(np.float64).reshape(2, 7, 2, 2), axis=3)
    np.testing.assert_allclose(
        ensemble_of(outputs, quantiles), ascending.mean(0) * 2 + 1, atol=1e-5
    )


@pytest.mark.parametrize("name", ["fedtype", "fml", "fedkd"])
def test_ensemble_is_evaluated_predicted_and_exported(name, tmp_path):
    summary = run(small(name, rounds=1, clients=2), tmp_path / "run")
    client = open_client(tmp_path / "run", "client-1")
    assert client.kinds == ("private", "proxy", "ensemble", "global")
    x = torch.rand(9, *client.record.format.shape)
    predicted = client.predict(x, "ensemble").probabilities
    with torch.no_grad():
        members = [F.softmax(client.model(kind)(x), 1).numpy() for kind in ("private", "proxy")]
    np.testing.assert_allclose(predicted, np.mean(members, axis=0), atol=1e-5)
    accuracy = client.accuracy("ensemble")
    for protocol, value in accuracy.items():
        reported = summary["accuracy"][protocol]["ensemble"]["per_client"]["client-1"]
        assert value == pytest.approx(reported)
    result = api.load(tmp_path / "run")
    for form in ("safetensors", "pt2"):
        card = result.export("client-1", tmp_path / f"m.{form}", kind="ensemble")
        assert json.loads(card.read_text())["kind"] == "ensemble"
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert program is not None
    found = compare([tmp_path / "run"], kind="ensemble")
    assert found.headline[1] == "ensemble"
