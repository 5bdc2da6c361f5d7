"""Shared by the commands: the console, and the options that give settings."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console

from fedhet.base.errors import FedhetError, SettingsError, typed
from fedhet.cli import completion
from fedhet.config.sources import Layers, parse_pairs
from fedhet.settings.run import RunSettings
from fedhet.settings.text import as_text

PIPED_WIDTH = 140
"""Columns of the output if it is not a terminal and the environment variable COLUMNS is not set."""

for _name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
    # Rich would accept 0 as a size, and fail on digits that are not ASCII; Typer fails on text.
    if not re.fullmatch("[1-9][0-9]{0,4}", os.environ.get(_name, "1")):
        del os.environ[_name]
os.environ["MPLBACKEND"] = "agg"  # figures are files; Matplotlib fails on an unknown backend
_IS_TERMINAL = sys.stdout is not None and sys.stdout.isatty()
console = Console(width=None if _IS_TERMINAL or "COLUMNS" in os.environ else PIPED_WIDTH)
errors = Console(stderr=True)


def _of_setting(name: str, metavar: str) -> Any:
    """Return the option for a setting with its own flag: its description, default and choices."""
    info = RunSettings.fields()[name]
    shown: dict[str, Any] = {
        "help": info.description,
        "show_default": as_text(info.default) or NONE,
    }
    if info.annotation is bool:
        return Annotated[bool | None, typer.Option(**shown)]
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    return Annotated[str | None, typer.Option(metavar="|".join(choices) or metavar, **shown)]


FLAGS = {
    "dataset": ("data.dataset", "NAME[:PLACE]"),
    "clients": ("clients", "INT"),
    "models": ("models.pool", "NAME[,NAME]"),
    "rounds": ("rounds", "INT"),
    "seed": ("seed", "INT"),
    "backend": ("engine.backend", "NAME"),
    "strict": ("engine.strict", "BOOL"),
    "out": ("out", "DIR"),
}
"""Settings with a flag of their own: the setting, and the name of its value in the help."""
NONE = "none"
"""The default of an option that gives nothing unless it is used, as the help shows it."""
TRUST = typer.Option(
    metavar="MODULE[,MODULE]",
    show_default=NONE,
    help="Modules that the settings in DIR may import. FEDHET_TRUST names them, too.",
)
SOURCES: dict[str, Any] = {
    "method": Annotated[
        str | None,
        typer.Argument(
            help="The method; `fedhet methods` lists them.", autocompletion=completion.methods
        ),
    ],
    "preset": Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            show_default=NONE,
            autocompletion=completion.presets,
            help="Named settings; later names override earlier ones. `fedhet presets` lists them.",
        ),
    ],
    "config": Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            show_default=NONE,
            help="A TOML file of settings, such as a run's config.toml.",
        ),
    ],
    "set_": Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="KEY=VALUE",
            show_default=NONE,
            help="Any setting; `fedhet settings` lists them. Repeatable.",
            autocompletion=completion.settings,
        ),
    ],
    "resume": Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=NONE,
            help="Resume the run in DIR after its last complete round.",
        ),
    ],
    "trust": Annotated[str | None, TRUST],
    **{flag: _of_setting(*where) for flag, where in FLAGS.items()},
}
"""The options from which a command's settings are read."""


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options `names` of SOURCES; it receives their settings as `values`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in names}
            command(values=gather(**chosen), **given)

        kind = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter(name, kind, default=None, annotation=SOURCES[name]) for name in names
        ]
        if "resume" not in names:  # the method must then be given
            shared = [p.replace(default=p.empty) if p.name == "method" else p for p in shared]
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [*shared, *(p.replace(kind=kind) for p in own if p.name != "values")]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return decorate


def gather(
    method: str | None = None,
    preset: str | None = None,
    config: Path | None = None,
    set_: list[str] | None = None,
    resume: Path | None = None,
    trust: str | None = None,
    **flags: str | bool | None,
) -> dict[str, object]:
    """Return the settings of a preset, a file, `--set` and flags; later ones override earlier.

    With `resume`, the settings of the run in that directory come first. Raises SettingsError.
    """
    given = [
        f"{FLAGS[name][0]}={as_text(value)}" for name, value in flags.items() if value is not None
    ]
    pairs = [*(set_ or []), *given]
    return Layers(preset, config, resume, trust or "").under(
        lambda name: parse_pairs(pairs, name), method
    )


def read_seeds(text: str) -> list[int]:
    """Return the seeds of "0,1,2". Raises SettingsError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise SettingsError(
            f"'--seeds {text}' is not allowed: it takes a list such as 0,1,2, without repetition"
        )
    return [int(part) for part in parts]


@contextlib.contextmanager
def loading(what: str = "PyTorch and Flower") -> Iterator[None]:
    """Say in a terminal that libraries are being loaded, which takes seconds.

    The block only imports. Raises FedhetError if that fails.
    """
    shown = console.status(f"loading {what}") if console.is_terminal else contextlib.nullcontext()
    try:
        with shown:
            yield
    except Exception as error:
        raise FedhetError(
            f"{what}: cannot be loaded ({typed(error)}). Check the installation, the memory limit, "
            "and environment variables such as TORCH_LOGS."
        ) from error


def say(line: str) -> None:
    """Print a line without formatting."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def say_where(page: Path) -> None:
    """Print the path of the report."""
    say(f"report: {page}")
