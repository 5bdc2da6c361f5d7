"""Losses of regression, quantiles, metrics of each target, and regressors without gradients."""

import copy
import io
import json
import textwrap
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from federation import Server, client_info, client_of, fast, records, run
from flwr.common import Context, RecordDict
from safetensors.numpy import load_file
from scipy.stats import norm
from sklearn import metrics as sk
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import SplineTransformer, StandardScaler
from sklearn.svm import SVR
from sklearn.tree import DecisionTreeRegressor
from test_tasks import FEATURES, LENGTH, NAMES, on_table, spec, write

from fedhet import models, report
from fedhet.base.errors import KnowledgeError, ModelError, SettingsError
from fedhet.base.metrics import Predictions, in_order, measure, measured_names, metric_of
from fedhet.base.seeding import derive
from fedhet.client_runtime.app import client_fn
from fedhet.client_runtime.node import close_clients
from fedhet.config.resolve import check, resolve
from fedhet.data.dataset import Split
from fedhet.data.rows import read_table
from fedhet.data.shared import read_dataset, write_dataset
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.data.tables import infer_schema
from fedhet.inference.api import Result
from fedhet.inference.client import open_client, read_inputs
from fedhet.inference.export import export
from fedhet.learning.devices import CPU
from fedhet.methods.registry import all_methods
from fedhet.models import RefittedRegressor, evaluate_model
from fedhet.runs.measures import read_measures
from fedhet.tasks import Regression, stored_task, task_of

LEVELS = (0.05, 0.3, 0.55, 0.9)
LOSSES = {
    "squared": Regression(),
    "huber": Regression(loss_name="huber", delta=0.4),
    "absolute": Regression(loss_name="absolute"),
    "quantile": Regression(loss_name="quantile", quantiles=LEVELS),
}
SETTINGS = {
    "squared": {},
    "huber": {"data.loss": "huber", "data.huber-delta": 0.4},
    "absolute": {"data.loss": "absolute"},
    "quantile": {"data.loss": "quantile", "data.quantiles": list(LEVELS)},
}
REGRESSION = [
    name for name, method in all_methods()[0].items() if "huber" in method.spec.losses(Regression())
]
QUICK = ("central", "fedkd", "fedmd", "feddf", "fedgems")


def by_sample(loss, outputs, targets):
    """Return the loss [N] of each sample, number by number."""
    rows = []
    for predicted, wanted in zip(outputs.tolist(), targets.tolist(), strict=True):
        terms = []
        for k, y in enumerate(wanted):
            if loss == "quantile":
                for level, q in zip(LEVELS, predicted[len(LEVELS) * k :], strict=False):
                    terms.append(level * (y - q) if y >= q else (1 - level) * (q - y))
                continue
            error = abs(predicted[k] - y)
            linear = 0.4 * (error - 0.2)
            terms.append(
                {
                    "squared": error**2,
                    "absolute": error,
                    "huber": linear if error > 0.4 else error**2 / 2,
                }[loss]
            )
        rows.append(sum(terms) / len(terms))
    return np.array(rows)


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_equals_its_formula(loss, columns):
    generator, task = torch.Generator().manual_seed(0), LOSSES[loss]
    targets = torch.randn(30, columns, generator=generator)
    outputs = torch.randn(30, task.outputs(columns), generator=generator)
    expected = by_sample(loss, outputs, targets)
    np.testing.assert_allclose(task.loss("none")(outputs, targets), expected, rtol=1e-4, atol=1e-6)
    assert task.loss()(outputs, targets).item() == pytest.approx(expected.mean(), rel=1e-5)


def test_quantile_loss_equals_scikit_learn():
    rng = np.random.default_rng(0)
    targets, outputs = rng.normal(size=(40, 2)), rng.normal(size=(40, 2, len(LEVELS)))
    expected = np.mean([
        sk.mean_pinball_loss(targets, outputs[..., q], alpha=level)
        for q, level in enumerate(LEVELS)
    ])  # fmt: skip
    loss = LOSSES["quantile"].loss()(torch.tensor(outputs).flatten(1), torch.tensor(targets))
    assert loss.item() == pytest.approx(expected)


def test_outputs_that_descend_the_quantile_loss_are_the_quantiles():
    targets = torch.tensor(np.random.default_rng(0).exponential(size=(4001, 2)) * [1.0, 5.0])
    outputs = torch.zeros(1, 2 * len(LEVELS), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([outputs], lr=0.05)
    for _ in range(1500):
        optimizer.zero_grad()
        LOSSES["quantile"].loss()(outputs.expand(len(targets), -1), targets).backward()
        optimizer.step()
    expected = np.quantile(targets, LEVELS, axis=0).T
    np.testing.assert_allclose(outputs.detach().reshape(2, -1), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_student_learns_every_quantile_of_its_teacher(reduction):
    teacher, student = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    loss = LOSSES["quantile"].divergence(reduction)(teacher, student)
    expected = ((teacher - student) ** 2).mean(1)
    torch.testing.assert_close(loss, expected.mean() if reduction == "mean" else expected)
    loss.sum().backward()
    assert teacher.grad is None
    assert student.grad.abs().min() > 0


def test_divergence_of_gaussian_quantiles_equals_the_wasserstein_distance():
    """W_2^2(N(m, s), N(n, t)) = (m - n)^2 + (s - t)^2, approximated by many quantiles."""
    levels = np.linspace(0.0005, 0.9995, 1000)
    one, other = (torch.tensor(norm.ppf(levels, m, s))[None] for m, s in ((1.0, 2.0), (4.0, 1.0)))
    distance = Regression(loss_name="quantile", quantiles=tuple(levels)).divergence()(one, other)
    assert distance.item() == pytest.approx(9 + 1, rel=0.02)


@pytest.mark.parametrize("loss", LOSSES)
def test_clients_descend_the_loss(loss, tmp_path):
    """Two full-batch steps of a client against the formulas above, differentiated by torch."""
    plain = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.05, "batch-size": 500, "local-epochs": 2}
    changes = {f"training.{name}": value for name, value in plain.items()} | SETTINGS[loss]
    changes |= {"clients": 2, "data.target": f"stay, {NAMES[2]}", "models.pool": ["mlp3"]}
    server = Server(on_table("local", write(tmp_path / "a.csv"), **changes), tmp_path / "run")
    instructions = server.instruct(1)
    for proxy, _ in instructions:
        client_of(proxy).state.restore(server.log.run_name, before=1)
    before = {p.name: copy.deepcopy(client_of(p).models["private"]) for p, _ in instructions}
    for proxy, _ in server.train(instructions):
        client, model = client_of(proxy), before[proxy.name]
        for _ in range(2):
            outputs, y = model(client.x), client.y
            errors = y.unsqueeze(2) - outputs.reshape(len(y), 2, -1)
            if loss == "quantile":
                levels = torch.tensor(LEVELS)
                value = torch.where(errors >= 0, levels * errors, (levels - 1) * errors).mean()
            elif loss == "huber":
                size = errors.abs()
                value = torch.where(size > 0.4, 0.4 * (size - 0.2), size**2 / 2).mean()
            else:
                value = (errors.abs() if loss == "absolute" else errors**2).mean()
            slopes = torch.autograd.grad(value, list(model.parameters()))
            with torch.no_grad():
                for w, slope in zip(model.parameters(), slopes, strict=True):
                    w -= 0.05 * slope
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                client.models["private"].state_dict()[name], value, rtol=1e-4, atol=1e-6
            )


# --- predictions and scores -----------------------------------------------------------------------


class Given(torch.nn.Module):
    """A model whose outputs are its inputs."""

    def forward(self, x):
        return x


def test_crossing_quantiles_are_sorted_and_the_closest_to_the_median_predicts():
    task = Regression((10.0, 0.0), (2.0, 1.0), "quantile", quantiles=LEVELS)
    outputs = torch.tensor([[3.0, 1.0, 0.0, -1.0, 5.0, 6.0, 7.0, 8.0]])
    decoded = task.decode(outputs)
    assert decoded.tolist() == [[[8.0, 10.0, 12.0, 16.0], [5.0, 6.0, 7.0, 8.0]]]
    targets = torch.tensor([[0.5, 9.0]])  # 11 and 9 in their units
    score = evaluate_model(Given(), Split(outputs, targets), CPU, ("mae", "coverage"), task)
    assert score.metrics == {
        "mae": (1.0 / 2 + 2.0 / 1) / 2, "mae.0": 1.0, "mae.1": 2.0,
        "coverage": 0.5, "coverage.0": 1.0, "coverage.1": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("levels", "expected"),
    [((0.1, 0.9), 1.5), ((0.05, 0.95), 1.5), ((0.1, 0.4, 0.6, 0.7), 2.5), ((0.1, 0.45, 0.9), 2.0)],
)
def test_without_a_median_the_closest_quantiles_are_averaged(levels, expected):
    task = Regression((0.0,), (1.0,), "quantile", quantiles=levels)
    outputs = torch.arange(1.0, 1 + len(levels)).flip(0)[None]
    assert task.point(task.decode(outputs)).item() == expected
    assert task.errors(outputs, torch.tensor([[1.0]])).item() == (expected - 1) ** 2
    score = evaluate_model(Given(), Split(outputs, torch.tensor([[0.0]])), CPU, ("mae",), task)
    assert score.metrics["mae"] == expected


def test_r2_of_a_constant_target_is_undefined():
    task = Regression((11.234,), (4.567,))
    for count in range(2, 30):
        targets = torch.full((count, 1), (3.0 - 11.234) / 4.567)
        score = evaluate_model(Given(), Split(targets + 0.2, targets), CPU, ("r2", "mae"), task)
        assert "r2" not in score.metrics
        assert score.metrics["mae"] == pytest.approx(0.9134, rel=1e-5)


def test_coverage_is_the_fraction_of_targets_inside():
    rng = np.random.default_rng(0)
    truth, ends = rng.normal(size=(50, 2)), np.sort(rng.normal(size=(50, 2, 2)), axis=2)
    inside = [
        [low <= y <= high for y, (low, high) in zip(row, intervals, strict=True)]
        for row, intervals in zip(truth, ends, strict=True)
    ]
    scores = measure(["coverage"], Predictions(truth, truth, intervals=ends))
    assert scores == {
        "coverage": np.mean(inside),
        "coverage.0": np.mean(inside, 0)[0],
        "coverage.1": np.mean(inside, 0)[1],
    }
    edge = Predictions(np.array([[1.0], [2.0]]), np.zeros((2, 1)), intervals=np.array([[[1, 2]]]))
    assert measure(["coverage"], edge) == {"coverage": 1.0}
    assert measure(["coverage"], Predictions(truth, truth)) == {}


def test_model_without_finite_quantiles_has_a_huge_error_and_is_accepted():
    task = Regression((0.0,), (1.0,), "quantile", quantiles=(0.1, 0.5, 0.9))
    broken = torch.full((4, 3), np.nan)
    split = Split(broken, torch.zeros(4, 1))
    score = evaluate_model(Given(), split, CPU, ("rmse", "coverage"), task)
    assert score.metrics == {"rmse": pytest.approx(1e15), "coverage": 0.0}


def test_scores_of_each_target_equal_scikit_learn():
    rng = np.random.default_rng(0)
    truth = rng.normal(50, [1, 20, 300], (40, 3))
    predicted = truth + rng.normal(3, 5, truth.shape)
    scores = measure(("rmse", "mae", "r2"), Predictions(truth, predicted))
    raw = {"multioutput": "raw_values"}
    for k in range(3):
        error = sk.root_mean_squared_error(truth, predicted, **raw)[k]
        assert scores[f"rmse.{k}"] == pytest.approx(error)
        assert scores[f"mae.{k}"] == pytest.approx(
            sk.mean_absolute_error(truth, predicted, **raw)[k]
        )
        assert scores[f"r2.{k}"] == pytest.approx(sk.r2_score(truth, predicted, **raw)[k])
    assert [*scores] == measured_names(("rmse", "mae", "r2"), 3)
    constant = measure(["r2"], Predictions(np.eye(3)[:, :2] * [1, 0], np.zeros((3, 2))))
    assert [*constant] == ["r2.0"]
    assert [*measure(["rmse"], Predictions(truth[:, :1], predicted[:, :1]))] == ["rmse"]


def test_names_of_targets_follow_their_metric():
    names = ["mae.1", "r2", "mae.0", "recall.10", "mae", "recall.2", "rmse"]
    assert sorted(names, key=in_order) == [
        "recall.2", "recall.10", "rmse", "mae", "mae.0", "mae.1", "r2",
    ]  # fmt: skip
    assert metric_of("mae.1").title == "MAE of target 1"
    assert metric_of("mae.1").lower_is_better
    assert metric_of("recall.1").title == "recall of class 1"


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with three quantiles of two targets."""
    root = tmp_path_factory.mktemp("quantiles")
    (root / "data").mkdir()
    lines = [",".join([*NAMES[1:], "stay", "age"])]
    table = np.column_stack([FEATURES[:, 1:], LENGTH, FEATURES[:, 0]])
    lines += [",".join(map(repr, row)) for row in table.tolist()]
    (root / "data" / "train.csv").write_text("\n".join(lines[:301]) + "\n")
    (root / "data" / "test.csv").write_text("\n".join([lines[0], *lines[301:]]) + "\n")
    changes = {
        "data.target": "stay,age",
        "data.loss": "quantile",
        "data.quantiles": [0.2, 0.4, 0.9],
    }
    config = on_table("fedavg", root / "data", **changes, **{"models.pool": ["mlp"]})
    run(config, root / "run", report=True)
    return root


def by_hand(root):
    """Return the sorted quantiles [N, K, Q] of client-0 on the test rows, from the files alone."""
    paths = (root / "run" / "state").glob("*/client-0/round-*.safetensors")
    weights = load_file(max(paths, key=lambda path: path.name))
    layers = [np.float64(v) for k, v in weights.items() if "private" in k]
    matrices = sorted((v for v in layers if v.ndim == 2), key=len, reverse=True)
    biases = sorted((v for v in layers if v.ndim == 1), key=len, reverse=True)
    train = FEATURES[:300, 1:]
    x = np.float32((FEATURES[300:, 1:] - train.mean(0)) / train.std(0))
    for number, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
        x = x @ matrix.T + bias
        x = np.maximum(x, 0) if number < len(matrices) - 1 else x
    scales = np.array([[v[:300].std(), v[:300].mean()] for v in (LENGTH, FEATURES[:, 0])])
    quantiles = x.reshape(-1, 2, 3) * scales[:, :1, None].squeeze(2)[None] + scales[None, :, 1:]
    return np.sort(quantiles, axis=2)


def test_run_records_the_scores_of_the_middle_quantile_and_the_coverage(trained):
    truth, quantiles = np.column_stack([LENGTH, FEATURES[:, 0]])[300:], by_hand(trained)
    predicted = quantiles[..., 1]  # of the level 0.4
    inside = (quantiles[..., 0] <= truth) & (truth <= quantiles[..., 2])
    errors = sk.root_mean_squared_error(truth, predicted, multioutput="raw_values")
    absolute = sk.mean_absolute_error(truth, predicted, multioutput="raw_values")
    deviations = np.std([LENGTH[:300], FEATURES[:300, 0]], axis=1)
    expected = {
        # Days and years cannot be averaged; deviations can.
        "rmse": (errors / deviations).mean(), "rmse.0": errors[0], "rmse.1": errors[1],
        "mae": (absolute / deviations).mean(), "mae.0": absolute[0], "mae.1": absolute[1],
        "r2": sk.r2_score(truth, predicted),
        "coverage": inside.mean(), "coverage.0": inside.mean(0)[0], "coverage.1": inside.mean(0)[1],
    }  # fmt: skip
    metrics = records(trained / "run")[-1]["metrics"]
    assert [*metrics] == measured_names(("rmse", "mae", "r2", "coverage"), 2)
    for name, value in expected.items():
        score = metrics[name]["common"]["private"]["per_client"]["client-0"]
        assert score == pytest.approx(value, rel=1e-3, abs=1e-3), name
    summary = json.loads((trained / "run" / "summary.json").read_text())
    assert summary["metric"] == "rmse"


def test_report_shows_the_scores_of_each_target_by_name(trained):
    page = (trained / "run" / "report.html").read_text()
    assert "Scores by target <small>last round, mean over the clients</small>" in page
    table = page[page.index("<h2>Scores by target") :]
    table = table[: table.index("</table>")]
    assert ">stay<" in table
    assert ">age<" in table
    assert ">coverage<" in table
    loaded = report.load_run(trained / "run")
    assert [title for title, _ in loaded.extra_metrics] == ["MAE", "R²", "coverage"]
    assert {"rmse.1", "coverage.0"} <= {*Result(loaded).to_frame().columns}
    compared = report.compare([trained / "run"], metric="rmse.1")
    mean = records(trained / "run")[-1]["metrics"]["rmse.1"]["common"]["private"]["mean"]
    assert compared.groups[0].score(("common", "private")).mean == mean


def test_predictions_have_the_quantiles_in_the_unit_of_the_target(trained, tmp_path, call):
    new = tmp_path / "new.csv"
    rows = [",".join(NAMES[1:]), *(",".join(map(repr, r)) for r in FEATURES[300:, 1:].tolist())]
    new.write_text("\n".join(rows) + "\n")
    client, expected = open_client(trained / "run", "client-0"), by_hand(trained)
    found = client.predict(read_inputs([new], client.record)[1], "private")
    assert (found.targets, found.levels) == (("stay", "age"), (0.2, 0.4, 0.9))
    np.testing.assert_allclose(found.quantiles, expected, rtol=1e-4)
    np.testing.assert_array_equal(found.values, found.quantiles[..., 1])
    words = ("predict", trained / "run", "client-0", new, "--kind", "private")
    read = pd.read_csv(io.StringIO(call(*words, "--csv")[1]))
    assert [*read][1:] == [
        "stay", "stay (0.2)", "stay (0.4)", "stay (0.9)",
        "age", "age (0.2)", "age (0.4)", "age (0.9)",
    ]  # fmt: skip
    np.testing.assert_allclose(read["age (0.9)"], expected[:, 1, 2], rtol=1e-4)
    np.testing.assert_allclose(read["stay"], expected[:, 0, 1], rtol=1e-4)
    _, table, _ = call(*words)
    assert f"{found.quantiles[0, 0, 0]:.6g}" in table


@pytest.mark.parametrize(
    "form", ["pt2", "safetensors", pytest.param("onnx", marks=pytest.mark.slow)]
)
def test_exported_model_describes_its_loss_and_its_quantiles(trained, tmp_path, form):
    if form == "onnx":
        pytest.importorskip("onnxscript")
    path, client = tmp_path / f"m.{form}", open_client(trained / "run", "client-0")
    card = json.loads(export(client, form, path, "private").read_text())
    assert card["task"]["loss_name"] == "quantile"
    assert card["task"]["quantiles"] == [0.2, 0.4, 0.9]
    assert card["output"]["of"] == "quantiles of the targets"
    assert card["targets"] == ["stay", "age"]
    columns = [column["name"] for column in card["input"]["columns"]]
    x = FEATURES[300:][:, [NAMES.index(name) for name in columns]]
    if form == "safetensors":
        assert card["output"]["order"].startswith("the quantiles of the first target")
        return
    if form == "pt2":
        predicted = torch.export.load(path).module()(torch.from_numpy(x)).detach().numpy()
    else:
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
        predicted = session.run([card["output"]["name"]], {"x": x})[0]
    np.testing.assert_allclose(predicted, by_hand(trained), rtol=1e-4)
    assert card["output"]["shape"] == ["N", 2, 3]


def test_loss_is_shared_with_other_processes_and_stored(tmp_path):
    table = {"dataset": f"table:{write(tmp_path / 'a.csv')}", "loss": "quantile"}
    dataset = RunData(spec(**table)).dataset
    write_dataset(dataset, tmp_path / "0.safetensors")
    read = read_dataset(tmp_path / "0.safetensors").format.task
    expected = Regression((LENGTH.mean(),), (LENGTH.std(),), "quantile", 1.0, (0.1, 0.5, 0.9))
    assert read == dataset.format.task == expected
    assert task_of(json.loads(json.dumps(stored_task(expected)))) == expected
    old = {"name": "regression", "means": [1.0], "deviations": [2.0]}  # without a loss
    assert task_of(old) == Regression((1.0,), (2.0,))
    named = {"loss_name": "quantile"}
    for wrong in (
        {"loss_name": "cubic"},
        named,
        {"quantiles": [0.5]},
        {**named, "quantiles": [0.9, 0.1]},
        {**named, "quantiles": [0.5, 1.0]},
        {**named, "quantiles": [0.5, float("nan")]},
    ):
        with pytest.raises(ValueError, match=r"loss_name.*squared, huber"):
            task_of({**old, **wrong})
    for wrong in (
        {"means": ["a"]}, {"means": [float("nan")]}, {"deviations": []}, {"deviations": [0.0]},
        {"delta": 0.0}, {"delta": "x"}, {"name": "nope"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"expected (finite|a positive|one of auto)"):
            task_of({**old, **wrong})
    for wrong in ("regression", 3, None):
        with pytest.raises(ValueError, match="fields"):
            task_of(wrong)
    for wrong in ({**named, "quantiles": ["0.5"]}, {"lost_name": "huber"}):
        with pytest.raises(ValueError, match=r"not supported between|unexpected keyword"):
            task_of({**old, **wrong})


@pytest.mark.parametrize(
    "method", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in REGRESSION]
)
def test_methods_learn_quantiles(method, tmp_path):
    changes = {**SETTINGS["quantile"], "data.target": f"stay,{NAMES[2]}", "rounds": 2}
    changes["models.num-classes"] = 2
    config = on_table(method, write(tmp_path / "a.csv"), **{**fast(method), **changes})
    metrics = run(config, tmp_path / "run")["metrics"]
    kinds = {kind for protocol in metrics["coverage"].values() for kind in protocol}
    assert kinds
    for protocol in metrics["coverage"].values():
        for score in protocol.values():
            assert 0 < score["mean"] <= 1
    assert {"rmse.0", "rmse.1"} <= metrics.keys()


def test_private_run_learns_quantiles_within_its_budget(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.csv", slice(0, 300))
    write(tmp_path / "data" / "test.csv", slice(300, None))
    changes = {"privacy.epsilon": 8.0, "models.pool": ["mlp"], "rounds": 1, **SETTINGS["quantile"]}
    summary = run(on_table("fedavg", tmp_path / "data", **changes), tmp_path / "run")
    assert 0 <= summary["metrics"]["coverage"]["common"]["private"]["mean"] <= 1
    assert all(0 < spent["epsilon"] <= 8.0 for spent in summary["privacy"].values())


def test_private_site_learns_the_loss_of_the_run_and_not_of_its_declaration(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "state"))
    site = tmp_path / "site"
    site.mkdir()
    schema = infer_schema(read_table(write(tmp_path / "all.csv"), spec()), spec())
    write(site / "train.csv", slice(0, 60))
    (site / "schema.toml").write_text(schema.to_toml())
    (site / "site.toml").write_text("num-classes = 1\n")
    own = {"name": "site-a", "privacy": "epsilon=80 delta=1e-5", "data": f"table:{site}"}
    settings = {"method": "fedavg", "models.pool": "mlp", "privacy.epsilon": 8.0}
    settings |= {"data.task": "regression", "models.num-classes": 1, "data.loss": "quantile"}
    client = client_fn(Context(0, 0, own, RecordDict(), settings)).numpy_client._client
    try:
        assert client.task.quantiles == (0.1, 0.5, 0.9)
        assert client.task.means == (LENGTH.mean(),)
        assert client.get_properties({})["classes"] == 3
        assert client.record("run-1").space == [0, 1, 2]
        assert client.record("run-1").format.classes == ("stay",)
    finally:
        close_clients()


def test_server_accepts_only_scores_of_its_targets():
    names = measured_names(("rmse",), 2)
    sent = {f"{name}.personal.private": 1.0 for name in names}
    times = {"seconds.train": 0.0, "seconds.evaluate": 0.0, "memory": 0.0}
    assert len(read_measures("a", sent | times, ["private"], names).scores) == 3
    with pytest.raises(KnowledgeError, match="metric"):
        read_measures("a", {**sent, **times, "rmse.2.personal.private": 1.0}, ["private"], names)
    assert measured_names(("rmse", "coverage"), 1) == ["rmse", "coverage"]


def test_codec_expects_one_score_per_target_and_not_per_quantile(tmp_path):
    changes = {"data.loss": "quantile", "rounds": 1}
    server = Server(on_table("local", write(tmp_path / "a.csv"), **changes), tmp_path / "run")
    proxy, result = server.train(server.instruct(1))[0]
    client, codec = client_of(proxy).info, server.flower._codec
    assert client.classes == 3
    assert "coverage.personal.private" in result.metrics
    assert not codec.read(client, ["private"], result, 1).error
    result.metrics["rmse.1.personal.private"] = 1.0
    assert "metric" in codec.read(client, ["private"], result, 1).error


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"data.task": "auto", "data.loss": "huber"},
            "setting 'data.loss': the task is classification, expected auto, got 'huber'",
        ),
        ({"data.loss": "cubic"}, "data.loss.*got 'cubic'"),
        ({"data.loss": "quantile", "data.quantiles": [0.9, 0.1]}, "ascending order"),
        ({"data.loss": "quantile", "data.quantiles": [0.1, 1.0]}, "data.quantiles"),
        ({"data.loss": "quantile", "data.quantiles": []}, "1 to 99 levels"),
        (
            {"data.quantiles": [0.1, 0.9]},
            r"'data.loss': expected 'quantile' with 'data.quantiles' = \[0.1, 0.9\], got 'auto'",
        ),
        (
            {"data.huber-delta": 2.0, "data.loss": "absolute"},
            "expected 'huber' with 'data.huber-delta' = 2.0, got 'absolute'",
        ),
        (
            {"method": "pfedbayes", "data.loss": "huber"},
            "because the loss must be a negative log-likelihood, expected auto or squared",
        ),
        (
            {"models.pool": ["sk-tree"], "data.loss": "quantile"},
            "the task is regression with 'data.loss' = 'quantile', expected neural networks",
        ),
        (
            {"metrics": ["coverage"]},
            "the task is regression with 'data.loss' = 'auto', expected names from rmse, mae, r2",
        ),
        (
            {"metrics": ["coverage"], "data.loss": "quantile", "data.quantiles": [0.5]},
            "expected names from rmse, mae, r2, got 'coverage'",
        ),
    ],
)
def test_settings_must_suit_the_loss(changes, fault):
    table = {"method": "local", "data.dataset": "table:a.csv", "data.task": "regression"}
    with pytest.raises(SettingsError, match=fault) as error:
        resolve({**table, **changes})
    assert "\n" not in str(error.value)


def test_default_metrics_follow_from_the_loss():
    table = {"method": "local", "data.dataset": "table:a.csv", "data.task": "regression"}
    quantile = resolve({**table, "data.loss": "quantile"})
    assert quantile.run.metrics == ("rmse", "mae", "r2", "coverage")
    assert quantile.run.data.quantiles == (0.1, 0.5, 0.9)
    assert resolve(quantile.flat()).run == quantile.run
    assert resolve({**table, "data.loss": "huber"}).run.metrics == ("rmse", "mae", "r2")
    explicit = resolve({**table, "method": "pfedbayes", "data.loss": "squared"})
    assert explicit.run.data.loss == "squared"


# --- regressors without gradients -----------------------------------------------------------------


def numbers(samples=120):
    """Return features [N, 4] with large means, and two standardized targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(50, 20, (samples, 4)).astype(np.float32)
    y = np.column_stack([np.sin(x[:, 0] / 20), x[:, 1] / 20 + rng.normal(size=samples) / 9])
    y = ((y - y.mean(0)) / y.std(0)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(y)


def built(name, targets=2):
    return models.build_any(name, (4,), targets, seed=0, task=Regression())


def test_regressors_equal_scikit_learn():
    x, y = numbers()
    flat = x.numpy()
    z = StandardScaler().fit_transform(flat)
    splines = SplineTransformer(n_knots=4, include_bias=False).fit_transform(z)

    def seed(name):
        return derive(0, "model", name) % 2**32

    expected = {
        "sk-tree": (lambda: DecisionTreeRegressor(random_state=seed("sk-tree")), flat),
        "sk-svm": (SVR, z),
        "sk-gam": (Ridge, splines),
        "sk-boosted-gam": (
            lambda: HistGradientBoostingRegressor(
                interaction_cst=[[0], [1], [2], [3]], early_stopping=False, random_state=0
            ),
            flat,
        ),
        "sk-mlp": (
            lambda: MLPRegressor(
                hidden_layer_sizes=(10,), solver="lbfgs", max_iter=300, random_state=seed("sk-mlp")
            ),
            z,
        ),
    }
    assert expected.keys() == models.WITHOUT_GRADIENTS.keys()
    for name, (make, features) in expected.items():
        model = built(name)
        assert isinstance(model, RefittedRegressor)
        assert model(x).tolist() == [[0.0, 0.0]] * 120  # the mean, before the first round
        model.fit(x, y)
        columns = [make().fit(features, y[:, k].double().numpy()).predict(features) for k in (0, 1)]
        np.testing.assert_allclose(model(x), np.column_stack(columns), rtol=2e-3, atol=2e-3)
        assert model(x).dtype == torch.float32
        model.fit_later(lambda: (x, -y))
        assert ((model(x) + y) ** 2).mean() < ((model(x) - y) ** 2).mean()


def test_only_clients_fit_regressors(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.csv", slice(0, 300))
    write(tmp_path / "data" / "test.csv", slice(300, None))
    config = on_table("local", tmp_path / "data", **{"models.pool": ["sk-svm", "sk-gam", "mlp"]})
    run(config, tmp_path / "run")
    metrics, data = records(tmp_path / "run")[-1]["metrics"], RunData.for_run(config.run)
    columns = [NAMES.index(column.name) for column in data.dataset.format.schema.columns]
    x = np.float32((FEATURES - FEATURES[:300].mean(0)) / FEATURES[:300].std(0))[:, columns]
    for number, make in ((0, SVR), (1, Ridge)):
        rows, name = data.split_rows(number)[0], f"client-{number}"
        scaler = StandardScaler().fit(x[rows])
        own, test = scaler.transform(x[rows]), scaler.transform(x[300:])
        if make is Ridge:
            splines = SplineTransformer(n_knots=4, include_bias=False).fit(own)
            own, test = splines.transform(own), splines.transform(test)
        z = (LENGTH[rows] - LENGTH[:300].mean()) / LENGTH[:300].std()
        predicted = make().fit(own, z).predict(test) * LENGTH[:300].std() + LENGTH[:300].mean()
        error = sk.root_mean_squared_error(LENGTH[300:], predicted)
        score = metrics["rmse"]["common"]["private"]["per_client"][name]
        assert score == pytest.approx(error, rel=1e-3)
        client = open_client(tmp_path / "run", name)
        assert client.scores()["common"]["rmse"] == score
        found = client.predict(torch.from_numpy(x[300:]))
        np.testing.assert_allclose(found.values[:, 0], predicted, rtol=1e-3)
        with pytest.raises(ModelError, match="export"):
            export(client, "pt2", tmp_path / "m.pt2")


def test_custom_regressor_learns_each_target(tmp_path, monkeypatch):
    body = """
        import numpy as np

        class Linear:
            def fit(self, x, y):
                assert y.ndim == 1 and y.dtype == np.float64
                self.w = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]

            def predict(self, x):
                return np.c_[x, np.ones(len(x))] @ self.w

        class Short(Linear):
            def predict(self, x):
                return super().predict(x)[:-1]

        def linear(shape, classes):
            return Linear()

        def short(shape, classes):
            return Short()
    """
    (tmp_path / "own_regressor.py").write_text(textwrap.dedent(body))
    monkeypatch.syspath_prepend(str(tmp_path))
    x, y = numbers()
    model = built("own_regressor:linear")
    model.fit(x, y)
    design = np.c_[x.numpy(), np.ones(len(x))]
    expected = design @ np.linalg.lstsq(design, y.double().numpy(), rcond=None)[0]
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)
    wrong = built("own_regressor:short")
    wrong.fit(x, y)
    with pytest.raises(ModelError, match="own_regressor:short"):
        wrong(x)
    task = Regression(loss_name="absolute")
    with pytest.raises(ModelError, match="gradients"):
        models.build_any("own_regressor:linear", (4,), 2, seed=0, task=task)
    changes = {"models.pool": ["own_regressor:linear"], "data.loss": "absolute"}
    config = on_table("local", write(tmp_path / "a.csv"), **changes)
    with pytest.raises(ModelError, match="gradients"):
        check(config)


def test_servers_test_set_in_another_scale_is_not_used(tmp_path, caplog):
    stores = []
    for number in (0, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        rows = [f"{k % 7},{k * (1 + number)}.5" for k in range(40)]
        for name in ("train", "test"):
            (folder / f"{name}.csv").write_text("\n".join(["a,days", *rows]) + "\n")
        stores.append(
            RunData(DataSpec(dataset=f"table:{folder}", target="days", task="regression"))
        )
    sites, server = stores
    task = (server.dataset.format.kind, server.dataset.format.shape)
    assert server.common_test_of(client_info(*task, 1, server.dataset.format.digest)) is not None
    assert server.common_test_of(client_info(*task)) is not None
    assert server.common_test_of(client_info(*task, 1, sites.dataset.format.digest)) is None
    assert "the schema of the targets differs from the clients' schema" in caplog.text


def test_sites_with_own_data_need_no_task_of_the_servers_dataset():
    """By default, the server's dataset is digits, whose task is classification."""
    store, info = RunData(DataSpec(task="regression")), client_info("table", (4,), 1)
    assert store.common_test_of(replace(info, own_data=True)) is None
    with pytest.raises(SettingsError, match=r"data\.task.*'digits'"):
        store.common_test_of(info)
