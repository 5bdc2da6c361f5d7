"""Commands for deployments: keys, nodes, and runs on them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedhet.base.errors import SettingsError
from fedhet.cli.options import NONE, loading, say, with_settings
from fedhet.config.sources import validated

if TYPE_CHECKING:
    from fedhet.deployment.control import Connection

TRAINING = ("method", "preset", "config", "dataset", "clients", "models", "rounds", "seed", "set_")
Server = Annotated[str, typer.Option(metavar="HOST:PORT", help="The server's control API.")]
Authority = Annotated[Path, typer.Option("--ca", metavar="FILE", help="The CA's certificate.")]


@with_settings(*TRAINING, "out")
def deploy_local_command(
    values: dict[str, object],
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
    validated(values)
    with loading():
        from fedhet.config.resolve import resolve
        from fedhet.deployment.local import deploy_local
        from fedhet.server.app import run_directory

    chosen = resolve(values)
    directory = run_directory(chosen)
    deploy_local(chosen, directory, keep, say)


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


@with_settings(*TRAINING)
def submit_command(
    values: dict[str, object],
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
    if out is not None:
        values["out"] = out
    validated(values)
    with loading():
        from fedhet.config.resolve import resolve
        from fedhet.deployment.control import submit

    chosen = resolve(values)
    with connected(server, ca) as connection:
        submit(chosen, connection, say)


@contextlib.contextmanager
def connected(server: str, ca: Path) -> Iterator[Connection]:
    """Yield a connection to a server, whose configuration goes with it."""
    from fedhet.deployment.control import Connection

    with tempfile.TemporaryDirectory(prefix="fedhet-") as home:
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
