"""The data of a site, decoded from its own folder."""

from __future__ import annotations

from pathlib import Path

import torch

from fedhet.data.datasets import sample_kind
from fedhet.data.folder import (
    UNLABELLED,
    class_folders,
    decode,
    listing,
    refuse_unlabelled,
    unlabelled_files,
)
from fedhet.data.npz import read_npz, same_form
from fedhet.data.partition import hold_out
from fedhet.data.spec import (
    UNKNOWN,
    ClientData,
    DataSpec,
    Split,
    global_random_kept,
    no_test,
    stored_as,
)
from fedhet.data.texts import TXT, find_rows, read_files, read_folder, site_rows
from fedhet.data.tokens import vocabulary_of
from fedhet.errors import DataError
from fedhet.kinds import TEXT


@global_random_kept()
def site_data(
    folder: str, *, spec: DataSpec, classes: int, name: str, unlabelled: bool = False
) -> ClientData:
    """Return the data of a site, from its own folder.

    FOLDER/train.npz and test.npz, or FOLDER/train/<class>/* and test/<class>/* images; for texts
    FOLDER/train.csv and test.csv (as `fedhet.data.texts` reads them), or .txt files by class.
    Without a test part, `spec.test_fraction` of the rest is held out. FOLDER/classes.txt (one name
    per line) lists the run's classes in order; it is needed only if a site lacks some of them.
    Samples without a class are in FOLDER/train/unlabelled; they are read if `unlabelled`.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise DataError(f"{root}: no such folder (the data of {name})")
    if classes < 2:
        raise DataError(
            f"{root}: the run must say how many classes there are, 2 or more: "
            f"'models.num-classes' is {classes}"
        )
    names = _classes_file(root, classes)
    rows = find_rows(root, "train")
    if sum([(root / "train.npz").exists(), (root / "train").is_dir(), rows is not None]) != 1:
        raise DataError(
            f"{root}: must hold either train.npz or train/<class>/<images or .txt>, or rows of "
            "texts in train.csv, .tsv or .jsonl (and test likewise)"
        )
    is_text = rows is not None or _holds_texts(root / "train", spec)
    if rows is not None:
        train, test, names = site_rows(rows, names, classes, spec)
    elif (root / "train").is_dir():
        names = names or _folder_names(root / "train", classes)
        train, test = _site_files(root, names, spec, is_text)
    else:
        train, test = _site_arrays(root, classes, spec)
    rest, left_aside = _without_labels(root, train, spec, unlabelled, is_text)
    if test is None:
        if not spec.test_fraction:
            raise no_test(f"{root}", spec)
        train_rows, test_rows = hold_out(len(train), spec, f"{name} ({root})")
        train, test = train.take(train_rows), train.take(test_rows)
    if len(train) < 2 or len(test) < 1:
        raise DataError(
            f"{root}: has {len(train)} training and {len(test)} test samples, at least 2 and 1 "
            "are needed"
        )
    names = names or tuple(map(str, range(classes)))
    # A site's label space is the classes of its samples; the run may have more.
    space = tuple(torch.unique(torch.cat([train.y, test.y])).tolist())
    size = vocabulary_of(spec) if is_text else 0
    stored = stored_as(train.x)
    return ClientData(name, train, test, None, names, space, rest, left_aside, size, stored)


def _holds_texts(train: Path, spec: DataSpec) -> bool:
    """Tell whether a site's tree holds texts, as `data.sample-kind` or some .txt file says."""
    return train.is_dir() and (sample_kind(spec) is TEXT or any(train.glob("*/*.txt")))


def _without_labels(
    root: Path, train: Split, spec: DataSpec, wanted: bool, is_text: bool
) -> tuple[Split | None, int]:
    """Return a site's unlabelled samples, if any, and the number of those that are not used.

    Images are decoded in the form of the training images, and scaled if those are. Raises
    DataError if the folder is needed and holds no samples.
    """
    refuse_unlabelled(root, f"it lies beside the class folders, in {root / 'train'}")
    folder = root / "train" / UNLABELLED
    if not folder.is_dir():
        return None, 0
    files = unlabelled_files(root / "train", TXT if is_text else ())
    if not wanted:
        return train.take(torch.arange(0)), len(files)
    if not files:
        what = ".txt files" if is_text else "images"
        raise DataError(f"{folder}: has no {what}; remove it, and labels of others are hidden")
    x = read_files(files, spec) if is_text else decode(files, spec, like=_form(train))
    found = Split(x, torch.full((len(x),), UNKNOWN))
    return found if x.dtype == train.x.dtype else found.scaled(), 0


def _classes_file(root: Path, classes: int) -> tuple[str, ...]:
    """Return the names in classes.txt, or () if there is no such file."""
    path = root / "classes.txt"
    if not path.exists():
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable text file ({error})") from error
    names = tuple(line.strip() for line in lines if line.strip())
    if len(names) != classes or len(set(names)) != classes:
        raise DataError(
            f"{path}: has {len(names)} names ({len(set(names))} different), the run has "
            f"{classes} classes: give each one line, in the run's order"
        )
    for name in names:
        if not name.isprintable():
            raise DataError(f"{path}: the name {name!r} is not printable")
    return names


def _folder_names(train: Path, classes: int) -> tuple[str, ...]:
    names = class_folders(train)
    if len(names) != classes:
        raise DataError(
            f"{train}: has {len(names)} class folders, the run has {classes} classes; name all "
            f"{classes} in the run's order in {train.parent / 'classes.txt'}"
        )
    return names


def _form(images: Split) -> tuple[int, ...]:
    return tuple(images.x.shape[1:])


def _site_files(
    root: Path, names: tuple[str, ...], spec: DataSpec, is_text: bool
) -> tuple[Split, Split | None]:
    if UNLABELLED in names:
        raise DataError(
            f"{root / 'classes.txt'}: {UNLABELLED!r} cannot name a class: "
            "the folder of that name is for images without one"
        )
    refuse_unlabelled(root / "test", "test images need a class")
    if is_text:
        there = (root / "test").is_dir()
        test = read_folder(root / "test", names, spec) if there else None
        return read_folder(root / "train", names, spec), test
    files, labels = listing(root / "train", names)
    train = Split(decode(files, spec), torch.from_numpy(labels))
    if not (root / "test").is_dir():
        return train, None
    files, labels = listing(root / "test", names)
    x = decode(files, spec, like=_form(train))
    return train, Split(x, torch.from_numpy(labels))


def _site_arrays(root: Path, classes: int, spec: DataSpec) -> tuple[Split, Split | None]:
    train = _within(root / "train.npz", classes, spec)
    path = root / "test.npz"
    if not path.exists():
        return train, None
    test = _within(path, classes, spec)
    same_form(train, test, "train.npz", path)
    return train, test


def _within(path: Path, classes: int, spec: DataSpec) -> Split:
    """Read a file, with labels among the run's classes."""
    split = read_npz(path, spec, sample_kind(spec))
    if len(split) and int(split.y.max()) >= classes:
        raise DataError(
            f"{path}: y holds the label {int(split.y.max())}, allowed are 0 to {classes - 1} "
            f"(the run has {classes} classes)"
        )
    return split
