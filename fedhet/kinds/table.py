"""Rows [F] of a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedhet.kinds.base import Array, Kind, Shape


class Table(Kind):
    """A row of F numbers: a table's numeric columns, and a feature for each category."""

    name, plural, data = "table", "tables", "a table"
    wanted = "rows [F] of a table"
    pool = "mlp,mlp2,mlp3"
    pool_of_any = "sk-tree,sk-svm,sk-gam,sk-mlp"  # CoFED's four kinds, Section 5.7
    model, large_model = "mlp", "mlp3"
    generates = True

    def fits(self, shape: Shape) -> bool:
        """Tell whether a sample of `shape` is a row."""
        return len(shape) == 1

    def generated(
        self, x: Array, columns: Sequence[int], size: int, rng: np.random.Generator
    ) -> Array:
        """Return rows [size, F] whose columns are those of x, each permuted.

        CoFED, Section 5.7: "randomly generated with valid values". The rule is that of the authors'
        published script: each column's values are in an order of its own, so that columns are
        independent, and no row's value is drawn twice before all are.
        """
        ends = np.cumsum(columns or (1,) * x.shape[1])[:-1]
        parts = np.split(x, ends, axis=1)
        return np.concatenate([part[_permuted(len(x), size, rng)] for part in parts], axis=1)


def _permuted(rows: int, size: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return `size` of the numbers below `rows`: one permutation after another."""
    passes = -(-size // rows)
    return np.concatenate([rng.permutation(rows) for _ in range(passes)])[:size]
