"""FedMD, DS-FL, and Cronus against slow transcriptions, their messages, and their state."""

import copy
import json

import numpy as np
import pytest
import torch
from federation import Server, client_of, run, small
from rounds import (
    PLAIN,
    SPACES,
    assert_close,
    clients,
    cross_entropy,
    descend,
    fitted,
    inside_of,
    instruction_of,
    learn,
    log_softmax,
    moved_outputs,
    opened,
    reply_of,
    same,
    state_of,
)

from fedhet.base.errors import SettingsError
from fedhet.client_runtime.node import open_client
from fedhet.clients.fedmd import Consensus
from fedhet.server.reply import Reply
from fedhet.wire.knowledge import Knowledge

METHODS = ("fedmd", "ds-fl", "cronus")
FIELD = {"fedmd": "logits", "ds-fl": "probabilities", "cronus": "probabilities"}
LOSSES = ("mae", "mse", "cross-entropy")


def md(method, **changes):
    """Return settings; names that begin with `own_` are settings of the method."""
    own = {f"{method}.server-model": "mlp"} if method == "ds-fl" else {}
    own |= {f"{method}.{k[4:]}": changes.pop(k) for k in list(changes) if k.startswith("own_")}
    usual = {"clients": 3, "models": "mlp", "max_samples": 240}
    return small(method, **{**usual, **own, **changes})


# The algorithms, written out slowly


def probabilities(logits):
    return torch.exp(log_softmax(logits))


def distance(kind, model, x, target, scores):
    """Return the distance of a model from a consensus on x, in the exchanged scores."""
    logits, target = model(x), torch.tensor(target).double()
    if kind == "cross-entropy":
        soft = target if scores == "probabilities" else probabilities(target)
        return -(soft * torch.log(probabilities(logits))).sum() / len(x)
    gap = (probabilities(logits) if scores == "probabilities" else logits) - target
    return (gap.abs() if kind == "mae" else gap**2).sum() / gap.numel()


def slow_round(method, client, start, instruction, *, loss, public_epochs=0):
    """Train three epochs on own data and six toward the consensus, in the method's order."""
    scores, public, x = FIELD[method], client.public, client.x.double()
    supervised = lambda m: cross_entropy(m(x), client.y)  # noqa: E731
    of_public = lambda m: cross_entropy(m(public.x.double()), public.y)  # noqa: E731
    model = descend(start, of_public, public_epochs)
    agreed = instruction.tensors.get(scores)
    if agreed is None:
        return descend(model, supervised)
    images = public.x.double()[instruction.tensors["rows"].astype(int)]
    if method == "cronus":
        own = len(x) / (len(x) + len(images))
        return descend(
            model,
            lambda m: own * supervised(m) + (1 - own) * distance(loss, m, images, agreed, scores),
        )
    model = descend(model, lambda m: distance(loss, m, images, agreed, scores), 6)
    return descend(model, supervised)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_rounds_of_a_client_equal_the_algorithm(tmp_path, method, loss):
    """Round 1 uses public labels and own data, and round 2 the consensus of round 1."""
    # In Cronus the three local epochs pass over both.
    chosen = {"own_public-epochs": 2} | ({} if method == "cronus" else {"own_digest-epochs": 6})
    config = md(method, **PLAIN, **chosen, own_loss=loss, own_sample=20)
    server = Server(config, tmp_path)
    start = {name: c.setup()["private"] for name, c in clients(server).items()}
    for number, public_epochs in ((1, 2), (2, 0)):
        instructions = server.instruct(number)
        instruction = instruction_of(instructions[0])
        assert (FIELD[method] in instruction.tensors) == (number == 2)
        replies = server.train(instructions)
        for proxy, result in replies:
            client = client_of(proxy)
            expected = slow_round(
                method,
                client,
                start[proxy.name],
                instruction,
                loss=loss,
                public_epochs=public_epochs,
            )
            assert_close(client.network, expected, rtol=5e-4, atol=2e-6)
            rows = instruction.tensors["asked"].astype(int)
            assert len(rows) == 20
            with torch.no_grad():
                scores = expected(client.public.x.double()[rows])
            scores = scores if method == "fedmd" else probabilities(scores)
            found = reply_of(result).tensors[FIELD[method]]
            np.testing.assert_allclose(found, scores, rtol=2e-3, atol=1e-5)
            start[proxy.name] = copy.deepcopy(client.network)
        server.aggregate(number, replies)


@pytest.mark.parametrize("method", METHODS)
def test_last_consensus_is_learned_before_evaluation(tmp_path, method):
    """Trained clients learn the last consensus; other evaluations train nothing."""
    chosen = {} if method == "cronus" else {"own_digest-epochs": 6}
    config = md(method, **PLAIN, **chosen, own_loss="mse", own_sample=20, rounds=2, fraction=0.3)
    server = Server(config, tmp_path)
    all_clients = [open_client(p._config, p._node) for p in server.manager.all().values()]
    for number in (1, 2):
        server.play(number)
        if number == 1:
            rounds = [client.state.participations for client in all_clients]
            server.close(1)
            assert rounds == [client.state.participations for client in all_clients]
    before = [copy.deepcopy(client.models.get("private")) for client in all_clients]
    rounds = [client.state.participations for client in all_clients]
    assert 0 in rounds
    assert len(set(rounds)) > 1
    instruction = server.strategy.eval_instruction(2, server.strategy.reference_client)
    server.close(2)
    for client, start, number in zip(all_clients, before, rounds, strict=True):
        assert client.state.participations == number + (number > 0)
        if not number:
            continue
        expected = slow_round(method, client, start, instruction, loss="mse")
        assert_close(client.network, expected, rtol=5e-4, atol=2e-6)
        client.state.begin_round()  # so that it is read from disk
        client.state.restore(json.loads((tmp_path / "run.json").read_text())["run"], before=4)
        assert_close(client.network, expected, rtol=5e-4, atol=2e-6)


def sharpened(mean, temperature):
    powers = np.exp(mean / temperature)
    return powers / powers.sum(1, keepdims=True)


CONSENSUS = {
    "fedmd": ({}, lambda mean: mean),
    "ds-fl": ({"own_temperature": 0.3}, lambda mean: sharpened(mean, 0.3)),
    "ds-fl sa": ({"own_aggregation": "sa"}, lambda mean: mean),
    "cronus": ({"own_aggregation": "mean"}, lambda mean: mean),
}


@pytest.mark.parametrize("case", CONSENSUS)
def test_consensus_weights_clients_equally(tmp_path, case):
    """All clients have equal weights; the consensus is for the public samples of the round."""
    chosen, of_mean = CONSENSUS[case]
    method = case.split()[0]
    server = Server(md(method, **chosen, own_sample=15), tmp_path)
    assert len({m.info.samples for m in server.strategy.members.values()}) > 1
    for number in (1, 2):
        rows = instruction_of(server.instruct(number)[0]).tensors["asked"]
        replies = learn(server, number)
        mean = sum(t[FIELD[method]].astype(float) for t in replies.values()) / 3
        instruction = instruction_of(server.instruct(number + 1)[0]).tensors
        agreed = instruction[FIELD[method]]
        np.testing.assert_allclose(agreed, of_mean(mean), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(instruction["rows"], rows)
        assert not np.array_equal(instruction["asked"], rows)


@pytest.mark.parametrize("aggregation", ["filter", "median", "trimmed"])
def test_cronus_resists_a_malicious_client(tmp_path, aggregation):
    """One of ten clients sends the same scores for all samples."""
    server = Server(
        md("cronus", own_aggregation=aggregation, own_sigma=0.02, models="mlp"), tmp_path
    )
    strategy = server.strategy
    rng = np.random.default_rng(0)
    base = rng.dirichlet([1.0] * 10, 40)
    honest = 0.97 * base + 0.03 * rng.dirichlet([1.0] * 10, (9, 40))
    malicious = np.eye(10)[rng.integers(0, 10, 40)]
    replies = np.concatenate([honest, malicious[None]]).astype(np.float32)
    moved = np.linalg.norm(strategy.aggregate_scores(replies) - honest.mean(0), axis=1)
    assert moved.max() < 0.02
    assert np.linalg.norm(replies.mean(0) - honest.mean(0), axis=1).min() > 0.03
    if aggregation == "filter":
        assert 0.1 <= strategy.filtered < 0.2


def under(tmp_path, method, seed, **attack):
    """Return the clients' accuracy on the common test set after six rounds of ten clients."""
    config = md(
        method, clients=10, rounds=6, max_samples=0, max_test_samples=0, partition="iid",
        local_epochs=3, public_fraction=0.2, **{"own_public-epochs": 0}, seed=seed, **attack,
    )  # fmt: skip
    found = run(config, tmp_path / f"{method}-{len(attack)}")
    return found["accuracy"]["common"]["private"]["mean"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cronus_with_one_malicious_client_of_ten_stays_within_a_point(tmp_path, seed):
    """Without clipping, FedMD's mean of logits is unbounded and loses most of its accuracy."""
    paf = {"attack": "paf", "attackers": 1, "attack.direction": "run", "attack.scale": 100.0}
    paf["clip_factor"] = 0.0
    accuracy = {m: [under(tmp_path, m, seed, **a) for a in ({}, paf)] for m in ("cronus", "fedmd")}
    assert abs(accuracy["cronus"][0] - accuracy["cronus"][1]) < 0.01
    assert accuracy["fedmd"][0] - accuracy["fedmd"][1] > 0.2


@pytest.mark.parametrize("loss", LOSSES)
def test_ds_fls_server_trains_on_the_consensus(tmp_path, loss):
    chosen = {**PLAIN, "own_server-epochs": 4, "own_sample": 15, "own_loss": loss}
    server = Server(md("ds-fl", **chosen), tmp_path)
    learner = server.strategy.learner
    for number in (1, 2):
        start = copy.deepcopy(learner.model)
        learn(server, number)
        instruction = instruction_of(server.instruct(number + 1)[0]).tensors
        x = server.strategy.public.x[instruction["rows"].astype(int)]
        x = clients(server)["client-0"].compute.to_inputs(x).double()
        agreed = instruction["probabilities"]
        toward = lambda m: distance(loss, m, x, agreed, "probabilities")  # noqa: B023, E731
        assert_close(learner.model, descend(start, toward, 4), rtol=5e-4, atol=2e-6)


# Gradients


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_consensus_has_gradients_only_for_the_student(tmp_path, method, loss):
    client = opened(md(method, own_loss=loss), tmp_path)
    scores = torch.rand(8, 10, generator=torch.Generator().manual_seed(0))
    scores = (scores / scores.sum(1, keepdim=True)).requires_grad_()
    consensus = Consensus(client.public.x[:8], scores)
    client.consensus_loss(consensus, consensus.x, consensus.numbers()).backward()
    assert scores.grad is None
    assert all(p.grad.abs().sum() > 0 for p in client.network.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_label_space_of_its_own(tmp_path, method):
    """Own labels give no gradient to outputs for other classes, unlike the consensus."""
    config = md(method, clients=4, **SPACES)
    server = Server(config, tmp_path)
    before = {n: state_of(c.setup()["private"]) for n, c in clients(server).items()}
    if method == "fedmd":  # without the public labels
        server = Server(md(method, clients=4, **{"own_public-epochs": 0}, **SPACES), tmp_path / "0")
    replies = learn(server, 1)
    for name, client in clients(server).items():
        assert ((moved_outputs(client, before[name]) > 0) == inside_of(client)).all()
        assert np.isfinite(replies[name][FIELD[method]]).all()
        before[name] = state_of(client.network)
    learn(server, 2)
    for name, client in clients(server).items():
        assert (moved_outputs(client, before[name]) > 0).all()
        outside = client.private(client.x[:3])[:, torch.tensor(~inside_of(client))]
        assert torch.isinf(outside).all()


# Sent fields


@pytest.mark.parametrize("method", METHODS)
def test_only_scores_of_public_samples_are_sent(tmp_path, method):
    server = Server(md(method, models=["mlp", "cnn2"]), tmp_path)
    for number in (1, 2):
        instruction = instruction_of(server.instruct(number)[0])
        agreed = {FIELD[method], "rows"} if number > 1 else set()
        assert set(instruction.tensors) == {"asked"} | agreed
        assert not instruction.scalars
        for tensors in learn(server, number).values():
            assert set(tensors) == {FIELD[method]}
            assert tensors[FIELD[method]].shape == (len(instruction.tensors["asked"]), 10)


@pytest.mark.parametrize("method", ["ds-fl", "cronus"])
def test_public_labels_are_not_used(tmp_path, method):
    """Wrong labels of the public data change nothing."""
    replies = []
    for number in range(2):
        client = opened(md(method), tmp_path / str(number))
        client.public = copy.copy(client.public)
        if number:
            object.__setattr__(client.public, "y", (client.public.y + 1) % 10)
        sampled = Knowledge({"asked": np.arange(10, dtype=np.uint8)})
        replies.append(fitted(client, 1, sampled))
    assert same(*replies)


def test_public_samples_are_drawn_each_round(tmp_path):
    server = Server(md("fedmd", own_sample=10), tmp_path / "some")
    drawn = [instruction_of(server.instruct(number)[0]).tensors["asked"] for number in (1, 2, 1)]
    assert [len(np.unique(rows)) for rows in drawn] == [10, 10, 10]
    assert not np.array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])
    for name, sample in (("all", 0), ("more", 10_000)):
        whole = Server(md("fedmd", own_sample=sample), tmp_path / name)
        rows = instruction_of(whole.instruct(1)[0]).tensors["asked"]
        np.testing.assert_array_equal(rows, np.arange(len(whole.strategy.public)))


def test_transfer_learning_happens_only_once(tmp_path):
    client = opened(md("fedmd", **{"own_public-epochs": 3}), tmp_path)
    learned = []
    client.train_epochs = lambda *given, epochs: learned.append((number, epochs))
    sampled = Knowledge({"asked": np.arange(10, dtype=np.uint8)})
    for number in (4, 5, 6):
        fitted(client, number, sampled)
    assert learned == [(4, 3)]


# State


KEEPING = {"keep_optimizer": True, "schedule": "plateau", "patience": 0}


def test_restored_ds_fl_server_continues_identically(tmp_path):
    config = md("ds-fl", rounds=5, lr=0.05, **KEEPING)
    server, other = Server(config, tmp_path / "one"), Server(config, tmp_path / "two").strategy
    for number in (1, 2):
        replies = learn(server, number)
    strategy = server.strategy
    other.load_state_dict(copy.deepcopy(strategy.state_dict()))
    said = [Reply(strategy.members[n].info, Knowledge(t), None) for n, t in replies.items()]
    for number in (3, 4, 5):
        for each in (strategy, other):
            each.select(number, [member.info for member in strategy.members.values()])
            each.aggregate(number, said[1:])
        assert same(other.state_dict(), strategy.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_consensus_forgets_a_departed_client(tmp_path, method):
    server = Server(md(method), tmp_path / "one")
    replies = learn(server, 1)
    server.strategy.forget("client-1")
    server.strategy.forget("unknown")
    kept = np.stack([replies[n][FIELD[method]] for n in ("client-0", "client-2")])
    expected = server.strategy.aggregate_scores(kept)
    np.testing.assert_array_equal(
        instruction_of(server.instruct(2)[0]).tensors[FIELD[method]], expected
    )
    for name in ("client-0", "client-2"):
        server.strategy.forget(name)
    assert set(instruction_of(server.instruct(2)[0]).tensors) == {"asked"}


# Settings


def test_single_public_sample_raises():
    with pytest.raises(SettingsError, match=r"'fedmd\.sample'.*1"):
        md("fedmd", own_sample=1)
