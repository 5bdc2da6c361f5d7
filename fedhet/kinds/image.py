"""Images [C, H, W]."""

from __future__ import annotations

from collections.abc import Mapping

from fedhet.kinds.base import Change, Kind, Shape


class Image(Kind):
    """An image, float32 in [-1, 1], or bytes that become that."""

    name, plural, data = "image", "images", "images"
    wanted = "images [C, H, W]"
    pool = "cnn2,cnn3,mlp,gems-resnet11,resnet10"
    model, large_model = "cnn2", "gems-resnet56"
    augmentations = ("crop", "flip", "crop-flip", "randaugment")
    changeable, semi = "images [1 or 3, H, W]", True

    def fits(self, shape: Shape) -> bool:
        """Tell whether a sample of `shape` is an image."""
        return len(shape) == 3 and shape[0] > 0

    def side(self, shape: Shape) -> int:
        """Return the shorter side."""
        return min(shape[1:])

    def minimum(self, side: int) -> str:
        """Return the words for images with a minimum side."""
        return f"{self.wanted} of side {side} or more"

    def is_changeable(self, shape: Shape) -> bool:
        """Tell whether images have one or three channels."""
        return self.fits(shape) and shape[0] in (1, 3)

    def changes(self) -> Mapping[str, Change]:
        """Return the changes of images."""
        from fedhet.kinds.image_changes import CHANGES

        return CHANGES
