"""Commands that use trained models: `predict` and `export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedhet.cli.listing import listing
from fedhet.cli.options import TRUST, console, loading, say
from fedhet.runs.units import printable, score

if TYPE_CHECKING:
    from fedhet.inference import Predictions

MOST_COLUMNS = 12
"""With more classes than this, the table shows only the most probable ones."""
TOP = 3

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="A run's directory, or a site's own state folder."),
]
Client = Annotated[str, typer.Argument(help="The client, as the run's table names it.")]
Best = Annotated[
    bool, typer.Option("--best", help="The models after the best round (keep-best), not the last.")
]
Trust = Annotated[str, TRUST]
Kind = Annotated[
    str, typer.Option(metavar="private|proxy", help="Kind of model; proxy with some methods.")
]


def predict_command(
    directory: Directory,
    client: Client,
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Images or texts, folders of them, one table, or one .npz file with an array x."
        ),
    ],
    kind: Kind = "private",
    best: Best = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    resize: Annotated[
        bool, typer.Option("--resize", help="Resize images to the size the model takes.")
    ] = False,
    most: Annotated[
        int,
        typer.Option(
            "--max-bytes", min=1, help="Bytes of samples at most, in place of data.max-bytes."
        ),
    ] = 2**29,
    trust: Trust = "",
) -> None:
    """Predict samples with a client's model: their classes and probabilities."""
    with loading("PyTorch"):
        from fedhet.inference import open_client, read_inputs

    trained = open_client(directory, client, best=best, trust=trust)
    names, x = read_inputs(inputs, trained.record, resize=resize, most=most)
    found = trained.predict(x, kind)
    if csv:
        frame = found.to_frame([printable(name) for name in names])
        frame["class"] = frame["class"].map(printable)
        frame.rename(columns=printable).to_csv(sys.stdout, index_label="sample")
        return
    console.print(_table(names, found))


def _table(names: list[str], found: Predictions) -> Table:
    several = len(found.classes) > MOST_COLUMNS
    shown = [f"the {TOP} most probable"] if several else found.classes
    rows = []
    for sample, label, row in zip(names, found.labels, found.probabilities, strict=True):
        cells = [score(value) for value in row]
        if several:
            top = row.argsort()[::-1][:TOP]
            cells = [", ".join(f"{printable(found.classes[k])} {cells[k]}" for k in top)]
        rows.append([printable(sample), printable(found.classes[label]), *cells])
    headers = ["sample", "class", *map(printable, shown)]
    return listing(*headers, rows=rows, words=None if several else 2)


def export_command(
    directory: Directory,
    client: Client,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="safetensors|pt2|onnx",
            help="safetensors: weights alone; pt2: torch.export's program; onnx.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the model goes.")],
    kind: Kind = "private",
    best: Best = False,
    trust: Trust = "",
) -> None:
    """Export a client's model, with a model card of its inputs and accuracy."""
    with loading("PyTorch"):
        from fedhet.inference import export, open_client

    trained = open_client(directory, client, best=best, trust=trust)
    card = export(trained, form, out, kind)
    say(f"model: {out}")
    say(f"card: {card}")
