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
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.base.errors import ModelError, error_reason, nearest
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


HIDDEN_WIDTH = 128
"""Width of the linear layers before the classifier."""


def check_encoder(name: str) -> None:
    """Check an encoder. Raises FedhetError if its configuration is unreadable."""
    configuration(encoder_parts(name)[2])


def assemble_encoder(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: Kind | None
) -> HetModel:
    """Build an encoder with linear layers.

    Raises ModelError if the encoder does not support texts of this length or vocabulary.
    """
    layers, frozen, encoder_name = encoder_parts(name)
    encoder = TextEncoder(encoder_name, frozen)
    encoder.check(name, shape, kind)
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
    """Encoder of texts: tokens [N, L] -> mean of the last hidden states [N, D].

    If `last` is set, the features are the hidden state of the last token, as in causal language
    models.
    """

    def __init__(self, name: str, frozen: bool, *, last: bool = False) -> None:
        super().__init__()
        config, self.last = configuration(name), last
        self.width = config_size(config, name, "hidden_size", "dim", "d_model")
        self.vocabulary = config_size(config, name, "vocab_size")
        self.max_tokens = config_size(config, name, "max_position_embeddings")
        self.padding = int(config.get("pad_token_id") or 0)
        if self.padding:  # Positions start after the id of the padding token.
            self.max_tokens -= self.padding + 1
        self.name = name
        self.network = None if frozen else _encoder(name)

    def check(self, model: str, shape: Shape, kind: Kind | None) -> None:
        """Check the shape. Raises ModelError unless it is a text shape that the model supports."""
        if kind not in (None, TEXT) or not TEXT.fits(shape):
            raise ModelError(f"model '{model}': expected {TEXT.wanted}, got shape {shape}")
        if shape[2] > self.vocabulary or shape[1] > self.max_tokens:
            raise ModelError(
                f"model '{model}': expected texts of up to {self.max_tokens} tokens with ids below "
                f"{self.vocabulary}, got up to {shape[1]} tokens with ids below {shape[2]}. Set "
                f"data.tokenizer = {self.name!r} to use the model's tokenizer, and "
                "data.max-tokens to truncate texts."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features [N, D] of texts, ignoring padding."""
        if self.network is not None:
            return self.features(self.network, x)
        with torch.no_grad():
            return self.features(_cached_encoder(self.name, x.device), x)

    def features(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return the features [N, D] that `network` computes from tokens [N, L]."""
        x = trim_padding(x)
        mask = token_mask(x)
        # Undo the swap of the encoder's padding token and PADDING in `fedhet.data.texts`.
        ids = torch.where(x == PADDING, self.padding, x.where(x != self.padding, PADDING))
        states = network(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return last_vector(states, mask) if self.last else masked_mean(states, mask)


def config_size(config: dict[str, Any], name: str, *keys: str) -> int:
    """Return the first integer among the values of `keys`. Raises ModelError if there is none."""
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise ModelError(f"encoder {name!r}: {' or '.join(keys)} not found in config.json")


@lru_cache(maxsize=2)
def _cached_encoder(name: str, device: torch.device) -> nn.Module:
    return _encoder(name).to(device).eval()


def _encoder(name: str) -> nn.Module:
    """Load a pretrained encoder from safetensors files, without running code from its directory."""
    library = transformers_library(f"encoder {name!r}", "encoders")
    directory = encoder_directory(name)
    try:
        network: nn.Module = library.AutoModel.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # transformers raises many exception types.
        raise ModelError(
            f"encoder {name!r}: {directory} cannot be loaded ({error_reason(error)})"
        ) from error
    return network.float()  # The file may be in half precision, but training needs float32.


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
