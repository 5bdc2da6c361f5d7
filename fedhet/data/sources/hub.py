"""Datasets from the Hugging Face Hub, loaded with flwr-datasets: `hf:NAME` or `hf:NAME@SUBSET`.

A NAME that begins with `/`, `~` or `.`, or that is the path of a directory, is a local directory
with files that the library `datasets` can read, or that its `save_to_disk` has written. The split
`train` is the training set. The split `test` is the common test set, or `validation` if there is no
`test` or if no row of it has a label. Only data files are read; fedhet runs no code from a dataset.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.base.disk import expanded, read_json, read_text
from fedhet.base.errors import DataError, describe_error, error_text
from fedhet.data.dataset import Dataset, Format, Location, Source, Split
from fedhet.data.rows import missing_column_error
from fedhet.data.sources.arrays import check_same_form
from fedhet.data.sources.images import Form, open_image, to_pixels
from fedhet.data.spec import DataSpec, Expected, check_max_bytes, reading
from fedhet.data.targets import find_classes, label_text
from fedhet.data.texts import text_sample_shape, tokenize
from fedhet.data.words import MISSING, encode_owners, find_words
from fedhet.kinds import IMAGE, TEXT

LOG = logging.getLogger("fedhet")
TESTS = ("test", "validation")
"""Splits that may be the common test set; the first split with labels is used."""
_UNLABELED = "-1"
"""Label of a row without a class, as in the test splits of GLUE."""
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_SUBSET = re.compile(r"\w[\w.-]*")
_FORMATS = ("parquet", "arrow", "csv", "json", "text", "imagefolder", "webdataset")
"""Readers in the library `datasets` for formats that cannot refer to other files."""
_SAVED = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` writes for several splits, and for each split."""
_LOCAL = ("file", "local", "zip", "tar", "gzip", "bz2", "xz", "lz4", "zstd")
"""fsspec protocols for local files and archives."""


def read_hub(name: str, spec: DataSpec) -> Dataset:
    """Read a dataset from the local cache, or download it if `data.download` is set.

    The samples are images, or texts if `data.sample-kind` is "text". The labels are in the column
    `data.label-column` or, if it does not exist, in the only column with the type ClassLabel.
    Raises DataError if the dataset cannot be read or lacks a column.
    """
    splits, where = _splits(name, spec), f"hf:{name}"
    train, label, features = splits["train"], spec.label_column, splits["train"].features
    if label not in features:
        stated = [key for key, each in features.items() if type(each).__name__ == "ClassLabel"]
        if len(stated) != 1:
            hint = ". Set data.label-column to the label column."
            raise missing_column_error(where, label, features, hint)
        label = str(stated[0])
    names = getattr(features[label], "names", None)  # A ClassLabel has names.
    labels = {part: _labels(rows, label, names) for part, rows in splits.items()}
    expected = spec.expected or Expected()
    classes = tuple(map(str, names or expected.classes))
    texts = sorted({text for text in labels["train"] if text})
    classes = classes or find_classes(texts, f"{where}: column {label!r}", spec.task)
    used = _used_splits(labels, classes, f"{where}: column {label!r}")
    parts: list[Split] = []
    for part, own in used.items():
        y = torch.from_numpy(find_words(own, classes))
        # A site may lack training samples of some classes.
        known = parts[0].y if parts and not expected.outputs else torch.arange(len(classes))
        if not len(y) or (unknown := ~torch.isin(y, known)).any():
            row = int(unknown.nonzero()[0]) if len(y) else 0
            got = f"no training row has its class {own[row]!r}" if own[row] else "it has no label"
            raise DataError(
                f"{where}: split {part!r}, row {row + 1}, column {label!r}: expected a label for "
                f"each sample, but {got}. Correct the label, or remove the row."
            )
        parts.append(Split(_samples(splits[part], name, spec), y))
    check_same_form(parts[0], parts[-1], "the training set", f"{where}: test set")
    owned = {}
    if spec.by:
        if spec.by not in features:
            raise missing_column_error(where, spec.by, features, " (data.by)")
        owners = [label_text(value) for value in train[spec.by]]
        if None in owners:
            rule = "expected a number or a word for each sample"
            raise DataError(f"{where}: column {spec.by!r} (data.by): {rule}")
        owned = encode_owners(list(map(str, owners)), f"{where}: column {spec.by!r}")
    is_text = spec.sample_kind == TEXT.name
    kind, shape = (TEXT, text_sample_shape(spec)) if is_text else (IMAGE, ())
    format = Format.from_samples(parts[0].x, classes, kind, shape=shape)
    return Dataset(spec.dataset, parts[0], parts[1] if parts[1:] else None, format, **owned)


def _used_splits(
    labels: Mapping[str, list[str]], classes: Sequence[str], where: str
) -> dict[str, list[str]]:
    """Return the labels of the training split and of the first test split that has labels.

    Raises DataError, prefixed with `where`, if no test split has labels.
    """
    used, without = {"train": labels["train"]}, []
    for part in [part for part in TESTS if part in labels]:
        if {*labels[part]} <= {"", _UNLABELED} - {*classes}:
            without.append(part)
        elif len(used) < 2:
            used[part] = labels[part]
    if TESTS[0] in without or (without and len(used) < 2):
        fault = f"{where}: no row of the split {without[0]!r} has a label"
        if len(used) < 2:
            fix = "Label the rows, or save a copy without the split with save_to_disk"
            raise DataError(f"{fault}. {fix}, and use hf:DIR.")
        LOG.warning("%s. The common test set is %r.", fault, [*used][1])
    return used


def _labels(rows: Any, label: str, names: Sequence[str] | None) -> list[str]:
    """Return the label of each row as text, or "" if it is missing.

    `names` are the classes of the training split if it states them.
    """
    if label not in rows.features:
        return [""] * len(rows)
    names = getattr(rows.features[label], "names", names)
    if names is not None:
        known = dict(enumerate(map(str, names))) | {int(_UNLABELED): ""}
        values = [known.get(each, each) if isinstance(each, int) else each for each in rows[label]]
    else:
        values = rows[label]
    texts = (label_text(value) or "" for value in values)
    return ["" if text in MISSING else text for text in texts]


def parse(location: str) -> Location:
    """Split a location into a local path or a name on the Hub, and `@SUBSET`."""
    name, sign, subset = location.partition("@")
    if name.startswith(("/", "~", ".")) or Path(name).is_dir():  # The library prefers directories.
        return Location(path=name, suffix=sign + subset)
    return Location(hub=name, suffix=sign + subset)


def _splits(name: str, spec: DataSpec) -> dict[str, Any]:
    """Load the splits of a dataset, by name."""
    from datasets import Image
    from flwr_datasets import FederatedDataset

    place = parse(name)
    where = str(expanded(place.path).resolve()) if place.path else place.hub
    subset = place.suffix.removeprefix("@") or None
    if not (place.path or _NAME.fullmatch(place.hub)) or not _SUBSET.fullmatch(subset or "x"):
        raise DataError(f"data.dataset: expected hf:NAME or hf:NAME@SUBSET, got 'hf:{name}'")
    root = Path(where) if place.path else None
    is_saved = root is not None and any(os.path.lexists(root / name) for name in _SAVED)
    federated = FederatedDataset(
        dataset=where, subset=subset, partitioners={"train": 1}, shuffle=False
    )
    with _confined(network=spec.download and not place.path, local=bool(place.path)) as failures:
        try:
            if root is not None and is_saved:
                splits = _load_saved(root)
            else:
                _check_files(where, subset, root)
                splits = {"train": federated.load_split("train")}
                for part in TESTS:
                    with contextlib.suppress(ValueError):  # Skip missing splits.
                        splits[part] = federated.load_split(part)
        except DataError:
            raise
        except Exception as error:  # The libraries raise many exception types.
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            fault = " ".join((failures or [str(cause)])[-1].split())[:300] or type(error).__name__
            if isinstance(cause, UnicodeDecodeError):
                fault += "; save the file in UTF-8"
            message = f"not found on this machine, or not readable ({fault})"
            message += ". Use --set download=true to download it from the Hugging Face Hub."
            if place.path or spec.download:
                also = "" if place.path else " or downloaded"
                message = f"cannot be read{also} ({fault})"
            raise DataError(f"data.dataset = 'hf:{name}': {message}") from error
    # Disable decoding, because the library's decoder would open any path.
    for part, rows in splits.items():
        for column in [key for key, kind in rows.features.items() if isinstance(kind, Image)]:
            splits[part] = splits[part].cast_column(column, Image(decode=False))
    return splits


def _load_saved(root: Path) -> dict[str, Any]:
    """Load the splits that `save_to_disk` has written; a single dataset is the split `train`.

    Raises DataError if a file is outside of `root`, or without a split `train`.
    """
    import pyarrow
    from datasets import load_from_disk

    names, rows = [""], []
    if os.path.lexists(path := root / _SAVED[0]):
        with reading(path, "list of splits", describe=describe_error):
            names = [str(name) for name in read_json(path)["splits"]]
    for name in names:
        state = root / name / _SAVED[1]
        info = state.with_name("dataset_info.json")
        with reading(state, "saved dataset", describe=describe_error):
            files = [state.parent / each["filename"] for each in read_json(state)["_data_files"]]
        for file in (state, info, *files):
            if not _inside(str(file), root):
                raise DataError(f"{state}: data file {str(file)!r} is outside of the dataset")
        with reading(info, "description", describe=describe_error):
            read_json(info).keys()
        rows += files
    try:
        loaded = load_from_disk(str(root))
    except Exception:  # The library's error does not name the file.
        for file in rows:
            with reading(file, "Arrow file"):
                pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all()
        raise
    splits = {"train": loaded} if names == [""] else dict(loaded)
    if "train" not in splits:
        raise DataError(f"{root}: split 'train' not found, got {', '.join(splits)}")
    return splits


def _check_files(where: str, subset: str | None, root: Path | None) -> None:
    """Raise DataError if a dataset refers to files outside of the dataset.

    A README.md or .huggingface.yaml may name any path or URL as `data_files`. For a local
    directory, the files must be inside the directory after resolving symlinks; for the Hub, all
    files must be remote.
    """
    import datasets

    if root is not None:
        _check_card(root)
    builder = datasets.load_dataset_builder(where, subset)
    module = type(builder).__module__.rpartition(".")[2]
    if root is not None and module not in _FORMATS:
        raise DataError(
            f"{root}: unsupported format {module!r}, whose files may refer to other files, "
            f"expected one of {', '.join(_FORMATS)}. Convert the files, for example to Parquet."
        )
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            last = file.rpartition("::")[2]
            is_remote = "://" in last and not last.startswith(("file:", "local:"))
            if not (is_remote if root is None else _inside(file, root)):
                raise DataError(f"hf:{where}: data file {file!r} is outside of the dataset")


def _check_card(root: Path) -> None:
    """Raise DataError if a metadata file refers to a path outside of `root`."""
    import yaml
    from huggingface_hub import DatasetCard

    for name in ("dataset_infos.json", "README.md", ".huggingface.yaml"):
        path = root / name
        if not os.path.lexists(path):
            continue
        if not _inside(str(path), root):
            raise DataError(f"{path}: points outside of {root}. Replace the symlink with the file.")
        with reading(path, "dataset card", describe=error_text):
            if name == "dataset_infos.json":
                read_json(path).keys()
                continue
            text = read_text(path)
            readme: Any = DatasetCard(text) if name == "README.md" else None
            card = readme.data.to_dict() if readme else yaml.safe_load(text)
            if not isinstance(card, dict | None):
                raise TypeError(f"expected a mapping, got a {type(card).__name__}")
        configs = (card or {}).get("configs")
        for pattern in _patterns(configs if isinstance(configs, list) else []):
            parts = re.split(r"[\\/]", pattern)
            if "::" in pattern or ":" in parts[0] or parts[0] in ("", "~") or ".." in parts:
                raise DataError(
                    f"{path}: expected a relative path below {root}, got {pattern!r}. Copy the "
                    "files into that directory."
                )


def _patterns(value: Any, key: str = "configs") -> Iterator[str]:
    """Yield all strings in the entries `data_files` and `data_dir` of a card's `configs`."""
    if isinstance(value, str) and key != "configs":
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            if key != "configs" or name in ("data_files", "data_dir"):
                yield from _patterns(each, str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _patterns(each, key)


def _inside(file: str, root: Path) -> bool:
    """Return whether a file is in `root` after resolving symlinks."""
    return "://" not in file and Path(file).resolve().is_relative_to(root.resolve())


class _Failures(logging.Handler):
    """Handler that keeps the messages of a logger."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a record, with classes by name."""
        self.texts.append(_CLASS.sub(r"\1", record.getMessage()))


@contextlib.contextmanager
def _confined(*, network: bool, local: bool) -> Iterator[list[str]]:
    """Disable the libraries' network access in the block, unless `network` is set.

    With `local`, all file systems other than local files and archives are also disabled. Yields a
    list of the errors that `datasets` logs, because its exceptions do not name the file.
    """
    import datasets.config
    import huggingface_hub.constants

    # Import by name, because the attribute `registry` of the package is not the module.
    core, registry = (importlib.import_module(f"fsspec.{name}") for name in ("core", "registry"))
    find: Callable[[str | None], Any] = vars(core)["get_filesystem_class"]

    def find_local(protocol: str | None) -> Any:
        if protocol and protocol not in _LOCAL:
            raise DataError(f"{protocol}: a local dataset must not refer to remote files")
        return find(protocol)

    offline = (datasets.config, huggingface_hub.constants) if not network else ()
    changes: list[tuple[Any, str, Any]] = [(each, "HF_HUB_OFFLINE", True) for each in offline]
    changes += [(each, find.__name__, find_local) for each in (core, registry) if local]
    before = [getattr(module, name) for module, name, _ in changes]
    handler, logger = _Failures(logging.ERROR), logging.getLogger("datasets")
    logger.addHandler(handler)
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


def _samples(rows: Any, name: str, spec: DataSpec) -> Tensor:
    """Convert the rows of a split to tokens or images."""
    if spec.sample_kind == TEXT.name:
        if absent := [column for column in spec.text_column if column not in rows.features]:
            hint = ". Set data.text-column to the text columns."
            raise missing_column_error(f"hf:{name}", absent[0], rows.features, hint)
        parts = zip(*(_texts(rows, each, name, spec) for each in spec.text_column), strict=True)
        return tokenize(list(map(" ".join, parts)), spec, f"hf:{name}")
    columns = [key for key, feature in rows.features.items() if type(feature).__name__ == "Image"]
    if len(columns) != 1:
        has_texts = {*spec.text_column} & {*rows.features}
        hint = ". For texts, use --set sample-kind=text." if has_texts else ""
        raise DataError(
            f"hf:{name}: expected exactly one image column among "
            f"{', '.join(rows.features)}, got {len(columns)}{hint}"
        )
    return _images(rows[columns[0]], name, spec)


def _texts(rows: Any, column: str, name: str, spec: DataSpec) -> Iterator[str]:
    """Yield the texts of a column, which may be missing only if there are several columns."""
    several = len(spec.text_column) > 1
    for row, value in enumerate(rows[column]):
        text = "" if several and value is None else label_text(value)
        if text is None or not (several or text.strip()):
            fault = f"row {row}, column {column!r}: expected a text, got {value!r:.80}"
            raise DataError(f"hf:{name}: {fault}")
        yield text


def _images(images: Sequence[Any], name: str, spec: DataSpec) -> Tensor:
    """Decode images to [N, C, H, W] uint8, resized to `data.image-size`.

    If `data.image-size` is 0, all images must have the same size. As in `datasets`, each image is a
    mapping with its file content and path. Raises DataError for a path outside of the dataset.
    """
    import datasets.config

    place, where = parse(name).path, f"hf:{name}"
    caches = ("HF_DATASETS_CACHE", "HF_CACHE_HOME", "DOWNLOADED_DATASETS_PATH")
    roots = [expanded(place)] if place else []
    roots += [Path(getattr(datasets.config, each)) for each in caches]

    def opened() -> Iterator[Any]:
        return (_image(value, f"{where}: image {k}", roots) for k, value in enumerate(images))

    form = Form.of_images(opened, spec.image_size)
    check_max_bytes(len(images) * prod(form.shape), spec, where)
    pixels = np.empty((len(images), *form.shape), np.uint8)
    for number, image in enumerate(opened()):
        pixels[number] = to_pixels(image, form, f"{where}: image {number}:")
    return torch.from_numpy(pixels)


def _image(value: Any, where: str, roots: Sequence[Path]) -> Any:
    """Open an image with Pillow. An image given as a path must be inside one of `roots`."""
    import fsspec

    if value is None:
        raise DataError(f"{where}: the image is missing. Remove the row.")
    content, path = value["bytes"], value["path"] or ""

    def described(error: Exception) -> str:
        return error_text(error).partition(" <_io.BytesIO")[0]  # Pillow would name the stream.

    with reading(f"{where} ({path})" if path else where, "image", describe=described):
        if content is None:
            archive = path.removeprefix("zip://").partition("::")[2] if "::" in path else path
            if not any(_inside(archive, root) for root in roots) or "::" in archive:
                raise DataError(f"{where}: path {path!r} is outside of the dataset")
            with fsspec.open(path, "rb") as file:
                content = file.read()
        return open_image(io.BytesIO(content))


SOURCES = (
    Source(
        "hf",
        "images or texts from the Hugging Face Hub",
        read_hub,
        "NAME",
        files=lambda path, settings: expanded(path) if path else None,
        parse=parse,
        owners="hf:NAME",
    ),
)
