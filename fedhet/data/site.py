"""The data of a site, decoded from its own folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedhet.base.disk import expanded, read_toml_tables
from fedhet.base.errors import DataError, StateError, error_reason
from fedhet.data.cells import find_rows, read_table
from fedhet.data.class_folders import TRAIN, UNLABELED, Scan, find_tree, holds
from fedhet.data.images import IMAGES
from fedhet.data.partition import hold_out
from fedhet.data.sources import sample_kind
from fedhet.data.sources.files import MAX_CLASSES, read_pair
from fedhet.data.spec import (
    FIXED_SEED,
    UNKNOWN,
    ClientData,
    Dataset,
    DataSpec,
    Split,
    no_test_error,
    preserve_global_rng,
    reading,
)
from fedhet.data.tables import labeled, read_schema
from fedhet.data.texts import TEXTS, read_texts, shape_of_texts
from fedhet.kinds import KINDS, TABLE, TEXT, Kind, Shape, kind_of_arrays
from fedhet.settings.run import DataSettings, RunSettings
from fedhet.settings.schema import build, invalid_setting, kebab

LOG = logging.getLogger("fedhet")
SCHEMA = "schema.toml"
"""The file that says what the columns of a site's table become; the same at all sites."""
DECLARATION = "site.toml"
"""The file by which a private site declares how its data is read, and what it holds."""
CLASSES = "classes.txt"
READING = (
    "sample_kind", "test_fraction", "image_size", "text_column", "label_column", "tokenizer",
    "vocabulary", "max_tokens",
)  # fmt: skip
"""The settings of `[data]` that a site may declare: those by which its directory is read. All
others are at their defaults at a private site, whatever the run says."""
_UNSET = {"models.num-classes": 0, "data.sample-kind": "auto"}
"""Values by which a run leaves a setting to the data."""
_DECLARE = (
    f"A private site declares its data in {DECLARATION}: see docs/privacy.md, "
    "'Declaration of a private site'."
)


@dataclass(frozen=True)
class Declaration:
    """The data of a private site as the site declares it, before it knows any run.

    The site reads and checks its data by this declaration alone. A run is compared with it, and
    never with the data: a refusal then says nothing about any sample.
    """

    path: str
    """The file of the declaration, for messages."""
    spec: DataSpec
    """The settings by which the data is read; those of a run have no part in it."""
    names: tuple[str, ...]
    """The names of all classes, in order."""
    kind: Kind
    shape: Shape

    @classmethod
    def read(cls, folder: str, max_bytes: int) -> Declaration:
        """Read site.toml, classes.txt and schema.toml; `max_bytes` is the site's own limit.

        Raises DataError or SettingsError if they do not declare the classes and the shape.
        """
        root = expanded(folder)
        path = root / DECLARATION
        try:
            given = dict(read_toml_tables(path)) if path.exists() else {}
        except (OSError, StateError) as error:
            raise DataError(f"{path}: not a readable TOML file ({error_reason(error)})") from None
        schema = read_schema(root / SCHEMA) if (root / SCHEMA).exists() else None
        number, shape = given.pop("num-classes", 0), given.pop("shape", [])
        names = schema.classes if schema else _classes_file(root, None)
        for name in given.keys() - {kebab(each) for each in READING}:
            known = ", ".join(["num-classes", "shape", *map(kebab, READING)])
            raise DataError(f"{path}: {name}: unknown setting, expected one of {known}")
        table = build(DataSettings, given, prefix=f"{path}: data.")
        spec = DataSpec.model_construct(
            **dict(table.model_copy(update={"max_bytes": max_bytes})), clients=1, seed=FIXED_SEED
        )
        if type(number) is not int or not (2 <= number <= MAX_CLASSES or (names and not number)):
            rule = f"expected an integer from 2 to {MAX_CLASSES}"
            raise DataError(f"{path}: num-classes: {rule}, got {number!r}. {_DECLARE}")
        if names and number not in (0, len(names)):
            where = root / (SCHEMA if schema else CLASSES)
            rule = f"expected {len(names)}, the number of classes in {where}, got {number}"
            raise DataError(f"{path}: num-classes: {rule}. Change either file.")
        if schema:
            found: Shape = (sum(schema.widths),)
            kind = TABLE
        elif table.sample_kind == TEXT.name:
            kind, found = TEXT, shape_of_texts(spec)
        else:
            found = tuple(shape) if isinstance(shape, list) else ()
            kind = kind_of_arrays(found, KINDS.get(table.sample_kind))
        sizes: list[Any] = list(found)
        if not 1 <= len(sizes) <= 4 or not all(type(k) is int and k >= 0 for k in sizes):
            rule = "expected the shape of a sample, such as [3, 32, 32]"
            raise DataError(f"{path}: shape: {rule}, got {shape!r}. {_DECLARE}")
        return cls(str(path), spec, names or tuple(map(str, range(number))), kind, found)

    @property
    def settings(self) -> dict[str, Any]:
        """The declared values of the settings of a run, by their full names."""
        flat = self.spec.flat()
        values = {f"data.{kebab(name)}": flat[kebab(name)] for name in READING}
        return values | {"models.num-classes": len(self.names)}

    def check(self, run: RunSettings) -> None:
        """Raise SettingsError if a run is for other classes, or for samples of another kind.

        Logs the other settings of the run that differ: the declared values are used.
        """
        asked, kind = run.flat(), self.kind
        binding = {"models.num-classes", "data.sample-kind"}
        if kind is TEXT:
            binding |= {"data.tokenizer", "data.vocabulary", "data.max-tokens"}
        for name, value in {**self.settings, "data.sample-kind": kind.name}.items():
            if asked[name] in (value, _UNSET.get(name, value)):
                continue
            if name in binding:
                raise invalid_setting(name, asked[name], f"{value!r} as declared by this site")
            LOG.info("%s = %r of the run is not used: %s", name, asked[name], self.path)

    def read_data(self, folder: str, name: str) -> ClientData:
        """Read and check the site's data. Raises DataError, of whatever kind the fault is."""
        try:
            return site_data(
                folder, spec=self.spec, classes=len(self.names), name=name, declared=self
            )
        except Exception as error:  # all alike: the type of an error is sent
            raise DataError(f"{type(error).__name__}: {error}") from error


@preserve_global_rng()
def site_data(
    folder: str,
    *,
    spec: DataSpec,
    classes: int,
    name: str,
    unlabeled: bool = False,
    declared: Declaration | None = None,
) -> ClientData:
    """Return the data of a site, from its own folder.

    FOLDER/train.npz and test.npz, or FOLDER/train/<class>/* and test/<class>/* images; for texts
    FOLDER/train.csv and test.csv (as `fedhet.data.texts` reads them), or .txt files by class. With
    FOLDER/schema.toml, train.csv (or .parquet) and test.csv are a table.
    Without a test part, `spec.test_fraction` of the rest is held out. FOLDER/classes.txt (one name
    per line) lists the run's classes in order; it is needed only if a site lacks some of them.
    Samples without a class are in FOLDER/train/unlabeled; they are read if `unlabeled`.
    With `declared`, all names and the shape come from this declaration, and none from the files.
    """
    root = expanded(folder)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder (the data of {name})")
    if classes < 2:
        raise DataError(
            f"{root}: the run must say how many classes there are, 2 or more: "
            f"'models.num-classes' is {classes}"
        )
    own, rest, num_unused_unlabeled = _read(root, classes, spec, unlabeled, declared)
    train, test = own.train, own.test
    if test is None:
        if not spec.test_fraction:
            raise no_test_error(f"{root}", spec)
        train_rows, test_rows = hold_out(len(train), spec, f"{name} ({root})")
        train, test = train.take(train_rows), train.take(test_rows)
    if len(train) < 2 or len(test) < 1:
        raise DataError(
            f"{root}: has {len(train)} training and {len(test)} test samples, at least 2 and 1 "
            "are needed"
        )
    # A site's label space is the classes of its samples; the run may have more.
    space = tuple(torch.unique(torch.cat([train.y, test.y])).tolist())
    if declared is not None:
        if own.shape != declared.shape:
            rule = f"expected the shape of the data, {list(own.shape)}, got {list(declared.shape)}"
            raise DataError(f"{declared.path}: shape: {rule}. Correct it.")
        space, rest = tuple(range(classes)), rest or train.take(torch.arange(0))
    return ClientData(
        name, train, test, None, own.classes, space, own.kind, own.shape, rest,
        num_unused_unlabeled, own.stored, own.schema,
    )  # fmt: skip


def _read(
    root: Path, classes: int, spec: DataSpec, unlabeled: bool, declared: Declaration | None
) -> tuple[Dataset, Split | None, int]:
    """Read a site's folder, in whichever layout it is. Raises DataError for another.

    Returns its labeled samples, those without a class if `unlabeled`, and the number of samples
    without a class that are not read.
    """
    names = declared.names if declared else _classes_file(root, classes)
    rows, is_npz = find_rows(root, "train"), (root / "train.npz").exists()
    trees = Scan(IMAGES).find_parts(root)[TRAIN]
    if is_npz + bool(trees) + (rows is not None) != 1:
        raise DataError(
            f"{root}: must hold either train.npz or train/<class>/<images or .txt>, or rows of "
            "texts in train.csv, .tsv or .jsonl (and test likewise)"
        )
    for path in root.iterdir():
        if path.name.lower() in UNLABELED and path.is_dir():
            raise DataError(
                f"{path}: is not allowed here: it lies next to the class folders, in "
                f"{next(iter(trees), None)}"
            )
    stated = sample_kind(spec)
    if is_npz:
        train, test = read_pair(root, spec, stated, classes)
        kind = kind_of_arrays(tuple(train.x.shape[1:]), stated).name
        names = names or tuple(map(str, range(classes)))
        return Dataset(f"{root}", train, test, names, kind=kind), None, 0
    if rows is not None:
        held = find_rows(root, "test")
        if stated is not TABLE and not (root / SCHEMA).exists():
            return read_texts(rows, held, spec, names, classes), None, 0
        schema = read_schema(root / SCHEMA)
        if len(schema.classes) != classes:
            raise DataError(
                f"{root / SCHEMA}: has {len(schema.classes)} classes, the run has {classes}"
            )
        train = labeled(schema, read_table(rows, spec))
        test = labeled(schema, read_table(held, spec)) if held else None
        own = Dataset(f"{root}", train, test, schema.classes, kind=TABLE.name, schema=schema)
        return own, None, 0

    # A text next to an image describes it: only a tree without images holds texts.
    texts = stated is TEXT or (not holds(root, IMAGES) and holds(root, TEXTS))
    files = TEXTS if texts else IMAGES
    if named := [name for name in names if name.lower() in UNLABELED]:
        raise DataError(
            f"{root / CLASSES}: {named[0]!r} cannot name a class: "
            f"the folder of that name is for {files.noun} without one"
        )
    tree = find_tree(root, files, classes=names, whole=False)
    if len(tree.classes) != classes:
        raise DataError(
            f"{root}: has {len(tree.classes)} class folders, the run has {classes} classes; name "
            f"all {classes} in the run's order in {root / CLASSES}"
        )
    own = tree.read(spec, declared.shape if declared and not texts else None)
    paths = tree.unlabeled
    if paths is None:
        return own, None, 0
    if not unlabeled:
        return own, own.train.take(torch.arange(0)), len(paths)
    if not paths:
        raise DataError(
            f"{root}: the directory of training {files.noun} without a class has no "
            f"{files.noun}. Remove it, and labels of others are hidden."
        )
    x = files.read(paths, spec, tuple(own.train.x.shape[1:]))
    return own, Split(x, torch.full((len(paths),), UNKNOWN)), 0


def _classes_file(root: Path, classes: int | None) -> tuple[str, ...]:
    """Return the names in classes.txt, or () if there is no such file.

    Raises DataError unless there are `classes` of them; None: any number from 2 on.
    """
    path = root / CLASSES
    if not path.exists():
        return ()
    with reading(path, "text file"):
        lines = path.read_text(encoding="utf-8").splitlines()
    names = tuple(line.strip() for line in lines if line.strip())
    classes = classes or max(2, len(names))
    if len(names) != classes or len(set(names)) != classes:
        raise DataError(
            f"{path}: has {len(names)} names ({len(set(names))} different), the run has "
            f"{classes} classes: give each one line, in the run's order"
        )
    for name in names:
        if not name.isprintable():
            raise DataError(f"{path}: the name {name!r} is not printable")
    return names
