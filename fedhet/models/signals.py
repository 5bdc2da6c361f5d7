"""Small networks for signals: [N, C, T] -> features [N, D]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.kinds import SIGNAL, Shape
from fedhet.models.dropout import Dropout
from fedhet.models.info import ModelInfo, share_of

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


def cnn(shape: Shape, widths: Sequence[int], dropout: float = 0.0, width: float = 1.0) -> nn.Module:
    """Return convs of `widths` over 5 steps, each halving time, and a linear layer: -> [N, 64].

    Dropout follows each. `width` is the share of all channels, rounded up.
    """
    *widths, features = (share_of(channels, width) for channels in (*widths, HIDDEN))
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


def resnet(shape: Shape, width: float = 1.0) -> nn.Module:
    """Return a stem that halves time, three blocks, and the mean over time: -> [N, 64]."""
    stem, *widths = (share_of(channels, width) for channels in (16, 32, HIDDEN, HIDDEN))
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


def _info(
    name: str, line: str, source: str, build: Callable[..., nn.Module], narrows: bool = True
) -> ModelInfo:
    return ModelInfo(name, "signal", line, source, 8, build, narrows, SIGNAL)


CNN2 = partial(cnn, widths=(16, 32))
CNN3 = partial(cnn, widths=(32, 64, 64))
DROPOUT = partial(CNN2, dropout=SIGNAL_DROPOUT)
MODELS = (
    _info("signal-cnn2", "2 conv layers, 16-32, and a linear of 64", "ours", CNN2),
    _info("signal-cnn3", "3 conv layers, 32-64-64, and a linear of 64", "ours", CNN3),
    _info("signal-cnn2-dropout", f"signal-cnn2 with dropout {SIGNAL_DROPOUT}", "ours", DROPOUT),
    _info("signal-gru", "a conv and a GRU of 32 in both directions", "ours", SignalGru, False),
    _info("signal-resnet", "3 blocks of 3 convs, 32-64-64", "Wang et al. 2017; small", resnet),
)
