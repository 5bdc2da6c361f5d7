"""The registry of models by name, and building a model for a run's shape and classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedhet.algorithms import Part
from fedhet.base.arrays import Shapes
from fedhet.base.errors import ModelError, OwnModelError, SettingsError, nearest
from fedhet.base.seeding import derive, numpy_rng, seeded
from fedhet.data.texts import is_encoder
from fedhet.kinds import IMAGE, KINDS, Shape
from fedhet.models import sequences, small, vision
from fedhet.models.classical import CLASSICAL, ClassicalInfo, Refitted
from fedhet.models.het import HetModel, join, names_of, output_shape
from fedhet.models.info import (
    GROUPED,
    DrawnInfo,
    ModelInfo,
    base_and_width,
    grouped_norms,
    has_batch_norms,
    narrow_name,
    narrowed,
)
from fedhet.models.libraries import (
    assemble_encoder,
    assemble_timm,
    check_encoder,
    check_timm,
    check_weights,
    is_pretrained,
    is_timm,
    pretrained_info,
)
from fedhet.models.user_model import (
    assemble_user_model,
    call_user_model,
    check_use,
    import_user_model,
    is_classifier,
    is_user_model,
    no_gradients,
)

MODELS: Mapping[str, ModelInfo] = MappingProxyType(
    {
        info.name: info
        for family in (small.MODELS, vision.MODELS, small.TABLES, sequences.MODELS)
        for info in family
    }
)
WITHOUT_GRADIENTS = MappingProxyType({info.name: info for info in CLASSICAL})
DRAWN = MappingProxyType({info.name: info for info in small.DRAWN})
"""Names in a pool for which each client draws a model."""
MIXING = frozenset({"signal-gru", "text-gru", "text-lstm", "text-transformer", "ft-transformer"})
"""Recurrent and attentive networks, of which Opacus cannot tell the gradient of each sample."""
MOST_COMPUTED = 2**16
"""Values of a sample up to which a model's width is found by computing."""
_DRAWABLE = MappingProxyType({k: v for drawn in small.DRAWN for k, v in drawn.models.items()})


def names() -> list[str]:
    """Return every registered network's name, grouped by family."""
    return list(MODELS)


def is_registered(name: str) -> bool:
    """Return whether `name` is a registered model, with or without gradients."""
    known = name in MODELS or name in WITHOUT_GRADIENTS or name in _DRAWABLE
    return known or _is_narrow(name) or _is_grouped(name) or is_pretrained(name)


def _is_narrow(name: str) -> bool:
    """Return whether `name` is a registered model at another width, such as cnn2-x0.5."""
    base, width = base_and_width(name)
    known = base in MODELS or _is_grouped(base)
    return width < 1 and known and find(base).narrows


def _is_grouped(name: str) -> bool:
    """Return whether `name` is a registered model with group norms, such as cnn2-gn."""
    base = name.removesuffix(GROUPED)
    return base != name and (base in MODELS or base in _DRAWABLE) and _has_batch_norms(base)


@lru_cache(maxsize=1024)
def _has_batch_norms(name: str) -> bool:
    """Return whether a registered network has batch norms."""
    info = find(name)
    if info.takes is not None and not info.takes.is_numeric:
        return False
    with seeded(0, "norms", name), torch.device("meta"):
        return has_batch_norms(info.extractor((info.takes or IMAGE).example))


def private_pool(pool: Sequence[str]) -> tuple[str, ...]:
    """Return those of a pool that can be trained by DP-SGD, with group norms for batch norms."""
    return tuple(without_batch_norms(name) for name in pool if name not in MIXING)


def without_batch_norms(name: str) -> str:
    """Return the name of the model with group norms; `name` if it has no batch norms."""
    base, width = base_and_width(name)
    found = (f"{name}{GROUPED}", narrow_name(f"{base}{GROUPED}", width))
    return next((grouped for grouped in found if is_registered(grouped)), name)


def describe() -> list[ModelInfo | ClassicalInfo | DrawnInfo]:
    """Return the entries that `fedhet models` lists, networks first."""
    return [*MODELS.values(), *WITHOUT_GRADIENTS.values(), *DRAWN.values()]


def find(name: str) -> ModelInfo:
    """Return the registered network, or raise ModelError with the nearest name."""
    if name in MODELS:
        return MODELS[name]
    if name in _DRAWABLE:
        return _DRAWABLE[name]
    if is_pretrained(name):
        return pretrained_info(name)
    if _is_narrow(name):
        base, width = base_and_width(name)
        return narrowed(find(base), width)
    if _is_grouped(name):
        return grouped_norms(find(name.removesuffix(GROUPED)))
    if name in WITHOUT_GRADIENTS:
        raise ModelError(no_gradients(name))
    if name in DRAWN:
        example = next(iter(DRAWN[name].models))
        raise ModelError(f"'{name}' is for a pool, of which each client draws one like '{example}'")
    hint = nearest(name, [*MODELS, *WITHOUT_GRADIENTS, *DRAWN])
    raise ModelError(
        f"unknown model '{name}'{f'{hint} ' if hint else '; '}`fedhet models` lists all"
    )


def check_name(name: str) -> None:
    """Raise ModelError if `name` is neither registered nor an importable function."""
    if is_user_model(name):
        import_user_model(name)
    elif is_encoder(name):
        check_encoder(name)
    elif is_timm(name):
        check_timm(name)
    elif name not in WITHOUT_GRADIENTS:
        find(name)


def check(name: str, kind: str, shape: Shape, classes: int, *, any_model: bool) -> None:
    """Raise ModelError unless the model of a pool can be built, or each that it stands for.

    `any_model` allows those without gradients.
    """
    if name in DRAWN:
        for info in DRAWN[name].models.values():
            info.check(tuple(shape), KINDS[kind])
        return
    if any_model and _is_classical(name, tuple(shape), classes):
        if name in WITHOUT_GRADIENTS and not KINDS[kind].is_numeric:
            raise ModelError(f"model '{name}' takes numbers, not {KINDS[kind].plural}")
        return
    if is_pretrained(name):
        check_weights(name)
    shapes(name, shape, classes, kind=kind)


def build_any(
    name: str, shape: Shape, classes: int, *, seed: int, kind: str = ""
) -> HetModel | Refitted:
    """Return the named model, of any kind; its random draws depend on seed and name only."""
    shape, own_seed = tuple(shape), derive(seed, "model", name)
    if not _is_classical(name, shape, classes):
        return build(name, shape, classes, seed=seed, kind=kind)
    if is_user_model(name):
        return Refitted(
            name, lambda: call_user_model(name, shape, classes), classes, own_seed, OwnModelError
        )
    info = WITHOUT_GRADIENTS[name]
    return Refitted(name, lambda: info.make(own_seed % 2**32), classes, own_seed)


@lru_cache(maxsize=1024)
def _is_classical(name: str, shape: Shape, classes: int) -> bool:
    if not is_user_model(name):
        return name in WITHOUT_GRADIENTS
    with seeded(0, "kind", name):
        return is_classifier(call_user_model(name, shape, classes))


def build(
    name: str,
    shape: Shape,
    classes: int,
    *,
    seed: int,
    feature_dim: int | None = None,
    kind: str = "",
) -> HetModel:
    """Return the model for samples of `shape`, with weights that depend on seed and name only.

    `feature_dim` is the width D between extractor and classifier; None keeps the native width.
    `kind` is the kind of the samples; "": the one that the model takes (numbers, if it says none).
    """
    with seeded(seed, "model", name):
        return _assemble(name, tuple(shape), classes, feature_dim, kind)


def shapes(
    name: str, shape: Shape, classes: int, feature_dim: int | None = None, kind: str = ""
) -> dict[str, tuple[Shape, str]]:
    """Return each tensor's shape and numpy dtype name in the model's state dict.

    For registered models no memory is allocated; a user's own model is built and dropped. Cached.
    """
    return dict(_shapes(name, tuple(shape), classes, feature_dim, kind))


@lru_cache(maxsize=1024)
def _shapes(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: str
) -> dict[str, tuple[Shape, str]]:
    computes = is_user_model(name) or is_encoder(name) or is_timm(name)
    with seeded(0, "shapes", name), torch.device("cpu" if computes else "meta"):
        model = _assemble(name, shape, classes, feature_dim, kind)
        state = model.state_dict()
        if is_user_model(name):
            another = _assemble(name, shape, classes, feature_dim, kind)
            check_use(name, model, another, shape, KINDS.get(kind))
    return {
        key: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in state.items()
    }


def _assemble(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: str
) -> HetModel:
    if classes < 1:
        raise ModelError(f"model '{name}': classes is {classes}; it must be 1 or more")
    if feature_dim is not None and feature_dim < 1:
        raise ModelError(f"model '{name}': feature_dim is {feature_dim}; it must be 1 or more")
    if is_encoder(name):
        return assemble_encoder(name, shape, classes, feature_dim, KINDS.get(kind))
    if is_timm(name):
        return assemble_timm(name, shape, classes, feature_dim, KINDS.get(kind))
    if is_user_model(name):
        return assemble_user_model(name, shape, classes, feature_dim, KINDS.get(kind))
    info = find(name)
    info.check(shape, KINDS.get(kind))
    return join(info.extractor(shape), _native_width(name, shape), classes, feature_dim)


@lru_cache(maxsize=1024)
def _native_width(name: str, shape: Shape) -> int:
    """Return D of a registered extractor, from a pass of two samples.

    The meta device is for large shapes, since a client's claim must not allocate memory, and for
    pretrained networks, which it spares their weights. For others it is slower, since PyTorch then
    imports its compiler. Models of texts need a device that computes, to see their lengths.
    """
    on_meta = prod(shape) > MOST_COMPUTED or is_pretrained(name)
    info = find(name)
    device = "meta" if on_meta and (info.takes is None or info.takes.is_numeric) else "cpu"
    with seeded(0, "width", name), torch.device(device):
        return output_shape(info.extractor(shape), shape, info.takes)[1]


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


def assign(pool: Sequence[str], clients: int, seed: int, rule: str = "cycle") -> list[str]:
    """Return each client's model name.

    "cycle": client k gets pool[k % len(pool)], so that all architectures have equally many clients.
    "shuffle": the same names, in an order drawn from `seed`. A name of DRAWN is then replaced by
    the client's draw. Raises SettingsError for an empty pool, ModelError for an unknown name.
    """
    if not pool:
        raise SettingsError("the pool of models is empty; it needs one name or more")
    for name in dict.fromkeys(pool):
        if name not in DRAWN:
            check_name(name)
    assigned = [pool[client % len(pool)] for client in range(clients)]
    if rule == "shuffle":
        order = numpy_rng(seed, "deal").permutation(clients)
        assigned = [assigned[place] for place in order]
    return [
        DRAWN[name].draw(seed, client) if name in DRAWN else name
        for client, name in enumerate(assigned)
    ]


_aten = torch.ops.aten
_MAKES = {_aten.empty, _aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn}
_BYTES = 4
T = TypeVar("T")


class Allocation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to make tensors of more than `most` bytes in all inside the block: ModelError."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most, self._left = most, most

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation of PyTorch, unless it would make too much."""
        if func.overloadpacket in _MAKES and args and isinstance(args[0], list | tuple):
            self._left -= _BYTES * prod(args[0])
            if self._left < 0:
                raise ModelError(f"the model would take more than {self._most:,} bytes")
        return func(*args, **(kwargs or {}))


def allocating(most: int, make: Callable[[], T]) -> T:
    """Return what `make` returns; raises ModelError before it takes more than `most` bytes."""
    with Allocation(most):
        return make()
