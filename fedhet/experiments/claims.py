"""The papers' claims over finished tables: `fedhet table claims`, and the pages that show them.

`python -m fedhet.experiments.claims`, in the project's root, writes what docs/results.md and
docs/tables.md say of the tables in fedhet/experiments/measured, and list.json, the list of tables
that `fedhet table` prints.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from fedhet.base.errors import StateError
from fedhet.config.reference import in_markdown, with_part
from fedhet.experiments.paper import OUTCOMES, Comparison, Finished
from fedhet.experiments.plan import (
    FIELD,
    SIZES,
    as_options,
    paper_of,
    plan,
    plan_field,
    read_field,
    read_table,
    table_names,
)
from fedhet.methods.registry import shipped_names
from fedhet.report.tables import Cell, Cells, markdown, plain
from fedhet.runs.directory import read_validated

MEASURED = Path(str(resources.files("fedhet.experiments") / "measured"))
"""The finished tables that come with fedhet: those of docs/tables.md."""
VERDICTS = ("holds", "not-told-apart", "does-not-hold", "not-measured")
"""What can come of a claim, over all places where its table tests it."""
WORDS = {verdict: verdict.replace("-", " ") for verdict in VERDICTS}
CLAIM_COLUMNS = (
    "claim", "table and size", "verdict", "places", "differences", "seeds that would decide"
)  # fmt: skip
MAX_SEEDS = 100
"""Above this number of seeds, a larger federation is the way to decide a claim."""
SEEDS = 3
"""A table of fewer seeds says so."""
TABLE_COLUMNS = ("table and size", "what it is", "made", "runs", "Kendall's τ")


def read_finished(folder: Path) -> list[Finished]:
    """Return the finished tables of a folder, by name and size. Raises StateError for a bad file.

    Other files are left alone.
    """
    wanted = [(name, size) for name in table_names() for size in SIZES]
    paths = [folder / f"{name}-{size}.json" for name, size in wanted]
    tables = []
    for path in paths:
        if path.exists():
            found = read_validated(path, Finished)
            if found.file_name != path.name:
                raise StateError(
                    f"{path} is of the table {found.table!r} in the size {found.size!r}"
                )
            tables.append(found)
    return tables


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

    @property
    def seeds_to_decide(self) -> int | None:
        """Number of seeds that would decide the claim if differences and spread stay as measured.

        A place that now points against the claim would refute it, and the first such place
        suffices; without one, every place within noise must be confirmed. A place is decided by
        n seeds if |difference| > 2 SE(n), where SE(n) = SE(k) sqrt(k / n) and k is the number of
        seeds that were run. None: the claim is decided or not measured, or a difference is zero.
        """
        if self.verdict != "not-told-apart":
            return None
        needed: dict[bool, list[float]] = {True: [], False: []}
        for each in self.comparisons:
            if each.outcome == "within noise" and each.difference is not None and each.se:
                ratio = 2 * each.se / each.difference if each.difference else math.inf
                needed[ratio > 0].append(len(self.finished.seeds) * ratio**2)
        refuting, confirming = needed[False], needed[True]
        found = min(refuting) if refuting else max(confirming, default=math.inf)
        return math.floor(found) + 1 if math.isfinite(found) else None


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
    columns: dict[str, list[Cell]] = {
        name: [] for name in ("paper", "size", "tables", "claims", *WORDS.values())
    }
    for paper in (*papers, "all"):
        every = [n for n in table_names() if paper in (paper_of(n), "all") and claims_of(n)]
        for size in SIZES:
            found = [c for c in claims if c.finished.size == size and paper in (c.paper, "all")]
            if not found:
                continue
            made = {claim.finished.table for claim in found}
            verdicts = Counter(claim.verdict for claim in found)
            row = (paper, size, f"{len(made)} of {len(every)}", str(len(found)))
            counts = (str(verdicts[verdict]) for verdict in VERDICTS)
            for column, text in zip(columns.values(), (*row, *counts), strict=True):
                column.append(Cell(text))
    return Cells(columns, words=2)


# --- generated pages --------------------------------------------------------------------------


def pages(root: Path, folder: Path = MEASURED) -> dict[Path, str]:
    """Return the text of the two pages, by their paths in the project."""
    tables = read_finished(folder)
    parts = {"results.md": results_part(claims_in(tables)), "tables.md": tables_part(tables)}
    found = {root / "docs" / name: part for name, part in parts.items()}
    return {path: with_part(path, part) for path, part in found.items()}


def results_part(claims: Sequence[TestedClaim]) -> str:
    """Return how many claims hold by paper and size, and then what came of each."""
    parts = [markdown(counted(claims))]
    for paper in dict.fromkeys(claim.paper for claim in claims):
        rows = []
        of_paper = [claim for claim in claims if claim.paper == paper]
        for claim in of_paper:
            known = [each for each in claim.comparisons if each.difference is not None]
            ordered = sorted(known, key=lambda each: each.difference or 0.0)
            ends = (*ordered[:1], *ordered[1:][-1:])  # the smallest and the largest
            seeds, decides = claim.seeds_to_decide, "–"
            if claim.verdict == "not-told-apart":
                decides = str(seeds) if seeds and seeds <= MAX_SEEDS else f"more than {MAX_SEEDS}"
            row = (
                plain(claim.says),
                _link(claim.finished),
                WORDS[claim.verdict],
                ", ".join(f"{o} {claim.counts[o]}" for o in OUTCOMES if claim.counts[o]),
                " to ".join(f"{each.difference:+.2f} ± {each.se:.2f}" for each in ends),
                decides,
            )
            rows.append(row)
        work = re.split(r", (?:Table|Fig|Section)", read_table(of_paper[0].finished.table).source)
        parts.append(f"### {paper}\n\n{work[0]}.\n\n{in_markdown(CLAIM_COLUMNS, rows)}")
    return "\n".join(parts)


def _link(finished: Finished) -> str:
    """Return a link to a table's section, whose anchor is as GitHub makes it of the heading."""
    page, title = paper_of(finished.table), read_table(finished.table).title
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    few = f", {len(finished.seeds)} seeds alone" if len(finished.seeds) < SEEDS else ""
    return f"[{finished.table}](tables/{page}.md#{anchor}), {finished.size}{few}"


def tables_part(tables: Iterable[Finished]) -> str:
    """Return a row for each finished table: its runs, and how many comparisons hold."""
    rows = []
    for table in tables:
        counts: Counter[str] = Counter(each.outcome for each in table.comparisons)
        made = [table.made, *(f"`{option}`" for option in as_options(table.settings))]
        taus = [f"{value:.2f}" for value in table.agreement.values() if value is not None]
        rows.append(
            (
                _link(table),
                plain(read_table(table.table).title),
                ", ".join(made),
                f"{table.finished} of {table.runs}",
                ", ".join(taus) or "–",
                *(str(counts[name]) for name in OUTCOMES),
            )
        )
    return in_markdown((*TABLE_COLUMNS, *OUTCOMES), rows, words=3)


def tables_listed() -> list[tuple[str, str, str, str]]:
    """Return the rows of the list of tables, with the number of runs that each table takes."""
    found = []
    for name in table_names():
        table = read_table(name)
        counts = {size: len(plan(name, table, size, [0], Path()).runs) for size in table.sizes}
        found.append((name, table.title, table.source, counts))
    field, methods = read_field(), sorted(shipped_names())
    counts = {s: len(plan_field(field, s, methods, [0], Path()).runs) for s in field.sizes}
    found.append((FIELD, field.title, "no paper", counts))
    return [
        (name, title, source, ", ".join(f"{size} {count}" for size, count in counts.items()))
        for name, title, source, counts in found
    ]


if __name__ == "__main__":
    for path, text in pages(Path()).items():
        path.write_text(text, encoding="utf-8")
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in tables_listed())
    Path("fedhet/experiments/list.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
