"""Commands that show the results of runs: `compare` and `report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedhet.base.metrics import METRICS
from fedhet.cli.options import NONE, loading, say
from fedhet.runs.records import KINDS, PROTOCOLS

Paper = Annotated[
    bool,
    typer.Option(
        "--paper",
        help="Write the figures in a paper's size and fonts too: PDFs, 3.25 or 6.75 inches wide.",
    ),
]


def compare_command(
    directories: Annotated[list[Path], typer.Argument(help="Runs, or folders of runs.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the page and figure go.")] = Path(
        "runs/compare"
    ),
    target: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            show_default="what all reach",
            help="Accuracy whose cost in bytes is shown, e.g. 0.7.",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(KINDS),
            show_default="private, if there are any",
            help="Kind of model to order and count by, or one that a method names.",
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PROTOCOLS),
            show_default="the methods' own",
            help="Test set to order and count by: one for all, or each client's own.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KIND]",
            show_default="local, or else the first",
            help="Baseline of the differences by seed: a method, or a run as the table calls it. "
            "With :KIND, its models of another kind.",
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            metavar="|".join(METRICS),
            help="What is compared, of what the runs' 'metrics' have measured.",
        ),
    ] = "accuracy",
    figures: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME]",
            show_default=NONE,
            help="The methods' own figures to draw too, e.g. pseudo_error.",
        ),
    ] = "",
    test: Annotated[
        str,
        typer.Option(
            metavar="none|t|wilcoxon",
            help="Test of the differences by seed, with Holm's correction: a paired t-test, or "
            "Wilcoxon's signed-rank test.",
        ),
    ] = "none",
    latex: Annotated[
        bool, typer.Option("--latex", help="Write compare.tex too: the tables for a paper.")
    ] = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Write compare.csv too: a row for each run and model.")
    ] = False,
    paper: Paper = False,
) -> None:
    """Lay runs side by side: a table, a figure and a page; mean and spread over seeds.

    Groups that share two seeds are also compared seed by seed. compare.json holds all numbers.
    """
    with loading("pandas and Matplotlib"):
        from fedhet import report
        from fedhet.cli.shown import show_comparison
        from fedhet.report.significance import read_test

    found = report.compare(
        directories,
        test=read_test(test),
        target=target,
        kind=kind,
        figures=figures,
        protocol=protocol,
        against=against,
        metric=metric,
    )
    show_comparison(found, out)
    for path in report.write_for_paper(found, out, latex=latex, csv=csv):
        say(f"for a paper: {path}")
    if paper:
        _say_where(report.write_figures_for_paper(found, out))


def report_command(
    directory: Annotated[Path, typer.Argument(help="A run's directory.")],
    paper: Paper = False,
) -> None:
    """Write a run's figures and report.html again; also of a run that was cut short."""
    with loading("pandas and Matplotlib"):
        from fedhet import report
        from fedhet.cli.shown import show_run

    run = report.write(directory)
    show_run(run)
    if paper:
        _say_where(report.write_run_for_paper(run))


def _say_where(figures: Sequence[Path]) -> None:
    if figures:
        say(f"for a paper: {figures[0].parent}")
