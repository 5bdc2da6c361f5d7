"""Reads the declaration of the table of all methods: its sizes, architectures and splits."""

from __future__ import annotations

import tomllib
from importlib import resources

from pydantic import BaseModel, ConfigDict, Field

from fedhet.papers.source import Line, Scale, Size

NAME = "field"
FILE = resources.files("fedhet") / "field" / "field.toml"


class FieldTable(BaseModel):
    """A table whose rows are all methods, and whose cells are architectures by splits."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    title: str
    notes: list[str] = Field(default_factory=list)
    sizes: dict[Size, Scale]
    architectures: list[Line] = Field(min_length=1)
    splits: list[Line] = Field(min_length=1)


def read_field() -> FieldTable:
    """Return the table of all methods."""
    return FieldTable.model_validate(tomllib.loads(FILE.read_text(encoding="utf-8")))
