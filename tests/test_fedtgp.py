"""FedTGP against slow transcriptions of its equations, its messages, and its state."""

import numpy as np
import pytest
import torch
from federation import Server, small
from hypothesis import given
from hypothesis import strategies as st
from rounds import (
    PLAIN,
    assert_class_means,
    assert_close,
    assert_only_rows_per_class,
    descend,
    features_from,
    fitted,
    instruction_of,
    learn,
    opened,
    same,
)

from fedhet.algorithms.classwise import Teacher, class_mean_distance
from fedhet.algorithms.feature_models import (
    NearestPrototype,
    TrainablePrototypes,
    adaptive_margin,
    contrastive_loss,
    train_prototypes,
)
from fedhet.base.errors import SettingsError
from fedhet.strategies import fedtgp as server_half
from fedhet.wire.knowledge import Knowledge


def fedtgp(**changes):
    quick = {"fedtgp.server-epochs": 3}
    return small("fedtgp", **{"clients": 3, **quick, **changes})


def phi(one, other):
    return np.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(one, other, strict=True)))


def drawn(seed, count=12, classes=4, width=5):
    """Return the clients' prototypes and classes, with each class at least twice."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes)] * 2 + [rng.integers(0, classes, count)])[:count]
    return rng.normal(size=(count, width)), labels


# Trainable global prototypes


def test_prototype_is_the_network_output_of_its_vector():
    """Fig. 3: W2 ReLU(W1 v + b1) + b2, with a vector of each class."""
    model = TrainablePrototypes(4, 5)
    named = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    assert sum(value.size for value in named.values()) == 4 * 5 + 2 * (5 * 5 + 5)
    for c in range(4):
        vector = named["vectors.weight"][c]
        hidden = np.maximum(named["network.0.weight"] @ vector + named["network.0.bias"], 0)
        expected = named["network.2.weight"] @ hidden + named["network.2.bias"]
        np.testing.assert_allclose(model()[c].detach(), expected, rtol=1e-5, atol=1e-6)


# Adaptive-margin-enhanced contrastive learning (Eqs. 6, 9 and 10)


def equation_10(prototypes, labels, trained, margin):
    """Return the sum over clients and classes of -log of the fraction in Eq. 10."""
    total = 0.0
    for own, c in zip(prototypes, labels, strict=True):
        top = np.exp(-(phi(own, trained[c]) + margin))
        others = sum(np.exp(-phi(own, trained[k])) for k in range(len(trained)) if k != c)
        total -= np.log(top / (top + others))
    return total


@pytest.mark.parametrize("margin", [0.0, 1.3])
def test_loss_equals_equation_10(margin):
    """The loss is the mean instead of the sum; without a margin, it is Eq. 6."""
    prototypes, labels = drawn(0)
    trained = np.random.default_rng(9).normal(size=(4, 5))
    loss = contrastive_loss(
        torch.tensor(prototypes), torch.tensor(labels), torch.tensor(trained), margin
    )
    expected = equation_10(prototypes, labels, trained, margin) / len(labels)
    assert loss.item() == pytest.approx(expected, rel=1e-9)


def test_loss_has_gradients_only_for_global_prototypes():
    """The gradient equals finite differences of Eq. 10; clients' prototypes are constants."""
    prototypes, labels = drawn(1)
    trained = np.random.default_rng(9).normal(size=(4, 5))
    place = torch.tensor(trained, requires_grad=True)
    contrastive_loss(torch.tensor(prototypes), torch.tensor(labels), place, 0.7).backward()
    step = 1e-6
    for c in range(4):
        for d in range(5):
            up, down = trained.copy(), trained.copy()
            up[c, d], down[c, d] = up[c, d] + step, down[c, d] - step
            slope = (
                equation_10(prototypes, labels, up, 0.7)
                - equation_10(prototypes, labels, down, 0.7)
            ) / (2 * step * len(labels))
            assert place.grad[c, d].item() == pytest.approx(slope, rel=1e-4, abs=1e-8)
    model = TrainablePrototypes(4, 5).double()
    given = torch.tensor(prototypes)
    contrastive_loss(given, torch.tensor(labels), model(), 0.7).backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
    assert given.grad is None


def test_distance_of_zero_has_a_gradient():
    """A zero distance has no gradient of the root; a large one loses no digits."""
    own = torch.tensor([[1000.0, 0.0], [1000.01, 0.0]])
    trained = own.clone().requires_grad_()
    loss = contrastive_loss(own, torch.tensor([0, 1]), trained, 0.5)
    loss.backward()
    assert trained.grad.isfinite().all()
    assert loss.item() == pytest.approx(np.log(1 + np.exp(0.5 - 0.01)), rel=1e-3)


def equation_9(prototypes, labels, threshold, reading):
    """Loop over the pairs of classes."""
    centers = {c: prototypes[labels == c].mean(0) for c in set(labels.tolist())}
    if len(centers) < 2:
        return 0.0
    apart = {c: [phi(q, centers[k]) for k in centers if k != c] for c, q in centers.items()}
    choose = max if reading == "largest" else min
    return min(max(choose(distances) for distances in apart.values()), threshold)


@given(st.integers(0, 2**31), st.integers(1, 20), st.sampled_from([1.0, 2.5, 100.0]))
def test_margin_equals_equation_9(seed, count, threshold):
    """Test the margin of the paper and of the authors' code."""
    prototypes, labels = drawn(seed, count)
    for reading in ("largest", "nearest"):
        found = adaptive_margin(torch.tensor(prototypes), torch.tensor(labels), threshold, reading)
        assert found == pytest.approx(equation_9(prototypes, labels, threshold, reading), rel=1e-9)


def slow_training(model, prototypes, labels, margin, lr, epochs):
    """Run gradient descent on Eq. 10 over all prototypes, in float64 and term by term."""
    own = torch.tensor(prototypes).double()

    def mean_loss(model):
        trained, loss = model(), 0.0
        for n, c in enumerate(labels.tolist()):
            powers = [
                -torch.sqrt(((own[n] - trained[k]) ** 2).sum()) - (margin if k == c else 0.0)
                for k in range(len(trained))
            ]
            loss = loss - powers[c] + torch.logsumexp(torch.stack(powers), 0)
        return loss / len(labels)

    return descend(model, mean_loss, epochs, lr)().detach().numpy()


def test_training_is_gradient_descent():
    prototypes, labels = drawn(3)
    torch.manual_seed(0)
    model = TrainablePrototypes(4, 5)
    expected = slow_training(model, prototypes, labels, 0.8, 0.1, 4)
    train_prototypes(
        model,
        torch.tensor(prototypes).float(),
        torch.tensor(labels),
        margin=0.8,
        epochs=4,
        batch_size=100,
        lr=0.1,
        generator=torch.Generator().manual_seed(0),
    )
    np.testing.assert_allclose(model().detach(), expected, rtol=1e-4, atol=1e-5)


def test_trained_prototypes_are_further_apart_than_means():
    """If the clients' classes overlap, their means are close; trained prototypes are not."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(4, 8))
    labels = np.tile(np.arange(4), 10)
    prototypes = centers[labels] + rng.normal(size=(40, 8))
    means = np.array([prototypes[labels == c].mean(0) for c in range(4)])
    torch.manual_seed(0)
    model, own = TrainablePrototypes(4, 8), torch.tensor(prototypes).float()
    train_prototypes(
        model,
        own,
        torch.tensor(labels),
        margin=adaptive_margin(own, torch.tensor(labels), 100.0),
        epochs=200,
        batch_size=10,
        lr=0.05,
        generator=torch.Generator().manual_seed(0),
    )
    trained = model().detach().numpy()

    def closest(vectors):
        return min(phi(vectors[a], vectors[b]) for a in range(4) for b in range(a))

    assert closest(trained) > closest(means)
    for c in range(4):  # and each is nearest to the mean of its own class
        assert min(range(4), key=lambda k: phi(trained[c], means[k])) == c


# The server


def test_round_trains_on_all_prototypes_of_the_round(tmp_path, monkeypatch):
    """Train with the run's settings and Eq. 9's margin on the sampled clients' prototypes."""
    seen = []
    plain = server_half.train_prototypes

    def watched(model, features, labels, **options):
        seen.append((features.numpy().copy(), labels.numpy().copy(), options))
        return plain(model, features, labels, **options)

    monkeypatch.setattr(server_half, "train_prototypes", watched)
    own = {
        "fedtgp.server-epochs": 2, "fedtgp.server-lr": 0.02, "fedtgp.server-batch-size": 7,
        "fedtgp.max-margin": 3.0, "fedtgp.margin": "nearest",
    }  # fmt: skip
    server = Server(fedtgp(clients=4, fraction=0.5, alpha=0.3, models="mlp", **own), tmp_path)
    for number in (1, 2):
        replies = learn(server, number)
        features, labels, options = seen[-1]
        expected = [replies[name]["features"] for name in sorted(replies)]
        np.testing.assert_array_equal(features, np.concatenate(expected))
        assert labels.tolist() == [c for name in sorted(replies) for c in replies[name]["classes"]]
        margin = equation_9(features, labels, 3.0, "nearest")
        assert options["margin"] == pytest.approx(margin, rel=1e-4)
        assert (options["epochs"], options["lr"], options["batch_size"]) == (2, 0.02, 7)
        measured = server.flower.state.record.method
        assert measured["margin"] == options["margin"]
        sent = instruction_of(server.instruct(number + 1)[0]).tensors["features"]
        apart = [min(phi(a, b) for j, b in enumerate(sent) if j != i) for i, a in enumerate(sent)]
        assert measured["separation"] == pytest.approx(np.mean(apart), rel=1e-4)


def test_only_classes_seen_by_a_client_are_sent(tmp_path):
    """Other classes also have prototypes, but without information."""
    server = Server(fedtgp(), tmp_path)
    assert not instruction_of(server.instruct(1)[0]).tensors
    client = server.strategy.members["client-0"].info
    assert server.strategy.eval_instruction(1, client) is None
    figures = server.strategy.aggregate(1, [features_from(server, "client-0", [1, 7])])
    assert figures["classes_covered"] == 2.0
    figures = server.strategy.aggregate(2, [features_from(server, "client-1", [4, 7])])
    assert figures["classes_covered"] == 3.0
    sent = instruction_of(server.instruct(3)[0]).tensors
    assert sent["classes"].tolist() == [1, 4, 7]
    trained = server.strategy.model().detach().numpy()
    np.testing.assert_array_equal(sent["features"], trained[[1, 4, 7]])
    assert server.strategy.eval_instruction(2, client) is server.strategy.instruct(3, client)


@pytest.mark.parametrize("classes", [[], [3]])
def test_round_with_one_class_changes_nothing(tmp_path, classes):
    server = Server(fedtgp(), tmp_path)
    before = server.strategy.state_dict()
    figures = server.strategy.aggregate(1, [features_from(server, "client-0", classes)])
    assert figures == {"classes_covered": 0.0}
    assert same(server.strategy.state_dict(), before)


def test_one_class_of_two_clients_has_no_margin(tmp_path):
    server = Server(fedtgp(), tmp_path)
    replies = [features_from(server, "client-0", [3]), features_from(server, "client-1", [3])]
    figures = server.strategy.aggregate(1, replies)
    assert figures["margin"] == figures["separation"] == 0.0
    assert figures["classes_covered"] == 1.0


def test_training_that_diverges_leaves_the_prototypes(tmp_path):
    """A client sends numbers whose squares are infinite, and no check rejects them."""
    server = Server(fedtgp(), tmp_path)
    server.strategy.aggregate(1, [features_from(server, "client-0", [1, 2])])
    before = {name: value.copy() for name, value in server.strategy.state_dict().items()}
    with pytest.raises(Exception, match="diverged"):
        server.strategy.aggregate(2, [features_from(server, "client-1", [1, 2], 1e38)])
    assert same(server.strategy.state_dict(), before)


def test_one_malicious_client_barely_moves_prototypes(tmp_path):
    """The gradient of a distance has length 1, regardless of the prototype's distance."""
    honest = [f"client-{k}" for k in range(4)]
    near, far = (Server(fedtgp(clients=5), tmp_path / name) for name in ("near", "far"))
    for server, value in ((near, 1.0), (far, 1e6)):
        replies = [features_from(server, name, [1, 2, 3]) for name in honest]
        replies.append(features_from(server, "client-4", [1, 2, 3], value))
        server.strategy.settings.__dict__["max_margin"] = 1.0
        server.strategy.aggregate(1, replies)
    one, other = (s.strategy.model().detach().numpy() for s in (near, far))
    assert np.abs(one - other).max() < 1.0


# The client (Eqs. 2 and 11)


def equation_11(features, labels, known):
    """Return the mean distance of a batch's class means to the global prototypes."""
    found = []
    for c in sorted(set(labels) & set(known)):
        own = np.mean([features[n] for n, label in enumerate(labels) if label == c], axis=0)
        found.append(np.sqrt(np.sum((own - known[c]) ** 2)))
    return np.mean(found) if found else 0.0


def batch(seed, samples=9, width=5):
    """Return features, labels in 0 to 3, and global prototypes of three of these classes."""
    rng = np.random.default_rng(seed)
    known = {c: rng.normal(size=width).astype(np.float32) for c in (0, 1, 3)}
    labels = [0, 2, 1, *rng.integers(0, 4, samples - 3).tolist()]
    return rng.normal(size=(samples, width)), labels, known


def taught(known, classes=6):
    features = np.stack(list(known.values()))
    return Teacher.from_tensors(np.array(list(known)), features, None, classes, torch.device("cpu"))


@given(st.integers(0, 2**31))
def test_distance_equals_equation_11(seed):
    """The gradient is 1 / (|C| n_c) times the direction from the prototype to the class mean."""
    features, labels, known = batch(seed)
    place = torch.tensor(features, dtype=torch.float32, requires_grad=True)
    found = class_mean_distance(place, torch.tensor(labels), taught(known))
    assert found.item() == pytest.approx(equation_11(features, labels, known), rel=1e-5)
    found.backward()
    classes = set(labels) & set(known)
    for n, c in enumerate(labels):
        expected = np.zeros(5)
        if c in classes:
            gap = features[[k for k, label in enumerate(labels) if label == c]].mean(0) - known[c]
            expected = gap / np.sqrt(np.sum(gap**2)) / len(classes) / labels.count(c)
        np.testing.assert_allclose(place.grad[n], expected, rtol=1e-4, atol=1e-6)


def test_gradient_is_zero_at_the_prototype():
    """The root has no gradient there, which must also stay finite nearby."""
    known = {0: np.zeros(3, np.float32), 1: np.ones(3, np.float32)}
    features = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0], [1.0, 1.0, 1.0], [1e-30, 0, 0]])
    for labels in ([0, 0, 1, 4], [2, 3, 1, 0], [2, 2, 2, 2]):
        place = features.clone().requires_grad_()
        found = class_mean_distance(place, torch.tensor(labels), taught(known))
        found.backward()
        assert found.item() == pytest.approx(0.0, abs=1e-29)
        assert torch.equal(place.grad, torch.zeros(4, 3))


def test_gradient_does_not_grow_with_the_distance():
    for far in (1.0, 1e3, 1e6):
        place = torch.full((1, 4), far, requires_grad=True)
        known = {2: np.zeros(4, np.float32)}
        class_mean_distance(place, torch.tensor([2]), taught(known)).backward()
        assert place.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


PULLS = {
    "euclidean": ({}, 0.1),
    "mse": ({"fedtgp.distance": "mse"}, 10.0),
    "own": ({"fedtgp.lambda": 0.7}, 0.7),
}


def slow_loss(features, logits, y, known, distance, weight):
    """Return cross-entropy plus lambda times either distance."""
    loss, gaps = 0.0, {}
    for n, label in enumerate(y):
        loss = loss + (torch.logsumexp(logits[n], 0) - logits[n, label]) / len(y)
        if label in known:
            gaps.setdefault(label, []).append(features[n] - torch.tensor(known[label]).double())
    if distance == "mse":
        return loss + weight * sum((g**2).mean() for own in gaps.values() for g in own) / len(y)
    means = [sum(own) / len(own) for own in gaps.values()]
    return loss + weight * sum((mean**2).sum().sqrt() for mean in means) / len(means)


@pytest.mark.parametrize("pull", PULLS)
def test_round_of_a_client_equals_the_local_update(tmp_path, pull):
    """Test both distances with their default weights, and with another weight."""
    changes, weight = PULLS[pull]
    chosen = {"models": "mlp2", "max_samples": 150, **changes, **PLAIN}
    client = opened(fedtgp(**chosen), tmp_path)
    rng = np.random.default_rng(0)
    known = {c: rng.normal(size=64).astype(np.float32) for c in (0, 1, 2, 4)}
    assert len(set(client.y.tolist()) - set(known)) > 0
    x, distance = client.x.double(), "mse" if pull == "mse" else "euclidean"

    def loss(model):
        features = model.extractor(x)
        logits = model.classifier(features)
        return slow_loss(features, logits, client.y.tolist(), known, distance, weight)

    model = descend(client.network, loss)
    sent = {"classes": np.array(list(known), np.int64), "features": np.stack(list(known.values()))}
    reply = fitted(client, 1, Knowledge(sent))
    assert_close(client.network, model)
    assert_class_means(reply, model.extractor(x), client.y)


def test_class_mean_is_not_private():
    """A sample's gradient would depend on its batch, which DP-SGD cannot bound."""
    private = {"privacy.epsilon": 8.0, "models": "mlp"}
    with pytest.raises(SettingsError, match=r"'fedtgp\.distance'.*mse"):
        fedtgp(**private)
    assert fedtgp(**private, **{"fedtgp.distance": "mse"}).method_settings.pull == (10.0, "mse")


def test_nearest_trained_prototype_is_evaluated(tmp_path):
    client = opened(fedtgp(), tmp_path)
    features = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    knowledge = Knowledge({"classes": np.array([0, 2, 5]), "features": features})
    judged = client.eval_models(knowledge)
    assert list(judged) == ["private", "prototype"]
    assert isinstance(judged["prototype"], NearestPrototype)
    own = client.network.extractor(client.x[:4]).detach().numpy()
    for n, guess in enumerate(judged["prototype"](client.x[:4]).argmax(1).tolist()):
        gaps = {c: phi(own[n], features[row]) for row, c in enumerate((0, 2, 5))}
        assert guess == min(gaps, key=gaps.get)


# Sent and local tensors


def test_only_prototypes_are_sent(tmp_path):
    """Unlike in FedProto, numbers of samples are not sent either."""
    config = fedtgp(models=["mlp", "cnn2", "cnn3"], **{"fedtgp.feature-dim": 32})
    assert_only_rows_per_class(config, tmp_path, "features", width=32)


def test_draws_depend_only_on_seed_and_round(tmp_path):
    """Draws do not use torch's global generator, and depend on the seed."""
    states = []
    for number, seed in enumerate((0, 0, 1)):
        server = Server(fedtgp(seed=seed), tmp_path / str(number))
        torch.manual_seed(number)
        learn(server, 1)
        states.append(server.strategy.state_dict())
    assert same(states[0], states[1])
    assert not same(states[0], states[2])
