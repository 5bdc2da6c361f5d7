"""FixMatch: augmentations, loss, and `training.semi` with the methods."""

import numpy as np
import pytest
import torch
from federation import Server, client_of, each, records, run, small
from torch import nn

from fedhet.algorithms.distillation import confident_labels, unlabeled_loss
from fedhet.base.errors import DataError, SettingsError
from fedhet.client_runtime.local_training import FixMatch
from fedhet.data.dataset import Split
from fedhet.kinds import IMAGE, KINDS, check_changeable
from fedhet.kinds.changes import CHANGES
from fedhet.learning.devices import CPU
from fedhet.methods.registry import find_method, shipped_names
from fedhet.settings.run import TrainingSettings

weak, strong = CHANGES["image"]["weak"], CHANGES["image"]["strong"]

METHODS = [name for name in sorted(shipped_names()) if find_method(name).spec.semi]


def semi(method="fedavg", **changes):
    return small(method, **{"clients": 3, "semi": "fixmatch", **changes})


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


def test_augmentations_draw_only_from_the_generator():
    x, before = images(20, 3, 16, 16), torch.get_rng_state()
    found = [strong(x, draws(seed)) for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_each_image_has_its_own_augmentation():
    """Sixty-four copies of an image have 9 weak augmentations; strong ones rarely coincide."""
    x = images(1, 1, 8, 8).repeat(64, 1, 1, 1)
    for change, least in ((weak, 9), (strong, 55)):
        assert len(torch.unique(change(x, draws()), dim=0)) >= least


def test_strong_augmentation_changes_more():
    x = images(64, 3, 16, 16).abs() * 0.5
    smooth = torch.nn.functional.avg_pool2d(x, 7, 1, 3)
    changed = [change(smooth, draws()) for change in (weak, strong)]
    moved = [(each - smooth).abs().mean() for each in changed]
    assert moved[1] > 2 * moved[0]


def test_digits_are_not_mirrored():
    """A bright column left of the center stays on the left after any shift."""
    x = torch.full((64, 1, 8, 8), -1.0)
    x[..., 2] = 1.0
    assert set(weak(x, draws())[:, 0, 4].argmax(1).tolist()) == {1, 2, 3}


@pytest.mark.parametrize(
    ("kind", "shape"), [("table", (5,)), ("image", (2, 8, 8)), ("signal", (8, 8))]
)
def test_augmentation_of_other_samples_raises(kind, shape):
    with pytest.raises(DataError, match=r"\[1 or 3, H, W\]"):
        check_changeable(KINDS[kind], shape, "FixMatch supports")


@pytest.mark.parametrize("seed", range(5))
def test_pseudo_labels_and_loss_sample_by_sample(seed):
    """Sohn et al., Eq. 4: average over all unlabeled images, with 0 for uncertain images."""
    rng = np.random.default_rng(seed)
    weakly, strongly = 3 * rng.normal(size=(30, 4)), 3 * rng.normal(size=(30, 4))
    guessed, confident = confident_labels(torch.tensor(weakly), 0.9)
    each = []
    for i in range(30):
        q = np.exp(weakly[i]) / np.exp(weakly[i]).sum()
        assert guessed[i] == q.argmax()
        assert confident[i] == (q.max() >= 0.9)
        p = np.exp(strongly[i]) / np.exp(strongly[i]).sum()
        each.append((q.max() >= 0.9) * -np.log(p[q.argmax()]))
    assert 0 < sum(value > 0 for value in each) < len(each)
    loss = unlabeled_loss(torch.tensor(strongly), guessed, confident)
    assert loss.item() == pytest.approx(np.mean(each), rel=1e-5)


def test_gradients_come_only_from_confident_samples():
    weakly = torch.tensor([[5.0, 0.0], [0.1, 0.0], [0.0, 5.0]], requires_grad=True)
    strongly = torch.zeros(3, 2, requires_grad=True)
    unlabeled_loss(strongly, *confident_labels(weakly, 0.9)).backward()
    assert weakly.grad is None
    assert (strongly.grad.abs().sum(1) > 0).tolist() == [True, False, True]
    assert strongly.grad[0, 0] < 0 < strongly.grad[0, 1]


# Around the loss of labeled samples


class Spy(nn.Module):
    """A model whose logits show the number in an image's corner pixel, and that logs its inputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(9.0))
        self.modes = []

    def forward(self, x):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.scale * nn.functional.one_hot((x.mean((1, 2, 3)) > 0).long(), 2).float()


def around(labeled, unlabeled, batch=16, **changes):
    def split(count, value):
        return Split(torch.full((count, 1, 8, 8), value), torch.arange(count) % 2)

    settings = TrainingSettings(batch_size=batch, semi="fixmatch", **changes)
    model, generator = Spy(), torch.Generator().manual_seed(0)
    parts = split(labeled, 0.5), split(unlabeled, 0.5)
    return model, FixMatch(*parts, IMAGE, (1, 8, 8), model, settings, CPU, generator)


@pytest.mark.parametrize(
    ("labeled", "unlabeled", "batch"), [(100, 60, 16), (3, 500, 32), (1, 40, 16), (0, 40, 16)]
)
def test_epoch_uses_all_labeled_and_unlabeled_samples(labeled, unlabeled, batch):
    """The number of steps is about that of all samples.

    At least an eighth of each batch is labeled.
    """
    _, fixmatch = around(labeled, unlabeled, batch)
    steps = -(-len(fixmatch.y) // fixmatch.batch_size)
    expected = -(-(labeled + unlabeled) // batch)
    assert abs(steps - expected) <= max(1, 0.2 * expected)
    assert fixmatch.batch_size >= batch / 8
    seen = torch.cat([next(fixmatch._batches) for _ in range(steps)])
    assert len(set(seen.tolist())) >= 0.8 * unlabeled
    assert len(fixmatch.y) >= max(labeled, 2)


def test_pseudo_labels_come_from_evaluation_without_gradients():
    model, fixmatch = around(20, 40)
    fixmatch.loss(model.train()).backward()
    assert model.modes == [(False, False), (True, True)]
    assert model.training
    assert model.scale.grad is not None


def test_weight_and_the_loss_of_labeled_samples():
    """With the same draws and the weights 0, 1, and 3, the loss is linear in the weight."""
    found = []
    for weight in (0.0, 1.0, 3.0):
        model, fixmatch = around(20, 40, semi_weight=weight, semi_threshold=0.0)
        loss_of = fixmatch.combined_loss(lambda x, y: torch.tensor(7.0), None, model)
        found.append(loss_of(fixmatch.x, fixmatch.y).item())
    assert found[0] == 7.0
    assert found[1] > 7.0
    assert found[2] - 7.0 == pytest.approx(3 * (found[1] - 7.0), rel=1e-5)


@pytest.mark.parametrize(("labeled", "unlabeled"), [(0, 40), (40, 0), (40, 1)])
def test_client_with_only_labeled_or_unlabeled_samples_trains(labeled, unlabeled):
    model, fixmatch = around(labeled, unlabeled, semi_threshold=0.0)
    loss_of = fixmatch.combined_loss(lambda x, y: torch.tensor(7.0), None, model)
    loss = loss_of(fixmatch.x, fixmatch.y)
    assert (loss == 7.0) == (labeled > 0)


def test_metrics_count_predictions_pseudo_labels_and_errors():
    model, fixmatch = around(20, 40)
    fixmatch.loss(model)  # bright images: class 1, of which half have 0 as their truth
    assert fixmatch.metrics() == {"pseudo_labels": 1.0, "pseudo_error": pytest.approx(0.5, abs=0.2)}
    model, fixmatch = around(20, 40, semi_threshold=1.0)
    fixmatch.loss(lambda x: model(x) / 9)
    assert fixmatch.metrics() == {"pseudo_labels": 0.0}


# With the methods


@pytest.mark.parametrize("method", each(METHODS))
def test_every_method_learns_from_unlabeled_images(method, tmp_path):
    """No other setting is needed; the metrics are in the records of the run."""
    config = semi(method, semi_threshold=0.0, rounds=2)
    run(config, tmp_path / "run")
    found = records(tmp_path / "run")[0]
    assert found["failed"] == {}
    assert found["method"]["pseudo_labels"] == 1
    assert 0 < found["method"]["pseudo_error"] < 1


def test_hidden_labels_are_used_only_for_metrics(tmp_path):
    """Other hidden labels change the measured error, but not the model."""
    found, errors = [], []
    for shift in (0, 1):
        server = Server(semi("local", semi_threshold=0.0), tmp_path / str(shift))
        instructions = server.instruct(1)
        clients = [client_of(proxy) for proxy, _ in instructions]
        for client in clients:
            client.unlabeled.y.copy_((client.unlabeled.y + shift) % 10)
        server.train(instructions)
        found.append([{k: v.clone() for k, v in c.network.state_dict().items()} for c in clients])
        errors.append([client.metrics["pseudo_error"] for client in clients])
        for client in clients:  # clients stay open in this process
            client.unlabeled.y.copy_((client.unlabeled.y - shift) % 10)
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert errors[0] != errors[1]


@pytest.mark.slow
def test_run_learns_and_becomes_confident(tmp_path):
    chosen = {"rounds": 6, "local_epochs": 3, "labeled_alpha": 1.0, "models": "cnn2"}
    summary = run(semi("fedavg", **chosen, **{"data.max-samples": 0}), tmp_path / "run")
    assert summary["accuracy"]["common"]["global"]["mean"] > 0.6
    said = [record["method"] for record in records(tmp_path / "run")]
    assert said[0]["pseudo_labels"] < said[-1]["pseudo_labels"]
    assert said[-1]["pseudo_error"] < 0.45


def test_pseudo_labels_stay_in_the_label_space(tmp_path):
    spaces = {
        "superclasses": [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7", "8", "9"]],
        "label-space": [2, 2],
    }
    changes = {"partition": "superclasses", "samples-per-class": 20, "models": "mlp", **spaces}
    config = semi("fedavg", semi_threshold=0.0, **changes)
    server = Server(config, tmp_path / "run")
    instructions = server.instruct(1)
    for proxy, _ in instructions:
        client = client_of(proxy)
        before = client.build_model().state_dict()["classifier.weight"]
        proxy.request(instructions[0][1], None, 1)
        moved = (client.network.state_dict()["classifier.weight"] - before).abs().sum(1) > 0
        assert moved.nonzero().flatten().tolist() == client.space.tolist()


@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [
        ("um-pfssl", {}, "'training.semi': unsupported by um-pfssl"),
        (
            "fedtype",
            {},
            "unsupported by fedtype, because its local training differs, expected none",
        ),
        (
            "local",
            {"models": "sk-tree"},
            "neural networks with 'training.semi' = 'fixmatch', got .*sk-tr",
        ),
        ("fedavg", {"dataset": "breast-cancer"}, "expected images or texts with 'training.semi'"),
        (
            "local",
            {"semi_threshold": 1.1},
            "'training.semi-threshold': expected number >= 0 and <= 1",
        ),
    ],
)
def test_unsupported_settings_raise(method, changes, says):
    with pytest.raises(SettingsError, match=says):
        small(method, semi="fixmatch", **changes)


def test_supervised_client_reports_no_pseudo_label_metrics(tmp_path):
    run(small("fedavg", rounds=1), tmp_path / "run")
    assert records(tmp_path / "run")[0]["method"] == {}
