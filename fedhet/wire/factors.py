"""Low-rank factorization for model updates in messages.

A tensor with two or more axes is treated as a matrix [P, Q], where P is the size of its first axis.
It may be sent as two factors, `<name>/left` [P, K] and `<name>/right` [K, Q]. Together, the factors
must be smaller than the matrix, so that the size of a message limits the memory of the receiver.
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
    """Declaration of a model update. Its matrices may be sent as low-rank factors."""

    def describe(self) -> str:
        """Return a short description of the type."""
        return "weight updates; a matrix [P, Q] may be sent as factors [P, K] and [K, Q]"

    def expected(self, sender: str, received: Arrays, shapes: Shapes) -> Shapes:
        """Return the expected shape and dtype of each tensor, or of its factors if they were sent.

        Raises KnowledgeError if the factors are not smaller than the matrix, or if their product
        might exceed MAX_MAGNITUDE.
        """
        expected: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, (shape, dtype) in shapes.items():
            left, right = received.get(name + LEFT), received.get(name + RIGHT)
            if left is None or right is None or not _is_matrix(shape, dtype):
                expected[name] = shape, dtype
                continue
            rows, columns = as_matrix(shape)
            rank, limit = left.shape[-1] if left.ndim else 0, max_rank(shape)
            if rank > limit:
                fault = f"rank of the factors must be at most {limit}, got {rank}"
                raise KnowledgeError(sender, f"{self.name}/{name}", fault)
            largest = [float(np.abs(factor).max(initial=0.0)) for factor in (left, right)]
            bound = rank * largest[0] * largest[1]
            if not bound <= contract.MAX_MAGNITUDE:  # This is also true if the bound is NaN.
                fault = f"magnitude bound of the product must be at most {contract.MAX_MAGNITUDE:g}"
                raise KnowledgeError(sender, f"{self.name}/{name}", f"{fault}, got {bound:.3g}")
            expected |= {name + LEFT: ((rows, rank), dtype), name + RIGHT: ((rank, columns), dtype)}
        return expected

    def min_value(self, name: str) -> float | None:
        """Return the lowest allowed value of the update `name`, or None for the default.

        Updates to variances may be negative.
        """
        return self.low


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the matrix size (P, Q) of a tensor with at least two axes."""
    return shape[0], math.prod(shape[1:])


def max_rank(shape: tuple[int, ...]) -> int:
    """Return the largest rank K whose factors are smaller than the matrix: K(P + Q) < PQ."""
    rows, columns = as_matrix(shape)
    return max(0, (rows * columns - 1) // (rows + columns))


def packed(changes: Arrays, factors_of: Callable[[Array], Factors]) -> dict[str, Array]:
    """Replace each matrix in a model update with its factors if they are smaller."""
    tensors: dict[str, Array] = {}
    for name, change in changes.items():
        if _is_matrix(change.shape, change.dtype.name):
            left, right = factors_of(change.reshape(as_matrix(change.shape)))
            if left.shape[1] <= max_rank(change.shape):
                tensors |= {name + LEFT: left, name + RIGHT: right}
                continue
        tensors[name] = change
    return tensors


def unpacked(sent: Arrays, shapes: Shapes) -> OnDemand:
    """Reconstruct the full model update from its low-rank factors (inverse of `packed`).

    Products are computed on access.
    """

    def change(name: str) -> Array:
        if name in sent:
            return sent[name]
        product: Array = sent[name + LEFT] @ sent[name + RIGHT]
        return product.reshape(shapes[name][0])

    return OnDemand({name: partial(change, name) for name in shapes})


def _is_matrix(shape: tuple[int, ...], dtype: str) -> bool:
    return len(shape) > 1 and np.issubdtype(np.dtype(dtype), np.floating)
