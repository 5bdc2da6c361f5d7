"""Networks of other libraries: torchvision's with ImageNet's weights, timm's, transformers'.

- `resnet18-pretrained`, `resnet18-frozen`: torchvision's networks. Images are prepared as the
  weights require: gray ones get three channels, small ones are enlarged, and all are normalized.
  The weights are read from torch's own cache on this machine; nothing is downloaded.
- `encoder-2:NAME`, `encoder-2-frozen:NAME`: pretrained encoders of texts with some linear layers,
  1 to 5, of which the last is the classifier. NAME is a folder in $FEDHET_ENCODERS with
  `config.json` and `model.safetensors`, as the library `transformers` saves an encoder.
- `timm:NAME`: the networks of the library timm, without pretrained weights.

A frozen network does not belong to the model's weights: it is neither trained nor sent, and a
process keeps one copy.
"""

from __future__ import annotations

import contextlib
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
from fedhet.models.sequences import mean_of, present, trimmed
from fedhet.models.vision import TORCHVISION

MIN_SIDE = 64
"""The side to which smaller images are enlarged; the networks divide it by 32."""
_NAME = re.compile(r"(.+)-(pretrained|frozen)")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Statistics of ImageNet's channels, from 0 to 1, that torchvision's weights require."""


def is_pretrained(name: str) -> bool:
    """Return whether `name` is a network of torchvision with its weights, trained on or frozen."""
    found = _NAME.fullmatch(name)
    return found is not None and found[1] in TORCHVISION


def pretrained_info(name: str) -> ModelInfo:
    """Return the entry of a name for which `is_pretrained` holds."""
    base, how = name.rsplit("-", 1)

    def extractor(shape: Shape) -> nn.Module:
        if shape[0] not in (1, 3):
            raise ModelError(
                f"model '{base}': weights of ImageNet take 1 or 3 channels, not {shape[0]}"
            )
        return _FrozenNetwork(base) if how == "frozen" else _Prepared(_network(base))

    line = "weights of ImageNet" + (", frozen" if how == "frozen" else "")
    return ModelInfo(name, base.split("-")[0], line, "torchvision", 1, extractor)


class _Prepared(nn.Module):
    """Images [N, C, H, W] in [-1, 1] -> a network's features [N, D]."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images."""
        x = ((x + 1) / 2).expand(-1, 3, -1, -1)
        if min(x.shape[2:]) < MIN_SIDE:
            scale = MIN_SIDE / min(x.shape[2:])
            size = [round(side * scale) for side in x.shape[2:]]
            x = nn.functional.interpolate(x, size=size, mode="bilinear")
        features: Tensor = self.network((x - self.mean) / self.std)
        return features


class _FrozenNetwork(nn.Module):
    """As `_Prepared`, in evaluation mode and without weights of its own."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images."""
        with torch.no_grad():
            features: Tensor = _kept_network(self.base, x.device)(x)
        return features


@lru_cache(maxsize=4)
def _kept_network(base: str, device: torch.device) -> nn.Module:
    with torch.device("meta" if device.type == "meta" else "cpu"):
        network = _Prepared(_network(base))
    return network.to(device).eval()


def _network(base: str) -> nn.Module:
    """Return the network without its last linear layer; on the meta device without weights."""
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
    """Raise ModelError if the weights of a pretrained network are not in torch's cache."""
    _file_of_weights(name.rsplit("-", 1)[0])


@lru_cache(maxsize=4)
def _weights(base: str) -> Mapping[str, Tensor]:
    """Return the weights from torch's cache. Raises ModelError if they are not there."""
    path = _file_of_weights(base)
    try:
        found: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's, zipfile's and torch's own
        raise ModelError(
            f"model '{base}': {path} cannot be read ({error_reason(error)})"
        ) from error
    return found


def _file_of_weights(base: str) -> Path:
    """Return the file in torch's cache. Raises ModelError if it is not there."""
    from torchvision.models import get_model_weights

    theirs = TORCHVISION[base]
    url = get_model_weights(theirs).DEFAULT.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    if not path.is_file():
        raise ModelError(
            f"model '{base}': the weights are not on this machine, as {path}; with an internet "
            f"connection, python -c \"from torchvision import models as m; m.get_model('{theirs}', "
            "weights='DEFAULT')\" puts them there"
        )
    return path


TIMM = "timm:"


def is_timm(name: str) -> bool:
    """Return whether `name` is one of timm's models."""
    return name.startswith(TIMM)


def check_timm(name: str) -> None:
    """Raise ModelError unless timm is installed, and has the model."""
    try:
        import timm
    except ImportError:
        raise ModelError(
            f"model '{name}': needs the package 'timm': pip install 'fedhet[timm]'"
        ) from None
    own = name.removeprefix(TIMM)
    if not timm.is_model(own):
        close = nearest(own, timm.list_models())
        raise ModelError(f"model '{name}': timm has no model '{own}'{close}")


def assemble_timm(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: Kind | None
) -> HetModel:
    """Return the network with a linear classifier. Raises ModelError if images do not fit it."""
    check_timm(name)
    if kind not in (None, IMAGE) or not IMAGE.fits(shape):
        raise ModelError(f"model '{name}' takes {IMAGE.wanted}, not shape {list(shape)}")
    from timm import create_model

    own = name.removeprefix(TIMM)
    options = {"pretrained": False, "num_classes": 0, "in_chans": shape[0]}
    try:
        try:
            network: nn.Module = create_model(own, img_size=shape[1:], **options)
        except TypeError:  # a convolutional network, which takes images of any size
            network = create_model(own, **options)
        features = output_shape(network, shape)
    except Exception as error:  # each of timm's networks has its own
        raise ModelError(f"model '{name}' does not run on images {list(shape)}: {error}") from error
    if len(features) != 2:
        raise ModelError(f"model '{name}' gives features {list(features)}, not [N, D]")
    return join(network, features[1], classes, feature_dim)


HIDDEN_WIDTH = 128
"""The width of linear layers before the last."""


def check_encoder(name: str) -> None:
    """Raise a FedhetError unless the encoder's folder is there."""
    configuration(encoder_parts(name)[2])


def assemble_encoder(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: Kind | None
) -> HetModel:
    """Return the encoder with its linear layers. Raises ModelError if texts do not fit it."""
    layers, frozen, folder = encoder_parts(name)
    if kind not in (None, TEXT) or not TEXT.fits(shape):
        raise ModelError(f"model '{name}' takes {TEXT.wanted}, not shape {shape}")
    encoder = _Encoder(folder, frozen)
    if shape[2] > encoder.vocabulary or shape[1] > encoder.longest:
        raise ModelError(
            f"model '{name}' takes texts of up to {encoder.longest} tokens below "
            f"{encoder.vocabulary}, not of {shape[1]} below {shape[2]}: 'data.tokenizer' = "
            f"{folder!r} gives it its own, and 'data.max-tokens' cuts them"
        )
    widths = [encoder.width] + [HIDDEN_WIDTH] * (layers - 1)
    hidden: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        hidden += [nn.Linear(inputs, outputs), nn.ReLU()]
    return join(nn.Sequential(encoder, *hidden), widths[-1], classes, feature_dim)


class _Encoder(nn.Module):
    """Tokens [N, L] -> the mean of the encoder's last states over the text, [N, D]."""

    def __init__(self, name: str, frozen: bool) -> None:
        super().__init__()
        config = configuration(name)
        self.width = _size(config, name, "hidden_size", "dim", "d_model")
        self.vocabulary = _size(config, name, "vocab_size")
        self.longest = _size(config, name, "max_position_embeddings")
        self.padding = int(config.get("pad_token_id") or 0)
        if self.padding:  # positions then begin after the padding's number
            self.longest -= self.padding + 1
        self.name = name
        self.network = None if frozen else _encoder(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a text, without those of its padding."""
        x = trimmed(x)
        there = present(x)
        # As `fedhet.data.texts` swaps them.
        ids = torch.where(x == PADDING, self.padding, x.where(x != self.padding, PADDING))
        is_frozen = self.network is None
        network = _kept_encoder(self.name, x.device) if self.network is None else self.network
        with torch.no_grad() if is_frozen else contextlib.nullcontext():
            states = network(input_ids=ids, attention_mask=there.long()).last_hidden_state
            return mean_of(states, there)


def _size(config: dict[str, Any], name: str, *keys: str) -> int:
    """Return the first of `keys` in an encoder's configuration. Raises ModelError if none is."""
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise ModelError(f"encoder {name!r}: its config.json has no {' or '.join(keys)}")


@lru_cache(maxsize=2)
def _kept_encoder(name: str, device: torch.device) -> nn.Module:
    return _encoder(name).to(device).eval()


def _encoder(name: str) -> nn.Module:
    """Return the encoder with its pretrained weights, from safetensors; no code is loaded."""
    try:
        from transformers import AutoModel
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise ModelError(
            f"encoder {name!r}: needs the package 'transformers': pip install 'fedhet[encoders]'"
        ) from None
    folder = encoder_directory(name)
    disable_progress_bar()
    try:
        network: nn.Module = AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # the library's own, for each fault of the folder
        raise ModelError(
            f"encoder {name!r}: {folder} cannot be loaded ({error_reason(error)})"
        ) from error
    return network.float()  # its file may hold half precision, which is not trained here
