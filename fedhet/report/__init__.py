"""What a run leaves to look at: tables, figures, a page; and runs side by side."""

from fedhet.report.compare import compare, write_comparison
from fedhet.report.figures import write_figures
from fedhet.report.groups import Comparison
from fedhet.report.page import write_report
from fedhet.report.run import Run, load_run
from fedhet.report.sweep import sweep, sweep_table, write_sweep
from fedhet.report.tables import comparison_table, final_table

__all__ = [
    "Comparison",
    "Run",
    "compare",
    "comparison_table",
    "final_table",
    "load_run",
    "sweep",
    "sweep_table",
    "write_comparison",
    "write_figures",
    "write_report",
    "write_sweep",
]
