"""Flower's entry points: `clients` of a simulation, one-line errors, and failed runs."""

import io
import json
import logging
from types import SimpleNamespace

import pytest
from federation import Server, records, run, small
from flwr.common import Code, Context, EvaluateRes, GetPropertiesIns, RecordDict, Status
from flwr.superlink.grid import InMemoryGrid
from interruption import CutError, CutOff, resumed
from rich.console import Console

from fedhet import report
from fedhet.base.errors import FedhetError, SettingsError
from fedhet.client_runtime.app import client_fn
from fedhet.config.resolve import resolve
from fedhet.config.sources import to_flower
from fedhet.engines import simulate
from fedhet.inference import api
from fedhet.runs.progress import Progress, read_status
from fedhet.runs.units import human_bytes
from fedhet.server import app as server_app
from fedhet.server.app import FedhetServerApp, Reported


def grid_of(counts):
    """Return a grid that lists as many nodes as `counts` contains, call by call."""
    grid = object.__new__(InMemoryGrid)
    left = list(counts)
    grid.get_node_ids = lambda: range(left.pop(0) if len(left) > 1 else left[0])
    return grid


def context_of(**changes):
    values = {**to_flower(small().flat()), "clients": 0, **changes}
    return Context(1, 1, {}, RecordDict(), values)


@pytest.fixture
def clients_of(monkeypatch):
    """Start the app on a grid, and return the run's setting `clients`."""
    monkeypatch.setattr(server_app, "SETTLED_SECONDS", 0.1)
    found = []

    def stop(context):
        found.append(context.run_config["clients"])
        raise SettingsError("enough: nothing is to be trained")

    def start(grid, context):
        with pytest.raises(SettingsError) as raised:
            FedhetServerApp(server_fn=stop)(grid, context)
        return found, str(raised.value)

    return start


def test_clients_follow_the_simulated_nodes_once_all_are_registered(clients_of):
    assert clients_of(grid_of([0, 0, 1, 2, 3, 7]), context_of())[0] == [7]


def test_matching_number_of_clients_is_kept(clients_of):
    assert clients_of(grid_of([4]), context_of(clients=4))[0] == [4]


def test_mismatched_number_of_clients_raises(clients_of, capsys):
    found, fault = clients_of(grid_of([2]), context_of(clients=4))
    assert not found
    assert fault.startswith("clients: expected 2, the number of simulated nodes, got 4.")
    assert "--federation-config 'num-supernodes=4'" in fault
    assert capsys.readouterr().out == f"error: {fault}\n"


def test_deployment_keeps_its_number_of_clients(clients_of):
    assert clients_of(object(), context_of(clients=3))[0] == [3]


def test_fedhet_error_is_logged_without_traceback(clients_of):
    clients_of(grid_of([2]), context_of(clients=4))
    lines, logger = [], logging.getLogger("flwr")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(logging.Formatter().format(record))
    logger.addHandler(handler)
    try:
        for error in (FedhetError("ours"), ValueError("a fault of the code")):
            logger.error("ServerApp raised an exception", exc_info=error)
    finally:
        logger.removeHandler(handler)
    assert lines[0] == "ServerApp raised an exception"
    assert "ValueError: a fault of the code" in lines[1]


def test_simulated_client_uses_the_number_of_partitions(tmp_path):
    node = {"partition-id": 2, "num-partitions": 3, "state-dir": str(tmp_path)}
    settings = {**to_flower(small().flat()), "clients": 0}
    instructions = GetPropertiesIns({})
    client = client_fn(SimpleNamespace(node_config=node, run_config=settings))
    assert client.get_properties(instructions).properties["name"] == "client-2"
    settings["clients"] = 2  # it is not one of two
    with pytest.raises(SettingsError, match="partition-id"):
        client_fn(SimpleNamespace(node_config=node, run_config=settings))


def test_failed_report_keeps_the_run_complete(tmp_path, monkeypatch):
    directory = tmp_path / "run"

    def fail(path):
        raise FileNotFoundError("no fedhet.mplstyle\nhere")

    console = Console(file=io.StringIO(), width=400)
    monkeypatch.setattr(report, "write_all", fail)
    simulate.train(small(rounds=1, clients=2), directory, [Reported(directory, console)])
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("the run is complete, but its report failed: FileNotFoundError: no fed")
    assert line.endswith(f"Write the report with `fedhet report {directory}`.")
    assert json.loads((directory / "summary.json").read_text())["accuracy"]


@pytest.fixture
def without_result(tmp_path, monkeypatch):
    """A run in which all clients train, but no client can evaluate its models."""
    directory = tmp_path / "run"

    def evaluate(self, ins, timeout, group_id):
        fault = {"error": "its batch norm has diverged"}
        return EvaluateRes(Status(Code.OK, ""), 0.0, 1, fault)

    monkeypatch.setattr(simulate.InlineProxy, "evaluate", evaluate)
    progress = Progress()
    with pytest.raises(FedhetError) as raised:
        run(small("fedavg", rounds=1, clients=2, models="mlp"), directory, [progress])
    return directory, str(raised.value), progress


def test_run_without_evaluable_models_fails(without_result):
    directory, fault, progress = without_result
    assert fault.startswith("no client could be evaluated in round 1; client client-0: ")
    assert "its batch norm has diverged" in fault
    assert not (directory / "summary.json").exists()
    assert progress.status.fault == fault
    assert read_status(directory).description == f"failed in round 1 of 1: {fault}"


def test_report_of_a_failed_run_shows_reason_models_and_memory(without_result):
    directory, fault, _ = without_result
    report.write_all(directory)
    page = (directory / "report.html").read_text()
    assert f"failed: 1 of 1 rounds; {fault}" in page.replace("&#39;", "'")
    found = report.load_run(directory)
    assert found.models == {"client-0": "mlp", "client-1": "mlp"}
    peak = records(directory)[0]["peak_memory_mb"]
    assert peak > 0
    assert human_bytes(1e6 * peak) in page
    assert "model unknown" not in page


def test_class_names_without_a_partition_come_from_the_data(tmp_path):
    server = Server(small(rounds=1, clients=2, metrics=["accuracy", "recall"]), tmp_path / "run")
    server.play(1)
    server.close(1)
    found = report.load_run(tmp_path / "run")
    assert found.partition is None
    assert found.origin.classes == [str(number) for number in range(10)]


def test_resumed_run_adds_bytes_and_clears_the_error(tmp_path):
    config, directory = small(rounds=2, clients=2), tmp_path / "run"
    with pytest.raises(CutError):
        run(config, directory, [CutOff(2, "before")])
    progress = Progress()
    run(resumed(config, directory), directory, [progress])
    lines = records(directory)
    assert len(lines) == 2
    assert progress.status.bytes == sum(each["bytes_up"] + each["bytes_down"] for each in lines)
    assert len(progress.means) == 2
    assert progress.now().bytes == progress.status.bytes
    assert json.loads((directory / "run.json").read_text())["fault"] == ""


@pytest.mark.parametrize("models", ["cnn2,mlp", ["cnn2", "mlp"]])
def test_models_from_python_may_be_text(models):
    config = api._resolve("felo", [("models.pool", models)])
    assert config == resolve({"method": "felo", "models.pool": ["cnn2", "mlp"]})
