"""FedLoRA's rules that change the frozen weights: FLoRA (flora) and FedEx-LoRA (fedex)."""

import copy

import numpy as np
import pytest
import torch
from bases import make_bases
from federation import Server, client_of, run, small
from interruption import cut_and_resumed
from rounds import clients, instruction_of, opened, replied, reply_of, same, state_of
from safetensors.numpy import load_file
from transformers import AutoModel

from fedhet import models
from fedhet.algorithms.adapters import compacted, factors_of, residual, stacked
from fedhet.base.errors import KnowledgeError, SettingsError
from fedhet.client_runtime.node import read_node
from fedhet.data.texts import VARIABLE
from fedhet.inference.client import TrainedClient, open_client, open_server
from fedhet.inference.export import export
from fedhet.methods.fedlora import SPEC, rank_in
from fedhet.models import adapted
from fedhet.models.adapted import Adapted, Merged
from fedhet.server.round import Selection
from fedhet.wire.knowledge import Envelope, Knowledge, encode

RULES = ("flora", "fedex")
POOL = [f"encoder-1-lora{rank}:vit" for rank in (2, 4, 6)]
SCALE = 2.0


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(autouse=True)
def _variable(home, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(home))


def federation(rule, **changes):
    few = {"clients": 3, "models": POOL, "max_samples": 120, "partition": "iid"}
    return small("fedlora", **{**few, "fedlora.aggregation": rule, "training.lr": 0.02, **changes})


def wide(b, a):
    return np.float64(b) @ np.float64(a)


def padded(value, shape):
    return np.pad(value, [(0, size - old) for size, old in zip(shape, value.shape, strict=True)])


def encoder_of(network) -> Adapted:
    return next(each for each in network.modules() if isinstance(each, Adapted))


def frozen_of(network):
    """Return the frozen weights of the adapted layers that a forward pass uses, by path."""
    encoder = encoder_of(network)
    bound = encoder.network(torch.device("cpu"), torch.float32)
    paths = factors_of(dict(encoder.named_parameters()))
    return {path: bound.get_submodule(path).base_layer.weight for path in paths}


def base_weights(home, paths):
    plain = AutoModel.from_pretrained(home / "vit", add_pooling_layer=False)
    return {path: np.float64(plain.get_submodule(path).weight.detach().numpy()) for path in paths}


def select(server, *names):
    server.strategy.select = lambda round, members: Selection(names)


# The formulas of the papers


def draws(ranks, seed=0, size=(7, 9)):
    rng = np.random.default_rng(seed)
    rows, columns = size
    return [
        ((np.float32(rng.normal(size=(rows, r))), np.float32(rng.normal(size=(r, columns)))), n)
        for r, n in zip(ranks, (3, 1, 6, 2), strict=False)
    ]


@pytest.mark.parametrize("ranks", [(2, 4, 6), (6, 2, 4), (3, 3, 3, 3), (5,)])
def test_factors_equal_the_dense_formulas(ranks):
    parts = draws(ranks)
    total, rank = sum(n for _, n in parts), max(ranks)
    mean = sum(n / total * wide(b, a) for (b, a), n in parts)
    found = stacked(parts)
    assert found[0].shape[1] == sum(ranks)
    np.testing.assert_allclose(wide(*found), mean, atol=1e-5)
    mean_b = sum(n / total * padded(b, (7, rank)) for (b, _), n in parts)
    mean_a = sum(n / total * padded(a, (rank, 9)) for (_, a), n in parts)
    found = residual(parts, (np.float32(mean_b), np.float32(mean_a)))
    assert found[0].shape[1] == sum(ranks) - min(ranks)
    np.testing.assert_allclose(wide(*found), mean - wide(mean_b, mean_a), atol=1e-5)


@pytest.mark.parametrize("size", [(7, 9), (9, 7)])
def test_compacted_factors_have_an_equal_product(size):
    ((b, a), _), *_ = draws((20,), size=size)
    factors = {"q.lora_B.weight": b, "q.lora_A.weight": a}
    found = compacted(factors, 8)
    assert [found[name].shape for name in factors] == [(size[0], 8), (8, size[1])]
    np.testing.assert_allclose(wide(*found.values()), wide(b, a), atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_rounds_equal_the_papers(tmp_path, home, rule):
    """Follow the weights over four rounds, in the last of which the factors are compacted."""
    server = Server(federation(rule, partition="dirichlet", rounds=5), tmp_path)
    expected, ranks = {}, []
    for number in range(1, 6):
        instructions, results = server.play(number)
        order = sorted(results, key=lambda each: each[0].name)
        samples = [server.strategy.members[proxy.name].info.samples for proxy, _ in order]
        share = [n / sum(samples) for n in samples]
        ranks += [instruction_of(each).scalars["start"] for each in instructions]
        sent = [factors_of(reply_of(result).group("weights")) for _, result in order]
        assert len(set(samples)) > 1
        encoders = [encoder_of(client_of(proxy).network) for proxy, _ in order]
        start = base_weights(home, factors_of(encoders[0].state_dict()))
        for proxy, _ in order:  # the frozen weights with which the clients have trained
            for path, weight in frozen_of(client_of(proxy).network).items():
                change = np.float64(weight.detach().numpy()) - start[path]
                target = expected.get(path, np.zeros_like(change))
                np.testing.assert_allclose(change, target, atol=2e-6)
        for path in start:
            factors = [each[f"extractor.0.{path}"] for each in sent]
            mean = sum(p * wide(b, a) for p, (b, a) in zip(share, factors, strict=True))
            if rule == "fedex":
                b = sum(p * padded(b, (16, 6)) for p, (b, _) in zip(share, factors, strict=True))
                a = sum(p * padded(a, (6, 16)) for p, (_, a) in zip(share, factors, strict=True))
                mean = mean - b @ a
                new_b, new_a = factors_of(server.strategy.weights)[f"extractor.0.{path}"]
                np.testing.assert_allclose(new_b, b, atol=1e-6)
                np.testing.assert_allclose(new_a, a, atol=1e-6)
            assert np.abs(mean).max() > 1e-4
            expected[path] = expected.get(path, 0) + SCALE * mean
        assert 0 < server.flower.state.record.method["top_energy"] <= 1
        head = sum(
            p * np.float64(reply_of(result).tensors["weights/classifier.weight"])
            for p, (_, result) in zip(share, order, strict=True)
        )
        np.testing.assert_allclose(server.strategy.weights["classifier.weight"], head, atol=1e-6)
    # At most 32 columns. Then compacted to 16, which all clients lack: flora in rounds 3 and 5,
    # and fedex in round 4.
    starts, last = {"flora": ([0, 0, 12, 0, 16], 16), "fedex": ([0, 0, 10, 20, 0], 26)}[rule]
    assert ranks == [rank for rank in starts for _ in range(3)]
    assert list(server.strategy.marks.values())[-1] == last


def test_flora_draws_new_adapters_in_each_round(tmp_path):
    """With a tiny learning rate, the clients reply with the adapters with which they start."""
    sent = {}
    for rank, model in ((2, POOL[0]), (6, POOL[2])):
        config = federation("flora", models=model, **{"training.lr": 1e-30})
        server = Server(config, tmp_path / str(rank))
        for number in (1, 2):
            instructions, results = server.play(number)
            for each in instructions:
                assert not any("lora" in name for name in instruction_of(each).group("weights"))
            for proxy, result in results:
                (b, a), *_ = factors_of(reply_of(result).group("weights")).values()
                sent[rank, number, proxy.name] = a
                assert np.abs(b).max() < 1e-25
                assert np.abs(a).max() <= 16**-0.5
    assert len({value.tobytes() for key, value in sent.items() if key[0] == 6}) == 6
    for (rank, *rest), value in sent.items():
        assert np.array_equal(value, sent[6, *rest][:rank])


# Clients that lack factors


@pytest.mark.parametrize("rule", RULES)
def test_client_catches_up_to_equal_weights_and_predictions(tmp_path, rule):
    """Compare a client that missed two rounds, and a new client, with the other clients."""
    config = federation(rule, models=POOL[0], rounds=6)
    server = Server(config, tmp_path / "run")
    columns, fewer = (6, 4) if rule == "flora" else (4, 2)
    for number in (1, 2):
        server.play(number)
    select(server, "client-1", "client-2")
    server.play(3)
    evaluations = server.flower.configure_evaluate(3)
    assert len(evaluations) == 3
    x, outputs = torch.rand(5, 1, 8, 8) * 2 - 1, []
    for call in evaluations:  # also the client that did not train
        knowledge = instruction_of(call)
        client = client_of(call[0])
        found = client.eval_models(knowledge)["global"]
        outputs.append(found.eval()(x).detach())
        assert knowledge.scalars["start"] == (2 if call[0].name != "client-0" else 1) * columns
    assert all(torch.equal(outputs[0], each) for each in outputs)
    select(server, *sorted(server.strategy.members))
    instructions = {each[0].name: each for each in server.instruct(4)}
    assert [instruction_of(instructions[f"client-{k}"]).scalars["start"] for k in range(3)] == [
        columns, 2 * columns, 2 * columns,
    ]  # fmt: skip
    server.train(instructions.values())
    late, other = (client_of(instructions[name][0]) for name in ("client-0", "client-1"))
    whole = server.strategy.eval_instruction(4, server.strategy.members["client-0"].info)
    assert whole.scalars == {"start": 0, "base": 0}  # `instruct` does not rely on the last reply
    new = opened(config, tmp_path / "new")
    replied(new, 4, whole)
    original = encoder_of(models.build(POOL[0], (1, 8, 8), 10, seed=0))
    for path, weight in frozen_of(late.network).items():
        base = original.network(torch.device("cpu"), torch.float32).get_submodule(path).base_layer
        for client in (late, other, new):
            theirs = encoder_of(client.network).merged[path]
            assert theirs.b.shape[1] == 2 * columns + fewer
            apart = Merged(theirs.b.clone(), theirs.a.clone())  # without the shared weight
            assert torch.equal(apart.weight(base.weight, SCALE, base.weight), weight)
            assert torch.equal(frozen_of(client.network)[path], weight)
    assert torch.equal(late.eval_models(whole)["global"].eval()(x),
                       new.eval_models(whole)["global"].eval()(x))  # fmt: skip


def test_client_that_lacks_factors_reports_it_and_then_gets_all(tmp_path):
    server = Server(federation("flora", rounds=4), tmp_path)
    for number in (1, 2):
        server.play(number)
    (call, *_) = server.instruct(3)
    proxy, knowledge = call[0], instruction_of(call)
    client = opened(federation("flora"), tmp_path / "new")
    _, _, metrics = client.fit(encode(Envelope("run", "fedlora", 3, "server"), knowledge), {})
    assert "lacks the 12 rank levels" in str(metrics["error"])
    wrong = Knowledge(knowledge.tensors, {**knowledge.scalars, "base": 7})
    envelope = Envelope(server.log.run_name, "fedlora", 3, "server")
    _, _, metrics = client_of(proxy).fit(encode(envelope, wrong), {})
    assert "lacks the 12 rank levels" in str(metrics["error"])
    (again, *_) = server.instruct(4)
    assert instruction_of(again).scalars == {"start": 0, "base": 0}
    merged = factors_of(instruction_of(again).group("merged"))
    assert {a.shape[0] for _, a in merged.values()} == {24}


# Saved states


@pytest.mark.parametrize("rule", RULES)
def test_resumed_run_equals_uninterrupted_run(tmp_path, rule):
    config = federation(rule, rounds=4, fraction=0.67)
    cut_and_resumed(config, tmp_path, round=3)


def test_restarted_client_and_copies_keep_the_merged_factors(tmp_path):
    config = federation("flora", rounds=3)
    server = Server(config, tmp_path)
    for number in (1, 2, 3):
        server.play(number)
    x = torch.rand(5, 1, 8, 8) * 2 - 1
    for number, client in enumerate(clients(server).values()):
        again = opened_in(server, config, tmp_path, number)
        assert same(state_of(again.network), state_of(client.network))
        assert any("merged" in name for name in state_of(again.network))
        clone = copy.deepcopy(client.network)
        for other in (again.network, clone):
            assert torch.equal(other.eval()(x), client.network.eval()(x))
            for path, weight in frozen_of(client.network).items():
                assert frozen_of(other)[path].data_ptr() == weight.data_ptr()
        plain = {n: v for n, v in clone.state_dict().items() if "merged" not in n}
        clone.load_state_dict(plain)  # a state without merged factors has the original base
        assert not encoder_of(clone).merged
        assert not torch.equal(clone.eval()(x), client.network.eval()(x))
        wrong = {n: v[:1] if "merged_A" in n else v for n, v in again.network.state_dict().items()}
        with pytest.raises(RuntimeError, match="merged factors of"):
            clone.load_state_dict(wrong)


def opened_in(server, config, directory, partition):
    node_config = {"partition-id": partition, "num-partitions": config.run.clients}
    node = read_node(node_config, config.run, str(directory / "state"), server.strategy.data)
    client = config.method.client(config, node)
    client.state.restore(server.log.run_name, before=99)
    return client


def test_ten_clients_share_each_changed_weight(tmp_path):
    server = Server(federation("flora", clients=10, max_samples=200, rounds=3), tmp_path)
    for number in (1, 2, 3):
        server.play(number)
    found = [frozen_of(client.network) for client in clients(server).values()]
    assert len(found) == 10
    for path in found[0]:
        assert len({each[path].data_ptr() for each in found}) == 1
    (path, *_) = found[0]
    half = [encoder_of(c.network).network(torch.device("cpu"), torch.bfloat16)
            .get_submodule(path).base_layer.weight for c in clients(server).values()]  # fmt: skip
    assert len({each.data_ptr() for each in half}) == 1
    assert torch.equal(half[0].float(), found[0][path].bfloat16().float())


# After the run


@pytest.fixture(scope="module", params=RULES)
def finished(request, home, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(home))
        directory = tmp_path_factory.mktemp("run") / "run"
        run(federation(request.param, rounds=3, **{"training.lr": 0.05}), directory)
        return directory


@pytest.mark.parametrize("kind", ["private", "global"])
@pytest.mark.parametrize("form", ["peft", "merged"])
def test_export_has_equal_outputs_in_the_libraries(finished, home, tmp_path, form, kind):
    client = open_client(finished, "client-1")
    export(client, form, tmp_path / "out", kind)
    x = torch.rand(4, 1, 8, 8) * 2 - 1
    network = client.network(kind).eval()
    if form == "peft":
        peft = pytest.importorskip("peft")
        base = AutoModel.from_pretrained(home / "vit")
        plain = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    else:
        plain = AutoModel.from_pretrained(tmp_path / "out").eval()
    tensors = load_file(tmp_path / "out" / "head.safetensors")
    head = {name: torch.from_numpy(value) for name, value in tensors.items()}
    assert set(head) == {"classifier.weight", "classifier.bias"}
    with torch.no_grad():
        features = plain(pixel_values=x).last_hidden_state[:, 0]
        found = features @ head["classifier.weight"].T + head["classifier.bias"]
        assert torch.allclose(found, network(x), atol=1e-5)
        base = AutoModel.from_pretrained(home / "vit").eval()(pixel_values=x).last_hidden_state
    assert not torch.allclose(features, base[:, 0], atol=1e-3)


def test_server_and_clients_predict_with_the_same_global_model(finished):
    x = torch.rand(5, 1, 8, 8) * 2 - 1
    for name, model in zip(("client-0", "client-1", "client-2"), POOL, strict=True):
        server, client = open_server(finished, architecture=model), open_client(finished, name)
        networks = server.network("global").eval(), client.network("global").eval()
        assert all(encoder_of(network).merged for network in networks)
        with torch.no_grad():
            assert torch.equal(networks[0](x), networks[1](x))


def test_exported_program_contains_the_changed_weights(finished, tmp_path, monkeypatch):
    """Export before any prediction, so that the export reads the frozen weights."""
    client = open_client(finished, "client-2")
    monkeypatch.setattr(TrainedClient, "accuracy", lambda *_: {})
    adapted._base.cache_clear()
    adapted._targets.cache_clear()
    export(client, "pt2", tmp_path / "out.pt2")
    program = torch.export.load(tmp_path / "out.pt2").module()
    x = torch.rand(5, 1, 8, 8) * 2 - 1
    with torch.no_grad():
        assert torch.allclose(program(x), client.model()(x).softmax(1), atol=1e-5)
        again = open_client(finished, "client-2").model()(x)
        assert torch.equal(again, client.model()(x))


# What is refused


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fedlora.prune": 0.9}, "fedlora.prune': expected 0 with RULE"),
        ({"wire.encoding": "int8"}, "frozen weights of all clients must be equal"),
        ({"privacy.epsilon": 8.0, "privacy.delta": 1e-3}, "products of noisy factors"),
        ({"privacy.secure-aggregation": True}, "multiplies the adapters"),
        ({"defense.average": "median"}, "expected one of mean, krum, filter"),
    ],
)
def test_unsupported_settings_raise_before_the_run(tmp_path, rule, changes, words):
    with pytest.raises(SettingsError, match=words.replace("RULE", rule)) as found:
        Server(federation(rule, **changes), tmp_path)
    assert "\n" not in str(found.value)


def test_only_flora_needs_the_mean(tmp_path):
    with pytest.raises(SettingsError, match="each client draws new adapters"):
        Server(federation("flora", **{"defense.average": "krum"}), tmp_path)
    Server(federation("fedex", **{"defense.average": "krum"}), tmp_path / "fedex")


def test_merged_factors_are_bounded(tmp_path):
    server = Server(federation("flora"), tmp_path)
    for number in (1, 2):
        server.play(number)
    (call, *_) = server.instruct(3)
    knowledge, info = instruction_of(call), server.strategy.members[call[0].name].info
    sizes = server.strategy.instruction_sizes(info)
    SPEC.instructions.check("server", knowledge.tensors, knowledge.scalars, sizes)
    assert rank_in(sizes.models["merged"]) == 32

    def refused(change, words):
        tensors = dict(knowledge.tensors)
        for name in [name for name in tensors if name.startswith("merged/")]:
            tensors[name] = change(name, tensors[name])
        with pytest.raises(KnowledgeError, match=words):
            SPEC.instructions.check("server", tensors, knowledge.scalars, sizes)

    refused(lambda name, value: np.full_like(value, 1e7), "magnitude bound")
    axis = {name: 1 if "lora_B" in name else 0 for name in knowledge.tensors}
    refused(lambda name, value: np.repeat(value, 5, axis[name]), r"expected float32 \[")


@pytest.mark.parametrize("rule", ["svd", "average", "freeze-a"])
def test_other_rules_send_no_merged_factors(tmp_path, rule):
    server = Server(federation(rule), tmp_path)
    instructions, results = server.play(1)
    for knowledge in (*map(instruction_of, instructions), *(reply_of(r) for _, r in results)):
        assert not knowledge.scalars
        assert {name.partition("/")[0] for name in knowledge.tensors} == {"weights"}
    assert not any("merged" in name or "mark" in name for name in server.strategy.state_dict())
