"""Generates what docs/results.md and docs/tables.md say of finished tables.

`python -m fedhet.papers.pages`, in the project's root, writes both from the files in
fedhet/papers/measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedhet.config.reference import in_markdown, with_part
from fedhet.papers.claims import WORDS, TestedClaim, claims_in, counted
from fedhet.papers.finished import MEASURED, Comparison, Finished, read_finished
from fedhet.papers.plan import as_options
from fedhet.papers.results import OUTCOMES
from fedhet.papers.source import paper_of, read_table
from fedhet.report.tables import markdown, plain

CLAIM_COLUMNS = ("claim", "table and size", "verdict", "places", "differences")
SEEDS = 3
"""A table of fewer seeds says so."""
TABLE_COLUMNS = ("table and size", "what it is", "made", "runs", "Kendall's τ")


def pages(root: Path, folder: Path = MEASURED) -> dict[Path, str]:
    """Return the text of the two pages, by their paths in the project."""
    tables = read_finished(folder)
    parts = {"results.md": results_part(claims_in(tables)), "tables.md": tables_part(tables)}
    found = {root / "docs" / name: part for name, part in parts.items()}
    return {path: with_part(path, part) for path, part in found.items()}


def results_part(claims: Sequence[TestedClaim]) -> str:
    """Return how many claims hold by paper and size, and then what came of each."""
    papers = dict.fromkeys(claim.paper for claim in claims)
    sections = [_section(paper, [c for c in claims if c.paper == paper]) for paper in papers]
    return "\n".join([markdown(counted(claims)), *sections])


def _section(paper: str, claims: Sequence[TestedClaim]) -> str:
    source = read_table(claims[0].finished.table).source
    return f"### {paper}\n\n{_work(source)}.\n\n{_claims(claims)}"


def _work(source: str) -> str:
    """Return the authors and the title of the work that a table is of."""
    return re.split(r", (?:Table|Fig|Section)", source)[0]


def _claims(claims: Sequence[TestedClaim]) -> str:
    rows = [
        (
            plain(claim.says),
            _link(claim.finished),
            WORDS[claim.verdict],
            _places(claim),
            _differences(claim.comparisons),
        )
        for claim in claims
    ]
    return in_markdown(CLAIM_COLUMNS, rows)


def _places(claim: TestedClaim) -> str:
    """Return the number of places of each outcome that occurs: "holds 2, within noise 1"."""
    return ", ".join(f"{o} {claim.counts[o]}" for o in OUTCOMES if claim.counts[o])


def _differences(comparisons: Iterable[Comparison]) -> str:
    """Return the difference of a claim, or the smallest and the largest of several."""
    known = [each for each in comparisons if each.difference is not None]
    ordered = sorted(known, key=lambda each: each.difference or 0.0)
    ends = [_difference(each) for each in (*ordered[:1], *ordered[1:][-1:])]
    return " to ".join(ends)


def _difference(found: Comparison) -> str:
    return f"{found.difference:+.2f} ± {found.se:.2f}"


def _link(finished: Finished) -> str:
    page, anchor = paper_of(finished.table), slug(read_table(finished.table).title)
    few = f", {len(finished.seeds)} seeds alone" if len(finished.seeds) < SEEDS else ""
    return f"[{finished.table}](tables/{page}.md#{anchor}), {finished.size}{few}"


def slug(title: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def tables_part(tables: Sequence[Finished]) -> str:
    """Return a row for each finished table: its runs, and how many comparisons hold."""
    return in_markdown((*TABLE_COLUMNS, *OUTCOMES), map(_row, tables), words=3)


def _row(table: Finished) -> tuple[str, ...]:
    counts: Counter[str] = Counter(each.outcome for each in table.comparisons)
    return (
        _link(table),
        plain(read_table(table.table).title),
        _made(table),
        f"{table.finished} of {table.runs}",
        _agreements(table),
        *(str(counts[name]) for name in OUTCOMES),
    )


def _made(table: Finished) -> str:
    """Return the day on which a table was made, and the settings that were given with it."""
    given = ", ".join(f"`{option}`" for option in as_options(table.settings))
    return f"{table.made}{', ' if given else ''}{given}"


def _agreements(table: Finished) -> str:
    known = [f"{value:.2f}" for value in table.agreement.values() if value is not None]
    return ", ".join(known) or "–"


def _write() -> None:
    for path, text in pages(Path()).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _write()
