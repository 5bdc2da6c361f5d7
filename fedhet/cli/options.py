"""Code that commands share: console, tables, shell completion, and options for settings.

A command declares its options in its signature, using the aliases in this module. It passes the
options for settings to `fedhet.config.sources.gather`.
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

from fedhet.base.errors import FedhetError, SettingsError, describe_error
from fedhet.config.sources import FLAGS, all_settings, preset_names
from fedhet.methods.registry import all_methods
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import as_text

PIPED_WIDTH = 140
"""Width of the output in columns if it is not a terminal and COLUMNS is not set."""

for _name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
    # Ignore invalid sizes: Rich accepts 0 and fails on non-ASCII digits, and Typer fails on text.
    if not re.fullmatch("[1-9][0-9]{0,4}", os.environ.get(_name, "1")):
        del os.environ[_name]
# Figures are only written to files, and Matplotlib would fail on an unknown backend.
os.environ["MPLBACKEND"] = "agg"
_IS_TERMINAL = sys.stdout is not None and sys.stdout.isatty()
_WIDTH = None if _IS_TERMINAL or "COLUMNS" in os.environ else PIPED_WIDTH
# Rich would replace names between colons, as in `table:cat: 3 clients`, with emoji.
console = Console(width=_WIDTH, emoji=False)
errors = Console(stderr=True, emoji=False)
NONE = "none"
"""Placeholder in the help for options without a default value."""
GAP = 2
"""Number of spaces between two table columns."""
MAX_HEADER = 20
"""Maximum width of a header in `listings`; longer headers are wrapped."""


def say(line: str) -> None:
    """Print a line without markup or highlighting."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def loading(libraries: str = "PyTorch and Flower") -> Iterator[None]:
    """Show a status on the terminal while the block imports libraries, which takes seconds.

    Raises FedhetError if an import fails.
    """
    line = f"loading {libraries}"
    status = console.status(line) if console.is_terminal else contextlib.nullcontext()
    try:
        with status:
            yield
    except Exception as error:
        raise FedhetError(
            f"cannot load {libraries}: {describe_error(error)}. Check the installation, the memory "
            f"limit, and environment variables such as TORCH_LOGS."
        ) from error


def listing(*headers: str, rows: Iterable[Iterable[str]] = (), words: int | None = None) -> Table:
    """Build a table without borders.

    The first `words` columns are left-aligned (by default, all columns), and the remaining columns
    are right-aligned.
    """
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
    """Split a wide listing into tables that fit into `width` terminal columns.

    Each table repeats the first `words` columns and adds at least one of the remaining columns.
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


# --- shell completion; functions return pairs (completion, description)


def complete_method(incomplete: str) -> list[tuple[str, str]]:
    """Complete the name of a method."""
    known = all_methods()[0].values()
    return [(each.name, each.spec.title) for each in known if each.name.startswith(incomplete)]


def complete_preset(incomplete: str) -> list[tuple[str, str]]:
    """Complete the last name in a comma-separated list of presets."""
    before, comma, last = incomplete.rpartition(",")
    return [
        (f"{before}{comma}{name}", line)
        for name, line in preset_names().items()
        if name.startswith(last)
    ]


def complete_setting(incomplete: str) -> list[tuple[str, str]]:
    """Complete the name of a setting or, after the equals sign, one of its choices."""
    name, sign, value = incomplete.partition("=")
    known = all_settings()
    if not sign:
        leaves = Counter(full.rpartition(".")[2] for full in known)
        names = {leaf: full for full in known if leaves[leaf := full.rpartition(".")[2]] == 1}
        names |= {full: full for full in known}
        return [
            (f"{short}=", known[full].description or "")
            for short, full in names.items()
            if short.startswith(name)
        ]
    matches = [full for full in known if full == name or full.endswith(f".{name}")]
    kind = known[matches[0]].annotation if len(matches) == 1 else None
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    choices = ("true", "false") if kind is bool else choices
    return [(f"{name}={each}", "") for each in choices if str(each).startswith(value)]


# --- options


def option(metavar: str | None, text: str, *names: str, default: str = NONE, **more: Any) -> Any:
    """Declare an option that is unset by default; the help shows `default` as its default value."""
    return typer.Option(*names, metavar=metavar, show_default=default, help=text, **more)


def _flag(name: str, metavar: str | None = None) -> Any:
    """Declare an option in `FLAGS`, with the description, default and choices of its setting."""
    info = RunSettings.fields()[FLAGS[name]]
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    description = info.description or ""
    return option(
        "|".join(choices) or metavar,
        f"{description[:1].upper()}{description[1:]}.",
        default=as_text(info.default) or NONE,
    )


Method = Annotated[
    str | None,
    typer.Argument(help="Method to run; see `fedhet methods`.", autocompletion=complete_method),
]
Preset = Annotated[
    str | None,
    option(
        "NAME[,NAME]",
        "Presets; later presets override earlier presets. See `fedhet presets`.",
        autocompletion=complete_preset,
    ),
]
ConfigFile = Annotated[
    Path | None,
    option("FILE", "TOML file with settings, such as the config.toml of a run.", "--config"),
]
Dataset = Annotated[str | None, _flag("dataset", "NAME[:PATH]")]
Clients = Annotated[str | None, _flag("clients", "INT")]
Models = Annotated[str | None, _flag("models", "NAME[,NAME]")]
Rounds = Annotated[str | None, _flag("rounds", "INT")]
Seed = Annotated[str | None, _flag("seed", "INT")]
Backend = Annotated[str | None, _flag("backend")]
Strict = Annotated[bool | None, _flag("strict")]
Out = Annotated[str | None, _flag("out", "DIR")]
Pairs = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "Set any setting; see `fedhet settings`. Repeatable.",
        "--set",
        "-s",
        autocompletion=complete_setting,
    ),
]
TRUST = option(
    "MODULE[,MODULE]",
    "Modules that settings in DIR may import, in addition to the modules in FEDHET_TRUST.",
)


MAX_SEEDS = 1000
"""Maximum number of seeds of one command."""


def read_seeds(text: str) -> list[int]:
    """Parse seeds such as "0,1,2" or "0-2". Raises SettingsError if they are invalid or duplicate.

    At most `MAX_SEEDS` seeds are accepted.
    """
    seeds: list[int] = []
    for part in text.split(","):
        ends = [end.strip() for end in part.split("-")]
        if not all(end.isdecimal() for end in ends) or len(ends) > 2:
            seeds = []
            break
        seeds += range(int(ends[0]), min(int(ends[-1]), int(ends[0]) + MAX_SEEDS) + 1) or [-1]
    if not 0 < len(seeds) <= MAX_SEEDS or len(set(seeds)) != len(seeds) or -1 in seeds:
        raise SettingsError(
            "--seeds: expected a list without duplicates, such as 0,1,2, or a range, such as 0-2, "
            f"of at most {MAX_SEEDS} seeds, got '{text}'"
        )
    return seeds


def point_name(point: Sequence[object]) -> str:
    """Convert a combination of values to a valid directory name."""
    texts = [as_text(value) if isinstance(value, tuple) else str(value) for value in point]
    valid = ["".join(c if c.isalnum() or c in "._-" else "-" for c in text) for text in texts]
    return "_".join(text.lstrip("._-")[:60] or "empty" for text in valid)
