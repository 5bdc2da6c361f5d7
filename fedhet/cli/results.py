"""Commands that show the results of runs: `compare` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare_command(
    directories: Annotated[list[Path], typer.Argument(help="Runs, or folders of runs.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the page and figure go.")] = Path(
        "runs/compare"
    ),
    target: Annotated[
        float | None, typer.Option(help="Accuracy whose cost in bytes is shown, e.g. 0.7.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="Kind of model to order and count by: private, proxy, global, server."),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="Test set to order and count by: common, or personal (each client's)."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KIND]",
            help="Baseline of the differences by seed: a method, or a run as the table calls it; "
            "local, or else the first. With :KIND, its models of another kind.",
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="What is compared, of what the runs' 'metrics' have measured.")
    ] = "accuracy",
    figures: Annotated[
        str, typer.Option(help="The methods' own figures to draw too, e.g. pseudo_error.")
    ] = "",
) -> None:
    """Lay runs side by side: a table, a figure and a page; mean and spread over seeds.

    Groups that share two seeds are also compared seed by seed. compare.json holds all numbers.
    """
    from fedhet import report
    from fedhet.cli.shown import show_comparison

    found = report.compare(
        directories,
        target=target,
        kind=kind,
        figures=figures,
        protocol=protocol,
        against=against,
        metric=metric,
    )
    show_comparison(found, out)


def report_command(
    directory: Annotated[Path, typer.Argument(help="A run's directory.")],
) -> None:
    """Write a run's figures and report.html again; also of a run that was cut short."""
    from fedhet import report
    from fedhet.cli.shown import show_run

    show_run(report.write(directory))
