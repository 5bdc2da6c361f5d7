"""The one face of every torch model: an extractor, to the flatten before the head, + a classifier.

Methods that exchange features (Felo, Velo) need the two apart and of one width; the adapter
gives every architecture that width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class HetModel(nn.Sequential):
    """An extractor [N, *shape] -> [N, D] and a classifier [N, D] -> [N, C], one after the other."""

    extractor: nn.Module
    classifier: nn.Module

    def __init__(self, extractor: nn.Module, classifier: nn.Module, feature_dim: int) -> None:
        """Join the two; `feature_dim` is D, the width that passes between them."""
        super().__init__(OrderedDict(extractor=extractor, classifier=classifier))
        self.feature_dim = feature_dim

    def features_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [N, D] and the logits [N, C] of one pass."""
        features = self.extractor(x)
        return features, self.classifier(features)


def join(extractor: nn.Module, native: int, classes: int, feature_dim: int | None) -> HetModel:
    """Return the extractor with a linear classifier.

    Where `feature_dim` asks for another width than `native`, a linear adapter ends the extractor.
    """
    width = native if feature_dim is None else feature_dim
    if width != native:
        layers = OrderedDict(native=extractor, adapter=nn.Linear(native, width))
        extractor = nn.Sequential(layers)
    return HetModel(extractor, nn.Linear(width, classes), width)


def output_shape(module: nn.Module, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that `module`, in evaluation mode, gives a batch of two samples of `shape`.

    On torch's default device: inside `torch.device("meta")` nothing is computed.
    """
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            return tuple(module(torch.zeros(2, *shape)).shape)
    finally:
        for part, mode in training.items():
            part.training = mode


class Within(nn.Module):
    """A network whose logits [N, C] are those of its own classes; the others can never be chosen.

    Trained through this face, a network learns to tell its own classes apart and nothing else:
    the outputs of the others get no gradient.
    """

    def __init__(self, network: nn.Module, outside: Tensor) -> None:
        """Hold the network, and which classes [C], as truths, are not the client's."""
        super().__init__()
        self.network = network
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [N, C], minus infinity for a class outside."""
        logits: Tensor = self.network(x)
        return logits.masked_fill(self.outside, float("-inf"))
