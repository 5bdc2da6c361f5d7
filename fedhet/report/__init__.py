"""Reports on runs, comparisons and sweeps, with tables and figures."""

from pathlib import Path

from fedhet.report.comparison import Comparison, compare
from fedhet.report.comparison_report import (
    comparison_table,
    paired_table,
    write_comparison,
    write_figures_for_paper,
    write_for_paper,
)
from fedhet.report.figures import write_figures
from fedhet.report.page import write_report
from fedhet.report.run import Run, load_run
from fedhet.report.sweep import sweep, sweep_table, write_sweep
from fedhet.report.tables import final_table, metric_table

__all__ = [
    "Comparison", "Run", "compare", "comparison_table", "final_table", "load_run",
    "metric_table", "paired_table", "sweep", "sweep_table", "write_all", "write_comparison",
    "write_figures", "write_figures_for_paper", "write_for_paper", "write_report", "write_sweep",
]  # fmt: skip


def write_all(directory: Path | str) -> Run:
    """Write a run's figures and HTML report into its directory, and return the run.

    Raises StateError if a file of the run is missing, truncated or malformed.
    """
    run = load_run(directory)
    write_figures(run)
    write_report(run)
    return run
