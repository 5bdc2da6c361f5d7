"""FedMRL against a slow transcription: the round, the gradients, and the messages."""

import copy
from math import exp, log

import numpy as np
import pytest
import torch
from federation import Server, client_of, run, small
from rounds import (
    PLAIN,
    cross_entropy,
    descend,
    instruction_of,
    learn,
    opened,
    reply_of,
    same,
    state_of,
)
from safetensors.numpy import load_file

from fedhet.algorithms.feature_models import Projector, matryoshka_losses
from fedhet.base.errors import SettingsError
from fedhet.clients.fedmrl import Fusion
from fedhet.inference.client import open_client
from fedhet.inference.export import export
from fedhet.models import HetModel, build


def fedmrl(**changes):
    return small("fedmrl", **{"clients": 3, "fedmrl.shared": "mlp3", **changes})


def whole(d1=3, classes=4):
    """Return a client's full model of plain layers: F has 5 features, and G has `d1`."""
    torch.manual_seed(1)
    shared = HetModel(torch.nn.Linear(6, d1), torch.nn.Linear(d1, classes), d1)
    own = HetModel(torch.nn.Linear(6, 5), torch.nn.Linear(5, classes), 5)
    fusion = Fusion(shared, own)
    return HetModel(fusion, own.classifier, 5)


# The representation and the losses


def by_hand(model, x, y):
    """Compute l^F and l^G (Section 4) sample by sample in lists of numbers."""
    fusion = model.extractor
    losses = []
    for sample, label in zip(x.tolist(), y.tolist(), strict=True):
        r_g, r_f = linear(fusion.shared.extractor, sample), linear(fusion.own, sample)
        fused = linear(fusion.projector, r_g + r_f)
        y_f = linear(model.classifier, fused)
        y_g = linear(fusion.shared.classifier, fused[: len(r_g)])
        losses.append([one_sample(y_f, label), one_sample(y_g, label)])
    return np.mean(losses, axis=0)


def linear(layer, values):
    rows, bias = layer.weight.tolist(), layer.bias.tolist()
    pairs = zip(rows, bias, strict=True)
    return [sum(w * v for w, v in zip(row, values, strict=True)) + b for row, b in pairs]


def one_sample(logits, label):
    return log(sum(exp(each) for each in logits)) - logits[label]


def test_losses_equal_the_paper():
    model, x = whole(), torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(7) % 4
    fused, fine = model.features_and_logits(x)
    found = matryoshka_losses(fine, model.extractor.coarse_logits(fused), y)
    np.testing.assert_allclose(found.detach().numpy(), by_hand(model, x, y), rtol=1e-5)
    assert torch.equal(model(x), fine), "the own head predicts"


REACHED = {
    0: {"shared.extractor", "own", "projector", "classifier"},
    1: {"shared.extractor", "own", "projector", "shared.classifier"},
}
"""The parts that the own head's loss, and the shared head's, reach."""


@pytest.mark.parametrize("term", REACHED)
def test_each_loss_has_gradients_for_its_head_and_below(term):
    model, x = whole(), torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    fused, fine = model.features_and_logits(x)
    coarse = model.extractor.coarse_logits(fused)
    matryoshka_losses(fine, coarse, torch.arange(7) % 4)[term].backward()
    reached = {
        name.removeprefix("extractor.").rpartition(".")[0]
        for name, p in model.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0
    }
    assert reached == REACHED[term]
    rows = model.extractor.projector.weight.grad.abs().sum(1) > 0
    assert rows.tolist() == ([True] * 5 if term == 0 else [True] * 3 + [False] * 2)


def test_projector_input_starts_with_shared_features():
    projector = Projector(2, 3)
    with torch.no_grad():
        projector.weight.copy_(torch.eye(3, 5))
        projector.bias.zero_()
    shared, own = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])
    fused = projector.fuse(shared, own)
    assert fused.tolist() == [[1.0, 2.0, 3.0]]
    assert projector.coarse(fused).tolist() == [[1.0, 2.0]]


# A round


def slow_round(model, x, y, lr, epochs, own_weight, shared_weight):
    """Algorithm 1: in each step, all parts descend on m^F l^F + m^G l^G."""

    def loss(model):
        fusion = model.extractor
        features = [fusion.shared.extractor(x.double()), fusion.own(x.double())]
        fused = fusion.projector(torch.cat(features, 1))
        coarse = fused[:, : features[0].shape[1]]
        heads = (
            (model.classifier(fused), own_weight),
            (fusion.shared.classifier(coarse), shared_weight),
        )
        return sum(weight * cross_entropy(logits, y) for logits, weight in heads)

    return descend(model, loss, epochs, lr)


def test_round_of_a_client_equals_the_algorithm(tmp_path):
    """In the second round, F and P are the client's, and G is the server's."""
    weights = {"fedmrl.own-weight": 0.7, "fedmrl.shared-weight": 1.5}
    server = Server(fedmrl(models="mlp2", **PLAIN, **weights), tmp_path / "run")
    learn(server, 1)
    instructions = server.instruct(2)
    client, sent = client_of(instructions[0][0]), instruction_of(instructions[0]).group("weights")
    start = copy.deepcopy(client.network)
    projector = state_of(start.extractor.projector)
    fresh = opened(fedmrl(models="mlp2"), tmp_path / "fresh").network.extractor.projector
    assert not same(projector, state_of(fresh)), "P has learned in round 1, and is kept"
    start.extractor.shared.load_state_dict({k: torch.tensor(v) for k, v in sent.items()})
    slow = slow_round(start, client.x, client.y, 0.1, 3, 0.7, 1.5)
    reply = reply_of(server.train(instructions)[0][1])
    for name, value in slow.state_dict().items():
        found = client.network.state_dict()[name].numpy()
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    for name, value in slow.extractor.shared.state_dict().items():
        np.testing.assert_allclose(reply.group("weights")[name], value, rtol=1e-4, atol=1e-6)
    before = slow_round(start, client.x, client.y, 0.1, 2, 0.7, 1.5)
    losses = by_hand_of(before, client.x.double(), client.y)
    found = [reply.scalars["fine_loss"], reply.scalars["coarse_loss"]]
    np.testing.assert_allclose(found, losses, rtol=1e-4, err_msg="of the last epoch")


def by_hand_of(model, x, y):
    fused, fine = model.features_and_logits(x)
    coarse = model.extractor.coarse_logits(fused)
    pairs = [(fine, y), (coarse, y)]
    return [torch.nn.functional.cross_entropy(*pair).item() for pair in pairs]


# Sent and local tensors


def test_only_the_shared_model_is_sent(tmp_path):
    server = Server(fedmrl(models=["mlp", "cnn2", "cnn3"]), tmp_path)
    instructions = server.instruct(1)
    info = client_of(instructions[0][0]).info
    shared = build("mlp3", info.shape, info.classes, seed=0, feature_dim=32)
    names = {f"weights/{name}" for name in shared.state_dict()}
    replies = [reply_of(result) for _, result in server.train(instructions)]
    for knowledge in (instruction_of(instructions[0]), *replies):
        assert set(knowledge.tensors) == names
    assert all(set(each.scalars) == {"fine_loss", "coarse_loss"} for each in replies)


def test_narrow_features_are_widened(tmp_path):
    config = fedmrl(models=["mlp", "cnn2", "mlp3"], **{"fedmrl.shared-dim": 100})
    widths = {
        client.info.model: client.network.feature_dim
        for client in (opened(config, tmp_path, partition=number) for number in range(3))
    }
    assert widths == {"mlp": 128, "cnn2": 100, "mlp3": 100}


def test_full_model_is_evaluated_with_own_and_average_part(tmp_path):
    server = Server(fedmrl(), tmp_path)
    learn(server, 1)
    instructions = server.instruct(2)
    client, knowledge = client_of(instructions[1][0]), instruction_of(instructions[0])
    judged = client.eval_models(knowledge)
    assert list(judged) == ["private", "global"]
    assert judged["private"] is client.network
    own, averaged = state_of(client.network), state_of(judged["global"])
    start = "extractor.shared."
    for name, value in averaged.items():
        if name.startswith(start):
            sent = knowledge.group("weights")[name.removeprefix(start)]
            np.testing.assert_array_equal(value, sent)
        else:
            np.testing.assert_array_equal(value, own[name])
    assert not same(own, averaged)
    assert list(client.eval_models(type(knowledge)())) == ["private"]


# Used after the run


def test_full_model_is_loaded_and_exported(tmp_path):
    run(fedmrl(rounds=1, max_samples=240), tmp_path / "run")
    trained = open_client(tmp_path / "run", "client-1")
    assert trained.kinds == ("private", "global")
    weights = tmp_path / "whole.safetensors"
    export(trained, "safetensors", weights)
    parts = {name.rpartition(".")[0] for name in load_file(weights)}
    assert {"extractor.projector", "extractor.shared.classifier", "classifier"} <= parts
    program = tmp_path / "whole.pt2"
    export(trained, "pt2", program)
    x = torch.rand(5, *trained.record.format.shape)
    found = torch.export.load(program).module()(x).detach().numpy()
    np.testing.assert_allclose(found, trained.predict(x).probabilities, atol=1e-5)


def test_unknown_shared_model_raises():
    with pytest.raises(SettingsError, match=r"'fedmrl\.shared'"):
        fedmrl(**{"fedmrl.shared": "cnn22"})
