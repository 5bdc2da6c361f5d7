"""Assigns the training settings of which a run gives several values to its clients, and draws
the clients with which nobody trains."""

from __future__ import annotations

from math import gcd, lcm

from fedhet.base.seeding import numpy_rng
from fedhet.settings.run import RunSettings, TrainingSettings


def training_of(run: RunSettings, client: int) -> TrainingSettings:
    """Return what client number `client` trains with: one value of each training setting.

    As `models.assignment` says, values are assigned in turn ("cycle"), or in turn and then shuffled
    by a draw of each setting's own ("shuffle").

    >>> lr = TrainingSettings(lr=[0.1, 0.01])
    >>> run = RunSettings(clients=4, models={"pool": ["mlp", "cnn2"]}, training=lr)
    >>> [training_of(run, client).lr for client in range(4)]
    [0.1, 0.01, 0.01, 0.1]
    """
    chosen, period, client = {}, max(1, len(run.models.pool)), client % run.clients
    for name, values in run.training.pools().items():
        place = client
        if run.models.assignment == "shuffle":
            place = int(numpy_rng(run.seed, "deal", name).permutation(run.clients)[client])
        chosen[name] = values[in_turn(place, len(values), period)]
        period *= len(values)
    return run.training.model_copy(update=chosen)


def unseen_clients(run: RunSettings) -> frozenset[int]:
    """Return the numbers of the clients with which nobody trains: a share 'data.unseen' of all.

    One at least where there is a share, and never all.

    >>> unseen_clients(RunSettings(clients=10, data={"unseen": 0.2}, seed=1))
    frozenset({9, 5})
    """
    return drawn_unseen(run.data.unseen, run.clients, run.seed)


def drawn_unseen(share: float, clients: int, seed: int) -> frozenset[int]:
    """Return the numbers of a share of the clients, as `unseen_clients` does."""
    if not share:
        return frozenset()
    count = min(clients - 1, max(1, round(share * clients)))
    return frozenset(numpy_rng(seed, "unseen").permutation(clients)[:count].tolist())


def in_turn(place: int, size: int, period: int) -> int:
    """Return which of `size` values the client at `place` is assigned, 0 to size - 1.

    Values are assigned in turn, and move on by one where the combinations with what has been
    assigned before, which repeats after `period` clients, would start again: the first
    size * period clients have each combination once, and then all repeats.
    """
    moved = place // lcm(size, period) % gcd(size, period)
    return (place + moved) % size
