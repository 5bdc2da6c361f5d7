"""One of five clients is malicious or faulty: it is named, and the run continues."""

from __future__ import annotations

import os
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Server, records, run, small
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from interruption import Notices, cut_and_resumed

from fedhet.base.errors import FedhetError
from fedhet.deployment.local import LocalDeployment
from fedhet.engines import simulate as simulation
from fedhet.engines.simulate import InlineProxy
from fedhet.methods.registry import find_method, method_names
from fedhet.runs.storage import Checkpoints, ClientStore
from fedhet.server.calls import CallOutcome
from fedhet.server.reply import ReplySpool
from fedhet.wire import contract
from fedhet.wire.contract import Contract
from fedhet.wire.knowledge import Knowledge, decode, encode

UNSAFE = "client-1"


@pytest.fixture(autouse=True)
def _unbounded(monkeypatch):
    """Removes the bound on numbers, which would reject these replies first."""
    monkeypatch.setattr(contract, "MAX_MAGNITUDE", float("inf"))


class Huge(InlineProxy):
    """Replies with the largest finite numbers that its contract allows."""

    rounds = range(100)

    def fit(self, ins, timeout, group_id):
        result = super().fit(ins, timeout, group_id)
        if self.cid == UNSAFE and group_id in self.rounds and result.parameters.tensors:
            result.parameters = enlarged(result.parameters)
        return result


def enlarged(parameters, size=3e38):
    envelope, said = decode(parameters_to_ndarrays(parameters), "test")
    tensors = {
        name: np.full_like(value, size) if value.dtype == np.float32 else value
        for name, value in said.tensors.items()
    }
    return ndarrays_to_parameters(encode(envelope, replace(said, tensors=tensors)))


class HugeAtFirst(Huge):
    """A client that is malicious only in round 1."""

    rounds = (1,)


class Broken(InlineProxy):
    """Replies with bytes that are no message."""

    def fit(self, ins, timeout, group_id):
        result = super().fit(ins, timeout, group_id)
        if self.cid == UNSAFE:
            result.parameters.tensors[:] = [b"\x80\x04garbage"]
        return result


class Dumb(InlineProxy):
    """Describes itself, and does not reply afterwards."""

    def fit(self, ins, timeout, group_id):
        if self.cid == UNSAFE:
            raise TimeoutError("no answer")
        return super().fit(ins, timeout, group_id)

    def evaluate(self, ins, timeout, group_id):
        if self.cid == UNSAFE:
            raise TimeoutError("no answer")
        return super().evaluate(ins, timeout, group_id)


class Silent(InlineProxy):
    """Does not even describe itself."""

    def get_properties(self, ins, timeout, group_id):
        if self.cid == UNSAFE:
            raise TimeoutError("no answer")
        return super().get_properties(ins, timeout, group_id)


class Liar(InlineProxy):
    """Makes false claims about itself."""

    claims: dict = {}

    def get_properties(self, ins, timeout, group_id):
        reply = super().get_properties(ins, timeout, group_id)
        if self.cid == UNSAFE:
            reply.properties.update(self.claims)
        return reply


class OddModel(Liar):
    claims = {"model": "no-such-model"}


class VastShape(Liar):
    claims = {"kind": "signal", "shape": "65536,65536"}


class Impostor(Liar):
    claims = {"name": "client-0"}


UNSAFES = [Huge, HugeAtFirst, Broken, Dumb, Silent, OddModel, VastShape, Impostor]
ROUNDS = 10


def five(method, **changes):
    rounds = changes.get("rounds", ROUNDS)
    iterations = {"cofed.iterations": rounds - 1} if method == "cofed" else {}
    few = {"rounds": rounds, "clients": 5, "min_clients": 4, "max_samples": 300}
    return small(method, **{**few, **iterations, **changes})


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Return the honest clients' accuracies in the last round without the malicious client."""
    known = {}

    def found(method):
        if method not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(simulation, "InlineProxy", Silent)
                summary = run(five(method), tmp_path_factory.mktemp(method) / "run")
            known[method] = accuracy_of(method, summary)
        return known[method]

    return found


QUICK = [("felo", Huge), ("felo", HugeAtFirst), ("felo", VastShape), ("fedavg", OddModel)]
EACH = [
    pytest.param(m, h, marks=() if (m, h) in QUICK else pytest.mark.slow, id=f"{m}-{h.__name__}")
    for m in method_names()
    for h in UNSAFES
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "malicious"), EACH)
def test_other_clients_are_unaffected(method, malicious, without, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "InlineProxy", malicious)
    notices = Notices()
    summary = run(five(method), tmp_path / "run", [notices])
    assert [past["round"] for past in summary["history"]] == list(range(1, ROUNDS + 1))
    if can_strike(method, malicious):
        named = [text for text in notices.texts if UNSAFE in text or "client-0 is excluded" in text]
        assert named, notices.texts
    if malicious is Silent:
        return
    honest = without(method)
    accuracy = accuracy_of(method, summary)
    assert honest.keys() <= accuracy.keys()
    mean = np.mean([accuracy[name] for name in honest])
    assert mean >= np.mean(list(honest.values())) - 0.02


def accuracy_of(method, summary):
    """Return the clients' accuracies on the common test set, of the method's first kind."""
    return summary["accuracy"]["common"][find_method(method).spec.kinds[0]]["per_client"]


def can_strike(method, malicious):
    """Return whether the malicious client's replies affect the method's server."""
    if issubclass(malicious, Huge):
        return sends_floats(method) and method != "central"  # whose trainer alone is asked
    if malicious is Broken:
        return method != "central"
    return malicious is not OddModel or weights_travel(method)


def sends_floats(method):
    fields = find_method(method).spec.replies.fields
    return any(getattr(f, "dtype", "float32").startswith("float") for f in fields if _tensor(f))


def weights_travel(method):
    spec = find_method(method).spec
    fields = (*spec.instructions.fields, *spec.replies.fields)
    return any(type(field).__name__ == "WeightsField" for field in fields)


def _tensor(field):
    return type(field).__name__ in {"TensorField", "WeightsField"}


@pytest.mark.parametrize("method", ["felo", "fedavg", "um-pfssl"])
def test_oversized_reply_is_dropped_with_name_and_field(method, tmp_path, monkeypatch):
    """The check also applies to replies on disk that are read one at a time (um-pfssl)."""
    monkeypatch.setattr(simulation, "InlineProxy", Huge)
    server = Server(five(method, rounds=2), tmp_path / "run")
    server.play(1)
    record = server.flower.state.record
    assert record.failed.keys() == {UNSAFE}
    assert "its root mean square is" in record.failed[UNSAFE]
    assert record.answered == ["client-0", "client-2", "client-3", "client-4"]


def test_oversized_reply_passes_with_factor_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "InlineProxy", Huge)
    server = Server(five("felo", outlier_factor=0.0, clip_factor=0.0), tmp_path / "run")
    server.play(1)
    assert server.flower.state.record.failed == {}


@pytest.mark.parametrize("method", ["felo", "fedavg", "fedtype"])
def test_server_rolls_back_if_no_client_can_train(method, tmp_path, monkeypatch):
    """Without the check of magnitudes, every instruction of round 2 contains the huge reply."""
    monkeypatch.setattr(simulation, "InlineProxy", HugeAtFirst)
    notices = Notices()
    run(five(method, rounds=4, outlier_factor=0.0, clip_factor=0.0), tmp_path / "run", [notices])
    first, second, third, fourth = records(tmp_path / "run")
    assert first["failed"] == {}
    assert len(second["failed"]) > 2, "the instruction makes training diverge"
    assert any(
        "of round 2: the server rolls back to its state before the first" in t
        for t in notices.texts
    )
    assert len(third["answered"]) == len(fourth["answered"]) == 5
    assert third["failed"] == fourth["failed"] == {}
    last = fourth["accuracy"]["common"]["private"]["per_client"]
    assert len(last) == 5


def test_unusable_average_of_an_architecture_is_reset(tmp_path, monkeypatch):
    """Velo's CVAE does not learn from such features, so other architectures continue."""
    monkeypatch.setattr(simulation, "InlineProxy", HugeAtFirst)
    always = {"velo.min-separation": 0.0}  # otherwise the means are sent, which strike all
    run(five("velo", rounds=5, outlier_factor=0.0, clip_factor=0.0, **always), tmp_path / "run")
    found = records(tmp_path / "run")
    struck = {"client-1", "client-3"}  # the cnn2
    assert [set(record["failed"]) for record in found] == [set(), struck, struck, set(), set()]
    assert [struck <= set(record["asked"]) for record in found] == [True] * 3 + [False, True]
    assert struck <= found[-1]["accuracy"]["common"]["private"]["per_client"].keys()


class HugeLater(Huge):
    """A client that is malicious only in round 3."""

    rounds = (3,)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_run_resumes_identically_after_a_rollback(stop, tmp_path, monkeypatch):
    """The server rolls back to its state after round 2, whose checkpoint is kept."""
    monkeypatch.setattr(simulation, "InlineProxy", HugeLater)
    notices = Notices()
    config = five("felo", rounds=6, outlier_factor=0.0, clip_factor=0.0)
    cut_and_resumed(config, tmp_path, stop + 1, watchers=[notices])
    assert any("the server rolls back to its state after round 2" in text for text in notices.texts)


def test_resumed_run_samples_the_same_clients(tmp_path, monkeypatch):
    """The numbers of refusals and of silent rounds are saved."""
    monkeypatch.setattr(simulation, "InlineProxy", Broken)
    cut_and_resumed(five("local", rounds=6), tmp_path)
    assert [UNSAFE in r["asked"] for r in records(tmp_path / "whole")] == [True] * 3 + [False] * 3


def test_silent_client_is_not_evaluated(tmp_path, monkeypatch):
    sampled = []

    class Counted(Dumb):
        def fit(self, ins, timeout, group_id):
            sampled.append((self.cid, group_id))
            return super().fit(ins, timeout, group_id)

        def evaluate(self, ins, timeout, group_id):
            sampled.append((self.cid, group_id))
            return super().evaluate(ins, timeout, group_id)

    monkeypatch.setattr(simulation, "InlineProxy", Counted)
    run(five("felo"), tmp_path / "run")
    assert [round for name, round in sampled if name == UNSAFE] == [1, 2, 4, 8], "nor evaluated"


@pytest.mark.parametrize("method", ["felo", "cofed", "um-pfssl"])
def test_contributions_of_departed_clients_expire(method, tmp_path):
    server = Server(five(method, rounds=4), tmp_path / "run")
    server.play(1)
    server.close(1)
    before = kept_of(server.strategy, method)
    assert UNSAFE in before
    server.strategy.forget(UNSAFE)
    assert kept_of(server.strategy, method) == before - {UNSAFE}
    server.strategy.forget(UNSAFE)
    server.strategy.forget("nobody")
    told = server.strategy.state_dict()
    server.strategy.load_state_dict(told)
    assert kept_of(server.strategy, method) == before - {UNSAFE}
    assert len(server.instruct(2)) == 5


def kept_of(strategy, method):
    if method == "um-pfssl":
        return {name for name, number in strategy.numbers.items() if number in strategy.versions}
    return set(strategy.means if method == "felo" else strategy.votes)


class Deaf(InlineProxy):
    """No client replies from round 3 on."""

    def fit(self, ins, timeout, group_id):
        if group_id > 2:
            raise TimeoutError("no answer")
        return super().fit(ins, timeout, group_id)


@pytest.mark.parametrize(("rounds", "since"), [(4, "since round 3"), (2, "")])
def test_run_fails_if_the_last_rounds_have_no_replies(rounds, since, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "InlineProxy", Deaf)
    if not since:
        run(five("local", rounds=rounds), tmp_path / "run")
        return
    with pytest.raises(FedhetError, match=f"{since}: client-0"):
        run(five("local", rounds=rounds), tmp_path / "run")
    assert len(records(tmp_path / "run")) == rounds, "what there is can be reported"
    assert not (tmp_path / "run" / "summary.json").exists(), "it is not complete"


@pytest.mark.slow
def test_run_without_replies_fails_on_ray(tmp_path, monkeypatch):
    config = five("local", rounds=1, clients=2, min_clients=0, backend="ray")

    def deaf(*_):
        raise TimeoutError("no answer")

    monkeypatch.setattr("fedhet.server.calls.NamedProxy.send", deaf)
    with pytest.raises(FedhetError):
        run(config, tmp_path / "run")


@pytest.fixture
def _usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_usual_umask")
def test_replies_on_disk_are_private_to_the_owner(tmp_path):
    outcome = CallOutcome("a", 1, Knowledge({"w": np.ones(3)}))
    ReplySpool(tmp_path / "inbox", Contract()).put(outcome)
    assert stat.S_IMODE((tmp_path / "inbox").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "inbox" / "a").stat().st_mode) == 0o600


@pytest.mark.usefixtures("_usual_umask")
def test_states_and_checkpoints_are_private_to_the_owner(tmp_path):
    store = ClientStore(tmp_path / "state", "run", "a")
    store.save(1, {"w": torch.ones(3)}, {"version": 1})
    (tmp_path / "run").mkdir()
    checkpoints = Checkpoints(tmp_path / "run", {"run": "run", "method": "fedavg"})
    checkpoints.write_checkpoint(1, {"w": np.ones(3, np.float32)}, {})
    found = [path for path in tmp_path.rglob("*.safetensors") if path.is_file()]
    assert len(found) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}


@pytest.mark.usefixtures("_usual_umask")
def test_files_of_a_local_deployment_are_private_to_the_owner(tmp_path):
    """The SuperLink's database, created by Flower, contains the clients' messages."""
    deployment = LocalDeployment(tmp_path, nodes=1)
    (tmp_path / "log").mkdir()
    deployment._start("server", "touch", tmp_path / "superlink.db")
    deployment.processes["server"].wait(60)
    assert stat.S_IMODE((tmp_path / "superlink.db").stat().st_mode) == 0o600
