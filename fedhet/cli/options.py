"""What the commands share: the console, the options that several take, the settings given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedhet.config.methods import find_method
from fedhet.config.sources import all_settings, parse_pairs, read_preset, read_toml
from fedhet.config.tables import RunSettings

PIPED_WIDTH = 130

console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
errors = Console(stderr=True)


def of_setting(name: str, metavar: str = "TEXT") -> typer.models.OptionInfo:
    """Return the option for a setting that has its own flag; its help is the setting's."""
    help_text = RunSettings.fields()[name].description
    option: typer.models.OptionInfo = typer.Option(help=help_text, metavar=metavar)
    return option


OPTIONS = {"models": "models.pool"}
"""Options that have another name than their setting's last part."""
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
Dataset = Annotated[str | None, of_setting("data.dataset")]
Clients = Annotated[str | None, of_setting("clients", "INT")]
Models = Annotated[str | None, of_setting("models.pool")]
Rounds = Annotated[str | None, of_setting("rounds", "INT")]
Seed = Annotated[str | None, of_setting("seed", "INT")]
Backend = Annotated[str | None, of_setting("engine.backend")]
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
        shared, own = RunSettings.fields(), find_method(method).settings()
        others = all_settings().keys() - shared.keys() - own.keys()
        values = {k: v for k, v in values.items() if k not in others} | {"method": method}
    given = [
        f"{OPTIONS.get(name, name)}={value}" for name, value in flags.items() if value is not None
    ]
    return values | parse_pairs([*(pairs or []), *given], str(values.get("method", "")) or None)


def say(line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def say_where(page: Path) -> None:
    """Print where the report is."""
    say(f"report: {page}")
