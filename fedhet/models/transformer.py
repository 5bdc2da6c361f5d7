"""Attention over the columns of a table, and the layers that texts use too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.kinds import TABLE, Shape
from fedhet.models.info import ModelInfo

WIDTH = 32
"""The width of a column's vector."""


def encoder_layers(width: int, layers: int, heads: int = 4) -> nn.TransformerEncoder:
    """Return layers of attention, [N, L, width] -> the same, normalised before each part."""
    layer = nn.TransformerEncoderLayer(
        width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(
        layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
    )


class FtTransformer(nn.Module):
    """A vector for each column, scaled by its number, and attention among them.

    Gorishniy et al., Revisiting Deep Learning Models for Tabular Data, 2021: the features are the
    last state of an additional vector that stands for the row.
    """

    def __init__(self, shape: Shape, layers: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape[0], WIDTH))
        self.bias = nn.Parameter(torch.empty(shape[0], WIDTH))
        self.row = nn.Parameter(torch.empty(1, WIDTH))
        bound = WIDTH**-0.5
        for parameter in (self.weight, self.bias, self.row):
            nn.init.uniform_(parameter, -bound, bound)
        self.layers = encoder_layers(WIDTH, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, F] to [N, 32]."""
        columns = x.unsqueeze(2) * self.weight + self.bias
        row = self.row.expand(len(x), 1, WIDTH).to(columns.dtype)
        features: Tensor = self.layers(torch.cat([row, columns], 1))[:, 0]
        return features


MODELS = (
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
