"""The command that writes example data: `example-data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedhet.cli.options import console


def example_command(
    kind: Annotated[Literal["text", "signal"], typer.Argument(help="What a sample is to be.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
) -> None:
    """Write a small dataset of texts or of signals, to try a run with."""
    from fedhet.data.examples import write_example

    write_example(kind, folder)
    console.print(
        f"fedhet run felo --dataset {kind}:{folder}", markup=False, highlight=False, soft_wrap=True
    )
