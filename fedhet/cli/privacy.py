"""`fedhet privacy`: what a ledger says was spent on which data, by which run."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedhet.cli.listing import listing
from fedhet.cli.options import console, say
from fedhet.errors import SettingsError


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Show what was spent of the privacy of a client's samples: by data, by run, and in total."""
    if not 0 < delta < 1:
        raise SettingsError(f"--delta is {delta:g}: it takes a number between 0 and 1")
    rows = [row for path in _ledgers(ledger) for row in _spent(path, delta)]
    if as_json:
        finite = [
            {**r, "epsilon": r["epsilon"] if math.isfinite(r["epsilon"]) else None} for r in rows
        ]
        say(json.dumps(finite))
        return
    shown = [
        (r["client"], r["data"][:12], r["run"], r["method"], str(r["rounds"]), r["from"], r["to"],
         f"{r['epsilon']:.4g}")
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


def _ledgers(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("_privacy/*.jsonl")) or sorted(path.glob("*.jsonl"))
    if not found:
        raise SettingsError(f"{path}: there is no ledger in it; a private run makes the first one")
    return found


def _spent(path: Path, delta: float) -> list[dict[str, Any]]:
    """Return a row for each run on the same data, and the total of all."""
    from fedhet.privacy.accounting import epsilon_of
    from fedhet.privacy.ledger import Entry, read_ledger

    entries = read_ledger(path)
    by_run: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
    for each in entries:
        by_run[each.data, each.run].append(each)

    def row(found: list[Entry], data: str, run: str, method: str) -> dict[str, Any]:
        return {
            "client": path.stem,
            "data": data,
            "run": run,
            "method": method,
            "rounds": len({(each.run, each.round) for each in found}),
            "from": min(each.at for each in found),
            "to": max(each.at for each in found),
            "epsilon": epsilon_of([each.release for each in found], delta),
            "infinite": sum(math.isinf(epsilon_of([each.release], delta)) for each in found),
            "delta": delta,
        }

    rows = [row(found, *key, found[0].method) for key, found in by_run.items()]
    return [*rows, row(entries, "all", "all", "")] if len(rows) > 1 else rows
