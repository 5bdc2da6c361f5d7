"""A table's comparisons as a file, NAME-SIZE.json: what is left of it when its runs are gone.

Those in `MEASURED` come with fedhet: the tables of docs/tables.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedhet.base.errors import StateError
from fedhet.papers.results import Results, Verdict
from fedhet.papers.source import SIZES, Size, table_names
from fedhet.runs.files import read_origin, read_summary, read_validated

MEASURED = Path(str(resources.files("fedhet") / "papers" / "measured"))
"""The finished tables that come with fedhet."""
Outcome = Literal["holds", "within noise", "does not hold", "not measured"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Comparison(_Part):
    """A claim in one place, and what came of it."""

    claim: str
    where: str
    above: str
    below: str
    outcome: Outcome
    difference: float | None = None
    """The mean over the seeds, in the unit of the printed numbers; None: not measured."""
    se: float | None = None
    """Its standard error."""


class Finished(_Part):
    """A table in one size, as far as it was made."""

    table: str
    size: Size
    seeds: list[int] = Field(min_length=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    """The settings that all of its runs had instead of the table's."""
    runs: int
    finished: int
    """The runs of which it was made."""
    made: str = ""
    """The day on which the last of them was begun, as 2026-11-24."""
    hours: float | None = None
    """What they took together, by the clock of the machine that made them."""
    agreement: dict[str, float | None] = Field(default_factory=dict)
    """Kendall's tau with the printed numbers, by column."""
    comparisons: list[Comparison] = Field(default_factory=list)

    @classmethod
    def of(cls, results: Results) -> Finished:
        """Return what a table's results come to."""
        plan = results.plan
        done = [run.directory for run in plan.runs if run.finished]
        return cls(
            table=plan.name,
            size=plan.size,
            seeds=[*plan.seeds],
            settings=dict(plan.over),
            runs=len(plan.runs),
            finished=len(done),
            made=max((_begun(path) for path in done), default=""),
            hours=_hours(done),
            agreement={
                column.name: _known(results.agreement(column.name), 2)
                for column in plan.table.columns_in(plan.size)
            },
            comparisons=[*map(_comparison, results.verdicts)],
        )

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.table}-{self.size}.json"

    def to_json(self) -> str:
        """Return its file's text, with a line for each comparison."""
        head = self.model_dump(exclude={"comparisons"})
        lines = [json.dumps(each.model_dump(), ensure_ascii=False) for each in self.comparisons]
        text = json.dumps({**head, "comparisons": []}, indent=1, ensure_ascii=False)
        return text.replace('"comparisons": []', f'"comparisons": [{_listed(lines)}]') + "\n"


def _listed(lines: Iterable[str]) -> str:
    joined = ",\n  ".join(lines)
    return f"\n  {joined}\n " if joined else ""


def _comparison(verdict: Verdict) -> Comparison:
    return Comparison(
        claim=verdict.claim.says,
        where=verdict.where,
        above=verdict.above,
        below=verdict.below,
        outcome=verdict.outcome,
        difference=_known(verdict.difference.mean, 4),
        se=_known(verdict.difference.se, 4),
    )


def _known(value: float, digits: int) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def _begun(run: Path) -> str:
    return read_origin(run / "run.json").started[: len("2026-11-24")]


def _hours(runs: Iterable[Path]) -> float:
    found = (read_summary(run / "summary.json") for run in runs)
    return round(sum(each.seconds.total for each in found if each) / 3600, 2)


def read_finished(folder: Path) -> list[Finished]:
    """Return the finished tables of a folder, by name and size. Raises StateError for a bad file.

    Other files are left alone.
    """
    wanted = [(name, size) for name in table_names() for size in SIZES]
    paths = [folder / f"{name}-{size}.json" for name, size in wanted]
    return [_read(path) for path in paths if path.exists()]


def _read(path: Path) -> Finished:
    found = read_validated(path, Finished)
    if found.file_name != path.name:
        raise StateError(f"{path} is of the table {found.table!r} in the size {found.size!r}")
    return found
