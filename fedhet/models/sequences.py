"""Small networks for signals [N, C, T], texts, tokens [N, L] int64, and tables [N, F]: -> [N, D].

Tokens of 0 are padding. A batch is cut to its longest text, and a text's features do not depend on
its padding: vectors of padding are zero and are left out of every mean, maximum and attention. A
text without any token counts as one of a single zero vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedhet.kinds import PADDING, SIGNAL, TABLE, TEXT, Shape
from fedhet.models.base import Dropout, ModelInfo, scale_channels

SIGNAL_DROPOUT = 0.25
PIECES = 4
"""The stretches of time over each of which the CNNs' last layer is averaged."""
HIDDEN = 64


class PiecesPool(nn.AdaptiveAvgPool1d):
    """The mean of each of as many pieces of time: [N, C, T] -> [N, C, P].

    On CUDA PyTorch's own has a gradient that is not the same each time; means of slices have.
    """

    def forward(self, input: Tensor) -> Tensor:  # the name is PyTorch's
        """Return the means."""
        pieces = cast(int, self.output_size)
        return means_of_pieces(input, pieces) if input.is_cuda else super().forward(input)


def means_of_pieces(x: Tensor, pieces: int) -> Tensor:
    """Return the means of P pieces of x [..., T], from floor(p T / P) to ceil((p + 1) T / P)."""
    length = x.shape[-1]
    bounds = [(p * length // pieces, -(-(p + 1) * length // pieces)) for p in range(pieces)]
    return torch.stack([x[..., start:end].mean(-1) for start, end in bounds], -1)


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return conv and batch norm: [N, I, T] -> [N, O, T / stride], rounded up."""
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm1d(outputs)
    )


def signal_cnn(
    shape: Shape, widths: Sequence[int], dropout: float = 0.0, width: float = 1.0
) -> nn.Module:
    """Return convs of `widths` over 5 steps, each halving time, and a linear layer: -> [N, 64].

    Dropout follows each. `width` is the share of all channels, rounded up.
    """
    *widths, features = (scale_channels(channels, width) for channels in (*widths, HIDDEN))
    drop: list[nn.Module] = [Dropout(dropout)] if dropout else []
    layers: list[nn.Module] = []
    for inputs, outputs in zip((shape[0], *widths[:-1]), widths, strict=True):
        layers += [conv_bn(inputs, outputs, 5), nn.ReLU(), nn.MaxPool1d(2), *drop]
    flat = [PiecesPool(PIECES), nn.Flatten()]
    head = [nn.Linear(PIECES * widths[-1], features), nn.ReLU(), *drop]
    return nn.Sequential(*layers, *flat, *head)


class Block(nn.Module):
    """Three convs, over 7, 5 and 3 steps, and a shortcut: [N, I, T] -> [N, O, T]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(conv_bn(inputs, outputs, 7), nn.ReLU()),
            *(conv_bn(outputs, outputs, 5), nn.ReLU()),
            conv_bn(outputs, outputs, 3),
        )
        self.shortcut = conv_bn(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, I, T] to [N, O, T]."""
        return F.relu(self.body(x) + self.shortcut(x))


def signal_resnet(shape: Shape, width: float = 1.0) -> nn.Module:
    """Return a stem that halves time, three blocks, and the mean over time: -> [N, 64]."""
    stem, *widths = (scale_channels(channels, width) for channels in (16, 32, HIDDEN, HIDDEN))
    blocks = [Block(i, o) for i, o in zip((stem, *widths[:-1]), widths, strict=True)]
    first = conv_bn(shape[0], stem, 7, 2)
    return nn.Sequential(first, nn.ReLU(), *blocks, PiecesPool(1), nn.Flatten())


class SignalGru(nn.Module):
    """A conv that shortens time to a quarter, a GRU in both directions, the mean of its states."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.stem = conv_bn(shape[0], HIDDEN // 2, 8, 4)
        self.layer = nn.GRU(HIDDEN // 2, HIDDEN // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, T] to [N, 64]."""
        states, _ = self.layer(F.relu(self.stem(x)).transpose(1, 2))
        features: Tensor = states.mean(1)
        return features


WIDTH = 32
"""The width of the vector of a token, or of a column."""
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
        size = scale_channels(WIDTH, width)
        self.tokens = Tokens(shape[2], size)
        self.hidden = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 32]."""
        return F.relu(self.hidden(mean_of(*self.tokens(x))))


class TextCnn(nn.Module):
    """Convolutions over 3, 4 and 5 tokens, and the maximum over the text (Kim 2014)."""

    def __init__(self, shape: Shape, dropout: float = 0.0, width: float = 1.0) -> None:
        super().__init__()
        inputs = scale_channels(WIDTH, width)
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
        places = torch.arange(1, present.shape[1] + 1, device=present.device)
        lengths = (present * places).amax(1).cpu()  # the place after the last token of each text
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.layer(packed)
        found, _ = pad_packed_sequence(states, batch_first=True, total_length=vectors.shape[1])
        return max_of(found, present)


def attention(width: int) -> nn.TransformerEncoder:
    """Return two layers of attention, [N, L, width] -> the same, normalized before each part."""
    layer = nn.TransformerEncoderLayer(
        width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)


class TextTransformer(nn.Module):
    """Vectors with learned places, two layers of attention (Vaswani et al. 2017), their mean."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = Tokens(shape[2], WIDTH)
        self.places = nn.Parameter(torch.empty(shape[1], WIDTH))
        nn.init.normal_(self.places, std=SPREAD)
        self.layers = attention(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 32]."""
        vectors, present = self.tokens(x)
        placed = vectors + self.places[: vectors.shape[1]]
        return mean_of(self.layers(placed, src_key_padding_mask=~present), present)


class FtTransformer(nn.Module):
    """A vector for each column, scaled by its number, and attention among them.

    Gorishniy et al., Revisiting Deep Learning Models for Tabular Data, 2021: the features are the
    last state of an additional vector that stands for the row.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape[0], WIDTH))
        self.bias = nn.Parameter(torch.empty(shape[0], WIDTH))
        self.row = nn.Parameter(torch.empty(1, WIDTH))
        for parameter in (self.weight, self.bias, self.row):
            nn.init.uniform_(parameter, -(WIDTH**-0.5), WIDTH**-0.5)
        self.layers = attention(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, F] to [N, 32]."""
        columns = x.unsqueeze(2) * self.weight + self.bias
        row = self.row.expand(len(x), 1, WIDTH).to(columns.dtype)
        features: Tensor = self.layers(torch.cat([row, columns], 1))[:, 0]
        return features


SIGNAL_CNN2 = partial(signal_cnn, widths=(16, 32))
SIGNAL_CNN3 = partial(signal_cnn, widths=(32, 64, 64))
CNN2_DROPOUT = partial(SIGNAL_CNN2, dropout=SIGNAL_DROPOUT)
CNN_DROPOUT = partial(TextCnn, dropout=TEXT_DROPOUT)
CNN_LINE = f"convs over 3, 4 and 5 words, {WIDTH} of each"
GRU, LSTM = (partial(Recurrent, cell=cell) for cell in ("gru", "lstm"))
TABLES = (
    (
        "ft-transformer",
        "a vector a column, 2 layers of 4 heads, width 32",
        "Gorishniy et al. 2021; small",
        FtTransformer,
    ),
)
SIGNALS = (
    ("signal-cnn2", "2 conv layers, 16-32, and a linear of 64", "ours", SIGNAL_CNN2),
    ("signal-cnn3", "3 conv layers, 32-64-64, and a linear of 64", "ours", SIGNAL_CNN3),
    ("signal-cnn2-dropout", f"signal-cnn2 with dropout {SIGNAL_DROPOUT}", "ours", CNN2_DROPOUT),
    ("signal-gru", "a conv and a GRU of 32 in both directions", "ours", SignalGru),
    ("signal-resnet", "3 blocks of 3 convs, 32-64-64", "Wang et al. 2017; small", signal_resnet),
)
TEXTS = (
    ("text-bag", f"mean of the words' vectors, and a linear of {WIDTH}", "ours", Bag),
    ("text-cnn", CNN_LINE, "Kim 2014", TextCnn),
    ("text-cnn-dropout", f"text-cnn with dropout {TEXT_DROPOUT}", "Kim 2014", CNN_DROPOUT),
    ("text-gru", f"a GRU of {WIDTH}", "Cho et al. 2014", GRU),
    (
        "text-lstm",
        f"an LSTM of {WIDTH} in both directions",
        "Hochreiter and Schmidhuber 1997",
        LSTM,
    ),
    (
        "text-transformer",
        f"2 layers of 4 heads, width {WIDTH}",
        "Vaswani et al. 2017",
        TextTransformer,
    ),
)
WHOLE = ("ft-transformer", "signal-gru", "text-gru", "text-lstm", "text-transformer")
"""The models without other widths: the leading channels of an LSTM's gates are not a model."""
MODELS = tuple(
    ModelInfo(name, kind.name, line, source, side, build, name not in WHOLE, kind)
    for kind, side, models in ((TABLE, None, TABLES), (SIGNAL, 8, SIGNALS), (TEXT, None, TEXTS))
    for name, line, source, build in models
)
