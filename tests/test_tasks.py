"""Tasks: regression of a table's columns, its scores, and the refusal of other methods."""

import copy
import io
import json
import math
import re
import shlex
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
from federation import Server, client_of, fast, records, run, small
from flwr.common import Context, RecordDict, parameters_to_ndarrays
from safetensors.numpy import load_file
from sklearn import metrics as sk
from sklearn.datasets import load_diabetes

from fedhet import report, tasks
from fedhet.base.errors import DataError, KnowledgeError, SettingsError
from fedhet.base.metrics import METRICS, Metric, Predictions, measure
from fedhet.cli.example import write_example
from fedhet.cli.results import numbers
from fedhet.client_runtime.app import client_fn
from fedhet.client_runtime.node import close_clients, read_node
from fedhet.config.resolve import resolve
from fedhet.data.dataset import Split
from fedhet.data.declaration import Declaration
from fedhet.data.rows import read_table
from fedhet.data.schemas import read_schema
from fedhet.data.shared import read_dataset, write_dataset
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.data.tables import infer_schema, labeled_split
from fedhet.inference.api import Result, compare
from fedhet.inference.client import open_client, read_inputs
from fedhet.inference.export import export
from fedhet.learning.devices import CPU
from fedhet.learning.training import SupervisedLoss, optimization_for
from fedhet.methods.registry import all_methods, find_method, method_names
from fedhet.models import evaluate_model
from fedhet.privacy import sgd
from fedhet.report.page import render_run
from fedhet.report.tables import baseline_line, client_cells
from fedhet.runs.directory import last_round
from fedhet.runs.measures import best_round, read_measures
from fedhet.runs.progress import Progress, read_status
from fedhet.runs.records import Headline, RoundRecord, Score
from fedhet.runs.storage import Checkpoints
from fedhet.runs.units import difference, score
from fedhet.tasks import Regression, find_task, task_of
from fedhet.wire.identity import ClientInfo, read_properties

FEATURES, LENGTH = load_diabetes(return_X_y=True, scaled=False)
NAMES = load_diabetes().feature_names
REGRESSION = (
    "local", "central", "fedavg", "fedprox", "fedbn", "fedper", "fedrep", "lg-fedavg", "pfedme",
    "ditto", "moon", "scaffold", "fedrolex", "heterofl", "fml", "fedkd", "fedmrl", "fedlora",
    "fedsa", "fedmd", "ds-fl", "feddf", "fedgems", "pfedbayes",
)  # fmt: skip


def write(path, rows=slice(None), target="stay", values=LENGTH):
    """Write a table with a numeric target."""
    lines = [",".join([*NAMES, target])]
    for row, value in zip(FEATURES[rows], values[rows], strict=True):
        lines.append(",".join(f"{each!r}" for each in [*row.tolist(), float(value)]))
    path.write_text("\n".join(lines) + "\n")
    return path


def spec(**changes):
    return DataSpec(target="stay", task="regression", **changes)


def on_table(method, path, **changes):
    table = {"data.dataset": f"table:{path}", "data.target": "stay", "data.task": "regression"}
    small = {"clients": 3, "rounds": 2, "engine.backend": "inline", "engine.precision": "float32"}
    return resolve({"method": method, **small, **table, **changes})


# --- metrics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 3])
def test_scores_of_regression_equal_those_of_scikit_learn(columns):
    rng = np.random.default_rng(0)
    truth = rng.normal(50, 20, (40, columns))
    predicted = truth + rng.normal(3, 5, truth.shape)
    scores = measure(("rmse", "mae", "r2"), Predictions(truth, predicted))
    assert scores["rmse"] == pytest.approx(sk.root_mean_squared_error(truth, predicted))
    assert scores["mae"] == pytest.approx(sk.mean_absolute_error(truth, predicted))
    assert scores["r2"] == pytest.approx(sk.r2_score(truth, predicted))


def test_r2_is_omitted_for_a_constant_target_and_bounded():
    constant = np.ones((5, 1))
    assert set(measure(("rmse", "r2"), Predictions(constant, constant + 1))) == {"rmse"}
    near = np.array([[1.0], [1 + 1e-9]])
    assert measure(("r2",), Predictions(near, near + 1e15))["r2"] == METRICS["r2"].lowest


def test_nonfinite_predictions_have_a_large_accepted_error():
    class Broken(torch.nn.Module):
        def forward(self, x):
            return torch.full((len(x), 1), math.nan)

    task, split = Regression((10.0,), (2.0,)), Split(torch.zeros(4, 2), torch.zeros(4, 1))
    score = evaluate_model(Broken(), split, CPU, ("rmse", "mae", "r2"), task)
    assert score.metrics["rmse"] == pytest.approx(1e15)
    sent = {f"{name}.personal.private": value for name, value in score.metrics.items()}
    times = {"seconds.train": 0.0, "seconds.evaluate": 0.0, "memory": 0.0}
    names = ("rmse", "mae", "r2")
    assert read_measures("a", sent | times, ["private"], names).scores
    del sent["rmse.personal.private"]
    with pytest.raises(KnowledgeError, match=r"rmse\.personal\.private"):
        read_measures("a", sent | times, ["private"], names)


def test_best_round_of_an_error_is_the_lowest():
    def record(number, mean):
        scores = {"personal": {"private": Score(mean=mean)}}
        return RoundRecord(number, metrics={"rmse": scores, "r2": scores})

    records = [record(1, 3.0), record(2, 1.0), record(3, 2.0)]
    assert best_round(records, Headline(protocol="personal")) == 2
    assert records[0].metric == "rmse"
    config = resolve({"method": "fedbn", "early-stopping": 1, "rounds": 9})  # personal headline
    assert last_round(records[:2], config) == 9
    assert last_round(records, config) == 4
    accurate = [RoundRecord(n, accuracy=r.metrics["rmse"]) for n, r in enumerate(records, 1)]
    assert best_round(accurate, Headline(protocol="personal")) == 1


# --- tables ---------------------------------------------------------------------------------------


def test_targets_are_standardized_by_the_schema(tmp_path):
    cells = read_table(write(tmp_path / "a.csv"), spec())
    schema = infer_schema(cells, spec())
    assert (schema.task, schema.classes, schema.outputs) == ("regression", (), ("stay",))
    assert "stay" not in {column.name for column in schema.columns}
    split = labeled_split(schema, cells)
    standardized = (LENGTH - LENGTH.mean()) / LENGTH.std()
    np.testing.assert_allclose(split.y[:, 0], standardized, rtol=1e-5, atol=1e-6)
    assert split.y.dtype == torch.float32
    np.testing.assert_allclose(schema.task_object.in_units(split.y)[:, 0], LENGTH, rtol=1e-5)
    other = labeled_split(schema, read_table(write(tmp_path / "b.csv", slice(0, 9)), spec()))
    torch.testing.assert_close(other.y, split.y[:9])  # of the schema, not of its own rows


def test_schema_of_regression_round_trips(tmp_path):
    schema = infer_schema(read_table(write(tmp_path / "a.csv"), spec()), spec())
    (tmp_path / "schema.toml").write_text(schema.to_toml())
    read = read_schema(tmp_path / "schema.toml")
    assert read == schema
    assert read.digest == schema.digest
    target = schema.targets[0].model_copy(update={"mean": 0.0})
    assert schema.model_copy(update={"targets": (target,)}).digest != schema.digest


def test_digest_depends_on_the_order_of_the_classes(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("age,ill\n" + "".join(f"{k},{'yes' if k % 3 else 'no'}\n" for k in range(1, 9)))
    classes = DataSpec(target="ill")
    schema = infer_schema(read_table(path, classes), classes)
    other = schema.model_copy(update={"classes": ("yes", "no")})
    assert schema.digest != other.digest
    assert schema.task == "classification"


@pytest.mark.parametrize(
    ("value", "fault"),
    [("", "the target is missing"), ("n/a", "the target is missing"), ("long", "not a number")],
)
def test_row_needs_a_numeric_target(tmp_path, value, fault):
    schema = infer_schema(read_table(write(tmp_path / "a.csv"), spec()), spec())
    path = write(tmp_path / "b.csv", slice(0, 3))
    lines = path.read_text().splitlines()
    lines[2] = ",".join([*lines[2].split(",")[:-1], value])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=rf"row 2, column 'stay': .*{fault}"):
        labeled_split(schema, read_table(path, spec()))


def test_target_of_words_raises(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "age,stay\n" + "".join(f"{k},{'long' if k % 3 else 'short'}\n" for k in range(9))
    )
    with pytest.raises(DataError, match=r"row 1, column 'stay': 'short'"):
        infer_schema(read_table(path, spec()), spec())


def test_auto_with_measurements_raises_with_both_settings(tmp_path):
    auto = DataSpec(target="stay")
    cells = read_table(write(tmp_path / "a.csv"), auto)
    match = "got 214 different numbers .* Set data.task to regression .* or to classification"
    with pytest.raises(DataError, match=match):
        infer_schema(cells, auto)
    decided = DataSpec(target="stay", task="classification")
    assert len(infer_schema(cells, decided).classes) == 214


def test_several_targets_have_a_scale_each(tmp_path):
    both = DataSpec(target="stay, bmi", task="regression")
    cells = read_table(write(tmp_path / "a.csv"), both)
    schema, bmi = infer_schema(cells, both), FEATURES[:, NAMES.index("bmi")]
    split = labeled_split(schema, cells)
    assert schema.outputs == ("stay", "bmi")
    np.testing.assert_allclose(split.y[:, 1], (bmi - bmi.mean()) / bmi.std(), rtol=1e-4, atol=1e-5)
    assert not {"stay", "bmi"} & {column.name for column in schema.columns}


def test_tenths_of_the_target_replace_classes(tmp_path):
    data = RunData(spec(dataset=f"table:{write(tmp_path / 'a.csv')}", clients=3))
    names, groups = data.strata()
    ranks = np.argsort(np.argsort(LENGTH, kind="stable"))
    assert len(names) == 10
    assert names[0].startswith("stay 25 to ")
    edges = np.cumsum([len(part) for part in np.array_split(np.arange(len(LENGTH)), 10)])
    np.testing.assert_array_equal(groups, np.searchsorted(edges, ranks, side="right"))
    counts = np.array(list(data.label_counts().values()))
    np.testing.assert_array_equal(counts.sum(0), np.bincount(groups))


def test_task_and_its_scale_are_shared_with_other_processes(tmp_path):
    dataset = RunData(spec(dataset=f"table:{write(tmp_path / 'a.csv')}")).dataset
    write_dataset(dataset, tmp_path / "0.safetensors")
    read = read_dataset(tmp_path / "0.safetensors")
    assert read.format.task == dataset.format.task == Regression((LENGTH.mean(),), (LENGTH.std(),))
    torch.testing.assert_close(read.train.y, dataset.train.y)


def test_data_must_have_the_targets_of_the_task(tmp_path):
    with pytest.raises(SettingsError, match=r"'classification'.*'digits'"):
        _ = RunData(DataSpec(task="regression")).dataset


def test_hospitals_of_the_example_have_different_scales(tmp_path):
    for name in "ab":
        write_example("regression", tmp_path / name)
    for part, count in (("train", 1200), ("test", 300)):
        rows = pd.read_csv(tmp_path / "a" / f"{part}.csv")
        assert len(rows) == count
        assert rows.equals(pd.read_csv(tmp_path / "b" / f"{part}.csv"))
        means = rows.groupby("site")[["weight", "creatinine", "days"]].mean()
        assert means.loc["east", "weight"] == pytest.approx(2.2046 * 75, rel=0.05)
        assert means.loc["north", "weight"] == pytest.approx(75, rel=0.05)
        ratio = means.loc["south", "creatinine"] / means.loc["north", "creatinine"]
        assert ratio == pytest.approx(88.42, rel=0.1)
        assert rows["days"].between(0.5, 90).all()
        assert rows["admission"].isna().any()


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox"])
def test_clients_descend_the_mean_squared_error(method, tmp_path):
    """Two full-batch steps: w <- w - lr (grad of mean (f(x) - z)^2 + mu (w - w^t))."""
    changes = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.05, "batch-size": 500}
    changes = {f"training.{name}": value for name, value in changes.items()}
    if method == "fedprox":
        changes["fedprox.mu"] = 0.7
    path = write(tmp_path / "a.csv")
    config = on_table(method, path, **changes, **{"training.local-epochs": 2})
    server = Server(config, tmp_path / "run")
    instructions = server.instruct(1)
    for proxy, _ in instructions:
        client_of(proxy).state.restore(server.log.run_name, before=1)
    before = {p.name: copy.deepcopy(client_of(p).models["private"]) for p, _ in instructions}
    for proxy, instruction in instructions:
        if method != "local":
            weights = (
                client_of(proxy)
                .codec.decode_instruction(
                    parameters_to_ndarrays(instruction.parameters), client_of(proxy).sizes
                )[1]
                .group("weights")
            )
            before[proxy.name].load_state_dict({k: torch.tensor(v) for k, v in weights.items()})
    for proxy, _ in server.train(instructions):
        client, model = client_of(proxy), before[proxy.name]
        start = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            outputs = model(client.x)
            loss = ((outputs - client.y) ** 2).sum() / client.y.numel()
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            mu = 0.7 if method == "fedprox" else 0.0
            with torch.no_grad():
                for w, slope, first in zip(model.parameters(), slopes, start, strict=True):
                    w -= 0.05 * (slope + mu * (w - first))
        trained = client.models["private"].state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "central"])
def test_records_hold_scores_in_the_unit_of_the_target(method, tmp_path):
    """The scores of every client, from its model and the numbers in the file."""
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.csv", slice(0, 300))
    write(tmp_path / "data" / "test.csv", slice(300, None))
    config = on_table(method, tmp_path / "data", **{"models.pool": ["mlp"]})
    summary = run(config, tmp_path / "run")
    assert summary["metric"] == "rmse"
    assert summary["accuracy"] == {}
    last = records(tmp_path / "run")[-1]
    assert list(last["metrics"]) == ["rmse", "mae", "r2"]
    name_of_run = json.loads((tmp_path / "run" / "run.json").read_text())["run"]
    data, mean, deviation = RunData.for_run(config.run), LENGTH[:300].mean(), LENGTH[:300].std()
    for number in range(3):
        node = read_node(
            {"partition-id": number, "num-partitions": 3},
            config.run,
            str(tmp_path / "run" / "state"),
            data,
        )
        name, tests = f"client-{number}", {"common": LENGTH[300:]}
        client = config.method.client(config, node)
        tests["personal"] = LENGTH[data.split_rows(number)[1]]
        if method == "central":  # the model of the server
            identity = {"run": name_of_run, "method": method}
            stored = Checkpoints(tmp_path / "run", identity).newest(print, 2)
            model = client._new_model()
            weights = {n.removeprefix("weights/"): v for n, v in stored.tensors.items()}
            model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()})
            kind = "global"
        else:
            client.state.restore(name_of_run, before=9)
            model, kind = client.models["private"], "private"
        for protocol, truth in tests.items():
            outputs = model.eval()(client.tests[protocol].x).detach().numpy()[:, 0]
            predicted = mean + deviation * outputs.astype(float)
            expected = {
                "rmse": sk.root_mean_squared_error(truth, predicted),
                "mae": sk.mean_absolute_error(truth, predicted),
                "r2": sk.r2_score(truth, predicted),
            }
            for metric, value in expected.items():
                score = last["metrics"][metric][protocol][kind]["per_client"][name]
                assert score == pytest.approx(value, rel=1e-4), (protocol, metric)
            constant = sk.root_mean_squared_error(truth, np.full(len(truth), truth.mean()))
            assert last["majority"][protocol][name] == pytest.approx(constant, rel=1e-5)
    worst = last["metrics"]["rmse"]["common"][kind]
    assert worst["worst"] == max(worst["per_client"].values())
    assert summary["history"][-1]["metrics"]["rmse"]["common"][kind] == worst["mean"]


def test_partition_shows_tenths_of_the_target(tmp_path, call):
    table = ("--dataset", f"table:{write(tmp_path / 'a.csv')}", "--clients", "3")
    code, shown, _ = call("partition", *table, "--set", "target=stay", "--set", "task=regression")
    assert code == 0
    rows = [line.split() for line in shown.splitlines() if line.startswith("client-")]
    assert sum({name: int(count) for name, count, *_ in rows}.values()) == len(LENGTH)
    assert f"stay {min(LENGTH):.4g} to " in shown
    assert f" to {max(LENGTH):.4g}" in shown


def test_run_prints_its_headline_metric(tmp_path):
    lines = []
    changes = {"early-stopping": 1, "rounds": 6}
    changes |= {"training.optimizer": "sgd", "training.lr": 1e-30}  # without improvement
    config = on_table("local", write(tmp_path / "a.csv"), **changes)
    summary = run(config, tmp_path / "run", (Progress(lines.append),), report=True)
    assert any("RMSE (personal, private)" in line for line in lines)
    assert not any("accuracy" in line.lower() for line in lines)
    assert summary["rounds"] < 6
    assert any("the RMSE has not decreased for 1 evaluations" in line for line in lines)
    loaded = report.load_run(tmp_path / "run")
    assert loaded.metric == "rmse"
    assert [title for title, _ in loaded.extra_metrics] == ["MAE", "R²"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "mean RMSE of the private models" in page
    assert "always predicting the mean target of the test set" in page
    frame = Result(loaded).to_frame()
    assert {"rmse", "mae", "r2"} <= {*frame.columns}
    assert "accuracy" not in frame.columns


def test_clients_with_the_highest_squared_errors_are_selected(tmp_path):
    """Round 3 of power-of-choice, after two rounds in which every client replied once."""
    chosen = {"clients": 6, "fraction": 0.5, "pace.select": "power-of-choice"}
    chosen |= {"pace.candidates": 6, "training.batch-size": 500, "training.local-epochs": 1}
    path = write(tmp_path / "a.csv")
    server = Server(on_table("local", path, **chosen), tmp_path / "run")
    losses, waited = {}, {}
    for number in (1, 2):
        instructions = server.instruct(number)
        for proxy, _ in instructions:
            client = client_of(proxy)
            client.state.restore(server.log.run_name, before=number)
            client.network.train()  # as in the single step of the epoch
            gap = client.network(client.x).detach().numpy() - client.y.numpy()
            losses[proxy.name] = float((gap.astype(float) ** 2).mean())
            waited[proxy.name] = number
        server.aggregate(number, server.train(instructions))
        server.close(number)
    assert sorted(waited.values()) == [1, 1, 1, 2, 2, 2]
    highest = sorted(losses, key=lambda name: -losses[name])[:3]
    selected = [proxy.name for proxy, _ in server.instruct(3)]
    assert sorted(selected) == sorted(highest), losses


THREE = ("mlp", "mlp2", "mlp3")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fml", "fedmd", "feddf"])
def test_three_architectures_on_ray_give_the_metrics_of_one_process(method, tmp_path):
    changes = {**fast(method), "models.pool": THREE}
    changes["data.loss"] = "quantile" if method == "fedmd" else "auto"
    for backend in ("inline", "ray"):
        chosen = {**changes, "engine.backend": backend}
        run(on_table(method, write(tmp_path / "a.csv"), **chosen), tmp_path / backend)
    one, other = (records(tmp_path / name) for name in ("inline", "ray"))
    for mine, others in zip(one, other, strict=True):
        assert mine["metrics"] == others["metrics"]
        assert mine["metrics"]["rmse"]["personal"]
    models = json.loads((tmp_path / "ray" / "summary.json").read_text())["models"]
    assert sorted(models.values()) == sorted(THREE)


# --- after a run ----------------------------------------------------------------------------------


def test_in_regression_a_client_with_a_lower_error_than_alone_is_better(tmp_path):
    path, paths = write(tmp_path / "a.csv"), (tmp_path / "run", tmp_path / "run" / "baseline")
    for place, method, seed in zip(paths, ("fml", "local"), (1, 2), strict=True):
        run(on_table(method, path, **{**fast(method), "seed": seed}), place)
    loaded = report.load_run(paths[0])
    ours, alone = (
        records(place)[-1]["metrics"]["rmse"]["personal"]["private"]["per_client"]
        for place in paths
    )
    better = sum(ours[name] < alone[name] for name in ours)
    assert f", {better} of 3 clients better" in baseline_line(loaded)
    assert better != sum(ours[name] > alone[name] for name in ours), "three is odd"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs of regression that differ in the learning rate, with the same seed and test set."""
    root = tmp_path_factory.mktemp("regression")
    (root / "data").mkdir()
    write(root / "data" / "train.csv", slice(0, 300))
    write(root / "data" / "test.csv", slice(300, None))
    for name, rate in {"good": 1e-2, "bad": 1e-30}.items():
        config = on_table("fedavg", root / "data", **{"training.lr": rate, "models.pool": ["mlp"]})
        run(config, root / "runs" / name)
    return root


def by_hand(root, features, name="client-0"):
    """Return the predictions in the target's unit, from the stored tensors and the table alone."""
    paths = (root / "runs" / "good" / "state").glob(f"*/{name}/round-*.safetensors")
    weights = load_file(max(paths, key=lambda path: path.name))
    layers = [np.float64(v) for k, v in weights.items() if "private" in k]
    matrices = sorted((v for v in layers if v.ndim == 2), key=len, reverse=True)
    biases = sorted((v for v in layers if v.ndim == 1), key=len, reverse=True)
    train = FEATURES[:300]
    x = np.float32((features - train.mean(0)) / train.std(0))
    for number, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
        x = x @ matrix.T + bias
        x = np.maximum(x, 0) if number < len(matrices) - 1 else x
    return x * LENGTH[:300].std() + LENGTH[:300].mean()


def test_comparison_uses_the_headline_metric_of_the_runs(trained, tmp_path, call):
    compared = report.compare([trained / "runs"])
    assert compared.metric.name == "rmse"
    assert [group.settings["training.lr"] for group in compared.groups] == ["0.01", "1e-30"]
    scores = [group.score(compared.headline).mean for group in compared.groups]
    assert scores[0] < scores[1]
    assert compared.target == math.ceil(1100 * scores[1]) / 1000
    frame = compare([trained / "runs"]).to_frame()
    assert frame["rmse.common.global.mean"].tolist() == scores
    assert report.compare([trained / "runs"], metric="r2").groups == tuple(
        replace(g, runs=tuple(r.with_metric("r2") for r in g.runs)) for g in compared.groups
    )
    _, text, _ = call("compare", trained / "runs", "--out", tmp_path / "out")
    assert "last round, RMSE" in text
    assert "accuracy" not in (tmp_path / "out" / "compare.html").read_text().lower()
    with pytest.raises(SettingsError, match=r"rmse, mae, r2 .*'accuracy'"):
        report.compare([trained / "runs"], metric="accuracy")


def test_default_target_of_r2_is_reached_by_all_runs(trained):
    compared = report.compare([trained / "runs"], metric="r2")
    last = [group.score(compared.headline).mean for group in compared.groups]
    assert compared.target <= min(last)
    assert compared.target > min(last) - 0.1 * abs(min(last)) - 0.002
    assert "-1e+16" not in " ".join(compared.notes)


def test_runs_of_different_tasks_are_not_compared_by_default(trained, tmp_path):
    run(small("local", clients=2, rounds=1, models="mlp"), tmp_path / "classes")
    both = [tmp_path / "classes", trained / "runs"]
    with pytest.raises(SettingsError, match="accuracy"):
        report.compare(both)
    assert report.compare(both, metric="rmse").metric.name == "rmse"


def test_sweep_has_the_lowest_error_as_its_best_point(trained, tmp_path):
    paths = {(rate,): [trained / "runs" / name] for rate, name in ((1e-30, "bad"), (0.01, "good"))}
    sweep = report.sweep(["training.lr"], paths)
    path = report.write_sweep(sweep, tmp_path)
    assert next(iter(sweep.results)).startswith("RMSE, ")
    page = path.read_text()
    best = min(sweep.results.iloc[:, 0])
    assert "lowest mean over seeds" in page
    assert f'"value">{best:.4g}' in page or f"{best:.4g}" in page
    assert "0.01" in page[page.index("lowest mean") :][:600]


def test_page_names_the_client_with_the_largest_error_as_the_worst(trained):
    found = report.load_run(trained / "runs" / "good").with_metric("rmse")
    record, errors = found.records[-1], {"client-0": 1.739, "client-1": 1.2, "client-2": 0.9884}
    scores = {"personal": {"private": Score(mean=1.3, std=0.3, worst=1.739, per_client=errors)}}
    record = replace(record, metrics={"rmse": scores})
    found = replace(found, summary=None, records=(record,))
    page = re.sub(r"<[^>]*>", " ", render_run(found))
    assert re.findall(r"worst client\s+(\S+) \((\S+)\)", page) == [("1.739", "client-0")]
    assert not re.findall(r"1\.739 \((?!client-0)", page)


def test_worst_training_loss_is_the_largest(trained):
    for line in (trained / "runs" / "good" / "metrics.jsonl").read_text().splitlines():
        loss = json.loads(line)["loss"]
        assert loss["worst"] == max(loss["per_client"].values()) > min(loss["per_client"].values())


def test_client_predicts_numbers_in_the_unit_of_the_target(trained, tmp_path, call):
    client = open_client(trained / "runs" / "good", "client-0")
    new = tmp_path / "new.csv"
    rows = [",".join(NAMES), *(",".join(map(repr, row)) for row in FEATURES[300:].tolist())]
    new.write_text("\n".join(rows) + "\n")
    names, x = read_inputs([new], client.record)
    found, expected = client.predict(x, "private"), by_hand(trained, FEATURES[300:])
    assert found.targets == ("stay",)
    np.testing.assert_allclose(found.values, expected, rtol=1e-4)
    assert Result(report.load_run(trained / "runs" / "good")).predict(
        "client-0", x.numpy(), "private"
    ).values == pytest.approx(found.values)
    own = ("--kind", "private")
    read = pd.read_csv(
        io.StringIO(call("predict", trained / "runs" / "good", "client-0", new, "--csv", *own)[1])
    )
    assert [*read] == ["sample", "stay"]
    assert read["sample"].tolist() == names
    np.testing.assert_allclose(read["stay"], expected[:, 0], rtol=1e-4)
    _, table, _ = call("predict", trained / "runs" / "good", "client-0", new, *own)
    assert f"{found.values[0, 0]:.6g}" in table
    record = records(trained / "runs" / "good")[-1]["metrics"]
    measured = client.scores("private")
    assert set(measured["common"]) == {"rmse", "mae", "r2"}
    for metric, value in measured["common"].items():
        assert value == record[metric]["common"]["private"]["per_client"]["client-0"]
    assert math.isnan(client.accuracy("private")["common"])


@pytest.mark.parametrize("form", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_exported_program_predicts_in_the_unit_of_the_target(trained, tmp_path, form):
    if form == "onnx":
        pytest.importorskip("onnxscript")
    path, client = tmp_path / f"m.{form}", open_client(trained / "runs" / "good", "client-0")
    card = json.loads(export(client, form, path, "private").read_text())
    columns = [column["name"] for column in card["input"]["columns"]]
    x = FEATURES[300:][:, [NAMES.index(name) for name in columns]]
    if form == "pt2":
        predicted = torch.export.load(path).module()(torch.from_numpy(x)).detach().numpy()
    else:
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
        predicted = session.run([card["output"]["name"]], {"x": x})[0]
    np.testing.assert_allclose(predicted, by_hand(trained, FEATURES[300:]), rtol=1e-4)
    assert card["targets"] == ["stay"]
    assert card["task"]["means"] == [pytest.approx(LENGTH[:300].mean())]
    assert card["output"] == {"name": "predictions", "of": "targets", "scaling": "in the file"}
    assert card["scores"]["common"]["rmse"] == client.scores("private")["common"]["rmse"]
    assert not {"accuracy", "classes", "label_space"} & card.keys()


# --- privacy --------------------------------------------------------------------------------------


def test_dp_sgd_clips_the_gradient_of_each_samples_squared_error():
    """Algorithm 1 of Abadi et al. without noise, sample by sample, with the squared error."""
    torch.manual_seed(0)
    x, y, model = torch.randn(8, 5), 3 * torch.randn(8, 2), torch.nn.Linear(5, 2)
    parameters = list(model.parameters())
    expected, norm = [torch.zeros_like(p) for p in parameters], 0.5
    for row in range(8):
        error = ((model(x[row : row + 1]) - y[row : row + 1]) ** 2).sum() / 2
        slopes = torch.autograd.grad(error, parameters)
        length = math.sqrt(sum(float((slope**2).sum()) for slope in slopes))
        for total, slope in zip(expected, slopes, strict=True):
            total += slope / max(1.0, length / norm)
    expected = [p.detach() - 0.1 * total / 8 for p, total in zip(parameters, expected, strict=True)]
    settings = resolve({"method": "local", "training.optimizer": "sgd", "training.momentum": 0.0,
                        "training.lr": 0.1}).run.training  # fmt: skip
    plain = optimization_for(model.parameters(), settings, CPU)
    with sgd.dp_sgd(plain, [model], 0.0, norm, 8) as private:
        private.step(SupervisedLoss(model, Regression().loss())(x, y), 0.0)
    for found, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), value)


def test_private_run_of_regression_reports_its_budget_and_scores(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.csv", slice(0, 300))
    write(tmp_path / "data" / "test.csv", slice(300, None))
    changes = {"privacy.epsilon": 8.0, "models.pool": ["mlp"], "training.batch-size": 4096}
    summary = run(on_table("fedavg", tmp_path / "data", **changes), tmp_path / "run")
    assert all(0 < spent["epsilon"] <= 8.0 for spent in summary["privacy"].values())
    assert len(summary["privacy"]) == 3
    assert math.isfinite(summary["metrics"]["rmse"]["common"]["private"]["mean"])
    assert summary["metric"] == "rmse"


def test_private_site_takes_its_scale_from_the_schema_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "state"))
    every = infer_schema(read_table(write(tmp_path / "all.csv"), spec()), spec())
    seen, own = [], {"name": "site-a", "privacy": "epsilon=80 delta=1e-5"}
    settings = {"method": "fedavg", "models.pool": "mlp", "privacy.epsilon": 8.0}
    for name, values in {"a": LENGTH, "b": 1000 * LENGTH}.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder / "train.csv", slice(0, 60), values=values)
        (folder / "schema.toml").write_text(every.to_toml())
        (folder / "site.toml").write_text("num-classes = 1\n")
        context = Context(0, 0, {**own, "data": f"table:{folder}"}, RecordDict(),
                          {**settings, "data.task": "regression"})  # fmt: skip
        client = client_fn(context).numpy_client._client
        assert client.task == Regression((LENGTH.mean(),), (LENGTH.std(),))
        rows = np.sort(np.concatenate([client.y, *(t.y for t in client.tests.values())])[:, 0])
        wanted = np.sort((values[:60] - LENGTH.mean()) / LENGTH.std())
        np.testing.assert_allclose(rows, wanted, rtol=1e-4, atol=1e-5)
        seen.append(client.get_properties({}))
        close_clients()
    assert seen[0] == seen[1]
    assert (seen[0]["task"], seen[0]["classes"], seen[0]["samples"]) == ("regression", 1, 2)
    for task, classes in (("auto", 0), ("classification", 2)):
        run_of = resolve({"method": "fedavg", "data.task": task, "models.num-classes": classes})
        with pytest.raises(SettingsError, match="'regression'"):
            Declaration.from_files(f"table:{tmp_path / 'a'}", 2**20).check(run_of.run)


# --- settings -------------------------------------------------------------------------------------


def test_methods_declare_their_tasks():
    methods = all_methods()[0]
    assert {n for n, m in methods.items() if "regression" in m.spec.tasks} == {*REGRESSION}
    for name, method in methods.items():
        if "regression" in method.spec.tasks:
            continue
        with pytest.raises(SettingsError) as error:
            resolve({"method": name, "data.task": "regression", "data.dataset": "table:a.csv"})
        text = str(error.value)
        assert f"unsupported by {name}, because {method.spec.only_tasks}" in text
        assert "\n" not in text
        assert "or another method (central, ditto, ds-fl, fedavg" in text


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"data.task": "regressions"}, "did you mean 'regression'"),
        ({"metrics": ["rmse"]}, "setting 'metrics': the task is classification, .* got 'rmse'"),
        ({"data.task": "regression", "metrics": ["auc"]}, "names from rmse, mae, r2, got 'auc'"),
        ({"data.task": "regression", "training.semi": "fixmatch"}, "expected none"),
    ],
)
def test_settings_must_suit_the_task(changes, fault):
    with pytest.raises(SettingsError, match=fault):
        resolve({"method": "local", "data.dataset": "table:a.csv", **changes})


def test_metrics_of_a_run_follow_from_its_task():
    assert resolve({"method": "local"}).run.metrics == ("accuracy",)
    table = {"method": "local", "data.dataset": "table:a.csv", "data.task": "regression"}
    config = resolve(table)
    assert config.run.metrics == ("rmse", "mae", "r2")
    assert config.run.models.pool == ("mlp", "mlp2", "mlp3")
    assert resolve(config.flat()).run == config.run
    assert resolve({**table, "metrics": ["r2"]}).run.metrics == ("rmse", "r2")


# --- sites ----------------------------------------------------------------------------------------


def test_site_reads_the_targets_with_the_schema_of_all_sites(tmp_path):
    schema = infer_schema(read_table(write(tmp_path / "all.csv"), spec()), spec())
    site = tmp_path / "site"
    site.mkdir()
    write(site / "train.csv", slice(0, 40))
    (site / "schema.toml").write_text(schema.to_toml())
    data = site_data(f"table:{site}", spec=spec(), classes=0, name="a")
    assert data.format.task == Regression((LENGTH.mean(),), (LENGTH.std(),))
    assert (data.format.classes, data.space) == (("stay",), (0,))
    rows = np.sort(
        np.concatenate(
            [data.format.task.in_units(data.train.y), data.format.task.in_units(data.test.y)]
        )[:, 0]
    )
    np.testing.assert_allclose(rows, np.sort(LENGTH[:40]), rtol=1e-5)
    with pytest.raises(SettingsError, match=r"data\.task.*'regression'.*'auto'"):
        site_data(f"table:{site}", spec=DataSpec(), classes=2, name="a")


def test_client_with_another_task_raises():
    info = ClientInfo("a", "mlp", 10, 1, "table", (3,), task="regression")
    assert read_properties(info.properties(), "node") == info
    with pytest.raises(KnowledgeError, match="classes"):
        read_properties({**info.properties(), "task": "classification"}, "node")


# --- units and advice -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"), (1.23456e-6, "1.235e-06"), (0.0123456, "0.01235"), (2.0, "2.000"),
        (58.3749, "58.37"), (999.949, "999.9"), (999.96, "1000"), (1234567.8, "1234568"),
        (2e15, "2.000e+15"), (math.nan, "—"),
    ],
)  # fmt: skip
def test_scores_with_a_unit_have_four_significant_digits(value, text):
    assert (score(value, "rmse"), score(value, "mae.1")) == (text, text)
    assert difference(value, "rmse") == (text if text == "—" else f"+{text}")
    assert difference(-value, "mae") == (text if text == "—" else f"-{text}")
    plain = "—" if math.isnan(value) else f"{value:.4f}"
    assert score(value) == score(value, "r2") == score(value, "macro-auc") == plain


def test_tiny_error_is_not_shown_as_zero(tmp_path):
    path = write(tmp_path / "a.csv", values=LENGTH * 1e-9)
    summary = run(on_table("local", path, rounds=1), tmp_path / "run")
    expected = summary["metrics"]["rmse"]["personal"]["private"]
    cells = client_cells(report.load_run(tmp_path / "run"))
    shown = [cell.text for cell in cells.columns["personal private"]]
    assert [*map(float, shown)] == pytest.approx([*expected["per_client"].values()], rel=6e-4)
    assert min(map(float, shown)) > 0
    assert float(cells.foot[0][-3]) == pytest.approx(expected["mean"], rel=6e-4)
    status = read_status(tmp_path / "run")
    assert f"mean RMSE (personal, private) {expected['mean']:#.4g}" in status.description
    page = render_run(report.load_run(tmp_path / "run"))
    assert f'<div class="number">{expected["mean"]:#.4g}</div>' in page
    assert "Targets: samples per range" in page
    assert "samples per class" not in page


def test_the_command_in_the_error_of_a_decimal_comma_leads_to_a_dataset(tmp_path, call):
    rows = [f'{k % 7},{"ab"[k % 2]},{"xyz"[k % 3]},"{k},5"' for k in range(60)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["age,ward,site,stay", *rows]) + "\n")
    given = spec(dataset=f"table:{path}", by="site", clients=3)
    with pytest.raises(DataError, match=r"row 1, column 'stay': '0,5' is not a number") as error:
        _ = RunData(given).dataset
    assert "the '?' of [targets.stay] in schema.toml" in str(error.value)
    declaration = 'type = "number", decimal = ","'
    assert declaration in error.value.__notes__[0]
    _, *command = shlex.split(re.search("Run `(.*?)`", str(error.value))[1])
    _, said, _ = call(*command)
    assert "Replace each '?'" in said
    schema = (tmp_path / "schema.toml").read_text()
    assert re.search(rf"\[targets.stay\]\ntype = \"\?\"\n# .*{declaration}", schema)
    with pytest.raises(DataError, match="type must not be '\\?', got it for 'stay'"):
        _ = RunData(given).dataset
    (tmp_path / "schema.toml").write_text(
        schema.replace('type = "?"', declaration.replace(", ", "\n"))
    )
    call(*command)
    assert read_schema(tmp_path / "schema.toml").targets[0].is_fitted
    dataset = RunData(given).dataset
    assert dataset.format.task.means[0] == pytest.approx(30.0)
    assert [column.name for column in dataset.format.schema.columns] == ["age", "ward"]


@pytest.mark.parametrize(
    ("task", "fix"),
    [
        ("regression", r"Use \[targets\.stay\] instead"),
        ("classification", r"List its classes or labels in classes"),
    ],
)
def test_a_target_among_the_columns_of_a_schema_raises(tmp_path, task, fix):
    path = tmp_path / "schema.toml"
    path.write_text(
        f'target = "stay"\ntask = "{task}"\n[columns.stay]\ntype = "number"\ndecimal = ","\n'
    )
    with pytest.raises(DataError, match=rf"schema.toml: columns.stay: .*got the target\. {fix}"):
        read_schema(path)


@pytest.mark.parametrize(
    ("values", "changes", "fault", "fix"),
    [
        (["1.5"] * 30 + [""], {}, "column 'stay': the target is missing. Remove the row.", None),
        (["1.5"] * 30 + ["x"], {}, "row 31, column 'stay': 'x' is not a number", None),
        (["NA"] * 31, {}, "row 1, column 'stay': the target is missing", None),
        (["0", "1", "x", "z"] * 9, {}, "row 3, column 'stay': 'x' is not a number",
         {"task": "classification"}),
        (["0", "1", "yes", "no"] * 9, {"task": "auto"}, "several words for yes or no", None),
        ([f'"{k},5"' for k in range(1, 31)], {}, "row 1, column 'stay': '1,5' is not a number",
         'type = "number"\ndecimal = ","'),
        ([f'{k / 8}' for k in range(1, 31)], {"task": "auto"}, "Set data.task to regression",
         {"task": "regression"}),
        ([f'"{k}"' for k in range(30)] * 2, {"task": "auto"}, "or to classification",
         {"task": "classification"}),
    ],
)  # fmt: skip
def test_advice_for_a_target_column_leads_to_a_dataset(tmp_path, values, changes, fault, fix):
    lines = [f"{k / 7:.3f},{value}" for k, value in enumerate(values)]
    (tmp_path / "a.csv").write_text("\n".join(["x,stay", *lines]) + "\n")
    given = spec(dataset=f"table:{tmp_path / 'a.csv'}").replace(**changes)
    with pytest.raises(DataError) as error:
        _ = RunData(given).dataset
    assert fault in str(error.value)
    if isinstance(fix, str):
        schema = f'target = "stay"\ntask = "regression"\n[targets.stay]\n{fix}\n[columns.x]\n'
        (tmp_path / "schema.toml").write_text(f'{schema}type = "number"\n')
        dataset = RunData(given).dataset
        assert dataset.format.task.means[0] == pytest.approx(np.mean(range(1, 31)) + 0.5)
    elif fix:
        assert len(RunData(given.replace(**fix)).dataset.train) == len(values)


@pytest.mark.parametrize(
    ("labels", "task", "fault"),
    [
        (["0", "1"], "auto", r"<U1 \[20\]. Convert the labels, e.g. with numpy.unique"),
        (["0", "1"], "regression", r"<U1 \[20\]. Convert the texts to numbers."),
        ([0.0, 1.0], "auto", "to regression to predict numbers, or convert classes to integers"),
    ],
)
def test_labels_of_arrays_in_another_type_are_converted_as_advised(tmp_path, labels, task, fault):
    y = np.array(labels * 10)
    arrays = {"x": np.random.default_rng(0).random((20, 3)), "y": y}
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        np.savez(tmp_path / part / "0.npz", **arrays)
    given = DataSpec(dataset=f"npz:{tmp_path}", task=task)
    with pytest.raises(DataError, match=fault):
        _ = RunData(given).dataset
    numbers = y.astype(float) if task == "regression" else np.unique(y, return_inverse=True)[1]
    for part in ("train", "test"):
        np.savez(tmp_path / part / "0.npz", x=arrays["x"], y=numbers)
    assert len(RunData(given).dataset.train) > 0


# --- tasks of other packages ----------------------------------------------------------------------


@dataclass(frozen=True)
class AbsoluteRegression(Regression):
    """A task of another package: regression with the absolute error as loss and headline."""

    name = "absolute"
    metrics = ("bias", "mae")

    def loss(self, reduction="mean"):
        l1_loss = torch.nn.functional.l1_loss
        return lambda outputs, y: l1_loss(outputs, y, reduction=reduction)


@pytest.mark.parametrize(
    ("properties", "able"),
    [
        ({}, {*REGRESSION} - {"pfedbayes"}),
        ({"has_likelihood": True}, {*REGRESSION}),
        ({"has_distribution": True}, {*method_names()} - {"pfedbayes"}),
        ({"has_distribution": True, "has_likelihood": True}, {*method_names()}),
    ],
)
def test_properties_of_a_new_task_decide_which_methods_support_it(properties, able, monkeypatch):
    hooks = dict.fromkeys(tasks.Task.__abstractmethods__)
    members = {"name": "new", "metrics": ("accuracy",), **hooks, **properties}
    monkeypatch.setitem(tasks.TASKS, "new", type("New", (tasks.Task,), members))
    find_task.cache_clear()
    for name in method_names():
        values = {"method": name, "data.dataset": "table:a.csv", "data.task": "new"}
        if name not in able:
            with pytest.raises(
                SettingsError, match=rf"unsupported by {name}, because .*\(central,"
            ):
                resolve(values)
            continue
        settings = resolve(values).method_settings
        if name == "heterofl":
            assert settings.masked == ("has_distribution" in properties)
        if name == "ds-fl":
            era = "has_distribution" in properties
            assert settings.loss == ("cross-entropy" if era else "mse")
            assert settings.aggregation == ("era" if era else "sa")
    assert "new" in find_method("local").spec.tasks
    assert ("new" in find_method("felo").spec.tasks) == ("has_distribution" in properties)


def test_task_of_another_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    class Point:
        name, value = "absolute", "elsewhere:AbsoluteRegression"

        def load(self):
            return AbsoluteRegression

    find_task.cache_clear()
    monkeypatch.setattr(tasks, "entry_points", lambda group: [Point()])
    try:
        with pytest.raises(SettingsError, match="metrics"):
            find_task("absolute")
        bias = Metric("bias", "bias", lambda p: float((p.predicted - p.truth).mean()), -1e9, 1e9,
                      task="absolute")  # fmt: skip
        monkeypatch.setitem(METRICS, "bias", bias)
        changes = {"data.task": "absolute", "metrics": ["bias", "mae"], "rounds": 1}
        config = on_table("local", write(tmp_path / "a.csv"), **changes)
        summary = run(config, tmp_path / "run")
        assert summary["metric"] == "bias"
        assert list(summary["metrics"]) == ["bias", "mae"]
        with pytest.raises(SettingsError, match="felo"):
            on_table("felo", tmp_path / "a.csv", **changes)
        assert task_of(tasks.stored_task(AbsoluteRegression((1.0,), (2.0,)))).means == (1.0,)
    finally:
        find_task.cache_clear()


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        ([6.48812345, 8.0], ["6.48812", "8"]),
        ([1.7e9, 1.7e9 + 86400], ["1700000000", "1700086400"]),
        ([1000.001, 1000.002, float("nan")], ["1000.001", "1000.002", "nan"]),
        ([-1e-7, 1e-7], ["-1e-07", "1e-07"]),
        ([5.0, 5.0], ["5", "5"]),
    ],
)
def test_predicted_numbers_are_printed_in_columns(column, texts):
    assert numbers(np.array(column)) == texts
