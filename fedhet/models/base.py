"""Code that all models share: registry entries, the model interface, and evaluation.

A torch model consists of an extractor and a classifier (head). Methods that exchange features
(Felo, Velo) use the two parts separately. They require the same feature width on all clients, so a
linear adapter is added if necessary. Weights are sent and stored as named arrays, for the entire
model or for a part of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.algorithms import LORA_A, MlpWidth, Part
from fedhet.base.arrays import Array, Arrays
from fedhet.base.errors import ModelError
from fedhet.base.metrics import ACCURACY
from fedhet.base.transfer import HOST, all_to_device
from fedhet.data.dataset import Split
from fedhet.kinds import IMAGE, Kind, Shape
from fedhet.learning.devices import Compute
from fedhet.learning.training import Evaluation, evaluating
from fedhet.models.classical import Refitted
from fedhet.tasks import CLASSIFICATION, Task


@dataclass(frozen=True)
class ModelInfo:
    """Registry entry for a network."""

    name: str
    family: str
    line: str
    """One-line description."""
    source: str
    """Source of the architecture: a paper or a library."""
    min_side: int | None
    """Minimum image side or number of time steps of a signal, or None for any shape."""
    extractor: Callable[..., nn.Module] = field(repr=False, compare=False)
    """Function that maps a shape to an extractor [N, *shape] -> [N, D], where D is the native
    width. If `narrows` is set, the function also has an argument `width`."""
    narrows: bool = False
    """Whether the model supports other widths, with names such as cnn2-x0.5."""
    takes: Kind | None = None
    """Supported sample kind. None means images, or any kind if `min_side` is None."""
    pooled: int = 0
    """Default width to which an adaptive average pool brings the extractor's output. The pool also
    replaces the linear adapter to other widths; 0 = no pool."""
    hidden: int = 0
    """Width of the classifier's hidden layer; 0 = the classifier is a single linear layer."""

    def check(self, shape: Shape, kind: Kind | None = None) -> None:
        """Check the samples. Raises ModelError if the model does not support their shape and kind.

        If `kind` is None, the kind that the model supports is assumed.
        """
        supported = IMAGE if self.takes is None and self.min_side is not None else self.takes
        if kind and supported is not kind and not kind.is_numeric:
            raise ModelError(
                f"model '{self.name}' does not support {kind.plural}. Use {kind.model} or another "
                f"model for {kind.plural} from `fedhet models`."
            )
        side = self.min_side or 0
        fits = len(shape) > 0
        if supported:
            fits = supported.fits(shape) and supported.side(shape) >= side
        is_other = bool(kind and supported and fits and kind is not supported)
        other = f"{kind.plural} of " if kind and is_other else ""
        if not fits or other or min(supported.sizes(shape) if supported else shape) < 1:
            expected = supported.wanted if supported else "samples of any shape"
            expected += supported.minimum.format(side) if supported and side else ""
            hint = ""
            if supported and (kind or supported).is_numeric:
                hint = ". Model 'mlp' supports any shape."
            raise ModelError(
                f"model '{self.name}': expected {expected}, got {other}shape {shape}{hint}"
            )


@dataclass(frozen=True)
class DrawnInfo:
    """Registry entry for a pool name that stands for several models, one per client."""

    name: str
    family: str
    line: str
    source: str
    draw: Callable[[int, int], str] = field(repr=False, compare=False)
    """Function that maps a seed and a client index to a model name (a key of `models`)."""
    models: Mapping[str, ModelInfo] = field(repr=False, compare=False)


def scale_channels(channels: int, width: float) -> int:
    """Return `width * channels`, rounded up as in HeteroFL's published code."""
    return math.ceil(channels * width)


class HetModel(nn.Sequential):
    """Model with an extractor [N, *shape] -> [N, D] and a classifier [N, D] -> [N, C]."""

    extractor: nn.Module
    classifier: nn.Module

    def __init__(self, extractor: nn.Module, classifier: nn.Module, feature_dim: int) -> None:
        """Combine an extractor and a classifier.

        Args:
            extractor: Module [N, *shape] -> [N, D].
            classifier: Module [N, D] -> [N, C].
            feature_dim: Width D of the features.
        """
        super().__init__(OrderedDict(extractor=extractor, classifier=classifier))
        self.feature_dim = feature_dim

    def features_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [N, D] and the logits [N, C] from one forward pass."""
        features = self.extractor(x)
        return features, self.classifier(features)


def join(
    extractor: nn.Module,
    native: int,
    classes: int,
    feature_dim: int | None,
    pooled: int = 0,
    hidden: int = 0,
) -> HetModel:
    """Add a classifier to an extractor.

    If `feature_dim` differs from the extractor's width `native`, an adapter is inserted between the
    extractor and the classifier. The adapter is linear, or an average pool if `pooled` is set. If
    `feature_dim` is an `MlpWidth`, the adapter is always inserted, and has a hidden layer.
    `ModelInfo` describes `pooled` and `hidden`.
    """
    width = int(feature_dim or pooled or native)
    adapter: nn.Module | None = None
    if isinstance(feature_dim, MlpWidth):
        adapter = nn.Sequential(nn.Linear(native, native), nn.ReLU(), nn.Linear(native, width))
    elif width != native:
        adapter = nn.AdaptiveAvgPool1d(width) if pooled else nn.Linear(native, width)
    if adapter is not None:
        extractor = nn.Sequential(OrderedDict(native=extractor, adapter=adapter))
    classifier: nn.Module = nn.Linear(hidden or width, classes)
    if hidden:
        classifier = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), classifier)
    return HetModel(extractor, classifier, width)


def output_shape(
    module: nn.Module, shape: Sequence[int], kind: Kind | None = None
) -> tuple[int, ...]:
    """Return the output shape of `module` in evaluation mode for two samples of `shape`.

    If `kind` is None, the samples are numbers. The forward pass runs on torch's default device. The
    device may be "meta", except for texts, because text models read the lengths of texts.
    """
    with evaluating(module), torch.no_grad():
        return tuple(module((kind or IMAGE).blank(2, tuple(shape))).shape)


class LabelSpaceModel(nn.Module):
    """Wrapper that restricts a network's logits [N, C] to a label space.

    Classes outside the label space are never predicted, and their outputs get no gradient.
    """

    def __init__(self, network: nn.Module, outside: Tensor) -> None:
        """Wrap a network.

        Args:
            network: Module with logits [N, C].
            outside: Boolean mask [C] of the classes outside the label space.
        """
        super().__init__()
        self.network = network
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [N, C], which are -inf for classes outside the label space."""
        logits: Tensor = self.network(x)
        return logits.masked_fill(self.outside, float("-inf"))


class Ensemble(nn.Module):
    """Model whose predictions are the mean of the predictions of several models."""

    def __init__(self, models: Iterable[nn.Module], task: Task) -> None:
        """Combine models for the samples and targets of `task`."""
        super().__init__()
        self.models = nn.ModuleList(models)
        self._average = task.average

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [N, C], such as the logarithm of the mean class probabilities."""
        return self._average(torch.stack([model(x).float() for model in self.models]))


def part_names(model: HetModel, part: Part) -> frozenset[str]:
    """Return the names of the tensors in a part of a model's state dict.

    "all-but-norms" excludes the weights and running statistics of batch norms (FedBN, Li et al.
    2021).
    """
    names = frozenset(model.state_dict())
    if part == "all":
        return names
    if part == "trained":
        return frozenset(name for name, _ in model.named_parameters())
    if part == "all-but-norms":
        norms = {path: m for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
        return names - {f"{path}.{key}" for path, m in norms.items() for key in m.state_dict()}
    if part == "lora-a" and any(name.endswith(LORA_A) for name in names):
        return frozenset(name for name in names if name.endswith(LORA_A))
    start = "classifier." if part == "head" else "extractor."
    return frozenset(name for name in names if name.startswith(start))


def part_arrays(model: HetModel, part: Part) -> dict[str, Array]:
    """Return the tensors in a part of a model as arrays, in the order of the state dict."""
    names = part_names(model, part)
    return {name: array for name, array in to_arrays(model).items() if name in names}


Model = TypeVar("Model", bound=nn.Module)


def to_arrays(model: nn.Module) -> dict[str, Array]:
    """Return the state dict of a model as NumPy arrays."""
    return to_host_arrays(model.state_dict())


def to_host_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Convert tensors to NumPy arrays, with a single copy from an accelerator."""
    return {name: tensor.numpy() for name, tensor in all_to_device(tensors, HOST).items()}


def load_weights(model: Model, weights: Arrays) -> Model:
    """Load `weights` into the state dict of `model`, on any device, and return `model`."""
    state = {
        # `np.require` copies only read-only arrays.
        name: torch.from_numpy(np.require(value, requirements="W"))
        for name, value in weights.items()
    }
    device = next((each.device for each in model.state_dict().values()), HOST)
    model.load_state_dict(all_to_device(state, device))
    return model


Evaluations = dict[tuple[str, str], Evaluation]
"""Evaluations by protocol ("personal", "common") and model kind ("private", "proxy", ...)."""


def evaluate_models(
    models: Mapping[str, nn.Module],
    splits: Mapping[str, Split],
    compute: Compute,
    metrics: Sequence[str],
    task: Task = CLASSIFICATION,
) -> Evaluations:
    """Evaluate each model on each test split. `models` are keyed by kind, `splits` by protocol."""
    return {
        (protocol, kind): evaluate_model(model, split, compute, metrics, task)
        for protocol, split in splits.items()
        for kind, model in models.items()
    }


def evaluate_model(
    model: nn.Module,
    split: Split,
    compute: Compute,
    metrics: Sequence[str] = (ACCURACY,),
    task: Task = CLASSIFICATION,
) -> Evaluation:
    """Evaluate a model on a split with at least one sample, and compute `metrics` of the task."""
    probabilities = model.probabilities if isinstance(model, Refitted) else None
    return task.evaluate(model, split, compute, metrics, probabilities)


LEVELS = 256
"""Number of values that a random byte can have."""


class Dropout(nn.Dropout):
    """Variant of `nn.Dropout` that is faster on CPUs, because it draws one byte per element.

    PyTorch draws a full random number per element, which takes several times as long as the layer
    before it. On other devices, or if `p` is not a multiple of 1/256, this layer is the same as
    `nn.Dropout`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Zero each element with probability p, and scale all other elements by 1/(1 - p)."""
        threshold = self.p * LEVELS
        if not self.training or x.device.type != "cpu" or threshold not in range(1, LEVELS):
            return super().forward(x)
        return x * random_bytes(x).ge_(threshold).div_(1 - self.p)


def random_bytes(like: Tensor) -> Tensor:
    """Return random integers from 0 to 255 with the shape, dtype, and layout of `like`.

    The integers are drawn from torch's global generator, eight at a time.
    """
    drawn = torch.empty(-(-like.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
    values = torch.empty_like(like, requires_grad=False)
    in_memory = values.as_strided((values.numel(),), (1,))
    in_memory.copy_(drawn.view(torch.uint8)[: values.numel()])
    return values
