"""The command `doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedhet.cli.options import NONE, console, say
from fedhet.cli.watch import Authority, Json, authority_for

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor_command(
    keys: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Check the keys and certificates in DIR, too."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default=NONE,
            help="Check the server with this control API, too.",
        ),
    ] = None,
    ca: Authority = None,
    as_json: Json = False,
) -> None:
    """Say what is amiss with this machine, with keys, or with a server; fails if something is.

    Packages, GPUs, memory, disk and ports; ends and signatures of certificates, pairs and modes of
    keys; whether a server answers, and whether its clock is near this one's.
    """
    from fedhet.deployment import doctor

    if keys is not None and not keys.is_dir():
        raise typer.BadParameter(f"{keys} is not a folder", param_hint="DIR")
    found = [*doctor.of_machine(Path.cwd())]
    found += doctor.of_keys(keys) if keys is not None else ()
    found += doctor.of_server(server, authority_for(server, ca)) if server is not None else ()
    if as_json:
        say(json.dumps([asdict(each) for each in found]))
    for each in () if as_json else found:
        line = Text.assemble((f"{each.level:8}", STYLES[each.level]), f"{each.what}: {each.text}")
        console.print(line, soft_wrap=True)
    if any(each.level == "error" for each in found):
        raise typer.Exit(1)
