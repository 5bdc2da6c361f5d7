"""Images [C, H, W], float32 in [-1, 1], or bytes that become that."""

from __future__ import annotations

from collections.abc import Mapping

from fedhet.kinds.base import Change, Kind


def _changes() -> Mapping[str, Change]:
    from fedhet.kinds.image_changes import CHANGES

    return CHANGES


IMAGE = Kind(
    name="image",
    plural="images",
    wanted="images [C, H, W]",
    fits=lambda shape: len(shape) == 3 and shape[0] > 0,
    pool=("cnn2", "cnn3", "mlp", "gems-resnet11", "resnet10"),
    model="cnn2",
    large_model="gems-resnet56",
    side=lambda shape: min(shape[1:]),
    minimum=" of side {} or more",
    augmentations=("crop", "flip", "crop-flip", "randaugment"),
    changeable="images [1 or 3, H, W]",
    is_changeable=lambda shape: shape[0] in (1, 3),
    changes=_changes,
)
