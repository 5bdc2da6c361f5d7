"""Models without gradients: one small interface for all libraries and custom models."""

import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import run, small
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import SplineTransformer, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from fedhet import models
from fedhet.base.errors import ModelError, SettingsError
from fedhet.base.seeding import derive
from fedhet.config.resolve import check, resolve
from fedhet.learning.training import evaluate
from fedhet.models import Refitted

NAMES = [info.name for info in models.WITHOUT_GRADIENTS.values()]

# The example of docs/models.md.
NEAREST_MEAN = """
    import numpy as np

    class NearestMean:
        def fit(self, x, y):
            self.labels = np.unique(y)
            self.means = np.stack([x[y == label].mean(0) for label in self.labels])

        def predict(self, x):
            distances = ((x[:, None] - self.means) ** 2).sum(2)
            return self.labels[distances.argmin(1)]

    def nearest_mean(shape, classes):
        return NearestMean()
"""


def drawn(seed=0, samples=120, classes=3, shape=(2, 2)):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(samples) % classes
    x = torch.randn(samples, *shape, generator=generator)
    return x + y.reshape(-1, *(1 for _ in shape)), y


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a user module, and return the name of a model in it."""

    def write(name, body, function):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))
        monkeypatch.syspath_prepend(str(tmp_path))
        return f"{name}:{function}"

    return write


@pytest.mark.parametrize("name", NAMES)
def test_models_train_and_evaluate_like_networks(name):
    x, y = drawn()
    model = models.build_any(name, (2, 2), 3, seed=0)
    assert isinstance(model, Refitted)
    model.fit(x, y)
    predicted = model.predict(x)
    assert predicted.dtype == torch.int64
    logits = model(x)
    assert logits.shape == (120, 3)
    assert torch.equal(logits.argmax(1), predicted)
    reached = (predicted == y).float().mean().item()
    assert reached > 0.75
    from fedhet.learning.devices import CPU

    assert evaluate(model, x, y, CPU).accuracy == pytest.approx(reached)
    assert not list(model.parameters())
    assert not model.state_dict()


def test_predictions_equal_scikit_learn():
    x, y = drawn()
    flat, seed = x.flatten(1).numpy(), derive(0, "model", "sk-tree") % 2**32
    tree = DecisionTreeClassifier(random_state=seed).fit(flat, y.numpy())
    assert fitted("sk-tree", x, y).tolist() == tree.predict(flat).tolist()
    scaled = StandardScaler().fit_transform(flat)
    assert fitted("sk-svm", x, y).tolist() == SVC().fit(scaled, y.numpy()).predict(scaled).tolist()
    splines = SplineTransformer(n_knots=4, include_bias=False).fit_transform(scaled)
    additive = LogisticRegression(max_iter=300).fit(splines, y.numpy())
    assert fitted("sk-gam", x, y).tolist() == additive.predict(splines).tolist()
    seed = derive(0, "model", "sk-mlp") % 2**32
    network = MLPClassifier((10,), solver="lbfgs", max_iter=300, random_state=seed)
    network.fit(scaled, y.numpy())
    assert fitted("sk-mlp", x, y).tolist() == network.predict(scaled).tolist()
    boosted = HistGradientBoostingClassifier(
        interaction_cst=[[0], [1], [2], [3]], early_stopping=False, random_state=0
    ).fit(flat, y.numpy())
    assert fitted("sk-boosted-gam", x, y).tolist() == boosted.predict(flat).tolist()


def mixed(samples=160):
    """Two numeric columns with large means and spreads, one one-hot column, and two classes."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(50, 20, (samples, 2))
    word = np.eye(4)[rng.choice(4, samples, p=[0.6, 0.3, 0.07, 0.03])]
    y = (numbers[:, 0] / 20 + 2 * word[:, 1] + rng.normal(size=samples) > 3).astype(np.int64)
    x = np.concatenate([word[:, :2], numbers, word[:, 2:]], axis=1).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(y)


@pytest.mark.parametrize("name", ["sk-svm", "sk-gam", "sk-mlp"])
def test_only_numeric_columns_are_scaled(name):
    """Compare with z-scores of columns 2 and 3; the additive model uses splines."""
    x, y = mixed()
    flat = x.numpy()
    numbers = flat[:, 2:4]
    z = ((numbers - numbers.mean(0)) / numbers.std(0)).astype(np.float32)
    if name == "sk-gam":
        z = SplineTransformer(n_knots=4, include_bias=False).fit_transform(z)
    by_hand = np.concatenate([z, flat[:, [0, 1, 4, 5]]], axis=1)
    seed = derive(0, "model", name) % 2**32
    classifier = {
        "sk-svm": SVC(),
        "sk-gam": LogisticRegression(max_iter=300),
        "sk-mlp": MLPClassifier((10,), solver="lbfgs", max_iter=300, random_state=seed),
    }[name].fit(by_hand, y.numpy())
    model = models.build_any(name, (6,), 2, seed=0)
    model.fit(x, y)
    agree = (model.predict(x).numpy() == classifier.predict(by_hand)).mean()
    assert agree > (0.97 if name == "sk-mlp" else 0.999)
    every = StandardScaler().fit_transform(flat)
    assert np.abs(every - np.concatenate([flat[:, :2], z[:, :2], flat[:, 4:]], axis=1)).max() > 1


def test_boosted_model_is_additive_and_tree_is_not():
    """If no tree uses both features, f(a, b) - f(a, b') is equal for every a, in log-odds."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.uniform(-1, 1, (400, 2)).astype(np.float32))
    y = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long()
    model = models.build_any("sk-boosted-gam", (2,), 2, seed=0)
    model.fit(x, y)

    def log_odds(a, b):
        shares = model.probabilities(torch.tensor([[a, b]]))[0].double().clamp(1e-9, 1)
        return (shares[1] / shares[0]).log().item()

    steps = [log_odds(a, 0.5) - log_odds(a, -0.5) for a in (-0.7, -0.2, 0.3, 0.8)]
    np.testing.assert_allclose(steps, steps[0], atol=1e-3)
    tree = models.build_any("sk-tree", (2,), 2, seed=0)
    tree.fit(x, y)
    assert (tree.predict(x) == y).all()
    assert (model.predict(x) == y).float().mean() < 0.9


def fitted(name, x, y):
    model = models.build_any(name, tuple(x.shape[1:]), 3, seed=0)
    model.fit(x, y)
    return model.predict(x)


@pytest.mark.parametrize("name", NAMES)
def test_single_class_and_constant_features_train(name):
    x, y = drawn()
    assert fitted(name, x, torch.full_like(y, 2)).unique().tolist() == [2]
    x[:, 0, 0] = 1.0
    assert len(fitted(name, x, y).unique()) > 1


def test_training_leaves_no_warning_and_no_global_state():
    before = np.random.get_state()[1].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted("sk-mlp", *drawn(samples=30))
    assert np.array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize("draw", ["random.random()", "np.random.normal()", "torch.randn(1).item()"])
def test_model_with_global_randomness_is_reproducible(own, draw):
    text = f"""
    import random
    import numpy as np
    import torch
    class Drawn:
        def fit(self, x, y): self.drawn = [{draw} for _ in range(20)]
        def predict(self, x):
            return (x[:, 0] * 50 + np.resize(self.drawn, len(x)) * 1e3).astype(int) % 3
    def drawn(shape, classes): return Drawn()
    """
    name = own(f"drawn{len(draw)}", text, "drawn")
    before = torch.get_rng_state()
    one = fitted(name, *drawn())
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    np.random.seed(5)
    assert torch.equal(one, fitted(name, *drawn()))


def test_documented_example_equals_the_tested_example():
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    assert textwrap.dedent(NEAREST_MEAN).split() in [
        block.split("```")[0].removeprefix("# mymodels.py").split()
        for block in page.split("```python\n")
    ]


def test_untrained_model_is_uniform():
    assert models.build_any("sk-tree", (4,), 3, seed=0).predict(torch.zeros(2, 4)).tolist() == [
        0,
        0,
    ]


def test_custom_model_trains(own):
    name = own("nearest", NEAREST_MEAN, "nearest_mean")
    x, y = drawn()
    means = torch.stack([x[y == label].flatten(1).mean(0) for label in range(3)])
    expected = torch.cdist(x.flatten(1), means).argmin(1)
    assert fitted(name, x, y).tolist() == expected.tolist()


def test_custom_model_trains_in_a_federation(own, tmp_path):
    name = own("nearest2", NEAREST_MEAN, "nearest_mean")
    for method in ("local", "cofed"):
        summary = run(small(method, models=[name, "mlp"], rounds=2), tmp_path / method)
        mine = {k: a for k, a in summary["models"].items() if a == name}
        reached = summary["accuracy"]["personal"]["private"]["per_client"]
        assert len(mine) == 2
        assert all(reached[client] > 0.3 for client in mine)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            "return np.zeros((len(x), 2), int)",
            r"predictions must be integers .* got int64 \[120, 2\]",
        ),
        ("return np.zeros(len(x))", r"predictions must be integers \[120\], got float64 \[120\]"),
        ("return np.full(len(x), 3)", r"predictions must be from 0 to 2, got 3 to 3"),
        ("raise KeyError('lost')", r"cannot predict: KeyError: 'lost'"),
    ],
)
def test_invalid_class_prediction_raises(own, body, fault):
    text = f"""
    import numpy as np
    class Odd:
        def fit(self, x, y): pass
        def predict(self, x): {body}
    def odd(shape, classes): return Odd()
    """
    name = own(f"odd{abs(hash(body))}", text, "odd")
    with pytest.raises(ModelError, match=f"model '{name}':? {fault}"):
        fitted(name, *drawn())


PROBABLE = """
    import numpy as np
    class Sure:
        def fit(self, x, y): self.classes_ = np.array([2, 0])
        def predict(self, x): return np.full(len(x), 2)
        def predict_proba(self, x): {body}
    def sure(shape, classes): return Sure()
    """


def test_probabilities_are_in_the_columns_of_their_classes(own):
    x, y = drawn()
    name = own("sure", PROBABLE.format(body="return np.tile([0.75, 0.25], (len(x), 1))"), "sure")
    model = models.build_any(name, (2, 2), 3, seed=0)
    model.fit(x, y)
    assert model.probabilities(x).tolist() == [[0.25, 0.0, 0.75]] * 120
    tree = models.build_any("sk-svm", (2, 2), 3, seed=0)
    tree.fit(x, y)
    assert torch.equal(tree.probabilities(x), tree(x)), "an SVM has none: it is certain"
    tree.fit(x, torch.full_like(y, 1))
    assert tree.probabilities(x).tolist() == [[0.0, 1.0, 0.0]] * 120


@pytest.mark.parametrize("name", ["sk-tree", "sk-gam", "sk-mlp"])
def test_probabilities_equal_scikit_learn(name):
    x, y = drawn()
    model = models.build_any(name, (2, 2), 3, seed=0)
    model.fit(x[y > 0], y[y > 0])
    found = model.probabilities(x).numpy()
    assert (found[:, 0] == 0).all()
    expected = model._fitted.predict_proba(x.flatten(1).numpy())
    np.testing.assert_allclose(found[:, 1:], expected, atol=1e-6)
    assert found.argmax(1).tolist() == model.predict(x).tolist()


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("return np.full((len(x), 2), 1.5)", r"probabilities must be \[120, 2\], from 0 to 1"),
        ("return np.full((len(x), 2), np.nan)", r"probabilities must be \[120, 2\]"),
        ("return np.ones((3, 2))", r"probabilities must be \[120, 2\]"),
        ("return np.ones((len(x), 3))", r"predictions must be integers \[3\], got int64 \[2\]"),
        ("raise KeyError('lost')", r"cannot predict: KeyError: 'lost'"),
    ],
)
def test_invalid_probability_raises(own, body, fault):
    name = own(f"unsure{abs(hash(body))}", PROBABLE.format(body=body), "sure")
    model = models.build_any(name, (2, 2), 3, seed=0)
    model.fit(*drawn())
    with pytest.raises(ModelError, match=f"model '{name}'.* {fault}|model '{name}': {fault}"):
        model.probabilities(drawn()[0])


def test_failed_fit_raises_with_the_model_name(own):
    text = """
    class Odd:
        def fit(self, x, y): raise ValueError("too few")
        def predict(self, x): return x
    def odd(shape, classes): return Odd()
    """
    name = own("unfit", text, "odd")
    with pytest.raises(ModelError, match=rf"'{name}'.*too few"):
        fitted(name, *drawn())


@pytest.mark.parametrize("method", ["felo", "fedtype"])
def test_method_that_needs_gradients_raises_before_the_run(method, own):
    with pytest.raises(SettingsError, match=rf"without gradients, .* sk-svm, .*cofed.*{method}"):
        resolve({"method": method, "models.pool": ["mlp", "sk-svm"]})
    name = own("nearest3", NEAREST_MEAN, "nearest_mean")
    with pytest.raises(ModelError, match=f"'{name}'"):
        check(resolve({"method": method, "models.pool": ["mlp", name]}))
    with pytest.raises(ModelError, match="'sk-svm'"):
        models.build("sk-svm", (4,), 2, seed=0)
    check(resolve({"method": "local", "models.pool": ["mlp", "sk-svm", name]}))
