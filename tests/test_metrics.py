"""Metrics other than accuracy: values against literal versions, and records of a run."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import records, run, small
from matplotlib.figure import Figure
from torch import nn
from typer.testing import CliRunner

from fedhet import report
from fedhet.base.errors import KnowledgeError, SettingsError
from fedhet.base.metrics import (
    METRICS,
    Metric,
    Predictions,
    measure,
    measured_names,
    metric_of,
    select_metrics,
)
from fedhet.cli import app
from fedhet.data.dataset import Split
from fedhet.data.store import RunData
from fedhet.inference import api
from fedhet.learning.devices import CPU
from fedhet.learning.training import evaluate
from fedhet.models import build_any, evaluate_model
from fedhet.report import figures
from fedhet.runs.measures import Measured, read_measures, write_measures
from fedhet.server.round import RoundState, Selection
from fedhet.settings.run import RunSettings

ALL = [name for name, metric in METRICS.items() if metric.task == "classification"]
NAMES = tuple(name for name in ALL if name != "accuracy")


def drawn(seed, samples=40, classes=5, absent=(3,)):
    """Return true classes, probabilities, and predictions; some classes are absent."""
    rng = np.random.default_rng(seed)
    truth = rng.choice([c for c in range(classes) if c not in absent], samples)
    likely = rng.dirichlet(np.ones(classes) * 0.5, samples)
    return truth, likely, likely.argmax(1)


# --- the oracles: each written out, without scikit-learn ------------------------------------


def recalls(truth, guess):
    found = {}
    for label in sorted(set(truth.tolist())):
        right = [g == label for t, g in zip(truth, guess, strict=True) if t == label]
        found[f"recall.{label}"] = sum(right) / len(right)
    return found


def macro_f1(truth, guess):
    each = []
    for label in set(truth.tolist()):
        hits = sum(t == g == label for t, g in zip(truth, guess, strict=True))
        each.append(2 * hits / (sum(truth == label) + sum(guess == label)))
    return sum(each) / len(each)


def auc(truth, likely):
    """Return the fraction of pairs in the right order by class, where a tie counts as half."""
    each = []
    for label in set(truth.tolist()):
        inside, outside = likely[truth == label, label], likely[truth != label, label]
        pairs = [
            1.0 if own > other else 0.5 if own == other else 0.0
            for own, other in itertools.product(inside, outside)
        ]
        each.append(sum(pairs) / len(pairs))
    return sum(each) / len(each)


def calibration_error(truth, likely):
    total = 0.0
    for place in range(15):
        low, high = place / 15, (place + 1) / 15
        inside = [
            (row.max(), row.argmax() == t)
            for row, t in zip(likely, truth, strict=True)
            if low < row.max() <= high
        ]
        if inside:
            gap = np.mean([right for _, right in inside]) - np.mean([sure for sure, _ in inside])
            total += len(inside) / len(truth) * abs(gap)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_each_metric_equals_its_definition(seed):
    truth, likely, guess = drawn(seed)
    found = measure(NAMES, Predictions(truth, guess, likely))
    of_classes = recalls(truth, guess)
    loss = -sum(math.log(row[t]) for row, t in zip(likely, truth, strict=True)) / len(truth)
    assert found == pytest.approx(
        {
            **of_classes,
            "balanced-accuracy": sum(of_classes.values()) / len(of_classes),
            "macro-f1": macro_f1(truth, guess),
            "auc": auc(truth, likely),
            "test-loss": loss,
            "calibration-error": calibration_error(truth, likely),
        }
    )
    assert "recall.3" not in found


def test_split_of_one_class_has_no_auc_and_no_nan():
    truth, guess = np.array([2, 2, 2]), np.array([2, 0, 2])
    likely = np.array([[0.1, 0.1, 0.8], [0.6, 0.2, 0.2], [0.0, 0.0, 1.0]])
    found = measure(NAMES, Predictions(truth, guess, likely))
    assert "auc" not in found
    assert set(found) == {*NAMES, "recall.2"} - {"auc", "recall"}
    assert found["balanced-accuracy"] == found["recall.2"] == pytest.approx(2 / 3)
    assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize("right", [True, False])
def test_certain_models_have_finite_metrics_within_their_ranges(right):
    truth = np.array([0, 1, 1, 0])
    guess = truth if right else 1 - truth
    likely = np.eye(2)[guess]
    found = measure(NAMES, Predictions(truth, guess, likely))
    for name, value in found.items():
        assert metric_of(name).lowest <= value <= metric_of(name).highest
    assert found["test-loss"] == pytest.approx(0 if right else 52 * math.log(2))
    assert found["calibration-error"] == (0 if right else 1)


# --- of models -------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Returns its inputs as logits."""

    def forward(self, x):
        return x


def test_metrics_do_not_change_the_score():
    logits = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(300) % 4
    plain = evaluate(Fixed(), logits, y, CPU)
    score = evaluate_model(Fixed(), Split(logits, y), CPU, NAMES)
    assert (score.accuracy, score.loss) == (plain.accuracy, plain.loss)
    assert evaluate_model(Fixed(), Split(logits, y), CPU) == plain
    assert evaluate_model(Fixed(), Split(logits, y), CPU, ALL).metrics["accuracy"] == plain.accuracy
    own = nn.functional.cross_entropy(logits.double(), y)
    assert score.metrics["test-loss"] == pytest.approx(own.item())


def test_classes_outside_a_label_space_are_never_predicted_and_cost_a_bounded_loss():
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    logits[:, 2] = -math.inf
    score = evaluate_model(Fixed(), Split(logits, torch.arange(50) % 3), CPU, NAMES)
    assert score.metrics["recall.2"] == 0
    assert score.metrics["test-loss"] < 37
    assert 0 < score.metrics["auc"] < 1


def test_nonfinite_outputs_have_only_an_accuracy():
    logits = torch.randn(10, 3)
    logits[4] = math.nan
    score = evaluate_model(Fixed(), Split(logits, torch.zeros(10, dtype=torch.int64)), CPU, NAMES)
    assert score.metrics == {}
    assert score.accuracy <= 0.9


@pytest.mark.parametrize("name", ["sk-tree", "sk-mlp", "sk-svm"])
def test_classical_model_is_evaluated_by_probabilities(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    model = build_any(name, (4,), 4, seed=0)  # no sample is of the last class
    model.fit(x[:30], y[:30])
    score = evaluate_model(model, Split(x[30:], y[30:]), CPU, NAMES)
    likely = model.probabilities(x[30:]).double().numpy()
    assert score.metrics["auc"] == pytest.approx(auc(y[30:].numpy(), likely))
    assert "recall.3" not in score.metrics
    if name == "sk-svm":  # certain of what it predicts
        assert score.metrics["calibration-error"] == pytest.approx(1 - score.accuracy)


# --- the setting, and sent metrics -------------------------------------------------------------


def test_setting_is_a_list_in_any_order():
    assert select_metrics(["auc", "balanced-accuracy", "auc"]) == (
        "accuracy",
        "balanced-accuracy",
        "auc",
    )
    assert RunSettings().metrics == RunSettings(metrics="accuracy").metrics == ("accuracy",)
    assert measured_names(("auc", "recall"), 2) == ["auc", "recall.0", "recall.1"]


def test_unknown_metric_raises():
    with pytest.raises(SettingsError, match=r"'metrics'.*macro-f1, auc.*acu"):
        small(metrics="acu")


def reported(**others):
    plain = Measured({("accuracy", "common", "private"): 0.5})
    return write_measures(plain) | {name.replace("_", "."): v for name, v in others.items()}


def test_metrics_round_trip():
    values = {"accuracy": 0.5, "auc": 0.75, "recall.1": 1.0}
    sent = Measured(
        {(name, "common", "private"): v for name, v in values.items()}, 1.0,
        majority={"common": 0.25, "personal": 1.0}, tested={"common": 359, "personal": 12},
    )  # fmt: skip
    wanted = measured_names(("accuracy", "auc", "recall"), 2)
    assert read_measures("a", write_measures(sent), ("private",), wanted) == sent


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("auc.common.private", math.nan, "must be a finite number"),
        ("auc.common.private", math.inf, "must be from 0 to 1"),
        ("auc.common.private", 1.5, "must be from 0 to 1"),
        ("auc.common.private", -0.1, "must be from 0 to 1"),
        ("auc.common.private", "1", "must be a finite number"),
        ("test-loss.common.private", 38.0, "must be from 0 to 37"),
        ("recall.2.common.private", 0.5, "not a metric of this method"),
        ("recall.-1.common.private", 0.5, "not a metric of this method"),
        ("macro-f1.common.private", 0.5, "not a metric of this method"),
        ("auc.common.proxy", 0.5, "not a metric of this method"),
        ("auc.personal.private", 0.5, "reported without accuracy.personal.private"),
        ("majority.common", 1.5, "must be from 0 to 1"),
        ("majority.common", math.nan, "must be a finite number"),
        ("majority.server", 0.5, "not a metric of this method"),
        ("tested.common", 0, "must be from 1 to 1e+09"),
        ("tested.personal", math.nan, "must be a finite number"),
        ("tested.server", 5, "not a metric of this method"),
    ],
)
def test_metrics_from_outside_are_checked(name, value, fault):
    wanted = measured_names(("accuracy", "auc", "test-loss", "recall"), 2)
    with pytest.raises(KnowledgeError, match=r"^a: ") as caught:
        read_measures("a", {**reported(), name: value}, ("private",), wanted)
    assert caught.value.field == name
    assert fault in caught.value.fault


def test_majority_class_is_recorded(tmp_path):
    config = small("local", clients=3, rounds=1, **{"data.partition": "dirichlet"})
    run(config, tmp_path)
    (record,) = records(tmp_path)
    store = RunData.for_run(config.run)
    for number in range(3):
        own = store.client(number)
        for protocol, split in (("personal", own.test), ("common", own.common)):
            counts = np.unique(split.y.numpy(), return_counts=True)[1]
            share = counts.max() / counts.sum()
            assert record["majority"][protocol][own.name] == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize(("method", "server"), [("felo", False), ("fedgems", True)])
def test_run_records_the_number_of_test_samples(method, server, tmp_path):
    config = small(method, rounds=1)
    run(config, tmp_path)
    tested = records(tmp_path)[-1]["tested"]
    names = [f"client-{k}" for k in range(4)]
    assert tested["common"] == dict.fromkeys([*names, *["server"] * server], 100)
    data = RunData.for_run(config.run)
    assert tested["personal"] == {name: len(data.split_rows(k)[1]) for k, name in enumerate(names)}
    loaded = report.load_run(tmp_path)
    assert loaded.test_samples("common", "server" if server else "private") == pytest.approx(100)
    counts = np.array([*tested["personal"].values()])
    expected = len(counts) ** 2 / (1 / counts).sum()
    assert loaded.test_samples("personal", "private") == pytest.approx(expected)


def test_no_metric_is_computed_without_the_setting():
    with pytest.raises(KnowledgeError, match="metric"):
        read_measures("a", {**reported(), "auc.common.private": 0.5}, ("private",), ["accuracy"])


def beside(accuracy=0.5, **values):
    both = {"accuracy": accuracy, **values}
    return Measured({(name.replace("_", "-"), "common", "private"): v for name, v in both.items()})


@pytest.mark.parametrize("name", ["spent", "answer"])
def test_undeclared_metric_raises(name):
    state = RoundState(1, print)
    state.start(1)
    state.record_selection(Selection(("a",)))
    with state.drop_on_error("a"):
        read_measures("a", {name: 1.0}, ["private"], ["accuracy"])
    assert state._failures == {"a": "refused"}


def test_worst_loss_is_the_highest():
    state = RoundState(1, print)
    state.start(1)
    state.record_selection(Selection(("a", "b")))
    state.record_measured("a", beside(test_loss=1.0, auc=0.25))
    state.record_measured("b", beside(test_loss=3.0, auc=0.75))
    found = state.finish(evaluated=True).metrics
    assert list(found) == ["auc", "test-loss"]
    assert found["auc"]["common"]["private"].worst == 0.25
    assert found["test-loss"]["common"]["private"].worst == 3.0
    again = RoundState(1, print)
    again.load_json(state.to_json())
    again.start(2)
    again.record_selection(Selection(("a", "b")))
    again.record_measured("b", beside(test_loss=2.0))  # no AUC any more
    again.scores.mark_outdated(["a"])
    metrics = again.finish(evaluated=True).metrics
    assert metrics["test-loss"]["common"]["private"].per_client == {"b": 2.0}
    assert "auc" not in metrics


# --- runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A run with scikit-learn models and all metrics, and its report."""
    directory = tmp_path_factory.mktemp("judged") / "run"
    config = small("local", models=["mlp", "sk-tree"], metrics=ALL, rounds=2, clients=3)
    return directory, run(config, directory, report=True)


def test_runs_metrics_are_in_its_files(judged):
    directory, summary = judged
    assert {name.partition(".")[0] for name in summary["metrics"]} == set(NAMES)
    for protocols in summary["metrics"].values():
        for kinds in protocols.values():
            score = kinds["private"]
            assert all(map(math.isfinite, score["per_client"].values()))
            assert score["mean"] == pytest.approx(np.mean(list(score["per_client"].values())))
    assert records(directory)[-1]["metrics"]["auc"]["common"]["private"]["mean"] > 0.5
    page = (directory / "report.html").read_text()
    for title in ("Balanced accuracy", "Macro F1", "AUC", "Test loss", "Calibration error"):
        assert f"{title}, " in page
    assert "Scores by class" in page


def test_default_changes_no_other_metric(judged, tmp_path):
    _, summary = judged
    plain = run(small("local", models=["mlp", "sk-tree"], clients=3), tmp_path / "run")
    assert "metrics" not in plain
    assert "metrics" not in records(tmp_path / "run")[0]
    for name in ("accuracy", "history", "bytes_up", "bytes_down"):
        mine, theirs = json.loads(json.dumps([plain[name], summary[name]]))
        for past in (*mine, *theirs) if name == "history" else ():
            past.pop("seconds")
        assert mine == theirs


def test_frames_have_the_metrics(judged):
    directory, summary = judged
    result = api.load(directory)
    auc_of = summary["metrics"]["auc"]["common"]["private"]
    assert result.history["auc.common.private"].iloc[-1] == pytest.approx(auc_of["mean"])
    assert result.clients["auc.common.private"].to_dict() == pytest.approx(auc_of["per_client"])
    frame = result.to_frame()
    last = frame[(frame["round"] == 2) & (frame["protocol"] == "common")]
    assert dict(zip(last["client"], last["auc"], strict=True)) == pytest.approx(
        auc_of["per_client"]
    )


def test_each_client_has_its_curve_in_tensorboard(judged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory, summary = judged
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    for metric in ("accuracy", "auc", "test-loss"):
        scores = (summary["accuracy"] if metric == "accuracy" else summary["metrics"][metric])[
            "common"
        ]["private"]
        for client, value in scores["per_client"].items():
            points = events.Scalars(f"{metric}-common-private/clients/{client}")
            assert [point.step for point in points] == [1, 2]
            assert points[-1].value == pytest.approx(value, rel=1e-6)


def test_runs_are_compared_by_a_metric(judged, tmp_path):
    directory, summary = judged
    other = tmp_path / "other"
    run(small("local", models=["mlp", "sk-tree"], metrics=ALL, clients=3, lr=0.01), other)
    again = json.loads((other / "summary.json").read_text())
    for metric, sign in (("auc", -1), ("test-loss", 1)):
        means = {
            str(path): found["metrics"][metric]["common"]["private"]["mean"]
            for path, found in ((directory, summary), (other, again))
        }
        found = report.compare([directory, other], metric=metric, protocol="common")
        order = [str(group.runs[0].path) for group in found.groups]
        assert order == sorted(means, key=lambda path: sign * means[path])
        at_zero = replace(found, target=0.0)
        assert sign > 0 or all(at_zero.to_target(group, "bytes").n for group in found.groups)
        assert all(found.to_target(group, "bytes").n == 1 for group in found.groups)
    compared = api.compare([directory, other], metric="auc").to_frame()
    assert "auc.common.private.mean" in compared


def test_command_compares_by_a_metric(judged, tmp_path):
    directory, _ = judged
    out = ["--out", str(tmp_path / "compare")]
    told = CliRunner().invoke(app, ["compare", str(directory), "--metric", "test-loss", *out])
    assert told.exit_code == 0, told.output
    assert "last round, test loss" in told.output
    assert json.loads((tmp_path / "compare" / "compare.json").read_text())["metric"] == "test-loss"
    with pytest.raises(SettingsError, match=r"accuracy, balanced-accuracy"):
        report.compare([directory], metric="auroc")


def kappa(made):
    """Return Cohen's kappa (-1 to 1) for all samples, and for each class against the rest."""

    def agreement(truth, guess):
        chance = sum(np.mean(truth == c) * np.mean(guess == c) for c in np.unique(truth))
        return float((np.mean(truth == guess) - chance) / (1 - chance))

    return agreement(made.truth, made.predicted)


def disagreement(made):
    """Return minus kappa for each class against the rest; lower values are better."""
    own = [(str(c), made.truth == c, made.predicted == c) for c in made.present]
    return {c: -kappa(Predictions(truth, guess, made.probabilities)) for c, truth, guess in own}


@pytest.fixture
def signed_metrics(monkeypatch):
    """Two custom metrics that can be negative: kappa, and a metric by class, lower is better."""
    for metric in (
        Metric("kappa", "Cohen's kappa", kappa, lowest=-1.0),
        Metric("disagreement", "disagreement", disagreement, lowest=-1.0, lower_is_better=True,
               by_class=True),
    ):  # fmt: skip
        monkeypatch.setitem(METRICS, metric.name, metric)


def test_class_of_a_metric_has_its_range_and_direction(signed_metrics):
    found = metric_of("disagreement.3")
    assert (found.name, found.title) == ("disagreement.3", "disagreement of class 3")
    assert (found.lowest, found.highest, found.lower_is_better) == (-1.0, 1.0, True)


def test_custom_metric_can_be_negative(signed_metrics, tmp_path):
    """Test a resumed simulation, its summary, its figures, and a comparison."""
    names = ["accuracy", "kappa", "disagreement"]
    slow = {"metrics": names, "lr": 1e-9, "clients": 3}  # models stay as good as chance
    run(small("local", **slow, rounds=1), tmp_path / "run")
    result = api.run(resume=tmp_path / "run", rounds=2, progress=False)
    for record in records(tmp_path / "run"):
        assert not record["failed"]
        score = record["metrics"]["kappa"]["personal"]["private"]
        assert min(score["per_client"].values()) == score["worst"] < 0
        each = [found["personal"]["private"] for name, found in record["metrics"].items()
                if name.startswith("disagreement.")]  # fmt: skip
        assert each
        assert all(max(found["per_client"].values()) == found["worst"] for found in each)
    mean = result.summary.metrics["kappa"]["personal"]["private"].mean
    found = report.compare([tmp_path / "run"], metric="kappa", protocol="personal")
    assert found.target == math.floor((0.9 * (mean + 1) - 1) * 1000) / 1000 < mean
    assert all(found.to_target(group, "bytes").n for group in found.groups)
    assert found.target_label == f"{found.target:.4f}"
    sampled = report.compare([tmp_path / "run"], -0.5, metric="kappa", protocol="personal")
    assert sampled.target == -0.5
    assert "kappa, " in (tmp_path / "run" / "report.html").read_text()
    view = report.load_run(tmp_path / "run").with_metric("kappa")
    figure = Figure()
    figures.metrics([("Cohen's kappa", view)]).draw(figure)
    low = (view.curve(view.headline, "private")[["mean", "std"]] @ [1, -1]).min()
    assert figure.axes[0].dataLim.ymin == pytest.approx(max(low, -1.0))


def test_terminals_table_has_the_metrics(judged):
    from synthetic import shown

    directory, _ = judged
    table = report.metric_table(report.load_run(directory))
    assert table is not None
    text = shown(table)
    assert "balanced accuracy" in text
    assert "recall" not in text


def test_servers_own_model_is_measured_too(tmp_path):
    config = small("fedgems", metrics="auc", server_model="mlp", rounds=1, clients=2)
    summary = run(config, tmp_path / "run")
    assert 0 < summary["metrics"]["auc"]["common"]["server"]["mean"] <= 1


def test_clients_with_label_spaces_of_their_own(tmp_path):
    config = small(
        "cofed", metrics=ALL, partition="superclasses", samples_per_class=10, clients=3,
        models=["mlp", "sk-svm"], max_samples=0,
    )  # fmt: skip
    summary = run(config, tmp_path / "run")
    for protocols in summary["metrics"].values():
        for kinds in protocols.values():
            assert all(map(math.isfinite, kinds["private"]["per_client"].values()))


def test_names_of_metrics_do_not_collide():
    assert metric_of("recall.3").title == "recall of class 3"
