"""Small networks for images and tables: CNNs, perceptrons, LeNet-5, ResNet-9, a transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations_with_replacement
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedhet.base.seeding import numpy_rng
from fedhet.kinds import TABLE, Shape
from fedhet.models.info import DrawnInfo, Dropout, ModelInfo, encoder_layers, share_of


def conv_bn(inputs: int, outputs: int, *, pool: bool = False, dropout: float = 0.0) -> nn.Module:
    """Return conv 3x3, BN, (dropout), ReLU, (max-pool 2x2): [N, I, H, W] -> [N, O, H', W']."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    if dropout:
        layers.append(Dropout(dropout))
    layers.append(nn.ReLU())
    if pool:
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def cnn(
    shape: Shape,
    widths: Sequence[int],
    pools: Sequence[bool],
    features: int,
    dropout: float = 0.0,
    width: float = 1.0,
) -> nn.Module:
    """Return conv layers of `widths`, pooled by `pools`, and a linear layer: -> [N, features].

    `shape` is [C, H, W]. Dropout follows the last two batch norms and the linear layer, as
    UM-pFSSL's ResNet-9 has it (section VI-A). `width` is the share of all channels, rounded up.
    """
    *widths, features = (share_of(channels, width) for channels in (*widths, features))
    inputs, divisor = (shape[0], *widths[:-1]), 2 ** sum(pools)
    drops = [0.0] * (len(widths) - 2) + [dropout] * 2
    layers = [
        conv_bn(i, o, pool=p, dropout=d)
        for i, o, p, d in zip(inputs, widths, pools, drops, strict=True)
    ]
    flat = widths[-1] * (shape[1] // divisor) * (shape[2] // divisor)
    head = [nn.Flatten(), nn.Linear(flat, features), nn.ReLU()]
    return nn.Sequential(*layers, *head, *([Dropout(dropout)] if dropout else []))


def mlp(shape: Shape, widths: Sequence[int], dropout: float = 0.0, width: float = 1.0) -> nn.Module:
    """Return flatten and hidden layers of `widths`, each with ReLU: [N, *shape] -> [N, last].

    Dropout follows each hidden layer. `width` is the share of all units, rounded up.
    """
    widths = [share_of(units, width) for units in widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in zip((prod(shape), *widths[:-1]), widths, strict=True):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        layers += [Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers)


def lenet5(shape: Shape) -> nn.Module:
    """Return LeNet-5 (LeCun et al. 1998) with ReLU and max-pools: [N, C, H, W] -> [N, 84]."""
    height, width = ((side // 2 - 4) // 2 for side in shape[1:])
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * height * width, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
    )


def cofed_cnn(shape: Shape, widths: Sequence[int]) -> nn.Module:
    """Return one of CoFED's CNNs, pooled after the first two convs: [N, C, H, W] -> [N, last].

    The paper gives the widths; batch norms, max-pools and the final global average pooling follow
    the authors' published code.
    """
    inputs = (shape[0], *widths[:-1])
    layers = [
        conv_bn(i, o, pool=place < 2)
        for place, (i, o) in enumerate(zip(inputs, widths, strict=True))
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Residual(nn.Module):
    """x + body(x), with the same shape."""

    def __init__(self, *body: nn.Module) -> None:
        """Store the layers of the body."""
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to the same shape."""
        branch: Tensor = self.body(x)
        return x + branch


def resnet9(shape: Shape, dropout: float = 0.5) -> nn.Module:
    """Return DAVIDNet's ResNet-9 with dropout, for MC dropout: [N, C, H, W] -> [N, 256].

    UM-pFSSL, section VI-A: dropout 0.5 after the last two batch norms and every fully connected
    layer but the output. The hidden one (512 -> 256) is ours: the paper gives no widths.
    """
    return nn.Sequential(
        *(conv_bn(shape[0], 64), conv_bn(64, 128, pool=True)),
        Residual(conv_bn(128, 128), conv_bn(128, 128)),
        *(conv_bn(128, 256, pool=True), conv_bn(256, 512, pool=True)),
        Residual(conv_bn(512, 512, dropout=dropout), conv_bn(512, 512, dropout=dropout)),
        *(nn.MaxPool2d((shape[1] // 8, shape[2] // 8)), nn.Flatten()),
        *(nn.Linear(512, 256), nn.ReLU(), Dropout(dropout)),
    )


# CoFED, Table 1: filters of 3 x 3 in each layer.
COFED = (
    (24, 40),
    (24, 32, 56),
    (20, 32),
    (24, 40, 56),
    (20, 32, 80),
    (24, 32, 80),
    (32, 32),
    (40, 56),
    (32, 48),
    (48, 56, 96),
)

COFED_WIDTHS = (20, 24, 32, 40, 48, 56, 80, 96)
"""The widths from which the authors' generator of architectures draws."""


def _cofed(name: str, source: str, widths: Sequence[int]) -> ModelInfo:
    line = f"{len(widths)} conv layers, {'-'.join(map(str, widths))}"
    return ModelInfo(name, "cnn", line, source, 4, partial(cofed_cnn, widths=widths))


def random_cofed(seed: int, client: int) -> str:
    """Return the name of the architecture that client number `client` draws.

    CoFED, Section 5.1: "randomly generated 2-layer or 3-layer CNNs". The rule is that of the
    authors' published generator, of which Table 1 prints ten draws: two or three layers, each
    equally likely; a width for each from COFED_WIDTHS, with replacement; ascending. Two clients may
    draw the same.
    """
    rng = numpy_rng(seed, "cofed-random", client)
    widths = sorted(rng.choice(COFED_WIDTHS, size=int(rng.integers(2, 4))).tolist())
    return _drawn_name(widths)


def _drawn_name(widths: Sequence[int]) -> str:
    return f"cofed-{'-'.join(map(str, widths))}"


def _mlp(name: str, *widths: int, dropout: float = 0.0) -> ModelInfo:
    layers = "1 hidden layer" if len(widths) == 1 else f"{len(widths)} hidden layers"
    line = f"{layers}: {'-'.join(map(str, widths))}"
    line += f", with dropout {dropout}" if dropout else ""
    build = partial(mlp, widths=widths, dropout=dropout)
    return ModelInfo(name, "mlp", line, "ours", None, build, narrows=True)


def _cnn(name: str, line: str, side: int, build: Callable[..., nn.Module]) -> ModelInfo:
    return ModelInfo(name, "cnn", line, "ours", side, build, narrows=True)


GENERATED_COFED = MappingProxyType(
    {
        _drawn_name(widths): _cofed(_drawn_name(widths), "CoFED, Section 5.1, generated", widths)
        for layers in (2, 3)
        for widths in combinations_with_replacement(COFED_WIDTHS, layers)
    }
)
"""Every architecture that `random_cofed` can draw, by its name, such as cofed-24-40."""
SMALL_DROPOUT = 0.25
"""ResNet-9's 0.5 leaves too little of 16 and 32 filters (measured: docs/results.md)."""
CNN2 = partial(cnn, widths=(16, 32), pools=(True, True), features=64)
CNN3 = partial(cnn, widths=(32, 64, 64), pools=(True, True, True), features=128)
CNN4 = partial(cnn, widths=(32, 32, 64, 64), pools=(False, True, False, True), features=128)
MODELS = (
    _mlp("mlp", 128),
    _mlp("mlp2", 256, 128),
    _mlp("mlp3", 256, 128, 64),
    _mlp("mlp-dropout", 128, dropout=SMALL_DROPOUT),
    _cnn("cnn2", "2 conv layers, 16-32, and a linear of 64", 4, CNN2),
    _cnn("cnn3", "3 conv layers, 32-64-64, and a linear of 128", 8, CNN3),
    _cnn("cnn4", "VGG-like: 32-32, 64-64, and a linear of 128", 4, CNN4),
    *(
        _cnn(f"{name}-dropout", f"{name} with dropout {SMALL_DROPOUT}", side, build)
        for name, side, build in (
            ("cnn2", 4, partial(CNN2, dropout=SMALL_DROPOUT)),
            ("cnn3", 8, partial(CNN3, dropout=SMALL_DROPOUT)),
        )
    ),
    ModelInfo("lenet5", "cnn", "conv 6-16 of 5x5, linear 120-84", "LeCun et al. 1998", 12, lenet5),
    ModelInfo(
        "resnet9", "resnet", "DAVIDNet with dropout 0.5", "UM-pFSSL, section VI-A", 8, resnet9
    ),
    *(
        _cofed(f"cofed-cnn{number}", f"CoFED, Table 1, model {number}", widths)
        for number, widths in enumerate(COFED, 1)
    ),
)
DRAWN = (
    DrawnInfo(
        "cofed-random",
        "cnn",
        "in a pool: each client draws a CNN of 2 or 3 conv layers, such as cofed-24-40",
        "CoFED, Section 5.1",
        random_cofed,
        GENERATED_COFED,
    ),
)


COLUMN_WIDTH = 32
"""The width of a column's vector."""


class FtTransformer(nn.Module):
    """A vector for each column, scaled by its number, and attention among them.

    Gorishniy et al., Revisiting Deep Learning Models for Tabular Data, 2021: the features are the
    last state of an additional vector that stands for the row.
    """

    def __init__(self, shape: Shape, layers: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape[0], COLUMN_WIDTH))
        self.bias = nn.Parameter(torch.empty(shape[0], COLUMN_WIDTH))
        self.row = nn.Parameter(torch.empty(1, COLUMN_WIDTH))
        bound = COLUMN_WIDTH**-0.5
        for parameter in (self.weight, self.bias, self.row):
            nn.init.uniform_(parameter, -bound, bound)
        self.layers = encoder_layers(COLUMN_WIDTH, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, F] to [N, 32]."""
        columns = x.unsqueeze(2) * self.weight + self.bias
        row = self.row.expand(len(x), 1, COLUMN_WIDTH).to(columns.dtype)
        features: Tensor = self.layers(torch.cat([row, columns], 1))[:, 0]
        return features


TABLES = (
    ModelInfo(
        "ft-transformer",
        "table",
        "a vector a column, 2 layers of 4 heads, width 32",
        "Gorishniy et al. 2021; small",
        None,
        FtTransformer,
        takes=TABLE,
    ),
)
