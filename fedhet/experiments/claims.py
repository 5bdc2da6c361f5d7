"""Verdicts of finished tables on the papers' claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import product
from pathlib import Path

from fedhet.base.errors import StateError
from fedhet.experiments.field import FieldRecord
from fedhet.experiments.output import bounds
from fedhet.experiments.paper import Comparison, TableResult
from fedhet.experiments.plan import FIELD, SIZES, Claim, paper_of, read_table, table_names
from fedhet.report.tables import Cell, Cells
from fedhet.runs.directory import read_validated

MEASURED = Path(str(resources.files("fedhet.experiments") / "measured"))
"""Directory of the finished tables that are included in fedhet."""
VERDICTS = ("holds", "not-told-apart", "does-not-hold", "not-measured")
"""Possible verdicts on a claim, over all comparisons in its table."""
WORDS = dict(zip(VERDICTS, ("holds", "inconclusive", "does not hold", "not measured"), strict=True))


def read_finished(folder: Path) -> list[TableResult]:
    """Return the finished tables in a directory, sorted by name and size.

    Other files are ignored. Raises StateError if a file is unreadable or misnamed.
    """
    results = []
    for name, size in product(table_names(), SIZES):
        path = folder / f"{name}-{size}.json"
        if path.exists():
            result = read_validated(path, TableResult)
            if result.file_name != path.name:
                raise StateError(f"{path}: expected the name {result.file_name} for its content")
            results.append(result)
    return results


def find_finished(
    folder: Path | None, default: Path, names: Collection[str]
) -> tuple[list[TableResult], str]:
    """Return the finished tables among `names`, and a description of their directory.

    The tables are read from `folder` or, if it is None, from `default`. If `default` contains none
    of the tables, the tables included in fedhet are returned.
    """
    source = folder or default
    results = [each for each in read_finished(source) if each.table in names]
    if results or folder:
        return results, f"the tables in {source}"
    results = [each for each in read_finished(MEASURED) if each.table in names]
    return results, "the tables that come with fedhet"


def field_records(folder: Path | None, default: Path) -> list[FieldRecord]:
    """Return the finished tables of all methods, from the directory that `find_finished` selects.

    Raises StateError if a file is unreadable.
    """
    for source in (folder or default, *(() if folder else (MEASURED,))):
        paths = [source / f"{FIELD}-{size}.json" for size in SIZES]
        if records := [read_validated(path, FieldRecord) for path in paths if path.exists()]:
            return records
    return []


@dataclass(frozen=True)
class TestedClaim:
    """Claim of a paper, with the comparisons that test the claim at one size of a table."""

    result: TableResult
    says: str
    stated: tuple[Claim, ...]
    """Declarations of the claim, with its bounds."""
    comparisons: tuple[Comparison, ...]

    @property
    def paper(self) -> str:
        """Short name of the paper. `fedhet table` accepts this name for all tables of the paper."""
        return paper_of(self.result.table)

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of comparisons by outcome."""
        return Counter(each.outcome for each in self.comparisons)

    @property
    def verdict(self) -> str:
        """Verdict on the claim, one of `VERDICTS` (see `verdict_of`)."""
        return verdict_of(self.counts, most=self.stated[0].holds_in == "most")

    @property
    def bound(self) -> str:
        """Bounds of the claim in words."""
        return bounds(self.stated)

    def on_data(self, bold: str = "") -> str:
        """Return the verdict with the data on which it is based, e.g. "holds on digits".

        The paper's numbers are often for other data. `bold` surrounds the verdict.
        """
        on = "" if self.verdict == "not-measured" else f" on {self.result.data}"
        return f"{bold}{WORDS[self.verdict]}{bold}{on}"


def verdict_of(outcomes: Iterable[str], *, most: bool = False) -> str:
    """Return the verdict on a claim from the outcomes of its comparisons.

    A claim holds if it holds in all comparisons, and does not hold if it fails in one comparison.
    With `most`, it holds if it holds in more than half, and does not hold if it fails in at least
    half of the comparisons. Otherwise, the claim is "not-measured" if no comparison was measured,
    and "not-told-apart" (inconclusive) if at least one comparison was measured.
    """
    counts = Counter(outcomes)
    half = counts.total() / 2
    held, failed = counts["holds"], counts["does not hold"]
    if counts["not measured"] == counts.total():
        return "not-measured"
    if failed >= (half if most else 1):
        return "does-not-hold"
    return "holds" if held > half and (most or held == 2 * half) else "not-told-apart"


def claims_in(tables: Iterable[TableResult]) -> list[TestedClaim]:
    """Return the claims of all finished tables, including claims without measurements."""
    return [
        TestedClaim(
            table, says, tuple(stated), tuple(c for c in table.comparisons if c.claim == says)
        )
        for table in tables
        for says, stated in read_table(table.table).sentences.items()
    ]


def counted(claims: Sequence[TestedClaim]) -> Cells:
    """Build a table of claims by verdict, with a row per paper and size, and a total per size."""
    papers = [*dict.fromkeys(paper_of(name) for name in table_names())]
    columns: dict[str, list[Cell]] = {
        name: [] for name in ("paper", "size", "tables", "claims", *WORDS.values())
    }
    for paper in (*papers, "all"):
        tables = {n: read_table(n) for n in table_names() if paper in (paper_of(n), "all")}
        for size in SIZES:
            every = [n for n, table in tables.items() if table.claims and size in table.sizes]
            checked = [c for c in claims if c.result.size == size and paper in (c.paper, "all")]
            if not checked:
                continue
            finished = {claim.result.table for claim in checked}
            verdicts = Counter(claim.verdict for claim in checked)
            row = (paper, size, f"{len(finished)} of {len(every)}", str(len(checked)))
            counts = (str(verdicts[verdict]) for verdict in VERDICTS)
            for column, text in zip(columns.values(), (*row, *counts), strict=True):
                column.append(Cell(text))
    return Cells(columns, words=2)
