"""Models of the server after a run: predictions, exports, and scores from a checkpoint alone."""

import json
import shutil

import numpy as np
import pytest
import torch
from federation import fast, run, small, without_figures
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from sklearn.datasets import load_digits

import fedhet
from fedhet.base.errors import DataError, SettingsError, StateError
from fedhet.client_runtime.state import ClientState
from fedhet.inference.client import open_models, open_server, samples_for
from fedhet.models import build

SCALED = (load_digits().images[:7] / 8 - 1)[:, None].astype(np.float32)
PUBLIC = {"data.public-fraction": 0.1}
RUNS = {
    "fedavg": {"models": "cnn2"},
    "fedtype": {"models": ["mlp", "cnn2"]},
    "felo": {"models": ["mlp", "cnn2"]},
    "fedgems": {"models": ["mlp", "cnn2"], **PUBLIC},
    "fml": {"models": ["mlp", "cnn2"]},
    "fedlora": {"models": "cnn2"},
    "heterofl": {"models": "mlp", "heterofl.levels": ["a", "b"]},
}
"""Runs whose server stores complete models."""
OTHERS = {
    "ditto": {"models": "mlp"},
    "fedprox": {"models": "mlp"},
    "moon": {"models": "mlp"},
    "scaffold": {"models": "mlp"},
    "pfedme": {"models": "mlp"},
    "pfedbayes": {"models": "mlp"},
    "fedkd": {"models": ["mlp", "cnn2"]},
    "velo": {"models": ["mlp", "cnn2"]},
    "feddf": {"models": ["mlp", "cnn2"], **PUBLIC},
    "ds-fl": {"models": ["mlp", "cnn2"], **PUBLIC},
    "central": {"models": "mlp"},
}


def trained(method, directory, **changes):
    config = small(method, clients=3, rounds=2, **fast(method), **changes)
    with without_figures():
        return directory, run(config, directory)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that trains each method once."""
    done = {}

    def of(method):
        if method not in done:
            path = tmp_path_factory.mktemp("server") / method
            done[method] = trained(method, path, **(RUNS | OTHERS)[method])
        return done[method]

    return of


def choices(directory):
    """Yield each kind and architecture of a server's models."""
    kinds = open_server(directory).kinds
    for kind in kinds:
        for name in architectures(directory, kind):
            yield kind, name


def architectures(directory, kind):
    try:
        return [open_server(directory).architecture(kind)]
    except StateError as error:
        listed = str(error).partition("must be one of ")[2].partition(", got")[0]
        return listed.split(", ")


def logits_by_hand(weights, x):
    """The network mlp in numpy: matrices and ReLUs."""
    layers = sorted({name.rpartition(".")[0] for name in weights})
    h = x.reshape(len(x), -1).astype(np.float64)
    for layer in sorted(layers, key=lambda name: ("classifier" in name, name)):
        h = h @ weights[f"{layer}.weight"].T.astype(np.float64) + weights[f"{layer}.bias"]
        h = h if "classifier" in layer else np.maximum(h, 0)
    return h


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


@pytest.mark.parametrize("method", [*RUNS, *SLOW])
def test_server_model_scores_as_the_run_recorded(runs, method):
    directory, summary = runs(method)
    scores = summary["accuracy"]["common"]
    found = list(choices(directory))
    assert found
    for kind, name in found:
        accuracy = open_server(directory, architecture=name).accuracy(kind)
        recorded = scores[kind]["per_client"]
        alike = [recorded.get(c) for c, model in summary["models"].items() if model == name]
        values = alike if any(alike) and kind != "server" else list(recorded.values())
        assert accuracy == {"common": values[0]}
        assert len(set(values)) == 1


@pytest.mark.parametrize("method", [*RUNS, *SLOW])
def test_client_evaluates_the_models_that_it_received(runs, method):
    directory, summary = runs(method)
    result = fedhet.load(directory)
    name = "client-0"
    kinds = set(summary["accuracy"]["common"]) - {"private", "proxy"}
    kinds = {kind for kind in kinds if name in summary["accuracy"]["common"][kind]["per_client"]}
    assert kinds <= set(result.kinds(name))
    for kind in kinds:
        measured = open_models(directory, name).accuracy(kind)
        for protocol, value in measured.items():
            assert value == summary["accuracy"][protocol][kind]["per_client"][name]


@pytest.mark.parametrize("method", RUNS)
def test_exported_server_model_predicts_in_plain_pytorch(runs, method, tmp_path):
    directory, _ = runs(method)
    kind, name = next(choices(directory))
    result = fedhet.load(directory)
    wanted = result.predict("server", SCALED, kind, name).probabilities
    card = result.export("server", tmp_path / "m.pt2", kind=kind, architecture=name)
    program = torch.export.load(tmp_path / "m.pt2").module()
    levels = torch.from_numpy((load_digits().images[:7] * 255 / 16).round().astype(np.uint8))
    given = json.loads(card.read_text())
    inputs = {"uint8": levels[:, None], "float32": torch.from_numpy(SCALED)}[given["input"]["type"]]
    with torch.no_grad():
        found = program(inputs).numpy()
    expected = result.predict("server", inputs, kind, name).probabilities
    assert np.allclose(found, expected, atol=1e-6)
    assert (given["client"], given["kind"], given["model"]) == ("server", kind, name)
    assert given["round"] == 2
    assert given["accuracy"] == open_server(directory, architecture=name).accuracy(kind)

    result.export("server", tmp_path / "m.safetensors", kind=kind, architecture=name)
    weights = load_tensors(tmp_path / "m.safetensors")
    module = build(name, (1, 8, 8), 10, seed=9, kind="image", feature_dim=given["features"])
    module.load_state_dict(weights)
    with torch.no_grad():
        found = module.eval()(torch.from_numpy(SCALED)).softmax(1).numpy()
    assert np.allclose(found, wanted, atol=1e-6)


def test_averaged_model_is_the_checkpoint_in_numpy(runs):
    """The directory of the run suffices: there are no client states and no data."""
    directory, _ = runs("fedprox")
    saved = load_file(max((directory / "checkpoints").glob("round-*.safetensors")))
    weights = {n.removeprefix("weights/"): v for n, v in saved.items() if n.startswith("weights/")}
    wanted = logits_by_hand(weights, SCALED)
    with torch.no_grad():
        found = fedhet.load(directory).model("server")(torch.from_numpy(SCALED)).numpy()
    assert np.allclose(found, wanted, atol=1e-5)


def test_checkpoint_suffices(runs, tmp_path, monkeypatch):
    directory, _ = runs("felo")
    before = fedhet.load(directory).predict("server", SCALED, architecture="mlp")
    shutil.copytree(directory, tmp_path / "run", ignore=shutil.ignore_patterns("state"))
    monkeypatch.setattr("fedhet.data.store.load", lambda *_, **__: pytest.fail("data was read"))
    after = open_server(tmp_path / "run", architecture="mlp")
    found = after.predict(samples_for(after.record, SCALED))
    assert (found.probabilities == before.probabilities).all()
    assert found.classes == tuple(map(str, range(10)))


def test_heterofl_offers_the_full_model_and_each_width(runs):
    directory, _ = runs("heterofl")
    assert sorted(choices(directory)) == [
        ("global", "mlp"), ("global", "mlp-x0.5"), ("server", "mlp"),
    ]  # fmt: skip
    result = fedhet.load(directory)
    assert len(result.model("server").classifier.weight[0]) > len(
        result.model("server", "global", "mlp-x0.5").classifier.weight[0]
    )


def test_ambiguous_or_unknown_model_raises_with_the_choices(runs):
    directory, _ = runs("felo")
    result = fedhet.load(directory)
    with pytest.raises(StateError, match=r"architecture .*cnn2, mlp.*none"):
        result.model("server")
    with pytest.raises(StateError, match=r"architecture .*cnn2, mlp.*'mpl'"):
        result.model("server", architecture="mpl")
    with pytest.raises(StateError, match=r"global.*'privat'"):
        result.model("server", "privat", "mlp")
    with pytest.raises(SettingsError, match=r"^architecture: .*'mlp'"):
        result.model("client-0", architecture="mlp")


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("fedper", "stores only .* of the .* tensors of model mlp. The other tensors, such as "
         "classifier.bias, stay on the clients. Use the kind 'global' of a client, such as client"),
        ("fedproto", "stores no model, but sends: .*prototype of each class. Use a model of a"),
        ("cofed", "stores no model, but sends: .*pseudolabel"),
        ("fedgkt", "maps features of a client's extractor. Use the kind 'server' of a client"),
        ("local", "the server of local stores no model. Use a model of a client, such as client-0"),
    ],
)  # fmt: skip
def test_server_without_a_complete_model_raises(tmp_path, method, says):
    changes = {"models": "mlp", **(PUBLIC if method == "cofed" else {})}
    directory, _ = trained(method, tmp_path / "run", **changes)
    with pytest.raises(StateError, match=says):
        fedhet.load(directory).model("server")


def test_pool_of_um_pfssl(tmp_path):
    directory, _ = trained("um-pfssl", tmp_path / "run")
    result = fedhet.load(directory)
    assert set(result.kinds("server")) == {f"pool/client-{k}" for k in range(3)}
    with pytest.raises(StateError, match=r"pool/client-0"):
        result.model("server")
    pooled = result.predict("server", SCALED, "pool/client-1").probabilities
    versions = sorted((directory / "pool").glob("*.safetensors"))
    known = dict(zip(("client-0", "client-1", "client-2"), range(3), strict=True))
    path = max(each for each in versions if each.name.startswith(f"{known['client-1']}-"))
    module = build(result.clients.model["client-1"], (1, 8, 8), 10, seed=3, kind="image")
    module.load_state_dict(load_tensors(path))
    with torch.no_grad():
        wanted = module.eval()(torch.from_numpy(SCALED)).softmax(1).numpy()
    assert np.allclose(pooled, wanted, atol=1e-6)


def test_batch_norms_of_heterofl_use_the_samples_of_a_client(tmp_path):
    directory, summary = trained("heterofl", tmp_path / "run", models="cnn2")
    with pytest.raises(StateError, match="num_batches_tracked"):
        fedhet.load(directory).model("server")
    for kind in ("global", "server"):
        recorded = summary["accuracy"]["common"][kind]["per_client"]["client-0"]
        assert open_models(directory, "client-0").accuracy(kind)["common"] == recorded


def test_best_round_and_a_resumed_run(tmp_path):
    """With keep-best, the checkpoint of the best round is kept; the newest is of the last round."""
    rates = {"training.lr": 0.2, "keep-best": True, "models": "mlp"}
    config = small("fedavg", clients=3, rounds=5, **rates)
    with without_figures():
        run(config, tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    means = [record["accuracy"]["common"]["global"]["mean"] for record in records]
    best = int(np.argmax(means)) + 1
    server = open_server(tmp_path / "run", best=True)
    assert server.round == best
    recorded = records[best - 1]["accuracy"]["common"]["global"]["per_client"]["client-0"]
    assert server.accuracy()["common"] == recorded
    assert open_server(tmp_path / "run").round == 5
    kept = {path.name for path in (tmp_path / "run/checkpoints").glob("round-*")}
    assert kept == {f"round-{number:06d}.safetensors" for number in {best, 4, 5}}


def test_best_round_without_keep_best_raises(tmp_path):
    directory, _ = trained("fedavg", tmp_path / "run", models="mlp")
    path = directory / "metrics.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    first["accuracy"]["common"]["global"]["mean"] = 1.0
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    (directory / "checkpoints" / "round-000001.safetensors").unlink()
    with pytest.raises(StateError, match="round 1"):
        open_server(directory, best=True)


def test_run_without_a_checkpoint_raises(tmp_path):
    directory, _ = trained("fedavg", tmp_path / "run", models="mlp")
    for path in (directory / "checkpoints").glob("round-*"):
        path.unlink()
    with pytest.raises(StateError, match="round"):
        open_server(directory)
    (directory / "checkpoints/server.json").write_text("{}")
    with pytest.raises(StateError, match="run: "):
        open_server(directory)
    with pytest.raises(StateError, match=r"server\.json"):
        open_server(tmp_path)


def test_clients_by_index(runs):
    directory, _ = runs("fedavg")
    result = fedhet.load(directory)
    wanted = result.predict("client-1", SCALED).probabilities
    assert (result.predict(1, SCALED).probabilities == wanted).all()
    with pytest.raises(SettingsError, match=r"0 to 2.*3"):
        result.predict(3, SCALED)
    for other in (None, 1.0, True):
        with pytest.raises(SettingsError, match="client-0"):
            result.predict(other, SCALED)


def test_unknown_test_set_raises(runs):
    directory, summary = runs("fedavg")
    result = fedhet.load(directory)
    personal = summary["accuracy"]["personal"]["private"]["per_client"]
    common = summary["accuracy"]["common"]["private"]["per_client"]
    total = 0
    for name in personal:
        x, y, classes = result.test(name)
        total += len(y)
        assert classes == tuple(map(str, range(10)))
        found = result.predict(name, x, kind="private").labels
        assert (found == y).mean() == pytest.approx(personal[name])
        x, y, _ = result.test()
        found = result.predict(name, x, kind="private").labels
        assert (found == y).mean() == pytest.approx(common[name])
        assert len(y) == summary["test_samples"]["common"]
    assert total == summary["test_samples"]["personal"]
    with pytest.raises(StateError, match=r"'client-7'.*client-0"):
        result.test("client-7")


def test_test_samples_of_sites_stay_at_the_sites(runs, tmp_path):
    directory, _ = runs("fedavg")
    shutil.copytree(directory, tmp_path / "run", ignore=shutil.ignore_patterns("state"))
    path = tmp_path / "run/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"own_data": True}))
    with pytest.raises(DataError, match="sites"):
        fedhet.load(tmp_path / "run").test("client-0")


def test_commands(runs, call, tmp_path):
    directory, _ = runs("felo")
    np.savez(tmp_path / "x.npz", x=SCALED)
    arguments = ("predict", directory, "server", tmp_path / "x.npz", "--csv")
    status, text, _ = call(*arguments, "--architecture", "cnn2")
    assert status == 0
    rows = [line.split(",") for line in text.strip().splitlines()[1:]]
    wanted = fedhet.load(directory).predict("server", SCALED, architecture="cnn2")
    assert [row[1] for row in rows] == wanted.names
    out = tmp_path / "m.pt2"  # The extension is the format.
    words = ("export", directory, "server", "--out", out, "--architecture", "cnn2")
    assert call(*words, "--kind", "global")[0] == 0
    assert json.loads((tmp_path / "m.pt2.json").read_text())["model"] == "cnn2"
    status, _, error = call(*arguments)
    assert status == 2
    assert "architecture must be one of cnn2, mlp, got none" in error
    assert len(error.strip().splitlines()) == 1


def counted(truth, predicted, classes=10):
    counts = np.zeros((classes, classes), int)
    for pair in zip(truth, predicted, strict=True):
        counts[pair] += 1
    return counts


@pytest.mark.parametrize("method", ["fedkd", "felo", "fedgems"])
def test_recorded_confusion_matrices_count_the_predictions_of_the_headline_models(runs, method):
    directory, summary = runs(method)
    result = fedhet.load(directory)
    x, y, _ = result.test()
    content = json.loads((directory / "confusion.json").read_text())
    kind = summary["headline_kinds"]["common"]
    assert (content["kind"], content["without"]) == (kind, [])
    assert content["classes"] == list(map(str, range(10)))
    scores = summary["accuracy"]["common"][kind]["per_client"]
    assert sorted(name for each in content["matrices"] for name in each["clients"]) == [*scores]
    right = samples = 0
    for each in content["matrices"]:
        names = each["clients"]
        if kind == "global":  # All clients of an architecture have the same model.
            names = names[:1]
        labels = [result.predict(name, x, kind=kind).labels for name in names]
        wanted = sum(counted(y, found) for found in labels)
        assert each["counts"] == wanted.tolist()
        assert each["samples"] == len(y) * len(names)
        accuracy = np.mean([scores[name] for name in names])
        assert np.trace(wanted) / each["samples"] == pytest.approx(accuracy, abs=1e-12)
        right, samples = right + np.trace(wanted), samples + each["samples"]
        frame = result.confusion(architecture=each["model"])
        assert frame.to_numpy().tolist() == wanted.tolist()
    total = result.confusion()
    assert (total.index.name, total.columns.name) == ("true class", "predicted class")
    assert (np.trace(total), total.to_numpy().sum()) == (right, samples)
    with pytest.raises(StateError, match=r"architecture .*'cnn9'"):
        result.confusion(architecture="cnn9")


def test_confusion_matrix_of_each_model(runs):
    directory, _ = runs("felo")
    result = fedhet.load(directory)
    for client, kind in (("client-0", "private"), ("client-0", ""), ("server", "global")):
        architecture = "cnn2" if client == "server" else ""
        x, y, classes = result.test()
        labels = result.predict(client, x, kind, architecture).labels
        frame = result.confusion(client, kind, architecture)
        assert frame.to_numpy().tolist() == counted(y, labels).tolist()
        assert tuple(frame.index) == tuple(frame.columns) == classes
    x, y, _ = result.test(1)
    labels = result.predict(1, x).labels
    frame = result.confusion(1, protocol="personal")
    assert frame.to_numpy().tolist() == counted(y, labels).tolist()
    with pytest.raises(SettingsError, match="'personal'"):
        result.confusion("server", architecture="cnn2", protocol="personal")


def test_damaged_or_outdated_confusion_matrix_is_excluded(tmp_path, monkeypatch):
    """A matrix is used only if it belongs to the recorded accuracy."""
    written = ClientState.write_confusion

    def write(state, counts):
        written(state, np.roll(counts, 1, axis=0) if state._client == "client-1" else counts)
        if state._client == "client-2":
            (state.folder / "confusion.npy").write_bytes(b"\x93NUMPY")

    monkeypatch.setattr(ClientState, "write_confusion", write)
    directory, _ = trained("local", tmp_path / "run", models="mlp")
    content = json.loads((directory / "confusion.json").read_text())
    assert content["without"] == ["client-1", "client-2"]
    assert content["matrices"][0]["clients"] == ["client-0"]


def test_default_model_of_a_client_is_the_headline_model(runs, call, tmp_path):
    np.savez(tmp_path / "x.npz", x=SCALED)
    for method, wanted in (("felo", "global"), ("fedkd", "private"), ("fedgems", "private")):
        directory, _ = runs(method)
        result = fedhet.load(directory)
        same = result.predict("client-0", SCALED, kind=wanted).probabilities
        assert (result.predict("client-0", SCALED).probabilities == same).all()
        status, text, error = call("predict", directory, "client-0", tmp_path / "x.npz")
        assert status == 0
        assert f"{wanted} model of client-0" in text
        assert ("the headline kind 'server'" in error) == (method == "fedgems")
        out = tmp_path / f"{method}.safetensors"
        assert call("export", directory, "client-0", "--out", out)[1].startswith(
            f"model: {out} ({wanted} model of client-0)"
        )
        assert json.loads((tmp_path / f"{out.name}.json").read_text())["kind"] == wanted


def test_command_for_confusion_matrices(runs, call):
    directory, _ = runs("felo")
    status, text, _ = call("confusion", directory, "client-0", "--csv")
    assert status == 0
    rows = [line.split(",") for line in text.strip().splitlines()]
    assert rows[0] == ["true", *map(str, range(10))]
    wanted = fedhet.load(directory).confusion("client-0")
    assert [list(map(int, row[1:])) for row in rows[1:]] == wanted.to_numpy().tolist()
    assert call("confusion", directory, "client-0")[1].startswith(
        f"global model of client-0: {np.trace(wanted)} of {wanted.to_numpy().sum()} correct"
    )
    status, text, _ = call("confusion", directory)
    assert status == 0
    assert text.startswith("global models of all clients: ")
    assert call("confusion", directory, "client-0", "--protocol", "own")[0] == 2
