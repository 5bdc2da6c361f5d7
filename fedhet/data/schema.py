"""What a table's columns become: a schema, as plain data that is kept in files.

A schema says what each column becomes, so that the same value is the same features at every
client: a number is centred and scaled, a date is one in days, a word is one of the column's
categories. A missing value is the mean, or no category, and a feature of its own says so.
`fedhet.data.tables` finds schemas, and encodes tables by them.
"""

from __future__ import annotations

import hashlib
from datetime import date, timedelta
from pathlib import Path
from typing import Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedhet.base.disk import read_tables
from fedhet.base.errors import DataError, StateError, reason_of

MOST_CATEGORIES, MOST_CLASSES = 200, 1000


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(_Frozen):
    """A column, and the features that its values become."""

    name: str
    kind: Literal["number", "date", "category"]
    mean: float = Field(0.0, allow_inf_nan=False)
    """Of a number; of a date, in days since 1970."""
    deviation: float = Field(1.0, gt=0, allow_inf_nan=False)
    categories: tuple[str, ...] = Field((), max_length=MOST_CATEGORIES)
    missing: bool = False
    """Whether a feature of its own says that a value is missing."""
    written: str = ""
    """How numbers or dates are written, such as 1.234,5 or dd/mm/yyyy; "": 1234.5, and ISO 8601."""
    unit: str = ""
    """What each number is written with, such as %."""

    @property
    def width(self) -> int:
        """The number of features."""
        own = len(self.categories) if self.kind == "category" else 1
        return own + self.missing

    @property
    def spread(self) -> str:
        """The mean and the standard deviation of a number or a date, or the categories."""
        if self.kind == "category":
            return ", ".join(self.categories)
        if self.kind == "date":
            mean = date(1970, 1, 1) + timedelta(days=round(self.mean))
            return f"mean {mean} ± {self.deviation:.4g} days"
        return f"mean {self.mean:.4g} ± {self.deviation:.4g}"


class TableSchema(_Frozen):
    """What is predicted from which columns, and how these become features."""

    target: str
    classes: tuple[str, ...] = Field(min_length=2, max_length=MOST_CLASSES)
    missing: tuple[str, ...] = ()
    """Marks of missing values, in addition to those of `fedhet.data.values`."""
    max_unknown: float = Field(0.2, ge=0, le=1)
    """Maximum fraction of a column's values that may be unknown to the schema."""
    columns: tuple[Column, ...] = Field(min_length=1)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of features of each column."""
        return tuple(column.width for column in self.columns)

    @property
    def digest(self) -> str:
        """A text that two schemas share only if they give the same features and classes."""
        text = self.model_dump_json(exclude={"max_unknown"})
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_toml(self) -> str:
        """Serialize the schema to TOML, in the format expected by `read_schema`."""
        kept = self.model_dump(exclude_defaults=True) | {"max_unknown": self.max_unknown}
        columns = kept.pop("columns")
        texts = {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}
        return tomli_w.dumps({**texts, "columns": columns})


def read_schema(path: Path) -> TableSchema:
    """Return the schema in a file. Raises DataError."""
    try:
        return TableSchema.model_validate(read_tables(path))
    except (OSError, StateError) as error:
        fault = f"{path}: {reason_of(error)}" if isinstance(error, OSError) else str(error)
        raise DataError(
            f"cannot read the schema of the table, which `fedhet schema` writes: {fault}"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: {where}: {first['msg']}") from None
