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
    asked, forgotten = {}, []
    for round in rounds:
        asked[round] = found.eligible(round, members)
        told = {name: outcomes.get(name) for name in asked[round]}
        forgotten += [(round, name) for name in found.update(round, told, members)]
    return asked, forgotten


def test_who_answers_is_always_asked():
    found, notices = standing()
    asked, forgotten = play(found, {})
    assert all(names == NAMES for names in asked.values())
    assert (forgotten, notices) == ([], [])


def test_a_client_whose_replies_are_refused_is_set_aside_by_name():
    found, notices = standing()
    asked, forgotten = play(found, {"b": "refused"})
    assert [round for round, names in asked.items() if "b" in names] == [1, 2, 3]
    assert forgotten == [(3, "b")]
    assert len(notices) == 1
    assert notices[0].startswith(
        "client b is excluded: its replies were rejected in 3 consecutive rounds"
    )


def test_one_good_reply_clears_a_client():
    found, _ = standing()
    for round, outcome in enumerate(["refused", "refused", None] * 5, start=1):
        assert found.eligible(round, NAMES) == NAMES
        found.update(round, {"b": outcome}, NAMES)


def test_silence_between_refusals_clears_nothing():
    found, _ = standing(max_silences=0)
    for round, outcome in enumerate(["refused", "silent", "refused", "error", "refused"], start=1):
        found.update(round, {"b": outcome}, NAMES)
    assert found.eligible(6, NAMES) == ["a", "c"]


@pytest.mark.parametrize("outcome", ["silent", "error"])
def test_a_client_that_does_not_answer_is_asked_now_and_then(outcome):
    found, notices = standing()
    asked, forgotten = play(found, {"b": outcome}, range(1, 61))
    rounds = [round for round, names in asked.items() if "b" in names]
    assert rounds == [1, 2, 4, 8, 16, 32, 48], "after 2, 4, 8 rounds, at most 16"
    assert forgotten == [(2, "b")]
    assert "client b has not replied in 2 consecutive rounds" in notices[0]


def test_who_answers_again_is_asked_as_before():
    found, _ = standing()
    play(found, {"b": "silent"}, range(1, 5))
    found.update(5, {"b": None}, NAMES)
    assert found.eligible(6, NAMES) == NAMES
    found.update(6, {"b": "silent"}, NAMES)
    assert found.eligible(7, NAMES) == NAMES


def test_zero_switches_either_off():
    found, _ = standing(max_refusals=0, max_silences=0)
    asked, forgotten = play(found, {"a": "refused", "b": "silent"})
    assert all(names == NAMES for names in asked.values())
    assert forgotten == []


def test_what_a_client_that_left_contributed_is_dropped_and_it_may_come_back():
    found, notices = standing()
    found.update(1, {"b": "silent"}, NAMES)
    assert found.update(2, {}, ["a", "c"]) == []
    assert found.update(3, {}, ["a", "c"]) == ["b"]
    assert notices == ["client b has left; its earlier contributions are discarded"]
    assert found.update(4, {}, ["a", "c"]) == [], "once"
    assert found.eligible(5, NAMES) == NAMES
    found.update(5, {"b": "silent"}, NAMES)
    assert found.eligible(6, NAMES) == NAMES, "its silence of before it left does not count"


def test_if_all_rest_all_are_asked():
    found, _ = standing()
    asked, _ = play(found, dict.fromkeys(NAMES, "silent"), range(1, 6))
    assert all(names == NAMES for names in asked.values())


def test_if_all_are_set_aside_the_run_ends():
    found, _ = standing()
    with pytest.raises(FedhetError, match=r"round 4.*3 clients"):
        play(found, dict.fromkeys(NAMES, "refused"))


def test_what_is_saved_decides_as_what_was():
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
