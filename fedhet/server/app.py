"""Flower's entry point for the server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from flwr.common import Context, Parameters, Scalar
from flwr.server import History, Server, ServerApp, ServerAppComponents, ServerConfig
from flwr.server.client_manager import ClientManager, SimpleClientManager
from flwr.server.server import EvaluateResultsAndFailures, FitResultsAndFailures
from flwr.serverapp import Grid
from rich.console import Console

from fedhet.base.errors import FedhetError, SettingsError, describe_error
from fedhet.config.resolve import Config, check_deployable, resolve_flower
from fedhet.config.sources import CLIENTS, FOLLOW
from fedhet.data.store import RunData
from fedhet.runs.display import line_display, round_lines
from fedhet.runs.log import RunLog, Watcher, trackers_of
from fedhet.runs.progress import status_file
from fedhet.runs.records import Summary
from fedhet.runs.units import console_for, log_error
from fedhet.wire.identity import is_name

FitRound = tuple[Parameters | None, dict[str, Scalar], FitResultsAndFailures] | None
EvaluateRound = tuple[float | None, dict[str, Scalar], EvaluateResultsAndFailures] | None


START_SECONDS, SETTLED_SECONDS = 60.0, 0.5
"""How long to wait for a simulation's nodes, and for no further one."""
ASKED_A_WORKER = 2
"""Clients that are asked at once for each worker: one trains, and the next waits for the worker."""


class _StoppedEarly(Exception):  # noqa: N818
    """Ends Flower's loop over the rounds before its last one."""


class FederationServer(Server):
    """Flower's server, with rounds that need not wait for all, and that resumes where it ended.

    A round has Flower's order: `configure_fit`, the clients' replies, `aggregate_fit`, and the same
    of the evaluation.
    """

    def __init__(
        self, config: Config, log: RunLog, manager: ClientManager, data: RunData | None = None
    ) -> None:
        strategy = config.method.strategy(config, log, data)
        super().__init__(client_manager=manager, strategy=strategy)
        self._method = strategy
        self.set_max_workers(min(config.run.clients, ASKED_A_WORKER * log.workers))
        self._log = log

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Run the remaining rounds, then write the summary.

        Raises FedhetError if the run has no result: in the last rounds no client has replied, or
        none could be evaluated. The reason is recorded in the run's directory.
        """
        result: tuple[History, float] = (History(), 0.0)
        self._method.collector.open(self.max_workers or 1)
        try:
            with contextlib.suppress(_StoppedEarly):
                result = super().fit(num_rounds - self._log.done, timeout)
            if fault := self._log.missing_result():
                raise FedhetError(fault)
        except Exception as error:
            self._log.fail(error)
            raise
        finally:
            self._method.collector.close()
        self._log.finish()
        return result

    def fit_round(self, server_round: int, timeout: float | None) -> FitRound:
        """Train round `server_round` of the remaining rounds."""
        number, method = self._log.done + server_round, self._method
        if number > self._log.last_round:
            raise _StoppedEarly
        asked = method.configure_fit(number, self.parameters, self.client_manager())
        if not asked and not method.collector.clients_at_work:
            return None
        closed = method.collector.fit(number, asked, method.state.needed, timeout)
        method.close_round(closed)
        parameters, metrics = method.aggregate_fit(number, closed.results, closed.failures)
        return parameters, metrics, (closed.results, closed.failures)

    def evaluate_round(self, server_round: int, timeout: float | None) -> EvaluateRound:
        """Evaluate round `server_round` of the remaining rounds."""
        number, method = self._log.done + server_round, self._method
        asked = method.configure_evaluate(number, self.parameters, self.client_manager())
        if not asked:
            return None
        closed = method.collector.evaluate(number, asked, timeout)
        loss, metrics = method.aggregate_evaluate(number, closed.results, closed.failures)
        return loss, metrics, (closed.results, closed.failures)


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

    `begun`, `deployed`: as of `RunLog`; `manager` has the clients, None: they will come; `data` is
    the store of the run's data in this process, None: a new one.
    """
    every = [*watchers, *trackers_of(config), status_file(directory)]
    log = RunLog(config, directory, workers=workers, watchers=every, begun=begun, deployed=deployed)
    rounds = ServerConfig(config.run.rounds, config.run.engine.round_timeout)
    server = FederationServer(config, log, manager or SimpleClientManager(), data)
    return ServerAppComponents(server=server, config=rounds)


def run_directory(config: Config) -> Path:
    """Return the run's directory; its name identifies the run. Raises SettingsError."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    dataset = config.run.data.dataset.partition(":")[0]
    default = f"runs/{config.method.name}-{dataset}-s{config.run.seed}-{stamp}"
    directory = Path(config.run.out or default).resolve()
    if not is_name(directory.name):
        rule = "a path that ends in letters, digits, '.', '_' and '-'"
        raise SettingsError(f"setting 'out' = {config.run.out!r} is not allowed: it takes {rule}")
    try:
        str(directory).encode()
    except UnicodeEncodeError:  # TensorBoard and safetensors would fail
        raise SettingsError(
            f"out: the run's directory must have a path in UTF-8, got {str(directory)!r}. Give "
            "another with --out, or set LC_ALL=C.UTF-8."
        ) from None
    return directory


class Reported(Watcher):
    """Writes the report of a finished run and prints its table."""

    def __init__(self, directory: Path, console: Console) -> None:
        self._directory, self._console = directory, console

    def run_finished(self, summary: Summary) -> None:
        """Write the report. If that fails, print one line: the run itself is complete."""
        try:
            # Import lazily: matplotlib and pandas take seconds. An import can fail, too.
            from fedhet import report

            run = report.write(self._directory)
            self._console.print(report.final_table(run))
        except Exception as error:
            command = f"`fedhet report {self._directory}` writes it"
            self._say(
                f"the run is complete, but its report failed: {describe_error(error)}; {command}"
            )
            return
        self._say(f"report, at the server: {self._directory / 'report.html'}")
        self._say(f"next, at the server: fedhet watch {self._directory.parent} shows all runs")

    def run_failed(self, reason: str) -> None:
        """Write the report of the rounds that a failed run has recorded, if there are any."""
        if (self._directory / "metrics.jsonl").exists():
            try:
                from fedhet import report

                report.write(self._directory)
            except Exception as error:
                self._say(f"the report of the recorded rounds failed: {describe_error(error)}")
            else:
                self._say(f"report of the recorded rounds: {self._directory / 'report.html'}")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def server_fn(context: Context) -> ServerAppComponents:
    """Return the components of a run that `flwr run` started."""
    config = resolve_flower(context.run_config)
    check_deployable(config)
    console, directory = console_for(), run_directory(config)
    shown = [line_display(console), round_lines(console), Reported(directory, console)]
    return components(config, directory, workers=config.run.clients, watchers=shown, deployed=True)


class FedhetServerApp(ServerApp):
    """Flower's ServerApp, with `clients` set to the number of simulated nodes."""

    def __call__(self, grid: Grid, context: Context) -> None:
        """Run the app. A FedhetError is logged as one line, and still fails Flower's run."""
        try:
            if nodes := simulated_nodes(grid):
                given = context.run_config.get(CLIENTS, FOLLOW)
                if given not in (FOLLOW, nodes):
                    raise SettingsError(
                        f"clients = {given}: expected {nodes}, the number of simulated nodes. "
                        "Omit 'clients' from --run-config, or add --federation-config "
                        f"'num-supernodes={given}' to `flwr run`"
                    )
                context.run_config = {**context.run_config, CLIENTS: nodes}
            super().__call__(grid, context)
        except FedhetError as error:
            log_error(error)
            raise


def simulated_nodes(grid: Grid) -> int:
    """Return the number of nodes of a simulation by Flower, or 0 for a deployment.

    Flower starts the app before it has registered all nodes, in one go and within this process,
    and tells the app nothing of their number. So wait until the number no longer changes.
    """
    # Import lazily: flwr.superlink loads SQLAlchemy (about 1 s).
    from flwr.superlink.grid import InMemoryGrid

    if not isinstance(grid, InMemoryGrid):
        return 0
    count, end = 0, time.monotonic() + START_SECONDS
    changed = time.monotonic()
    while (now := time.monotonic()) < end:
        if (found := len(list(grid.get_node_ids()))) != count:
            count, changed = found, now
        if count and now - changed >= SETTLED_SECONDS:
            return count
        time.sleep(0.02)
    raise FedhetError(f"no node of the simulation was registered within {START_SECONDS:g} s")


app = FedhetServerApp(server_fn=server_fn)
