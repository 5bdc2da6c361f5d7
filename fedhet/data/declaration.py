"""Declaration of the data of a private site, in site.toml."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from fedhet.base.disk import read_toml_tables
from fedhet.base.errors import DataError, SettingsError
from fedhet.data.dataset import ClientData
from fedhet.data.folders import CLASSES_FILE
from fedhet.data.schemas import SCHEMA, find_schema
from fedhet.data.site import directory_of, read_class_names, site_data
from fedhet.data.sources import find_source
from fedhet.data.sources.arrays import MAX_CLASSES
from fedhet.data.spec import FIXED_SEED, DataSpec, reading
from fedhet.kinds import TABLE, TEXT, Kind, Shape, kind_of_arrays
from fedhet.settings.run import DataSettings, RunSettings
from fedhet.settings.schema import CountOrNone, Listed, Schema, build, invalid_setting, kebab
from fedhet.tasks import Classification, find_task

LOG = logging.getLogger("fedhet")
DECLARATION = "site.toml"
"""Declaration file of a site for runs that hide its samples (`PrivacySettings.hides_samples`): data
settings, number of classes, and shape."""
MAX_ROWS = 10**12
"""Maximum number of rows that a site may declare."""
READING = (
    "test_fraction", "validation_fraction", "image_size", "text_column",
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


class _SiteFile(Schema):
    """Settings of site.toml, in addition to those in `READING`."""

    num_classes: int = Field(0, ge=0, le=MAX_CLASSES)
    shape: Annotated[tuple[CountOrNone, ...], Listed] = Field((), max_length=4)
    rows: int = Field(0, ge=2, le=MAX_ROWS)


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
    def from_files(cls, dataset: str, max_bytes: int) -> Declaration:
        """Read the declaration of a site from site.toml, classes.txt, and schema.toml.

        Args:
            dataset: Data of the site, in the form of `data.dataset`.
            max_bytes: Size limit for the site's data, in bytes.

        Raises:
            DataError: If a file is invalid, or if the classes or the shape are not declared.
            SettingsError: If a setting has an invalid value.
        """
        source, root = find_source(dataset)[0], directory_of(dataset, DataSettings())
        if root is None:
            raise DataError(
                f"node-config 'data' = {dataset!r}: expected files of this site, because the site "
                f"declares its data in {DECLARATION}"
            )
        path = root / DECLARATION
        declared: dict[str, Any] = {}
        if os.path.lexists(path):
            with reading(path, "TOML file"):
                declared = read_toml_tables(path)
        schema = find_schema(root, shared=True)
        if not os.path.lexists(path) and not (schema and schema.columns):
            raise DataError(f"{path}: file not found. {_DECLARE}")
        known = [*map(kebab, (*_SiteFile.model_fields, *READING))]
        if unknown := [name for name in declared if name not in known]:
            rule = f"expected one of {', '.join(known)}"
            raise DataError(f"{path}: {unknown[0]}: unknown setting, {rule}")
        stated = {name: declared.pop(name) for name in _SiteFile.fields() if name in declared}
        own = build(_SiteFile, stated, prefix=f"{path}: ")
        table = build(DataSettings, declared, prefix=f"{path}: data.")
        names = schema.outputs if schema else read_class_names(root, None)
        changes = {
            "max_bytes": max_bytes,
            "task": schema.task if schema else table.task,
            "validation_fraction": table.validation,
        }
        spec = DataSpec.model_construct(
            **dict(table.model_copy(update=changes)), clients=1, seed=FIXED_SEED
        )
        if names and own.num_classes not in (0, len(names)):
            where = root / (SCHEMA if schema else CLASSES_FILE)
            rule = f"expected {len(names)}, the number of classes in {where}, got {own.num_classes}"
            raise DataError(f"{path}: num-classes: {rule}. Correct one of the two files.")
        names = names or tuple(map(str, range(own.num_classes)))
        if len(names) < (low := find_task(spec.task).min_outputs):
            rule = f"expected an integer from {low} to {MAX_CLASSES}"
            raise DataError(f"{path}: num-classes: {rule}, got {own.num_classes}. {_DECLARE}")
        shape = source.shape(spec) or own.shape
        kind = kind_of_arrays(shape, source.kind)
        if schema and schema.columns:
            kind, shape = TABLE, (sum(schema.widths),)
        if not shape:
            rule = "expected the shape of a sample, such as [3, 32, 32]"
            raise DataError(f"{path}: shape: {rule}, got {list(shape)}. {_DECLARE}")
        return cls(str(path), spec, names, kind, shape, own.rows)

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
        self, dataset: str, name: str, listed: Iterable[int] = (), min_samples: int = 1
    ) -> ClientData:
        """Read and check the site's data. Raises DataError for any failure.

        Args:
            dataset: Data of the site, in the form of `data.dataset`.
            name: Name of the site.
            listed: Classes that the peers file lists for the site. The site sends their means in
                each round, so the check must not depend on the run.
            min_samples: Minimum number of training samples in each listed class.
        """
        try:
            data = site_data(
                dataset, spec=self.spec, classes=len(self.names), name=name, declared=self
            )
            if isinstance(data.format.task, Classification):
                counts = Counter(data.train.y.tolist())
                if lacking := [label for label in listed if counts[label] < min_samples]:
                    raise DataError(
                        f"{dataset}: expected at least {min_samples} training samples of each "
                        f"class that the peers file lists for {name}, got {counts[lacking[0]]} of "
                        f"class {lacking[0]}. List only classes with enough samples (`fedhet certs "
                        "DIR --peer NAME --classes`)."
                    )
            return data
        except Exception as error:
            # The server receives the type of the error, so the type must not depend on the data.
            raise DataError(f"{type(error).__name__}: {error}") from error
