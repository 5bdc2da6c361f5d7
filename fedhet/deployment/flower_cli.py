"""The connection to a server: Flower's command line, with its address and certificate."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from fedhet import __version__
from fedhet.config.resolve import Config
from fedhet.errors import FedhetError
from fedhet.settings.schema import nest

CONNECTION = "fedhet"
COMPLETED = "finished:completed"
_FLOWERS_OWN = re.compile(
    r"(INFO|DEBUG)\b|Using SuperLink|Success|ERROR\b.*(ServerApp raised|Exit Code: 201)"
    r"|An unhandled exception occurred in the ServerApp|For more information, visit: <https://flower"
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_FRAME = re.compile("[─│╭╮╰╯]+")
_OURS = re.compile(r"fedhet\.errors\.\w+: ")


@dataclass(frozen=True)
class Connection:
    """Flower's command line for one server; its configuration is below `home`."""

    home: Path
    address: str
    """HOST:PORT of the server's control API."""
    authority: Path
    """The certificate of the CA that signed the server's."""

    def prepare(self) -> None:
        """Write the connection where Flower's command line looks for it."""
        if not self.authority.is_file():
            raise FedhetError(f"{self.authority}: no such file; it takes the CA's certificate")
        connection = {"address": self.address, "root-certificates": str(self.authority.resolve())}
        _write_toml(
            self.home / "config.toml",
            {"superlink": {"default": CONNECTION, CONNECTION: connection}},
        )

    def register(self, public_key: Path) -> bool:
        """Make a node known to the server; False if it is already. The file's stem is its name."""
        name = public_key.name.removesuffix(".pub")
        try:
            self.flwr("supernode", "register", public_key, CONNECTION, "--name", name)
        except FedhetError as error:
            if "already" in str(error):
                return False
            raise
        return True

    def submit(self, config: Config) -> str:
        """Start a run; return its id. The app has no code: that of every site is installed."""
        app = self.home / "app"
        shutil.rmtree(app, ignore_errors=True)
        _write_toml(app / "pyproject.toml", app_of(config))
        started = json.loads(self.flwr("run", app, CONNECTION, "--format", "json"))
        return str(started["run-id"])

    def status(self, run_id: str) -> str:
        """Return Flower's word for how a run is: running, finished:completed, …"""
        runs = json.loads(self.flwr("list", CONNECTION, "--run-id", run_id, "--format", "json"))
        return str(runs["runs"][0]["status"])

    def follow(self, run_id: str, say: Callable[[str], None]) -> None:
        """Pass on, line by line, what the run's server says, until the run is over."""
        command = [program("flwr"), "log", run_id, CONNECTION, "--stream"]
        with subprocess.Popen(
            command,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as stream:
            try:
                for line in readable(stream.stdout or ()):
                    say(line)
            finally:
                stream.terminate()

    def flwr(self, *words: object) -> str:
        """Return what Flower's command line prints. Raises FedhetError where it fails."""
        command = [program("flwr"), *map(str, words)]
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or '"success": false' in done.stdout:
            said = " ".join(_FRAME.sub(" ", _COLOUR.sub("", done.stdout + done.stderr)).split())
            raise FedhetError(f"`flwr {' '.join(map(str, words[:2]))}` failed: {said[-500:]}")
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Return the environment of every program of Flower's that is started here."""
        return {
            **os.environ,
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Yield what a run's server says: no line of Flower's own, and of our errors their message.

    The traceback of any other error stays whole.
    """
    trace: list[str] = []
    for line in lines:
        text = line.rstrip()
        plain = _COLOUR.sub("", text)
        if plain.startswith("Traceback (most recent call last)") or (trace and plain[:1] == " "):
            trace.append(text)
        elif trace and (ours := _OURS.match(plain)):
            yield f"error: {plain[ours.end() :]}"
            trace = []
        elif plain and not _FLOWERS_OWN.match(plain):
            yield from trace
            yield text
            trace = []
    yield from trace


def submit(config: Config, connection: Connection, say: Callable[[str], None]) -> None:
    """Run `config` on the deployment at `connection` to its end.

    Raises FedhetError where the run does not end well.
    """
    run_id = connection.submit(config)
    say(f"run {run_id} on {connection.address}")
    connection.follow(run_id, say)
    status = connection.status(run_id)
    if status != COMPLETED:
        raise FedhetError(f"run {run_id} ended as {status!r}: see above, and the server's log")


def app_of(config: Config) -> dict[str, object]:
    """Return the pyproject.toml of a Flower app that is nothing but the settings of a run."""
    app = {
        "publisher": "fedhet",
        "components": {
            "serverapp": "fedhet.server_app:app",
            "clientapp": "fedhet.client_app:app",
        },
        "config": nest(config.flat()),
    }
    project = {"name": "fedhet-run", "version": __version__, "dependencies": []}
    return {"project": project, "tool": {"flwr": {"app": app}}}


def program(name: str) -> str:
    """Return where one of Flower's commands is: beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FedhetError(f"cannot find {name}: it comes with Flower, `pip install flwr`")
    return found


def _write_toml(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
