"""Trees of files, one folder for each class: images, or texts.

PATH/train/<class>/* and PATH/test/<class>/*, or PATH/<class>/* without a test set. A site's tree
may also have PATH/train/unlabelled/*, files without a class.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhet.data.spec import Dataset, DataSpec, Index, Split, stratified
from fedhet.disk.folder import expanded
from fedhet.errors import DataError, nearest
from fedhet.kinds import Shape
from fedhet.seeding import numpy_rng

_OTHER_PART = {"train": "test", "test": "train"}
UNLABELLED = "unlabelled"
"""A site's folder for files without a class, next to its class folders."""


@dataclass(frozen=True)
class Files:
    """How files that hold a sample each are read."""

    noun: str
    """What the files are called in messages."""
    endings: tuple[str, ...]
    """How their names end."""
    read: Callable[[Sequence[str], DataSpec, Shape | None], Tensor]
    """(paths, settings, shape that the samples must have or None) -> samples [N, ...]."""


def read_tree(place: str, spec: DataSpec, files: Files) -> Dataset:
    """Read a tree as a dataset. Raises DataError for any fault of its folders and files."""
    train_root, test_root = parts(expanded(place))
    for root in filter(None, (train_root, test_root)):
        refuse_unlabelled(
            root,
            f"only a site's own training {files.noun} may lack a class; of shared data "
            "'data.labelled-alpha' hides labels",
        )
    classes = class_folders(train_root)
    train = read_folder(train_root, classes, spec, files, most=spec.max_samples)
    form = tuple(train.x.shape[1:])
    test = read_folder(test_root, classes, spec, files, form) if test_root is not None else None
    return Dataset(spec.dataset, train, test, classes)


def read_folder(
    root: Path,
    classes: Sequence[str],
    spec: DataSpec,
    files: Files,
    like: Shape | None = None,
    most: int = 0,
) -> Split:
    """Read the files <class>/* below `root`; those that `data.max-samples` draws, if `most`."""
    paths, labels = listing(root, classes, files.endings)
    if 0 < most < len(paths):
        rows = stratified(labels, most, numpy_rng(spec.seed, "max-samples"))
        paths, labels = [paths[row] for row in rows], labels[rows]
    return Split(files.read(paths, spec, like), torch.from_numpy(labels))


def parts(root: Path) -> tuple[Path, Path | None]:
    """Return the folders of the training and of the test files (or None) below `root`."""
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
    root: Path, classes: Sequence[str], endings: tuple[str, ...]
) -> tuple[list[str], Index]:
    """List the files of `root`'s class folders: their paths, and their labels [N].

    A folder that is not a class, or has no file with one of the endings, is an error; a class
    without a folder is not.
    """
    from torchvision.datasets.folder import make_dataset

    found = class_folders(root)
    for name in found:
        if name not in classes:
            close = nearest(name, classes)
            raise DataError(f"{root / name}: not a class of the training set{close}")
    labels = {name: label for label, name in enumerate(classes) if name in found}
    refuse_links_back(root, found)
    try:
        pairs = make_dataset(str(root), labels, extensions=endings)
    except FileNotFoundError as error:
        raise DataError(f"{root}: {error}") from error
    return [path for path, _ in pairs], np.array([label for _, label in pairs], dtype=np.int64)


def refuse_links_back(root: Path, folders: Sequence[str]) -> None:
    """Raise DataError if a link among `root`'s folders leads back to the data.

    Links to folders elsewhere are followed, but one to a folder above `root`, to one that another
    folder or link has reached, or to the other part (train, test) would give files a second label.
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
                    f"{folder}: is a link to {real}, whose files are in the data already"
                )


def unlabelled_files(root: Path, endings: tuple[str, ...]) -> list[str]:
    """List the files of `root`'s folder UNLABELLED, sorted, as `listing` does."""
    from torchvision.datasets.folder import make_dataset

    refuse_links_back(root, [*class_folders(root), UNLABELLED])
    found = make_dataset(str(root), {UNLABELLED: 0}, extensions=endings, allow_empty=True)
    return [path for path, _ in found]


def refuse_unlabelled(root: Path, rule: str) -> None:
    """Raise DataError with `rule` if `root` has a folder UNLABELLED."""
    if (root / UNLABELLED).is_dir():
        raise DataError(f"{root / UNLABELLED}: is not allowed here: {rule}")
