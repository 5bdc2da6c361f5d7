"""Source `imagefolder:PATH`: decoding with Pillow, and an on-disk cache of decoded image files.

The cache stores arrays [N, C, H, W] uint8 as .npy files in FEDHET_CACHE_DIR (or ~/.cache/fedhet),
named by a hash of their sources. The files are memory-mapped, so all processes on a machine share
one copy. They are written under a temporary name and then renamed, and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedhet.base.disk import expanded, map_npy
from fedhet.base.errors import DataError, error_reason
from fedhet.data.dataset import Source
from fedhet.data.folders import Files, read_folder
from fedhet.data.spec import DataSpec, check_max_bytes, reading
from fedhet.kinds import IMAGE, Shape

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMAT = 3
"""Version of the decoder, which is part of the cache key; increase it when decoding changes."""
_ROWS = 256
"""Number of images that a thread decodes at a time."""
_THREADS = 8
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Pillow names of the supported formats, which are detected regardless of the file extension. Other
formats are rejected, because decoding a format such as EPS can run code."""
GRAY_MODES = ("L", "I;16", "I;16L", "I;16B", "I;16N", "I")
"""Pillow modes of grayscale images."""
_PHOTOMETRIC = 262
"""TIFF tag that is 0 if the value 0 is white."""
_BACKGROUND = 255
"""White, the background of transparent pixels."""
MODES = {1: "L", 3: "RGB"}
"""Pillow modes, by number of channels."""

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Form:
    """Target format of decoded images."""

    mode: str
    """Pillow mode, "L" or "RGB"."""
    size: tuple[int, int]
    """Width and height."""
    resize: bool
    """Whether to resize images of another size instead of raising an error."""
    rule: str = "the size of the first image"
    """Description of `size`, for messages."""
    remedy: str = "Set data.image-size to resize all images."
    max_bytes: int = 2**31
    """Maximum memory of the images decoded at the same time, in bytes."""

    @classmethod
    def from_first(cls, first: tuple[int, int], gray: bool, image_size: int) -> Form:
        """Return the format with side length `image_size` or, if it is 0, with the size `first`."""
        size = (image_size, image_size) if image_size else first
        return cls("L" if gray else "RGB", size, image_size > 0)

    @classmethod
    def of_images(cls, images: Callable[[], Iterable[Image]], image_size: int = 0) -> Form:
        """Return the format of several images, which are RGB unless all of them are grayscale."""
        gray = all(image.mode in ("1", *GRAY_MODES) for image in images())
        return cls.from_first(apply_orientation(next(iter(images()))).size, gray, image_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape [C, H, W] of a decoded image."""
        return (1 if self.mode == "L" else 3, self.size[1], self.size[0])


def to_pixels(image: Image, form: Form, where: str) -> Pixels:
    """Convert an image, as displayed by image viewers, to a uint8 array [C, H, W].

    Applies the EXIF orientation, adds a white background to transparent images, scales 16-bit
    values by their full range, and reads only the first frame. Color profiles are ignored. Raises
    DataError, prefixed with `where`, for an unsupported image or size.
    """
    import PIL.Image

    # Pillow inverts 8-bit but not 16-bit TIFF images in which 0 is white.
    zero_is_white = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0
    image = apply_orientation(image)
    if image.size != form.size and not form.resize:
        raise DataError(
            f"{where} expected {form.size[0]} x {form.size[1]} pixels, {form.rule}, got "
            f"{image.width} x {image.height}. {form.remedy}"
        )
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        kind = "floats" if image.mode == "F" else "signed or 32-bit integers"
        raise DataError(
            f"{where} expected 8 or 16 bits per channel, got {kind}, whose range is unknown. "
            "Scale the image and save it as PNG."
        )
    if image.mode[0] == "I":
        values = np.asarray(image).astype(np.float64)
        values = 65535 - values if zero_is_white else values
        image = PIL.Image.fromarray(np.rint(values / 257).clip(0, 255).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        foreground = image.convert("RGBA")
        background = PIL.Image.new("RGBA", foreground.size, (_BACKGROUND,) * 4)
        image = PIL.Image.alpha_composite(background, foreground).convert("RGB")
    converted = image.convert(form.mode)
    resized = converted if converted.size == form.size else converted.resize(form.size)
    pixels = np.asarray(resized)
    return pixels[None] if form.mode == "L" else pixels.transpose(2, 0, 1)


def apply_orientation(image: Image) -> Image:
    """Decode an image and apply its EXIF orientation."""
    from PIL import ImageOps

    format = image.format
    image.load()
    turned = ImageOps.exif_transpose(image)
    turned.format = format
    return turned


def decode(files: Sequence[str], spec: DataSpec, like: Shape | None = None) -> Tensor:
    """Decode image files to a uint8 array [N, C, H, W], using the cache.

    Args:
        files: Paths of the images.
        spec: Data settings. If `image_size` is 0, all images must have the same size.
        like: Required shape [C, H, W] of each image. If it is None, the size is `image_size` or the
            size of the first image, and the images are RGB unless all files are grayscale.

    Raises:
        DataError: If a file is not a valid image, or if the images exceed `data.max-bytes`.
    """
    target = _cache_file(files, spec.image_size, like)
    try:
        pixels = _open(target, len(files))
        if pixels is None:
            from filelock import FileLock

            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{target}.lock"):  # Other processes wait until the array is complete.
                pixels = _open(target, len(files))
                if pixels is None:
                    _build(target, files, spec, like)
                    pixels = map_npy(target)
    except OSError as error:
        raise DataError(
            f"{target.parent}: cannot store the decoded images ({error_reason(error)}). "
            "Set the environment variable FEDHET_CACHE_DIR to another directory."
        ) from error
    return torch.from_numpy(pixels)


def _cache_file(files: Sequence[str], image_size: int, like: Shape | None) -> Path:
    key = hashlib.blake2b(repr((_FORMAT, image_size, like)).encode(), digest_size=16)
    # Resolve each directory only once, because a tree may contain a million files.
    resolve = cache(os.path.realpath)
    for path in files:
        directory, name = os.path.split(path)
        with reading(path, "image"):
            stat = os.stat(path)
        line = f"{resolve(directory)}/{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        key.update(os.fsencode(line))
    home = os.environ.get("FEDHET_CACHE_DIR") or "~/.cache/fedhet"
    remedy = "set the environment variable FEDHET_CACHE_DIR to a directory"
    return expanded(home, remedy) / f"images-{key.hexdigest()}.npy"


def _open(target: Path, count: int) -> Pixels | None:
    """Map the cached array into memory, or return None if it is missing or incomplete."""
    try:
        pixels = map_npy(target)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    is_complete = pixels.dtype == np.uint8 and pixels.ndim == 4 and len(pixels) == count
    return pixels if is_complete else None


def _build(target: Path, files: Sequence[str], spec: DataSpec, like: Shape | None) -> None:
    """Decode `files`, in order, to the .npy file `target`."""
    if like is not None:
        channels, height, width = like
        form = Form(MODES[channels], (width, height), spec.image_size > 0)
    else:
        with open_checked(files[0]) as first:
            size = first.size if spec.image_size else apply_orientation(first).size
        form = Form.from_first(size, all(map(_is_gray, files)), spec.image_size)
    form = replace(form, max_bytes=spec.max_bytes)
    check_max_bytes(len(files) * prod(form.shape), spec, f"{files[0]} and the other images")
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".tmp", delete=False) as file:
        try:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(files), *form.shape)}
            np.lib.format.write_array_header_1_0(file, header)
            for pixels in decode_blocks(files, form):
                file.write(pixels.tobytes())
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def open_image(source: str | IO[bytes]) -> Image:
    """Open an image in one of the `FORMATS`, reading only its header."""
    import PIL.Image

    PIL.Image.init()  # Some formats are missing if Pillow was built without their libraries.
    image = PIL.Image.open(source, formats=[each for each in FORMATS if each in PIL.Image.OPEN])
    # Pillow maps an uncompressed TIFF with a name into memory, in the wrong shape if it is rotated.
    image.filename = ""
    return image


@contextmanager
def open_checked(path: str) -> Iterator[Image]:
    """Open an image file, and convert all exceptions raised in the block to DataError."""
    with reading(path, "image"), open_image(path) as image:
        yield image


def _is_gray(path: str) -> bool:
    with open_checked(path) as image:
        return image.mode in GRAY_MODES


def decode_blocks(files: Sequence[str], form: Form) -> Iterator[Pixels]:
    """Decode image files in order, and yield blocks of up to _ROWS images [N, C, H, W].

    Raises DataError for a file that is not an image or does not match the format.
    """
    blocks = [files[start : start + _ROWS] for start in range(0, len(files), _ROWS)]

    def pixels(path: str) -> Pixels:
        with open_checked(path) as image:
            needed = 4 * _THREADS * image.width * image.height
            # Check the original size, because an image is decoded completely before it is resized.
            if needed > form.max_bytes:
                raise DataError(
                    f"{path}: expected at most data.max-bytes = {form.max_bytes} bytes in memory, "
                    f"got {needed} to decode {_THREADS} images of {image.width} x {image.height} "
                    "pixels"
                )
            return to_pixels(image, form, f"{path}:")

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        yield from pool.map(lambda block: np.stack([pixels(path) for path in block]), blocks)


IMAGES = Files(
    "images",
    (
        ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".bmp", ".dib", ".webp", ".tif",
        ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k",
    ),
    decode,
    IMAGE,
)  # fmt: skip
"""File type of images, with the common file extensions."""

SOURCES = (
    Source(
        "imagefolder",
        "images: PATH[/train|/test]/CLASS/FILE, or with a label table (labels.csv)",
        partial(read_folder, files=IMAGES),
        "PATH",
        is_mapped=True,
        owners="imagefolder:PATH",
    ),
)
