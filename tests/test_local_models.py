"""The four kinds of averaged models against numpy and torch.distributions."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from fedhet import models
from fedhet.algorithms.local_models import (
    MIN_SCALE,
    START_SCALE,
    LocalModel,
    MoreauModel,
    ProximalModel,
    VariationalModel,
    gaussian_kl,
    inverse_softplus,
)
from fedhet.methods.fedtype import FedTypeSettings, proxy_sizes
from fedhet.wire.identity import ClientInfo

X = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 10
NETS = ["mlp", "cnn2", "gems-resnet11"]


def net(name="mlp", seed=0):
    return models.build(name, (1, 8, 8), 10, seed=seed)


def state_of(model):
    """Return a copy of every parameter and buffer."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(left, right):
    """Return whether two states have the same names and values."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def moved(model, seed=1, by=0.1):
    """Return the model after adding noise to its parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return model


def scales_of(model, value=START_SCALE):
    return {name: torch.full_like(p, value) for name, p in model.named_parameters()}


def variational(model, *, anchor=None, scale=None, zeta=1.0, seed=0):
    anchor = state_of(model) if anchor is None else anchor
    return VariationalModel(model, anchor, scale or scales_of(model), zeta, seed)


def some_proxies(name="cnn2", strength=15.0):
    """Return a fresh proxy of each kind."""
    built = [net(name) for _ in range(4)]
    anchors = [state_of(model) for model in built]
    return [
        LocalModel(built[0], anchors[0]),
        ProximalModel(built[1], anchors[1], 0.1),
        MoreauModel(built[2], anchors[2], strength, 0.005),
        VariationalModel(built[3], anchors[3], scales_of(built[3]), 1e-4, 0),
    ]


# All kinds


@pytest.mark.parametrize("name", NETS)
def test_upload_is_the_received_state(name):
    for proxy in some_proxies(name):
        assert same(proxy.upload(), state_of(proxy.model))
        found = {k: tuple(v.shape) for k, v in proxy.upload().items()}
        assert found == {k: tuple(s[0]) for k, s in models.shapes(name, (1, 8, 8), 10).items()}


def test_plain_proxy_is_trained_and_sent_unchanged():
    model = net("cnn2")
    proxy = LocalModel(model, state_of(model))
    assert proxy.regularizer() == 0.0
    assert [id(p) for p in proxy.parameters()] == [id(p) for p in model.parameters()]
    moved(model)
    proxy.stepped()
    assert same(proxy.upload(), state_of(model))
    model.eval()
    assert torch.equal(proxy.logits(X), model(X))


def test_anchor_never_moves():
    for proxy in some_proxies("mlp"):
        before = {name: tensor.clone() for name, tensor in proxy.anchor.items()}
        optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (F.cross_entropy(proxy.logits(X), Y) + proxy.regularizer()).backward()
            optimizer.step()
            proxy.stepped()
        assert same(proxy.anchor, before)
        assert all(tensor.grad is None for tensor in proxy.anchor.values())
        assert not same(proxy.anchor, {k: p.detach() for k, p in proxy.model.named_parameters()})


# FedProx


def test_proximal_term_is_zero_at_the_server_and_ignores_statistics():
    model = net("cnn2")
    proxy = ProximalModel(model, state_of(model), 1.0)
    model.train()
    model(X)  # moves the running statistics
    assert proxy.regularizer().item() == 0.0
    proxy.stepped()
    assert same(proxy.upload(), state_of(model))


# pFedMe


def test_local_copy_does_not_overshoot_the_proxy():
    model = net("mlp")
    proxy = MoreauModel(model, state_of(model), 100.0, 1.0)
    moved(model)
    proxy.stepped()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(proxy.local[name], parameter.detach())


def test_moreau_upload_has_the_copy_and_the_running_statistics():
    model = net("cnn2")
    start = state_of(model)
    proxy = MoreauModel(model, state_of(model), 15.0, 0.005)
    model.train()
    model(X)
    moved(model)
    sent, now = proxy.upload(), state_of(model)
    trained = {name for name, _ in model.named_parameters()}
    assert list(sent) == list(now)
    assert trained < set(sent)
    for name, tensor in sent.items():
        assert torch.equal(tensor, start[name] if name in trained else now[name]), name
    assert not torch.equal(now[next(iter(trained))], start[next(iter(trained))])


# pFedBayes


@settings(max_examples=80)
@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(-4, 1), st.floats(-4, 1))
def test_gaussian_kl_equals_torch(seed, size, magnitude, other_magnitude):
    generator = torch.Generator().manual_seed(seed)

    def some(power):
        mean = torch.randn(size, generator=generator, dtype=torch.float64) * 10**power
        scale = (torch.rand(size, generator=generator, dtype=torch.float64) + 0.1) * 10**power
        return mean, scale

    own, other = some(magnitude), some(other_magnitude)
    found = gaussian_kl(*own, *other)
    expected = kl_divergence(Normal(*own), Normal(*other)).sum()
    assert found.shape == ()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert found >= -1e-9
    assert gaussian_kl(*own, *own).item() == 0.0


@pytest.mark.parametrize("zeta", [1e-4, 1.0])
def test_divergence_and_gradients_equal_torch(zeta):
    model = net("cnn2")
    anchor, scale = state_of(model), scales_of(model, 0.05)
    proxy = variational(moved(model), anchor=anchor, scale=scale, zeta=zeta)
    with torch.no_grad():
        for raw in proxy.raw.values():
            raw += 0.3 * torch.randn(raw.shape, generator=torch.Generator().manual_seed(3))
    means = {k: p.detach().double().requires_grad_() for k, p in model.named_parameters()}
    raws = {k: r.detach().double().requires_grad_() for k, r in proxy.raw.items()}
    expected = zeta * sum(
        kl_divergence(
            Normal(means[k], torch.log1p(raws[k].exp())),
            Normal(anchor[k].double(), scale[k].double()),
        ).sum()
        for k in means
    )
    expected.backward()
    loss = proxy.regularizer()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for key, parameter in model.named_parameters():
        for own, reference in (
            (parameter.grad, means[key].grad),
            (proxy.raw[key].grad, raws[key].grad),
        ):
            torch.testing.assert_close(own.double(), reference, rtol=1e-3, atol=1e-4 * zeta)


def test_both_means_and_scales_are_trained():
    proxy = variational(net("cnn2"))
    names = dict(proxy.model.named_parameters())
    assert proxy.raw.keys() == names.keys() == proxy.scale().keys()
    expected = [id(p) for p in (*names.values(), *proxy.raw.values())]
    assert [id(p) for p in proxy.parameters()] == expected
    F.cross_entropy(proxy.logits(X), Y).backward()
    for parameter in proxy.parameters():
        assert parameter.requires_grad
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
    assert sum(raw.grad.abs().sum() for raw in proxy.raw.values()) > 0
    assert sum(p.grad.abs().sum() for p in names.values()) > 0


def linear(classes=3, inputs=4, seed=0):
    """Return a linear layer without bias, whose logits on the unit matrix are its weights."""
    torch.manual_seed(seed)
    return nn.Linear(inputs, classes, bias=False)


def test_gradients_of_one_draw_equal_the_reparametrization():
    model = linear()
    proxy = variational(model, scale={"weight": torch.rand(3, 4) + 0.1})
    raw, scale = proxy.raw["weight"], proxy.scale()["weight"]
    drawn = proxy.logits(torch.eye(4))
    direction = torch.randn(4, 3)
    (drawn * direction).sum().backward()
    noise = (drawn.detach().T - model.weight.detach()) / scale
    torch.testing.assert_close(model.weight.grad, direction.T)
    torch.testing.assert_close(raw.grad, direction.T * noise * torch.sigmoid(raw.detach()))


def test_draws_are_gaussian_around_the_mean():
    count, model = 4000, linear()
    scale = torch.tensor([[0.01, 0.1, 1.0, 3.0]]).repeat(3, 1)
    proxy = variational(model, scale={"weight": scale})
    with torch.no_grad():
        drawn = torch.stack([proxy.logits(torch.eye(4)).T for _ in range(count)])
        z = (drawn - model.weight) / scale
    assert (z.mean(0).abs() < 5 / math.sqrt(count)).all()
    assert ((z.std(0) - 1).abs() < 5 / math.sqrt(2 * count)).all()
    between = torch.corrcoef(z.flatten(1).T) - torch.eye(12)  # weights are drawn independently
    assert between.abs().max() < 5 / math.sqrt(count)
    after = torch.corrcoef(torch.stack([z[1:].flatten(), z[:-1].flatten()]))[0, 1]
    assert after.abs() < 5 / math.sqrt(12 * count)  # and so is each call


def test_one_draw_serves_the_full_batch():
    model = linear()
    proxy = variational(model, scale={"weight": torch.ones(3, 4)})
    before = state_of(model)
    first, second = (proxy.logits(torch.ones(6, 4)) for _ in range(2))
    assert torch.equal(first, first[:1].expand(6, 3))
    assert not torch.equal(first, second)
    assert same(state_of(model), before)  # the means stay


@pytest.mark.parametrize("name", NETS)
def test_draws_follow_the_seed(name):
    def three(seed):
        proxy = variational(net(name), scale=scales_of(net(name), 0.1), seed=seed)
        return torch.stack([proxy.logits(X).detach() for _ in range(3)])

    state = torch.random.get_rng_state()
    assert torch.equal(three(5), three(5))
    assert not torch.equal(three(5), three(6))
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is left alone


@pytest.mark.parametrize("value", [1e-6, 1e-5, 1e-3, START_SCALE, 0.5, 1.0, 5.0, 30.0, 100.0])
def test_softplus_undoes_its_inverse(value):
    scale = torch.tensor([value])
    torch.testing.assert_close(F.softplus(inverse_softplus(scale)), scale, rtol=1e-5, atol=0)
    model = linear()
    proxy = variational(model, scale={"weight": torch.full((3, 4), value)})
    torch.testing.assert_close(
        proxy.scale()["weight"], torch.full((3, 4), value), rtol=1e-5, atol=0
    )


def test_scales_have_a_lower_bound():
    model = linear()
    proxy = variational(model)
    for raw in (-1e4, -100.0, -14.0, -13.0, 0.0, 50.0):
        with torch.no_grad():
            proxy.raw["weight"].fill_(raw)
        scale = proxy.scale()["weight"]
        assert (scale >= MIN_SCALE).all()
        assert not scale.requires_grad
        loss = proxy.logits(torch.eye(4)).sum() + proxy.regularizer()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss, proxy.parameters()))


def test_upload_and_scale_are_means_and_deviations():
    model = net("cnn2")
    proxy = variational(model, scale=scales_of(model, 0.2))
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
    (F.cross_entropy(proxy.logits(X), Y) + proxy.regularizer()).backward()
    optimizer.step()
    proxy.stepped()
    assert same(proxy.upload(), state_of(model))
    for name, raw in proxy.raw.items():
        torch.testing.assert_close(proxy.scale()[name], torch.log1p(raw.detach().exp()))
        assert not torch.equal(proxy.scale()[name], torch.full_like(raw, 0.2))


def test_running_statistics_are_updated_once_per_call():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    plain = copy.deepcopy(model)
    proxy, x = variational(model), torch.randn(32, 4)
    for calls in (1, 2, 3):
        proxy.logits(x)
        plain(x)
        assert model[0].num_batches_tracked.item() == calls
        torch.testing.assert_close(model[0].running_mean, plain[0].running_mean)
        torch.testing.assert_close(model[0].running_var, plain[0].running_var)
    assert proxy.upload()["0.num_batches_tracked"] == 3
    assert proxy.raw.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


# Sent fields


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_proxy_sizes(name, shape):
    client = ClientInfo("client-0", "mlp", 20, 7, "image", shape)
    sizes = proxy_sizes(FedTypeSettings(proxy=name), client)
    assert sizes.axes == {"C": 7}
    found = sizes.models
    model = models.build(name, shape, 7, seed=3)
    assert found.keys() == {"proxy", "scale"}
    assert found["proxy"] == models.shapes(name, shape, 7)
    state = model.state_dict()
    assert {k: tuple(s) for k, (s, _) in found["proxy"].items()} == {
        k: tuple(v.shape) for k, v in state.items()
    }
    trained = {k for k, _ in model.named_parameters()}
    assert found["scale"].keys() == trained
    assert all(found["scale"][k] == found["proxy"][k] for k in trained)
    assert all(dtype == "float32" for _, dtype in found["scale"].values())
