"""The command that writes example data: `example-data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedhet.cli.options import say


def example_command(
    kind: Annotated[
        Literal["text", "signal", "table"], typer.Argument(help="The kind of samples.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
) -> None:
    """Write a small dataset of texts, of signals or of a table, to try a run with."""
    from fedhet.data.examples import SETTINGS, write_example

    write_example(kind, folder)
    say(f"fedhet run felo --dataset {kind}:{folder}{SETTINGS.get(kind, '')}")
