"""Flower's SuperLink and SuperNode, with the parts that Flower lacks for signed apps.

Flower's SuperNode verifies an app with `--trusted-entities`, but its SuperLink forwards only the
signatures of apps from Flower's hub. It drops the signature of an app that `StartRun` contains.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fedhet.base.disk import state_directory
from fedhet.base.errors import SettingsError
from fedhet.deployment import certs
from fedhet.deployment.control import FORWARDED
from fedhet.deployment.transport import Address, check_transport, open_to_sites, transport_of
from fedhet.deployment.worker import prepare, with_worker
from fedhet.settings.addresses import split_host_port

if TYPE_CHECKING:
    from flwr.proto.control_pb2 import StartRunRequest, StartRunResponse
    from flwr.supercore.fab import Fab

UNPROTECTED = (
    "warning: --trusted-entities is not set, so this site is not protected from a malicious "
    "server: it runs any code from the server, and this code can read the site's data and bypass "
    "all node settings"
)
LOCK_SECONDS = 60
"""Time for which a transaction of the server's database waits for another, in seconds."""
POLL_FRACTION = 0.1
"""Time until a node's next poll, as a fraction of the time waited so far. The server of a run polls
its grid by the same rule."""
MIN_POLL_SECONDS = 0.1
"""Minimum time between two polls of a node, in seconds."""


class _SigningState:
    """Flower's state of a SuperLink, which stores the next app together with its signatures."""

    def __init__(self, state: Any, verifications: Mapping[str, str]) -> None:
        self._state, self._verifications = state, dict(verifications)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def store_app(self, fab: Fab, **details: Any) -> str:
        signed = dataclasses.replace(fab, verifications=self._verifications)
        return str(self._state.store_app(fab=signed, **details))


def forwarding(start_run: Callable[..., StartRunResponse]) -> Callable[..., StartRunResponse]:
    """Wrap Flower's handler of `StartRun` so that it keeps the signatures of a submitted app.

    The note of the response tells `fedhet submit` that the sites receive the signatures. The server
    does not verify them, because only the sites decide which publishers they trust.
    """

    def start(
        request: StartRunRequest, account: Any, state: Any, *args: Any, **kwargs: Any
    ) -> StartRunResponse:
        verifications = dict(request.fab.verifications)
        if not verifications or not request.fab.content:
            return start_run(request, account, state, *args, **kwargs)
        signing = _SigningState(state, verifications)
        response = start_run(request, account, signing, *args, **kwargs)
        response.note = FORWARDED
        return response

    return start


def run_server(
    directory: Path, sites: str, control: str, database: Path, arguments: Sequence[str]
) -> None:
    """Run Flower's SuperLink in this process, with signed apps, until a signal stops it.

    Successful requests are not logged, because they would fill the log.

    Args:
        directory: Directory with the CA's certificate, and the server's certificate and key.
        sites: HOST:PORT for sites.
        control: HOST:PORT of the control API, which authenticates nobody.
        database: File of the server's state.
        arguments: Further options of `flower-superlink`.

    Raises:
        FedhetError: If a file or an address is invalid, or if an option is set by this function.
    """
    for_sites, (host, port) = _address("--address", sites), _address("--control", control)
    if for_sites[1] == port:
        raise SettingsError(f"--control: expected another port than --address, got {port} twice")
    certs.read_server(directory)
    own = {
        "--ssl-ca-certfile": directory / certs.CA_CERTIFICATE,
        "--ssl-certfile": directory / certs.SERVER_CERTIFICATE,
        "--ssl-keyfile": directory / certs.SERVER_KEY,
        "--host": host,
        "--port": port,
        "--database": database,
    }
    others = ("--insecure", "--simulation", "--allow-runtime-dependency-installation")
    always = ("--enable-supernode-auth", "--disable-runtime-dependency-installation")
    taken = (*own, *always, *others, "--fleet-api-", "--control-api-")
    for word in arguments:
        name = word.partition("=")[0]
        # Flower also accepts the beginning of an option.
        if name.startswith("--") and any(
            each.startswith(name) or name.startswith(each) for each in taken
        ):
            raise SettingsError(f"{name}: unsupported option, see `fedhet server --help`")
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.control import control_handlers

    _prepare_environment()
    wait_for_locks()
    control_handlers.start_run = forwarding(control_handlers.start_run)
    logging.getLogger("uvicorn.access").addFilter(_has_failed)
    words = [str(word) for option in own.items() for word in option]
    sys.argv = ["flower-superlink", *arguments, *words, *always, *open_to_sites(for_sites)]
    flower_superlink()


def _address(option: str, text: str) -> Address:
    try:
        return split_host_port(text)
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from None


def _prepare_environment() -> None:
    """Set the environment of the server's and the nodes' processes."""
    # Flower starts its other programs by name, also if this process was started by its path.
    programs = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    # Flower would start the process of a message after up to a second.
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    # These variables open further ports, without authentication.
    for name in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):
        os.environ.pop(name, None)


def wait_for_locks() -> None:
    """Let transactions of the server's database wait up to LOCK_SECONDS for other transactions.

    Flower waits five seconds, which is too short on a busy machine. Its error `database is locked`
    loses a site's reply or ends Flower's SuperExec, without which no further run can start.
    """
    from sqlalchemy import event
    from sqlalchemy.pool import Pool

    # Flower sets its own limit when it opens a connection.
    event.listen(Pool, "checkout", _set_lock_seconds)


def _set_lock_seconds(connection: sqlite3.Connection, *_: object) -> None:
    connection.execute(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}").close()


def _has_failed(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's access log is about a rejected or failed request."""
    return not isinstance(record.args, tuple) or int(str(record.args[-1])) >= 400


def run_node(arguments: Sequence[str], warn: Callable[[str], None]) -> None:
    """Run Flower's SuperNode in this process, after a check of publishers and server.

    Args:
        arguments: Command-line arguments of `flower-supernode`.
        warn: Function that shows a warning if the site trusts every app.

    Raises:
        FedhetError: If the file of trusted publishers is invalid or empty, or if the server's
            version of Flower uses another transport.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--trusted-entities", type=Path)
    parser.add_argument("--superlink")
    given = parser.parse_known_args(list(arguments))[0]
    if given.trusted_entities is None:
        warn(UNPROTECTED)
    else:
        certs.read_publishers(given.trusted_entities.expanduser())
    if given.superlink is not None:
        # A node waits for a server that does not reply yet.
        with contextlib.suppress(OSError):
            check_transport(given.superlink, transport_of(_address("--superlink", given.superlink)))
    _prepare_environment()
    os.environ.update(with_worker(os.environ, state_directory()))
    prepare(os.environ)
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    from fedhet.server.nodes import retry_pulls_soon

    retry_pulls_soon()
    own_time = SimpleNamespace(**{**vars(time), "sleep": polling_sleep()})
    vars(start_client_internal)["time"] = own_time
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def polling_sleep() -> Callable[[float], None]:
    """Return a function that replaces `time.sleep` where Flower's SuperNode polls.

    Flower polls the server for a message every three seconds, and the client app for its reply
    every half second. The function sleeps for a tenth of the time since the first of these polls,
    but not longer than Flower. A short round therefore loses little time, and a long wait causes
    hardly more requests.
    """
    interval = started = 0.0

    def sleep(seconds: float) -> None:
        nonlocal interval, started
        if seconds != interval:
            interval, started = seconds, time.monotonic()
        waited = time.monotonic() - started
        time.sleep(min(seconds, max(MIN_POLL_SECONDS, POLL_FRACTION * waited)))

    return sleep
