"""Scales down, or refuses, replies that are out of proportion to the others of a round.

A reply of finite numbers satisfies its contract, whatever their size. But one client's features of
3e38 in a mean leave nobody able to train on it, and a few times the others' harm too. So the root
mean square of each field of a reply is compared with that of the other clients' replies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, median

import numpy as np

from fedhet.base.arrays import Array, Arrays, OnDemand
from fedhet.base.errors import KnowledgeError
from fedhet.wire.knowledge import Knowledge

Magnitudes = Mapping[str, float]
"""The root mean square of each floating-point field of a reply; a model is one field."""
LEAST_REFERENCE = 0.01
"""A root mean square to which others may always be compared: a reply of zeros makes nobody odd."""


def magnitudes_of(knowledge: Knowledge) -> Magnitudes:
    """Return the root mean square of each field of a reply that holds floating-point numbers."""
    fields: dict[str, list[Array]] = {}
    for name, value in knowledge.tensors.items():
        if np.issubdtype(value.dtype, np.floating) and value.size:
            fields.setdefault(name.partition("/")[0], []).append(value)
    return {field: _root_mean_square(values) for field, values in fields.items()}


def out_of_proportion(
    magnitudes: Mapping[str, Magnitudes], usual: Magnitudes, factor: float
) -> dict[str, KnowledgeError]:
    """Return the clients whose replies are out of proportion, with the error that says so.

    `magnitudes`: by client, those of a round's replies; `usual`: the last round's medians. A field
    is compared with the larger of the other clients' median and the usual one. With two clients
    the larger is thus refused: it is the one that does harm. No client is judged by its own reply,
    so nothing is refused where there is nothing to compare with.
    """
    found: dict[str, KnowledgeError] = {}
    for name, field, size, others in _beside_the_others(magnitudes):
        known = [*others, *([usual[field]] if field in usual else [])]
        if known and size > factor * max(*known, LEAST_REFERENCE):
            fault = (
                f"its root mean square is {size:.3g}, the other clients' {max(known):.3g}: more "
                f"than 'engine.outlier-factor' = {factor:g} times as large"
            )
            found.setdefault(name, KnowledgeError(name, field, fault))
    return found


def excesses(
    magnitudes: Mapping[str, Magnitudes], limit: float, exempt: Collection[str] = ()
) -> dict[str, dict[str, float]]:
    """Return, by client and field, how many times as large as allowed each field is; above 1 only.

    Allowed is `limit` times the other clients' median. Fields in `exempt` are never too large.
    """
    found: dict[str, dict[str, float]] = {}
    for name, field, size, others in _beside_the_others(magnitudes):
        most = limit * max(*others, LEAST_REFERENCE) if others else size
        if size > most and field not in exempt:
            found.setdefault(name, {})[field] = size / most
    return found


def scaled_down(knowledge: Knowledge, excess: Mapping[str, float]) -> Knowledge:
    """Return a reply with the floating-point tensors of each field in `excess` divided by it.

    Those of a reply on disk are divided when they are used.
    """
    own = knowledge.tensors
    return Knowledge(
        OnDemand({n: partial(_divided, own, n, excess.get(n.partition("/")[0])) for n in own}),
        knowledge.scalars,
    )


def _divided(tensors: Arrays, name: str, by: float | None) -> Array:
    value = tensors[name]
    if by is None or not np.issubdtype(value.dtype, np.floating):
        return value
    return (value / by).astype(value.dtype)


def medians(magnitudes: Iterable[Magnitudes]) -> dict[str, float]:
    """Return the median of each field over a round's accepted replies."""
    return {field: float(median(sizes)) for field, sizes in sorted(_sorted(magnitudes).items())}


def _beside_the_others(
    magnitudes: Mapping[str, Magnitudes],
) -> Iterator[tuple[str, str, float, tuple[float, ...]]]:
    """Yield each client's fields: name, field, size, and the median of the others, if any.

    A median without one's own is a look-up in the sorted sizes: ten thousand clients cost no more
    each than ten do.
    """
    by_field = _sorted(magnitudes.values())
    for name, fields in magnitudes.items():
        for field, size in fields.items():
            yield name, field, size, _median_without(by_field[field], size)


def _median_without(ordered: Sequence[float], size: float) -> tuple[float, ...]:
    """Return the median of sorted numbers without one of them; () if there are no others."""
    own, others = bisect_left(ordered, size), len(ordered) - 1
    if not others:
        return ()
    middle = {(others - 1) // 2, others // 2}
    return (fmean(ordered[place + (place >= own)] for place in middle),)


def _sorted(magnitudes: Iterable[Magnitudes]) -> dict[str, list[float]]:
    """Return the sizes of each field over replies, ascending."""
    fields: dict[str, list[float]] = {}
    for each in magnitudes:
        for field, size in each.items():
            fields.setdefault(field, []).append(size)
    return {field: sorted(sizes) for field, sizes in fields.items()}


def _root_mean_square(values: Sequence[Array]) -> float:
    """Return the root mean square over arrays; infinity if their squares overflow."""
    with np.errstate(over="ignore"):
        total = sum(float(_square(value)) for value in values)
    return float(np.sqrt(total / sum(value.size for value in values)))


def _square(value: Array) -> float:
    flat = value.ravel() if value.dtype.itemsize > 2 else value.ravel().astype(np.float32)
    return float(np.vdot(flat, flat))
