"""Selective knowledge fusion against slow references for Section 3.3 of FedGEMS."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import softmax

from fedhet.algorithms.distillation import (
    MIN_ENTROPY,
    Targets,
    fuse,
    fuse_all,
    reliability,
    selective_loss,
)

CLASSES = 5


def reference_entropy(row):
    """Eq. 3: the sum over classes; p log p is 0 at p = 0."""
    return -sum(p * math.log(p) for p in softmax(row.astype(np.float64)) if p > 0)


def reference_alpha(logits, labels):
    """Compute Eq. 4 in a loop over samples and clients, with numbers that do not overflow."""
    clients, samples, _ = logits.shape
    alpha = np.zeros((clients, samples))
    with localcontext() as context:
        context.prec = 40
        for i in range(samples):
            terms = {}
            for j in range(clients):
                if logits[j, i].argmax() == labels[i]:
                    h = max(reference_entropy(logits[j, i]), MIN_ENTROPY)
                    terms[j] = (Decimal(1) / Decimal(h)).exp()
            for j, term in terms.items():
                alpha[j, i] = float(term / sum(terms.values()))
    return alpha


def draw(seed, clients=4, samples=12, scale=3.0):
    rng = np.random.default_rng(seed)
    logits = (scale * rng.normal(size=(clients, samples, CLASSES))).astype(np.float32)
    return logits, rng.integers(0, CLASSES, samples)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([0.1, 1.0, 3.0, 10.0]))
def test_weights_equal_equation_4(seed, clients, scale):
    logits, labels = draw(seed, clients, scale=scale)
    alpha = reliability(torch.tensor(logits), torch.tensor(labels)).numpy()
    np.testing.assert_allclose(alpha, reference_alpha(logits, labels), rtol=1e-3, atol=1e-6)
    right = logits.argmax(2) == labels
    assert (alpha[~right] == 0).all()
    np.testing.assert_allclose(alpha.sum(0), right.any(0).astype(float), atol=1e-5)


def one_sample(*rows):
    return torch.tensor([[row] for row in rows]), torch.tensor([1])


def test_no_reliable_client_gives_no_weights_and_no_target():
    logits, labels = one_sample([3.0, 0, 0], [0.0, 0, 1])
    assert reliability(logits, labels).tolist() == [[0], [0]]
    assert fuse(logits, labels).known.tolist() == [False]


def test_one_reliable_client_is_the_only_teacher():
    logits, labels = one_sample([3.0, 0, 0], [0.5, 2.0, 0], [0.0, 0, 9])
    assert reliability(logits, labels).flatten().tolist() == [0, 1, 0]
    torch.testing.assert_close(fuse(logits, labels).logits, torch.tensor([[0.5, 2.0, 0]]))


@pytest.mark.parametrize("sure", [30.0, 1e4, 1e30])
def test_weights_are_finite_at_zero_entropy(sure):
    """1/H is unbounded.

    Clients below the floor count alike, and other clients not at all.
    """
    logits, labels = one_sample([0.0, sure, 0], [0.0, 2 * sure, 0], [0.0, 1.0, 0])
    alpha = reliability(logits, labels)
    torch.testing.assert_close(alpha.flatten(), torch.tensor([0.5, 0.5, 0.0]))
    assert fuse(logits, labels).logits.isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_target_is_the_weighted_sum_of_equation_5(seed):
    logits, labels = draw(seed)
    lesson = fuse(torch.tensor(logits), torch.tensor(labels))
    expected = np.einsum("kn,knc->nc", reference_alpha(logits, labels), logits)
    np.testing.assert_allclose(lesson.logits, expected, rtol=1e-3, atol=1e-4)
    assert lesson.known.tolist() == (logits.argmax(2) == labels).any(0).tolist()


def test_all_clients_count_without_selection():
    logits, _ = draw(0)
    lesson = fuse_all(torch.tensor(logits))
    np.testing.assert_allclose(lesson.logits, logits.mean(0), rtol=1e-5, atol=1e-6)
    assert lesson.known.all()


@pytest.mark.parametrize("fused", [lambda k, y: fuse(k, y), lambda k, y: fuse_all(k)])
def test_largest_logits_give_finite_targets(fused):
    """A client's finite reply must not end a run."""
    labels = torch.tensor([1, 1])
    most = torch.finfo(torch.float32).max
    sure = [[[-most, most, 0.0], [0.0, most, 0.0]], [[0.0, 1.0, 0.0], [0.0, most, 0.0]]]
    for said in (torch.tensor(sure), torch.tensor(sure)[:1]):
        lesson = fused(said, labels)
        own = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = selective_loss(own, labels, lesson.logits, lesson.known, 0.75)
        loss.backward()
        assert loss.isfinite()
        torch.testing.assert_close(loss.detach(), torch.nn.functional.cross_entropy(own, labels))
        assert own.grad.isfinite().all()


def test_empty_request_gives_no_target():
    lesson = fuse(torch.zeros(3, 0, CLASSES), torch.zeros(0, dtype=torch.long))
    assert lesson.logits.shape == (0, CLASSES)


def test_targets_keep_the_selected_rows():
    lesson = Targets.none(4, 2, torch.device("cpu"))
    lesson.keep(torch.tensor([2, 0]), torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([True, False]))
    assert lesson.known.tolist() == [False, False, True, False]
    assert lesson.logits.tolist() == [[0, 0], [0, 0], [1, 2], [0, 0]]


def test_copied_target_is_independent():
    lesson = Targets.none(2, 2, torch.device("cpu"))
    every = torch.tensor([0, 1]), torch.ones(2, 2), torch.tensor([True, True])
    lesson.copy().keep(*every)
    assert not lesson.known.any()
    assert not lesson.logits.any()


def reference_loss(logits, labels, teacher, taught, epsilon):
    """Eq. 1, 2, 5 and 6, sample by sample."""
    losses = []
    for own, y, other, is_taught in zip(logits, labels, teacher, taught, strict=True):
        q, p = softmax(own.astype(np.float64)), softmax(other.astype(np.float64))
        ce = -math.log(q[y])
        kl = sum(p[c] * math.log(p[c] / q[c]) for c in range(len(p)))
        losses.append(epsilon * ce + (1 - epsilon) * kl if is_taught else ce)
    return np.mean(losses)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.75, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_losses(seed, epsilon):
    (own, teacher), labels = draw(seed, 2)
    taught = np.random.default_rng(seed).random(len(labels)) < 0.5
    loss = selective_loss(*map(torch.tensor, (own, labels, teacher, taught)), epsilon)
    assert loss.item() == pytest.approx(
        reference_loss(own, labels, teacher, taught, epsilon), rel=1e-4
    )


def test_no_gradient_flows_to_the_teacher():
    own, teacher = torch.randn(2, 6, CLASSES, generator=torch.Generator().manual_seed(0))
    own, teacher = own.requires_grad_(), teacher.requires_grad_()
    labels, taught = torch.arange(6) % CLASSES, torch.tensor([True, True, True] + [False] * 3)
    selective_loss(own, labels, teacher, taught, 0.0).backward()
    assert teacher.grad is None
    p, q = teacher.detach().softmax(1), own.detach().softmax(1)
    one_hot = torch.nn.functional.one_hot(labels, CLASSES).float()
    expected = torch.where(taught.unsqueeze(1), q - p, q - one_hot) / 6
    torch.testing.assert_close(own.grad, expected)
