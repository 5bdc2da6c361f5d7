"""Which client runs which model of a run's pool."""

from __future__ import annotations

from collections.abc import Sequence

from fedhet.errors import SettingsError
from fedhet.models.registry import check_name
from fedhet.seeding import numpy_rng

RULES = ("cycle", "shuffle")


def deal(pool: Sequence[str], clients: int, seed: int, rule: str = "cycle") -> list[str]:
    """Return each client's model name.

    "cycle": client k gets pool[k % len(pool)], so the groups of one architecture are of equal
    size. "shuffle": the same names, in an order drawn from `seed`.
    """
    if rule not in RULES:
        raise SettingsError(f"deal rule '{rule}' does not exist; allowed: {', '.join(RULES)}")
    if not pool:
        raise SettingsError("the pool of models is empty; it needs one name or more")
    if clients < 1:
        raise SettingsError(f"clients is {clients}; it must be 1 or more")
    for name in dict.fromkeys(pool):
        check_name(name)
    dealt = [pool[client % len(pool)] for client in range(clients)]
    if rule == "shuffle":
        order = numpy_rng(seed, "deal").permutation(clients)
        dealt = [dealt[place] for place in order]
    return dealt
