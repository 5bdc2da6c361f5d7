"""Networks from other libraries: pretrained torchvision networks, timm, and transformers.

- `resnet18-pretrained`, `resnet18-frozen`: torchvision networks with ImageNet weights. Images are
  preprocessed as the weights require: grayscale images get three channels, small images are
  enlarged, and all images are normalized. The weights are loaded from the local cache of torch;
  nothing is downloaded.
- `encoder-2:NAME`, `encoder-2-frozen:NAME`: pretrained text encoders with 1 to 5 linear layers,
  including the classifier. NAME is a directory in $FEDHET_ENCODERS with `config.json` and
  `model.safetensors`, as saved by `transformers`.
- `timm:NAME`: networks from timm, without pretrained weights.

The weights of a frozen network are not part of the model. They are neither trained nor sent, and
each process keeps a single copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fedhet.base.errors import ModelError, describe_error, error_reason, error_text, nearest
from fedhet.data.texts import configuration, encoder_directory, encoder_parts
from fedhet.kinds import IMAGE, PADDING, TEXT, Kind, Shape
from fedhet.models.base import HetModel, ModelInfo, join, output_shape
from fedhet.models.sequences import last_vector, masked_mean, token_mask, trim_padding
from fedhet.models.vision import TORCHVISION

MIN_SIDE = 64
"""Side length to which smaller images are enlarged, because the networks downsample by 32."""
_NAME = re.compile(r"(.+)-(pretrained|frozen)")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Channel statistics of ImageNet, for images in [0, 1]."""


def is_pretrained(name: str) -> bool:
    """Return whether `name` is a torchvision network with pretrained or frozen weights."""
    match = _NAME.fullmatch(name)
    return match is not None and match[1] in TORCHVISION


def pretrained_info(name: str) -> ModelInfo:
    """Return the registry entry for a pretrained network."""
    base, how = name.rsplit("-", 1)

    def extractor(shape: Shape) -> nn.Module:
        if shape[0] not in (1, 3):
            raise ModelError(
                f"model '{base}': ImageNet weights require 1 or 3 channels, got {shape[0]}"
            )
        return _FrozenNetwork(base) if how == "frozen" else _Preprocessed(_network(base))

    line = "ImageNet weights" + (", frozen" if how == "frozen" else "")
    return ModelInfo(name, base.split("-")[0], line, "torchvision", 1, extractor)


class _Preprocessed(nn.Module):
    """Network with ImageNet preprocessing: images [N, C, H, W] in [-1, 1] -> features [N, D]."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features [N, D] of images."""
        x = ((x + 1) / 2).expand(-1, 3, -1, -1)
        if min(x.shape[2:]) < MIN_SIDE:
            scale = MIN_SIDE / min(x.shape[2:])
            size = [round(side * scale) for side in x.shape[2:]]
            x = nn.functional.interpolate(x, size=size, mode="bilinear")
        features: Tensor = self.network((x - self.mean) / self.std)
        return features


class _FrozenNetwork(nn.Module):
    """Variant of `_Preprocessed` in evaluation mode, without parameters."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        """Return the features [N, D] of images."""
        with torch.no_grad():
            features: Tensor = _cached_network(self.base, x.device)(x)
        return features


@lru_cache(maxsize=4)
def _cached_network(base: str, device: torch.device) -> nn.Module:
    with torch.device("meta" if device.type == "meta" else "cpu"):
        network = _Preprocessed(_network(base))
    return network.to(device).eval()


def _network(base: str) -> nn.Module:
    """Build a network without its last linear layer. On the meta device, no weights are loaded."""
    from torchvision.models import get_model

    net: Any = get_model(TORCHVISION[base], weights=None)
    if not next(net.parameters()).is_meta:
        with torch.no_grad():
            net.load_state_dict(_weights(base))
    if hasattr(net, "fc"):
        net.fc = nn.Identity()
    else:
        net.classifier = net.classifier[:-1]
    module: nn.Module = net
    return module


def check_weights(name: str) -> None:
    """Check a pretrained network. Raises ModelError if its weights are not in torch's cache."""
    _weights_file(name.rsplit("-", 1)[0])


@lru_cache(maxsize=4)
def _weights(base: str) -> Mapping[str, Tensor]:
    """Load weights from torch's cache. Raises ModelError if they are missing or invalid."""
    path = _weights_file(base)
    try:
        weights: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zipfile, and torch raise many exception types.
        raise ModelError(
            f"model '{base}': {path} cannot be read ({error_reason(error)})"
        ) from error
    return weights


def _weights_file(base: str) -> Path:
    """Return the path of the weights file in torch's cache. Raises ModelError if it is missing."""
    from torchvision.models import get_model_weights

    tv_name = TORCHVISION[base]
    url = get_model_weights(tv_name).DEFAULT.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    if not path.is_file():
        raise ModelError(
            f"model '{base}': weights file {path} not found. Download it with: python -c \"from "
            f"torchvision import models as m; m.get_model('{tv_name}', weights='DEFAULT')\""
        )
    return path


TIMM = "timm:"


def is_timm(name: str) -> bool:
    """Return whether `name` has the form `timm:NAME`."""
    return name.startswith(TIMM)


def check_timm(name: str) -> None:
    """Check a timm model. Raises ModelError if timm is not installed or has no such model."""
    try:
        import timm
    except ImportError:
        raise ModelError(
            f"model '{name}': package 'timm' not found. Install it with: pip install 'fedhet[timm]'"
        ) from None
    timm_name = name.removeprefix(TIMM)
    if not timm.is_model(timm_name):
        close = nearest(timm_name, timm.list_models())
        raise ModelError(f"model '{name}': '{timm_name}' not found in timm{close}")


def assemble_timm(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: Kind | None
) -> HetModel:
    """Build a timm network with a linear classifier.

    Raises ModelError if the network does not support images of this shape.
    """
    check_timm(name)
    if kind not in (None, IMAGE) or not IMAGE.fits(shape):
        raise ModelError(f"model '{name}': expected {IMAGE.wanted}, got shape {list(shape)}")
    from timm import create_model

    timm_name = name.removeprefix(TIMM)
    options = {"pretrained": False, "num_classes": 0, "in_chans": shape[0]}
    try:
        try:
            network: nn.Module = create_model(timm_name, img_size=shape[1:], **options)
        except TypeError:  # Convolutional networks do not have the option `img_size`.
            network = create_model(timm_name, **options)
        features = output_shape(network, shape)
    except Exception as error:  # timm networks raise many exception types.
        raise ModelError(
            f"model '{name}' failed for images of shape {list(shape)}: {error}"
        ) from error
    if len(features) != 2:
        raise ModelError(f"model '{name}': expected features [N, D], got {list(features)}")
    return join(network, features[1], classes, feature_dim)


UNUSED = ("pooler.",)
"""Name prefixes of weights that do not affect the features, and that may be missing from files."""
HIDDEN_WIDTH = 128
"""Width of the linear layers before the classifier."""


def check_encoder(name: str) -> None:
    """Check an encoder. Raises FedhetError if its configuration or weights are missing."""
    base = encoder_parts(name)[2]
    configuration(base)
    weight_files(encoder_directory(base))


def assemble_encoder(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: Kind | None
) -> HetModel:
    """Build an encoder with linear layers.

    Raises ModelError if the encoder does not support texts of this length or vocabulary.
    """
    layers, frozen, base = encoder_parts(name)
    encoder = TextEncoder(name, base, shape, kind, frozen=frozen)
    return with_layers(encoder, encoder.width, layers, classes, feature_dim)


def with_layers(
    encoder: nn.Module, width: int, layers: int, classes: int, feature_dim: int | None
) -> HetModel:
    """Append linear layers, including the classifier, to an encoder."""
    widths = [width] + [HIDDEN_WIDTH] * (layers - 1)
    hidden: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        hidden += [nn.Linear(inputs, outputs), nn.ReLU()]
    return join(nn.Sequential(encoder, *hidden), widths[-1], classes, feature_dim)


class TextEncoder(nn.Module):
    """Encoder of texts: tokens [N, L] -> features [N, D].

    The features are the last hidden state of the last token in causal models, and the mean of the
    last hidden states in other models.
    """

    def __init__(
        self, model: str, base: str, shape: Shape, kind: Kind | None, *, frozen: bool
    ) -> None:
        """Check that the base model supports texts of this shape. Raises ModelError otherwise."""
        super().__init__()
        if kind not in (None, TEXT) or not TEXT.fits(shape):
            raise ModelError(f"model '{model}': expected {TEXT.wanted}, got shape {shape}")
        self.directory = encoder_directory(base)
        file = f"{self.directory}/config.json"
        network: Any = text_part(encoder_skeleton(self.directory))
        config = network.config
        padding = getattr(config, "pad_token_id", None)
        try:
            vocabulary = network.get_input_embeddings().num_embeddings
            self.width = _hidden_width(network)
        except Exception as error:  # transformers models raise many exception types.
            hint = ". pad_token_id is null" if padding is None else ""
            raise ModelError(
                f"{file}: the model cannot read texts ({describe_error(error)}){hint}"
            ) from error
        if "attention_mask" not in signature(network.forward).parameters:
            raise ModelError(
                f"{file}: model type {config.model_type} does not ignore padding, because it has "
                "no attention mask. Use another base model."
            )
        stated = getattr(config, "max_position_embeddings", None) or -1
        limits = [stated] if stated > 0 else []  # T5 states no limit, and XLNet states -1.
        for path, each in network.named_modules():
            name = path.rpartition(".")[2]
            if isinstance(each, nn.Embedding) and ("pos" in name or name == "wpe"):
                # As in RoBERTa, positions start after the id of the padding token.
                skipped = 0 if each.padding_idx is None else each.padding_idx + 1
                limits.append(each.num_embeddings - skipped)
        longest = min(limits, default=shape[1])
        if longest < 1:
            raise ModelError(f"{file}: no position is left after pad_token_id, got {padding}")
        if shape[1] > longest:
            raise ModelError(
                f"model '{model}': expected texts of up to {longest} tokens, got up to {shape[1]}. "
                f"Set data.max-tokens = {longest} to truncate texts."
            )
        if shape[2] - 1 > vocabulary:
            raise ModelError(
                f"model '{model}': expected tokens with ids below {vocabulary}, got ids below "
                f"{shape[2] - 1}. Set data.tokenizer = {base!r} to use the model's tokenizer."
            )
        self.zero = shape[2] - 1
        """Token of `fedhet.data.texts` that stands for token 0 of the base model."""
        self.padding = padding if padding is not None and padding >= 0 else 0
        self.is_causal = _is_causal(network)
        self.network = None if frozen else text_part(load_encoder(self.directory))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features [N, D] of texts, ignoring padding."""
        if self.network is not None:
            return self.features(self.network, x)
        with torch.no_grad():
            return self.features(_cached_encoder(self.directory, x.device), x)

    def features(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return the features [N, D] that `network` computes from tokens [N, L]."""
        x = trim_padding(x)
        mask = token_mask(x)
        ids = torch.where(x == PADDING, self.padding, x.where(x != self.zero, 0))
        part = text_part(network)
        states = part(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return last_vector(states, mask) if self.is_causal else masked_mean(states, mask)


def text_part(network: nn.Module) -> nn.Module:
    """Return the encoder of an encoder-decoder model such as T5, or the unchanged model."""
    part: Any = network
    if "decoder_input_ids" in signature(part.forward).parameters:
        part = part.get_encoder()
    encoder: nn.Module = part
    return encoder


def _hidden_width(network: Any) -> int:
    """Return the width of a text model's last hidden states, from a pass on the meta device."""
    try:
        with torch.no_grad(), torch.device("meta"):
            ids = torch.ones(1, 2, dtype=torch.int64)
            return int(network(input_ids=ids).last_hidden_state.shape[-1])
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
    return int(network.config.hidden_size)  # Some models need values, which meta tensors lack.


def _is_causal(network: Any) -> bool:
    """Return whether the state of a token depends only on previous tokens."""
    flags = [each.is_causal for each in network.modules() if hasattr(each, "is_causal")]
    if flags:
        return any(flags)
    from transformers.models.auto import modeling_auto as auto

    # Some causal models, e.g. BLOOM, have no flags, but they have no head for masked tokens.
    name, is_decoder = network.config.model_type, not network.config.is_encoder_decoder
    is_masked = name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return is_decoder and not is_masked and name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@lru_cache(maxsize=2)
def _cached_encoder(directory: str, device: torch.device) -> nn.Module:
    return text_part(load_encoder(directory)).to(device)


def weight_files(directory: str) -> list[Path]:
    """Return a model's safetensors files. Raises ModelError if one is missing or no file."""
    files = sorted(Path(directory).glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{directory}/model.safetensors: file not found")
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path}: expected a regular file")
    return files


@lru_cache(maxsize=8)
def encoder_skeleton(directory: str, *, causal: bool = False) -> nn.Module:
    """Return a pretrained model without weights, in evaluation mode.

    With `causal`, the model is a causal language model with its head. Raises ModelError if
    config.json is invalid, a file of weights is damaged, or a weight has another shape than
    config.json states.
    """
    file = f"{directory}/config.json"
    transformers = transformers_library(f"encoder {Path(directory).name!r}", "encoders")
    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        padding = getattr(config, "pad_token_id", None)
        if padding is not None and padding >= getattr(config, "vocab_size", padding + 1):
            raise ModelError(
                f"{file}: pad_token_id must be below vocab_size = {config.vocab_size}, or null if "
                f"the model has no padding token, got {padding}"
            )
        auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        with torch.device("meta"):
            network: nn.Module = auto.from_config(config, trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:  # The library raises many exception types.
        raise ModelError(f"{file}: the model cannot be built ({describe_error(error)})") from error
    built: Any = network
    expected = {name: list(each.shape) for name, each in built.state_dict().items()}
    for path in weight_files(directory):
        try:
            with safe_open(path, "pt") as weights:  # Reads only the header.
                stored = {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
        except Exception as error:  # The library raises its own exceptions.
            raise ModelError(f"{path}: not a safetensors file ({error_text(error)})") from error
        for key, shape in stored.items():
            name = key if causal else key.removeprefix(f"{built.base_model_prefix}.")
            _check_shape(directory, name, shape, expected.get(name, shape))
    return network.requires_grad_(False).eval()


def _check_shape(directory: str, name: str, stored: list[int], expected: list[int]) -> None:
    if stored != expected:
        raise ModelError(
            f"{directory}/config.json: expected {name} of shape {expected}, got {stored} in "
            "model.safetensors"
        )


def load_encoder(directory: str, *, causal: bool = False) -> nn.Module:
    """Read a pretrained model from safetensors, in float32 and in evaluation mode.

    With `causal`, the model is a causal language model with its head. Code in the directory is not
    executed. Raises ModelError if a weight is missing or has another shape than config.json states.
    """
    transformers = transformers_library(f"encoder {Path(directory).name!r}", "encoders")
    # Silence the library, because it would also report unused weights. Missing weights are checked
    # below.
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
            network, report = auto.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # The library raises many exception types.
        raise ModelError(f"{directory}: cannot be loaded ({describe_error(error)})") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    for key, stored, expected in sorted(report["mismatched_keys"]):
        _check_shape(directory, key, list(stored), list(expected))
    part = text_part(network)
    prefix = next(path for path, each in network.named_modules() if each is part)
    missing = [key for key in report["missing_keys"] if key.startswith(prefix)]
    if missing := sorted(key for key in missing if not key.startswith(UNUSED)):
        raise ModelError(
            f"{directory}/model.safetensors: {len(missing)} weights of config.json not found, such "
            f"as {missing[0]}"
        )
    pretrained: nn.Module = network.float().eval()
    return pretrained


def quantize_layers(network: nn.Module, device: torch.device | None = None) -> None:
    """Replace linear layers by 4-bit layers of bitsandbytes, except the head and adapters.

    Without a device, the new layers have no weights (meta device). A `Conv1D` of transformers is
    replaced by a linear layer. Raises ModelError if bitsandbytes is missing.
    """
    try:
        import bitsandbytes
    except ImportError:
        raise ModelError(
            "engine.base-precision = nf4: package 'bitsandbytes' not found. Install it with: "
            "pip install 'fedhet[quantized]'"
        ) from None
    layers: Any = bitsandbytes.nn
    base: Any = network
    head = base.get_output_embeddings()
    for path, layer in list(network.named_modules()):
        is_conv = type(layer).__name__ == "Conv1D"
        is_plain = type(layer) is nn.Linear and not path.endswith(("lora_A", "lora_B"))
        if layer is head or not (is_conv or is_plain):
            continue
        weight: Any = layer.weight.T if is_conv else layer.weight
        rows, columns = weight.shape
        small = layers.Linear4bit(columns, rows, layer.bias is not None, device="meta")
        # Its format for CPUs with AVX-512 has no backward pass, and the weight is shared.
        small.support_avx512bf16_for_cpu = False
        small.weight = layers.Params4bit(weight.detach().contiguous(), quant_type="nf4")
        small.bias = layer.bias
        network.set_submodule(path, small if device is None else small.to(device))


def transformers_library(model: str, extra: str) -> Any:
    """Import transformers. Raises ModelError, which names `model` and `extra`, if this fails."""
    try:
        import transformers
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise ModelError(
            f"{model}: package 'transformers' not found. Install it with: "
            f"pip install 'fedhet[{extra}]'"
        ) from None
    disable_progress_bar()
    return transformers
