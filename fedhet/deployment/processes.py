"""Flower's SuperLink and SuperNode, with the parts that Flower lacks for signed apps.

In Flower 1.39, a SuperNode verifies an app with `--trusted-entities`, but a SuperLink forwards only
the signatures of apps from Flower's hub. It drops the signature of an app that `StartRun` contains.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedhet.deployment.certs import read_publishers
from fedhet.deployment.control import FORWARDED, program

if TYPE_CHECKING:
    from flwr.proto.control_pb2 import StartRunRequest, StartRunResponse
    from flwr.supercore.fab import Fab

UNPROTECTED = (
    "warning: --trusted-entities is not set, so this site is not protected from a malicious "
    "server: it runs any code from the server, and this code can read the site's data and bypass "
    "all node settings"
)


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


def run_superlink(arguments: Sequence[str]) -> None:
    """Run Flower's SuperLink in this process, with signed apps, until a signal stops it.

    Successful requests are not logged, because they would fill the log.
    """
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.control import control_handlers

    control_handlers.start_run = forwarding(control_handlers.start_run)
    logging.getLogger("uvicorn.access").addFilter(_has_failed)
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def _has_failed(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's access log is about a rejected or failed request."""
    return not isinstance(record.args, tuple) or int(str(record.args[-1])) >= 400


def run_supernode(arguments: Sequence[str], warn: Callable[[str], None]) -> NoReturn:
    """Replace this process with Flower's SuperNode, after a check of the trusted publishers.

    Args:
        arguments: Command-line arguments of `flower-supernode`.
        warn: Function that shows a warning if the site trusts every app.

    Raises:
        SettingsError: If the file of trusted publishers is invalid or empty.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--trusted-entities", type=Path)
    trusted = parser.parse_known_args(list(arguments))[0].trusted_entities
    if trusted is None:
        warn(UNPROTECTED)
    else:
        read_publishers(trusted.expanduser())
    command = ["flower-supernode", *arguments]
    os.execv(program(command[0]), command)  # noqa: S606
