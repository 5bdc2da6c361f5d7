"""FixAvg: FixMatch's augmentations and loss, and FedAvg around them."""

import numpy as np
import pytest
import torch
from federation import Server, client_of, records, run, small
from flwr.common import parameters_to_ndarrays

from fedhet.algorithms.fixmatch import (
    check_shape,
    confident_labels,
    fixmatch_loss,
    strong,
    weak,
)
from fedhet.errors import DataError, FedhetError, SettingsError
from fedhet.wire.knowledge import decode


def fixavg(**changes):
    return small("fixavg", **{"models": "cnn2-dropout", "clients": 3, **changes})


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def images(count, *shape):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, *shape, generator=generator) * 2 - 1


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("change", [weak, strong])
def test_augmented_images_are_images(shape, change):
    x = images(37, *shape)
    changed = change(x, draws())
    assert changed.shape == x.shape
    assert changed.dtype == x.dtype
    assert changed.min() >= -1.001
    assert changed.max() <= 1.001
    assert not torch.equal(changed, x)


def test_augmentations_are_drawn_from_the_generator_alone():
    x, before = images(20, 3, 16, 16), torch.get_rng_state()
    found = [strong(x, draws(seed)) for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_each_image_has_an_augmentation_of_its_own():
    """Of sixty-four copies of an image: 9 weak ones are possible, strong ones hardly meet."""
    x = images(1, 1, 8, 8).repeat(64, 1, 1, 1)
    for change, least in ((weak, 9), (strong, 55)):
        assert len(torch.unique(change(x, draws()), dim=0)) >= least


def test_strong_ones_are_stronger():
    x = images(64, 3, 16, 16).abs() * 0.5
    smooth = torch.nn.functional.avg_pool2d(x, 7, 1, 3)
    changed = [change(smooth, draws()) for change in (weak, strong)]
    moved = [(each - smooth).abs().mean() for each in changed]
    assert moved[1] > 2 * moved[0]


def test_digits_are_not_mirrored():
    """One bright column left of the middle stays left, by whatever shift there is."""
    x = torch.full((64, 1, 8, 8), -1.0)
    x[..., 2] = 1.0
    assert set(weak(x, draws())[:, 0, 4].argmax(1).tolist()) == {1, 2, 3}


@pytest.mark.parametrize("shape", [(5,), (2, 8, 8), (8, 8)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(DataError, match=r"images \[1 or 3, H, W\], the samples have shape"):
        check_shape(shape)


@pytest.mark.parametrize("seed", range(5))
def test_pseudo_labels_and_loss_sample_by_sample(seed):
    """Sohn et al.: Eq. 3 over the B labelled images, Eq. 4 over all of the unlabelled ones."""
    rng = np.random.default_rng(seed)
    weakly, strongly = 3 * rng.normal(size=(30, 4)), 3 * rng.normal(size=(30, 4))
    truth, known = rng.integers(0, 4, 30), rng.random(30) < 0.4
    guessed, confident = confident_labels(torch.tensor(weakly), 0.9)
    supervised, unsupervised = [], []
    for i in range(30):
        q = np.exp(weakly[i]) / np.exp(weakly[i]).sum()
        assert guessed[i] == q.argmax()
        assert confident[i] == (q.max() >= 0.9)
        p = np.exp(strongly[i]) / np.exp(strongly[i]).sum()
        if known[i]:
            supervised.append(-np.log(p[truth[i]]))
        else:
            unsupervised.append((q.max() >= 0.9) * -np.log(p[q.argmax()]))
    assert 0 < sum(value > 0 for value in unsupervised) < len(unsupervised)
    labels = torch.where(torch.tensor(known), torch.tensor(truth), guessed)
    loss = fixmatch_loss(torch.tensor(strongly), labels, torch.tensor(known), confident, 0.5)
    expected = np.mean(supervised) + 0.5 * np.mean(unsupervised)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_a_batch_without_samples_of_one_sort_has_the_other_term_alone(known):
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    labels, everywhere = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
    loss = fixmatch_loss(logits, labels, everywhere & known, everywhere, 0.25)
    each = [np.log(1 + np.e), np.log(1 + np.e**2)]
    assert loss.item() == pytest.approx(np.mean(each) * (1 if known else 0.25), rel=1e-6)


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


def test_a_table_is_refused_before_anyone_trains():
    with pytest.raises(SettingsError, match="it takes images with fixavg, which augments them"):
        fixavg(models="mlp", dataset="breast-cancer")
