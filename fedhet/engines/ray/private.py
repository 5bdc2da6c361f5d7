"""What keeps a Ray cluster to the process that starts it: loopback, a token, and its own folder.

By itself Ray listens on all interfaces without authentication: whoever can reach one of its ports
can have it run any function. Its logs and sockets lie in /tmp/ray, readable by all.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from typing import Any

from fedhet.engines.environment import inherited

_folders: list[tempfile.TemporaryDirectory[str]] = []
"""The folder of the cluster that runs; it is removed when this process ends, at the latest."""


@contextlib.contextmanager
def private() -> Iterator[str]:
    """Yield a folder for a cluster that is started inside the block, on loopback and with a token.

    All of Ray's processes inherit the token from the environment: it is on no command line. This
    process keeps it until `forget`.
    """
    from ray._private import ray_constants

    # Below /tmp, as Ray's own: the path of a socket may have a hundred characters.
    place = os.environ.get("RAY_TMPDIR", "/tmp" if os.path.isdir("/tmp") else None)  # noqa: S108
    _folders.append(tempfile.TemporaryDirectory("", "fedhet-ray-", place, True))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    reachable = ray_constants.ENABLE_RAY_CLUSTER
    # So Ray takes the loopback interface; its own option for an address does not.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with inherited({**token, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            _read_environment()
            yield os.path.join(_folders[-1].name, "ray")  # Ray opens its folder to all
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = reachable


def forget() -> None:
    """Remove the folder of the cluster that has ended, and forget its token."""
    if _folders:
        remove_folder()
        _read_environment()


def remove_folder() -> None:
    """Remove the cluster's folder, if there is one."""
    if _folders:
        _folders.pop().cleanup()


def _read_environment() -> None:
    """Let Ray read again whether it is to use a token and which; else it does so once."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
