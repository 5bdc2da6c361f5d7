"""FedType: messages, gradients, and ablations."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Server, records, run, small
from rounds import clients, fitted, instruction_of, learn, opened, replied, same, state_of
from torch.nn import functional as F

from fedhet.algorithms.local_models import START_SCALE, LocalModel
from fedhet.base.arrays import group, grouped
from fedhet.base.errors import SettingsError
from fedhet.clients.fedtype import Reciprocity
from fedhet.data.dataset import Split
from fedhet.models import build
from fedhet.wire.knowledge import Knowledge

CHANGES = {
    "clients": 3,
    "models": ["mlp", "cnn2", "cnn3"],
    "fedtype.proxy": "mlp3",
    "fedtype.calibrate-on": "held",
}


def fedtype(**changes):
    return small("fedtype", **{**CHANGES, **changes})


@pytest.fixture
def client(tmp_path):
    return opened(fedtype(), tmp_path)


def instruction(client):
    proxy = build(client.settings.proxy, client.info.shape, client.info.classes, seed=7)
    return Knowledge(grouped("proxy", state_of(proxy)))


def mean_of(server, replies, kind):
    """Return the mean of a kind of the replies' weights, weighted by samples, in float64."""
    samples = {name: server.strategy.members[name].info.samples for name in replies}
    parts = {name: group(tensors, kind) for name, tensors in replies.items()}
    return {
        key: sum(samples[n] * part[key].astype(float) for n, part in parts.items())
        / sum(samples.values())
        for key in next(iter(parts.values()))
    }


def reciprocity(client):
    proxy = LocalModel(client.models["proxy"], client.models["proxy"].state_dict())
    learning = Reciprocity(client, proxy, 1)
    learning.calibrate()
    return learning


def moved(model):
    return sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)


def step(client):
    """Return the step of the round and a batch: x, and the logits of both models."""
    learning = reciprocity(client)
    x = client.x[:20]
    return learning, x, client.models["private"](x), client.models["proxy"](x)


def test_cross_entropy_and_backward_loss_train_only_the_private_model(client):
    learning, x, private, proxy = step(client)
    loss = F.cross_entropy(private, client.y[:20]) + learning.backward_loss(x, private, proxy)
    loss.backward()
    assert moved(client.models["private"]) > 0
    assert moved(client.models["proxy"]) == 0


def test_forward_loss_trains_only_the_proxy(client):
    learning, _, private, proxy = step(client)
    learning.forward_loss(private, proxy, client.y[:20]).backward()
    assert moved(client.models["private"]) == 0
    assert moved(client.models["proxy"]) > 0


@pytest.mark.parametrize("backward", ["conformal", "topk", "symmetric"])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_every_backward_loss_trains_only_the_private_model(tmp_path, backward, mode):
    changes = {"fedtype.backward": backward, "fedtype.mode": mode}
    learning, x, private, proxy = step(client := opened(fedtype(**changes), tmp_path))
    learning.backward_loss(x, private, proxy).backward()
    assert moved(client.models["private"]) > 0
    assert moved(client.models["proxy"]) == 0


@pytest.mark.parametrize(("own", "other"), [("private", "proxy"), ("proxy", "private")])
def test_alternating_losses_train_only_their_model(tmp_path, own, other):
    changes = {"fedtype.order": "alternating", "fedtype.proxy-loss": "ce+kl"}
    learning = reciprocity(client := opened(fedtype(**changes), tmp_path))
    getattr(learning, f"{own}_loss")(client.x[:20], client.y[:20]).backward()
    assert moved(client.models[own]) > 0
    assert moved(client.models[other]) == 0


@pytest.mark.parametrize("model", ["cnn2-dropout", "gems-resnet11"])
def test_published_proxy_learns_from_the_private_model_without_dropout(tmp_path, model):
    """update_new.py calls `large_model.eval()` before the epoch of the small model."""
    changes = {"fedtype.order": "alternating", "fedtype.proxy-loss": "kl", "fedtype.proxy": "mlp"}
    learning = reciprocity(client := opened(fedtype(models=model, **changes), tmp_path))
    private, x = client.models["private"], client.x[:20]
    before = {name: value.clone() for name, value in private.state_dict().items()}
    loss = learning.proxy_loss(x, client.y[:20]).item()
    assert private.training
    teacher = private.eval()(x).softmax(1).tolist()
    student = client.models["proxy"](x).softmax(1).tolist()
    expected = sum(
        q * math.log(q / p)
        for mine, said in zip(student, teacher, strict=True)
        for p, q in zip(mine, said, strict=True)
    )
    assert loss == pytest.approx(expected / 20, rel=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in private.state_dict().items())


def test_published_proxy_loss_is_a_mean_over_samples_and_classes(tmp_path):
    """The loss is written out for three samples of four classes; KLDivLoss averages over both."""
    learning = reciprocity(opened(fedtype(**{"fedtype.proxy-loss": "ce+kl"}), tmp_path))
    private, proxy = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    expected = 0.0
    for label, mine, said in zip([2, 0, 3], proxy.tolist(), private.tolist(), strict=True):
        p = [math.exp(v) / sum(math.exp(w) for w in mine) for v in mine]
        q = [math.exp(v) / sum(math.exp(w) for w in said) for v in said]
        divergence = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
        expected += (divergence / 4 - math.log(p[label])) / 3
    found = learning.forward_loss(private, proxy, torch.tensor([2, 0, 3]))
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_data_is_split_7_2_1(client):
    train, held, test = len(client.y), len(client.held_out), len(client.tests["personal"])
    everything = train + held + test
    assert held == round(0.1 * everything)
    assert test == round(0.2 * everything)
    rows = {tuple(row.flatten().tolist()) for row in client.x}
    assert not rows & {tuple(row.flatten().tolist()) for row in client.held_out.x}


def test_no_byte_of_the_private_model_is_in_any_payload(tmp_path):
    server = Server(fedtype(), tmp_path / "run")
    payloads = []
    for number in (1, 2):
        instructions = server.instruct(number)
        replies = server.train(instructions)
        payloads += [b"".join(ins.parameters.tensors) for _, ins in instructions]
        payloads += [b"".join(result.parameters.tensors) for _, result in replies]
        server.aggregate(number, replies)
        judging = server.flower.configure_evaluate(number)
        payloads += [b"".join(ins.parameters.tensors) for _, ins in judging]
        for client in clients(server).values():
            for name, tensor in client.models["private"].state_dict().items():
                # A row is long enough not to be met by chance.
                if tensor.is_floating_point() and tensor.numel() >= 16:
                    piece = tensor.flatten()[:16].numpy().tobytes()
                    if piece == bytes(len(piece)) or len(set(tensor.flatten()[:16].tolist())) < 4:
                        continue
                    assert not any(piece in payload for payload in payloads), name


def test_bytes_are_those_of_the_proxy(tmp_path):
    run(fedtype(rounds=3), tmp_path / "run")
    state = build("mlp3", (1, 8, 8), 10, seed=0).state_dict()
    size = sum(tensor.nbytes for tensor in state.values())
    for record in records(tmp_path / "run")[:-1]:
        overhead = 1.01 * 3 * size + 3 * 2000  # and a manifest each
        assert 3 * size <= record["bytes_up"] <= overhead
        assert 3 * size <= record["bytes_down"] <= overhead


def test_three_kinds_of_accuracy(tmp_path):
    summary = run(fedtype(), tmp_path / "run")
    assert summary["headline"] == "personal"
    for protocol in ("personal", "common"):
        assert set(summary["accuracy"][protocol]) == {"private", "proxy", "ensemble", "global"}
    common = summary["accuracy"]["common"]["global"]
    assert len(set(common["per_client"].values())) == 1
    figures = records(tmp_path / "run")[-1]["method"]
    assert 0 < figures["eta"] <= 1
    assert 1 <= figures["proxy_set"] <= 10
    assert 1 <= figures["private_set"] <= 10
    assert 0 < figures["single_sets"] < 1
    assert figures["proxy_set"] >= 2 - figures["single_sets"], "other sets have two labels or more"
    assert figures["tau"] > 0


def test_last_global_model_is_the_last_aggregate(tmp_path):
    server = Server(fedtype(rounds=1), tmp_path / "run")
    expected = mean_of(server, learn(server, 1), "proxy")
    instructions = server.flower.configure_evaluate(1)
    assert len(instructions) == 3
    for name, tensor in instruction_of(instructions[0]).group("proxy").items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["fedavg", "fedprox", "pfedme", "pfedbayes"])
def test_every_aggregation_runs_and_is_reproducible(tmp_path, aggregation):
    config = fedtype(**{"fedtype.aggregation": aggregation, "fedtype.moreau-steps": 2})
    first = run(config, tmp_path / "a")
    assert first["accuracy"] == run(config, tmp_path / "b")["accuracy"]


def test_pfedbayes_averages_mean_and_scale(tmp_path):
    server = Server(fedtype(**{"fedtype.aggregation": "pfedbayes"}), tmp_path / "run")
    start = instruction_of(server.instruct(1)[0]).group("scale")
    assert all((v == np.float32(START_SCALE)).all() for v in start.values())
    expected = mean_of(server, learn(server, 1), "scale")
    for name, tensor in instruction_of(server.instruct(2)[0]).group("scale").items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-4)
        assert (tensor != np.float32(START_SCALE)).any()


def test_pfedme_mixes_by_beta(tmp_path):
    config = fedtype(**{"fedtype.aggregation": "pfedme", "fedtype.moreau-beta": 0.25})
    server = Server(config, tmp_path / "run")
    before = {k: v.copy() for k, v in server.strategy.averaged["proxy"].items()}
    mean = mean_of(server, learn(server, 1), "proxy")
    for name, tensor in server.strategy.averaged["proxy"].items():
        expected = 0.75 * before[name] + 0.25 * mean[name]
        np.testing.assert_allclose(tensor, expected, rtol=1e-4, atol=1e-5)


def test_proxy_starts_each_round_from_the_server(client):
    sent = instruction(client)
    client.train(1, sent)
    client.settings = client.settings.model_copy(update={"aggregation": "fedavg"})
    client.node = replace(client.node, training=client.training.model_copy(update={"lr": 1e-12}))
    client.train(2, sent)
    for name, value in client.models["proxy"].state_dict().items():
        np.testing.assert_allclose(value.numpy(), sent.tensors[f"proxy/{name}"], atol=1e-5)


@pytest.mark.parametrize("local_epochs", [1, 3, 7])
def test_parts_cover_the_data_once(tmp_path, local_epochs):
    config = fedtype(local_epochs=local_epochs, **{"fedtype.epoch-data": "part"})
    learning = reciprocity(opened(config, tmp_path))
    seen, client = [], learning.client
    client.train_own = lambda *arguments, **options: seen.append(arguments[4].x)
    for epoch in range(local_epochs):
        learning.run_epoch(epoch)
    rows = sorted(map(tuple, torch.cat(seen).flatten(1).tolist()))
    assert rows == sorted(map(tuple, client.x.flatten(1).tolist()))


@pytest.mark.parametrize("local_epochs", [1, 2, 5])
def test_unseen_samples_are_those_of_the_other_parts(tmp_path, local_epochs):
    chosen = {"fedtype.epoch-data": "part", "fedtype.calibrate-on": "unseen"}
    learning = reciprocity(opened(fedtype(local_epochs=local_epochs, **chosen), tmp_path))
    client = learning.client
    every = sorted(map(tuple, client.x.flatten(1).tolist()))
    calibrated, epochs = [], []
    learning.calibrate = lambda: calibrated.append(client.held_out)
    client.train_own = lambda *arguments, **options: epochs.append((client.held_out, arguments[4]))
    for epoch in range(local_epochs):
        learning.run_epoch(epoch)
    assert len(epochs) == local_epochs
    for held_out, trained in epochs:
        rows = torch.cat([held_out.x, trained.x]).flatten(1).tolist()
        assert sorted(map(tuple, rows)) == every
        for part in (held_out, trained):
            for image, label in zip(part.x, part.y, strict=True):
                same_image = (client.x == image).flatten(1).all(1)
                assert label in client.y[same_image]
    assert len(calibrated) == (local_epochs if local_epochs > 1 else 0), "one part sees all of D"


def test_unseen_samples_need_parts():
    with pytest.raises(SettingsError, match=r"'fedtype\.calibrate-on'.*'fedtype\.epoch-data'"):
        fedtype(**{"fedtype.calibrate-on": "unseen"})


@pytest.mark.parametrize(
    "changes",
    [
        {"fedtype.u": 0.5},
        {"fedtype.mode": "evaluation"},
        {"fedtype.epoch-data": "part"},
        {"fedtype.epoch-data": "part", "fedtype.calibrate-on": "unseen"},
    ],
)
def test_switch_changes_the_run(tmp_path, changes):
    """The test of Algorithm 1, whose models have no batch norm, covers the other switches."""
    trained = []
    for number, chosen in enumerate([{}, changes]):
        config = fedtype(local_epochs=4, models="cnn2", **chosen)
        client = opened(config, tmp_path / str(number))
        fitted(client, 1, instruction(client))
        trained.append(torch.cat([p.flatten() for p in client.models["private"].parameters()]))
    assert not torch.equal(*trained)


@pytest.mark.parametrize("value", ["often", 1.5, -0.1])
def test_u_is_random_or_a_number(value):
    with pytest.raises(SettingsError, match=r"'fedtype\.u'"):
        fedtype(**{"fedtype.u": value})


def test_unknown_proxy_raises_before_training():
    with pytest.raises(SettingsError, match=r"'fedtype\.proxy'"):
        fedtype(**{"fedtype.proxy": "cnn22"})


@pytest.mark.parametrize("value", ["often", 1.5, -1, True])
def test_k_reg_is_auto_or_a_rank(value):
    with pytest.raises(SettingsError, match=r"'fedtype\.k-reg'"):
        fedtype(**{"fedtype.k-reg": value})


@pytest.mark.parametrize("infinite", ["skip", "imitate"])
def test_client_with_one_calibration_sample_trains(tmp_path, infinite):
    chosen = {"fedtype.quantile": "corrected", "fedtype.infinite": infinite}
    config = fedtype(max_samples=60, min_samples=10, clients=3, models="cnn2", **chosen)
    client = opened(config, tmp_path)
    client.held_out = Split(client.held_out.x[:1], client.held_out.y[:1])
    figures = replied(client, 1, instruction(client)).scalars
    if infinite == "skip":
        assert figures == {}
    else:  # the sets are whole, so that the models agree on each
        assert figures["eta"] == 1
        assert figures["proxy_set"] == len(client.label_set)


def test_client_of_two_samples_trains_on_both(tmp_path):
    config = fedtype(clients=2, max_samples=4, min_samples=1, test_fraction=0.0, partition="iid")
    client = opened(config, tmp_path)
    assert (len(client.held_out), len(client.y)) == (0, 2)
    assert replied(client, 1, instruction(client)).scalars == {}


def test_calibration_adds_nothing_to_the_batch_norms(tmp_path):
    client = opened(fedtype(models="cnn2", **{"fedtype.proxy": "cnn2"}), tmp_path)
    before = {kind: state_of(model) for kind, model in client.models.items()}
    reciprocity(client)
    assert all(same(state_of(model), before[kind]) for kind, model in client.models.items())


@pytest.mark.parametrize(
    ("held", "batch", "sizes"),
    [(10, 8, [10]), (16, 8, [8, 8]), (19, 8, [10, 9]), (5, 8, [8]), (5, 64, [32]), (40, 64, [40])],
)
def test_calibration_uses_adequate_batch_norm_statistics(tmp_path, held, batch, sizes):
    """D' is evaluated in equal parts of at least a batch; a small part joins others."""
    client = opened(fedtype(models="cnn2", batch_size=batch), tmp_path)
    everything = torch.cat([client.held_out.x, client.x])
    labels = torch.cat([client.held_out.y, client.y])
    client.held_out = Split(everything[:held], labels[:held])
    seen = []
    client.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    reciprocity(client)
    assert [len(part) for part in seen] == sizes
    own = [min(size, held) for size in sizes]
    assert torch.equal(
        torch.cat([part[:count] for part, count in zip(seen, own, strict=True)]), everything[:held]
    )


def test_change_of_accuracy_is_kept_over_rounds(tmp_path):
    """With one epoch per round, Eq. 7 needs the accuracy of the last round."""
    client = opened(fedtype(local_epochs=1), tmp_path)
    for number in (1, 2):
        fitted(client, number, instruction(client))
    assert client.state.metadata["proxy_accuracy"] == client.accuracy
    again = opened(fedtype(local_epochs=1), tmp_path, before=3)
    assert again.accuracy == client.accuracy
    again.state.metadata["proxy_accuracy"] = 2.0  # more than it can be now
    assert reciprocity(again).imitation.penalty > 0.5
