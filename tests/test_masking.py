"""Secure aggregation: arithmetic, masks, and what a curious or lying server learns.

The sites are real `Masking` objects, and the server is the real `Unmasking`; only training, and the
transport between them, are left out. Expected sums are computed in NumPy from the plain values.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from federation import small
from flwr.common import Code, GetPropertiesRes, Status

from fedhet.algorithms import shamir
from fedhet.base.errors import KnowledgeError, MaskingError, StateError
from fedhet.client_runtime.masking import Ledger, Masking
from fedhet.config.secure import MAX_PEERS, simulated_peers
from fedhet.runs.measures import Measured
from fedhet.server.members import ClientHealth, Member
from fedhet.server.nodes import RetryingGrid
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState
from fedhet.server.unmasking import ALL, Unmasking
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Envelope, Knowledge
from fedhet.wire.masking import (
    BOX_BYTES,
    COMMITMENT,
    HEADER,
    MASKED,
    MASKED_CONTRACT,
    REQUEST,
    REVEAL,
    SHARES,
)

CLASSES, WIDTH = 4, 3
PRIME = 2**521 - 1
WEIGHTS = {
    "layer.weight": ((2, 3), "float32"),
    "norm.running_mean": ((3,), "float32"),
    "norm.running_var": ((3,), "float32"),
    "norm.num_batches_tracked": ((), "int64"),
}
SIZES = Sizes({"C": CLASSES, "D": WIDTH}, {"weights": WEIGHTS})


class Kit:
    """Sites and a server of one run, without training."""

    def __init__(
        self,
        directory: Path,
        sites: int = 4,
        method: str = "fedavg",
        models=("cnn2",),
        classes=None,
        cap: int = 100,
        colluding: int = 1,
        server: str = "curious",
        is_site: bool = False,
        deployed: bool = False,
        **changes: object,
    ) -> None:
        self.is_site, self.pool = is_site, "cnn2"
        self.names = [f"site-{number:02d}" for number in range(sites)]
        changes |= {"clients": max(sites, 3), "privacy.secure-aggregation": True}
        self.config = small(method, **changes)
        self.directory = directory / "run"
        self.directory.mkdir(exist_ok=True)
        lists = dict.fromkeys(self.names, ("0", "1", "2", "3")) | dict(classes or {})
        self.samples = {name: 10 * k + 20 for k, name in enumerate(self.names)}
        weights = {name: min(samples, cap) for name, samples in self.samples.items()}
        self.peers, self.keys = simulated_peers(
            self.names, colluding=colluding, server=server, classes=lists, weights=weights
        )
        self.root = directory / "sites"
        self.infos = {
            name: ClientInfo(
                name, models[k % len(models)], 10 * k + 20, CLASSES, "image", (1, 8, 8)
            )
            for k, name in enumerate(self.names)
        }
        self.sites = {name: self.site(name) for name in self.names}
        self.notices: list[str] = []
        self.state = RoundState(1, self.notices.append)
        self.state.start(1)
        grid = RetryingGrid(None, None) if deployed else None  # type: ignore[arg-type]
        self.members = {
            name: Member(info, SimpleNamespace(get_properties=self.answering(name), grid=grid))
            for name, info in self.infos.items()
        }
        self.silent: set[str] = set()
        self.revealed: dict[str, dict] = {}
        self.server = self.new_server()

    def site(self, name: str, peers=None) -> Masking:
        """Return a site as after a restart, perhaps with another peers file."""
        node = SimpleNamespace(
            name=name,
            peers=peers or self.peers,
            peers_key=self.keys[name],
            state_dir=self.root / name,
            is_site=self.is_site,
            pool=self.pool,
        )
        return Masking(self.config, node, self.infos[name])

    def new_server(self, *, resume: bool = False) -> Unmasking:
        config = self.config.replacing(resume=resume)
        return Unmasking(config, "run", self.state, self.directory, 1.0)

    def answering(self, name: str):
        def get_properties(ins, timeout, group_id):
            if name in self.silent:
                raise TimeoutError("no reply")
            try:
                reply = self.sites[name].revealed(ins.config)
            except MaskingError as error:
                reply = {"error": str(error)}
            self.revealed[name] = reply
            return GetPropertiesRes(Status(Code.OK, ""), reply)

        return get_properties

    def masked(self, name: str, sent: Knowledge, number: int = 1, instruction=None) -> Knowledge:
        """Return a site's masked reply to the server's request."""
        return self.masked_with(name, self.server.config(name), sent, number, instruction)

    def masked_with(self, name, request, sent, number=1, instruction=None) -> Knowledge:
        envelope = Envelope("run", self.config.run.method, number, "server")
        site = self.sites[name]
        stored = site.begin(envelope, instruction or Knowledge(), request)
        if stored is not None:
            return Knowledge(dict(zip(self.tensor_names, stored, strict=True)))
        reply = site.masked(envelope, sent)
        self.tensor_names = list(reply.tensors)
        arrays = site.store(envelope, list(reply.tensors.values()))
        return Knowledge(dict(zip(self.tensor_names, arrays, strict=True)), reply.scalars)

    def total(self, replies: list[Reply]) -> list[Reply]:
        return list(self.server(replies, lambda client: SIZES))

    def sums(self, sent: dict[str, Knowledge], number: int = 1, lost=(), silent=()) -> list[Reply]:
        """Return the sums of a round; `lost` sites do not reply, `silent` sites reveal nothing."""
        self.server.start(number, self.members, self.names)
        self.silent = {*silent}
        replies = [
            Reply(self.infos[name], self.masked(name, sent[name], number), Measured({}))
            for name in self.names
            if name not in lost
        ]
        return self.total(replies)


def weights_of(rng: np.random.Generator, scale: float = 1.0) -> Knowledge:
    """Return random weights."""
    tensors = {
        "weights/layer.weight": scale * rng.normal(size=(2, 3)).astype(np.float32),
        "weights/norm.running_mean": rng.normal(size=3).astype(np.float32) * 100,
        "weights/norm.running_var": rng.random(3).astype(np.float32) * 1e4,
        "weights/norm.num_batches_tracked": np.asarray(rng.integers(1000), np.int64),
    }
    return Knowledge(tensors)


def of_all(rng: np.random.Generator, names) -> dict[str, Knowledge]:
    return {name: weights_of(rng) for name in names}


def threshold(sites: int, colluding: int) -> int:
    """Return t as in the design, written out again."""
    return max(-(-(sites + colluding) // 2) + 1, sites * 2 // 3 + 1)


# Secret sharing


def shares_of(secret, needed, count):
    return dict(enumerate(shamir.split(secret, needed, count), 1))


@pytest.mark.parametrize(("needed", "count"), [(1, 1), (2, 3), (4, 4), (4, 7)])
def test_threshold_of_shares_determines_the_secret(needed, count):
    secret = bytes(range(32))
    shares = shares_of(secret, needed, count)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(shares, size):
            some = {number: shares[number] for number in chosen}
            assert shamir.has_spare(some) is (size > needed)
            if size >= needed:
                assert shamir.join(some) == secret
            else:
                with pytest.raises(ValueError, match="do not determine"):
                    shamir.join(some)


@pytest.mark.parametrize("sites", [5, 10, 50])
def test_wrong_share_gives_another_value(sites):
    needed, rng = threshold(sites, 1), np.random.default_rng(sites)
    shares = shares_of(rng.bytes(32), needed, sites)
    shares[int(rng.integers(sites)) + 1] = rng.bytes(65).rjust(66, b"\0")
    assert not shamir.has_spare(shares)
    with pytest.raises(ValueError, match="determine"):
        shamir.join(shares)


def test_shares_lie_on_a_polynomial_of_the_right_degree():
    # An independent interpolation in fractions of integers modulo the prime.
    shares = [int.from_bytes(s, "big") for s in shamir.split(b"\1" * 32, 3, 6)]
    differences = shares
    for _ in range(3):
        differences = [(b - a) % (2**521 - 1) for a, b in itertools.pairwise(differences)]
    assert not any(differences), "third differences of a polynomial of degree 2 vanish"


@pytest.mark.parametrize("arguments", [(b"short", 1, 1), (bytes(32), 0, 3), (bytes(32), 4, 3)])
def test_invalid_sharing_raises(arguments):
    with pytest.raises(ValueError, match="32 bytes"):
        shamir.split(*arguments)


# Sums


@pytest.mark.parametrize("sites", [3, 4, 5, 8, 11])
def test_sums_of_any_survivors_are_the_weighted_means(tmp_path, sites):
    rng = np.random.default_rng(sites)
    kit = Kit(tmp_path, sites)
    for number, lost in enumerate(range(sites - threshold(sites, 1) + 1), 1):
        sent = of_all(rng, kit.names)
        gone = set(rng.permutation(kit.names)[:lost])
        kit.state.start(number)
        (total,) = kit.sums(sent, number, lost=gone)
        there = [name for name in kit.names if name not in gone]
        assert total.clients == tuple(there)
        weights = np.array([min(kit.infos[n].samples, 100) for n in there], np.float64)
        assert total.client.samples == weights.sum()
        assert total.client.name == ALL
        fraction = 25 - math.ceil(math.log2(sites))
        bounds = {
            "layer.weight": len(there) / 2 * 2.0**-fraction / (weights / 100).sum(),
            "norm.running_mean": len(there) / 2 * 2.0**-20 / weights.sum(),
            "norm.running_var": len(there) / 2 * 2.0**-20 / weights.sum(),
            "norm.num_batches_tracked": 0.5,
        }
        for name, bound in bounds.items():
            values = [np.asarray(sent[n].tensors[f"weights/{name}"], np.float64) for n in there]
            exact = np.average(values, axis=0, weights=weights)
            if name.endswith("num_batches_tracked"):
                exact = np.zeros_like(exact)  # as in the instruction, which has no weights here
            found = total.knowledge.tensors[f"weights/{name}"]
            assert found.dtype == values[0].dtype or found.dtype in (np.float32, np.int64)
            rounding = np.abs(exact) * 2.0**-23  # of float32
            assert (np.abs(found - exact) <= bound + rounding).all(), name
        assert not kit.notices


def test_values_beyond_the_range_are_clipped_and_only_the_site_knows_their_number(tmp_path, caplog):
    kit = Kit(tmp_path, 3, cap=20)
    sent = of_all(np.random.default_rng(0), kit.names)
    for name in kit.names[:2]:
        sent[name].tensors["weights/layer.weight"][0, 0] = 1e6
    (total,) = kit.sums(sent)
    third = sent[kit.names[2]].tensors["weights/layer.weight"][0, 0]
    expected = (64 + 64 + third) / 3
    assert total.knowledge.tensors["weights/layer.weight"][0, 0] == pytest.approx(expected, 1e-5)
    assert caplog.text.count("1 values of the reply were clipped") == 2
    assert not kit.notices


def test_extreme_values_do_not_overflow_the_sum(tmp_path):
    for value in (-1e9, 1e9):
        kit = Kit(tmp_path, 8, cap=1)
        sent = {name: weights_of(np.random.default_rng(0)) for name in kit.names}
        for knowledge in sent.values():
            knowledge.tensors["weights/layer.weight"][:] = value
            knowledge.tensors["weights/norm.running_mean"][:] = 1e12 * np.sign(value)
        kit.state.start(1)
        (total,) = kit.sums(sent, 1 if value < 0 else 2)
        mean = total.knowledge.tensors["weights/layer.weight"]
        np.testing.assert_allclose(mean, 64 * np.sign(value), rtol=1e-5)
        statistics = total.knowledge.tensors["weights/norm.running_mean"]
        np.testing.assert_allclose(statistics, np.sign(value) * 2**62 / 8 / 2**20, rtol=1e-6)


def test_variance_is_never_negative(tmp_path):
    kit = Kit(tmp_path, 3)
    sent = of_all(np.random.default_rng(0), kit.names)
    for knowledge in sent.values():
        knowledge.tensors["weights/norm.running_var"][:] = -1.0
    (total,) = kit.sums(sent)
    assert (total.knowledge.tensors["weights/norm.running_var"] == 0).all()


@pytest.mark.parametrize("is_told", [True, False])
def test_values_that_are_not_finite_become_those_of_the_instruction(tmp_path, is_told, caplog):
    """An error would tell the server for which instructions the site's values overflow."""
    kit = Kit(tmp_path, 3)
    kit.server.start(1, kit.members, kit.names)
    rng = np.random.default_rng(0)
    told = weights_of(rng) if is_told else Knowledge()
    sent = of_all(rng, kit.names)
    spoiled = {name: value.copy() for name, value in sent["site-01"].tensors.items()}
    spoiled["weights/layer.weight"][0, 0] = np.nan
    sent["site-01"] = Knowledge(spoiled)
    replies = [
        Reply(kit.infos[name], kit.masked(name, sent[name], instruction=told), Measured({}))
        for name in kit.names
    ]
    (total,) = kit.total(replies)
    assert "site-01: reply contains NaN or infinity" in caplog.text
    weights = [kit.peers.peer(name).weight for name in kit.names]
    for name in ("weights/layer.weight", "weights/norm.running_var"):
        values = [sent[site].tensors[name] for site in kit.names]
        values[1] = told.tensors[name] if is_told else np.zeros_like(values[1])
        exact = np.average(values, axis=0, weights=weights)
        np.testing.assert_allclose(total.knowledge.tensors[name], exact, rtol=1e-5, atol=1e-4)


def test_class_row_of_one_heavy_site_is_not_sent(tmp_path):
    """Weights are limited for the sites that list a class, as for the sites of a round."""
    listed = dict.fromkeys(("site-00", "site-01", "site-02"), ("0", "1"))
    listed |= {"site-03": ("0",), "site-04": ("0",)}
    kit = Kit(tmp_path, 5, "fedproto", classes=listed, cap=1000)
    for name, weight in zip(kit.names, (1, 1, 1000, 1000, 1), strict=True):
        kit.samples[name] = weight
    kit.peers, kit.keys = simulated_peers(kit.names, classes=listed, weights=kit.samples)
    kit.sites = {name: kit.site(name) for name in kit.names}
    rng = np.random.default_rng(2)
    sent = {name: rows_of(rng, [0, 1], logits=False) for name in kit.names}
    (total,) = kit.sums(sent)
    assert total.knowledge.tensors["classes"].tolist() == [0]


# Class rows


def rows_of(rng: np.random.Generator, classes, *, logits: bool = True) -> Knowledge:
    tensors = {
        "classes": np.array(classes, np.int64),
        "features": rng.normal(size=(len(classes), WIDTH)).astype(np.float32) * 10,
        "counts": rng.integers(1, 50, len(classes)),
    }
    if logits:
        tensors["logits"] = rng.normal(size=(len(classes), CLASSES)).astype(np.float32)
    return Knowledge(tensors)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("weighting", ["samples", "clients"])
def test_class_means_are_averaged_over_the_sites_that_have_the_class(tmp_path, weighting, noise):
    rng = np.random.default_rng(1)
    classes = {"site-04": ("0", "1", "2")}
    changes = {"privacy.noise-multiplier": noise, "models.pool": ["mlp"]} if noise else {}
    kit = Kit(
        tmp_path, 5, "fedproto", classes=classes, **{"fedproto.weighting": weighting}, **changes
    )
    held = [[0, 1, 2, 3], [0, 2], [0, 1], [3], [0, 2]]
    sent = {n: rows_of(rng, held[k], logits=False) for k, n in enumerate(kit.names)}
    (total,) = kit.sums(sent, lost=["site-03"])
    found = total.knowledge.tensors
    expected = {}
    for label in range(CLASSES):
        top, weight, count = np.zeros(WIDTH), 0.0, 0
        for name in ("site-00", "site-01", "site-02", "site-04"):
            tensors = sent[name].tensors
            for row, each in enumerate(tensors["classes"]):
                if each == label:
                    public = kit.peers.peer(name).weight  # in place of the number of samples
                    own = public if weighting == "samples" else 1
                    top += own * tensors["features"][row].astype(np.float64)
                    weight, count = weight + own, count + public
        if weight:
            expected[label] = top / weight, count
    assert found["classes"].tolist() == sorted(expected)
    for row, label in enumerate(found["classes"]):
        mean, count = expected[label]
        np.testing.assert_allclose(found["features"][row], mean, rtol=1e-6, atol=1e-5)
        assert found["counts"][row] == count


def test_class_listed_by_too_few_sites_is_not_sent(tmp_path):
    listed = {"site-00": ("0", "3"), "site-01": ("0", "3"), "site-02": ("0",), "site-03": ("0",)}
    kit = Kit(tmp_path, 4, "fedproto", classes=listed)
    rng = np.random.default_rng(2)
    # site-02 has samples of class 3, but does not list it.
    sent = {name: rows_of(rng, [0, 3], logits=False) for name in kit.names}
    (total,) = kit.sums(sent)
    assert total.knowledge.tensors["classes"].tolist() == [0]


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_site_without_samples_of_a_class_that_it_lists_sends_nothing(tmp_path, noise):
    """Otherwise, the sum would be the row of the only other site with samples of the class.

    In a run with differential privacy, the server could choose a noise that has this effect.
    """
    changes = {"privacy.noise-multiplier": noise, "models.pool": ["mlp"]} if noise else {}
    kit = Kit(tmp_path, 4, "fedproto", is_site=True, **changes)
    rng = np.random.default_rng(2)
    kit.server.start(1, kit.members, kit.names)
    kit.masked("site-00", rows_of(rng, [0, 1, 2, 3], logits=False))
    with pytest.raises(MaskingError, match="class") as error:
        kit.masked("site-01", rows_of(rng, [0, 2], logits=False))
    (tmp_path / "other").mkdir()
    other = Kit(tmp_path / "other", 4, "fedproto", is_site=True, **changes)
    other.server.start(1, other.members, other.names)
    with pytest.raises(MaskingError) as same:
        other.masked("site-01", rows_of(rng, [0, 1], logits=False))
    assert str(error.value) == str(same.value), "the message does not depend on the class"


def test_shares_are_withheld_if_too_few_survivors_list_a_class(tmp_path):
    listed = {f"site-{k:02d}": ("0", "1") if k < 3 else ("0",) for k in range(5)}
    kit = Kit(tmp_path, 5, "fedproto", classes=listed)
    sent = {n: rows_of(np.random.default_rng(2), [0, 1], logits=False) for n in kit.names}
    assert not kit.sums(sent, lost=["site-00"])
    assert "expected at least 3 sites that list class 1, got 2" in kit.notices[0]
    kit.state.start(2)
    (total,) = kit.sums(sent, 2, lost=["site-04"])
    assert total.knowledge.tensors["classes"].tolist() == [0, 1]


def felo_reply(rng, classes) -> Knowledge:
    return Knowledge({**rows_of(rng, classes).tensors, **weights_of(rng).tensors})


def test_felo_sums_class_means_over_all_and_weights_per_architecture(tmp_path):
    kit = Kit(tmp_path, 7, "felo", models=("cnn2", "mlp"))
    rng = np.random.default_rng(3)
    sent = {name: felo_reply(rng, [0, 1, 2, 3]) for name in kit.names}
    sums = {reply.client.name: reply for reply in kit.sums(sent)}
    assert sorted(sums) == ["+all", "+cnn2", "+mlp"]
    assert not any(name.startswith("weights/") for name in sums["+all"].knowledge.tensors)
    assert sums["+cnn2"].clients == ("site-00", "site-02", "site-04", "site-06")
    assert sums["+mlp"].clients == ("site-01", "site-03", "site-05")
    for name, info in (("+cnn2", "cnn2"), ("+mlp", "mlp")):
        own = [n for n in kit.names if kit.infos[n].model == info]
        weights = [min(kit.infos[n].samples, 100) for n in own]
        key = "weights/layer.weight"
        exact = np.average([sent[n].tensors[key] for n in own], axis=0, weights=weights)
        found = sums[name].knowledge.tensors
        np.testing.assert_allclose(found[key], exact, atol=1e-6)
        assert sums[name].client.model == info
        assert found["classes"].shape == (0,), "only the sum over all clients has class means"
        assert found["features"].shape == (0, WIDTH)
    features = np.mean([sent[n].tensors["features"].astype(float) for n in kit.names], axis=0)
    found = sums["+all"].knowledge.tensors["features"]
    np.testing.assert_allclose(found, features, rtol=1e-6, atol=1e-5)


def test_sum_with_too_few_survivors_does_not_affect_other_sums(tmp_path):
    # t = 6 of all, and all 4 of a model
    kit = Kit(tmp_path, 8, "felo", models=("cnn2", "mlp"), **{"felo.weighting": "samples"})
    rng = np.random.default_rng(3)
    sent = {name: felo_reply(rng, [0, 1]) for name in kit.names}
    sums = {reply.client.name: reply for reply in kit.sums(sent, lost=["site-00"])}
    assert any("expected at least 4 of 4 sites, got 3" in line for line in kit.notices)
    assert sorted(sums) == [ALL, "+mlp"]
    assert "weights/layer.weight" not in sums[ALL].knowledge.tensors
    assert sums[ALL].clients == tuple(kit.names[1:])
    weights = [kit.peers.peer(name).weight for name in kit.names[1:]]
    features = [np.float64(sent[name].tensors["features"]) for name in kit.names[1:]]
    mean = sum(w * x for w, x in zip(weights, features, strict=True)) / sum(weights)
    found = sums[ALL].knowledge.tensors["features"]
    assert np.abs(found - mean).max() < 1e-5


def test_survivors_are_kept_if_the_ledger_loses_its_last_line(tmp_path):
    kit = Kit(tmp_path, 5)
    kit.sums({name: weights_of(np.random.default_rng(0)) for name in kit.names})
    ledger = kit.root / "site-00" / "_masking" / "site-00.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    assert "shares" in lines[-1]
    ledger.write_text("".join(lines[:-1]))
    size = kit.masked("site-00", Knowledge()).tensors[f"{SHARES}/0"].shape[1]
    request = {"run": "run", "round": 1, "survivors": {"0": kit.names[:4]}}
    with pytest.raises(MaskingError, match=r"round 2|shares"):
        kit.site("site-00").revealed({REVEAL: json.dumps(request), f"{SHARES}/0": bytes(4 * size)})


@pytest.mark.parametrize("kept", [0, 2])
def test_ledger_from_a_backup_never_leads_to_a_second_reply(tmp_path, kept):
    """The ledger is older than the stored replies, of which only the last are kept."""
    kit = Kit(tmp_path, 5)
    rng = np.random.default_rng(0)
    requests = {}
    for number in range(1, 6):
        kit.state.start(number)
        assert kit.sums(of_all(rng, kit.names), number)
        requests[number] = kit.server.config("site-00")
    ledger = ledger_of(kit, "site-00")
    lines = ledger.read_text().splitlines(keepends=True)
    assert len(lines) == 10
    ledger.write_text("".join(lines[:kept]))
    kit.sites["site-00"] = kit.site("site-00")
    for number in range(1, 6):
        request = json.loads(requests[number][REQUEST]) | {"nonce": "11" * 16}
        for changed in (requests[number], {REQUEST: json.dumps(request)}):
            if number > 2 and changed is requests[number]:
                kit.masked_with("site-00", changed, weights_of(rng), number)  # the stored reply
                continue
            with pytest.raises(MaskingError, match=f"round {number} of run run: expected"):
                kit.masked_with("site-00", changed, weights_of(rng), number)
        told = {"run": "run", "round": number, "survivors": {"0": kit.names[:4]}}
        boxes = {f"{SHARES}/0": bytes(4 * BOX_BYTES)}
        with pytest.raises(MaskingError, match=r"already sent|no masked reply"):
            kit.sites["site-00"].revealed({REVEAL: json.dumps(told), **boxes})
    kit.state.start(6)
    assert kit.sums(of_all(rng, kit.names), 6), "the site takes part in later rounds"


def test_shares_of_an_earlier_round_are_not_revealed_after_those_of_a_later_round(tmp_path):
    """Otherwise, the stored reply of the later round would be deleted."""
    kit = Kit(tmp_path, 5)
    rng = np.random.default_rng(0)
    kit.server.start(1, kit.members, kit.names)
    kit.masked("site-00", weights_of(rng))
    kit.state.start(2)
    kit.sums(of_all(rng, kit.names), 2)
    told = {"run": "run", "round": 1, "survivors": {"0": kit.names}}
    boxes = {f"{SHARES}/0": bytes(5 * BOX_BYTES)}
    with pytest.raises(MaskingError, match="expected a round after 2"):
        kit.sites["site-00"].revealed({REVEAL: json.dumps(told), **boxes})


def test_weights_of_an_architecture_with_too_few_clients_are_not_sent(tmp_path):
    kit = Kit(tmp_path, 5, "felo", models=("cnn2", "cnn2", "mlp", "cnn2", "mlp"))
    rng = np.random.default_rng(3)
    sums = kit.sums({name: felo_reply(rng, [0, 1, 2, 3]) for name in kit.names})
    assert [reply.client.name for reply in sums] == ["+all", "+cnn2"]
    assert "weights of site-02, site-04 are not summed" in kit.notices[0]
    request = json.loads(kit.server.config("site-02")[REQUEST])
    assert list(request["cohorts"]) == ["0"]


def test_site_refuses_single_sums(tmp_path):
    """With two colluding sites, a sum needs four sites, but the server does not know this."""
    kit = Kit(tmp_path, 7, "felo", models=("cnn2", "mlp"), colluding=2)
    rng = np.random.default_rng(3)
    sums = kit.sums({name: felo_reply(rng, [0, 1, 2, 3]) for name in kit.names})
    assert sorted(reply.client.name for reply in sums) == ["+all", "+cnn2"]
    assert kit.notices[0] == (
        "client site-01 refuses a sum: masking: cohort: expected at least 4 sites, got 3"
    )
    assert "the sum of weights of mlp is lost: 0 of 3 clients replied" in kit.notices[3]


def test_site_without_samples_of_a_listed_class_refuses_only_class_means(tmp_path):
    kit, rng = Kit(tmp_path, 5, "felo", is_site=True), np.random.default_rng(3)
    sent = {name: felo_reply(rng, [0, 1, 2, 3]) for name in kit.names}
    sent["site-01"] = felo_reply(rng, [0, 1, 2])
    sums = {reply.client.name: reply for reply in kit.sums(sent)}
    assert sorted(sums) == [ALL, "+cnn2"]
    assert sums[ALL].clients == (*kit.names[:1], *kit.names[2:])
    features = [np.float64(sent[name].tensors["features"]) for name in sums[ALL].clients]
    found = sums[ALL].knowledge.tensors["features"]
    np.testing.assert_allclose(found, np.mean(features, axis=0), rtol=1e-6, atol=1e-5)
    assert sums["+cnn2"].clients == tuple(kit.names)
    (notice,) = kit.notices
    assert "client site-01 refuses a sum: a class that the peers file lists for this site" in notice


@pytest.mark.parametrize("field", [MASKED, SHARES])
def test_reply_without_a_vector_or_without_shares_is_not_summed(tmp_path, field):
    kit = Kit(tmp_path, 5)
    kit.server.start(1, kit.members, kit.names)
    sent = of_all(np.random.default_rng(3), kit.names)
    replies = [Reply(kit.infos[n], kit.masked(n, sent[n]), Measured({})) for n in kit.names]
    del replies[2].knowledge.tensors[f"{field}/0"]
    sizes = kit.server.masked_sizes(kit.infos["site-02"], lambda client: SIZES)
    with pytest.raises(KnowledgeError, match=f"{field}: missing"):
        MASKED_CONTRACT.check("site-02", replies[2].knowledge.tensors, {}, sizes)
    (total,) = kit.total(replies)
    assert total.clients == ("site-00", "site-01", "site-03", "site-04")


# Lost sites


def test_round_survives_losses_before_or_after_the_replies_but_not_both(tmp_path):
    rng = np.random.default_rng(4)
    kit = Kit(tmp_path, 6)  # t = 5
    sent = of_all(rng, kit.names)
    (total,) = kit.sums(sent, 1, lost=["site-02"])
    assert len(total.clients) == 5
    kit.state.start(2)
    (total,) = kit.sums(sent, 2, silent=["site-03"])
    assert len(total.clients) == 6
    kit.state.start(3)
    assert not kit.sums(sent, 3, lost=["site-02"], silent=["site-03"])
    assert "no reply from site-02, and no shares of their secrets from site-03" in kit.notices[-1]
    kit.state.start(4)
    assert not kit.sums(sent, 4, silent=["site-03", "site-04"])
    assert "the mask of site-00 is unknown: 4 shares do not determine" in kit.notices[-1]
    kit.state.start(5)
    assert not kit.sums(sent, 5, lost=["site-00", "site-01"])
    assert "expected at least 5 of 6 sites, got 4" in kit.notices[-2]
    kit.state.start(6)
    assert len(kit.sums(sent, 6)) == 1, "the next round works"


def test_site_that_restarts_is_called_again_for_its_shares(tmp_path):
    kit = Kit(tmp_path, 3, deployed=True)  # the shares of all three are needed
    kit.server = Unmasking(kit.config, "run", kit.state, kit.directory, timeout=20.0)
    proxy, calls = kit.members["site-01"].proxy, []
    reply = proxy.get_properties

    def get_properties(*args):
        calls.append(args)
        if len(calls) == 1:
            raise TimeoutError("the site restarts")
        return reply(*args)

    proxy.get_properties = get_properties
    (total,) = kit.sums(of_all(np.random.default_rng(4), kit.names))
    assert len(calls) == 2
    assert total.clients == tuple(kit.names)
    assert not kit.notices


def test_resumed_server_omits_a_lost_sum_again(tmp_path):
    """Otherwise, the sites would reject the changed request, and all their sums would be lost."""
    kit, rng = Kit(tmp_path, 6, "felo", models=("cnn2", "mlp")), np.random.default_rng(3)
    sent = {name: felo_reply(rng, [0, 1, 2, 3]) for name in kit.names}
    before = kit.sums(sent, lost=["site-03"])
    assert [reply.client.name for reply in before] == [ALL, "+cnn2"]
    kit.server = kit.new_server(resume=True)
    kit.state.start(1)
    after = kit.sums(sent)  # The lost site replies to the repeated request.
    assert [(each.client.name, each.clients) for each in after] == [
        (each.client.name, each.clients) for each in before
    ]
    for one, other in zip(before, after, strict=True):
        for name, value in one.knowledge.tensors.items():
            np.testing.assert_array_equal(other.knowledge.tensors[name], value)
    assert kit.notices[-1].endswith(
        "weights of mlp is lost: it was lost before the run was resumed"
    )


def test_sum_does_not_wait_for_a_site_whose_shares_are_not_needed(tmp_path):
    kit = Kit(tmp_path, 5, deployed=True)
    sent = of_all(np.random.default_rng(4), kit.names)
    begun, hanging = time.monotonic(), threading.Event()
    reply = kit.members["site-03"].proxy.get_properties
    kit.members["site-03"].proxy.get_properties = lambda *args: hanging.wait(20) and reply(*args)
    assert kit.sums(sent)
    assert time.monotonic() - begun < 0.9, "the time limit is a second"
    hanging.set()
    assert kit.sums(sent, 2, silent=["site-04"])
    assert time.monotonic() - begun < 1.8
    begun = time.monotonic()
    assert not kit.sums(sent, 3, lost=["site-00"], silent=["site-04"])
    assert time.monotonic() - begun > 0.9


def test_client_in_this_process_is_called_once(tmp_path):
    kit, begun = Kit(tmp_path, 3), time.monotonic()
    assert not kit.sums(of_all(np.random.default_rng(4), kit.names), silent=["site-01"])
    assert time.monotonic() - begun < 0.9, "the time limit is a second"
    assert "shares not revealed by site-01: no reply" in kit.notices[0]


def test_no_reply_gives_no_sum(tmp_path):
    kit = Kit(tmp_path, 3)
    assert kit.sums({}, lost=kit.names) == []


def test_site_that_reveals_nonsense_loses_its_shares_but_not_the_round(tmp_path):
    key = f"{SHARES}/0"
    rng = np.random.default_rng(4)
    for number, change in enumerate(
        (
            lambda reply: reply | {key: reply[key][:-1]},
            lambda reply: reply | {key: 3.0},
            lambda reply: {},
            lambda reply: reply | {key: bytes(len(reply[key]))},
            lambda reply: reply | {key: b"\1" * len(reply[key])},
        )
    ):
        kit = Kit(tmp_path / str(number), 5) if (tmp_path / str(number)).mkdir() is None else None
        honest = kit.sites["site-01"]

        class Bad:
            begin, masked, store = honest.begin, honest.masked, honest.store

            def revealed(self, config, change=change, honest=honest):
                return change(honest.revealed(config))

        kit.sites["site-01"] = Bad()
        sent = of_all(rng, kit.names)
        sums = kit.sums(sent)
        expected = (
            *["shares not revealed by site-01: shares/0: expected 330 and 0 bytes"] * 2,
            None,
            *[f"round 1: site-01 revealed wrong shares of the masks of {', '.join(kit.names)}"] * 2,
        )
        assert (expected[number] or "") in "".join(kit.notices)
        assert len(kit.notices) == (expected[number] is not None)
        weights = [min(info.samples, 100) for info in kit.infos.values()]
        field = "weights/layer.weight"
        exact = np.average([sent[n].tensors[field] for n in kit.names], axis=0, weights=weights)
        np.testing.assert_allclose(sums[0].knowledge.tensors[field], exact, atol=1e-6)


def test_wrong_shares_of_one_sum_do_not_affect_other_sums(tmp_path):
    # All 3 shares of a model are needed, but only 5 of 6 shares of the sum over all clients.
    for number, kinds in enumerate(((0,), (0, 1))):
        (directory := tmp_path / f"{number}").mkdir()
        kit, rng = Kit(directory, 6, "felo", models=("cnn2", "mlp")), np.random.default_rng(3)
        honest = kit.sites["site-01"]

        class Bad:
            begin, masked, store = honest.begin, honest.masked, honest.store

            def revealed(self, config, kinds=kinds, honest=honest):
                response = honest.revealed(config)
                for kind in kinds:
                    key = f"{SHARES}/{kind}"
                    response |= {key: b"\1" * (len(response[key]) - kind)}
                return response

        kit.sites["site-01"] = Bad()
        sums = kit.sums({name: felo_reply(rng, [0, 1, 2, 3]) for name in kit.names})
        found = sorted(reply.client.name for reply in sums)
        assert found == (["+all", "+cnn2"] if 1 in kinds else ["+all", "+cnn2", "+mlp"])
        assert any("site-01 revealed wrong shares of the masks" in line for line in kit.notices)
        assert any("sum of weights of mlp is lost" in line for line in kit.notices) == (1 in kinds)


def test_share_that_cannot_be_decrypted_is_not_needed(tmp_path):
    kit = Kit(tmp_path, 5)
    sent = of_all(np.random.default_rng(0), kit.names)
    kit.server.start(1, kit.members, kit.names)
    replies = []
    for name in kit.names:
        knowledge = kit.masked(name, sent[name])
        if name == "site-00":
            knowledge.tensors[f"{SHARES}/0"][3, 20] ^= 1
        replies.append(Reply(kit.infos[name], knowledge, Measured({})))
    assert len(kit.total(replies)) == 1
    assert kit.notices == [
        "round 1: site-03 revealed wrong shares of the masks of site-00, or these clients sent "
        "wrong shares to site-03"
    ]


def test_impossible_sum_is_dropped(tmp_path):
    kit = Kit(tmp_path, 3)
    kit.server.start(1, kit.members, kit.names)
    sent = of_all(np.random.default_rng(0), kit.names)
    replies = [Reply(kit.infos[n], kit.masked(n, sent[n]), Measured({})) for n in kit.names]
    vector = replies[0].knowledge.tensors[f"{MASKED}/0"]
    vector[2 * HEADER.index("weight") + 1] ^= 1 << 31
    assert not kit.total(replies)
    assert "impossible counters" in kit.notices[-1]


# What a site refuses


def test_invalid_cohorts_raise(tmp_path):
    kit = Kit(tmp_path, 5)
    names = kit.names
    sent = weights_of(np.random.default_rng(0))

    def refused(cohort, match, **more):
        request = {"nonce": "00" * 16, "cohorts": {"0": cohort}} | more
        with pytest.raises(MaskingError, match=match):
            kit.masked_with("site-00", {REQUEST: json.dumps(request)}, sent)

    refused([*names, "stranger"], "expected sites in the peers file, got stranger")
    refused(names[1:], "expected a list that includes this site, site-00")
    refused(names[:2], "expected at least 3 sites, got 2")
    refused(names[::-1], "sorted list of distinct names")
    refused([*names, names[-1]], "sorted list of distinct names")
    refused("all", "sorted list of distinct names")
    refused(names, "nonce", nonce="00" * 15)
    refused(names, "nonce", nonce=3)
    refused(names, "cohorts of this run", cohorts={"1": names})
    refused(names, "cohorts of this run", cohorts={"-1": names})
    refused(names, "cohorts of this run", cohorts={})
    for request in ({}, {REQUEST: "{"}, {REQUEST: "[]"}, {REQUEST: 3}, {REQUEST: '{"nonce": ""}'}):
        with pytest.raises(MaskingError, match="JSON with cohorts, nonce"):
            kit.masked_with("site-00", request, sent)


def test_minimum_of_the_peers_file_prevents_disjoint_cohorts(tmp_path):
    kit = Kit(tmp_path, 7)
    assert kit.peers.least == 4
    kit.server.start(1, kit.members, kit.names[:3])
    with pytest.raises(MaskingError, match=r"4 sites.*3"):
        kit.masked("site-00", weights_of(np.random.default_rng(0)))


def test_invalid_survivors_raise(tmp_path):
    kit = Kit(tmp_path, 5)  # t = 4
    names = kit.names
    kit.server.start(1, kit.members, names)
    for name in names:
        kit.masked(name, weights_of(np.random.default_rng(0)))
    size = kit.masked("site-00", Knowledge()).tensors[f"{SHARES}/0"].shape[1]

    def refused(names_told, match, boxes=None, **more):
        request = {"run": "run", "round": 1, "survivors": {"0": names_told}} | more
        boxes = bytes(size * len(names_told)) if boxes is None else boxes
        with pytest.raises(MaskingError, match=match):
            kit.sites["site-00"].revealed({REVEAL: json.dumps(request), f"{SHARES}/0": boxes})

    refused(names[1:], "including site-00")
    refused(names[:3], "expected at least 4 of 5 sites, got 3")
    refused([*names, "stranger"], "expected sites of the cohort")
    refused(names, "one share from each survivor", b"")
    refused(names, "sent no masked reply in round 2", round=2)
    refused(names, "sent no masked reply in round 1", run="other")
    refused(names, "expected a run", run="../run")
    refused(names, "expected a run", round=True)
    refused(names, "lanes of this site's masked reply", survivors={"1": names})


def test_differing_peers_files_are_detected(tmp_path):
    kit = Kit(tmp_path, 4)
    other = replace(kit.peers, least=4)
    kit.sites["site-01"] = kit.site("site-01", other)
    assert not kit.sums(of_all(np.random.default_rng(0), kit.names))
    assert "is lost" in kit.notices[-1]


def test_masks_of_different_cohorts_do_not_cancel(tmp_path):
    kit = Kit(tmp_path, 5)
    kit.server.start(1, kit.members, kit.names)
    sent = of_all(np.random.default_rng(0), kit.names)
    replies = []
    for name in kit.names[:4]:
        request = json.loads(kit.server.config(name)[REQUEST])
        if name == "site-00":
            request["cohorts"]["0"] = kit.names[:4]
        knowledge = kit.masked_with(name, {REQUEST: json.dumps(request)}, sent[name])
        replies.append(Reply(kit.infos[name], knowledge, Measured({})))
    replies[0].knowledge.tensors[f"{SHARES}/0"] = np.concatenate(
        [replies[0].knowledge.tensors[f"{SHARES}/0"], np.zeros((1, 94), np.uint8)]
    )
    assert not kit.total(replies)


# Repeated requests


def test_repeated_request_gets_identical_bytes_and_others_raise(tmp_path):
    kit = Kit(tmp_path, 4)
    kit.server.start(1, kit.members, kit.names)
    rng = np.random.default_rng(0)
    instruction = Knowledge({"weights/w": np.ones(3, np.float32)})
    first = kit.masked("site-00", weights_of(rng), 1, instruction)
    kit.sites["site-00"] = kit.site("site-00")  # restarted
    second = kit.masked("site-00", weights_of(rng), 1, instruction)
    assert all(np.array_equal(first.tensors[k], second.tensors[k]) for k in first.tensors)
    request = json.loads(kit.server.config("site-00")[REQUEST])
    changed = Knowledge({"weights/w": np.zeros(3, np.float32)})
    for other, content in (
        (request, changed),
        (request | {"nonce": "11" * 16}, instruction),
        (request | {"cohorts": {"0": kit.names[:3]}}, instruction),
    ):
        with pytest.raises(MaskingError, match="round 1 of run run: expected the same request"):
            kit.masked_with("site-00", {REQUEST: json.dumps(other)}, Knowledge(), 1, content)


def test_shares_are_revealed_for_one_list_of_survivors(tmp_path):
    kit = Kit(tmp_path, 6)
    sent = of_all(np.random.default_rng(0), kit.names)
    kit.sums(sent)
    first = dict(kit.revealed)
    kit.server._request.groups[0] = replace(kit.server._request.groups[0], survivors=())
    replies = [Reply(kit.infos[n], kit.masked(n, sent[n]), Measured({})) for n in kit.names]
    assert len(kit.total(replies)) == 1, "the same request again"
    assert kit.revealed == first
    kit.server._request.groups[0] = replace(kit.server._request.groups[0], survivors=())
    assert not kit.total(replies[1:]), "another list"
    assert all("has already sent its shares" in kit.revealed[n]["error"] for n in kit.names[1:])
    # Other shares for the same survivors: those of a second mask of the same site.
    kit.server._request.groups[0] = replace(kit.server._request.groups[0], survivors=())
    replies[0].knowledge.tensors[f"{SHARES}/0"][1, 5] ^= 1
    kit.revealed.clear()
    kit.total(replies)
    assert "error" in kit.revealed["site-01"]


def ledger_of(kit: Kit, name: str) -> Path:
    return kit.root / name / "_masking" / f"{name}.jsonl"


def test_truncated_ledger_never_leads_to_a_second_vector(tmp_path):
    kit = Kit(tmp_path, 4)
    kit.server.start(1, kit.members, kit.names)
    rng = np.random.default_rng(0)
    first = kit.masked("site-00", weights_of(rng))
    ledger = ledger_of(kit, "site-00")
    assert ledger.stat().st_mode & 0o077 == 0
    line = ledger.read_bytes()
    for content in (b"", line[:-5]):
        ledger.write_bytes(content)
        kit.sites["site-00"] = kit.site("site-00")
        again = kit.masked("site-00", weights_of(rng))
        assert np.array_equal(first.tensors[f"{MASKED}/0"], again.tensors[f"{MASKED}/0"])
        assert ledger.read_bytes() == line
        ledger.write_bytes(content)
        request = json.loads(kit.server.config("site-00")[REQUEST]) | {"nonce": "11" * 16}
        with pytest.raises(MaskingError, match="expected the same request"):
            kit.masked_with("site-00", {REQUEST: json.dumps(request)}, weights_of(rng))


@pytest.mark.parametrize("content", [b"nonsense\n", b'["run", 1, "masked reply"]\n', b"[[]]\n"])
def test_damaged_ledger_stops_all_replies(tmp_path, content):
    kit = Kit(tmp_path, 4)
    kit.server.start(1, kit.members, kit.names)
    kit.masked("site-00", weights_of(np.random.default_rng(0)))
    ledger_of(kit, "site-00").write_bytes(content)
    with pytest.raises(StateError, match="damaged"):
        kit.masked("site-00", weights_of(np.random.default_rng(0)))


def test_lost_reply_is_not_computed_again(tmp_path):
    kit = Kit(tmp_path, 4)
    kit.server.start(1, kit.members, kit.names)
    kit.masked("site-00", weights_of(np.random.default_rng(0)))
    for path in (kit.root / "site-00" / "run" / "site-00").glob("masked-*"):
        path.unlink()
    with pytest.raises(MaskingError, match="expected the same request"):
        kit.masked("site-00", weights_of(np.random.default_rng(0)))


def test_two_processes_of_a_site_send_the_same_vector(tmp_path):
    kit = Kit(tmp_path, 4)
    kit.server.start(1, kit.members, kit.names)
    envelope, request = Envelope("run", "fedavg", 1, "server"), kit.server.config("site-00")
    both, replies = [kit.site("site-00"), kit.site("site-00")], []
    for site in both:
        assert site.begin(envelope, Knowledge(), request) is None
        replies.append(
            [*site.masked(envelope, weights_of(np.random.default_rng(0))).tensors.values()]
        )
    assert not np.array_equal(replies[0][0], replies[1][0]), "each has a new mask"
    sent = [site.store(envelope, arrays) for site, arrays in zip(both, replies, strict=True)]
    assert np.array_equal(sent[0][0], sent[1][0])


# A server that is stopped


def test_server_that_resumes_repeats_its_requests(tmp_path):
    kit = Kit(tmp_path, 6)
    rng = np.random.default_rng(0)
    sent = of_all(rng, kit.names)
    kit.server.start(1, kit.members, kit.names)
    before = {name: kit.server.config(name) for name in kit.names}
    kit.server = kit.new_server(resume=True)  # stopped after the cohort was written
    assert kit.server.start(1, kit.members, [*kit.names]) == {*kit.names}
    assert {name: kit.server.config(name) for name in kit.names} == before

    class StoppedError(Exception):
        pass

    def stop(*args):
        raise StoppedError

    ask, kit.server._ask = kit.server._ask, stop  # stopped after the survivors were written
    with pytest.raises(StoppedError):
        kit.sums(sent, 1, lost=["site-00"])
    kit.server = kit.new_server(resume=True)
    kit.server._sum = stop  # stopped after the shares were requested; site-00 is back
    with pytest.raises(StoppedError):
        kit.sums(sent, 1)
    kit.server = kit.new_server(resume=True)
    (total,) = kit.sums(sent, 1)
    assert total.clients == tuple(kit.names[1:]), "the survivors of the first request"
    assert ask is not None


def test_server_that_resumes_without_a_survivor_loses_the_round_only(tmp_path):
    kit = Kit(tmp_path, 6)
    sent = of_all(np.random.default_rng(0), kit.names)
    kit.sums(sent, 1)
    kit.server = kit.new_server(resume=True)
    assert not kit.sums(sent, 1, lost=["site-05"])
    assert "5 of 6 clients replied" in kit.notices[-1]
    kit.state.start(2)
    assert len(kit.sums(sent, 2, lost=["site-05"])) == 1


def test_new_client_does_not_join_the_cohort_of_a_repeated_round(tmp_path):
    kit = Kit(tmp_path, 6)
    kit.server.start(1, kit.members, kit.names[:5])
    kit.server = kit.new_server(resume=True)
    assert kit.server.start(1, kit.members, kit.names) == {*kit.names[:5]}


def test_damaged_file_of_requests_stops_the_run(tmp_path):
    kit = Kit(tmp_path, 3)
    for text in ("{", "[]", '{"1": 3}', '{"x": ["00", []]}'):
        (kit.directory / "secure-aggregation.json").write_text(text)
        with pytest.raises(StateError, match="secure-aggregation"):
            kit.new_server(resume=True)


# What the server sees


SPLIT = shamir.split


def drawing(drawn: list[bytes], secret: bytes, *numbers: int) -> list[bytes]:
    """Split a secret, and keep it in `drawn`."""
    drawn.append(secret)
    return SPLIT(secret, *numbers)


def view(kit: Kit, number: int, values: np.ndarray, *, mask: bool = True) -> np.ndarray:
    """Return the vectors that a server sees after it has removed the masks b_i that it learns."""
    kit.server.start(number, kit.members, kit.names)
    seen = []
    for name, value in zip(kit.names, values, strict=True):
        site = kit.sites[name]
        sent = Knowledge(
            {k: v.copy() for k, v in weights_of(np.random.default_rng(0)).tensors.items()}
        )
        sent.tensors["weights/layer.weight"][:] = value
        envelope = Envelope("run", "fedavg", number, "server")
        assert site.begin(envelope, Knowledge(), kit.server.config(name)) is None
        layout = site._layout(site._sums[0], sent, len(kit.names))
        if mask:
            drawn: list[bytes] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shamir, "split", partial(drawing, drawn))
                vector = site.masked(envelope, sent).tensors[f"{MASKED}/0"]
            layout.add_mask(vector, drawn[0], -1)
        else:
            vector, _ = layout.encode(sent.tensors, site._weight, site._peers.max_weight)
        seen.append(vector)
    return np.stack(seen)


def chi_square(values: np.ndarray, other: np.ndarray | None = None) -> float:
    """Return the p-value of uniform bytes, or of equal distributions of bytes."""
    from scipy import stats

    counts = np.bincount(values.reshape(-1).view(np.uint8), minlength=256)
    if other is None:
        return stats.chisquare(counts).pvalue
    others = np.bincount(other.reshape(-1).view(np.uint8), minlength=256)
    seen = (counts + others) > 0
    return stats.chi2_contingency([counts[seen], others[seen]]).pvalue


@pytest.mark.parametrize("keyings", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_view_of_the_server_depends_only_on_the_sum(tmp_path, keyings):
    kit = Kit(tmp_path, 3, cap=20)
    one, two = np.array([1.0, 2.0, 3.0]), np.array([-20.0, 40.0, -14.0])
    assert one.sum() == two.sum()
    number, views = itertools.count(1), {}
    for masked in (True, False):
        for name, values in (("one", one), ("two", two)):
            count = keyings if masked else 20
            seen = [view(kit, next(number), values, mask=masked) for _ in range(count)]
            views[name, masked] = np.stack(seen)  # [keyings, sites, words]
    for name in ("one", "two"):
        totals = views[name, True].astype(np.uint64).sum(1) % 2**32
        assert (totals[:, -6:] == totals[0, -6:]).all(), "the sum is always the same"
        for pair in ((0, 1), (0, 2), (1, 2)):
            assert chi_square(views[name, True][:, pair]) > 1e-6, "any two vectors are uniform"
    for site in range(3):
        left, right = views["one", True][:, site], views["two", True][:, site]
        assert chi_square(left, right) > 1e-6, "the two views cannot be told apart"
    left, right = views["one", False][:, 0, -6:], views["two", False][:, 0, -6:]
    assert chi_square(left, right) < 1e-12, "without masks, the test tells them apart"
    assert chi_square(left) < 1e-12


def test_page_states_the_numbers_of_honest_sites(tmp_path):
    page = Path(__file__).parents[1] / "docs" / "secure-aggregation.md"
    cells = [line.strip("| ").split(" | ") for line in page.read_text().splitlines()]
    rows = {name: list(map(int, values)) for name, *values in cells if len(values) == 5
            and all(map(str.isdecimal, values))}  # fmt: skip
    sites = [3, 4, 5, 10, 50]
    least = [max(3, n // 2 + 1) for n in sites]
    assert rows["sites *n*"] == sites
    assert rows["threshold *t* (*c* = 1)"] == [threshold(n, 1) for n in sites]
    assert rows["maximum number of lost sites"] == [n - threshold(n, 1) for n in sites]
    assert rows["minimum number of sites in a round, by default"] == least
    assert least == [simulated_peers(map(str, range(n)))[0].least for n in sites]
    honest = "honest sites in a sum"
    curious = [threshold(n, 1) - 1 for n in sites]
    assert rows[f"{honest}, server that follows the protocol"] == curious
    for lane, smallest in (("all architectures", least), ("one architecture", [3] * 5)):
        found = [
            min(2 * threshold(m, 1) - m - 1 for m in range(low, n + 1))
            for low, n in zip(smallest, sites, strict=True)
        ]
        assert rows[f"{honest} over {lane}, malicious server"] == found


@pytest.mark.parametrize("colluding", [1, 2, 3])
@pytest.mark.parametrize(("method", "number"), [("fedavg", 0), ("heterofl", 0), ("felo", 1)])
def test_each_sum_has_two_sites_more_than_the_colluding_sites(method, number, colluding, tmp_path):
    """Sums over an architecture may have fewer sites than the peers file requires in a round."""
    needs = {"heterofl.masked": False, "heterofl.weighting": "samples"}
    changes = needs if method == "heterofl" else {}
    kit = Kit(tmp_path, 12, method, colluding=colluding, **changes)
    smallest = 7 if method == "fedavg" else max(3, colluding + 2)
    envelope = Envelope("run", method, 1, "server")
    for size in (smallest - 1, smallest):
        cohorts = {str(number): kit.names[:size]}
        request = {REQUEST: json.dumps({"nonce": "00" * 16, "cohorts": cohorts})}
        site = kit.site("site-00")
        if size == smallest:
            assert site.begin(envelope, Knowledge(), request) is None
            continue
        with pytest.raises(MaskingError, match=rf"{smallest} sites.*{size}"):
            site.begin(envelope, Knowledge(), request)
    for sites in range(max(3, colluding + 2), 60):
        assert threshold(sites, colluding) >= max(3, colluding + 2)
        assert 2 * threshold(sites, colluding) - sites - colluding >= 2


@pytest.mark.parametrize("sites", [3, 4, 5])
def test_lying_server_and_a_colluding_site_learn_only_sums_over_two_honest_sites(tmp_path, sites):
    """Search all lists of survivors that a server may send to each honest site.

    Unknowns are the vectors x_i of the honest sites, their masks b_i, and the masks s_ij of two
    honest sites. The server knows y_i = x_i + b_i + sum of +-s_ij, each b_i for which t sites
    reveal shares, and each s_ij that i or j reveals. By linear algebra, the smallest set of honest
    sites of which it learns the sum must have 2 t - n - c sites.
    """
    kit = Kit(tmp_path, sites)
    kit.server.start(1, kit.members, kit.names)
    for name in kit.names:
        kit.masked(name, weights_of(np.random.default_rng(0)))
    honest, needed = list(range(sites - 1)), kit.peers.threshold(sites)
    lists = {
        k: [each for each in all_lists(sites) if accepts(kit, kit.names[k], each)] for k in honest
    }
    assert all(lists.values())
    pairs = list(itertools.combinations(honest, 2))
    smallest = sites
    for chosen in itertools.product(*lists.values()):
        told = dict(zip(honest, chosen, strict=True))
        known_b = [
            i
            for i in honest
            if sum(i in told[k] for k in honest) + 1 >= needed  # 1 colludes
        ]
        known_s = [(i, j) for i, j in pairs if j not in told[i] or i not in told[j]]
        unknown = {**{("b", i): n for n, i in enumerate(i for i in honest if i not in known_b)}}
        unknown |= {
            ("s", p): len(unknown) + n for n, p in enumerate(p for p in pairs if p not in known_s)
        }
        matrix = np.zeros((len(honest), max(len(unknown), 1)))
        for row, i in enumerate(honest):
            if ("b", i) in unknown:
                matrix[row, unknown["b", i]] = 1
            for pair in pairs:
                if i in pair and ("s", pair) in unknown:
                    matrix[row, unknown["s", pair]] = 1 if i == pair[0] else -1
        # The server learns sum of a_i x_i for each a with a matrix = 0.
        for size in range(1, len(honest) + 1):
            if any(
                np.linalg.matrix_rank(matrix[list(subset)]) < size
                for subset in itertools.combinations(range(len(honest)), size)
            ):
                smallest = min(smallest, size)
                break
    assert smallest >= 2
    assert smallest >= 2 * needed - sites - 1


def all_lists(sites: int) -> list[tuple[int, ...]]:
    return [
        each for size in range(1, sites + 1) for each in itertools.combinations(range(sites), size)
    ]


def accepts(kit: Kit, name: str, numbers: tuple[int, ...]) -> bool:
    """Return whether a site reveals its shares for a list of survivors; nothing is recorded."""
    site, lane = kit.sites[name], kit.sites[name]._lanes[0]
    try:
        names = site._survivors(lane, [kit.names[number] for number in numbers])
    except MaskingError:
        return False
    return not site._fault(lane, names)


def test_thresholds_are_those_of_the_design(tmp_path):
    assert [threshold(n, 1) for n in (3, 4, 5, 10, 50)] == [3, 4, 4, 7, 34]
    kit = Kit(tmp_path, 10)
    for sites in (3, 4, 5, 10, 50, MAX_PEERS):
        assert kit.peers.threshold(sites) == threshold(sites, 1)
        assert 2 * threshold(sites, 1) - sites - 1 >= 2


def test_ledger_alone_refuses_a_second_request(tmp_path):
    ledger, written = Ledger(tmp_path, "site-00"), []
    assert ledger.commit("run", 1, "shares", "aa", lambda: written.append(1))
    assert not ledger.commit("run", 1, "shares", "aa", lambda: written.append(2))
    with pytest.raises(MaskingError, match="already sent its shares"):
        ledger.commit("run", 1, "shares", "bb", lambda: written.append(3))
    assert ledger.commit("run", 2, "shares", "bb", lambda: None), "another round"
    assert written == [1]


def test_sum_of_another_number_of_sites_is_dropped(tmp_path):
    kit = Kit(tmp_path, 3)
    kit.server.start(1, kit.members, kit.names)
    sent = of_all(np.random.default_rng(0), kit.names)
    replies = [Reply(kit.infos[n], kit.masked(n, sent[n]), Measured({})) for n in kit.names]
    replies[0].knowledge.tensors[f"{MASKED}/0"][2 * HEADER.index("sites")] += 1
    assert not kit.total(replies)
    assert "the masks do not cancel" in kit.notices[-1]


# Clients that spoil sums


def altered_replies(kit: Kit, sent, number: int, change) -> list[Reply]:
    """Return the masked replies of a round; `change` modifies the tensors of site-01."""
    kit.state.start(number)
    kit.server.start(number, kit.members, kit.names)
    replies = []
    for name in kit.names:
        tensors = {k: v.copy() for k, v in kit.masked(name, sent[name], number).tensors.items()}
        if name == "site-01":
            change(tensors)
        replies.append(Reply(kit.infos[name], Knowledge(tensors), Measured({})))
    return replies


def test_share_that_changes_the_secret_by_one_is_recognized(tmp_path):
    """Adding 1/weight to a share adds 1 to the secret, which still has 32 bytes."""
    kit, prime = Kit(tmp_path, 10), PRIME
    honest = kit.sites["site-01"]
    weight = lagrange_weight(2, range(1, 11))

    class Bad:
        begin, masked, store = honest.begin, honest.masked, honest.store

        def revealed(self, config):
            reply = honest.revealed(config)
            shares = reply[f"{SHARES}/0"]
            moved = [
                (int.from_bytes(shares[k : k + 66], "big") + pow(weight, -1, prime)) % prime
                for k in range(0, len(shares), 66)
            ]
            return reply | {f"{SHARES}/0": b"".join(s.to_bytes(66, "big") for s in moved)}

    kit.sites["site-01"] = Bad()
    sent = of_all(np.random.default_rng(4), kit.names)
    (total,) = kit.sums(sent)
    weights = [kit.peers.peer(name).weight for name in kit.names]
    field = "weights/layer.weight"
    exact = np.average([sent[n].tensors[field] for n in kit.names], axis=0, weights=weights)
    np.testing.assert_allclose(total.knowledge.tensors[field], exact, atol=1e-5)
    assert kit.notices[0].startswith("round 1: site-01 revealed wrong shares of the masks of")


def test_client_whose_seed_does_not_match_its_commitment_is_named(tmp_path):
    kit = Kit(tmp_path, 5)

    def change(tensors) -> None:
        tensors[f"{COMMITMENT}/0"][0, 0] ^= 1

    assert not kit.total(
        altered_replies(kit, of_all(np.random.default_rng(0), kit.names), 1, change)
    )
    assert kit.notices[0] == (
        "round 1: site-01 sent shares of a seed that does not match its commitment"
    )


def lagrange_weight(number: int, numbers) -> int:
    """Return the factor of a share in the value at 0 of the polynomial through all shares."""
    weight = 1
    for other in set(numbers) - {number}:
        weight = weight * other * pow(other - number, -1, PRIME) % PRIME
    return weight


@pytest.mark.parametrize("victim", ["seed", "share"])
@pytest.mark.parametrize("sites", [5, 7, 10])
def test_two_malicious_sites_cannot_make_an_honest_site_seem_malicious(tmp_path, sites, victim):
    """Two shares are changed together, so that the others look wrong.

    For "seed", all shares lie on one polynomial with another value at 0. For "share", all shares
    except that of site-00 determine the secret.
    """
    kit = Kit(tmp_path, sites)
    numbers = range(1, sites + 1)
    first, second = lagrange_weight(4, numbers), lagrange_weight(5, numbers)
    # Moment 1 of the errors is 0, or that of the shares without share 1 is.
    factors = (4, 5) if victim == "seed" else (1 - 4, 1 - 5)
    errors = [second * factors[1] % PRIME, -first * factors[0] % PRIME]

    class Bad:
        def __init__(self, honest, error):
            self.begin, self.masked, self.store = honest.begin, honest.masked, honest.store
            self._honest, self._error = honest, error

        def revealed(self, config):
            reply = self._honest.revealed(config)
            shares = reply[f"{SHARES}/0"]
            moved = [
                (int.from_bytes(shares[k : k + 66], "big") + self._error) % PRIME
                for k in range(0, len(shares), 66)
            ]
            return reply | {f"{SHARES}/0": b"".join(s.to_bytes(66, "big") for s in moved)}

    for name, error in zip(("site-03", "site-04"), errors, strict=True):
        kit.sites[name] = Bad(kit.sites[name], error)
    sums = kit.sums(of_all(np.random.default_rng(4), kit.names))
    assert bool(sums) is (sites - 2 >= threshold(sites, 1))
    named = [line for line in kit.notices if "wrong shares" in line or "does not match" in line]
    assert [line.split()[2] for line in named] == ["site-03", "site-04"]
    assert all("revealed wrong shares of the masks of" in line for line in named)


def test_sites_with_different_public_sets_have_no_sum(tmp_path):
    """Otherwise, a server could choose the public set of all sites except one."""
    kit = Kit(tmp_path, 5)
    kit.infos["site-01"] = replace(kit.infos["site-01"], public="0" * 16)
    kit.sites["site-01"] = kit.site("site-01")
    assert not kit.sums(of_all(np.random.default_rng(0), kit.names))
    assert "site-01 derived other keys than most clients" in kit.notices[0]


def test_wrong_seed_costs_one_reconstruction_per_reply(tmp_path, monkeypatch):
    """The shares of the other masks are joined once, and again when all clients have replied."""
    kit, joined = Kit(tmp_path, 9, deployed=True), []

    def counted(shares):
        joined.append(len(shares))
        return shamir.join(shares)

    def change(tensors) -> None:
        tensors[f"{COMMITMENT}/0"][0, 0] ^= 1

    monkeypatch.setattr("fedhet.server.unmasking.join", counted)
    sent = of_all(np.random.default_rng(0), kit.names)
    assert not kit.total(altered_replies(kit, sent, 1, change))
    assert kit.notices[0].endswith(
        "site-01 sent shares of a seed that does not match its commitment"
    )
    assert sorted(joined) == [threshold(9, 1)] * 9 + [8] + [9] * 9


def test_client_that_spoils_every_box_is_named_and_excluded(tmp_path):
    kit = Kit(tmp_path, 5)
    health = kit.state.health = ClientHealth(3, 0, kit.notices.append)

    def change(tensors) -> None:
        tensors[f"{SHARES}/0"][:, 20] ^= 1

    for number in (1, 2, 3):
        assert health.eligible(number, kit.names) == kit.names
        sent = of_all(np.random.default_rng(number), kit.names)
        assert not kit.total(altered_replies(kit, sent, number, change))
        assert kit.notices[-2].startswith(f"round {number}: site-01 sent wrong shares of its mask")
        kit.state.update_health(kit.names)
    assert health.eligible(4, kit.names) == [name for name in kit.names if name != "site-01"]


def test_run_ends_if_an_unknown_client_spoils_each_sum(tmp_path):
    """One word of a masked vector suffices, and it does not reveal which client changed it."""
    kit = Kit(tmp_path, 5)

    def change(tensors) -> None:
        tensors[f"{MASKED}/0"][2 * HEADER.index("sites")] += 1

    rng = np.random.default_rng(0)
    for number in (1, 2):
        assert not kit.total(altered_replies(kit, of_all(rng, kit.names), number, change))
        assert "the masks do not cancel" in kit.notices[-1]
    honest = altered_replies(kit, of_all(rng, kit.names), 3, lambda tensors: None)
    assert kit.total(honest), "the count starts again"
    for number in (4, 5):
        assert not kit.total(altered_replies(kit, of_all(rng, kit.names), number, change))
    replies = altered_replies(kit, of_all(rng, kit.names), 6, change)
    with pytest.raises(StateError, match="spoiled in 3 consecutive rounds"):
        kit.total(replies)


@pytest.mark.parametrize("value", ["instruction", "setting", "pool"])
def test_sites_with_different_instructions_or_settings_have_no_key_in_common(tmp_path, value):
    """Without a common key, the server cannot even unmask the sum of the other sites."""
    kit = Kit(tmp_path, 5)
    if value == "setting":
        config = kit.config
        kit.config = config.replacing(training=config.run.training.model_copy(update={"lr": 1e-12}))
        kit.sites["site-00"] = kit.site("site-00")
        kit.config = config
    elif value == "pool":  # The server chooses the models of sites without their own model.
        kit.pool = "mlp"
        kit.sites["site-00"] = kit.site("site-00")
    kit.server.start(1, kit.members, kit.names)
    sent = of_all(np.random.default_rng(0), kit.names)
    told = Knowledge({"weights/layer.weight": np.ones((2, 3), np.float32)})
    other = Knowledge({"weights/layer.weight": np.zeros((2, 3), np.float32)})
    replies = []
    for name in kit.names:
        is_other = value == "instruction" and name == "site-00"
        knowledge = kit.masked(name, sent[name], instruction=other if is_other else told)
        replies.append(Reply(kit.infos[name], knowledge, Measured({})))
    assert not kit.total(replies)
    assert kit.notices[0].startswith("round 1: site-00 derived other keys than most clients")
    shares = kit.revealed["site-01"][f"{SHARES}/0"]
    assert not any(shares[:66]), "the share of site-00's seed cannot be decrypted"


def test_site_does_not_reply_again_with_other_settings(tmp_path):
    kit = Kit(tmp_path, 3)
    sent = of_all(np.random.default_rng(0), kit.names)
    kit.server.start(1, kit.members, kit.names)
    kit.masked("site-00", sent["site-00"])
    table = kit.config.run.training.model_copy(update={"lr": 1e-12})
    kit.config = kit.config.replacing(training=table)
    kit.sites["site-00"] = kit.site("site-00")
    with pytest.raises(MaskingError, match="expected the same request as before"):
        kit.masked("site-00", sent["site-00"])


@pytest.mark.parametrize(("method", "is_lost"), [("fedavg", True), ("fml", False)])
def test_sites_with_different_architectures_have_no_key_in_common(tmp_path, method, is_lost):
    """Models of the same layout can differ, such as a network with and without dropout.

    If sites send a common model, their other models may differ.
    """
    kit = Kit(tmp_path, 5, method)
    kit.server.start(1, kit.members, kit.names)
    sent = of_all(np.random.default_rng(0), kit.names)
    replies = []
    for k, name in enumerate(kit.names):
        envelope = Envelope("run", method, 1, "server")
        site = kit.sites[name]
        assert site.begin(envelope, Knowledge(), kit.server.config(name)) is None
        reply = site.masked(envelope, sent[name], "mlp" if k else "mlp-dropout")
        site.store(envelope, list(reply.tensors.values()))
        replies.append(Reply(kit.infos[name], reply, Measured({})))
    assert (not kit.total(replies)) is is_lost


def test_cohort_dominated_by_one_weight_raises(tmp_path):
    kit = Kit(tmp_path, 5)  # weights 20 to 60
    heavy = replace(kit.peers.peer("site-04"), weight=110)
    peers = replace(kit.peers, peers=(*kit.peers.peers[:4], heavy))
    site = kit.site("site-04", peers)
    for names, is_refused in ((kit.names, False), (["site-00", "site-01", "site-04"], True)):
        request = {"nonce": "00" * 16, "cohorts": {"0": names}}
        envelope = Envelope("run", "fedavg", 1, "server")
        if is_refused:
            with pytest.raises(MaskingError, match="no site with more weight than the other"):
                site.begin(envelope, Knowledge(), {REQUEST: json.dumps(request)})
        else:
            assert site.begin(envelope, Knowledge(), {REQUEST: json.dumps(request)}) is None
