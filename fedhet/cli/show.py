"""Commands that list methods, models, presets, settings and partitions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedhet import data, models
from fedhet.cli.options import console, with_settings
from fedhet.config.methods import find_method, methods
from fedhet.config.reference import (
    FIELD_COLUMNS,
    SETTING_COLUMNS,
    default_models,
    field_rows,
    setting_rows,
)
from fedhet.config.resolve import resolve
from fedhet.config.sources import defaults_toml, preset_names, read_preset
from fedhet.settings.tables import RunSettings


def methods_command(
    name: Annotated[str | None, typer.Argument(help="One method, in full.")] = None,
) -> None:
    """List the methods, or one with its settings and what it sends."""
    if name is not None:
        _show_method(name)
        return
    found, faults = methods()
    specs = {known: method.spec for known, method in found.items()}
    rows = [(name, spec.title, spec.headline, spec.paper) for name, spec in specs.items()]
    console.print(_table("method", "what it does", "headline", "paper", rows=rows))
    for fault in faults:
        console.print(f"left out: {fault}", markup=False)


def _show_method(name: str) -> None:
    method = find_method(name)
    spec = method.spec
    console.print(f"[bold]{method.name}[/]: {escape(spec.title)}\n{escape(spec.paper)}")
    console.print(default_models(method), markup=False)
    if method.settings():
        console.print(_table(*SETTING_COLUMNS, rows=setting_rows(method.settings())))
    for title, contract in (
        ("the server sends", method.strategy.sends),
        ("a client sends", method.client.sends),
    ):
        table = _table(*FIELD_COLUMNS, rows=field_rows(contract))
        table.title, table.title_justify = title, "left"
        console.print(table if contract.fields else f"{title} nothing")


def models_command() -> None:
    """List the models that a pool may name."""
    rows = [(info.name, info.family, info.line, info.source) for info in models.describe()]
    console.print(_table("model", "family", "what it is", "source", rows=rows))
    console.print(
        "A model of your own: a name with a colon, `package.module:function`; see the README. A "
        "pretrained encoder of texts: `encoder-2:NAME`; see docs/data.md."
    )


def presets_command(
    name: Annotated[str | None, typer.Argument(help="One preset, in full.")] = None,
) -> None:
    """List the presets, or the settings of one."""
    if name is not None:
        for key, value in read_preset(name).items():
            console.print(f"{key} = {value!r}", markup=False)
        return
    console.print(_table("preset", "what it is", rows=preset_names().items()))


def settings_command(
    toml: Annotated[
        bool, typer.Option(help="All settings of all methods at their defaults, as TOML.")
    ] = False,
) -> None:
    """List the settings that every run has."""
    if toml:
        console.print(defaults_toml(), end="", markup=False, highlight=False, soft_wrap=True)
        return
    console.print(_table(*SETTING_COLUMNS, rows=setting_rows(RunSettings.fields())))
    console.print("A method's own: `fedhet methods NAME`.")


@with_settings("preset", "config", "dataset", "clients", "set_")
def partition_command(values: dict[str, object]) -> None:
    """Show how the data is dealt: samples of each class at each client."""
    spec = data.DataSpec.of(resolve(values).run)
    data.validate(spec)
    counts = data.label_counts(spec)
    table = _table("client", "samples", *data.load(spec).classes)
    for client, row in counts.items():
        table.add_row(client, str(sum(row)), *(str(n) if n else "·" for n in row))
    console.print(table)


def _table(*columns: str, rows: Iterable[Iterable[str]] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
