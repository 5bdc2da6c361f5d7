"""The data of a site, decoded from its own folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedhet.data.class_folders import (
    TRAIN,
    UNLABELLED,
    find_parts,
    holds,
    read_part,
    understand,
)
from fedhet.data.images import IMAGES
from fedhet.data.npz import read_npz, same_form
from fedhet.data.partition import hold_out
from fedhet.data.sources import sample_kind
from fedhet.data.spec import (
    UNKNOWN,
    ClientData,
    DataSpec,
    Split,
    global_random_kept,
    no_test,
    stored_as,
)
from fedhet.data.tables import TableSchema, find_table, read_schema, read_table
from fedhet.data.texts import TEXTS, find_rows, site_rows
from fedhet.data.tokens import shape_of_texts
from fedhet.disk.folder import expanded
from fedhet.errors import DataError, reason_of
from fedhet.kinds import TABLE, TEXT, Shape

SCHEMA = "schema.toml"
"""The file that says what the columns of a site's table become; the same at all sites."""


@global_random_kept()
def site_data(
    folder: str, *, spec: DataSpec, classes: int, name: str, unlabelled: bool = False
) -> ClientData:
    """Return the data of a site, from its own folder.

    FOLDER/train.npz and test.npz, or FOLDER/train/<class>/* and test/<class>/* images; for texts
    FOLDER/train.csv and test.csv (as `fedhet.data.texts` reads them), or .txt files by class. With
    FOLDER/schema.toml, train.csv (or .parquet) and test.csv are a table.
    Without a test part, `spec.test_fraction` of the rest is held out. FOLDER/classes.txt (one name
    per line) lists the run's classes in order; it is needed only if a site lacks some of them.
    Samples without a class are in FOLDER/train/unlabelled; they are read if `unlabelled`.
    """
    root = expanded(folder)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder (the data of {name})")
    if classes < 2:
        raise DataError(
            f"{root}: the run must say how many classes there are, 2 or more: "
            f"'models.num-classes' is {classes}"
        )
    own = _read(root, classes, spec, unlabelled)
    train, test = _with_test(own.train, own.test, spec, f"{root}", f"{name} ({root})")
    names = own.names or tuple(map(str, range(classes)))
    # A site's label space is the classes of its samples; the run may have more.
    space = tuple(torch.unique(torch.cat([train.y, test.y])).tolist())
    return ClientData(
        name, train, test, None, names, space, own.shape or _form(train), own.rest, own.left_aside,
        stored_as(train.x), own.schema,
    )  # fmt: skip


@dataclass(frozen=True)
class _Own:
    """What a site's folder holds."""

    train: Split
    test: Split | None
    names: tuple[str, ...]
    rest: Split | None = None
    """Samples without a class, if they were asked for."""
    left_aside: int = 0
    shape: Shape = ()
    """() is that of the training samples."""
    schema: TableSchema | None = None


def _read(root: Path, classes: int, spec: DataSpec, unlabelled: bool) -> _Own:
    """Read a site's folder, in whichever layout it is. Raises DataError for another."""
    names = _classes_file(root, classes)
    rows = find_table(root, "train") or find_rows(root, "train")
    tree = next(iter(find_parts(root)[TRAIN]), None)
    if sum([(root / "train.npz").exists(), tree is not None, rows is not None]) != 1:
        raise DataError(
            f"{root}: must hold either train.npz or train/<class>/<images or .txt>, or rows of "
            "texts in train.csv, .tsv or .jsonl (and test likewise)"
        )
    for path in root.iterdir():
        if path.name.lower() in UNLABELLED and path.is_dir():
            raise DataError(
                f"{path}: is not allowed here: it lies next to the class folders, in {tree}"
            )
    if rows is not None and (sample_kind(spec) is TABLE or (root / SCHEMA).exists()):
        schema = read_schema(root / SCHEMA)
        return _Own(*_table(root, schema, classes, spec), schema=schema)
    if rows is not None:
        return _Own(*site_rows(rows, names, classes, spec), shape=shape_of_texts(spec))
    if tree is None:
        return _Own(*_site_arrays(root, classes, spec), names)
    return _site_tree(root, names, classes, spec, unlabelled)


def _site_tree(
    root: Path, names: tuple[str, ...], classes: int, spec: DataSpec, unlabelled: bool
) -> _Own:
    """Read the files of a site, by class. Samples without a class are read if `unlabelled`."""
    # A text next to an image describes it: only a tree without images holds texts.
    texts = sample_kind(spec) is TEXT or (not holds(root, IMAGES) and holds(root, TEXTS))
    files = TEXTS if texts else IMAGES
    if named := [name for name in names if name.lower() in UNLABELLED]:
        raise DataError(
            f"{root / 'classes.txt'}: {named[0]!r} cannot name a class: "
            f"the folder of that name is for {files.noun} without one"
        )
    tree = understand(root, files, classes=names, whole=False)
    if len(tree.classes) != classes:
        raise DataError(
            f"{root}: has {len(tree.classes)} class folders, the run has {classes} classes; name "
            f"all {classes} in the run's order in {root / 'classes.txt'}"
        )
    tree.unused.report(root, files)
    train = read_part(tree.train, tree.classes, spec, files)
    form = _form(train)
    test = read_part(tree.test, tree.classes, spec, files, form) if tree.test is not None else None
    rest, left_aside, paths = None, 0, tree.unlabelled
    if paths is not None and not unlabelled:
        rest, left_aside = train.take(torch.arange(0)), len(paths)
    elif paths is not None:
        if not paths:
            raise DataError(
                f"{root}: the directory of training {files.noun} without a class has no "
                f"{files.noun}. Remove it, and labels of others are hidden."
            )
        rest = Split(files.read(paths, spec, form), torch.full((len(paths),), UNKNOWN))
    shape = shape_of_texts(spec) if texts else ()
    return _Own(train, test, tree.classes, rest, left_aside, shape)


def _table(
    root: Path, schema: TableSchema, classes: int, spec: DataSpec
) -> tuple[Split, Split | None, tuple[str, ...]]:
    """Return a site's training rows, its test rows if there are any, and the schema's classes.

    Raises DataError for a file that does not fit the schema, which names the column.
    """
    if len(schema.classes) != classes:
        raise DataError(
            f"{root / SCHEMA}: has {len(schema.classes)} classes, the run has {classes}"
        )
    train, test = find_table(root, "train"), find_table(root, "test")
    if train is None:
        raise DataError(f"{root}: a table is train.csv, .tsv or .parquet")
    rows = schema.labelled(read_table(train, spec))
    return rows, schema.labelled(read_table(test, spec)) if test else None, schema.classes


def _with_test(
    train: Split, test: Split | None, spec: DataSpec, root: str, owner: str
) -> tuple[Split, Split]:
    """Return the training and the test samples; without a test part, some are held out.

    Raises DataError for too few of either.
    """
    if test is None:
        if not spec.test_fraction:
            raise no_test(root, spec)
        train_rows, test_rows = hold_out(len(train), spec, owner)
        train, test = train.take(train_rows), train.take(test_rows)
    if len(train) < 2 or len(test) < 1:
        raise DataError(
            f"{root}: has {len(train)} training and {len(test)} test samples, at least 2 and 1 "
            "are needed"
        )
    return train, test


def _classes_file(root: Path, classes: int) -> tuple[str, ...]:
    """Return the names in classes.txt, or () if there is no such file."""
    path = root / "classes.txt"
    if not path.exists():
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable text file ({reason_of(error)})") from error
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


def _form(split: Split) -> Shape:
    return tuple(split.x.shape[1:])


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
