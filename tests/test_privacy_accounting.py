"""Privacy accounting against closed forms, other accountants, and monotonicity."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import settings as quickly
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from fedhet.base.errors import SettingsError
from fedhet.methods.registry import find_method, shipped_names
from fedhet.methods.spec import Passes
from fedhet.privacy.accounting import (
    Plan,
    Release,
    calibrate_noise,
    combined_noise,
    epoch,
    epsilon_of,
)
from fedhet.settings.defense import MIN_CLASS_NOISE, MIN_NOISE, PrivacySettings

DELTA = 1e-5
noises = st.floats(0.5, 20)
rates = st.floats(0.005, 1.0)


def gaussian_epsilon(mu, delta=DELTA):
    """Return the exact epsilon of mu-Gaussian differential privacy (Balle and Wang 2018)."""

    def excess(epsilon):
        left = norm.cdf(mu / 2 - epsilon / mu)
        return left - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return brentq(excess, 0, 200)


@pytest.mark.parametrize(("noise", "count"), [(1.0, 1), (4.0, 20), (2.0, 3), (30.0, 1000)])
def test_unsampled_epsilon_is_close_to_the_exact_gaussian_mechanism(noise, count):
    exact = gaussian_epsilon(math.sqrt(count) / noise)
    assert exact <= epsilon_of([Release(noise, count=count)], DELTA) <= 1.12 * exact


def test_epsilon_of_class_sums_and_counts_equals_the_design():
    """With z_f = 4, z_n = 8, and 20 rounds, Gaussian differential privacy gives exactly 5.7."""
    mu = math.sqrt(20) / combined_noise(4, 8, 1)
    assert gaussian_epsilon(mu) == pytest.approx(5.7, abs=0.05)
    assert 5.68 < epsilon_of([Release(combined_noise(4, 8, 1), count=20)], DELTA) < 6.2


@pytest.mark.parametrize(
    ("noise", "rate", "steps"), [(1.5, 0.04, 2250), (1.1, 256 / 60_000, 14_062), (0.8, 0.01, 500)]
)
def test_sampled_epsilon_equals_another_accountant(noise, rate, steps):
    other = RDPAccountant()
    other.history = [(noise, rate, steps)]
    found = epsilon_of([Release(noise, rate, steps)], DELTA)
    assert found == pytest.approx(other.get_epsilon(DELTA), rel=0.02)


def test_published_example_of_dp_sgd_on_mnist():
    """TensorFlow Privacy's tutorial reports at most 3.0.

    It has noise 1.1, batches of 256 of 60,000, and 60 epochs. Its conversion to epsilon was less
    tight than the current one.
    """
    assert 2.3 < epsilon_of([Release(1.1, 256 / 60_000, 60 * 235)], DELTA) < 3.01


def test_several_gaussians_compose_to_one():
    apart = [Release(4.0), Release(4.0), Release(8.0)]
    together = [Release(combined_noise(4.0, 8.0, 2))]
    assert epsilon_of(apart, DELTA) == pytest.approx(epsilon_of(together, DELTA), rel=1e-6)


@quickly(max_examples=25, deadline=None)
@given(noises, rates, st.integers(1, 500), st.floats(1e-8, 1e-3))
def test_epsilon_is_monotone(z, q, count, delta):
    one = epsilon_of([Release(z, q, count)], delta)
    assert epsilon_of([Release(1.2 * z, q, count)], delta) <= one + 1e-9
    assert epsilon_of([Release(z, q, count + 10)], delta) >= one - 1e-9
    assert epsilon_of([Release(z, 0.5 * q, count)], delta) <= one + 1e-9
    assert epsilon_of([Release(z, q, count)], min(2 * delta, 0.01)) <= one + 1e-9
    assert epsilon_of([Release(z, q, count), Release(5.0)], delta) >= one - 1e-9


@pytest.mark.parametrize("sampling", [1.0, 0.5, 1e-6])
@pytest.mark.parametrize(
    "noise", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-323, 1e-154, 1e-10, 0.29, 1e7, 1e308]
)
def test_invalid_noise_has_infinite_epsilon(noise, sampling):
    for releases in ([Release(noise, sampling)], [Release(5.0), Release(noise, sampling)]):
        assert epsilon_of(releases, DELTA) == math.inf


@pytest.mark.parametrize("sampling", [0.0, -1.0, 1.1, math.nan, math.inf])
def test_invalid_sampling_rate_has_infinite_epsilon(sampling):
    assert epsilon_of([Release(5.0, sampling)], DELTA) == math.inf


@pytest.mark.parametrize("count", [0, -5, 10**16, 10**400])
def test_invalid_count_has_infinite_epsilon(count):
    assert epsilon_of([Release(5.0, 0.1, 3), Release(6.0, 0.1, count)], DELTA) == math.inf


def test_many_steps_of_a_tiny_rate_have_positive_epsilon():
    """Rounding errors would make the divergence negative, which dp-accounting treats as 0."""
    for rate in (1e-6, 1e-8, 1e-12, 5e-324):
        assert epsilon_of([Release(1.0, rate, 10**15)], DELTA) > 1
    assert epsilon_of([Release(100.0, 1e-7, 10**12)], DELTA) > 0


def test_epsilon_is_zero_only_if_delta_covers_the_loss():
    assert epsilon_of([], DELTA) == 0
    assert epsilon_of([Release(1e6)], DELTA) == 0  # its total variation is 4e-7
    assert epsilon_of([Release(64.0)], 0.01) == 0  # 0.0062
    assert 0 < epsilon_of([Release(1e6, count=10**6)], DELTA) < 0.01


def test_failing_accountant_has_infinite_epsilon(monkeypatch):
    import dp_accounting.rdp

    for wrong in (0.0, math.nan, -1.0):
        monkeypatch.setattr(
            dp_accounting.rdp.RdpAccountant, "get_epsilon", lambda self, delta, wrong=wrong: wrong
        )
        assert epsilon_of([Release(1.234 + abs(wrong if wrong == wrong else 2))], DELTA) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("rate", [1e-9, 1e-6, 1e-4, 0.01, 0.1, 0.5, 0.99, 1.0])
def test_epsilon_never_rises_with_the_noise_from_the_least_noise_on(rate, delta):
    noises = [MIN_NOISE * 1.25**k for k in range(25)] + [1e3, 1e4, 1e5, 1e6]
    for count in (1, 10**3, 10**6):
        found = [epsilon_of([Release(z, rate, count)], delta) for z in noises]
        assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("noise-multiplier", 1e-154, "0.3"), ("noise-multiplier", 0.29, "0.3"),
     ("class-noise", 0.5, "1"), ("count-noise", 1e-10, "1")],
)  # fmt: skip
def test_settings_with_too_little_noise_raise(name, value, least):
    message = f"setting 'privacy.{name}': .*expected 0 or at least {least}, got {value:g}"
    with pytest.raises(ValueError, match=message):
        PrivacySettings(**{name: value, **({} if name[0] == "n" else {"epsilon": 1.0})})
    assert PrivacySettings(**{"noise-multiplier": MIN_NOISE}).is_on


def test_least_class_noise_is_accounted_for_every_method():
    most = max(find_method(name).spec.privacy.vectors for name in shipped_names())
    assert combined_noise(MIN_CLASS_NOISE, MIN_CLASS_NOISE, most) >= MIN_NOISE


def test_entry_with_negligible_noise_exhausts_the_budget():
    spent = (Release(1e-154),)
    with pytest.raises(SettingsError, match="too small"):
        calibrate_noise(PrivacySettings(epsilon=1.0), plan(), 1.0, spent)


def test_large_epsilon_does_not_lead_below_the_least_noise():
    assert (
        calibrate_noise(PrivacySettings(epsilon=1e6), plan(vectors=0), 1e6).gradients == MIN_NOISE
    )


def test_epoch_has_as_many_steps_as_batches():
    assert epoch(100, 32, 2.0) == Release(2.0, 0.32, 4)
    assert epoch(20, 32, 2.0) == Release(2.0, 1.0, 1)


def plan(rows=500, rounds=10, vectors=2, batch=32, epochs=2):
    return Plan(rows, (Passes(rounds, batch, epochs),), rounds, vectors)


@quickly(max_examples=10, deadline=None)
@given(st.sampled_from([1.0, 3.0, 8.0]), st.integers(50, 5000), st.integers(1, 30))
def test_noise_for_an_epsilon_uses_nearly_all_of_it(epsilon, rows, rounds):
    chosen, wanted = plan(rows, rounds), PrivacySettings(epsilon=epsilon)
    noise = calibrate_noise(wanted, chosen, epsilon)
    sums = chosen.sums(noise.sums, noise.counts)
    spent = epsilon_of([*chosen.steps(noise.gradients), *sums], DELTA)
    assert 0.98 * epsilon < spent <= epsilon
    assert epsilon_of(sums, DELTA) <= 0.25 * epsilon
    assert noise.counts == 2 * noise.sums


def test_earlier_consumption_increases_the_noise():
    chosen = plan()
    first = calibrate_noise(PrivacySettings(epsilon=8.0), chosen, 8.0)
    before = tuple(chosen.steps(3 * first.gradients))
    again = calibrate_noise(PrivacySettings(epsilon=8.0), chosen, 8.0, before)
    assert again.gradients > first.gradients
    everything = [*before, *chosen.steps(again.gradients), *chosen.sums(again.sums, again.counts)]
    assert epsilon_of(everything, DELTA) <= 8.0


def test_noise_that_is_given_is_kept():
    given_ = PrivacySettings(noise_multiplier=1.3, class_noise=6.0, count_noise=5.0)
    noise = calibrate_noise(given_, plan(), 0.0)
    assert (noise.gradients, noise.sums, noise.counts) == (1.3, 6.0, 5.0)
    assert calibrate_noise(PrivacySettings(noise_multiplier=1.3), plan(), 0.0).sums == 4.0


def test_unreachable_epsilon_raises():
    little = PrivacySettings(epsilon=1.0, class_noise=2.0)
    with pytest.raises(SettingsError, match=r"'privacy\.epsilon': 1 "):
        calibrate_noise(little, plan(), 1.0)


@pytest.mark.parametrize(
    "given_",
    [{"epsilon": 1.0, "noise-multiplier": 1.0}, {"class-noise": 4.0}, {"count-noise": 4.0}],
)
def test_settings_that_contradict_each_other_raise(given_):
    with pytest.raises((ValueError, SettingsError), match=r"'privacy\.epsilon'|without noise"):
        PrivacySettings(**given_)
