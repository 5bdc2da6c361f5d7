"""Registry of models: builds a model from its name, an input shape, and a number of classes."""

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
from fedhet.base.metrics import CAUSAL_LM
from fedhet.base.seeding import derive, numpy_rng, seeded
from fedhet.data.texts import is_encoder
from fedhet.kinds import IMAGE, KINDS, Shape
from fedhet.models import sequences, vision
from fedhet.models.adapted import (
    assemble_adapted,
    base_digest,
    base_of,
    check_adapted,
    draw_rows,
    is_adapted,
    is_causal,
    prepare_base,
    rank_of,
    without_rank,
)
from fedhet.models.base import (
    DrawnInfo,
    Ensemble,
    Evaluations,
    HetModel,
    LabelSpaceModel,
    ModelInfo,
    evaluate_model,
    evaluate_models,
    join,
    load_weights,
    output_shape,
    part_arrays,
    part_names,
    to_arrays,
    to_host_arrays,
)
from fedhet.models.classical import CLASSICAL, ClassicalInfo, Refitted, RefittedRegressor
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
from fedhet.tasks import CLASSIFICATION, Task

__all__ = [
    "DRAWN", "MODELS", "WITHOUT_GRADIENTS", "AllocationLimit", "Ensemble", "Evaluations",
    "HetModel", "LabelSpaceModel", "Refitted", "assign", "base_and_width", "base_digest", "base_of",
    "build", "build_any", "check", "check_name", "check_task", "describe", "draw_rows",
    "evaluate_model", "evaluate_models", "find", "group_norm_name", "is_adapted", "is_causal",
    "is_registered", "is_user_model", "load_weights", "names", "narrow_name", "part_arrays",
    "part_names", "prepare_base", "private_pool", "rank_of", "shapes", "to_arrays",
    "to_host_arrays", "without_rank",
]  # fmt: skip

MODELS: Mapping[str, ModelInfo] = MappingProxyType(
    {info.name: info for info in (*vision.MODELS, *sequences.MODELS)}
)
WITHOUT_GRADIENTS = MappingProxyType({info.name: info for info in CLASSICAL})
DRAWN = MappingProxyType({info.name: info for info in vision.DRAWN})
"""Pool names that stand for several models; each client draws one of the models."""
EXTERNAL = (
    (is_user_model, import_user_model, assemble_user_model),
    (is_adapted, check_adapted, assemble_adapted),
    (is_encoder, check_encoder, assemble_encoder),
    (is_timm, check_timm, assemble_timm),
)
"""Functions for each family of custom or library models: the first matches a name, the second
checks the name, and the third builds the model."""
NO_SAMPLE_GRADIENTS = frozenset(
    {
        *("signal-gru", "text-gru", "text-lstm", "text-transformer", "ft-transformer"),
        *("htfl-vit-b-16", "htfl-vit-b-32"),
    }
)
"""Recurrent and attention networks, for which Opacus cannot compute per-sample gradients."""
MAX_COMPUTED = 2**16
"""Maximum number of values in a sample for which the feature width is computed on the CPU."""
GROUPED = "-gn"
"""Name suffix of models with group norms instead of batch norms."""
GROUPS = 8
"""Maximum number of groups in a group norm; the number used must divide the number of channels."""
_NARROW = re.compile(r"(.+)-x(0\.[0-9]{1,6})")
_NETWORKS = {**MODELS, **{k: v for drawn in vision.DRAWN for k, v in drawn.models.items()}}


def names() -> list[str]:
    """Return the names of all registered networks, grouped by family."""
    return list(MODELS)


def describe() -> list[ModelInfo | ClassicalInfo | DrawnInfo]:
    """Return the registry entries listed by `fedhet models`, networks first."""
    return [*MODELS.values(), *WITHOUT_GRADIENTS.values(), *DRAWN.values()]


def narrow_name(name: str, width: float) -> str:
    """Return the name of a model with a fraction `width` of the channels, such as cnn2-x0.5."""
    return name if width == 1 else f"{name}-x{width:.6f}".rstrip("0")


def base_and_width(name: str) -> tuple[str, float]:
    """Split a name into base name and width in (0, 1] (inverse of `narrow_name`)."""
    match = _NARROW.fullmatch(name)
    return (match[1], float(match[2])) if match and float(match[2]) else (name, 1.0)


def group_norm_name(name: str) -> str:
    """Return the name of the variant with group norms, or `name` if it has no batch norms."""
    base, width = base_and_width(name)
    # The suffix of shufflenet-v2-x0.5 is not a width, so try the full name first.
    candidates = (f"{name}{GROUPED}", narrow_name(f"{base}{GROUPED}", width))
    return next((grouped for grouped in candidates if _lookup(grouped)), name)


def private_pool(pool: Sequence[str]) -> tuple[str, ...]:
    """Return the models in a pool that support DP-SGD, with group norms instead of batch norms."""
    return tuple(group_norm_name(name) for name in pool if name not in NO_SAMPLE_GRADIENTS)


def is_registered(name: str) -> bool:
    """Return whether `name` is a registered model, with or without gradients."""
    return name in WITHOUT_GRADIENTS or _lookup(name) is not None


@lru_cache(maxsize=1024)
def _lookup(name: str) -> ModelInfo | None:
    """Return the entry of a registered network or of a variant, or None if the name is unknown.

    Variants have a fraction of the channels (cnn2-x0.5), group norms instead of batch norms
    (cnn2-gn), both (cnn2-gn-x0.5), or pretrained weights.
    """
    if name in _NETWORKS:
        return _NETWORKS[name]
    if is_pretrained(name):
        return pretrained_info(name)
    base, width = base_and_width(name)
    if width < 1:
        info = _lookup(base)
        if info is None or not info.narrows:
            return None
        line = f"{info.line}; {width:g} of the channels of each layer"
        extractor = partial(info.extractor, width=width)
        return replace(info, name=name, line=line, extractor=extractor, narrows=False)
    base = name.removesuffix(GROUPED)
    if base == name or (info := _NETWORKS.get(base)) is None:
        return None
    if info.takes is not None and not info.takes.is_numeric:
        return None
    with seeded(0, "norms", info.name), torch.device("meta"):
        network = info.extractor((info.takes or IMAGE).example)
    if not any(isinstance(part, _BatchNorm) for part in network.modules()):
        return None
    line = f"{info.line}; group norms instead of batch norms"
    extractor = partial(_with_group_norms, info.extractor)
    return replace(info, name=name, line=line, extractor=extractor)


def _with_group_norms(
    extractor: Callable[..., nn.Module], shape: Shape, **options: Any
) -> nn.Module:
    """Build an extractor with group norms (Wu and He 2018) instead of batch norms.

    The outputs of a sample then do not depend on the other samples in the batch.
    """
    network = extractor(shape, **options)
    for part in list(network.modules()):
        if getattr(part, "inplace", False):
            setattr(part, "inplace", False)  # noqa: B010  Hooks need unmodified outputs.
        for name, child in part.named_children():
            if isinstance(child, _BatchNorm):
                channels = child.num_features
                norm = nn.GroupNorm(math.gcd(channels, GROUPS), channels)
                setattr(part, name, nn.Sequential(norm, _Copy()))
    return network


class _Copy(nn.Module):
    """Layer that copies its input, because torchvision blocks modify a norm's output in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Copy a tensor of any shape."""
        return x.clone()


def find(name: str) -> ModelInfo:
    """Return the entry of a registered network. Raises ModelError if the name is unknown."""
    if (info := _lookup(name)) is not None:
        return info
    if name in WITHOUT_GRADIENTS:
        raise ModelError(no_gradients(name))
    if name in DRAWN:
        example = next(iter(DRAWN[name].models))
        raise ModelError(
            f"model '{name}' is supported only in a model pool; expected a single model such as "
            f"'{example}'"
        )
    hint = nearest(name, [*MODELS, *WITHOUT_GRADIENTS, *DRAWN])
    raise ModelError(f"unknown model '{name}'{hint or '.'} See `fedhet models`.")


def check_name(name: str) -> None:
    """Check a model name. Raises ModelError if it is neither a known model nor importable."""
    for matches, check_external, _ in EXTERNAL:
        if matches(name):
            check_external(name)
            return
    if name not in WITHOUT_GRADIENTS:
        find(name)


def check_task(name: str, task: Task) -> None:
    """Check that the outputs of a model have the form that the task needs.

    Raises ModelError if only one of the two is for causal language modeling.
    """
    needs_causal = CAUSAL_LM in task.properties
    if needs_causal != is_causal(name):
        expected = "causal-lora8:NAME" if needs_causal else "another model"
        raise ModelError(f"model '{name}' with the task {task.name}: expected {expected}")


def check(name: str, kind: str, shape: Shape, classes: int, *, any_model: bool) -> None:
    """Check that a model can be built for the samples. Raises ModelError if it cannot.

    `any_model` also permits models without gradients.
    """
    if name in DRAWN:
        for info in DRAWN[name].models.values():
            info.check(tuple(shape), KINDS[kind])
        return
    if any_model and _is_classical(name, tuple(shape), classes):
        if name in WITHOUT_GRADIENTS and not KINDS[kind].is_numeric:
            raise ModelError(f"model '{name}' does not support {KINDS[kind].plural}")
        return
    if is_pretrained(name):
        check_weights(name)
    shapes(name, shape, classes, kind=kind)


def build_any(
    name: str,
    shape: Shape,
    classes: int,
    *,
    seed: int,
    kind: str = "",
    task: Task = CLASSIFICATION,
) -> HetModel | Refitted:
    """Build a model with or without gradients. The weights depend only on the seed and the name.

    Raises ModelError if the model has no gradients, but the task requires them.
    """
    shape, model_seed = tuple(shape), derive(seed, "model", name)
    if not _is_classical(name, shape, classes):
        return build(name, shape, classes, seed=seed, kind=kind)
    if not task.any_model:
        raise ModelError(no_gradients(name))
    numbers = not task.has_distribution
    refitted = RefittedRegressor if numbers else Refitted
    if is_user_model(name):
        return refitted(
            name, lambda: call_user_model(name, shape, classes), classes, model_seed, UserModelError
        )
    info = WITHOUT_GRADIENTS[name]
    return refitted(name, lambda: info.make(model_seed % 2**32, numbers), classes, model_seed)


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
    """Build a model with initial weights that depend only on the seed and the name.

    Args:
        name: Model name.
        shape: Shape of a sample.
        classes: Number of classes.
        seed: Seed for the initial weights.
        feature_dim: Feature width D between extractor and classifier, or None for the native width.
        kind: Sample kind, or "" for the kind that the model supports (numbers if it supports
            several).

    Raises:
        ModelError: If the model is unknown or does not support the samples.
    """
    # Models that differ only in the rank of their adapters initially compute the same function.
    with seeded(seed, "model", without_rank(name)):
        return _assemble(name, tuple(shape), classes, feature_dim, kind)


def shapes(
    name: str,
    shape: Shape,
    classes: int,
    feature_dim: int | None = None,
    kind: str = "",
    part: Part = "all",
) -> Shapes:
    """Return the shape and NumPy dtype name of each tensor in a part of a model's state dict.

    No memory is allocated for registered models. Custom models are built and discarded. Results are
    cached.
    """
    return dict(_shapes(name, tuple(shape), classes, feature_dim, kind, part))


@lru_cache(maxsize=1024, typed=True)
def _shapes(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: str, part: Part
) -> Shapes:
    is_external = any(matches(name) for matches, _, _ in EXTERNAL)
    with seeded(0, "shapes", name), torch.device("cpu" if is_external else "meta"):
        model = _assemble(name, shape, classes, feature_dim, kind)
        state, included = model.state_dict(), part_names(model, part)
        if is_user_model(name):
            with seeded(0, "shapes", name):
                another = _assemble(name, shape, classes, feature_dim, kind)
            check_use(name, model, another, shape, KINDS.get(kind))
    return {
        key: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in state.items()
        if key in included
    }


USER_CACHES = (_shapes, _is_classical)
"""Caches of results that depend on a user's code, which may change between two runs."""


def _assemble(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: str
) -> HetModel:
    if classes < 1:
        raise ModelError(f"model '{name}': classes must be at least 1, got {classes}")
    if feature_dim is not None and feature_dim < 1:
        raise ModelError(f"model '{name}': feature_dim must be at least 1, got {feature_dim}")
    for matches, _, assemble in EXTERNAL:
        if matches(name):
            return assemble(name, shape, classes, feature_dim, KINDS.get(kind))
    info = find(name)
    info.check(shape, KINDS.get(kind))
    extractor, native = info.extractor(shape), _native_width(name, shape)
    return join(extractor, native, classes, feature_dim, info.pooled, info.hidden)


@lru_cache(maxsize=1024)
def _native_width(name: str, shape: Shape) -> int:
    """Compute the feature width D of a registered extractor with a forward pass of two samples.

    Large samples use the meta device, because a shape reported by a client must not allocate
    memory. Pretrained networks use the meta device to avoid loading weights. For other models, the
    meta device would be slower, because it imports PyTorch's compiler. Text models need the CPU to
    read text lengths.
    """
    on_meta = prod(shape) > MAX_COMPUTED or is_pretrained(name)
    info = find(name)
    device = "meta" if on_meta and (info.takes is None or info.takes.is_numeric) else "cpu"
    with seeded(0, "width", name), torch.device(device):
        return output_shape(info.extractor(shape), shape, info.takes)[1]


def assign(pool: Sequence[str], clients: int, seed: int, rule: str = "cycle") -> list[str]:
    """Assign a model from the pool to each client.

    Args:
        pool: Model names.
        clients: Number of clients.
        seed: Seed for the random draws.
        rule: With "cycle", client k gets pool[k % len(pool)], so the clients are distributed evenly
            over the models. With "shuffle", the same names are assigned in random order. Names in
            DRAWN are replaced with a random model for each client.

    Returns:
        The model name for each client.

    Raises:
        SettingsError: If the pool is empty.
        ModelError: If a name is unknown.
    """
    if not pool:
        raise SettingsError("models.pool must not be empty")
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
    """Context manager that raises ModelError before new tensors exceed `max_bytes` in total."""

    _aten = torch.ops.aten
    _factories = frozenset(
        {_aten.empty, _aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn}
    )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because PyTorch imports its compiler to exclude a mode from graphs."""
        return False

    def __init__(self, max_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._max_bytes, self._remaining = max_bytes, max_bytes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a PyTorch operation, unless it would exceed the limit."""
        if func.overloadpacket in self._factories and args and isinstance(args[0], list | tuple):
            device = (kwargs or {}).get("device") or "cpu"
            if torch.device(device).type != "meta":  # Tensors on the meta device use no memory.
                self._remaining -= 4 * prod(args[0])  # Assume elements of 4 bytes (float32).
                if self._remaining < 0:
                    raise ModelError(f"the model would need more than {self._max_bytes:,} bytes")
        return func(*args, **(kwargs or {}))
