"""Folders of image files, one folder per class, decoded once into an array cached on disk.

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
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedhet.data.spec import Dataset, DataSpec, Split, refuse_more, stratified
from fedhet.errors import DataError, nearest
from fedhet.seeding import numpy_rng

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMAT = 1  # part of the cache key: increase it when decoding changes
_ROWS = 256  # images that one thread decodes at a time
_CHANNELS = {"L": 1, "RGB": 3}
_OTHER_PART = {"train": "test", "test": "train"}

TREE = "imagefolder"
"""The datasets whose decoded images lie in a cache of their own, which every process maps."""
UNLABELLED = "unlabelled"
"""A site's folder for images without a class, next to its class folders."""

Pixels = npt.NDArray[np.uint8]


def read_tree(path: str, spec: DataSpec) -> Dataset:
    """Read PATH/train/<class>/* and PATH/test/<class>/*, or PATH/<class>/* with no test set."""
    train_root, test_root = parts(Path(path).expanduser())
    for root in filter(None, (train_root, test_root)):
        refuse_unlabelled(
            root,
            "only a site's own training images may lack a class; of shared data "
            "'data.labelled-alpha' hides labels",
        )
    classes = class_folders(train_root)
    files, labels = listing(train_root, classes)
    if 0 < spec.max_samples < len(files):
        rows = stratified(labels, spec.max_samples, numpy_rng(spec.seed, "max-samples"))
        files, labels = [files[row] for row in rows], labels[rows]
    train = Split(decode(files, spec), torch.from_numpy(labels))
    test = None
    if test_root is not None:
        files, labels = listing(test_root, classes)
        x = decode(files, spec, like=tuple(train.x.shape[1:]))
        test = Split(x, torch.from_numpy(labels))
    return Dataset(spec.dataset, train, test, classes)


def parts(root: Path) -> tuple[Path, Path | None]:
    """Return the folders of the training images and of the test images (or None) below `root`."""
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    if not (root / "train").is_dir():
        return root, None
    return root / "train", root / "test" if (root / "test").is_dir() else None


def class_folders(root: Path) -> tuple[str, ...]:
    """Return the names of the folders in `root`, sorted: the classes, in the order of labels.

    The folder UNLABELLED is not a class.
    """
    folders = (entry.name for entry in os.scandir(root) if entry.is_dir())
    classes = tuple(sorted(name for name in folders if name != UNLABELLED))
    if not classes:
        raise DataError(f"{root}: has no folders; expected one folder of files for each class")
    for name in classes:
        if not name.isprintable():  # nor are bytes that are no UTF-8, which Python escapes
            raise DataError(
                f"{root / name}: a folder names its class, in printable characters of UTF-8"
            )
    return classes


def listing(
    root: Path, classes: Sequence[str], endings: tuple[str, ...] = ()
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """List the files of `root`'s class folders: their paths, and their labels [N].

    Files are images or, with `endings`, those whose name has one. A folder that is not a class or
    has no such file is an error; a class without a folder is not.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    found = class_folders(root)
    for name in found:
        if name not in classes:
            close = nearest(name, classes)
            raise DataError(f"{root / name}: not a class of the training set{close}")
    labels = {name: label for label, name in enumerate(classes) if name in found}
    refuse_links_back(root, found)
    try:
        pairs = make_dataset(str(root), labels, extensions=endings or IMG_EXTENSIONS)
    except FileNotFoundError as error:
        raise DataError(f"{root}: {error}") from error
    return [path for path, _ in pairs], np.array([label for _, label in pairs], dtype=np.int64)


def refuse_links_back(root: Path, folders: Sequence[str]) -> None:
    """Raise DataError if a link among `root`'s folders leads back to the data.

    Links to folders elsewhere are followed, but one to a folder above `root`, to one that another
    folder or link has reached, or to the other part (train, test) would give images a second label.
    """
    here = Path(os.path.realpath(root))
    other = Path(os.path.realpath(root.parent / _OTHER_PART.get(root.name, root.name)))
    seen: dict[Path, str] = {}
    for name in folders:
        for folder, _, _ in os.walk(root / name, followlinks=True):
            real = Path(os.path.realpath(folder))
            again = seen.setdefault(real, folder) != folder
            elsewhere = other != here and real.is_relative_to(other)
            if again or elsewhere or here.is_relative_to(real):
                raise DataError(
                    f"{folder}: is a link to {real}, whose images are in the data already"
                )


def unlabelled_files(root: Path, endings: tuple[str, ...] = ()) -> list[str]:
    """List the files of `root`'s folder UNLABELLED, sorted, as `listing` does; empty if none."""
    if not (root / UNLABELLED).is_dir():
        return []
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    refuse_links_back(root, [*class_folders(root), UNLABELLED])
    kinds = endings or IMG_EXTENSIONS
    found = make_dataset(str(root), {UNLABELLED: 0}, extensions=kinds, allow_empty=True)
    return [path for path, _ in found]


def refuse_unlabelled(root: Path, rule: str) -> None:
    """Raise DataError with `rule` if `root` has a folder UNLABELLED."""
    if (root / UNLABELLED).is_dir():
        raise DataError(f"{root / UNLABELLED}: is not allowed here: {rule}")


def decode(files: Sequence[str], spec: DataSpec, like: tuple[int, ...] | None = None) -> Tensor:
    """Return the images [N, C, H, W] uint8, from the cache if possible; else add them to it.

    They are resized to `image_size`, or (0) must all have the size of the first. They become
    greyscale (C = 1) if every file is, else RGB. `like` (C, H, W) sets channels and size instead.
    Raises DataError for a file that is no image, and if they take more than `data.max-bytes`.
    """
    target = _cache_file(files, spec.image_size, like)
    try:
        cached = _open(target, len(files))
        if cached is None:
            cached = _build(target, files, spec, like)
    except OSError as error:
        raise DataError(
            f"{target.parent}: cannot hold the decoded images ({error}); "
            "name another folder in the environment variable FEDHET_CACHE_DIR"
        ) from error
    return torch.from_numpy(cached)


def _cache_file(files: Sequence[str], image_size: int, like: tuple[int, ...] | None) -> Path:
    key = hashlib.blake2b(repr((_FORMAT, image_size, like)).encode(), digest_size=16)
    resolve = cache(os.path.realpath)  # once per folder: a tree may hold a million files
    for path in files:
        folder, name = os.path.split(path)
        try:
            stat = os.stat(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        line = f"{resolve(folder)}/{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        key.update(os.fsencode(line))
    home = os.environ.get("FEDHET_CACHE_DIR") or "~/.cache/fedhet"
    return Path(home).expanduser() / f"images-{key.hexdigest()}.npy"


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


def _build(
    target: Path, files: Sequence[str], spec: DataSpec, like: tuple[int, ...] | None
) -> Pixels:
    """Decode into `target`; other processes that need the same array wait and then use it."""
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        cached = _open(target, len(files))
        if cached is not None:
            return cached
        mode, size = _form(files, spec.image_size, like)
        taken = len(files) * _CHANNELS[mode] * size[0] * size[1]
        refuse_more(taken, spec, Path(files[0]).parents[1])
        with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".tmp", delete=False) as file:
            try:
                _write(file, files, mode, size, resize=spec.image_size > 0)
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    return np.load(target, mmap_mode="c", allow_pickle=False)  # type: ignore[no-any-return]


def _form(
    files: Sequence[str], image_size: int, like: tuple[int, ...] | None
) -> tuple[str, tuple[int, int]]:
    """Return the mode and the (width, height) of the decoded images."""
    if like is not None:
        channels, height, width = like
        return ("L" if channels == 1 else "RGB"), (width, height)
    with _image(files[0]) as first:
        size = (image_size, image_size) if image_size else first.size
    return ("L" if all(map(_is_grey, files)) else "RGB"), size


def _is_grey(path: str) -> bool:
    with _image(path) as image:
        return image.mode == "L"


def _image(path: str) -> Image:
    """Open an image file (reads the header, not the pixels)."""
    import PIL.Image

    try:
        return PIL.Image.open(path)
    except Exception as error:  # every format of Pillow's has its own
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"{path}: not a readable image ({error})")


def _write(
    file: IO[bytes], files: Sequence[str], mode: str, size: tuple[int, int], resize: bool
) -> None:
    """Write the .npy file of all `files`, decoded by a few threads, in the order of `files`."""
    shape = (len(files), _CHANNELS[mode], size[1], size[0])
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for pixels in decoded(files, mode, size, resize):
        file.write(pixels.tobytes())
    file.flush()
    os.fsync(file.fileno())


def decoded(
    files: Sequence[str], mode: str, size: tuple[int, int], resize: bool
) -> Iterator[Pixels]:
    """Yield image files, decoded, in blocks [at most _ROWS, C, H, W], in the order of `files`.

    `mode` is "L" or "RGB", `size` (width, height). Raises DataError for a file that is no image or,
    unless they are resized, of another size.
    """
    blocks = [files[start : start + _ROWS] for start in range(0, len(files), _ROWS)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(
            lambda block: np.stack([_pixels(path, mode, size, resize) for path in block]), blocks
        )


def _pixels(path: str, mode: str, size: tuple[int, int], resize: bool) -> Pixels:
    """Decode one file into [C, H, W]."""
    with _image(path) as image:
        if image.mode[0] in "IF":
            raise DataError(f"{path}: has more than 8 bits a channel ({image.mode}); convert it")
        if not resize and image.size != size:
            raise DataError(
                f"{path}: is {image.width} x {image.height} pixels, the first image "
                f"{size[0]} x {size[1]}; set data.image-size to resize all"
            )
        try:
            image = image.convert(mode)
        except Exception as error:  # as in `_image`
            raise _unreadable(path, error) from error
        pixels = np.asarray(image.resize(size) if resize and image.size != size else image)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
