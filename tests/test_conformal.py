"""FedType's conformal sets and losses against references that follow the paper.

The references loop over samples and labels in plain Python, with exact fractions where the paper
counts or compares.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import betabinom
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from fedhet.algorithms.conformal import (
    Calibration,
    Raps,
    calibrate,
    conformal_quantile,
    consensus,
    dynamic_penalty,
    fit_temperature,
    imitation_loss,
    mass_above_and_rank,
    prediction_sets,
    raps_scores,
    top_sets,
    unpenalized_ranks,
)
from fedhet.algorithms.distillation import distillation_loss

FORMS = ["g1", "g2", "g3", "g4"]
DRAWS = 200
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


# References


def reference_rho(row, y):
    """Return the mass of the labels strictly more likely than y (Section 3.2.3)."""
    return sum(p for p in row if p > row[y])


def reference_rank(row, y):
    """Section 3.2.3: o(y) = |{y' : pi(y') >= pi(y)}|."""
    return len([p for p in row if p >= row[y]])


def reference_score(row, y, u, penalty, k_reg):
    """The left side of Eq. 6."""
    return row[y] * u + reference_rho(row, y) + penalty * max(reference_rank(row, y) - k_reg, 0)


def reference_softmax(row, temperature=1.0):
    scaled = [z / temperature for z in row]
    top = max(scaled)
    raised = [math.exp(z - top) for z in scaled]
    return [value / sum(raised) for value in raised]


def reference_quantile(scores, theta):
    """Return the smallest score that at least (n + 1)(1 - theta) of n scores reach."""
    need = (len(scores) + 1) * (1 - theta)
    for score in sorted(scores):
        if sum(s <= score for s in scores) >= need:
            return score
    return math.inf


def reference_temperature(logits, labels):
    """Appendix F with autograd and torch's SGD on the mean negative log-likelihood."""
    temperature = nn.Parameter(torch.tensor(1.3))
    optimizer = torch.optim.SGD([temperature], lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits / temperature, labels).backward()
        optimizer.step()
    return temperature.item()


def reference_eta(s, l):  # noqa: E741
    """Eq. 8 on Python sets."""
    return Fraction(len(s & l), len(s | l)) if len(s) >= len(l) else Fraction(len(s & l), len(s))


def members(mask):
    """Return the labels in each row of a mask [N, C]."""
    return [{y for y, inside in enumerate(row) if inside} for row in mask.tolist()]


# Draws


@st.composite
def exact_rows(draw, least=1, most=50):
    """Draw up to 4 rows of fractions (eighths, sixteenths, ...) that sum to 1, with many ties."""
    classes = draw(st.integers(least, most))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        counts = draw(st.lists(st.integers(0, 3), min_size=classes, max_size=classes))
        total = 8
        while total < sum(counts):
            total *= 2
        counts[draw(st.integers(0, classes - 1))] += total - sum(counts)
        rows.append([Fraction(count, total) for count in counts])
    return rows


def as_tensor(rows):
    return torch.tensor([[float(p) for p in row] for row in rows])


def some_logits(seed, samples, classes, scale=2.0):
    """Return logits [N, C] and labels [N] that agree more often than by chance."""
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(samples, classes))
    labels = (logits + rng.gumbel(size=logits.shape) * scale).argmax(1)
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)


def some_sets(rng, samples, classes):
    """Return sets [N, C] of every size from 1 to C."""
    sizes = rng.integers(1, classes + 1, size=(samples, 1))
    return torch.tensor(rng.random((samples, classes)).argsort(1).argsort(1) < sizes)


# pi, rho, o (Eq. 6)


@settings(max_examples=150)
@given(exact_rows())
def test_mass_above_and_rank_with_ties_are_exact(rows):
    rho, rank = mass_above_and_rank(as_tensor(rows))
    for i, row in enumerate(rows):
        for y in range(len(row)):
            assert Fraction(rho[i, y].item()) == reference_rho(row, y)
            assert rank[i, y].item() == reference_rank(row, y)


@pytest.mark.parametrize("classes", [1, 2, 3, 10, 50, 300])
def test_mass_above_and_rank_of_random_probabilities(classes):
    rng = np.random.default_rng(classes)
    rows = rng.dirichlet(np.full(classes, 0.5), size=20).astype(np.float32)
    rho, rank = mass_above_and_rank(torch.tensor(rows))
    assert rho.shape == rank.shape == rows.shape
    for i, row in enumerate(rows.astype(np.float64).tolist()):
        for y in range(classes):
            assert rho[i, y].item() == pytest.approx(reference_rho(row, y), abs=1e-6)
            assert rank[i, y].item() == reference_rank(row, y)


def test_mass_above_and_rank_of_an_empty_batch():
    rho, rank = mass_above_and_rank(torch.empty(0, 7))
    assert rho.shape == rank.shape == (0, 7)


def test_mass_above_and_rank_do_not_change_probabilities():
    probabilities = torch.rand(5, 8).softmax(1)
    before = probabilities.clone()
    mass_above_and_rank(probabilities)
    assert torch.equal(probabilities, before)


# Scores


@settings(max_examples=80)
@given(
    exact_rows(),
    st.integers(0, 8).map(lambda k: Fraction(k, 8)),
    st.sampled_from([Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(2)]),
    st.integers(0, 12),
    st.booleans(),
)
def test_raps_scores_are_exact(rows, u, penalty, k_reg, on_tensor):
    given_penalty = torch.tensor(float(penalty)) if on_tensor else float(penalty)
    factors = [u if i % 2 == 0 else 1 - u for i in range(len(rows))]
    scores = raps_scores(
        as_tensor(rows), torch.tensor([float(f) for f in factors]), given_penalty, k_reg
    )
    for i, row in enumerate(rows):
        for y in range(len(row)):
            expected = reference_score(row, y, factors[i], penalty, k_reg)
            assert Fraction(scores[i, y].item()) == expected


# Sets (Eq. 6)


@settings(max_examples=150)
@given(
    st.integers(0, 10_000),
    st.integers(2, 30),
    st.floats(0.5, 3),
    st.floats(-0.1, 3),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 8),
)
def test_prediction_sets_match_a_loop_over_samples(seed, classes, temperature, tau, penalty, k_reg):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-4, 5, size=(12, classes)).astype(np.float32)
    u = rng.random(12).astype(np.float32)
    calibration = Calibration(torch.tensor(temperature), torch.tensor(tau, dtype=torch.float32))
    sets = prediction_sets(
        torch.tensor(logits), calibration, torch.tensor(u), penalty=penalty, k_reg=k_reg
    )
    assert sets.dtype == torch.bool
    assert sets.shape == logits.shape
    for row, factor, found in zip(logits.tolist(), u.tolist(), members(sets), strict=True):
        pi = reference_softmax(row, temperature)
        # Rounded, so that labels of one logit are exactly as likely as each other.
        scores = [round(reference_score(pi, y, factor, penalty, k_reg), 12) for y in range(classes)]
        if min(abs(score - tau) for score in scores) < 1e-5:
            continue  # float32 may decide either way
        expected = {y for y, score in enumerate(scores) if score <= tau}
        if expected:
            assert found == expected
        else:
            assert len(found) == 1
            assert row[found.pop()] == max(row)


def test_empty_set_becomes_the_most_likely_label():
    logits, _ = some_logits(0, 40, 6)
    nothing = Calibration(torch.tensor(1.0), torch.tensor(-1.0))
    sets = prediction_sets(logits, nothing, torch.ones(40), penalty=0.5, k_reg=5)
    assert members(sets) == [{y} for y in logits.argmax(1).tolist()]


@pytest.mark.parametrize("classes", [1, 2, 10, 100])
def test_infinite_threshold_includes_every_class(classes):
    logits, _ = some_logits(1, 30, classes, scale=30.0)
    everything = Calibration(torch.tensor(1.0), torch.tensor(torch.inf))
    assert prediction_sets(logits, everything, torch.rand(30), penalty=2.0, k_reg=0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sets_of_half_precision_logits_equal_those_in_float32(dtype):
    logits = some_logits(3, 60, 10)[0].to(dtype)
    calibration, u = Calibration(torch.tensor(1.4), torch.tensor(0.9)), torch.rand(60)
    sets = prediction_sets(logits, calibration, u, penalty=0.5, k_reg=5)
    assert torch.equal(sets, prediction_sets(logits.float(), calibration, u, penalty=0.5, k_reg=5))


def test_sets_carry_no_gradient():
    logits = some_logits(4, 8, 5)[0].requires_grad_()
    calibration = Calibration(torch.tensor(1.0), torch.tensor(0.9))
    assert not prediction_sets(
        logits, calibration, torch.rand(8), penalty=0.5, k_reg=5
    ).requires_grad
    assert not top_sets(logits, 2).requires_grad


# The ablation FedType_TopK


@pytest.mark.parametrize("size", [1, 2, 5, 9, 10, 11, 1000])
def test_top_sets(size):
    logits, _ = some_logits(size, 50, 10)
    expected = [set(np.argsort(-row)[:size].tolist()) for row in logits.numpy()]
    sets = top_sets(logits, size)
    assert sets.dtype == torch.bool
    assert members(sets) == expected


@pytest.mark.parametrize("size", [1, 3, 6])
def test_top_sets_with_ties_have_the_requested_size(size):
    assert top_sets(torch.zeros(4, 6), size).sum(1).tolist() == [size] * 4


# Consensus (Eq. 8)


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.integers(1, 20))
def test_consensus_matches_python_sets(seed, classes):
    rng = np.random.default_rng(seed)
    proxy, private = some_sets(rng, 40, classes), some_sets(rng, 40, classes)
    eta = consensus(proxy, private)
    for found, s, l in zip(eta, members(proxy), members(private), strict=True):  # noqa: E741
        assert found.item() == pytest.approx(float(reference_eta(s, l)), rel=1e-6)
    assert ((eta >= 0) & (eta <= 1)).all()


# The dynamic penalty (Eq. 7, Section 4.2.4)


@pytest.mark.parametrize("lambda_", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("delta", [-1.0, -0.7, -0.25, -0.01])
def test_penalties_if_accuracy_falls(delta, lambda_):
    assert dynamic_penalty(delta, lambda_, "g1") == pytest.approx(lambda_ * delta - delta + lambda_)
    assert dynamic_penalty(delta, lambda_, "g2") == lambda_
    assert dynamic_penalty(delta, lambda_, "g3") == pytest.approx(lambda_ * delta * delta + lambda_)
    assert dynamic_penalty(delta, lambda_, "g4") == pytest.approx(
        -lambda_ * delta * delta - delta + lambda_
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("delta", [0.0, -0.0, 1e-9, 0.3, 1.0])
def test_penalty_is_lambda_if_accuracy_does_not_fall(delta, form):
    assert dynamic_penalty(delta, 0.5, form) == 0.5


@pytest.mark.parametrize("form", FORMS)
def test_penalty_is_at_least_lambda_and_grows_as_accuracy_falls(form):
    values = [dynamic_penalty(delta, 0.5, form) for delta in np.linspace(-1, 0, 101).tolist()]
    assert all(value >= 0.5 for value in values)
    if form != "g2":
        assert all(left > right for left, right in itertools.pairwise(values))


@pytest.mark.parametrize("form", ["g1", "g3", "g4"])
def test_penalty_shrinks_sets(form):
    logits, labels = some_logits(7, 500, 20, scale=0.5)
    u = torch.rand(500, generator=torch.Generator().manual_seed(7))
    calibration = calibrate(logits, labels, u, theta=0.1, raps=Raps())
    sizes = [
        prediction_sets(
            logits, calibration, u, penalty=dynamic_penalty(delta, 0.5, form), k_reg=5
        ).sum()
        for delta in (0.1, -0.2, -0.6, -1.0)
    ]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] >= 500


# The threshold (Appendix B, step 3)


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=60),
    st.sampled_from(["0.01", "0.05", "0.1", "0.2", "0.25", "0.3", "0.5", "0.9"]),
)
def test_conformal_quantile_with_ties_matches_brute_force(scores, theta):
    tau = conformal_quantile(torch.tensor(scores, dtype=torch.float32), float(theta))
    assert tau.shape == ()
    assert tau.item() == reference_quantile(scores, Fraction(theta))


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.9]),
)
def test_plain_quantile_equals_numpy_higher(scores, theta):
    """RAPS' published code takes np.quantile(scores, 1 - theta, method="higher")."""
    tau = conformal_quantile(torch.tensor(scores, dtype=torch.float32), theta, corrected=False)
    assert tau.item() == np.quantile(scores, 1 - theta, method="higher")


@pytest.mark.parametrize("samples", [*range(1, 121), 199, 499, 999, 1999, 9999, 99999])
def test_rounding_errors_do_not_move_the_quantile(samples):
    scores = torch.randperm(samples, generator=torch.Generator().manual_seed(samples)).float()
    for hundredths in range(5, 51):
        position = math.ceil((samples + 1) * (1 - Fraction(hundredths, 100)))
        expected = position - 1 if position <= samples else math.inf
        for theta in (hundredths / 100, 1 - (1 - hundredths / 100)):
            assert conformal_quantile(scores, theta).item() == expected


# Temperature (Appendix F)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 20.0])
@pytest.mark.parametrize(("samples", "classes"), [(1, 2), (1, 10), (5, 10), (9, 3), (300, 100)])
def test_temperature_equals_autograd_with_sgd(samples, classes, scale):
    for seed in range(5):
        logits, labels = some_logits(seed, samples, classes, scale)
        expected = reference_temperature(logits, labels)
        assert fit_temperature(logits, labels).item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-8, 1e3, 1e6, 1e20])
@pytest.mark.parametrize("right", [True, False])
def test_temperature_stays_positive_for_extreme_logits(scale, right):
    logits = scale * torch.tensor([[3.0, 1.0, -2.0], [0.0, 5.0, 1.0], [-1.0, 0.0, 9.0]])
    labels = logits.argmax(1) if right else logits.argmin(1)
    temperature = fit_temperature(logits, labels)
    assert temperature.shape == ()
    assert torch.isfinite(temperature)
    assert temperature > 0


# The whole calibration (Eq. 5)


@pytest.mark.parametrize("samples", [1, 5, 8, 9, 10, 57])
@pytest.mark.parametrize("theta", ["0.1", "0.3"])
def test_calibrate_matches_a_loop_over_samples(samples, theta):
    logits, labels = some_logits(samples, samples, 12)
    u = torch.rand(samples, generator=torch.Generator().manual_seed(samples))
    raps = Raps(penalty=0.25, k_reg=3)
    found = calibrate(logits, labels, u, theta=float(theta), raps=raps)
    temperature = reference_temperature(logits, labels)
    scores = [
        reference_score(reference_softmax(row, temperature), y, factor, 0.25, 3)
        for row, y, factor in zip(logits.tolist(), labels.tolist(), u.tolist(), strict=True)
    ]
    assert found.temperature.item() == pytest.approx(temperature, abs=1e-5)
    assert found.tau.item() == pytest.approx(reference_quantile(scores, Fraction(theta)), abs=1e-5)


# Coverage: P(y in S) >= 1 - theta (Eq. 4)


def synthetic_pool(seed, size):
    """Return calibrated logits [N, C] and labels: each label is drawn from its softmax."""
    rng = np.random.default_rng(seed)
    logits = np.log(rng.dirichlet(np.full(12, 0.4), size=size) + 1e-12)
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)


@pytest.fixture(scope="module")
def digits_pool():
    """Return logits and labels for the half of the digits that were not used for the regression."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    seen, unseen = order[: len(y) // 2], order[len(y) // 2 :]
    model = LogisticRegression(max_iter=300).fit(x[seen] / 16, y[seen])
    logits = model.decision_function(x[unseen] / 16)
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(y[unseen])


def draws(pool, samples, tests, seed):
    """Yield calibration and test data (logits, labels, and u), newly drawn from the pool."""
    logits, labels = pool
    generator = torch.Generator().manual_seed(seed)
    for _ in range(DRAWS):
        order = torch.randperm(len(labels), generator=generator)[: samples + tests]
        u = torch.rand(len(order), generator=generator)
        yield tuple(
            (logits[order[part]], labels[order[part]], u[part])
            for part in (slice(samples), slice(samples, None))
        )


def holds(mask, labels):
    """Return the fraction of rows in which the mask contains the label."""
    return mask.gather(1, labels.unsqueeze(1)).float().mean().item()


def standard_error(samples, tests, theta):
    """Return the exact standard error of the mean coverage, which is beta-binomial."""
    need = math.ceil((samples + 1) * (1 - Fraction(theta)))
    return betabinom(tests, need, samples + 1 - need).std() / tests / math.sqrt(DRAWS)


def exact_coverage(pool, samples, tests, theta, seed, temperature=1.0):
    """Return the coverage of each draw before and after the repair of empty sets, [DRAWS, 2].

    With a given temperature only, the coverage is exactly ceil((n + 1)(1 - theta)) / (n + 1).
    """
    found = []
    for (logits, labels, u), (new, truth, v) in draws(pool, samples, tests, seed):
        scores = raps_scores((logits / temperature).softmax(1), u, 0.5, 5)
        tau = conformal_quantile(scores[torch.arange(samples), labels], float(theta))
        raw = raps_scores((new / temperature).softmax(1), v, 0.5, 5) <= tau
        calibration = Calibration(torch.tensor(temperature), tau)
        sets = prediction_sets(new, calibration, v, penalty=0.5, k_reg=5)
        found.append((holds(raw, truth), holds(sets, truth)))
    return np.array(found)


@pytest.mark.parametrize("theta", ["0.05", "0.3"])
@pytest.mark.parametrize("samples", [9, 100, 101])
@pytest.mark.parametrize("real", [False, True])
def test_coverage_is_exact(digits_pool, samples, theta, real):
    """Test calibrated logits and the logits of a classifier."""
    pool, heat = (digits_pool, 1.3) if real else (synthetic_pool(samples, 20_000), 1.0)
    raw, mended = exact_coverage(pool, samples, 300, theta, seed=1, temperature=heat).T
    need = math.ceil((samples + 1) * (1 - Fraction(theta)))
    expected = need / (samples + 1) if need <= samples else 1.0
    error = standard_error(samples, 300, theta) if need <= samples else 0
    assert abs(raw.mean() - expected) <= 4 * error
    assert mended.mean() >= 1 - float(theta) - 4 * error
    assert (mended >= raw).all()
    if error and not real:  # over draws, what is covered spreads as a beta-binomial does
        assert 0.7 < raw.std() / (error * math.sqrt(DRAWS)) < 1.3


@pytest.mark.parametrize("theta", ["0.05", "0.3"])
@pytest.mark.parametrize("samples", [30, 100])
@pytest.mark.parametrize("factor", [1.0, 3.0, None])
def test_calibrated_sets_contain_the_label(digits_pool, samples, theta, factor):
    """Calibrate as in training, with the temperature.

    The logits are calibrated, overconfident, or real.
    """
    logits, labels = digits_pool if factor is None else synthetic_pool(3, 20_000)
    pool = (logits if factor is None else factor * logits), labels
    found = []
    for (known, y, u), (new, truth, v) in draws(pool, samples, 300, seed=2):
        calibration = calibrate(known, y, u, theta=float(theta), raps=Raps())
        sets = prediction_sets(new, calibration, v, penalty=0.5, k_reg=5)
        found.append(holds(sets, truth))
    error = standard_error(samples, 300, theta)
    assert np.mean(found) >= 1 - float(theta) - 4 * error
    # No draw falls where less than one of a million should, nor more than 5 % below the 1st.
    need = math.ceil((samples + 1) * (1 - Fraction(theta)))
    law = betabinom(300, need, samples + 1 - need)
    covered = np.round(np.array(found) * 300)
    assert covered.min() >= law.ppf(1e-6)
    assert (covered < law.ppf(0.01)).mean() < 0.05


# The losses (Eq. 1, Eq. 3)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 30), st.booleans())
def test_imitation_loss_and_gradient_match_a_loop_over_samples(seed, classes, averaged):
    rng = np.random.default_rng(seed)
    logits = some_logits(seed, 9, classes)[0].requires_grad_()
    sets, eta = some_sets(rng, 9, classes), torch.tensor(rng.random(9), dtype=torch.float32)
    loss = imitation_loss(logits, sets, eta, averaged=averaged)
    loss.backward()
    expected, gradient = 0.0, np.zeros((9, classes))
    for j, (row, inside) in enumerate(zip(logits.tolist(), members(sets), strict=True)):
        pi = reference_softmax(row)
        weight = eta[j].item() / 9 / (len(inside) if averaged else 1)
        expected -= weight * sum(math.log(pi[k]) for k in inside)
        for k in range(classes):
            gradient[j, k] = weight * (len(inside) * pi[k] - (k in inside))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(logits.grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_support_half_precision(dtype):
    rng = np.random.default_rng(0)
    teacher, student = (some_logits(seed, 16, 10)[0].to(dtype) for seed in (0, 1))
    student.requires_grad_()
    sets, eta = some_sets(rng, 16, 10), torch.rand(16)
    exact = student.detach().float()
    for loss, expected in (
        (distillation_loss(teacher, student), distillation_loss(teacher.float(), exact)),
        (imitation_loss(student, sets, eta), imitation_loss(exact, sets, eta)),
    ):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.detach(), expected)
        (gradient,) = torch.autograd.grad(loss, student)
        assert gradient.dtype == dtype
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_losses_are_finite_for_saturated_logits(dtype):
    logits = torch.tensor([[300.0, -300.0, 0.0], [0.0, 0.0, 500.0]], dtype=dtype)
    sets = torch.tensor([[False, True, False], [True, True, True]])
    assert torch.isfinite(imitation_loss(logits, sets, torch.ones(2)))
    assert torch.isfinite(distillation_loss(logits, -logits))
    assert torch.isfinite(distillation_loss(-logits, logits))


@pytest.mark.parametrize(
    ("labels", "free"), [(1, 1), (2, 1), (10, 1), (32, 2), (33, 2), (55, 3), (100, 5), (1000, 5)]
)
def test_ranks_without_a_penalty(labels, free):
    assert unpenalized_ranks(labels) == free


# Devices


@pytest.mark.parametrize("device", DEVICES)
def test_results_stay_on_their_device(device):
    logits, labels = some_logits(0, 200, 20)
    u = torch.rand(200, generator=torch.Generator().manual_seed(0))
    there = [tensor.to(device) for tensor in (logits, labels, u)]
    here = calibrate(logits, labels, u, theta=0.1, raps=Raps())
    calibration = calibrate(*there, theta=0.1, raps=Raps())
    sets = prediction_sets(there[0], calibration, there[2], penalty=0.5, k_reg=5)
    eta = consensus(sets, top_sets(there[0], 3))
    loss = imitation_loss(there[0], sets, eta) + distillation_loss(there[0], 2 * there[0])
    for tensor in (calibration.temperature, calibration.tau, sets, eta, loss):
        assert tensor.device.type == device
    torch.testing.assert_close(calibration.temperature.cpu(), here.temperature)
    torch.testing.assert_close(calibration.tau.cpu(), here.tau)
    expected = prediction_sets(logits, here, u, penalty=0.5, k_reg=5)
    assert (sets.cpu() != expected).sum() <= 2  # a score within rounding of tau
