"""Commands for deployments: keys, nodes, runs on them, and how they are getting on."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from fedhet.base.errors import FedhetError, SettingsError
from fedhet.cli.options import (
    NONE,
    Clients,
    ConfigFile,
    Dataset,
    Method,
    Models,
    Out,
    Pairs,
    Preset,
    Rounds,
    Seed,
    console,
    gather,
    listing,
    loading,
    say,
)
from fedhet.config.sources import validated

if TYPE_CHECKING:
    from fedhet.deployment.control import Connection

Server = Annotated[str, typer.Option(metavar="HOST:PORT", help="The server's control API.")]
Authority = Annotated[Path, typer.Option("--ca", metavar="FILE", help="The CA's certificate.")]
AuthorityOfServer = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", show_default=NONE, help="The CA's certificate, for a server."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RUNS = Path("runs")
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def deploy_local_command(
    *,
    method: Method,
    preset: Preset = None,
    config: ConfigFile = None,
    dataset: Dataset = None,
    clients: Clients = None,
    models: Models = None,
    rounds: Rounds = None,
    seed: Seed = None,
    set_: Pairs = None,
    out: Out = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="a temporary folder",
            help="Keep keys, logs and the sites' state in DIR.",
        ),
    ] = None,
) -> None:
    """Run a federation as on separate machines: a server and nodes, over gRPC, with TLS."""
    values = gather(
        method, preset, config, set_, dataset=dataset, clients=clients, models=models,
        rounds=rounds, seed=seed, out=out,
    )  # fmt: skip
    given = validated(values)
    with loading():
        from fedhet.config.resolve import completed
        from fedhet.deployment.local import deploy_local
        from fedhet.server.app import run_directory

    chosen = completed(given)
    deploy_local(chosen, run_directory(chosen), keep, say)


def register_command(
    keys: Annotated[list[Path], typer.Argument(metavar="FILE.pub…", help="Nodes' public keys.")],
    server: Server,
    ca: Authority,
    name: Annotated[
        str, typer.Option(metavar="NAME", show_default="the file's", help="The client's name.")
    ] = "",
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Let a key take the place of another with the same name."),
    ] = False,
) -> None:
    """Register nodes at a deployed server; a file's name is the client's.

    Only this key can then take part under that name, and only under that name. A name that another
    key has is refused, unless --replace is given.
    """
    if name and len(keys) > 1:
        raise SettingsError(f"--name {name} is for one key, {len(keys)} are given")
    from fedhet.deployment import control

    with connected(server, ca) as connection:
        named = [(name or key.name.removesuffix(".pub"), key) for key in keys]
        for line in control.register(connection, named, replace=replace):
            say(line)


def submit_command(
    *,
    method: Method,
    preset: Preset = None,
    config: ConfigFile = None,
    dataset: Dataset = None,
    clients: Clients = None,
    models: Models = None,
    rounds: Rounds = None,
    seed: Seed = None,
    set_: Pairs = None,
    server: Server,
    ca: Authority,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", show_default="a new one in runs/", help="A folder at the server."
        ),
    ] = None,
) -> None:
    """Run a federation on a deployed server and its nodes; follow it to its end."""
    values = gather(
        method, preset, config, set_, dataset=dataset, clients=clients, models=models,
        rounds=rounds, seed=seed, out=out,
    )  # fmt: skip
    given = validated(values)
    with loading():
        from fedhet.config.resolve import completed
        from fedhet.deployment.control import submit

    chosen = completed(given)
    with connected(server, ca) as connection:
        submit(chosen, connection, say)


@contextlib.contextmanager
def connected(server: str, ca: Path) -> Iterator[Connection]:
    """Yield a connection to a server, whose configuration goes with it."""
    from fedhet.deployment.control import Connection, interrupted_by_terminate

    with interrupted_by_terminate(), tempfile.TemporaryDirectory(prefix="fedhet-") as home:
        connection = Connection(Path(home), server, ca)
        connection.prepare()
        connection.require_answer()
        yield connection


def certs_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            show_default="localhost",
            help="A name or address of the server, as nodes reach it. Repeatable.",
        ),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", show_default=NONE, help="A node's name. Repeatable."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=0, help="Number of nodes: site-0, site-1, …")] = 0,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until they expire.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace the server's certificate by a new one.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default=NONE, help="At a site: make its key pair in DIR alone."
        ),
    ] = None,
) -> None:
    """Make a development CA, a server certificate and a key pair a node; keep what is there."""
    from fedhet.deployment import certs
    from fedhet.deployment.local import site_name

    if key is not None and (renew or host or node or nodes):
        raise SettingsError("'--key' makes a site's key alone: leave out the server's options")
    if renew and (node or nodes):
        raise SettingsError("'--renew' replaces the server's certificate alone, and makes no keys")
    if key is not None:
        for path in certs.make_node_key(directory / key):
            say(f"wrote {path}")
        say(f"register {key}.pub at the server; {key} stays here")
        return
    if renew:
        written = certs.renew(directory, host or [], days)
    else:
        names = [*(site_name(k) for k in range(nodes)), *(node or [])]
        written = certs.make(directory, host or [], names, days)
    for path in written:
        say(f"wrote {path}")
    if not written:
        say(f"nothing to write: {directory} has all keys and certificates")
    for name in (certs.CA_CERTIFICATE, certs.SERVER_CERTIFICATE):
        say(certs.ends(directory / name))
    if renew:
        say("restart the server to use it; the sites reconnect by themselves")


def status_command(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR|HOST:PORT]",
            help="A run's directory, or a server's address. By default the newest run in runs/.",
        ),
    ] = None,
    ca: AuthorityOfServer = None,
    as_json: Json = False,
) -> None:
    """Show where a run is: its round, and who has answered, is awaited, rests or is away."""
    if where is not None and not Path(where).exists() and (":" in where or ca is not None):
        _show_server(where, ca, as_json=as_json)
        return
    directory = RUNS if where is None else Path(where)
    if where is None or (directory.is_dir() and not (directory / "config.toml").exists()):
        configs = [*directory.glob("*/config.toml"), *directory.glob("*/*/config.toml")]
        if not configs:
            raise SettingsError(f"no run in {directory}/: give the directory of one, or HOST:PORT")
        directory = max(configs, key=lambda path: path.stat().st_mtime).parent
    from fedhet.runs.progress import read_status
    from fedhet.runs.units import human_seconds, plural, score

    status = read_status(directory)
    if as_json:
        say(json.dumps({"directory": str(directory), **status.as_json()}))
        return
    say(f"{status.title or 'a run'} in {directory}")
    say(status.in_words)
    rows = [
        (c.name, c.model, c.state, score(c.accuracy), human_seconds(c.seconds), c.line)
        for c in status.clients
    ]
    headers = ("client", "model", "state", "accuracy", "time", "last answer")
    console.print(listing(*headers, rows=rows))
    for notice in status.notices:
        say(f"note: {notice}")
    if status.updated and status.stage != "finished":
        say(f"as of {plural(max(0, round(time.time() - status.updated)), 'second')} ago")


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
    ca: Authority,
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
        state = "never seen" if site.state == "registered" else site.state
        rows.append((fields["name"], state, fields["since"] or "", fields["node"]))
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
    ca: AuthorityOfServer = None,
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
