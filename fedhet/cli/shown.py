"""Prints the tables of runs, and where their pages are."""

from __future__ import annotations

from pathlib import Path

from fedhet import report
from fedhet.cli.options import console, say_where


def show_comparison(comparison: report.Comparison, out: Path) -> None:
    """Write a comparison into `out` and print its tables."""
    report.write_comparison(comparison, out)
    console.print(report.comparison_table(comparison))
    if (differences := report.paired_table(comparison)) is not None:
        console.print(differences)
    say_where(out / "compare.html")


def show_run(run: report.Run) -> None:
    """Print the table of a run and the path of its page."""
    console.print(report.final_table(run))
    if (metrics := report.metric_table(run)) is not None:
        console.print(metrics)
    say_where(run.path / "report.html")
