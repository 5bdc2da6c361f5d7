"""The cache of open clients: which clients it keeps, and its cost per client."""

from dataclasses import dataclass

import pytest
from federation import Server, client_of, small
from hypothesis import given
from hypothesis import strategies as st

from fedhet.client_runtime.node import ClientCache

MOST = 100


@dataclass(eq=False)
class Sized:
    """A client with a given size, which counts the calls."""

    size: int
    asked: int = 0

    def held_bytes(self):
        self.asked += 1
        return self.size


def kept_by_hand(uses):
    """Return the cached clients after each use.

    Clients of other runs are closed first, and then the most recently used clients.
    """
    kept = []
    for run, name, size in uses:
        others = [each for each in kept if each[:2] != (run, name)]
        while sum(size for *_, size in others) > MOST:
            stale = [each for each in others if each[0] != run]
            others.remove(stale[0] if stale else others[-1])
        kept = [*others, (run, name, size)]
        yield [(run, name) for run, name, _ in kept]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7), st.integers(0, 60)), max_size=40))
def test_client_needed_last_is_evicted(uses):
    """The size of a client changes with each use."""
    clients, cache = {}, ClientCache(MOST)
    for (run, name, size), expected in zip(uses, kept_by_hand(uses), strict=True):
        fresh, key = Sized(0), (run, name)
        client = cache.open(run, name, lambda fresh=fresh: fresh)
        client.size = size
        assert (client is fresh) == (key not in clients)
        clients = {k: clients.get(k, client) for k in expected}
        clients[key] = client
        assert cache.keys() == set(expected)


def test_only_evicted_clients_are_opened_again():
    cache, opened = ClientCache(MOST), []
    for _ in range(4):
        opened.append(0)
        for name in range(15):  # eleven of ten bytes each: ten that fit, and the one in use

            def new():
                opened[-1] += 1
                return Sized(10)

            cache.open("run", name, new)
    assert opened == [15, 4, 4, 4]


def test_failed_opening_keeps_other_clients():
    cache = ClientCache(MOST)

    def broken():
        raise ValueError("no data")

    for run in (0, 1):
        with pytest.raises(ValueError, match="no data"):
            cache.open(run, "a", broken)
        cache.open(run, "b", lambda: Sized(10))
    assert cache.keys() == {(0, "b"), (1, "b")}


def test_memory_is_measured_per_client():
    cache = ClientCache(MOST)
    clients = [cache.open(0, n, lambda: Sized(0)) for n in range(50)]
    before = sum(client.asked for client in clients)
    cache.open(0, 0, lambda: Sized(0))
    assert sum(client.asked for client in clients) == before + 1 == 50


@pytest.mark.parametrize("method", ["felo", "fedtype", "um-pfssl", "pfedme", "fml"])
def test_waiting_client_holds_no_gradients(tmp_path, method):
    server = Server(small(method, clients=2), tmp_path)
    server.train(server.instruct(1))
    for proxy, _ in server.instruct(1):
        models = client_of(proxy).models.values()
        parameters = [p for model in models for p in model.parameters()]
        assert parameters
        assert all(p.grad is None for p in parameters)
