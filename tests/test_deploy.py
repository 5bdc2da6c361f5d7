"""A real deployment on the loopback interface: same results as a simulation, TLS, and keys."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import shutil
import socket
import threading

import numpy as np
import psutil
import pytest
from bases import make_bases
from federation import run, small, without_times
from interruption import until
from PIL import Image
from safetensors import safe_open
from test_tables import many, write

from fedhet.base.errors import DataError, FedhetError, StateError
from fedhet.cli.example import write_example
from fedhet.config.resolve import resolve
from fedhet.data.store import RunData
from fedhet.deployment import certs, control
from fedhet.deployment.control import submit
from fedhet.deployment.local import LocalDeployment, free_port, members_of
from fedhet.deployment.transport import GRPC, TRANSPORT
from fedhet.inference.client import open_client, open_server, read_inputs
from fedhet.kinds import IMAGE
from fedhet.methods.registry import find_method, method_names

MODELS = ["mlp", "cnn2", "cnn3"]
ORDINARY = "felo"


class Relay:
    """Forwards TCP connections to a port, and stores the first bytes of the callers."""

    def __init__(self, port: int) -> None:
        self.port, self._to = free_port(), port
        self.heard: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                first = caller.recv(65536)
                self.heard.append(first)
                server.sendall(first)
                for a, b in ((caller, server), (server, caller)):
                    threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            end.close()

    def close(self) -> None:
        self._listener.close()


def to_the_end(deployment, config, directory):
    """Run `config`, and return its summary and the server's lines."""
    placed = resolve({**config.flat(), "out": str(directory), "clients": deployment.nodes})
    said: list[str] = []
    submit(placed, deployment.connection, said.append)
    assert (directory / "summary.json").exists(), "\n".join(said)
    return json.loads((directory / "summary.json").read_text()), said


def descendants(deployment):
    """Return every process that belongs to a deployment."""
    found = []
    for process in deployment.processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process, *members_of(process.pid)]
    return found


def of_method(method: str):
    # Simulated, all clients have one process; there and here each trains on one thread.
    rounds = {"cofed.iterations": 1} if method == "cofed" else {}  # which makes two
    default = find_method(method).spec.pool(IMAGE)
    models = MODELS if "," in default else default  # or all clients have one
    return small(method, clients=3, models=models, rounds=2, join_timeout=300.0, **rounds)


DEPLOYED = [m for m in method_names() if not find_method(m).spec.simulation_only]
METHODS = [m if m == ORDINARY else pytest.param(m, marks=pytest.mark.slow) for m in DEPLOYED]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", METHODS)
def test_three_sites_give_the_metrics_of_a_simulation(method, tmp_path):
    config = of_method(method)
    deployment = LocalDeployment(tmp_path / "deployment", nodes=3)
    deployment.prepare()
    deployment.start_server()
    relay = Relay(deployment.fleet_port)
    try:
        for k in range(3):
            deployment.register(k)
            deployment.start_node(k, superlink=f"127.0.0.1:{relay.port}")
        refused = refusals(deployment, tmp_path) if method == ORDINARY else {}
        summary, said = to_the_end(deployment, config, tmp_path / "deployed")
        for name, reason in refused.items():
            log = until(lambda name=name: ended(deployment, name))
            assert reason in log, (name, log[-2000:])
        if refused:
            assert "No SuperNode found with the given public key" in deployment.log_of("server")
        assert not any("left out" in line for line in said)
        if method == ORDINARY:
            check_control(deployment, said)
    finally:
        started = descendants(deployment)
        deployment.stop()
        relay.close()
    assert not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert without_times(summary) == without_times(run(config, tmp_path / "simulated"))
    check_wire(relay.heard)
    check_state(tmp_path / "deployment" / "state", summary)


def check_control(deployment, said):
    """Check that the server lists its sites and runs under the names that users chose."""
    place = deployment.connection
    assert any("report.html" in line for line in said)  # after the table
    sites = {site.name: site.state for site in control.sites(place)}
    assert [sites[f"client-{k}"] for k in range(3)] == ["online"] * 3
    run, *others = control.newest_runs(place)
    assert (run.state, others) == ("finished:completed", [])
    assert set(run.lines) <= set(said)
    assert control.unregister(place, "client-1") == 1
    assert "client-1" not in {site.name for site in control.sites(place)}
    assert control.unregister(place, "client-1") == 0
    check_names(deployment)


def check_names(deployment):
    """Check that a second key for a name is rejected, unless --replace is passed."""
    place, keys = deployment.connection, deployment.certs / certs.NODES
    with pytest.raises(FedhetError, match=r"site-1\.pub"):
        list(control.register(place, [("client-1", keys / "site-1.pub")]))
    _, second = certs.make_node_key(keys / "second")
    before = [site.node for site in control.sites(place)]
    with pytest.raises(FedhetError, match="'client-2'"):
        list(control.register(place, [("client-2", second)]))
    assert list(control.register(place, [("client-0", keys / "site-0.pub")])) == [
        "client-0 is already registered with this key"
    ]
    assert [site.node for site in control.sites(place)] == before
    assert len(list(control.register(place, [("client-2", second)], replace=True))) == 2
    (site,) = (site for site in control.sites(place) if site.name == "client-2")
    assert (site.state, site.node in before) == ("registered", False)


TEXT_MODELS = ["text-cnn", "text-gru", "text-bag"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sites_with_texts_give_the_metrics_of_a_simulation(tmp_path):
    """Each site has a directory of texts; in the simulation, a column names the owner of a text."""
    write_example("text", tmp_path / "texts")
    everyone = tmp_path / "texts" / "train.csv"
    lengths = {"data.max-tokens": 24, "models.num-classes": 4, "data.test-fraction": 0.2}
    common = {**lengths, "models": TEXT_MODELS, "clients": 3, "rounds": 3}
    simulated = small("felo", **common, dataset=f"text:{everyone}", by="site", max_samples=0)
    folders = site_folders(everyone, simulated, tmp_path / "sites")
    with LocalDeployment(tmp_path / "deployment", nodes=3) as deployment:
        deployment.stop("site-0", "site-1", "site-2")  # started with partitions
        for k, folder in enumerate(folders):
            node = {"data": f"text:{folder}", "name": f"client-{k}", "model": TEXT_MODELS[k]}
            words = " ".join(f'{key}="{value}"' for key, value in node.items())
            deployment.start_node(k, **{"node-config": words})
        deployed = small("felo", **common, **{"data.sample-kind": "text"}, join_timeout=300.0)
        summary, said = to_the_end(deployment, deployed, tmp_path / "deployed")
    assert not any("left out" in line for line in said)
    alone = run(simulated, tmp_path / "simulated")
    assert summary["accuracy"]["personal"] == alone["accuracy"]["personal"]
    assert (
        summary["models"]
        == alone["models"]
        == {f"client-{k}": m for k, m in enumerate(TEXT_MODELS)}
    )
    numbers = [
        [(record["accuracy"], record["bytes_up"]) for record in found["history"]]
        for found in (summary, alone)
    ]
    assert numbers[0] == numbers[1]


def deployed_with_tables(simulated, table, config, root):
    """Deploy `config` on three sites with the rows of the clients of a simulation on `table`.

    Returns the summary and the directories of the sites.
    """
    folders = site_folders(table, simulated, root / "sites")
    for folder in folders:
        (folder / "classes.txt").unlink()
    return deployed_with_schema(simulated, folders, config, root), folders


def deployed_with_schema(simulated, folders, config, root, kind="table", form="table"):
    """Deploy `config` on three sites with the schema of a simulation, and return the summary."""
    dataset = RunData.for_run(simulated.run).dataset
    with LocalDeployment(root / "deployment", nodes=3) as deployment:
        deployment.stop("site-0", "site-1", "site-2")  # started with partitions
        for k, folder in enumerate(folders):
            (folder / "schema.toml").write_text(dataset.format.schema.to_toml())
            own = {"data": f"{form}:{folder}", "name": f"client-{k}"}
            node = {**own, "model": config.run.models.pool[k]}
            words = " ".join(f'{key}="{value}"' for key, value in node.items())
            deployment.start_node(k, **{"node-config": words})
        there = {"models.num-classes": len(dataset.format.classes), "data.sample-kind": kind}
        changes = {**config.flat(), **there, "engine.join-timeout": 300.0}
        summary, said = to_the_end(deployment, resolve(changes), root / "run")
    assert not any("left out" in line for line in said)
    return summary


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sites_with_tables_give_the_metrics_of_a_simulation(tmp_path):
    """Each site has rows and the shared schema; in the simulation, a column names the owner."""
    everyone = write(tmp_path / "all.csv", many(150))
    table = {"dataset": f"table:{everyone}", "target": "died", "by": "ward", "max_samples": 0}
    common = {"clients": 3, "rounds": 3, "models": ["mlp", "mlp2", "mlp3"]}
    simulated = small("felo", **common, **table)
    summary, folders = deployed_with_tables(simulated, everyone, small("felo", **common), tmp_path)
    assert summary["accuracy"] == run(simulated, tmp_path / "simulated")["accuracy"]
    deployed, predictions = tmp_path / "run", []
    with pytest.raises(DataError, match=r"schema\.toml"):
        read_inputs([everyone], open_server(deployed, architecture="mlp2").record)
    shutil.copy(folders[0] / "schema.toml", deployed)  # The server lacks only the names.
    for directory in (deployed, tmp_path / "simulated"):
        server = open_server(directory, architecture="mlp2")
        predictions.append(server.predict(read_inputs([everyone], server.record)[1]))
    assert (predictions[0].probabilities == predictions[1].probabilities).all()
    assert (
        predictions[0].classes
        == predictions[1].classes
        == RunData.for_run(simulated.run).dataset.format.classes
    )
    other = (deployed / "schema.toml").read_text().replace("mean = ", "mean = 1", 1)
    (deployed / "schema.toml").write_text(other)
    with pytest.raises(StateError, match=r"schema\.toml"):
        open_server(deployed, architecture="mlp2")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sites_with_label_tables_give_the_metrics_of_a_simulation(tmp_path):
    """The third site has no positive label, so its AUC is undefined and in no mean."""
    images, rng, rows = tmp_path / "all" / "train", np.random.default_rng(0), []
    images.mkdir(parents=True)
    for k in range(90):
        pixels, (a, b) = rng.integers(0, 80, (16, 16)), rng.integers(0, 2, 2)
        pixels[:8, :8] += 120 * a
        pixels[8:, :8] += 120 * b
        name, owner = f"{k:03}.png", "pqr"[k % 3]
        Image.fromarray(pixels.astype(np.uint8)).save(images / name)
        rows.append([name, owner, *(("0", "0") if owner == "r" else (a, b if k % 7 else ""))])
    write_labels(images, ["file", "site", "a", "b"], rows)
    common = {"clients": 3, "rounds": 2, "models": ["cnn2", "mlp", "cnn3"]}
    common |= {"data.task": "multi-label", "data.target": "a,b"}
    tree = {"dataset": f"imagefolder:{tmp_path / 'all'}", "by": "site", "max_samples": 0}
    simulated = small("fml", **common, **tree)
    folders = [tmp_path / "sites" / str(k) for k in range(3)]
    for k, folder in enumerate(folders):
        for part, index in zip(
            ("train", "test"), RunData.for_run(simulated.run).split_rows(k)[:2], strict=True
        ):
            (folder / part).mkdir(parents=True)
            for row in index:
                shutil.copy(images / rows[row][0], folder / part)
            chosen = [[rows[row][0], *rows[row][2:]] for row in index]
            write_labels(folder / part, ["file", "a", "b"], chosen)
    config, form = small("fml", **common), "imagefolder"
    summary = deployed_with_schema(simulated, folders, config, tmp_path, "image", form)
    expected = run(simulated, tmp_path / "simulated")
    assert summary["metrics"] == expected["metrics"]
    assert summary["metrics"]["macro-auc"]["personal"]["private"]["clients"] == 2


def write_labels(folder, header, rows):
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sites_predict_numbers_as_in_a_simulation(tmp_path):
    """Three hospitals with a model each learn quantiles of a stay, standardized by the schema."""
    write_example("regression", tmp_path / "stay")
    everyone = tmp_path / "stay" / "train.csv"
    table = {"dataset": f"table:{everyone}", "target": "days", "by": "site", "max_samples": 0}
    common = {"clients": 3, "rounds": 3, "models": ["mlp", "mlp2", "mlp3"]}
    common |= {"data.task": "regression", "early-stopping": 3, "keep-best": True}
    common["data.loss"] = "quantile"
    simulated = small("fml", **common, **table)
    summary, folders = deployed_with_tables(simulated, everyone, small("fml", **common), tmp_path)
    alone = run(simulated, tmp_path / "simulated")
    assert (summary["metric"], summary["accuracy"]) == ("rmse", {})
    assert summary["metrics"] == alone["metrics"]
    assert [each["metrics"] for each in summary["history"]] == [
        each["metrics"] for each in alone["history"]
    ]
    # A site predicts days with its model, which stays at the site.
    for k, folder in enumerate(folders):
        state = tmp_path / "deployment" / "state" / f"site-{k}"
        predicted = []
        for directory in (state, tmp_path / "simulated"):
            client = open_client(directory, f"client-{k}")
            _, x = read_inputs([folder / "test.csv"], client.record)
            predicted.append(client.predict(x).quantiles)
        np.testing.assert_array_equal(*predicted)
        with (folder / "test.csv").open(encoding="utf-8", newline="") as file:
            days = np.array([[float(row["days"])] for row in csv.DictReader(file)])
        error = float(np.sqrt(((predicted[0][..., 1] - days) ** 2).mean()))
        scores = summary["metrics"]["rmse"]["personal"]["private"]["per_client"]
        assert scores[f"client-{k}"] == pytest.approx(error, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("encoding", ["int8", "top-k"])
def test_three_sites_with_encodings_give_the_metrics_of_a_simulation(encoding, tmp_path):
    """A new process handles each message, and finds the weights from earlier messages on disk."""
    config = small(
        "felo",
        clients=3,
        models=MODELS,
        rounds=3,
        join_timeout=300.0,
        **{"wire.encoding": encoding},
    )
    with LocalDeployment(tmp_path / "deployment", nodes=3) as deployment:
        summary, said = to_the_end(deployment, config, tmp_path / "deployed")
    assert not any("left out" in line or "dropped" in line for line in said)
    assert without_times(summary) == without_times(run(config, tmp_path / "simulated"))
    received = sorted((tmp_path / "deployment" / "state").glob("site-*/*/client-*/received/*"))
    assert len(received) == 9  # of three sites the last three


def site_folders(everyone, config, root):
    """Write each client's rows to a site directory, and return the directories."""
    head, *rows = csv.reader(everyone.open(encoding="utf-8", newline=""))
    kept = head[:2] if head[1] == "label" else head
    found = []
    for k in range(config.run.clients):
        folder = root / f"{k}"
        folder.mkdir(parents=True)
        (folder / "classes.txt").write_text("\n".join(sorted({row[1] for row in rows})))
        train, test, validation = RunData.for_run(config.run).split_rows(k)
        # A site holds out its validation samples itself.
        own = np.sort(np.concatenate([train, validation])), test
        for part, places in zip(("train", "test"), own, strict=True):
            with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
                written = csv.writer(file)
                written.writerow(kept)
                written.writerows(rows[place][: len(kept)] for place in places)
        found.append(folder)
    return found


def check_wire(heard):
    """Check that connections use TLS with the installed Flower's protocol."""
    hellos = [first for first in heard if first]
    assert len(hellos) >= 3
    for hello in hellos:
        assert hello[:2] == b"\x16\x03", "a TLS handshake"
        assert (b"\x02h2" if TRANSPORT == GRPC else b"\x08http/1.1") in hello, "ALPN"


def check_state(root, summary):
    """Check that every site keeps its own state in its own directory."""
    kept = {path.parent.name: path.parents[2].name for path in root.rglob("round-*.safetensors")}
    assert kept == {f"client-{k}": f"site-{k}" for k in range(3)}
    assert set(kept) == set(summary["models"])


def refusals(deployment, folder):
    """Start nodes that must be rejected, and return the reason in the log of each node."""
    certs.make_node_key(folder / "stranger")
    certs.make(folder / "other", [], [], days=1)
    address = f"127.0.0.1:{deployment.fleet_port}"
    strange = {"auth-supernode-private-key": folder / "stranger"}
    give_up = {"max-retries": 1}
    deployment.certs.joinpath(certs.NODES, "site-7").write_bytes((folder / "stranger").read_bytes())
    for name, options in {
        "site-7": give_up | strange,
        "site-8": give_up
        | strange
        | {"root-certificates": folder / "other" / certs.CA_CERTIFICATE},
        "site-9": give_up
        | {"insecure": "", "root-certificates": None, "auth-supernode-private-key": None},
    }.items():
        deployment.start_node(int(name[-1]), superlink=address, **options)
    return {
        "site-7": "[code: 2004] Failed to activate SuperNode",
        "site-8": "CERTIFICATE_VERIFY_FAILED",
        "site-9": "Socket closed" if TRANSPORT == GRPC else "Server disconnected without",
    }


def ended(deployment, name):
    """Return a node's log after its process has ended."""
    process = deployment.processes[name]
    return deployment.log_of(name) if process.poll() is not None else ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sites_with_adapters_give_the_metrics_of_a_simulation(tmp_path, monkeypatch):
    """Each site has the base model on disk; only adapters and heads are sent and saved."""
    monkeypatch.setenv("FEDHET_ENCODERS", str(make_bases(tmp_path / "bases")))
    pool = [f"encoder-1-lora{rank}:vit" for rank in (2, 4, 8)]
    config = small("fedlora", clients=3, models=pool, rounds=3, join_timeout=300.0)
    with LocalDeployment(tmp_path / "deployment", nodes=3) as deployment:
        summary, said = to_the_end(deployment, config, tmp_path / "deployed")
    assert not any("left out" in line or "dropped" in line for line in said)
    assert summary["models"] == {f"client-{k}": name for k, name in enumerate(pool)}
    assert without_times(summary) == without_times(run(config, tmp_path / "simulated"))
    for kept in (tmp_path / "deployment" / "state", tmp_path / "deployed" / "checkpoints"):
        files = [*kept.rglob("*.safetensors")]
        names = {name for path in files for name in safe_open(path, "np").keys()}  # noqa: SIM118
        parts = {re.split("[./]", name)[-2] for name in names}
        assert {"lora_A", "lora_B", "classifier"} <= parts
        assert "layers" in str(names)
        assert not parts & {"q_proj", "v_proj", "k_proj", "o_proj", "dense", "projection"}, names
