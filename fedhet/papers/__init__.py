"""The papers' tables by name: the runs of each, and how they compare with the printed numbers."""

from fedhet.papers.plan import Plan, each_once, plan
from fedhet.papers.results import Results, collect
from fedhet.papers.source import SIZES, PaperTable, Size, read_table, table_names, tables_of
from fedhet.papers.write import as_markdown, overview, write_latex, write_overview, write_results

__all__ = [
    "SIZES", "PaperTable", "Plan", "Results", "Size", "as_markdown", "collect", "each_once",
    "overview", "plan", "read_table", "table_names", "tables_of", "write_latex",
    "write_overview", "write_results",
]  # fmt: skip
