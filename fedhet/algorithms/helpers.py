"""A client's list of helpers: UM-pFSSL's Algorithms 2 and 3.

Models have the numbers of the server's pool; the client itself is in its own list and is never
removed. Ranks are by Corr (Eq. 13), ties by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedhet.base.arrays import Array

Key = tuple[int, int]
"""A model's number in the pool and its version, the round in which it was uploaded."""
CANDIDATE, FILL, REFRESH = range(3)
"""Roles of the models sent: to be compared (Algorithm 3), to fill the list (Algorithm 1, line 16),
to replace an older version of a helper (Algorithm 2)."""


@dataclass(frozen=True)
class Helper:
    """A model in a client's list."""

    number: int
    """The model's number in the server's pool."""
    version: int
    """The round in which the model was uploaded."""
    relation: float
    """Corr(k|j) of this version with the client's data."""


@dataclass(frozen=True)
class Plan:
    """The plan for one client in a round; models by number and version."""

    train: bool
    warm_up: bool
    candidates: Sequence[Key]
    fill: Sequence[Key]
    refresh: Sequence[Key]

    @property
    def models(self) -> list[Key]:
        """Return the models to send."""
        return [*self.candidates, *self.fill, *self.refresh]

    @property
    def roles(self) -> list[int]:
        """Return the role of each model sent."""
        counts = len(self.candidates), len(self.fill), len(self.refresh)
        return np.repeat([CANDIDATE, FILL, REFRESH], counts).tolist()

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to ask of the client."""
        return not (self.train or self.warm_up or self.models)


def ranked(helpers: Iterable[Helper]) -> list[Helper]:
    """Return the helpers by rank, the least related first."""
    return sorted(helpers, key=_rank)


def _rank(helper: Helper) -> tuple[float, int]:
    return helper.relation, helper.number


def replaceable(helpers: Sequence[Helper], own: int, replace: int) -> list[Helper]:
    """Return Re of Algorithm 3: the helpers of the `replace` lowest ranks, without the client."""
    return [helper for helper in ranked(helpers)[:replace] if helper.number != own]


def refreshable(helpers: Sequence[Helper], own: int, replace: int) -> list[Helper]:
    """Return Up of Algorithm 2: helpers above the `replace` lowest ranks, without the client."""
    return [helper for helper in ranked(helpers)[replace:] if helper.number != own]


def replaced(
    helpers: Sequence[Helper], candidates: Iterable[Helper], own: int, replace: int
) -> list[Helper]:
    """Return the list after Algorithm 3, ranked.

    Each candidate is compared with the least related replaceable helper, and replaces it if more
    related. Candidates that are already in the list are skipped.
    """
    places = replaceable(helpers, own, replace)
    known = {helper.number for helper in helpers}
    staying = [helper for helper in helpers if helper not in places]
    for candidate in candidates:
        if candidate.number in known or not places:
            continue
        known.add(candidate.number)
        least = min(places, key=_rank)
        if candidate.relation > least.relation:
            places[places.index(least)] = candidate
    return ranked([*staying, *places])


def refreshed(helpers: Iterable[Helper], newer: Mapping[int, Helper]) -> list[Helper]:
    """Return the list after Algorithm 2, lines 7 to 11, ranked: with newer versions of helpers."""
    return ranked(
        newer[h.number] if h.number in newer and newer[h.number].version > h.version else h
        for h in helpers
    )


def filled(helpers: Sequence[Helper], more: Iterable[Helper], size: int) -> list[Helper]:
    """Return the list, filled up from `more` to at most `size` (Algorithm 1, line 16), ranked."""
    full = {helper.number: helper for helper in helpers}
    for helper in more:
        if len(full) < size:
            full.setdefault(helper.number, helper)
    return ranked(full.values())


def to_arrays(helpers: Sequence[Helper]) -> dict[str, Array]:
    """Return a list as arrays [helpers]; `from_arrays` is the inverse."""
    return {
        "numbers": np.array([helper.number for helper in helpers], np.int64),
        "versions": np.array([helper.version for helper in helpers], np.int64),
        "relations": np.array([helper.relation for helper in helpers], np.float64),
    }


def from_arrays(arrays: Mapping[str, Array]) -> list[Helper]:
    """Return the list from the arrays that `to_arrays` returned."""
    columns = (arrays[name].tolist() for name in ("numbers", "versions", "relations"))
    return [Helper(*row) for row in zip(*columns, strict=True)]
