"""What the commands share: the console, the options that several take, the settings given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedhet.config.resolve import parse_pairs, read_preset, read_toml
from fedhet.config.schema import Settings

PIPED_WIDTH = 130

console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
errors = Console(stderr=True)


def of_setting(name: str, metavar: str = "TEXT") -> typer.models.OptionInfo:
    """Return the option for a setting that has its own flag; its help is the setting's."""
    help_text = Settings.fields()[name].description
    option: typer.models.OptionInfo = typer.Option(help=help_text, metavar=metavar)
    return option


METHOD = typer.Argument(help="The method; `fedhet methods` lists them.")
Method = Annotated[str, METHOD]
Preset = Annotated[str | None, typer.Option(help="Named settings; `fedhet presets` lists them.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file of settings, such as a run leaves.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Any setting; `fedhet settings` lists them."
    ),
]
Dataset = Annotated[str | None, of_setting("dataset")]
Clients = Annotated[str | None, of_setting("clients", "INT")]
Models = Annotated[str | None, of_setting("models")]
Rounds = Annotated[str | None, of_setting("rounds", "INT")]
Seed = Annotated[str | None, of_setting("seed", "INT")]
Backend = Annotated[str | None, of_setting("backend")]
Out = Annotated[str | None, of_setting("out", "DIR")]


def gather(
    method: str | None,
    preset: str | None,
    config: Path | None,
    pairs: list[str] | None,
    **flags: str | None,
) -> dict[str, object]:
    """Return the settings of a preset, a file, `--set` and flags; the later ones win."""
    values: dict[str, object] = {}
    if preset is not None:
        values |= read_preset(preset)
    if config is not None:
        values |= read_toml(config)
    if method is not None:
        # So that `run local --preset felo-…` is the yardstick of that experiment.
        values = {k: v for k, v in values.items() if "." not in k or k.startswith(f"{method}.")}
        values["method"] = method
    given = [f"{name}={value}" for name, value in flags.items() if value is not None]
    return values | parse_pairs([*(pairs or []), *given])


def say(line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def say_where(page: Path) -> None:
    """Print where the report is."""
    say(f"report: {page}")
