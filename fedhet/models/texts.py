"""Small networks for texts: tokens [N, L] int64 -> features [N, D]; tokens of 0 are padding.

A batch is cut to its longest text, and a text's features do not depend on its padding: vectors of
padding are zero and are left out of every mean, maximum and attention. A text without any token
counts as one of a single zero vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedhet.kinds import PADDING, TEXT, Shape
from fedhet.models.dropout import Dropout
from fedhet.models.info import ModelInfo, share_of
from fedhet.models.transformer import encoder_layers

WIDTH = 32
"""The width of a token's vector."""
SPREAD = 0.1
"""The standard deviation of new vectors."""
TEXT_DROPOUT = 0.25
KERNELS = (3, 4, 5)


def trimmed(x: Tensor) -> Tensor:
    """Return tokens [N, L] without the columns at the end in which all texts have padding.

    An exported program keeps these columns, because its shapes must not depend on values.
    """
    if torch.compiler.is_exporting():
        return x
    used = (x != PADDING).any(0).nonzero()
    return x[:, : int(used[-1]) + 1 if len(used) else 1]


def present(x: Tensor) -> Tensor:
    """Return which tokens [N, L] belong to a text, bool; of an empty text, the first does."""
    found = x != PADDING
    found[:, 0] |= ~found.any(1)
    return found


class Tokens(nn.Module):
    """The vectors of tokens, as the first layer of every model of texts."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=SPREAD)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors [N, L', E], zero for padding, and which belong to a text, bool [N, L']."""
        x = trimmed(x)
        vectors = self.embedding(x)
        return vectors * (x != PADDING).unsqueeze(2).to(vectors.dtype), present(x)


def mean_of(vectors: Tensor, present: Tensor) -> Tensor:
    """Return the mean [N, D] of the vectors [N, L, D] that are `present` [N, L]."""
    count = present.sum(1, keepdim=True)
    total: Tensor = vectors.masked_fill(~present.unsqueeze(2), 0).sum(1)
    return total / count


def max_of(vectors: Tensor, present: Tensor) -> Tensor:
    """Return the greatest value of each feature, [N, D], over vectors [N, L, D] `present`."""
    greatest: Tensor = vectors.masked_fill(~present.unsqueeze(2), float("-inf")).amax(1)
    return greatest


class Bag(nn.Module):
    """The mean of a text's vectors, and a hidden layer."""

    def __init__(self, shape: Shape, width: float = 1.0) -> None:
        super().__init__()
        size = share_of(WIDTH, width)
        self.tokens = Tokens(shape[2], size)
        self.hidden = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 32]."""
        return F.relu(self.hidden(mean_of(*self.tokens(x))))


class TextCnn(nn.Module):
    """Convolutions over 3, 4 and 5 tokens, and the maximum over the text (Kim 2014)."""

    def __init__(self, shape: Shape, dropout: float = 0.0, width: float = 1.0) -> None:
        super().__init__()
        inputs = share_of(WIDTH, width)
        self.tokens = Tokens(shape[2], inputs)
        self.convs = nn.ModuleList(nn.Conv1d(inputs, inputs, size) for size in KERNELS)
        self.dropout = Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 96]."""
        vectors, present = self.tokens(x)
        across = vectors.transpose(1, 2)
        found = []
        for size, conv in zip(KERNELS, self.convs, strict=True):
            after = F.pad(across, (0, size - 1))  # each place sees itself and those after it
            found.append(max_of(F.relu(conv(after)).transpose(1, 2), present))
        # Filter by filter, so that a narrower model's features are the first of a wider one's.
        features: Tensor = self.dropout(torch.stack(found, 2).flatten(1))
        return features


class Recurrent(nn.Module):
    """An LSTM in both directions, or a GRU in one; the maximum of its states over the text."""

    def __init__(self, shape: Shape, cell: Literal["lstm", "gru"]) -> None:
        super().__init__()
        self.tokens = Tokens(shape[2], WIDTH)
        both = cell == "lstm"
        kind = nn.LSTM if both else nn.GRU
        self.layer = kind(WIDTH, WIDTH, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 64], or [N, 32]."""
        vectors, present = self.tokens(x)
        # Packed, the direction from the end begins at the text's end, not at its padding's.
        lengths = _lengths(present)
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.layer(packed)
        found, _ = pad_packed_sequence(states, batch_first=True, total_length=vectors.shape[1])
        return max_of(found, present)


def _lengths(present: Tensor) -> Tensor:
    """Return the place after the last token of each text, [N], on the processor."""
    places = torch.arange(1, present.shape[1] + 1, device=present.device)
    return (present * places).amax(1).cpu()


class TextTransformer(nn.Module):
    """Vectors with learned places, two layers of attention (Vaswani et al. 2017), their mean."""

    def __init__(self, shape: Shape, layers: int = 2) -> None:
        super().__init__()
        self.tokens = Tokens(shape[2], WIDTH)
        self.places = nn.Parameter(torch.empty(shape[1], WIDTH))
        nn.init.normal_(self.places, std=SPREAD)
        self.layers = encoder_layers(WIDTH, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 32]."""
        vectors, present = self.tokens(x)
        placed = vectors + self.places[: vectors.shape[1]]
        return mean_of(self.layers(placed, src_key_padding_mask=~present), present)


def _info(name: str, line: str, source: str, build: Callable[..., nn.Module]) -> ModelInfo:
    return ModelInfo(name, "text", line, source, None, build, name in NARROW, TEXT)


CNN_DROPOUT = partial(TextCnn, dropout=TEXT_DROPOUT)
CNN_LINE = f"convs over 3, 4 and 5 words, {WIDTH} of each"
NARROW = ("text-bag", "text-cnn", "text-cnn-dropout")
"""The models whose leading channels are a model, which those of an LSTM's gates are not."""
MODELS = (
    _info("text-bag", f"mean of the words' vectors, and a linear of {WIDTH}", "ours", Bag),
    _info("text-cnn", CNN_LINE, "Kim 2014", TextCnn),
    _info("text-cnn-dropout", f"text-cnn with dropout {TEXT_DROPOUT}", "Kim 2014", CNN_DROPOUT),
    _info("text-gru", f"a GRU of {WIDTH}", "Cho et al. 2014", partial(Recurrent, cell="gru")),
    _info(
        "text-lstm",
        f"an LSTM of {WIDTH} in both directions",
        "Hochreiter and Schmidhuber 1997",
        partial(Recurrent, cell="lstm"),
    ),
    _info(
        "text-transformer",
        f"2 layers of 4 heads, width {WIDTH}",
        "Vaswani et al. 2017",
        TextTransformer,
    ),
)
