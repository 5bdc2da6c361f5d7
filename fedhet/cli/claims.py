"""The command `table claims`: the papers' claims over finished tables."""

from __future__ import annotations

import json
from pathlib import Path

from fedhet.base.errors import StateError
from fedhet.cli.options import console, say
from fedhet.cli.table import printed
from fedhet.papers.claims import claims_in, counted
from fedhet.papers.finished import MEASURED, read_finished

MEANING = (
    "A claim holds if it does in every place of its table, and does not hold if it fails in one, "
    "each beyond two standard errors."
)


def show_claims(folder: Path | None, usual: Path, *, as_json: bool) -> None:
    """Print which claims hold in the finished tables of a folder.

    `folder` None: the `usual` one or, if that has none, the tables that come with fedhet. Raises
    StateError if a folder that is named has none.
    """
    found, where = read_finished(folder or usual), f"the tables in {folder or usual}"
    if folder and not found:
        raise StateError(f"{folder} has no finished table: `fedhet table NAME --out {folder}`")
    if not found:
        found, where = read_finished(MEASURED), "the tables that come with fedhet"
    claims = claims_in(found)
    if as_json:
        say(json.dumps([claim.as_json() for claim in claims], ensure_ascii=False))
        return
    say(where)
    console.print(printed(counted(claims)))
    say(MEANING)
