"""Registry of models: builds a model by name, for any input shape and number of classes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from fedhet.algorithms import Part
from fedhet.base.arrays import Shapes
from fedhet.base.errors import ModelError, SettingsError, UserModelError, nearest
from fedhet.base.seeding import derive, numpy_rng, seeded
from fedhet.data.texts import is_encoder
from fedhet.kinds import IMAGE, KINDS, Shape
from fedhet.models import sequences, vision
from fedhet.models.base import (
    DrawnInfo,
    HetModel,
    ModelInfo,
    join,
    output_shape,
    part_names,
)
from fedhet.models.classical import CLASSICAL, ClassicalInfo, Refitted
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
    {info.name: info for info in (*vision.MODELS, *sequences.MODELS)}
)
WITHOUT_GRADIENTS = MappingProxyType({info.name: info for info in CLASSICAL})
DRAWN = MappingProxyType({info.name: info for info in vision.DRAWN})
"""Names in a pool for which each client draws a model."""
EXTERNAL = (
    (is_user_model, import_user_model, assemble_user_model),
    (is_encoder, check_encoder, assemble_encoder),
    (is_timm, check_timm, assemble_timm),
)
"""Models of users and of other libraries: whether a name is theirs, its check, what builds one."""
NO_SAMPLE_GRADIENTS = frozenset(
    {"signal-gru", "text-gru", "text-lstm", "text-transformer", "ft-transformer"}
)
"""Recurrent and attentive networks, of which Opacus cannot tell the gradient of each sample."""
MAX_COMPUTED = 2**16
"""Values of a sample up to which a model's width is found by computing."""
GROUPED = "-gn"
"""What follows the name of a model whose batch norms are replaced by group norms."""
GROUPS = 8
"""The most groups of a group norm; fewer where the channels cannot be divided by it."""
_NARROW = re.compile(r"(.+)-x(0\.[0-9]{1,6})")
_NETWORKS = {**MODELS, **{k: v for drawn in vision.DRAWN for k, v in drawn.models.items()}}


def names() -> list[str]:
    """Return every registered network's name, grouped by family."""
    return list(MODELS)


def describe() -> list[ModelInfo | ClassicalInfo | DrawnInfo]:
    """Return the entries that `fedhet models` lists, networks first."""
    return [*MODELS.values(), *WITHOUT_GRADIENTS.values(), *DRAWN.values()]


def narrow_name(name: str, width: float) -> str:
    """Return the name of a model with a share `width` of its channels: cnn2-x0.5; `name` for 1."""
    return name if width == 1 else f"{name}-x{width:.6f}".rstrip("0")


def base_and_width(name: str) -> tuple[str, float]:
    """Return the inverse of `narrow_name`: the name of the whole model, and the width in (0, 1]."""
    found = _NARROW.fullmatch(name)
    return (found[1], float(found[2])) if found and float(found[2]) else (name, 1.0)


def group_norm_name(name: str) -> str:
    """Return the name of the model with group norms; `name` if it has no batch norms."""
    base, width = base_and_width(name)  # no width is in the name of shufflenet-v2-x0.5 itself
    found = (f"{name}{GROUPED}", narrow_name(f"{base}{GROUPED}", width))
    return next((grouped for grouped in found if _lookup(grouped)), name)


def private_pool(pool: Sequence[str]) -> tuple[str, ...]:
    """Return those of a pool that can be trained by DP-SGD, with group norms for batch norms."""
    return tuple(group_norm_name(name) for name in pool if name not in NO_SAMPLE_GRADIENTS)


def is_registered(name: str) -> bool:
    """Return whether `name` is a registered model, with or without gradients."""
    return name in WITHOUT_GRADIENTS or _lookup(name) is not None


@lru_cache(maxsize=1024)
def _lookup(name: str) -> ModelInfo | None:
    """Return the entry of a registered network or of a variant of it, or None.

    Variants are a share of the channels (cnn2-x0.5, rounded up), group norms in place of batch
    norms (cnn2-gn), both (cnn2-gn-x0.5), and pretrained weights.
    """
    if name in _NETWORKS:
        return _NETWORKS[name]
    if is_pretrained(name):
        return pretrained_info(name)
    base, width = base_and_width(name)
    if width < 1:
        whole = _lookup(base)
        if whole is None or not whole.narrows:
            return None
        line = f"{whole.line}; {width:g} of the channels of each layer"
        extractor = partial(whole.extractor, width=width)
        return replace(whole, name=name, line=line, extractor=extractor, narrows=False)
    base = name.removesuffix(GROUPED)
    if base == name or (whole := _NETWORKS.get(base)) is None or not _has_batch_norms(whole):
        return None
    line = f"{whole.line}; group norms in place of batch norms"
    extractor = partial(_with_group_norms, whole.extractor)
    return replace(whole, name=name, line=line, extractor=extractor)


def _has_batch_norms(info: ModelInfo) -> bool:
    """Return whether any layer of a network normalizes by the statistics of a batch."""
    if info.takes is not None and not info.takes.is_numeric:
        return False
    with seeded(0, "norms", info.name), torch.device("meta"):
        network = info.extractor((info.takes or IMAGE).example)
    return any(isinstance(part, _BatchNorm) for part in network.modules())


def _with_group_norms(extractor: Callable[..., nn.Module], shape: Shape, **own: Any) -> nn.Module:
    """Return an extractor with group norms (Wu and He 2018) in place of its batch norms.

    No sample then depends on the others of its batch.
    """
    made = extractor(shape, **own)
    for part in list(made.modules()):
        if getattr(part, "inplace", False):
            setattr(part, "inplace", False)  # noqa: B010  hooks need what the layer before has returned
        for name, child in part.named_children():
            if isinstance(child, _BatchNorm):
                channels = child.num_features
                norm = nn.GroupNorm(math.gcd(channels, GROUPS), channels)
                setattr(part, name, nn.Sequential(norm, _Copy()))
    return made


class _Copy(nn.Module):
    """x, in memory of its own: torchvision's blocks add to what a norm returns in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor of any shape."""
        return x.clone()


def find(name: str) -> ModelInfo:
    """Return the registered network, or raise ModelError with the nearest name."""
    if (info := _lookup(name)) is not None:
        return info
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
    for is_its, check_its, _ in EXTERNAL:
        if is_its(name):
            check_its(name)
            return
    if name not in WITHOUT_GRADIENTS:
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
            name, lambda: call_user_model(name, shape, classes), classes, own_seed, UserModelError
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
    name: str,
    shape: Shape,
    classes: int,
    feature_dim: int | None = None,
    kind: str = "",
    part: Part = "all",
) -> Shapes:
    """Return the shape and numpy dtype name of each tensor in a part of the model's state dict.

    For registered models no memory is allocated; a user's own model is built and dropped. Cached.
    """
    return dict(_shapes(name, tuple(shape), classes, feature_dim, kind, part))


@lru_cache(maxsize=1024)
def _shapes(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: str, part: Part
) -> Shapes:
    computes = any(is_its(name) for is_its, _, _ in EXTERNAL)
    with seeded(0, "shapes", name), torch.device("cpu" if computes else "meta"):
        model = _assemble(name, shape, classes, feature_dim, kind)
        state, included = model.state_dict(), part_names(model, part)
        if is_user_model(name):
            another = _assemble(name, shape, classes, feature_dim, kind)
            check_use(name, model, another, shape, KINDS.get(kind))
    return {
        key: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in state.items()
        if key in included
    }


def _assemble(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: str
) -> HetModel:
    if classes < 1:
        raise ModelError(f"model '{name}': classes is {classes}; it must be 1 or more")
    if feature_dim is not None and feature_dim < 1:
        raise ModelError(f"model '{name}': feature_dim is {feature_dim}; it must be 1 or more")
    for is_its, _, assemble in EXTERNAL:
        if is_its(name):
            return assemble(name, shape, classes, feature_dim, KINDS.get(kind))
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
    on_meta = prod(shape) > MAX_COMPUTED or is_pretrained(name)
    info = find(name)
    device = "meta" if on_meta and (info.takes is None or info.takes.is_numeric) else "cpu"
    with seeded(0, "width", name), torch.device(device):
        return output_shape(info.extractor(shape), shape, info.takes)[1]


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


class AllocationLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ModelError, inside the block, before the tensors made take over `most` bytes."""

    _aten = torch.ops.aten
    _makes = frozenset({_aten.empty, _aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn})

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
        if func.overloadpacket in self._makes and args and isinstance(args[0], list | tuple):
            self._left -= 4 * prod(args[0])  # bytes of a float32
            if self._left < 0:
                raise ModelError(f"the model would take more than {self._most:,} bytes")
        return func(*args, **(kwargs or {}))
