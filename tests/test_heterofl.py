"""HeteroFL against transcriptions of Diao et al.'s Algorithm 1 and Section 3."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation import Server, client_of, run, small
from rounds import PLAIN, SPACES, altered, instruction_of, reply_of, same
from torch import nn
from torch.nn import functional as F

from fedhet.algorithms.weights import (
    SubModel,
    average_overlaps,
    cut_submodel,
    is_submodel,
    query_statistics,
)
from fedhet.base.errors import ModelError, SettingsError
from fedhet.learning.devices import CPU
from fedhet.models import base_and_width, build, is_registered, narrow_name, shapes, to_arrays
from fedhet.wire.identity import ClientInfo

SHAPE = (3, 32, 32)
MODELS = ("mlp2", "cnn2", "cnn3-dropout", "resnet18")
WIDTHS = (0.5, 0.0625)


def federation(**changes):
    few = {"clients": 3, "models": "mlp", "max_samples": 200}
    return small("heterofl", **{**few, **changes})


# Models by width


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", MODELS)
def test_narrow_model_is_the_leading_part_of_the_full_model(name, width):
    """The full model with zeros elsewhere has the same logits, for all layers."""
    narrow = narrow_name(name, width)
    assert base_and_width(narrow) == (name, width)
    whole, part = (build(n, SHAPE, 7, seed=0).eval() for n in (name, narrow))
    arrays, found = to_arrays(whole), to_arrays(part)
    small_shapes = shapes(narrow, SHAPE, 7)
    assert is_submodel(small_shapes, shapes(name, SHAPE, 7))
    assert not is_submodel(shapes(name, SHAPE, 7), small_shapes)
    parts = cut_submodel(arrays, small_shapes)
    wide = {key: torch.zeros_like(value) for key, value in whole.state_dict().items()}
    for key, value in parts.items():
        assert value.shape == found[key].shape
        index = tuple(slice(0, size) for size in value.shape)
        assert np.array_equal(value, arrays[key][index])
        wide[key][index] = torch.tensor(value)
    for key in wide:  # what is cut off has variance one
        if key.endswith("running_var"):
            wide[key].fill_(1)
    part.load_state_dict({key: torch.tensor(value) for key, value in parts.items()})
    whole.load_state_dict(wide)
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(part(x), whole(x), rtol=1e-4, atol=1e-5)


def test_widths_are_fractions_of_channels_rounded_up():
    assert shapes("cnn2-x0.3", SHAPE, 7)["extractor.0.0.weight"][0] == (5, 3, 3, 3)
    stages = [shapes("resnet18-x0.25", SHAPE, 7)[f"extractor.layer{k}.0.conv1.weight"][0][0]
              for k in (1, 2, 3, 4)]  # fmt: skip
    assert stages == [16, 32, 64, 128]
    assert shapes("mlp2-x0.0625", SHAPE, 7)["classifier.weight"][0] == (7, 8)


def test_invalid_width_raises():
    assert is_registered("cnn2-x0.5")
    assert base_and_width("shufflenet-v2-x0.5")[1] == 0.5  # it is a model of its own
    for name in ("resnet9-x0.5", "cnn2-x0", "cnn2-x0.0", "cnn2-x1.5", "cnn2-x0.5-x0.5"):
        assert not is_registered(name)
        with pytest.raises(ModelError, match="unknown model"):
            build(name, SHAPE, 7, seed=0)


# The mathematics


def slowly(before, models):
    """Average element by element over the models that trained the element."""
    after = {}
    for name, value in before.items():
        after[name] = value.copy()
        for place in np.ndindex(value.shape):
            total = weight = 0.0
            for model in models:
                local = model.weights[name]
                holds = all(p < size for p, size in zip(place, local.shape, strict=True))
                if name.startswith("classifier.") and model.labels is not None:
                    holds = holds and place[0] in model.labels.tolist()
                if holds:
                    total += model.weight * float(local[place])
                    weight += model.weight
            if weight:
                after[name][place] = total / weight
    return after


@pytest.mark.parametrize("with_labels", [True, False])
def test_each_element_is_the_mean_over_clients_that_have_it(with_labels):
    rng = np.random.default_rng(3)
    sizes = {"extractor.w": (6, 5), "extractor.b": (6,), "classifier.weight": (4, 6)}
    before = {k: rng.normal(size=s).astype(np.float32) for k, s in sizes.items()}
    models = []
    for width, weight, labels in ((3, 7, [0, 2]), (2, 1, [2]), (3, 4, [0])):
        own = {"extractor.w": (width, 5), "extractor.b": (width,), "classifier.weight": (4, width)}
        weights = {k: rng.normal(size=s).astype(np.float32) for k, s in own.items()}
        models.append(SubModel(weights, weight, np.array(labels) if with_labels else None))
    found, wanted = average_overlaps(before, models), slowly(before, models)
    assert found.keys() == before.keys()
    for name, value in wanted.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], value, rtol=1e-6)
    assert np.array_equal(found["extractor.b"][3:], before["extractor.b"][3:])  # nobody's
    if with_labels:
        for label in (1, 3):
            row = found["classifier.weight"][label]
            assert np.array_equal(row, before["classifier.weight"][label])


def test_statistics_are_the_mean_over_batches():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5))
    model[1].running_mean += 5
    x = torch.randn(10, 1, 6, 6)
    query_statistics(model, x, CPU, torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model[0](x).transpose(0, 1).flatten(1)
    torch.testing.assert_close(model[1].running_mean, out.mean(1))
    torch.testing.assert_close(model[1].running_var, out.var(1, unbiased=True))
    assert model[1].momentum == 0.1
    assert all(part.training for part in model.modules())
    x = torch.randn(256, 1, 6, 6)
    query_statistics(model, x, CPU, torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model[0](x).transpose(0, 1).flatten(1)
    assert model[1].num_batches_tracked == 2
    torch.testing.assert_close(model[1].running_mean, out.mean(1))


# Rounds


def test_full_width_equals_fedavg(tmp_path):
    alike = {"heterofl.levels": "a", "heterofl.weighting": "samples", "heterofl.masked": False}
    found = []
    for method, own in (("fedavg", {}), ("heterofl", alike)):
        config = small(method, **{"clients": 3, "models": "mlp", "max_samples": 200, **own})
        server = Server(config, tmp_path / method)
        for round in (1, 2):
            server.play(round)
        found.append(instruction_of(server.instruct(3)[0]).tensors)
    assert same(*found)


@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_clients_receive_their_part_and_overlaps_are_averaged(tmp_path, weighting):
    settings = {"heterofl.weighting": weighting, "engine.samples-cap": 10.0}
    config = federation(clients=4, **settings)
    server = Server(config, tmp_path)
    before = {name: value.copy() for name, value in server.strategy.weights.items()}
    instructions = server.instruct(1)
    units = [
        instruction_of(each).tensors["weights/classifier.weight"].shape[1] for each in instructions
    ]
    assert units == [128, 64, 32, 128]
    for each in instructions:
        for name, value in instruction_of(each).group("weights").items():
            assert np.array_equal(value, before[name][tuple(slice(0, n) for n in value.shape)])
    replies, models = server.train(instructions), []
    for proxy, result in replies:
        labels = reply_of(result).tensors["labels"]
        client = client_of(proxy)
        assert labels.tolist() == sorted({*client.y.tolist()})
        count = client.info.samples if weighting == "samples" else 1
        models.append(SubModel(reply_of(result).group("weights"), count, labels))
    server.aggregate(1, replies)
    wanted = slowly(before, models)
    for name, value in server.strategy.weights.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-7)


def test_round_of_a_client_uses_scaler_and_mask(tmp_path):
    """Level b divides features by 1/2: gradient descent on full batches in float64."""
    server = Server(federation(alpha=0.2, **PLAIN), tmp_path)
    instructions = server.instruct(1)
    start = instruction_of(instructions[1]).group("weights")
    names = [f"{layer}.{kind}" for layer in ("extractor.1", "classifier")
             for kind in ("weight", "bias")]  # fmt: skip
    w = [torch.tensor(start[name]).double().requires_grad_() for name in names]
    client = client_of(instructions[1][0])
    x, y = client.x.double().flatten(1), client.y
    absent = [k for k in range(10) if k not in y.tolist()]
    assert absent
    for _ in range(3):
        logits = F.relu((x @ w[0].T + w[1]) / 0.5) @ w[2].T + w[3]
        logits = torch.stack([
            logits[:, k] * 0 if k in absent else logits[:, k] for k in range(10)
        ], 1)  # fmt: skip
        gradients = torch.autograd.grad(F.cross_entropy(logits, y), w)
        w = [(v - 0.1 * g).detach().requires_grad_() for v, g in zip(w, gradients, strict=True)]
    reply = reply_of(server.train(instructions)[1][1]).group("weights")
    for name, value in zip(names, w, strict=True):
        np.testing.assert_allclose(reply[name], value.detach(), rtol=1e-4, atol=1e-6)
    assert np.array_equal(reply["classifier.weight"][absent], start["classifier.weight"][absent])


def test_batch_norm_statistics_are_never_sent(tmp_path):
    server = Server(federation(models="cnn2", clients=2), tmp_path)
    instructions = server.instruct(1)
    replies = server.train(instructions)
    for each, (_, result) in zip(instructions, replies, strict=True):
        for knowledge in (instruction_of(each), reply_of(result)):
            assert not [name for name in knowledge.tensors if "running" in name or "num_" in name]
            assert len(knowledge.group("weights")) == 10
    (proxy, instruction), *_ = instructions
    client = client_of(proxy)
    judged = client.eval_models(instruction_of((proxy, instruction)))
    for model in judged.values():
        with torch.no_grad():
            out = model.extractor[0][0](client.x).transpose(0, 1).flatten(1)
        torch.testing.assert_close(model.extractor[0][1].running_mean, out.mean(1))
    sent = instruction_of((proxy, instruction)).group("weights")
    assert all(np.array_equal(judged["global"].state_dict()[n], v) for n, v in sent.items())


def test_replies_of_another_width_are_dropped(tmp_path):
    server = Server(federation(clients=4), tmp_path)
    results = server.train(server.instruct(1))
    changes = [
        lambda found: None,
        lambda found: found.update(reply_of(results[0][1]).tensors),
        lambda found: found.pop("labels"),
        lambda found: found.update(labels=found["labels"][:0]),
    ]
    replies = [
        (proxy, altered(result, change))
        for (proxy, result), change in zip(results, changes, strict=True)
    ]
    server.aggregate(1, replies)
    failed = server.flower.state.record.failed
    assert failed.keys() == {"client-1", "client-2", "client-3"}
    assert "expected float32" in failed["client-1"]
    assert "labels" in failed["client-2"]
    assert "labels" in failed["client-3"]


def test_client_with_another_architecture_is_not_sampled(tmp_path):
    server = Server(federation(**{"heterofl.levels": ["b", "c"]}), tmp_path)
    members = [m.info for m in server.strategy.members.values()]
    assert [m.model for m in members] == ["mlp-x0.5", "mlp-x0.25", "mlp-x0.5"]
    odd = [
        ClientInfo("x", name, 20, 10, "image", (1, 8, 8))
        for name in ("mlp", "cnn2-x0.5", "mlp2-x0.5")
    ]
    chosen = server.strategy.select(1, [*members, *odd])
    assert chosen.names == [member.name for member in members]
    assert server.strategy.eval_instruction(2, odd[0]) is None
    assert server.strategy.eval_instruction(2, members[0]) is not None


@pytest.mark.parametrize("mask", [True, False])
def test_label_space_of_its_own(tmp_path, mask):
    changes = {"max-samples": 0, "heterofl.masked": mask}
    server = Server(federation(**changes, **SPACES), tmp_path)
    instructions = server.instruct(1)
    for each, (proxy, result) in zip(instructions, server.train(instructions), strict=True):
        client, name = client_of(proxy), "weights/classifier.weight"
        moved = np.abs(reply_of(result).tensors[name] - instruction_of(each).tensors[name]).sum(1)
        assert (moved > 0).nonzero()[0].tolist() == client.space.tolist()
        assert ("labels" in reply_of(result).tensors) == mask


def test_run_learns(tmp_path):
    chosen = {"rounds": 4, "clients": 3, "fraction": 0.67, "alpha": 1.0, "local_epochs": 3}
    config = federation(**chosen, **{"heterofl.levels": ["a", "b"], "max-samples": 400})
    summary = run(config, tmp_path / "run")
    common = summary["accuracy"]["common"]
    assert common["global"]["mean"] > 0.5
    assert common["server"]["per_client"] == {
        name: common["global"]["per_client"][name] for name in ("client-0", "client-2")
    }, "level a has the whole model"


def test_invalid_settings_raise(tmp_path):
    with pytest.raises(SettingsError, match=r"'heterofl\.levels'"):
        federation(**{"heterofl.levels": ["a", "f"]})
    with pytest.raises(SettingsError, match=r"'models\.pool'.*'mlp', 'cnn2'"):
        Server(federation(models=["mlp", "cnn2"]), tmp_path / "two")
    with pytest.raises(SettingsError, match=r"'models\.pool'.*'cofed-24-40'"):
        Server(federation(models="cofed-24-40", clients=2), tmp_path / "none")
    with pytest.raises(SettingsError, match=r"training\.semi"):
        federation(**{"training.semi": "fixmatch"})
