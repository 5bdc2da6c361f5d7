"""Commands that list methods, models, datasets and settings, or show partitions and schemas."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import tomli_w
import typer
from pydantic.fields import FieldInfo
from rich.markup import escape
from rich.table import Table

from fedhet.base.errors import SettingsError
from fedhet.cli import options
from fedhet.cli.options import console, listing, loading, option, say
from fedhet.config import describe
from fedhet.config.sources import (
    all_settings,
    defaults,
    gather,
    preset_names,
    read_preset,
    validate,
)
from fedhet.methods.registry import all_methods, find_method
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import Schema, nest, table_of, unknown


def methods_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Method to describe in detail.", autocompletion=options.complete_method
        ),
    ] = None,
) -> None:
    """List the methods, or describe the settings and messages of one method."""
    if name is None:
        methods, faults = all_methods()
        specs = {name: method.spec for name, method in methods.items()}
        rows = [(name, spec.title, spec.headline, spec.paper) for name, spec in specs.items()]
        console.print(listing("method", "description", "headline", "paper", rows=rows))
        for fault in faults:
            console.print(f"not loaded: {fault}", markup=False)
        return
    method = find_method(name)
    spec = method.spec
    console.print(f"[bold]{name}[/]: {escape(spec.title)}\n{escape(spec.paper)}")
    supported = (
        describe.tasks,
        describe.training,
        describe.defenses,
        describe.privacy,
        describe.summation,
    )
    for sentence_of in (describe.default_models, *supported):
        if sentence := sentence_of(method):
            console.print(sentence, markup=False)
    if method.settings():
        console.print(_settings(method.settings()))
    for sender, contract in (("the server", spec.instructions), ("a client", spec.replies)):
        table = listing(*describe.FIELD_COLUMNS, rows=describe.field_rows(contract))
        table.title, table.title_justify = f"{sender} sends", "left"
        console.print(table if contract.fields else f"{sender} sends no data")


def models_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Base model with adapters, such as causal-lora8:NAME."
        ),
    ] = None,
) -> None:
    """List the models, or show what of a base model would be trained."""
    from fedhet import models

    if name is not None:
        from fedhet.models.adapted import describe_adapted

        trained, frozen, layers = describe_adapted(name)
        console.print(listing("layer", "adapter", "parameters", rows=layers))
        console.print(f"{trained:,} parameters are trained and sent, {frozen:,} are frozen")
        return
    rows = [(info.name, info.family, info.line, info.source) for info in models.describe()]
    console.print(listing("model", "family", "description", "source", rows=rows))
    console.print(
        "Custom models: `package.module:function`; see docs/models.md. Pretrained text encoders: "
        "`encoder-2:NAME`; see docs/data.md. Language models with adapters: `causal-lora8:NAME`; "
        "see docs/models.md. Models NAME-gn use group normalization "
        "instead of batch normalization, as required by differential privacy."
    )


def datasets_command() -> None:
    """List the datasets, and the formats of custom data."""
    from fedhet.data.sources import SOURCES

    rows = [(each.form, each.line) for each in SOURCES.values()]
    console.print(listing("dataset", "description", rows=rows))


def presets_command(
    name: Annotated[
        str | None,
        typer.Argument(help="Preset to show.", autocompletion=options.complete_preset),
    ] = None,
) -> None:
    """List the presets, or show the settings of one preset."""
    if name is not None:
        for key, value in read_preset(name).items():
            console.print(f"{key} = {value!r}", markup=False)
        return
    console.print(listing("preset", "description", rows=preset_names().items()))


def settings_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of a settings table, e.g. training, or part of a setting's name."
        ),
    ] = None,
    toml: Annotated[
        bool, typer.Option(help="Print all settings of all methods with their defaults as TOML.")
    ] = False,
) -> None:
    """List the settings that all runs share, or the settings that match a name."""
    if toml:
        toml_text = tomli_w.dumps(nest(defaults()))
        console.print(toml_text, end="", markup=False, highlight=False, soft_wrap=True)
        return
    if name is not None:
        known = all_settings()
        matches = {k: info for k, info in known.items() if table_of(k) == name}
        matches = matches or {k: info for k, info in known.items() if name in k}
        if not matches:
            raise unknown(name, known)
        console.print(_settings({name: known[name]} if name in known else matches))
        return
    tables = {"": inspect.getdoc(RunSettings)}
    for field, info in RunSettings.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Schema):
            tables[field] = inspect.getdoc(info.annotation)
    for table, doc in tables.items():
        summary = (doc or "").splitlines()[0]
        title = f"[{table}] {summary}" if table else summary
        console.print(title, style="bold", markup=False, highlight=False)
        inside = {k: info for k, info in RunSettings.fields().items() if table_of(k) == table}
        console.print(_settings(inside), "")
    console.print("For the settings of a method, see `fedhet methods NAME`.")


def _settings(settings: Mapping[str, FieldInfo]) -> Table:
    return listing(*describe.SETTING_COLUMNS, rows=describe.setting_rows(settings))


def partition_command(
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    dataset: options.Dataset = None,
    clients: options.Clients = None,
    set_: options.Pairs = None,
) -> None:
    """Show the partition: each client's number of samples per class or group of targets."""
    values = gather(None, preset, config, set_, dataset=dataset, clients=clients)
    # The default method supports fewer tasks than `local`, which partitions data in the same way.
    given = validate({"method": "local"} | values)
    with loading("PyTorch"):
        from fedhet.config.resolve import complete
        from fedhet.data.store import RunData
        from fedhet.runs.units import printable

    data = RunData.for_run(complete(given).run)
    data.validate()
    owners = data.owners()
    rows = [
        [client, *([printable(owners[client])] if owners else []), str(sum(row))]
        + [str(n) if n else "·" for n in row]
        for client, row in data.label_counts().items()
    ]
    words = ("client", *(["owner"] if owners else []), "samples")
    for table in options.listings((*words, *data.strata()[0]), rows, len(words), console.width):
        console.print(table)


def schema_command(
    table: Annotated[
        Path, typer.Argument(metavar="FILE", help="CSV, TSV, JSON Lines, Parquet, or .npz file.")
    ],
    target: Annotated[
        str, option("COLUMN", "Label column.", default="the target of an existing schema")
    ] = "",
    exclude: Annotated[
        str, option("NAME,NAME…", "Columns that are not features, such as the site.")
    ] = "",
    task: Annotated[
        str,
        typer.Option(
            help="Task: auto, classification, regression (predicts numbers), or multi-label "
            "(predicts several labels)."
        ),
    ] = "auto",
    targets_only: Annotated[
        bool,
        typer.Option(
            help="Describe only the targets; use with the label tables of images, signals, or "
            "texts. Always on for .npz files."
        ),
    ] = False,
    out: Annotated[
        Path | None, option("FILE", "Output file.", default="schema.toml next to the table")
    ] = None,
) -> None:
    """Write the schema of a table, or complete the schema next to the table.

    If the type of a column is unclear, the schema contains the type '?' with examples of values.
    Replace it, and run the command again. All sites of a deployment use the same schema.
    """
    from fedhet.base.disk import write_text
    from fedhet.data.columns import describe_unclear
    from fedhet.data.rows import read_table
    from fedhet.data.schemas import SCHEMA, read_schema
    from fedhet.data.spec import DataSpec
    from fedhet.data.tables import infer_schema
    from fedhet.data.targets import array_table, infer_targets
    from fedhet.settings.schema import build

    out = out or table.parent / SCHEMA
    declared = read_schema(out) if out.exists() else None
    if declared and target not in ("", declared.target):
        raise SettingsError(
            f"--target: expected {declared.target!r}, the target in {out}, got {target!r}. Choose "
            "another file with --out."
        )
    names = tuple(name.strip() for name in exclude.split(",") if name.strip())
    settings = {"target": target, "task": task, "exclude": names}
    if declared:
        settings |= {"target": declared.target, "task": declared.task}
    spec = build(DataSpec, settings, prefix="data.")
    if table.suffix == ".npz":
        # This module imports PyTorch, which the schema of a table does not need.
        from fedhet.data.sources.arrays import read_arrays

        rows = array_table(read_arrays(table, ("y",), spec)["y"], table, spec)
        schema = infer_targets(rows, spec, say, declared)
    else:
        rows = read_table(table, spec)
        infer = infer_targets if targets_only else infer_schema
        schema = infer(rows, spec, say, declared, draft=True)
    every = (*schema.targets, *schema.columns)
    unclear = [column.name for column in every if column.type == "?"]
    lines = describe_unclear(rows, unclear)
    write_text(out, schema.to_toml(lines))
    features = [column for column in schema.columns if column.type not in ("?", "ignore")]
    say(
        f"{len(features)} columns, {sum(column.width for column in features)} features; "
        f"{schema.task_object.noun}: {', '.join(schema.outputs)}"
    )
    for line in lines.values():
        say(line)
    if unclear:
        say("Replace each '?' in the schema, and run this command again.")
    say(f"schema: {out}")
