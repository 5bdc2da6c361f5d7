"""Directories of images or texts, with one file for each sample.

The layout is ROOT/train/CLASS/FILE and ROOT/test/CLASS/FILE, or ROOT/CLASS/FILE without a test set.
With `data.by = "folder"`, the class directories are in a directory for each owner. Alternatively, a
label table lists the files and their targets. Any other layout is an error. Simulations and sites
call the same function, `read_folder`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import torch
from torch import Tensor

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, SettingsError, nearest, one_line
from fedhet.data.dataset import UNKNOWN, Dataset, Format, Split
from fedhet.data.rows import Table, find_rows, missing_column_error, read_table
from fedhet.data.schemas import SCHEMA, TableSchema, declared_targets
from fedhet.data.spec import DataSpec, Expected, reading
from fedhet.data.targets import infer_targets, read_targets
from fedhet.data.words import encode_owners, plain_form
from fedhet.kinds import Kind, Shape
from fedhet.tasks import CLASSIFICATION, Classification, find_task

LOG = logging.getLogger("fedhet")
TRAIN, TEST, UNLABELED = "train", "test", "unlabeled"
_UNLABELED = ("unlabeled", "unlabelled", "unsup")
"""Names that datasets give to samples without a class; they would become a class unnoticed."""
FOLDER = "folder"
"""Value of `data.by` for a directory tree in which each owner has a directory."""
LABEL_TABLES = {"labels": "file", "metadata": "file_name"}
"""Names of label tables, without extension, and of their columns with the path of each file."""
PARTS = {
    "train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST,
    "val": TEST, "valid": TEST, "validation": TEST,
}  # fmt: skip
"""Common names of the parts of a dataset, in lower case, and the supported names."""
CLASSES_FILE = "classes.txt"
"""File with the class names in order, one per line."""
_DESCRIPTIONS = (CLASSES_FILE, SCHEMA, "site.toml")
"""Names of the files that describe the data."""
_SYSTEM = {
    "__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found",
    "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r",
}  # fmt: skip
"""Names of directories and files that operating systems create, in lower case."""


@dataclass(frozen=True)
class Files:
    """File type with one sample in each file, and the function that reads such files."""

    noun: str
    """Noun for the files, used in messages."""
    endings: tuple[str, ...]
    """File extensions, in lower case."""
    read: Callable[[Sequence[str], DataSpec, Shape | None], Tensor]
    """Function that takes paths, data settings, and a required shape (or None), and returns samples
    [N, ...]."""
    kind: Kind
    """Kind of the samples."""
    shape: Callable[[DataSpec], Shape] = lambda spec: ()
    """Function that returns the shape of a sample for given data settings; () = the shape of the
    array that was read."""


def is_ignored(name: str) -> bool:
    """Return whether a file or directory is hidden or was created by an operating system."""
    return name.startswith((".", "~$")) or name.lower() in _SYSTEM


class Listing(NamedTuple):
    """Sorted names in a directory, and the number of files of other types, by extension."""

    files: list[str]
    folders: list[str]
    others: Counter[str]


class Walk:
    """Reader of directories that lists each directory once and counts the files of other types."""

    def __init__(self, files: Files, known: Sequence[Path] = ()) -> None:
        """Create the reader; `known` files describe the data, so they are not listed."""
        self.files, self._known = files, {*map(os.path.normpath, known)}
        self._listings: dict[str, Listing] = {}
        self._paths: dict[str, str] = {}

    def scan(self, path: Path | str) -> Listing:
        """List a directory. Symlinks to directories are followed.

        Raises DataError if the directory is unreadable, if it has been listed under another path,
        because its files would be read twice, or if a sample is not a regular file.
        """
        path = str(path)
        if path in self._listings:
            return self._listings[path]
        before = self._paths.setdefault(os.path.realpath(path), path)
        if before != path:
            link = before if os.path.islink(before) and not os.path.islink(path) else path
            fault = "a symlink leads to a directory whose files are already part of the data"
            raise DataError(f"{link}: {fault}. Remove the symlink.")
        found = self._listings[path] = Listing([], [], Counter())
        with reading(path, "directory"), os.scandir(path) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            name, is_link = entry.name, entry.is_symlink()
            if is_ignored(name) or os.path.normpath(entry.path) in self._known:
                continue
            if os.path.isdir(entry.path) if is_link else entry.is_dir():
                found.folders.append(name)
            elif not name.lower().endswith(self.files.endings):
                found.others[Path(name).suffix.lower() or "without an extension"] += 1
            elif os.path.isfile(entry.path) if is_link else entry.is_file():
                found.files.append(name)
            else:
                raise DataError(f"{entry.path}: expected a regular file")
        return found

    def below(self, top: Path | str) -> list[str]:
        """Return the paths of all samples in a directory and its subdirectories.

        Raises DataError if there are none.
        """
        paths, pending = [], [str(top)]
        while pending:
            path = pending.pop()
            listing = self.scan(path)
            paths += [os.path.join(path, name) for name in listing.files]
            pending += [os.path.join(path, name) for name in reversed(listing.folders)]
        if not paths:
            raise DataError(f"{top}: no {self.files.noun} found")
        return paths

    def warn(self, root: Path) -> None:
        """Log the number of files of other types in one line, which stays on this machine."""
        counts = sum((each.others for each in self._listings.values()), Counter[str]())
        if count := counts.total():
            are = "file is" if count == 1 else "files are"
            _warn_once(f"{root}: {count} {are} not used as {self.files.noun}: {_listed(counts)}")


def _listed(counts: Counter[str]) -> str:
    parts = [f"{count} {one_line(extension)}" for extension, count in counts.most_common(8)]
    return ", ".join(parts) + (", and others" if len(counts) > len(parts) else "")


@lru_cache(maxsize=256)
def _warn_once(line: str) -> None:
    """Log a line, unless this process has already logged it."""
    LOG.warning("%s", line)


class _Part(NamedTuple):
    """Samples of a part of the data."""

    paths: list[str]
    y: Tensor
    """Targets of the samples."""
    owners: dict[str, Any]
    """Fields of `Dataset` for the owners of the samples, or {}."""
    unlabeled: list[str]
    """Paths of the samples without a label."""


@dataclass(frozen=True)
class _Tree:
    """Directory tree with the layout ROOT[/train|/test][/OWNER]/CLASS/FILE."""

    root: Path
    walk: Walk
    spec: DataSpec

    @property
    def _by_owner(self) -> bool:
        return self.spec.by.strip() == FOLDER

    @property
    def _layout(self) -> str:
        owner, by = ("/OWNER", " (data.by = 'folder')") if self._by_owner else ("", "")
        return f"{self.root}[/{TRAIN}|/{TEST}]{owner}/CLASS/FILE{by}"

    def _error(self, path: Path, fix: str) -> DataError:
        kind = "directory" if path.is_dir() else "file"
        return DataError(f"{path}: unexpected {kind}, expected {self._layout}. {fix}")

    def check_parts(self, parts: Mapping[str, Path]) -> None:
        """Raise DataError if the root directory contains other names than its parts or classes."""
        files, folders, _ = self.walk.scan(self.root)
        has_parts, train = self.root not in parts.values(), self.root / TRAIN
        for name in folders:
            meant = PARTS.get(name.lower(), "")
            if name not in parts and (has_parts or meant):
                fix = f"Move it into {train}"
                if meant:
                    fix = f"Merge it with {meant}" if meant in parts else f"Rename it to {meant}"
                raise self._error(self.root / name, f"{fix}, or remove it.")
        if has_parts and (table := _find_label_table(self.root)):
            raise self._error(table, f"Move its rows to a label table in {' and '.join(parts)}.")
        if has_parts and files:
            raise self._error(self.root / files[0], f"Move it below {train}, or remove it.")
        if TRAIN not in parts:
            raise DataError(f"{train}: directory not found, expected {self._layout}")

    def list_samples(
        self, top: Path, known: Sequence[str], *, all_classes: bool
    ) -> tuple[_Part, tuple[str, ...]]:
        """List the samples of a part in its class directories.

        Args:
            top: Directory of the part.
            known: Names of the classes, in the order of their labels; () = any name.
            all_classes: Whether each class must have a sample.

        Returns:
            The samples, and the names of the classes, which are sorted unless they are known.
        """
        noun = self.walk.files.noun
        if self.spec.by.strip() not in ("", FOLDER):
            rule = f"must be {FOLDER!r} or empty for {noun} without a label table"
            raise SettingsError(f"data.by {rule}, got {self.spec.by!r}")
        paths: list[str] = []
        names: list[str] = []
        owners: list[str] = []
        unlabeled: list[str] = []
        first: dict[str, Path] = {}
        for owner in self._folders(top) if self._by_owner else [""]:
            for folder in self._folders(top / owner):
                # macOS decomposes letters such as é in names.
                path, name = top / owner / folder, normalize("NFC", folder)
                if name == UNLABELED:
                    unlabeled += self.walk.below(path)
                    continue
                if name.lower() in _UNLABELED:
                    fix = f"Rename it to {UNLABELED} if its {noun} have no class."
                    raise self._error(path, fix)
                if known and name not in known:
                    fault = f"unknown class {name!r}{nearest(name, known) or '.'}"
                    raise DataError(f"{path}: {fault} Rename the directory, or remove it.")
                files = self._files(path)
                first.setdefault(name, path)
                paths += files
                names += [name] * len(files)
                owners += [owner] * len(files)
        if all_classes and (empty := sorted(first.keys() - {*names})):
            raise DataError(f"{first[empty[0]]}: no {noun} found")
        if not names:
            raise DataError(f"{top}: no {noun} found in the class directories")
        forms = {plain_form(name): name for name in first}
        if alike := [name for name in first if forms[plain_form(name)] != name]:
            other = forms[plain_form(alike[0])]
            raise self._error(
                first[alike[0]], f"Merge it with {first[other].name!r}, or rename it."
            )
        classes = tuple(known or sorted(first))
        labels = {name: label for label, name in enumerate(classes)}
        y = torch.tensor([labels[name] for name in names])
        owned = encode_owners(owners, self.root, frozenset()) if self._by_owner else {}
        return _Part(paths, y, owned, unlabeled), classes

    def _folders(self, path: Path) -> list[str]:
        """Return the names of the subdirectories. Raises DataError if there are samples."""
        files, folders, others = self.walk.scan(path)
        if files:
            other = f"list the files in {path / 'labels.csv'}"
            other = "unset data.by" if self._by_owner else other
            raise self._error(path / files[0], f"Move it into a class directory, or {other}.")
        if not folders:
            got = f"only {_listed(others)}" if others else "an empty directory"
            raise DataError(f"{path}: expected directories, as in {self._layout}, got {got}")
        for name in folders:
            if not name.isprintable():  # Python escapes bytes that are not UTF-8.
                raise DataError(f"{path / name}: the name must be printable UTF-8 text")
        return folders

    def _files(self, path: Path) -> list[str]:
        """Return the paths of the samples in a class directory, which has no subdirectories."""
        files, folders, others = self.walk.scan(path)
        if folders:
            fix = f"Move its files into {path}"
            if not self._by_owner:
                fix += (
                    f", use {path} as the path, or set data.by to {FOLDER} if {path.name} is the "
                    "owner of samples, such as a hospital"
                )
            raise self._error(path / folders[0], f"{fix}.")
        if others and not files:
            noun, endings = self.walk.files.noun, ", ".join(self.walk.files.endings)
            raise DataError(f"{path}: expected {noun} ({endings}), got only {_listed(others)}")
        return [os.path.join(path, name) for name in files]


def _find_label_table(top: Path) -> Path | None:
    """Return the label table in a directory, or None if there is none."""
    found = [path for name in LABEL_TABLES if (path := find_rows(top, name))]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise DataError(f"{top}: expected a single label table, got {names}")
    return found[0] if found else None


def _file_column(path: Path) -> str:
    return LABEL_TABLES[path.name.split(".")[0].lower()]


def _read_label_table(path: Path, walk: Walk, spec: DataSpec) -> tuple[list[str], Table, list[str]]:
    """Read a label table, which has a row for each sample in its directory and below.

    Returns:
        The paths of the samples, the table, and the paths of the samples without a label.
    """
    table, top, column = read_table(path, spec), path.parent, _file_column(path)
    if column not in table.columns:
        raise missing_column_error(path, column, table.columns)
    unlabeled = walk.below(top / UNLABELED) if UNLABELED in walk.scan(top).folders else []
    unread = {*unlabeled}
    below = [each for each in walk.below(top) if each not in unread]
    present = {normalize("NFC", os.path.relpath(each, top)): each for each in below}
    rows: dict[str, int] = {}
    for row, name in enumerate(table.column(column).rows()):
        key = normalize("NFC", os.path.normpath(name))
        if key in rows:
            fault = f"{name!r} is already in row {rows[key] + 1}. Remove one."
            raise table.error(column, row, fault)
        if key not in present:
            fault = f"{name!r} not found among the {walk.files.noun}{nearest(key, present)}"
            raise table.error(column, row, fault)
        rows[key] = row
    if absent := sorted(present.keys() - rows.keys()):
        raise DataError(
            f"{path}: expected a row for each of the {len(present)} {walk.files.noun} in {top}, "
            f"got none for {absent[0]!r}. Add the row, or remove the file."
        )
    return [present[key] for key in rows], table, unlabeled


def _infer_schema(path: Path, root: Path, table: Table, spec: DataSpec) -> TableSchema:
    """Infer the schema of the targets in the training part's label table `path`."""
    declared, spec = declared_targets(spec, path, root)
    if not spec.target:
        used = (_file_column(path), spec.by.strip())
        others = [name for name in table.columns if name not in used]
        if len(others) != 1:
            raise DataError(
                f"{path}: data.target must name target columns, one or more of {', '.join(others)}"
            )
        spec = spec.replace(target=others[0])
    return infer_targets(table, spec, declared=declared)


def read_folder(location: str, spec: DataSpec, files: Files) -> Dataset:
    """Read the directory `location` of images or texts, with class directories or label tables.

    In a simulation, each class must have a sample. A site may lack samples of some classes if it
    states the names of all classes.

    Raises:
        DataError: If the layout, a label table, or a file is invalid.
        SettingsError: If `data.by` is unsupported.
    """
    root = expanded(location)
    if not root.is_dir():
        raise DataError(f"{root}: directory not found")
    parts = {part: root / part for part in (TRAIN, TEST) if (root / part).is_dir()}
    parts = parts or {TRAIN: root}
    tables = {part: path for part, top in parts.items() if (path := _find_label_table(top))}
    descriptions = [top / name for top in (root, *parts.values()) for name in _DESCRIPTIONS]
    walk = Walk(files, [*descriptions, *tables.values()])
    tree, expected = _Tree(root, walk, spec), spec.expected or Expected()
    schema = None
    if tables or find_task(spec.task) is not Classification:
        if root not in parts.values():
            tree.check_parts(parts)
        for top in [top for part, top in parts.items() if part not in tables]:
            raise DataError(
                f"{top / 'labels.csv'}: file not found, expected a table with the column 'file' "
                f"and the targets of the {files.noun} in {top} (data.task = {spec.task!r})"
            )
        rows = {part: _read_label_table(path, walk, spec) for part, path in tables.items()}
        schema = _infer_schema(tables[TRAIN], root, rows[TRAIN][1], spec)
        classes = schema.outputs
        samples = {
            part: _Part(paths, read_targets(schema, table), table.owners(), unlabeled)
            for part, (paths, table, unlabeled) in rows.items()
        }
    else:
        tree.check_parts(parts)
        if any(name.lower() in _UNLABELED for name in expected.classes):
            rule = "is reserved for the directory of samples without a class"
            raise DataError(f"{root / CLASSES_FILE}: the class name {UNLABELED!r} {rule}")
        train, classes = tree.list_samples(
            parts[TRAIN], expected.classes, all_classes=not expected.outputs
        )
        samples = {TRAIN: train}
        if TEST in parts:
            samples[TEST], _ = tree.list_samples(parts[TEST], classes, all_classes=False)
    expected.check_outputs(len(classes), tables.get(TRAIN, root), root)
    if TEST in samples and (unlabeled := samples[TEST].unlabeled):
        fault = f"test {files.noun} must be labeled. Move them into {parts[TRAIN] / UNLABELED}."
        raise DataError(f"{unlabeled[0]}: {fault}")
    walk.warn(root)
    if samples[TRAIN].unlabeled and spec.expected is None:
        LOG.warning(
            "%s: %d %s without a class are used only at sites. In a simulation, data.labeled-alpha "
            "hides the labels of other samples.",
            location, len(samples[TRAIN].unlabeled), files.noun,
        )  # fmt: skip
    return _read_samples(samples, files, spec, classes, schema)


def _read_samples(
    samples: Mapping[str, _Part],
    files: Files,
    spec: DataSpec,
    classes: tuple[str, ...],
    schema: TableSchema | None,
) -> Dataset:
    """Read the files of all parts."""
    expected, train = spec.expected or Expected(), samples[TRAIN]
    task = schema.task_object if schema else CLASSIFICATION
    # Draw the subset first, so that no other files are read.
    drawn = spec.draw_samples(task.strata(train.y, classes)[1])
    x = files.read([train.paths[row] for row in drawn], spec, expected.shape or None)
    owned = train.owners
    if owned:
        owned = {**owned, "groups": owned["groups"][drawn]}

    def split(paths: Sequence[str], y: Tensor) -> Split:
        return Split(files.read(paths, spec, tuple(x.shape[1:])), y)

    test, unlabeled, unread = None, None, len(train.unlabeled)
    if TEST in samples:
        test = split(samples[TEST].paths, samples[TEST].y)
    if expected.reads_unlabeled and unread:
        unlabeled, unread = split(train.unlabeled, torch.full((unread,), UNKNOWN)), 0
    format = Format.from_samples(x, classes, files.kind, shape=files.shape(spec), schema=schema)
    return Dataset(
        spec.dataset, Split(x, train.y[drawn]), test, format, unlabeled=unlabeled,
        num_unlabeled=unread, **owned,
    )  # fmt: skip
