"""Sampling of clients that are refused, silent, or disconnected, round after round."""

import json

import pytest

from fedhet.base.errors import FedhetError
from fedhet.server.members import ClientHealth

NAMES = ["a", "b", "c"]


def standing(max_refusals=3, max_silences=2):
    notices = []
    found = ClientHealth(max_refusals, max_silences, notices.append)
    return found, notices


def play(found, outcomes, rounds=range(1, 40), members=NAMES):
    """Call all clients that may be called, with replies from `outcomes`; return them by round."""
    sampled, forgotten = {}, []
    for round in rounds:
        sampled[round] = found.eligible(round, members)
        told = {name: outcomes.get(name) for name in sampled[round]}
        forgotten += [(round, name) for name in found.update(round, told, members)]
    return sampled, forgotten


def test_replying_client_is_always_eligible():
    found, notices = standing()
    sampled, forgotten = play(found, {})
    assert all(names == NAMES for names in sampled.values())
    assert (forgotten, notices) == ([], [])


def test_client_with_rejected_replies_is_excluded():
    found, notices = standing()
    sampled, forgotten = play(found, {"b": "refused"})
    assert [round for round, names in sampled.items() if "b" in names] == [1, 2, 3]
    assert forgotten == [(3, "b")]
    assert len(notices) == 1
    assert notices[0].startswith(
        "client b is excluded: its replies were rejected in 3 consecutive rounds"
    )


def test_valid_reply_resets_rejections():
    found, _ = standing()
    for round, outcome in enumerate(["refused", "refused", None] * 5, start=1):
        assert found.eligible(round, NAMES) == NAMES
        found.update(round, {"b": outcome}, NAMES)


def test_missing_reply_does_not_reset_rejections():
    found, _ = standing(max_silences=0)
    for round, outcome in enumerate(["refused", "silent", "refused", "error", "refused"], start=1):
        found.update(round, {"b": outcome}, NAMES)
    assert found.eligible(6, NAMES) == ["a", "c"]


@pytest.mark.parametrize("outcome", ["silent", "error"])
def test_silent_client_backs_off(outcome):
    found, notices = standing()
    sampled, forgotten = play(found, {"b": outcome}, range(1, 61))
    rounds = [round for round, names in sampled.items() if "b" in names]
    assert rounds == [1, 2, 4, 8, 16, 32, 48], "after 2, 4, 8 rounds, at most 16"
    assert forgotten == [(2, "b")]
    assert "client b has not replied in 2 consecutive rounds" in notices[0]


def test_reply_ends_the_backoff():
    found, _ = standing()
    play(found, {"b": "silent"}, range(1, 5))
    found.update(5, {"b": None}, NAMES)
    assert found.eligible(6, NAMES) == NAMES
    found.update(6, {"b": "silent"}, NAMES)
    assert found.eligible(7, NAMES) == NAMES


def test_zero_disables_exclusion_and_backoff():
    found, _ = standing(max_refusals=0, max_silences=0)
    sampled, forgotten = play(found, {"a": "refused", "b": "silent"})
    assert all(names == NAMES for names in sampled.values())
    assert forgotten == []


def test_departed_client_is_forgotten_and_may_return():
    found, notices = standing()
    found.update(1, {"b": "silent"}, NAMES)
    assert found.update(2, {}, ["a", "c"]) == []
    assert found.update(3, {}, ["a", "c"]) == ["b"]
    assert notices == ["client b has left; its earlier contributions are discarded"]
    assert found.update(4, {}, ["a", "c"]) == [], "once"
    assert found.eligible(5, NAMES) == NAMES
    found.update(5, {"b": "silent"}, NAMES)
    assert found.eligible(6, NAMES) == NAMES, "its silence of before it left does not count"


def test_all_clients_are_eligible_if_all_back_off():
    found, _ = standing()
    sampled, _ = play(found, dict.fromkeys(NAMES, "silent"), range(1, 6))
    assert all(names == NAMES for names in sampled.values())


def test_run_ends_if_all_clients_are_excluded():
    found, _ = standing()
    with pytest.raises(FedhetError, match=r"round 4.*3 clients"):
        play(found, dict.fromkeys(NAMES, "refused"))


def test_restored_health_is_identical():
    """Restore a checkpoint from JSON during a backoff, refusals, and an absence."""
    outcomes = {"a": "refused", "b": "silent"}
    for cut in range(1, 12):
        whole, _ = standing()
        play(whole, outcomes, range(1, cut + 1), [*NAMES, "d"])
        other, _ = standing()
        other.load_dict(json.loads(json.dumps(whole.to_dict())))
        assert play(other, outcomes, range(cut + 1, 40)) == play(
            whole, outcomes, range(cut + 1, 40)
        )
