"""Random changes to texts [N, L] int64, padded with 0: tokens left out, and tokens that move.

Wei and Zou, EDA: Easy Data Augmentation, 2019, for words left out and swapped; tokens move as in
Lample et al., Unsupervised Machine Translation Using Monolingual Corpora Only, 2018, Section 2.3.
All draws come from a CPU generator that the caller seeds, and depend on L, not on the texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Generator, Tensor

from fedhet.base.transfer import to_device
from fedhet.kinds.base import Change
from fedhet.kinds.text import PADDING

WEAK, STRONG = 0.1, 0.3
"""The share of tokens that a weak and a strong change leave out."""
REACH = 3
"""How many places a token moves at most."""


def left_out(x: Tensor, generator: Generator, share: float) -> Tensor:
    """Return texts without a random `share` of their tokens; the others close up, one stays."""
    drawn = to_device(torch.rand(x.shape, generator=generator), x.device)
    drawn = drawn.masked_fill(x == PADDING, -1.0)
    kept = drawn >= share
    kept.scatter_(1, drawn.argmax(1, keepdim=True), value=True)
    order = (~kept).byte().argsort(dim=1, stable=True)
    return (x * kept).gather(1, order)


def moved(x: Tensor, generator: Generator) -> Tensor:
    """Return texts whose tokens have each moved by up to REACH places, by a random amount."""
    drawn = to_device(torch.rand(x.shape, generator=generator), x.device) * (REACH + 1)
    places = torch.arange(x.shape[1], device=x.device) + drawn
    places = places.masked_fill(x == PADDING, float("inf"))
    return x.gather(1, places.argsort(dim=1, stable=True))


def weak_tokens(x: Tensor, generator: Generator) -> Tensor:
    """Leave out a tenth of the tokens."""
    return left_out(x, generator, WEAK)


def strong_tokens(x: Tensor, generator: Generator) -> Tensor:
    """Leave out three tenths of the tokens, and move the others."""
    return moved(left_out(x, generator, STRONG), generator)


def changed_tokens(x: Tensor, generator: Generator) -> Tensor:
    """Leave out a tenth of the tokens, and move the others: `training.augment` = tokens."""
    return moved(left_out(x, generator, WEAK), generator)


CHANGES: Mapping[str, Change] = MappingProxyType(
    {"tokens": changed_tokens, "weak": weak_tokens, "strong": strong_tokens}
)
"""The changes of texts by name: `training.augment`, and FixMatch's (ours: it has images alone)."""
