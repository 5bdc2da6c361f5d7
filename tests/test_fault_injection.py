"""Simulated clients that drop out of a round, or take longer."""

import time

import numpy as np
import pytest
from federation import permitted, records, run, small, without_times
from test_permissions import PARTITION, SHIPPED

from fedhet.algorithms.rounds import is_hit
from fedhet.base.errors import SettingsError
from fedhet.base.seeding import numpy_rng
from fedhet.client_runtime.local_training import injected_faults
from fedhet.config.resolve import check_deployable

ROUNDS = range(1, 1001)


@pytest.mark.parametrize("fault", ["drop-out", "straggler"])
def test_dropout_rate_holds_and_draws_are_independent(fault):
    hit = {
        name: np.array([is_hit(0, name, number, fault, 0.2) for number in ROUNDS])
        for name in ("client-0", "client-1")
    }
    for found in hit.values():
        assert abs(found.mean() - 0.2) < 0.04  # three standard deviations
    both = (hit["client-0"] & hit["client-1"]).mean()
    assert abs(both - 0.04) < 0.015
    after = (hit["client-0"][1:] & hit["client-0"][:-1]).mean()
    assert abs(after - 0.04) < 0.015
    again = [is_hit(1, "client-0", number, fault, 0.2) for number in ROUNDS]
    assert again != hit["client-0"].tolist()
    assert not any(is_hit(0, "client-0", number, fault, 0.0) for number in ROUNDS)


def test_dropped_client_does_not_reply(tmp_path):
    config = small("felo", rounds=3, drop_outs=0.4, max_silences=0)
    run(config, tmp_path / "run")
    lost = 0
    for record in records(tmp_path / "run"):
        draws = {
            n: numpy_rng(config.run.seed, n, record["round"], "drop-out") for n in record["asked"]
        }
        fails = {name for name, rng in draws.items() if rng.random() < 0.4}
        assert set(record["failed"]) == fails
        assert set(record["answered"]) == set(record["asked"]) - fails
        assert all("'pace.drop-outs'" in reason for reason in record["failed"].values())
        lost += len(fails)
    assert lost > 0


def test_straggler_takes_longer_and_computes_the_same(tmp_path):
    plain = run(small("local", rounds=1, clients=2), tmp_path / "plain")
    slow = run(small("local", rounds=1, clients=2, stragglers=1.0, slowdown=2.0), tmp_path / "slow")
    assert without_times(slow) == without_times(plain)


@pytest.mark.parametrize(("share", "expected"), [(1.0, 0.15), (0.0, 0.05)])
def test_straggler_is_slower_by_the_factor(share, expected):
    settings = small(stragglers=share, slowdown=3.0).run
    started = time.perf_counter()
    with injected_faults(settings, "client-0", 1):
        time.sleep(0.05)
    taken = time.perf_counter() - started
    assert taken >= expected
    assert share or taken < 0.14


@pytest.mark.parametrize("setting", ["drop_outs", "stragglers"])
def test_fault_injection_raises_in_a_deployment(setting):
    with pytest.raises(SettingsError, match="deployment"):
        check_deployable(small(**{setting: 0.5}))


def test_site_ignores_fault_injection():
    sampled = {**SHIPPED, "pace.drop-outs": 0.9, "pace.stragglers": 1.0, "pace.slowdown": 1e3}
    taken = permitted(PARTITION, sampled)
    assert not {name for name in taken if name in ("pace.drop-outs", "pace.stragglers")}


@pytest.mark.slow
def test_ray_gives_the_metrics_of_inline(tmp_path):
    changes = {"rounds": 2, "drop_outs": 0.4, "max_silences": 0}
    inline = run(small("felo", **changes), tmp_path / "inline")
    on_ray = run(small("felo", backend="ray", **changes), tmp_path / "ray")
    assert without_times(inline) == without_times(on_ray)
    for one, other in zip(records(tmp_path / "inline"), records(tmp_path / "ray"), strict=True):
        assert one["failed"] == other["failed"]
