"""What a sample is: an image, a row of a table, a text or a signal; its shape says which.

| kind | shape | values |
|---|---|---|
| image | [C, H, W] | float32 |
| table | [F] | float32 |
| signal | [C, T]: channels and steps of time | float32 |
| text | [0, L, V]: at most L tokens, numbers below V; a text has no channels | int64 [L] |
"""

from __future__ import annotations

from typing import Literal

Shape = tuple[int, ...]
"""One sample's shape."""
Kind = Literal["image", "table", "text", "signal"]

PADDING = 0
"""The token that fills a text up to L; every text has one token or more that is another."""


def text_shape(tokens: int, vocabulary: int) -> Shape:
    """Return the shape of texts of at most `tokens` tokens, with numbers below `vocabulary`."""
    return (0, tokens, vocabulary)


def kind_of(shape: Shape) -> Kind:
    """Return the kind of samples of `shape`."""
    if len(shape) == 3 and shape[0] == 0:
        return "text"
    return {1: "table", 2: "signal"}.get(len(shape), "image")  # type: ignore[return-value]


def described(shape: Shape) -> str:
    """Return a sample's shape in words, for messages."""
    if kind_of(shape) == "text":
        return f"texts of up to {shape[1]} tokens below {shape[2]}"
    return f"shape {list(shape)}"
