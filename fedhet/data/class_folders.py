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
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, nearest, reason_of
from fedhet.base.seeding import numpy_rng
from fedhet.data.spec import Dataset, DataSpec, Split, stratified
from fedhet.kinds import Shape

LOG = logging.getLogger("fedhet")
TRAIN, TEST, VALIDATION = "train", "test", "val"
PARTS = {
    "train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST,
    "val": VALIDATION, "valid": VALIDATION, "validation": VALIDATION,
}  # fmt: skip
"""Names of the directories of a part, in lower case."""
UNLABELLED = ("unlabelled", "unlabeled", "unsup")
"""Names of directories with files without a class, next to the class directories."""
MAX_DEPTH = 64
"""Maximum depth of nested directories."""
_TOOLS = {
    "__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "system volume information",
    "lost+found", "__pycache__", ".ds_store", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r",
}  # fmt: skip
"""Directories and files that other programs leave in a tree, in lower case."""
_BESIDE = {"readme", "license", "licence", "copying", "changelog", "cmds"}
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

    def takes(self, name: str, bare: bool = False) -> bool:
        """Return whether a file of this name is a sample; `bare`: has no ending."""
        low = name.lower()
        if bare:
            return self.bare and not _ENDING.search(low) and low not in _BESIDE
        return low.endswith(self.endings)


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
    """A directory of a tree: its samples and its subdirectories, without what is ignored."""

    path: str
    files: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    """Files without an ending, if they may be samples."""
    folders: dict[str, Folder] = field(default_factory=dict)
    unused: Unused = field(default_factory=Unused)
    """Other files that lie directly in the directory."""

    @property
    def name(self) -> str:
        """The name of the directory."""
        return os.path.basename(self.path)

    def walk(self) -> Iterator[Folder]:
        """Yield this directory and all directories below it, sorted by path."""
        below = [self, *(each for folder in self.folders.values() for each in folder.walk())]
        return iter(sorted(below, key=lambda each: each.path))

    def all_unused(self, bare: bool) -> Unused:
        """Return the counts of all files below the directory that are not used."""
        found = Unused()
        for each in self.walk():
            found.merge(each.unused)
            for name in each.bare if not bare else ():
                found.add(name)
        return found

    def samples(self, bare: bool) -> list[str]:
        """Return the paths of all samples below the directory, sorted by directory and name."""
        return [
            os.path.join(each.path, name)
            for each in self.walk()
            for name in sorted([*each.files, *(each.bare if bare else ())])
        ]


def is_ignored(name: str) -> bool:
    """Return whether a file or directory is hidden, or one that other programs leave behind."""
    return name.startswith((".", "~$")) or name.lower() in _TOOLS


@dataclass
class Scan:
    """Reads the directories of one tree; raises DataError if a file would be read twice."""

    files: Files
    follow: bool = True
    """Whether symlinks to directories are followed, if they lead out of the tree."""
    seen: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Real path of each directory that was read -> its path, and whether a symlink led to it."""

    def read(self, root: str | Path) -> Folder:
        """Return the directory `root` with all that is below it.

        Symlinks to other directories are followed, but not symlinks back into the tree, whose
        files would get a second label.
        """
        return self._read(str(root), os.path.realpath(root), (), False)

    def _read(self, path: str, real: str, above: tuple[str, ...], linked: bool) -> Folder:
        if len(above) > MAX_DEPTH:
            raise DataError(f"{path}: more than {MAX_DEPTH} directories deep")
        if real in self.seen or (above and Path(above[0]).is_relative_to(real)):
            before, was_linked = self.seen.get(real, (path, True))
            link = before if was_linked and not linked else path
            raise DataError(f"{link}: is a link to {real}, whose files are in the data already")
        self.seen[real] = path, linked
        found = Folder(path)
        for entry in _listed(path):
            if is_ignored(entry.name):
                _count_ignored(entry, found.unused)
            elif _is_dir(entry):
                is_link = entry.is_symlink()
                if is_link and not self.follow:
                    found.unused.add(f"in {entry.name}", "a symlink")
                    continue
                below = os.path.realpath(entry.path) if is_link else f"{real}/{entry.name}"
                found.folders[entry.name] = self._read(
                    entry.path, below, (*above, real), linked or is_link
                )
            elif entry.is_symlink() or entry.is_file():  # reading a broken symlink is an error
                if self.files.takes(entry.name):
                    found.files.append(entry.name)
                elif self.files.takes(entry.name, bare=True):
                    found.bare.append(entry.name)
                else:
                    found.unused.add(entry.name)
            else:
                found.unused.add(entry.name, "not a regular file")
        return found


def _listed(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a directory, sorted by name. Raises DataError if it is unreadable."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda each: each.name)
    except OSError as error:
        raise DataError(f"{folder}: not a readable directory ({reason_of(error)})") from error


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symlink that leads to itself, or through a directory that is unreadable
        return False


def _count_ignored(entry: os.DirEntry[str], unused: Unused) -> None:
    """Count the files at or below an ignored entry; symlinks are not followed."""
    if entry.is_dir(follow_symlinks=False):
        files = sum(len(names) for _, _, names in os.walk(entry.path))
        unused.add(entry.name, _TOOL_REASON, files)
    else:  # hidden files may be thousands, such as ._name for each name
        named = entry.name if entry.name.lower() in _TOOLS else "hidden files"
        unused.add(named, _TOOL_REASON)


def _count_beside(folder: Path, unused: Unused) -> None:
    """Count the files that lie directly in a directory above the classes, and ignored entries."""
    for entry in _listed(folder):
        if is_ignored(entry.name):
            _count_ignored(entry, unused)
        elif not _is_dir(entry) and entry.name not in _OF_SITES:
            unused.add(entry.name)


@dataclass(frozen=True)
class Tree:
    """A tree of files as it is understood: the paths of the samples by class."""

    root: Path
    classes: tuple[str, ...]
    """The directories that name a class, sorted: the order of the labels."""
    train: dict[str, list[str]]
    test: dict[str, list[str]] | None
    unlabelled: list[str] | None
    """Training files without a class; None without a directory for them."""
    unused: Unused


def understand(
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
    unused = Unused()
    top = _unwrapped(root, files, unused)
    train, test = _parts(top, files, unused)
    scan = Scan(files)
    folder = scan.read(train)
    held = scan.read(test) if test is not None else None
    bare = files.bare and not any(each.files for each in folder.walk())
    apart = [
        folder.folders.pop(name) for name in sorted(folder.folders) if name.lower() in UNLABELLED
    ]
    unlabelled = [path for each in apart for path in each.samples(bare)] if apart else None
    for each in apart:
        unused.merge(each.all_unused(bare))
    level = level or (1 if classes else _class_level(folder, files, bare))
    found = _by_class(folder, level, files, bare, unused)
    if not found:
        _refuse_no_classes(folder, files, bare, root)
    names = tuple(classes) or tuple(sorted(found))
    _check_names(folder, found, names)
    training = {name: _samples_of(found[name], bare, unused) for name in names if name in found}
    for name, own in training.items():
        if not own and (whole or _is_used(found[name])):
            empty = found[name][0]
            unread = empty.all_unused(bare=False)
            what = f"only {unread}" if len(unread) else "nothing"
            raise DataError(
                f"{empty.path}: no valid file for the class, expected {files.noun} "
                f"({', '.join(files.endings)}), got {what}"
            )
    tests = None
    if held is not None:
        for name in [each for each in held.folders if each.lower() in UNLABELLED]:
            raise DataError(
                f"{held.folders[name].path}: test {files.noun} need a class. Move the directory "
                f"into {train}, or remove it."
            )
        by_class = _by_class(held, level, files, bare, unused)
        if not by_class:
            _refuse_no_classes(held, files, bare, root)
        _check_names(held, by_class, names)
        tests = {name: _samples_of(each, bare, unused) for name, each in by_class.items()}
    for part, paths in ((folder, training), (held, tests)):
        if part is not None and not any((paths or {}).values()):
            raise DataError(f"{part.path}: its class directories hold no {files.noun}")
    return Tree(root, names, training, tests, unlabelled, unused)


def read_tree(place: str, spec: DataSpec, files: Files) -> Dataset:
    """Read a tree as a dataset. Raises DataError for any fault of its directories and files."""
    tree = understand(expanded(place), files, level=spec.class_level)
    apart = len(tree.unlabelled or ())
    tree.unused.add(f"{files.noun} without a class", "see data.labelled-alpha", apart)
    tree.unused.report(tree.root, files)
    train = read_part(tree.train, tree.classes, spec, files, most=spec.max_samples)
    form = tuple(train.x.shape[1:])
    test = read_part(tree.test, tree.classes, spec, files, form) if tree.test is not None else None
    return Dataset(
        spec.dataset, train, test, tree.classes, kind=files.kind, shape=files.shape(spec)
    )


def read_part(
    part: dict[str, list[str]],
    classes: Sequence[str],
    spec: DataSpec,
    files: Files,
    like: Shape | None = None,
    most: int = 0,
) -> Split:
    """Read the files of a part, class by class; those that `data.max-samples` draws, if `most`."""
    place = {name: label for label, name in enumerate(classes)}
    pairs = [(path, place[name]) for name in sorted(part) for path in part[name]]
    paths, labels = [path for path, _ in pairs], np.array([y for _, y in pairs], dtype=np.int64)
    if 0 < most < len(paths):
        rows = stratified(labels, most, numpy_rng(spec.seed, "max-samples"))
        paths, labels = [paths[row] for row in rows], labels[rows]
    return Split(files.read(paths, spec, like), torch.from_numpy(labels))


def holds(root: Path, files: Files) -> bool:
    """Return whether a directory below `root` holds a sample, at most eight levels deep."""
    for path, folders, names in os.walk(root, followlinks=True):
        depth = len(Path(path).relative_to(root).parts)  # symlinks may lead back
        folders[:] = [name for name in folders if depth < 8 and not is_ignored(name)]
        taken = (files.takes(name) or files.takes(name, bare=True) for name in names)
        if depth and any(taken):
            return True
    return False


def _entries(root: Path, files: Files) -> tuple[dict[str, Path], bool]:
    """Return the visible directories in `root`, and whether it holds samples itself."""
    folders, has_files = {}, False
    for entry in _listed(root):
        if is_ignored(entry.name):
            continue
        if _is_dir(entry):
            folders[entry.name] = Path(entry.path)
        else:
            has_files |= files.takes(entry.name)
    return folders, has_files


def _unwrapped(root: Path, files: Files, unused: Unused) -> Path:
    """Return the directory of the tree itself: archives often unpack into nested directories.

    A directory that holds nothing but one other directory is left out if that one holds
    directories and no samples, as in archive/archive/train.
    """
    for _ in range(MAX_DEPTH):
        folders, has_files = _entries(root, files)
        if len(folders) != 1 or has_files:
            return root
        ((name, only),) = folders.items()
        below, has_samples = _entries(only, files)
        is_part = name.lower() in PARTS and root.name.lower() != name.lower()
        if not below or has_samples or is_part or root.resolve().is_relative_to(only.resolve()):
            return root
        _count_beside(root, unused)
        root = only
    return root


def part_of(name: str, loosely: bool = False) -> str:
    """Return which part a directory of this name holds, or "" if none.

    `loosely`: one word of the name is enough, as in seg_train or training_set.
    """
    words = re.split(r"[\W_]+", name.lower()) if loosely else [name.lower()]
    found = {PARTS[word] for word in words if word in PARTS}
    return found.pop() if len(found) == 1 else ""


def find_parts(root: Path) -> dict[str, list[Path]]:
    """Return the directories in `root` that are parts, by part.

    A name in which a part is one of several words counts only if both a training and another part
    are found so, each with directories in it: "train_station" may be a class.
    """
    names = [e.name for e in _listed(root) if _is_dir(e) and not is_ignored(e.name)]
    exact: dict[str, list[Path]] = {TRAIN: [], TEST: [], VALIDATION: []}
    loose: dict[str, list[Path]] = {TRAIN: [], TEST: [], VALIDATION: []}
    for name in names:
        if part := part_of(name):
            exact[part].append(root / name)
        if part := part_of(name, loosely=True):
            loose[part] += [root / name] if any(map(_is_dir, _listed(root / name))) else []
    if not exact[TRAIN] and loose[TRAIN] and (loose[TEST] or loose[VALIDATION]):
        return loose
    return exact


def _parts(top: Path, files: Files, unused: Unused) -> tuple[Path, Path | None]:
    """Return the directories of the training and of the test files (or None)."""
    found = find_parts(top)
    if not any(found.values()):
        return top, None
    for part, folders in found.items():
        if len(folders) > 1:
            raise DataError(
                f"{top}: {' and '.join(each.name for each in folders)} both name the part "
                f"{part!r}, expected one of them. Remove or rename the others."
            )
    one = {part: folders[0] for part, folders in found.items() if folders}
    others = [name for name, path in _entries(top, files)[0].items() if path not in one.values()]
    first = next(iter(one.values()))
    flat = [path for path in one.values() if not _entries(path, files)[0]]
    if TRAIN not in one or (one[TRAIN] in flat and others):
        if others and all(_entries(path, files)[1] for path in one.values()):
            raise DataError(
                f"{first}: the name is that of a part, but the directories next to it "
                f"({', '.join(others[:3])}) look like classes. If {first.name} is a class, move "
                f"all class directories into {top / 'train'}; otherwise remove it."
            )
        if TRAIN not in one:
            raise DataError(
                f"{top}: has {first.name}, but no directory of training {files.noun}, expected "
                f"train/<class>/<{files.noun}>. Rename the directory, or name it as the path."
            )
    train = _unwrapped_part(one[TRAIN], files, unused)
    # A test part without class directories has no labels; then the validation part is the test.
    chosen = [part for part in (TEST, VALIDATION) if part in one]
    usable = [part for part in chosen if one[part] not in flat]
    test = (usable or chosen or [""])[0]
    for part in chosen:
        if part != test:
            reason = f"{one[test].name} is the common test set"
            unused.add(f"in {one[part].name}", reason, _all_files(one[part]))
    if test == VALIDATION:
        _warn_once(f"{top}: {one[test].name} is the common test set, as there is no labeled test")
    for name in others:
        unused.add(f"in {name}", f"next to {one[TRAIN].name}", _all_files(top / name))
    _count_beside(top, unused)
    return train, _unwrapped_part(one[test], files, unused, train) if test else None


def _all_files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def _unwrapped_part(part: Path, files: Files, unused: Unused, train: Path | None = None) -> Path:
    """Return the directory that holds the class directories of a part, as in train/train/<class>.

    A directory of a test part that has the name of a training class is a class.
    """
    names = set(_entries(train, files)[0]) if train is not None else set()
    while not names & set(_entries(part, files)[0]):
        below = _unwrapped(part, files, unused)
        if below == part:
            break
        part = below
    return part


def _class_level(folder: Folder, files: Files, bare: bool) -> int:
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
            if deep is not each and deep.name.lower() in low and deep.name.lower() != name.lower()
        )
        if again:
            raise DataError(
                f"{again[0]}: has the name of another class directory. Move or remove it, or set "
                f"{setting} if its files belong to the class {name}."
            )
    nested = [each for each in classes.values() if not (each.files or (bare and each.bare))]
    # Directories that add no level: cat/cat/*, and cat/images/* next to cat/masks.
    plain = [
        each
        for each in nested
        if [name.lower() for name in each.folders] == [each.name.lower()]
        or {name.lower() for name in each.folders} <= _IMAGES | _MASKS
    ]
    if nested and len(nested) == len(classes) and len(plain) < len(nested):
        below = sorted({name for each in nested for name in each.folders})
        raise DataError(
            f"{folder.path}: its class directories hold directories and no {files.noun}, so the "
            f"classes may be {_some(sorted(classes))}, or {_some(below)}. Set {setting} or "
            "data.class-level=2 to decide (at a site: list the classes in classes.txt, or move the "
            "files)."
        )
    return 1


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _is_used(folders: Sequence[Folder]) -> bool:
    """Return whether directories hold any file that no other program left."""
    return any(
        each.files or each.bare or each.unused.own for folder in folders for each in folder.walk()
    )


def _by_class(
    folder: Folder, level: int, files: Files, bare: bool, unused: Unused
) -> dict[str, list[Folder]]:
    """Return the directories of each class; count the files above them."""
    unused.merge(folder.unused)
    loose = [*folder.files, *folder.bare] if bare else folder.files
    unused.add(files.noun, _LOOSE_REASON, len(loose))
    for name in folder.bare if not bare else ():
        unused.add(name)
    found: dict[str, list[Folder]] = {}
    for name, each in folder.folders.items():
        if level == 1:
            found.setdefault(name, []).append(each)
        else:
            for below, folders in _by_class(each, level - 1, files, bare, unused).items():
                found.setdefault(below, []).extend(folders)
    return found


def _samples_of(folders: Sequence[Folder], bare: bool, unused: Unused) -> list[str]:
    """Return the samples of a class; count the other files of its directories."""
    paths: list[str] = []
    for folder in folders:
        for name in [each for each in folder.folders if each.lower() in _MASKS]:
            masks = folder.folders.pop(name)
            unused.add(f"in {name}", "masks or annotations", _all_files(Path(masks.path)))
        unused.merge(folder.all_unused(bare))
        paths += folder.samples(bare)
    return paths


def _check_names(folder: Folder, found: dict[str, list[Folder]], classes: Sequence[str]) -> None:
    """Raise DataError for a directory that is no class, or whose name cannot be shown."""
    for name, folders in sorted(found.items()):
        if not name.isprintable():  # nor are bytes that are not UTF-8, which Python escapes
            raise DataError(
                f"{folders[0].path}: a directory names its class, in printable characters of UTF-8"
            )
        if name not in classes and _is_used(folders):
            close = nearest(name, classes)
            raise DataError(f"{folders[0].path}: not a class of the training set{close}")
        if name not in classes:
            del found[name]


def _refuse_no_classes(folder: Folder, files: Files, bare: bool, root: Path) -> NoReturn:
    tables = [
        name
        for place in dict.fromkeys((root, Path(folder.path), Path(folder.path).parent))
        if place.is_relative_to(root)
        for name in sorted(os.listdir(place))
        if name.lower().endswith((".csv", ".tsv", ".xlsx", ".json", ".jsonl"))
    ]
    loose = len(folder.files) + (len(folder.bare) if bare else 0)
    held = f", got {loose} {files.noun} without one" if loose else ""
    table = f" The labels in {tables[0]} are not read." if tables else ""
    raise DataError(
        f"{folder.path}: has no folders; expected one folder of {files.noun} for each class{held}."
        f"{table}"
    )
