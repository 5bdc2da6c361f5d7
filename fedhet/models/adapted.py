"""Foundation models with LoRA adapters: `encoder-1-lora8:NAME` and `causal-lora8:NAME`.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models. NAME is a directory in
$FEDHET_ENCODERS with `config.json` and `model.safetensors`, as saved by the library `transformers`.
The number after `lora` is the rank r. The adapter of a layer with weight W [P, Q] adds s B A
to W, with B [P, r] and A [r, Q]. The scaling factor s is 2, or the number after `-scale`, as in
`encoder-1-lora8-scale4:NAME`.

The base model is frozen. It is neither sent nor saved, and a process keeps one copy per device and
precision. Adapters are nested by rank: in a new model of rank 8, A equals the first 8 rows of A in
a new model of rank 16.

Encoders read texts or images, and have linear layers after their features. Causal language models
(`causal-lora8:NAME`, for `data.task = causal-lm`) predict the next token of each token with the
frozen head of the base model.

A method may merge factors into the frozen weights, which become W + s B' A'. The factors B' and A'
are part of the state dict, and a process keeps one copy of them and of each changed weight.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms import LORA_A, LORA_B, MERGED_A, MERGED_B
from fedhet.algorithms.adapters import factors_of, renamed
from fedhet.base.errors import ModelError, describe_error, safe_repr
from fedhet.base.seeding import torch_generator
from fedhet.data.texts import configuration, encoder_directory, read_configuration
from fedhet.kinds import IMAGE, PADDING, Kind, Shape
from fedhet.models.base import HetModel
from fedhet.models.libraries import (
    TextEncoder,
    encoder_skeleton,
    load_encoder,
    quantize_layers,
    text_part,
    weight_files,
    with_layers,
)
from fedhet.models.sequences import token_mask, trim_padding
from fedhet.settings.engine import ComputeSettings

SCALE = 2.0
"""Default scaling factor s. It is the same for all ranks, so that clients of different ranks scale
the same rows of A and columns of B equally. With s = alpha / r for a fixed alpha, s would differ
between these clients."""
TARGETS = frozenset(
    {"query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "query_proj", "value_proj", "q", "v"}
)
"""Names of the layers that get an adapter, i.e. the projections to queries and values."""
FUSED_TARGETS = frozenset({"c_attn", "query_key_value", "qkv_proj", "Wqkv"})
"""Names of the layers in causal language models that compute queries, keys, and values together."""
_ADAPTED = re.compile(r"(?:encoder-[1-5]|causal)-lora.*:")
_NAME = re.compile(
    r"(?:encoder-([1-5])|causal)-lora([1-9][0-9]{0,2})(?:-scale([0-9]+(?:\.[0-9]+)?))?:(.+)"
)
_IGNORED = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Entries in config.json that do not affect a model's outputs."""


@dataclass(frozen=True)
class AdapterName:
    """Parsed name of a model with adapters."""

    layers: int
    """Number of linear layers after the encoder, including the classifier; 0 = the model is a
    causal language model, whose head belongs to the base model."""
    rank: int
    scale: float
    base: str
    """Name of the base model, i.e. of its directory in $FEDHET_ENCODERS."""

    @classmethod
    def parse(cls, name: str) -> AdapterName | None:
        """Parse the name of a model. Returns None if the model has no adapters."""
        found = _NAME.fullmatch(name)
        if found is None or not float(found[3] or SCALE):
            return None
        return cls(int(found[1] or 0), int(found[2]), float(found[3] or SCALE), found[4])

    @property
    def is_causal(self) -> bool:
        """Whether the model is a causal language model."""
        return self.layers == 0

    @property
    def family(self) -> str:
        """First part of the name, such as `encoder-1` or `causal`."""
        return f"encoder-{self.layers}" if self.layers else "causal"


def is_adapted(name: str) -> bool:
    """Return whether `name` is the name of a model with adapters."""
    return _ADAPTED.match(name) is not None


def rank_of(name: str) -> int:
    """Return the rank of a model's adapters, or 0 if the model has no adapters."""
    parts = AdapterName.parse(name)
    return parts.rank if parts else 0


def base_of(name: str) -> str:
    """Return the name of a model's frozen base model, or "" if the model has no adapters."""
    parts = AdapterName.parse(name)
    return parts.base if parts else ""


def without_rank(name: str) -> str:
    """Return a model's name without the rank. Models that differ only in rank share this name."""
    parts = AdapterName.parse(name)
    return f"{parts.family}-lora-scale{parts.scale:g}:{parts.base}" if parts else name


def is_causal(name: str) -> bool:
    """Return whether `name` is the name of a causal language model with adapters."""
    parts = AdapterName.parse(name)
    return parts is not None and parts.is_causal


def check_adapted(name: str) -> None:
    """Check the base model. Raises FedhetError if its directory has no safetensors weights."""
    base = _parsed(name).base
    configuration(base)
    weight_files(encoder_directory(base))


def assemble_adapted(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: Kind | None
) -> HetModel:
    """Build a base model with adapters and linear layers.

    The weights of the base model are read in the first forward pass. Raises ModelError if the base
    model is unsuitable.
    """
    parts = _parsed(name)
    if parts.is_causal:
        if feature_dim is not None:
            raise ModelError(f"model '{name}': a causal language model has no features")
        texts = TokenReader(name, parts.base, shape, kind)
        return HetModel(Adapted(parts, texts.width, texts.features), nn.Identity(), texts.width)
    network: Any = encoder_skeleton(encoder_directory(parts.base))
    reader: TextEncoder | ImageReader
    if network.main_input_name == "pixel_values":
        reader = ImageReader(name, parts.base, shape, kind)
    else:
        reader = TextEncoder(name, parts.base, shape, kind, frozen=True)
    encoder = Adapted(parts, reader.width, reader.features)
    return with_layers(encoder, reader.width, parts.layers, classes, feature_dim)


class TokenReader(TextEncoder):
    """Input and output of a causal language model: tokens [N, L] -> logits [N, L', V].

    Trailing padding is removed, so that L' is the length of the longest text.
    """

    def __init__(self, model: str, base: str, shape: Shape, kind: Kind | None) -> None:
        """Check that the base model is causal, and supports texts of this shape.

        Raises ModelError otherwise.
        """
        super().__init__(model, base, shape, kind, frozen=True)
        network: Any = encoder_skeleton(self.directory, causal=True)
        if not self.is_causal:
            raise ModelError(
                f"model '{model}': {self.directory}/config.json: expected a causal language model, "
                f"got {network.config.model_type}, whose tokens depend on later tokens"
            )
        self.width = network.get_output_embeddings().weight.shape[0]

    def features(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return the logits [N, L', V] of the token after each token."""
        x = trim_padding(x)
        ids = torch.where(x == PADDING, self.padding, x.where(x != self.zero, 0))
        logits: Tensor = network(
            input_ids=ids, attention_mask=token_mask(x).long(), use_cache=False
        ).logits
        return logits


class ImageReader:
    """Input and output of an image model: images [N, C, H, W] in [-1, 1] -> features [N, D]."""

    def __init__(self, model: str, base: str, shape: Shape, kind: Kind | None) -> None:
        """Check that the base model supports images of this shape. Raises ModelError otherwise."""
        if kind not in (None, IMAGE) or not IMAGE.fits(shape):
            raise ModelError(f"model '{model}': expected {IMAGE.wanted}, got shape {shape}")
        directory = encoder_directory(base)
        network: Any = encoder_skeleton(directory)
        self.channels = int(getattr(network.config, "num_channels", 3))
        if shape[0] not in (1, self.channels):
            channels = " or ".join(map(str, sorted({1, self.channels})))
            raise ModelError(f"model '{model}': expected {channels} channels, got {shape[0]}")
        path = Path(directory) / "preprocessor_config.json"
        given = read_configuration(path) if os.path.lexists(path) else {}
        self.mean: list[float] | None = None
        """Channel means for values from 0 to 1, or None if the model expects values in [-1, 1]."""
        self.std: list[float] | None = None
        if not given.get("do_normalize", True):
            self.mean, self.std = [0.0] * self.channels, [1.0] * self.channels
        elif given.get("image_mean") or given.get("image_std"):
            self.mean = _statistics(path, given, "image_mean", self.channels)
            self.std = _statistics(path, given, "image_std", self.channels)
        if masked := getattr(network.config, "mask_ratio", 0):
            raise ModelError(
                f"{directory}/config.json: mask_ratio must be 0, because random patches would be "
                f"masked, got {masked}"
            )
        names = {name.rpartition(".")[2] for name, _ in network.named_parameters()}
        self.has_class_token = bool(names & {"cls_token", "class_embedding"})
        try:
            size = network.config.image_size
            self.size = (size, size) if isinstance(size, int) else tuple(size)
            with torch.no_grad(), torch.device("meta"):
                images = torch.zeros(1, self.channels, *self.size)
                self.width = self.features(network, images).shape[1]
        except Exception as error:  # transformers models raise many exception types.
            raise ModelError(
                f"{directory}/config.json: the model cannot read images ({describe_error(error)})"
            ) from error

    def features(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return the features [N, D] of images.

        The features are the last hidden state of the class token, or the mean of all last hidden
        states if the network has no class token.
        """
        x = x.expand(-1, self.channels, -1, -1)
        if tuple(x.shape[2:]) != self.size:
            x = F.interpolate(x, size=self.size, mode="bilinear")
        if self.mean and self.std:
            mean, std = (x.new_tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
            x = ((x + 1) / 2 - mean) / std
        states: Tensor = network(pixel_values=x).last_hidden_state
        if states.ndim == 4:  # [N, D, H, W], as in convolutional networks
            return states.mean((2, 3))
        return states[:, 0] if self.has_class_token else states.mean(1)


def _statistics(path: Path, given: dict[str, Any], key: str, channels: int) -> list[float]:
    """Return a list of one number per channel. Raises ModelError for any other value."""
    values: Any = given.get(key)
    bound = 0.0 if key == "image_std" else -math.inf
    is_list = isinstance(values, list) and len(values) == channels
    if is_list and all(isinstance(each, int | float) and each > bound for each in values):
        return list(values)
    rule = f"a list of {channels} numbers" + (" above 0" if key == "image_std" else "")
    raise ModelError(f"{path}: {key} must be {rule}, got {safe_repr(values)}")


class LoraLinear(nn.Module):
    """Frozen linear layer with an adapter: x -> W x + b + s B A x.

    The frozen layer is a `nn.Linear`, or a `Conv1D` of transformers, which stores W transposed.
    """

    def __init__(self, base_layer: nn.Module, rank: int, scale: float, draws: torch.Generator):
        super().__init__()
        self.base_layer, self.scale = base_layer, scale
        weight: Any = base_layer.weight
        rows, columns = weight.shape if isinstance(base_layer, nn.Linear) else weight.shape[::-1]
        with torch.device("meta"):  # Avoid draws from PyTorch's generator.
            self.lora_A = nn.Linear(columns, rank, bias=False)
            self.lora_B = nn.Linear(rank, rows, bias=False)
        self.lora_A.weight = nn.Parameter(draw_rows(rank, columns, draws))
        self.lora_B.weight = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., P] for inputs [..., Q]."""
        change: Tensor = self.lora_B(self.lora_A(x))
        outputs: Tensor = self.base_layer(x)
        return outputs + change * self.scale


def draw_rows(rank: int, columns: int, draws: torch.Generator) -> Tensor:
    """Draw the factor A [r, Q] of a new adapter. The first rows do not depend on the rank."""
    bound = columns**-0.5
    rows = [torch.empty(columns).uniform_(-bound, bound, generator=draws) for _ in range(rank)]
    return torch.stack(rows)


class Merged:
    """Factors B [P, R] and A [R, Q] that are merged into a frozen weight, which becomes W + s B A.

    The factors are on the host. Models with equal factors share the object and the changed weight.
    """

    def __init__(self, b: Tensor, a: Tensor) -> None:
        self.b, self.a = b, a
        self._weights: dict[tuple[torch.device, torch.dtype], nn.Parameter] = {}

    @classmethod
    def of(cls, model: Adapted, path: str, b: Tensor, a: Tensor) -> Merged:
        """Return the shared object with these factors for a layer of a model."""
        b, a = (each.detach().cpu().contiguous() for each in (b, a))
        digest = hashlib.blake2b(repr((b.shape, a.shape)).encode())
        for each in (b, a):
            digest.update(each.numpy().data)
        key = model.folder, model.name.scale, path, digest.digest()
        return _MERGED.setdefault(key, cls(b, a))

    def weight(
        self, base: Tensor, scale: float, like: Tensor, *, transposed: bool = False
    ) -> nn.Parameter:
        """Return the changed weight [P, Q], with the device and the dtype of `like`.

        If `transposed`, the layer stores the weight as [Q, P]. The sum is computed in float64 from
        all factors, and rounded only once. It thus does not depend on the rounds in which the
        factors were received, and small changes add up in half precision.
        """
        key = like.device, like.dtype
        if key not in self._weights:
            with torch.inference_mode(False), torch.no_grad():
                change = scale * (self.b.double() @ self.a.double())
                changed = base.double() + (change.T if transposed else change)
                moved = changed.to(like.dtype).to(like.device)
                self._weights[key] = nn.Parameter(moved, requires_grad=False)
        return self._weights[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> Merged:
        """Share the object between copies of a model."""
        return self


_MERGED: WeakValueDictionary[tuple[str, float, str, bytes], Merged] = WeakValueDictionary()


class Adapted(nn.Module):
    """Trained adapters, and their frozen base model, which is not a registered submodule.

    Example:
        The adapter of the layer `encoder.layer.0.attention.self.query` has the state-dict names
        `encoder.layer.0.attention.self.query.lora_A.weight` and `….lora_B.weight`, as in peft.
    """

    def __init__(
        self, name: AdapterName, width: int, features: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        """Add adapters to a base model; `features` computes the model's features [N, `width`]."""
        super().__init__()
        self.name, self._width, self._features = name, width, features
        self.folder = encoder_directory(name.base)
        self._recomputed: tuple[nn.Module, ...] = ()
        """Layers that are computed again in the backward pass (see `recompute_layers`)."""
        self._is_quantized = False
        network = _share_frozen(encoder_skeleton(self.folder, causal=name.is_causal), ())
        # A decoder after an encoder does not affect the features.
        used = set((network if name.is_causal else text_part(network)).modules())
        targets = TARGETS | FUSED_TARGETS if name.is_causal else TARGETS
        layers = {
            path: each
            for path, each in network.named_modules()
            if path.rpartition(".")[2] in targets and each in used and _is_linear(each)
        }
        for path, module in network.named_modules():
            # `nn.MultiheadAttention` reads the weights of its projections without calling the
            # layers. In evaluation mode, PyTorch's encoder layer does the same.
            if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
                raise ModelError(
                    f"base model {name.base!r}: adapters have no effect on layer '{path}', a "
                    f"PyTorch {type(module).__name__}. Use a base model with separate projections, "
                    "such as BERT or ViT."
                )
        if not layers:
            *names, last = sorted(targets)
            raise ModelError(
                f"base model {name.base!r}: expected a linear layer named {', '.join(names)}, or "
                f"{last} to adapt, found none. Use another base model."
            )
        # Make the same number of draws for all ranks, so that the head does not depend on the rank.
        seed = int(torch.randint(2**62, ()))
        for path, layer in layers.items():
            draws = torch_generator(seed, "adapter", path)
            adapted = LoraLinear(layer, name.rank, name.scale, draws)
            network.set_submodule(path, adapted)
            _add_nested(self, f"{path}.lora_A", adapted.lora_A)
            _add_nested(self, f"{path}.lora_B", adapted.lora_B)
        self._hidden = (network,)  # A tuple prevents registration as a submodule.
        self._bound: tuple[torch.device, torch.dtype] | None = None
        self.merged: dict[str, Merged] = {}
        """Factors that are merged into the frozen weights, by path of the layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the features [N, D]. Under autocast, the base model has autocast's dtype."""
        # Handle empty batches here, because transformers' attention does not support them. Skip
        # the check during export, because an exported program must not depend on the batch size.
        if not torch.compiler.is_exporting() and not len(x):
            shape = (0, x.shape[1], self._width) if self.name.is_causal else (0, self._width)
            return x.new_zeros(shape, dtype=torch.float32)
        dtype = next(self.parameters()).dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        network = self.network(x.device, dtype)
        for each in self._recomputed:
            each.training = self.training  # Not its dropout, which stays in evaluation mode.
        return self._features(network, x)

    def network(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Return the base model with its adapters, and with its frozen weights on `device`."""
        (network,) = self._hidden
        if self._bound != (device, dtype):
            causal, quantized = self.name.is_causal, self._is_quantized
            tensors = _base(self.folder, device, dtype, causal=causal, quantized=quantized)
            for path, module in network.named_modules():
                prefix = f"{path}.".replace(".base_layer.", ".") if path else ""
                for own in (module._parameters, module._buffers):
                    for key in list(own):
                        if (found := tensors.get(prefix + key)) is not None:
                            own[key] = found
            for path, each in self.merged.items():
                layer: Any = network.get_submodule(path)
                base, like = _targets(self.folder, causal=causal)[path], tensors[f"{path}.weight"]
                transposed = not isinstance(layer.base_layer, nn.Linear)
                layer.base_layer.weight = each.weight(
                    base, layer.scale, like, transposed=transposed
                )
            self._bound = device, dtype
        return network

    def recompute_layers(self) -> None:
        """Compute the base model's layers again in the backward pass (gradient checkpointing).

        Training then needs less memory and more time, and has the same results. Raises ModelError
        if the base model does not support it.
        """
        network: Any = self._hidden[0]
        # The first name is that of transformers 5.
        enable = getattr(network, "activation_checkpointing_enable", None)
        enable = enable or network.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise ModelError(
                f"base model {self.name.base!r}: engine.gradient-checkpointing is not supported "
                f"({describe_error(error)})"
            ) from error
        flagged = [each for each in network.modules() if hasattr(each, "gradient_checkpointing")]
        self._recomputed = tuple(each for each in flagged if each is not network)

    def quantize(self) -> None:
        """Store the base model's frozen linear layers in 4 bits (NF4; Dettmers et al., QLoRA).

        The head of a language model and the adapters keep their precision. Raises ModelError if the
        package bitsandbytes is missing or the model has merged factors.
        """
        self._is_quantized, self._bound = True, None
        self._check_merged()
        quantize_layers(self._hidden[0])

    def _check_merged(self) -> None:
        if self.merged and self._is_quantized:
            raise ModelError(
                f"base model {self.name.base!r}: factors cannot be merged into weights of 4 bits. "
                "Set engine.base-precision to full, or fedlora.aggregation to another rule than "
                "flora and fedex."
            )

    def changes(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return factors (B, A) of the change of each base weight: merged factors and adapter."""
        factors = factors_of(self.state_dict())
        for path, each in self.merged.items():
            b, a = factors[path]
            factors[path] = torch.cat([each.b.to(b), b], 1), torch.cat([each.a.to(a), a])
        return factors

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for path, each in self.merged.items():
            destination |= {prefix + path + MERGED_B: each.b, prefix + path + MERGED_A: each.a}

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Replace the merged factors. A state dict without merged factors removes them."""
        names = [k for k in state_dict if k.startswith(prefix) and k.endswith((MERGED_A, MERGED_B))]
        given = {name.removeprefix(prefix): state_dict.pop(name) for name in names}
        pairs = renamed(given, (MERGED_A, MERGED_B), (LORA_A, LORA_B))
        self.merged, self._bound = {}, None
        for path, (own_b, own_a) in factors_of(dict(self.named_parameters())).items():
            b, a = pairs.pop(path + LORA_B, own_b[:, :0]), pairs.pop(path + LORA_A, own_a[:0])
            rank = b.shape[-1] if b.ndim else 0
            if b.shape != (len(own_b), rank) or a.shape != (rank, own_a.shape[1]):
                errors.append(f"merged factors of {path}: shapes {list(b.shape)}, {list(a.shape)}")
            elif rank:
                self.merged[path] = Merged.of(self, path, b, a)
        self._check_merged()
        unexpected += [prefix + name for name in pairs]
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected, errors
        )

    def extra_repr(self) -> str:
        """Describe the base model, which is not a submodule."""
        return f"base={self.name.base}, rank={self.name.rank}, scale={self.name.scale:g}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        """Copy the adapters, and share the frozen weights."""
        (network,) = self._hidden
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        own = {id(each) for each in self.parameters()}
        hidden = _share_frozen(network, own, memo)
        rest = {k: v for k, v in vars(self).items() if k not in ("_hidden", "_recomputed")}
        vars(copied).update(copy.deepcopy(rest, memo), _hidden=(hidden,), _recomputed=())
        if self._recomputed:
            copied.recompute_layers()
        return copied


def describe_adapted(name: str) -> tuple[int, int, list[tuple[str, str, str]]]:
    """Describe what of a model with adapters is trained, without reading its weights.

    Linear layers after an encoder, whose number of outputs depends on the data, are not included.

    Returns:
        The number of parameters of the adapters, the number of parameters of the base model, and
        the name of each adapted layer with the shapes and the number of parameters of its adapter.

    Raises:
        ModelError: If `name` is not the name of a model with adapters.
    """
    parts = _parsed(name)
    adapted = Adapted(parts, 1, lambda network, x: x)
    network: Any = encoder_skeleton(adapted.folder, causal=parts.is_causal)
    rows = [
        (path, f"B {list(b.shape)}, A {list(a.shape)}", f"{b.numel() + a.numel():,}")
        for path, (b, a) in factors_of(adapted.state_dict()).items()
    ]
    trained = sum(each.numel() for each in adapted.parameters())
    return trained, sum(each.numel() for each in network.parameters()), rows


def prepare_base(model: nn.Module, engine: ComputeSettings) -> None:
    """Apply an engine's settings for frozen base models to a model, if it has one."""
    for each in model.modules():
        if isinstance(each, Adapted):
            if engine.base_precision == "nf4":
                each.quantize()
            if engine.gradient_checkpointing:
                each.recompute_layers()


def merged_base(model: Adapted) -> nn.Module:
    """Return a copy of the base model in which each adapted layer has the weight W + s B A."""
    network = load_encoder(model.folder, causal=model.name.is_causal)
    with torch.no_grad():
        for path, (b, a) in model.changes().items():
            layer: Any = network.get_submodule(path)
            change = model.name.scale * (b.double() @ a.double()).to(layer.weight)
            layer.weight += change if isinstance(layer, nn.Linear) else change.T
    return network


def peft_config(model: Adapted) -> dict[str, Any]:
    """Return the content of adapter_config.json, the configuration file of the PEFT library."""
    changes, layers = model.changes(), dict[str, Any](model._hidden[0].named_modules())
    rank, paths = max(a.shape[0] for _, a in changes.values()), sorted(changes)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": model.name.base,
        "r": rank,
        "lora_alpha": model.name.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": paths,
        "bias": "none",
        "fan_in_fan_out": not isinstance(layers[paths[0]].base_layer, nn.Linear),
        "task_type": "CAUSAL_LM" if model.name.is_causal else None,
        "inference_mode": True,
    }


def base_digest(name: str) -> str:
    """Return a digest of an adapted model's base model, or "" for models without adapters.

    If the digests of two clients differ, their models differ although the name is the same.
    """
    parts = AdapterName.parse(name)
    if parts is None:
        return ""
    files = weight_files(encoder_directory(parts.base))
    stamps = tuple((str(each), each.stat().st_mtime_ns, each.stat().st_size) for each in files)
    config = {k: v for k, v in configuration(parts.base).items() if k not in _IGNORED}
    return _digest(stamps, json.dumps(config, sort_keys=True))


@lru_cache(maxsize=16)
def _digest(stamps: tuple[tuple[str, int, int], ...], config: str) -> str:
    found = hashlib.blake2b(config.encode(), digest_size=8)
    for path, _, _ in stamps:
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _parsed(name: str) -> AdapterName:
    parts = AdapterName.parse(name)
    if parts is None:
        example = "encoder-1-lora8:NAME or causal-lora8-scale4:NAME, with a rank from 1 to 999"
        raise ModelError(f"model '{name}': expected a name such as {example}")
    return parts


def _add_nested(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` under `path`, and create missing parents as empty modules."""
    *parents, last = path.split(".")
    for each in parents:
        if each not in root._modules:
            root.add_module(each, nn.Module())
        root = root.get_submodule(each)
    root.add_module(last, module)


def _share_frozen(
    network: nn.Module, own: Iterable[int], memo: dict[int, Any] | None = None
) -> nn.Module:
    """Copy a module, but share all parameters and buffers whose ids are not in `own`."""
    memo = {} if memo is None else memo
    for each in chain(network.parameters(), network.buffers()):
        if id(each) not in own:
            memo[id(each)] = each
    copied: nn.Module = copy.deepcopy(network, memo)
    return copied


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of PyTorch or transformers (`Conv1D`)."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@lru_cache(maxsize=4)
def _base(
    folder: str, device: torch.device, dtype: torch.dtype, *, causal: bool, quantized: bool
) -> dict[str, Tensor]:
    """Return a base model's parameters and buffers on a device, without those of a decoder.

    In half precision, vectors stay in float32, because layer normalization on a CPU does not
    support half-precision vectors, and vectors need little memory.
    """
    with torch.inference_mode(False), torch.no_grad():
        network = load_encoder(folder, causal=causal).requires_grad_(False)
        part = network if causal else text_part(network)
        if quantized:
            quantize_layers(part, device)
        for each in chain(part.parameters(), part.buffers()):
            if each.is_floating_point():
                wide = each.ndim < 2 and dtype.itemsize < 4
                each.data = each.data.to(torch.float32 if wide else dtype)
        part.to(device)
    used = {id(each) for each in chain(part.parameters(), part.buffers())}
    named = chain(  # A shared weight has several names.
        network.named_parameters(remove_duplicate=False),
        network.named_buffers(remove_duplicate=False),
    )
    return {name: each for name, each in named if id(each) in used}


@lru_cache(maxsize=4)
def _targets(folder: str, *, causal: bool) -> dict[str, Tensor]:
    """Return the unrounded weights of a base model's layers with adapters, on the host, by path."""
    with torch.inference_mode(False):
        network = load_encoder(folder, causal=causal)
    layers: list[tuple[str, Any]] = [*network.named_modules()]
    return {
        path: layer.weight.detach()
        for path, layer in layers
        if path.rpartition(".")[2] in TARGETS | FUSED_TARGETS and _is_linear(layer)
    }
