"""Declarations of the tables, read from TOML files: those of papers, and the one of all methods.

A paper's table, `tables/NAME.toml`, has rows, columns, sizes, printed numbers and claims. A cell is
one run per seed. Its settings are those of the size, then of the column, of the row, and
of the place where they meet, if there is one; of each, its presets come first. Cells with equal
settings share their runs, so that several kinds of model of one run can be rows or columns of their
own. The table of all methods, `field.toml`, crosses architectures with splits of the data.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import resources
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedhet.base.errors import SettingsError, unknown_name
from fedhet.methods.registry import shipped_names
from fedhet.runs.records import PROTOCOLS

FILES = resources.files("fedhet.experiments") / "tables"
FIELD = "field"
"""The name of the table of all methods."""
Size = Literal["tiny", "small", "paper"]
SIZES: tuple[Size, ...] = get_args(Size)
"""Digits, in minutes; the paper's federation with small networks; as in the paper."""
STATISTICS = ("mean", "std", "tail", "worst")
DIRECTIONS = ("up", "down")
RATIOS = ("mean", "best", "worst")


def _is_metric(text: str) -> str:
    first, second, *rest = (*text.split("/"), "")
    third = rest[0] or "mean" if rest else "mean"
    accuracy = first in PROTOCOLS and second and third in STATISTICS
    relative = first == "relative" and second in PROTOCOLS and third in RATIOS
    bytes_sent = first == "bytes" and second in DIRECTIONS and not rest[:-1]
    figure = first == "figure" and second
    if len(rest) > 2 or not (accuracy or relative or bytes_sent or figure):
        raise ValueError(
            "it takes PROTOCOL/KIND[/mean|std|tail|worst], relative/PROTOCOL[/mean|best|worst], "
            "bytes/up|down, or figure/NAME"
        )
    return text


Metric = Annotated[str, AfterValidator(_is_metric)]
"""The metric that a cell shows, such as `common/global`, `relative/common/best`, `figure/tau`.

`bytes/up` is the mean per round of what all clients send together, in KiB.
"""
Printed = float | Annotated[list[float], Field(min_length=1, max_length=2)]
"""A number of the paper, or a number and its spread."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Change(_Part):
    """Settings that override earlier ones: those of presets, then individual ones."""

    preset: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)


class Scale(Change):
    """A size of the table: the settings that all its runs share."""

    says: str
    """A description, and what was cut from the paper's experiment."""


class Line(_Part):
    """A row or a column."""

    name: str
    every: Change = Change()
    """Its settings in every size."""
    tiny: Change | None = None
    small: Change | None = None
    paper: Change | None = None
    sizes: list[Size] = Field(default_factory=lambda: list(SIZES), min_length=1)
    """The sizes that have it."""
    metric: Metric = ""

    def changes(self, size: Size) -> list[Change]:
        """Return its settings in a size, the later ones over the earlier."""
        own: Change | None = getattr(self, size)
        return [self.every, *([own] if own else [])]


class Row(Line):
    """A row: a method, or a variant of one."""

    method: str
    printed: dict[str, Printed] = Field(default_factory=dict)
    """The paper's numbers by column."""


class Place(Line):
    """Settings of a row, which is named, in some of the columns."""

    columns: list[str] = Field(min_length=1)


class Claim(_Part):
    """A claim of the paper: each of `above` is greater than each of `below`."""

    says: str
    above: list[str] = Field(min_length=1)
    below: list[str] = Field(min_length=1)
    of: Literal["rows", "columns"] = "rows"
    """Whether the names are of rows, compared in each column, or of columns, in each row."""
    where: list[str] = Field(default_factory=list)
    """The columns (or rows) in which the paper claims it; none: in all."""


class PaperTable(_Part):
    """A table of a paper."""

    title: str
    source: str
    """The paper, and the table or figure."""
    metric: Metric
    """What a cell shows, unless its row or column overrides it."""
    unit: Literal["percent", "ratio"] = "percent"
    """The unit of the printed numbers; accuracies are measured as shares."""
    notes: list[str] = Field(default_factory=list)
    """Notes on the table, such as rows of the paper that are left out, and why."""
    sizes: dict[Size, Scale]
    rows: list[Row] = Field(min_length=1)
    columns: list[Line] = Field(min_length=1)
    places: list[Place] = Field(default_factory=list)
    claims: list[Claim] = Field(default_factory=list)

    def rows_in(self, size: Size) -> list[Row]:
        """Return the rows of a size."""
        return [row for row in self.rows if size in row.sizes]

    def columns_in(self, size: Size) -> list[Line]:
        """Return the columns of a size."""
        return [column for column in self.columns if size in column.sizes]

    def changes(self, row: Row, column: Line, size: Size) -> list[Change]:
        """Return the settings of a cell in a size, the later ones over the earlier."""
        found = [self.sizes[size], *column.changes(size), *row.changes(size)]
        for place in self.places:
            if place.name == row.name and column.name in place.columns:
                found += place.changes(size)
        return found

    @model_validator(mode="after")
    def _names_are_known(self) -> PaperTable:
        rows, columns = ([line.name for line in part] for part in (self.rows, self.columns))
        for names in (rows, columns):
            if len(set(names)) < len(names):
                raise ValueError(f"a name occurs twice in {names}")
        for row in self.rows:
            _all_in(row.printed, columns, f"row {row.name!r}, printed")
        for place in self.places:
            _all_in([place.name], rows, "places, name")
            _all_in(place.columns, columns, f"places, {place.name!r}")
        for claim in self.claims:
            ours, theirs = (rows, columns) if claim.of == "rows" else (columns, rows)
            _all_in([*claim.above, *claim.below], ours, f"claim {claim.says!r}")
            _all_in(claim.where, theirs, f"claim {claim.says!r}, where")
        return self


class Architectures(Line):
    """A pool of models."""

    instead: list[Line] = Field(default_factory=list)
    """What a method that cannot train the pool has instead of it; the name is the method's."""

    def of(self, method: str, size: Size) -> list[Change]:
        """Return a method's settings in a size, the later ones over the earlier."""
        own = (line for line in self.instead if line.name == method)
        return [*self.changes(size), *(change for line in own for change in line.changes(size))]


class FieldTable(_Part):
    """A table whose rows are all methods, and whose cells are architectures by splits."""

    title: str
    notes: list[str] = Field(default_factory=list)
    sizes: dict[Size, Scale]
    architectures: list[Architectures] = Field(min_length=1)
    splits: list[Line] = Field(min_length=1)


def read_field() -> FieldTable:
    """Return the table of all methods."""
    file = resources.files("fedhet.experiments") / f"{FIELD}.toml"
    return FieldTable.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))


def table_names() -> list[str]:
    """Return the names of all tables."""
    return sorted(
        file.name.removesuffix(".toml") for file in FILES.iterdir() if file.name.endswith(".toml")
    )


def tables_of(word: str) -> list[str]:
    """Return the names of the tables that a word means: "all", one, or those of a paper ("felo").

    Raises SettingsError that suggests the nearest name.
    """
    known = table_names()
    found = [name for name in known if word == "all" or f"{name}-".startswith(f"{word}-")]
    if not found:
        raise SettingsError(unknown_name("table", word, known, "`fedhet table` lists all"))
    return found


def paper_of(name: str) -> str:
    """Return the word for a table's paper: the method that the paper is about."""
    return next(method for method in shipped_names() if name.startswith(f"{method}-"))


def read_table(name: str) -> PaperTable:
    """Return one of `table_names`. Raises SettingsError that says what is wrong with its file."""
    text = (FILES / f"{name}.toml").read_text(encoding="utf-8")
    try:
        return PaperTable.model_validate(tomllib.loads(text))
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"table '{name}': {where}: {first['msg']}") from None


def _all_in(names: Iterable[str], known: list[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: {name!r} is none of {', '.join(known)}")
