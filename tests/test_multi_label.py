"""Multi-label classification: targets, losses, scores, methods, and predictions."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from federation import fast, records, run
from safetensors.numpy import load_file
from scipy.special import expit
from sklearn import metrics as sk
from sklearn.datasets import load_digits
from test_secure_runs import check_same_instructions
from test_tasks import on_table

from fedhet.algorithms.distillation import (
    AdaptiveIntensity,
    Outputs,
    SelectionByError,
    mutual_losses,
)
from fedhet.base.errors import DataError, SettingsError
from fedhet.base.metrics import Predictions, measure, metric_of
from fedhet.config.resolve import resolve
from fedhet.data.dataset import Dataset, Format, Split
from fedhet.data.rows import read_table
from fedhet.data.schemas import read_schema
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.data.tables import infer_schema, labeled_split
from fedhet.inference.api import Result
from fedhet.inference.client import open_client, read_inputs
from fedhet.inference.export import export
from fedhet.learning.devices import CPU
from fedhet.learning.training import SupervisedLoss, optimization_for
from fedhet.methods.registry import all_methods
from fedhet.models import evaluate_model
from fedhet.privacy import sgd
from fedhet.report import comparison, tables
from fedhet.report.run import load_run
from fedhet.tasks import MultiLabel, task_of

TASK, LABELS = MultiLabel(), ("heart", "lung", "bone")
METHODS = (
    "local", "central", "fedavg", "fedprox", "fedbn", "fedper", "fedrep", "lg-fedavg", "heterofl",
    "pfedme", "ditto", "moon", "scaffold", "fedrolex", "fml", "fedkd", "fedmrl", "fedlora",
    "fedsa", "fedmd", "ds-fl", "feddf", "fedgems",
)  # fmt: skip


def drawn(samples=120, seed=0):
    """Return features [N, 4] and labels [N, 3], a tenth of which are missing."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 4))
    y = (x @ rng.normal(size=(4, 3)) + rng.normal(0, 0.3, (samples, 3)) > 0).astype(float)
    y[rng.random(y.shape) < 0.1] = np.nan
    return x, y


def write(path, x, y, words=("0", "1")):
    """Write a table with a column for each label."""
    lines = [",".join(["a", "b", "c", "d", *LABELS])]
    for row, labels in zip(x, y, strict=True):
        shown = ["" if math.isnan(each) else words[int(each)] for each in labels]
        lines.append(",".join([*(f"{each!r}" for each in row.tolist()), *shown]))
    path.write_text("\n".join(lines) + "\n")
    return path


def spec(target="heart,lung,bone", **changes):
    return DataSpec(**{"target": target, "task": "multi-label", **changes})


def config(method, path, **changes):
    target = {"data.target": ",".join(LABELS), "data.task": "multi-label"}
    return on_table(method, path, **{**fast(method), **target, **changes})


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write(tmp_path_factory.mktemp("table") / "a.csv", *drawn())


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("0", "1"), ("0.0", "1.0"), ("False", "true")])
def test_each_label_has_a_column(tmp_path, words):
    x, y = drawn()
    cells = read_table(write(tmp_path / "a.csv", x, y, words), spec())
    schema = infer_schema(cells, spec())
    split = labeled_split(schema, cells)
    np.testing.assert_array_equal(split.y, y.astype(np.float32))
    assert (schema.task, schema.outputs) == ("multi-label", LABELS)
    assert {column.name for column in schema.columns} == {*"abcd"}
    (tmp_path / "schema.toml").write_text(schema.to_toml())
    assert read_schema(tmp_path / "schema.toml") == schema


LISTS = [["lung", "heart"], [], None, ["bone"], ["lung"]]
LISTED = [[0, 1, 1], [0, 0, 0], [math.nan] * 3, [1, 0, 0], [0, 0, 1]]
"""Targets of the labels in alphabetical order: bone, heart, lung."""


def listed(path):
    """Write a table with a column of lists, in the format of the path."""
    rows = [{"x": k / 7, "found": labels} for k, labels in enumerate(LISTS)]
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        texts = ["lung; heart", "[]", "", "bone", '"[""lung""]"']
        lines = [f"{row['x']},{text}" for row, text in zip(rows, texts, strict=True)]
        path.write_text("\n".join(["x,found", *lines]) + "\n")
    return path


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_column_lists_the_labels_of_each_row(tmp_path, ending):
    path, lines = listed(tmp_path / f"a.{ending}"), []
    cells = read_table(path, spec("found"))
    schema = infer_schema(cells, spec("found"), lines.append)
    assert schema.outputs == ("bone", "heart", "lung")
    np.testing.assert_array_equal(labeled_split(schema, cells).y, np.float32(LISTED))
    assert "found: lists of 3 labels; 1 missing; write [] for a row without labels" in lines
    assert "lung: label, 2 of 4 rows" in lines


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_auto_asks_about_lists_and_names_the_setting_that_decides(tmp_path, ending):
    path = listed(tmp_path / f"a.{ending}")
    if ending == "csv":
        path.write_text("x,found\n1,a;b\n2,a\n3,b\n4,b;a\n")
    auto = spec("found", task="auto")
    with pytest.raises(DataError, match=r"data\.task.*multi-label") as error:
        infer_schema(read_table(path, auto), auto)
    assert "\n" not in str(error.value)


def test_classes_may_contain_semicolons(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,old; male\n2,old; female\n3,young; male\n")
    auto = spec("y", task="auto")
    with pytest.raises(DataError, match="or to classification if each value is a class"):
        infer_schema(read_table(path, auto), auto)
    stated = spec("y", task="classification")
    assert len(infer_schema(read_table(path, stated), stated).classes) == 3
    path.write_text("x,y\n1,a;b\n2,a\n3,b\n")
    assert infer_schema(read_table(path, stated), stated).classes == ("a", "a;b", "b")


@pytest.mark.parametrize(
    ("rows", "target", "fault"),
    [
        ("1,0\n2,2\n3,1", "p,q", r"row 2, column 'p': expected 0, 1, or a missing value, got '2'"),
        ("a;b,1\n[a,1", "p", r"row 2, column 'p': expected labels such as a;b"),
        ('"[[""a""]]",1\na,1', "p", r"row 1, column 'p': .*got a list"),
        ("0,1\n1,1\n1,0", "p", r"expected lists of labels, got only 0 and 1"),
        ("0,1\n1,1\n1,0", "p,p", r"different labels, got 2 \(1 different\)"),
        ("0,1\n1,1\n1,0", "p,z", r"column 'z'"),
    ],
)
def test_invalid_target_has_one_error(tmp_path, rows, target, fault):
    path = tmp_path / "a.csv"
    lines = [f"{row},{k / 7}" for k, row in enumerate(rows.split("\n"))]
    path.write_text("\n".join(["p,q,x", *lines]) + "\n")
    with pytest.raises(DataError, match=fault) as error:
        infer_schema(read_table(path, spec(target)), spec(target))
    assert "\n" not in str(error.value)


def test_marker_of_missing_labels_is_declared(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("p,q,x\n1,-1,0.5\n0,1,0.7\n")
    table = read_table(path, spec("p,q"))
    with pytest.raises(DataError, match=r"row 1, column 'q': .*'-1'"):
        infer_schema(table, spec("p,q"))
    (tmp_path / "schema.toml").write_text(
        'target = "p,q"\ntask = "multi-label"\nmissing = ["-1"]\n[columns.x]\ntype = "number"\n'
    )
    declared = read_schema(tmp_path / "schema.toml")
    labels = labeled_split(infer_schema(table, spec("p,q"), declared=declared), table).y
    np.testing.assert_array_equal(labels, np.float32([[1, math.nan], [0, 1]]))


def test_site_reads_labels_with_the_schema_of_all_sites(tmp_path):
    every = infer_schema(read_table(listed(tmp_path / "a.csv"), spec("found")), spec("found"))
    site = tmp_path / "site"
    site.mkdir()
    (site / "schema.toml").write_text(every.to_toml())
    (site / "train.csv").write_text("x,found\n" + "0.1,lung\n0.2,heart;lung\n" * 20)
    data = site_data(f"table:{site}", spec=spec("found"), classes=3, name="a")
    assert data.format.classes == ("bone", "heart", "lung")
    assert not data.train.y[:, 0].any()
    assert data.train.y[:, 2].all()
    (site / "train.csv").write_text("x,found\n0.1,lungs\n" + "0.2,lung\n" * 9)
    with pytest.raises(DataError, match=r"'lungs'.*'lung'"):
        site_data(f"table:{site}", spec=spec("found"), classes=3, name="a")


def test_samples_are_grouped_by_their_rarest_label():
    nan = math.nan
    targets = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, nan], [0, 0, 0], [nan, 1, 1.0]])
    names, groups = TASK.strata(targets, LABELS)
    assert names == (*LABELS, "no label")
    assert groups.tolist() == [1, 0, 0, 3, 2]


@pytest.mark.parametrize("rule", ["dirichlet", "iid", "shards", "classes"])
def test_partitions_contain_each_row_once(table, rule):
    data = RunData.for_run(config("local", table, **{"data.partition": rule}).run)
    rows = np.concatenate([np.concatenate(data.split_rows(k)) for k in range(3)])
    assert np.array_equal(np.unique(rows), np.sort(rows))
    if rule != "classes":
        assert len(rows) == 120


# --- losses ---------------------------------------------------------------------------------------


def entropy_by_hand(outputs, targets):
    """Return each sample's binary cross-entropy over its present labels, in float64 loops."""
    losses = []
    for row, labels in zip(outputs.double().tolist(), targets.double().tolist(), strict=True):
        pairs = [(z, t) for z, t in zip(row, labels, strict=True) if not math.isnan(t)]
        parts = [-math.log(expit(z) if t else expit(-z)) for z, t in pairs]
        losses.append(sum(parts) / len(parts) if parts else 0.0)
    return losses


def test_loss_is_the_mean_over_the_present_labels_of_each_sample():
    outputs = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor(drawn(9, 3)[1], dtype=torch.float32)
    targets[4] = math.nan
    expected = entropy_by_hand(outputs.detach(), targets)
    found = TASK.loss("none")(outputs, targets)
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-5, atol=1e-6)
    loss = TASK.loss()(outputs, targets)
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-5)
    loss.backward()
    assert not outputs.grad[targets.isnan()].any()
    assert (outputs.grad[~targets.isnan()] != 0).all()


def test_batch_without_labels_has_the_loss_0_and_a_gradient():
    outputs = torch.randn(4, 3, requires_grad=True)
    loss = TASK.loss()(outputs, torch.full((4, 3), math.nan))
    loss.backward()
    assert loss.item() == 0
    assert not outputs.grad.any()


def test_divergence_equals_bernoulli_distributions():
    teacher, student = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    teacher.requires_grad_()
    student.requires_grad_()
    p, q = (expit(each.detach().double().numpy()) for each in (teacher, student))
    expected = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean(1)
    found = TASK.divergence("none")(teacher, student)
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-3, atol=1e-6)
    mean = TASK.divergence()(teacher, student)
    assert mean.item() == pytest.approx(expected.mean(), rel=1e-3)
    mean.backward()
    assert teacher.grad is None
    np.testing.assert_allclose(student.grad, (q - p) / 18, atol=1e-6)


def test_fedgems_counts_predictions_with_a_small_loss_as_correct():
    selection = SelectionByError(TASK.errors, TASK.loss("none"), TASK.divergence("none"), 0.25)
    outputs, likely = torch.tensor([[2.0, 2.0], [1.2, 1.2], [2.0, -2.0]]), torch.ones(3, 2)
    assert selection.right(outputs, likely).tolist() == [True, False, False]
    likely[0] = math.nan  # a sample without labels has the loss 0
    assert selection.right(outputs, likely).tolist() == [False, False, False]
    weights = selection.reliability(outputs.expand(2, 3, 2), torch.ones(3, 2))
    assert weights.tolist() == [[0.5, 0.0, 0.0]] * 2
    assert not selection.reliability(outputs.expand(2, 3, 2), likely).any()


@pytest.mark.parametrize("by_sample", [True, False])
def test_samples_without_labels_neither_raise_fedkds_intensity_nor_are_distilled(by_sample):
    rng = np.random.default_rng(0)
    mentor, mentee = (
        Outputs(torch.tensor(rng.normal(size=(4, 3))), torch.tensor(rng.normal(size=(4, 2))))
        for _ in range(2)
    )
    labels = torch.tensor(rng.integers(2, size=(4, 3)), dtype=torch.float32)
    labels[3] = math.nan
    loss_of, divergence_of = TASK.loss("none" if by_sample else "mean"), TASK.divergence("none")
    options = AdaptiveIntensity(by_sample)
    *losses, _ = mutual_losses(mentor, mentee, labels, options, loss_of, divergence_of)
    first = [Outputs(each.logits[:3], each.features[:3]) for each in (mentor, mentee)]
    *expected, _ = mutual_losses(*first, labels[:3], options, loss_of, divergence_of)
    for loss, part in zip(losses, expected, strict=True):
        assert loss.item() == pytest.approx(0.75 * part.item(), rel=1e-6)
    labels[:] = math.nan
    *losses, intensity = mutual_losses(mentor, mentee, labels, options, loss_of, divergence_of)
    assert [loss.item() for loss in losses] == [0.0, 0.0]
    assert intensity == 0


@pytest.mark.parametrize("task", ["auto", "multi-label"])
def test_lists_with_another_separator_raise(tmp_path, task):
    names = ["heart", "lung", "bone", "skin"]
    pairs = [f"{a}|{b}" for a in names for b in names if a != b]
    path = tmp_path / "a.csv"
    path.write_text("a,found\n" + "".join(f"{k},{pair}\n" for k, pair in enumerate(pairs)))
    wrong = spec("found").replace(task=task)
    rule = "expected one class in each row" if task == "auto" else "must be separated by ';'"
    with pytest.raises(DataError, match=rf"a\.csv: .*column 'found': .*{rule}.*heart"):
        infer_schema(read_table(path, wrong), wrong)


def test_dp_sgd_clips_each_samples_gradient_independently_of_missing_labels():
    torch.manual_seed(0)
    x, y, model = torch.randn(8, 5), (torch.rand(8, 3) < 0.5).float(), torch.nn.Linear(5, 3)
    y[torch.rand(8, 3) < 0.3] = math.nan
    parameters, norm = list(model.parameters()), 0.2
    expected = [torch.zeros_like(p) for p in parameters]
    for row in range(8):
        there = ~y[row].isnan()
        likely = model(x[row])[there].sigmoid()
        truth = y[row][there]
        loss = -(truth * likely.log() + (1 - truth) * (1 - likely).log()).mean()
        slopes = torch.autograd.grad(loss, parameters)
        length = math.sqrt(sum(float((slope**2).sum()) for slope in slopes))
        for total, slope in zip(expected, slopes, strict=True):
            total += slope / max(1.0, length / norm)
    expected = [p.detach() - 0.1 * total / 8 for p, total in zip(parameters, expected, strict=True)]
    settings = resolve({"method": "local", "training.optimizer": "sgd", "training.momentum": 0.0,
                        "training.lr": 0.1}).run.training  # fmt: skip
    plain = optimization_for(model.parameters(), settings, CPU)
    with sgd.dp_sgd(plain, [model], 0.0, norm, 8) as private:
        private.step(SupervisedLoss(model, TASK.loss())(x, y), 0.0)
    for found, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), value)


# --- scores ---------------------------------------------------------------------------------------

NAMES = (*MultiLabel.metrics, "label-auc", "label-f1", "label-precision")


def test_scores_equal_scikit_learn_over_present_labels():
    truth = np.column_stack([drawn(60)[1], np.zeros(60), np.full(60, math.nan)])
    likely = np.random.default_rng(1).random(truth.shape)
    likely = np.where(truth == 1, likely**0.5, likely)
    found = measure(NAMES, Predictions(truth, (likely >= 0.5) * 1.0, likely))
    by_label = {"label-auc": [], "label-f1": [], "label-precision": []}
    for k in range(3):
        rows = np.isfinite(truth[:, k])
        y, p = truth[rows, k].astype(int), likely[rows, k]
        by_label["label-auc"].append(sk.roc_auc_score(y, p))
        by_label["label-f1"].append(sk.f1_score(y, p >= 0.5))
        by_label["label-precision"].append(sk.average_precision_score(y, p))
    expected = {f"{name}.{k}": v for name, values in by_label.items() for k, v in enumerate(values)}
    expected |= {
        "macro-auc": np.mean(by_label["label-auc"]),
        "f1": np.mean(by_label["label-f1"]),
        "average-precision": np.mean(by_label["label-precision"]),
        "micro-auc": sk.roc_auc_score(truth[np.isfinite(truth)], likely[np.isfinite(truth)]),
        "scored-labels": 3.0,
    }
    assert found == pytest.approx(expected)


def test_split_on_which_no_label_can_be_scored_has_no_scores():
    truth = np.zeros((5, 2))
    found = measure(NAMES, Predictions(truth, truth, truth))
    assert found == {"scored-labels": 0.0}
    model, split = torch.nn.Linear(4, 2), Split(torch.randn(5, 4), torch.tensor([[0.0, 1.0]] * 5))
    score = evaluate_model(model, split, CPU, NAMES, TASK)
    assert score.metrics == {}
    assert math.isnan(score.majority)
    assert score.loss > 0
    assert metric_of("label-auc.3").title == "AUC of label 3"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Run three sites; at the third site, no sample has any label."""
    root = tmp_path_factory.mktemp("healthy")
    x, y = drawn(90)
    y[60:] = 0.0
    path = write(root / "a.csv", x, y)
    first, *rows = path.read_text().splitlines()
    sites = [f"{row},{'pqr'[number // 30]}" for number, row in enumerate(rows)]
    path.write_text("\n".join([f"{first},site", *sites]) + "\n")
    changes = {"data.by": "site", "rounds": 8, "early-stopping": 2, "keep-best": True,
               "training.lr": 1e-12}  # fmt: skip
    summary = run(config("fedavg", path, **changes), root / "run")
    return root / "run", summary


def test_site_that_cannot_be_scored_is_excluded_from_the_means(healthy):
    directory, summary = healthy
    for record in records(directory):
        score = record["metrics"]["macro-auc"]["personal"]["private"]
        values = [score["per_client"][name] for name in ("client-0", "client-1")]
        assert score["mean"] == pytest.approx(np.mean(values))
        assert (*score["per_client"],) == ("client-0", "client-1")
        assert (*record["majority"]["personal"],) == ("client-0", "client-1")
    final = summary["metrics"]["macro-auc"]["personal"]["private"]
    assert final["clients"] == 2
    assert "NaN" not in (directory / "summary.json").read_text()
    assert len(records(directory)) == 4  # One more round after two without improvement.
    shown = tables.client_cells(load_run(directory))
    assert [row[-1].text for row in zip(*shown.columns.values(), strict=True)][2] == "—"
    assert not Result(load_run(directory)).to_frame()["client"].eq("client-2").any()
    compared = comparison.compare([directory])
    assert compared.groups[0].score(("personal", "private")).mean == pytest.approx(final["mean"])


def test_model_is_scored_by_its_sigmoids_and_undefined_outputs_are_wrong():
    x, y = (torch.tensor(each, dtype=torch.float32) for each in drawn(50))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    score = evaluate_model(model, Split(x, y), CPU, ("macro-auc", "f1"), TASK)
    outputs = model(x).detach()
    likely, aucs = expit(outputs.double().numpy()), []
    for k in range(3):
        rows = np.isfinite(y[:, k].numpy())
        aucs.append(sk.roc_auc_score(y[rows, k], likely[rows, k]))
    assert score.metrics["macro-auc"] == pytest.approx(np.mean(aucs))
    assert score.loss == pytest.approx(np.mean(entropy_by_hand(outputs, y)), rel=1e-5)
    assert score.majority == 0.5
    assert math.isnan(score.accuracy)

    class Broken(torch.nn.Module):
        def forward(self, x):
            return torch.full((len(x), 3), math.nan)

    broken = evaluate_model(Broken(), Split(x, y), CPU, ("macro-auc", "f1"), TASK)
    assert broken.metrics == {"macro-auc": 0.0, "f1": 0.0}


# --- methods --------------------------------------------------------------------------------------


def test_unsupported_methods_raise():
    methods = all_methods()[0]
    assert {n for n, m in methods.items() if "multi-label" in m.spec.tasks} == {*METHODS}
    for name in sorted(methods.keys() - {*METHODS}):
        with pytest.raises(SettingsError) as error:
            resolve({"method": name, "data.task": "multi-label", "data.dataset": "table:a.csv"})
        reason = methods[name].spec.only_tasks
        assert f"unsupported by {name}, because {reason}" in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in ("fedavg", "fml", "feddf") else pytest.mark.slow)
        for name in METHODS
        if name not in ("fedlora", "fedsa")
    ],
)
def test_methods_train_models_of_three_architectures(method, table, tmp_path):
    one = all_methods()[0][method].spec
    pool = ["mlp"] if one.one_model or one.submodels else ["mlp", "mlp2", "mlp3"]
    # Five epochs are enough to learn labels that are linear in four features.
    changes = {"models.pool": pool, "training.local-epochs": 5, "training.lr": 0.01}
    summary = run(config(method, table, **changes), tmp_path)
    assert summary["metric"] == "macro-auc"
    assert "accuracy" not in summary["metrics"]
    kinds = summary["metrics"]["macro-auc"]
    assert all(score["mean"] > 0.55 for each in kinds.values() for score in each.values())
    last = records(tmp_path)[-1]
    assert {each for protocol in last["majority"].values() for each in protocol.values()} == {0.5}
    assert set(last["metrics"]) >= {"macro-auc", "scored-labels"}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in ("fedavg", "ds-fl") else pytest.mark.slow)
        for name in METHODS
        if all_methods()[0][name].spec.sums.lanes and name != "fedsa"
    ],
)
def test_masked_sums_give_the_same_instructions_as_plain_replies(method, table, tmp_path):
    changes = {"clients": 6, "rounds": 2, "data.partition": "iid", "models.pool": ["mlp"]}
    if method == "heterofl":
        changes |= {"heterofl.levels": ["a", "b"], "heterofl.weighting": "samples"}
    check_same_instructions(config(method, table, **changes), tmp_path)


def test_client_descends_the_loss(table, tmp_path):
    plain = {"training.optimizer": "sgd", "training.momentum": 0.0, "training.lr": 0.5,
             "training.weight-decay": 0.0, "training.batch-size": 4096,
             "training.local-epochs": 1, "rounds": 1}  # fmt: skip
    chosen = config("local", table, **plain)
    run(chosen, tmp_path / "run")
    data = RunData.for_run(chosen.run).client(0)
    from fedhet.models import build

    model = build("mlp", (4,), 3, kind="table", seed=chosen.run.seed).double().train()
    outputs = model(data.train.x.double())
    truth, there = data.train.y.nan_to_num().double(), ~data.train.y.isnan()
    losses = -(truth * outputs.sigmoid().log() + (1 - truth) * (-outputs).sigmoid().log())
    by_sample = (losses * there).sum(1) / there.sum(1).clamp(min=1)
    slopes = torch.autograd.grad(by_sample.mean(), list(model.parameters()))
    (state,) = (tmp_path / "run" / "state").rglob("client-0/round-*.safetensors")
    stored = load_file(state)
    for (name, weight), slope in zip(model.named_parameters(), slopes, strict=True):
        (key,) = [key for key in stored if key.endswith(f"private/{name}")]
        expected = (weight - 0.5 * slope).detach().numpy()
        np.testing.assert_allclose(stored[key], expected, rtol=1e-4, atol=1e-5)


def test_private_run_has_a_budget(tmp_path):
    (tmp_path / "data").mkdir()
    for name, rows in (("train", slice(90)), ("test", slice(90, None))):
        write(tmp_path / "data" / f"{name}.csv", *(each[rows] for each in drawn()))
    changes = {"privacy.epsilon": 8.0, "models.pool": ["mlp"], "training.batch-size": 4096}
    summary = run(config("fedavg", tmp_path / "data", **changes), tmp_path / "run")
    assert all(0 < spent["epsilon"] <= 8.0 for spent in summary["privacy"].values())
    assert math.isfinite(summary["metrics"]["macro-auc"]["common"]["private"]["mean"])


# --- after a run ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(table, tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    metrics = {"metrics": ["macro-auc", "label-auc"]}
    run(config("fml", table, **metrics), root, report=True)
    return root


def test_reports_name_the_labels(trained):
    page = (trained / "report.html").read_text()
    assert all(each in page for each in ("macro AUC", "each label&#39;s fraction", *LABELS))
    last = records(trained)[-1]
    assert {"label-auc.0", "label-auc.1", "label-auc.2"} <= set(last["metrics"])


def test_predictions_are_probabilities_and_labels_from_a_half(trained, tmp_path, call):
    path = write(tmp_path / "new.csv", *drawn(7, 5))
    client = open_client(trained, "client-0")
    _, x = read_inputs([path], client.record)
    predictions = client.predict(x)
    expected = expit(client.model()(x).detach().double().numpy())
    np.testing.assert_allclose(predictions.values, expected, rtol=1e-5)
    wanted = [[n for n, p in zip(LABELS, row, strict=True) if p >= 0.5] for row in expected]
    assert predictions.labels == wanted
    _, shown, _ = call("predict", trained, "client-0", path, "--csv")
    lines = shown.strip().split("\n")
    assert lines[0] == "sample,labels,heart,lung,bone"
    assert [line.split(",")[1] for line in lines[1:]] == ["; ".join(row) for row in wanted]
    assert "heart" in call("predict", trained, "client-0", path)[1]


@pytest.mark.parametrize("form", ["safetensors", "pt2"])
def test_exported_model_describes_its_labels(trained, tmp_path, form):
    client = open_client(trained, "client-0")
    path = tmp_path / f"a.{form}"
    card = json.loads(export(client, form, path).read_text())
    if form == "pt2":
        program = torch.export.load(path).module()
        values = np.random.default_rng(0).normal(size=(3, 4))
        _, x = read_inputs([write(tmp_path / "n.csv", values, np.ones((3, 3)))], client.record)
        expected = client.predict(x).values
        np.testing.assert_allclose(program(torch.tensor(values)).detach(), expected, rtol=1e-4)
        assert card["output"]["scaling"] == "in the file"
    else:
        assert card["output"]["scaling"] == "probability of each label = sigmoid(output)"
    assert (card["task"], card["targets"]) == ({"name": "multi-label"}, [*LABELS])
    assert 0 <= card["scores"]["personal"]["macro-auc"] <= 1


def test_task_is_restored_from_a_file():
    assert task_of({"name": "multi-label"}) == TASK


# --- images, and worker processes -----------------------------------------------------------------


def overlaid():
    """Return images of two overlaid digits, with their classes as labels."""
    images, classes = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    pairs = rng.choice(len(images), (240, 2))
    x = images[pairs].max(1).reshape(-1, 1, 8, 8) / 8 - 1
    y = np.zeros((240, 10))
    y[np.arange(240)[:, None], classes[pairs]] = 1
    split = Split(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
    names = tuple(map(str, range(10)))
    return Dataset("pairs", split, None, Format("image", (1, 8, 8), names, TASK, stored="scaled"))


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_overlaid_digits_are_learned(tmp_path, backend):
    changes = {
        "method": "fedmd", "clients": 3, "rounds": 1, "engine.backend": backend,
        "data.dataset": "python:test_multi_label:overlaid", "data.task": "multi-label",
        "models.pool": ["cnn2", "mlp", "mlp2"], "data.public-fraction": 0.2,
    }  # fmt: skip
    summary = run(resolve({**fast("fedmd", models=False), **changes}), tmp_path)
    assert summary["metrics"]["macro-auc"]["personal"]["private"]["mean"] > 0.5
    assert len(summary["models"]) == 3
