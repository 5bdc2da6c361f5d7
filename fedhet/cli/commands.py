"""The classes of fedhet's commands: arguments with help, and options that are meant as settings."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import click
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from fedhet.cli.options import FLAGS
from fedhet.config.sources import all_settings
from fedhet.settings.words import meant


class Command(TyperCommand):
    """A command whose arguments are described, and that says how to give a setting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # click from 8.4 on clears the help that typer 0.20 has given to an argument.
        said = _helps(self.callback)
        for parameter in self.params:
            if isinstance(parameter, click.Argument) and not getattr(parameter, "help", None):
                parameter.help = said.get(str(parameter.name))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; for an option that is a setting's name, say how the setting is given."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            way = _way_to_set(error.option_name)
            if not way or not any(option.name == "set_" for option in self.params):
                raise
            raise click.NoSuchOption(
                error.option_name, f"No such option '{error.option_name}'; write {way}", ctx=ctx
            ) from None


def _helps(callback: Any) -> dict[str, str | None]:
    """Return the help of each argument in the signature of a command's function."""
    parameters = inspect.signature(callback, eval_str=True).parameters if callback else {}
    return {
        name: said.help
        for name, parameter in parameters.items()
        for said in get_args(parameter.annotation)
        if isinstance(said, ArgumentInfo)
    }


def _way_to_set(option: str) -> str:
    """Return how to give the setting that an unknown option names or means, or ""."""
    known, word = all_settings(), option.strip("-").replace("_", "-")
    named = (name for name in known if word in (name, name.rpartition(".")[2]))
    full = meant(word, known) or next(named, "")
    flag = next((flag for flag, (name, _) in FLAGS.items() if name == full), "")
    return f"--{flag} VALUE" if flag else f"--set {full}=VALUE" if full else ""
