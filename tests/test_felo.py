"""Felo against an independent numpy reference that follows Section 3.1."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import softmax

from fedhet import models
from fedhet.algorithms.classwise import (
    ClassSums,
    Teacher,
    Terms,
    average,
    class_feature_loss,
    class_logit_loss,
    felo_loss,
)

CPU = torch.device("cpu")


def reference_means(features, logits, labels):
    """Section 3.1.1: compute the mean of each class with a loop over samples."""
    sums = {}
    for f, p, y in zip(features, logits, labels, strict=True):
        count, total_f, total_p = sums.get(int(y), (0, 0.0, 0.0))
        sums[int(y)] = (count + 1, total_f + f.astype(np.float64), total_p + p.astype(np.float64))
    return {y: (f / count, p / count, count) for y, (count, f, p) in sums.items()}


def reference_average(clients, by_samples):
    """Section 3.1.2: compute the mean of each class with a loop over the clients that have it."""
    result = {}
    for y in sorted({y for client in clients for y in client}):
        holders = [client[y] for client in clients if y in client]
        weights = [count if by_samples else 1 for _, _, count in holders]
        feature = sum(w * f for w, (f, _, _) in zip(weights, holders, strict=True)) / sum(weights)
        logit = sum(w * p for w, (_, p, _) in zip(weights, holders, strict=True)) / sum(weights)
        result[y] = (feature, logit)
    return result


def reference_losses(features, logits, labels, entries, alpha):
    """Eq. 1, sample by sample: l_mse, l_kl and the mean of all with l_ce.

    Their weights, and the scales of features, are in the transcription of test_felo_algorithm.py.
    """
    ce, mse, kl = [], [], []
    for f, p, y in zip(features, logits, labels, strict=True):
        q = softmax(p.astype(np.float64))
        ce.append(-np.log(q[y]))
        if int(y) not in entries:
            mse.append(0.0)
            kl.append(0.0)
            continue
        entry, entry_logit = entries[int(y)]
        target = softmax(entry_logit.astype(np.float64))
        mse.append(np.mean((f.astype(np.float64) - entry) ** 2))
        kl.append(np.sum(target * (np.log(target) - np.log(q))))
    total = np.mean([c + alpha * (m + k) for c, m, k in zip(ce, mse, kl, strict=True)])
    return np.array(mse), np.array(kl), total


def draw(seed, samples=40, classes=5, width=7, holds=None):
    rng = np.random.default_rng(seed)
    labels = rng.choice(holds or range(classes), size=samples)
    features = rng.normal(size=(samples, width)).astype(np.float32)
    logits = (3 * rng.normal(size=(samples, classes))).astype(np.float32)
    return features, logits, labels


def gathered(features, logits, labels, classes=5, batch=9):
    sums = ClassSums(classes, features.shape[1], CPU)
    for start in range(0, len(labels), batch):
        part = slice(start, start + batch)
        sums.add(
            torch.tensor(features[part]), torch.tensor(logits[part]), torch.tensor(labels[part])
        )
    return sums.means()


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.integers(1, 60), st.sets(st.integers(0, 4), min_size=1))
def test_class_means(seed, samples, holds):
    drawn = draw(seed, samples, holds=sorted(holds))
    expected = reference_means(*drawn)
    means = gathered(*drawn)
    assert means.classes.tolist() == sorted(expected)
    for row, y in enumerate(means.classes):
        feature, logit, count = expected[int(y)]
        np.testing.assert_allclose(means.features[row], feature, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(means.logits[row], logit, rtol=1e-4, atol=1e-5)
        assert means.counts[row] == count


@pytest.mark.parametrize("by_samples", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_average_over_clients(seed, by_samples):
    rng = np.random.default_rng(seed)
    drawn = [
        draw(
            100 * seed + k, 20, holds=sorted(rng.choice(5, size=rng.integers(1, 5), replace=False))
        )
        for k in range(4)
    ]
    expected = reference_average([reference_means(*d) for d in drawn], by_samples)
    result = average([gathered(*d) for d in drawn], by_samples=by_samples)
    assert result.classes.tolist() == sorted(expected)
    for row, y in enumerate(result.classes):
        np.testing.assert_allclose(result.features[row], expected[int(y)][0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.logits[row], expected[int(y)][1], rtol=1e-4, atol=1e-5)


def test_average_of_no_reply_has_no_class():
    assert average([], by_samples=False).classes.size == 0


def teacher_of(entries, classes=5, width=7):
    present = np.array(sorted(entries), dtype=np.int64)
    features = np.array([entries[y][0] for y in sorted(entries)], np.float32).reshape(-1, width)
    logits = np.array([entries[y][1] for y in sorted(entries)], np.float32).reshape(-1, classes)
    return Teacher.from_tensors(present, features, logits, classes, CPU)


@pytest.mark.parametrize("known", [(0, 1, 2, 3, 4), (1, 3), ()])
@pytest.mark.parametrize("seed", range(10))
def test_losses_of_equation_1(seed, known):
    features, logits, labels = draw(seed)
    own = reference_means(*draw(seed + 1000, 200))
    entries = {y: own[y][:2] for y in known}
    mse, kl, total = reference_losses(features, logits, labels, entries, alpha=0.7)
    f, p, y = torch.tensor(features), torch.tensor(logits), torch.tensor(labels)
    teacher = teacher_of(entries)
    np.testing.assert_allclose(class_feature_loss(f, y, teacher), mse, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(class_logit_loss(p, y, teacher), kl, rtol=1e-3, atol=1e-4)
    loss = felo_loss(f, p, y, teacher, Terms(alpha=0.7))
    assert loss.item() == pytest.approx(total, rel=1e-4)
    assert Terms() == Terms(alpha=1, feature=1, logit=1, norm="none")


@pytest.mark.parametrize("norm", ["none", "rms", "unit"])
def test_zero_features_have_finite_loss_and_gradient(norm):
    zeros = {y: (np.zeros(7), np.zeros(5)) for y in range(5)}
    x = torch.zeros(5, 7, requires_grad=True)
    loss = class_feature_loss(x, torch.arange(5), teacher_of(zeros), norm)
    loss.sum().backward()
    assert loss.abs().sum() == x.grad.abs().sum() == 0
    own = reference_means(*draw(1, 200))
    entries = teacher_of({y: own[y][:2] for y in own})
    class_feature_loss(x, torch.arange(5), entries, norm).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().sum() > 0


def test_loss_without_a_teacher_is_cross_entropy():
    features, logits, labels = draw(3)
    _, _, ce = reference_losses(features, logits, labels, {}, alpha=1.0)
    loss = felo_loss(
        torch.tensor(features), torch.tensor(logits), torch.tensor(labels), None, Terms()
    )
    assert loss.item() == pytest.approx(ce, rel=1e-5)


@pytest.fixture
def student():
    model = models.build("mlp", (6,), 5, seed=0, feature_dim=7)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    return model, x, torch.arange(12) % 5


def gradients(model):
    def size(module):
        return sum(float(p.grad.abs().sum()) for p in module.parameters() if p.grad is not None)

    return size(model.extractor), size(model.classifier)


@pytest.fixture
def teacher():
    own = reference_means(*draw(1, 200))
    return teacher_of({y: own[y][:2] for y in own})


@pytest.mark.parametrize("norm", ["none", "rms", "unit"])
def test_feature_loss_trains_only_the_extractor(student, teacher, norm):
    model, x, y = student
    features, _ = model.features_and_logits(x)
    class_feature_loss(features, y, teacher, norm).mean().backward()
    extractor, classifier = gradients(model)
    assert extractor > 0
    assert classifier == 0


def test_gathering_means_leaves_no_graph(student):
    model, x, y = student
    sums = ClassSums(5, 7, CPU)
    sums.add(*model.features_and_logits(x), y)
    assert not sums.features.requires_grad
    assert not sums.logits.requires_grad


def test_means_of_bfloat16_batches_are_float32():
    features, logits, labels = draw(5)
    sums = ClassSums(5, 7, CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums.add(torch.tensor(features), torch.tensor(logits), torch.tensor(labels))
    expected = reference_means(features, logits, labels)
    means = sums.means()
    np.testing.assert_allclose(means.features[0], expected[0][0], rtol=1e-4, atol=1e-5)
