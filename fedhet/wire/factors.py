"""Changes of a model in messages, of which a matrix may travel as two factors that are smaller.

A tensor with several axes counts as the matrix [P, Q] of its first axis and of all others. Its
factors, `<name>/left` [P, K] and `<name>/right` [K, Q], must together be smaller than itself: so a
message bounds what the receiver allocates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedhet.base.arrays import Array, Arrays, OnDemand, Shapes
from fedhet.base.errors import KnowledgeError
from fedhet.wire import contract
from fedhet.wire.contract import WeightsField

LEFT, RIGHT = "/left", "/right"
Factors = tuple[Array, Array]


@dataclass(frozen=True)
class FactorsField(WeightsField):
    """The change of a whole model: tensors `name/<name in the state dict>`, or their factors."""

    def describe(self) -> str:
        """Return a short name of the type."""
        return "changes of weights, a matrix whole or as [P, K] and [K, Q]"

    def expected(self, sender: str, found: Arrays, shapes: Shapes) -> Shapes:
        """Return the tensors that a message must have: of a matrix, itself or its factors.

        Raises KnowledgeError for factors that are not smaller than the matrix, or whose product may
        be larger than any number may be.
        """
        wanted: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, (shape, dtype) in shapes.items():
            left, right = found.get(name + LEFT), found.get(name + RIGHT)
            if left is None or right is None or not _is_matrix(shape, dtype):
                wanted[name] = shape, dtype
                continue
            rows, columns = as_matrix(shape)
            rank, most = left.shape[-1] if left.ndim else 0, max_rank(shape)
            if rank > most:
                fault = f"has rank {rank}, the most allowed is {most}"
                raise KnowledgeError(sender, f"{self.name}/{name}", fault)
            largest = [float(np.abs(each).max(initial=0.0)) for each in (left, right)]
            product = rank * largest[0] * largest[1]
            if not product <= contract.MAX_MAGNITUDE:  # also if one is NaN
                fault = f"its factors may be {product:.3g} together"
                fault = f"{fault}, at most {contract.MAX_MAGNITUDE:g}"
                raise KnowledgeError(sender, f"{self.name}/{name}", fault)
            wanted |= {name + LEFT: ((rows, rank), dtype), name + RIGHT: ((rank, columns), dtype)}
        return wanted

    def least(self, name: str) -> float | None:
        """Return no minimum value, as a variance may fall."""
        return self.low


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return P and Q of a tensor with two axes or more."""
    return shape[0], math.prod(shape[1:])


def max_rank(shape: tuple[int, ...]) -> int:
    """Return the greatest K for which both factors are smaller than the matrix: K(P + Q) < PQ."""
    rows, columns = as_matrix(shape)
    return max(0, (rows * columns - 1) // (rows + columns))


def packed(changes: Arrays, factors_of: Callable[[Array], Factors]) -> dict[str, Array]:
    """Return what is sent of changes: the factors of each matrix, where these are smaller."""
    sent: dict[str, Array] = {}
    for name, change in changes.items():
        if _is_matrix(change.shape, change.dtype.name):
            left, right = factors_of(change.reshape(as_matrix(change.shape)))
            if left.shape[1] <= max_rank(change.shape):
                sent |= {name + LEFT: left, name + RIGHT: right}
                continue
        sent[name] = change
    return sent


def unpacked(sent: Arrays, shapes: Shapes) -> OnDemand:
    """Return the changes of a whole model, the inverse of `packed`: products when they are used."""

    def change(name: str) -> Array:
        if name in sent:
            return sent[name]
        product: Array = sent[name + LEFT] @ sent[name + RIGHT]
        return product.reshape(shapes[name][0])

    return OnDemand({name: partial(change, name) for name in shapes})


def _is_matrix(shape: tuple[int, ...], dtype: str) -> bool:
    return len(shape) > 1 and np.issubdtype(np.dtype(dtype), np.floating)
