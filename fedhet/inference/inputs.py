"""Samples to predict: files of images or texts, folders of them, npz files and arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.client_runtime.record import ClientRecord
from fedhet.data import DataSpec
from fedhet.data.folder import decoded
from fedhet.data.texts import read_files
from fedhet.data.tokens import tokenized
from fedhet.devices import scaled
from fedhet.errors import DataError
from fedhet.kinds import TEXT, kind_of
from fedhet.runs.units import natural

MODES = {1: "L", 3: "RGB"}
"""Pillow's mode of images with so many channels."""
ROUNDING = 1e-3
"""By how much a scaled pixel may be outside -1 to 1."""


def read_inputs(
    paths: Sequence[Path], record: ClientRecord, *, resize: bool = False
) -> tuple[list[str], Tensor]:
    """Return a name for each sample, and the samples [N, *shape], scaled as in training.

    `paths` are image files and folders of them, or one .npz file with an array `x`; of a client
    with texts, .txt files and folders of them. Images get the client's channels; those of another
    size are resized if `resize` is set, or if the client's own were (`data.image-size`). Raises
    DataError, which names the file.
    """
    if _is_text(record):
        texts = [file for path in paths for file in _files_in(path, (".txt",))]
        if not texts:
            raise DataError(f"{', '.join(map(str, paths)) or 'nothing given'}: holds no .txt files")
        return list(map(str, texts)), read_files(list(map(str, texts)), _spec(record))
    arrays = [path for path in paths if path.suffix == ".npz"]
    if arrays and len(paths) > 1:
        raise DataError(f"{arrays[0]}: is one file of all samples; give it alone")
    if arrays:
        x = samples_for(record, _array(arrays[0]), str(arrays[0]))
        return [str(row) for row in range(len(x))], x
    files = [file for path in paths for file in _images_in(path)]
    if not files:
        raise DataError(f"{', '.join(map(str, paths)) or 'nothing given'}: holds no images")
    resize = resize or bool(record.settings.get("data.image-size"))
    return list(map(str, files)), samples_for(record, _pixels(files, record, resize), str(files[0]))


def samples_for(record: ClientRecord, x: Any, where: str = "x") -> Tensor:
    """Return samples as the client's models take them: float32 [N, *shape], or tokens of texts.

    Bytes (uint8) are scaled as the client's own images were; floats are taken as scaled already;
    texts are a sequence of str. Raises DataError, which names `where`, for another shape, or a
    range that cannot be meant.
    """
    if _is_text(record):
        if isinstance(x, str) or not all(isinstance(text, str) for text in x):
            raise DataError(f"{where}: {record.client}'s model takes texts, a sequence of str")
        return tokenized(list(x), _spec(record), where)
    values = kind_of(tuple(record.shape)).checked(np.asarray(x), where)
    if list(values.shape[1:]) != record.shape:
        raise DataError(
            f"{where}: has samples of shape {list(values.shape[1:])}, {record.client}'s model "
            f"takes {record.shape}"
        )
    as_bytes = values.dtype == np.uint8
    if as_bytes and record.stored == "given":
        raise DataError(
            f"{where}: holds bytes, but {record.client} was trained on numbers as they were given: "
            "give float32 in the range of its own samples"
        )
    if not as_bytes and record.stored != "given" and np.abs(values).max(initial=0) > 1 + ROUNDING:
        raise DataError(
            f"{where}: holds {values.flat[np.abs(values).argmax()]:g}, but images are bytes "
            "(uint8), or floats already scaled to -1 to 1"
        )
    return scaled(torch.from_numpy(values))


def _array(path: Path) -> Any:
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["x"]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: must be an .npz file with an array x ({error})") from error


def _is_text(record: ClientRecord) -> bool:
    return TEXT.fits(tuple(record.shape))


def _spec(record: ClientRecord) -> DataSpec:
    """Return the settings by which the client's texts became tokens."""
    return DataSpec.of(record.config().run)


def _images_in(path: Path) -> list[Path]:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return _files_in(path, IMG_EXTENSIONS)


def _files_in(path: Path, endings: Sequence[str]) -> list[Path]:
    """Return a file itself, or those with the endings anywhere in a folder, in natural order."""
    if not path.is_dir():
        return [path]
    found = (file for file in path.rglob("*") if file.suffix.lower() in endings)
    return sorted(found, key=lambda file: natural(str(file)))


def _pixels(files: Sequence[Path], record: ClientRecord, resize: bool) -> Any:
    """Return images [N, C, H, W] of bytes in the client's form."""
    if len(record.shape) != 3 or record.shape[0] not in MODES:
        raise DataError(
            f"{files[0]}: {record.client}'s model takes samples of shape {record.shape}, which "
            "images cannot give; give an .npz file with an array x"
        )
    channels, height, width = record.shape
    if not resize:
        _refuse_sizes(files, (width, height), record)
    names = [str(file) for file in files]
    return np.concatenate(list(decoded(names, MODES[channels], (width, height), resize)))


def _refuse_sizes(files: Sequence[Path], size: tuple[int, int], record: ClientRecord) -> None:
    """Raise DataError for the first image that is not of `size` (width, height)."""
    import PIL.Image

    for file in files:
        try:
            with PIL.Image.open(file) as image:
                found = image.size
        except Exception as error:  # every format of Pillow's has its own
            raise DataError(f"{file}: not a readable image ({error})") from error
        if found != size:
            raise DataError(
                f"{file}: is {found[0]} x {found[1]} pixels, {record.client}'s model takes "
                f"{size[0]} x {size[1]}; --resize resizes it"
            )
