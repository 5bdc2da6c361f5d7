"""Secure aggregation in runs: methods against their plain runs, refusals, stops, and what is sent.

tests/test_masking.py tests the protocol without training.
"""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federation import Server, client_of, fast, records, run, small, weighed_by_samples
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from interruption import CutError, Notices, resumed, same_but_for_the_name
from rounds import instruction_of, reply_of

from fedhet.base.errors import MaskingError, SettingsError
from fedhet.client_runtime.masking import Masking
from fedhet.config.resolve import resolve
from fedhet.engines import simulate as simulation
from fedhet.methods.registry import all_methods, find_method
from fedhet.server.unmasking import Unmasking
from fedhet.wire.knowledge import Knowledge, decode, encode

SUMMED = sorted(name for name, method in all_methods()[0].items() if method.spec.sums.lanes)
NOT_IN_THE_DESIGN = {"fedsa"}
"""Methods that were added after the design's table; fedsa averages the factors A as FedAvg does."""
SETTINGS = {
    "fedproto": {"fedproto.weighting": "clients"},
    "fedhe": {"fedhe.replies": "latest"},
    "fedrolex": {
        "fedrolex.levels": ["a", "b"],
        "fedrolex.weighting": "samples",
        "fedrolex.masked": False,
    },
    "heterofl": {
        "heterofl.levels": ["a", "b"],
        "heterofl.weighting": "samples",
        "heterofl.masked": False,
    },
}
SECURE = {"privacy.secure-aggregation": True}


def config_of(method: str, **changes: object):
    """Return a small federation of six clients that all have samples of every class."""
    changes = {"clients": 6, "alpha": 1000.0, "data.min-samples": 30, **changes}
    return small(method, **{**fast(method), **SETTINGS.get(method, {}), **changes})


def test_methods_of_the_design_can_be_summed():
    design = (
        "fedavg fedprox fedbn fedper fedrep lg-fedavg fml fedmrl pfedme ditto moon fedtype "
        "scaffold fedrolex "
        "pfedbayes felo fedproto fedhe fedmd fccl ds-fl heterofl"
    )
    assert {*SUMMED} - NOT_IN_THE_DESIGN == {*design.split()}
    for name, method in all_methods()[0].items():
        assert bool(method.spec.sums.lanes) != bool(method.spec.sums.unsupported), name


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in ("fedavg", "felo", "ds-fl") else [pytest.mark.slow])
        for name in SUMMED
        if name != "fedsa"  # needs a pretrained encoder, see tests/test_fedlora.py
    ],
)
def test_masked_round_gives_the_same_instructions_as_plain_text(tmp_path, monkeypatch, method):
    monkeypatch.setattr(simulation, "peers_of", weighed_by_samples)
    check_same_instructions(config_of(method), tmp_path)


def check_same_instructions(config, directory):
    """Compare the instructions after a round with and without secure aggregation."""
    told = []
    for secure in (False, True):
        (folder := directory / f"{secure}").mkdir()
        server = Server(resolve({**config.flat(), "privacy.secure-aggregation": secure}), folder)
        _, replies = server.play(1)
        assert all("masked/0" in reply_of(sent).tensors for _, sent in replies) is secure
        server.close(1)
        told.append({proxy.name: instruction_of((proxy, ins)) for proxy, ins in server.instruct(2)})
    plain, summed = told
    assert plain.keys() == summed.keys()
    compared = 0
    for name in plain:
        one, other = plain[name].tensors, summed[name].tensors
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype
            if key.endswith("num_batches_tracked"):  # would reveal the number of samples
                assert other[key] == 0, "as in the first instruction"
                continue
            np.testing.assert_allclose(other[key], one[key], rtol=2e-6, atol=4e-6, err_msg=key)
            compared += one[key].size
    assert compared > 100


@pytest.mark.parametrize("weighting", ["samples", "clients"])
@pytest.mark.parametrize("method", ["felo", "fedproto"])
@pytest.mark.slow
def test_all_sites_have_the_same_weight_in_class_means_by_default(tmp_path, method, weighting):
    told = []
    for secure in (False, True):
        (directory := tmp_path / f"{secure}").mkdir()
        own = weighting if secure else "clients"
        changes = {f"{method}.weighting": own, "alpha": 0.5, "data.min-samples": 20}
        server = Server(config_of(method, **changes, **(SECURE if secure else {})), directory)
        server.play(1)
        told.append([instruction_of(each).tensors for each in server.instruct(2)])
    for one, other in zip(*told, strict=True):
        rows = np.isin(one["classes"], other["classes"])
        assert 0 < rows.sum() <= len(rows), "classes of fewer than three clients are missing"
        np.testing.assert_allclose(other["features"], one["features"][rows], rtol=2e-6, atol=4e-6)


# A malicious server (Pasquini et al., CCS 2022)


def changed(ins: FitIns, change, scalars=None, **signed: object) -> FitIns:
    """Return a request whose instruction `change` has modified; `signed` is its envelope.

    `scalars` replaces the scalars that the instruction has.
    """
    envelope, knowledge = decode(parameters_to_ndarrays(ins.parameters), "test")
    tensors = {name: value.copy() for name, value in knowledge.tensors.items()}
    change(tensors)
    own = {name: (scalars or {}).get(name, value) for name, value in knowledge.scalars.items()}
    message = encode(replace(envelope, **signed), Knowledge(tensors, own))
    return FitIns(ndarrays_to_parameters(message), ins.config)


def to_zero(tensors) -> None:
    for name, value in tensors.items():
        if name == "probabilities":
            value[...] = 1 / value.shape[1]
        elif np.issubdtype(value.dtype, np.floating) and not name.startswith("scale/"):
            value[...] = 0


@pytest.mark.parametrize("form", ["instructions", "settings"])
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in ("fedavg", "felo") else [pytest.mark.slow])
        for name in SUMMED
        if name != "fedsa"  # needs a pretrained encoder; its messages are those of fedavg
    ],
)
def test_server_that_spoils_all_replies_but_one_learns_nothing(tmp_path, method, form):
    """With replies that the server knows, the sum would be the remaining client's reply."""
    one_model = {"models": ["cnn2"]} if method == "felo" else {}
    config = config_of(method, rounds=3, **SECURE, **one_model)
    server = Server(config, tmp_path)
    notices: list[str] = []
    server.log.notice = server.flower.state.notice = notices.append
    server.play(1)
    server.close(1)
    before = server.strategy.state_dict()
    instructions = server.instruct(2)
    replies = []
    for number, (proxy, ins) in enumerate(instructions):
        if number and form == "instructions":
            ins = changed(ins, to_zero)
        elif number:
            inner, other = proxy._proxy, resolve({**config.flat(), "training.lr": 1e-12})
            inner._config = other
            inner._node = replace(inner._node, training=other.run.training)
        replies += server.train([(proxy, ins)])
    assert all("masked/0" in reply_of(result).tensors for _, result in replies)
    server.aggregate(2, replies)
    lanes = config.method.spec.sums.for_run(config.method_settings)
    assert sum("is lost" in text for text in notices) == len(lanes), notices
    derived = "round 2: client-0 derived other keys than most clients"
    assert any(derived in text for text in notices), notices
    after = server.strategy.state_dict()
    assert before.keys() == after.keys()
    # The sites of the other level form a sum that is not spoiled.
    if method in ("fedrolex", "heterofl"):
        return
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "fedprox",
        "pfedme",
        "heterofl",
        "fedrolex",
        "fedper",
        "fedrep",
        "fedbn",
        "ditto",
        "moon",
        "scaffold",
    ],
)
def test_sum_resists_a_malicious_server_only_if_replies_depend_on_no_earlier_round(
    tmp_path, method
):
    """A server could spoil earlier rounds for all clients but one, and so know their replies."""
    config = config_of(method, rounds=3)
    sent = []
    for spoiled in (False, True):
        (folder := tmp_path / f"{spoiled}").mkdir()
        server = Server(config, folder)
        instructions = server.instruct(1)[:1]
        proxy, ins = instructions[0]
        if spoiled:

            def shift(tensors) -> None:
                for value in tensors.values():
                    if np.issubdtype(value.dtype, np.floating):
                        value += np.float32(0.1)

            server.train([(proxy, changed(ins, shift))])
        # SCAFFOLD's server says whether the reply of round 1 counts.
        later = changed(ins, lambda tensors: None, {"counted": 1}, round=2)
        ((_, result),) = server.train([(proxy, later)])
        sent.append(reply_of(result).tensors)
    fresh, spoiled = sent
    same = all(np.array_equal(fresh[name], spoiled[name]) for name in fresh)
    (lane,) = find_method(method).spec.sums.lanes
    assert same is (lane.server == "malicious")


def test_sums_that_resist_a_malicious_server_are_the_documented_ones():
    resisting = {
        name
        for name in SUMMED
        if all(lane.server == "malicious" for lane in find_method(name).spec.sums.lanes)
    }
    assert resisting == {"ditto", "fedavg", "fedprox", "fedrolex", "heterofl", "pfedme"}
    page = (Path(__file__).parents[1] / "docs" / "secure-aggregation.md").read_text()
    rows = [line for line in page.splitlines() if "protects a site from any server" in line]
    assert {n.strip() for row in rows for n in row.split("|")[1].replace("`", "").split(",")} == (
        resisting
    )


def test_site_that_requires_protection_rejects_other_sums(tmp_path, monkeypatch):
    def malicious(data, *, peers_of=simulation.peers_of):
        peers, keys = peers_of(data)
        return replace(peers, server="malicious"), keys

    monkeypatch.setattr(simulation, "peers_of", malicious)
    server = Server(config_of("fedproto", rounds=1, **SECURE), tmp_path)
    _, replies = server.play(1)
    for _, result in replies:
        assert "requires protection from a malicious server" in result.metrics["error"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("training.keep-optimizer", True),
        ("training.schedule", "plateau"),
        ("training.lr", [0.1, 1e-12]),
    ],
)
def test_settings_that_reveal_single_replies_raise(setting, value):
    with pytest.raises(SettingsError, match=setting):
        config_of("fedavg", **SECURE, **{setting: value})


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {"training.weight-decay": 1001.0}),
        ("fedprox", {"fedprox.mu": 1001.0}),
        ("pfedme", {"pfedme.strength": 1001.0}),
        ("pfedme", {"pfedme.strength": 10.0, "pfedme.rate": 0.11}),
    ],
)
def test_regularization_must_not_amplify_the_site_with_the_most_batches(method, settings):
    """A step that multiplies weights by less than -1 makes the longest training dominate a sum."""
    with pytest.raises(SettingsError, match="regularization"):
        config_of(method, **SECURE, **settings)
    assert config_of(method, **settings)
    assert config_of(method, **SECURE)


def test_precision_does_not_depend_on_the_machine():
    changed = {"engine.precision": "auto"}
    assert config_of("fedavg", **changed).run.engine.precision == "auto"
    assert config_of("fedavg", **changed, **SECURE).run.engine.precision == "float32"


def test_sums_do_not_reveal_numbers_of_samples(tmp_path):
    """Two sums that differ by one site would reveal its numbers exactly."""
    server = Server(config_of("felo", models=["cnn2"], **SECURE), tmp_path)
    counts = {}
    aggregate = server.strategy.aggregate

    def recording(round, replies):
        for reply in replies:
            counts[round, reply.client.name] = (
                reply.samples,
                reply.knowledge.tensors["counts"].tolist(),
            )
        return aggregate(round, replies)

    server.strategy.aggregate = recording
    server.play(1)
    samples, by_class = counts[1, "+all"]
    assert samples == 6, "each client has the weight 1"
    assert len(by_class) == 10
    assert len({*by_class}) == 1


def test_client_sends_nothing_about_its_own_samples(tmp_path):
    server = Server(config_of("fedavg", **SECURE), tmp_path)
    assert {member.info.samples for member in server.strategy.members.values()} == {2}
    _, replies = server.play(1)
    plain = Server(config_of("fedavg"), tmp_path / "plain")
    _, plain_answers = plain.play(1)
    for (_, result), (_, other) in zip(replies, plain_answers, strict=True):
        sent = reply_of(result)
        assert sorted(sent.tensors) == ["commitment/0", "masked/0", "shares/0"]
        assert not sent.scalars
        assert result.num_examples == 2
        assert "loss" in other.metrics
        assert "loss" not in result.metrics
        weights = np.concatenate(
            [value.reshape(-1) for value in reply_of(other).tensors.values()]
        ).astype(np.float32)
        vector = sent.tensors["masked/0"][-len(weights) :].view(np.int32)
        assert abs(np.corrcoef(vector.astype(float), weights)[0, 1]) < 0.05, "a mask is there"
    for each, is_plain in ((server, False), (plain, True)):
        sampled = each.flower.configure_evaluate(1)
        for proxy, instruction in sampled:
            result = proxy.request(instruction, None, 0)
            assert "accuracy.common.global" in result.metrics
            assert ("accuracy.personal.global" in result.metrics) is is_plain
            assert (result.loss > 0) is is_plain


def test_reply_is_stored_before_it_is_sent_and_not_computed_again(tmp_path):
    server = Server(config_of("fedavg", **SECURE), tmp_path)
    instructions = server.instruct(1)
    first, second = server.train(instructions), server.train(instructions)
    for (_, one), (_, other) in zip(first, second, strict=True):
        assert one.parameters.tensors == other.parameters.tensors


def test_reply_passes_the_steps_of_an_instruction_in_the_opposite_order(tmp_path, monkeypatch):
    """The guarantees rest on this order, e.g. a reply is stored only after the state is saved."""
    noise = {"privacy.noise-multiplier": 1.0, "models.pool": ["mlp"]}
    server, order = Server(config_of("fedavg", **SECURE, **noise), tmp_path), []
    proxy, ins = server.instruct(1)[0]
    client = client_of(proxy)

    def recorded(owner, name):
        function = getattr(owner, name)

        def call(*args, **options):
            order.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, call)

    recorded(client, "train")
    for name in ("begin", "stored_reply", "filter_reply", "store_reply"):
        recorded(client.privacy, name)
    for name in ("masked", "store"):
        recorded(client.masking, name)
    recorded(client.codec, "encode_reply")
    for name in ("restore", "save"):
        recorded(client.state, name)
    check = client.masking.begin
    monkeypatch.setattr(
        client.masking, "begin", lambda *words: (order.append("check"), check(*words))[1]
    )
    first = proxy.request(ins, None, 1)
    received, sent = order[: order.index("train")], order[order.index("train") + 1 :]
    assert received == ["begin", "check", "stored_reply", "restore"]
    assert sent == ["filter_reply", "masked", "encode_reply", "save", "store", "store_reply"]
    assert "error" not in first.metrics
    order.clear()
    again = proxy.request(ins, None, 1)
    assert order == ["begin", "check", "restore"]
    assert again.parameters.tensors == first.parameters.tensors


def test_run_continues_without_a_sum_that_clients_refuse(tmp_path, monkeypatch):
    lane_of = Masking._lane

    def refusing(self, number, cohort):
        if number == 1:
            raise MaskingError("masking: cohort: too small")
        return lane_of(self, number, cohort)

    monkeypatch.setattr(Masking, "_lane", refusing)
    said = Notices()
    summary = run(config_of("felo", models=["cnn2"], **SECURE), tmp_path, [said])
    assert len(records(tmp_path)[0]["answered"]) == 6
    assert summary["history"][-1]["accuracy"]["common"]
    assert "client client-0 refuses a sum: masking: cohort: too small" in said.texts
    assert any("sum of weights of cnn2 is lost: 0 of 6" in text for text in said.texts)


def test_run_continues_without_the_clients_that_are_lost(tmp_path):
    # One of six clients drops out in round 1, which the sum tolerates, and two in round 2.
    config = config_of("fedavg", rounds=3, **SECURE, **{"pace.drop-outs": 0.08, "seed": 17})
    run(config, tmp_path)
    first, second, third = records(tmp_path)
    assert len(first["failed"]) == 1
    assert len(first["answered"]) == 5
    assert not {*first["answered"]} & {*first["failed"]}
    assert len(second["failed"]) == 2
    assert not second["answered"], "the threshold is five"
    assert len(third["answered"]) == 6


@pytest.mark.parametrize(
    ("step", "moment"),
    [
        ("start", "before"),
        ("start", "after"),
        pytest.param("_ask", "before", marks=pytest.mark.slow),
        ("_ask", "after"),
        pytest.param("_sum", "after", marks=pytest.mark.slow),
    ],
)
def test_server_that_is_stopped_at_any_step_resumes_with_the_same_sums(
    tmp_path, monkeypatch, step, moment
):
    config = config_of("fedavg", rounds=2, **SECURE)
    run(config, tmp_path / "whole")
    real, calls = getattr(Unmasking, step), []

    def stopping(self, *args):
        calls.append(step)
        if moment == "before" and len(calls) == 2:
            raise CutError
        result = real(self, *args)
        if moment == "after" and len(calls) == 2:
            raise CutError
        return result

    monkeypatch.setattr(Unmasking, step, stopping)
    with pytest.raises(CutError):
        run(config, tmp_path / "cut")
    # A copy, because the interrupted run stays locked until its objects are collected.
    shutil.copytree(tmp_path / "cut", tmp_path / "copy")
    run(resumed(config, tmp_path / "copy"), tmp_path / "copy")
    same_but_for_the_name(tmp_path / "whole", tmp_path / "copy")


@pytest.mark.slow
def test_ray_gives_the_same_numbers(tmp_path):
    config = config_of("felo", rounds=2, **SECURE)
    summaries = [
        run(resolve({**config.flat(), "engine.backend": backend}), tmp_path / backend)
        for backend in ("inline", "ray")
    ]
    assert summaries[0]["accuracy"] == summaries[1]["accuracy"]


@pytest.mark.slow
def test_differential_privacy_and_int8_instructions_work_with_sums(tmp_path):
    secure = {**SECURE, "privacy.epsilon": 50.0, "wire.encoding": "int8"}
    config = config_of("fedavg", rounds=2, models=["mlp"], **secure)
    summary = run(config, tmp_path / "run")
    assert summary["history"][-1]["accuracy"]["common"]
    assert all(value > 0 for value in records(tmp_path / "run")[-1]["epsilon"].values())


# Refusals before a run


@pytest.mark.parametrize(
    "method", sorted(name for name, m in all_methods()[0].items() if m.spec.sums.unsupported)
)
def test_methods_that_need_single_replies_raise(method):
    reason = find_method(method).spec.sums.unsupported
    with pytest.raises(SettingsError) as error:
        resolve({"method": method, **SECURE})
    assert str(error.value) == (
        f"setting 'privacy.secure-aggregation': unsupported by {method} ({reason}), expected "
        "false, got True"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 0.5}, "'fraction': expected 1 with 'privacy.secure-aggregation', got 0.5"),
        ({"defense.average": "median"}, "'defense.average': expected mean with"),
        ({"attack.kind": "sign-flip"}, "'attack.kind': expected none with"),
        ({"pace.mode": "asynchronous"}, "'pace.mode': expected synchronous with"),
        ({"pace.over-selection": 0.5}, "'pace.over-selection': expected 0 with"),
        ({"pace.min-replies": 0.5}, "'pace.min-replies': expected 1 with"),
        ({"pace.timeout": "3x"}, "'pace.timeout': expected empty with"),
        ({"pace.select": "oort"}, "'pace.select': expected random with"),
        ({"wire.encoding": "top-k"}, "'wire.encoding': expected float32 or float16 or int8 with"),
        ({"data.held-out-clients": 0.2}, "'data.held-out-clients': expected 0 with"),
        ({"clients": 2}, "'clients': expected at least 3 with"),
        ({"method": "fedhe"}, "'fedhe.replies': expected latest with"),
        ({"method": "heterofl"}, "'heterofl.weighting': expected samples with"),
        (
            {"method": "heterofl", "heterofl.weighting": "samples"},
            "'heterofl.masked': expected false with",
        ),
    ],
)
def test_settings_that_need_single_replies_raise(settings, message):
    with pytest.raises(SettingsError) as error:
        resolve({"method": "fedavg", **SECURE, **settings})
    assert message in str(error.value)


def test_round_waits_until_enough_clients_for_a_sum_are_connected(tmp_path):
    """Otherwise, the remaining rounds of three sites pass while one of them restarts."""
    server = Server(config_of("fedavg", clients=3, join_timeout=60.0, **SECURE), tmp_path)
    server.play(1)
    server.close(1)
    lost = server.manager.all()["client-1"]
    server.manager.unregister(lost)
    threading.Timer(1.0, server.manager.register, [lost]).start()
    assert sorted(proxy.name for proxy, _ in server.instruct(2)) == [
        "client-0",
        "client-1",
        "client-2",
    ]


def test_round_without_enough_clients_is_canceled_after_the_timeout(tmp_path):
    server = Server(config_of("fedavg", clients=3, join_timeout=1.0, **SECURE), tmp_path)
    server.manager.unregister(server.manager.all()["client-1"])
    assert server.instruct(1) == []


def test_client_that_is_needed_for_a_sum_is_called_although_it_backs_off(tmp_path):
    for secure, called in ((True, 3), (False, 2)):
        (directory := tmp_path / f"{secure}").mkdir()
        changes = {"clients": 3, **(SECURE if secure else {})}
        server = Server(config_of("fedavg", **changes), directory)
        reason = server.flower.state.health.exclusion_reason
        server.flower.state.health.exclusion_reason = lambda round, name, reason=reason: (
            "backing off" if name == "client-1" else ""
        )
        assert len(server.instruct(1)) == called


def test_level_with_too_few_clients_raises_before_the_first_round(tmp_path):
    config = config_of("heterofl", clients=5, **SECURE)
    with pytest.raises(SettingsError, match=r"3 clients.*2 clients"):
        Server(config, tmp_path)


def test_run_without_secure_aggregation_has_no_keys(tmp_path: Path):
    server = Server(config_of("fedavg"), tmp_path)
    server.play(1)
    assert not (tmp_path / "secure-aggregation.json").exists()
    assert not list(tmp_path.rglob("*peers*"))
