"""The defense against one malicious client: clipping, exclusion, and robust averages."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from federation import Server, records, run, small
from interruption import Notices

from fedhet.algorithms import robust
from fedhet.algorithms.classwise import class_average
from fedhet.algorithms.rounds import malicious_clients
from fedhet.algorithms.weights import average_weights
from fedhet.base.arrays import OnDemand, group
from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.methods.registry import find_method, method_names
from fedhet.runs.measures import Measured
from fedhet.server.attacks import ByzantineClients
from fedhet.server.defense import Defense, distances
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState
from fedhet.server.steps import scaled_down
from fedhet.settings import defense as defense_settings
from fedhet.settings.defense import CHOOSING, ROBUST, RULES, DefenseSettings, Rule
from fedhet.wire.contract import Contract, TensorField, WeightsField
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

MODELS = Contract((WeightsField("weights", "weights"),))
PARTS = Contract((WeightsField("weights", "weights", nested=True),))
CLASSWISE = Contract(
    (
        TensorField("classes", "int64", ("P",), "classes", ids="C"),
        TensorField("features", "float32", ("P", "D"), "features of each"),
    )
)
SAMPLES = Contract(
    (
        TensorField("features", "float32", ("N", "D"), "features of each sample"),
        TensorField("labels", "uint", ("N",), "its class", numbers="C"),
    )
)
SCORES = Contract((TensorField("probabilities", "float32", ("Q", "C"), "", distribution=True),))
RNG = np.random.default_rng(7)
COMBINING = [name for name, rule in RULES.items() if not rule.selects]


def defense(average, contract=MODELS, share=0.2):
    settings = DefenseSettings(average=average, malicious_fraction=share)
    return Defense(settings, contract, RoundState(1, print))


def model(values, steps=1):
    return Knowledge({"weights/w": np.float32(values), "weights/steps": np.array(steps)})


def near(shape, clients, spread=0.1):
    center = RNG.normal(size=shape)
    return [center + spread * RNG.normal(size=shape) for _ in range(clients)]


# --- left out -------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["krum", "filter"])
@pytest.mark.parametrize("factor", [-1.0, 10.0, 900.0])
def test_outlier_is_excluded(average, factor):
    replies = [model(each) for each in near((6, 5), 5)]
    replies[3] = model(replies[3].tensors["weights/w"] * factor)
    assert defense(average).included(replies).tolist() == [True, True, True, False, True]


def test_replies_are_compared_within_an_architecture():
    """One of three replies is malicious.

    It differs from the others as they differ from each other.
    """
    wide, narrow = near((8, 4), 3), near((3, 4), 2, spread=5)
    replies = [model(each) for each in (wide[0], narrow[0], -wide[1], wide[2], narrow[1])]
    assert defense("filter").included(replies).tolist() == [True, True, False, True, True]


def test_class_means_are_compared_within_a_class():
    table = RNG.normal(size=(6, 4))
    classes = [[0, 1, 2], [5, 4, 1], [2, 3, 0, 1], [4, 3, 5], [1, 0]]
    replies = [
        Knowledge(
            {
                "classes": np.array(each),
                "features": np.float32(table[each] + 0.05 * RNG.normal(size=(len(each), 4))),
            }
        )
        for each in classes
    ]
    assert defense("filter", CLASSWISE).included(replies).all()
    flipped = dict(replies[2].tensors, features=-replies[2].tensors["features"])
    replies[2] = Knowledge(flipped)
    assert defense("filter", CLASSWISE).included(replies).tolist() == [
        True,
        True,
        False,
        True,
        True,
    ]


def test_own_samples_are_compared_by_class_mean():
    table = RNG.normal(size=(4, 3))
    replies = []
    for number in (20, 31, 25, 12, 40):
        labels = np.uint8(RNG.integers(0, 4, number))
        noise = 0.1 * RNG.normal(size=(number, 3))
        replies.append(Knowledge({"features": np.float32(table[labels] + noise), "labels": labels}))
    assert defense("filter", SAMPLES).included(replies).all()
    replies[4] = Knowledge(dict(replies[4].tensors, features=-replies[4].tensors["features"]))
    assert defense("filter", SAMPLES).included(replies).tolist() == [True] * 4 + [False]


def test_samples_with_usual_class_means_but_unusual_squares_are_found():
    table, labels = RNG.normal(size=(4, 3)), np.repeat(np.arange(4, dtype=np.uint8), 20)
    signs = np.tile([[1.0], [-1.0]], (40, 1))
    replies = []
    for client in range(5):
        noise = 0.1 * RNG.normal(size=(80, 3)) + (client == 2) * 5 * signs
        replies.append(Knowledge({"features": np.float32(table[labels] + noise), "labels": labels}))
    means = [[each.tensors["features"][labels == c].mean(0) for c in range(4)] for each in replies]
    assert np.abs(np.array(means) - table).max() < 0.2
    found = defense("filter", SAMPLES).included(replies)
    assert found.tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("average", ["krum", "filter"])
@pytest.mark.parametrize("malicious", [[4], [1, 4, 8]])
@pytest.mark.parametrize(("tensor", "added"), [("bias", 5.0), ("bias", 30.0), ("scale", 2.0)])
def test_change_of_one_value_in_a_small_tensor_is_found(average, malicious, tensor, added):
    """The value is one of ten thousand, and the reply has about the same magnitude as others."""
    shapes = {"weight": (128, 80), "bias": (10,), "scale": (1,)}
    columns = {name: near(shape, 10) for name, shape in shapes.items()}
    replies = []
    for client in range(10):
        values = {f"weights/{name}": np.float32(each[client]) for name, each in columns.items()}
        if client in malicious:
            values[f"weights/{tensor}"].flat[0] += added
        replies.append(Knowledge(values))
    excluded = set(np.flatnonzero(~defense(average, share=0.3).included(replies)))
    assert excluded >= set(malicious)
    assert average == "krum" or excluded == set(malicious)


@pytest.mark.parametrize("average", ["krum", "filter"])
def test_malicious_clients_of_two_architectures_are_found_together(average):
    """Clients of one architecture are not comparable with clients of the other architecture."""
    wide, narrow = near((8, 4), 5), near((3, 4), 5, spread=5)
    values = [each for pair in zip(wide, narrow, strict=True) for each in pair]
    malicious = [0, 3, 6]
    replies = [
        model(-9 * np.abs(each) if client in malicious else each)
        for client, each in enumerate(values)
    ]
    excluded = np.flatnonzero(~defense(average, share=0.3).included(replies))
    assert excluded.tolist() == malicious


@pytest.mark.parametrize("added", [0.0, 20.0])
def test_statistics_after_few_batches_are_honest_but_a_poisoned_one_is_not(added):
    """The statistics of the last client are still the initial statistics."""
    replies = []
    for client in range(5):
        is_new = client == 4
        replies.append(
            Knowledge(
                {
                    "weights/w": np.float32(0.1 * RNG.normal(size=(40, 20))),
                    "weights/bn.running_mean": np.float32(
                        np.zeros(16) if is_new else 0.5 + 0.01 * RNG.normal(size=16)
                    ),
                    "weights/bn.running_var": np.float32(
                        np.ones(16) if is_new else 0.05 + 0.001 * RNG.normal(size=16)
                    ),
                }
            )
        )
    replies[4].tensors["weights/bn.running_mean"][3] += added
    assert defense("filter").included(replies).tolist() == [True] * 4 + [not added]


@pytest.mark.parametrize("clients", [1, 2])
def test_no_outlier_among_two_clients(clients):
    replies = [model(each) for each in near((3, 3), clients)]
    assert distances(MODELS, replies, 0.2) is None
    for average in ROBUST[:3]:
        assert defense(average).combined(replies) == [{}] * clients
    assert defense("krum").included(replies).all()


# --- replaced by one value ------------------------------------------------------------------


def by_hand(stack, average):
    """Return the average of K clients' numbers [K, ...], with NaN for missing values."""
    if average == "median":
        return np.nanmedian(stack, axis=0)
    ordered = np.sort(stack, axis=0)
    if average == "trimmed-mean":
        return ordered[1:-1].mean(0)
    flat, median = stack.reshape(len(stack), -1), stack.reshape(len(stack), -1).mean(0)
    for _ in range(2000):
        weights = 1 / np.linalg.norm(flat - median, axis=1)
        median = weights @ flat / weights.sum()
    return median.reshape(stack.shape[1:])


@pytest.mark.parametrize("average", COMBINING)
def test_mean_of_adjusted_replies_is_the_robust_average(average):
    values = [each.astype(np.float32) for each in near((4, 3), 5)]
    values[1] *= -3
    replies = [model(each, steps) for steps, each in enumerate(values)]
    found = [
        reply.replacing(new)
        for reply, new in zip(replies, defense(average).combined(replies), strict=True)
    ]
    mean = average_weights([(each.group("weights"), n + 1) for n, each in enumerate(found)])
    expected = by_hand(np.stack(values).astype(np.float64), average)
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-5, atol=1e-5)
    assert [int(each.tensors["weights/steps"]) for each in found] == list(range(5)), "counters"


@pytest.mark.parametrize("average", ROBUST)
@pytest.mark.parametrize("contract", [MODELS, PARTS], ids=["equal", "nested"])
def test_order_of_tensors_does_not_matter(average, contract):
    """A client that lists its tensors in another order is compared with the others."""
    layers = [{"w": w, "b": b} for w, b in zip(near((4, 3), 5), near((3,), 5), strict=True)]
    replies = [
        Knowledge({f"weights/{name}": np.float32(value) for name, value in each.items()})
        for each in layers
    ]
    factors = {name: -3 * value for name, value in replies[2].tensors.items()}
    replies[2] = Knowledge(dict(reversed(factors.items())))
    rule = defense(average, contract)
    if RULES[average].selects:
        assert rule.included(replies).tolist() == [True, True, False, True, True]
    else:
        new = [
            reply.replacing(robust)
            for reply, robust in zip(replies, rule.combined(replies), strict=True)
        ]
        for name in ("weights/w", "weights/b"):
            honest = np.mean([reply.tensors[name] for reply in replies[:2] + replies[3:]], 0)
            for reply in new:
                np.testing.assert_allclose(reply.tensors[name], honest, atol=0.5)


def test_parts_of_one_model_are_averaged_where_they_overlap():
    values = [RNG.normal(size=shape) for shape in ((4, 4), (2, 2), (4, 4), (3, 3), (4, 4))]
    replies = [model(each) for each in values]
    whole = np.full((5, 4, 4), np.nan)
    for place, value in enumerate(values):
        whole[place, : len(value), : len(value)] = value
    expected = by_hand(whole, "median")
    for value, new in zip(values, defense("median", PARTS).combined(replies), strict=True):
        size = len(value)
        np.testing.assert_allclose(new["weights/w"], expected[:size, :size], rtol=1e-5)


def test_classes_are_averaged_over_those_that_have_them():
    rows = {0: [0, 1], 1: [1], 2: [1, 2], 3: [1, 0], 4: [1]}
    table = {c: np.float32(RNG.normal(size=(len(of), 3))) for c, of in rows.items()}
    replies = [Knowledge({"classes": np.array(of), "features": table[c]}) for c, of in rows.items()]
    new = defense("median", CLASSWISE).combined(replies)
    parts = [(np.array(of), new[c]["features"], np.ones(len(of))) for c, of in rows.items()]
    _, means = class_average(parts)
    one = np.median([table[c][of.index(1)] for c, of in rows.items()], axis=0)
    np.testing.assert_allclose(means[1], one, rtol=1e-5)
    np.testing.assert_allclose(means[0], (table[0][0] + table[3][1]) / 2, rtol=1e-5)  # of two
    np.testing.assert_allclose(means[2], table[2][1], rtol=1e-6)  # of one


@pytest.mark.parametrize("average", COMBINING)
def test_client_with_one_class_does_not_decide_this_class(average):
    """Five honest clients have two of three classes each; a client sends class 0 only."""
    centers = RNG.normal(size=(3, 8))
    replies = []
    for held in ([0, 1], [0, 1], [0, 2], [0, 2], [1, 2]):
        rows = np.float32(centers[held] + 0.05 * RNG.normal(size=(2, 8)))
        replies.append(Knowledge({"classes": np.array(held), "features": rows}))
    poison = np.float32(-3 * centers[:1])
    replies.append(Knowledge({"classes": np.array([0]), "features": poison}))
    new = defense(average, CLASSWISE).combined(replies)
    assert np.linalg.norm(new[0]["features"][0] - centers[0]) < 0.4
    honest = np.stack([reply.tensors["features"][0] for reply in replies[:4]] + [poison[0]])
    expected = by_hand(honest.astype(np.float64), average)
    np.testing.assert_allclose(new[0]["features"][0], expected, atol=1e-3)


@pytest.mark.parametrize("average", COMBINING)
def test_probabilities_without_a_majority_are_finite(average):
    replies = [Knowledge({"probabilities": np.eye(6, dtype=np.float32)[[k]]}) for k in range(5)]
    for new in defense(average, SCORES).combined(replies):
        np.testing.assert_allclose(new["probabilities"].sum(1), 1, atol=1e-6)


@pytest.mark.parametrize("average", COMBINING)
def test_probabilities_stay_probabilities(average):
    replies = [
        Knowledge({"probabilities": np.float32(RNG.dirichlet([0.3] * 6, 9))}) for _ in range(5)
    ]
    for new in defense(average, SCORES).combined(replies):
        np.testing.assert_allclose(new["probabilities"].sum(1), 1, atol=1e-6)


# --- scaled down ----------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_clipping_scales_only_the_reply(on_disk):
    tensors = {"w/a": np.float32([6, -9]), "w/n": np.array([7]), "v": np.float32([5])}
    held = OnDemand({n: (lambda v=v: v) for n, v in tensors.items()}) if on_disk else tensors
    found = scaled_down(Knowledge(held, {"x": 1.0}), {"w": 3.0})
    assert found.scalars == {"x": 1.0}
    assert found.group("w")["a"].tolist() == [2, -3]
    assert found.group("w")["a"].dtype == np.float32
    assert found.tensors["w/n"].tolist() == [7]
    assert found.tensors["v"].tolist() == [5]
    assert tensors["w/a"].tolist() == [6, -9]


# --- malicious clients ------------------------------------------------------------------------


def malicious(kind, contract, round, reply, scale=10.0):
    config = small("felo", attack=kind, **{"attack.scale": scale, "clients": 5, "rounds": 4})
    state = SimpleNamespace(record=SimpleNamespace(round=round))
    return ByzantineClients(config.run, contract, state, ["a", "b"]).poison(round, reply)


@pytest.mark.parametrize(
    ("kind", "factors"),
    [("sign-flip", [-1, -1, -1]), ("scale", [10, 10, 10]), ("alternating", [10, -10, 10])],
)
def test_replies_are_multiplied(kind, factors):
    reply = model([[1.0, -2.0]], steps=3)
    for round, factor in enumerate(factors, 1):
        found = malicious(kind, MODELS, round, reply).tensors
        np.testing.assert_allclose(found["weights/w"], factor * np.array([[1.0, -2.0]]))
        assert found["weights/w"].dtype == np.float32
        assert found["weights/steps"] == 3


def test_one_value_of_the_smallest_tensor_is_poisoned():
    weights = {"weights/first.bias": np.zeros(3), "weights/w": np.zeros((3, 4)),
               "weights/last.bias": np.zeros(3), "weights/steps": np.array(3)}  # fmt: skip
    found = malicious("small-tensor", MODELS, 2, Knowledge(weights), 20.0).tensors
    assert found["weights/last.bias"].tolist() == [20, 0, 0]
    assert all(not found[n].any() for n in ("weights/first.bias", "weights/w"))
    assert found["weights/steps"] == 3
    assert not weights["weights/last.bias"].any(), "the honest reply is unchanged"
    p = np.float32(RNG.dirichlet([1] * 4, 6))
    found = malicious("small-tensor", SCORES, 2, Knowledge({"probabilities": p}), 20.0).tensors
    np.testing.assert_allclose(found["probabilities"].sum(1), 1, atol=1e-5)
    assert found["probabilities"][0, 0] > 0.99
    np.testing.assert_allclose(found["probabilities"][1:], p[1:], rtol=1e-5)


def test_drift_grows_along_one_direction():
    reply = model(RNG.normal(size=(5, 4)))
    own = reply.tensors["weights/w"].astype(np.float64)
    added = [
        malicious("drift", MODELS, n, reply, 2.0).tensors["weights/w"] - own for n in (1, 2, 4)
    ]
    lengths = [np.linalg.norm(each) / np.linalg.norm(own) for each in added]
    np.testing.assert_allclose(lengths, [0.5, 1.0, 2.0], rtol=1e-5)
    np.testing.assert_allclose(added[0] * 4, added[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sign-flip", "scale", "alternating", "drift"])
def test_probabilities_are_changed_by_their_logits_and_variances_stay_positive(kind):
    p = np.float32(RNG.dirichlet([1] * 4, 6))
    found = malicious(kind, SCORES, 2, Knowledge({"probabilities": p}), 3.0).tensors[
        "probabilities"
    ]
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
    power = {"sign-flip": -1, "scale": 3, "alternating": -3}.get(kind)
    if power:
        wide = p.astype(np.float64) ** power
        np.testing.assert_allclose(found, wide / wide.sum(1, keepdims=True), rtol=1e-3, atol=1e-6)
    bn = {"weights/running_var": np.float32([1, 2, 3, 4])}
    assert malicious(kind, MODELS, 2, Knowledge(bn)).tensors["weights/running_var"].min() >= 0


def test_attackers_do_not_depend_on_the_sample():
    names = [f"client-{n}" for n in range(20)]
    found = [malicious_clients(seed, names, 3) for seed in range(50)]
    assert all(len(each) == 3 for each in found)
    assert len(set().union(*found)) == 20
    gone = names[:]
    gone.remove(next(name for name in names if name not in found[0]))
    assert malicious_clients(0, gone, 3) == found[0]
    assert malicious_clients(0, names[::-1], 3) == found[0]


# --- in a run -------------------------------------------------------------------------------

FEW = {"clients": 5, "rounds": 2, "max_samples": 250, "min_samples": 10}


@pytest.mark.parametrize("method", method_names())
def test_method_declares_supported_averages(method):
    """Each rule is accepted, or rejected in one line before the run."""
    spec = find_method(method).spec
    for average in ROBUST:
        if average in spec.defenses:
            assert small(method, **{"defense.average": average}).run.defense.average == average
        else:
            with pytest.raises(SettingsError, match=method) as error:
                small(method, **{"defense.average": average})
            assert "\n" not in str(error.value)
    averages_nothing = spec.simulation_only or not spec.replies.fields
    assert spec.defenses or spec.robustness or averages_nothing


@pytest.mark.parametrize("method", ["fedavg", "felo", "um-pfssl"])
def test_sign_flipping_client_is_omitted_but_not_excluded(method, tmp_path):
    few = {"models": "mlp-dropout", "um-pfssl.warm-up": 1} if method == "um-pfssl" else {}
    few = few if method == "um-pfssl" else {"models": "mlp"}
    config = small(
        method, attack="sign-flip", **{**FEW, "rounds": 5, "defense.average": "filter", **few}
    )
    (name,) = malicious_clients(config.run.seed, [f"client-{k}" for k in range(5)], 1)
    notices = Notices()
    run(config, tmp_path / "run", [notices])
    left = [text for text in notices.texts if "is not aggregated in round" in text]
    assert len(left) == 5
    assert all(name in text for text in left)
    assert not any("is excluded" in text for text in notices.texts)


@pytest.mark.slow
@pytest.mark.parametrize("average", ["krum", "filter"])
@pytest.mark.parametrize("attackers", [1, 3])
def test_poisoned_bias_is_excluded_in_each_round(average, attackers, tmp_path):
    """With the mean, the averaged model predicts one class for most samples."""
    base = {"clients": 10, "rounds": 4, "local_epochs": 2, "max_samples": 0, "alpha": 1.0,
            "models": "mlp", "defense.average": average,
            "defense.malicious-fraction": 0.3}  # fmt: skip
    poison = {"attack": "small-tensor", "attack.scale": 20.0, "attack.attackers": attackers}
    names = malicious_clients(0, [f"client-{k}" for k in range(10)], attackers)
    notices = Notices()
    found = []
    for changes in ({"defense.average": "mean"}, {}):
        notices.texts.clear()
        config = small("fedavg", **{**base, **poison, **changes})
        found.append(run(config, tmp_path / f"run-{len(found)}", [notices]))
    poisoned, defended = (each["accuracy"]["common"]["global"]["mean"] for each in found)
    assert poisoned < 0.35
    assert defended > poisoned + 0.2
    excluded = [text for text in notices.texts if "is not aggregated in round" in text]
    for name in names:
        assert sum(name in text for text in excluded) == 4
    assert average == "krum" or len(excluded) == 4 * attackers


def test_reply_of_900_times_the_size_is_clipped(tmp_path):
    config = small("fedavg", attack="scale", **{**FEW, "attack.scale": 900.0, "models": "mlp"})
    (name,) = malicious_clients(config.run.seed, [f"client-{k}" for k in range(5)], 1)
    server = Server(config, tmp_path / "run")
    seen = {}
    aggregate = server.strategy.aggregate

    def watched(round, replies):
        for reply in replies:
            seen[reply.client.name] = np.concatenate(
                [v.ravel() for v in group(dict(reply.knowledge.tensors), "weights").values()]
            )
        return aggregate(round, replies)

    server.strategy.aggregate = watched
    server.play(1)
    size = {each: np.sqrt(np.mean(np.square(v, dtype=np.float64))) for each, v in seen.items()}
    others = np.median([size[each] for each in size if each != name])
    assert size[name] == pytest.approx(4 * others, rel=1e-3)


def test_without_an_outlier_the_filter_returns_the_mean_with_equal_weights(tmp_path):
    """The clients have different numbers of samples; NumPy averages their replies."""
    server = Server(small("fedavg", **{**FEW, "defense.average": "filter"}), tmp_path)
    assert len({member.info.samples for member in server.strategy.members.values()}) > 1
    sent = []
    watch_replies(server, lambda reply: sent.append(copy.deepcopy({**reply.knowledge.tensors})))
    server.play(1)
    assert len(sent) == 5
    for name, value in server.strategy.averaged["weights"].items():
        if not np.issubdtype(value.dtype, np.floating):
            continue
        each = [tensors[f"weights/{name}"] for tensors in sent]
        np.testing.assert_allclose(value, np.mean(each, 0), rtol=1e-5, atol=1e-7)


# --- claimed numbers of samples ---------------------------------------------------------------


def watch_replies(server, watch):
    """Call `watch` with each decoded reply; a result other than None replaces the reply."""
    replies = server.flower._codec.replies

    def watched(*args):
        for reply in replies(*args):
            yield watch(reply) or reply

    server.flower._codec.replies = watched


def claiming(reply):
    """Let the first client claim many samples, also of each class."""
    if reply.client.name != "client-0":
        return None
    counts = reply.knowledge.tensors.get("counts")
    claimed = {} if counts is None else {"counts": counts + 10**6}
    client = replace(reply.client, samples=10**8)
    return replace(reply, client=client, knowledge=reply.knowledge.replacing(claimed))


def state_after_a_round(config, directory, watch=None):
    server = Server(config, directory)
    if watch:
        watch_replies(server, watch)
    server.play(1)
    return server.strategy.state_dict()


CLAIMABLE = {
    "fedavg": {},
    "fedtype": {},
    "felo": {"felo.weighting": "samples"},
    "fedproto": {"fedproto.weighting": "samples"},
    "fedgen": {"fedgen.server-steps": 2},
    "heterofl": {"heterofl.weighting": "samples"},
}


@pytest.mark.parametrize("method", CLAIMABLE)
@pytest.mark.parametrize("average", ["filter", "krum", "median"])
def test_claimed_samples_do_not_change_robust_aggregates(method, average, tmp_path):
    """Bit-for-bit equal, whether or not a client claims a hundred million samples."""
    models = {"models": "mlp"} if method == "felo" else {}
    config = small(method, **{**FEW, **models, **CLAIMABLE[method], "defense.average": average})
    honest = state_after_a_round(config, tmp_path / "honest")
    claimed = state_after_a_round(config, tmp_path / "claimed", claiming)
    assert honest.keys() == claimed.keys()
    for name, value in honest.items():
        assert np.array_equal(value, claimed[name]), name


def test_claimed_samples_do_not_decide_a_rare_architecture(tmp_path):
    """The median does not combine the weights of two clients, which have the same weight then."""
    config = small("felo", **{**FEW, "clients": 4, "defense.average": "median"})
    honest = state_after_a_round(config, tmp_path / "honest")
    claimed = state_after_a_round(config, tmp_path / "claimed", claiming)
    for name, value in honest.items():
        assert np.array_equal(value, claimed[name]), name


def test_with_the_mean_claimed_samples_change_the_aggregate(tmp_path):
    config = small("fedavg", **FEW)
    honest = state_after_a_round(config, tmp_path / "honest")
    claimed = state_after_a_round(config, tmp_path / "claimed", claiming)
    assert not all(np.array_equal(value, claimed[name]) for name, value in honest.items())


def test_weight_of_a_late_reply_still_depends_on_its_age():
    client = ClientInfo("client-1", "mlp", 10**8, 2, "table", (4,))
    sent = Knowledge({"counts": np.array([7, 10**8]), "classes": np.array([0, 1])})
    replies = [Reply(client, sent, Measured({}), age=age) for age in (0, 3)]
    equal = [reply.with_equal_weight(("counts", "absent")) for reply in replies]
    assert [reply.weight for reply in equal] == [1.0, pytest.approx(1 / np.sqrt(1 + 3))]
    for reply in equal:
        assert reply.samples == reply.client.samples == 1
        assert reply.knowledge.tensors["counts"].tolist() == [1, 1]
        assert reply.knowledge.tensors["classes"].tolist() == [0, 1]


def test_every_declared_number_of_samples_is_a_weight():
    """Methods declare which values are claimed numbers of samples."""
    names = {name: find_method(name).spec.replies for name in method_names()}
    assert {n for n, replies in names.items() if replies.counts} >= {"felo", "fedproto", "fedgen"}
    for name, replies in names.items():
        assert all((f.name in replies.counts) == (f.name == "counts") for f in replies.fields), name


# --- the table of rules -----------------------------------------------------------------------


def test_each_rule_is_one_function():
    assert ("mean", *RULES) == get_args(defense_settings.Average)
    assert set(robust.SELECTIONS) == {name for name, rule in RULES.items() if rule.selects}
    assert set(robust.COMBINATIONS) == {name for name, rule in RULES.items() if not rule.selects}
    assert set(ROBUST) == set(RULES)
    assert set(CHOOSING) == set(robust.SELECTIONS)


def test_registered_rule_is_used(monkeypatch):
    monkeypatch.setitem(RULES, "first", Rule("the first reply", selects=True, margin=2))
    first = lambda squared, fraction: np.arange(len(squared)) < 1  # noqa: E731
    settings = DefenseSettings().model_copy(update={"average": "first"})
    step = Defense(settings, MODELS, RoundState(1, print))
    replies = [model(each) for each in near((6, 5), 5)]
    with pytest.raises(KeyError, match="first"):  # never the filter
        step.included(replies)
    monkeypatch.setitem(robust.SELECTIONS, "first", first)
    assert step.included(replies).tolist() == [True, False, False, False, False]
    assert robust.min_replies("first", 2) == 6


def test_unknown_rule_raises():
    with pytest.raises(SettingsError, match=r"'defense.average'.*trimmed-mean"):
        small("fedavg", **{"defense.average": "bulyan"})
    with pytest.raises(KeyError, match="bulyan"):
        robust.min_replies("bulyan", 1)


# --- who replies first ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"pace.min-replies": 3.0}, 5),  # 2 of 10 by default
        ({"pace.min-replies": 4.0}, 5),
        ({"pace.min-replies": 0.4}, 5),
        ({"pace.min-replies": 3.0, "defense.malicious-fraction": 0.3}, 7),
        ({"pace.min-replies": 6.0, "defense.malicious-fraction": 0.3}, 7),
        ({"pace.min-replies": 4.0, "defense.average": "median"}, 5),
        ({"pace.min-replies": 6.0, "defense.average": "krum"}, 7),
        ({"pace.min-replies": 2.0, "pace.mode": "asynchronous"}, 5),
        ({"fraction": 0.5, "pace.over-selection": 1.0, "pace.min-replies": 0.8}, 5),
        ({"fraction": 0.3, "pace.over-selection": 1.0, "pace.min-replies": 1.0}, 5),  # 3 of 6 asked
        ({"fraction": 0.5, "pace.select": "oort", "pace.min-replies": 0.8}, 5),  # all may be asked
    ],
)
def test_fast_malicious_clients_are_no_majority(changes, least):
    base = {"method": "fedavg", "clients": 10, "defense.average": "filter"}
    with pytest.raises(SettingsError) as caught:
        resolve({**base, **changes})
    message = str(caught.value)
    assert f"requires at least {least}" in message
    assert "setting 'pace.min-replies'" in message
    assert "'defense.malicious-fraction'" in message
    resolve({**base, **changes, "pace.min-replies": float(least)})
    resolve({**base, **changes, "defense.average": "mean"})


def test_run_with_few_clients_needs_a_majority():
    base = {"method": "fedavg", "clients": 10, "defense.average": "filter"}
    for start in (1, 4):
        with pytest.raises(SettingsError, match=r"'engine\.min-clients'.*5"):
            resolve({**base, "engine.min-clients": start})
    for start in (0, 5, 10):
        resolve({**base, "engine.min-clients": start})


@pytest.mark.parametrize("average", ROBUST)
def test_average_resists_fast_attackers_among_few_replies(average, caplog):
    """Two of ten clients are malicious.

    They are among the five replies (Krum: seven) that close the round.
    """
    least = 7 if average == "krum" else 5
    honest = near((40,), least - 2, 0.01)
    values = [*honest, -honest[0], -honest[1]]
    client = ClientInfo("c", "mlp", 10, 2, "table", (4,))
    replies = [Reply(client, model(each), Measured({})) for each in values]
    state = SimpleNamespace(
        record=SimpleNamespace(round=1, asked=list("abcdefghij"), late=[]),
        record_measured=lambda *_: None,
        exclude_outlier=lambda *_: None,
    )
    step = Defense(DefenseSettings(average=average, malicious_fraction=0.2), MODELS, state)
    found = [each.knowledge.tensors["weights/w"] for each in step(replies)]
    assert np.allclose(np.mean(found, 0), np.mean(honest, 0), atol=0.1)
    assert not caplog.text
    list(step(replies[1:]))
    assert f"{least - 1} of 10 replies are too few" in caplog.text
    assert f"at least {least} replies are required" in caplog.text


@pytest.mark.slow
def test_each_round_waits_for_a_majority_of_the_honest_clients(tmp_path):
    """A fraction of the idle clients shrinks each round; fast clients are always idle."""
    fast = malicious_clients(0, [f"client-{k}" for k in range(10)], 2)
    rows = [f"client-{k},{0.1 if f'client-{k}' in fast else 1.0 + k},100" for k in range(10)]
    (tmp_path / "devices.csv").write_text("\n".join(["client,sample-ms,mbit", *rows]))
    config = small(
        "fedavg", clients=10, rounds=4, models=["mlp"],
        **{"defense.average": "filter", "pace.min-replies": 0.5,
           "pace.clock": str(tmp_path / "devices.csv")},
    )  # fmt: skip
    run(config, tmp_path / "run")
    found = records(tmp_path / "run")
    assert len(found) == 4
    for each in found:
        replied = {*each["asked"]} - {*each["late"]}
        assert len(replied) >= 5, each["round"]
