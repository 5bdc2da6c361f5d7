"""Flower's entry point for the server."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from flwr.common import Context
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.client_manager import ClientManager, SimpleClientManager
from flwr.serverapp import Grid
from rich.console import Console

from fedhet.base.disk import expanded
from fedhet.base.errors import FedhetError, SettingsError, describe_error
from fedhet.config.resolve import Config, check_deployable, resolve_flower
from fedhet.config.sources import CLIENTS, FOLLOW
from fedhet.data.store import RunData
from fedhet.runs.display import line_display, round_lines
from fedhet.runs.log import RunLog, Watcher, trackers_of
from fedhet.runs.progress import status_file
from fedhet.runs.records import Summary
from fedhet.runs.units import console_for, log_error
from fedhet.server.federation import FederationServer
from fedhet.server.nodes import retry_pulls_soon
from fedhet.wire.identity import is_name

START_SECONDS, SETTLED_SECONDS = 60.0, 0.5
"""Maximum time to wait for the nodes of a simulation, and time without a new node after which all
nodes are assumed to be registered, both in seconds."""


def components(
    config: Config,
    directory: Path,
    *,
    workers: int,
    watchers: Iterable[Watcher],
    begun: float | None = None,
    manager: ClientManager | None = None,
    data: RunData | None = None,
    deployed: bool = False,
) -> ServerAppComponents:
    """Return the components of Flower's ServerApp.

    Args:
        config: Configuration of the run.
        directory: The run's directory.
        workers: Number of clients that train at the same time.
        watchers: Observers of the run, in addition to trackers and the status file.
        begun: Start time of the run, as returned by `time.perf_counter`; None means now.
        manager: Registry of connected clients; by default, a new registry, which clients join
            later.
        data: Store of the run's data in this process; by default, a new store.
        deployed: Whether the clients are sites of a deployment.
    """
    watchers = [*watchers, *trackers_of(config), status_file(directory)]
    log = RunLog(
        config, directory, workers=workers, watchers=watchers, begun=begun, deployed=deployed
    )
    rounds = ServerConfig(config.run.rounds, config.run.engine.round_timeout)
    server = FederationServer(config, log, manager or SimpleClientManager(), data)
    return ServerAppComponents(server=server, config=rounds)


def run_directory(config: Config) -> Path:
    """Return the directory of a run. The name of the directory identifies the run.

    Raises SettingsError if the name or the path of the directory is invalid.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    dataset = config.run.data.dataset.partition(":")[0]
    default = f"runs/{config.method.name}-{dataset}-s{config.run.seed}-{stamp}"
    directory = expanded(config.run.out or default).resolve()
    if not is_name(directory.name):
        raise SettingsError(
            "out: the name of the run's directory must consist of letters, digits, '.', '_' and "
            f"'-', got {config.run.out!r}"
        )
    try:
        str(directory).encode()
    except UnicodeEncodeError:  # TensorBoard and safetensors do not support such paths.
        raise SettingsError(
            f"out: the path of the run's directory must be valid UTF-8, got {str(directory)!r}. "
            "Choose another directory with --out, or set LC_ALL=C.UTF-8."
        ) from None
    return directory


class Reported(Watcher):
    """Watcher that writes the report of a finished run and prints its results table."""

    def __init__(self, directory: Path, console: Console) -> None:
        self._directory, self._console = directory, console

    def run_finished(self, summary: Summary) -> None:
        """Write the report. A failure only prints a message, because the run is complete."""
        try:
            # Import lazily, because importing matplotlib and pandas takes seconds and may fail.
            from fedhet import report

            run = report.write_all(self._directory)
            self._console.print(report.final_table(run))
        except Exception as error:
            command = f"`fedhet report {self._directory}`"
            reason = f"{describe_error(error)}. Write the report with {command}."
            self._print(f"the run is complete, but its report failed: {reason}")
            return
        self._print(f"report, on the server: {self._directory / 'report.html'}")
        self._print(f"all runs, on the server: fedhet watch {self._directory.parent}")

    def run_failed(self, reason: str) -> None:
        """Write a report on a failed run, if at least one round was recorded."""
        if (self._directory / "metrics.jsonl").exists():
            try:
                from fedhet import report

                report.write_all(self._directory)
            except Exception as error:
                self._print(f"the report on the recorded rounds failed: {describe_error(error)}")
            else:
                self._print(f"report on the recorded rounds: {self._directory / 'report.html'}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def server_fn(context: Context) -> ServerAppComponents:
    """Return the components of a run started with `flwr run`."""
    config = resolve_flower(context.run_config)
    check_deployable(config)
    retry_pulls_soon()
    console, directory = console_for(), run_directory(config)
    watchers = [line_display(console), round_lines(console), Reported(directory, console)]
    return components(
        config, directory, workers=config.run.clients, watchers=watchers, deployed=True
    )


class FedhetServerApp(ServerApp):
    """Flower's ServerApp, with `clients` set to the number of simulated nodes."""

    def __call__(self, grid: Grid, context: Context) -> None:
        """Run the app.

        Logs a FedhetError as one line, and re-raises it so that Flower's run fails.
        """
        try:
            if nodes := simulated_nodes(grid):
                clients = context.run_config.get(CLIENTS, FOLLOW)
                if clients not in (FOLLOW, nodes):
                    raise SettingsError(
                        f"clients: expected {nodes}, the number of simulated nodes, got {clients}. "
                        "Omit 'clients' from --run-config, or add --federation-config "
                        f"'num-supernodes={clients}' to `flwr run`."
                    )
                context.run_config = {**context.run_config, CLIENTS: nodes}
            super().__call__(grid, context)
        except FedhetError as error:
            log_error(error)
            raise


def simulated_nodes(grid: Grid) -> int:
    """Return the number of nodes in a Flower simulation, or 0 for a deployment.

    Flower starts the app before it has registered all nodes, and does not report their number.
    This function waits until the number no longer changes.
    """
    # Import lazily, because flwr.superlink loads SQLAlchemy (about 1 s).
    from flwr.superlink.grid import InMemoryGrid

    if not isinstance(grid, InMemoryGrid):
        return 0
    count, end = 0, time.monotonic() + START_SECONDS
    changed = time.monotonic()
    while (now := time.monotonic()) < end:
        if (new_count := len(list(grid.get_node_ids()))) != count:
            count, changed = new_count, now
        if count and now - changed >= SETTLED_SECONDS:
            return count
        time.sleep(0.02)
    raise FedhetError(f"no simulated node was registered within {START_SECONDS:g} s")


app = FedhetServerApp(server_fn=server_fn)
