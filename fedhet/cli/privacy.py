"""`fedhet privacy`: the budget consumed by each run, as recorded in a ledger."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedhet.base.errors import SettingsError
from fedhet.cli.listing import listing
from fedhet.cli.options import NONE, console, say


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
        _merge(ledger, merge)
    rows = [row for path in _ledgers(ledger) for row in _spent(path, delta)]
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


def _merge(ledger: Path, copy: Path) -> None:
    from fedhet.privacy.ledger import FOLDER, Ledger, read_ledger

    if ledger.parent.name != FOLDER or ledger.suffix != ".jsonl":
        raise SettingsError(f"{ledger}: expected a file STATE/{FOLDER}/NAME.jsonl to merge into")
    entries = read_ledger(copy)
    if others := sorted({each.client for each in entries} - {ledger.stem}):
        raise SettingsError(f"{copy}: expected the ledger of '{ledger.stem}', got '{others[0]}'")
    added = Ledger(ledger.parent.parent, ledger.stem).merge(entries)
    said = f"{added} of {len(entries)} entries of {copy} were missing in {ledger}, and were added"
    typer.echo(said, err=True)


def _ledgers(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("_privacy/*.jsonl")) or sorted(path.glob("*.jsonl"))
    if not found:
        raise SettingsError(
            f"{path}: no ledger found. The first private run creates one, and so does the first "
            "run at a site"
        )
    return found


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
