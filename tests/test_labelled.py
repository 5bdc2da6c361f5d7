"""The labelled and the unlabelled part of a client's samples."""

import numpy as np
import pytest
import torch
from federation import small
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.node import read_node
from fedhet.config import labelled_alpha, pool, resolve
from fedhet.data import Split, split_labels
from fedhet.data.labelled import LEAST
from fedhet.errors import DataError, SettingsError


def samples(count):
    return Split(torch.arange(count, dtype=torch.float32)[:, None], torch.arange(count) % 3)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(2 * LEAST, 200), st.floats(0.05, 20))
def test_every_sample_is_in_one_part(seed, count, alpha):
    labelled, rest = split_labels(samples(count), alpha, seed, "client-0")
    both = torch.cat([labelled.x, rest.x]).flatten()
    assert sorted(both.tolist()) == list(range(count))
    assert min(len(labelled), len(rest)) >= LEAST
    for part in (labelled, rest):
        np.testing.assert_array_equal(part.y, part.x.flatten().long() % 3)


def test_shares_are_those_of_a_dirichlet_draw():
    """Dir_2(a) has mean 1/2 and variance 1 / (4 (2 a + 1))."""
    for alpha in (0.5, 5.0):
        shares = [
            len(split_labels(samples(1000), alpha, 0, f"client-{k}")[0]) / 1000 for k in range(600)
        ]
        assert np.mean(shares) == pytest.approx(0.5, abs=0.05)
        assert np.var(shares) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.2)


def test_which_samples_are_labelled_is_drawn_too():
    labelled, _ = split_labels(samples(200), 5.0, 0, "client-0")
    assert labelled.x.flatten().tolist() != list(range(len(labelled)))


def test_the_parts_hang_on_seed_and_client_alone():
    def labelled(seed, client):
        return split_labels(samples(100), 0.5, seed, client)[0].x.flatten().tolist()

    assert labelled(0, "a") == labelled(0, "a")
    assert labelled(0, "a") != labelled(1, "a")
    assert labelled(0, "a") != labelled(0, "b")


def test_without_a_share_all_is_labelled():
    train = samples(5)
    labelled, rest = split_labels(train, 0.0, 0, "client-0")
    assert labelled is train
    assert len(rest) == 0
    assert rest.x.shape == (0, 1)


def test_too_few_samples_are_named():
    with pytest.raises(DataError, match=r"site-a: has 3 training samples, 'labelled-alpha' = 0.5"):
        split_labels(samples(3), 0.5, 0, "site-a")


def opened(config, directory):
    node = read_node({"partition-id": 1, "num-partitions": 4}, config.run, str(directory))
    return config.method.client(config.run, config.client, config.method.server_sends, node)


def test_a_yardstick_trains_on_the_same_labelled_part(tmp_path):
    method = opened(small("um-pfssl", models="cnn2-dropout"), tmp_path)
    local = opened(small("local", models="cnn2-dropout", labelled_alpha=0.5), tmp_path)
    everything = opened(small("local", models="cnn2-dropout"), tmp_path)
    assert torch.equal(method.x, local.x)
    assert torch.equal(method.unlabelled.x, local.unlabelled.x)
    assert len(everything.unlabelled) == 0
    assert len(everything.x) == len(local.x) + len(local.unlabelled) == local.info.samples


def test_only_a_method_that_needs_it_hides_labels():
    assert labelled_alpha(small("felo").run) == 0
    assert labelled_alpha(small("um-pfssl").run) == labelled_alpha(small("fixavg").run) == 0.5
    assert labelled_alpha(small("um-pfssl", labelled_alpha=2.0).run) == 2.0


def test_a_method_of_one_model_has_it_by_default():
    assert pool(resolve({"method": "um-pfssl"}).run) == ["cnn2-dropout"]
    assert pool(resolve({"method": "um-pfssl", "models": "resnet9"}).run) == ["resnet9"]
    assert len(pool(resolve({"method": "felo"}).run)) == 5


def test_a_share_must_not_be_negative():
    with pytest.raises(SettingsError, match=r"'labelled-alpha' = -1.0 is not allowed"):
        resolve({"labelled-alpha": -1.0})
