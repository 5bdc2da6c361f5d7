"""Rows [F] of a table: its numeric columns, and a feature for each category of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedhet.kinds.base import Array, Kind


def permuted_columns(
    x: Array, columns: Sequence[int], size: int, rng: np.random.Generator
) -> Array:
    """Return rows [size, F] whose columns are those of x [N, F], each permuted.

    CoFED, Section 5.7: "randomly generated with valid values". The rule is that of the authors'
    published script: each column's values are in an order of its own, so that columns are
    independent, and no row's value is drawn twice before all are.
    """
    parts = np.split(x, np.cumsum(columns or (1,) * x.shape[1])[:-1], axis=1)
    passes = -(-size // len(x))
    rows = [np.concatenate([rng.permutation(len(x)) for _ in range(passes)]) for _ in parts]
    return np.concatenate([p[row[:size]] for p, row in zip(parts, rows, strict=True)], axis=1)


TABLE = Kind(
    name="table",
    plural="tables",
    wanted="rows [F] of a table",
    fits=lambda shape: len(shape) == 1,
    pool=("mlp", "mlp2", "mlp3"),
    pool_of_any=("sk-tree", "sk-svm", "sk-gam", "sk-mlp"),  # CoFED's four kinds, Section 5.7
    model="mlp",
    large_model="mlp3",
    generated=permuted_columns,
)
