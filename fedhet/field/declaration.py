"""Reads the declaration of the table of all methods: its sizes, architectures and splits."""

from __future__ import annotations

import tomllib
from importlib import resources

from pydantic import BaseModel, ConfigDict, Field

from fedhet.papers.source import Change, Line, Scale, Size

NAME = "field"
FILE = resources.files("fedhet") / "field" / "field.toml"


class Architectures(Line):
    """A pool of models."""

    instead: list[Line] = Field(default_factory=list)
    """What a method that cannot train the pool has instead of it; the name is the method's."""

    def of(self, method: str, size: Size) -> list[Change]:
        """Return a method's settings in a size, the later ones over the earlier."""
        own = (line for line in self.instead if line.name == method)
        return [*self.changes(size), *(change for line in own for change in line.changes(size))]


class FieldTable(BaseModel):
    """A table whose rows are all methods, and whose cells are architectures by splits."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    title: str
    notes: list[str] = Field(default_factory=list)
    sizes: dict[Size, Scale]
    architectures: list[Architectures] = Field(min_length=1)
    splits: list[Line] = Field(min_length=1)


def read_field() -> FieldTable:
    """Return the table of all methods."""
    return FieldTable.model_validate(tomllib.loads(FILE.read_text(encoding="utf-8")))
