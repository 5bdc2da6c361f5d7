"""Texts [0, L, V]: at most L tokens, whose numbers are below V."""

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


class Text(Kind):
    """A text as the numbers of its tokens, int64 [L]."""

    name, plural, data = "text", "texts", "text"
    wanted = "texts (text:PATH)"
    pool = "text-bag,text-cnn,text-gru,text-lstm,text-transformer"
    model, large_model = "text-cnn", "text-transformer"
    is_numeric = False
    augmentations = ("tokens",)
    changeable, semi = "texts", True
    generates = True

    def fits(self, shape: Shape) -> bool:
        """Tell whether a sample of `shape` is a text."""
        return len(shape) == 3 and shape[0] == 0

    def described(self, shape: Shape) -> str:
        """Return the tokens of a text in words."""
        return f"texts of up to {shape[1]} tokens below {shape[2]}"

    def sizes(self, shape: Shape) -> Shape:
        """Return L and V."""
        return shape[1:]

    def blank(self, count: int, shape: Shape) -> Tensor:
        """Return texts of one token."""
        import torch

        return torch.ones(count, 1, dtype=torch.int64)

    def generated(
        self, x: Array, columns: Sequence[int], size: int, rng: np.random.Generator
    ) -> Array:
        """Return texts [size, L] of the tokens of x in a random order.

        As generated rows of tables: each token is as frequent as in x, and its place says nothing.
        Lengths are those of the texts in x, in an order of their own.
        """
        every = x[x != PADDING]
        lengths = rng.choice((x != PADDING).sum(1), size)
        inside = np.arange(x.shape[1]) < lengths[:, None]
        rows = np.full((size, x.shape[1]), PADDING, np.int64)
        rows[inside] = rng.choice(every, int(inside.sum()))
        return rows

    def changes(self) -> Mapping[str, Change]:
        """Return the changes of texts."""
        from fedhet.kinds.token_changes import CHANGES

        return CHANGES
