"""FedGEMS against a transcription of its paper, sample by sample, and its messages."""

import copy
import math

import numpy as np
import pytest
import rounds
import torch
from federation import Server, arrived, client_info, client_of, records, run, small
from rounds import altered, instruction_of, reply_of, same
from torch import nn

from fedhet.base.errors import DataError, KnowledgeError, SettingsError, StateError
from fedhet.base.seeding import derive
from fedhet.client_runtime.node import read_node
from fedhet.data.store import RunData
from fedhet.wire.knowledge import Knowledge

FEW = {"fedgems.server-model": "mlp2", "models": "mlp", "max_samples": 300, "batch_size": 16}


def fedgems(**changes):
    return small("fedgems", **{**FEW, **changes})


# --- the paper, written out -----------------------------------------------------------------


def softmax(logits):
    """Return the probabilities of one sample's logits, in float64."""
    logits = np.asarray(logits, np.float64)
    powers = [math.exp(value - max(logits)) for value in logits]
    return [power / sum(powers) for power in powers]


def ensemble_by_the_paper(logits, label):
    """Return the sum of alpha_j l_j (Eqs.

    3 to 5) for one sample, or None without reliable clients.
    """
    inverse = {}
    for j, own in enumerate(logits):
        if max(range(len(own)), key=lambda c: own[c]) == label:
            inverse[j] = 1 / -sum(p * math.log(p) for p in softmax(own) if p > 0)
    if not inverse:
        return None
    total = sum(math.exp(h - max(inverse.values())) for h in inverse.values())
    target = [0.0] * len(logits[0])
    for j, h in inverse.items():
        alpha = math.exp(h - max(inverse.values())) / total
        target = [t + alpha * float(value) for t, value in zip(target, logits[j], strict=True)]
    return target


def mean_by_the_paper(logits):
    """Return the mean over the clients for one sample, which FedGEM learns from."""
    return [sum(float(own[c]) for own in logits) / len(logits) for c in range(len(logits[0]))]


def loss_by_the_paper(own, label, teacher, epsilon):
    """Return Eq. 1 for one sample or, with a teacher's logits, Eq. 2, 5 and 6."""
    log_q = own - torch.logsumexp(own, 0)
    if teacher is None:
        return -log_q[label]
    p = torch.tensor(softmax(teacher))
    divergence = (p * (p.clamp_min(1e-300).log() - log_q)).sum()
    return epsilon * -log_q[label] + (1 - epsilon) * divergence


def minibatches(samples, size, order):
    """Return an epoch's minibatches in the generator's order, without batches of one sample."""
    rows = torch.randperm(samples, generator=order).tolist()
    cut = [rows[start : start + size] for start in range(0, samples, size)]
    return cut if len(cut[-1]) > 1 else [*cut[:-2], cut[-2] + cut[-1]]


def order_of(*names):
    """Return the random generator for one use."""
    return torch.Generator().manual_seed(derive(*names))


class PaperServer:
    """ServerExecute of Algorithm 1, with the self-evaluation of Section 3.3.1 once per round.

    It has its own weights, memory, and optimizer, and shares no code with fedhet.
    """

    def __init__(self, model, x, y, run, own):
        self.model, self.x, self.y, self.run, self.own = copy.deepcopy(model), x, y, run, own
        self.l_global = {}
        self.optimizer = self.new_optimizer()
        self.lowering = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimizer, factor=run.training.decay, patience=run.training.patience
        )
        self.l_s = self.predict()

    def new_optimizer(self):
        training = self.run.training
        if training.optimizer == "adam":
            return torch.optim.Adam(
                self.model.parameters(), lr=training.lr, weight_decay=training.weight_decay
            )
        return torch.optim.SGD(
            self.model.parameters(), lr=training.lr, momentum=training.momentum,
            weight_decay=training.weight_decay,
        )  # fmt: skip

    def predict(self):
        self.model.eval()
        with torch.no_grad():
            return self.model(self.x).numpy().astype(np.float64)

    def is_right(self, i, logits):
        return int(np.argmax(logits)) == int(self.y[i])

    def kind(self, i, right):
        """Return the part (S1, S2, or S3) of a sample: lines 5, 8, and 10, and Table 5."""
        own = self.own
        if not own["selective"]:
            return 3
        if right and own["self-training"]:
            return 1
        if i in self.l_global and own["self-distillation"]:
            return 2
        return 3

    def kinds(self):
        """Return the division into S1, S2, and S3 after the self-evaluation."""
        return [self.kind(i, self.is_right(i, self.l_s[i])) for i in range(len(self.y))]

    def asked(self):
        """Return the requested samples (line 11)."""
        asks = self.own["ensemble"] != "none" or not self.own["selective"]
        return [i for i, kind in enumerate(self.kinds()) if kind == 3 and asks]

    def lesson(self, i, kind, replies):
        """Return the teacher of a sample; `replies` contains the logits of clients by sample."""
        if kind == 1:
            return None
        if kind == 2:
            return self.l_global[i]
        if i not in replies:
            return None
        if self.own["ensemble"] == "mean" or not self.own["selective"]:
            return mean_by_the_paper(replies[i])
        return ensemble_by_the_paper(replies[i], int(self.y[i]))

    def learn(self, number, replies):
        """Run lines 4 to 15, and return the sizes of S1, S2, and S3 in the last epoch."""
        if not self.run.training.keep_optimizer:
            self.optimizer = self.new_optimizer()
        kinds = self.kinds()
        lessons = [self.lesson(i, kind, replies) for i, kind in enumerate(kinds)]
        if self.own["split"] == "round":
            for i, logits in enumerate(self.l_s):
                if self.is_right(i, logits):
                    self.l_global[i] = logits
        order = order_of(self.run.seed, "server", number)
        for _ in range(self.own["server-epochs"]):
            counts = [0, 0, 0]
            for rows in minibatches(len(self.y), self.run.training.batch_size, order):
                self.model.train()
                predicted, losses = self.model(self.x[rows]), []
                for own, i in zip(predicted, rows, strict=True):
                    kind, teacher = kinds[i], lessons[i]
                    if self.own["split"] == "batch":
                        logits = own.detach().numpy().astype(np.float64)
                        right = self.is_right(i, logits)
                        kind = self.kind(i, right)
                        teacher = self.lesson(i, kind, replies)
                        if right:
                            self.l_global[i] = logits
                    counts[kind - 1] += 1
                    epsilon = self.own["epsilon"]
                    losses.append(loss_by_the_paper(own, int(self.y[i]), teacher, epsilon))
                self.optimizer.zero_grad()
                (sum(losses) / len(losses)).backward()
                self.optimizer.step()
        self.l_s = self.predict()
        if self.run.training.schedule == "plateau":
            wrong = [not self.is_right(i, logits) for i, logits in enumerate(self.l_s)]
            self.lowering.step(sum(wrong) / len(wrong))
        return counts


def bits(instructions, name, count):
    """Return the samples whose bit is set in a field of an instruction, or all if it is absent."""
    found = instruction_of(instructions).tensors.get(name)
    return list(range(count)) if found is None else list(np.flatnonzero(np.unpackbits(found)))


# --- the server -----------------------------------------------------------------------------

SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
BN = {"fedgems.server-model": "cnn2"}
"""Batch norms: what is right in training is not what is right in evaluation."""
KEPT = {"keep_optimizer": True, "schedule": "plateau", "patience": 0, "decay": 0.5}
UNSTEADY = {"lr": 0.2, "fedgems.server-epochs": 1}
"""The error rises in the second round, after which the rate falls."""


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, {1, 2, 3}),
        ({"fedgems.epsilon": 0.2, **KEPT, **BN, **UNSTEADY}, {1, 2, 3}),
        ({"optimizer": "adam", "lr": 0.003, "keep_optimizer": True}, {1, 2, 3}),
        ({"fedgems.selective": False}, {3}),
        ({"fedgems.self-training": False, **BN}, {2, 3}),
        ({"fedgems.self-distillation": False, **BN}, {1, 3}),
        ({"fedgems.ensemble": "mean"}, {1, 2, 3}),
        ({"fedgems.ensemble": "none"}, {1, 2, 3}),
        ({"fedgems.split": "batch", **BN}, {1, 2, 3}),
        ({"fedgems.split": "batch", "fedgems.self-training": False}, {2, 3}),
    ],
    ids=lambda each: ",".join(map(str, each.values())) if isinstance(each, dict) else "",
)
@pytest.mark.usefixtures("steady_adam")
def test_server_equals_the_paper(tmp_path, changes, parts):
    """Compare over several rounds with independent weights and memory."""
    few = {"rounds": 3, "clients": 3, "max_samples": 200, "batch_size": 10}
    chosen = {**few, "weight_decay": 1e-3, "fedgems.server-epochs": 2, **SGD, **changes}
    config = fedgems(**chosen)
    server = Server(config, tmp_path / "run")
    strategy, own = server.strategy, config.method_settings.flat()
    public = RunData.for_run(config.run).public_set(client_info("image", (1, 8, 8)), labeled=True)
    paper = PaperServer(strategy.learner.model, public.x, public.y, strategy.run, own)
    seen = set()
    for number in (1, 2, 3):
        expected, instructed = paper.asked(), server.instruct(number)
        for each in instructed:
            assert bits(each, "wanted", 40) == expected
            if number > 1:
                logits = instruction_of(each).tensors["logits"]
                np.testing.assert_allclose(logits, paper.l_s, rtol=2e-3, atol=2e-3)
        replies = server.train(instructed)
        given = [reply_of(result).tensors["logits"] for _, result in replies]
        results = {i: [logits[k] for logits in given] for k, i in enumerate(expected)}
        server.aggregate(number, replies)
        counts = paper.learn(number, results)
        figures = server.flower.state.record.method
        assert [figures["s1"], figures["s2"], figures["s3"]] == counts
        assert figures["asked"] == len(expected)
        seen |= {kind for kind, count in zip((1, 2, 3), counts, strict=True) if count}
        for name, tensor in paper.model.state_dict().items():
            ours = strategy.learner.model.state_dict()[name]
            np.testing.assert_allclose(ours, tensor, rtol=2e-3, atol=2e-4)
        pool = strategy.pool
        assert pool.known.nonzero().flatten().tolist() == sorted(paper.l_global)
        for i, kept in paper.l_global.items():
            np.testing.assert_allclose(pool.logits[i], kept, rtol=2e-3, atol=2e-3)
    assert seen == parts
    if chosen.get("schedule") == "plateau":
        factor = paper.optimizer.param_groups[0]["lr"] / config.run.training.lr
        assert strategy.learner.plateau.factor == pytest.approx(factor)
        assert factor < 1


def test_fedgem_is_fedgems_without_its_three_components(tmp_path):
    """Table 5 removes one strategy at a time.

    Without all three, FedGEM uses all clients and samples.
    """
    without = {"self-training": False, "self-distillation": False, "ensemble": "mean"}
    named = {f"fedgems.{name}": value for name, value in without.items()}
    states = []
    for changes in ({"fedgems.selective": False}, named):
        server = Server(fedgems(rounds=2, **changes), tmp_path / str(len(states)))
        for number in (1, 2):
            server.play(number)
        states.append(server.strategy.learner.model.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [
        ("split", "batch", "'round'"),
        ("self-training", False, "True"),
        ("self-distillation", False, "True"),
        ("ensemble", "mean", "'weighted'"),
    ],
)
def test_fedgem_has_no_component_settings(name, value, default):
    with pytest.raises(SettingsError, match=rf"'fedgems\.{name}'.*{default}"):
        fedgems(**{"fedgems.selective": False, f"fedgems.{name}": value})


def test_clients_send_logits_for_requested_samples(tmp_path):
    server = Server(fedgems(rounds=2), tmp_path / "run")
    for number in (1, 2):
        instructions, replies = server.play(number)
        rows = bits(instructions[0], "wanted", 60)
        assert 0 < len(rows) < 60
        for proxy, result in replies:
            client = client_of(proxy)
            model = client.models["private"].eval()
            with torch.no_grad():
                own = model(
                    RunData.for_run(client.run)
                    .public_set(client_info("image", (1, 8, 8)), labeled=True)
                    .x[rows]
                )
            found = reply_of(result).tensors["logits"]
            np.testing.assert_allclose(found, own, rtol=1e-4, atol=1e-5)
        assert server.flower.state.record.method["upload_ratio"] == len(rows) / 60


def test_selection_reduces_the_upload(tmp_path):
    ratios, ups = [], []
    server = Server(fedgems(rounds=5, lr=0.01), tmp_path / "gems")
    for number in range(1, 6):
        server.play(number)
        ratios.append(server.flower.state.record.method["upload_ratio"])
        ups.append(server.flower.state.record.bytes_up)
    assert ratios[0] > 0.7
    assert ratios[-1] < 0.2 * ratios[0]
    whole = 4 * 60 * 10 * 4  # clients, public samples, classes, bytes
    assert all(whole * r <= up < 4 * 500 + whole * r for up, r in zip(ups, ratios, strict=True))
    gem = Server(fedgems(rounds=2, **{"fedgems.selective": False}), tmp_path / "gem")
    for number in (1, 2):
        gem.play(number)
        assert gem.flower.state.record.method["upload_ratio"] == 1
        assert whole < gem.flower.state.record.bytes_up < whole + 4 * 500


# --- a server whose training diverges -------------------------------------------------------


class Cube(nn.Module):
    """A model that grows without bound, with the gradients of a polynomial."""

    def forward(self, x):
        return x**3


def cubic(shape, classes):
    """Return a network that follows soft targets, and diverges on contradicting certain targets."""
    inputs = nn.Linear(math.prod(shape), 16)
    return nn.Sequential(nn.Flatten(), inputs, Cube()), nn.Linear(16, classes)


def unstable(**changes):
    """The server (SGD with rate 0.3; clients use Adam) learns only from the clients' logits."""
    recipe = {
        "clients": 5,
        "optimizer": ["sgd", "adam", "adam", "adam", "adam"],
        "lr": [0.3, 0.001, 0.001, 0.001, 0.001],
        "momentum": 0.0,
        "fedgems.server-model": f"{__name__}:cubic",
        "fedgems.selective": False,
        "fedgems.epsilon": 0.0,
        "fedgems.server-epochs": 3,
    }
    return fedgems(**{**recipe, **changes})


def lie(replies):
    """Let client-1 predict a random class with certainty for each sample, within the contract."""

    def sure(tensors):
        drawn = np.random.default_rng(0).integers(0, 10, len(tensors["logits"]))
        tensors["logits"] = (1e11 * np.eye(10)[drawn]).astype(np.float32)

    return [
        (proxy, altered(result, sure) if proxy.name == "client-1" else result)
        for proxy, result in replies
    ]


def all_of(server):
    """Return the server's state without the record of which client holds which logits."""
    state = {name: np.array(value) for name, value in server.strategy.state_dict().items()}
    return {name: value for name, value in state.items() if not name.startswith("held/")}


def notices_of(server):
    said = []
    server.flower.state.notice = said.append
    return said


def test_diverging_reply_costs_one_round(tmp_path):
    """The server restores its weights, logs this, and learns again from the next round."""
    config = unstable(rounds=4, outlier_factor=0.0, clip_factor=0.0, keep_optimizer=True)
    server = Server(config, tmp_path / "run")
    notices, diverged = notices_of(server), []
    for number in (1, 2, 3, 4):
        before = all_of(server)
        replies = server.train(server.instruct(number))
        server.aggregate(number, lie(replies) if number == 2 else replies)
        diverged.append(server.flower.state.record.method.get("diverged", 0))
        after = all_of(server)
        assert same(before, after) == (number == 2)
        assert all(np.isfinite(value).all() for value in after.values() if value.dtype.kind == "f")
    server.close(4)
    assert diverged == [0, 1, 0, 0], "without the lie it does not"
    assert server.flower.state.record.accuracy["common"]["server"].mean > 0
    [said] = notices
    assert "the training of the server's model diverged in round 2 (the loss is" in said
    assert "client-0, client-1, client-2, client-3, client-4 in this round are discarded" in said


def test_outlier_check_drops_the_diverging_reply(tmp_path):
    server = Server(unstable(rounds=2), tmp_path / "run")
    server.aggregate(1, lie(server.train(server.instruct(1))))
    assert server.flower.state.record.failed.keys() == {"client-1"}
    assert "diverged" not in server.flower.state.record.method


@pytest.mark.parametrize(("limit", "rounds", "last"), [(3, 9, 3), (1, 9, 1), (0, 2, 2)])
def test_server_that_diverges_every_round_ends_the_run(tmp_path, limit, rounds, last):
    """The run ends after `engine.max-divergences` rounds, or after the last if it never learned."""
    rates = [1000000.0, 0.001, 0.001, 0.001, 0.001]
    server = Server(unstable(rounds=rounds, lr=rates, max_divergences=limit), tmp_path / "run")
    before = all_of(server)
    for number in range(1, last):
        server.play(number)
    with pytest.raises(StateError, match=rf"{last} .*round {last}"):
        server.play(last)
    after = all_of(server)
    assert same(before, after)
    assert all(np.isfinite(value).all() for value in after.values()), "as a checkpoint must be"


def test_unsendable_logits_count_as_divergence(tmp_path):
    """One step leaves the loss unchanged, and makes logits that clients do not accept."""
    config = unstable(
        lr=[1000000.0, 0.001, 0.001, 0.001, 0.001], batch_size=64, **{"fedgems.server-epochs": 1}
    )
    server = Server(config, tmp_path / "run")
    before, notices = all_of(server), notices_of(server)
    server.play(1)
    assert server.flower.state.record.method["diverged"] == 1
    assert same(before, all_of(server))
    loss = float(notices[-1].partition("the loss is ")[2].partition(")")[0])
    assert math.isfinite(loss)


def test_only_consecutive_divergence_ends_the_run(tmp_path):
    """Every second round diverges, and the run continues, also after a restored checkpoint."""
    server = Server(
        unstable(rounds=9, max_divergences=2, outlier_factor=0.0, clip_factor=0.0), tmp_path / "run"
    )
    for number in range(1, 6):
        replies = server.train(server.instruct(number))
        server.aggregate(number, lie(replies) if number in (2, 4) else replies)
        assert server.flower.state.rollback.divergences == (number in (2, 4))
        text = server.flower.state.to_json()
    state = server.flower.state
    state.rollback.divergences, state.rollback.learned_once = 7, False
    state.load_json(text)
    assert (state.rollback.divergences, state.rollback.learned_once) == (0, True)


# --- what is sent of the server's logits ----------------------------------------------------


def test_untrained_server_sends_no_logits(tmp_path):
    server = Server(fedgems(), tmp_path / "run")
    instructions, _ = server.play(1)
    assert all("logits" not in instruction_of(each).tensors for each in instructions)
    assert all("logits" in instruction_of(each).tensors for each in server.instruct(2))


def frozen_but_for(server, rows_of_round):
    """Let the server's logits change only in a few rows per round."""
    strategy = server.strategy
    predict = strategy.learner.predict

    def changed(x):
        number = server.flower.state.record.round
        if number == 1:
            return predict(x)
        logits = strategy.logits.copy()
        logits[rows_of_round[number]] = predict(x)[rows_of_round[number]]
        return logits

    strategy.learner.predict = changed


def test_only_changed_logits_are_sent_and_absent_clients_catch_up(tmp_path):
    config = fedgems(rounds=9, fraction=0.5)
    server = Server(config, tmp_path / "run")
    strategy = server.strategy
    rng = np.random.default_rng(0)
    frozen_but_for(server, {n: rng.choice(60, 5, replace=False) for n in range(2, 10)})
    had, seen = {}, set()
    for number in range(1, 8):
        instructions = server.instruct(number)
        logits = strategy.logits.copy()
        for proxy, ins in instructions:
            told = instruction_of((proxy, ins)).tensors
            if number == 1:
                continue
            part = "changed" in told
            assert part == (had.get(proxy.name, 0) > 1), "a part is of what was sent before"
            away = number - had.get(proxy.name, 0)
            seen.add((part, min(away, 3)))
            if part:
                assert len(told["logits"]) <= 5 * away
        replies = server.train(instructions)
        for proxy, _ in replies:
            had[proxy.name] = number
            if number > 1:
                np.testing.assert_array_equal(client_of(proxy).state.tensors["logits"], logits)
        server.aggregate(number, replies)
    assert {(True, 1), (True, 2)} <= seen, "some were away for a round"


def test_silent_client_receives_all_logits_again(tmp_path):
    server = Server(fedgems(rounds=5), tmp_path / "run")
    frozen_but_for(server, {n: np.arange(n) for n in range(2, 6)})
    server.play(1)
    server.play(2)
    replies = server.train(server.instruct(3))
    server.aggregate(3, replies[1:])
    whole = ["changed" not in instruction_of(each).tensors for each in server.instruct(4)]
    names = [proxy.name for proxy, _ in replies]
    assert whole == [name == names[0] for name in names]


def test_partial_update_larger_than_full_is_sent_in_full(tmp_path):
    server = Server(fedgems(), tmp_path / "run")
    server.play(1)
    server.play(2)
    assert all("changed" not in instruction_of(each).tensors for each in server.instruct(3))


# --- a client -------------------------------------------------------------------------------


def opened(tmp_path, **changes):
    return rounds.opened(fedgems(**changes), tmp_path, partition=0)


def client_by_the_paper(client, model, number, teacher, epsilon):
    """Lines 21 to 27: Eq. 6 on public samples with a teacher, and then private data."""
    model, settings, name = copy.deepcopy(model).train(), client.training, client.info.name
    adam = torch.optim.Adam(model.parameters(), lr=settings.lr)

    def epochs(x, y, teachers, use, count, weight):
        order = order_of(client.run.seed, name, number, use)
        for _ in range(count):
            for rows in minibatches(len(y), settings.batch_size, order):
                losses = [
                    loss_by_the_paper(
                        own, int(y[i]), None if teachers is None else teachers[i], weight
                    )
                    for own, i in zip(model(x[rows]), rows, strict=True)
                ]
                adam.zero_grad()
                (sum(losses) / len(losses)).backward()
                adam.step()

    public = RunData.for_run(client.run).public_set(client_info("image", (1, 8, 8)), labeled=True)
    if teacher is not None:
        epochs(public.x, public.y, teacher, "public", client.settings.public_epochs, epsilon)
    own = RunData.for_run(client.run).client(0).train
    epochs(own.x, own.y, None, "batches", settings.local_epochs, epsilon)
    return model


@pytest.mark.parametrize("taught", [True, False])
@pytest.mark.parametrize("epsilon", [0.75, 0.1])
@pytest.mark.usefixtures("steady_adam")
def test_client_equals_algorithm_1(tmp_path, taught, epsilon):
    client = opened(
        tmp_path, local_epochs=2, **{"fedgems.epsilon": epsilon, "fedgems.public-epochs": 2}
    )
    public = RunData.for_run(client.run).public_set(client_info("image", (1, 8, 8)), labeled=True)
    count, start = len(public), copy.deepcopy(client.models["private"])
    teacher = 3 * torch.randn(count, 10, generator=torch.Generator().manual_seed(1))
    wanted = np.arange(count) % 3 == 0
    told = {"wanted": np.packbits(wanted)} | ({"logits": teacher.numpy()} if taught else {})
    reply = client.train(3, Knowledge(told)).tensors["logits"]
    model = client_by_the_paper(client, start, 3, teacher if taught else None, epsilon)
    for name, tensor in model.state_dict().items():
        ours = client.models["private"].state_dict()[name]
        np.testing.assert_allclose(ours, tensor, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        expected = model.eval()(public.x[torch.tensor(wanted)])
    np.testing.assert_allclose(reply, expected, rtol=1e-3, atol=1e-4)


def test_empty_request_gets_an_empty_reply(tmp_path):
    client = opened(tmp_path)
    told = Knowledge({"wanted": np.packbits(np.zeros(len(client.public), bool))})
    assert client.train(1, told).tensors["logits"].shape == (0, 10)


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ({"logits": (60, 10), "changed": 60}, "no previous logits|got 60"),
        ({"logits": (7, 10)}, "expected 60 rows, got 7"),
        ({"logits": (7, 10), "changed": 8}, "expected 8 rows, got 7"),
    ],
)
def test_invalid_logits_raise(tmp_path, told, fault):
    client = opened(tmp_path)
    bits = np.packbits(np.arange(60) < min(told.get("changed", 0), 59))
    tensors = {"logits": np.zeros(told["logits"], np.float32)}
    tensors |= {"changed": bits} if "changed" in told else {}
    with pytest.raises(KnowledgeError, match=fault):
        client.train(2, Knowledge(tensors))


def test_reply_with_other_rows_is_dropped(tmp_path):
    server = Server(fedgems(), tmp_path / "run")
    replies = server.train(server.instruct(1))
    server.strategy.wanted[:] = True
    server.aggregate(1, replies)
    assert len(server.flower.state.record.failed) == 4
    assert "with Q = 60" in server.flower.state.record.failed["client-0"]


# --- the public set and the server's accuracy -----------------------------------------------


def rows_of(x):
    return {row.tobytes() for row in np.ascontiguousarray(x.numpy())}


def test_public_samples_belong_to_no_client(tmp_path):
    server = Server(fedgems(), tmp_path / "run")
    public = rows_of(server.strategy.x)
    assert len(public) == 60
    for number in range(4):
        data = RunData.for_run(server.strategy.run).client(number)
        assert not public & (rows_of(data.train.x) | rows_of(data.test.x) | rows_of(data.common.x))


@pytest.mark.parametrize("part", ["train", "test"])
def test_site_with_a_public_sample_raises(tmp_path, part):
    """The public fraction is from the run's dataset, of which a site may have a copy."""
    config = fedgems(num_classes=10)
    public = RunData.for_run(config.run).public_set(client_info("image", (1, 8, 8)), labeled=True)
    owned = RunData.for_run(config.run).client(0).train
    for name in ("train", "test"):
        of = public if name == part else owned
        np.savez(tmp_path / f"{name}.npz", x=of.x.numpy()[:20], y=of.y.numpy()[:20])
    node = read_node(
        {"data": f"npz:{tmp_path}", "name": "site"}, config.run, str(tmp_path / "state")
    )
    client = config.method.client(config, node)
    with pytest.raises(DataError, match=r"20 of 20"):
        client.sizes()
    np.savez(tmp_path / f"{part}.npz", x=owned.x.numpy()[20:40], y=owned.y.numpy()[20:40])
    config.method.client(config, node).sizes()


def test_generated_rows_raise(tmp_path):
    table = {"dataset": "breast-cancer", "public_dataset": "generated", "public_samples": 40}
    with pytest.raises(SettingsError, match="labels"):
        Server(fedgems(**table), tmp_path / "run")


def test_server_model_is_evaluated_as_kind_server(tmp_path):
    server = Server(fedgems(rounds=2), tmp_path / "run")
    for number in (1, 2):
        server.play(number)
        server.close(number)
    strategy = server.strategy
    common = RunData.for_run(strategy.run).common_test
    with torch.no_grad():
        right = strategy.learner.model.eval()(common.x).argmax(1) == common.y
    found = server.flower.state.record.accuracy["common"]["server"]
    assert found.per_client == {"server": pytest.approx(right.float().mean().item())}
    summary = server.log.finish()
    assert summary.accuracy["common"]["server"].mean == found.mean
    assert "server" not in summary.accuracy["personal"]
    assert "server" in summary.history[0].accuracy["common"]


def test_server_model_is_evaluated_in_evaluation_rounds(tmp_path):
    run(fedgems(rounds=3, evaluate_every=2), tmp_path / "run")
    judged = [bool(record["accuracy"]) for record in records(tmp_path / "run")]
    assert judged == [False, True, True]


# --- checkpoints ----------------------------------------------------------------------------


def test_restored_server_continues_bit_for_bit(tmp_path):
    config = fedgems(rounds=4, fraction=0.75)
    server = Server(config, tmp_path / "run")
    for number in (1, 2):
        server.play(number)
    saved = {name: np.array(value) for name, value in server.strategy.state_dict().items()}
    assert {"logits", "changed", "pool/logits", "pool/known"} <= saved.keys()
    assert any(name.startswith("model/") for name in saved)
    other = Server(config, tmp_path / "other")
    other.strategy.load_state_dict(saved)
    instructions = server.instruct(3)
    for one, two in zip(instructions, other.instruct(3), strict=True):
        assert same(instruction_of(one).tensors, instruction_of(two).tensors)
    results = server.train(instructions)
    strategy = server.strategy
    outcomes = [arrived(proxy, result, 3) for proxy, result in results]
    replies = list(server.flower._codec.replies(outcomes, strategy.members))
    assert server.strategy.aggregate(3, replies) == other.strategy.aggregate(3, replies)
    assert same(server.strategy.state_dict(), other.strategy.state_dict())


def test_logits_of_a_client_survive_its_process(tmp_path):
    config = fedgems(rounds=3)
    server = Server(config, tmp_path / "run")
    server.play(1)
    instructions, _ = server.play(2)
    proxy = instructions[0][0]
    kept = client_of(proxy).state.tensors["logits"].clone()
    node = client_of(proxy).node
    fresh = config.method.client(config, node)
    fresh.state.restore(server.log.run_name, before=3)
    torch.testing.assert_close(fresh.state.tensors["logits"], kept)
