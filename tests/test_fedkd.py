"""FedKD against slow transcriptions of its losses and round, its messages, and its state."""

import copy

import numpy as np
import pytest
import torch
from federation import Server, client_of, records, run, small
from rounds import PLAIN, instruction_of, learn, log_softmax, reply_of, state_of, step

from fedhet.algorithms.distillation import AdaptiveIntensity, Outputs, mutual_losses
from fedhet.algorithms.weights import add_update
from fedhet.base.errors import SettingsError
from fedhet.clients.fedkd import Mentor
from fedhet.inference.client import open_client
from fedhet.inference.export import export
from fedhet.models import HetModel, build


def fedkd(**changes):
    return small("fedkd", **{"clients": 3, "fedkd.mentee": "mlp3", **changes})


# The losses


def by_hand(views, labels, by_sample, hidden):
    """Compute L_t and L_s (Eqs. 1 to 7) in loops over samples and classes."""
    (p_t, h_t), (p_s, h_s) = [(probabilities(v.logits), v.features.tolist()) for v in views]
    ce = [[-np.log(p[n][y]) for n, y in enumerate(labels)] for p in (p_t, p_s)]
    kl = [
        [divergence(b, a) for a, b in zip(own, other, strict=True)]
        for own, other in ((p_t, p_s), (p_s, p_t))
    ]
    mse = [
        np.mean([(a - b) ** 2 for a, b in zip(t, s, strict=True)])
        for t, s in zip(h_t, h_s, strict=True)
    ]
    found = []
    for me in range(2):
        if by_sample:
            parts = [
                ce[me][n] + (kl[me][n] + hidden * mse[n]) / (ce[0][n] + ce[1][n])
                for n in range(len(labels))
            ]
            found.append(np.mean(parts))
        else:
            whole = np.mean(kl[me]) + hidden * np.mean(mse)
            found.append(np.mean(ce[me]) + whole / (np.mean(ce[0]) + np.mean(ce[1])))
    return found


def probabilities(logits):
    powers = np.exp(logits.detach().double().numpy())
    return powers / powers.sum(1, keepdims=True)


def divergence(a, b):
    """Return KL(a, b) = -sum_i a_i log(b_i / a_i), as in the paper."""
    return -sum(a[i] * np.log(b[i] / a[i]) for i in range(len(a)))


def views(seed=0, samples=6):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(samples, n, generator=generator).requires_grad_() for n in (4, 5, 4, 5)]
    return Outputs(*parts[:2]), Outputs(*parts[2:])


LABELS = [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("hidden", [1.0, 0.3])
def test_losses_equal_the_paper(by_sample, hidden):
    both = views()
    how = AdaptiveIntensity(by_sample, hidden=hidden)
    *found, intensity = mutual_losses(*both, torch.tensor(LABELS), how)
    expected = by_hand(both, LABELS, by_sample, hidden)
    np.testing.assert_allclose([f.item() for f in found], expected, rtol=1e-5)
    ce = [-np.log(probabilities(v.logits)[range(6), LABELS]) for v in both]
    each = 1 / (ce[0] + ce[1]) if by_sample else 1 / (ce[0].mean() + ce[1].mean())
    assert intensity.item() == pytest.approx(np.mean(each), rel=1e-5)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("me", [0, 1])
def test_each_loss_has_gradients_only_for_its_model(me, by_sample, learned):
    both = views()
    mutual_losses(*both, torch.tensor(LABELS), AdaptiveIntensity(by_sample, learned))[me].backward()
    for part in (both[me].logits, both[me].features):
        assert part.grad.abs().sum() > 0
    for part in (both[1 - me].logits, both[1 - me].features):
        assert part.grad is None or part.grad.abs().sum() == 0


@pytest.mark.parametrize("learned", [False, True])
def test_intensity_is_a_weight_or_is_learned(learned):
    """Compute the gradient with finite differences.

    The teacher is fixed, and optionally the intensity.
    """
    both, step = views(), 1e-4
    mutual_losses(*both, torch.tensor(LABELS), AdaptiveIntensity(False, learned))[0].backward()
    fixed = by_hand(both, LABELS, False, 1.0)[0]
    ce = [-np.log(probabilities(v.logits)[range(6), LABELS]).mean() for v in both]
    moved = copy.deepcopy(both[0].logits.detach().double())
    moved[2, 1] += step
    shifted = (Outputs(moved, both[0].features), both[1])
    now = by_hand(shifted, LABELS, False, 1.0)[0]
    if not learned:
        own = -np.log(probabilities(moved)[range(6), LABELS]).mean()
        now = own + (now - own) * (own + ce[1]) / (ce[0] + ce[1])
    assert both[0].logits.grad[2, 1].item() == pytest.approx((now - fixed) / step, rel=1e-2)


def test_zero_losses_are_not_divided_by_zero():
    sure = 100 * torch.eye(4)[[0, 1, 2, 3]]
    both = Outputs(sure.requires_grad_(), torch.zeros(4, 5)), Outputs(sure, torch.ones(4, 5))
    for by_sample in (False, True):
        found = mutual_losses(*both, torch.arange(4), AdaptiveIntensity(by_sample))
        assert all(value.isfinite() for value in found)


# A round


def slow_round(mentor, mentee, x, y, lr, epochs, learned):
    """Take one step on both models with explicit losses and the other model's old outputs."""
    mentor, mentee, x = copy.deepcopy(mentor).double(), copy.deepcopy(mentee).double(), x.double()
    for _ in range(epochs):
        h_t, h_s = mentor.extractor(x), mentee.extractor(x) @ mentor.bridge.weight.T
        logs = [log_softmax(mentor.classifier(h_t)), log_softmax(mentee(x))]
        ce = [-each[range(len(y)), y].mean() for each in logs]
        steps = []
        for me, (model, own_h, other_h) in enumerate(((mentor, h_t, h_s), (mentee, h_s, h_t))):
            teacher = logs[1 - me].detach()
            total = ce[me] + ce[1 - me].detach()
            total = total if learned else total.detach()
            kl = (teacher.exp() * (teacher - logs[me])).sum(1).mean()
            mse = ((own_h - other_h.detach()) ** 2).mean()
            loss = ce[me] + kl / total + mse / total
            parameters = list(model.parameters()) + ([mentor.bridge.weight] if me else [])
            found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
            steps.append((parameters, found))
        for parameters, found in steps:
            step(parameters, found, lr)
    return mentor, mentee


def whole_of(tensors, name, shape):
    if f"update/{name}" in tensors:
        return tensors[f"update/{name}"]
    return (tensors[f"update/{name}/left"] @ tensors[f"update/{name}/right"]).reshape(shape)


def kept_energy(cut, whole):
    """Return the fraction of a matrix's energy that its projection keeps."""
    return np.square(cut.astype(float)).sum() / np.square(whole.astype(float)).sum()


@pytest.mark.parametrize("learned", [True, False])
def test_two_rounds_equal_algorithm_1(tmp_path, learned):
    """Mentor and W^h are the client's, and the mentee is the server's. Its change is cut (Eq. 8).

    By default, the gradient propagates through the intensity, as in the paper.
    """
    chosen = {} if learned else {"fedkd.intensity-learned": False}
    server = Server(fedkd(models="mlp2", **PLAIN, **chosen, rounds=4), tmp_path / "run")
    learn(server, 1)
    before = copy.deepcopy(server.strategy.averaged["weights"])
    instructions = server.instruct(2)
    client = client_of(instructions[0][0])
    mentee = build("mlp3", client.info.shape, client.info.classes, seed=5)
    mentee.load_state_dict({k: torch.tensor(v) for k, v in before.items()})
    start = copy.deepcopy(client.network)
    mentor, shared = slow_round(start, mentee, client.x, client.y, 0.1, 3, learned)
    replies = server.train(instructions)
    for name, value in mentor.state_dict().items():
        found = client.network.state_dict()[name].numpy()
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    matrices = [each.bridge.weight.detach().numpy() for each in (start, mentor)]
    assert not np.allclose(*matrices), "W^h learns"
    sent = reply_of(replies[0][1]).tensors
    for name, value in shared.state_dict().items():
        change = value.numpy() - before[name]
        cut = whole_of(sent, name, change.shape)
        if f"update/{name}/left" not in sent:
            np.testing.assert_allclose(cut, change, atol=1e-5)
            continue
        assert kept_energy(cut, change) > 0.95 + 0.03 * 2 / 4 - 1e-3
        rank = sent[f"update/{name}/left"].shape[1]
        squares = np.linalg.svd(change, compute_uv=False) ** 2
        assert squares[: rank - 1].sum() <= (0.95 + 0.03 * 2 / 4) * squares.sum() * 1.001
    assert any(name.endswith("/left") for name in sent)
    check_the_servers_part(server, replies, before)


def check_the_servers_part(server, replies, before):
    """Lines 13 to 22: the mean of the changes, weighted by samples, is cut again and added."""
    samples = {c.name: server.strategy.members[c.name].info.samples for c, _ in replies}
    server.aggregate(2, replies)
    told = instruction_of(server.instruct(3)[0])
    total = sum(samples.values())
    assert told.scalars == {"base": 2}
    for name, value in server.strategy.averaged["weights"].items():
        parts = [
            (whole_of(reply_of(r).tensors, name, value.shape), samples[c.name] / total)
            for c, r in replies
        ]
        mean = sum(part * share for part, share in parts)
        cut = whole_of(told.tensors, name, value.shape)
        np.testing.assert_allclose(value, before[name] + cut, rtol=1e-5, atol=1e-6)
        lost = np.square(mean - cut).sum() / np.square(mean).sum()
        assert lost < (1 - 0.95 - 0.03 * 2 / 4 + 1e-3 if value.ndim > 1 else 1e-9), name


# Who is sent what


def mentees(server, number):
    """Return each client's decoded mentee and the fields of its instruction."""
    found = {}
    for instructions in server.instruct(number):
        knowledge, client = instruction_of(instructions), client_of(instructions[0])
        client.state.restore(server.log.run_name, before=number)
        fields = {name.partition("/")[0] for name in knowledge.tensors}
        found[instructions[0].name] = fields, client._received(knowledge)
    return found


def test_clients_apply_changes_of_the_mentee(tmp_path):
    server = Server(fedkd(rounds=5), tmp_path)
    for number in (1, 2, 3, 4):
        for fields, mentee in mentees(server, number).values():
            assert fields == ({"update"} if number > 1 else {"weights"})
            for name, value in server.strategy.averaged["weights"].items():
                np.testing.assert_allclose(mentee[name], value, atol=1e-6)
        server.strategy.holders |= {*server.strategy.members} if number > 1 else set()
        learn(server, number)


def test_client_that_missed_a_round_receives_the_full_mentee(tmp_path):
    server = Server(fedkd(rounds=5, min_clients=2), tmp_path)
    learn(server, 1)
    instructions = server.instruct(2)
    server.aggregate(2, server.train(instructions)[1:])
    fields = {
        instructions[0].name: instruction_of(instructions).scalars.keys()
        for instructions in server.instruct(3)
    }
    assert [len(each) for each in fields.values()] == [0, 1, 1]


def test_client_with_lost_state_receives_the_full_mentee(tmp_path):
    server = Server(fedkd(rounds=5, min_clients=2), tmp_path)
    learn(server, 1)
    instructions = server.instruct(2)
    client = client_of(instructions[1][0])
    for file in client.state.folder.iterdir():
        file.unlink()
    replies = server.train(instructions)
    server.aggregate(2, replies)
    failed = server.flower.state.record.failed
    assert list(failed) == ["client-1"]
    assert "expected an update of the mentee of round none, got round 1" in failed["client-1"]
    replies = server.train(server.instruct(3))
    server.aggregate(3, replies)
    assert not server.flower.state.record.failed


def test_all_clients_receive_the_full_mentee_after_an_empty_round(tmp_path):
    """The same happens after a server rolled back to its state before the round."""
    server = Server(fedkd(rounds=5), tmp_path)
    learn(server, 1)
    kept = server.strategy.state_dict()
    assert not any(
        instruction_of(instructions).group("weights") for instructions in server.instruct(2)
    )
    server.strategy.load_state_dict(kept)
    assert server.strategy.holders == {"client-0", "client-1", "client-2"}
    assert all(instruction_of(instructions).group("weights") for instructions in server.instruct(3))


def test_run_with_few_clients_per_round_has_no_failures(tmp_path):
    run(fedkd(clients=4, rounds=5, fraction=0.5, max_samples=300), tmp_path / "run")
    found = records(tmp_path / "run")
    assert [record["failed"] for record in found] == [{}] * 5
    assert all(
        0 < record["method"][name] < 1 for record in found for name in ("sent_up", "sent_down")
    )


def test_factors_need_fewer_bytes_than_weights(tmp_path):
    usual = {"clients": 3, "max_samples": 300, "rounds": 3, "models": ["mlp", "cnn2"]}
    both = {
        "fedkd": small("fedkd", **usual, **{"fedkd.mentee": "mlp3"}),
        "fml": small("fml", **usual, **{"fml.meme": "mlp3"}),
    }
    bytes_of = {}
    for name, config in both.items():
        run(config, tmp_path / name)
        found = records(tmp_path / name)
        bytes_of[name] = [sum(each["bytes_up"] for each in found), found[-1]["bytes_down"]]
    assert bytes_of["fedkd"][0] < 0.8 * bytes_of["fml"][0]
    assert bytes_of["fedkd"][1] < 0.8 * bytes_of["fml"][1]


# Evaluation and use


def test_all_kinds_are_evaluated(tmp_path):
    server = Server(fedkd(models=["mlp", "cnn2", "cnn3"]), tmp_path)
    instructions, _ = server.play(1)
    client = client_of(instructions[1][0])
    for shown in (server.strategy._update, server.strategy.instruction):
        judged = client.eval_models(shown)
        assert list(judged) == ["private", "proxy", "global"]
        assert isinstance(judged["private"], Mentor)
        for name, value in state_of(judged["global"]).items():
            np.testing.assert_allclose(value, server.strategy.averaged["weights"][name], atol=1e-6)
    assert list(client.eval_models(type(server.strategy._update)())) == ["private", "proxy"]


def test_matrix_is_saved_with_the_mentor_and_unused_in_prediction(tmp_path):
    run(fedkd(rounds=1, max_samples=240), tmp_path / "run")
    trained = open_client(tmp_path / "run", "client-1")
    assert trained.kinds == ("private", "proxy", "ensemble", "global")
    export(trained, "pt2", tmp_path / "mentor.pt2")
    x = torch.rand(5, *trained.record.format.shape)
    found = torch.export.load(tmp_path / "mentor.pt2").module()(x).detach().numpy()
    np.testing.assert_allclose(found, trained.predict(x).probabilities, atol=1e-5)
    network = trained.network()
    plain = HetModel(network.extractor, network.classifier, network.feature_dim)
    assert torch.equal(network(x), plain.eval()(x))


def test_variance_never_falls_below_zero():
    found = add_update({"a.running_var": np.ones(2)}, {"a.running_var": np.array([-3.0, 1.0])})
    assert found["a.running_var"].tolist() == [0.0, 2.0]


def test_unknown_mentee_raises():
    with pytest.raises(SettingsError, match=r"'fedkd\.mentee'"):
        fedkd(**{"fedkd.mentee": "cnn22"})
