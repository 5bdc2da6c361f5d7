"""FedLoRA and FedSA on clients whose adapters have differing ranks, and every method on them."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from bases import make_bases
from federation import Server, client_of, fast, records, run, small
from interruption import cut_and_resumed
from rounds import PLAIN, altered, clients, instruction_of, learn, reply_of, same, state_of

from fedhet.algorithms.adapters import factors_of
from fedhet.algorithms.rounds import malicious_clients
from fedhet.base.errors import ModelError, SettingsError
from fedhet.data.texts import VARIABLE
from fedhet.inference.client import open_client
from fedhet.inference.export import export
from fedhet.methods.fedlora import with_rank
from fedhet.methods.registry import find_method, method_names
from fedhet.models import base_digest
from fedhet.settings.defense import ROBUST

RULES = ("average", "sparsity", "svd", "rank-partition", "freeze-a")
POOL = [f"encoder-1-lora{rank}:vit" for rank in (2, 4, 6)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(autouse=True)
def _variable(home, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(home))


def federation(method="fedlora", **changes):
    few = {"clients": 3, "models": POOL, "max_samples": 120, "partition": "iid"}
    return small(method, **{**few, **changes})


def product(weights, path):
    b, a = factors_of(weights)[path]
    return np.asarray(b, np.float64) @ np.asarray(a, np.float64)


def ranks(weights):
    return {b.shape[1] for b, _ in factors_of(weights).values()}


# A round of each rule, from what clients really send


def expected(rule, replies, samples, before, frozen):
    """Compute the product of the new factors and the head with NumPy in float64."""
    total, (path, *_) = sum(samples), factors_of(before)
    share = [n / total for n in samples]
    factors = [
        (np.float64(r[f"{path}.lora_B.weight"]),
         np.float64(frozen[: r[f"{path}.lora_B.weight"].shape[1]] if rule == "freeze-a"
                    else r[f"{path}.lora_A.weight"]))
        for r in replies
    ]  # fmt: skip
    rank = max(len(a) for _, a in factors)
    if rule in ("average", "sparsity"):
        if rule == "sparsity":
            norms = [
                np.sqrt(sum(np.square(product(r, p)).sum() for p in factors_of(r))) for r in replies
            ]
            share = [norm / sum(norms) for norm in norms]
        b = sum(
            w * np.pad(b, ((0, 0), (0, rank - b.shape[1])))
            for w, (b, _) in zip(share, factors, strict=True)
        )
        a = sum(
            w * np.pad(a, ((0, rank - len(a)), (0, 0)))
            for w, (_, a) in zip(share, factors, strict=True)
        )
        return b @ a
    if rule == "rank-partition":
        found, start = 0, 0
        for end in sorted(len(a) for _, a in factors):
            having = [(w, b, a) for w, (b, a) in zip(share, factors, strict=True) if len(a) >= end]
            level = sum(w * b[:, start:end] @ a[start:end] for w, b, a in having)
            found, start = found + level / sum(w for w, *_ in having), end
    else:
        found = sum(w * b @ a for w, (b, a) in zip(share, factors, strict=True))
    if rule == "freeze-a":
        return found
    u, sigma, v = np.linalg.svd(found)
    return (u[:, :rank] * sigma[:rank]) @ v[:rank]


@pytest.mark.parametrize("rule", RULES)
def test_round_equals_the_papers(tmp_path, rule):
    server = Server(federation(**{"fedlora.aggregation": rule, "partition": "dirichlet"}), tmp_path)
    strategy = server.strategy
    server.play(1)  # so that B is not zero
    before = dict(strategy.weights)
    instructions = server.instruct(2)
    for name, model in zip(sorted(strategy.members), POOL, strict=True):
        info = strategy.members[name].info
        assert info.model == model
    sent = {each[0].name: instruction_of(each).group("weights") for each in instructions}
    for (_, weights), rank in zip(sorted(sent.items()), (2, 4, 6), strict=True):
        for name, value in weights.items():  # the leading part of the server's, at its own rank
            assert np.array_equal(value, before[name][tuple(map(slice, value.shape))])
        assert (rule == "freeze-a") is not any(name.endswith("lora_A.weight") for name in weights)
        bs = [value for name, value in weights.items() if name.endswith("lora_B.weight")]
        assert {b.shape[1] for b in bs} == {rank}
    results = server.train(instructions)
    server.aggregate(2, results)
    order = sorted(results, key=lambda each: each[0].name)
    replies = [reply_of(result).group("weights") for _, result in order]
    samples = [strategy.members[proxy.name].info.samples for proxy, _ in order]
    assert len(set(samples)) > 1
    (path, *_) = factors_of(before)
    matrix = expected(rule, replies, samples, before, before[f"{path}.lora_A.weight"])
    found = product(strategy.weights, path)
    np.testing.assert_allclose(found, matrix, atol=1e-5 * np.abs(matrix).max())
    assert np.abs(found - product(before, path)).max() > 1e-4 * np.abs(matrix).max()
    head = sum(
        n / sum(samples) * np.float64(reply["classifier.weight"])
        for n, reply in zip(samples, replies, strict=True)
    )
    np.testing.assert_allclose(strategy.weights["classifier.weight"], head, atol=1e-6)
    assert 0 < server.flower.state.record.method["top_energy"] <= 1
    for client in clients(server).values():
        frozen = rule == "freeze-a"
        needs = {n: p.requires_grad for n, p in client.network.named_parameters()}
        assert all(needs[n] is not (frozen and n.endswith("lora_A.weight")) for n in needs)


def test_frozen_a_is_the_first_rows_of_the_server(tmp_path):
    server = Server(federation(**{"fedlora.aggregation": "freeze-a"}), tmp_path)
    for number in (1, 2):
        server.play(number)
    for client in clients(server).values():
        for name, value in state_of(client.network).items():
            if name.endswith("lora_A.weight"):
                assert np.array_equal(value, server.strategy.weights[name][: len(value)])


def test_average_equals_fedavg_at_equal_ranks(tmp_path):
    """FedIT equals FedAvg bit for bit over three rounds, on the server and on the clients."""
    same_rank = {"models": POOL[1]}
    one = Server(federation(**same_rank, **{"fedlora.aggregation": "average"}), tmp_path / "one")
    other = Server(federation("fedavg", **same_rank), tmp_path / "other")
    for number in (1, 2, 3):
        one.play(number)
        other.play(number)
        assert same(one.strategy.weights, other.strategy.averaged["weights"])
    theirs = clients(other)
    for name, client in clients(one).items():
        assert same(state_of(client.network), state_of(theirs[name].network))


def test_rule_is_chosen_by_privacy():
    settings = find_method("fedlora").spec.settings
    assert settings().rule(is_private=False) == "svd"
    assert settings().rule(is_private=True) == "freeze-a"
    assert settings(aggregation="average").rule(is_private=True) == "average"


def test_rank_level_without_clients_is_unchanged(tmp_path):
    server = Server(federation(**{"fedlora.aggregation": "average"}), tmp_path)
    server.play(1)
    before = dict(server.strategy.weights)
    instructions = sorted(server.instruct(2), key=lambda each: each[0].name)[:2]  # ranks 2 and 4
    server.aggregate(2, server.train(instructions))
    for name, value in server.strategy.weights.items():
        if name.endswith("lora_A.weight"):
            assert np.array_equal(value[4:], before[name][4:])
            assert not np.array_equal(value[:4], before[name][:4])


# Pruning


def test_pruning_shrinks_ranks_and_stays_after_a_restart(tmp_path):
    options = {"fedlora.prune": 0.9, "fedlora.prune-weight": 100.0, **PLAIN, "training.lr": 0.01}
    server = Server(federation(rounds=4, **options), tmp_path)
    for number in range(1, 4):
        server.play(number)
    found = server.strategy.ranks
    assert found
    assert all(1 <= rank < 6 for rank in found.values())
    for instructions in server.instruct(4):
        weights, own = instruction_of(instructions).group("weights"), client_of(instructions[0])
        rank = found.get(instructions[0].name, int(own.info.model[14]))
        assert ranks(weights) == {rank}
        for b, _ in factors_of(state_of(own.network)).values():
            assert b.shape[1] >= rank
    state = server.strategy.state_dict()
    other = Server(federation(rounds=4, **options), tmp_path / "other")
    other.strategy.load_state_dict(state)
    assert other.strategy.ranks == found
    (name, *_) = found
    other.strategy.forget(name)
    assert name not in other.strategy.ranks


def test_pruned_levels_have_no_effect_and_no_gradient(tmp_path):
    from fedhet.algorithms.adapters import PrunedModel

    server = Server(federation(models=POOL[2]), tmp_path)
    server.play(1)
    (proxy, _), *_ = server.instruct(2)
    client = client_of(proxy)
    weights = dict(server.strategy.weights)
    part = with_rank({n: (v.shape, "float32") for n, v in weights.items()}, 4)
    small_part = {n: v[tuple(map(slice, part[n][0]))] for n, v in weights.items()}
    model = client._joined(client.network, small_part)
    model(client.x[:8].float()).sum().backward()
    for b, a in factors_of(dict(model.named_parameters())).values():
        assert not any(each.any() for each in (b[:, 4:], a[4:], b.grad[:, 4:], a.grad[4:]))
        assert all(each.any() for each in (b.grad[:, :4], a.grad[:4]))
    pruned = PrunedModel(model, client.anchor(), 4, 0.99, 0.5)
    tail = sum(
        np.linalg.norm(b[:, 3:]) * np.linalg.norm(a[3:])
        for b, a in factors_of(state_of(model)).values()
    )
    assert float(pruned.regularizer()) == pytest.approx(0.5 * tail, rel=1e-4)
    assert pruned.rank == 4
    with torch.no_grad():
        for b, _ in factors_of(dict(model.named_parameters())).values():
            b[:, 3] *= 0.5
    assert pruned.rank == 3


# What is refused


def test_replies_of_a_wrong_rank_or_magnitude_are_dropped(tmp_path):
    server = Server(federation(**{"fedlora.aggregation": "average"}), tmp_path)
    instructions = sorted(server.instruct(1), key=lambda each: each[0].name)
    replies = server.train(instructions)

    def smaller(tensors):
        for name, value in tensors.items():
            if name.endswith("lora_A.weight"):
                tensors[name] = value[:1]
            elif name.endswith("lora_B.weight"):
                tensors[name] = np.ascontiguousarray(value[:, :1])

    def huge(tensors):
        for name in tensors:
            if "lora" in name:
                tensors[name][:] = 1e7

    def ragged(tensors):
        name = next(name for name in tensors if name.endswith("lora_A.weight"))
        tensors[name] = tensors[name][:1]

    for index, change in enumerate((smaller, huge, ragged)):
        proxy, result = replies[index]
        replies[index] = proxy, altered(result, change)
    server.aggregate(1, replies)
    text = str(server.flower.state.record)
    for words in ("expected adapters of rank 2, got 1", "magnitude bound", "expected float32"):
        assert words in text, text


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("fedlora", {"models": [POOL[0], "encoder-1-lora4-scale1:vit"]}, "differ only in rank"),
        ("fedlora", {"models": [POOL[0], "mlp"]}, "differ only in rank"),
        ("fedlora", {"fedlora.aggregation": "freeze-a", "fedlora.prune": 0.9}, "0 with freeze-a"),
        ("fedlora", {"defense.average": "median"}, "expected one of mean, krum, filter"),
        (
            "fedlora",
            {"fedlora.aggregation": "sparsity", "defense.average": "filter"},
            "large adapters, expected another rule with 'defense.average' = filter",
        ),
        ("fedavg", {}, "one model for all clients"),
        ("fedsa", {}, "one model for all clients"),
        ("heterofl", {"models": POOL[0]}, "a model with several widths"),
    ],
)
def test_unsupported_settings_raise_before_the_run(tmp_path, method, changes, words):
    with pytest.raises(SettingsError, match=words) as found:
        Server(federation(method, **changes), tmp_path)
    assert "\n" not in str(found.value)


def test_client_whose_base_model_differs_is_excluded(tmp_path, monkeypatch):
    """The digest of most clients counts; ranks of one base model have the same digest."""
    plain = base_digest
    monkeypatch.setattr(
        "fedhet.client_runtime.samples.base_digest",
        lambda name: "0" * 16 if name == POOL[0] else plain(name),
    )
    server = Server(federation(**{"engine.min-clients": 2}), tmp_path)
    assert sorted(server.strategy.members) == ["client-1", "client-2"]
    assert len({member.info.base for member in server.strategy.members.values()}) == 1


# FedSA


def test_fedsa_sends_only_a(tmp_path):
    server = Server(federation("fedsa", models=POOL[1]), tmp_path)
    before = {name: state_of(c.network) for name, c in clients(server).items() if c.models}
    replies = learn(server, 1)
    for tensors in replies.values():
        assert all(name.endswith("lora_A.weight") for name in tensors)
        assert len(tensors) == 4
    samples = {n: server.strategy.members[n].info.samples for n in replies}
    for name, value in server.strategy.averaged["weights"].items():
        found = sum(
            samples[n] / sum(samples.values()) * np.float64(each[f"weights/{name}"])
            for n, each in replies.items()
        )
        np.testing.assert_allclose(value, found, atol=1e-7)
    server.play(2)
    one, other, *_ = (state_of(c.network) for c in clients(server).values())
    assert not any(np.array_equal(one[n], other[n]) for n in one if "lora_A" not in n)
    assert before == {} or before


def test_fedsa_gives_the_same_instructions_with_secure_aggregation(tmp_path):
    told = []
    for secure in (False, True):
        (directory := tmp_path / f"{secure}").mkdir()
        changes = {"models": POOL[1], "privacy.secure-aggregation": secure}
        server = Server(federation("fedsa", **changes), directory)
        _, results = server.play(1)
        sent = {name for _, result in results for name in reply_of(result).tensors}
        assert (sent == {"commitment/0", "masked/0", "shares/0"}) is secure
        told.append([instruction_of(each).tensors for each in server.instruct(2)])
    for one, other in zip(*told, strict=True):
        assert one.keys() == other.keys()
        assert len(one) == 4
        for name, value in one.items():
            np.testing.assert_allclose(other[name], value, rtol=2e-6, atol=4e-6)


# Every method on adapted models

REFUSED = {"fedrolex": "several widths", "heterofl": "several widths", "um-pfssl": "dropout"}


@pytest.mark.parametrize("method", [n for n in method_names() if n not in REFUSED])
def test_every_method_runs_on_adapted_models(tmp_path, method):
    """Ranks count as architectures, unless the method needs one architecture."""
    models = POOL[1] if find_method(method).spec.one_model else POOL[:2]
    fixed = find_method(method).spec.settings().fixed_rounds()
    rounds = {} if fixed else {"rounds": 1}
    config = federation(method, models=models, clients=2, **rounds, **fast(method))
    summary = run(config, tmp_path / "run")
    assert set(summary["accuracy"]["personal"]) <= {*find_method(method).spec.kinds}
    assert summary["rounds"] == (config.run.rounds if fixed else 1)


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_unsupported_methods_raise(tmp_path, method):
    with pytest.raises((SettingsError, ModelError), match=REFUSED[method]) as found:
        Server(federation(method, models=POOL[0]), tmp_path)
    assert "\n" not in str(found.value)


# Runs


def test_resumed_run_equals_uninterrupted_run(tmp_path):
    cut_and_resumed(federation(rounds=3, **{"fedlora.prune": 0.9}), tmp_path, round=3)


def test_run_learns_on_a_frozen_base(tmp_path):
    options = {"max_samples": 400, "local_epochs": 5, "training.lr": 0.01, "rounds": 4}
    found = run(federation(**options), tmp_path / "run")["accuracy"]
    assert found["common"]["global"]["mean"] > 0.3  # ten classes, a random base


@pytest.mark.parametrize("average", [a for a in ROBUST if a in ("krum", "filter")])
def test_robust_averages_exclude_a_poisoned_reply_among_differing_ranks(tmp_path, average):
    options = {
        "clients": 6, "defense.average": average, "defense.malicious-fraction": 0.2,
        "attack": "sign-flip", "attack.attackers": 1, "rounds": 1, "max_samples": 240,
    }  # fmt: skip
    run(federation(**options), tmp_path / "run")
    record = records(tmp_path / "run")[-1]
    (attacker,) = malicious_clients(0, record["asked"], 1)
    assert f"an outlier ('defense.average' = '{average}')" in record["failed"][attacker]
    assert len(record["answered"]) >= 4


@pytest.mark.parametrize("encoding", ["int8", "float16"])
def test_adapters_are_encoded(tmp_path, encoding):
    plain = run(federation(rounds=2), tmp_path / "plain")
    coded = run(federation(rounds=2, **{"wire.encoding": encoding}), tmp_path / "coded")
    assert coded["bytes_up"] < plain["bytes_up"]


def test_private_runs_freeze_a(tmp_path):
    pytest.importorskip("opacus")
    options = {"privacy.epsilon": 8.0, "privacy.delta": 1e-3, "training.augment": "none"}
    server = Server(federation(models=POOL[:2], clients=2, **options), tmp_path)
    assert server.strategy.rule == "freeze-a"
    before = dict(server.strategy.weights)
    for tensors in learn(server, 1).values():
        assert not any(name.endswith("lora_A.weight") for name in tensors)
    moved = {n for n, v in server.strategy.weights.items() if not np.array_equal(v, before[n])}
    assert moved == {n for n in before if not n.endswith("lora_A.weight")}


# Export


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(home))
        directory = tmp_path_factory.mktemp("run") / "run"
        run(federation(rounds=2, **{"training.lr": 0.05}), directory)
        return directory


def test_trained_client_predicts_in_a_new_process(finished, home):
    """Predict within the memory limit, of which a skeleton without weights uses nothing."""
    code = (
        "import fedhet, torch; from fedhet.inference.client import open_client; "
        f"c = open_client({str(finished)!r}, 'client-1'); "
        "print(tuple(c.predict(torch.zeros(3, 1, 8, 8)).probabilities.shape))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, VARIABLE: str(home)},
    )  # fmt: skip
    assert done.stdout.strip() == "(3, 10)", done.stderr[-2000:]


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_export_has_equal_outputs_in_the_libraries(finished, home, tmp_path, form):
    from safetensors.torch import load_file
    from transformers import AutoModel

    client = open_client(finished, "client-1")
    export(client, form, tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert "head.safetensors" in files
    assert str(home) not in (tmp_path / "out.json").read_text()
    x = torch.rand(4, 1, 8, 8) * 2 - 1
    network = client.network().eval()
    if form == "peft":
        peft = pytest.importorskip("peft")
        base = AutoModel.from_pretrained(home / "vit")
        plain = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
        plain.eval()
    else:
        plain = AutoModel.from_pretrained(tmp_path / "out").eval()
    head = load_file(tmp_path / "out" / "head.safetensors")
    assert set(head) == {"classifier.weight", "classifier.bias"}
    with torch.no_grad():
        features = plain(pixel_values=x).last_hidden_state[:, 0]
        found = features @ head["classifier.weight"].T + head["classifier.bias"]
        expected = network(x)
        base = AutoModel.from_pretrained(home / "vit").eval()(pixel_values=x).last_hidden_state
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(features, base[:, 0], atol=1e-3)


def test_exporting_adapters_of_another_model_raises(tmp_path):
    run(small("local", clients=2, rounds=1, models="mlp"), tmp_path / "run")
    client = open_client(tmp_path / "run", "client-0")
    with pytest.raises(ModelError, match="adapters"):
        export(client, "peft", tmp_path / "out")


def test_exported_program_needs_no_library(finished, tmp_path):
    client = open_client(finished, "client-2")
    export(client, "pt2", tmp_path / "out.pt2")
    program = torch.export.load(tmp_path / "out.pt2").module()
    x = torch.rand(5, 1, 8, 8) * 2 - 1
    with torch.no_grad():
        assert torch.allclose(program(x), client.model()(x).softmax(1), atol=1e-5)


def test_text_models_train_with_adapters(tmp_path):
    rows = [f"{'good fine nice' if n % 2 else 'bad poor dull'} {n},{n % 2}" for n in range(90)]
    (tmp_path / "all.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    config = federation(
        models=["encoder-1-lora2:bert", "encoder-1-lora4:bert"], dataset=f"text:{tmp_path}/all.csv",
        clients=2, rounds=2, max_samples=0, **{"data.vocabulary": 64, "data.max-tokens": 12},
        **{"data.min-samples": 4, "training.lr": 0.02, "training.local-epochs": 5},
    )  # fmt: skip
    assert run(config, tmp_path / "run")["accuracy"]["personal"]["private"]["mean"] > 0.7


def test_causal_models_learn_the_next_token(tmp_path):
    """A text of cycles, in which a word determines the next word."""
    cycles = ["one two three four", "red green blue", "cat dog cow pig hen"]
    text = " ".join(cycles[n % 3] + " " + cycles[n % 3] for n in range(300))
    (tmp_path / "train.txt").write_text(text)
    config = federation(
        models=["encoder-1-lora2:llama", "encoder-1-lora4:llama"], clients=2, rounds=2,
        dataset=f"next-token:{tmp_path}", max_samples=0, partition="iid",
        **{"data.vocabulary": 64, "data.max-tokens": 6, "training.lr": 0.03},
        **{"training.local-epochs": 4},
    )  # fmt: skip
    accuracy = run(config, tmp_path / "run")["accuracy"]["personal"]["global"]["mean"]
    assert accuracy > 0.6  # by chance, a twelfth; between two cycles, the next word is open
