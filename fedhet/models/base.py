"""The parts that models by name share: their registry entry, their interface, and their evaluation.

A torch model is an extractor (up to the head) and a classifier. Methods that exchange features
(Felo, Velo) need the two parts separate and with one feature width; the adapter gives every
architecture that width. Weights travel and are stored as named arrays, of the whole model or of a
part of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.algorithms import Part
from fedhet.base.arrays import Array, Arrays
from fedhet.base.errors import ModelError
from fedhet.base.metrics import ACCURACY, Predictions, measure
from fedhet.base.transfer import HOST, all_to_device
from fedhet.data.spec import Split
from fedhet.kinds import IMAGE, Kind, Shape
from fedhet.learning.devices import Compute
from fedhet.learning.training import Evaluation, evaluate, evaluating
from fedhet.models.classical import Refitted


@dataclass(frozen=True)
class ModelInfo:
    """A registered model: `extractor(shape)` builds [N, *shape] -> [N, D], D its native width.

    `min_side` is the minimum side of an image, or steps of time of a signal; None: any shape is
    accepted, also flat vectors. `takes` is the kind of the samples, if they are not images.
    """

    name: str
    family: str
    line: str
    source: str
    min_side: int | None
    extractor: Callable[..., nn.Module] = field(repr=False, compare=False)
    """(shape) -> the extractor; with `narrows`, also (shape, width=...)."""
    narrows: bool = False
    """Whether the model comes in other widths, by names such as cnn2-x0.5 (`narrowed`)."""
    takes: Kind | None = None
    """The one kind of samples that the model takes; None: images or, without `min_side`, any."""

    def check(self, shape: Shape, kind: Kind | None = None) -> None:
        """Raise ModelError, with the allowed shapes, if samples of this shape do not fit.

        `kind` is the kind of the samples; None: the one that the model takes.
        """
        taken = IMAGE if self.takes is None and self.min_side is not None else self.takes
        if kind and taken is not kind and not kind.is_numeric:
            raise ModelError(
                f"model '{self.name}' takes numbers, not {kind.plural}; {kind.model} and others "
                "that `fedhet models` lists do"
            )
        side = self.min_side or 0
        fits = taken.fits(shape) and taken.side(shape) >= side if taken else len(shape) > 0
        other = f"{kind.plural} of " if kind and taken and fits and kind is not taken else ""
        if not fits or other or min(taken.sizes(shape) if taken else shape) < 1:
            allowed = taken.wanted if taken else "samples of any shape"
            allowed += taken.minimum.format(side) if taken and side else ""
            hint = "; 'mlp' takes any shape" if taken and (kind or taken).is_numeric else ""
            raise ModelError(f"model '{self.name}' takes {allowed}, not {other}shape {shape}{hint}")


@dataclass(frozen=True)
class DrawnInfo:
    """A name in a pool for which each client draws a model."""

    name: str
    family: str
    line: str
    source: str
    draw: Callable[[int, int], str] = field(repr=False, compare=False)
    """(seed, number of the client) -> the name of its model, one of `models`."""
    models: Mapping[str, ModelInfo] = field(repr=False, compare=False)


def scale_channels(channels: int, width: float) -> int:
    """Return the channels of a layer at a width: rounded up, as in HeteroFL's published code."""
    return math.ceil(channels * width)


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
    with evaluating(module), torch.no_grad():
        return tuple(module((kind or IMAGE).blank(2, tuple(shape))).shape)


class LabelSpaceModel(nn.Module):
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


def part_names(model: HetModel, part: Part) -> frozenset[str]:
    """Return the names in the state dict of `model` that belong to the part.

    A batch norm's are its weights and its running statistics (FedBN, Li et al. 2021).
    """
    everything = frozenset(model.state_dict())
    if part == "all":
        return everything
    if part == "trained":
        return frozenset(name for name, _ in model.named_parameters())
    if part == "all-but-norms":
        norms = {path: m for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
        return everything - {f"{path}.{key}" for path, m in norms.items() for key in m.state_dict()}
    start = "classifier." if part == "head" else "extractor."
    return frozenset(name for name in everything if name.startswith(start))


def part_arrays(model: HetModel, part: Part) -> dict[str, Array]:
    """Return the part's tensors as arrays, in the order of the state dict."""
    names = part_names(model, part)
    return {name: array for name, array in to_arrays(model).items() if name in names}


Model = TypeVar("Model", bound=nn.Module)


def to_arrays(model: nn.Module) -> dict[str, Array]:
    """Return a model's state dict as numpy arrays by name."""
    return to_host_arrays(model.state_dict())


def to_host_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
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


Evaluations = dict[tuple[str, str], Evaluation]
"""Evaluations by protocol ("personal", "common") and kind of model ("private", "proxy", ...)."""


def evaluate_models(
    models: Mapping[str, nn.Module],
    splits: Mapping[str, Split],
    compute: Compute,
    metrics: Sequence[str],
) -> Evaluations:
    """Evaluate models, by kind, on every test split, by protocol."""
    return {
        (protocol, kind): evaluate_model(model, split, compute, metrics)
        for protocol, split in splits.items()
        for kind, model in models.items()
    }


def evaluate_model(
    model: nn.Module, split: Split, compute: Compute, metrics: Sequence[str] = (ACCURACY,)
) -> Evaluation:
    """Return a model's score on a split of at least one sample, with its `metrics`.

    A model whose outputs are not all numbers has its accuracy alone.
    """
    kept: list[Tensor] | None = None if set(metrics) <= {ACCURACY} else []
    score = evaluate(model, split.x, split.y, compute, kept)
    if kept:
        logits = torch.cat(kept).double().cpu()
        if logits.amax(1).isfinite().all() and not logits.isnan().any():
            truth, predicted = split.y.cpu().numpy(), logits.argmax(1).numpy()
            if isinstance(model, Refitted):
                likely = (
                    model.probabilities(compute.to_inputs(split.x)).double().cpu().clip(0.0, 1.0)
                )
            else:
                likely = logits.softmax(1)
            made = Predictions(truth, predicted, likely.numpy())
            return replace(score, metrics=measure(metrics, made))
    return score


LEVELS = 256
"""The number of values of a random byte."""


class Dropout(nn.Dropout):
    """`nn.Dropout`, which on a CPU decides by one random byte for each element.

    torch draws a whole random number for each, which takes several times as long as the layer
    before it. Elsewhere, and for a `p` that is not a multiple of 1/256, it is torch's own.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x with each element zeroed with probability p, the others scaled by 1/(1 - p)."""
        threshold = self.p * LEVELS
        if not self.training or x.device.type != "cpu" or threshold not in range(1, LEVELS):
            return super().forward(x)
        return x * random_bytes(x).ge_(threshold).div_(1 - self.p)


def random_bytes(like: Tensor) -> Tensor:
    """Return integers from 0 to 255 as a tensor of the shape, type and layout of `like`.

    They are drawn from torch's global generator, eight at a time.
    """
    drawn = torch.empty(-(-like.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
    found = torch.empty_like(like, requires_grad=False)
    in_memory = found.as_strided((found.numel(),), (1,))
    in_memory.copy_(drawn.view(torch.uint8)[: found.numel()])
    return found
