"""Low-rank updates: sent factors, rejected factors, and aggregation on the server."""

import numpy as np
import pytest
from federation import Server, small
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import altered, reply_of

from fedhet.algorithms.weights import energy_kept, factors, min_rank
from fedhet.base.errors import KnowledgeError
from fedhet.runs.measures import Measured
from fedhet.server.reply import Reply, magnitudes_of
from fedhet.server.round import RoundState
from fedhet.server.steps import expand_factors
from fedhet.wire.contract import Contract, Sizes, TensorField
from fedhet.wire.factors import FactorsField, max_rank, packed, unpacked
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

SENDER = "client-3"
SHAPES = {
    "conv.weight": ((6, 2, 2, 2), "float32"),
    "fc.weight": ((5, 4), "float32"),
    "fc.bias": ((5,), "float32"),
    "bn.running_var": ((6,), "float32"),
    "bn.count": ((), "int64"),
}
CONTRACT = Contract((FactorsField("update", "change"), TensorField("other", "int64", (), "")))


def f32(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sound():
    """Return an update with rank-3 factors of the convolution, and all other tensors in full."""
    return {
        "update/conv.weight/left": f32(6, 3),
        "update/conv.weight/right": f32(3, 8),
        "update/fc.weight": f32(5, 4),
        "update/fc.bias": f32(5),
        "update/bn.running_var": -np.ones(6, np.float32),
        "update/bn.count": np.array(7),
        "other": np.array(1),
    }


def check(tensors):
    CONTRACT.check(SENDER, tensors, {}, Sizes({}, {"update": SHAPES}))


# What is refused


def test_matrix_is_sent_in_full_or_as_factors():
    check(sound())
    none = {"update/conv.weight/left": f32(6, 0), "update/conv.weight/right": f32(0, 8)}
    check({**sound(), **none})
    whole = {k: v for k, v in sound().items() if "conv" not in k}
    check({**whole, "update/conv.weight": f32(6, 2, 2, 2)})


CONV = "update/conv.weight"
REFUSED = {
    "a rank whose factors are larger": (
        {f"{CONV}/left": f32(6, 4), f"{CONV}/right": f32(4, 8)},
        "must be at most 3, got 4",
    ),
    "half of a matrix": ({f"{CONV}/right": None}, "missing|not a tensor"),
    "both": ({CONV: f32(6, 2, 2, 2)}, "not a tensor of the client's model"),
    "factors of a vector": ({"update/fc.bias/left": f32(5, 1)}, "not a tensor"),
    "another rank": ({f"{CONV}/right": f32(2, 8)}, r"\[3, 8\], got float32 \[2, 8\]"),
    "other rows": ({f"{CONV}/left": f32(7, 3)}, r"\[6, 3\], got float32 \[7, 3\]"),
    "no axis": ({f"{CONV}/left": np.float32(1)[()] * np.ones((), np.float32)}, "expected float32"),
    "another type": ({f"{CONV}/left": np.ones((6, 3))}, "got float64"),
    "not a number": ({f"{CONV}/left": np.full((6, 3), np.nan, np.float32)}, "NaN|nan"),
    "a product beyond all measure": (
        {f"{CONV}/left": np.full((6, 3), 1e7, np.float32), f"{CONV}/right": f32(3, 8) * 1e7},
        "product must be at most 1e",
    ),
    "a factor beyond all measure": (
        {f"{CONV}/left": np.full((6, 3), 1e20, np.float32), f"{CONV}/right": f32(3, 8) * 0},
        "magnitude must be at most",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_factors_raise(case):
    changes, words = REFUSED[case]
    tensors = {**sound(), **changes}
    with pytest.raises(KnowledgeError, match=words) as caught:
        check({k: v for k, v in tensors.items() if v is not None})
    assert caught.value.sender == SENDER
    assert caught.value.field.startswith("update/")


# What is sent


matrices = st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**32 - 1))


@settings(deadline=None, max_examples=60)
@given(matrices, st.floats(0.01, 1.0))
def test_rank_is_the_smallest_with_enough_energy(drawn, energy):
    """Eq. 8 with the eigenvalues of M^T M instead of the singular values of M."""
    rows, columns, seed = drawn
    rng = np.random.default_rng(seed)
    scale = 10.0 ** -np.arange(columns)
    matrix = rng.normal(size=(rows, columns)) * scale
    squares = np.sort(np.linalg.eigvalsh(matrix.T @ matrix).clip(min=0))[::-1]
    left, right = factors(matrix, energy)
    rank = left.shape[1]
    assert (left.shape, right.shape) == ((rows, rank), (rank, columns))
    shares = [squares[:k].sum() / squares.sum() for k in range(len(squares) + 1)]
    assert shares[rank] > energy - 1e-9
    assert rank == 0 or shares[rank - 1] <= energy + 1e-9
    lost = np.square(matrix - left @ right).sum()
    assert lost == pytest.approx(squares[rank:].sum(), rel=1e-6, abs=1e-12)


def test_zero_matrix_has_rank_one():
    left, right = factors(np.zeros((4, 3), np.float32), 0.9)
    assert (left.shape, right.shape) == ((4, 0), (0, 3))
    assert min_rank(np.array([2.0, 1.0, 0.0]), 1.0) == 2


def test_energy_rises_over_the_rounds():
    """Eq. 9 at t = r / R."""
    found = [energy_kept(r, 4, 0.5, 0.9) for r in (1, 2, 4)]
    np.testing.assert_allclose(found, [0.6, 0.7, 0.9])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 8))
def test_packing_round_trips(seed, rank):
    rng = np.random.default_rng(seed)
    changes = {
        name: rng.normal(size=shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()
    }
    changes["conv.weight"] = (
        (rng.normal(size=(6, rank)) @ rng.normal(size=(rank, 8)))
        .reshape(6, 2, 2, 2)
        .astype(np.float32)
    )
    sent = packed(changes, lambda matrix: factors(matrix, 1 - 1e-9))
    assert ("conv.weight/left" in sent) == (rank <= 3)
    assert sum(v.size for v in sent.values()) <= sum(v.size for v in changes.values())
    check({**{f"update/{k}": v for k, v in sent.items()}, "other": np.array(1)})
    found = unpacked(sent, SHAPES)
    assert list(found) == list(SHAPES)
    for name, value in changes.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4)


def test_maximum_rank_is_the_largest_that_saves_bytes():
    for rows, columns in [(1, 1), (6, 8), (64, 128), (10, 64), (2, 1000)]:
        most = max_rank((rows, columns))
        assert most * (rows + columns) < rows * columns or most == 0
        assert (most + 1) * (rows + columns) >= rows * columns


# What the server makes of it


def test_products_are_computed_lazily():
    tensors = sound()
    client = ClientInfo("a", "mlp", 10, 10, "image", (1, 8, 8))
    sizes = Sizes({}, {"update": SHAPES})
    reply = Reply(client, Knowledge(tensors), Measured({}))
    state = RoundState(1, print)
    (expanded,) = expand_factors(
        [reply], contract=CONTRACT, sizes=lambda client: sizes, state=state
    )
    whole = expanded.knowledge
    assert list(whole.group("update")) == list(SHAPES)
    product = tensors[f"{CONV}/left"] @ tensors[f"{CONV}/right"]
    np.testing.assert_array_equal(whole.tensors[CONV], product.reshape(6, 2, 2, 2))
    squares = [
        np.square(v.astype(float))
        for v in (product, *(tensors[f"update/{n}"] for n in ("fc.weight", "fc.bias")))
    ]
    total = np.sqrt(sum(s.sum() for s in squares) / sum(s.size for s in squares))
    assert magnitudes_of(whole)["update"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("value", [1e7, 3e30])
def test_reply_with_an_oversized_product_is_dropped(value):
    tensors = sound() | {f"{CONV}/left": np.full((6, 3), value, "float32")}
    tensors[f"{CONV}/right"] = np.full((3, 8), value, "float32")
    client = ClientInfo("a", "mlp", 10, 10, "image", (1, 8, 8))
    reply, state = Reply(client, Knowledge(tensors), Measured({})), RoundState(1, lambda text: None)
    sizes = Sizes({}, {"update": SHAPES})
    assert not [*expand_factors([reply], contract=CONTRACT, sizes=lambda _: sizes, state=state)]
    assert state.record.failed["a"].startswith(f"{CONV}: ")


@pytest.mark.parametrize("average", ["mean", "median"])
def test_averages_are_of_the_changes_not_of_the_factors(tmp_path, average):
    """One of five clients sends the same change as factors with other signs, without effect."""
    config = small("fedkd", clients=5, max_samples=300, **{"defense.average": average})
    results = []
    for name, flip in (("plain", False), ("flipped", True)):
        server = Server(config, tmp_path / name)
        replies = server.train(server.instruct(1))
        if flip:
            replies[1] = replies[1][0], altered(replies[1][1], negated)
        server.aggregate(1, replies)
        assert not server.flower.state.record.failed
        results.append(server.strategy.averaged["weights"])
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, atol=1e-6)
    ranks = [v.shape for k, v in reply_of(replies[0][1]).tensors.items() if k.endswith("/left")]
    assert ranks


def negated(tensors):
    for name in tensors:
        if name.endswith(("/left", "/right")):
            tensors[name] *= -1


def test_outlier_check_compares_products(tmp_path):
    """The split between the factors does not matter; clipping scales the right factor."""

    def scaled(tensors):
        for name in tensors:
            if name.endswith("/right"):
                tensors[name] *= 1000

    config = small("fedkd", clients=5, max_samples=300, outlier_factor=50.0)
    server = Server(config, tmp_path)
    replies = server.train(server.instruct(1))
    replies[1] = replies[1][0], altered(replies[1][1], scaled)
    server.aggregate(1, replies)
    failed = server.flower.state.record.failed
    assert list(failed) == [replies[1][0].name]
    assert "update: its root mean square is" in failed[replies[1][0].name]
