"""The commands that list what there is: methods, models, presets, settings, partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape
from rich.table import Table

from fedhet import data, models
from fedhet.cli.options import console, with_settings
from fedhet.config.methods import find_method, method_names
from fedhet.config.resolve import resolve
from fedhet.config.sources import defaults_toml, preset_names, read_preset
from fedhet.settings.schema import allowed
from fedhet.settings.tables import RunSettings
from fedhet.wire.contract import Contract


def methods_command(
    name: Annotated[str | None, typer.Argument(help="One method, in full.")] = None,
) -> None:
    """List the methods, or one with its settings and what it sends."""
    if name is not None:
        _show_method(name)
        return
    table = _table("method", "what it does", "headline", "paper")
    for known in method_names():
        found = find_method(known)
        table.add_row(known, found.spec.title, found.spec.headline, found.spec.paper)
    console.print(table)


def _show_method(name: str) -> None:
    method = find_method(name)
    spec = method.spec
    console.print(f"[bold]{method.name}[/]: {escape(spec.title)}\n{escape(spec.paper)}")
    if method.settings():
        console.print(_settings_table(method.settings()))
    for title, contract in (
        ("the server sends", method.strategy.sends),
        ("a client sends", method.client.sends),
    ):
        console.print(_contract_table(title, contract) if contract.fields else f"{title} nothing")


def models_command() -> None:
    """List the models that a pool may name."""
    table = _table("model", "family", "what it is", "source")
    for info in models.describe():
        table.add_row(info.name, info.family, escape(info.line), escape(info.source))
    console.print(table)
    console.print(
        "A model of your own: a name with a colon, `package.module:function`; see the README."
    )


def presets_command(
    name: Annotated[str | None, typer.Argument(help="One preset, in full.")] = None,
) -> None:
    """List the presets, or the settings of one."""
    if name is not None:
        for key, value in read_preset(name).items():
            console.print(f"{key} = {value!r}", markup=False)
        return
    table = _table("preset", "what it is")
    for known, title in preset_names().items():
        table.add_row(known, escape(title))
    console.print(table)


def settings_command(
    toml: Annotated[
        bool, typer.Option(help="All settings of all methods at their defaults, as TOML.")
    ] = False,
) -> None:
    """List the settings that every run has."""
    if toml:
        console.print(defaults_toml(), end="", markup=False, highlight=False, soft_wrap=True)
        return
    console.print(_settings_table(RunSettings.fields()))
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


def _settings_table(settings: Mapping[str, FieldInfo]) -> Table:
    table = _table("setting", "default", "takes", "what it is")
    for name, info in settings.items():
        default = info.default if info.default != "" else '""'
        row = (name, str(default), allowed(info), info.description or "")
        table.add_row(*map(escape, row))
    return table


def _contract_table(title: str, contract: Contract) -> Table:
    table = _table("field", "type", "what it is")
    table.title, table.title_justify = title, "left"
    for field in contract.fields:
        optional = "" if field.required else " (optional)"
        table.add_row(field.name, escape(field.describe()), escape(field.help + optional))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
