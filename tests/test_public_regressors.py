"""Regressors without gradients, in methods that exchange predictions on public data."""

import numpy as np
import pytest
import torch
from federation import Server, client_of, run
from interruption import cut_and_resumed
from rounds import instruction_of, reply_of
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import SplineTransformer, StandardScaler
from sklearn.svm import SVR

from fedhet.algorithms.distillation import SelectionByError, fuse
from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.inference.client import open_client
from fedhet.models import build_any
from fedhet.tasks import Regression

METHODS = ("fedmd", "ds-fl", "fedgems")
SPLINES = SplineTransformer(n_knots=4, include_bias=False)
REFERENCE = {"sk-svm": SVR(), "sk-gam": make_pipeline(SPLINES, Ridge())}
"""What scikit-learn fits to standardized columns, by name of the model."""


def on_diabetes(method, **changes):
    values = {
        "method": method,
        "clients": 3,
        "rounds": 3,
        "seed": 1,
        "data.dataset": "python:benchmarks.tasks:diabetes",
        "data.task": "regression",
        "data.public-fraction": 0.2,
        "training.local-epochs": 1,
        "models.pool": ["sk-svm", "sk-gam", "mlp"],
        "engine.backend": "inline",
        "engine.device": "cpu",
        "engine.precision": "float32",
    }
    server = {f"{method}.server-model": "mlp"} if method in {"ds-fl", "fedgems"} else {}
    return resolve({**values, **server, **changes})


def fitted(name, x, y):
    """Return the function that scikit-learn learns from x [N, F] and y [N, 1]."""
    model = make_pipeline(StandardScaler(), REFERENCE[name])
    return model.fit(np.float32(x), np.float64(y)[:, 0]).predict


@pytest.mark.parametrize("method", ["fedmd", "ds-fl"])
def test_regressor_learns_its_data_and_the_mean_of_the_predictions(tmp_path, method):
    server, mean = Server(on_diabetes(method, **{f"{method}.sample": 40}), tmp_path), None
    for number in (1, 2, 3):
        instructions = server.instruct(number)
        replies, told = server.train(instructions), instruction_of(instructions[0]).tensors
        if mean is not None:
            np.testing.assert_allclose(told["logits"], mean, rtol=1e-5, atol=1e-6)
        for proxy, result in replies:
            client, logits = client_of(proxy), reply_of(result).tensors["logits"]
            assert logits.shape == (40, 1)
            if client.info.model == "mlp":
                continue
            public, x, y = client.public, client.x.numpy(), client.y.numpy()
            if mean is not None:
                x, y = np.r_[x, public.x.numpy()[told["rows"]]], np.r_[y, told["logits"]]
            elif method == "fedmd":  # DS-FL needs no public labels
                x, y = np.r_[x, public.x.numpy()], np.r_[y, public.y.numpy()]
            predict = fitted(client.info.model, x, y)
            expected = predict(public.x.numpy()[told["asked"]])
            np.testing.assert_allclose(logits[:, 0], expected, rtol=1e-3, atol=1e-4)
        mean = np.mean([reply_of(result).tensors["logits"] for _, result in replies], 0)
        server.aggregate(number, replies)


def test_regressor_learns_weighted_means_of_labels_and_outputs_of_the_server(tmp_path):
    server = Server(on_diabetes("fedgems", **{"fedgems.epsilon": 0.75}), tmp_path)
    server.play(1)
    instructions = server.instruct(2)
    for proxy, result in server.train(instructions):
        client, logits = client_of(proxy), reply_of(result).tensors["logits"]
        if client.info.model == "mlp":
            continue
        teacher, public = client.state.tensors["logits"].numpy(), client.public
        target = 0.75 * public.y.numpy() + 0.25 * teacher
        assert np.abs(target - public.y.numpy()).max() > 0.1
        x, y = np.r_[client.x, public.x], np.r_[client.y, target]
        wanted = instruction_of(instructions[0]).tensors.get("wanted")
        rows = slice(None) if wanted is None else np.flatnonzero(
            np.unpackbits(wanted, count=len(public))
        )  # fmt: skip
        expected = fitted(client.info.model, x, y)(public.x.numpy()[rows])
        np.testing.assert_allclose(logits[:, 0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_interrupted_run_fits_the_same_regressors_again(tmp_path, method):
    summary = cut_and_resumed(on_diabetes(method), tmp_path)
    scores = summary["metrics"]["rmse"]["common"]["private"]["per_client"]
    assert all(40 < score < 80 for score in scores.values())  # the deviation is about 77
    client = open_client(tmp_path / "cut", "client-0", trust="benchmarks.tasks")
    assert client.scores()["common"]["rmse"] == scores["client-0"]


def test_predictions_help_regressors(tmp_path):
    """Sites with different targets learn more about the common test set from each other."""
    errors = {}
    for method in ("local", "ds-fl"):
        config = on_diabetes(method, **{"models.pool": ["sk-svm", "sk-gam"], "data.alpha": 0.1})
        summary = run(config, tmp_path / method)
        errors[method] = summary["metrics"]["rmse"]["common"]["private"]["mean"]
    assert errors["ds-fl"] < errors["local"] - 2


@pytest.mark.parametrize(
    ("method", "task", "able"),
    [
        ("fedmd", "classification", "cofed, local"),
        ("fml", "regression", "ds-fl, fedgems, fedmd, local"),
    ],
)
def test_other_methods_and_tasks_reject_models_without_gradients(method, task, able):
    values = {"models.pool": ["sk-svm"], "data.task": task}
    with pytest.raises(SettingsError, match=able):
        on_diabetes(method, **values)


def test_regressor_predicts_an_empty_batch():
    model = build_any(
        "sk-svm", (4,), 2, seed=0, kind="table", task=Regression((0.0, 0.0), (1.0, 1.0))
    )
    model.fit(torch.randn(20, 4), torch.randn(20, 2))
    assert model(torch.zeros(0, 4)).shape == (0, 2)


def test_empty_outputs_are_fused():
    """A round of FedGEMS may request no public sample from the clients."""
    loss = torch.nn.functional.mse_loss
    errors = lambda outputs, targets: loss(outputs, targets, reduction="none").mean(1)  # noqa: E731
    selection = SelectionByError(errors, errors, errors, tolerance=0.25)
    fused = fuse(torch.zeros(3, 0, 1), torch.zeros(0, 1), selection)
    assert fused.logits.shape == (0, 1)
    assert fused.known.shape == (0,)
