"""Runs with encodings: known and missing weights, unsent changes, and equal results."""

import json
import shutil

import numpy as np
import pytest
from federation import Server, client_of, records, run, small, without_times
from flwr.common import (
    Code,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from interruption import cut_and_resumed

from fedhet.base.arrays import OnDemand
from fedhet.base.errors import SettingsError
from fedhet.methods.registry import find_method
from fedhet.server.codec import MAX_VERSIONS, Codec, InstructionEncoder
from fedhet.server.reply import ReplySpool
from fedhet.server.round import RoundState
from fedhet.settings.engine import WireSettings
from fedhet.wire.contract import Contract, WeightsField
from fedhet.wire.encodings import Coder, rules_of
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Envelope, Knowledge, Packing, decode, digest_of, encode

LOSSY = ("float16", "int8", "top-k")


def encoded(method="fedavg", encoding="int8", **changes):
    return small(method, **{"wire.encoding": encoding, **changes})


def received(proxy, ins):
    """Return a client's decoded instruction."""
    client = client_of(proxy)
    return client.codec.decode_instruction(parameters_to_ndarrays(ins.parameters), client.sizes)[1]


def folders(server, what="received"):
    return sorted(server.log.directory.glob(f"state/*/*/{what}"))


# --- equal numbers ----------------------------------------------------------------------------

CASES = [
    ("felo", "int8", {"evaluate-every": 2}),
    ("fedavg", "top-k", {}),
    ("fedgems", "int8", {"fedgems.server-model": "mlp"}),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in [
            ("feddf", "int8", {"feddf.epochs": 1}),
            ("um-pfssl", "float16", {"um-pfssl.warm-up": 1, "um-pfssl.passes": 2}),
        ]
    ),
]


@pytest.mark.parametrize(("method", "encoding", "changes"), CASES)
def test_resumed_run_is_equal_bit_for_bit(method, encoding, changes, tmp_path):
    config = encoded(method, encoding, rounds=4, fraction=0.75, **changes)
    cut_and_resumed(config, tmp_path, 3, "after" if method == "felo" else "before")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["top-k", *LOSSY[:2]])
def test_ray_gives_the_metrics_of_inline(encoding, tmp_path):
    config = encoded("felo", encoding, rounds=3, max_samples=200)
    inline = run(config, tmp_path / "inline")
    on_ray = run(
        encoded("felo", encoding, rounds=3, max_samples=200, backend="ray"), tmp_path / "ray"
    )
    assert without_times(on_ray) == without_times(inline)


@pytest.mark.parametrize("method", ["fedavg", "felo"])
def test_metrics_do_not_depend_on_resending(method, tmp_path):
    found = {}
    for resend in (True, False):
        config = small(method, rounds=3, **{"wire.resend": resend})
        summary = run(config, tmp_path / f"{resend}")
        found[resend] = summary["accuracy"], [r["loss"] for r in records(tmp_path / f"{resend}")]
    assert found[True] == found[False]
    one, other = (records(tmp_path / f"{resend}")[2] for resend in (True, False))
    assert one["bytes_up"] == other["bytes_up"]
    assert one["bytes_evaluation"] == pytest.approx(other["bytes_evaluation"], rel=0.01)
    assert other["bytes_down"] < 0.2 * one["bytes_down"]


@pytest.mark.parametrize("encoding", LOSSY)
def test_encoding_saves_bytes_and_changes_little(encoding, tmp_path):
    plain = run(small("fedavg", rounds=3), tmp_path / "plain")
    found = run(encoded(encoding=encoding, rounds=3), tmp_path / encoding)
    sums = [
        [sum(r[name] for r in records(tmp_path / where)) for name in ("bytes_up", "bytes_down")]
        for where in ("plain", encoding)
    ]
    up, down = (other / one for one, other in zip(*sums, strict=True))
    assert up < {"float16": 0.6, "int8": 0.36, "top-k": 0.22}[encoding]
    assert down < 0.2  # weights to evaluate are those of the next round
    if encoding != "top-k":
        one, other = (each["accuracy"]["common"]["global"]["mean"] for each in (plain, found))
        assert abs(one - other) < 0.03


# --- what clients have ------------------------------------------------------------------------


def test_held_weights_are_not_sent_again(tmp_path):
    server = Server(encoded(), tmp_path)
    server.play(1)
    server.close(1)
    for proxy, ins in server.instruct(2):
        assert sum(map(len, ins.parameters.tensors)) < 1000
        weights = received(proxy, ins).group("weights")
        assert weights.keys() == server.strategy.averaged["weights"].keys()
        for name, value in server.strategy.averaged["weights"].items():
            np.testing.assert_allclose(weights[name], value, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("encoding", LOSSY)
def test_server_tracks_decoded_weights_of_each_client(encoding, tmp_path):
    server = Server(encoded("felo", encoding), tmp_path)
    for number in (1, 2, 3):
        instructions = server.instruct(number)
        for proxy, ins in instructions:
            kept = server.flower.state.calls.sent(proxy.name, number)[0]
            came = received(proxy, ins).tensors
            if kept is None:  # without weights, nothing builds on it
                assert number == 1
                assert not any(name.startswith("weights/") for name in came)
                continue
            assert kept.tensors.keys() == came.keys()
            assert all(kept.tensors[n].tobytes() == v.tobytes() for n, v in came.items())
        server.aggregate(number, server.train(instructions))
        server.close(number)


def lose(folder):
    shutil.rmtree(folder)


def damage(folder):
    """Swap weights: the files are valid, but have wrong names."""
    paths = sorted(folder.glob("*.safetensors"))
    contents = [path.read_bytes() for path in paths]
    for path, other in zip(paths, [contents[-1], *contents], strict=False):
        path.write_bytes(other)
    assert len(paths) > 1


def cut(folder):
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("encoding", "happens"), [("int8", lose), ("int8", damage), ("float16", cut)]
)
def test_client_that_lost_its_weights_receives_full_weights(encoding, happens, tmp_path):
    """This costs bytes, but does not change the results."""
    servers = [Server(encoded(encoding=encoding), tmp_path / name) for name in ("whole", "lost")]
    for number in (1, 2, 3):
        for server in servers:
            if number > 1 and server is servers[1]:
                happens(folders(server)[0])
            _, replies = server.play(number)
            assert not any("error" in result.metrics for _, result in replies)
            server.close(number)
    whole, lost = (server.strategy.averaged["weights"] for server in servers)
    for name, value in whole.items():
        assert value.tobytes() == lost[name].tobytes()
    whole, lost = (server.flower.state.record for server in servers)
    assert lost.bytes_down > whole.bytes_down + 20_000
    assert lost.answered == whole.answered


def test_reply_with_an_unknown_base_is_dropped(tmp_path):
    server = Server(encoded(), tmp_path)
    instructions = server.instruct(1)
    server.flower.state.calls.close(instructions[0][0].name, 1)
    replies = server.train(instructions)
    server.aggregate(1, replies)
    failed = server.flower.state.record.failed
    assert list(failed) == [instructions[0][0].name]
    assert "base: " in failed[instructions[0][0].name]


# --- what is left unsent ----------------------------------------------------------------------


def test_repeated_round_counts_the_residual_once(tmp_path):
    server = Server(encoded(encoding="top-k"), tmp_path)
    server.play(1)
    server.close(1)
    instructions = server.instruct(2)
    proxy, ins = instructions[0]

    def played():
        result = proxy._proxy.fit(ins, None, 0)
        kept = {n: v.numpy().copy() for n, v in client_of(proxy).state.tensors.items()}
        return result.parameters.tensors, kept

    first, left = played()
    again, left_again = played()
    assert first == again
    assert left.keys() == left_again.keys()
    assert any(name.startswith("unsent/weights/") and np.abs(v).max() for name, v in left.items())
    assert all(np.array_equal(value, left_again[name]) for name, value in left.items())


def test_sent_and_residual_values_sum_to_the_change(tmp_path):
    """Compare sums over rounds of the server's decoded values and the client's changes."""
    server = Server(encoded(encoding="top-k", clients=2), tmp_path)
    learned, came = {}, {}
    for number in (1, 2, 3):
        instructions = server.instruct(number)
        starts = {proxy.name: received(proxy, ins).group("weights") for proxy, ins in instructions}
        replies = server.train(instructions)
        for proxy, result in replies:
            client, start = client_of(proxy), starts[proxy.name]
            find = server.flower.state.calls.bases_of(proxy.name)
            reply = decode(parameters_to_ndarrays(result.parameters), "a", find)[1]
            for name, value in reply.group("weights").items():
                place = proxy.name, name
                after = client.network.state_dict()[name].numpy()
                learned[place] = learned.get(place, 0) + after - start[name]
                came[place] = came.get(place, 0) + value - start[name]
        server.aggregate(number, replies)
        if number < 3:
            server.close(number)
    compared = 0
    for proxy, _ in instructions:
        for name, value in client_of(proxy).state.tensors.items():
            place = proxy.name, name.removeprefix("unsent/weights/")
            np.testing.assert_allclose(came[place] + value.numpy(), learned[place], atol=1e-4)
            compared += 1
    assert compared >= 8


# --- the encoder ------------------------------------------------------------------------------

SENT = Contract((WeightsField("weights", "a model"),))


def weights(seed, size=300):
    rng = np.random.default_rng(seed)
    return Knowledge({"weights/w": rng.normal(size=size).astype(np.float32)})


def encoder(encoding="int8"):
    return InstructionEncoder(Coder.for_contract(WireSettings(encoding=encoding), SENT, 0))


def decoded(parameters, base=None):
    bases = {digest_of(base): base} if base else {}
    arrays = parameters_to_ndarrays(parameters)
    return decode(arrays, "server", lambda envelope, digest: bases.get(digest))[1].tensors


def place(round):
    return Envelope("run", "m", round, "server")


def test_each_way_to_send_a_version_gives_the_same_numbers():
    made, clients = encoder(), ("a", "b", "c")
    first = made.instruction(place(1), "train", weights(1), clients)
    for client in clients[:2]:
        made.payload(client, first)
    second = made.instruction(place(2), "train", weights(2), clients)
    old, new = first.knowledge.tensors, second.knowledge.tensors
    ways = [second.payload_for(held) for held in (0, digest_of(old), digest_of(new))]
    sizes = [sum(map(len, each.tensors)) for each in ways]
    assert sizes[0] > sizes[1] > sizes[2]
    for way, base in zip(ways, (None, old, new), strict=True):
        assert decoded(way, base)["weights/w"].tobytes() == new["weights/w"].tobytes()
    half = new["weights/w"]
    assert np.array_equal(half, half.astype(np.float16))
    unit = np.abs(weights(2).tensors["weights/w"] - old["weights/w"]).max() / 127
    error = np.abs(half - weights(2).tensors["weights/w"])
    assert error.max() <= unit * 1.01 + np.abs(half).max() * 2**-11


def test_encoding_errors_do_not_accumulate():
    made, last = encoder(), None
    for round in range(1, 40):
        last = made.instruction(place(round), "train", weights(round), ["a"])
        made.payload("a", last)
    off = last.knowledge.tensors["weights/w"] - weights(39).tensors["weights/w"]
    assert np.abs(off).max() < 0.1  # a difference is up to 8, its unit a 127th of that
    assert abs(off.mean()) < 0.01


def test_resent_weights_keep_their_version():
    made = encoder()
    one = made.instruction(place(1), "evaluate", weights(1), ["a"])
    made.payload("a", one)
    made.drop_unused()
    other = made.instruction(place(2), "train", weights(1), ["a", "b"])
    assert other.version.digest == one.version.digest
    assert decoded(made.payload("b", other)).keys() == {"weights/w"}


def test_unused_versions_are_deleted():
    made = encoder()
    for number in range(20):
        made.payload(f"c{number}", made.instruction(place(1), "train", weights(number), ()))
        made.drop_unused()
    assert len(made.state_dict()) == MAX_VERSIONS
    for number in range(20):
        made.payload(f"c{number}", made.instruction(place(2), "train", weights(77), ()))
    made.drop_unused()
    assert len(made.state_dict()) == 1


def test_restored_server_knows_weights_of_its_clients():
    made, back = encoder(), encoder()
    made.payload("a", made.instruction(place(1), "train", weights(1), ["a"]))
    kept = made.state_dict() | {"other": np.ones(2)}
    assert back.load(kept, json.loads(json.dumps(made.metadata()))).keys() == {"other"}
    one, other = (each.instruction(place(2), "train", weights(2), ["a"]) for each in (made, back))
    assert one.version.digest == other.version.digest
    assert made.payload("a", one).tensors == back.payload("a", other).tensors


def test_plain_instructions_leave_no_state():
    plain = InstructionEncoder(Coder.for_contract(small().run.wire, SENT, 0))
    plain.payload("a", plain.instruction(place(1), "train", weights(1), ["a"]))
    assert plain.state_dict() == plain.metadata() == plain.held == {}


# --- replies on disk --------------------------------------------------------------------------


def test_encoded_reply_is_stored_decoded(tmp_path):
    coder = Coder(rules_of(WireSettings(encoding="int8")), SENT, 0)
    base, own = weights(1).tensors, weights(2).tensors
    travels, _ = coder.reply(("a", 1), own, base, {})
    state, packing = RoundState(1, print), Packing(travels, digest_of(base))
    state.calls.keep("a", 1, Knowledge(base), digest_of(base))
    codec, spool = Codec("run", find_method("fedavg"), 10**6, state), ReplySpool(tmp_path, SENT)
    times = {"seconds.train": 0.0, "seconds.evaluate": 0.0, "memory": 0.0}
    outcomes = []
    for name in ("a", "b"):
        message = encode(Envelope("run", "fedavg", 1, name), Knowledge(own), packing)
        payload = ndarrays_to_parameters(message)
        result = FitRes(Status(Code.OK, ""), payload, 1, times)
        client = ClientInfo(name, "mlp", 12, 3, "table", (4,))
        outcomes.append(spool.put(codec.read(client, (), result, 1)))
        assert outcomes[-1].bytes_received == sum(map(len, payload.tensors)), "as it was sent"
    tensors = outcomes[0].knowledge.tensors
    assert isinstance(tensors, OnDemand)
    assert tensors["weights/w"].dtype == np.float32
    assert np.abs(tensors["weights/w"] - own["weights/w"]).max() < 8 / 127
    assert outcomes[1].error.startswith("base: ")
    assert (outcomes[1].failure, outcomes[1].is_reply) == ("refused", True)
    assert not outcomes[1].knowledge.tensors


# --- settings ---------------------------------------------------------------------------------


def test_settings_are_ranged_and_change_the_experiment():
    with pytest.raises(SettingsError, match=r"wire\.encoding"):
        small(**{"wire.encoding": "zip"})
    for odd in (0.0, 0.6, -1.0):
        with pytest.raises(SettingsError, match=r"wire\.keep"):
            small(**{"wire.encoding": "top-k", "wire.keep": odd})
    assert rules_of(small().run.wire) is None
    assert encoded().flat()["wire.encoding"] == "int8"
