"""Images, decoded from files or by Pillow; those of files once, into an array cached on disk.

The decoded array [N, C, H, W] uint8 is a .npy file in FEDHET_CACHE_DIR (or ~/.cache/fedhet), named
by a hash of its sources and opened as a memory map: all processes of a machine share its pages. It
is written under a temporary name, then renamed. It may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, error_reason
from fedhet.data.class_folders import Files
from fedhet.data.spec import DataSpec, check_max_bytes, reading
from fedhet.kinds import Shape

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMAT = 2  # part of the cache key: increase it when decoding changes
_ROWS = 256  # images that one thread decodes at a time
_THREADS = 8
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Pillow's names of the formats that are read, whatever a file's ending is. No others: some run
programs or hold code, such as EPS."""
GRAY_MODES = ("L", "I;16", "I;16L", "I;16B", "I;16N", "I")
"""Modes of images that stay grayscale if all images have one of them."""
_BACKGROUND = 255
"""Transparent pixels are shown on white, as on a page."""
MODES = {1: "L", 3: "RGB"}
"""Pillow's mode of images, by their number of channels."""

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Form:
    """What images are decoded to."""

    mode: str
    """Pillow's: L or RGB."""
    size: tuple[int, int]
    """Width and height."""
    resize: bool
    """Whether images of another size are resized, and not refused."""
    rule: str = "the first image"
    """What has that size, for messages."""
    remedy: str = "set data.image-size to resize all"
    max_bytes: int = 2**31
    """Maximum bytes of the images that are decoded at the same time."""

    @classmethod
    def of(cls, first: tuple[int, int], gray: bool, image_size: int) -> Form:
        """Return the form of images of which one has the size `first` (width, height)."""
        size = (image_size, image_size) if image_size else first
        return cls("L" if gray else "RGB", size, image_size > 0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape [C, H, W] of a decoded image."""
        return (1 if self.mode == "L" else 3, self.size[1], self.size[0])


def pixels_of(image: Image, form: Form, where: str) -> Pixels:
    """Return an image [C, H, W] as viewers show it.

    It is turned as its EXIF data says, and put on white where it is transparent; 16-bit values are
    scaled by their full range; of several frames, the first is read. Color profiles are ignored.
    Raises DataError, which begins with `where`, for an image that does not fit.
    """
    import PIL.Image

    image = upright(image)
    if image.size != form.size and not form.resize:
        raise DataError(
            f"{where} is {image.width} x {image.height} pixels, {form.rule} {form.size[0]} x "
            f"{form.size[1]}; {form.remedy}"
        )
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        kind = "floats" if image.mode == "F" else "signed or 32-bit integers"
        raise DataError(
            f"{where} holds {kind}, whose range is unknown, expected 8 or 16 bits a channel. "
            "Scale it and save it as PNG."
        )
    if image.mode[0] == "I":
        values = np.asarray(image).astype(np.float64)
        image = PIL.Image.fromarray(np.rint(values / 257).clip(0, 255).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        shown = image.convert("RGBA")
        page = PIL.Image.new("RGBA", shown.size, (_BACKGROUND,) * 4)
        image = PIL.Image.alpha_composite(page, shown).convert("RGB")
    converted = image.convert(form.mode)
    resized = converted if converted.size == form.size else converted.resize(form.size)
    pixels = np.asarray(resized)
    return pixels[None] if form.mode == "L" else pixels.transpose(2, 0, 1)


def upright(image: Image) -> Image:
    """Return an image, decoded, and turned as the orientation in its EXIF data says."""
    from PIL import ImageOps

    format = image.format
    image.load()
    turned = ImageOps.exif_transpose(image)
    turned.format = format
    return turned


def decode(files: Sequence[str], spec: DataSpec, like: Shape | None = None) -> Tensor:
    """Return the images [N, C, H, W] uint8, from the cache if possible; else add them to it.

    They are resized to `image_size`, or (0) must all have the size of the first. They become
    grayscale (C = 1) if every file is, else RGB. `like` [C, H, W] sets channels and size instead.
    Raises DataError for a file that is not an image, and if they take more than `data.max-bytes`.
    """
    target = _cache_file(files, spec.image_size, like)
    try:
        pixels = _open(target, len(files))
        if pixels is None:
            from filelock import FileLock

            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{target}.lock"):  # other processes that need the array wait for it
                pixels = _open(target, len(files))
                if pixels is None:
                    _build(target, files, spec, like)
                    pixels = np.load(target, mmap_mode="c", allow_pickle=False)
    except OSError as error:
        raise DataError(
            f"{target.parent}: cannot hold the decoded images ({error_reason(error)}); "
            "name another folder in the environment variable FEDHET_CACHE_DIR"
        ) from error
    return torch.from_numpy(pixels)


def _cache_file(files: Sequence[str], image_size: int, like: Shape | None) -> Path:
    key = hashlib.blake2b(repr((_FORMAT, image_size, like)).encode(), digest_size=16)
    resolve = cache(os.path.realpath)  # once per folder: a tree may hold a million files
    for path in files:
        folder, name = os.path.split(path)
        with reading(path, "image"):
            stat = os.stat(path)
        line = f"{resolve(folder)}/{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        key.update(os.fsencode(line))
    home = os.environ.get("FEDHET_CACHE_DIR") or "~/.cache/fedhet"
    remedy = "name a directory in the environment variable FEDHET_CACHE_DIR"
    return expanded(home, remedy) / f"images-{key.hexdigest()}.npy"


def _open(target: Path, count: int) -> Pixels | None:
    """Map the cached array, or return None if it is absent or incomplete.

    Mapped copy-on-write: torch accepts it without a warning, and writes never reach the file.
    """
    try:
        pixels = np.load(target, mmap_mode="c", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    whole = pixels.dtype == np.uint8 and pixels.ndim == 4 and len(pixels) == count
    return pixels if whole else None


def _build(target: Path, files: Sequence[str], spec: DataSpec, like: Shape | None) -> None:
    """Decode `files`, in their order, into the .npy file `target`."""
    if like is not None:
        channels, height, width = like
        form = Form(MODES[channels], (width, height), spec.image_size > 0)
    else:
        with opened(files[0]) as first:
            size = first.size if spec.image_size else upright(first).size
        form = Form.of(size, all(map(_is_gray, files)), spec.image_size)
    form = replace(form, max_bytes=spec.max_bytes)
    check_max_bytes(len(files) * prod(form.shape), spec, Path(files[0]).parents[1])
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".tmp", delete=False) as file:
        try:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(files), *form.shape)}
            np.lib.format.write_array_header_1_0(file, header)
            for pixels in decoded(files, form):
                file.write(pixels.tobytes())
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def open_image(source: str | IO[bytes]) -> Image:
    """Open an image of one of the FORMATS (reads the header, not the pixels)."""
    import PIL.Image

    PIL.Image.init()  # Pillow has some formats only if their libraries were there to build it
    return PIL.Image.open(source, formats=[each for each in FORMATS if each in PIL.Image.OPEN])


@contextmanager
def opened(path: str) -> Iterator[Image]:
    """Open an image file. Raises DataError for any fault while it is read in the block."""
    with reading(path, "image"), open_image(path) as image:
        yield image


def _is_gray(path: str) -> bool:
    with opened(path) as image:
        return image.mode in GRAY_MODES


def decoded(files: Sequence[str], form: Form) -> Iterator[Pixels]:
    """Yield image files, decoded, in blocks [at most _ROWS, C, H, W], in the order of `files`.

    Raises DataError for a file that is not an image, or does not fit the form.
    """
    blocks = [files[start : start + _ROWS] for start in range(0, len(files), _ROWS)]

    def pixels(path: str) -> Pixels:
        with opened(path) as image:
            takes = 4 * _THREADS * image.width * image.height
            if takes > form.max_bytes:  # whatever size it is resized to
                raise DataError(
                    f"{path}: is {image.width} x {image.height} pixels, which take {takes} bytes "
                    f"while {_THREADS} are decoded, 'data.max-bytes' allows {form.max_bytes}"
                )
            return pixels_of(image, form, f"{path}:")

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        yield from pool.map(lambda block: np.stack([pixels(path) for path in block]), blocks)


IMAGES = Files(
    "images",
    (
        ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".bmp", ".dib", ".webp", ".tif",
        ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k",
    ),
    decode,
    "image",
)  # fmt: skip
"""Files of images, by the endings that users and viewers take for images."""
