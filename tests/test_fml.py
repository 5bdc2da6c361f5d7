"""FML against slow transcriptions of its losses, its messages, and its state."""

import copy

import numpy as np
import pytest
import torch
from federation import Server, client_of, small
from rounds import PLAIN, instruction_of, learn, log_softmax, reply_of, same, step

from fedhet.algorithms.distillation import mutual_loss
from fedhet.base.errors import SettingsError
from fedhet.models import build


def fml(**changes):
    return small("fml", **{"clients": 3, "fml.meme": "mlp3", **changes})


# The losses


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_each_loss_has_gradients_only_for_its_model(share):
    own, peer = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    own.requires_grad_()
    peer.requires_grad_()
    mutual_loss(own, peer, torch.arange(6) % 4, share).backward()
    assert own.grad.abs().sum() > 0
    assert peer.grad is None or peer.grad.abs().sum() == 0


# A round


def slow_round(private, meme, x, y, lr, epochs, alpha, beta):
    """Take one step on both models with explicit losses and the other model's old outputs."""
    models = [copy.deepcopy(m).double() for m in (private, meme)]
    for _ in range(epochs):
        outputs = [log_softmax(m(x.double())) for m in models]
        fixed = [logs.detach() for logs in outputs]
        steps = []
        for me, model in enumerate(models):
            share, other = (alpha, beta)[me], fixed[1 - me]
            supervised = -sum(outputs[me][n, y[n]] for n in range(len(y))) / len(y)
            divergence = (torch.exp(other) * (other - outputs[me])).sum() / len(y)
            loss = share * supervised + (1 - share) * divergence
            steps.append(torch.autograd.grad(loss, list(model.parameters())))
        for model, gradients in zip(models, steps, strict=True):
            step(model.parameters(), gradients, lr)
    return models


def test_round_of_a_client_equals_the_local_update(tmp_path):
    """In the second round, the private model is the client's, and the meme is the server's."""
    server = Server(
        fml(models="mlp2", **PLAIN, **{"fml.alpha": 0.3, "fml.beta": 0.8}), tmp_path / "run"
    )
    learn(server, 1)
    instructions = server.instruct(2)
    client = client_of(instructions[0][0])
    meme = build("mlp3", client.info.shape, client.info.classes, seed=5)
    meme.load_state_dict(
        {k: torch.tensor(v) for k, v in instruction_of(instructions[0]).group("weights").items()}
    )
    start = copy.deepcopy(client.network)
    private, shared = slow_round(start, meme, client.x, client.y, 0.1, 3, 0.3, 0.8)
    reply = reply_of(server.train(instructions)[0][1]).group("weights")
    for name, value in shared.state_dict().items():
        np.testing.assert_allclose(reply[name], value.numpy(), rtol=1e-4, atol=1e-6)
    for name, value in private.state_dict().items():
        found = client.network.state_dict()[name].numpy()
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-4, atol=1e-6)
    assert not np.allclose(
        start.state_dict()["classifier.weight"], private.state_dict()["classifier.weight"]
    )


def test_meme_without_private_models_equals_fedavg(tmp_path):
    """With beta = 1, the meme learns only from labels, whatever the private models are."""
    mutual = Server(fml(models=["cnn2", "mlp"], **{"fml.beta": 1.0}), tmp_path / "fml")
    plain = Server(small("fedavg", clients=3, models="mlp3"), tmp_path / "fedavg")
    for number in (1, 2):
        one, other = learn(mutual, number), learn(plain, number)
        assert all(same(one[name], other[name]) for name in one)
    assert same(
        instruction_of(mutual.instruct(3)[0]).tensors, instruction_of(plain.instruct(3)[0]).tensors
    )


# Sent and local tensors


def test_only_the_meme_is_sent(tmp_path):
    server = Server(fml(models=["mlp", "cnn2", "cnn3"]), tmp_path)
    instructions = server.instruct(1)
    info = client_of(instructions[0][0]).info
    names = {f"weights/{n}" for n in build("mlp3", info.shape, info.classes, seed=0).state_dict()}
    for knowledge in (
        instruction_of(instructions[0]),
        *(reply_of(result) for _, result in server.train(instructions)),
    ):
        assert set(knowledge.tensors) == names
        assert not knowledge.scalars


def test_all_kinds_are_evaluated(tmp_path):
    server = Server(fml(), tmp_path)
    learn(server, 1)
    instructions = server.instruct(2)
    client, knowledge = client_of(instructions[1][0]), instruction_of(instructions[0])
    judged = client.eval_models(knowledge)
    assert list(judged) == ["private", "proxy", "global"]
    assert judged["private"] is client.network
    assert judged["proxy"] is client.models["proxy"]
    for name, value in judged["global"].state_dict().items():
        np.testing.assert_array_equal(value, knowledge.group("weights")[name])
    assert list(client.eval_models(type(knowledge)())) == ["private", "proxy"]


# Settings and runs


def test_unknown_meme_raises():
    with pytest.raises(SettingsError, match=r"'fml\.meme'"):
        fml(**{"fml.meme": "cnn22"})
