"""Directory trees of images or texts, with one directory for each class.

The layout is PATH/train/<class>/* and PATH/test/<class>/*, or PATH/<class>/* without a test set.
docs/data.md lists the supported layouts and the layouts that are rejected as ambiguous.
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
"""Directory names of the training, test, and validation parts, in lower case."""
UNLABELED = ("unlabeled", "unlabelled", "unsup")
"""Names of directories with unlabeled files, next to the class directories."""
MAX_DEPTH = 64
"""Maximum depth of nested directories."""
_TOOLS = {
    "__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "system volume information",
    "lost+found", "__pycache__", ".ds_store", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r",
}  # fmt: skip
"""Names of directories and files that other programs create, in lower case."""
_DOCUMENTS = {"readme", "license", "copying", "changelog", "cmds"}
"""Names of files without an extension that describe a dataset instead of being samples."""
_OF_SITES = ("classes.txt", "schema.toml", "site.toml")
"""Names of the files that describe a site's data."""
_IMAGES = {"images", "image", "imgs", "img"}
_MASKS = {"masks", "mask", "annotations", "annotation", "ground_truth", "groundtruth", "gt"}
_NO_CLASS = (_IMAGES | _MASKS | {"labels"}) - {"mask"}
_PIECE = re.compile(
    r".*(?<![a-z])(part|batch|fold|chunk|split|shard|images?|imgs?)[ _-]*\d+", re.ASCII
)
"""Names of directories that contain a piece of a dataset, such as images_part_1."""
_ENDING = re.compile(r"\.[a-z][a-z0-9]{0,7}(\.gz|\.bz2|\.xz)?$")
_HINTS = {
    ".dcm": "DICOM: convert them to 8-bit or 16-bit PNG",
    ".heic": "convert them to JPEG or PNG", ".heif": "convert them to JPEG or PNG",
    ".nii": "volumes: save slices as PNG", ".nii.gz": "volumes: save slices as PNG",
    ".npy": "arrays: see npz:DIR", ".npz": "arrays: see npz:DIR",
    ".zip": "unpack them", ".tar": "unpack them", ".rar": "unpack them", ".7z": "unpack them",
    ".gz": "unpack them", ".tar.gz": "unpack them",
}  # fmt: skip
_TOOL_REASON, _LOOSE_REASON = "created by other programs", "outside of the class directories"


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
    kind: str
    """Kind of the samples."""
    shape: Callable[[DataSpec], Shape] = lambda spec: ()
    """Function that returns the shape of a sample for given data settings; () = the shape of the
    array that was read."""
    bare: bool = False
    """Whether to read files without an extension if no file in the tree has one of `endings`."""

    def accepts_bare(self, name: str) -> bool:
        """Return whether a file without an extension may be a sample."""
        low = name.lower()
        return self.bare and not _ENDING.search(low) and low not in _DOCUMENTS


class Unused:
    """Counts of unused files, by name or extension, and by reason."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, reason: str = "", count: int = 1) -> None:
        """Count files by `name` and reason, or by file extension if the reason is empty."""
        if not reason:
            extension = _ENDING.search(name.lower())
            name = extension[0] if extension else "without an extension"
            reason = _HINTS.get(name, "")
        if count:
            self._counts[name, reason] += count

    def merge(self, other: Unused) -> None:
        """Add the counts of `other`."""
        self._counts.update(other._counts)

    def __len__(self) -> int:
        return sum(self._counts.values())

    @property
    def num_user_files(self) -> int:
        """Number of unused files that were not created by other programs."""
        return len(self) - sum(n for (_, why), n in self._counts.items() if why == _TOOL_REASON)

    def __str__(self) -> str:
        """Return the counts as text, in descending order."""
        listed = [
            f"{count} {name}{f' ({reason})' if reason else ''}"
            for (name, reason), count in self._counts.most_common(8)
        ]
        more = len(self._counts) - len(listed)
        return ", ".join(listed) + (f", and {more} other kinds" if more > 0 else "")

    def report(self, root: Path, files: Files) -> None:
        """Log the counts in one line, if there are any. The log stays on this machine."""
        if len(self):
            are = "file is" if len(self) == 1 else "files are"
            _warn_once(f"{root}: {len(self)} {are} not used as {files.noun}: {self}")


@lru_cache(maxsize=256)
def _warn_once(line: str) -> None:
    """Log a line, unless this process has already logged it."""
    LOG.warning("%s", "".join(c if c.isprintable() else repr(c)[1:-1] for c in line))


@dataclass
class Folder:
    """Directory in a tree, with its files, its subdirectories, and counts of ignored entries."""

    path: str
    files: list[str] = field(default_factory=list)
    """Names of the sample files."""
    bare: list[str] = field(default_factory=list)
    """Names of files without an extension, which may be samples."""
    others: list[str] = field(default_factory=list)
    """Names of files that are not samples."""
    folders: dict[str, Folder] = field(default_factory=dict)
    ignored: Unused = field(default_factory=Unused)

    def walk(self) -> Iterator[Folder]:
        """Iterate over this directory and all directories below it, sorted by path."""
        below = [self, *(each for folder in self.folders.values() for each in folder.walk())]
        return iter(sorted(below, key=lambda each: each.path))

    def unused(self) -> Unused:
        """Count the files directly in this directory that are not samples."""
        counts = Unused()
        counts.merge(self.ignored)
        for name in self.others:
            counts.add(name)
        return counts

    def all_unused(self) -> Unused:
        """Count all unused files in this directory and below."""
        counts = Unused()
        for each in self.walk():
            counts.merge(each.unused())
        return counts

    def samples(self) -> list[str]:
        """Return the paths of all samples below the directory, sorted by directory and name."""
        return [os.path.join(each.path, name) for each in self.walk() for name in each.files]


def is_ignored(name: str) -> bool:
    """Return whether a file or directory is hidden or was created by another program."""
    return name.startswith((".", "~$")) or name.lower() in _TOOLS


def part_of(name: str, any_word: bool = False) -> str:
    """Return the part that a directory name refers to, or "" if the name refers to no part.

    With `any_word`, one matching word in the name is enough, as in seg_train or training_set.
    """
    words = re.split(r"[\W_]+", name.lower()) if any_word else [name.lower()]
    parts = {PARTS[word] for word in words if word in PARTS}
    return parts.pop() if len(parts) == 1 else ""


@dataclass
class Scan:
    """Scanner for one directory tree. Raises DataError if a file would be read twice."""

    files: Files
    follow: bool = True
    """Whether to follow symlinks to directories outside of the tree."""
    unused: Unused = field(default_factory=Unused)
    """Counts of unused files above the class directories."""
    _bare: bool | None = None
    """Whether files without an extension are samples, or None before the first `read`."""
    _seen: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Path of each visited directory, and whether a symlink led to it, by real path."""
    _folders: dict[str, Folder] = field(default_factory=dict)

    def listed(self, path: str | Path) -> Folder:
        """List a directory without listing its subdirectories.

        Raises DataError if the directory is unreadable.
        """
        if folder := self._folders.get(str(path)):
            return folder
        folder = self._folders[str(path)] = Folder(str(path))
        with reading(path, "directory"), os.scandir(path) as entries:
            ordered = sorted(entries, key=lambda each: each.name)
        for entry in ordered:
            name, is_link = entry.name, entry.is_symlink()
            if is_ignored(name):
                if entry.is_dir(follow_symlinks=False):
                    folder.ignored.add(name, _TOOL_REASON, _count_files(entry.path))
                else:  # Count hidden files together, because there may be one for each sample.
                    label = name if name.lower() in _TOOLS else "hidden files"
                    folder.ignored.add(label, _TOOL_REASON)
            elif os.path.isdir(entry.path) if is_link else entry.is_dir():
                if is_link and not self.follow:
                    folder.ignored.add(f"in {name}", "a symlink")
                else:
                    folder.folders[name] = Folder(entry.path)
            elif not is_link and not entry.is_file():  # Broken symlinks fail later, when read.
                folder.ignored.add(name, "not a regular file")
            elif name.lower().endswith(self.files.endings):
                folder.files.append(name)
            else:
                (folder.bare if self.files.accepts_bare(name) else folder.others).append(name)
        return folder

    def read(self, root: str | Path) -> Folder:
        """Read the directory `root` recursively.

        Symlinks to directories outside the tree are followed. A symlink back into the tree is an
        error, because its files would get a second label. Files without an extension are samples if
        the first directory that is read contains no other samples.
        """
        tree = self._read(str(root), os.path.realpath(root), (), False)
        if self._bare is None:
            self._bare = not any(each.files for each in tree.walk())
        for each in tree.walk():
            if self._bare:
                each.files = sorted([*each.files, *each.bare])
            else:
                each.others += each.bare
        return tree

    def _read(self, path: str, real: str, parents: tuple[str, ...], linked: bool) -> Folder:
        if len(parents) > MAX_DEPTH:
            raise DataError(f"{path}: directories are nested more than {MAX_DEPTH} levels deep")
        if real in self._seen or (parents and Path(parents[0]).is_relative_to(real)):
            before, was_linked = self._seen.get(real, (path, True))
            link = before if was_linked and not linked else path
            raise DataError(
                f"{link}: symlink to {real}, whose files are already part of the data. Remove it."
            )
        self._seen[real] = path, linked
        folder = self.listed(path)
        for name, each in folder.folders.items():
            is_link = os.path.islink(each.path)
            below = os.path.realpath(each.path) if is_link else f"{real}/{name}"
            folder.folders[name] = self._read(each.path, below, (*parents, real), linked or is_link)
        return folder

    def find_parts(self, root: Path) -> dict[str, list[Path]]:
        """Find the training, test, and validation directories in `root`, by part.

        Names with several words, such as "train_station", may be classes. They count as parts only
        if the training part and another part exist, and if both parts contain directories.
        """
        exact: dict[str, list[Path]] = {TRAIN: [], TEST: [], VALIDATION: []}
        by_word: dict[str, list[Path]] = {TRAIN: [], TEST: [], VALIDATION: []}
        for name in self.listed(root).folders:
            if part := part_of(name):
                exact[part].append(root / name)
            if (part := part_of(name, any_word=True)) and self.listed(root / name).folders:
                by_word[part].append(root / name)
        if not exact[TRAIN] and by_word[TRAIN] and (by_word[TEST] or by_word[VALIDATION]):
            return by_word
        return exact

    def unwrapped(self, root: Path) -> Path:
        """Skip wrapper directories, and return the first directory that is not a wrapper.

        Unpacking an archive often creates a directory with a single subdirectory. It is skipped if
        the subdirectory contains directories and no samples, as in archive/archive/train.
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
            self._count_unused(root)
            root = only
        return root

    def parts(self, top: Path) -> tuple[Path, Path | None]:
        """Return the directory of the training part, and the directory of the test part or None."""
        parts = self.find_parts(top)
        if not any(parts.values()):
            return top, None
        for part, paths in parts.items():
            if len(paths) > 1:
                raise DataError(
                    f"{top}: expected one {part} directory, got "
                    f"{' and '.join(each.name for each in paths)}. Remove or rename all but one."
                )
        path_of = {part: paths[0] for part, paths in parts.items() if paths}
        others = [name for name in self.listed(top).folders if top / name not in path_of.values()]
        first = next(iter(path_of.values()))
        flat = [path for path in path_of.values() if not self.listed(path).folders]
        if TRAIN not in path_of or (path_of[TRAIN] in flat and others):
            if others and all(self.listed(path).files for path in path_of.values()):
                raise DataError(
                    f"{first}: ambiguous directory, either a part of the data or a class like the "
                    f"directories next to it ({', '.join(others[:3])}). If {first.name} is a "
                    f"class, move all class directories into {top / 'train'}; otherwise remove it."
                )
            if TRAIN not in path_of:
                noun = self.files.noun
                raise DataError(
                    f"{top}: no directory of training {noun}, expected train/<class>/<{noun}>, "
                    f"got only {first.name}. Rename the directory, or use it as the path."
                )
        train = self._unwrapped_part(path_of[TRAIN], set())
        # A test part without class directories has no labels, so prefer the validation part.
        candidates = [part for part in (TEST, VALIDATION) if part in path_of]
        labeled = [part for part in candidates if path_of[part] not in flat]
        test = (labeled or candidates or [""])[0]
        for part in candidates:
            if part != test:
                reason = f"{path_of[test].name} is the common test set"
                self.unused.add(f"in {path_of[part].name}", reason, _count_files(path_of[part]))
        if test == VALIDATION:
            name = path_of[test].name
            _warn_once(
                f"{top}: using {name} as the common test set, because no labeled test data exists"
            )
        for name in others:
            reason = f"next to {path_of[TRAIN].name}"
            self.unused.add(f"in {name}", reason, _count_files(top / name))
        self._count_unused(top)
        classes = set(self.listed(train).folders)
        return train, self._unwrapped_part(path_of[test], classes) if test else None

    def _unwrapped_part(self, part: Path, classes: set[str]) -> Path:
        """Find the directory that contains a part's class directories, as in train/train/<class>.

        In the test part, a directory that has the name of a training class is a class directory.
        """
        while not classes & set(self.listed(part).folders):
            below = self.unwrapped(part)
            if below == part:
                break
            part = below
        return part

    def _count_unused(self, path: Path) -> None:
        """Count the files directly in a directory above the class directories."""
        folder = self.listed(path)
        self.unused.merge(folder.ignored)
        for name in (*folder.files, *folder.bare, *folder.others):
            if name not in _OF_SITES:
                self.unused.add(name)

    def class_folders(
        self, part: Folder, level: int, classes: Sequence[str], root: Path
    ) -> dict[str, list[Folder]]:
        """Return each class's directories in a part, and count the files in the directories above.

        Raises DataError if there are no class directories, if a name is not in `classes` (unless
        `classes` is empty), or if a name is not printable.
        """
        by_class: dict[str, list[Folder]] = {}
        above = [part]
        for depth in range(1, level + 1):
            below = [each for folder in above for each in folder.folders.items()]
            for folder in above:
                self.unused.merge(folder.unused())
                self.unused.add(self.files.noun, _LOOSE_REASON, len(folder.files))
            if depth < level:
                above = [each for _, each in below]
        for name, each in below:
            by_class.setdefault(name, []).append(each)
        if not by_class:
            tables = [
                name
                for place in dict.fromkeys((root, Path(part.path), Path(part.path).parent))
                if place.is_relative_to(root)
                for name in sorted(os.listdir(place))
                if name.lower().endswith((".csv", ".tsv", ".xlsx", ".json", ".jsonl"))
            ]
            loose, noun = len(part.files), self.files.noun
            got = f"{loose} {noun} outside of class directories" if loose else "no directories"
            rule = f" A label table must be {part.path}/labels.csv, got"
            table = f"{rule} {tables[0]}." if tables else ""
            raise DataError(
                f"{part.path}: expected one directory of {noun} for each class, got {got}.{table}"
            )
        for name, folders in sorted(by_class.items()):
            if not name.isprintable():  # Python escapes bytes that are not UTF-8.
                rule = "the name of a class directory must be printable UTF-8 text"
                raise DataError(f"{folders[0].path}: {rule}")
            if classes and name not in classes:
                if _is_used(folders):
                    close = nearest(name, classes)
                    raise DataError(f"{folders[0].path}: unknown class {name!r}{close}")
                del by_class[name]
        return by_class

    def samples_of(self, folders: Sequence[Folder]) -> list[str]:
        """Return the paths of a class's samples, and count the other files in its directories."""
        paths: list[str] = []
        for folder in folders:
            for name in [each for each in folder.folders if each.lower() in _MASKS]:
                masks = folder.folders.pop(name)
                self.unused.add(f"in {name}", "masks or annotations", _count_files(masks.path))
            self.unused.merge(folder.all_unused())
            paths += folder.samples()
        return paths


def _count_files(directory: str | Path) -> int:
    return sum(len(names) for _, _, names in os.walk(directory))


def _is_used(folders: Sequence[Folder]) -> bool:
    """Return whether directories contain files that were not created by other programs."""
    below = [each for folder in folders for each in folder.walk()]
    return any(each.files or each.others or each.ignored.num_user_files for each in below)


def contains_samples(root: Path, files: Files) -> bool:
    """Return whether `root` contains a sample, at a depth of at most eight levels."""
    for path, directories, names in os.walk(root, followlinks=True):
        # The depth is limited, because symlinks may form cycles.
        depth = len(Path(path).relative_to(root).parts)
        directories[:] = [name for name in directories if depth < 8 and not is_ignored(name)]
        if depth and any(
            name.lower().endswith(files.endings) or files.accepts_bare(name) for name in names
        ):
            return True
    return False


@dataclass(frozen=True)
class Tree:
    """Scanned directory tree, with the sample paths by class."""

    root: Path
    files: Files
    classes: tuple[str, ...]
    """Class names, in the order of the labels."""
    train: dict[str, list[str]]
    test: dict[str, list[str]] | None
    unlabeled: list[str] | None
    """Training files without a class; None if there is no directory for them."""
    unused: Unused

    def read(self, spec: DataSpec, like: Shape | None = None, max_samples: int = 0) -> Dataset:
        """Read the samples, and log the unused files.

        Args:
            spec: Data settings.
            like: Required shape of the samples, if any.
            max_samples: Maximum number of training samples, drawn at random; 0 = all.
        """
        self.unused.report(self.root, self.files)
        train = self._split(self.train, spec, like, max_samples)
        form = tuple(train.x.shape[1:])
        test = self._split(self.test, spec, form) if self.test is not None else None
        kind, shape = self.files.kind, self.files.shape(spec)
        return Dataset(spec.dataset, train, test, self.classes, kind=kind, shape=shape)

    def _split(
        self, part: dict[str, list[str]], spec: DataSpec, like: Shape | None, max_samples: int = 0
    ) -> Split:
        place = {name: label for label, name in enumerate(self.classes)}
        pairs = [(path, place[name]) for name in sorted(part) for path in part[name]]
        paths, labels = [path for path, _ in pairs], np.array([y for _, y in pairs], np.int64)
        rows = subset_rows(labels, max_samples, numpy_rng(spec.seed, "max-samples"))
        paths = [paths[row] for row in rows]
        return Split(self.files.read(paths, spec, like), torch.from_numpy(labels[rows]))


def find_tree(
    root: Path,
    files: Files,
    *,
    level: int = 0,
    classes: Sequence[str] = (),
    all_classes: bool = True,
) -> Tree:
    """Find the parts, the classes, and the samples of a directory tree.

    Args:
        root: Directory of the tree.
        files: Type of the sample files.
        level: Depth of the class directories below `root` or below its parts; 0 = determine
            automatically.
        classes: Class names in order; () = the names of the class directories.
        all_classes: Whether every class must have a sample; False for a site.

    Raises:
        DataError: If the tree has no classes or is ambiguous.
    """
    if not root.is_dir():
        raise DataError(f"{root}: directory not found")
    scan = Scan(files)
    train, test = scan.parts(scan.unwrapped(root))
    folder = scan.read(train)
    test_folder = scan.read(test) if test is not None else None
    unlabeled_folders = [
        folder.folders.pop(name) for name in sorted(folder.folders) if name.lower() in UNLABELED
    ]
    unlabeled = [path for each in unlabeled_folders for path in each.samples()]
    for each in unlabeled_folders:
        scan.unused.merge(each.all_unused())
    level = level or (1 if classes else _class_level(folder, files))
    by_class = scan.class_folders(folder, level, classes, root)
    names = tuple(classes) or tuple(sorted(by_class))
    training = {name: scan.samples_of(by_class[name]) for name in names if name in by_class}
    for name, paths in training.items():
        if not paths and (all_classes or _is_used(by_class[name])):
            empty = by_class[name][0]
            unused = empty.all_unused()
            got = f"only {unused}" if len(unused) else "no files"
            raise DataError(
                f"{empty.path}: expected {files.noun} ({', '.join(files.endings)}), got {got}"
            )
    tests = None
    if test_folder is not None:
        for name in [each for each in test_folder.folders if each.lower() in UNLABELED]:
            raise DataError(
                f"{test_folder.folders[name].path}: test {files.noun} must be labeled. Move the "
                f"directory into {train}, or remove it."
            )
        test_classes = scan.class_folders(test_folder, level, names, root)
        tests = {name: scan.samples_of(each) for name, each in test_classes.items()}
    for part, samples in ((folder, training), (test_folder, tests)):
        if part is not None and not any((samples or {}).values()):
            raise DataError(f"{part.path}: no {files.noun} found in the class directories")
    return Tree(
        root, files, names, training, tests, unlabeled if unlabeled_folders else None, scan.unused
    )


def _class_level(folder: Folder, files: Files) -> int:
    """Return 1, the depth of the class directories. Raises DataError if the depth is ambiguous."""
    classes = {name: each for name, each in folder.folders.items() if _is_used([each])}
    low = {name.lower() for name in classes}
    setting = "data.class-level = 1"
    odd = sorted(name for name in classes if name.lower() in _NO_CLASS)
    if len(classes) > 1 and (odd or all(_PIECE.fullmatch(name) for name in low)):
        examples = ", ".join((odd or sorted(classes))[:3])
        raise DataError(
            f"{folder.path}: expected one directory for each class, got directories that look "
            f"like parts of a dataset, not like classes ({examples}). Move the {files.noun} "
            f"into class directories, set data.target if there is a labels.csv, or set {setting} "
            "if the names are classes."
        )
    for name, each in classes.items():
        if parts := sorted(name for name in each.folders if part_of(name)):
            raise DataError(
                f"{each.path}: {' and '.join(parts)} must be at the top of the tree, above the "
                f"class directories. Use a directory such as {each.path} as the path, or move the "
                "files to train/<class> and test/<class>."
            )
        duplicates = sorted(
            deep.path
            for deep in each.walk()
            if deep is not each and os.path.basename(deep.path).lower() in low - {name.lower()}
        )
        if duplicates:
            raise DataError(
                f"{duplicates[0]}: duplicate name of a class directory. Move or remove it, or set "
                f"{setting} if its files belong to the class {name}."
            )
    nested = [each for each in classes.values() if not each.files]
    # Some nested directories do not add a level: cat/cat/*, and cat/images/* next to cat/masks.
    redundant = [
        each
        for each in nested
        if [name.lower() for name in each.folders] == [os.path.basename(each.path).lower()]
        or {name.lower() for name in each.folders} <= _IMAGES | _MASKS
    ]
    if nested and len(nested) == len(classes) and len(redundant) < len(nested):
        below = {name for each in nested for name in each.folders}
        one, two = (
            ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            for names in (classes, below)
        )
        raise DataError(
            f"{folder.path}: ambiguous classes, either {one} or {two}, because the directories "
            f"contain directories and no {files.noun}. Set {setting} or data.class-level = 2. At "
            "a site, list the classes in classes.txt, or move the files."
        )
    return 1
