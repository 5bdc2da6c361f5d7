"""Client selection: random, power-of-choice, and Oort."""

from __future__ import annotations

import math

import numpy as np
import pytest
from federation import records, run, small
from interruption import CutError, CutOff, resumed, same_but_for_the_name

from fedhet.server.selection import (
    ClientSampler,
    History,
    LastReply,
    oort,
    power_of_choice,
    preferred_seconds,
    utilities,
)
from fedhet.settings.engine import PaceSettings
from fedhet.settings.run import RunSettings
from fedhet.wire.identity import ClientInfo

NAMES = [f"c{k:02d}" for k in range(20)]


def rng(seed=0):
    return np.random.default_rng(seed)


def test_power_of_choice_selects_the_highest_losses_of_the_candidates():
    history = History({name: LastReply(1, float(k), 1.0, 10) for k, name in enumerate(NAMES)})
    samples = dict.fromkeys(NAMES, 10.0)
    assert power_of_choice(NAMES, samples, history, 3, 20, rng()) == ["c19", "c18", "c17"]
    del history.clients["c05"]  # its loss is not known: it comes first
    assert power_of_choice(NAMES, samples, history, 2, 20, rng()) == ["c05", "c19"]
    history.clients["c05"] = LastReply(2, math.nan, 1.0, 10)  # it has answered, without a loss
    assert power_of_choice(NAMES, samples, history, 2, 20, rng()) == ["c05", "c19"]
    picked = power_of_choice(NAMES, samples, history, 4, 0, rng(3))
    assert len(set(picked)) == 4
    assert min(history.clients[name].loss for name in picked if name != "c05") > 0


def test_power_of_choice_draws_candidates_by_their_samples():
    samples = dict.fromkeys(NAMES, 1.0) | {"c00": 1000.0}
    drawn = [power_of_choice(NAMES, samples, History(), 1, 1, rng(seed))[0] for seed in range(200)]
    assert drawn.count("c00") > 180


def test_oort_explores_unknown_clients():
    history = History({name: LastReply(1, 1.0, 1.0, 10) for name in NAMES[:10]})
    first = oort(NAMES, history, 1, 10, rng())
    assert sum(name in NAMES[10:] for name in first) == 9  # 0.9 of ten
    late = oort(NAMES, history, 500, 10, rng())
    assert sum(name in NAMES[10:] for name in late) == 2  # 0.2 at the least
    alone = oort(NAMES[10:], history, 500, 6, rng())
    assert len(set(alone)) == 6


def test_oort_utility_is_the_loss_with_a_penalty_for_slow_clients():
    """Compute Eq. 2: |B| times the loss, times (T / t)^2 beyond T, plus a bonus for age."""
    clients = {
        "a": LastReply(4, 2.0, 1.0, 50),
        "b": LastReply(9, 0.5, 10.0, 100),
        "c": LastReply(1, 1.0, 2.0, 10),
    }
    found = utilities(clients, 10, preferred=5.0)
    plain = {"a": 100.0, "b": 50.0, "c": 10.0}
    most = np.quantile(list(plain.values()), 0.95)
    for name, past in clients.items():
        value = min(plain[name], most) + math.sqrt(0.1 * math.log(10) / past.round) * most
        value *= (5.0 / past.seconds) ** 2 if past.seconds > 5 else 1.0
        assert found[name] == pytest.approx(value)


def test_oort_prefers_useful_and_fast_clients():
    history = History({name: LastReply(1, 0.1, 1.0, 10) for name in NAMES})
    for name in NAMES[:5]:
        history.clients[name] = LastReply(1, 5.0, 1.0, 10)
    for name in NAMES[:2]:
        history.clients[name].seconds = 1000.0
    assert set(oort(NAMES, history, 500, 3, rng())) == set(NAMES[2:5])


def test_pacer_extends_the_deadline_when_utility_falls():
    clients = {name: LastReply(1, 1.0, float(k), 10) for k, name in enumerate(NAMES)}
    calm = preferred_seconds(History(clients, [5.0] * 40))
    assert preferred_seconds(History(clients, [5.0] * 20 + [4.0] * 20)) > calm
    assert preferred_seconds(History(clients, [4.0] * 20 + [5.0] * 20)) == calm
    assert calm == pytest.approx(np.quantile(range(20), 0.3))


@pytest.mark.parametrize("select", ["random", "power-of-choice", "oort"])
def test_selection_has_the_requested_size_without_duplicates(select):
    history = {name: LastReply(1, float(k), 1.0, 10) for k, name in enumerate(NAMES[:15])}
    members = [ClientInfo(name, "mlp", 10, 10, "image", (1, 8, 8)) for name in NAMES]
    for count, more in ((1, 0.0), (7, 0.0), (20, 0.0), (20, 0.5)):
        pace = PaceSettings(select=select, over_selection=more)
        sampler = ClientSampler(RunSettings(pace=pace, fraction=count / len(NAMES)))
        sampler.load_dict({"clients": history})
        chosen = sampler.choose(3, members)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == count
        assert chosen == sampler.choose(3, members[::-1])


@pytest.mark.parametrize("select", ["power-of-choice", "oort"])
def test_run_with_selection_by_loss_resumes_identically(tmp_path, select):
    changes = {"select": select, "clients": 6, "fraction": 0.5, "models": ["mlp"], "rounds": 4}
    config = small("fedavg", clock="log-normal", **changes)
    run(config, tmp_path / "whole")
    with pytest.raises(CutError):
        run(config, tmp_path / "cut", [CutOff(3, "before")])
    run(resumed(config, tmp_path / "cut"), tmp_path / "cut")
    same_but_for_the_name(tmp_path / "whole", tmp_path / "cut")
    plain = small("fedavg", clock="log-normal", **{**changes, "select": "random"})
    run(plain, tmp_path / "plain")
    sampled = [[r["asked"] for r in records(tmp_path / name)] for name in ("whole", "plain")]
    assert sampled[0] != sampled[1]
