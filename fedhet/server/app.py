"""Flower's entry point for the server."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from flwr.common import Context, Parameters, Scalar
from flwr.server import History, Server, ServerApp, ServerAppComponents, ServerConfig
from flwr.server.client_manager import ClientManager, SimpleClientManager
from flwr.server.server import EvaluateResultsAndFailures, FitResultsAndFailures
from flwr.serverapp import Grid
from rich.console import Console

from fedhet.base.errors import (
    FedhetError,
    SettingsError,
    StateError,
    describe_error,
    error_location,
)
from fedhet.config.resolve import Config, check_deployable, resolve_flower
from fedhet.config.sources import CLIENTS, FOLLOW
from fedhet.data.store import RunData
from fedhet.methods.registry import shipped_names
from fedhet.runs.display import line_display, round_lines
from fedhet.runs.log import RunLog, Watcher, trackers_of
from fedhet.runs.progress import status_file
from fedhet.runs.records import Summary
from fedhet.runs.units import console_for, log_error
from fedhet.server.calls import UserCodeFault
from fedhet.wire.identity import is_name

FitRound = tuple[Parameters | None, dict[str, Scalar], FitResultsAndFailures] | None
EvaluateRound = tuple[float | None, dict[str, Scalar], EvaluateResultsAndFailures] | None


START_SECONDS, SETTLED_SECONDS = 60.0, 0.5
"""Maximum time to wait for the nodes of a simulation, and time without a new node after which all
nodes are assumed to be registered, both in seconds."""
CALLS_PER_WORKER = 2
"""Concurrent calls per worker: while one client trains, the next client waits for the worker."""


class _StoppedEarly(Exception):  # noqa: N818
    """Raised to end Flower's loop over the rounds early."""


class FederationServer(Server):
    """Flower server that can resume runs, and close rounds without waiting for all clients.

    As in Flower, a round consists of `configure_fit`, the clients' replies, and `aggregate_fit`,
    followed by the corresponding steps for the evaluation.
    """

    def __init__(
        self, config: Config, log: RunLog, manager: ClientManager, data: RunData | None = None
    ) -> None:
        strategy = config.method.strategy(config, log, data)
        super().__init__(client_manager=manager, strategy=strategy)
        self._method = strategy
        self.set_max_workers(min(config.run.clients, CALLS_PER_WORKER * log.workers))
        self._log = log

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Run the remaining rounds, and write the summary.

        Raises FedhetError if a custom method failed, or if the run has no result because no client
        replied or could be evaluated in the last rounds. The run's directory records the reason.
        """
        result: tuple[History, float] = (History(), 0.0)
        self._method.collector.open(self.max_workers or 1)
        with contextlib.closing(self._log):
            try:
                with contextlib.suppress(_StoppedEarly):
                    result = super().fit(num_rounds - self._log.done, timeout)
                if fault := self._log.missing_result():
                    raise FedhetError(fault)
            except Exception as error:
                reported = self._reported(error)
                self._log.fail(reported)
                if reported is not error:
                    raise reported from error
                raise
            finally:
                self._method.collector.close()
            self._log.finish()
        return result

    def _reported(self, error: Exception) -> Exception:
        """Return the error to report.

        If a custom method failed, the result is a StateError with a one-line message, and the
        traceback is written to the log.
        """
        method = self._log.config.method
        if isinstance(error, FedhetError) or method.name in shipped_names():
            return error
        fault = UserCodeFault.of(error)
        logging.getLogger("flwr").error("%s", fault.traceback)
        in_file = (self._log.directory / "flower.log").exists()
        where = "The run's flower.log" if in_file else "The server's log"
        place = error_location(error, method.modules[0])
        reported = StateError(
            f"method '{method.name}' failed on the server: {describe_error(error)}{place}. "
            f"{where} holds the full traceback."
        )
        reported.add_note(fault.user_frames)
        return reported

    def fit_round(self, server_round: int, timeout: float | None) -> FitRound:
        """Run the training of a round. Flower counts `server_round` from the last resume."""
        number, method = self._log.done + server_round, self._method
        if number > self._log.last_round:
            raise _StoppedEarly
        instructions = method.configure_fit(number, self.parameters, self.client_manager())
        if not instructions and not method.collector.clients_at_work:
            return None
        replies = method.collector.fit(number, instructions, method.state.needed, timeout)
        method.close_round(replies)
        parameters, metrics = method.aggregate_fit(number, replies.results, replies.failures)
        return parameters, metrics, (replies.results, replies.failures)

    def evaluate_round(self, server_round: int, timeout: float | None) -> EvaluateRound:
        """Run the evaluation of a round. Flower counts `server_round` from the last resume."""
        number, method = self._log.done + server_round, self._method
        instructions = method.configure_evaluate(number, self.parameters, self.client_manager())
        if not instructions:
            return None
        replies = method.collector.evaluate(number, instructions, timeout)
        loss, metrics = method.aggregate_evaluate(number, replies.results, replies.failures)
        return loss, metrics, (replies.results, replies.failures)


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
        begun: Start time of the run, as for `RunLog`.
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
    directory = Path(config.run.out or default).resolve()
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
        """Write the report, or print an error message, because the run itself is complete."""
        try:
            # Import lazily, because importing matplotlib and pandas takes seconds and may fail.
            from fedhet import report

            run = report.write(self._directory)
            self._console.print(report.final_table(run))
        except Exception as error:
            command = f"`fedhet report {self._directory}`"
            reason = f"{describe_error(error)}. Write the report with {command}."
            self._print(f"the run is complete, but its report failed: {reason}")
            return
        self._print(f"report, on the server: {self._directory / 'report.html'}")
        self._print(f"all runs, on the server: fedhet watch {self._directory.parent}")

    def run_failed(self, reason: str) -> None:
        """Write a report on the recorded rounds of a failed run, if there are any."""
        if (self._directory / "metrics.jsonl").exists():
            try:
                from fedhet import report

                report.write(self._directory)
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
