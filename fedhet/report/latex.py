"""Tables in LaTeX, for a paper: with booktabs' rules, the best in bold, the second underlined."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from fedhet.report.comparison import Comparison
from fedhet.report.tables import MARK, Cell, Cells, comparison_cells, paired_cells

SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "<": r"\textless{}", ">": r"\textgreater{}",
        "±": r"$\pm$", MARK: r"$^\dagger$", "–": "--", "−": "$-$", "τ": r"$\tau$",
        "ε": r"$\varepsilon$",
    }
)  # fmt: skip
"""What LaTeX reads as something else, or does not have in every font."""
DAGGER = SPECIAL[ord(MARK)]
HEAD = "% \\usepackage{booktabs}\n"
BEST, SECOND = r"\textbf{%s}", r"\underline{%s}"
MAX_COLUMNS = 6
"""Number of columns that fit the width of a paper."""


def escaped(text: str) -> str:
    """Return text as LaTeX shows it."""
    return text.translate(SPECIAL)


def tabular(
    cells: Cells, better: Mapping[str, int] | None = None, marked: Collection[int] = ()
) -> str:
    """Return a table in LaTeX.

    `better`: for the columns, by header, in which the best and the second are marked, 1 if higher
    numbers are better or -1 if lower ones are. The first of these columns has a dagger in the rows
    `marked`.
    """
    better = better or {}
    chosen = next(iter(better), "")
    columns = [
        _column(column, better.get(header, 0), marked if header == chosen else ())
        for header, column in cells.columns.items()
    ]
    layout = "".join("l" if place < cells.words else "r" for place in range(len(columns)))
    rows = [[escaped(header) for header in cells.headers], *zip(*columns, strict=True)]
    head, *body = [" & ".join(row) + r" \\" for row in rows]
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _column(column: Sequence[Cell], sign: int, marked: Collection[int]) -> list[str]:
    """Return a column's cells; `sign` is 0 where none is better than another."""
    texts = [
        escaped(cell.text) + (DAGGER if row in marked else "") for row, cell in enumerate(column)
    ]
    known = {c.value for c in column if c.value is not None and math.isfinite(c.value)}
    if not sign or len(known) < 2:
        return texts
    best, second = sorted(known, key=lambda value: -sign * value)[:2]
    looks = {best: BEST, second: SECOND}
    return [
        looks.get(cell.value, "%s").replace("%s", text) if cell.value is not None else text
        for cell, text in zip(column, texts, strict=True)
    ]


def comparison_latex(comparison: Comparison) -> str:
    """Return a comparison's table, and that of the paired differences if there are any.

    The table has at most `MAX_COLUMNS` columns, since a paper is no wider: the label, the data set
    if there are several, the headline score, epsilon if it is known, the worst client, the bytes,
    and further scores as far as there is room. A comment names the columns that are omitted.
    """
    found = comparison_cells(comparison).columns
    headline, *others = [" ".join(column) for column in comparison.columns]
    about = (
        ["run", "data set"] if len({group.dataset for group in comparison.groups}) > 1 else ["run"]
    )
    wanted = [
        *about,
        headline,
        "epsilon",
        "worst client",
        "bytes up",
        "bytes down",
        *others,
        "tail",
    ]
    chosen = [header for header in wanted if header in found][:MAX_COLUMNS]
    kept = Cells({h: found[h] for h in found if h in chosen}, words=len(about))
    omitted = [header for header in found if header not in (*chosen, "run", "data set")]
    notes = f"% Omitted here, but in compare.json: {', '.join(omitted)}\n" if omitted else ""
    sign = -1 if comparison.metric.lower_is_better else 1
    scores = [
        header for header in (headline, *others, "tail", "worst client") if header in kept.columns
    ]
    clear = {pair.group.label for pair in comparison.pairs if pair.last.clear}
    marked = [row for row, group in enumerate(comparison.groups) if group.label in clear]
    parts = [HEAD + notes, tabular(kept, dict.fromkeys(scores, sign), marked)]
    if (paired := paired_cells(comparison)) is not None:
        parts.append(tabular(paired))
    return "\n".join(parts)
