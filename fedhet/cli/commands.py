"""The class of fedhet's commands: arguments with help, and hints for options that are settings."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import click
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from fedhet.cli.options import FLAGS
from fedhet.config.sources import all_settings
from fedhet.settings.schema import meant


class Command(TyperCommand):
    """A command whose arguments have help, and which says how a setting is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # click from 8.4 on clears the help that typer 0.20 has given to an argument.
        helps = _helps(self.callback)
        for parameter in self.params:
            if isinstance(parameter, click.Argument) and not getattr(parameter, "help", None):
                parameter.help = helps.get(str(parameter.name))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; say of an option that is the name of a setting how it is given."""
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
        name: info.help
        for name, parameter in parameters.items()
        for info in get_args(parameter.annotation)
        if isinstance(info, ArgumentInfo)
    }


def _way_to_set(option: str) -> str:
    """Return how to give the setting that an unknown option names or means, or ""."""
    known, word = all_settings(), option.strip("-").replace("_", "-")
    named = (name for name in known if word in (name, name.rpartition(".")[2]))
    full = meant(word, known) or next(named, "")
    flag = next((flag for flag, (name, _) in FLAGS.items() if name == full), "")
    return f"--{flag} VALUE" if flag else f"--set {full}=VALUE" if full else ""
