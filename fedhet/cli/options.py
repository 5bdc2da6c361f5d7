"""What the commands share: the console, tables, completion, and the options that give settings.

A command names each of its options in its signature, by an alias of this module, and passes those
that give settings to `gather`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedhet.base.errors import FedhetError, SettingsError, typed
from fedhet.config.sources import (
    all_settings,
    laid_over,
    layered,
    of_method,
    parse_pairs,
    preset_names,
)
from fedhet.methods.registry import all_methods
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
NONE = "none"
"""The default of an option that gives nothing unless it is used, as the help shows it."""
GAP = 2
"""Columns of the terminal between two columns of a table."""
MAX_HEADER = 20
"""Columns of the terminal from which a header of `listings` is folded."""


def say(line: str) -> None:
    """Print a line without formatting."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


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


def listing(*headers: str, rows: Iterable[Iterable[str]] = (), words: int | None = None) -> Table:
    """Return a table without lines; columns after the first `words` are right-aligned."""
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold")
    for place, header in enumerate(headers):
        left = words is None or place < words
        table.add_column(Text(header), overflow="fold", justify="left" if left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def listings(
    headers: Sequence[str], rows: Sequence[Sequence[str]], words: int, width: int
) -> Iterator[Table]:
    """Yield a listing in as many tables as needed for `width` columns of the terminal.

    Each table has the first `words` columns, and at least one of the other columns.
    """
    sizes = [min(cell_len(header), MAX_HEADER) + GAP for header in headers]
    for row in rows:
        sizes = [max(size, cell_len(text) + GAP) for size, text in zip(sizes, row, strict=True)]
    blocks = [list(range(words))]
    for place in range(words, len(headers)):
        is_full = sum(sizes[each] for each in [*blocks[-1], place]) > width
        if is_full and len(blocks[-1]) > words:
            blocks.append(list(range(words)))
        blocks[-1].append(place)
    for block in blocks:
        parts = [[row[place] for place in block] for row in rows]
        yield listing(*(headers[place] for place in block), rows=parts)


# --- shell completion: each completion, with its description


def complete_method(incomplete: str) -> list[tuple[str, str]]:
    """Return the methods whose names start with `incomplete`."""
    known = all_methods()[0].values()
    return [(each.name, each.spec.title) for each in known if each.name.startswith(incomplete)]


def complete_preset(incomplete: str) -> list[tuple[str, str]]:
    """Return the presets whose names start with the last in a comma-separated text."""
    before, comma, last = incomplete.rpartition(",")
    return [
        (f"{before}{comma}{name}", line)
        for name, line in preset_names().items()
        if name.startswith(last)
    ]


def complete_setting(incomplete: str) -> list[tuple[str, str]]:
    """Return the settings as `KEY=` or, after the sign, the values of a setting that has few."""
    name, sign, value = incomplete.partition("=")
    known = all_settings()
    if not sign:
        leaves = Counter(full.rpartition(".")[2] for full in known)
        named = {leaf: full for full in known if leaves[leaf := full.rpartition(".")[2]] == 1}
        named |= {full: full for full in known}
        return [
            (f"{short}=", known[full].description or "")
            for short, full in named.items()
            if short.startswith(name)
        ]
    ending = [full for full in known if full == name or full.endswith(f".{name}")]
    kind = known[ending[0]].annotation if len(ending) == 1 else None
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    choices = ("true", "false") if kind is bool else choices
    return [(f"{name}={each}", "") for each in choices if str(each).startswith(value)]


# --- options that give settings

FLAGS = {
    "dataset": "data.dataset",
    "clients": "clients",
    "models": "models.pool",
    "rounds": "rounds",
    "seed": "seed",
    "backend": "engine.backend",
    "strict": "engine.strict",
    "out": "out",
}
"""The settings that have an option of their own, by its name."""


def _flag(name: str, metavar: str | None = None) -> Any:
    """Return the option of FLAGS for a setting: its description, default and choices."""
    info = RunSettings.fields()[FLAGS[name]]
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    return typer.Option(
        help=info.description,
        show_default=as_text(info.default) or NONE,
        metavar="|".join(choices) or metavar,
    )


Method = Annotated[
    str | None,
    typer.Argument(help="The method; `fedhet methods` lists them.", autocompletion=complete_method),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME]",
        show_default=NONE,
        autocompletion=complete_preset,
        help="Named settings; later names override earlier ones. `fedhet presets` lists them.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        show_default=NONE,
        help="A TOML file of settings, such as a run's config.toml.",
    ),
]
Dataset = Annotated[str | None, _flag("dataset", "NAME[:PLACE]")]
Clients = Annotated[str | None, _flag("clients", "INT")]
Models = Annotated[str | None, _flag("models", "NAME[,NAME]")]
Rounds = Annotated[str | None, _flag("rounds", "INT")]
Seed = Annotated[str | None, _flag("seed", "INT")]
Backend = Annotated[str | None, _flag("backend")]
Strict = Annotated[bool | None, _flag("strict")]
Out = Annotated[str | None, _flag("out", "DIR")]
Pairs = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        show_default=NONE,
        help="Any setting; `fedhet settings` lists them. Repeatable.",
        autocompletion=complete_setting,
    ),
]
TRUST = typer.Option(
    metavar="MODULE[,MODULE]",
    show_default=NONE,
    help="Modules that the settings in DIR may import. FEDHET_TRUST names them, too.",
)


def gather(
    method: str | None = None,
    preset: str | None = None,
    config: Path | None = None,
    set_: list[str] | None = None,
    resume: Path | None = None,
    trust: str | None = None,
    **flags: str | bool | None,
) -> dict[str, object]:
    """Return the settings of a preset, a file, `--set` and FLAGS; later ones override earlier.

    With `resume`, the settings of the run in that directory come first. Raises SettingsError.
    """
    given = [f"{FLAGS[k]}={as_text(value)}" for k, value in flags.items() if value is not None]
    pairs = [*(set_ or []), *given]
    values = layered(preset, config, resume, trust or "")
    if method is not None:  # so that `run local --preset felo-…` is the baseline of that experiment
        values = of_method(values, method)
    named = values.get("method")
    return laid_over(values, parse_pairs(pairs, None if named is None else str(named)), resume)


def read_seeds(text: str) -> list[int]:
    """Return the seeds of "0,1,2". Raises SettingsError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise SettingsError(
            f"'--seeds {text}' is not allowed: it takes a list such as 0,1,2, without repetition"
        )
    return [int(part) for part in parts]
