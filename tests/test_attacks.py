"""Poisoning attacks against a transcription of Appendix A of FedGEMS, client by client."""

import json
import math

import numpy as np
import pytest
import torch
from federation import Server, records, run, small
from flwr.common import parameters_to_ndarrays
from hypothesis import given, settings
from hypothesis import strategies as st
from interruption import Notices

from fedhet.algorithms.rounds import malicious_clients
from fedhet.base.errors import SettingsError
from fedhet.client_runtime.node import open_client
from fedhet.client_runtime.samples import poisoned
from fedhet.config.resolve import check_deployable, resolve
from fedhet.data.dataset import Split
from fedhet.methods.registry import find_method
from fedhet.server import attacks
from fedhet.server.attacks import (
    Attack,
    Benign,
    ByzantineClients,
    far_vector,
    lie,
    ofom,
    paf,
    z_max,
)
from fedhet.server.round import RoundState
from fedhet.wire.contract import Contract, ScalarField, Sizes, TensorField, WeightsField, poisonable
from fedhet.wire.knowledge import Knowledge, decode

LOGITS = Contract((TensorField("logits", "float32", ("Q", "C"), "logits"),))
MODELS = Contract((WeightsField("weights", "weights"), ScalarField("eta", float, "a figure")))
CLASSWISE = Contract(
    (
        TensorField("classes", "int64", ("P",), "classes", ids="C"),
        TensorField("logits", "float32", ("P", "C"), "logits of each"),
        TensorField("counts", "int64", ("P",), "samples of each", counts=True),
    )
)


def attack(kind, contract=LOGITS, **changes):
    run = small("felo", attack=kind, **{"clients": 9, **changes}).run
    state = RoundState(1, print)
    return Attack(run.attack, contract, run.seed, state, lambda client: Sizes({}))


def phi(z):
    return (1 + math.erf(z / math.sqrt(2))) / 2


def logits_of(names, seed=0, shape=(6, 4)):
    rng = np.random.default_rng(seed)
    return {n: Knowledge({"logits": rng.normal(size=shape).astype(np.float32)}) for n in names}


# --- the equations --------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 20))
def test_z_max_of_equations_8_and_9(benign, malicious):
    supporters = math.floor(benign / 2 + 1) - malicious
    share = (benign - supporters) / benign
    z = z_max(benign, malicious)
    assert math.isfinite(z)
    if 0 < share < 1 - 1 / (2 * benign):
        assert phi(z - 1e-6) < share < phi(z + 1e-6)
    else:
        assert phi(z) == pytest.approx(1 - 1 / (2 * benign))


def test_z_max_of_sixteen_clients():
    """With fifteen benign clients and one malicious client, s = 8 - 1 and Phi(z) = 8 / 15."""
    assert z_max(15, 1) == pytest.approx(0.0837, abs=1e-4)
    assert phi(0.0837) == pytest.approx(8 / 15, abs=1e-4)


def draw_benign(seed, n=5, shape=(3, 2)):
    updates = np.random.default_rng(seed).normal(size=(n, *shape))
    return updates, Benign(n, updates.mean(0), updates.std(0))


@pytest.mark.parametrize("seed", range(5))
def test_malicious_updates(seed):
    updates, benign = draw_benign(seed)
    far = np.random.default_rng(seed + 100).normal(size=(3, 2))
    np.testing.assert_allclose(paf(benign, far), sum(updates) / 5 + far)  # Eq. 7
    first = sum(updates) / 5 + far
    np.testing.assert_allclose(ofom(benign, far, second=False), first)  # Eq. 11
    np.testing.assert_allclose(ofom(benign, far, second=True), (sum(updates) + first) / 6)
    for j in np.ndindex(3, 2):  # Eq. 10
        mu = sum(u[j] for u in updates) / 5
        sigma = math.sqrt(sum((u[j] - mu) ** 2 for u in updates) / 5)
        assert lie(benign, 1)[j] == pytest.approx(mu + z_max(5, 1) * sigma)


@pytest.mark.parametrize("scale", [0.5, 10.0])
def test_far_vector_is_as_long_as_it_is_told(scale):
    mean = np.random.default_rng(0).normal(size=(7, 3))
    direction = np.random.default_rng(1).normal(size=(7, 3))
    far = far_vector(mean, scale, direction)
    assert np.linalg.norm(far) == pytest.approx(scale * np.linalg.norm(mean))
    cosine = np.vdot(far, direction) / np.linalg.norm(far) / np.linalg.norm(direction)
    assert cosine == pytest.approx(1)
    assert far_vector(np.zeros((0, 3)), scale, np.zeros((0, 3))).shape == (0, 3)


# --- whom it strikes, and what it knows -----------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [("paf", 1), ("lie", 1), ("ofom", 2)])
def test_number_of_attackers_per_round_follows_the_paper(kind, count):
    names = [f"client-{n}" for n in range(9)]
    struck = [attack(kind).targets(number, names) for number in range(1, 200)]
    assert all(len(s) == count and s <= set(names) for s in struck)
    assert set().union(*struck) == set(names)
    again = [attack(kind).targets(number, names[::-1]) for number in range(1, 200)]
    assert struck == again, "the order of names is nothing"
    assert struck != [attack(kind, seed=1).targets(n, names) for n in range(1, 200)]
    assert len(attack(kind, attackers=4).targets(1, names)) == 4


@pytest.mark.parametrize("kind", ["paf", "lie", "ofom"])
def test_only_replies_of_attackers_change(kind):
    replies = logits_of("abcdef")
    victims = {"b", "e"}
    poisoned = attack(kind).poison(1, replies, victims)
    assert list(poisoned) == list(replies)
    honest = [replies[n].tensors["logits"].astype(np.float64) for n in "acdf"]
    mean, std = np.mean(honest, 0), np.std(honest, 0)
    for name in replies:
        same = np.array_equal(poisoned[name].tensors["logits"], replies[name].tensors["logits"])
        assert same == (name not in victims)
        assert poisoned[name].tensors["logits"].dtype == np.float32
    b, e = (poisoned[n].tensors["logits"].astype(np.float64) for n in "be")
    if kind == "lie":
        np.testing.assert_allclose(b, mean + z_max(4, 2) * std, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(b, e)
        return
    assert np.linalg.norm(b - mean) == pytest.approx(10 * np.linalg.norm(mean), rel=1e-4)
    expected = b if kind == "paf" else (4 * mean + b) / 5
    np.testing.assert_allclose(e, expected, rtol=1e-4, atol=1e-4)


def test_attackers_share_statistics_if_all_clients_are_malicious():
    replies = logits_of("ab")
    poisoned = attack("lie").poison(1, replies, {"a", "b"})
    both = np.stack([replies[n].tensors["logits"] for n in "ab"])
    expected = both.mean(0) + z_max(2, 2) * both.std(0)
    np.testing.assert_allclose(poisoned["a"].tensors["logits"], expected, rtol=1e-4, atol=1e-5)


def test_missing_reply_is_not_poisoned():
    replies = logits_of("ab")
    assert attack("paf").poison(1, replies, {"z"}) == replies


def test_direction_changes_each_round():
    replies, strike = logits_of("abc"), attack("paf")
    one, same, other = (strike.poison(n, replies, {"a"})["a"].tensors["logits"] for n in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)


def theta(poisoned, benign):
    """Return theta' in Eq.

    7 as a unit vector, which was added to the mean of the benign clients.
    """
    honest = [each.tensors["logits"].astype(np.float64) for each in benign]
    added = poisoned.tensors["logits"].astype(np.float64) - sum(honest) / len(honest)
    return added / np.linalg.norm(added)


@pytest.mark.parametrize("kind", ["paf", "ofom"])
def test_direction_is_constant_in_a_run(kind):
    """Eqs. 7 and 11 have one theta'. By default, it differs by seed and round."""
    found = {}
    for direction, seed in (("run", 0), ("run", 1), ("round", 0)):
        strike = attack(kind, direction=direction, seed=seed)
        for number in (1, 2, 7):
            replies = logits_of("abc", seed=number)
            poisoned = strike.poison(number, replies, {"a"})["a"]
            benign = [replies[name] for name in "bc"]
            found[direction, seed, number] = theta(poisoned, benign)
            length = np.linalg.norm(
                poisoned.tensors["logits"] - sum(b.tensors["logits"] for b in benign) / 2
            )
            mean = np.linalg.norm(sum(b.tensors["logits"] for b in benign) / 2)
            assert length == pytest.approx(10 * mean, rel=1e-4)
    np.testing.assert_allclose(found["run", 0, 1], found["run", 0, 7], atol=1e-6)
    np.testing.assert_allclose(found["run", 1, 1], found["run", 1, 2], atol=1e-6)
    for one, other in ((("run", 0, 1), ("run", 1, 1)), (("round", 0, 1), ("round", 0, 2))):
        assert abs(np.vdot(found[one], found[other])) < 0.9


def test_direction_depends_on_sample_ids_not_on_the_selection():
    """A reply is about different public samples in each round."""
    strike, every = attack("paf", direction="run"), np.arange(6, dtype=np.uint16)
    replies = logits_of("abc")
    benign = [replies[name] for name in "bc"]
    whole = theta(strike.poison(1, replies, {"a"}, {"a": {"Q": every}})["a"], benign)
    rows = np.array([1, 4, 5])
    some = {n: Knowledge({"logits": r.tensors["logits"][rows]}) for n, r in replies.items()}
    part = strike.poison(2, some, {"a"}, {"a": {"Q": rows}})["a"]
    expected = whole[rows] / np.linalg.norm(whole[rows])
    np.testing.assert_allclose(theta(part, [some[name] for name in "bc"]), expected, atol=1e-5)
    none = {n: Knowledge({"logits": r.tensors["logits"][:0]}) for n, r in replies.items()}
    empty = strike.poison(3, none, {"a"}, {"a": {"Q": rows[:0]}})["a"]
    assert empty.tensors["logits"].shape == (0, 4)


def test_direction_depends_on_class_ids_not_on_the_client():
    def said(*classes):
        ids = np.array(classes, np.int64)
        logits = np.ones((len(classes), 5), np.float32)
        return Knowledge({"classes": ids, "logits": logits, "counts": ids + 1})

    strike = attack("paf", CLASSWISE, direction="run")
    all_five = {name: said(0, 1, 2, 3, 4) for name in "ab"}
    whole = theta(strike.poison(1, all_five, {"a"})["a"], [all_five["b"]])
    some = {name: said(3, 0) for name in "ab"}
    part = theta(strike.poison(2, some, {"a"})["a"], [some["b"]])
    expected = whole[[3, 0]] / np.linalg.norm(whole[[3, 0]])
    np.testing.assert_allclose(part, expected, atol=1e-5)


def test_rows_are_matched_by_id():
    def said(*classes, add=0.0):
        rows = np.array([[100.0 * y + c + add for c in range(5)] for y in classes], np.float32)
        ids = np.array(classes, np.int64)
        return Knowledge({"classes": ids, "logits": rows, "counts": ids + 1})

    replies = {"a": said(3, 0, 4), "b": said(0, 1, 3, add=2), "c": said(3, add=8)}
    poisoned = attack("lie", CLASSWISE).poison(1, replies, {"a"})["a"]
    z = z_max(2, 1)
    three, zero, four = poisoned.tensors["logits"]
    mine = replies["a"].tensors["logits"]
    np.testing.assert_allclose(three, mine[0] + 5 + z * 3, rtol=1e-5)  # of +2 and +8
    np.testing.assert_allclose(zero, mine[1] + 2, rtol=1e-5)  # of one alone
    np.testing.assert_array_equal(four, mine[2])  # nobody else has it
    for name in ("classes", "counts"):
        np.testing.assert_array_equal(poisoned.tensors[name], replies["a"].tensors[name])


def test_models_are_matched_by_architecture():
    def said(value, width):
        full = np.full((width, 2), value, np.float32)
        steps = np.array(int(value), np.int64)
        return Knowledge({"weights/w": full, "weights/steps": steps}, {"eta": 0.5})

    replies = {"a": said(1, 3), "b": said(2, 3), "c": said(4, 3), "d": said(90, 5)}
    poisoned = attack("lie", MODELS).poison(1, replies, {"a"})["a"]
    expected = 3 + z_max(2, 1) * 1
    np.testing.assert_allclose(poisoned.tensors["weights/w"], np.full((3, 2), expected), rtol=1e-5)
    assert poisoned.tensors["weights/steps"] == 1, "counters are left alone"
    assert poisoned.scalars == {"eta": 0.5}
    alone = attack("lie", MODELS).poison(1, replies, {"d"})["d"]
    np.testing.assert_array_equal(alone.tensors["weights/w"], replies["d"].tensors["weights/w"])


@pytest.mark.parametrize("kind", ["paf", "ofom"])
def test_poisoned_running_variances_stay_nonnegative(kind):
    """With a negative variance, a model has no outputs, which is not the aim of any attack."""
    rng = np.random.default_rng(0)
    replies = {
        name: Knowledge(
            {
                "weights/bn.weight": rng.normal(size=40).astype(np.float32),
                "weights/bn.running_var": rng.uniform(0.5, 2, 40).astype(np.float32),
            }
        )
        for name in "abcd"
    }
    poisoned = attack(kind, MODELS).poison(1, replies, {"a", "b"})
    for name in "ab":
        variances = poisoned[name].tensors["weights/bn.running_var"]
        assert variances.min() == 0 < variances.max()
        assert poisoned[name].tensors["weights/bn.weight"].min() < -1


# --- in a run -------------------------------------------------------------------------------


def test_methods_that_send_logits_or_weights_can_be_attacked():
    for name, fields in {
        "felo": {"logits", "weights"},
        "fedtype": {"proxy"},
        "fedgems": {"logits"},
        "fedmd": {"logits"},
        "ds-fl": {"probabilities", "logits"},
        "cronus": {"probabilities"},
        "fccl": {"logits"},
        "kt-pfl": {"probabilities"},
        "rhfl": {"probabilities"},
        "local": set(),
    }.items():
        assert {f.name for f in poisonable(find_method(name).spec.replies)} == fields


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "local", "attack": "lie"}, "clients of local send neither logits nor weights"),
        ({"attackers": 1}, "'attack.attackers': expected 0 if 'attack.kind' is none, got 1"),
        ({"attack": "paf", "attackers": 4}, "expected less than 'clients' = 4"),
    ],
)
def test_invalid_attack_settings_raise(settings, message):
    with pytest.raises(SettingsError, match=message):
        small(**{"method": "felo", **settings})


def played(tmp_path, **changes):
    """Return a strategy after a round, its replies, and the replies that its method received."""
    server = Server(small(**changes), tmp_path / "run")
    seen = []
    aggregate = server.strategy.aggregate

    def watched(round, replies):
        # Weights can be read in the round alone.
        seen.extend(r.with_knowledge(Knowledge(dict(r.knowledge.tensors))) for r in replies)
        return aggregate(round, replies)

    server.strategy.aggregate = watched
    _, results = server.play(1)
    server.close(1)
    told = {p.name: decode(parameters_to_ndarrays(r.parameters), "x")[1] for p, r in results}
    return server, told, {reply.client.name: reply.knowledge for reply in seen}


QUICK = {"models": "mlp", "max_samples": 200, "min_samples": 10}
FEDGEMS = {"method": "fedgems", "fedgems.server-model": "mlp", **QUICK}


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        (FEDGEMS, "logits"),
        ({"method": "felo", **QUICK}, "logits"),
        ({"method": "felo", **QUICK}, "weights/classifier.weight"),
        ({"method": "fedtype", "fedtype.proxy": "mlp", **QUICK}, "proxy/classifier.weight"),
    ],
)
@pytest.mark.parametrize("kind", ["paf", "ofom"])
def test_method_receives_poison_and_clients_are_unaware(tmp_path, changes, tensor, kind):
    config = small(attack=kind, **changes)
    server, told, saw = played(tmp_path, attack=kind, **changes)
    struck = attack(kind, clients=config.run.clients).targets(1, list(told))
    record = server.flower.state.record
    assert record.method["poisoned"] == len(struck) == (1 if kind == "paf" else 2)
    for name, knowledge in told.items():
        same = np.array_equal(knowledge.tensors[tensor], saw[name].tensors[tensor])
        assert same == (name not in struck)
    assert record.answered == sorted(told)
    known = json.loads(server.flower.state.to_json())["scores"]["accuracy"]
    assert set(known["common"]["private"]) == set(told)


@pytest.mark.parametrize("method", ["fedtype", "um-pfssl", "fedavg", "pfedbayes"])
def test_honest_clients_train_under_attack(tmp_path, method):
    """No honest client drops out of the run, even if the accuracy suffers."""
    run(small(method, attack="paf", evaluate_every=2), tmp_path / "run")
    assert [record["failed"] for record in records(tmp_path / "run")] == [{}] * 2


def test_attack_uses_the_selected_samples(tmp_path, monkeypatch):
    server = Server(small(attack="paf", **FEDGEMS), tmp_path / "run")
    seen, poison = [], Attack.poison

    def watched(self, round, replies, victims, rows):
        seen.append((victims, rows))
        return poison(self, round, replies, victims, rows)

    monkeypatch.setattr(Attack, "poison", watched)
    for number in (1, 2):
        instructions = server.instruct(number)
        server.aggregate(number, server.train(instructions))
        instruction = decode(parameters_to_ndarrays(instructions[0][1].parameters), "x")[1]
        expected = np.flatnonzero(np.unpackbits(instruction.tensors["wanted"]))
        victims, rows = seen[-1]
        assert rows.keys() == victims
        assert all(r["Q"].tolist() == expected.tolist() for r in rows.values())


def gem_under(tmp_path, seed, **changes):
    """Return the accuracy on the common test set of FedGEM's server, at epsilon 0.25."""
    config = small(
        "fedgems", models="mlp", max_samples=300, rounds=5, seed=seed, lr=0.01, evaluate_every=5,
        **{
            "fedgems.server-model": "mlp", "fedgems.selective": False, "fedgems.epsilon": 0.25,
            "fedgems.server-epochs": 5, **changes,
        },
    )  # fmt: skip
    server = Server(config, tmp_path / f"{seed}-{len(changes)}")
    for number in range(1, 6):
        server.play(number)
    x, y = server.strategy.common_test().x, server.strategy.common_test().y
    with torch.no_grad():
        return (server.strategy.learner.model.eval()(x).argmax(1) == y).float().mean().item()


def test_attack_reduces_accuracy(tmp_path):
    """FedGEM learns a poisoned mean, which has three quarters of the weight in the loss of Eq.

    5.
    """
    struck = {"attack": "paf", "attack.direction": "run"}
    honest, poisoned = gem_under(tmp_path, 0), gem_under(tmp_path, 0, **struck)
    assert honest > 0.6
    assert poisoned < honest - 0.1


def test_searching_client_is_not_attacked(tmp_path, monkeypatch):
    """In UM-pFSSL, many clients are called, but few train and upload. Only these are poisoned."""
    chosen = {"clients": 6, "min_samples": 5, "fraction": 0.3, "rounds": 6, "evaluate_every": 6}
    server = Server(small("um-pfssl", attack="paf", **chosen), tmp_path / "run")
    struck = []
    poison = Attack.poison

    def watched(self, round, replies, victims, rows):
        uploads = {name for name, k in replies.items() if k.group("weights")}
        struck.append((victims, uploads, set(replies)))
        return poison(self, round, replies, victims, rows)

    monkeypatch.setattr(Attack, "poison", watched)
    for number in range(1, 6):
        server.play(number)
    assert any(uploads < sampled for _, uploads, sampled in struck)
    assert all(len(victims) == 1 and victims <= uploads for victims, uploads, _ in struck)


def test_poison_that_violates_the_contract_is_dropped(tmp_path):
    server = Server(small(attack="paf", **FEDGEMS), tmp_path / "run")
    replies = server.train(server.instruct(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attacks, "far_vector", lambda mean, *_: np.full(mean.shape, 1e300))
        with np.errstate(over="ignore"):
            server.aggregate(1, replies)
    failed = server.flower.state.record.failed
    assert list(failed.values()) == ["logits: contains NaN or infinity"]
    assert len(server.flower.state.record.answered) == 3


def test_attack_is_deterministic(tmp_path):
    (one, _, saw), (two, _, again) = (
        played(tmp_path / name, attack="ofom", **FEDGEMS) for name in ("one", "two")
    )
    assert one.flower.state.record.method == two.flower.state.record.method
    for name, knowledge in saw.items():
        np.testing.assert_array_equal(knowledge.tensors["logits"], again[name].tensors["logits"])


# --- clients that poison their data, and claim samples ------------------------------------------


def test_label_flipping_reverses_the_order_of_the_classes():
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 3, 9])
    flipped = poisoned(Split(x, y), "label-flip", 10, 0, "client-1")
    assert flipped.y.tolist() == [9, 6, 0]
    assert torch.equal(flipped.x, x)
    assert y.tolist() == [0, 3, 9], "the samples are shared"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_backdoor_marks_half_of_the_images(dtype):
    x = (torch.arange(10 * 8 * 8) % 200).reshape(10, 1, 8, 8).to(dtype)
    y, before = torch.arange(10) % 5 + 1, x.clone()
    changed = poisoned(Split(x, y), "backdoor", 10, 0, "client-1")
    assert torch.equal(x, before), "the samples are shared"
    marked = (changed.x != x).flatten(1).any(1)
    assert marked.sum() == 5
    assert torch.equal(changed.y, torch.where(marked, 0, y))
    largest = 255 if dtype == torch.uint8 else changed.x.max()
    assert (changed.x[marked][..., 6:, 6:] == largest).all()
    assert torch.equal(changed.x[..., :6, :], x[..., :6, :])
    again = poisoned(Split(x, y), "backdoor", 10, 0, "client-1")
    assert torch.equal(again.x, changed.x)


CLAIMS = {"attack.claimed-samples": 10**8}


@pytest.mark.parametrize("kind", ["label-flip", "backdoor"])
def test_only_the_malicious_clients_poison_their_training_data(kind, tmp_path):
    few = {"clients": 5, "attack.attackers": 2, **CLAIMS}
    server = Server(small("felo", attack=kind, **few), tmp_path / "attacked")
    other = Server(small("felo", clients=5), tmp_path / "honest")
    malicious = malicious_clients(0, [f"client-{k}" for k in range(5)], 2)
    for proxy, twin in zip(
        server.manager.all().values(), other.manager.all().values(), strict=True
    ):
        client, honest = (open_client(each._config, each._node) for each in (proxy, twin))
        assert client.info == honest.info
        is_malicious = client.info.name in malicious
        assert torch.equal(client.y, honest.y) != is_malicious
        assert torch.equal(client.x, honest.x) != (is_malicious and kind == "backdoor")
        for name, split in client.tests.items():
            assert torch.equal(split.x, honest.tests[name].x)
            assert torch.equal(split.y, honest.tests[name].y)
        claim = client.get_properties({})["samples"]
        assert claim == (10**8 if is_malicious else honest.info.samples)


def test_claimed_samples_count_at_most_twice_the_median(tmp_path):
    """Class counts are claimed, too, and limited to the client's number of samples."""
    notices = Notices()
    config = small("felo", attack="label-flip", clients=5, rounds=1, models="mlp", **CLAIMS)
    run(config, tmp_path / "run", [notices])
    (name,) = malicious_clients(0, [f"client-{k}" for k in range(5)], 1)
    (notice,) = [text for text in notices.texts if "100000000" in text]
    assert f"client {name} reported 100000000 samples" in notice
    assert "2 times the median" in notice
    (record,) = records(tmp_path / "run")
    assert record["method"]["poisoned"] == 1


def test_claimed_class_counts_have_the_claimed_sum():
    config = small("felo", attack="label-flip", **CLAIMS)
    step = ByzantineClients(config.run, CLASSWISE, RoundState(1, print), ["client-0"])
    tensors = {
        "classes": np.array([0, 2]),
        "logits": np.ones((2, 4), np.float32),
        "counts": np.array([3, 1]),
    }
    changed = step.poison(1, Knowledge(tensors)).tensors
    assert changed["counts"].tolist() == [75_000_000, 25_000_000]
    assert np.array_equal(changed["logits"], tensors["logits"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attack.claimed-samples": 5}, "'attack.claimed-samples'.*0 if 'attack.kind' is none"),
        ({"attack.kind": "lie", **CLAIMS}, "'attack.claimed-samples'.*0 if 'attack.kind' is lie"),
        (
            {"attack.kind": "label-flip", "data.task": "regression"},
            "'attack.kind'.*the task is regression",
        ),
        (
            {"attack.kind": "backdoor", "data.dataset": "breast-cancer"},
            "'data.dataset'.*square in an image",
        ),
        ({"method": "central", "attack.kind": "label-flip"}, "send nothing that they train"),
    ],
)
def test_impossible_attack_is_rejected(changes, message):
    with pytest.raises(SettingsError, match=message):
        resolve({"method": "fedavg", **changes})


def test_clients_poison_their_data_only_in_simulations():
    for changes in ({"attack.kind": "backdoor"}, {"attack.kind": "scale", **CLAIMS}):
        with pytest.raises(SettingsError, match="in a deployment"):
            check_deployable(resolve({"method": "fedavg", **changes}))


@pytest.mark.slow
@pytest.mark.parametrize("average", ["krum", "filter"])
@pytest.mark.parametrize("method", ["fedavg", "felo", "fedtype"])
def test_claimed_samples_do_not_make_label_flipping_succeed(method, average, tmp_path):
    """One of ten clients flips labels; the honest clients lose little accuracy."""
    base = {
        "clients": 10, "rounds": 5, "local_epochs": 2, "max_samples": 0, "max_test_samples": 0,
        "alpha": 1.0, "models": "mlp", "defense.average": average,
    }  # fmt: skip
    (name,) = malicious_clients(0, [f"client-{k}" for k in range(10)], 1)
    spec = find_method(method).spec
    means = []
    for attack in ({}, {"attack": "label-flip", **CLAIMS}):
        found = run(small(method, **base, **attack), tmp_path / f"run-{len(means)}")["accuracy"]
        kinds = found[spec.headline].values()
        each = [[v for n, v in kind["per_client"].items() if n != name] for kind in kinds]
        means.append(np.mean([np.mean(values) for values in each]))
    assert means[1] >= means[0] - 0.1
