"""The papers' claims over finished tables: which hold, by paper and size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedhet.papers.finished import Comparison, Finished
from fedhet.papers.source import SIZES, paper_of, read_table, table_names
from fedhet.report.tables import Cell, Cells

VERDICTS = ("holds", "not-told-apart", "does-not-hold", "not-measured")
"""What can come of a claim, over all places where its table tests it."""
WORDS = {verdict: verdict.replace("-", " ") for verdict in VERDICTS}


@dataclass(frozen=True)
class TestedClaim:
    """A claim of a table in one size, and the comparisons that test it."""

    finished: Finished
    says: str
    comparisons: tuple[Comparison, ...]

    @property
    def paper(self) -> str:
        """The word for the paper, which `fedhet table` takes for all of its tables."""
        return paper_of(self.finished.table)

    @cached_property
    def counts(self) -> Counter[str]:
        """The number of places by outcome."""
        return Counter(each.outcome for each in self.comparisons)

    @property
    def verdict(self) -> str:
        """One of VERDICTS, which see `verdict_of`."""
        return verdict_of(self.counts)

    def as_json(self) -> dict[str, str]:
        """Return the claim as an entry of `fedhet table claims --json`."""
        table, size = self.finished.table, self.finished.size
        return {
            "paper": self.paper, "table": table, "size": size, "claim": self.says,
            "verdict": self.verdict,
        }  # fmt: skip


def verdict_of(outcomes: Collection[str]) -> str:
    """Return what comes of a claim with these outcomes in the places that test it.

    It holds if it does in every place, and does not hold if it fails in one: it is claimed of all.
    Otherwise it is not measured if no place is, and else not told apart.
    """
    found = set(outcomes)
    if "does not hold" in found:
        return "does-not-hold"
    if found == {"holds"}:
        return "holds"
    return "not-told-apart" if found - {"not measured"} else "not-measured"


def claims_in(tables: Iterable[Finished]) -> list[TestedClaim]:
    """Return each claim of finished tables; one that a size has no rows for is not measured."""
    return [
        TestedClaim(table, says, tuple(c for c in table.comparisons if c.claim == says))
        for table in tables
        for says in claims_of(table.table)
    ]


def claims_of(table: str) -> list[str]:
    """Return what a table's paper claims of it, each claim once."""
    return [*dict.fromkeys(claim.says for claim in read_table(table).claims)]


def counted(claims: Sequence[TestedClaim]) -> Cells:
    """Return a row for each paper and size, and one for each size: how many claims hold."""
    papers = [*dict.fromkeys(paper_of(name) for name in table_names())]
    groups = [
        (paper, size, [c for c in claims if c.finished.size == size and paper in (c.paper, "all")])
        for paper in (*papers, "all")
        for size in SIZES
    ]
    made = [group for group in groups if group[2]]
    return Cells(
        {
            "paper": [Cell(paper) for paper, _, _ in made],
            "size": [Cell(size) for _, size, _ in made],
            "tables": [Cell(_share(paper, found)) for paper, _, found in made],
            "claims": [Cell(str(len(found))) for _, _, found in made],
            **{word: [_count(found, v) for _, _, found in made] for v, word in WORDS.items()},
        },
        words=2,
    )


def _count(claims: Iterable[TestedClaim], verdict: str) -> Cell:
    return Cell(str(sum(claim.verdict == verdict for claim in claims)))


def _share(paper: str, claims: Iterable[TestedClaim]) -> str:
    made = {claim.finished.table for claim in claims}
    every = [n for n in table_names() if paper in (paper_of(n), "all") and claims_of(n)]
    return f"{len(made)} of {len(every)}"
