"""The common interface of torch models: an extractor (up to the head) and a classifier.

Methods that exchange features (Felo, Velo) need the two parts separate and with one feature width;
the adapter gives every architecture that width. Weights travel and are stored as named arrays, of
the whole model or of a part of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.algorithms import Part
from fedhet.base.arrays import Array, Arrays
from fedhet.base.transfer import HOST, all_to_device
from fedhet.kinds import IMAGE, Kind


class HetModel(nn.Sequential):
    """An extractor [N, *shape] -> [N, D] followed by a classifier [N, D] -> [N, C]."""

    extractor: nn.Module
    classifier: nn.Module

    def __init__(self, extractor: nn.Module, classifier: nn.Module, feature_dim: int) -> None:
        """Combine the two parts; `feature_dim` is D, the width of the features between them."""
        super().__init__(OrderedDict(extractor=extractor, classifier=classifier))
        self.feature_dim = feature_dim

    def features_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [N, D] and the logits [N, C] of one pass."""
        features = self.extractor(x)
        return features, self.classifier(features)


def join(extractor: nn.Module, native: int, classes: int, feature_dim: int | None) -> HetModel:
    """Return the extractor with a linear classifier.

    If `feature_dim` differs from `native`, a linear adapter is appended to the extractor.
    """
    width = native if feature_dim is None else feature_dim
    if width != native:
        layers = OrderedDict(native=extractor, adapter=nn.Linear(native, width))
        extractor = nn.Sequential(layers)
    return HetModel(extractor, nn.Linear(width, classes), width)


def output_shape(
    module: nn.Module, shape: Sequence[int], kind: Kind | None = None
) -> tuple[int, ...]:
    """Return the shape of `module`'s output, in evaluation mode, for two samples of `shape`.

    `kind` is the kind of the samples; None: numbers.

    On torch's default device: inside `torch.device("meta")` nothing is computed. A model of texts
    needs a device that computes, as it looks at their lengths.
    """
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            return tuple(module((kind or IMAGE).blank(2, tuple(shape))).shape)
    finally:
        for part, mode in training.items():
            part.training = mode


class Within(nn.Module):
    """A network with its logits [N, C] restricted to its own classes; others are never predicted.

    A network trained through this wrapper learns to distinguish its own classes only: the outputs
    of the other classes get no gradient.
    """

    def __init__(self, network: nn.Module, outside: Tensor) -> None:
        """Wrap `network`; `outside` [C], bool, marks the classes that are not the client's."""
        super().__init__()
        self.network = network
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [N, C], minus infinity for classes outside the label space."""
        logits: Tensor = self.network(x)
        return logits.masked_fill(self.outside, float("-inf"))


def names_of(model: HetModel, part: Part) -> frozenset[str]:
    """Return the names in the state dict of `model` that belong to the part.

    A batch norm's are its weights and its running statistics (FedBN, Li et al. 2021).
    """
    everything = frozenset(model.state_dict())
    if part == "all":
        return everything
    if part == "trained":
        return frozenset(name for name, _ in model.named_parameters())
    if part == "all-but-norms":
        return everything - _names_within(model, _BatchNorm)
    start = "classifier." if part == "head" else "extractor."
    return frozenset(name for name in everything if name.startswith(start))


def arrays_of(model: HetModel, part: Part) -> dict[str, Array]:
    """Return the part's tensors as arrays, in the order of the state dict."""
    names = names_of(model, part)
    return {name: array for name, array in to_arrays(model).items() if name in names}


def _names_within(model: nn.Module, layer: type[nn.Module]) -> frozenset[str]:
    """Return the names in the state dict that belong to layers of one type."""
    return frozenset(
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, layer)
        for name in module.state_dict()
    )


Model = TypeVar("Model", bound=nn.Module)


def to_arrays(model: nn.Module) -> dict[str, Array]:
    """Return a model's state dict as numpy arrays by name."""
    return on_host(model.state_dict())


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return tensors as numpy arrays by name: those of an accelerator are copied in one piece."""
    return {name: tensor.numpy() for name, tensor in all_to_device(tensors, HOST).items()}


def load_weights(model: Model, weights: Arrays) -> Model:
    """Load `weights`, by state-dict names, into `model` on any device, and return it."""
    state = {
        name: torch.from_numpy(np.require(value, requirements="W"))  # copied only if read-only
        for name, value in weights.items()
    }
    device = next((each.device for each in model.state_dict().values()), HOST)
    model.load_state_dict(all_to_device(state, device))
    return model
