"""Verdicts on the papers' claims, and the documentation pages that show finished tables.

`python -m fedhet.experiments.claims`, run in the project's root, writes the generated parts of
docs/results.md and docs/tables/*.md from the files in fedhet/experiments/measured. It also writes
list.json, the list of tables that `fedhet table` prints.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import product
from pathlib import Path

from fedhet.base.errors import StateError
from fedhet.config.reference import with_part
from fedhet.experiments.field import FieldRecord, page_parts
from fedhet.experiments.paper import Comparison, TableResult, cells
from fedhet.experiments.plan import (
    FIELD,
    SIZES,
    paper_of,
    plan,
    plan_field,
    read_field,
    read_table,
    table_names,
)
from fedhet.methods.registry import shipped_names
from fedhet.report.differences import OUTCOMES
from fedhet.report.tables import Cell, Cells, escape_markdown, markdown
from fedhet.runs.directory import read_validated

MEASURED = Path(str(resources.files("fedhet.experiments") / "measured"))
"""Directory of the finished tables that are included in fedhet."""
MEASURED_PART = "<!-- make reference, measured -->"
"""Start of a generated part with measurements, in a page that may have other generated parts."""
USUAL_HARDWARE = {
    "Two cores of an AMD EPYC.": "",
    "Two cores of an AMD EPYC (AVX-512), bfloat16.": "In bfloat16.",
}
"""Abbreviations of the default hardware, which docs/tables.md describes once for all sections."""
USUAL_SEEDS = [0, 1, 2]
"""Default seeds. A section omits its command if the table has default seeds and settings."""
UNLISTED = {"engine.backend", "data.data-dir", "engine.precision"}
"""Settings that a section's command omits, because they do not change the numbers, or because the
hardware line states their value (bfloat16)."""
MAX_ROWS = {"tiny": 6, "small": 30, "paper": 30}
"""Maximum number of rows that a section shows; `fedhet table NAME --show` prints longer tables."""
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


@dataclass(frozen=True)
class TestedClaim:
    """Claim of a paper, with the comparisons that test the claim at one size of a table."""

    result: TableResult
    says: str
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
        return verdict_of(self.counts)

    def on_data(self, bold: str = "") -> str:
        """Return the verdict with the data on which it is based, e.g. "holds on digits".

        The paper's numbers are often for other data. `bold` surrounds the verdict.
        """
        on = "" if self.verdict == "not-measured" else f" on {self.result.data}"
        return f"{bold}{WORDS[self.verdict]}{bold}{on}"


def verdict_of(outcomes: Collection[str]) -> str:
    """Return the verdict on a claim from the outcomes of its comparisons.

    A claim holds if it holds in all comparisons, and does not hold if it fails in one comparison.
    Otherwise, the claim is "not-measured" if no comparison was measured, and "not-told-apart"
    (inconclusive) if at least one comparison was measured.
    """
    distinct = set(outcomes)
    if "does not hold" in distinct:
        return "does-not-hold"
    if distinct == {"holds"}:
        return "holds"
    return "not-told-apart" if distinct - {"not measured"} else "not-measured"


def claims_in(tables: Iterable[TableResult]) -> list[TestedClaim]:
    """Return the claims of all finished tables, including claims without measurements."""
    return [
        TestedClaim(table, says, tuple(c for c in table.comparisons if c.claim == says))
        for table in tables
        for says in claims_of(table.table)
    ]


def claims_of(table: str) -> list[str]:
    """Return a paper's claims about a table, without duplicates."""
    return [*dict.fromkeys(claim.says for claim in read_table(table).claims)]


def counted(claims: Sequence[TestedClaim]) -> Cells:
    """Build a table of claims by verdict, with a row per paper and size, and a total per size."""
    papers = [*dict.fromkeys(paper_of(name) for name in table_names())]
    columns: dict[str, list[Cell]] = {
        name: [] for name in ("paper", "size", "tables", "claims", *WORDS.values())
    }
    for paper in (*papers, "all"):
        every = [n for n in table_names() if paper in (paper_of(n), "all") and claims_of(n)]
        for size in SIZES:
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


# --- generated pages --------------------------------------------------------------------------


def pages(root: Path, folder: Path = MEASURED) -> dict[Path, str]:
    """Return the text of the generated pages, by path."""
    results = read_finished(folder)
    parts = {
        "results.md": markdown(counted(claims_in(results))),
        **{
            f"tables/{paper}.md": paper_part([r for r in results if paper_of(r.table) == paper])
            for paper in dict.fromkeys(paper_of(result.table) for result in results)
        },
    }
    paths = {root / "docs" / name: part for name, part in parts.items()}
    texts = {path: with_part(path, part) for path, part in paths.items() if path.exists()}
    for name, part in field_parts(folder).items():
        if (path := root / "docs" / name).exists():
            texts[path] = with_part(path, part, begin=MEASURED_PART)
    return texts


def field_parts(folder: Path = MEASURED) -> dict[str, str]:
    """Return the generated parts of the pages about the table of all methods, by page."""
    path = folder / f"{FIELD}-tiny.json"
    if not path.exists():
        return {}
    return page_parts(read_validated(path, FieldRecord).results, "digits")


def paper_part(results: Sequence[TableResult]) -> str:
    """Return a section for each table of a paper, with numbers and verdicts on claims.

    A section shows the largest size for which the table was created. It contains the command only
    if the seeds or settings differ from the defaults.
    """
    largest = {result.table: result for result in results}
    return "\n".join(_section(result) for result in largest.values())


def _section(result: TableResult) -> str:
    table = read_table(result.table)
    part = re.split(r", (?=Table|Fig|Section)", table.source, maxsplit=1)[-1]
    hardware = USUAL_HARDWARE.get(result.hardware, result.hardware)
    about = " ".join(filter(None, (f"{part}.", result.about(table), hardware, f"{result.made}.")))
    claims = []
    for claim in claims_in([result]):
        # Count the comparisons that hold, are within noise, and fail, as in "2/1/0".
        tally = "/".join(str(claim.counts[outcome]) for outcome in OUTCOMES[:3])
        if missing := claim.counts["not measured"]:
            tally += f", {missing} not measured"
        claims.append(f"- {escape_markdown(claim.says)}: {claim.on_data('**')} ({tally}).")
    digits = 1 if table.unit == "percent" else 2
    listed = {name: value for name, value in result.settings.items() if name not in UNLISTED}
    is_default = result.seeds == USUAL_SEEDS and not listed
    command = result.model_copy(update={"settings": listed}).command
    shown = markdown(cells(result, table, digits, brief=True))
    if len(table.rows_in(result.size)) > MAX_ROWS[result.size]:
        shown = f"`fedhet table {result.table} --show` prints the rows.\n"
    parts = [
        f"## {escape_markdown(table.title)}\n",
        f"{escape_markdown(about)}\n",
        "" if is_default else f"```bash\n{command}\n```\n",
        shown,
        "\n".join(claims) + "\n" if claims else "",
        f"{result.remark}\n" if result.remark else "",
    ]
    return "\n".join(filter(None, parts))


def tables_listed() -> list[tuple[str, str, str, str]]:
    """Return the rows of the list of tables, with the number of runs per seed for each size."""
    rows = []
    for name in table_names():
        table = read_table(name)
        counts = {size: len(plan(name, table, size, [0], Path()).runs) for size in table.sizes}
        rows.append((name, table.title, table.source, counts))
    field = read_field()
    methods = sorted(set(shipped_names()) - set(field.excluded))
    counts = {s: len(plan_field(field, s, methods, [0], Path()).runs) for s in field.sizes}
    rows.append((FIELD, field.title, "no paper", counts))
    return [
        (name, title, source, ", ".join(f"{size} {count}" for size, count in counts.items()))
        for name, title, source, counts in rows
    ]


if __name__ == "__main__":
    for path, text in pages(Path()).items():
        path.write_text(text, encoding="utf-8")
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in tables_listed())
    Path("fedhet/experiments/list.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
