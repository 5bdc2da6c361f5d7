"""Samples to predict: files of images or texts, folders of them, npz files and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.base.errors import DataError
from fedhet.client_runtime.samples import ClientRecord
from fedhet.data.cells import read_table
from fedhet.data.class_folders import Files, Scan
from fedhet.data.images import IMAGES, MODES, Form, decoded
from fedhet.data.sources.files import read_arrays
from fedhet.data.spec import DataSpec, refuse_more
from fedhet.data.tables import TableSchema, encode
from fedhet.data.texts import TEXTS, tokenized
from fedhet.kinds import IMAGE, KINDS, TEXT
from fedhet.learning.devices import scaled
from fedhet.runs.units import natural

ROUNDING = 1e-3
"""By how much a scaled pixel may be outside -1 to 1."""
MOST_BYTES = 2**29
"""Bytes of samples, as the model takes them, that are read at once."""
_AS_FLOAT = 4


def read_inputs(
    paths: Sequence[Path], record: ClientRecord, *, resize: bool = False, most: int = MOST_BYTES
) -> tuple[list[str], Tensor]:
    """Return a name for each sample, and the samples [N, *shape], scaled as in training.

    `paths` are image files and directories of them, or one .npz file with an array `x`; for a
    client with texts, text files and directories of them. Images get the client's channels; those
    of another size are resized if `resize` is set, or if the client's own were
    (`data.image-size`). Raises DataError, which names the file, also if the samples take more than
    `most` bytes. The settings of the run may be somebody else's, so their `data.max-bytes` does
    not count.
    """
    bounds = _spec(record).but(max_bytes=most)
    if record.kind == TEXT.name:
        texts = _files_in(paths, TEXTS)
        return texts, TEXTS.read(texts, bounds, None)
    if record.table is not None and not any(path.suffix == ".npz" for path in paths):
        return _table_rows(paths, record.table, bounds)
    arrays = [path for path in paths if path.suffix == ".npz"]
    if arrays and len(paths) > 1:
        raise DataError(f"{arrays[0]}: is one file of all samples; give it alone")
    if arrays:
        _refuse_irregular(arrays[0])
        found = read_arrays(arrays[0], ("x",), bounds, scaled=True)["x"]
        x = samples_for(record, found, str(arrays[0]))
        return [str(row) for row in range(len(x))], x
    files = _files_in(paths, IMAGES)
    form = _form(record, resize or bool(record.settings.get("data.image-size")), files[0])
    refuse_more(_AS_FLOAT * len(files) * prod(form.shape), bounds, f"{files[0]} and the others")
    return files, samples_for(record, np.concatenate(list(decoded(files, form))), files[0])


def samples_for(record: ClientRecord, x: Any, where: str = "x") -> Tensor:
    """Return samples as the client's models take them: float32 [N, *shape], or tokens of texts.

    Bytes (uint8) are scaled as the client's own images were; floats are taken as scaled already;
    texts are a sequence of str. Raises DataError, which names `where`, for another shape, or a
    range that cannot be meant.
    """
    if record.kind == TEXT.name:
        if isinstance(x, str) or not all(isinstance(text, str) for text in x):
            raise DataError(f"{where}: {record.client}'s model takes texts, a sequence of str")
        return tokenized(list(x), _spec(record), where)
    shape = tuple(record.shape)
    kind = KINDS[record.kind]
    values, wanted = kind.checked(np.asarray(x), where), kind.blank(1, shape).shape[1:]
    if values.shape[1:] != wanted:
        raise DataError(
            f"{where}: has samples of shape {list(values.shape[1:])}, {record.client}'s model "
            f"takes {list(wanted)}"
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


def _table_rows(
    paths: Sequence[Path], schema: TableSchema, bounds: DataSpec
) -> tuple[list[str], Tensor]:
    """Return the lines of a table's file as names, and its rows as features."""
    if len(paths) > 1:
        raise DataError(f"{paths[1]}: give one table alone")
    _refuse_irregular(paths[0])
    cells = read_table(paths[0], bounds)
    return [f"line {line}" for line in cells.lines], encode(schema, cells)


def _spec(record: ClientRecord) -> DataSpec:
    """Return the settings by which the client's texts became tokens."""
    return DataSpec.of(record.config().run)


def _files_in(paths: Sequence[Path], files: Files) -> list[str]:
    """Return files, and the samples anywhere in directories, in natural order.

    Files of directories that are not used are counted in one line of the log; symlinks to
    directories are not followed. Raises DataError if there are no samples.
    """
    found: list[str] = []
    for path in paths:
        if not path.is_dir():
            found.append(str(path))
            continue
        folder = Scan(files, follow=False).read(path)
        found += sorted(folder.samples(), key=natural)
        folder.all_unused().report(path, files)
    for file in found:
        _refuse_irregular(Path(file))
    if not found:
        given = ", ".join(map(str, paths)) or "nothing given"
        raise DataError(f"{given}: holds no {files.noun}")
    return found


def _refuse_irregular(path: Path) -> None:
    """Raise DataError for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file")


def _form(record: ClientRecord, resize: bool, first: str) -> Form:
    """Return the form of the client's images. Raises DataError if it has none."""
    if record.kind != IMAGE.name or record.shape[0] not in MODES:
        raise DataError(
            f"{first}: {record.client}'s model takes samples of shape {record.shape}, which "
            "images cannot give; give an .npz file with an array x"
        )
    channels, height, width = record.shape
    rule = f"{record.client}'s model takes"
    return Form(MODES[channels], (width, height), resize, rule, "--resize resizes it")
