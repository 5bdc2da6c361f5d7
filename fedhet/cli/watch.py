"""Commands that show what is under way: `status`, `sites` and `watch`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedhet.base.errors import FedhetError, SettingsError
from fedhet.cli.deploy import connected
from fedhet.cli.listing import listing
from fedhet.cli.options import NONE, console, loading, say

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Authority = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", show_default=NONE, help="The CA's certificate, for a server."
    ),
]
RUNS = Path("runs")


def status_command(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR|HOST:PORT]",
            help="A run's directory, or a server's address. By default the newest run in runs/.",
        ),
    ] = None,
    ca: Authority = None,
    as_json: Json = False,
) -> None:
    """Show where a run is: its round, and who has answered, is awaited, rests or is away."""
    if where is not None and not Path(where).exists() and (":" in where or ca is not None):
        _show_server(where, ca, as_json=as_json)
        return
    directory = RUNS if where is None else Path(where)
    if where is None or (directory.is_dir() and not (directory / "config.toml").exists()):
        directory = _newest(directory)
    from fedhet.runs.progress import read_status

    status = read_status(directory)
    if as_json:
        say(json.dumps({"directory": str(directory), **status.as_json()}))
        return
    _show_status(directory, status)


def _newest(folder: Path) -> Path:
    files = (*folder.glob("*/config.toml"), *folder.glob("*/*/config.toml"))
    found = [path.parent for path in files]
    if not found:
        raise SettingsError(f"no run in {folder}/: give the directory of one, or HOST:PORT")
    return max(found, key=lambda path: (path / "config.toml").stat().st_mtime)


def _show_status(directory: Path, status: Any) -> None:
    from fedhet.runs.units import human_seconds, plural, score

    say(f"{status.title or 'a run'} in {directory}")
    say(status.in_words)
    rows = [
        (
            each.name,
            each.model,
            each.state,
            score(each.accuracy),
            human_seconds(each.seconds),
            each.line,
        )
        for each in status.clients
    ]
    headers = ("client", "model", "state", "accuracy", "time", "last answer")
    console.print(listing(*headers, rows=rows))
    for notice in status.notices:
        say(f"note: {notice}")
    if status.updated and status.stage != "finished":
        age = max(0, round(time.time() - status.updated))
        say(f"as of {plural(age, 'second')} ago")


def _show_server(address: str, ca: Path | None, *, as_json: bool) -> None:
    from fedhet.deployment import control

    with connected(address, authority_for(address, ca)) as connection:
        known, runs = control.sites(connection), control.newest_runs(connection)
    if as_json:
        found = {
            "sites": [_site_fields(site) for site in known],
            "runs": [
                {"run": str(run.number), "state": run.state, "log": list(run.lines)} for run in runs
            ],
        }
        say(json.dumps(found))
        return
    _list_sites(known)
    for run in runs:
        console.print(f"[bold]run {run.number}[/]: {escape(run.state)}", highlight=False)
        for line in run.lines:
            say(f"  {line}")
    if not runs:
        say("no run has been submitted yet")


def sites_command(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server's control API.")],
    ca: Annotated[Path, typer.Option("--ca", metavar="FILE", help="The CA's certificate.")],
    remove: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=NONE,
            help="Unregister the site: its key is not accepted any more.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the sites of a server by the names they registered with, and whether they are online."""
    from fedhet.deployment import control

    with connected(server, ca) as connection:
        if remove is not None:
            if not control.unregister(connection, remove):
                raise FedhetError(f"no site is registered as '{remove}' at {server}")
            say(f"{remove} is not registered any more")
        known = control.sites(connection)
    if as_json:
        say(json.dumps([_site_fields(site) for site in known]))
    else:
        _list_sites(known)


def _list_sites(sites: Any) -> None:
    rows = []
    for site in sites:
        fields = _site_fields(site)
        rows.append((fields["name"], fields["state"], fields["since"] or "", fields["node"]))
    console.print(listing("site", "state", "since (UTC)", "node", rows=rows))
    if not rows:
        say("no site is registered: `fedhet register` does")


def _site_fields(site: Any) -> dict[str, Any]:
    from fedhet.runs.units import printable

    since = site.since.strftime("%Y-%m-%d %H:%M:%S") if site.since else None
    return {
        "name": printable(site.name),
        "state": site.state,
        "since": since,
        "node": str(site.node),
    }


def authority_for(address: str, ca: Path | None) -> Path:
    """Return the certificate of a server's CA. Raises SettingsError if it was not given."""
    if ca is None:
        raise SettingsError(f"'{address}' is a server: give the certificate of its CA with --ca")
    return ca


def watch_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's directory, or a folder of runs.")
    ] = RUNS,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: any free one.")
    ] = 8090,
) -> None:
    """Serve the pages of runs on this machine alone; they are refreshed as rounds end."""
    with loading("pandas and Matplotlib"):
        from fedhet.report.watch import serve

    with serve(directory, port) as address:
        say(f"{address}  (Ctrl-C ends)")
        while True:
            time.sleep(3600)
