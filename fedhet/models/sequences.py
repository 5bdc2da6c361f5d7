"""Small networks that map signals [N, C, T], texts [N, L], or tables [N, F] to features [N, D].

Token 0 is padding. Batches are trimmed to their longest text. The features of a text do not depend
on padding, because padding has zero embeddings and is excluded from means, maxima, and attention. A
text without tokens is treated as a single zero vector.
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
"""Number of time intervals over which the CNNs average the outputs of the last convolution."""
HIDDEN = 64


class DeterministicAvgPool1d(nn.AdaptiveAvgPool1d):
    """Variant of `nn.AdaptiveAvgPool1d` with a deterministic gradient on CUDA."""

    def forward(self, input: Tensor) -> Tensor:  # The parameter has PyTorch's name.
        """Map [N, C, T] to [N, C, P]."""
        pieces = cast(int, self.output_size)
        return adaptive_means(input, pieces) if input.is_cuda else super().forward(input)


def adaptive_means(x: Tensor, pieces: int) -> Tensor:
    """Average x [..., T] over P intervals; interval p is [floor(p T / P), ceil((p + 1) T / P))."""
    length = x.shape[-1]
    bounds = [(p * length // pieces, -(-(p + 1) * length // pieces)) for p in range(pieces)]
    return torch.stack([x[..., start:end].mean(-1) for start, end in bounds], -1)


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Build a convolution and batch norm: [N, I, T] -> [N, O, ceil(T / stride)]."""
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm1d(outputs)
    )


def signal_cnn(
    shape: Shape, widths: Sequence[int], dropout: float = 0.0, width: float = 1.0
) -> nn.Module:
    """Build a CNN with kernel size 5 and outputs [N, 64].

    Each layer halves the number of time steps and is followed by dropout. `width` scales every
    channel count; the result is rounded up.
    """
    *widths, features = (scale_channels(channels, width) for channels in (*widths, HIDDEN))
    drop: list[nn.Module] = [Dropout(dropout)] if dropout else []
    layers: list[nn.Module] = []
    for inputs, outputs in zip((shape[0], *widths[:-1]), widths, strict=True):
        layers += [conv_bn(inputs, outputs, 5), nn.ReLU(), nn.MaxPool1d(2), *drop]
    flat = [DeterministicAvgPool1d(PIECES), nn.Flatten()]
    head = [nn.Linear(PIECES * widths[-1], features), nn.ReLU(), *drop]
    return nn.Sequential(*layers, *flat, *head)


class Block(nn.Module):
    """Residual block of three convolutions, with kernel sizes 7, 5, and 3."""

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
    """Build a ResNet with three blocks and outputs [N, 64]; the stem halves the time steps."""
    stem, *widths = (scale_channels(channels, width) for channels in (16, 32, HIDDEN, HIDDEN))
    blocks = [Block(i, o) for i, o in zip((stem, *widths[:-1]), widths, strict=True)]
    first = conv_bn(shape[0], stem, 7, 2)
    return nn.Sequential(first, nn.ReLU(), *blocks, DeterministicAvgPool1d(1), nn.Flatten())


class SignalGru(nn.Module):
    """Bidirectional GRU with mean pooling, after a convolution of stride 4."""

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
"""Embedding width of a token or column."""
INIT_STD = 0.1
"""Standard deviation of initial embeddings."""
TEXT_DROPOUT = 0.25
KERNELS = (3, 4, 5)


def trim_padding(x: Tensor) -> Tensor:
    """Remove trailing columns of tokens [N, L] that contain only padding.

    During export, these columns are kept, because shapes must not depend on values.
    """
    if torch.compiler.is_exporting():
        return x
    used = (x != PADDING).any(0).nonzero()
    return x[:, : int(used[-1]) + 1 if len(used) else 1]


def token_mask(x: Tensor) -> Tensor:
    """Return a Boolean mask [N, L] of non-padding tokens and the first position of empty texts."""
    mask = x != PADDING
    mask[:, 0] |= ~mask.any(1)
    return mask


class Tokens(nn.Module):
    """Token embedding, the first layer of all text models."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings [N, L', E], zero for padding, and the token mask [N, L']."""
        x = trim_padding(x)
        vectors = self.embedding(x)
        return vectors * (x != PADDING).unsqueeze(2).to(vectors.dtype), token_mask(x)


def masked_mean(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return the mean [N, D] of the vectors [N, L, D] selected by `mask` [N, L]."""
    count = mask.sum(1, keepdim=True)
    total: Tensor = vectors.masked_fill(~mask.unsqueeze(2), 0).sum(1)
    return total / count


def last_vector(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return the last vector [N, D] of the vectors [N, L, D] selected by `mask` [N, L]."""
    places = mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = places.argmax(1).view(-1, 1, 1).expand(-1, 1, vectors.shape[2])
    return vectors.gather(1, last).squeeze(1)


def masked_max(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return the maximum [N, D] of the vectors [N, L, D] selected by `mask` [N, L]."""
    maximum: Tensor = vectors.masked_fill(~mask.unsqueeze(2), float("-inf")).amax(1)
    return maximum


class Bag(nn.Module):
    """Bag of words: mean of the token embeddings, followed by a hidden layer."""

    def __init__(self, shape: Shape, width: float = 1.0) -> None:
        super().__init__()
        size = scale_channels(WIDTH, width)
        self.tokens = Tokens(shape[2], size)
        self.hidden = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 32]."""
        return F.relu(self.hidden(masked_mean(*self.tokens(x))))


class TextCnn(nn.Module):
    """CNN with kernel sizes 3, 4, and 5, and max pooling over the text (Kim 2014)."""

    def __init__(self, shape: Shape, dropout: float = 0.0, width: float = 1.0) -> None:
        super().__init__()
        inputs = scale_channels(WIDTH, width)
        self.tokens = Tokens(shape[2], inputs)
        self.convs = nn.ModuleList(nn.Conv1d(inputs, inputs, size) for size in KERNELS)
        self.dropout = Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 96]."""
        vectors, mask = self.tokens(x)
        channels = vectors.transpose(1, 2)
        maxima = []
        for size, conv in zip(KERNELS, self.convs, strict=True):
            # Pad only the end, because each kernel covers a token and the tokens after it.
            padded = F.pad(channels, (0, size - 1))
            maxima.append(masked_max(F.relu(conv(padded)).transpose(1, 2), mask))
        # Interleave the kernels, so that a narrower model has the first features of a wider model.
        features: Tensor = self.dropout(torch.stack(maxima, 2).flatten(1))
        return features


class Recurrent(nn.Module):
    """Bidirectional LSTM or unidirectional GRU, with max pooling over the text."""

    def __init__(self, shape: Shape, cell: Literal["lstm", "gru"]) -> None:
        super().__init__()
        self.tokens = Tokens(shape[2], WIDTH)
        is_bidirectional = cell == "lstm"
        kind = nn.LSTM if is_bidirectional else nn.GRU
        self.layer = kind(WIDTH, WIDTH, batch_first=True, bidirectional=is_bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 64] (LSTM) or [N, 32] (GRU)."""
        vectors, mask = self.tokens(x)
        # Pack the texts, so that the backward direction starts at the end of the text.
        positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        lengths = (mask * positions).amax(1).cpu()
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.layer(packed)
        padded, _ = pad_packed_sequence(states, batch_first=True, total_length=vectors.shape[1])
        return masked_max(padded, mask)


def attention(width: int) -> nn.TransformerEncoder:
    """Build two pre-norm Transformer encoder layers, [N, L, width] -> [N, L, width]."""
    layer = nn.TransformerEncoderLayer(
        width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)


class TextTransformer(nn.Module):
    """Transformer with learned positions (Vaswani et al. 2017) and mean pooling."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = Tokens(shape[2], WIDTH)
        self.places = nn.Parameter(torch.empty(shape[1], WIDTH))
        nn.init.normal_(self.places, std=INIT_STD)
        self.layers = attention(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, L] to [N, 32]."""
        vectors, mask = self.tokens(x)
        placed = vectors + self.places[: vectors.shape[1]]
        return masked_mean(self.layers(placed, src_key_padding_mask=~mask), mask)


class FtTransformer(nn.Module):
    """Transformer over the columns of a table, with an embedding of each numeric column.

    Gorishniy et al., Revisiting Deep Learning Models for Tabular Data, 2021. The features are the
    last hidden state of an additional row token.
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
CNN_LINE = f"kernels of 3, 4, and 5 words, {WIDTH} filters each"
GRU, LSTM = (partial(Recurrent, cell=cell) for cell in ("gru", "lstm"))
TABLES = (
    (
        "ft-transformer",
        "column embeddings, 2 layers, 4 heads, width 32",
        "Gorishniy et al. 2021; small",
        FtTransformer,
    ),
)
SIGNALS = (
    ("signal-cnn2", "2 conv layers, 16-32, and a linear layer of 64", "fedhet", SIGNAL_CNN2),
    ("signal-cnn3", "3 conv layers, 32-64-64, and a linear layer of 64", "fedhet", SIGNAL_CNN3),
    ("signal-cnn2-dropout", f"signal-cnn2 with dropout {SIGNAL_DROPOUT}", "fedhet", CNN2_DROPOUT),
    ("signal-gru", "a conv layer and a bidirectional GRU of width 32", "fedhet", SignalGru),
    (
        "signal-resnet",
        "3 blocks of 3 conv layers, 32-64-64",
        "Wang et al. 2017; small",
        signal_resnet,
    ),
)
TEXTS = (
    ("text-bag", f"mean of word embeddings, and a linear layer of {WIDTH}", "fedhet", Bag),
    ("text-cnn", CNN_LINE, "Kim 2014", TextCnn),
    ("text-cnn-dropout", f"text-cnn with dropout {TEXT_DROPOUT}", "Kim 2014", CNN_DROPOUT),
    ("text-gru", f"a GRU of width {WIDTH}", "Cho et al. 2014", GRU),
    (
        "text-lstm",
        f"a bidirectional LSTM of width {WIDTH}",
        "Hochreiter and Schmidhuber 1997",
        LSTM,
    ),
    (
        "text-transformer",
        f"2 layers, 4 heads, width {WIDTH}",
        "Vaswani et al. 2017",
        TextTransformer,
    ),
)
FIXED_WIDTH = ("ft-transformer", "signal-gru", "text-gru", "text-lstm", "text-transformer")
"""Models that do not support other widths. For example, the leading channels of an LSTM's gates do
not form a smaller LSTM."""
MODELS = tuple(
    ModelInfo(name, kind.name, line, source, side, build, name not in FIXED_WIDTH, kind)
    for kind, side, models in ((TABLE, None, TABLES), (SIGNAL, 8, SIGNALS), (TEXT, None, TEXTS))
    for name, line, source, build in models
)
