"""The networks of the library timm, without pretrained weights: `timm:NAME`."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedhet.base.errors import ModelError, nearest
from fedhet.kinds import IMAGE, Kind, Shape
from fedhet.models.het import HetModel, join, output_shape

START = "timm:"


def is_timm(name: str) -> bool:
    """Return whether `name` is one of timm's models."""
    return name.startswith(START)


def check_timm(name: str) -> None:
    """Raise ModelError unless timm is installed, and has the model."""
    library, own = _library(name), name.removeprefix(START)
    if not library.is_model(own):
        close = nearest(own, library.list_models())
        raise ModelError(f"model '{name}': timm has no model '{own}'{close}")


def assemble_timm(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: Kind | None
) -> HetModel:
    """Return the network with a linear classifier. Raises ModelError if images do not fit it."""
    check_timm(name)
    if kind not in (None, IMAGE) or not IMAGE.fits(shape):
        raise ModelError(f"model '{name}' takes {IMAGE.wanted}, not shape {list(shape)}")
    try:
        network = _network(name, shape)
        features = output_shape(network, shape)
    except Exception as error:  # each of timm's networks has its own
        raise ModelError(f"model '{name}' does not run on images {list(shape)}: {error}") from error
    if len(features) != 2:
        raise ModelError(f"model '{name}' gives features {list(features)}, not [N, D]")
    return join(network, features[1], classes, feature_dim)


def _network(name: str, shape: Shape) -> nn.Module:
    """Return the network without its head, for the size of the images if it has one of its own."""
    make, own = _library(name).create_model, name.removeprefix(START)
    options = {"pretrained": False, "num_classes": 0, "in_chans": shape[0]}
    try:
        made: nn.Module = make(own, img_size=shape[1:], **options)
    except TypeError:  # a convolutional network, which takes images of any size
        made = make(own, **options)
    return made


def _library(name: str) -> Any:
    try:
        import timm
    except ImportError:
        raise ModelError(
            f"model '{name}': needs the package 'timm': pip install 'fedhet[timm]'"
        ) from None
    return timm
