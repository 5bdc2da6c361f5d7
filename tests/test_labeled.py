"""The labeled and the unlabeled samples of a client, and wrong labels."""

import numpy as np
import PIL.Image
import pytest
import torch
from federation import small
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import opened

from fedhet.base.arrays import grouped
from fedhet.base.errors import DataError, SettingsError
from fedhet.client_runtime.node import read_node
from fedhet.data.dataset import UNKNOWN, Split
from fedhet.data.partition import split_labels, with_wrong_labels
from fedhet.data.store import RunData
from fedhet.wire.knowledge import Knowledge


def samples(count):
    return Split(torch.arange(count, dtype=torch.float32)[:, None], torch.arange(count) % 3)


@settings(max_examples=60)
@given(st.integers(0, 1000), st.integers(0, 5), st.integers(10, 200), st.floats(0.05, 20))
def test_every_sample_is_in_one_part(seed, least, count, alpha):
    labeled, rest = split_labels(samples(count), alpha, least, seed, "client-0")
    both = torch.cat([labeled.x, rest.x]).flatten()
    assert sorted(both.tolist()) == list(range(count))
    assert min(len(labeled), len(rest)) >= least
    for part in (labeled, rest):
        np.testing.assert_array_equal(part.y, part.x.flatten().long() % 3)


def test_fractions_equal_a_dirichlet_draw():
    """Dir_2(a) has mean 1/2 and variance 1 / (4 (2 a + 1))."""
    for alpha in (0.5, 5.0):
        shares = [
            len(split_labels(samples(1000), alpha, 2, 0, f"client-{k}")[0]) / 1000
            for k in range(600)
        ]
        assert np.mean(shares) == pytest.approx(0.5, abs=0.05)
        assert np.var(shares) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.2)


def test_labeled_samples_are_drawn():
    labeled, _ = split_labels(samples(200), 5.0, 2, 0, "client-0")
    assert labeled.x.flatten().tolist() != list(range(len(labeled)))


def test_parts_depend_only_on_seed_and_client():
    def labeled(seed, client):
        return split_labels(samples(100), 0.5, 2, seed, client)[0].x.flatten().tolist()

    assert labeled(0, "a") == labeled(0, "a")
    assert labeled(0, "a") != labeled(1, "a")
    assert labeled(0, "a") != labeled(0, "b")


def test_all_samples_are_labeled_by_default():
    train = samples(5)
    labeled, rest = split_labels(train, 0.0, 2, 0, "client-0")
    assert labeled is train
    assert len(rest) == 0
    assert rest.x.shape == (0, 1)


def test_client_may_be_assigned_no_labels_or_all():
    counts = {len(split_labels(samples(20), 0.1, 0, 0, f"client-{k}")[0]) for k in range(60)}
    assert {0, 20} < counts


def test_too_few_samples_raise():
    with pytest.raises(DataError, match=r"site-a: .*4 .*3"):
        split_labels(samples(3), 0.5, 2, 0, "site-a")


@pytest.mark.parametrize("probability", [0.2, 0.9])
@pytest.mark.parametrize("space", [(0, 1, 2, 3, 4), (1, 4, 7)])
def test_wrong_labels_are_uniform_over_the_other_classes(probability, space):
    count, classes = 30_000, len(space)
    correct = torch.tensor(space)[torch.arange(count) % classes]
    train = Split(torch.zeros(count, 1), correct)
    noisy = with_wrong_labels(train, probability, space, 0, "client-0")
    assert noisy.x is train.x
    assert noisy.y.dtype == torch.int64
    expected = probability / (classes - 1)
    for true in space:
        drawn = noisy.y[correct == true]
        shares = {c: (drawn == c).double().mean().item() for c in drawn.unique().tolist()}
        assert shares.pop(true) == pytest.approx(1 - probability, abs=0.02)
        assert shares == {c: pytest.approx(expected, abs=0.02) for c in {*space} - {true}}
    again = with_wrong_labels(train, probability, space, 0, "client-0")
    assert torch.equal(again.y, noisy.y)
    for seed, client in ((1, "client-0"), (0, "client-1")):
        other = with_wrong_labels(train, probability, space, seed, client)
        assert not torch.equal(other.y, noisy.y)


def test_only_training_labels_of_clients_are_wrong():
    both = [
        RunData.for_run(small("fedmd", public_fraction=0.2, **{"data.label-noise": noise}).run)
        for noise in (0.0, 0.4)
    ]
    wrong = []
    for index in range(both[0].spec.clients):
        clean, noisy = (data.client(index) for data in both)
        for part in ("test", "common", "validation"):
            assert torch.equal(getattr(clean, part).y, getattr(noisy, part).y)
        assert torch.equal(clean.train.x, noisy.train.x)
        wrong += (clean.train.y != noisy.train.y).tolist()
    assert np.mean(wrong) == pytest.approx(0.4, abs=0.05)
    pooled = both[1].pooled_parts()[0].y
    clients = [both[1].client(index).train.y for index in range(both[1].spec.clients)]
    assert torch.equal(pooled, torch.cat(clients))
    assert torch.equal(*(data.dataset.train.y for data in both))


def test_wrong_labels_need_classes():
    with pytest.raises(SettingsError, match=r"data\.label-noise.*regression.*expected 0, got 0.1"):
        small("local", **{"data.task": "regression", "data.label-noise": 0.1})


def test_baseline_trains_on_the_same_labeled_part(tmp_path):
    method = opened(small("um-pfssl", models="cnn2-dropout"), tmp_path)
    local = opened(small("local", models="cnn2-dropout", labeled_alpha=0.5), tmp_path)
    everything = opened(small("local", models="cnn2-dropout"), tmp_path)
    assert torch.equal(method.x, local.x)
    assert torch.equal(method.unlabeled.x, local.unlabeled.x)
    assert len(everything.unlabeled) == 0
    assert len(everything.x) == len(local.x) + len(local.unlabeled) == local.info.samples


@pytest.fixture
def site(tmp_path):
    """A site with 12 images of two classes, and 6 images without a class."""
    rng = np.random.default_rng(0)
    folders = {"train/a": 6, "train/b": 6, "train/unlabeled": 6, "test/a": 2, "test/b": 2}
    for folder, count in folders.items():
        (tmp_path / "data" / folder).mkdir(parents=True)
        for k in range(count):
            pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(tmp_path / "data" / folder / f"{k}.png")
    return tmp_path


def at_site(site, method, **changes):
    config = small(method, models="cnn2-dropout", num_classes=2, **changes)
    node_config = {
        "name": "site-a",
        "data": f"imagefolder:{site / 'data'}",
        "model": "cnn2-dropout",
    }
    node = read_node(node_config, config.run, str(site / "state"))
    return config.method.client(config, node)


def test_sites_images_without_a_class_are_its_unlabeled_part(site, caplog):
    for method, semi in (("um-pfssl", "none"), ("fedavg", "fixmatch"), ("local", "fixmatch")):
        client = at_site(site, method, semi=semi)
        assert (len(client.y), len(client.unlabeled), client.info.samples) == (12, 6, 18)
        assert client.unlabeled.y.tolist() == [UNKNOWN] * 6
        client.get_properties({})
    assert not caplog.messages


def test_supervised_methods_exclude_unlabeled_samples(site, caplog):
    found = [at_site(site, "local"), at_site(site, "local", labeled_alpha=0.5)]
    for client in found:  # the yardstick has the labels that um-pfssl has
        assert torch.equal(client.x, at_site(site, "um-pfssl").x)
        assert (len(client.unlabeled), client.info.samples) == (0, 12)
    found[0].get_properties({})
    assert caplog.messages == [
        "site-a: 6 unlabeled samples are not used, because local uses only labeled samples"
    ]


def test_client_without_labels_reports_no_pseudo_label_error(site):
    um = at_site(site, "um-pfssl", **{"um-pfssl.warm-up": 1})
    um.state.restore("run", before=1)
    start = {name: t.clone() for name, t in um.models["private"].state_dict().items()}
    told = Knowledge(scalars={"own": 0, "train": True, "held": 0})
    reply = um.train(1, told)
    um.config.method.spec.instructions.check("server", told.tensors, told.scalars, um.sizes())
    assert "pseudo_error" not in reply.scalars
    assert any(not np.array_equal(reply.group("weights")[name], t) for name, t in start.items())

    fix = at_site(site, "fedavg", semi="fixmatch", semi_threshold=0.0)
    fix.state.restore("run", before=1)
    weights = {name: t.numpy() for name, t in fix.build_model().state_dict().items()}
    fix.train(1, Knowledge(grouped("weights", weights)))
    assert fix.metrics == {"pseudo_labels": 1.0}


def test_only_a_method_that_needs_it_hides_labels():
    def share(method, **changes):
        return small(method, **changes).run.data.labeled_alpha

    assert share("felo") == share("local") == 0
    assert share("um-pfssl") == share("fedavg", semi="fixmatch") == 0.5
    assert share("um-pfssl", labeled_alpha=2.0) == share("felo", labeled_alpha=2.0) == 2.0
