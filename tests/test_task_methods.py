"""Regression with each method, against slow transcriptions of its losses and rounds."""

import copy
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
import torch
from federation import Server, client_info, client_of, fast, run, weighed_by_samples
from interruption import cut_and_resumed
from rounds import (
    PLAIN,
    altered,
    assert_close,
    descend,
    instruction_of,
    learn,
    normal,
    reply_of,
    same,
    state_of,
    step,
)
from test_fedavg import slow_bayes
from test_privacy_steps import MIXES, Own
from test_tasks import NAMES, on_table, write
from torch import nn
from torch.distributions import Normal

from fedhet import models
from fedhet.algorithms.distillation import (
    AdaptiveIntensity,
    Outputs,
    SelectionByError,
    fuse,
    mutual_loss,
    mutual_losses,
)
from fedhet.algorithms.feature_models import matryoshka_losses
from fedhet.base.errors import DataError, KnowledgeError, ModelError, SettingsError
from fedhet.config.describe import tasks
from fedhet.config.resolve import resolve
from fedhet.data.declaration import Declaration
from fedhet.data.rows import read_table
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.data.tables import infer_schema
from fedhet.engines import simulate as simulation
from fedhet.learning.devices import CPU
from fedhet.learning.training import optimization_for
from fedhet.methods.registry import all_methods, find_method
from fedhet.models import build
from fedhet.privacy import sgd
from fedhet.settings.run import TrainingSettings
from fedhet.tasks import Classification, Regression
from fedhet.wire.contract import Sizes

TASK = Regression()
MUTUAL = TASK.loss(), TASK.divergence()
STEPS = {**PLAIN, "training.lr": 0.05}
"""Three steps of gradient descent on all data."""
LR = 0.05


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table with a numeric target."""
    return write(tmp_path_factory.mktemp("table") / "a.csv")


def federation(method, table, tmp_path, **changes):
    """Return a server and three clients that descend on all their data."""
    return Server(on_table(method, table, **{**fast(method), **STEPS, **changes}), tmp_path)


def squared(outputs, targets):
    """Return the mean over samples and columns of the squared error."""
    targets = torch.as_tensor(targets)
    return ((outputs - targets.to(outputs.dtype)) ** 2).sum() / outputs.numel()


def meme_of(client, instruction, name="mlp3"):
    """Return the model whose weights a client has received."""
    meme = build(name, client.info.shape, 1, kind="table", seed=5)
    weights = instruction.group("weights")
    meme.load_state_dict({k: torch.tensor(v) for k, v in weights.items()})
    return meme


# --- losses ---------------------------------------------------------------------------------------


def draws(*shapes, seed=0):
    """Return random tensors with gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_mutual_learning_uses_squared_errors_per_model(weight, columns):
    own, peer, targets = draws((5, columns), (5, columns), (5, columns))
    loss = mutual_loss(own, peer, targets.detach(), weight, *MUTUAL)
    a, b, y = (each.detach().double().numpy() for each in (own, peer, targets))
    total = 0.0
    for n in range(5):
        for k in range(columns):
            total += weight * (a[n, k] - y[n, k]) ** 2 + (1 - weight) * (a[n, k] - b[n, k]) ** 2
    assert loss.item() == pytest.approx(total / (5 * columns), rel=1e-5)
    loss.backward()
    expected = 2 * (weight * (a - y) + (1 - weight) * (a - b)) / (5 * columns)
    np.testing.assert_allclose(own.grad, expected, rtol=1e-4, atol=1e-6)
    assert peer.grad is None


def distances_by_hand(both, targets, by_sample, hidden):
    """Compute FedKD's L_t and L_s with squared errors, in loops over samples and columns."""
    values = [(v.logits.detach().double().numpy(), v.features.detach().double().numpy())
              for v in both]  # fmt: skip
    y, found = targets.double().numpy(), []

    def mean_square(a, b):
        return sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) / len(a)

    errors = [[mean_square(outputs[n], y[n]) for n in range(len(y))] for outputs, _ in values]
    apart = [
        mean_square(values[0][0][n], values[1][0][n])
        + hidden * mean_square(values[0][1][n], values[1][1][n])
        for n in range(len(y))
    ]
    for me in range(2):
        if by_sample:
            parts = [
                errors[me][n] + apart[n] / (errors[0][n] + errors[1][n]) for n in range(len(y))
            ]
            found.append(np.mean(parts))
        else:
            sums = np.mean(errors[0]) + np.mean(errors[1])
            found.append(np.mean(errors[me]) + np.mean(apart) / sums)
    return found


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("by_sample", [False, True])
def test_mentor_and_mentee_learn_from_squared_errors(by_sample, learned):
    parts = draws((6, 2), (6, 5), (6, 2), (6, 5))
    both = Outputs(*parts[:2]), Outputs(*parts[2:])
    targets = normal(1, 6, 2).astype(np.float32)
    options = AdaptiveIntensity(by_sample, learned, 0.3)
    loss_of = TASK.loss("none" if by_sample else "mean")
    losses = mutual_losses(*both, torch.tensor(targets), options, loss_of, TASK.divergence("none"))
    expected = distances_by_hand(both, torch.tensor(targets), by_sample, 0.3)
    np.testing.assert_allclose([each.item() for each in losses[:2]], expected, rtol=1e-5)
    losses[0].backward()
    assert all(part.grad.abs().sum() > 0 for part in parts[:2])
    assert all(part.grad is None for part in parts[2:])


def test_both_heads_learn_the_targets():
    fine, coarse, targets = draws((4, 2), (4, 2), (4, 2))
    losses = matryoshka_losses(fine, coarse, targets.detach(), TASK.loss())
    for place, own in enumerate((fine, coarse)):
        gap = (own - targets).detach().numpy()
        assert losses[place].item() == pytest.approx((gap**2).mean(), rel=1e-5)
    losses[1].backward()
    assert fine.grad.abs().sum() == 0
    gap = (coarse - targets).detach().numpy()
    np.testing.assert_allclose(coarse.grad, 2 * gap / 8, rtol=1e-5)


def selection(tolerance=0.25):
    return SelectionByError(TASK.errors, TASK.loss("none"), TASK.divergence("none"), tolerance)


def test_prediction_is_correct_up_to_the_tolerance():
    outputs = torch.tensor([[0.5], [0.6], [-0.5], [0.0]])
    assert selection().right(outputs, torch.zeros(4, 1)).tolist() == [True, False, True, True]
    two = torch.tensor([[0.5, 0.5], [0.8, 0.0], [0.6, 0.4]])  # means of 0.25, 0.32, and 0.26
    assert selection().right(two, torch.zeros(3, 2)).tolist() == [True, False, False]


@pytest.mark.parametrize("seed", range(3))
def test_clients_with_small_errors_have_large_weights(seed):
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(4, 9, 2)).astype(np.float32)
    targets = rng.normal(size=(9, 2)).astype(np.float32)
    outputs[0, 0] = targets[0]  # an error of 0
    fused = fuse(torch.tensor(outputs), torch.tensor(targets), selection(0.8))
    for n in range(9):
        weights = []
        for own in outputs[:, n].tolist():
            gaps = zip(own, targets[n].tolist(), strict=True)
            error = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in gaps) / 2
            floor = Fraction(8, 10) / 1000
            weights.append(1 / max(error, floor) if error <= Fraction(8, 10) else Fraction(0))
        assert bool(fused.known[n]) is any(weights)
        if any(weights):
            shares = np.array([float(each / sum(weights)) for each in weights])
            np.testing.assert_allclose(fused.logits[n], shares @ outputs[:, n], rtol=1e-4)


def test_largest_outputs_give_finite_targets():
    outputs = torch.tensor([[[1e12]], [[0.1]]])
    fused = fuse(outputs, torch.zeros(1, 1), selection())
    torch.testing.assert_close(fused.logits, torch.tensor([[0.1]]))
    assert not fuse(outputs[:1], torch.zeros(1, 1), selection()).known.any()


def test_selected_outputs_are_learned_with_squared_errors():
    own, teacher, targets = draws((5, 2), (5, 2), (5, 2))
    known = torch.tensor([True, False, True, True, False])
    loss = selection().loss(own, targets.detach(), teacher, known, 0.75)
    a, b, y = (each.detach().double().numpy() for each in (own, teacher, targets))
    total = 0.0
    for n in range(5):
        labeled, distilled = ((a[n] - y[n]) ** 2).mean(), ((a[n] - b[n]) ** 2).mean()
        total += 0.75 * labeled + 0.25 * distilled if known[n] else labeled
    assert loss.item() == pytest.approx(total / 5, rel=1e-5)
    loss.backward()
    assert teacher.grad is None
    assert (own.grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_of_samples_and_of_batches_agree(reduction):
    (outputs,), labels = draws((6, 3)), torch.tensor([0, 1, 2, 0, 1, 2])
    targets = torch.tensor(normal(2, 6, 3), dtype=torch.float32)
    for task, y in ((Classification(), labels), (TASK, targets)):
        losses, mean = task.loss("none")(outputs, y), task.loss()(outputs, y)
        assert losses.shape == (6,)
        torch.testing.assert_close(losses.mean(), mean)
        (peer,) = draws((6, 3), seed=4)
        apart = task.divergence("none")(peer, outputs)
        assert apart.shape == (6,)
        torch.testing.assert_close(apart.mean(), task.divergence()(peer, outputs))
        task.divergence(reduction)(peer, outputs).sum().backward()
        assert peer.grad is None


# --- rounds of clients ----------------------------------------------------------------------------


def test_fml_descends_squared_errors_of_both_models(table, tmp_path):
    shares = {"fml.alpha": 0.3, "fml.beta": 0.8}
    server = federation("fml", table, tmp_path, **shares)
    learn(server, 1)
    instructions = server.instruct(2)
    client = client_of(instructions[0][0])
    meme = meme_of(client, instruction_of(instructions[0]))
    pair = [copy.deepcopy(each).double() for each in (client.network, meme)]
    x, y = client.x.double(), client.y.double()
    for _ in range(3):
        outputs, steps = [each(x) for each in pair], []
        for me, (model, share) in enumerate(zip(pair, (0.3, 0.8), strict=True)):
            other = outputs[1 - me].detach()
            loss = share * squared(outputs[me], y) + (1 - share) * squared(outputs[me], other)
            steps.append(torch.autograd.grad(loss, list(model.parameters())))
        for model, gradients in zip(pair, steps, strict=True):
            step(model.parameters(), gradients, LR)
    reply = reply_of(server.train(instructions)[0][1]).group("weights")
    assert_close(client.network, pair[0])
    for name, value in pair[1].state_dict().items():
        np.testing.assert_allclose(reply[name], value, rtol=1e-4, atol=1e-6)


def test_meme_without_private_models_equals_fedavg(table, tmp_path):
    mutual = federation("fml", table, tmp_path / "fml", **{"fml.beta": 1.0})
    plain = federation("fedavg", table, tmp_path / "fedavg", **{"models.pool": ["mlp3"]})
    for number in (1, 2):
        one, other = learn(mutual, number), learn(plain, number)
        assert all(same(one[name], other[name]) for name in one)


@pytest.mark.parametrize("intensity", ["batch", "sample"])
def test_fedkd_descends_squared_errors_of_mentor_and_mentee(table, tmp_path, intensity):
    server = federation("fedkd", table, tmp_path, **{"fedkd.intensity": intensity})
    instructions = server.instruct(1)
    client = client_of(instructions[1][0])
    client.state.restore(server.log.run_name, before=1)
    mentor = copy.deepcopy(client.network).double()
    mentee = meme_of(client, instruction_of(instructions[1])).double()
    x, y = client.x.double(), client.y.double()
    before = copy.deepcopy(mentee)
    for _ in range(3):
        features = mentor.extractor(x), mentee.extractor(x) @ mentor.bridge.weight.T
        outputs = mentor.classifier(features[0]), mentee(x)
        errors = [((each - y) ** 2).mean(1) for each in outputs]
        steps = []
        for me, model in enumerate((mentor, mentee)):
            apart = ((outputs[me] - outputs[1 - me].detach()) ** 2).mean(1)
            apart = apart + ((features[me] - features[1 - me].detach()) ** 2).mean(1)
            if intensity == "sample":
                loss = (errors[me] + apart / sum(errors).detach()).mean()
            else:  # no gradient passes through the denominators
                sums = sum(errors).mean().detach()
                loss = errors[me].mean() + apart.mean() / sums
            parameters = list(model.parameters()) + ([mentor.bridge.weight] if me else [])
            found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
            steps.append((parameters, found))
        for parameters, found in steps:
            step(parameters, found, LR)
    server.train(instructions)
    assert_close(client.network, mentor)
    assert_close(client.models["proxy"], mentee)
    assert not np.allclose(*(state_of(each)["classifier.weight"] for each in (before, mentee)))


def test_fedmrl_descends_the_squared_errors_of_both_heads(table, tmp_path):
    weights = {"fedmrl.own-weight": 0.7, "fedmrl.shared-weight": 1.5}
    server = federation("fedmrl", table, tmp_path, **weights)
    learn(server, 1)
    instructions = server.instruct(2)
    client, sent = client_of(instructions[0][0]), instruction_of(instructions[0]).group("weights")
    start = copy.deepcopy(client.network)
    start.extractor.shared.load_state_dict({k: torch.tensor(v) for k, v in sent.items()})
    x, y = client.x.double(), client.y

    def heads(model):
        fusion = model.extractor
        shared = fusion.shared.extractor(x)
        fused = fusion.projector(torch.cat([shared, fusion.own(x)], 1))
        coarse = fusion.shared.classifier(fused[:, : shared.shape[1]])
        return squared(model.classifier(fused), y), squared(coarse, y)

    slow = descend(start, lambda model: 0.7 * heads(model)[0] + 1.5 * heads(model)[1], 3, LR)
    reply = reply_of(server.train(instructions)[0][1])
    assert_close(client.network, slow)
    before = descend(start, lambda model: 0.7 * heads(model)[0] + 1.5 * heads(model)[1], 2, LR)
    expected = [each.item() for each in heads(before)]
    found = [reply.scalars["fine_loss"], reply.scalars["coarse_loss"]]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_head_without_weight_does_not_learn(table, tmp_path):
    server = federation("fedmrl", table, tmp_path, **{"fedmrl.own-weight": 0.0})
    instructions = server.instruct(1)
    client = client_of(instructions[0][0])
    client.state.restore(server.log.run_name, before=1)
    before = state_of(client.network)
    server.train(instructions)
    moved = {name for name, value in state_of(client.network).items()
             if not np.array_equal(value, before[name])}  # fmt: skip
    assert not {name for name in moved if name.startswith("classifier.")}
    assert "extractor.shared.classifier.weight" in moved
    assert any(name.startswith("extractor.projector.") for name in moved)
    assert any(name.startswith("extractor.own.") for name in moved)


def test_heterofl_descends_without_the_scaler_and_sends_no_classes(table, tmp_path):
    """The average is over all clients that hold an element."""
    server = federation("heterofl", table, tmp_path)
    assert server.strategy.settings.masked is False
    assert server.strategy.settings.scaler is False  # its models would predict too small numbers
    instructions = server.instruct(1)
    start = instruction_of(instructions[1]).group("weights")
    w = {name: torch.tensor(value).double().requires_grad_() for name, value in start.items()}
    client, layers = client_of(instructions[1][0]), sorted({name.rpartition(".")[0] for name in w})
    assert layers == ["classifier", "extractor.1"]
    x, y = client.x.double().flatten(1), client.y
    for _ in range(3):
        features = x @ w["extractor.1.weight"].T + w["extractor.1.bias"]
        outputs = features.relu() @ w["classifier.weight"].T + w["classifier.bias"]
        gradients = torch.autograd.grad(squared(outputs, y), list(w.values()))
        pairs = zip(w.items(), gradients, strict=True)
        w = {name: (v - LR * g).detach().requires_grad_() for (name, v), g in pairs}
    results = server.train(instructions)
    replies = [reply_of(result).tensors for _, result in results]
    for name, value in w.items():
        found = replies[1][f"weights/{name}"]
        np.testing.assert_allclose(found, value.detach(), rtol=1e-4, atol=1e-6)
    assert all("labels" not in reply for reply in replies)
    server.aggregate(1, results)
    server.close(1)
    for name, value in server.strategy.weights.items():
        for place in np.ndindex(value.shape):
            held = [
                reply[f"weights/{name}"][place]
                for reply in replies
                if all(p < n for p, n in zip(place, reply[f"weights/{name}"].shape, strict=True))
            ]
            assert value[place] == pytest.approx(np.mean(held, dtype=float), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("method", "like"), [("fedlora", "fedavg"), ("fedsa", "fedper")])
def test_without_adapters_methods_of_adapters_are_averages(table, tmp_path, method, like):
    pool = {"models.pool": ["mlp"]}
    one = federation(method, table, tmp_path / "one", **pool)
    other = federation(like, table, tmp_path / "other", **pool)
    for number in (1, 2):
        pairs = learn(one, number), learn(other, number)
        for name, tensors in pairs[0].items():
            assert tensors.keys() == pairs[1][name].keys()
            for key, value in tensors.items():
                np.testing.assert_allclose(value, pairs[1][name][key], rtol=1e-5, atol=1e-7)


def test_pfedbayes_descends_a_gaussian_likelihood(table, tmp_path, monkeypatch, steady_adam):
    """The loss is -log N(y; f(x), 1/2) without its constant, i.e. the squared error."""

    def likelihood(outputs, y):
        logs = Normal(outputs, 0.5**0.5).log_prob(y.double())
        return -(logs + 0.5 * np.log(np.pi)).mean()

    monkeypatch.setattr(torch, "randn", lambda shape, **options: torch.ones(shape))
    bayes = {"pfedbayes.zeta": 3.0, "pfedbayes.steps": 2, "pfedbayes.noise": 0.25}
    pool = {"models.pool": ["mlp"], "training.lr": 0.02}
    server = federation("pfedbayes", table, tmp_path, **bayes, **pool)
    server.play(1)
    instructions = server.instruct(2)
    client, told = client_of(instructions[0][0]), instruction_of(instructions[0])
    options = {"zeta": 3.0, "steps": 2, "noise": 0.25, "eps": steady_adam, "loss": likelihood}
    q, w = slow_bayes(client, told, **options)
    reply, near = reply_of(server.train(instructions)[0][1]), {"rtol": 1e-3, "atol": 2e-5}
    for name, parameter in client.network.named_parameters():
        np.testing.assert_allclose(parameter.detach(), q[name, 0], **near)
        np.testing.assert_allclose(reply.group("weights")[name], w[name, 0], **near)


@pytest.mark.parametrize("method", ["fedmd", "ds-fl"])
@pytest.mark.parametrize("kind", ["mae", "mse"])
def test_clients_learn_the_mean_of_all_outputs(table, tmp_path, method, kind):
    """Digest and Revisit of FedMD; in the first round, transfer learning on public targets."""
    epochs = {f"{method}.public-epochs": 2, f"{method}.digest-epochs": 2, f"{method}.loss": kind}
    server = federation(method, table, tmp_path, **epochs)
    instructions = server.instruct(1)
    client = client_of(instructions[0][0])
    client.state.restore(server.log.run_name, before=1)
    public = client.public
    start = descend(client.network, lambda m: squared(m(public.x.double()), public.y), 2, LR)
    slow = descend(start, lambda m: squared(m(client.x.double()), client.y), 3, LR)
    replies = server.train(instructions)
    assert_close(client.network, slow)
    outputs = [reply_of(result).tensors["logits"] for _, result in replies]
    rows = instruction_of(instructions[0]).tensors["asked"].astype(int)
    with torch.no_grad():
        expected = slow(public.x[rows].double())
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-3, atol=1e-5)

    before = copy.deepcopy(server.strategy.learner.model) if method == "ds-fl" else None
    server.aggregate(1, replies)
    server.close(1)
    instructions = server.instruct(2)
    told = instruction_of(instructions[0]).tensors
    assert set(told) == {"logits", "rows", "asked"}
    mean = np.mean(outputs, axis=0, dtype=np.float64)
    np.testing.assert_allclose(told["logits"], mean, rtol=1e-5, atol=1e-7)
    x, agreed = public.x[told["rows"].astype(int)].double(), torch.tensor(told["logits"])

    def toward(model):
        gap = model(x) - agreed
        return (gap.abs() if kind == "mae" else gap**2).mean()

    slow = descend(descend(client.network, toward, 2, LR), lambda m: squared(
        m(client.x.double()), client.y
    ), 3, LR)  # fmt: skip
    server.train(instructions)
    assert_close(client.network, slow, rtol=1e-3, atol=1e-5)
    if before is not None:
        trained = descend(before, toward, server.strategy.settings.server_epochs, LR)
        assert_close(server.strategy.learner.model, trained, rtol=1e-3, atol=1e-5)


# --- rounds of servers ----------------------------------------------------------------------------


def test_feddf_descends_the_squared_error_to_the_mean_output(table, tmp_path, steady_adam):
    """One step of Adam from each average: w - lr g / (|g| + eps)."""
    options = {"feddf.epochs": 1, "feddf.batch-size": 1000, "feddf.lr": 2e-4}
    pool = {"models.pool": ["mlp", "mlp2"]}
    server = federation("feddf", table, tmp_path, **options, **pool)
    instructions = server.instruct(1)
    names = [client_of(proxy).info.model for proxy, _ in instructions]
    samples = [client_of(proxy).info.samples for proxy, _ in instructions]
    results = server.train(instructions)
    x, replies = server.strategy.x.double(), []
    for (_, result), name in zip(results, names, strict=True):
        model = build(name, tuple(x.shape[1:]), 1, kind="table", seed=0)
        weights = reply_of(result).group("weights")
        model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()})
        replies.append(model.double().eval())
    with torch.no_grad():
        teacher = torch.stack([model(x) for model in replies]).mean(0)
    server.aggregate(1, results)
    for name in set(names):
        own = [k for k, each in enumerate(names) if each == name]
        total = sum(samples[k] for k in own)
        student = copy.deepcopy(replies[own[0]]).train()
        average = {
            key: sum(replies[k].state_dict()[key] * samples[k] for k in own) / total
            for key in student.state_dict()
        }
        student.load_state_dict(average)
        distances = [squared(student(x), teacher).item()]
        slopes = torch.autograd.grad(squared(student(x), teacher), list(student.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(student.parameters(), slopes, strict=True):
                parameter -= 2e-4 * slope / (slope.abs() + steady_adam)
        distances.append(squared(student(x), teacher).item())
        assert distances[1] < distances[0], "otherwise, the average remains"
        for key, value in student.state_dict().items():
            found = server.strategy.models[name][key]
            np.testing.assert_allclose(found, value, rtol=0, atol=1e-5, err_msg=key)


def test_fedgems_selects_by_error(table, tmp_path):
    """The server learns once from labels, earlier outputs, and the clients' fused outputs."""
    chosen = {"fedgems.server-epochs": 1, "fedgems.public-epochs": 2, "fedgems.epsilon": 0.6}
    chosen |= {"rounds": 3}
    server = federation("fedgems", table, tmp_path, **chosen, **{"models.pool": ["mlp", "mlp2"]})
    strategy = server.strategy
    x, y = strategy.x.double(), strategy.y.double()
    pool: dict[int, np.ndarray] = {}
    for number in (1, 2, 3):
        start = copy.deepcopy(strategy.learner.model)
        with torch.no_grad():
            own = copy.deepcopy(start).double().eval()(x)
        right = ((own - y) ** 2).mean(1) <= 0.25
        instructions = server.instruct(number)
        wanted = [n for n in range(len(y)) if not right[n] and n not in pool]
        bits = np.unpackbits(instruction_of(instructions[0]).tensors["wanted"], count=len(y))
        assert np.flatnonzero(bits).tolist() == wanted
        student, teacher = client_of(instructions[0][0]), None
        student.state.restore(server.log.run_name, before=number)
        if number > 1:
            told = instruction_of(instructions[0]).tensors
            teacher = student.state.tensors.get("logits", torch.zeros(len(y), 1)).clone()
            has = np.unpackbits(told["changed"], count=len(y)) if "changed" in told else None
            rows = slice(None) if has is None else torch.tensor(np.flatnonzero(has))
            teacher[rows] = torch.tensor(told["logits"])
        slow = copy.deepcopy(student.network)
        if teacher is not None:
            public = student.public
            slow = descend(slow, lambda m, public=public, teacher=teacher: (
                0.6 * squared(m(public.x.double()), public.y)
                + 0.4 * squared(m(public.x.double()), teacher)
            ), 2, LR)  # fmt: skip
        slow = descend(slow, lambda m, c=student: squared(m(c.x.double()), c.y), 3, LR)
        replies = server.train(instructions)
        assert_close(student.network, slow, rtol=1e-3, atol=1e-5)

        outputs = np.stack([reply_of(result).tensors["logits"] for _, result in replies])
        lesson = {n: value for n, value in pool.items() if not right[n]}
        for place, n in enumerate(wanted):
            errors = ((outputs[:, place].astype(float) - y[n].numpy()) ** 2).mean(1)
            weights = np.where(errors <= 0.25, 1 / np.maximum(errors, 0.25 / 1000), 0.0)
            if weights.any():
                lesson[n] = (weights / weights.sum()) @ outputs[:, place]
        for n in np.flatnonzero(right).tolist():
            pool[n] = own[n].numpy()

        def loss(model, lesson=lesson):
            predicted, losses = model(x), []
            for n in range(len(y)):
                labeled = ((predicted[n] - y[n]) ** 2).mean()
                if n in lesson:
                    apart = ((predicted[n] - torch.tensor(lesson[n])) ** 2).mean()
                    labeled = 0.6 * labeled + 0.4 * apart
                losses.append(labeled)
            return torch.stack(losses).mean()

        slow = descend(start, loss, 1, LR)
        server.aggregate(number, replies)
        server.close(number)
        assert_close(strategy.learner.model, slow, rtol=1e-3, atol=1e-5)
    assert pool
    assert lesson


# --- messages, attacks, and defenses --------------------------------------------------------------


def test_messages_of_a_task_have_only_its_scores():
    spec, rows = find_method("ds-fl").spec, np.full((2, 3), 1 / 3, np.float32)
    settings = spec.settings()
    for task, kind, other in ((Classification(), "probabilities", "logits"),
                              (TASK, "logits", "probabilities")):  # fmt: skip
        sizes = Sizes({"Q": 2, "C": 3, "N": 9}, unused=settings.unused_in(task))
        spec.replies.check("a", {kind: rows}, {}, sizes)
        with pytest.raises(KnowledgeError, match=f"{other}.*unknown field"):
            spec.replies.check("a", {kind: rows, other: rows}, {}, sizes)
        with pytest.raises(KnowledgeError, match=f"{kind}.*missing"):
            spec.replies.check("a", {}, {}, sizes)
        sampled = {"asked": np.arange(2, dtype=np.uint8)}
        spec.instructions.check("server", sampled, {}, sizes)
        agreed = {"rows": np.arange(2, dtype=np.uint8), **sampled}
        with pytest.raises(KnowledgeError, match=f"{kind}.*missing, required by rows"):
            spec.instructions.check("server", agreed, {}, sizes)
        spec.instructions.check("server", {**agreed, kind: rows}, {}, sizes)
    numbers = rows - 5
    sizes = Sizes({"Q": 2, "C": 3}, unused=settings.unused_in(TASK))
    spec.replies.check("a", {"logits": numbers}, {}, sizes)


@pytest.mark.parametrize("method", ["fedmd", "ds-fl"])
def test_attack_changes_numbers_as_numbers(table, tmp_path, method):
    attack = {"attack.kind": "sign-flip", "attack.attackers": 1}
    server = federation(method, table, tmp_path, **attack)
    replies, poisoned = learn(server, 1), []
    for name, scores in server.strategy.scores.items():
        sent = replies[name]["logits"]
        poisoned += [name] if np.array_equal(scores, -sent) else []
        assert np.array_equal(scores, sent) is (name not in poisoned)
    assert len(poisoned) == 1


@pytest.mark.parametrize("kind", ["paf", "lie", "ofom"])
def test_adversary_of_the_paper_adds_to_the_mean_output(table, tmp_path, kind):
    plain = {"clients": 6, "defense.clip-factor": 0, "engine.outlier-factor": 0}
    attack = {"attack.kind": kind, "attack.attackers": 1}
    server = federation("ds-fl", table, tmp_path, **attack, **plain)
    replies = learn(server, 1)
    changed = [name for name, scores in server.strategy.scores.items()
               if not np.array_equal(scores, replies[name]["logits"])]  # fmt: skip
    assert len(changed) == 1
    scores = server.strategy.scores[changed[0]]
    honest = np.stack([replies[name]["logits"] for name in sorted(replies) if name not in changed])
    added = scores - honest.mean(0, dtype=float)
    if kind == "lie":  # s = 5 // 2 + 1 - 1 = 2 supporters, so z = F^-1((5 - 2) / 5)
        shift = NormalDist().inv_cdf(0.6) * honest.std(0, dtype=float)
        np.testing.assert_allclose(added, shift, rtol=1e-3, atol=1e-6)
    else:
        length = np.linalg.norm(honest.mean(0))
        assert np.linalg.norm(added) == pytest.approx(10 * length, rel=1e-3)
    assert (scores < 0).any(), "outputs are no probabilities"


@pytest.mark.parametrize("method", ["fedmd", "ds-fl"])
def test_robust_consensus_is_the_median_of_the_outputs(table, tmp_path, method):
    robust = {"defense.average": "median", "defense.clip-factor": 0}
    server = federation(method, table, tmp_path, **robust)
    replies = learn(server, 1)
    median = np.median([reply["logits"] for reply in replies.values()], axis=0)
    np.testing.assert_allclose(server.strategy.consensus, median, rtol=1e-5, atol=1e-7)


def test_nonfinite_outputs_raise(table, tmp_path):
    server = federation("ds-fl", table, tmp_path)
    replies = server.train(server.instruct(1))

    def spoil(tensors):
        tensors["logits"][0] = np.nan

    replies[0] = (replies[0][0], altered(replies[0][1], spoil))
    server.aggregate(1, replies)
    assert len(server.strategy.scores) == 2


# --- privacy --------------------------------------------------------------------------------------


def private_step(models_, loss, norm):
    """Take a DP-SGD step without noise on a batch."""
    parameters = [p for model in models_ for p in model.parameters()]
    settings = TrainingSettings(optimizer="sgd", lr=0.5, momentum=0.0)
    plain = optimization_for(parameters, settings, CPU)
    with sgd.dp_sgd(plain, models_, 0.0, norm, 10) as private:
        private.step(loss())
    return [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("norm", [0.05, 3.0])
@pytest.mark.parametrize("mutual", [False, True])
def test_private_step_clips_the_squared_error_of_each_sample(columns, norm, mutual):
    """Algorithm 1 of Abadi et al. without noise, by sample; two models are clipped jointly."""
    pair = [build(name, (4,), columns, kind="table", seed=k).train()
            for k, name in enumerate(["mlp", "mlp2"])]  # fmt: skip
    pair = pair if mutual else pair[:1]
    x, y = (torch.tensor(normal(k, 8, n), dtype=torch.float32)
            for k, n in enumerate((4, columns)))  # fmt: skip

    def loss_of(x, y):
        outputs = [model(x) for model in pair]
        if not mutual:
            return TASK.loss()(outputs[0], y)
        return mutual_loss(*outputs, y, 0.3, *MUTUAL) + mutual_loss(*outputs[::-1], y, 0.8, *MUTUAL)

    parameters = [p for model in pair for p in model.parameters()]
    total = [torch.zeros_like(p) for p in parameters]
    for n in range(8):
        outputs = [model(x[n : n + 1])[0] for model in pair]
        loss = ((outputs[0] - y[n]) ** 2).sum() / columns
        if mutual:
            a, b = outputs
            loss = 0.3 * loss + 0.7 * ((a - b.detach()) ** 2).sum() / columns
            loss = loss + 0.8 * ((b - y[n]) ** 2).sum() / columns
            loss = loss + 0.2 * ((b - a.detach()) ** 2).sum() / columns
        slopes = torch.autograd.grad(loss, parameters)
        length = torch.sqrt(sum(slope.square().sum() for slope in slopes))
        for whole, slope in zip(total, slopes, strict=True):
            whole += slope / max(1.0, float(length) / norm)
    expected = [p.detach() - 0.5 * t / 10 for p, t in zip(parameters, total, strict=True)]
    for found, wanted in zip(
        private_step(pair, lambda: loss_of(x, y), norm), expected, strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_single_output_does_not_hide_gradients_of_other_samples():
    torch.manual_seed(0)
    for name, mix in (("gradient alone", MIXES["gradient alone"]), ("", lambda own, h: h)):
        sgd._TESTED.clear()
        model = models.HetModel(Own(mix), nn.Linear(12, 1), 12)
        if name:
            with pytest.raises(ModelError, match="gradient"):
                sgd.check_supports_dp(model, "image", (1, 8, 8))
        else:
            sgd.check_supports_dp(model, "image", (1, 8, 8))
    sgd._TESTED.clear()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in ("fedavg", "ds-fl") else [pytest.mark.slow])
        for name, each in sorted(all_methods()[0].items())
        if each.spec.sums.lanes and "regression" in each.spec.tasks and name != "fedsa"
    ],
)
def test_masked_sums_give_the_same_instructions_as_plain_replies(
    table, tmp_path, monkeypatch, method
):
    monkeypatch.setattr(simulation, "peers_of", weighed_by_samples)
    field = "logits" if method in ("ds-fl", "fedmd") else "weights"
    changes = {"heterofl.levels": ["a", "b"], "heterofl.weighting": "samples"}
    changes = {**(changes if method == "heterofl" else {}), "clients": 6, "data.partition": "iid"}
    told = []
    for secure in (False, True):
        masked = {"privacy.secure-aggregation": True} if secure else {}
        (directory := tmp_path / f"{secure}").mkdir()
        server = federation(method, table, directory, **changes, **masked)
        _, replies = server.play(1)
        assert all(
            any(name.startswith("masked/" if secure else field) for name in reply_of(sent).tensors)
            for _, sent in replies
        )
        told.append({proxy.name: instruction_of((proxy, ins)) for proxy, ins in server.instruct(2)})
    assert told[0].keys() == told[1].keys()
    for name, plain in told[0].items():
        summed = told[1][name].tensors
        assert plain.tensors.keys() == summed.keys()
        assert any(key.startswith(field) for key in summed)
        for key, value in plain.tensors.items():
            np.testing.assert_allclose(summed[key], value, rtol=2e-6, atol=4e-6, err_msg=key)


@pytest.mark.parametrize("method", ["fedavg", "fml", "fedkd", "fedmd"])
def test_private_run_stays_within_its_budget(tmp_path, method):
    chosen = {"privacy.epsilon": 8.0, "rounds": 1}
    chosen |= {"fedkd.intensity": "sample"} if method == "fedkd" else {}
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.csv", slice(0, 300))
    write(tmp_path / "data" / "test.csv", slice(300, None))
    config = on_table(method, tmp_path / "data", **{**fast(method), **chosen})
    summary = run(config, tmp_path / "run")
    assert summary["metric"] == "rmse"
    assert {*summary["metrics"]["rmse"]} == {"common"}, "scores on private rows are not sent"
    assert len(summary["privacy"]) == 3
    assert all(0 < each["epsilon"] <= 8.0 for each in summary["privacy"].values())


def test_private_site_declares_the_task_by_its_schema(table, tmp_path):
    described = DataSpec(target="stay", task="regression")
    schema = infer_schema(read_table(table, described), described)
    site = tmp_path / "site"
    site.mkdir()
    write(site / "train.csv", slice(0, 60))
    (site / "schema.toml").write_text(schema.to_toml())
    declared = Declaration.from_files(f"table:{site}", 10**9)
    assert declared.names == ("stay",)
    data = declared.read_data(f"table:{site}", "a")
    column = schema.targets[0]
    assert data.format.task == Regression((column.mean,), (column.deviation,))
    of_task = {"method": "fedavg", "data.dataset": "table:a.csv", "data.task": "regression"}
    declared.check(resolve(of_task).run)
    declared.check(resolve({**of_task, "models.num-classes": 1}).run)
    with pytest.raises(SettingsError, match=r"'data\.task'.*'regression'"):
        declared.check(resolve({"method": "fedavg"}).run)
    with pytest.raises(SettingsError, match=r"'models\.num-classes'.*1"):
        declared.check(resolve({**of_task, "models.num-classes": 2}).run)
    (site / "site.toml").write_text("num-classes = 1\n")
    assert Declaration.from_files(f"table:{site}", 10**9).names == ("stay",)


# --- settings and data ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("ds-fl", "aggregation", "sa"),
        ("ds-fl", "loss", "mse"),
        ("heterofl", "masked", False),
        ("heterofl", "scaler", False),
        ("fedkd", "intensity_learned", False),
        ("fedmd", "loss", "mae"),
    ],
)
def test_settings_suit_the_task_by_default(table, method, field, value):
    config = on_table(method, table)
    assert getattr(config.method_settings, field) == value
    assert resolve(config.flat()).method_settings == config.method_settings
    if (method, field) != ("fedmd", "loss"):
        assert getattr(resolve({"method": method}).method_settings, field) != value


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("ds-fl.aggregation", "era", "sa"),
        ("ds-fl.loss", "cross-entropy", "mse or mae"),
        ("heterofl.masked", True, "false"),
        ("heterofl.scaler", True, "false"),
        ("fedkd.intensity-learned", True, "false"),
        ("fedmd.loss", "cross-entropy", "mae or mse"),
    ],
)
def test_settings_for_classes_raise(table, setting, value, expected):
    with pytest.raises(SettingsError) as error:
        on_table(setting.partition(".")[0], table, **{setting: value})
    text = str(error.value)
    assert f"'{setting}': the task is regression, expected {expected}, got " in text


def test_method_is_shown_with_its_tasks():
    shown = {name: tasks(find_method(name)) for name in ("fedavg", "fml", "cofed", "ds-fl")}
    assert shown["fedavg"] == "Tasks (`data.task`): all."
    able = "Tasks (`data.task`): classification, regression, multi-label; no other task, because "
    assert shown["fml"] == f"{able}its distillation needs one vector of outputs for each sample."
    assert shown["cofed"] == (
        "Tasks (`data.task`): classification; no other task, because its clients vote on classes."
    )
    required = "require ds-fl.loss=mse or mae, ds-fl.aggregation=sa, ds-fl.temperature=0.1"
    assert shown["ds-fl"].startswith(able)
    assert shown["ds-fl"].endswith(f"; tasks without classes {required}.")


def test_public_targets_have_the_scale_of_the_clients(table, tmp_path):
    other = tmp_path / "other.csv"
    lines = table.read_text().splitlines()
    moved = [lines[0]]
    for line in lines[1:200]:
        cells = line.split(",")
        moved.append(",".join([*cells[:-1], str(float(cells[-1]) * 10)]))
    other.write_text("\n".join(moved) + "\n")
    data = RunData.for_run(
        on_table("fedmd", table, **{"data.public-dataset": f"table:{other}"}).run
    )
    client = data.client(0)
    order = client.format.digest
    shape = tuple(data.dataset.format.shape)
    assert len(data.public_set(client_info("table", shape, 1, order), labeled=False)) == 199
    with pytest.raises(DataError, match="targets"):
        data.public_set(client_info("table", shape, 1, order), labeled=True)
    own = RunData.for_run(on_table("fedmd", table).run)
    assert len(own.public_set(client_info("table", shape, 1, order), labeled=True)) > 0


@pytest.mark.parametrize("method", ["feddf", "ds-fl"])
def test_public_samples_may_be_generated(table, tmp_path, method):
    generated = {"data.public-dataset": "generated", "data.public-samples": 40, "rounds": 1}
    summary = run(on_table(method, table, **{**fast(method), **generated}), tmp_path / "run")
    assert summary["metric"] == "rmse"


@pytest.mark.parametrize("method", ["fedkd", "ds-fl", "feddf", "fedgems"])
def test_resumed_run_equals_uninterrupted_run(table, tmp_path, method):
    config = on_table(method, table, **{**fast(method), "rounds": 3})
    cut_and_resumed(config, tmp_path)


def test_several_targets_are_learned_together(tmp_path):
    path = write(tmp_path / "a.csv")
    for method in ("fml", "fedkd", "fedmrl", "ds-fl", "fedgems"):
        chosen = {"data.target": f"stay, {NAMES[2]}", "rounds": 1}
        summary = run(on_table(method, path, **{**fast(method), **chosen}), tmp_path / method)
        assert np.isfinite(summary["metrics"]["rmse"]["personal"]["private"]["mean"])
