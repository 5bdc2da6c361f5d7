"""Commands about finished runs: `compare`, `report`, `predict`, `export` and `privacy`."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedhet.base.errors import SettingsError
from fedhet.base.metrics import METRICS
from fedhet.cli.options import NONE, TRUST, console, listing, loading, say
from fedhet.runs.records import KINDS, PROTOCOLS
from fedhet.runs.units import printable, score

if TYPE_CHECKING:
    from fedhet import report

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

    found = report.compare(
        directories,
        test=test,
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

    run = report.write(directory)
    show_run(run)
    if paper:
        _say_where(report.write_figures(run, paper=True))


def _say_where(figures: Sequence[Path]) -> None:
    if figures:
        say(f"for a paper: {figures[0].parent}")


def show_comparison(comparison: report.Comparison, out: Path) -> None:
    """Write a comparison into `out` and print its tables."""
    from fedhet import report

    report.write_comparison(comparison, out)
    console.print(report.comparison_table(comparison))
    if (differences := report.paired_table(comparison)) is not None:
        console.print(differences)
    say(f"report: {out / 'compare.html'}")


def show_run(run: report.Run) -> None:
    """Print the table of a run and the path of its page."""
    from fedhet import report

    console.print(report.final_table(run))
    if (metrics := report.metric_table(run)) is not None:
        console.print(metrics)
    say(f"report: {run.path / 'report.html'}")


# --- use of the models

MAX_COLUMNS = 12
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
        from fedhet.inference.client import open_client, read_inputs

    trained = open_client(directory, client, best=best, trust=trust)
    names, x = read_inputs(inputs, trained.record, resize=resize, most=most)
    found = trained.predict(x, kind)
    if csv:
        frame = found.to_frame([printable(name) for name in names])
        frame["class"] = frame["class"].map(printable)
        frame.rename(columns=printable).to_csv(sys.stdout, index_label="sample")
        return
    several = len(found.classes) > MAX_COLUMNS
    shown = [f"the {TOP} most probable"] if several else found.classes
    rows = []
    for sample, label, row in zip(names, found.labels, found.probabilities, strict=True):
        cells = [score(value) for value in row]
        if several:
            top = row.argsort()[::-1][:TOP]
            cells = [", ".join(f"{printable(found.classes[k])} {cells[k]}" for k in top)]
        rows.append([printable(sample), printable(found.classes[label]), *cells])
    headers = ["sample", "class", *map(printable, shown)]
    console.print(listing(*headers, rows=rows, words=None if several else 2))


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
        from fedhet.inference.client import open_client
        from fedhet.inference.export import export

    trained = open_client(directory, client, best=best, trust=trust)
    card = export(trained, form, out, kind)
    say(f"model: {out}")
    say(f"card: {card}")


# --- privacy budgets


def privacy_command(
    ledger: Annotated[
        Path,
        typer.Argument(
            metavar="LEDGER",
            help="A client's ledger, such as STATE/_privacy/site-a.jsonl, or a folder of ledgers.",
        ),
    ],
    delta: Annotated[
        float, typer.Option("--delta", help="The delta at which epsilon is given.")
    ] = 1e-5,
    merge: Annotated[
        Path | None,
        typer.Option(
            metavar="COPY",
            show_default=NONE,
            help="First add the entries of another copy of LEDGER, such as a backup's.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Show the privacy budget that runs have consumed: by data, by run, and in total.

    Runs without privacy are listed too: they void the guarantee of all runs in the ledger.
    """
    if not 0 < delta < 1:
        raise SettingsError(f"--delta is {delta:g}: it takes a number between 0 and 1")
    if merge is not None:
        from fedhet.privacy.ledger import FOLDER, Ledger, read_ledger

        if ledger.parent.name != FOLDER or ledger.suffix != ".jsonl":
            raise SettingsError(
                f"{ledger}: expected a file STATE/{FOLDER}/NAME.jsonl to merge into"
            )
        entries, own = read_ledger(merge), ledger.stem
        if others := sorted({each.client for each in entries} - {own}):
            raise SettingsError(f"{merge}: expected the ledger of '{own}', got '{others[0]}'")
        added = Ledger(ledger.parent.parent, own).merge(entries)
        said = f"{added} of {len(entries)} entries of {merge} were missing in {ledger}"
        typer.echo(f"{said}, and were added", err=True)
    ledgers = [ledger]
    if ledger.is_dir():
        ledgers = sorted(ledger.rglob("_privacy/*.jsonl")) or sorted(ledger.glob("*.jsonl"))
    if not ledgers:
        raise SettingsError(
            f"{ledger}: no ledger found. The first private run creates one, and so does the first "
            "run at a site"
        )
    rows = [row for path in ledgers for row in _spent(path, delta)]
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
            f"{client}: {count} entries have infinite epsilon: they are of a version whose noise "
            "can be removed, or have too little noise. docs/privacy.md says how to continue."
        )
    for client in sorted({r["client"] for r in rows if not r["guarantee"]}):
        say(f"{client}: no privacy guarantee, because the ledger has runs without privacy")


def _spent(path: Path, delta: float) -> list[dict[str, Any]]:
    """Return a row for each run on the same data, and the total of all.

    `epsilon` is infinite for runs without privacy, and `guarantee` is then False for all runs.
    """
    from fedhet.privacy.accounting import epsilon_of
    from fedhet.privacy.ledger import Entry, read_ledger

    entries = read_ledger(path)
    guarantee = all(each.is_private for each in entries)
    by_run: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
    for each in entries:
        by_run[each.data, each.run].append(each)

    def row(found: list[Entry], data: str, run: str, method: str) -> dict[str, Any]:
        is_private = all(each.is_private for each in found)
        epsilon = epsilon_of([e.release for e in found], delta) if is_private else math.inf
        return {
            "client": path.stem,
            "data": data,
            "run": run,
            "method": method,
            "rounds": len({(each.run, each.round) for each in found}),
            "from": min(each.at for each in found),
            "to": max(each.at for each in found),
            "epsilon": epsilon,
            "infinite": sum(
                math.isinf(epsilon_of([e.release], delta)) for e in found if e.is_private
            ),
            "delta": delta,
            "guarantee": guarantee,
        }

    rows = [row(found, *key, found[0].method) for key, found in by_run.items()]
    return [*rows, row(entries, "all", "all", "")] if len(rows) > 1 else rows
