"""Generator of the pages that show finished tables.

`python -m tools.results`, run in the project's root directory, writes the generated parts of
docs/results.md, docs/methods.md and docs/tables/*.md from the files in fedhet/experiments/measured,
and of docs/conformance.md and docs/defaults.md from benchmarks/measured.
It also writes list.json, the list of tables that `fedhet table` prints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks import conformance, defaults
from fedhet.experiments.claims import MEASURED, claims_in, counted, read_finished
from fedhet.experiments.field import (
    DIFFERENCES,
    RANKS,
    FieldRecord,
    FieldResults,
    costs,
    differences,
    ranks,
    recommendations,
)
from fedhet.experiments.output import cells
from fedhet.experiments.paper import TableResult
from fedhet.experiments.plan import (
    FIELD,
    command_of,
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
from tools.reference import with_part

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
MAX_ROWS = {"tiny": 8, "small": 30, "paper": 30}
"""Maximum number of rows that a section shows; `fedhet table NAME --show` prints longer tables."""


def pages(root: Path, folder: Path = MEASURED) -> dict[Path, str]:
    """Return the text of the generated pages, by path."""
    results = read_finished(folder)
    parts = {
        "results.md": markdown(counted(claims_in(results))),
        **{
            f"tables/{paper}.md": paper_part([r for r in results if paper_of(r.table) == paper])
            for paper in dict.fromkeys(paper_of(result.table) for result in results)
        },
        "conformance.md": conformance.shown(conformance.read_records()),
        "defaults.md": defaults.shown(defaults.read_records()["rows"]),
    }
    paths = {root / "docs" / name: part for name, part in parts.items()}
    texts = {path: with_part(path, part) for path, part in paths.items() if path.exists()}
    measured = folder / f"{FIELD}-tiny.json"
    if measured.exists():
        results_of_all = read_validated(measured, FieldRecord).results
        for name, part in field_parts(results_of_all, "digits").items():
            if (path := root / "docs" / name).exists():
                texts[path] = with_part(path, part, begin=MEASURED_PART)
    return texts


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
    listed = {name: value for name, value in result.settings.items() if name not in UNLISTED}
    changed = ", ".join(f"{name} = {value}" for name, value in listed.items())
    changes = f"Settings changed by the command: {changed}." if changed else ""
    words = (f"{part}.", result.about(table), changes, hardware, f"{result.made}.")
    about = " ".join(filter(None, words))
    claims = []
    for claim in claims_in([result]):
        # Count the comparisons that hold, are within noise, and fail, as in "2/1/0".
        tally = "/".join(str(claim.counts[outcome]) for outcome in OUTCOMES[:3])
        if missing := claim.counts["not measured"]:
            tally += f", {missing} not measured"
        sentence = f"- {escape_markdown(claim.says)} (*{claim.bound}*)"
        claims.append(f"{sentence}: {claim.on_data('**')} ({tally}).")
    digits = 1 if table.unit == "percent" else 2
    is_default = result.seeds == USUAL_SEEDS and not listed
    command = result.model_copy(update={"settings": listed}).command
    brief = cells(result, table, digits, brief=True)
    shown = markdown(brief)
    if len(brief.rows) > MAX_ROWS[result.size]:
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


def field_parts(results: FieldResults, says: str) -> dict[str, str]:
    """Return the generated parts of docs/methods.md and docs/tables/field.md.

    `says` describes the data in one word.
    """
    plan = results.plan
    source = (
        f"(`{command_of(plan)}`, {results.finished} runs on {says}, "
        f"{results.hardware}, {results.made}.)\n"
    )
    traffic = costs(results)
    by_method = dict(zip([c.text for c in traffic.columns["method"]], traffic.rows, strict=True))
    table = ranks(results, spread=True)
    names = [cell.text for cell in table.columns["method"]]
    shown = Cells(
        {
            **table.columns,
            **{
                title: [by_method[n][list(traffic.columns).index(title)] if n in by_method
                        else Cell("") for n in names]
                for title in ("bytes",)
            },
        }
    )  # fmt: skip
    return {
        "methods.md": f"{markdown(recommendations(results))}\n{source}",
        "tables/field.md": "\n".join(
            [source, markdown(shown), f"{RANKS} ±: standard deviation of the ranks over cells.\n",
             f"{DIFFERENCES}\n", markdown(differences(results))]
        ),
    }  # fmt: skip


if __name__ == "__main__":
    for path, text in pages(Path()).items():
        path.write_text(text, encoding="utf-8")
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in tables_listed())
    Path("fedhet/experiments/list.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
