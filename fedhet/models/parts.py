"""The part of a model that travels: one predicate for all methods that average weights."""

from __future__ import annotations

from functools import lru_cache

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.algorithms.choices import Part
from fedhet.base.arrays import Array, Shapes
from fedhet.kinds import Shape
from fedhet.models.het import HetModel
from fedhet.models.registry import build, shapes
from fedhet.models.weights import to_arrays


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


def shapes_of(
    part: Part,
    name: str,
    shape: Shape,
    classes: int,
    feature_dim: int | None = None,
    kind: str = "",
) -> Shapes:
    """Return the shape and dtype of the part's tensors, of a model by name."""
    whole = shapes(name, shape, classes, feature_dim, kind)
    if part == "all":
        return whole
    names = _names_by_model(part, name, tuple(shape), classes, feature_dim, kind)
    return {key: found for key, found in whole.items() if key in names}


@lru_cache(maxsize=256)
def _names_by_model(
    part: Part, name: str, shape: Shape, classes: int, feature_dim: int | None, kind: str
) -> frozenset[str]:
    built = build(name, shape, classes, seed=0, feature_dim=feature_dim, kind=kind)
    return names_of(built, part)


def _names_within(model: nn.Module, layer: type[nn.Module]) -> frozenset[str]:
    """Return the names in the state dict that belong to layers of one type."""
    return frozenset(
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, layer)
        for name in module.state_dict()
    )
