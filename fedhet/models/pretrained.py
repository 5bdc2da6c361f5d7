"""torchvision's networks with ImageNet's weights: `resnet18-pretrained`, `resnet18-frozen`.

Images are prepared as the weights require: grey ones get three channels, small ones are enlarged,
and all are normalised. A frozen network does not belong to the model's weights: it is neither
trained nor sent, and a process keeps one copy. The weights are read from torch's own cache on this
machine; nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.base.errors import ModelError, reason_of
from fedhet.kinds import Shape
from fedhet.models.info import ModelInfo

LEAST_SIDE = 64
"""The side to which smaller images are enlarged; the networks divide it by 32."""
NETWORKS: Mapping[str, str] = MappingProxyType(
    {
        **{f"resnet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
        **{f"vgg{layers}": f"vgg{layers}_bn" for layers in (11, 13, 16, 19)},
        "shufflenet-v2": "shufflenet_v2_x1_0",
        "shufflenet-v2-x0.5": "shufflenet_v2_x0_5",
        "mobilenet-v2": "mobilenet_v2",
        "mobilenet-v3-small": "mobilenet_v3_small",
        "efficientnet-b0": "efficientnet_b0",
    }
)
"""The networks with pretrained weights, and their names in torchvision."""
_NAME = re.compile(r"(.+)-(pretrained|frozen)")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Statistics of ImageNet's channels, from 0 to 1, that torchvision's weights require."""


def is_pretrained(name: str) -> bool:
    """Return whether `name` is a network of `NETWORKS` with its weights, trained on or frozen."""
    found = _NAME.fullmatch(name)
    return found is not None and found[1] in NETWORKS


def pretrained_info(name: str) -> ModelInfo:
    """Return the entry of a name for which `is_pretrained` holds."""
    base, how = name.rsplit("-", 1)
    build = partial(_extractor, base=base, frozen=how == "frozen")
    line = "weights of ImageNet" + (", frozen" if how == "frozen" else "")
    return ModelInfo(name, base.split("-")[0], line, "torchvision", 1, build)


def _extractor(shape: Shape, base: str, frozen: bool) -> nn.Module:
    if shape[0] not in (1, 3):
        raise ModelError(
            f"model '{base}': weights of ImageNet take 1 or 3 channels, not {shape[0]}"
        )
    return _Frozen(base) if frozen else _Prepared(_network(base))


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
        if min(x.shape[2:]) < LEAST_SIDE:
            scale = LEAST_SIDE / min(x.shape[2:])
            size = [round(side * scale) for side in x.shape[2:]]
            x = nn.functional.interpolate(x, size=size, mode="bilinear")
        features: Tensor = self.network((x - self.mean) / self.std)
        return features


class _Frozen(nn.Module):
    """As `_Prepared`, in evaluation mode and without weights of its own."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images."""
        with torch.no_grad():
            features: Tensor = _kept(self.base, x.device)(x)
        return features


@lru_cache(maxsize=4)
def _kept(base: str, device: torch.device) -> nn.Module:
    with torch.device("meta" if device.type == "meta" else "cpu"):
        network = _Prepared(_network(base))
    return network.to(device).eval()


def _network(base: str) -> nn.Module:
    """Return the network without its last linear layer; on the meta device without weights."""
    from torchvision.models import get_model

    net: Any = get_model(NETWORKS[base], weights=None)
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
        raise ModelError(f"model '{base}': {path} cannot be read ({reason_of(error)})") from error
    return found


def _file_of_weights(base: str) -> Path:
    """Return the file in torch's cache. Raises ModelError if it is not there."""
    from torchvision.models import get_model_weights

    theirs = NETWORKS[base]
    url = get_model_weights(theirs).DEFAULT.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    if not path.is_file():
        raise ModelError(
            f"model '{base}': the weights are not on this machine, as {path}; with an internet "
            f"connection, python -c \"from torchvision import models as m; m.get_model('{theirs}', "
            "weights='DEFAULT')\" puts them there"
        )
    return path
