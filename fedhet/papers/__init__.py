"""The papers' tables by name: the runs of each, and how they compare with the printed numbers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedhet.papers.plan import Plan, each_once, plan
from fedhet.papers.source import SIZES, PaperTable, Size, read_table, table_names, tables_of

if TYPE_CHECKING:
    from fedhet.papers.results import Results as Results
    from fedhet.papers.results import collect as collect
    from fedhet.papers.write import as_markdown as as_markdown
    from fedhet.papers.write import overview as overview
    from fedhet.papers.write import write_latex as write_latex
    from fedhet.papers.write import write_overview as write_overview
    from fedhet.papers.write import write_results as write_results

__all__ = [
    "SIZES", "PaperTable", "Plan", "Results", "Size", "as_markdown", "collect", "each_once",
    "overview", "plan", "read_table", "table_names", "tables_of", "write_latex",
    "write_overview", "write_results",
]  # fmt: skip

# Import lazily: results need pandas and matplotlib, a list of the tables does not.
_RESULTS = ("Results", "collect")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    home = f"{__name__}.{'results' if name in _RESULTS else 'write'}"
    return getattr(importlib.import_module(home), name)
