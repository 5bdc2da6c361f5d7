"""Trees of files, one directory for each class: images, or texts.

PATH/train/<class>/* and PATH/test/<class>/*, or PATH/<class>/* without a test set. docs/data.md
lists the layouts that are read, and those that are refused because they can be read in two ways.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhet.base.errors import DataError, nearest
from fedhet.base.seeding import numpy_rng
from fedhet.data.spec import Dataset, DataSpec, Split, reading, subset_rows
from fedhet.kinds import Shape

LOG = logging.getLogger("fedhet")
TRAIN, TEST, VALIDATION = "train", "test", "val"
PARTS = {
    "train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST,
    "val": VALIDATION, "valid": VALIDATION, "validation": VALIDATION,
}  # fmt: skip
"""Names of the directories of a part, in lower case."""
UNLABELED = ("unlabeled", "unlabelled", "unsup")
"""Names of directories with files without a class, next to the class directories."""
MAX_DEPTH = 64
"""Maximum depth of nested directories."""
_TOOLS = {
    "__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "system volume information",
    "lost+found", "__pycache__", ".ds_store", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r",
}  # fmt: skip
"""Directories and files that other programs leave in a tree, in lower case."""
_BESIDE = {"readme", "license", "copying", "changelog", "cmds"}
"""Names of files without an ending that describe a data set and are no samples of it."""
_OF_SITES = ("classes.txt", "schema.toml", "site.toml")
"""Files that describe a site's data."""
_IMAGES = {"images", "image", "imgs", "img"}
_MASKS = {"masks", "mask", "annotations", "annotation", "ground_truth", "groundtruth", "gt"}
_NO_CLASS = (_IMAGES | _MASKS | {"labels"}) - {"mask"}
_PIECE = re.compile(
    r".*(?<![a-z])(part|batch|fold|chunk|split|shard|images?|imgs?)[ _-]*\d+", re.ASCII
)
"""Names of directories that hold a piece of a data set, such as images_part_1."""
_ENDING = re.compile(r"\.[a-z][a-z0-9]{0,7}(\.gz|\.bz2|\.xz)?$")
_HINTS = {
    ".dcm": "DICOM: convert them to 8-bit or 16-bit PNG",
    ".heic": "convert them to JPEG or PNG", ".heif": "convert them to JPEG or PNG",
    ".nii": "volumes: save slices as PNG", ".nii.gz": "volumes: save slices as PNG",
    ".npy": "arrays: see npz:DIR", ".npz": "arrays: see npz:DIR",
    ".zip": "unpack them", ".tar": "unpack them", ".rar": "unpack them", ".7z": "unpack them",
    ".gz": "unpack them", ".tar.gz": "unpack them",
}  # fmt: skip
_TOOL_REASON, _LOOSE_REASON = "left by other programs", "in no class directory"


@dataclass(frozen=True)
class Files:
    """Files that hold a sample each, and their reader."""

    noun: str
    """Name of the files in messages."""
    endings: tuple[str, ...]
    """Endings of their names, in lower case."""
    read: Callable[[Sequence[str], DataSpec, Shape | None], Tensor]
    """(paths, settings, shape that the samples must have or None) -> samples [N, ...]."""
    kind: str
    """The kind of the samples."""
    shape: Callable[[DataSpec], Shape] = lambda spec: ()
    """(settings) -> the shape of a sample; (): that of what was read."""
    bare: bool = False
    """Whether files without an ending are read if no file of the tree has one of the endings."""

    def takes_bare(self, name: str) -> bool:
        """Return whether a file of this name, which has no ending, may be a sample."""
        low = name.lower()
        return self.bare and not _ENDING.search(low) and low not in _BESIDE


class Unused:
    """Files that are not used, counted by name or ending and by reason."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, reason: str = "", count: int = 1) -> None:
        """Count files of one name, reported by `name`, or by their ending if there is no reason."""
        if not reason:
            found = _ENDING.search(name.lower())
            name = found[0] if found else "without an ending"
            reason = _HINTS.get(name, "")
        if count:
            self._counts[name, reason] += count

    def merge(self, other: Unused) -> None:
        """Add the counts of `other`."""
        self._counts.update(other._counts)

    def __len__(self) -> int:
        return sum(self._counts.values())

    @property
    def own(self) -> int:
        """The number of files that no other program left."""
        return len(self) - sum(n for (_, why), n in self._counts.items() if why == _TOOL_REASON)

    def __str__(self) -> str:
        """Return the counts in words, the largest first."""
        listed = [
            f"{count} {name}{f' ({reason})' if reason else ''}"
            for (name, reason), count in self._counts.most_common(8)
        ]
        more = len(self._counts) - len(listed)
        return ", ".join(listed) + (f", and {more} other kinds" if more > 0 else "")

    def report(self, root: Path, files: Files) -> None:
        """Log the counts in one line, if there are any; only on this machine."""
        if len(self):
            are = "file is" if len(self) == 1 else "files are"
            _warn_once(f"{root}: {len(self)} {are} not used as {files.noun}: {self}")


@lru_cache(maxsize=256)
def _warn_once(line: str) -> None:
    """Log a line, unless this process has logged it before."""
    LOG.warning("%s", "".join(c if c.isprintable() else repr(c)[1:-1] for c in line))


@dataclass
class Folder:
    """A directory of a tree: its files and its subdirectories, without what is ignored."""

    path: str
    files: list[str] = field(default_factory=list)
    """The samples."""
    bare: list[str] = field(default_factory=list)
    """Files without an ending, as long as it is open whether they are samples."""
    others: list[str] = field(default_factory=list)
    folders: dict[str, Folder] = field(default_factory=dict)
    ignored: Unused = field(default_factory=Unused)

    def walk(self) -> Iterator[Folder]:
        """Yield this directory and all directories below it, sorted by path."""
        below = [self, *(each for folder in self.folders.values() for each in folder.walk())]
        return iter(sorted(below, key=lambda each: each.path))

    def unused(self) -> Unused:
        """Return the counts of the files that lie directly in the directory and are no samples."""
        found = Unused()
        found.merge(self.ignored)
        for name in self.others:
            found.add(name)
        return found

    def all_unused(self) -> Unused:
        """Return the counts of all files below the directory that are not used."""
        found = Unused()
        for each in self.walk():
            found.merge(each.unused())
        return found

    def samples(self) -> list[str]:
        """Return the paths of all samples below the directory, sorted by directory and name."""
        return [os.path.join(each.path, name) for each in self.walk() for name in each.files]


def is_ignored(name: str) -> bool:
    """Return whether a file or directory is hidden, or one that other programs leave behind."""
    return name.startswith((".", "~$")) or name.lower() in _TOOLS


def part_of(name: str, loosely: bool = False) -> str:
    """Return which part a directory of this name holds, or "" if none.

    `loosely`: one word of the name is enough, as in seg_train or training_set.
    """
    words = re.split(r"[\W_]+", name.lower()) if loosely else [name.lower()]
    found = {PARTS[word] for word in words if word in PARTS}
    return found.pop() if len(found) == 1 else ""


@dataclass
class Scan:
    """Reads the directories of one tree; raises DataError if a file would be read twice."""

    files: Files
    follow: bool = True
    """Whether symlinks to directories are followed, if they lead out of the tree."""
    unused: Unused = field(default_factory=Unused)
    """Counts of files above the classes."""
    _bare: bool | None = None
    """Whether files without an ending are samples; None: nothing is read yet."""
    _seen: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Real path of each directory that was read -> its path, and whether a symlink led to it."""
    _folders: dict[str, Folder] = field(default_factory=dict)

    def listed(self, path: str | Path) -> Folder:
        """Return a directory, of whose subdirectories nothing but the names is read.

        Raises DataError if it is unreadable.
        """
        if found := self._folders.get(str(path)):
            return found
        found = self._folders[str(path)] = Folder(str(path))
        with reading(path, "directory"), os.scandir(path) as entries:
            ordered = sorted(entries, key=lambda each: each.name)
        for entry in ordered:
            name, is_link = entry.name, entry.is_symlink()
            if is_ignored(name):
                if entry.is_dir(follow_symlinks=False):
                    found.ignored.add(name, _TOOL_REASON, _all_files(entry.path))
                else:  # hidden files may be thousands, such as ._name for each name
                    named = name if name.lower() in _TOOLS else "hidden files"
                    found.ignored.add(named, _TOOL_REASON)
            elif os.path.isdir(entry.path) if is_link else entry.is_dir():
                if is_link and not self.follow:
                    found.ignored.add(f"in {name}", "a symlink")
                else:
                    found.folders[name] = Folder(entry.path)
            elif not is_link and not entry.is_file():  # reading a broken symlink is an error
                found.ignored.add(name, "not a regular file")
            elif name.lower().endswith(self.files.endings):
                found.files.append(name)
            else:
                (found.bare if self.files.takes_bare(name) else found.others).append(name)
        return found

    def read(self, root: str | Path) -> Folder:
        """Return the directory `root` with all that is below it.

        Symlinks to other directories are followed, but not symlinks back into the tree, whose
        files would get a second label. Files without an ending are samples if the directory that is
        read first has no others.
        """
        found = self._read(str(root), os.path.realpath(root), (), False)
        if self._bare is None:
            self._bare = not any(each.files for each in found.walk())
        for each in found.walk():
            if self._bare:
                each.files = sorted([*each.files, *each.bare])
            else:
                each.others += each.bare
        return found

    def _read(self, path: str, real: str, above: tuple[str, ...], linked: bool) -> Folder:
        if len(above) > MAX_DEPTH:
            raise DataError(f"{path}: more than {MAX_DEPTH} directories deep")
        if real in self._seen or (above and Path(above[0]).is_relative_to(real)):
            before, was_linked = self._seen.get(real, (path, True))
            link = before if was_linked and not linked else path
            raise DataError(f"{link}: is a link to {real}, whose files are in the data already")
        self._seen[real] = path, linked
        found = self.listed(path)
        for name, each in found.folders.items():
            is_link = os.path.islink(each.path)
            below = os.path.realpath(each.path) if is_link else f"{real}/{name}"
            found.folders[name] = self._read(each.path, below, (*above, real), linked or is_link)
        return found

    def find_parts(self, root: Path) -> dict[str, list[Path]]:
        """Return the directories in `root` that are parts, by part.

        A name in which a part is one of several words counts only if both a training and another
        part are found so, each with directories in it: "train_station" may be a class.
        """
        exact: dict[str, list[Path]] = {TRAIN: [], TEST: [], VALIDATION: []}
        loose: dict[str, list[Path]] = {TRAIN: [], TEST: [], VALIDATION: []}
        for name in self.listed(root).folders:
            if part := part_of(name):
                exact[part].append(root / name)
            if (part := part_of(name, loosely=True)) and self.listed(root / name).folders:
                loose[part].append(root / name)
        if not exact[TRAIN] and loose[TRAIN] and (loose[TEST] or loose[VALIDATION]):
            return loose
        return exact

    def unwrapped(self, root: Path) -> Path:
        """Return the directory of the tree itself: archives often unpack into nested directories.

        A directory that holds nothing but one other directory is left out if that one holds
        directories and no samples, as in archive/archive/train.
        """
        for _ in range(MAX_DEPTH):
            here = self.listed(root)
            only = root / next(iter(here.folders), "")
            if len(here.folders) != 1 or here.files:
                break
            below = self.listed(only)
            is_part = only.name.lower() in PARTS and root.name.lower() != only.name.lower()
            if not below.folders or below.files or is_part:
                break
            if root.resolve().is_relative_to(only.resolve()):
                break
            self._count_beside(root)
            root = only
        return root

    def parts(self, top: Path) -> tuple[Path, Path | None]:
        """Return the directories of the training and of the test files (or None)."""
        found = self.find_parts(top)
        if not any(found.values()):
            return top, None
        for part, folders in found.items():
            if len(folders) > 1:
                raise DataError(
                    f"{top}: {' and '.join(each.name for each in folders)} both name the part "
                    f"{part!r}, expected one of them. Remove or rename the others."
                )
        one = {part: folders[0] for part, folders in found.items() if folders}
        others = [name for name in self.listed(top).folders if top / name not in one.values()]
        first = next(iter(one.values()))
        flat = [path for path in one.values() if not self.listed(path).folders]
        if TRAIN not in one or (one[TRAIN] in flat and others):
            if others and all(self.listed(path).files for path in one.values()):
                raise DataError(
                    f"{first}: the name is that of a part, but the directories next to it "
                    f"({', '.join(others[:3])}) look like classes. If {first.name} is a class, "
                    f"move all class directories into {top / 'train'}; otherwise remove it."
                )
            if TRAIN not in one:
                noun = self.files.noun
                raise DataError(
                    f"{top}: has {first.name}, but no directory of training {noun}, expected "
                    f"train/<class>/<{noun}>. Rename the directory, or name it as the path."
                )
        train = self._unwrapped_part(one[TRAIN], set())
        # A test part without class directories has no labels; then the validation part is the test.
        chosen = [part for part in (TEST, VALIDATION) if part in one]
        usable = [part for part in chosen if one[part] not in flat]
        test = (usable or chosen or [""])[0]
        for part in chosen:
            if part != test:
                reason = f"{one[test].name} is the common test set"
                self.unused.add(f"in {one[part].name}", reason, _all_files(one[part]))
        if test == VALIDATION:
            name = one[test].name
            _warn_once(f"{top}: {name} is the common test set, as there is no labeled test")
        for name in others:
            self.unused.add(f"in {name}", f"next to {one[TRAIN].name}", _all_files(top / name))
        self._count_beside(top)
        classes = set(self.listed(train).folders)
        return train, self._unwrapped_part(one[test], classes) if test else None

    def _unwrapped_part(self, part: Path, classes: set[str]) -> Path:
        """Return the directory that holds a part's class directories, as in train/train/<class>.

        A directory of a test part that has the name of a training class is a class.
        """
        while not classes & set(self.listed(part).folders):
            below = self.unwrapped(part)
            if below == part:
                break
            part = below
        return part

    def _count_beside(self, path: Path) -> None:
        """Count the files that lie directly in a directory above the classes."""
        found = self.listed(path)
        self.unused.merge(found.ignored)
        for name in (*found.files, *found.bare, *found.others):
            if name not in _OF_SITES:
                self.unused.add(name)

    def class_folders(
        self, part: Folder, level: int, classes: Sequence[str], root: Path
    ) -> dict[str, list[Folder]]:
        """Return the directories of each class of a part; count the files above them.

        Raises DataError if there are none, or for one that is not in `classes`, if any are known,
        or whose name cannot be shown.
        """
        found: dict[str, list[Folder]] = {}
        above = [part]
        for depth in range(1, level + 1):
            below = [each for folder in above for each in folder.folders.items()]
            for folder in above:
                self.unused.merge(folder.unused())
                self.unused.add(self.files.noun, _LOOSE_REASON, len(folder.files))
            if depth < level:
                above = [each for _, each in below]
        for name, each in below:
            found.setdefault(name, []).append(each)
        if not found:
            tables = [
                name
                for place in dict.fromkeys((root, Path(part.path), Path(part.path).parent))
                if place.is_relative_to(root)
                for name in sorted(os.listdir(place))
                if name.lower().endswith((".csv", ".tsv", ".xlsx", ".json", ".jsonl"))
            ]
            loose, noun = len(part.files), self.files.noun
            held = f", got {loose} {noun} without one" if loose else ""
            table = f" The labels in {tables[0]} are not read." if tables else ""
            raise DataError(
                f"{part.path}: has no folders; expected one folder of {noun} for each class{held}."
                f"{table}"
            )
        for name, folders in sorted(found.items()):
            if not name.isprintable():  # nor are bytes that are not UTF-8, which Python escapes
                rule = "a directory names its class, in printable characters of UTF-8"
                raise DataError(f"{folders[0].path}: {rule}")
            if classes and name not in classes:
                if _is_used(folders):
                    close = nearest(name, classes)
                    raise DataError(f"{folders[0].path}: not a class of the training set{close}")
                del found[name]
        return found

    def samples_of(self, folders: Sequence[Folder]) -> list[str]:
        """Return the samples of a class; count the other files of its directories."""
        paths: list[str] = []
        for folder in folders:
            for name in [each for each in folder.folders if each.lower() in _MASKS]:
                masks = folder.folders.pop(name)
                self.unused.add(f"in {name}", "masks or annotations", _all_files(masks.path))
            self.unused.merge(folder.all_unused())
            paths += folder.samples()
        return paths


def _all_files(folder: str | Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def _is_used(folders: Sequence[Folder]) -> bool:
    """Return whether directories hold any file that no other program left."""
    below = [each for folder in folders for each in folder.walk()]
    return any(each.files or each.others or each.ignored.own for each in below)


def holds(root: Path, files: Files) -> bool:
    """Return whether a directory below `root` holds a sample, at most eight levels deep."""
    for path, folders, names in os.walk(root, followlinks=True):
        depth = len(Path(path).relative_to(root).parts)  # symlinks may lead back
        folders[:] = [name for name in folders if depth < 8 and not is_ignored(name)]
        taken = (name.lower().endswith(files.endings) or files.takes_bare(name) for name in names)
        if depth and any(taken):
            return True
    return False


@dataclass(frozen=True)
class Tree:
    """A tree of files as it is understood: the paths of the samples by class."""

    root: Path
    files: Files
    classes: tuple[str, ...]
    """The directories that name a class, sorted: the order of the labels."""
    train: dict[str, list[str]]
    test: dict[str, list[str]] | None
    unlabeled: list[str] | None
    """Training files without a class; None without a directory for them."""
    unused: Unused

    def read(self, spec: DataSpec, like: Shape | None = None, most: int = 0) -> Dataset:
        """Read the samples, of shape `like` if it is given; log which files are not used.

        If `most`, reads only the training samples that `data.max-samples` draws.
        """
        self.unused.report(self.root, self.files)
        train = self._split(self.train, spec, like, most)
        form = tuple(train.x.shape[1:])
        test = self._split(self.test, spec, form) if self.test is not None else None
        kind, shape = self.files.kind, self.files.shape(spec)
        return Dataset(spec.dataset, train, test, self.classes, kind=kind, shape=shape)

    def _split(
        self, part: dict[str, list[str]], spec: DataSpec, like: Shape | None, most: int = 0
    ) -> Split:
        place = {name: label for label, name in enumerate(self.classes)}
        pairs = [(path, place[name]) for name in sorted(part) for path in part[name]]
        paths, labels = [path for path, _ in pairs], np.array([y for _, y in pairs], np.int64)
        rows = subset_rows(labels, most, numpy_rng(spec.seed, "max-samples"))
        paths = [paths[row] for row in rows]
        return Split(self.files.read(paths, spec, like), torch.from_numpy(labels[rows]))


def find_tree(
    root: Path, files: Files, *, level: int = 0, classes: Sequence[str] = (), whole: bool = True
) -> Tree:
    """Find the parts, the classes and the samples of a tree.

    Args:
        root: Directory of the tree.
        files: Which files hold samples.
        level: Depth of the class directories below `root` or its parts; 0 = found.
        classes: The classes in order, if they are known.
        whole: Whether every class needs a sample; False for a site, which may lack some.

    Raises DataError for a tree that holds no classes, or that can be read in two ways.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such directory")
    scan = Scan(files)
    train, test = scan.parts(scan.unwrapped(root))
    folder = scan.read(train)
    held = scan.read(test) if test is not None else None
    apart = [
        folder.folders.pop(name) for name in sorted(folder.folders) if name.lower() in UNLABELED
    ]
    unlabeled = [path for each in apart for path in each.samples()] if apart else None
    for each in apart:
        scan.unused.merge(each.all_unused())
    level = level or (1 if classes else _class_level(folder, files))
    found = scan.class_folders(folder, level, classes, root)
    names = tuple(classes) or tuple(sorted(found))
    training = {name: scan.samples_of(found[name]) for name in names if name in found}
    for name, own in training.items():
        if not own and (whole or _is_used(found[name])):
            empty = found[name][0]
            unread = empty.all_unused()
            what = f"only {unread}" if len(unread) else "nothing"
            raise DataError(
                f"{empty.path}: no valid file for the class, expected {files.noun} "
                f"({', '.join(files.endings)}), got {what}"
            )
    tests = None
    if held is not None:
        for name in [each for each in held.folders if each.lower() in UNLABELED]:
            raise DataError(
                f"{held.folders[name].path}: test {files.noun} need a class. Move the directory "
                f"into {train}, or remove it."
            )
        by_class = scan.class_folders(held, level, names, root)
        tests = {name: scan.samples_of(each) for name, each in by_class.items()}
    for part, paths in ((folder, training), (held, tests)):
        if part is not None and not any((paths or {}).values()):
            raise DataError(f"{part.path}: its class directories hold no {files.noun}")
    return Tree(root, files, names, training, tests, unlabeled, scan.unused)


def _class_level(folder: Folder, files: Files) -> int:
    """Return the depth of the class directories: 1. Raises DataError if another is possible."""
    classes = {name: each for name, each in folder.folders.items() if _is_used([each])}
    low = {name.lower() for name in classes}
    setting = "data.class-level=1"
    odd = sorted(name for name in classes if name.lower() in _NO_CLASS)
    if len(classes) > 1 and (odd or all(_PIECE.fullmatch(name) for name in low)):
        named = ", ".join((odd or sorted(classes))[:3])
        raise DataError(
            f"{folder.path}: the directory names ({named}) look like pieces of a data set, not like"
            f" classes, expected one directory for each class; tables of labels are not read. Move "
            f"the {files.noun} into class directories, or set {setting} if the names are classes."
        )
    for name, each in classes.items():
        inside = each.folders
        if parts := sorted(name for name in inside if part_of(name)):
            raise DataError(
                f"{each.path}: holds {' and '.join(parts)}, which must lie at the top of the tree, "
                f"above the class directories. Name a directory such as {each.path} as the path, "
                "or move the files to train/<class> and test/<class>."
            )
        again = sorted(
            deep.path
            for deep in each.walk()
            if deep is not each and os.path.basename(deep.path).lower() in low - {name.lower()}
        )
        if again:
            raise DataError(
                f"{again[0]}: has the name of another class directory. Move or remove it, or set "
                f"{setting} if its files belong to the class {name}."
            )
    nested = [each for each in classes.values() if not each.files]
    # Directories that add no level: cat/cat/*, and cat/images/* next to cat/masks.
    plain = [
        each
        for each in nested
        if [name.lower() for name in each.folders] == [os.path.basename(each.path).lower()]
        or {name.lower() for name in each.folders} <= _IMAGES | _MASKS
    ]
    if nested and len(nested) == len(classes) and len(plain) < len(nested):
        below = {name for each in nested for name in each.folders}
        one, two = (
            ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            for names in (classes, below)
        )
        raise DataError(
            f"{folder.path}: its class directories hold directories and no {files.noun}, so the "
            f"classes may be {one}, or {two}. Set {setting} or data.class-level=2 to decide (at a "
            "site: list the classes in classes.txt, or move the files)."
        )
    return 1
