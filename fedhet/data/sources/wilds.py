"""WILDS' folders of images, a client each hospital or camera: `camelyon17:DIR`, `iwildcam:DIR`.

Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts. DIR has `metadata.csv` and the
images as they are unpacked; those of WILDS' own test part are the common test set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, reason_of
from fedhet.base.seeding import numpy_rng
from fedhet.data.images import decode
from fedhet.data.npz import checked_labels
from fedhet.data.sources.base import Source
from fedhet.data.spec import FIXED_SEED, Dataset, DataSpec, Split, numbered, refuse_more, stratified
from fedhet.kinds import Shape

if TYPE_CHECKING:
    import pandas as pd

TEST_CENTRE = 2
"""The hospital that WILDS tests on, which is no client."""


@dataclass(frozen=True)
class Form:
    """How the metadata of one of WILDS' data sets is written."""

    label: str
    owner: str
    """The column of the hospital, or of the camera."""
    needs: tuple[str, ...]
    """Further columns that are read."""
    part: Callable[[pd.DataFrame], Any]
    """(metadata) -> 1 for each row of the training set, 2 for one of the test set, 0 for others."""
    file: Callable[[pd.DataFrame], list[str]]
    """(metadata) -> the path of each row's image, below DIR."""
    classes: tuple[str, ...] = ()
    """Their names; (): their numbers, up to the highest."""


def read_wilds(place: str, spec: DataSpec, form: Form) -> Dataset:
    """Read DIR. Raises DataError for any fault of its files."""
    root = expanded(place)
    table = _metadata(root / "metadata.csv", spec, form)
    labels = checked_labels(table[form.label].to_numpy(), root / "metadata.csv")
    parts = np.asarray(form.part(table))
    train = _rows(parts == 1, labels, spec.max_samples, spec.seed, "max-samples")
    rest = _rows(parts == 2, labels, spec.max_test_samples, FIXED_SEED, "max-test-samples")
    if not len(train):
        raise DataError(f"{root / 'metadata.csv'}: has no row of the training set")
    files = np.array([str(root / _inside(name, root)) for name in form.file(table)])
    split = _split(files, labels, train, spec)
    like = tuple(split.x.shape[1:])
    classes = form.classes or tuple(map(str, range(int(labels.max()) + 1)))
    return Dataset(
        spec.dataset,
        split,
        _split(files, labels, rest, spec, like) if len(rest) else None,
        classes,
        groups=numbered(table[form.owner].to_numpy()[train]),
    )


def _inside(name: str, root: Path) -> str:
    """Return the path of an image. Raises DataError for one that leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"{root / 'metadata.csv'}: {name!r} is not an image below {root}")
    return name


def _split(files: Any, labels: Any, rows: Any, spec: DataSpec, like: Shape | None = None) -> Split:
    return Split(decode(files[rows].tolist(), spec, like), torch.from_numpy(labels[rows]))


def _rows(chosen: Any, labels: Any, most: int, seed: int, use: str) -> Any:
    """Return the rows that are chosen; of more than `most` of them, a stratified draw."""
    rows = np.flatnonzero(chosen)
    if not 0 < most < len(rows):
        return rows
    return rows[stratified(labels[rows], most, numpy_rng(seed, use))]


def _metadata(path: Path, spec: DataSpec, form: Form) -> pd.DataFrame:
    import pandas as pd

    wanted = [form.label, form.owner, *form.needs]
    try:
        refuse_more(path.stat().st_size, spec, path)
        table = pd.read_csv(path, usecols=wanted, dtype=dict.fromkeys(form.needs, str))
    except DataError:
        raise
    except Exception as error:  # pandas has its own for each fault of a file
        reason = f"{reason_of(error)}; it takes the columns {', '.join(wanted)}"
        raise DataError(f"{path}: cannot be read ({reason})") from error
    if table.isna().any().any():
        raise DataError(f"{path}: a row lacks one of {', '.join(wanted)}")
    return table


def _patches(table: pd.DataFrame) -> list[str]:
    columns = (table[name] for name in ("patient", "node", "x_coord", "y_coord"))
    return [
        f"patches/patient_{patient}_node_{node}/patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png"
        for patient, node, x, y in zip(*columns, strict=True)
    ]


CAMELYON17 = Form(
    "tumor",
    "center",
    ("patient", "node", "x_coord", "y_coord"),
    lambda table: np.where(table["center"] == TEST_CENTRE, 2, 1),
    _patches,
    ("normal", "tumor"),
)
IWILDCAM = Form(
    "y",
    "location_remapped",
    ("split", "filename"),
    lambda table: np.select([table["split"] == "train", table["split"] == "test"], [1, 2], 0),
    lambda table: [f"train/{name}" for name in table["filename"]],
)


def _source(name: str, line: str, form: Form) -> Source:
    return Source(name, line, partial(read_wilds, form=form), "DIR", is_mapped=True)


SOURCES = (
    _source("camelyon17", "WILDS' tissue images, a client each hospital", CAMELYON17),
    _source("iwildcam", "WILDS' animals, a client each camera", IWILDCAM),
)
