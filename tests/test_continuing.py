"""Runs that continue after their last round, stop early, or keep the best models."""

import json
import os

import pytest
import torch
from federation import records, run, settings, small, without_times
from interruption import Notices, cut_and_resumed, resumed

from fedhet.base.errors import StateError
from fedhet.config.resolve import resolve
from fedhet.config.sources import read_toml
from fedhet.inference import api
from fedhet.inference.client import open_client
from fedhet.runs.directory import last_round
from fedhet.runs.measures import best_round, spread
from fedhet.runs.records import Headline, RoundRecord
from fedhet.runs.storage import ClientStore


def longer(config, directory, **changes):
    """Return the settings of a resumed run with some of them changed."""
    named = settings(config.method.name, **changes)
    return resolve({**config.flat(), **named, "out": str(directory), "resume": True})


@pytest.mark.parametrize("method", ["local", "felo"])
def test_finished_run_continues_like_a_longer_run(method, tmp_path):
    config = small(method, rounds=2, fraction=0.75)
    run(config, tmp_path / "run")
    summary = run(longer(config, tmp_path / "run", rounds=4), tmp_path / "run")
    whole = run(small(method, rounds=4, fraction=0.75), tmp_path / "whole")
    assert summary["rounds"] == 4
    assert read_toml(tmp_path / "run" / "config.toml")["rounds"] == 4
    for found, expected in zip(
        records(tmp_path / "run")[2:], records(tmp_path / "whole")[2:], strict=True
    ):
        assert found["accuracy"] == expected["accuracy"]
        assert found["loss"] == expected["loss"]
    assert without_times(summary) == without_times(whole)


def test_settings_outside_the_experiment_may_change(tmp_path):
    config = small("local", rounds=1, clients=2)
    run(config, tmp_path / "run")
    other = {"round_timeout": 60.0, "threads": 1, "metrics": "auc", "max_payload_mb": 10.0}
    summary = run(longer(config, tmp_path / "run", rounds=2, **other), tmp_path / "run")
    assert summary["rounds"] == 2
    assert "auc" in summary["metrics"]
    kept = read_toml(tmp_path / "run" / "config.toml")
    assert (kept["engine.round-timeout"], kept["metrics"]) == (60.0, ["accuracy", "auc"])


@pytest.mark.parametrize("change", [{"rounds": 1}, {"lr": 0.5}, {"precision": "bfloat16"}])
def test_finished_run_that_cannot_continue_is_unchanged(tmp_path, change):
    config = small("local", rounds=2, clients=2)
    run(config, tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(StateError, match=r"rounds|contains a run"):
        run(longer(config, tmp_path / "run", **change), tmp_path / "run")
    with pytest.raises(StateError, match="--rounds"):
        run(resumed(config, tmp_path / "run"), tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_changed_schedule_is_noted(tmp_path):
    config = small("local", rounds=1, clients=2, schedule="cosine")
    run(config, tmp_path / "run")
    notices = Notices()
    run(longer(config, tmp_path / "run", rounds=2), tmp_path / "run", [notices])
    assert "the learning rate schedule (cosine) changes from 1 rounds to 2 rounds" in notices.texts


# --- early stopping ---------------------------------------------------------------------------


def record(number, mean=None):
    found = RoundRecord(number)
    if mean is not None:
        found.accuracy = {"common": {"private": spread({"a": mean})}}
    return found


@pytest.mark.parametrize(
    ("means", "patience", "last"),
    [
        ([0.1, 0.2, 0.3], 1, 20),
        ([0.1, 0.2, 0.2], 1, 4),  # the same is no rise
        ([0.1, 0.3, 0.2, 0.25], 2, 5),
        ([0.1, 0.3, 0.2, 0.4, 0.1], 2, 20),
        ([0.3, None, 0.2, None, 0.1], 2, 6),  # rounds without an evaluation do not count
        ([0.3, 0.2, 0.1, 0.9], 2, 4),  # what comes after the last round changes nothing
        ([0.5] * 19, 19, 20),
        ([0.5] * 19, 0, 20),
    ],
)
def test_last_round_follows_from_the_records(means, patience, last):
    config = small("felo", rounds=20, early_stopping=patience)
    found = [record(number, mean) for number, mean in enumerate(means, 1)]
    assert last_round(found, config) == last


def stubborn(**changes):
    """Return a run with constant accuracy, because it learns next to nothing."""
    return small("felo", rounds=8, clients=2, models="mlp", lr=1e-9, **changes)


def test_run_without_improvement_stops_early(tmp_path):
    notices = Notices()
    summary = run(stubborn(early_stopping=2), tmp_path / "run", [notices])
    assert summary["rounds"] == 4
    assert sum("round 4 is the last" in text for text in notices.texts) == 1
    last = records(tmp_path / "run")[-1]
    assert last["accuracy"]  # evaluated as a last round is: with the averages that it has made
    whole = run(stubborn(validation_fraction=0.1).replacing(rounds=4), tmp_path / "whole")
    assert without_times(summary) == without_times(whole)


@pytest.mark.parametrize(("round", "moment"), [(3, "after"), (4, "before"), (4, "after")])
def test_interrupted_run_stops_early(tmp_path, round, moment):
    cut_and_resumed(stubborn(early_stopping=2), tmp_path, round, moment)


def test_run_that_ended_early_continues_without_early_stopping(tmp_path):
    config = stubborn(early_stopping=1)
    assert run(config, tmp_path / "run")["rounds"] == 3
    with pytest.raises(StateError, match="early-stopping=0"):
        run(resumed(config, tmp_path / "run"), tmp_path / "run")
    summary = run(longer(config, tmp_path / "run", early_stopping=0), tmp_path / "run")
    assert summary["rounds"] == 8


# --- the best round ---------------------------------------------------------------------------


def test_best_round_is_the_first_maximum():
    found = [record(1, 0.1), record(2, 0.4), record(3), record(4, 0.4), record(5, 0.3)]
    assert best_round(found, Headline()) == 2
    personal = Headline(protocol="personal")  # Only the other protocol was evaluated.
    assert best_round(found[:1], personal) == 1
    assert best_round([record(1)], Headline()) == 0
    central = [record(1, 0.1), record(2, 0.4), record(3, 0.3)]  # without private models
    for each in central:
        each.accuracy = {"common": {"global": each.accuracy["common"]["private"]}}
    assert best_round(central, Headline()) == 2


def test_state_of_the_best_round_is_kept(tmp_path):
    store = ClientStore(tmp_path, "run-1", "a")
    for number in (2, 3, 5, 6, 7, 8, 9):
        store.save(number, {"w": torch.full((1,), float(number))}, {}, best_round=4)
    assert store.rounds() == [3, 7, 8, 9]  # after round 4 the client's state was that of round 3
    store.save(10, {"w": torch.ones(1)}, {}, best_round=9)
    assert store.rounds() == [8, 9, 10]


def test_models_of_the_best_round_can_be_used(tmp_path):
    """The training is so coarse that the models get worse over rounds."""
    config = small("local", rounds=6, clients=2, optimizer="sgd", lr=3.0, models="mlp",
                   keep_best=True, validation_fraction=0.0, seed=1)  # fmt: skip
    run(config, tmp_path / "run")
    every = records(tmp_path / "run")
    means = [each["accuracy"]["common"]["private"]["mean"] for each in every]
    best = means.index(max(means)) + 1
    assert best < 4, "else it would be there anyway"
    trained = open_client(tmp_path / "run", "client-0", best=True)
    assert trained.round == best
    expected = every[best - 1]["accuracy"]["common"]["private"]["per_client"]["client-0"]
    assert trained.accuracy()["common"] == pytest.approx(expected)
    result = api.load(tmp_path / "run")
    one, other = result.best().model("client-0"), result.model("client-0")
    assert any(
        not torch.equal(left, right)
        for left, right in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"]["common"]["private"]["mean"] == means[-1]  # never the headline


def test_missing_models_of_the_best_round_raise(tmp_path):
    config = small("local", rounds=5, clients=2, optimizer="sgd", lr=3.0, models="mlp", seed=1)
    run(config, tmp_path / "run")
    with pytest.raises(StateError, match="keep-best=true"):
        open_client(tmp_path / "run", "client-0", best=True)
    state = next((tmp_path / "run" / "state").iterdir())
    with pytest.raises(StateError):
        open_client(state, "client-0", best=True)
    assert os.listdir(tmp_path / "run" / "state")
