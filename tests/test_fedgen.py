"""FedGen against slow transcriptions of the generator's training and of a client's round."""

import copy
from math import exp, log

import numpy as np
import pytest
import torch
from federation import Server, client_of, records, run, small
from rounds import (
    PLAIN,
    SPACES,
    altered,
    assert_close,
    cross_entropy,
    descend,
    instruction_of,
    learn,
    log_softmax,
    opened,
    replied,
    reply_of,
    same,
)
from torch import nn

from fedhet.algorithms.feature_models import (
    Generator,
    diversity_loss,
    ensemble,
    label_weights,
    train_generator,
)
from fedhet.base.arrays import group
from fedhet.base.errors import ModelError
from fedhet.methods.fedgen import generator_shapes
from fedhet.models import HetModel
from fedhet.strategies import fedgen as server_half
from fedhet.wire.knowledge import Knowledge


def fedgen(**changes):
    return small("fedgen", **{"clients": 3, **changes})


# The ensemble and the generator's losses

COUNTS = np.array([[4, 0, 1], [12, 0, 3], [0, 0, 4]])


def heads(seed=0):
    rng = np.random.default_rng(seed)
    return list(rng.normal(size=(3, 3, 2))), list(rng.normal(size=(3, 3)))


def test_client_weight_is_its_fraction_of_the_class():
    expected = [[0.25, 0, 0.125], [0.75, 0, 0.375], [0, 0, 0.5]]
    np.testing.assert_allclose(label_weights(COUNTS), expected)


def test_ensemble_is_the_weighted_mean_of_logits():
    """Eq. 4: sum_k w_k^y (W_k z + b_k), by loops over samples and clients."""
    weights, biases = heads()
    shares = label_weights(COUNTS)
    rng, labels = np.random.default_rng(1), [0, 2, 1, 2]
    features = rng.normal(size=(4, 2)).astype(np.float32)
    head = ensemble(shares, weights, biases)
    found = head.logits(torch.tensor(features), torch.tensor(labels))
    for n, label in enumerate(labels):
        expected = sum(shares[k, label] * (weights[k] @ features[n] + biases[k]) for k in range(3))
        np.testing.assert_allclose(found[n].numpy(), expected, rtol=1e-5, atol=1e-6)


def diversity_by_hand(noise, features):
    total = 0.0
    for i in range(len(noise)):
        for j in range(len(noise)):
            apart = np.mean([(a - b) ** 2 for a, b in zip(noise[i], noise[j], strict=True)])
            moved = np.mean([abs(a - b) for a, b in zip(features[i], features[j], strict=True)])
            total += apart * moved
    return exp(-total / len(noise) ** 2)


def test_diversity_equals_the_code_of_the_authors():
    rng = np.random.default_rng(0)
    noise, features = rng.normal(size=(5, 3)), rng.normal(size=(5, 4))
    found = diversity_loss(torch.tensor(noise), torch.tensor(features))
    assert found.item() == pytest.approx(diversity_by_hand(noise.tolist(), features.tolist()))
    assert diversity_loss(torch.tensor(noise), torch.zeros(5, 4)).item() == 1.0


def test_generator_step_equals_the_algorithm(monkeypatch, steady_adam):
    """Compare Adam's first step on the loss in float64.

    The loss is CE of the mean logits plus eta times the diversity.
    """
    torch.manual_seed(0)
    model = Generator(3, 2, 4, 2)
    slow = copy.deepcopy(model).double()
    weights, biases = heads()
    shares, prior = label_weights(COUNTS), torch.tensor([0.5, 0.0, 0.5])
    course = {"steps": 1, "batch_size": 6, "lr": 0.01, "diversity": 0.7}
    draws = torch.Generator().manual_seed(3)
    loss = train_generator(model, ensemble(shares, weights, biases), prior, draws, **course)

    again = torch.Generator().manual_seed(3)
    labels = torch.multinomial(prior, 6, replacement=True, generator=again)
    noise = torch.randn(6, 2, generator=again).double()
    assert 1 not in labels, "a class that nobody has"
    hidden = slow.hidden[0](torch.cat([noise, torch.eye(3).double()[labels]], 1))
    mean, variance = hidden.mean(0), hidden.var(0, unbiased=False)
    features = slow.output(torch.relu((hidden - mean) / (variance + 1e-5).sqrt()))
    task = 0.0
    for n, y in enumerate(labels):
        parts = [
            shares[k, y] * (torch.tensor(weights[k]) @ features[n] + torch.tensor(biases[k]))
            for k in range(3)
        ]
        logits = sum(parts)
        task -= (logits[y] - torch.logsumexp(logits, 0)) / 6
    assert loss == pytest.approx(task.item(), rel=1e-5)
    apart = (noise[:, None] - noise[None]).pow(2).mean(2)
    moved = (features[:, None] - features[None]).abs().mean(2)
    (task + 0.7 * torch.exp(-(apart * moved).mean())).backward()
    for (name, now), before in zip(model.named_parameters(), slow.parameters(), strict=True):
        if before.grad is None:  # the batch norm's, written out above as it starts
            continue
        step = 0.01 * before.grad / (before.grad.abs() + steady_adam)
        expected = (before - step).detach().numpy()
        np.testing.assert_allclose(now.detach().numpy(), expected, atol=1e-4, err_msg=name)


# A client's round


def constant(client, rng):
    """Return an instruction whose generator ignores its noise and generates only one class."""
    own = client.settings
    shapes = generator_shapes(client.info.classes, own.noise_dim, own.hidden_dim, own.feature_dim)
    tensors = {}
    for name, (shape, dtype) in shapes.items():
        value = np.abs(rng.normal(size=shape)) if "running_var" in name else rng.normal(size=shape)
        tensors[f"generator/{name}"] = (0.2 * value).astype(dtype)
    tensors["generator/hidden.0.weight"][:, : own.noise_dim] = 0
    label = int(client.y[0])
    head = client.network.classifier
    tensors |= {
        "weights/classifier.weight": rng.normal(size=head.weight.shape).astype(np.float32) * 0.1,
        "weights/classifier.bias": rng.normal(size=head.bias.shape).astype(np.float32),
        "prior": np.eye(client.info.classes, dtype=np.float32)[label],
    }
    return Knowledge(tensors), label


def generated(tensors, labels, noise_dim):
    """Compute G's features in evaluation mode: linear layer, batch norm, ReLU, linear layer."""
    g = {k: v.astype(np.float64) for k, v in tensors.items()}
    hidden = g["hidden.0.weight"][:, noise_dim + labels].T + g["hidden.0.bias"]
    scaled = (hidden - g["hidden.1.running_mean"]) / np.sqrt(g["hidden.1.running_var"] + 1e-5)
    shaped = np.maximum(scaled * g["hidden.1.weight"] + g["hidden.1.bias"], 0)
    return torch.tensor(shaped @ g["output.weight"].T + g["output.bias"])


def slow_round(client, knowledge, label, share):
    """CE + alpha CE(h(G(y')), y') (Eq. 5) + beta KL(h(G(y)) || h f(x)) (the authors' code)."""
    model, own = copy.deepcopy(client.network).double(), client.settings
    sent = group(knowledge.tensors, "weights")
    model.load_state_dict(
        model.state_dict() | {k: torch.tensor(v).double() for k, v in sent.items()}
    )
    x, y = client.x.double(), client.y
    made = group(knowledge.tensors, "generator")
    of_own = generated(made, y.numpy(), own.noise_dim)
    of_one = generated(made, np.array([label]), own.noise_dim)

    def loss(model):
        logs = log_softmax(model(x))
        ce = -logs[range(len(y)), y].mean()
        reply = log_softmax(model.classifier(of_own)).detach()
        kl = (reply.exp() * (reply - logs)).sum(1).mean()
        synthetic = -log_softmax(model.classifier(of_one))[0, label]
        return ce + share * (own.alpha * synthetic + own.beta * kl)

    return descend(model, loss)


def test_round_of_a_client_equals_the_algorithm(tmp_path):
    changes = {"fedgen.alpha": 0.6, "fedgen.beta": 0.3, "fedgen.decay": 0.5, **PLAIN}
    client = opened(fedgen(models="mlp2", max_samples=200, **changes), tmp_path, before=3)
    knowledge, label = constant(client, np.random.default_rng(0))
    slow = slow_round(client, knowledge, label, share=0.5**2)
    reply = replied(client, 3, knowledge).tensors
    for name, value in slow.state_dict().items():
        found = client.network.state_dict()[name].numpy()
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)
        if name.startswith("classifier."):
            np.testing.assert_allclose(reply[f"weights/{name}"], value, rtol=1e-3, atol=1e-5)
    assert set(group(reply, "weights")) == {"classifier.weight", "classifier.bias"}
    assert dict(zip(reply["classes"].tolist(), reply["counts"].tolist(), strict=True)) == {
        int(label): int((client.y == label).sum()) for label in client.y.unique()
    }


REACHED = {
    "generated": {"classifier.weight", "classifier.bias"},
    "latent": {"extractor", "classifier.weight", "classifier.bias"},
}


@pytest.mark.parametrize("term", REACHED)
def test_each_term_has_gradients_only_for_its_model(tmp_path, term, monkeypatch):
    """Generated features train only the head; the head's output for them trains all."""
    off = {"generated": "fedgen.beta", "latent": "fedgen.alpha"}[term]
    client = opened(fedgen(models="mlp", max_samples=100, **{off: 0.0}), tmp_path, before=2)
    knowledge, _ = constant(client, np.random.default_rng(0))
    seen = {}

    def train_own(loss_of, predict, optimizing, generator, **options):
        teacher = client._teacher
        supervised = nn.functional.cross_entropy(client.network(client.x), client.y)
        extra = (
            options["penalty"]()
            if term == "generated"
            else loss_of(client.x, client.y) - supervised
        )
        extra.backward()
        seen.update({n: p.grad for n, p in client.network.named_parameters() if p.grad is not None})
        assert all(p.grad is None for p in teacher.generator.parameters())

    monkeypatch.setattr(client, "train_own", train_own)
    client.train(2, knowledge)
    reached = {
        n if n.startswith("classifier") else "extractor"
        for n, g in seen.items()
        if g.abs().sum() > 0
    }
    assert reached == REACHED[term]


def test_first_round_equals_lg_fedavg(tmp_path):
    own, plain = (
        Server(fedgen(), tmp_path / "own"),
        Server(small("lg-fedavg", clients=3), tmp_path / "lg"),
    )
    one, other = learn(own, 1), learn(plain, 1)
    for name in one:
        assert same(group(one[name], "weights"), group(other[name], "weights"))


# Sent fields, and the server


def test_sent_fields(tmp_path):
    server = Server(fedgen(models=["mlp", "cnn2", "cnn3"]), tmp_path)
    instructions, replies = server.play(1)
    head = {"weights/classifier.weight", "weights/classifier.bias"}
    assert set(instruction_of(instructions[0]).tensors) == head, (
        "no generator before it has been trained"
    )
    assert set(reply_of(replies[0][1]).tensors) == head | {"classes", "counts"}
    told = instruction_of(server.instruct(2)[0]).tensors
    assert {name.partition("/")[0] for name in told} == {"weights", "generator", "prior"}
    counts = np.zeros(10)
    for _, result in replies:
        sent = reply_of(result).tensors
        counts[sent["classes"]] += sent["counts"]
    np.testing.assert_allclose(told["prior"], counts / counts.sum(), rtol=1e-6)
    judged = server.strategy.eval_instruction(1, None)
    assert set(judged.tensors) == head


PRINTED = {"weighting": "clients", "prior": "counts", "alpha": 1.0, "beta": 0.0, "decay": 1.0}


def own_settings(**changes):
    return {f"fedgen.{name}": value for name, value in changes.items()}


def test_no_counts_are_sent_with_equal_weights(tmp_path):
    changes = own_settings(weighting="clients", prior="uniform")
    server = Server(fedgen(**changes), tmp_path)
    _, replies = server.play(1)
    assert {n.partition("/")[0] for n in reply_of(replies[0][1]).tensors} == {"weights"}
    np.testing.assert_allclose(server.strategy.prior, 0.1)


@pytest.mark.parametrize("prior", ["counts", "uniform"])
@pytest.mark.parametrize("weighting", ["labels", "clients"])
def test_ensemble_and_the_classes_of_each_reading(tmp_path, monkeypatch, weighting, prior):
    """Eq. 4 uses a plain mean of the clients' logits, and Algorithm 1 p(y) from their counts."""
    seen = []
    plain = server_half.train_generator

    def watched(model, head, prior, draws, **course):
        seen.append((head, prior.numpy()))
        return plain(model, head, prior, draws, **course)

    monkeypatch.setattr(server_half, "train_generator", watched)
    changes = own_settings(**{**PRINTED, "weighting": weighting, "prior": prior})
    spaces = {**SPACES, "models.pool": ["mlp"], "max_samples": 0}
    server = Server(fedgen(clients=3, **changes, **spaces), tmp_path)
    clients, classes = (
        [client_of(proxy) for proxy, _ in server.instruct(1)],
        server.strategy.reference_client.classes,
    )
    counts = np.array([[int((c.y == k).sum()) for k in range(classes)] for c in clients])
    assert (counts.sum(0) == 0).any(), "a class that no client has"
    _, results = server.play(1)
    (head, prior_found), replies = seen[0], [reply_of(result).tensors for _, result in results]
    totals = counts.sum(0)
    if (weighting, prior) == ("clients", "uniform"):
        expected = [1 / classes] * classes
    elif prior == "uniform":
        expected = [float(n > 0) / np.count_nonzero(totals) for n in totals]
    else:
        expected = [n / totals.sum() for n in totals]
    np.testing.assert_allclose(prior_found, expected)
    np.testing.assert_allclose(server.strategy.prior, expected, rtol=1e-6)
    for c in np.flatnonzero(totals):
        parts = [1 / 3] * 3 if weighting == "clients" else [own[c] / totals[c] for own in counts]
        for name, found in (("weight", head.weight[c]), ("bias", head.bias[c])):
            own = [reply[f"weights/classifier.{name}"].astype(float) for reply in replies]
            mean = sum(part * each for part, each in zip(parts, own, strict=True))
            np.testing.assert_allclose(found.numpy(), mean, rtol=1e-4, atol=1e-6)


def test_round_of_a_client_equals_equation_5_as_printed(tmp_path):
    """The loss is cross-entropy on own samples plus the head's loss on generated ones, weight 1."""
    changes = {**own_settings(**PRINTED), **PLAIN}
    client = opened(fedgen(models="mlp2", max_samples=200, **changes), tmp_path, before=3)
    knowledge, label = constant(client, np.random.default_rng(0))
    model, made = copy.deepcopy(client.network).double(), group(knowledge.tensors, "generator")
    sent = group(knowledge.tensors, "weights")
    model.load_state_dict(
        model.state_dict() | {k: torch.tensor(v).double() for k, v in sent.items()}
    )
    features = generated(made, np.array([label]), client.settings.noise_dim)

    def loss(model):
        reply = log_softmax(model.classifier(features))
        return cross_entropy(model(client.x.double()), client.y) - reply[0, label]

    expected = descend(model, loss)
    replied(client, 3, knowledge)
    assert_close(client.network, expected, rtol=1e-3, atol=1e-5)


def test_class_counts_are_limited_by_samples(tmp_path):
    def boast(tensors):
        tensors["counts"] = tensors["counts"] * 10**6

    server = Server(fedgen(), tmp_path)
    results = server.train(server.instruct(1))
    honest = reply_of(results[0][1]).tensors
    name, samples = results[0][0].name, honest["counts"].sum()
    results[0] = results[0][0], altered(results[0][1], boast)
    accepted = []
    monkeyed = server.strategy._counts
    server.strategy._counts = lambda replies: accepted.append(monkeyed(replies)) or accepted[-1]
    server.aggregate(1, results)
    assert accepted[0][0].sum() <= server.strategy.members[name].info.samples
    assert accepted[0][0].sum() == pytest.approx(samples, abs=10)


def test_class_without_samples_is_never_generated(tmp_path):
    server = Server(
        fedgen(clients=3, **{**SPACES, "models.pool": ["mlp"], "max_samples": 0}), tmp_path
    )
    server.play(1)
    present = {int(y) for proxy, _ in server.instruct(2) for y in client_of(proxy).y.unique()}
    assert {int(c) for c in server.strategy.prior.nonzero()[0]} == present


def test_generator_that_diverges_is_not_kept(tmp_path, monkeypatch):
    def diverged(model, *args, **course):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        return float("nan")

    server = Server(fedgen(), tmp_path)
    before = {k: v.clone() for k, v in server.strategy.generator.state_dict().items()}
    monkeypatch.setattr("fedhet.strategies.fedgen.train_generator", diverged)
    server.play(1)
    after = server.strategy.generator.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(
        name.startswith("generator") for name in instruction_of(server.instruct(2)[0]).tensors
    )


def test_generator_learns_what_the_heads_agree_on(tmp_path):
    course = {"fedgen.server-steps": 200, "fedgen.generator-lr": 3e-3}
    summary = run(fedgen(rounds=3, local_epochs=2, **course), tmp_path / "run")
    first, *_, last = [past["method"] for past in records(tmp_path / "run")]
    assert last["agreement"] > 0.9
    assert last["generator_loss"] < first["generator_loss"] < log(10) + 0.5
    assert set(summary["accuracy"]["personal"]) == {"private", "global"}


def test_nonlinear_head_raises(tmp_path, monkeypatch):
    client = opened(fedgen(), tmp_path)
    deep = HetModel(nn.Flatten(), nn.Sequential(nn.Linear(64, 10)), 64)
    monkeypatch.setattr(client, "build_model", lambda width: deep)
    with pytest.raises(ModelError, match=r"nn\.Linear.*Sequential"):
        client.setup()
