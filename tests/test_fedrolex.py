"""FedRolex against a transcription of Algorithm 1 with index sets, on the model's own channels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation import Server, client_of, run, small
from rounds import PLAIN, instruction_of, reply_of, same
from torch.nn import functional as F

from fedhet.algorithms.weights import roll_channels
from fedhet.base.errors import SettingsError
from fedhet.models import build, narrow_name, shapes

HIDDEN = 128
MODELS = ("mlp", "mlp2", "cnn2", "cnn3-dropout", "cnn4", "resnet18", "resnet50")
PARAMETERS = ("extractor.1.weight", "extractor.1.bias", "classifier.weight", "classifier.bias")


def window(round, width, size=HIDDEN):
    """Alam et al., Eq. 3: the channels j, j + 1, ... modulo K of round j, counted from 0."""
    return [(round + k) % size for k in range(int(width * size))]


def logits(w, x, rate):
    """Return the logits of a submodel with HeteroFL's scaler."""
    return torch.relu((x.flatten(1) @ w[0].T + w[1]) / rate) @ w[2].T + w[3]


def locally(weights, x, y, absent, rate, lr=0.1, epochs=3):
    """Train on the masked cross-entropy with full batches."""
    w = [torch.tensor(value).double() for value in weights]
    for _ in range(epochs):
        w = [value.detach().requires_grad_() for value in w]
        out = logits(w, x, rate).masked_fill(absent, 0.0)
        gradients = torch.autograd.grad(F.cross_entropy(out, y), w)
        w = [value.detach() - lr * g for value, g in zip(w, gradients, strict=True)]
    return [value.numpy() for value in w]


def test_rounds_equal_the_algorithm(tmp_path):
    """The server's model in its own order of channels, which the strategy rolls by the round."""
    changes = {"clients": 3, "models": "mlp", "max_samples": 200, **PLAIN}
    server = Server(small("fedrolex", **changes), tmp_path)
    whole = [server.strategy.weights[name].astype(float) for name in PARAMETERS]
    for round in range(4):
        instructions = server.instruct(round + 1)
        total = [np.zeros(value.shape) for value in whole]
        count = [np.zeros(value.shape) for value in whole]
        for proxy, _ in instructions:
            client = client_of(proxy)
            width = client.settings.width_of(client.node.partition)
            own, x, y = window(round, width), client.x.double(), client.y
            index = [np.ix_(own, range(64)), own, np.ix_(range(10), own), list(range(10))]
            sent = instruction_of((proxy, _)).group("weights")
            for name, value, part in zip(PARAMETERS, whole, index, strict=True):
                np.testing.assert_allclose(sent[name], value[part], rtol=1e-4, atol=1e-5)
            absent = torch.ones(10, dtype=torch.bool)
            absent[y] = False
            parts = [value[part] for value, part in zip(whole, index, strict=True)]
            trained = locally(parts, x, y, absent, width)
            classes = sorted({*y.tolist()})
            heads = [None, None, np.ix_(classes, own), classes]
            for k in range(4):
                rows = trained[k] if heads[k] is None else trained[k][classes]
                total[k][heads[k] or index[k]] += rows
                count[k][heads[k] or index[k]] += 1
        server.aggregate(round + 1, server.train(instructions))
        whole = [np.where(c > 0, t / np.maximum(c, 1), w)
                 for w, t, c in zip(whole, total, count, strict=True)]  # fmt: skip
        order = window(round + 1, 1.0)
        moved = [whole[0][order], whole[1][order], whole[2][:, order], whole[3]]
        for name, value in zip(PARAMETERS, moved, strict=True):
            found = server.strategy.weights[name]
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)])
@pytest.mark.parametrize("name", MODELS)
def test_rolled_model_computes_the_same_function(name, shape):
    """For linear layers after convolutions, residual blocks, and batch norms."""
    torch.manual_seed(0)
    model = build(name, shape, 7, seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    narrow = shapes(narrow_name(name, 0.0625), shape, 7)
    rolled = roll_channels(weights, narrow)
    assert same(rolled, roll_channels(dict(sorted(weights.items())), narrow))
    moved = {n for n in weights if not np.array_equal(rolled[n], weights[n])}
    assert moved == {n for n in weights if narrow[n][0] != weights[n].shape}
    x = torch.randn(3, *shape)
    with torch.no_grad():
        before = model(x)
        model.load_state_dict({n: torch.tensor(v) for n, v in rolled.items()}, strict=False)
        torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)


def test_windows_return_after_as_many_rounds_as_channels():
    weights = {n: np.random.default_rng(0).normal(size=s) for n, (s, _) in
               shapes("mlp", (1, 8, 8), 10).items()}  # fmt: skip
    narrow, rolled = shapes("mlp-x0.5", (1, 8, 8), 10), weights
    for round in range(HIDDEN):
        assert same(rolled, weights) is (round == 0)
        rolled = roll_channels(rolled, narrow)
    assert same(rolled, weights)


def test_first_round_equals_heterofl_and_the_second_does_not(tmp_path):
    replies = []
    for method in ("fedrolex", "heterofl"):
        config = small(method, clients=3, models="cnn2", max_samples=200)
        server = Server(config, tmp_path / method)
        instructions, first = server.play(1)
        second = server.train(server.instruct(2))
        replies.append(
            [[reply_of(result).tensors for _, result in each] for each in (first, second)]
        )
        assert len(instructions) == 3
    ours, theirs = replies
    assert all(same(*pair) for pair in zip(ours[0], theirs[0], strict=True))
    assert not any(same(*pair) for pair in zip(ours[1], theirs[1], strict=True))


def test_run_resumes_with_the_same_window(tmp_path):
    config = small("fedrolex", clients=3, models="mlp", max_samples=200)
    server = Server(config, tmp_path / "one")
    server.play(1)
    fresh = Server(config, tmp_path / "two")
    fresh.strategy.load_state_dict(server.strategy.state_dict())
    for (_, one), (_, two) in zip(server.instruct(2), fresh.instruct(2), strict=True):
        tensors = (instruction_of((None, each)).tensors for each in (one, two))
        assert same(*tensors)


def test_models_with_group_norms_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"models\.pool.*without group norms"):
        Server(small("fedrolex", clients=3, models="cnn2-gn"), tmp_path)
    with pytest.raises(SettingsError, match=r"privacy\.epsilon.*group norms"):
        small("fedrolex", **{"privacy.epsilon": 8.0})
    with pytest.raises(SettingsError, match=r"pace\.mode"):
        small("fedrolex", **{"pace.mode": "asynchronous"})


def test_run(tmp_path):
    summary = run(small("fedrolex", clients=3, models="cnn2"), tmp_path / "run")
    assert set(summary["accuracy"]["personal"]) == {"private", "global", "server"}
