"""Texts [0, L, V]: at most L tokens, whose numbers are below V; int64 [L]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedhet.kinds.base import Array, Change, Kind, Shape

if TYPE_CHECKING:
    from torch import Tensor

PADDING = 0
"""The token that fills a text up to L; every text has one token or more that is another."""


def text_shape(tokens: int, vocabulary: int) -> Shape:
    """Return the shape of texts of at most `tokens` tokens, with numbers below `vocabulary`."""
    return (0, tokens, vocabulary)


def _one_token(count: int, shape: Shape) -> Tensor:
    import torch

    return torch.ones(count, 1, dtype=torch.int64)


def shuffled_tokens(x: Array, columns: Sequence[int], size: int, rng: np.random.Generator) -> Array:
    """Return texts [size, L] of the tokens of x [N, L] in a random order.

    As generated rows of tables: each token is as frequent as in x, and its place says nothing.
    Lengths are those of the texts in x, in an order of their own.
    """
    lengths = rng.choice((x != PADDING).sum(1), size)
    inside = np.arange(x.shape[1]) < lengths[:, None]
    rows = np.full((size, x.shape[1]), PADDING, np.int64)
    rows[inside] = rng.choice(x[x != PADDING], int(inside.sum()))
    return rows


def _changes() -> Mapping[str, Change]:
    from fedhet.kinds.token_changes import CHANGES

    return CHANGES


TEXT = Kind(
    name="text",
    plural="texts",
    wanted="texts (text:PATH)",
    fits=lambda shape: len(shape) == 3 and shape[0] == 0,
    pool=("text-bag", "text-cnn", "text-gru", "text-lstm", "text-transformer"),
    model="text-cnn",
    large_model="text-transformer",
    is_numeric=False,
    describe=lambda shape: f"texts of up to {shape[1]} tokens below {shape[2]}",
    sizes=lambda shape: shape[1:],
    blank=_one_token,
    generated=shuffled_tokens,
    augmentations=("tokens",),
    changeable="texts",
    changes=_changes,
)
