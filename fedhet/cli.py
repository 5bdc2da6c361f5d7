"""The command line: `fedhet run METHOD`, and what lists, compares and shows."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhet import __version__, certs, data, models, report
from fedhet.config import (
    Config,
    data_spec,
    defaults_toml,
    parse_pairs,
    preset_names,
    read_preset,
    read_toml,
    resolve,
)
from fedhet.connection import Connection, submit
from fedhet.contract import Contract
from fedhet.deploy import deploy_local, site_name
from fedhet.display import LineDisplay, LiveDisplay
from fedhet.errors import FedhetError, SettingsError, StateError
from fedhet.registry import find_method, method_names
from fedhet.runlog import Watcher
from fedhet.server_app import run_directory
from fedhet.settings import Settings, allowed
from fedhet.simulate import simulate
from fedhet.sweep import folder_name, read_sweep

PIPED_WIDTH = 130

app = typer.Typer(
    help="Federated learning for clients whose models differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
errors = Console(stderr=True)


def main() -> None:
    """Run the command line; a user's mistake ends it with one line and status 2."""
    try:
        app()
    except FedhetError as error:
        errors.print(f"fedhet: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from None
    except OSError as error:
        errors.print(f"fedhet: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        errors.print("fedhet: interrupted", style="red")
        raise SystemExit(130) from None


def _setting(name: str, metavar: str | None = None) -> typer.models.OptionInfo:
    """Return the option for a setting that has its own flag; its help is the setting's."""
    help_text = Settings.fields()[name].description
    option: typer.models.OptionInfo = typer.Option(help=help_text, metavar=metavar or "TEXT")
    return option


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


@app.command("run")
def run_command(
    method: Annotated[
        str | None, typer.Argument(help="The method; `fedhet methods` lists them.")
    ] = None,
    preset: Preset = None,
    config: ConfigFile = None,
    dataset: Annotated[str | None, _setting("dataset")] = None,
    clients: Annotated[str | None, _setting("clients", "INT")] = None,
    models: Annotated[str | None, _setting("models")] = None,
    rounds: Annotated[str | None, _setting("rounds", "INT")] = None,
    seed: Annotated[str | None, _setting("seed", "INT")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="INT,INT…", help="Several runs, one a seed, compared.")
    ] = None,
    set_: Set = None,
    backend: Annotated[str | None, _setting("backend")] = None,
    out: Annotated[str | None, _setting("out", "DIR")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with the run in DIR after its last whole round."),
    ] = None,
) -> None:
    """Train a federation on this machine; end with a table and a report."""
    if resume is not None and any((preset, config, seeds, out)):
        raise SettingsError(
            "--resume takes the settings from the run's directory: "
            "--preset, --config, --seeds and --out do not go with it"
        )
    if method is None and resume is None:
        raise SettingsError("which method? `fedhet run METHOD`; `fedhet methods` lists them")
    if seeds is not None and seed is not None:
        raise SettingsError("--seed and --seeds are both given: give one of them")
    flags = {
        "dataset": dataset,
        "clients": clients,
        "models": models,
        "rounds": rounds,
        "seed": seed,
        "backend": backend,
        "out": out,
    }
    if resume is not None:
        flags |= {"out": str(resume), "resume": "true"}
        config = _config_of(resume)
    values = _gather(method, preset, config, flags, set_ or [])
    if seeds is None:
        chosen = resolve(values)
        directory = run_directory(chosen)
        _run(chosen, directory)
        console.print(report.final_table(report.load_run(directory)))
        _say_where(directory / "report.html")
        return
    _run_seeds(values, _read_seeds(seeds))


def _config_of(directory: Path) -> Path:
    """Return the settings file of the run in `directory`. Raises StateError."""
    path = directory / "config.toml"
    if not path.exists():
        raise StateError(f"{directory} holds no run to resume: it has no config.toml")
    return path


def _run_seeds(values: Mapping[str, object], seeds: list[int]) -> None:
    parent = run_directory(resolve({**values, "seed": seeds[0]}))
    if (parent / "config.toml").exists():
        raise StateError(f"{parent} holds a run already; give another directory with --out")
    runs = [parent / f"seed-{seed}" for seed in seeds]
    configs = [
        resolve({**values, "seed": seed, "out": str(directory)})
        for seed, directory in zip(seeds, runs, strict=True)
    ]
    for config, directory in zip(configs, runs, strict=True):
        _run(config, directory)
    _compare(runs, parent)


def _run(config: Config, directory: Path) -> None:
    with _display() as display, _ending_at_once_on_interrupt(directory):
        simulate(config, directory, [display])


@contextlib.contextmanager
def _ending_at_once_on_interrupt(directory: Path) -> Iterator[None]:
    """End the process on Ctrl-C: Flower's threads would wait for their clients to the end."""

    def end(*_: object) -> None:
        console.show_cursor(True)
        errors.print(
            f"\nfedhet: interrupted; `fedhet report {directory}` shows what there is",
            markup=False,
            soft_wrap=True,
        )
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _display() -> Iterator[Watcher]:
    if not console.is_terminal:
        yield LineDisplay(console)
        return
    with LiveDisplay(console) as live:
        yield live


@app.command("deploy-local")
def deploy_local_command(
    method: Annotated[str, typer.Argument(help="The method; `fedhet methods` lists them.")],
    preset: Preset = None,
    config: ConfigFile = None,
    dataset: Annotated[str | None, _setting("dataset")] = None,
    clients: Annotated[str | None, _setting("clients", "INT")] = None,
    models: Annotated[str | None, _setting("models")] = None,
    rounds: Annotated[str | None, _setting("rounds", "INT")] = None,
    seed: Annotated[str | None, _setting("seed", "INT")] = None,
    set_: Set = None,
    out: Annotated[str | None, _setting("out", "DIR")] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep keys, logs and the sites' state in DIR."),
    ] = None,
) -> None:
    """Run a federation as on separate machines: a server and nodes, over gRPC, with TLS."""
    flags = {
        "dataset": dataset,
        "clients": clients,
        "models": models,
        "rounds": rounds,
        "seed": seed,
        "out": out,
    }
    chosen = resolve(_gather(method, preset, config, flags, set_ or []))
    directory = run_directory(chosen)
    deploy_local(chosen, directory, keep, _say)
    report.write_figures(report.load_run(directory))
    report.write_report(directory)
    console.print(report.final_table(report.load_run(directory)))
    _say_where(directory / "report.html")


Server = Annotated[str, typer.Option(metavar="HOST:PORT", help="The server's control API.")]
Authority = Annotated[Path, typer.Option("--ca", metavar="FILE", help="The CA's certificate.")]


@app.command("register")
def register_command(
    keys: Annotated[list[Path], typer.Argument(metavar="FILE.pub…", help="Nodes' public keys.")],
    server: Server,
    ca: Authority,
) -> None:
    """Make nodes known to a deployed server; a file's name is the node's."""
    with _connected(server, ca) as connection:
        for key in keys:
            new = connection.register(key)
            _say(f"{key.name.removesuffix('.pub')} is {'now' if new else 'already'} registered")


@app.command("submit")
def submit_command(
    method: Annotated[str, typer.Argument(help="The method; `fedhet methods` lists them.")],
    server: Server,
    ca: Authority,
    preset: Preset = None,
    config: ConfigFile = None,
    dataset: Annotated[str | None, _setting("dataset")] = None,
    clients: Annotated[str | None, _setting("clients", "INT")] = None,
    models: Annotated[str | None, _setting("models")] = None,
    rounds: Annotated[str | None, _setting("rounds", "INT")] = None,
    seed: Annotated[str | None, _setting("seed", "INT")] = None,
    set_: Set = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="At the server.")] = None,
) -> None:
    """Run a federation on a deployed server and its nodes; follow it to its end."""
    flags = {
        "dataset": dataset,
        "clients": clients,
        "models": models,
        "rounds": rounds,
        "seed": seed,
        "out": out,
    }
    chosen = resolve(_gather(method, preset, config, flags, set_ or []))
    with _connected(server, ca) as connection:
        submit(chosen, connection, _say)


@contextlib.contextmanager
def _connected(server: str, ca: Path) -> Iterator[Connection]:
    with tempfile.TemporaryDirectory(prefix="fedhet-") as home:
        connection = Connection(Path(home), server, ca)
        connection.prepare()
        yield connection


@app.command("certs")
def certs_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where they go.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address of the server, as nodes reach it; repeatable."),
    ] = None,
    node: Annotated[list[str] | None, typer.Option(help="A node's name; repeatable.")] = None,
    nodes: Annotated[int, typer.Option(min=0, help="So many nodes: site-0, site-1, …")] = 0,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Until they expire.")] = 365,
) -> None:
    """Make a development CA, a server certificate and a key pair a node; keep what is there."""
    names = [*(site_name(k) for k in range(nodes)), *(node or [])]
    written = certs.make(directory, host or [], names, days)
    for path in written:
        _say(f"wrote {path}")
    if not written:
        _say(f"{directory} has them all already")


@app.command("sweep")
def sweep_command(
    method: Annotated[str, typer.Argument(help="The method; `fedhet methods` lists them.")],
    over: Annotated[
        str, typer.Argument(metavar="KEY=VALUES", help="START:STOP:STEP, both ends in, or a,b,c.")
    ],
    preset: Preset = None,
    config: ConfigFile = None,
    seeds: Annotated[str, typer.Option(metavar="INT,INT…", help="Runs of each value.")] = "0",
    figures: Annotated[
        str, typer.Option(help="The method's figures to draw beside the accuracy; the first.")
    ] = "",
    set_: Set = None,
    backend: Annotated[str | None, _setting("backend")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where all of it goes.")] = Path(
        "runs/sweep"
    ),
) -> None:
    """Run one setting at several values; end with a table and a figure over them."""
    name, swept = read_sweep(over)
    values = _gather(method, preset, config, {"backend": backend}, set_ or [])
    plan = {
        value: {
            out / folder_name(value) / f"seed-{seed}": {**values, name: value, "seed": seed}
            for seed in _read_seeds(seeds)
        }
        for value in swept
    }
    # All of them are checked before the first is run.
    configs = {
        directory: resolve({**chosen, "out": str(directory.resolve())})
        for runs in plan.values()
        for directory, chosen in runs.items()
    }
    for directory, chosen in configs.items():
        _run(chosen, directory.resolve())
    found = report.sweep(name, {value: list(runs) for value, runs in plan.items()})
    figure = report.write_sweep(found, out, figures)
    console.print(report.sweep_table(found, figures))
    console.print(f"figure: {figure}", highlight=False, markup=False, soft_wrap=True)


@app.command("compare")
def compare_command(
    directories: Annotated[list[Path], typer.Argument(help="Runs, or folders of runs.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the page and figure go.")] = Path(
        "runs/compare"
    ),
    target: Annotated[
        float | None, typer.Option(help="Accuracy whose cost in bytes is shown, e.g. 0.7.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="Kind of model to order and count by: private, proxy, global, server."),
    ] = None,
) -> None:
    """Lay runs side by side: a table, a figure and a page; mean and spread over seeds."""
    _compare(directories, out, target, kind)


def _compare(
    directories: list[Path], out: Path, target: float | None = None, kind: str | None = None
) -> None:
    comparison = report.compare(directories, target=target, kind=kind)
    report.write_comparison(comparison, out)
    console.print(report.comparison_table(comparison))
    _say_where(out / "compare.html")


@app.command("report")
def report_command(
    directory: Annotated[Path, typer.Argument(help="A run's directory.")],
) -> None:
    """Write a run's figures and report.html anew; also of a run that was cut short."""
    report.write_figures(report.load_run(directory))
    page = report.write_report(directory)
    console.print(report.final_table(report.load_run(directory)))
    _say_where(page)


@app.command("methods")
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
        table.add_row(known, found.title, found.headline, found.paper)
    console.print(table)


def _show_method(name: str) -> None:
    method = find_method(name)
    console.print(f"[bold]{method.name}[/]: {escape(method.title)}\n{escape(method.paper)}")
    if method.settings():
        console.print(_settings_table(method.settings()))
    for title, contract in (
        ("the server sends", method.server_sends),
        ("a client sends", method.client_sends),
    ):
        console.print(_contract_table(title, contract) if contract.fields else f"{title} nothing")


@app.command("models")
def models_command() -> None:
    """List the models that a pool may name."""
    table = _table("model", "family", "what it is", "source")
    known: list[models.ModelInfo | models.ClassicalInfo] = list(models.describe())
    for info in [*known, *models.describe_classical()]:
        table.add_row(info.name, info.family, escape(info.line), escape(info.source))
    console.print(table)
    console.print(
        "A model of your own: a name with a colon, `package.module:function`; see the README."
    )


@app.command("presets")
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


@app.command("settings")
def settings_command(
    toml: Annotated[
        bool, typer.Option(help="All settings of all methods at their defaults, as TOML.")
    ] = False,
) -> None:
    """List the settings that every run has."""
    if toml:
        console.print(defaults_toml(), end="", markup=False, highlight=False, soft_wrap=True)
        return
    console.print(_settings_table(Settings.fields()))
    console.print("A method's own: `fedhet methods NAME`.")


@app.command("partition")
def partition_command(
    preset: Preset = None,
    config: ConfigFile = None,
    dataset: Annotated[str | None, _setting("dataset")] = None,
    clients: Annotated[str | None, _setting("clients", "INT")] = None,
    set_: Set = None,
) -> None:
    """Show how the data is dealt: samples of each class at each client."""
    flags = {"dataset": dataset, "clients": clients}
    spec = data_spec(resolve(_gather(None, preset, config, flags, set_ or [])).run)
    data.validate(spec)
    counts = data.label_counts(spec)
    table = _table("client", "samples", *data.load(spec).classes)
    for client, row in counts.items():
        table.add_row(client, str(sum(row)), *(str(n) if n else "·" for n in row))
    console.print(table)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning for clients whose models differ."""
    if version:
        console.print(__version__, highlight=False)
        raise typer.Exit


def _gather(
    method: str | None,
    preset: str | None,
    config: Path | None,
    flags: Mapping[str, str | None],
    pairs: list[str],
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
    return values | parse_pairs([*pairs, *given])


def _read_seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise SettingsError(f"'--seeds {text}' is not allowed: it takes e.g. 0,1,2, none twice")
    return [int(part) for part in parts]


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


def _say_where(page: Path) -> None:
    _say(f"report: {page}")


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
