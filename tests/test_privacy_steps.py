"""DP-SGD and class sums against slow transcriptions, and measured noise."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as quickly
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedhet import models
from fedhet.base.errors import ModelError, PrivacyError
from fedhet.kinds import KINDS
from fedhet.learning.devices import CPU
from fedhet.learning.training import CrossEntropy, optimization_for, train_epochs
from fedhet.privacy import sgd
from fedhet.privacy.accounting import Noise
from fedhet.privacy.noise import RESOLUTION, ClippedClassSums, Grid, SecretNoise
from fedhet.settings.run import TrainingSettings

PLAIN_SGD = TrainingSettings(optimizer="sgd", lr=0.5, momentum=0.0)


def network(name="cnn2-gn", classes=3):
    return models.build(name, (1, 8, 8), classes, seed=3).train()


def batch(count=12, seed=0, classes=3):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 8, 8, generator=rng)
    return x, torch.randint(classes, (count,), generator=rng)


def transcribed(model, x, y, norm, batch_size, rate, weights=None):
    """Run Algorithm 1 of Abadi et al. without noise, sample by sample."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for image, label in zip(x, y, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        length = torch.sqrt(sum(g.square().sum() for g in grads))
        for whole, grad in zip(total, grads, strict=True):
            whole += grad / max(1.0, float(length) / norm)
    return [
        p.detach() - rate * g / batch_size for p, g in zip(model.parameters(), total, strict=True)
    ]


def stepped(model, x, y, *, noise=0.0, norm=0.3, batch_size=10, penalty=0.0, loss=None):
    plain = optimization_for(model.parameters(), PLAIN_SGD, CPU)
    with sgd.dp_sgd(plain, [model], noise, norm, batch_size) as private:
        found = CrossEntropy(model)(x, y) if len(y) else None
        private.step(found if loss is None else loss(model, x, y), penalty)
    return [p.detach().clone() for p in model.parameters()]


def close(found, expected):
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["cnn2-gn", "mlp", "lenet5", "gems-resnet11-gn"])
@pytest.mark.parametrize("norm", [0.05, 3.0])
def test_step_is_the_clipped_gradient_sum_over_the_expected_batch(name, norm):
    shape = (1, 16, 16)
    model = models.build(name, shape, 3, seed=3).train()
    x, y = torch.randn(9, *shape, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 3
    expected = transcribed(copy.deepcopy(model), x, y, norm, 16, 0.5)
    assert close(stepped(model, x, y, norm=norm, batch_size=16), expected)


def test_noise_is_drawn_for_every_weight_and_has_its_width():
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(0)
    after = stepped(model, x, y, noise=2.0, norm=0.3, batch_size=10)
    moved = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])
    assert moved.std() == pytest.approx(0.5 * 2.0 * 0.3 / 10, rel=0.05)
    assert abs(float(moved.mean())) < 4 * float(moved.std()) / len(moved) ** 0.5
    again = stepped(network(), x, y, noise=2.0, norm=0.3, batch_size=10)
    assert not close(after, again)


def test_sample_with_a_nonfinite_gradient_is_skipped():
    x, y = batch()
    x[4] = torch.inf
    kept = torch.arange(12) != 4
    expected = transcribed(network(), x[kept], y[kept], 0.3, 10, 0.5)
    assert close(stepped(network(), x, y), expected)


def test_term_of_the_weights_is_added_after_the_noise_and_not_scaled_down():
    x, y = batch()
    plain = stepped(network(), x, y, norm=0.3)
    model = network()
    anchor = [torch.zeros_like(p) for p in model.parameters()]
    penalty = 10 * sum(
        (p - a).square().sum() for p, a in zip(model.parameters(), anchor, strict=True)
    )
    found = stepped(model, x, y, norm=0.3, penalty=penalty)
    start = network().parameters()
    expected = [each - 0.5 * 20 * p.detach() for each, p in zip(plain, start, strict=True)]
    assert close(found, expected)


def test_loss_that_reaches_only_one_model_leaves_the_other_to_noise_alone():
    one, other = network("mlp"), network("cnn2-gn")
    before = [p.detach().clone() for p in other.parameters()]
    plain = optimization_for([*one.parameters(), *other.parameters()], PLAIN_SGD, CPU)
    x, y = batch()
    with sgd.dp_sgd(plain, [one, other], 0.0, 0.3, 10) as private:
        private.step(CrossEntropy(one)(x, y))
    assert close([p.detach() for p in other.parameters()], before)


def test_frozen_parameters_stay_and_are_not_counted():
    model = network()
    model.extractor.requires_grad_(False)
    before = [p.detach().clone() for p in model.extractor.parameters()]
    plain = optimization_for(model.parameters(), PLAIN_SGD, CPU)
    with sgd.dp_sgd(plain, [model], 1.0, 0.3, 10) as private:
        for seed in range(3):
            x, y = batch(5 + seed, seed)
            private.step(CrossEntropy(model)(x, y))
    assert close([p.detach() for p in model.extractor.parameters()], before)


def test_per_sample_hooks_are_removed():
    model = network()
    names = {name for p in model.parameters() for name in vars(p)}
    stepped(model, *batch())
    assert {name for p in model.parameters() for name in vars(p)} == names
    assert not any(part._forward_hooks or part._backward_hooks for part in model.modules())


@pytest.mark.parametrize("name", ["cnn2", "resnet10", "vgg11"])
def test_model_that_mixes_samples_raises(name):
    model = models.build(name, (3, 32, 32), 3, seed=0)
    plain = optimization_for(model.parameters(), PLAIN_SGD, CPU)
    with pytest.raises(ModelError, match="DP-SGD"), sgd.dp_sgd(plain, [model], 1.0, 1.0, 8):
        pass


def test_parameter_of_no_model_raises():
    alone = nn.Parameter(torch.zeros(3))
    plain = optimization_for([*network().parameters(), alone], PLAIN_SGD, CPU)
    refused = pytest.raises(ModelError, match="belongs to none of")
    with refused, sgd.dp_sgd(plain, [network()], 1.0, 1.0, 8):
        pass


def test_batches_are_poisson_samples_independent_of_the_seed():
    model = network()
    plain = optimization_for(model.parameters(), PLAIN_SGD, CPU)
    with sgd.dp_sgd(plain, [model], 1.0, 1.0, 8) as private:
        seed = torch.Generator().manual_seed(0)
        found = [list(private.batches(100, 8, seed, CPU.device)) for _ in range(80)]
    assert {len(epoch) for epoch in found} == {13}
    sizes = np.array([len(index) for epoch in found for index in epoch])
    assert sizes.mean() == pytest.approx(8, abs=4 * sizes.std() / len(sizes) ** 0.5)
    assert sizes.var() == pytest.approx(100 * 0.08 * 0.92, rel=0.2)
    chosen = np.bincount(torch.cat([i for epoch in found for i in epoch]).numpy(), minlength=100)
    expected = 80 * 13 * 0.08
    assert np.abs(chosen - expected).max() < 5 * expected**0.5
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))


def test_epoch_whose_batches_may_be_empty_trains():
    model = network()
    x, y = batch(4)
    plain = optimization_for(model.parameters(), PLAIN_SGD, CPU)
    with sgd.dp_sgd(plain, [model], 1.0, 1.0, 1) as private:
        loss = train_epochs(
            x, y, CrossEntropy(model), private,
            epochs=1, batch_size=1, generator=torch.Generator(), compute=CPU,
        )  # fmt: skip
    assert np.isfinite(loss)


@pytest.mark.parametrize("name", ["cnn3", "cnn4", "cofed-cnn2", "resnet10", "signal-cnn2"])
def test_model_with_group_norms_has_no_batch_norm_and_depends_on_no_other_sample(name):
    shape = (3, 64) if name.startswith("signal") else (3, 16, 16)
    fit = models.group_norm_name(name)
    assert fit == f"{name}-gn" == models.group_norm_name(fit)
    model = models.build(fit, shape, 4, seed=0).train()
    assert not any("BatchNorm" in type(part).__name__ for part in model.modules())
    x = torch.randn(6, *shape)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)
    sgd.check_supports_dp(model)


class Own(nn.Module):
    """A custom extractor, whose features pass through `mix`, a function of (self, features)."""

    def __init__(self, mix, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())
        self.mix, self.drop = mix, nn.Dropout(dropout)
        self.register_buffer("center", torch.zeros(12))
        self.calls = 0
        self.kept = 0.0

    def forward(self, x):
        return self.mix(self, self.drop(self.layers(x)))


def running(own, h):
    if own.training:
        own.center = 0.9 * own.center.detach() + 0.1 * h.detach().mean(0)
    return h


def remembered(own, h):
    before, own.kept = own.kept, h.detach().mean()
    return h + before


def counted(own, h):
    own.calls += 1
    return h * own.calls


MIXES = {
    "mean": lambda own, h: h - h.mean(0),
    "a little of the mean": lambda own, h: h - 1e-3 * h.mean(0),
    "mean in training": lambda own, h: h - h.mean(0) if own.training else h,
    "mean in evaluation": lambda own, h: h if own.training else h - h.mean(0),
    "functional batch norm": lambda own, h: F.batch_norm(h, None, None, training=True),
    "norm of the batch": lambda own, h: h / (1 + h.norm()),
    "size of the batch": lambda own, h: h / len(h),
    "attention": lambda own, h: F.softmax(h @ h.T, dim=1) @ h,
    "softmax over the batch": lambda own, h: h.softmax(0),
    "sorted": lambda own, h: h.sort(0).values,
    "order": lambda own, h: h * torch.arange(1, len(h) + 1)[:, None],
    "neighbor": lambda own, h: h + h.roll(1, 0),
    "largest": lambda own, h: h / h.max().clamp(min=1),
    "control flow": lambda own, h: h * 2 if h.max() > 50 else h,
    "large batches": lambda own, h: h - h.mean(0) if len(h) > 32 else h,
    "gradient alone": lambda own, h: h + h.mean(0) - h.mean(0).detach(),
    "running statistics": running,
    "memory": remembered,
    "counter": counted,
    "random draws": lambda own, h: h + torch.randn_like(h),
}


def owned(mix, dropout=0.0):
    torch.manual_seed(0)
    return models.HetModel(Own(mix, dropout), nn.Linear(12, 3), 12)


@pytest.mark.parametrize("name", MIXES)
def test_custom_model_that_mixes_samples_raises(name):
    with pytest.raises(ModelError, match=r"^model 'm:f'"):
        refuse(owned(MIXES[name], 0.5))


def refuse(model):
    sgd._TESTED.clear()  # all these models have the same classes
    sgd.check_supports_dp(model, "image", (1, 8, 8), "m:f")


@pytest.mark.parametrize(
    "mix",
    [
        lambda own, h: h,
        lambda own, h: F.dropout(h, 0.5, own.training),
        lambda own, h: F.layer_norm(h, (12,)) / (1 + h.norm(dim=1, keepdim=True)),
        lambda own, h: h.float(),
        lambda own, h: h.sort(1).values.softmax(1),
    ],
)
def test_custom_model_of_independent_samples_is_accepted(mix):
    model = owned(mix, 0.5).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    draws = torch.random.get_rng_state()
    refuse(model)
    assert torch.equal(torch.random.get_rng_state(), draws)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks for part in model.modules())


def test_private_training_tests_its_models_too():
    sgd._TESTED.clear()
    model = owned(MIXES["mean"])
    plain = optimization_for(model.parameters(), PLAIN_SGD, CPU)
    refused = pytest.raises(ModelError, match="other samples")
    with refused, sgd.dp_sgd(plain, [model], 1.0, 1.0, 8, "image", (1, 8, 8)):
        pass


def test_model_is_tested_again_if_other_parameters_are_trained():
    """A head has a gradient per sample even if the frozen extractor has none."""
    sgd._TESTED.clear()
    model = owned(MIXES["gradient alone"])
    model.extractor.requires_grad_(requires_grad=False)
    sgd.check_supports_dp(model, "image", (1, 8, 8))
    model.extractor.requires_grad_(requires_grad=True)
    with pytest.raises(ModelError, match="gradient depends"):
        sgd.check_supports_dp(model, "image", (1, 8, 8))


def test_network_in_channels_last_format_raises():
    """Opacus reads inputs of convolutions as if they were contiguous."""
    model = network().to(memory_format=torch.channels_last)
    sgd._TESTED.clear()
    with pytest.raises(ModelError, match="gradient depends"):
        sgd.check_supports_dp(model, "image", (1, 8, 8))


def suits(name, kind, shape):
    """Return whether a network accepts samples of `shape`, without building it."""
    try:
        models.MODELS[name].check(shape, KINDS[kind])
    except ModelError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape", "name"),
    [
        (kind, shape, name)
        for kind, shape in [
            ("image", (3, 32, 32)),
            ("signal", (3, 64)),
            ("table", (8,)),
            ("text", (0, 12, 50)),
        ]
        for name in models.names()
        if name not in models.NO_SAMPLE_GRADIENTS
        and "imagenet" not in name
        and suits(name, kind, shape)
    ],
)
def test_every_model_that_may_be_private_is_accepted(kind, shape, name):
    (name,) = models.private_pool([name])
    sgd.check_supports_dp(models.build(name, shape, 4, seed=0, kind=kind), kind, shape, name)


@pytest.mark.parametrize(
    ("kind", "shape", "names"),
    [
        ("image", (1, 16, 16), ["cnn2-gn", "mlp", "lenet5", "gems-resnet11-gn"]),
        ("signal", (3, 64), ["signal-cnn2-gn"]),
        ("table", (8,), ["mlp", "mlp-dropout"]),
        ("text", (0, 12, 50), ["text-bag", "text-cnn-dropout"]),
    ],
)
def test_usual_models_are_accepted(kind, shape, names):
    for name in names:
        sgd.check_supports_dp(models.build(name, shape, 4, seed=0), kind, shape, name)


def test_narrow_models_have_group_norms_too():
    assert models.group_norm_name("cnn2-x0.5") == "cnn2-gn-x0.5"
    assert models.group_norm_name("shufflenet-v2-x0.5") == "shufflenet-v2-x0.5-gn"
    assert models.is_registered("cnn2-gn-x0.5")
    assert not models.is_registered("mlp-gn")


# Class sums


NORM = 1.5


def means_transcribed(features, labels, norm, classes):
    sums, counts = np.zeros((classes, features.shape[1])), np.zeros(classes)
    for row, label in zip(features, labels, strict=True):
        length = np.sqrt((row.astype(np.float64) ** 2).sum())
        sums[label] += row * min(1.0, norm / length) if length else row
        counts[label] += 1
    return sums, counts


def class_sums(features, labels, norm, classes, size=64):
    """Return the sums of vectors, in batches of `size`."""
    features, labels = torch.as_tensor(features), torch.as_tensor(labels)
    sums = ClippedClassSums(classes, norm)
    for x, y in zip(features.split(size), labels.split(size), strict=True):
        sums.add(x, x, y)
    return sums


def test_without_noise_the_means_are_those_of_the_scaled_down_vectors():
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(0, 3, 60)
    sums = class_sums(features, labels, NORM, 4)
    found = sums.noised_means(Noise(0, 0, 0), 1, SecretNoise())
    expected, number = means_transcribed(features, labels, NORM, 4)
    assert found.classes.tolist() == [0, 1, 2]
    assert found.counts.tolist() == number[:3].tolist()
    for means in (found.features, found.logits):
        assert np.allclose(means, expected[:3] / number[:3, None], atol=2 * NORM / RESOLUTION)


def test_noise_of_sums_and_counts_has_its_width_and_classes_without_samples_have_it_too():
    draws, labels = SecretNoise(bytes(32)), torch.arange(4).repeat(10**4)
    sums = class_sums(torch.zeros(len(labels), 6), labels, 2.0, 5, size=10**5)
    many = [sums.noised_means(Noise(0, 3.0, 7.0), 1, draws) for _ in range(400)]
    assert all(set(m.classes) >= {0, 1, 2, 3} for m in many)
    noise = np.stack([m.features[:4] * m.counts[:4, None] for m in many])
    assert noise.std() == pytest.approx(3.0 * 2.0, rel=0.05)
    assert np.stack([m.counts[:4] for m in many]).std() == pytest.approx(7.0, rel=0.07)
    rare = [m for m in many if 4 in m.classes]
    assert rare == [] or all(m.counts[4] >= 21 for m in rare)


def test_class_is_sent_only_if_its_count_exceeds_the_noise():
    def sent(count, least=1):
        labels, draws = torch.arange(1000).repeat(count), SecretNoise(bytes(32))
        sums = ClippedClassSums(1000, 1.0)
        sums.add(torch.zeros(len(labels), 1), torch.zeros(len(labels), 1), labels)
        return len(sums.noised_means(Noise(0, 1, 7), least, draws).classes)

    assert sent(0) < 6
    assert sent(60) == 1000
    assert sent(60, least=100) == 0


def test_required_class_is_sent_with_any_number_of_samples():
    """A sum with fewer samples than the limit is divided by the limit."""
    rng = np.random.default_rng(0)
    labels = np.array([0] * 40 + [1] * 4 + [2] * 3)
    features = rng.normal(size=(len(labels), 5)).astype(np.float32)
    sums = class_sums(features, labels, NORM, 4)
    found = sums.noised_means(Noise(0, 0, 0), 10, SecretNoise(), required=[1, 3])
    expected, _ = means_transcribed(features, labels, NORM, 4)
    assert found.classes.tolist() == [0, 1, 3]
    for means in (found.features, found.logits):
        assert np.allclose(means[0], expected[0] / 40, atol=2 * NORM / RESOLUTION)
        assert np.allclose(means[1], expected[1] / 10, atol=2 * NORM / RESOLUTION)
        assert not means[2].any()


def test_class_sums_without_a_batch_are_an_error():
    with pytest.raises(ValueError, match="no batch was added"):
        ClippedClassSums(3, 1.0).noised_means(Noise(1, 1, 1), 1, SecretNoise())


# Exact sums


def integers_of(vector, grid):
    """Return a vector's numbers on the grid: the sum of the vector alone."""
    return [int(k) for k in grid.sum_all([vector[None]])[0].tolist()]


def check_rounded(vector, integers, grid):
    """Compare a clipped and rounded vector with exact fractions."""
    exact, step, norm = [Fraction(v) for v in vector.tolist()], Fraction(grid.step), grid.norm
    square = sum(v * v for v in exact)
    # The vector is no longer than the norm, and no number has grown or changed its sign.
    assert sum(k * k for k in integers) <= (Fraction(norm) / step) ** 2
    shrunk = Fraction(norm) * Fraction(1 - 2**-19)
    if square <= shrunk**2:
        assert integers == [math.trunc(v / step) for v in exact]
        return
    for v, k in zip(exact, integers, strict=True):
        assert k * v >= 0
        assert k * k * step * step * square <= min(square, Fraction(norm) ** 2) * v * v
        # The number is rounded by less than one step, in addition to a factor close to 1.
        lower = max(Fraction(0), abs(v) / step - 1)
        factor = Fraction(norm) * Fraction(1 - 2**-18)
        if square >= Fraction(norm) ** 2:
            assert (abs(k) + 1) ** 2 * step * step * square >= factor**2 * v * v
        else:
            assert abs(k) + 1 >= lower * Fraction(1 - 2**-18)


SCALES = [1e-42, 1e-20, 1e-4, 0.3, 1.0, 40.0, 1e15, 3e38]


@quickly(max_examples=80, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 40), st.sampled_from([1e-3, 0.7, 1.0, 5.0, 1e6]),
    st.sampled_from(SCALES), st.integers(0, 999),
)  # fmt: skip
def test_sum_is_that_of_integers_and_no_vector_is_longer_than_the_norm(
    count, width, norm, scale, seed
):
    rng = np.random.default_rng(seed)
    numbers = rng.uniform(-1, 1, (count, width)) * scale * 10 ** rng.uniform(-3, 0, (count, 1))
    vectors, grid = torch.tensor(numbers.astype(np.float32)), Grid(norm, width)
    rows = [integers_of(vector, grid) for vector in vectors]
    for vector, integers in zip(vectors, rows, strict=True):
        check_rounded(vector, integers, grid)
    expected = [sum(column) for column in zip(*rows, strict=True)]
    order = torch.tensor(rng.permutation(count))
    assert grid.sum_all([vectors])[0].tolist() == expected
    assert grid.sum_all([vectors[order]])[0].tolist() == expected
    # The parts of a vector are clipped together.
    parts = [vectors[:, :1], vectors[:, 1:].reshape(count, -1, 1)]
    sums = torch.cat([each.flatten() for each in grid.sum_all(parts)])
    assert sums.tolist() == expected
    labels = torch.tensor(rng.integers(0, 3, count))
    of_class = [
        [sum(row[k] for row, c in zip(rows, labels.tolist(), strict=True) if c == label)
         for k in range(width)]
        for label in range(3)
    ]  # fmt: skip
    assert grid.sum_by_class(vectors, labels, 3).tolist() == of_class


def test_norm_of_long_vectors_is_exact():
    """In float32, a running sum of squares stops growing, so the norm would be too small."""
    vector = torch.full((3_000_000,), 2.0**-11)
    vector[:64] = 1.0
    grid = Grid(1.0, len(vector))
    for parts in ([vector], [vector[:70], vector[70:]]):
        total = grid.sum_all([part[None] for part in parts])
        square = sum(int((part * part).sum()) for part in total)
        assert square <= (Fraction(1) / Fraction(grid.step)) ** 2
        assert float(square) ** 0.5 * grid.step == pytest.approx(1.0, abs=2 / RESOLUTION)


@pytest.mark.parametrize("size", [1, 7, 32, 200])
def test_class_sums_depend_neither_on_the_batch_size_nor_on_the_order(size):
    rng = np.random.default_rng(1)
    features, labels = rng.normal(size=(200, 8)).astype(np.float32), rng.integers(0, 3, 200)
    expected = class_sums(features, labels, NORM, 4)
    order = rng.permutation(200)
    found = class_sums(features[order], labels[order], NORM, 4, size)
    pairs = zip([*found._sums, found._counts], [*expected._sums, expected._counts], strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_vector_that_is_not_finite_becomes_zeros():
    vectors = torch.tensor([[1.0, torch.nan], [torch.inf, 0.0], [0.5, 0.5]])
    grid = Grid(1.0, 2)
    assert (grid.sum_all([vectors])[0] * grid.step).tolist() == [0.5, 0.5]
    by_class = grid.sum_by_class(vectors, torch.tensor([0, 1, 2]), 3) * grid.step
    assert by_class.tolist() == [[0, 0], [0, 0], [0.5, 0.5]]


def test_vectors_that_could_overflow_raise():
    with pytest.raises(PrivacyError, match="268,435,456"):
        Grid(1.0, 2**28 + 1)
    widest = Grid(1.0, 2**28)
    assert 2**28 <= widest.norm / widest.step <= 2**29


class GivenGradients:
    """A loss whose gradients of each sample are given."""

    def __init__(self, parameter, gradients):
        self.parameter, self.gradients = parameter, gradients

    def backward(self):
        self.parameter.grad_sample = self.gradients


def step_with(gradients):
    """Return the change of a model's weights in a step without noise."""
    model = nn.Linear(gradients.shape[1], 1, bias=False)
    nn.init.zeros_(model.weight)
    plain = optimization_for(model.parameters(), PLAIN_SGD, CPU)
    with sgd.dp_sgd(plain, [model], 0.0, 1.0, 1) as private:
        private.step(GivenGradients(model.weight, gradients[:, None]))
    return -2 * model.weight.detach()[0]


def test_order_of_a_batch_has_no_effect_on_a_step():
    rng = torch.Generator().manual_seed(0)
    gradients = torch.randn(4096, 50, generator=rng)
    first = step_with(gradients)
    for _ in range(3):
        again = step_with(gradients[torch.randperm(4096, generator=rng)])
        assert torch.equal(again, first)


def test_one_gradient_changes_a_large_batch_by_its_norm():
    """The sum is exact, even if it is much smaller than the partial sums.

    In floating point, small gradients are lost or doubled, depending on the other gradients.
    """
    ones, small = torch.ones(2**17, 1), torch.full((2**17, 1), 3 * 2.0**-11)
    without = torch.cat([torch.zeros(1, 1), ones, small, -ones])
    present = without.clone()
    present[0] = 1.0
    sums = [float(step_with(each)[0]) for each in (without, present)]
    assert sums[0] == 2**17 * 3 * 2.0**-11
    assert sums[1] - sums[0] == pytest.approx(1.0, abs=2 / RESOLUTION)
    assert sums[1] - sums[0] <= 1
