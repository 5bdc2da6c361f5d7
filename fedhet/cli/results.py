"""Commands for finished runs: `compare`, `report`, `predict`, `export` and `privacy`."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedhet.base.errors import SettingsError
from fedhet.base.metrics import METRICS
from fedhet.cli.options import TRUST, console, listing, listings, loading, option, say
from fedhet.runs.records import EVALUATED, KINDS, PROTOCOLS
from fedhet.runs.units import printable, score

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedhet import report
    from fedhet.inference.client import TrainedClient

Paper = Annotated[
    bool,
    typer.Option(
        "--paper",
        help="Also write the figures as PDF files for a paper, 3.25 or 6.75 inches wide.",
    ),
]


def compare_command(
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories, or directories that contain runs.")
    ],
    out: Annotated[
        Path | None,
        option("DIR", "Output directory.", default="runs/compare, or the next free runs/compare-N"),
    ] = None,
    target: Annotated[
        float | None,
        option(
            "NUMBER",
            "Target score for the bytes-to-target column, e.g. an accuracy of 0.7.",
            default="a score that all runs reach",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        option(
            "|".join(KINDS),
            "Sort the runs by this kind of model's score; methods may define additional kinds.",
            default="each method's headline kind",
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        option(
            "|".join(EVALUATED),
            "Sort the runs by the score on these samples: the clients' own test splits, the common "
            "test set, or the clients' validation samples.",
            default="the method's headline",
        ),
    ] = None,
    against: Annotated[
        str | None,
        option(
            "NAME[:KIND]",
            "Baseline for the paired differences: a method, or the label of a run in the table. To "
            "select another kind of model, append :KIND.",
            default="local if present, otherwise the first",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        option(
            "|".join(METRICS),
            "Metric to compare, which the runs must have recorded.",
            default="the runs' headline metric, such as accuracy",
        ),
    ] = None,
    figures: Annotated[
        str,
        option(
            "NAME[,NAME]",
            "Method-specific metrics to plot in addition to the accuracy, e.g. pseudo_error.",
        ),
    ] = "",
    test: Annotated[
        str,
        typer.Option(
            metavar="none|t|wilcoxon",
            help="Significance test for the paired differences, with Holm's correction: t-test, or "
            "Wilcoxon signed-rank test.",
        ),
    ] = "none",
    latex: Annotated[
        bool, typer.Option("--latex", help="Also write the tables as LaTeX (compare.tex).")
    ] = False,
    csv: Annotated[
        bool,
        typer.Option("--csv", help="Also write one row per run and model as CSV (compare.csv)."),
    ] = False,
    paper: Paper = False,
) -> None:
    """Compare runs by the mean and standard deviation of their scores over seeds.

    Writes an HTML report with tables and figures, and compare.json with all numbers. Groups with at
    least two common seeds are also compared seed by seed.
    """
    with loading("pandas and Matplotlib"):
        from fedhet import report

    comparison = report.compare(
        directories,
        test=test,
        target=target,
        kind=kind,
        figures=figures,
        protocol=protocol,
        against=against,
        metric=metric,
    )
    if out is None:  # Keep earlier comparisons.
        first = Path("runs/compare")
        out, number = first, 2
        while out.exists():
            out, number = first.with_name(f"{first.name}-{number}"), number + 1
    show_comparison(comparison, out)
    for path in report.write_for_paper(comparison, out, latex=latex, csv=csv):
        say(f"paper output: {path}")
    if paper:
        _print_location(report.write_figures_for_paper(comparison, out))


def report_command(
    directory: Annotated[Path, typer.Argument(help="Run directory.")],
    paper: Paper = False,
) -> None:
    """Rewrite a run's figures and report.html, even if the run is unfinished."""
    with loading("pandas and Matplotlib"):
        from fedhet import report

    run = report.write_all(directory)
    show_run(run)
    if paper:
        _print_location(report.write_figures(run, paper=True))


def _print_location(figures: Sequence[Path]) -> None:
    if figures:
        say(f"paper figures: {figures[0].parent}")


def show_comparison(comparison: report.Comparison, out: Path) -> None:
    """Write a comparison to the directory `out` and print its tables."""
    from fedhet import report

    report.write_comparison(comparison, out)
    console.print(report.comparison_table(comparison))
    if (differences := report.paired_table(comparison)) is not None:
        console.print(differences)
    say(f"report: {out / 'compare.html'}")


def show_run(run: report.Run) -> None:
    """Print the results table of a run and the path of its HTML report."""
    from fedhet import report

    console.print(report.final_table(run))
    if (metrics := report.metric_table(run)) is not None:
        console.print(metrics)
    say(f"report: {run.path / 'report.html'}")


# --- trained models

MAX_COLUMNS = 12
"""Maximum number of class columns; with more classes, only the top predictions are shown."""
TOP = 3
MAX_DIGITS = 15
"""Maximum number of digits; all of them are exact in float64."""

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Run directory, or the state directory of a site."),
]
Client = Annotated[str, typer.Argument(help="Client name, as in the results table, or server.")]
Best = Annotated[
    bool,
    typer.Option(
        "--best", help="Use the models from the best round (keep-best), not from the last round."
    ),
]
Trust = Annotated[str, TRUST]
Kind = Annotated[
    str,
    option(
        "KIND",
        "Kind of model, such as private, proxy, ensemble, or global.",
        default="the headline kind, or private if the client does not have it; for the server, "
        "server, global, or the only kind",
    ),
]
Architecture = Annotated[
    str,
    option(
        "MODEL",
        "Architecture of the server's model, such as cnn2, if it has several.",
        default="the only architecture",
    ),
]


def predict_command(
    directory: Directory,
    client: Client,
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Image or text files, directories of image or text files, tables, or .npz files "
            "with an array x."
        ),
    ],
    kind: Kind = "",
    architecture: Architecture = "",
    best: Best = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    resize: Annotated[
        bool, typer.Option("--resize", help="Resize images to the model's input size.")
    ] = False,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Maximum size of the samples in memory, in bytes.")
    ] = 2**29,
    trust: Trust = "",
) -> None:
    """Predict classes with probabilities, or numbers, with a model of a client or of the server."""
    with loading("PyTorch"):
        from fedhet.inference.client import (
            PredictedLabels,
            Predictions,
            open_models,
            read_inputs,
        )

    trained = open_models(directory, client, architecture=architecture, best=best, trust=trust)
    names, x = read_inputs(inputs, trained.record, resize=resize, max_bytes=max_bytes)
    predictions = trained.predict(x, kind)
    described = model_line(trained, kind)
    is_class = isinstance(predictions, Predictions)
    if csv:
        frame = predictions.to_frame([csv_text(name) for name in names])
        if is_class:
            frame["class"] = frame["class"].map(csv_text)
        typer.echo(described, err=True)
        frame.rename(columns=csv_text).to_csv(sys.stdout, index_label="sample")
        return
    say(described)
    if not isinstance(predictions, Predictions):
        frame = predictions.to_frame()
        headers = ["sample", *map(printable, frame.columns)]
        texts = (
            [printable(value) for value in column] if column.dtype == object else numbers(column)
            for column in (frame.iloc[:, place].to_numpy() for place in range(frame.shape[1]))
        )
        rows = [list(row) for row in zip(map(printable, names), *texts, strict=True)]
        words = 2 if isinstance(predictions, PredictedLabels) else 1
        console.print(listing(*headers, rows=rows, words=words))
        return
    classes = list(map(printable, predictions.classes))
    only_top = len(classes) > MAX_COLUMNS
    rows = []
    for sample, label, row in zip(
        names, predictions.labels, predictions.probabilities, strict=True
    ):
        cells = [score(value) for value in row]
        if only_top:
            top = row.argsort()[::-1][:TOP]
            cells = [", ".join(f"{classes[k]} {cells[k]}" for k in top)]
        rows.append([printable(sample), classes[label], *cells])
    headers = ["sample", "class", *([f"top {TOP}"] if only_top else classes)]
    console.print(listing(*headers, rows=rows, words=None if only_top else 2))


def generate_command(
    directory: Directory,
    client: Client,
    prompt: Annotated[
        list[str], typer.Option("--prompt", metavar="TEXT", help="Text to continue. Repeatable.")
    ],
    kind: Kind = "",
    architecture: Architecture = "",
    best: Best = False,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Maximum number of generated tokens.")
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="Temperature of sampling; 0 = always the most likely token."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling.")] = 0,
    trust: Trust = "",
) -> None:
    """Generate text with a language model of a client or of the server."""
    with loading("PyTorch"):
        from fedhet.inference.client import open_models
        from fedhet.inference.generation import generate

    trained = open_models(directory, client, architecture=architecture, best=best, trust=trust)
    say(model_line(trained, kind))
    for text in prompt:
        generated = generate(
            trained, text, kind, max_tokens=tokens, temperature=temperature, seed=seed
        )
        typer.echo(f"{printable(text)}{printable_lines(generated)}")


def printable_lines(text: str) -> str:
    """Return a text in which only line breaks remain of the control characters."""
    return "\n".join(map(printable, text.split("\n")))


def csv_text(name: str) -> str:
    """Return a class or sample name for a CSV file.

    A name that a spreadsheet would evaluate as a formula begins with an apostrophe.
    """
    text = printable(name)
    is_number = re.fullmatch(r"[+-]?[\d.]+(?:e[+-]?\d+)?", text, re.IGNORECASE)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) and not is_number else text


def model_line(trained: TrainedClient, kind: str) -> str:
    """Name the kind of a model, such as "global model of client-0".

    Warns if the default is not the kind of the headline score.
    """
    if not kind and (missing := trained.missing_headline):
        typer.echo(missing, err=True)
    return f"{kind or trained.default_kind} model of {trained.record.client}"


def confusion_command(
    directory: Directory,
    client: Annotated[
        str | None,
        typer.Argument(
            help="Client name, as in the results table, or server. The default is the matrix of "
            "the headline models, which the run has recorded."
        ),
    ] = None,
    kind: Kind = "",
    architecture: Architecture = "",
    protocol: Annotated[
        str,
        option(
            "|".join(PROTOCOLS),
            "Test set: the common test set, or the client's own test split.",
            default="common if it exists",
        ),
    ] = "",
    best: Best = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of tables.")] = False,
    trust: Trust = "",
) -> None:
    """Count the test samples by true class and predicted class.

    With many classes, only the most frequent errors are shown; --csv prints all counts.
    """
    with loading("PyTorch, pandas and Matplotlib"):
        from fedhet import report
        from fedhet.inference.client import open_models, recorded_confusion
        from fedhet.report.tables import frequent_confusions

    if client is None:
        run = report.load_run(directory)
        frame, of = recorded_confusion(run, architecture), "headline models"
        if run.confusion:
            of = f"{run.confusion.kind} models of all clients"
    else:
        trained = open_models(directory, client, architecture=architecture, best=best, trust=trust)
        frame = trained.confusion(kind, protocol)
        of = model_line(trained, kind)
    names, counts = [printable(name) for name in frame.index], frame.to_numpy()
    if csv:
        names = [csv_text(name) for name in frame.index]
        frame.set_axis(names, axis=0).set_axis(names, axis=1).to_csv(sys.stdout, index_label="true")
        return
    say(f"{of}: {counts.trace():,} of {counts.sum():,} correct")
    if len(names) <= MAX_COLUMNS:
        rows = [[name, *map(str, row)] for name, row in zip(names, counts.tolist(), strict=True)]
        for table in listings(("true class", *names), rows, 1, console.width):
            console.print(table)
        return
    if (errors := frequent_confusions(counts, names)) is not None:
        rows = [[cell.text for cell in row] for row in errors.rows]
        console.print(listing(*errors.headers, rows=rows, words=errors.words))


def numbers(column: NDArray[np.float64]) -> list[str]:
    """Format numbers with six digits, or more if large numbers differ by less.

    The last digit is at most a thousandth of the difference between the largest and the smallest
    number. Otherwise, large numbers, such as seconds since 1970, would all look the same.
    """
    finite = [value for value in column.tolist() if math.isfinite(value)] or [0.0]
    largest, spread = max(map(abs, finite)), max(finite) - min(finite)
    needed = [6]
    if largest:
        needed.append(math.floor(math.log10(largest)) + 1)
    if spread:
        needed.append(math.ceil(math.log10(largest / spread)) + 4)
    digits = min(max(needed), MAX_DIGITS)
    return [f"{value:.{digits}g}" for value in column.tolist()]


def export_command(
    directory: Directory,
    client: Client,
    out: Annotated[Path, typer.Option(metavar="PATH", help="Output file or directory.")],
    form: Annotated[
        str,
        option(
            "safetensors|pt2|onnx|peft|merged",
            "safetensors: weights only; pt2: torch.export program; onnx: ONNX model; peft: "
            "directory of LoRA adapters; merged: directory of the base model with its adapters.",
            "--format",
            default="the extension of PATH",
        ),
    ] = "",
    kind: Kind = "",
    architecture: Architecture = "",
    best: Best = False,
    trust: Trust = "",
) -> None:
    """Export a model of a client or of the server, with a card that describes it."""
    with loading("PyTorch"):
        from fedhet.inference.client import open_models
        from fedhet.inference.export import export

    trained = open_models(directory, client, architecture=architecture, best=best, trust=trust)
    card = export(trained, form or out.suffix.lstrip("."), out, kind)
    say(f"model: {out} ({model_line(trained, kind)})")
    say(f"card: {card}")


# --- privacy budgets


def privacy_command(
    ledger: Annotated[
        Path,
        typer.Argument(
            metavar="LEDGER",
            help="Ledger of a client, such as STATE/_privacy/site-a.jsonl, or a directory of "
            "ledgers.",
        ),
    ],
    delta: Annotated[
        float, typer.Option("--delta", help="Delta at which epsilon is reported.")
    ] = 1e-5,
    merge: Annotated[
        Path | None,
        option(
            "COPY",
            "Another copy of LEDGER, such as a backup. Its entries are added to LEDGER first.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the privacy budget consumed per dataset and run, and in total.

    Runs without privacy are also listed, because they void the guarantee for all runs in the
    ledger.
    """
    if not 0 < delta < 1:
        raise SettingsError(f"--delta: expected a number > 0 and < 1, got {delta:g}")
    if merge is not None:
        from fedhet.privacy.ledger import FOLDER, Ledger, read_ledger

        if ledger.parent.name != FOLDER or ledger.suffix != ".jsonl":
            raise SettingsError(
                f"{ledger}: expected a file STATE/{FOLDER}/NAME.jsonl to merge into"
            )
        entries, client = read_ledger(merge), ledger.stem
        if others := sorted({each.client for each in entries} - {client}):
            raise SettingsError(f"{merge}: expected the ledger of '{client}', got '{others[0]}'")
        added = Ledger(ledger.parent.parent, client).merge(entries)
        typer.echo(f"added {added} of {len(entries)} entries of {merge} to {ledger}", err=True)
    ledgers = [ledger]
    if ledger.is_dir():
        ledgers = sorted(ledger.rglob("_privacy/*.jsonl")) or sorted(ledger.glob("*.jsonl"))
    if not ledgers:
        raise SettingsError(
            f"{ledger}: no ledger found. It is created by the first private run, or by the first "
            "run at a site."
        )
    rows = [row for path in ledgers for row in _consumed(path, delta)]
    if as_json:
        finite = [
            {**r, "epsilon": r["epsilon"] if math.isfinite(r["epsilon"]) else None} for r in rows
        ]
        say(json.dumps(finite))
        return
    shown = [
        (r["client"], r["data"][:12], r["run"], r["method"], str(r["rounds"]), r["from"], r["to"],
         "no privacy" if math.isinf(r["epsilon"]) and not r["infinite"] else f"{r['epsilon']:.4g}")
        for r in rows
    ]  # fmt: skip
    heads = "client", "data", "run", "method", "rounds", "from", "to", f"epsilon at {delta:g}"
    console.print(listing(*heads, rows=shown, words=4))
    unbounded = {r["client"]: r["infinite"] for r in rows if r["infinite"]}
    for client, count in unbounded.items():
        say(
            f"{client}: {count} entr{'y has' if count == 1 else 'ies have'} infinite epsilon, "
            "because the noise is too small, or because an attacker can remove the noise of an "
            "earlier version. See docs/privacy.md."
        )
    for client in sorted({r["client"] for r in rows if not r["guarantee"]}):
        say(f"{client}: no privacy guarantee, because the ledger contains runs without privacy")


def _consumed(path: Path, delta: float) -> list[dict[str, Any]]:
    """Return one row with the consumed budget for each dataset and run.

    If there are several rows, an additional row contains the total. `epsilon` is infinite for runs
    without privacy. If there is such a run, `guarantee` is False in every row.
    """
    from fedhet.privacy.accounting import epsilon_of
    from fedhet.privacy.ledger import Entry, read_ledger

    entries = read_ledger(path)
    guarantee = all(each.is_private for each in entries)
    by_run: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
    for each in entries:
        by_run[each.data, each.run].append(each)

    def row(entries: list[Entry], data: str, run: str, method: str) -> dict[str, Any]:
        is_private = all(each.is_private for each in entries)
        epsilon = epsilon_of([e.release for e in entries], delta) if is_private else math.inf
        return {
            "client": path.stem,
            "data": data,
            "run": run,
            "method": method,
            "rounds": len({(each.run, each.round) for each in entries}),
            "from": min(each.at for each in entries),
            "to": max(each.at for each in entries),
            "epsilon": epsilon,
            "infinite": sum(
                math.isinf(epsilon_of([e.release], delta)) for e in entries if e.is_private
            ),
            "delta": delta,
            "guarantee": guarantee,
        }

    rows = [row(inside, *key, inside[0].method) for key, inside in by_run.items()]
    return [*rows, row(entries, "all", "all", "")] if len(rows) > 1 else rows
