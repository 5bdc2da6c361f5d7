"""Data of a site in a deployment, read from a directory at the site."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedhet.base.disk import expanded, read_toml_tables
from fedhet.base.errors import DataError, SettingsError, StateError, error_reason
from fedhet.data.folders import TRAIN, UNLABELED, read_folder
from fedhet.data.images import IMAGES
from fedhet.data.partition import hold_out, hold_out_validation
from fedhet.data.rows import find_rows, read_table
from fedhet.data.schemas import SCHEMA, TableSchema, read_schema
from fedhet.data.sources import sample_kind
from fedhet.data.sources.files import MAX_CLASSES, read_pair, target_fields
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
from fedhet.data.tables import labeled_split
from fedhet.data.texts import TEXTS, read_texts, text_sample_shape
from fedhet.kinds import KINDS, TABLE, TEXT, Kind, Shape, kind_of_arrays
from fedhet.settings.run import DataSettings, RunSettings
from fedhet.settings.schema import build, invalid_setting, kebab
from fedhet.tasks import CLASSIFICATION, Classification, Task, find_task

LOG = logging.getLogger("fedhet")
DECLARATION = "site.toml"
"""Declaration file of a site for runs that hide its samples (`PrivacySettings.hides_samples`): data
settings, number of classes, and shape."""
CLASSES = "classes.txt"
MAX_ROWS = 10**12
"""Maximum number of rows that a site may declare."""
READING = (
    "sample_kind", "test_fraction", "validation_fraction", "image_size", "text_column",
    "label_column", "tokenizer", "vocabulary", "max_tokens",
)  # fmt: skip
"""Settings in `[data]` that a site may declare. For all other data settings, a site with a
declaration uses the defaults and ignores the run's values."""
_UNSET = {"models.num-classes": 0, "data.sample-kind": "auto"}
"""Settings that are inferred from the data if they have these values."""
_DECLARE = (
    f"A site with 'peers' or 'privacy' declares its data in {DECLARATION}, for example with the "
    "lines 'num-classes = 10' and 'shape = [3, 32, 32]' (Privacy, 'Declaration of a private site')."
)


@dataclass(frozen=True)
class Declaration:
    """Declaration of a site's data, independent of any run.

    The site reads and checks its data using only this declaration. A run is compared with the
    declaration and never with the data, so an error message reveals nothing about any sample.
    """

    path: str
    """Path of the declaration file, for messages."""
    spec: DataSpec
    """Data settings of the site, which take precedence over the settings of a run."""
    names: tuple[str, ...]
    """Class names, in the order of the labels."""
    kind: Kind
    shape: Shape
    rows: int = 0
    """Public number of training rows, from which a private site computes its noise and its steps;
    0 = undeclared, which runs with secure aggregation refuse."""

    @classmethod
    def read(cls, directory: str, max_bytes: int) -> Declaration:
        """Read the declaration of a site from site.toml, classes.txt, and schema.toml.

        Args:
            directory: Data directory of the site.
            max_bytes: Size limit for the site's data, in bytes.

        Raises:
            DataError: If a file is invalid, or if the classes or the shape are not declared.
            SettingsError: If a setting has an invalid value.
        """
        root = expanded(directory)
        path = root / DECLARATION
        try:
            declared = dict(read_toml_tables(path)) if path.exists() else {}
        except (OSError, StateError) as error:
            raise DataError(f"{path}: not a readable TOML file ({error_reason(error)})") from None
        schema = _site_schema(root) if (root / SCHEMA).exists() else None
        if not path.exists() and not (schema and schema.columns):
            raise DataError(f"{path}: file not found. {_DECLARE}")
        number, shape = declared.pop("num-classes", 0), declared.pop("shape", [])
        names = schema.outputs if schema else _read_class_names(root, None)
        rows = declared.pop("rows", None)
        if rows is not None and (type(rows) is not int or not 2 <= rows <= MAX_ROWS):
            rule = f"expected an integer from 2 to {MAX_ROWS}"
            raise DataError(f"{path}: rows: {rule}, got {rows!r}. {_DECLARE}")
        for name in declared.keys() - {kebab(each) for each in READING}:
            known = ", ".join(["num-classes", "shape", "rows", *map(kebab, READING)])
            raise DataError(f"{path}: {name}: unknown setting, expected one of {known}")
        table = build(DataSettings, declared, prefix=f"{path}: data.")
        own = {
            "max_bytes": max_bytes,
            "task": schema.task if schema else table.task,
            "validation_fraction": table.validation,
        }
        spec = DataSpec.model_construct(
            **dict(table.model_copy(update=own)), clients=1, seed=FIXED_SEED
        )
        low = find_task(spec.task).min_outputs
        outputs = (0, len(names)) if names else ()
        if type(number) is not int or not (low <= number <= MAX_CLASSES or number in outputs):
            rule = f"expected an integer from {low} to {MAX_CLASSES}"
            raise DataError(f"{path}: num-classes: {rule}, got {number!r}. {_DECLARE}")
        if names and number not in (0, len(names)):
            where = root / (SCHEMA if schema else CLASSES)
            rule = f"expected {len(names)}, the number of classes in {where}, got {number}"
            raise DataError(f"{path}: num-classes: {rule}. Correct one of the two files.")
        if schema and schema.columns:
            sample_shape: Shape = (sum(schema.widths),)
            kind = TABLE
        elif table.sample_kind == TEXT.name:
            kind, sample_shape = TEXT, text_sample_shape(spec)
        else:
            sample_shape = tuple(shape) if isinstance(shape, list) else ()
            kind = kind_of_arrays(sample_shape, KINDS.get(table.sample_kind))
        sizes: list[Any] = list(sample_shape)
        if not 1 <= len(sizes) <= 4 or not all(type(k) is int and k >= 0 for k in sizes):
            rule = "expected the shape of a sample, such as [3, 32, 32]"
            raise DataError(f"{path}: shape: {rule}, got {shape!r}. {_DECLARE}")
        names = names or tuple(map(str, range(number)))
        return cls(str(path), spec, names, kind, sample_shape, rows or 0)

    @property
    def settings(self) -> dict[str, Any]:
        """Values that the site declares for settings of a run, by full name of the setting."""
        flat = self.spec.flat()
        values = {f"data.{kebab(name)}": flat[kebab(name)] for name in READING}
        return values | {"models.num-classes": len(self.names)}

    def accounted_rows(self, samples: int) -> int:
        """Return the declared number of rows, or the largest power of two up to `samples`."""
        return self.rows or 2 ** (samples.bit_length() - 1)

    def rows_fault(self, samples: int) -> str:
        """Return a message if the declared number of rows differs from the data by a factor of two.

        `samples` is the number of training samples. Returns "" if the number is undeclared.
        """
        if not self.rows or 0.5 <= self.rows / samples <= 2:
            return ""
        return (
            f"{self.path}: rows = {self.rows}, but the site has {samples} training samples. "
            f"Batches contain {samples / self.rows:.2g} times as many samples as "
            "'training.batch-size'. Correct the number."
        )

    def check(self, run: RunSettings) -> None:
        """Compare the settings of a run with the declaration.

        Raises SettingsError if the task, the number of classes, the sample kind, or (for texts) the
        tokenization differs. For other settings, differences are logged, and the declared values
        are used.

        With both differential privacy and secure aggregation, also raises SettingsError if the
        number of rows is undeclared. The rounds, epochs, and batch sizes that a budget permits
        depend on this number, so a server could otherwise find out the number by bisection.
        """
        if run.privacy.is_on and run.privacy.secure_aggregation:
            self.check_rows()
        values, kind, task = run.flat(), self.kind, find_task(self.spec.task)
        if find_task(run.data.task) is not task:
            expected = f"{task.name!r} as declared by this site"
            raise invalid_setting("data.task", run.data.task, expected)
        binding = {"models.num-classes", "data.sample-kind"}
        if kind is TEXT:
            binding |= {"data.tokenizer", "data.vocabulary", "data.max-tokens"}
        for name, value in {**self.settings, "data.sample-kind": kind.name}.items():
            if values[name] in (value, _UNSET.get(name, value)):
                continue
            if name in binding:
                raise invalid_setting(name, values[name], f"{value!r} as declared by this site")
            LOG.info(
                "the run's %s = %r is ignored, because %s declares another value",
                name, values[name], self.path,
            )  # fmt: skip

    def check_rows(self) -> None:
        """Raise SettingsError if the number of rows is undeclared."""
        if not self.rows:
            raise SettingsError(
                f"{self.path}: rows: not found, expected the public approximate number of training "
                "samples, because the run uses differential privacy with secure aggregation. Add a "
                "line such as 'rows = 5000' (Privacy, 'Number of rows')."
            )

    def read_data(
        self, directory: str, name: str, listed: Iterable[int] = (), min_samples: int = 1
    ) -> ClientData:
        """Read and check the site's data. Raises DataError for any failure.

        Args:
            directory: Data directory of the site.
            name: Name of the site.
            listed: Classes that the peers file lists for the site. The site sends their means in
                each round, so the check must not depend on the run.
            min_samples: Minimum number of training samples in each listed class.
        """
        try:
            data = site_data(
                directory, spec=self.spec, classes=len(self.names), name=name, declared=self
            )
            if isinstance(data.task, Classification):
                counts = Counter(data.train.y.tolist())
                if lacking := [label for label in listed if counts[label] < min_samples]:
                    raise DataError(
                        f"{directory}: expected at least {min_samples} training samples of each "
                        f"class that the peers file lists for {name}, got {counts[lacking[0]]} of "
                        f"class {lacking[0]}. List only classes with enough samples (`fedhet certs "
                        "DIR --peer NAME --classes`)."
                    )
            return data
        except Exception as error:
            # The server receives the type of the error, so the type must not depend on the data.
            raise DataError(f"{type(error).__name__}: {error}") from error


@preserve_global_rng()
def site_data(
    directory: str,
    *,
    spec: DataSpec,
    classes: int,
    name: str,
    unlabeled: bool = False,
    declared: Declaration | None = None,
) -> ClientData:
    """Read the data of a site.

    The directory has one of the following layouts:

    - train.npz and test.npz;
    - images or .txt files in train/<class>/ and test/<class>/, or without test data in <class>/;
    - texts in train.csv and test.csv;
    - with schema.toml, a table in train.csv (or .parquet) and test.csv;
    - images or .txt files in train/ and test/, listed in train/labels.csv and test/labels.csv.

    For tasks other than classification, all layouts require schema.toml with the targets.

    If there is no test part, `spec.test_fraction` of the samples is held out. Then, a fraction
    `spec.validation` of the training samples is held out for validation. classes.txt lists the
    classes of the run in order, one per line. The file is required only if the site does not have
    samples of all classes. train/unlabeled/ contains samples without a label.

    Args:
        directory: Data directory of the site.
        spec: Data settings.
        classes: Number of classes in the run.
        name: Name of the site.
        unlabeled: Whether to read the samples without a label.
        declared: Declaration of the site, which defines all class names and the shape, or None if
            the settings of the run apply.

    Raises:
        DataError: If the directory is invalid or has too few samples.
    """
    root = expanded(directory)
    if not root.is_dir():
        raise DataError(f"{root}: directory not found (data of {name})")
    if classes < 2 and find_task(spec.task) is Classification:
        raise DataError(
            f"{root}: models.num-classes must be the number of classes, at least 2, got {classes}"
        )
    dataset, unlabeled_split, num_unused = _read(root, classes, spec, unlabeled, declared)
    if type(dataset.task) is not find_task(spec.task):
        raise DataError(
            f"{root}: data.task must be {dataset.task.name}, the task of this data, got "
            f"{spec.task!r}"
        )
    train, test = dataset.train, dataset.test
    if test is None:
        if not spec.test_fraction:
            raise no_test_error(f"{root}", spec)
        train_rows, test_rows = hold_out(len(train), spec, f"{name} ({root})")
        train, test = train.take(train_rows), train.take(test_rows)
    if len(train) < 2 or len(test) < 1:
        raise DataError(
            f"{root}: expected at least 2 training samples and 1 test sample, got {len(train)} "
            f"and {len(test)}"
        )
    # The label space of a site contains the classes of its samples; the run may have more classes.
    space = tuple(range(len(dataset.classes)))
    if isinstance(dataset.task, Classification):
        space = tuple(torch.unique(torch.cat([train.y, test.y])).tolist())
    train_rows, rows = hold_out_validation(dataset.strata(train), spec, name)
    validation = train.take(rows) if len(rows) else None
    if validation is not None:
        train = train.take(train_rows)
    elif spec.validation:
        LOG.warning(
            "%s: no validation samples, because data.validation-fraction = %g of %d training "
            "samples is less than one sample",
            name, spec.validation, len(train),
        )  # fmt: skip
    if declared is not None:
        if (shape := dataset.shape) != declared.shape:
            rule = f"expected the shape of the data, {list(shape)}, got {list(declared.shape)}"
            raise DataError(f"{declared.path}: shape: {rule}. Correct it.")
        space = tuple(range(classes))
        unlabeled_split = unlabeled_split or train.take(torch.arange(0))
    return ClientData(
        name, train, test, None, dataset.classes, space, dataset.kind, dataset.shape,
        unlabeled_split, num_unused, dataset.stored, dataset.schema, dataset.task, validation,
    )  # fmt: skip


def _read(
    root: Path, classes: int, spec: DataSpec, unlabeled: bool, declared: Declaration | None
) -> tuple[Dataset, Split | None, int]:
    """Read a site's directory in any supported layout.

    Returns the labeled samples, the unlabeled samples if requested, and the number of unlabeled
    samples that were not read. Raises DataError for an unsupported layout.
    """
    is_classification = find_task(spec.task) is Classification
    rows = find_rows(root, "train")
    has_schema = (root / SCHEMA).exists() and (rows is not None or not is_classification)
    schema = _site_schema(root) if has_schema else None
    if schema is None and not is_classification:
        raise DataError(
            f"{root / SCHEMA}: file not found, expected the scale of the targets, which all sites "
            f"share (data.task = {spec.task!r}). Create it with `fedhet schema`."
        )
    names: tuple[str, ...] = ()
    if is_classification:
        names = declared.names if declared else _read_class_names(root, classes)
    elif schema is not None:
        _check_targets(schema, root, classes, spec)
    is_array, is_tree = (root / "train.npz").exists(), (root / TRAIN).is_dir()
    if is_array + is_tree + (rows is not None) > 1 or not any(root.iterdir()):
        raise DataError(
            f"{root}: expected exactly one of train.npz, train/<class>/<images or .txt>, and rows "
            "in train.csv, .tsv, .jsonl, or .parquet (and likewise for test)"
        )
    if (is_array or rows is not None) and (root / UNLABELED).is_dir():
        raise DataError(
            f"{root / UNLABELED}: unexpected directory. Move it into a directory train."
        )
    stated = sample_kind(spec)
    if is_array:
        shared = None if is_classification else schema
        train, test = read_pair(root, spec, stated, classes, shared)
        kind = kind_of_arrays(tuple(train.x.shape[1:]), stated).name
        described = target_fields(shared) or {"classes": names or tuple(map(str, range(classes)))}
        return Dataset(f"{root}", train, test, kind=kind, **described), None, 0
    if rows is not None:
        return _read_rows(root, rows, spec, classes, names, schema), None, 0

    files = TEXTS if stated is TEXT else IMAGES
    if UNLABELED in names:
        raise DataError(
            f"{root / CLASSES}: {UNLABELED!r} cannot be a class name, because it is reserved for "
            f"the directory of unlabeled {files.noun}"
        )
    dataset, paths = read_folder(
        root, files, spec.replace(by="", max_samples=0), names=names, classes=classes,
        schema=schema, like=declared.shape if declared and files is IMAGES else None,
    )  # fmt: skip
    if not paths:
        return dataset, None, 0
    if not unlabeled:
        return dataset, dataset.train.take(torch.arange(0)), len(paths)
    x = files.read(paths, spec, tuple(dataset.train.x.shape[1:]))
    return dataset, Split(x, torch.full((len(paths),), UNKNOWN)), 0


def _read_rows(
    root: Path,
    rows: Path,
    spec: DataSpec,
    classes: int,
    names: tuple[str, ...],
    schema: TableSchema | None,
) -> Dataset:
    """Read a site's texts or table from the row file `rows` and, if it exists, the test file."""
    test_rows = find_rows(root, "test")
    if sample_kind(spec) is not TABLE and not (schema and schema.columns):
        return read_texts(rows, test_rows, spec, names, classes, schema)
    schema = schema or _site_schema(root)  # `_site_schema` reports a missing file.
    if not schema.columns:
        raise DataError(
            f"{root / SCHEMA}: columns: expected the columns of a table, got only targets. Set "
            "data.sample-kind to text if the rows are texts."
        )
    task = _check_targets(schema, root, classes, spec)
    train = labeled_split(schema, read_table(rows, spec))
    test = labeled_split(schema, read_table(test_rows, spec)) if test_rows else None
    kind, outputs = TABLE.name, schema.outputs
    return Dataset(f"{root}", train, test, outputs, kind=kind, schema=schema, task=task)


def _check_targets(schema: TableSchema, root: Path, classes: int, spec: DataSpec) -> Task:
    """Return the task of a schema.

    Raises DataError if the run has another task or another number of outputs.
    """
    task = schema.task_object
    if type(task) is not find_task(spec.task):
        raise DataError(
            f"{root / SCHEMA}: task: expected data.task = {spec.task!r} of the run, got "
            f"{schema.task!r}. Set data.task to {schema.task}."
        )
    if len(schema.outputs) != (classes or len(schema.outputs)):
        raise DataError(
            f"{root / SCHEMA}: expected the {classes} {task.noun} of the run, got "
            f"{len(schema.outputs)}"
        )
    return task


def _site_schema(root: Path) -> TableSchema:
    """Read a site's schema, which all sites share. Raises DataError if it is incomplete."""
    return read_schema(root / SCHEMA).check_fitted(root / SCHEMA)


class SiteOutputs(NamedTuple):
    """Outputs of a site's models, as described by the files that all sites share."""

    classes: tuple[str, ...]
    schema: TableSchema | None
    task: Task


def site_outputs(root: Path) -> SiteOutputs | None:
    """Read schema.toml or classes.txt in a directory, or return None if neither file exists.

    Raises DataError if the file is invalid.
    """
    if (root / SCHEMA).exists():
        schema = _site_schema(root)
        return SiteOutputs(schema.outputs, schema, schema.task_object)
    names = _read_class_names(root, None)
    return SiteOutputs(names, None, CLASSIFICATION) if names else None


def _read_class_names(root: Path, classes: int | None) -> tuple[str, ...]:
    """Return the names in classes.txt, or () if the file does not exist.

    Raises DataError if there are not exactly `classes` names, or if `classes` is None and there are
    fewer than two names.
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
            f"{path}: expected {classes} different class names, one per line, in the run's class "
            f"order, got {len(names)} names ({len(set(names))} different)"
        )
    for name in names:
        if not name.isprintable():
            raise DataError(f"{path}: class name {name!r} must be printable text")
    return names
