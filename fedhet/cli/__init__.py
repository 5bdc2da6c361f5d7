"""Command line of fedhet.

Importing PyTorch, Flower and Matplotlib takes seconds. Commands therefore import these libraries in
their bodies, only if needed, and after a first check of the settings. Help, lists and errors thus
appear immediately.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import sys
import threading
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn, get_args

if any(option[:1] == "e" for option in sys.warnoptions):
    # Typer, Flower and PyTorch issue warnings, which must not be turned into errors.
    warnings.simplefilter("default")
    os.environ["PYTHONWARNINGS"] = "default"

import click
import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from fedhet.base import __version__
from fedhet.base.disk import expanded
from fedhet.base.errors import FedhetError, error_reason
from fedhet.cli import deploy, results, run, show
from fedhet.cli.example import example_command
from fedhet.cli.options import console, errors
from fedhet.config.sources import FLAGS, all_settings
from fedhet.engines.connection import abandon, is_starting
from fedhet.runs.units import make_output_lenient
from fedhet.settings.schema import synonym_of


class Command(TyperCommand):
    """Command that shows help for arguments, and a hint if an unknown option names a setting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Restore the help texts of arguments: Typer 0.20 sets them, but click >= 8.4 clears them.
        signature = inspect.signature(self.callback, eval_str=True) if self.callback else None
        annotations = signature.parameters if signature else {}
        for parameter in self.params:
            if isinstance(parameter, click.Argument) and not getattr(parameter, "help", None):
                metadata = get_args(annotations[str(parameter.name)].annotation)
                texts = (info.help for info in metadata if isinstance(info, ArgumentInfo))
                parameter.help = next(texts, None)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments, and replace `~` in paths.

        If an unknown option names a setting, the error shows how to set it.
        """
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known, word = all_settings(), error.option_name.strip("-").replace("_", "-")
            matches = (name for name in known if word in (name, name.rpartition(".")[2]))
            setting = synonym_of(word, known) or next(matches, "")
            if not setting or not any(option.name == "set_" for option in self.params):
                raise
            message = f"No such option '{error.option_name}'; {self._usage(setting)}"
            raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None
        for parameter in self.params:
            name, value = str(parameter.name), ctx.params.get(str(parameter.name))
            if isinstance(parameter.type, click.Path) and value is not None:
                several = isinstance(value, list | tuple)
                ctx.params[name] = [*map(expanded, value)] if several else expanded(value)
        return rest

    def _usage(self, setting: str) -> str:
        """Return a hint on how to set a setting with the options of this command."""
        flags = {option for parameter in self.params for option in parameter.opts}
        flag = next((f"--{flag}" for flag, name in FLAGS.items() if name == setting), "")
        if flag in flags:
            return f"use {flag} VALUE"
        if setting in run.PER_RUN_SETTINGS and "--seeds" in flags and "--seed" not in flags:
            return run.PER_RUN_SETTINGS[setting]  # The command sets it for each of its runs.
        return f"use --set {setting}=VALUE"


app = typer.Typer(
    help="Federated learning for clients with different models.",
    no_args_is_help=True,
    suggest_commands=False,  # click already suggests commands.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=Command)(run.run_command)
app.command("sweep", cls=Command)(run.sweep_command)
# The package of experiments is optional; without it, only the command `table` is missing.
if (experiments := find_spec("fedhet.experiments")) and experiments.has_location:
    app.command("table", cls=Command)(import_module("fedhet.experiments.command").table_command)
app.command("compare", cls=Command)(results.compare_command)
app.command("report", cls=Command)(results.report_command)
app.command("status", cls=Command)(deploy.status_command)
app.command("watch", cls=Command)(deploy.watch_command)
app.command("privacy", cls=Command)(results.privacy_command)
app.command("predict", cls=Command)(results.predict_command)
app.command("generate", cls=Command)(results.generate_command)
app.command("confusion", cls=Command)(results.confusion_command)
app.command("export", cls=Command)(results.export_command)
app.command("certs", cls=Command)(deploy.certs_command)
app.command("peers", cls=Command)(deploy.peers_command)
app.command("doctor", cls=Command)(deploy.doctor_command)
app.command("register", cls=Command)(deploy.register_command)
app.command("sites", cls=Command)(deploy.sites_command)
app.command("submit", cls=Command)(deploy.submit_command)
# Flower parses the options of its own programs.
passed_on = {"ignore_unknown_options": True}
app.command("server", cls=Command, context_settings=passed_on)(deploy.server_command)
app.command("node", cls=Command, context_settings=passed_on)(deploy.node_command)
app.command("deploy-local", cls=Command)(deploy.deploy_local_command)
app.command("methods", cls=Command)(show.methods_command)
app.command("models", cls=Command)(show.models_command)
app.command("datasets", cls=Command)(show.datasets_command)
app.command("presets", cls=Command)(show.presets_command)
app.command("settings", cls=Command)(show.settings_command)
app.command("partition", cls=Command)(show.partition_command)
app.command("schema", cls=Command)(show.schema_command)
app.command("example-data", cls=Command)(example_command)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning for clients with different models."""
    if version:
        console.print(__version__, highlight=False)
        raise typer.Exit


def command() -> NoReturn:
    """Run the command line, then exit the process.

    This skips Python's clean-up of modules, which takes a second if PyTorch is loaded.
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
        with contextlib.suppress(OSError, ValueError):  # The reader of the output may have exited.
            stream.flush()
    os._exit(status or 0)


def main() -> None:
    """Run the command line. On a user error, exit with a one-line message and status 2."""
    make_output_lenient()
    try:
        try:
            os.getcwd()
        except FileNotFoundError:  # In a deleted directory, oneMKL would abort.
            raise FedhetError(
                "working directory: not found, because it was deleted. Change to another directory."
            ) from None
        app()
    except (FedhetError, OSError) as error:
        for note in getattr(error, "__notes__", ()):
            errors.print(note, style="red", highlight=False, markup=False, soft_wrap=True)
        message = error_reason(error)
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {message}"
        line = f"fedhet: {message}"
        errors.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
        if is_starting():
            exit_at_once(2)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        errors.print("fedhet: interrupted", style="red")
        raise SystemExit(130) from None


def exit_at_once(status: int) -> NoReturn:
    """Exit the process without waiting for Ray to start."""
    abandon()
    os._exit(status)
