"""CoFED's search for a participant's training configuration, against plain torch and by hand."""

import math
from itertools import product

import numpy as np
import pytest
import rounds
import torch
from federation import Server, small
from torch.nn import functional as F

from fedhet import models
from fedhet.base.errors import SettingsError
from fedhet.clients.cofed import Candidate, GridSearch, find_best, grid
from fedhet.config.resolve import resolve
from fedhet.learning.training import Evaluation, Optimization, batches
from fedhet.wire.knowledge import Knowledge

TASKS = {
    "partition": "superclasses",
    "superclasses": [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"], ["8", "9"]],
    "label-space": 3,
    "subclasses": 1,
    "samples-per-class": 20,
    "public-fraction": 0.4,
    "max-samples": 700,
    "rounds": 10,
}
GRID = {
    "cofed.search": "grid",
    "cofed.search-optimizers": ["adam", "sgd"],
    "cofed.search-rates": [0.0001, 0.003],
    "cofed.search-decays": [1, 0.5],
    "cofed.search-updates": [0.01, 1],
    "cofed.search-share": 0.25,
}


def opened(directory, models_="mlp", index=0, **changes):
    config = small("cofed", **{**TASKS, "models": models_, "local-epochs": 3, **changes})
    return rounds.opened(config, directory, partition=index)


PREDICT = Knowledge(scalars={"predict": True})


def test_grid_is_every_combination_and_sgd_tries_ten_times_the_rates():
    rates = {"cofed.search-rates": [0.002, 0.01]}
    found = grid(resolve({"method": "cofed", **rates}).method_settings)
    expected = [
        Candidate(o, r * {"adam": 1, "sgd": 10}[o], d)
        for o, r, d in product(["adam", "sgd"], [0.002, 0.01], [1.0, 0.99])
    ]
    assert found == expected
    assert {c.lr for c in found if c.optimizer == "sgd"} == {0.02, 0.1}


def test_default_grid_equals_the_published_script():
    """[0.02 0.04 0.06 0.08 0.1] / (1 + 9 * (s == "adam")), for "adam" and "sgdm"; updates .1, 2."""
    settings = resolve({"method": "cofed"}).method_settings
    tried = grid(settings)
    rates = {o: sorted({c.lr for c in tried if c.optimizer == o}) for o in ("adam", "sgd")}
    assert rates["sgd"] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert rates["adam"] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert 0.99 in {c.decay for c in tried}
    assert settings.search_updates == (0.1, 2)
    assert settings.search == "none"


def test_best_candidate_has_highest_accuracy_then_lowest_loss():
    one, two, three = (Candidate("adam", lr, 1.0) for lr in (1.0, 2.0, 3.0))

    def chosen(*scores):
        table = dict(zip((one, two, three), scores, strict=True))
        return find_best([one, two, three], table.__getitem__)

    assert chosen(Evaluation(0.5, 0.1), Evaluation(0.6, 9.0), Evaluation(0.4, 0.0)) == two
    assert chosen(Evaluation(0.5, 0.3), Evaluation(0.5, 0.2), Evaluation(0.5, 0.4)) == two
    assert chosen(Evaluation(0.5, 0.3), Evaluation(0.5, 0.3), Evaluation(0.5, 0.3)) == one
    assert chosen(Evaluation(0.5, math.nan), Evaluation(0.5, 0.3), Evaluation(0.5, math.inf)) == two


def plain_training(model, space, x, y, candidate, epochs, size, order):
    """Train with cross-entropy on the client's classes and torch optimizers, one rate per epoch."""
    make = {"adam": torch.optim.Adam, "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)}
    optimizer = make[candidate.optimizer](model.parameters(), lr=candidate.lr)
    rate = candidate.lr
    for _ in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for index in batches(len(y), size, order):
            logits = model(x[index])[:, space]
            target = torch.tensor([space.index(label) for label in y[index].tolist()])
            optimizer.zero_grad()
            F.cross_entropy(logits, target).backward()
            optimizer.step()
        rate *= candidate.decay
    return model


def same_weights(ours, expected):
    ours = getattr(ours, "network", ours).state_dict()  # without its restriction to the classes
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


def test_learning_rate_decays_after_each_epoch():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    sgd = torch.optim.SGD([{"params": weights[:1], "lr": 0.8}, {"params": weights[1:], "lr": 0.4}])
    lower = Optimization(sgd, torch.amp.GradScaler("cpu", enabled=False)).decay_schedule(0.5)
    seen = []
    for epoch in range(3):
        lower(epoch)
        seen.append([group["lr"] for group in sgd.param_groups])
    assert seen == [[0.8, 0.4], [0.4, 0.2], [0.2, 0.1]]


def by_hand(model, space, x, y):
    with torch.no_grad():
        logits = model.eval()(x)[:, space]
    target = torch.tensor([space.index(label) for label in y.tolist()])
    right = (logits.argmax(1) == target).double().mean().item()
    return right, -F.cross_entropy(logits, target).item()


def candidates_by_hand(decays):
    return [
        Candidate(o, r * (10 if o == "sgd" else 1), d)
        for o, r, d in product(("adam", "sgd"), (0.0001, 0.003), decays)
    ]


@pytest.mark.parametrize(("index", "decays"), [(0, (1.0, 0.5)), (1, (0.5, 0.4))])
def test_search_equals_plain_torch(tmp_path, index, decays):
    """Repeat the search for both phases: candidates, held-out data, and the choice."""
    tried = {**GRID, "cofed.search-decays": decays}
    client = opened(tmp_path, index=index, **tried)
    space = client.space.tolist()
    search = GridSearch(client, 1)
    held = {row.numpy().tobytes() for row in search.held_out.x}
    mask = torch.tensor([row.numpy().tobytes() in held for row in client.x])
    assert mask.sum() == len(search.held_out) == int(0.25 * len(client.y))
    assert set(search.held_out.y.tolist()) == set(client.y.tolist()), "stratified"
    assert torch.equal(search.train_part.x, client.x[~mask])

    def local(candidate, x, y, use="batches", round=1):
        model = models.build("mlp", (1, 8, 8), 5, seed=0)
        order = client.generator(round, use)
        return plain_training(model, space, x, y, candidate, 3, client.training.batch_size, order)

    scored = {
        c: by_hand(
            local(c, client.x[~mask], client.y[~mask]), space, client.x[mask], client.y[mask]
        )
        for c in candidates_by_hand(decays)
    }
    expected = max(scored, key=scored.get)
    assert len(set(scored.values())) > 4
    client.train(1, PREDICT)
    client.state.metadata["participations"] = 1
    facts = client.state.metadata
    assert (facts["search.optimizer"], facts["search.decay"]) == (
        expected.optimizer,
        expected.decay,
    )
    assert facts["search.lr"] == pytest.approx(expected.lr)
    assert client.training.optimizer == expected.optimizer
    # The final training has all of the data.
    whole = local(expected, client.x, client.y)
    same_weights(client.models["private"], whole)

    labels = np.full(len(client.public), 5, np.uint8)
    labels[:30] = np.resize(space, 30)
    client.settings = client.settings.model_copy(update={"update_batch_size": 40})
    client.train(2, Knowledge({"labels": labels}, {"predict": False}))
    given = torch.from_numpy(labels[:30].astype(np.int64))
    x = torch.cat([client.x[~mask], client.public[:30]])
    y = torch.cat([client.y[~mask], given])
    updated = {}
    for factor in (0.01, 1.0):
        start = local(expected, client.x[~mask], client.y[~mask], round=2)
        changed = Candidate(expected.optimizer, expected.lr * factor, expected.decay)
        order = client.generator(2, "update")
        model = plain_training(start, space, x, y, changed, 3, 40, order)
        search = GridSearch(client, 2)
        same_weights(search._updated(search._trained(expected), changed), model)
        updated[factor] = by_hand(model, space, client.x[mask], client.y[mask])
    assert facts["search.update"] == max(updated, key=updated.get)
    assert client.training.lr == pytest.approx(expected.lr * facts["search.update"])


def test_search_of_one_candidate_equals_no_search(tmp_path):
    """Trials must not change later draws of dropout or augmentation."""
    extra = {"training.augment": "crop-flip", "training.optimizer": "adam", "training.lr": 0.002}
    one = {"cofed.search-rates": 0.002, "cofed.search-decays": 1, "cofed.search-updates": 1}
    alone = {**GRID, **one, "cofed.search-optimizers": "adam"}
    plain = opened(tmp_path / "plain", "cnn2-dropout", **extra)
    searching = opened(tmp_path / "search", "cnn2-dropout", **extra, **alone)
    labels = np.full(len(plain.public), 5, np.uint8)
    labels[:30] = np.resize(plain.space, 30)
    for round, sent in ((1, PREDICT), (2, Knowledge({"labels": labels}, {"predict": False}))):
        for client in (plain, searching):
            client._train("run", round, sent)
        one, other = (c.models["private"].state_dict() for c in (plain, searching))
        assert all(torch.equal(one[name], other[name]) for name in one), round
    assert "search.lr" in searching.state.metadata
    assert "search.lr" not in plain.state.metadata


def test_result_is_kept_with_the_private_model(tmp_path):
    config = small("cofed", **{**TASKS, **GRID, "models": ["mlp", "sk-tree"], "clients": 2})
    server = Server(config, tmp_path / "run")
    for number in (1, 2):
        server.play(number)
        server.close(number)
    found = []
    for index, (proxy, _) in enumerate(server.instruct(3)):
        client = config.method.client(config, proxy._proxy._node)
        client.state.restore(server.log.run_name, before=3)
        found.append({k: v for k, v in client.state.metadata.items() if k.startswith("search.")})
        if index == 0:
            rate = found[0]["search.lr"] * found[0]["search.update"]
            assert client.training.lr == pytest.approx(rate)
    assert set(found[0]) == {f"search.{k}" for k in ("optimizer", "lr", "decay", "update")}
    assert found[1] == {}, "a tree has nothing to search for"


@pytest.mark.parametrize("count", [2, 3])
def test_too_little_data_skips_the_search(tmp_path, count):
    client = opened(tmp_path, **GRID)
    few = torch.arange(count)
    client.samples.own = type(client.samples.own)(client.x[few], client.y[few])
    client.train(1, PREDICT)
    assert ("search.lr" in client.state.metadata) == (count == 3)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *(
            ("search-rates", value, "expected list of numbers > 0 and <= 1000")
            for value in (0, -1, "a", [0.1, ""], math.nan, math.inf, 1001)
        ),
        *(
            ("search-decays", value, "expected list of numbers > 0 and <= 1")
            for value in (1.1, [0.5, 0], "0.9;0.8")
        ),
        ("search-updates", [0.1, "x"], "expected list of numbers > 0 and <= 1000"),
        ("search-rates", [], "expected a list of at least one value, without duplicates"),
        ("search-rates", [0.1, 0.10], "expected a list of at least one value, without duplicates"),
        (
            "search-optimizers",
            ["adam"] * 2,
            "expected a list of at least one value, without duplicates",
        ),
        ("search-optimizers", "sgdm", "expected list of values from adam, adamw, sgd"),
        ("search-share", 0.0, "expected number > 0 and < 1"),
        ("search-share", 1.0, "expected number > 0 and < 1"),
        ("search", "random", "expected one of none, grid"),
    ],
)
def test_invalid_search_raises(name, value, rule):
    with pytest.raises(SettingsError) as caught:
        resolve({"method": "cofed", f"cofed.{name}": value})
    assert str(caught.value).startswith(f"setting 'cofed.{name}': {rule}, got {value!r}")
