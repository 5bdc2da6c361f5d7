"""Table schemas: TOML files that define how the columns of a table become features and targets.

A schema states the type and the notation of each column, and the numbers with which all clients
encode values in the same way. `fedhet schema` writes it, and users edit it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedhet.base.disk import read_toml_tables
from fedhet.base.errors import DataError, SettingsError, StateError, error_reason, nearest
from fedhet.data.columns import NOTATION, Column
from fedhet.data.spec import DataSpec
from fedhet.tasks import CLASSIFICATION, MAX_CLASSES, Task, find_task

SCHEMA = "schema.toml"
"""Name of the schema file, in the directory of a table or of a site's data."""


class TableSchema(BaseModel):
    """Task, target, and feature columns of a table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    """Target column, or several target columns separated by commas."""
    task: str = CLASSIFICATION.name
    classes: tuple[str, ...] = Field((), max_length=MAX_CLASSES)
    """Classes or labels of the target; empty for numbers."""
    targets: tuple[Column, ...] = ()
    """Columns of numeric targets."""
    missing: tuple[str, ...] = ()
    """Markers of missing values in all columns, in addition to `fedhet.data.words.MISSING`."""
    max_unknown: float = Field(0.2, ge=0, le=1)
    """Maximum fraction of unknown values in a column."""
    columns: tuple[Column, ...] = ()
    """Feature columns; () = the samples are not table rows, so only targets are described."""

    @field_validator("task")
    @classmethod
    def _check_task(cls, name: str) -> str:
        try:
            return find_task(name).name
        except SettingsError as error:
            raise ValueError(str(error)) from None

    @field_validator("targets", "columns", mode="before")
    @classmethod
    def _name_columns(cls, columns: object) -> object:
        """Convert TOML tables with the names of columns to columns."""
        if not isinstance(columns, Mapping):
            return columns
        for name, column in columns.items():
            if not isinstance(column, Mapping):
                raise ValueError(f"{name}: expected a table with the type, got {column!r:.80}")
        return [{"name": name, **column} for name, column in columns.items()]

    @property
    def task_object(self) -> Task:
        """Task of the table, with the scale of its targets."""
        scales = [column.scale for column in self.targets]
        return find_task(self.task).with_scale([m for m, _ in scales], [d for _, d in scales])

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of a model's outputs: the classes, or the target columns."""
        return self.classes or tuple(column.name for column in self.targets)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of features of each column."""
        return tuple(column.width for column in self.columns)

    @property
    def digest(self) -> str:
        """Hash of all fields that affect the encoding of features and targets.

        Fields in `NOTATION` have no effect, because sites may write their files differently.
        """
        other = {"task", "targets"} if self.task == CLASSIFICATION.name else set()
        values = self.model_dump(mode="json", exclude={"max_unknown", "missing", *other})
        for column in [*values["columns"], *values.get("targets", ())]:
            for name in NOTATION:
                del column[name]
        return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()

    def to_toml(self, comments: Mapping[str, str] | None = None) -> str:
        """Serialize the schema to TOML, in the format expected by `read_schema`.

        `comments` maps the names of columns to lines that follow the column.
        """
        values = self.model_dump(exclude_defaults=True, exclude={"columns", "targets"})
        values |= {"task": self.task, "max_unknown": self.max_unknown}
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        parts = [tomli_w.dumps(lists)]
        for key in ("targets", "columns"):
            for column in getattr(self, key):
                fields = column.model_dump(exclude_none=True, exclude_defaults=True)
                name = fields.pop("name")
                parts.append(tomli_w.dumps({key: {name: fields}}).replace(f"[{key}]\n\n", ""))
                if comment := (comments or {}).get(name, ""):
                    parts[-1] += "".join(f"# {line}\n" for line in comment.splitlines())
        return "\n".join(parts)

    def check_fitted(self, path: Path) -> TableSchema:
        """Return the schema. Raises DataError if a field of a column is unknown."""
        for column in (*self.columns, *self.targets):
            if not column.is_fitted:
                raise DataError(
                    f"{path}: column {column.name!r}: values, or mean and deviation, and optional "
                    "must be set, because all sites encode values in the same way. Create the "
                    "file with `fedhet schema`."
                )
        if not self.outputs:
            raise DataError(f"{path}: classes must be set, because all sites share them")
        return self


def toml_key(name: str) -> str:
    """Return a column's name as a key in TOML, in quotation marks if necessary."""
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")


def read_schema(path: Path) -> TableSchema:
    """Read a schema file. Raises DataError if it is unreadable or invalid."""
    tables: Mapping[str, object] = {}
    try:
        tables = read_toml_tables(path)
        schema = TableSchema.model_validate(tables)
    except (OSError, StateError) as error:
        fault = f"{path}: {error_reason(error)}" if isinstance(error, OSError) else str(error)
        raise DataError(
            f"cannot read the table schema: {fault}. Create it with `fedhet schema`."
        ) from None
    except ValidationError as error:
        faults = []
        for each in error.errors():
            place, fault = [*map(str, each["loc"])], each["msg"].removeprefix("Value error, ")
            columns = tables.get(place[0]) if len(place) > 1 else None
            if isinstance(columns, Mapping) and place[1].isdigit():  # Name the column.
                place[1] = toml_key([*columns][int(place[1])])
            if each["type"] == "extra_forbidden":
                known = Column.model_fields if len(place) > 1 else TableSchema.model_fields
                fault = f"unknown field{nearest(place[-1], known)}"
            faults.append(f"{'.'.join(place)}: {fault}")
        raise DataError(f"{path}: {'; '.join(faults)}") from None
    targets = {schema.target, *(name.strip() for name in schema.target.split(","))}
    for column in schema.columns:
        if column.name in targets:
            if schema.task_object.targets == "numbers":
                fix = f"Use [targets.{toml_key(column.name)}] instead."
            else:
                fix = "List its classes or labels in classes."
            raise DataError(
                f"{path}: columns.{toml_key(column.name)}: expected a feature column, got the "
                f"target. {fix}"
            )
    unclear = [column.name for column in (*schema.columns, *schema.targets) if column.type == "?"]
    if unclear:
        raise DataError(
            f"{path}: type must not be '?', got it for {', '.join(map(repr, unclear))}. Replace it "
            "with number, date, category, or ignore."
        )

    def complete(columns: tuple[Column, ...]) -> tuple[Column, ...]:
        marks = schema.missing
        return tuple(
            column.model_copy(update={"missing": tuple(dict.fromkeys((*column.missing, *marks)))})
            for column in columns
            if column.type != "ignore"
        )

    update = {"columns": complete(schema.columns), "targets": complete(schema.targets)}
    return schema.model_copy(update=update)


def find_schema(path: Path, *, shared: bool = False) -> TableSchema | None:
    """Read the schema next to a row file, or in a directory, or return None if there is none.

    Raises DataError if the schema is `shared` by all sites and a field of a column is unknown.
    """
    file = (path if path.is_dir() else path.parent) / SCHEMA
    if not os.path.lexists(file):
        return None
    schema = read_schema(file)
    return schema.check_fitted(file) if shared else schema


def declared_targets(spec: DataSpec, *paths: Path) -> tuple[TableSchema | None, DataSpec]:
    """Return the schema next to the data, or None, and data settings with its target.

    The first of several `paths` with a schema counts. Raises DataError if the schema is invalid.
    """
    for path in paths:
        if schema := find_schema(path, shared=spec.expected is not None):
            return schema, spec.replace(target=schema.target)
    return None, spec
