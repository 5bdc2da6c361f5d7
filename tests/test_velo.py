"""Velo: the server's state and training, messages, and the client's training."""

import numpy as np
import pytest
import rounds
import torch
from federation import Server, records, run, small
from rounds import instruction_of, same

from fedhet import models
from fedhet.algorithms.classwise import ClassMeans, average
from fedhet.algorithms.feature_models import synthesize, train_cvae
from fedhet.base.errors import KnowledgeError
from fedhet.base.seeding import torch_generator
from fedhet.config.resolve import resolve
from fedhet.config.sources import read_preset
from fedhet.learning.training import batches
from fedhet.strategies.base import Reply
from fedhet.wire.knowledge import Envelope, Knowledge, encode

WIDTH = 8

CHEAP = {"velo.feature-dim": WIDTH, "velo.hidden-dim": 16, "velo.latent-dim": 3, "velo.epochs": 3}
CHEAP |= {"velo.min-separation": 0.0}  # as printed: so short a training tells nothing apart


def read_means(knowledge):
    names = ("classes", "features", "logits", "counts")
    return ClassMeans(**{name: knowledge.tensors[name] for name in names})


def velo(**changes):
    return small("velo", **{**CHEAP, "velo.share-weights": False, **changes})


def started(directory, **changes):
    """A strategy that knows its members, for replies created by a test."""
    return Server(velo(**changes), directory / "run").strategy


def reply(strategy, name, classes, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    classes = np.array(classes, np.int64)
    tensors = {
        "classes": classes,
        "features": (scale * rng.normal(size=(len(classes), WIDTH))).astype(np.float32),
        "logits": rng.normal(size=(len(classes), 10)).astype(np.float32),
        "counts": np.ones(len(classes), np.int64),
    }
    info = strategy.members[name].info
    return Reply(info, Knowledge(tensors), info.samples)


def two_replies(strategy, round, classes=((0, 1, 2), (1, 2, 5))):
    return [
        reply(strategy, f"client-{k}", each, seed=10 * round + k) for k, each in enumerate(classes)
    ]


def told(strategy, round):
    return strategy.instruct(round, strategy.members["client-0"].info).tensors


def weights(strategy):
    return {name: tensor.clone() for name, tensor in strategy.cvae.state_dict().items()}


def test_first_instruction_is_empty(tmp_path):
    assert not told(started(tmp_path), 1)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_cvae_is_trained_every_interval_rounds(tmp_path, interval):
    strategy = started(tmp_path, **{"velo.interval": interval})
    for round in range(1, 7):
        before = weights(strategy)
        figures = strategy.aggregate(round, two_replies(strategy, round))
        due = round % interval == 0
        assert same(weights(strategy), before) != due
        assert ("cvae_loss" in figures) == due
        assert figures["features_kept"] == 6 * round


def test_until_the_cvae_is_trained_the_means_are_sent(tmp_path):
    strategy = started(tmp_path, **{"velo.interval": 3, "velo.samples-per-class": 2})
    for round in (1, 2, 3):
        replies = two_replies(strategy, round)
        strategy.aggregate(round, replies)
        mean = average([read_means(r.knowledge) for r in replies], by_samples=False)
        sent = told(strategy, round + 1)
        assert sent["classes"].tolist() == [0, 1, 2, 5]
        assert sent["features"].shape == (4, 2, WIDTH)
        np.testing.assert_array_equal(sent["logits"], mean.logits)
        for s in (0, 1):
            assert np.array_equal(sent["features"][:, s], mean.features) == (round < 3)


def test_synthetic_features_replace_the_means(tmp_path):
    """Repeat lines 5 and 7 on the same dataset."""
    strategy = started(tmp_path, **{"velo.samples-per-class": 4})
    model = strategy.cvae
    by_hand = type(model)(WIDTH, 10, 3, 16)
    by_hand.load_state_dict(weights(strategy))
    strategy.aggregate(1, two_replies(strategy, 1))
    loss = train_cvae(
        by_hand, torch.tensor(strategy.features), torch.tensor(strategy.labels),
        epochs=3, batch_size=256, lr=0.01, deviation=1.0,
        generator=torch_generator(0, "server", 1, "cvae"),
    )  # fmt: skip
    assert np.isfinite(loss)
    assert same(weights(strategy), dict(by_hand.state_dict()))
    generator = torch_generator(0, "server", 1, "synthetic")
    expected = synthesize(by_hand, torch.tensor([0, 1, 2, 5]), 4, generator)
    sent = told(strategy, 2)
    np.testing.assert_array_equal(sent["features"], expected.numpy())
    assert len(np.unique(sent["features"].reshape(16, WIDTH), axis=0)) == 16


def test_decoder_is_sampled_again_between_trainings(tmp_path):
    strategy = started(tmp_path, **{"velo.interval": 2})
    sent = []
    for round in (1, 2, 3):
        strategy.aggregate(round, two_replies(strategy, 1))
        sent.append(told(strategy, round + 1)["features"])
    assert not np.array_equal(sent[1], sent[2])


def test_class_new_since_the_last_training_uses_its_mean(tmp_path):
    strategy = started(tmp_path, **{"velo.interval": 2})
    strategy.aggregate(1, two_replies(strategy, 1))
    strategy.aggregate(2, two_replies(strategy, 2))
    late = reply(strategy, "client-2", [2, 4], seed=99)
    strategy.aggregate(3, [late])
    sent = told(strategy, 4)
    assert sent["classes"].tolist() == [0, 1, 2, 4, 5]
    mean = late.knowledge.tensors["features"][1]
    np.testing.assert_array_equal(sent["features"][3, 0], mean)
    np.testing.assert_array_equal(sent["features"][[0, 1, 2, 4]], strategy.synthetic)


def of_their_class(strategy, name, classes, places, width=0.05):
    """Return a reply whose features of class y are near 3 at places[y], and near 0 elsewhere."""
    said = reply(strategy, name, classes)
    near = np.array([3.0 * np.eye(WIDTH)[places[y]] for y in classes])
    noise = width * np.random.default_rng(len(name)).normal(size=near.shape)
    tensors = {**said.knowledge.tensors, "features": (near + noise).astype(np.float32)}
    return said.with_knowledge(Knowledge(tensors))


LEARNS = {"velo.epochs": 150, "velo.min-separation": 0.9}
PLACES = {0: 0, 1: 1, 2: 2, 5: 5}


def test_separation_is_measured_on_separate_draws(tmp_path):
    """Measure in every round after the first training, in numpy, against the means of all."""
    strategy = started(tmp_path, **{"velo.interval": 2})
    for round in (1, 2, 3):
        replies = two_replies(strategy, round)
        figures = strategy.aggregate(round, replies)
        assert ("separation" in figures) == (round > 1)
        if round == 1:
            continue
        said = {}
        for each in replies:
            tensors = each.knowledge.tensors
            for y, feature in zip(tensors["classes"].tolist(), tensors["features"], strict=True):
                said.setdefault(y, []).append(feature.astype(np.float64))
        means = {y: np.mean(rows, axis=0) for y, rows in sorted(said.items())}
        generator = torch_generator(0, "server", round, "separation")
        drawn = synthesize(strategy.cvae, torch.tensor(list(means)), 100, generator).numpy()
        right = [
            min(means, key=lambda k: np.linalg.norm(feature - means[k])) == y
            for y, features in zip(means, drawn.astype(np.float64), strict=True)
            for feature in features
        ]
        assert figures["separation"] == pytest.approx(np.mean(right), abs=0.006)


@pytest.mark.parametrize("above", [False, True])
def test_features_are_decoded_above_the_minimum_separation(tmp_path, above):
    """At exactly the measured fraction, features are decoded; above it, means are sent."""
    share = started(tmp_path / "a").aggregate(1, two_replies(started(tmp_path / "b"), 1))
    share = share["separation"]
    assert 0 < share < 1
    least = float(np.nextafter(share, 1)) if above else share
    strategy = started(tmp_path / "c", **{"velo.min-separation": least})
    replies = two_replies(strategy, 1)
    metrics = strategy.aggregate(1, replies)
    assert (metrics["separation"], metrics["synthetic"]) == (share, float(not above))
    mean = average([read_means(r.knowledge) for r in replies], by_samples=False)
    sent = told(strategy, 2)["features"][:, 0]
    assert np.array_equal(sent, mean.features) == above
    assert np.array_equal(sent, strategy.synthetic[:, 0]) != above


def test_means_are_sent_again_if_separation_falls(tmp_path):
    """The clients' classes are swapped, and the CVAE is trained only in every second round."""
    strategy = started(tmp_path, **LEARNS, **{"velo.interval": 2})
    names, moved = ("client-0", "client-1"), {0: 5, 1: 2, 2: 1, 5: 0}
    shares, synthetic = [], []
    for round, places in ((1, PLACES), (2, PLACES), (3, moved)):
        replies = [of_their_class(strategy, name, [0, 1, 2, 5], places) for name in names]
        shares.append(strategy.aggregate(round, replies).get("separation"))
        mean = average([read_means(r.knowledge) for r in replies], by_samples=False)
        synthetic.append(
            not np.array_equal(told(strategy, round + 1)["features"][:, 0], mean.features)
        )
    assert shares[0] is None
    assert shares[1] > 0.95
    assert shares[2] < 0.05
    assert synthetic == [False, True, False]


def test_departed_classes_are_not_measured(tmp_path):
    strategy = started(tmp_path, **LEARNS)
    replies = [
        of_their_class(strategy, "client-0", [0, 1], PLACES),
        of_their_class(strategy, "client-1", [2, 5], PLACES),
    ]
    for round in (1, 2):
        assert strategy.aggregate(round, replies)["separation"] > 0.95
    strategy.forget("client-1")
    assert strategy.aggregate(3, replies[:1])["separation"] > 0.95
    assert told(strategy, 4)["classes"].tolist() == [0, 1]
    strategy.forget("client-0")
    assert strategy._measure_separation(4) == {}


def test_unseen_class_gets_no_feature(tmp_path):
    strategy = started(tmp_path)
    for round in (1, 2):
        strategy.aggregate(round, two_replies(strategy, round))
        assert told(strategy, round + 1)["classes"].tolist() == [0, 1, 2, 5]


def test_single_feature_is_not_trained(tmp_path):
    strategy = started(tmp_path)
    figures = strategy.aggregate(1, [reply(strategy, "client-0", [3])])
    assert "cvae_loss" not in figures
    assert told(strategy, 2)["classes"].tolist() == [3]


def test_feature_memory_is_limited_and_drops_the_oldest(tmp_path):
    strategy = started(tmp_path, **{"velo.memory": 3})
    came = {label: [] for label in (0, 1, 2, 5)}
    for round in range(1, 6):
        replies = two_replies(strategy, round)
        strategy.aggregate(round, replies)
        for part in replies:
            tensors = part.knowledge.tensors
            for label, feature in zip(
                tensors["classes"].tolist(), tensors["features"], strict=True
            ):
                came[label].append((round, feature.tobytes()))
        for label, entries in came.items():
            kept = {f.tobytes() for f in strategy.features[strategy.labels == label]}
            assert len(kept) == min(3, len(entries))
            oldest = min(round for round, feature in entries if feature in kept)
            assert {feature for round, feature in entries if round > oldest} <= kept


def test_excess_features_are_dropped_at_random(tmp_path):
    strategy = started(tmp_path, **{"velo.memory": 1})
    survivors = set()
    for round in range(1, 30):
        replies = [reply(strategy, f"client-{k}", [4], seed=k) for k in range(4)]
        strategy.aggregate(round, replies)
        first = [r.knowledge.tensors["features"][0].tobytes() for r in replies]
        survivors.add(first.index(strategy.features[0].tobytes()))
    assert survivors == {0, 1, 2, 3}


def test_cvae_uses_the_threads_of_the_run(tmp_path):
    server = Server(velo(), tmp_path)
    for round in (1, 2):
        replies = server.train(server.instruct(round))
        torch.set_num_threads(2)
        server.aggregate(round, replies)
        assert torch.get_num_threads() == server.strategy.run.engine.threads == 1


def test_diverging_cvae_is_replaced_by_the_previous(tmp_path):
    config = velo()
    server = Server(config, tmp_path / "run")
    heard = []
    server.log.notice = heard.append
    strategy = server.strategy
    strategy.aggregate(1, two_replies(strategy, 1))
    before = weights(strategy)
    strategy.settings = strategy.settings.model_copy(update={"cvae_lr": 1e6})
    figures = strategy.aggregate(2, [reply(strategy, "client-3", [0, 8])])
    assert "cvae_loss" not in figures
    assert same(weights(strategy), before)
    assert [text for text in heard if "round 2: the CVAE diverged" in text]
    sent = told(strategy, 3)
    assert sent["classes"].tolist() == [0, 1, 2, 5, 8]
    np.testing.assert_array_equal(sent["features"][:4], strategy.synthetic)
    assert np.isfinite(sent["features"]).all()


def test_outlier_reply_does_not_make_the_cvae_diverge(tmp_path):
    strategy = started(tmp_path)
    strategy.aggregate(1, two_replies(strategy, 1))
    figures = strategy.aggregate(2, [reply(strategy, "client-3", [0, 8], scale=1e30)])
    assert np.isfinite(figures["cvae_loss"])
    sent = told(strategy, 3)
    assert sent["classes"].tolist() == [0, 1, 2, 5, 8]
    assert np.abs(sent["features"]).max() < 50


@pytest.mark.parametrize(
    "changes", [{}, {"velo.interval": 2, "velo.samples-per-class": 3}, {"velo.min-separation": 0.1}]
)
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_restored_server_continues_bit_for_bit(tmp_path, changes, stop):
    changes = {**changes, "velo.memory": 2}
    whole = started(tmp_path / "whole", **changes)
    for round in range(1, stop + 1):
        whole.aggregate(round, two_replies(whole, round))
    saved = {name: value.copy() for name, value in whole.state_dict().items()}
    assert all(isinstance(value, np.ndarray) for value in saved.values())
    again = started(tmp_path / "again", **changes)
    again.load_state_dict(saved)
    for round in range(stop + 1, stop + 4):
        assert same(told(again, round), told(whole, round))
        figures = [s.aggregate(round, two_replies(s, round)) for s in (whole, again)]
        assert figures[0] == figures[1]
        assert same(again.state_dict(), whole.state_dict())


def test_saved_state_does_not_change(tmp_path):
    strategy = started(tmp_path)
    strategy.aggregate(1, two_replies(strategy, 1))
    saved = strategy.state_dict()
    copies = {name: value.copy() for name, value in saved.items()}
    strategy.aggregate(2, two_replies(strategy, 2))
    assert same(saved, copies)


# --- clients --------------------------------------------------------------------------------


def opened(config, directory):
    client = rounds.opened(config, directory, partition=0)
    client.state.metadata["participations"] = 1
    return client


def knowledge(count, width=64, classes=(0, 2, 3, 4, 5, 6, 7, 9)):
    rng = np.random.default_rng(0)
    return {
        "classes": np.array(classes, np.int64),
        "features": rng.normal(size=(len(classes), count, width)).astype(np.float32),
        "logits": (2 * rng.normal(size=(len(classes), 10))).astype(np.float32),
    }


def transcription(client, round, taught, count):
    """Compute line 14 of Algorithm 1 sample by sample, with a feature drawn per class and batch."""
    model = models.build("mlp", (1, 8, 8), 10, seed=client.run.seed, feature_dim=64).train()
    adam = torch.optim.Adam(model.parameters(), lr=client.training.lr)
    order, chance = client.generator(round, "batches"), client.generator(round, "features")
    rows = {y: row for row, y in enumerate(taught["classes"].tolist())}
    for _ in range(client.training.local_epochs):
        for index in batches(len(client.y), client.training.batch_size, order):
            picks = torch.randint(count, (len(index),), generator=chance).tolist()
            features, logits = model.features_and_logits(client.x[index])
            losses = []
            for s, p, y, pick in zip(
                features, logits, client.y[index].tolist(), picks, strict=True
            ):
                loss = -torch.log(torch.softmax(p, 0)[y])
                if y in rows:
                    target = torch.tensor(taught["features"][rows[y]][pick])
                    teacher = torch.softmax(torch.tensor(taught["logits"][rows[y]]), 0)
                    loss = loss + torch.mean((s - target) ** 2)
                    kl = teacher * (torch.log(teacher) - torch.log_softmax(p, 0))
                    loss = loss + kl.sum()
                losses.append(loss)
            adam.zero_grad()
            (sum(losses) / len(losses)).backward()
            adam.step()
    return model.state_dict()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.usefixtures("steady_adam")
def test_client_draws_a_feature_of_the_class_for_each_sample(tmp_path, count):
    changes = {"local_epochs": 2, "models": "mlp", "velo.samples-per-class": count}
    changes["velo.feature-weight"] = 1.0  # as printed
    client = opened(small("velo", **changes), tmp_path)
    taught = knowledge(count)
    client.train(3, Knowledge(taught))
    for name, expected in transcription(client, 3, taught, count).items():
        ours = client.models["private"].state_dict()[name]
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "rms", "unit"])
def test_client_with_one_feature_per_class_equals_felo(tmp_path, norm):
    taught = knowledge(1)
    ours, felos = (
        opened(small(method, models="mlp", **{f"{method}.feature-norm": norm}), tmp_path / method)
        for method in ("velo", "felo")
    )
    one = ours.train(2, Knowledge(taught))
    other = felos.train(2, Knowledge({**taught, "features": taught["features"][:, 0]}))
    assert same(dict(one.tensors), dict(other.tensors))


def test_first_participation_is_cross_entropy(tmp_path):
    replies = []
    for name, taught in (("with", knowledge(1)), ("without", {})):
        client = opened(small("velo", models="mlp"), tmp_path / name)
        client.state.metadata["participations"] = 0
        replies.append(dict(client.train(1, Knowledge(taught)).tensors))
    assert same(*replies)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_other_number_of_features_raises(tmp_path, count):
    client = opened(small("velo", models="mlp", **{"velo.samples-per-class": 2}), tmp_path)

    def read(sent):
        message = encode(Envelope("run", "velo", 1, "server"), Knowledge(knowledge(sent)))
        return client.codec.decode_instruction(message, client.sizes)

    assert read(2)[0].round == 1
    with pytest.raises(KnowledgeError, match=r"features: .*S = 2"):
        read(count)


# --- runs -------------------------------------------------------------------------------------


def test_run_with_several_features_a_class(tmp_path):
    changes = {"rounds": 3, "velo.interval": 2, "velo.samples-per-class": 2}
    changes |= {"velo.min-separation": 0.9}
    summary = run(small("velo", **(CHEAP | changes)), tmp_path / "run", report=True)
    figures = [record["method"] for record in records(tmp_path / "run")]
    assert [r["answered"] for r in records(tmp_path / "run")] == [list(summary["models"])] * 3
    assert ["cvae_loss" in each for each in figures] == [False, True, False]
    assert ["separation" in each for each in figures] == [False, True, True]
    assert all(0 <= each.get("separation", 0) <= 1 for each in figures)
    kept = [each["features_kept"] for each in figures]
    assert kept == [kept[0], 2 * kept[0], 3 * kept[0]]
    assert "separation" in (tmp_path / "run" / "report.html").read_text()


def test_velo_equals_felo_before_the_first_training(tmp_path):
    """The first round is initial training, and the second round uses only the means."""
    sent = {}
    for method in ("felo", "velo"):
        changes = {"rounds": 3, "models": ["cnn2", "mlp"]}
        own = {"velo.interval": 2, "velo.min-separation": 0.0}
        changes |= own if method == "velo" else {}
        server = Server(small(method, **changes), tmp_path / method)
        for round in (1, 2):
            server.play(round)
            server.close(round)
        sent[method] = instruction_of(server.instruct(3)[0]).tensors
    assert sent["felo"].keys() == sent["velo"].keys()
    for name, value in sent["felo"].items():
        ours = sent["velo"][name]
        if name == "features":
            assert not np.allclose(ours[:, 0], value)
        else:
            np.testing.assert_array_equal(ours, value)


def test_extreme_pool_has_one_feature_width():
    """Table 3: only ResNet-50 has features with a width other than 512."""
    config = resolve(read_preset("velo-cifar10-extreme"))
    width = config.method_settings.feature_dim
    names = config.run.models.pool
    assert list(names) == [f"resnet{depth}" for depth in (10, 18, 26, 34, 50)]
    assert config.method_settings.feature_dim == width == 512
    for name in names:
        found = models.shapes(name, (3, 32, 32), 10, width)
        assert found["classifier.weight"] == ((10, width), "float32")
        adapter = found.get("extractor.adapter.weight")
        assert adapter == (((width, 2048), "float32") if name == "resnet50" else None)


@pytest.mark.slow
def test_widest_and_the_narrowest_of_the_pool_train_together(tmp_path):
    few = {"models": ["resnet10", "resnet50"], "clients": 2, "max_samples": 24, "min_samples": 4}
    few |= {"partition": "iid", "max_test_samples": 10, "velo.feature-dim": 32, "velo.epochs": 3}
    run(small("velo", **few), tmp_path / "run")
    for record in records(tmp_path / "run"):
        assert record["failed"] == {}
        assert np.isfinite(record["method"]["cvae_loss"])
