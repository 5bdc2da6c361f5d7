"""Commands for deployments: certificates, keys, sites, runs, and status."""

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

from fedhet.base.disk import expanded
from fedhet.base.errors import FedhetError, SettingsError
from fedhet.cli import options
from fedhet.cli.options import console, errors, listing, loading, option, say
from fedhet.config.sources import gather, validate

if TYPE_CHECKING:
    from fedhet.deployment.control import Connection

Server = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Address of the server's control API.")
]
Authority = Annotated[Path, typer.Option("--ca", metavar="FILE", help="Certificate of the CA.")]
AuthorityOfServer = Annotated[
    Path | None, option("FILE", "Certificate of the server's CA.", "--ca")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[OPTION]…", help="Options of Flower's command.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RUNS = Path("runs")
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def deploy_local_command(
    *,
    method: options.Method,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    dataset: options.Dataset = None,
    clients: options.Clients = None,
    models: options.Models = None,
    rounds: options.Rounds = None,
    seed: options.Seed = None,
    set_: options.Pairs = None,
    out: options.Out = None,
    keep: Annotated[
        Path | None,
        option(
            "DIR",
            "Directory for keys, logs, and the state of the sites.",
            default="a temporary directory",
        ),
    ] = None,
) -> None:
    """Run a server and nodes on this machine that communicate over TLS."""
    values = gather(
        method, preset, config, set_, dataset=dataset, clients=clients, models=models,
        rounds=rounds, seed=seed, out=out,
    )  # fmt: skip
    given = validate(values)
    with loading():
        from fedhet.config.resolve import complete
        from fedhet.deployment.local import deploy_local
        from fedhet.server.app import run_directory

    resolved = complete(given)
    deploy_local(resolved, run_directory(resolved), keep, say)


def register_command(
    keys: Annotated[list[Path], typer.Argument(metavar="FILE.pub…", help="Public keys of nodes.")],
    server: Server,
    ca: Authority,
    name: Annotated[str, option("NAME", "Client name.", default="the file name")] = "",
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace the key of an existing client."),
    ] = False,
) -> None:
    """Register the public keys of nodes with a server.

    The file name of a key is the client name. A node with this key can then participate only under
    this name, and no other key can use the name unless --replace is given.
    """
    if name and len(keys) > 1:
        raise SettingsError(f"--name {name}: expected one key, got {len(keys)}")
    from fedhet.deployment import control

    with connected(server, ca) as connection:
        named_keys = [(name or key.name.removesuffix(".pub"), key) for key in keys]
        for line in control.register(connection, named_keys, replace=replace):
            say(line)


def submit_command(
    *,
    method: options.Method,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    dataset: options.Dataset = None,
    clients: options.Clients = None,
    models: options.Models = None,
    rounds: options.Rounds = None,
    seed: options.Seed = None,
    set_: options.Pairs = None,
    server: Server,
    ca: Authority,
    out: Annotated[
        str | None,
        option("DIR", "Run directory on the server.", default="a new directory in runs/"),
    ] = None,
    sign: Annotated[
        Path | None,
        option("FILE", "Publisher's private key, which signs the run for sites that require it."),
    ] = None,
) -> None:
    """Start a run on a deployed server and its nodes, and follow its log."""
    values = gather(
        method, preset, config, set_, dataset=dataset, clients=clients, models=models,
        rounds=rounds, seed=seed, out=out,
    )  # fmt: skip
    given = validate(values)
    with loading():
        from fedhet.config.resolve import complete
        from fedhet.deployment.certs import read_publisher_key
        from fedhet.deployment.control import submit

    resolved, key = complete(given), None if sign is None else read_publisher_key(sign)
    with connected(server, ca) as connection:
        submit(resolved, connection, say, key)


def server_command(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Directory with ca.crt, server.pem, and server.key (`fedhet certs`).",
        ),
    ],
    arguments: Arguments = None,
    *,
    address: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Address for sites; 0.0.0.0:9092 = all networks."),
    ] = "127.0.0.1:9092",
    control: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address of the control API, without authentication."
        ),
    ] = "127.0.0.1:8000",
    database: Annotated[
        Path, typer.Option(metavar="FILE", help="State of the server, with pending messages.")
    ] = Path("superlink.db"),
) -> None:
    """Run a federation's server, i.e. Flower's SuperLink, with TLS and registered sites.

    Sites can reach only Flower's API for sites. The server forwards the signatures of runs to the
    sites. Also takes other options of `flower-superlink`, after DIR, such as --log-file FILE.
    """
    from fedhet.deployment.processes import run_server

    run_server(directory, address, control, database, arguments or [])


def node_command(arguments: Arguments = None) -> None:
    """Run Flower's node at a site, and warn if the site also runs unsigned code.

    Takes the options of `flower-supernode`, which `flower-supernode --help` lists.
    With --trusted-entities FILE, the site runs only apps that a publisher in the file signed.
    """
    from fedhet.deployment.processes import run_node

    def warn(line: str) -> None:
        errors.print(line, highlight=False, markup=False, soft_wrap=True)

    run_node(arguments or [], warn)


@contextlib.contextmanager
def connected(server: str, ca: Path) -> Iterator[Connection]:
    """Yield a connection to a reachable server, with a temporary Flower configuration."""
    from fedhet.deployment.control import Connection, interrupted_by_terminate

    with interrupted_by_terminate(), tempfile.TemporaryDirectory(prefix="fedhet-") as home:
        connection = Connection(Path(home), server, ca)
        connection.prepare()
        connection.check_reachable()
        yield connection


def certs_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory.")],
    host: Annotated[
        list[str] | None,
        option(
            "HOST",
            "Host name or IP address that nodes use to reach the server. Repeatable.",
            default="localhost",
        ),
    ] = None,
    node: Annotated[list[str] | None, option("NAME", "Name of a node. Repeatable.")] = None,
    nodes: Annotated[int, typer.Option(min=0, help="Number of nodes, named site-0, site-1, …")] = 0,
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="Validity of the certificates in days.")
    ] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace the server's certificate.")
    ] = False,
    key: Annotated[
        str | None, option("NAME", "Create only the key pair of this node. Run this at the site.")
    ] = None,
    peer: Annotated[
        str | None,
        option("NAME", "Create only this site's key for secure aggregation. Run this at the site."),
    ] = None,
    publisher: Annotated[
        str | None,
        option(
            "NAME", "Create only this publisher's key, which signs runs. Keep it off the server."
        ),
    ] = None,
    classes: Annotated[
        str,
        option(
            "LIST", "With --peer: numbers of the classes whose means the site sends, such as 0-3,7."
        ),
    ] = "",
    weight: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --peer: weight of the site in averages, visible to all sites; 0 = 1, the "
            "same weight for all sites. Use a rounded value, not the number of samples.",
        ),
    ] = 0,
) -> None:
    """Create a development CA, a server certificate, and a key pair for each node.

    Existing files are kept.
    """
    from fedhet.deployment import certs
    from fedhet.deployment.local import site_name

    pairs = {"--key": key, "--peer": peer, "--publisher": publisher}
    for flag, name in pairs.items():
        others = [other for other in pairs if other != flag and pairs[other] is not None]
        others += ["--classes"] if (classes or weight) and flag != "--peer" else []
        if name is not None and (renew or host or node or nodes or others):
            raise SettingsError(
                f"{flag} cannot be combined with other options, because it creates only a key pair"
            )
    if classes and peer is None:
        raise SettingsError(f"--classes {classes}: expected --peer NAME with the site's name")
    if weight and peer is None:
        raise SettingsError(f"--weight {weight}: expected --peer NAME with the site's name")
    if renew and (node or nodes):
        raise SettingsError(
            "--renew cannot be combined with --node or --nodes, because it replaces only the "
            "server's certificate"
        )
    advice = ""
    if peer is not None:
        from fedhet.config import secure

        written = secure.write_key(directory, peer, secure.class_numbers(classes), weight or 1)
        private, public = (path.name for path in written)
        advice = f"next: send {public} to the other sites; keep {private} secret"
    elif publisher is not None:
        written = certs.make_publisher_key(directory, publisher)
        private, public = (path.name for path in written)
        advice = (
            f"next: send {public} to the sites, for --trusted-entities; keep {private} secret, and "
            "off the server"
        )
    elif key is not None:
        written = certs.make_node_key(directory / key)
        advice = f"next: register {key}.pub with the server; keep {key} secret"
    elif renew:
        written = certs.renew(directory, host or [], days)
    else:
        names = [*(site_name(k) for k in range(nodes)), *(node or [])]
        written = certs.make(directory, host or [], names, days)
    for path in written:
        say(f"wrote {path}")
    if advice:
        say(advice)
        return
    if not written:
        say(f"nothing to do: {directory} already contains all keys and certificates")
    for name in (certs.CA_CERTIFICATE, certs.SERVER_CERTIFICATE):
        say(certs.expiry(directory / name))
    if renew:
        say("restart the server to use the new certificate; sites reconnect automatically")


def peers_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="Public files of all sites, or one peers file."),
    ],
    out: Annotated[Path | None, option("FILE", "Peers file to write.")] = None,
    colluding: Annotated[
        int, typer.Option(min=1, help="Number of sites that may collude with the server.")
    ] = 1,
    least: Annotated[
        int,
        typer.Option(
            min=0, help="Minimum number of sites in a round; 0 = just over half of the sites."
        ),
    ] = 0,
    server: Annotated[
        str,
        option(
            "KIND",
            "Server against which sites require protection: curious (it follows the protocol), or "
            "malicious (it may lie). The latter refuses methods that do not resist such a server.",
        ),
    ] = "curious",
) -> None:
    """Combine all sites' public files into a peers file for secure aggregation, or show one.

    Each site runs this command itself, with the same options. The sites then compare the digest by
    phone, because the server must not be able to replace the files.
    """
    from fedhet.config import secure
    from fedhet.runs.units import plural, spans

    if out is None:
        if len(files) > 1 or least or (colluding, server) != (1, "curious"):
            raise SettingsError("--out: not set, expected the peers file to write")
        peers = secure.read_peers(files[0])
    else:
        sites = tuple(map(secure.read_public, files))
        peers = secure.Peers(sites, colluding, least, server)  # type: ignore[arg-type]
        secure.write_peers(out, peers)
        say(f"wrote {out}")
    rows = [
        (peer.name, spans(map(int, peer.classes)), str(peer.weight), peer.key.hex())
        for peer in peers.peers
    ]
    console.print(listing("site", "classes", "weight", "key", rows=rows))
    needed = peers.threshold(len(peers.peers))
    say(f"{plural(len(peers.peers), 'site')}, of which at most {peers.colluding} may collude")
    rule = "must follow the protocol" if peers.server == "curious" else "may be malicious"
    say(f"the server {rule}")
    say(
        f"a round needs {peers.least} sites; if all sites participate, up to "
        f"{len(rows) - needed} of them can fail"
    )
    say(f"digest: {secure.readable(peers.digest)}")
    say("compare the digest with all other sites by phone")


def status_command(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR|HOST:PORT]",
            help="Run directory or server address; default: the newest run in runs/.",
        ),
    ] = None,
    ca: AuthorityOfServer = None,
    as_json: Json = False,
) -> None:
    """Show a run's progress: the current round and the state of each client."""
    if where is not None and not expanded(where).exists() and (":" in where or ca is not None):
        _show_server(where, ca, as_json=as_json)
        return
    directory = RUNS if where is None else expanded(where)
    if where is None or (directory.is_dir() and not (directory / "config.toml").exists()):
        configs = [*directory.glob("*/config.toml"), *directory.glob("*/*/config.toml")]
        if not configs:
            raise SettingsError(f"{directory}: no run found, expected a run directory or HOST:PORT")
        directory = max(configs, key=lambda path: path.stat().st_mtime).parent
    from fedhet.runs.progress import read_status
    from fedhet.runs.units import human_seconds, plural, score

    status = read_status(directory)
    if as_json:
        say(json.dumps({"directory": str(directory), **status.as_json()}))
        return
    say(f"{status.title or 'a run'} in {directory}")
    say(status.description)
    rows = [
        (
            c.name,
            c.model,
            c.state,
            score(c.accuracy, status.metric_name),
            human_seconds(c.seconds),
            c.line,
        )
        for c in status.clients
    ]
    headers = ("client", "model", "state", status.metric, "time", "last reply")
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
        fields = {
            "sites": [_site_fields(site) for site in known],
            "runs": [
                {"run": str(run.number), "state": run.state, "log": list(run.lines)} for run in runs
            ],
        }
        say(json.dumps(fields))
        return
    _list_sites(known)
    for run in runs:
        console.print(f"[bold]run {run.number}[/]: {escape(run.state)}", highlight=False)
        for line in run.lines:
            say(f"  {line}")
    if not runs:
        say("no runs submitted yet")


def sites_command(
    server: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Address of the server's control API.")
    ],
    ca: Authority,
    remove: Annotated[
        str | None, option("NAME", "Unregister this site; its key is then rejected.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the registered sites of a server, with the state of each site."""
    from fedhet.deployment import control

    with connected(server, ca) as connection:
        if remove is not None:
            if not control.unregister(connection, remove):
                raise FedhetError(f"site '{remove}': not registered with {server}")
            say(f"unregistered {remove}")
        known = control.sites(connection)
    if as_json:
        say(json.dumps([_site_fields(site) for site in known]))
    else:
        _list_sites(known)


def _list_sites(sites: Any) -> None:
    rows = []
    for site in sites:
        fields = _site_fields(site)
        state = "never connected" if site.state == "registered" else site.state
        rows.append((fields["name"], state, fields["since"] or "", fields["node"]))
    console.print(listing("site", "state", "since (UTC)", "node", rows=rows))
    if not rows:
        say("no sites registered; see `fedhet register`")


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
    """Return `ca`, the path of the CA certificate. Raises SettingsError if `ca` is None."""
    if ca is None:
        raise SettingsError(f"--ca: not set, expected the CA certificate of server {address}")
    return ca


def watch_command(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Run directory, or a directory that contains runs."),
    ] = RUNS,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 = any free port.")
    ] = 8090,
) -> None:
    """Serve live reports of runs on this machine, updated after each round."""
    with loading("pandas and Matplotlib"):
        from fedhet.report.watch import serve

    with serve(directory, port) as address:
        say(f"{address}  (press Ctrl-C to stop)")
        while True:
            time.sleep(3600)


def doctor_command(
    keys: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Also check the keys and certificates in DIR."),
    ] = None,
    server: Annotated[
        str | None, option("HOST:PORT", "Also check the server with this control API address.")
    ] = None,
    superlink: Annotated[
        str | None,
        option("HOST:PORT", "At a site: also check the server with this value of --superlink."),
    ] = None,
    ca: AuthorityOfServer = None,
    site: Annotated[
        str | None,
        option("NODE-CONFIG", "Also check the site with this value of --node-config."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Diagnose this machine, keys, a site, or a server; exit with status 1 on errors.

    Checks the machine's packages, GPUs, memory, disk, and ports; the expiry dates and signatures of
    certificates; the pairing and file modes of keys; a site's node settings, peers file,
    declaration, and data; whether the server replies and its clock agrees with the clock of this
    machine; and whether a site can reach the server with the installed version of Flower.
    """
    from fedhet.deployment import doctor

    if keys is not None and not keys.is_dir():
        raise typer.BadParameter(f"{keys}: expected a directory", param_hint="DIR")
    findings = [*doctor.check_machine(Path.cwd())]
    findings += doctor.check_keys(keys) if keys is not None else ()
    findings += doctor.check_site(site) if site is not None else ()
    findings += doctor.check_server(server, authority_for(server, ca)) if server is not None else ()
    if superlink is not None:
        findings += doctor.check_sites_address(superlink, authority_for(superlink, ca))
    if as_json:
        say(json.dumps([asdict(each) for each in findings]))
    for each in () if as_json else findings:
        line = Text.assemble(
            (f"{each.level:8}", STYLES[each.level]), f"{each.subject}: {each.text}"
        )
        console.print(line, soft_wrap=True)
    if any(each.level == "error" for each in findings):
        raise typer.Exit(1)
