"""FixAvg: FixMatch's augmentations and loss, and FedAvg around them."""

import numpy as np
import pytest
import torch
from federation import Server, client_of, records, run, small
from flwr.common import parameters_to_ndarrays

from fedhet.algorithms.fixmatch import augmentations, confident_labels, fixmatch_loss
from fedhet.errors import DataError, FedhetError
from fedhet.seeding import seeded
from fedhet.wire.knowledge import decode


def fixavg(**changes):
    return small("fixavg", **{"models": "cnn2-dropout", "clients": 3, **changes})


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def images(count, *shape):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, *shape, generator=generator) * 2 - 1


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_augmented_images_are_images(shape, kind):
    x = images(37, *shape)
    with seeded(0, "augment"):
        changed = getattr(augmentations(shape), kind)(x)
    assert changed.shape == x.shape
    assert changed.dtype == x.dtype
    assert changed.min() >= -1.001
    assert changed.max() <= 1.001
    assert not torch.equal(changed, x)


def test_augmentations_are_drawn_from_the_seed():
    x, kinds = images(20, 3, 16, 16), augmentations((3, 16, 16))
    found = []
    for use in ("a", "a", "b"):
        with seeded(0, use):
            found.append(kinds.strong(x))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_strong_ones_are_stronger():
    x, kinds = images(64, 3, 16, 16).abs() * 0.5, augmentations((3, 16, 16))
    smooth = torch.nn.functional.avg_pool2d(x, 7, 1, 3)
    with seeded(0, "augment"):
        weak, strong = kinds.weak(smooth), kinds.strong(smooth)
    assert (strong - smooth).abs().mean() > 2 * (weak - smooth).abs().mean()


def test_digits_are_not_mirrored():
    """One bright column left of the middle stays left, by whatever shift there is."""
    x = torch.full((64, 1, 8, 8), -1.0)
    x[..., 2] = 1.0
    with seeded(0, "augment"):
        weak = augmentations((1, 8, 8)).weak(x)
    assert set(weak[:, 0, 4].argmax(1).tolist()) <= {1, 2, 3}


@pytest.mark.parametrize("shape", [(5,), (2, 8, 8), (8, 8)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(DataError, match=r"images \[1 or 3, H, W\], the samples have shape"):
        augmentations(shape)


@pytest.mark.parametrize("seed", range(5))
def test_pseudo_labels_and_loss_sample_by_sample(seed):
    rng = np.random.default_rng(seed)
    weak, strong = 3 * rng.normal(size=(30, 4)), 3 * rng.normal(size=(30, 4))
    truth, known = rng.integers(0, 4, 30), rng.random(30) < 0.4
    guessed, confident = confident_labels(torch.tensor(weak), 0.9)
    total = 0.0
    for i in range(30):
        p = np.exp(weak[i]) / np.exp(weak[i]).sum()
        assert guessed[i] == p.argmax()
        assert confident[i] == (p.max() >= 0.9)
        q = np.exp(strong[i]) / np.exp(strong[i]).sum()
        if known[i]:
            total -= np.log(q[truth[i]])
        elif p.max() >= 0.9:
            total -= 0.5 * np.log(q[p.argmax()])
    labels = torch.where(torch.tensor(known), torch.tensor(truth), guessed)
    loss = fixmatch_loss(torch.tensor(strong), labels, torch.tensor(known), confident, 0.5)
    assert loss.item() == pytest.approx(total / 30, rel=1e-5)


def test_gradient_reaches_labelled_and_confident_samples_alone():
    logits = torch.zeros(4, 3, requires_grad=True)
    known = torch.tensor([True, True, False, False])
    confident = torch.tensor([True, False, True, False])
    fixmatch_loss(logits, torch.tensor([0, 1, 2, 0]), known, confident, 1.0).backward()
    assert (logits.grad.abs().sum(1) > 0).tolist() == [True, True, True, False]


def test_labels_of_the_unlabelled_are_measured_by_not_learnt(tmp_path):
    """Other hidden labels: the same weights, another error."""
    found = []
    for shift in (0, 1):
        server = Server(fixavg(**{"fixavg.threshold": 0.0}), tmp_path / str(shift))
        asked = server.ask(1)
        for proxy, _ in asked:
            client = client_of(proxy)
            hidden = client.unlabelled.y
            hidden.copy_((hidden + shift) % 10)
        found.append([said(result) for _, result in server.answers(asked)])
        for proxy, _ in asked:  # clients stay open in this process
            hidden = client_of(proxy).unlabelled.y
            hidden.copy_((hidden - shift) % 10)
    for one, other in zip(*found, strict=True):
        for name, value in one.tensors.items():
            np.testing.assert_array_equal(value, other.tensors[name])
        assert one.scalars["confident"] == other.scalars["confident"] == 1.0
    errors = [[reply.scalars["pseudo_error"] for reply in replies] for replies in found]
    assert errors[0] != errors[1]


def said(result):
    return decode(parameters_to_ndarrays(result.parameters), "test")[1]


def test_the_server_averages_by_samples(tmp_path):
    config = fixavg(clients=4, fraction=0.5)
    server = Server(config, tmp_path / "run")
    answers = server.answers(server.ask(1))
    server.strategy.aggregate_fit(1, answers, [])
    samples = {c.name: server.strategy.members[c.name].info.samples for c, _ in answers}
    _, told = decode(parameters_to_ndarrays(server.ask(2)[0][1].parameters), "test")
    for name, value in told.tensors.items():
        parts = [(said(r).tensors[name].astype(float), samples[c.name]) for c, r in answers]
        mean = sum(part * count for part, count in parts) / sum(count for _, count in parts)
        np.testing.assert_allclose(
            value, np.rint(mean) if "num_batches" in name else mean, rtol=1e-5, atol=1e-6
        )


def test_a_restored_server_says_the_same(tmp_path):
    config = fixavg()
    server = Server(config, tmp_path / "one")
    server.strategy.aggregate_fit(1, server.answers(server.ask(1)), [])
    other = Server(config, tmp_path / "two")
    other.strategy._exchange._run = server.log.run_name
    other.strategy.load_state_dict(server.strategy.state_dict())
    for (_, one), (_, two) in zip(server.ask(2), other.ask(2), strict=True):
        assert one.parameters.tensors == two.parameters.tensors


def test_a_run_judges_both_kinds(tmp_path):
    summary = run(fixavg(rounds=2), tmp_path / "run")
    assert set(summary["accuracy"]["personal"]) == {"private", "global"}
    assert 0 <= records(tmp_path / "run")[-1]["method"]["confident"] <= 1


def test_all_clients_must_have_one_model(tmp_path):
    with pytest.raises(FedhetError, match="one model for all clients with fixavg"):
        Server(fixavg(models="mlp,cnn2"), tmp_path / "run")


def test_a_table_is_refused_before_anyone_trains(tmp_path):
    with pytest.raises(DataError, match=r"the samples have shape \[30\]"):
        Server(fixavg(models="mlp", dataset="breast-cancer"), tmp_path / "run")
