"""Evaluations in the messages of the next round, as deployments send them."""

from __future__ import annotations

from collections import Counter

import pytest
from flwr.common import Code, FitRes, Status

from fedhet.base.errors import StateError
from fedhet.client_runtime.state import MessageClient
from fedhet.clients.felo import FeloClient
from fedhet.methods.registry import find_method, shipped_names
from fedhet.runs.log import RunLog
from fedhet.runs.measures import EVALUATES_FIRST, EVALUATION
from fedhet.server.calls import NOTHING
from fedhet.server.codec import Codec
from fedhet.server.round import RoundState
from fedhet.strategies.base import HetStrategy
from fedhet.strategies.felo import FeloStrategy
from tests.federation import client_info, each, fast, records, run, small, without_times


@pytest.fixture
def deployed(monkeypatch):
    """Let simulations send the messages of deployments, and count them by kind."""
    monkeypatch.setattr(RunLog, "is_deployed", True)
    messages = Counter()
    for kind in ("fit", "evaluate"):
        original = getattr(MessageClient, kind)

        def counted(self, ins, kind=kind, original=original):
            messages[kind, bool(ins.config.get(EVALUATES_FIRST))] += 1
            return original(self, ins)

        monkeypatch.setattr(MessageClient, kind, counted)
    return messages


def lines(directory):
    """Return the records of a run without durations."""
    varying = {"seconds", "peak_memory_mb"}
    return [{k: v for k, v in r.items() if k not in varying} for r in records(directory)]


def compare(config, tmp_path, monkeypatch):
    """Run a federation with attached evaluations, and without; return what must be equal."""
    attached = without_times(run(config, tmp_path / "attached"))
    monkeypatch.setattr(RunLog, "is_deployed", False)
    separate = without_times(run(config, tmp_path / "separate"))
    folders = tmp_path / "attached", tmp_path / "separate"
    return tuple(zip((attached, separate), map(lines, folders), strict=True))


def test_all_evaluations_but_the_last_are_attached(deployed, tmp_path, monkeypatch):
    config = small("felo", rounds=3)
    attached, separate = compare(config, tmp_path, monkeypatch)
    assert attached == separate
    del deployed["fit", False], deployed["evaluate", False]
    assert deployed == {("fit", True): 2 * 4}


def test_deployed_round_is_one_message(deployed, tmp_path):
    run(small("felo", rounds=3), tmp_path / "run")
    assert deployed == {("fit", False): 4, ("fit", True): 8, ("evaluate", False): 4}


EVALUATED = sorted(
    name
    for name in shipped_names()
    if find_method(name).strategy.eval_instruction is not HetStrategy.eval_instruction
)
"""The methods whose clients evaluate models of the server."""


@pytest.mark.parametrize("method", each(EVALUATED))
def test_every_method_has_the_same_results(method, deployed, tmp_path, monkeypatch):
    config = small(method, **fast(method), rounds=3)
    attached, separate = compare(config, tmp_path, monkeypatch)
    assert attached == separate


def test_clients_that_do_not_train_are_evaluated_separately(deployed, tmp_path, monkeypatch):
    config = small("felo", rounds=4, fraction=0.5, **{"data.partition": "iid"})
    run(config, tmp_path / "run")
    assert deployed["fit", True] == 2 * 3
    assert deployed["evaluate", False] == 2 * 3 + 4
    attached, separate = compare(config, tmp_path / "pair", monkeypatch)
    assert attached == separate


def test_rounds_without_evaluation_attach_nothing(deployed, tmp_path, monkeypatch):
    config = small("felo", rounds=5, evaluate_every=2)
    run(config, tmp_path / "run")
    assert deployed["fit", True] == 4 * 2
    attached, separate = compare(config, tmp_path / "pair", monkeypatch)
    assert attached == separate


@pytest.mark.parametrize(
    "changes",
    [
        {"early_stopping": 2},
        {"keep_best": True},
        {"wire.encoding": "int8"},
        {"pace.timeout": "60"},
        {"privacy.secure-aggregation": True},
    ],
)
def test_settings_that_need_the_scores_of_each_round_attach_nothing(changes, deployed, tmp_path):
    run(small("felo", rounds=2, **changes), tmp_path / "run")
    assert not deployed["fit", True]
    assert deployed["evaluate", False] == 2 * 4


def test_run_that_failed_after_an_open_round_resumes_with_the_same_results(
    deployed, tmp_path, monkeypatch
):
    """The failure is in round 3. If no client has replied, round 2 has no evaluation yet."""
    config = small("felo", rounds=4)
    whole = run(config, tmp_path / "whole")
    aggregate = FeloStrategy.aggregate

    def failing(self, round, replies):
        if round == 3:
            raise StateError("the server stopped")
        return aggregate(self, round, replies)

    instruct = FeloStrategy.instruct

    def stopping(self, round, client):
        if round == 3:
            raise StateError("the server stopped")
        return instruct(self, round, client)

    for number, (name, function) in enumerate((("aggregate", failing), ("instruct", stopping))):
        directory = tmp_path / f"run-{number}"
        with monkeypatch.context() as patch:
            patch.setattr(FeloStrategy, name, function)
            with pytest.raises(StateError, match="server stopped"):
                run(config, directory)
        assert len(records(directory)) == 2 - number
        deployed.clear()
        resumed = run(config.replacing(resume=True), directory)
        assert without_times(resumed) == without_times(whole)
        assert lines(directory) == lines(tmp_path / "whole")
        assert deployed == {("fit", True): 8, ("evaluate", False): 4}, "rounds 3 and 4"


def test_failed_evaluation_is_recorded_in_its_round(deployed, tmp_path, monkeypatch):
    evaluation, config = FeloClient.evaluation, small("felo", rounds=3)

    def failing(self, knowledge):
        if self.info.name == "client-1" and self.state.participations == 2:
            raise StateError("the test set is gone")
        return evaluation(self, knowledge)

    monkeypatch.setattr(FeloClient, "evaluation", failing)
    attached, separate = compare(config, tmp_path, monkeypatch)
    assert attached == separate
    rounds = records(tmp_path / "attached")
    assert [round.get("unevaluated", {}) for round in rounds] == [
        {}, {"client-1": "the test set is gone"}, {}
    ]  # fmt: skip
    assert all(len(round["answered"]) == 4 for round in rounds)


def test_client_that_sends_no_evaluation_is_not_evaluated(deployed, tmp_path, monkeypatch):
    fit = MessageClient.fit

    def silent(self, ins):
        result = fit(self, ins)
        if self.numpy_client.info.name == "client-2":
            result.metrics = {
                n: v for n, v in result.metrics.items() if not n.startswith(EVALUATION)
            }
        return result

    monkeypatch.setattr(MessageClient, "fit", silent)
    run(small("felo", rounds=3), tmp_path / "run")
    reasons = [record.get("unevaluated", {}) for record in records(tmp_path / "run")]
    assert reasons == [{"client-2": "sent no evaluation"}] * 2 + [{}]


def test_unrequested_and_nested_evaluations_are_refused_or_ignored(tmp_path):
    config = small("felo")
    codec = Codec("run", config.method, 10**6, RoundState(1, print))
    client = client_info("image", (1, 8, 8))
    metrics = {EVALUATION * 5000 + "loss": 0.0}
    outcome = codec.read(client, ["private"], FitRes(Status(Code.OK, ""), NOTHING, 1, metrics), 2)
    assert outcome.evaluation.failure == "refused"
    assert outcome.error
