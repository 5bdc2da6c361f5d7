"""UM-pFSSL's Eqs. 9 to 14 against numpy, and the scope of Monte Carlo dropout."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedhet import models
from fedhet.algorithms.uncertainty import (
    MIN_PSEUDO,
    aggregation_weights,
    certainty,
    dropping,
    entropy,
    has_dropout,
    most_certain,
    predictive,
    pseudo_label_loss,
    relation,
    semi_supervised_loss,
    split_at_dropout,
)
from fedhet.base.seeding import seeded
from fedhet.models import HetModel

DROPPERS = ["cnn2-dropout", "cnn3-dropout", "resnet9"]


def distributions(seed, *shape, sharp=3.0):
    logits = sharp * np.random.default_rng(seed).normal(size=shape)
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return (exp / exp.sum(-1, keepdims=True)).astype(np.float32)


def reference_entropy(row):
    """Eq. 10, class by class."""
    return -sum(float(p) * math.log(float(p)) for p in row if p > 0)


@pytest.fixture
def dropper():
    """A model with dropout and batch norm.

    Its statistics differ from those of a batch, and its logits are large.
    """
    model = models.build("cnn2-dropout", (1, 8, 8), 10, seed=0)
    with torch.no_grad():
        model.classifier.weight.mul_(150)
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.fill_(0.3)
                part.running_var.fill_(2.0)
    return model


def images(count=12, shape=(1, 8, 8), seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(2, 12))
def test_entropy_equals_equation_10(seed, samples, classes):
    rows = distributions(seed, samples, classes)
    expected = [reference_entropy(row) for row in rows]
    np.testing.assert_allclose(entropy(torch.tensor(rows)), expected, rtol=1e-4, atol=1e-5)


def test_entropy_is_between_0_and_that_of_the_uniform():
    sure = torch.eye(4)
    assert entropy(sure).tolist() == [0, 0, 0, 0]
    assert entropy(torch.full((1, 4), 0.25)).item() == pytest.approx(math.log(4), rel=1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 15))
def test_each_sample_uses_its_most_certain_helper(seed, helpers, samples):
    predictions = distributions(seed, helpers, samples, 5)
    labels, chosen = most_certain(torch.tensor(predictions))
    for i in range(samples):
        least = min(range(helpers), key=lambda j: reference_entropy(predictions[j, i]))
        assert chosen[i] == least
        np.testing.assert_array_equal(labels[i], predictions[least, i])


def test_helper_that_gives_nan_is_the_least_certain():
    predictions = torch.full((2, 3, 4), 0.25)
    predictions[0] = math.nan
    labels, chosen = most_certain(predictions)
    assert chosen.tolist() == [1, 1, 1]
    assert labels.isfinite().all()
    assert certainty(entropy(predictions[0]), 4) == 0


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(2, 12))
def test_certainty_is_maximum_entropy_minus_entropy(seed, samples, classes):
    rows = distributions(seed, samples, classes)
    mean = np.mean([reference_entropy(row) for row in rows])
    found = certainty(entropy(torch.tensor(rows)), classes)
    assert found == pytest.approx(1 - mean / math.log(classes), abs=1e-5)
    assert 0 <= found <= 1


def test_certainty_of_an_empty_batch_is_zero():
    assert certainty(torch.zeros(0), 10) == 0


def test_certainty_is_never_negative():
    assert certainty(entropy(torch.full((1000, 10), 0.1)) + 1e-6, 10) == 0


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_relation_equals_equation_13(sure, accuracy, labeled):
    both = relation(sure, accuracy, labeled, "en+ta")
    assert both == pytest.approx((1 - labeled) * sure + labeled * accuracy)
    assert relation(sure, accuracy, labeled, "en") == sure
    assert relation(sure, accuracy, labeled, "ta") == accuracy


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_helper_weights_follow_relations(relations):
    weights = aggregation_weights(torch.tensor(relations, dtype=torch.float64))
    assert weights.sum().item() == pytest.approx(1)
    total = sum(relations)
    for weight, value in zip(weights.tolist(), relations, strict=True):
        expected = value / total if total > 0 else 1 / len(relations)
        assert weight == pytest.approx(expected, abs=1e-9)


def test_mean_over_passes_equals_a_loop(dropper):
    """Many masks in one batch and many calls with one mask have the same distribution (Eq. 9)."""
    x, passes = images(4), 3000
    with seeded(0, "batched"):
        batched = predictive(dropper, x, passes, rows=5000)
    with seeded(0, "looped"), dropping(dropper), torch.no_grad():
        looped = sum(dropper(x).softmax(1) for _ in range(passes)) / passes
    np.testing.assert_allclose(batched, looped, atol=0.03)
    with torch.no_grad():
        plain = dropper.eval()(x).softmax(1)
    assert (batched - plain).abs().max() > 0.05  # dropout was on


def test_every_pass_and_sample_has_its_own_mask():
    class Masks(nn.Module):
        def forward(self, x):
            seen.append(x.clone())
            return x[:, :2]

    seen = []
    model = nn.Sequential(nn.Dropout(0.5), Masks())
    predictive(model, torch.ones(6, 40), 5)
    (masks,) = seen
    assert masks.shape == (30, 40)
    assert len({tuple(row) for row in masks.tolist()}) == 30


def test_batch_rows_are_limited():
    class Widest(nn.Module):
        def forward(self, x):
            rows.append(len(x))
            return x

    rows = []
    predictive(nn.Sequential(nn.Dropout(0.5), Widest()), torch.ones(50, 3), 8, rows=64)
    assert max(rows) == 64
    assert sum(rows) == 50 * 8


def test_layers_before_dropout_run_once():
    class Count(nn.Module):
        def forward(self, x):
            rows.append(len(x))
            return x

    rows = []
    model = HetModel(nn.Sequential(Count(), nn.Dropout(0.5)), nn.Linear(4, 3), 4)
    assert predictive(model, torch.ones(10, 4), 8).shape == (10, 3)
    assert rows == [10]


@pytest.mark.parametrize("name", DROPPERS)
def test_split_model_equals_the_model(name):
    model = models.build(name, (3, 16, 16), 10, seed=0).eval()
    steady, noisy = split_at_dropout(model)
    assert not has_dropout(steady)
    x = images(3, (3, 16, 16))
    torch.testing.assert_close(noisy(steady(x)), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", DROPPERS)
def test_only_dropout_is_in_training_mode(name):
    model = models.build(name, (1, 8, 8), 10, seed=0)
    model.train()
    with dropping(model):
        for part in model.modules():
            drops = isinstance(part, nn.Dropout)
            assert part.training == drops
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_prediction_does_not_change_the_model(dropper, training):
    dropper.train(training)
    before = {name: tensor.clone() for name, tensor in dropper.state_dict().items()}
    predictive(dropper, images(), 8)
    for name, tensor in dropper.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(part.training == training for part in dropper.modules())


def test_batch_norm_uses_running_statistics(dropper):
    """A sample's prediction does not depend on other samples in the batch."""
    quiet = models.build("cnn2-dropout", (1, 8, 8), 10, seed=0)
    quiet.load_state_dict(dropper.state_dict())
    for part in quiet.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    x = images(8)
    alone = torch.cat([predictive(quiet, row[None], 3) for row in x])
    together = predictive(quiet, x, 3)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together, quiet.eval()(x).softmax(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cnn2", "mlp", "resnet10"])
def test_models_without_dropout_are_recognized(name):
    assert not has_dropout(models.build(name, (1, 8, 8), 10, seed=0))
    assert not has_dropout(nn.Dropout(0.0))


def test_same_seed_gives_the_same_prediction(dropper):
    found = []
    for _ in range(2):
        with seeded(3, "masks"):
            found.append(predictive(dropper, images(), 8))
    assert torch.equal(*found)


DIRECTIONS = {
    "forward": lambda own, pseudo: pseudo * (math.log(pseudo) - math.log(own)),
    "reverse": lambda own, pseudo: own * (math.log(own) - math.log(pseudo)),
}


@pytest.mark.parametrize("divergence", DIRECTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_joint_loss_equals_equations_1_4_and_5(seed, divergence):
    rng = np.random.default_rng(seed)
    logits, pseudo = 3 * rng.normal(size=(20, 5)), distributions(seed, 20, 5)
    labels, labeled = rng.integers(0, 5, 20), rng.random(20) < 0.4
    own = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    ce = [-math.log(own[i, labels[i]]) for i in range(20) if labeled[i]]
    kl = [
        sum(DIRECTIONS[divergence](own[i, c], pseudo[i, c]) for c in range(5))
        for i in range(20)
        if not labeled[i]
    ]
    mu = len(ce) / 20
    expected = mu * np.mean(ce) + (1 - mu) * np.mean(kl)
    given = (torch.tensor(values) for values in (logits, labels, pseudo, labeled))
    found = semi_supervised_loss(*given, divergence)
    assert found.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("divergence", DIRECTIONS)
def test_no_gradient_reaches_the_pseudo_label(divergence):
    generator = torch.Generator().manual_seed(0)
    logits, helper = (torch.randn(3, 4, requires_grad=True, generator=generator) for _ in range(2))
    pseudo_label_loss(logits, helper.softmax(1), divergence).sum().backward()
    assert (logits.grad.abs().sum(1) > 0).all()
    assert helper.grad is None


def test_class_excluded_by_a_pseudo_label_has_a_finite_loss():
    logits, pseudo = torch.tensor([[0.0, 20.0]]), torch.tensor([[1.0, 0.0]])
    reverse = pseudo_label_loss(logits, pseudo, "reverse")
    assert reverse.item() == pytest.approx(-math.log(MIN_PSEUDO), rel=0.01)
    assert pseudo_label_loss(logits, pseudo, "forward").item() == pytest.approx(20, rel=0.01)
