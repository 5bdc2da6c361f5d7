"""Training recipes: schedules, clipping, augmentation, kept optimizers, assigned settings."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from federation import Server, client_of, records, run, small
from flwr.common import parameters_to_ndarrays
from interruption import cut_and_resumed
from torch import nn
from torch.optim import SGD, lr_scheduler
from torchvision.transforms import v2

from fedhet.base.errors import DataError, SettingsError
from fedhet.base.seeding import torch_generator
from fedhet.client_runtime.node import read_node
from fedhet.config.resolve import resolve
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.kinds import IMAGE, TABLE, augmentation, changes
from fedhet.learning.devices import CPU
from fedhet.learning.training import CrossEntropy, Plateau, batches, optimization_for, rate_factor
from fedhet.settings.run import TrainingSettings, training_of


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


# --- the schedule ---------------------------------------------------------------------------


def of_torch(make, rounds):
    """Return the factors of a torch scheduler, one per round."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(rounds):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def linear(optimizer, rounds):
    return lr_scheduler.LinearLR(optimizer, 1 / (rounds + 1), total_iters=rounds)


SCHEDULES = {
    "constant": ({}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    "cosine": ({"schedule": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
    "step": (
        {"schedule": "step", "milestones": [3, 4, 11], "decay": 0.3},
        lambda o: lr_scheduler.MultiStepLR(o, [3, 4, 11], 0.3),
    ),
    "step at half and three quarters": (
        {"schedule": "step"},
        lambda o: lr_scheduler.MultiStepLR(o, [10, 15], 0.1),
    ),
    "warm-up": ({"warm_up_rounds": 4}, lambda o: linear(o, 4)),
    "warm-up, then cosine": (
        {"schedule": "cosine", "warm_up_rounds": 5},
        lambda o: lr_scheduler.SequentialLR(
            o, [linear(o, 5), lr_scheduler.CosineAnnealingLR(o, 15)], [5]
        ),
    ),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_learning_rate_factor_equals_the_torch_scheduler(case):
    settings, make = SCHEDULES[case]
    settings = TrainingSettings(**settings)
    found = [rate_factor(settings, number, 20) for number in range(1, 21)]
    assert found == pytest.approx(of_torch(make, 20), rel=1e-9)
    assert min(found) > 0


def test_default_is_a_factor_of_exactly_one():
    assert {rate_factor(TrainingSettings(), number, 7) for number in range(1, 8)} == {1.0}


@pytest.mark.parametrize("patience", [0, 2])
def test_plateau_equals_torch(patience):
    values = np.random.default_rng(patience).uniform(0.5, 1, 40).tolist()
    values += [0.4, 0.4 * (1 - 1e-5)]
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    known = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience)
    ours, falls = Plateau(), 0
    for value in values:
        known.step(value)
        before, ours = ours, ours.after(value, patience=patience, decay=0.5)
        falls += ours.factor < before.factor
        assert ours.factor == pytest.approx(max(optimizer.param_groups[0]["lr"], 0), rel=1e-6)
        assert (ours.best, ours.waited) == (known.best, known.num_bad_epochs)
        if ours.factor < 1e-6:
            break
    assert falls > 3


def rate_in(server, number):
    """The learning rate of a client's optimizer in a round."""
    client = client_of(server.instruct(number)[0][0])
    client.state.restore(server.log.run_name, before=number)
    client.recipe.begin(number)
    return client.optimization(client.network.parameters()).optimizer.param_groups[0]["lr"]


def test_client_trains_at_the_rounds_rate(tmp_path):
    config = small("local", rounds=4, schedule="step", milestones=[2], lr=0.5, clients=2)
    server = Server(config, tmp_path / "run")
    assert [rate_in(server, number) for number in (1, 2, 3, 4, 2)] == [0.5, 0.5, 0.05, 0.05, 0.5]


def test_clients_plateau_follows_its_own_training_loss(tmp_path):
    """With a tiny rate, the loss does not decrease, so each third round lowers the rate."""
    config = small("local", lr=1e-30, optimizer="sgd", schedule="plateau", patience=1, decay=0.25)
    server = Server(config, tmp_path / "run")
    rates = []
    for number in range(1, 8):
        rates.append(rate_in(server, number))
        (client, ins), *_ = server.instruct(number)
        client.request(ins, None, number)
    falls = [0, 0, 0, 1, 1, 2, 2]  # round 1 is the least so far, 2 waits, 3 lowers, 4 waits, ...
    assert rates == pytest.approx([1e-30 * 0.25**fall for fall in falls], rel=1e-6, abs=0)


# --- the step -------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e5])
def test_gradients_norm_is_bounded(clip):
    model = nn.Linear(3, 2)
    x, y = torch.randn(8, 3, generator=draws()), torch.arange(8) % 2
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    nn.functional.cross_entropy(model(x), y).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    settings = TrainingSettings(optimizer="sgd", lr=1.0, momentum=0.0, clip=clip)
    optimizing = optimization_for(model.parameters(), settings, CPU)
    optimizing.step(nn.functional.cross_entropy(model(x), y))
    moved = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    norm = gradient.norm().item()
    expected = gradient * (clip / norm if 0 < clip < norm else 1)
    assert 0.01 < norm < 1e5
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)


def test_adamw_equals_torch():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    settings = TrainingSettings(optimizer="adamw", lr=0.1, weight_decay=0.5)
    optimizing = optimization_for(model.parameters(), settings, CPU)
    theirs = torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.5)
    for seed in range(3):
        x = torch.randn(8, 3, generator=draws(seed))
        optimizing.step(model(x).square().mean())
        theirs.zero_grad()
        other(x).square().mean().backward()
        theirs.step()
    torch.testing.assert_close(model.weight, other.weight)
    adam = optimization_for(nn.Linear(3, 2).parameters(), TrainingSettings(), CPU).optimizer
    assert isinstance(adam, torch.optim.Adam)
    assert not isinstance(adam, torch.optim.AdamW)


# --- augmentation ---------------------------------------------------------------------------


def images(count, *shape):
    return torch.rand(count, *shape, generator=draws(7)) * 2 - 1


def all_shifts(image, reach, pad):
    _, height, width = image.shape
    wide = np.pad(image.numpy(), [(0, 0), (reach, reach), (reach, reach)], **pad)
    return [
        wide[:, top : top + height, left : left + width].tobytes()
        for top, left in itertools.product(range(2 * reach + 1), repeat=2)
    ]


@pytest.mark.parametrize(
    ("reflect", "pad"),
    [(False, {"mode": "constant", "constant_values": -1.0}), (True, {"mode": "reflect"})],
)
def test_each_image_has_its_own_shift(reflect, pad):
    x = images(300, 3, 16, 17)
    shifted = changes.shift(x, draws(), reflect=reflect)
    found = [
        all_shifts(before, 2, pad).index(after.numpy().tobytes())
        for before, after in zip(x, shifted, strict=True)
    ]
    assert set(found) == set(range(25))
    assert max(Counter(found).values()) < 35  # 12 each, in the mean


def test_about_half_of_the_images_are_mirrored():
    x = images(400, 1, 8, 8)
    flipped = changes.flip(x, draws())
    mirrored = [np.array_equal(a, b[..., ::-1]) for a, b in zip(flipped, x.numpy(), strict=True)]
    same = [torch.equal(a, b) for a, b in zip(flipped, x, strict=True)]
    assert sum(mirrored) + sum(same) == 400
    assert 150 < sum(mirrored) < 250


NAMES = (
    "ShearX ShearY TranslateX TranslateY Rotate Brightness Color Contrast Sharpness "
    "Identity Posterize Solarize AutoContrast Equalize"
).split()


@pytest.mark.parametrize("number", range(23))
@pytest.mark.parametrize("shape", [(3, 32, 24), (1, 8, 8)])
def test_operations_equal_torchvision_randaugment(number, shape):
    name = NAMES[number % 14]
    magnitudes, signed = v2.RandAugment._AUGMENTATION_SPACE[name]
    assert signed == (number % 14 < 9)
    found = magnitudes(31, *shape[1:])
    magnitude = 0.0 if found is None else found[10].item()
    x = (images(5, *shape) + 1) / 2
    theirs = v2.RandAugment()._apply_image_or_video_transform(
        x, name, -magnitude if number >= 14 else magnitude, v2.InterpolationMode.NEAREST, {}
    )
    torch.testing.assert_close(changes.operations()[number](x), theirs)


def test_each_image_draws_two_operations(monkeypatch):
    """Operations that mark images with powers of 30 can be identified."""
    marks = [lambda x, n=n: x * 30 + n for n in range(23)]
    monkeypatch.setattr(changes, "operations", lambda: marks)
    codes = changes.rand_augment(torch.full((4000, 1, 1, 1), -1.0), draws()).flatten()
    read = ((codes.double() + 1) / 2).round().long()
    for place in (read % 30, read // 30):
        counts = torch.bincount(place, minlength=23)
        both = counts[:9] + counts[14:]
        assert len(counts) == 23
        assert both.min() > 200  # each of the fourteen kinds about 286 times
        assert counts[9:14].min() > 200
        assert counts[14:].min() > 80
    assert len(torch.unique(read)) > 400  # of 529 pairs


def test_erased_is_one_rectangle_of_a_fiftieth_to_a_fifth():
    x = torch.ones(500, 3, 40, 30)
    erased = changes.erase(x, draws())
    areas = []
    for image in erased:
        rows, columns = ((image[0] == -1).any(1), (image[0] == -1).any(0))
        assert torch.equal(image == -1, (rows[:, None] & columns[None]).expand(3, 40, 30))
        for line in (rows, columns):
            place = line.nonzero().flatten()
            assert place[-1] - place[0] + 1 == len(place)  # in one piece
        areas.append(float(rows.sum() * columns.sum()) / 1200)
    assert min(areas) > 0.015
    assert max(areas) < 0.23
    assert np.mean(areas) == pytest.approx(0.11, abs=0.01)
    assert len({erased[k].numpy().tobytes() for k in range(500)}) > 450


@pytest.mark.parametrize("name", ["crop", "flip", "crop-flip", "randaugment"])
def test_augmentation_draws_only_from_its_generator(name):
    change, x = augmentation(name, IMAGE, (3, 8, 8)), images(9, 3, 8, 8)
    state = torch.get_rng_state()
    assert torch.equal(change(x, draws(1)), change(x, draws(1)))
    assert not torch.equal(change(x, draws(1)), change(x, draws(2)))
    assert torch.equal(torch.get_rng_state(), state)


def test_augmentation_of_a_table_raises():
    assert augmentation("none", TABLE, (30,)) is None
    with pytest.raises(DataError, match=r"training\.augment = 'crop'.*\[30\]"):
        augmentation("crop", TABLE, (30,))


def test_augmentation_of_a_table_raises_before_the_run(tmp_path):
    config = small("local", dataset="breast-cancer", models="mlp", augment="flip")
    with pytest.raises(DataError, match=r"training\.augment = 'flip'"):
        run(config, tmp_path / "run")


def test_augmentation_with_fixmatch_raises():
    with pytest.raises(SettingsError, match=r"'training\.semi' = 'fixmatch'"):
        small("fedavg", augment="crop", semi="fixmatch")


def seen_by(client, monkeypatch):
    """Record the images that a client augments."""
    seen = []
    monkeypatch.setattr(client.recipe, "_augmentation", lambda x, _: seen.append(x) or x)
    return seen


def test_private_images_are_augmented_and_public_ones_with_their_logits_are_not(
    tmp_path, monkeypatch
):
    config = small("fedgems", augment="crop", **{"fedgems.server-model": "mlp"})
    server = Server(config, tmp_path / "run")
    server.play(1)
    (proxy, ins), *_ = server.instruct(2)
    client = client_of(proxy)
    seen = seen_by(client, monkeypatch)
    distilled = []
    original = client._distill
    monkeypatch.setattr(client, "_distill", lambda *said: distilled.append(1) or original(*said))
    proxy.request(ins, None, 2)
    assert distilled == [1]
    assert sum(map(len, seen)) == len(client.y)


def test_client_augments_by_its_own_draws_of_the_round(tmp_path):
    """Compare with the generator of (seed, client, round)."""
    server = Server(small("local", augment="crop-flip", seed=3), tmp_path / "run")
    client = client_of(server.instruct(1)[1][0])
    client.recipe.begin(2)
    x = client.x[:40]
    found = [client.recipe.augment(x[:20]), client.recipe.augment(x[20:])]
    generator = torch_generator(3, client.info.name, 2, "augment")
    for part, seen in zip(x.split(20), found, strict=True):
        mirrored = torch.where(torch.rand(20, generator=generator).lt(0.5)[:, None, None, None],
                               part.flip(3), part)  # fmt: skip
        top, left = torch.randint(3, (2, 20), generator=generator)
        wide = nn.functional.pad(mirrored, (1, 1, 1, 1), value=-1.0)
        for image, row, column, after in zip(wide, top, left, seen, strict=True):
            assert torch.equal(image[:, row : row + 8, column : column + 8], after)


def test_order_of_clients_does_not_matter(tmp_path):
    config = small("felo", augment="randaugment", keep_optimizer=True, schedule="cosine")
    found = []
    for step in (1, -1):
        server = Server(config, tmp_path / str(step))
        for number in (1, 2):
            replies = {p.name: r for p, r in server.train(server.instruct(number)[::step])}
        found.append({name: r.parameters.tensors[1:] for name, r in replies.items()})
    assert found[0] == found[1]


# --- the optimizer that is kept -------------------------------------------------------------


def uninterrupted(client, config, rounds):
    """Train with one optimizer over all rounds, by hand."""
    model = client.build_model()
    training = config.run.training
    adam = torch.optim.Adam(model.parameters(), lr=training.lr, fused=True)
    loss_of = CrossEntropy(model.train())
    for number in range(1, rounds + 1):
        order = torch_generator(config.run.seed, client.info.name, number, "batches")
        for index in batches(len(client.y), training.batch_size, order):
            adam.zero_grad()
            loss_of(client.x[index], client.y[index]).backward()
            adam.step()
    return model.state_dict()


@pytest.mark.parametrize("keep", [True, False])
def test_kept_optimizer_equals_uninterrupted_training(tmp_path, keep):
    """The client stays open, or is read from disk."""
    config = small("local", clients=2, models="mlp", keep_optimizer=keep)
    server = Server(config, tmp_path / "run")
    for number in (1, 2, 3):
        (proxy, ins), *_ = server.instruct(number)
        if number == 3:  # as in another process
            fresh = config.method.client(config, proxy._proxy._node)
            fresh.fit(parameters_to_ndarrays(ins.parameters), {})
        else:
            proxy.request(ins, None, number)
    expected = uninterrupted(fresh, config, 3)
    same = [torch.equal(v, expected[k]) for k, v in fresh.network.state_dict().items()]
    assert all(same) == keep
    kept = {name.partition("/")[0] for name in fresh.state.tensors}
    assert kept == ({"optimizer"} if keep else set())


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_optimizer_state_keeps_the_layout_of_parameters(optimizer):
    def model():
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    one, x = model(), images(5, 3, 6, 6)
    settings = TrainingSettings(optimizer=optimizer, lr=0.1)
    first = optimization_for(one.parameters(), settings, CPU)
    for _ in range(3):
        first.step(one(x).square().mean())
    saved = {name: value.contiguous().clone() for name, value in first.state(one).items()}
    other = model()
    other.load_state_dict(one.state_dict())
    again = optimization_for(other.parameters(), settings, CPU)
    again.load_state(other, saved)
    for _ in range(2):
        first.step(one(x).square().mean())
        again.step(other(x).square().mean())
    assert torch.equal(one.weight, other.weight)
    for known in again.optimizer.state[other.weight].values():
        assert known.ndim < 4 or known.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("other", [nn.Linear(3, 5), nn.Sequential(nn.Linear(3, 2))])
def test_unsuitable_optimizer_state_is_ignored(other):
    one = nn.Linear(3, 2)
    first = optimization_for(one.parameters(), TrainingSettings(), CPU)
    first.step(one(torch.ones(4, 3)).sum())
    again = optimization_for(other.parameters(), TrainingSettings(), CPU)
    again.load_state(other, first.state(one))
    assert not again.optimizer.state


def test_fedtype_keeps_the_optimizer_of_the_private_model(tmp_path):
    server = Server(small("fedtype", keep_optimizer=True, models="mlp"), tmp_path / "run")
    (proxy, ins), *_ = server.instruct(1)
    proxy.request(ins, None, 1)
    client = client_of(proxy)
    names = {key.split("/")[1] for key in client.state.tensors if key.startswith("optimizer/")}
    assert names == {name for name, _ in client.network.named_parameters()}


RECIPES = {
    "local": {"schedule": "plateau", "patience": 0, "augment": "crop"},
    "fedgems": {"schedule": "plateau", "patience": 0, "fedgems.server-model": "mlp"},
}


@pytest.mark.parametrize("method", RECIPES)
def test_resumed_run_restores_optimizers_and_plateau(tmp_path, method):
    changes = {"models": "mlp", "max_samples": 200, "lr": 0.03, "keep_optimizer": True}
    config = small(method, rounds=4, fraction=0.75, **changes, **RECIPES[method])
    cut_and_resumed(config, tmp_path, moment="after")
    assert len(records(tmp_path / "cut")) == 4


def test_fedgems_server_keeps_its_optimizer_and_lowers_its_rate(tmp_path, monkeypatch):
    rates = []

    def recorded(*args):
        optimizing = optimization_for(*args)
        rates.append(optimizing.optimizer.param_groups[0]["lr"])
        return optimizing

    monkeypatch.setattr("fedhet.server.learner.optimization_for", recorded)
    config = small(
        "fedgems", rounds=3, models="mlp", lr=1e-30, optimizer="sgd", schedule="plateau",
        patience=0, keep_optimizer=True, **{"fedgems.server-model": "mlp"},
    )  # fmt: skip
    server = Server(config, tmp_path / "run")
    factors = []
    for number in (1, 2, 3):
        server.play(number)
        factors.append(server.strategy.learner.plateau.factor)
    assert factors == pytest.approx([1, 0.1, 0.01])
    state = server.strategy.state_dict()
    names = {name for name, _ in server.strategy.learner.model.named_parameters()}
    kept = {key.removeprefix("optimizer/") for key in state if key.startswith("optimizer/")}
    assert kept == {f"{name}/momentum_buffer" for name in names}
    # a round trains at the rate that the rounds before have left
    assert rates == pytest.approx([1e-30, 1e-30, 1e-31], rel=1e-6, abs=0)


# --- assigned -------------------------------------------------------------------------------


def assigned(**changes):
    run = small("local", **changes).run
    return [training_of(run, client) for client in range(run.clients)]


def test_single_value_applies_to_all_clients():
    assert assigned() == [small("local").run.training] * 4
    assert type(assigned(lr=1)[0].lr) is float


@pytest.mark.parametrize(
    ("models", "optimizers", "rates"),
    [(2, 2, 2), (2, 3, 2), (3, 2, 3), (5, 2, 2), (4, 2, 3), (1, 3, 3), (3, 3, 3), (6, 3, 2)],
)
def test_every_combination_has_one_client(models, optimizers, rates):
    clients = models * optimizers * rates
    pools = {
        "models": ["mlp", "mlp2", "cnn2", "cnn3", "lenet5", "resnet10"][:models],
        "optimizer": ["adam", "sgd", "adamw"][:optimizers],
        "lr": [0.1, 0.01, 0.001][:rates],
    }
    found = assigned(clients=clients, **pools)
    seen = Counter((k % models, t.optimizer, t.lr) for k, t in enumerate(found))
    assert len(seen) == clients
    # Also with fewer clients than combinations, each value has equally many, give or take one.
    for size, name in itertools.product(range(1, clients), ("optimizer", "lr")):
        values = [getattr(t, name) for t in found]
        counts = [values[:size].count(value) for value in set(values)]
        assert max(counts) - min(counts) <= 1


def test_shuffled_values_have_an_independent_order_per_setting():
    pools = {"lr": [0.1, 0.01], "optimizer": ["adam", "sgd"], "batch_size": [8, 16, 32]}
    found = assigned(clients=12, assignment="shuffle", **pools)
    assert Counter(t.lr for t in found) == {0.1: 6, 0.01: 6}
    assert Counter(t.batch_size for t in found) == {8: 4, 16: 4, 32: 4}
    assert [t.lr == 0.1 for t in found] != [t.optimizer == "adam" for t in found]
    assert found == assigned(clients=12, assignment="shuffle", **pools)
    assert found != assigned(clients=12, assignment="shuffle", seed=1, **pools)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("training.lr", [0.1, -1], "number > 0"),
        ("training.lr", [], "number > 0"),
        ("training.lr", [0.1, ""], "number > 0"),
        ("training.lr", "fast", "number > 0"),
        ("training.optimizer", ["adam", "sdg"], "one of adam, adamw, sgd"),
        ("training.local-epochs", [1, 2.5], "integer >= 1"),
        ("training.batch-size", [8, 0], "integer >= 1"),
        ("training.momentum", [0.1, 0.2], "number >= 0"),
        ("training.milestones", [5, 3], "a list of integers >= 1 in ascending order"),
        ("training.milestones", [5, 5], "a list of integers >= 1 in ascending order"),
        ("training.milestones", [0, 5], "list of integers >= 1"),
        ("training.milestones", ["5;7"], "list of integers >= 1"),
    ],
)
def test_each_value_is_checked(name, value, rule):
    with pytest.raises(SettingsError) as caught:
        resolve({name: value})
    assert f"setting '{name}': expected {rule}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pool_round_trips_through_a_file(tmp_path):
    config = resolve({"training.lr": [0.1, 1e-3], "training.local-epochs": [1, 2]})
    assert config.flat()["training.lr"] == [0.1, 0.001]
    assert resolve(config.flat()) == config
    assert config.run.training.first() == TrainingSettings(lr=0.1, local_epochs=1)


def test_client_trains_with_its_assigned_settings_and_the_summary_has_them(tmp_path):
    config = small(
        "local", clients=2, models="mlp", rounds=1, lr=[0.5, 0.25], optimizer=["sgd", "adamw"],
        local_epochs=[2, 1], batch_size=[16, 8],
    )  # fmt: skip
    server = Server(config, tmp_path / "by-hand")
    assert server.strategy.run.training.lr == (0.5, 0.25)
    for (proxy, ins), kind, rate in zip(
        server.instruct(1), (torch.optim.SGD, torch.optim.AdamW), (0.5, 0.25), strict=True
    ):
        client = client_of(proxy)
        proxy.request(ins, None, 1)
        made = client.optimization(client.network.parameters()).optimizer
        assert isinstance(made, kind)
        assert made.param_groups[0]["lr"] == rate
        assert client.run.training == config.run.training
    summary = run(config, tmp_path / "run")
    assert summary["training"] == {
        "client-0": "sgd, lr 0.5, epochs 2, batch 16",
        "client-1": "adamw, lr 0.25, epochs 1, batch 8",
    }


def test_node_settings_precede_run_settings():
    run = small("local", lr=[0.5, 0.25]).run
    own = {"partition-id": 1, "optimizer": "sgd", "local-epochs": 7, "batch-size": 3}
    assert read_node(own, run).training == run.training.model_copy(
        update={"lr": 0.25, "optimizer": "sgd", "local_epochs": 7, "batch_size": 3}
    )
    assert read_node({"partition-id": 0, "lr": 2.0}, run).training.lr == 2.0
    with pytest.raises(SettingsError, match=r"node-config optimizer'.*'sdg'"):
        read_node({"partition-id": 0, "optimizer": "sdg"}, run)


# --- no test split of their own -------------------------------------------------------------


@pytest.mark.parametrize("method", ["local", "fedtype", "cofed"])
def test_common_test_set_is_used_without_test_splits(tmp_path, method):
    no_cap = {"engine.samples-cap": 10.0}
    config = small(method, test_fraction=0.0, models="mlp", max_samples=200, **no_cap)
    summary = run(config, tmp_path / "run", report=True)
    assert set(summary["accuracy"]) == {"common"}
    assert summary["headline"] == "common"
    assert (tmp_path / "run" / "report.html").exists()
    whole = sum(training_samples(config, tmp_path))
    assert whole == 200 * (0.8 if method == "cofed" else 1)


def training_samples(config, directory):
    server = Server(config, directory / "again")
    return [member.info.samples for member in server.strategy.members.values()]


def test_site_without_a_test_set_needs_a_split(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "train.npz", x=rng.random((20, 4), np.float32), y=np.arange(20) % 2)
    with pytest.raises(DataError, match=r"data\.test-fraction"):
        site_data(f"npz:{tmp_path}", spec=DataSpec(test_fraction=0.0), classes=2, name="a")
    assert len(site_data(f"npz:{tmp_path}", spec=DataSpec(), classes=2, name="a").test) == 4
