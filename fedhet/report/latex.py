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
COSTS = ("bytes up", "bytes down")
"""The columns of costs that a paper's table has; time depends on the machine."""


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
    """Return a comparison's table, and that of the paired differences if there are any."""
    found = comparison_cells(comparison)
    scores = [" ".join(column) for column in comparison.columns] + ["tail", "worst client"]
    headers = ("run", "data set", "n", *scores, "epsilon", *COSTS)
    kept = Cells({h: found.columns[h] for h in headers if h in found.columns}, words=found.words)
    sign = -1 if comparison.metric.lower_is_better else 1
    clear = {pair.group.label for pair in comparison.pairs if pair.last.clear}
    marked = [row for row, group in enumerate(comparison.groups) if group.label in clear]
    parts = [HEAD, tabular(kept, dict.fromkeys(scores, sign), marked)]
    if (paired := paired_cells(comparison)) is not None:
        parts.append(tabular(paired))
    return "\n".join(parts)
