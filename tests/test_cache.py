"""Open clients: which are kept, and that keeping many costs no more for each."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from fedhet.client.cache import OpenClients

MOST = 100


@dataclass(eq=False)
class Sized:
    """A client that holds so many bytes, and counts how often it is asked."""

    size: int
    asked: int = 0

    def held_bytes(self):
        self.asked += 1
        return self.size


def kept_by_hand(uses):
    """Which clients are kept after each use: the latest whose sizes fit, beside the one in use."""
    kept = []
    for name, size in uses:
        others = [(n, s) for n, s in kept if n != name]
        while sum(s for _, s in others) > MOST:
            others.pop(0)
        kept = [*others, (name, size)]
        yield [n for n, _ in kept]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), max_size=40))
def test_the_latest_that_fit_are_kept(uses):
    """A client's size changes with each use."""
    clients, cache = {}, OpenClients(MOST)
    for (name, size), expected in zip(uses, kept_by_hand(uses), strict=True):
        fresh = Sized(0)
        client = cache.open(name, lambda fresh=fresh: fresh)
        client.size = size
        assert (client is fresh) == (name not in clients)
        clients = {n: clients.get(n, client) for n in expected}
        clients[name] = client
        assert list(cache._clients) == expected


def test_a_use_measures_one_client_however_many_are_open():
    cache = OpenClients(MOST)
    clients = [cache.open(n, lambda: Sized(0)) for n in range(50)]
    before = sum(client.asked for client in clients)
    cache.open(0, lambda: Sized(0))
    assert sum(client.asked for client in clients) == before + 1 == 50
