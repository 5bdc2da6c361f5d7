"""The command line: `fedhet run METHOD`, and commands that list, compare and show.

A command imports PyTorch, Flower and matplotlib, which takes seconds, in its body: after a first
check of its settings, and only if it needs them. Help, lists and mistakes are thus shown at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, NoReturn

if any(option[:1] == "e" for option in sys.warnoptions):
    # Typer, Flower and PyTorch issue warnings of their own: show them instead of failing.
    warnings.simplefilter("default")
    os.environ["PYTHONWARNINGS"] = "default"

import typer

from fedhet.base.errors import FedhetError, reason_of
from fedhet.base.version import __version__
from fedhet.cli.commands import Command
from fedhet.cli.deploy import certs_command, deploy_local_command, register_command, submit_command
from fedhet.cli.doctor import doctor_command
from fedhet.cli.example import example_command
from fedhet.cli.interrupt import end_at_once
from fedhet.cli.options import console, errors
from fedhet.cli.privacy import privacy_command
from fedhet.cli.results import compare_command, report_command
from fedhet.cli.run import run_command, sweep_command
from fedhet.cli.schema import schema_command
from fedhet.cli.show import (
    datasets_command,
    methods_command,
    models_command,
    partition_command,
    presets_command,
    settings_command,
)
from fedhet.cli.use import export_command, predict_command
from fedhet.cli.watch import sites_command, status_command, watch_command
from fedhet.engines.ray.connection import is_starting
from fedhet.runs.units import make_output_lenient

app = typer.Typer(
    help="Federated learning for clients whose models differ.",
    no_args_is_help=True,
    suggest_commands=False,  # click does, and typer would a second time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=Command)(run_command)
app.command("sweep", cls=Command)(sweep_command)
# Nothing depends on the experiments: without their directory, only their command is missing.
if (experiments := find_spec("fedhet.experiments")) and experiments.has_location:
    app.command("table", cls=Command)(import_module("fedhet.experiments.command").table_command)
app.command("compare", cls=Command)(compare_command)
app.command("report", cls=Command)(report_command)
app.command("status", cls=Command)(status_command)
app.command("watch", cls=Command)(watch_command)
app.command("privacy", cls=Command)(privacy_command)
app.command("predict", cls=Command)(predict_command)
app.command("export", cls=Command)(export_command)
app.command("certs", cls=Command)(certs_command)
app.command("doctor", cls=Command)(doctor_command)
app.command("register", cls=Command)(register_command)
app.command("sites", cls=Command)(sites_command)
app.command("submit", cls=Command)(submit_command)
app.command("deploy-local", cls=Command)(deploy_local_command)
app.command("methods", cls=Command)(methods_command)
app.command("models", cls=Command)(models_command)
app.command("datasets", cls=Command)(datasets_command)
app.command("presets", cls=Command)(presets_command)
app.command("settings", cls=Command)(settings_command)
app.command("partition", cls=Command)(partition_command)
app.command("schema", cls=Command)(schema_command)
app.command("example-data", cls=Command)(example_command)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning for clients whose models differ."""
    if version:
        console.print(__version__, highlight=False)
        raise typer.Exit


def command() -> NoReturn:
    """Run the command line as the program of this process, and end the process.

    Skips Python's own clean-up of modules, which takes a second after PyTorch was imported.
    """
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    if not isinstance(status, int | None):
        errors.print(str(status), markup=False)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status or 0)


def main() -> None:
    """Run the command line; a user error ends it with a one-line message and status 2."""
    make_output_lenient()
    try:
        try:
            os.getcwd()
        except FileNotFoundError:  # oneMKL ends the process then
            raise FedhetError(
                "working directory: not found, expected an existing directory, got one that was "
                "deleted. Change to another directory."
            ) from None
        app()
    except (FedhetError, OSError) as error:
        for note in getattr(error, "__notes__", ()):
            errors.print(note, style="red", highlight=False, markup=False, soft_wrap=True)
        errors.print(
            f"fedhet: {_words(error)}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        if is_starting():
            end_at_once(2)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        errors.print("fedhet: interrupted", style="red")
        raise SystemExit(130) from None


def _words(error: Exception) -> str:
    """Return an error's message; for an error of the system, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {reason_of(error)}"
    return reason_of(error)
