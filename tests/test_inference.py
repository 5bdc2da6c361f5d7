"""Trained models after a run: predictions, exports, and model cards."""

import csv
import hashlib
import json
import os
import re
import shutil
import struct
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from federation import run, small, without_figures
from rounds import SPACES
from safetensors import safe_open
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from torch import nn

from fedhet.base.errors import DataError, FedhetError, ModelError, StateError
from fedhet.cli.example import write_example
from fedhet.cli.results import csv_text
from fedhet.client_runtime.node import read_node
from fedhet.inference.client import clients_in, open_client, read_inputs, samples_for
from fedhet.inference.export import FORMATS, Encoder, export
from fedhet.wire.knowledge import Envelope, Knowledge, encode

MLP, CNN, TREE = "client-0", "client-1", "client-2"
LEVELS = load_digits().images[:6]
SCALED = (LEVELS / 8 - 1)[:, None].astype(np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with clients that each know two of four classes."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    config = small("local", clients=3, models=["mlp", "cnn2", "sk-tree"], **SPACES)
    with without_figures():
        return directory, run(config, directory)


def newest_state(directory, client):
    return max((directory / "state").rglob(f"{client}/round-*.safetensors"))


def by_hand(weights, x, space):
    """The network mlp in numpy: matrices, ReLUs, and the softmax over own classes."""
    layers = sorted({n.rpartition(".")[0] for n in weights if n.startswith("private/")})
    h = x.reshape(len(x), -1).astype(np.float64)
    for layer in sorted(layers, key=lambda name: ("classifier" in name, name)):
        h = h @ weights[f"{layer}.weight"].T.astype(np.float64) + weights[f"{layer}.bias"]
        h = h if "classifier" in layer else np.maximum(h, 0)
    outside = [k for k in range(h.shape[1]) if k not in space]
    h[:, outside] = -np.inf
    odds = np.exp(h - h.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def test_predictions_equal_the_state_within_the_label_space(trained):
    directory, _ = trained
    client = open_client(directory, MLP)
    weights = load_file(newest_state(directory, MLP))
    found = client.predict(samples_for(client.record, SCALED))
    wanted = by_hand(weights, SCALED, client.record.space)
    assert len(client.record.space) == 2
    assert np.allclose(found.probabilities, wanted, atol=1e-6)
    assert (found.labels == wanted.argmax(1)).all()
    assert found.names == [["0+1", "2+3", "4+5", "6+7+8+9"][k] for k in found.labels]
    frame = found.to_frame()
    assert np.allclose(frame["probability"], wanted.max(1), atol=1e-6)


@pytest.mark.parametrize("client", [MLP, CNN, TREE])
def test_restored_model_scores_as_in_the_run(trained, client):
    directory, summary = trained
    measured = open_client(directory, client).accuracy()
    assert set(measured) == {"common", "personal"}
    for protocol, accuracy in measured.items():
        assert accuracy == summary["accuracy"][protocol]["private"]["per_client"][client]


def test_kinds_besides_the_private_model(tmp_path):
    config = small("fedtype", clients=2, rounds=1, models="mlp", **{"fedtype.proxy": "mlp2"})
    with without_figures():
        summary = run(config, tmp_path / "run")
    client = open_client(tmp_path / "run", "client-1")
    assert set(client.kinds) == {"private", "proxy", "ensemble", "global"}
    scores = summary["accuracy"]["common"]["proxy"]["per_client"]
    assert client.accuracy("proxy")["common"] == scores["client-1"]
    with pytest.raises(StateError, match=r"private, proxy, ensemble, global.*'proxi'"):
        client.model("proxi")


def test_network_predicts_without_data_and_run(trained, tmp_path, monkeypatch):
    """A site has only its own state directory."""
    directory, _ = trained
    before = open_client(directory, CNN).predict(torch.from_numpy(SCALED)).probabilities
    shutil.copytree(directory / "state", tmp_path / "state")
    monkeypatch.setattr(
        "fedhet.clients.base.load_samples", lambda *_: pytest.fail("the data was read")
    )
    (run_folder,) = (tmp_path / "state").iterdir()
    for folder in (tmp_path / "state", run_folder, run_folder / CNN):
        client = open_client(folder, CNN)
        assert (client.round, client.participations) == (2, 2)
        assert not client.model().training
        after = client.predict(torch.from_numpy(SCALED)).probabilities
        assert (after == before).all()


def test_without_the_data_a_tree_cannot_be_fitted_again_and_no_accuracy_measured(
    trained, tmp_path, monkeypatch
):
    directory, _ = trained

    def gone(*_):
        raise DataError("the data is gone")

    monkeypatch.setattr("fedhet.clients.base.load_samples", gone)
    with pytest.raises(DataError, match="gone"):
        open_client(directory, TREE)
    path = export(open_client(directory, MLP), "safetensors", tmp_path / "m.safetensors")
    card = json.loads(path.read_text())
    assert card["accuracy"] is None
    assert "unavailable" in card["accuracy_unknown"]


def test_state_without_a_record_loads(trained, tmp_path):
    directory, summary = trained
    copy = tmp_path / "run"
    shutil.copytree(directory, copy)
    for path in copy.rglob("client.json"):
        path.unlink()
    scores = summary["accuracy"]["common"]["private"]["per_client"]
    assert open_client(copy, CNN).accuracy()["common"] == scores[CNN]
    with pytest.raises(StateError, match="directory of the run"):
        open_client(copy / "state", CNN)


def with_storage(record, stored):
    """Return a record of samples with another storage format."""
    return record.model_copy(update={"format": replace(record.format, stored=stored)})


def test_record_contains_only_needed_values_and_is_private(trained):
    directory, _ = trained
    path = newest_state(directory, MLP).parent / "client.json"
    record = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    assert record["format"]["stored"] == "scaled"
    assert record["format"]["shape"] == [1, 8, 8]
    assert "out" not in record["settings"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "client.json: invalid client record"),
        ('{"run": 3}', "run: Input should be a valid string"),
        ("[]", "client.json: invalid client record"),
        ('{"model": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_damaged_record_raises(trained, tmp_path, content, says):
    directory, _ = trained
    shutil.copytree(directory, tmp_path / "run")
    path = newest_state(tmp_path / "run", MLP).parent / "client.json"
    path.write_text(content)
    with pytest.raises(StateError, match=says):
        open_client(tmp_path / "run", MLP)


def test_record_of_another_client_or_with_strange_classes_raises(trained, tmp_path):
    directory, _ = trained
    shutil.copytree(directory, tmp_path / "run")
    path = newest_state(tmp_path / "run", MLP).parent / "client.json"
    record = json.loads(path.read_text())
    for change, says in [({"client": CNN}, "expected client"), ({"space": [0, 9]}, "space")]:
        path.write_text(json.dumps({**record, **change}))
        with pytest.raises(StateError, match=says):
            open_client(tmp_path / "run", MLP)


def test_places_of_states(trained, tmp_path):
    directory, _ = trained
    assert clients_in(directory) == clients_in(directory / "state") == [MLP, CNN, TREE]
    with pytest.raises(StateError, match=r"'client-9'.*client-0, client-1, client-2"):
        open_client(directory, "client-9")
    with pytest.raises(StateError):
        open_client(tmp_path / "nowhere", MLP)
    with pytest.raises(StateError, match=str(directory)):
        open_client(directory.parent, MLP)
    with pytest.raises(StateError, match="directory"):
        open_client(tmp_path, MLP)
    (tmp_path / "run.json").write_text(json.dumps({"run": "felo-1"}))
    with pytest.raises(StateError, match="sites"):
        open_client(tmp_path, MLP)


def test_several_runs_in_one_state_folder(trained, tmp_path):
    directory, _ = trained
    (one,) = (directory / "state").iterdir()
    for name in (one.name, "local-other"):
        shutil.copytree(one, tmp_path / name)
    with pytest.raises(StateError, match=r"client-0.*local-other"):
        open_client(tmp_path, MLP)
    assert open_client(tmp_path / one.name, MLP).record.run == one.name
    with pytest.raises(StateError, match="'client-0'"):
        open_client(tmp_path / "local-other", MLP)


@pytest.fixture
def images(tmp_path):
    """Digits as image files in a directory tree."""
    for k, levels in enumerate(LEVELS):
        path = tmp_path / "images" / f"part-{k % 2}" / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(np.round(levels * 255 / 16).astype(np.uint8)).save(path)
    return tmp_path / "images"


def test_image_files_are_scaled_as_in_training(trained, images):
    record = open_client(trained[0], MLP).record
    names, x = read_inputs([images], record)
    order = [0, 2, 4, 1, 3, 5]  # folder by folder
    assert [name.rpartition("/")[2] for name in names] == [f"{k}.png" for k in order]
    pixels = np.round(LEVELS[order] * 255 / 16)[:, None]
    assert np.allclose(x.numpy(), pixels / 127.5 - 1, atol=1e-6)
    assert x.dtype == torch.float32


def test_other_sizes_are_refused_or_resized_and_colors_become_gray(trained, tmp_path):
    record = open_client(trained[0], MLP).record
    path = tmp_path / "red.png"
    PIL.Image.new("RGB", (20, 10), (255, 0, 0)).save(path)
    with pytest.raises(DataError, match=r"red\.png: .*8 x 8.*20 x 10.*--resize"):
        read_inputs([path], record)
    _, x = read_inputs([path], record, resize=True)
    assert x.shape == (1, 1, 8, 8)
    assert np.allclose(x.numpy(), 76 / 127.5 - 1)  # the luma of red, ITU-R 601


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (
            np.zeros((2, 1, 9, 8), np.uint8),
            r"model expects samples of shape \[1, 8, 8\], got \[1, 9, 8\]",
        ),
        (np.full((2, 8, 8), 16.0), "or floats scaled to .*, got 16"),
        (np.full((2, 8, 8), np.nan), "NaN"),
        (np.array(["a"]), "expected an array of numbers, got <U1"),
        (Path("new.csv"), "got object. Use `fedhet predict` to predict files"),
    ],
)
def test_ambiguous_arrays_raise(trained, x, says):
    record = open_client(trained[0], MLP).record
    with pytest.raises(DataError, match=says):
        samples_for(record, x)
    with pytest.raises(DataError, match="float32"):
        samples_for(with_storage(record, "given"), np.zeros((1, 8, 8), np.uint8))


def test_npz_files(trained, tmp_path):
    record = open_client(trained[0], MLP).record
    np.savez(tmp_path / "x.npz", x=SCALED)
    names, x = read_inputs([tmp_path / "x.npz"], record)
    assert names == ["0", "1", "2", "3", "4", "5"]
    assert (x.numpy() == SCALED).all()
    np.savez(tmp_path / "z.npz", z=SCALED)
    np.savez(tmp_path / "o.npz", x=np.array([object()]))
    (tmp_path / "t.npz").write_text("text")
    for name, fault in (
        ("z", "array 'x' not found"),
        ("o", "pickled"),
        ("t", "not a readable .npz"),
    ):
        with pytest.raises(DataError, match=f"{name}.npz: {fault}"):
            read_inputs([tmp_path / f"{name}.npz"], record)
    with pytest.raises(DataError):
        read_inputs([tmp_path / "none.npz"], record)
    names, x = read_inputs([tmp_path / "x.npz", tmp_path / "x.npz"], record)
    assert len(x) == len({*names}) * 2 == 12
    (tmp_path / "image.png").touch()
    for others in (tmp_path / "image.png", tmp_path):
        with pytest.raises(DataError, match="only with other"):
            read_inputs([tmp_path / "x.npz", others], record)
    with pytest.raises(DataError, match="memory"):
        read_inputs([tmp_path / "x.npz"] * 2, record, max_bytes=2 * SCALED.nbytes - 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        read_inputs([tmp_path / "empty"], record)


def with_member(path, header, content=b"", size=None):
    """Return an npz file whose x.npy has this header, and this size in the index."""
    text = header.encode().ljust(118) + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", 119) + text + content)
    if size is not None:
        packed = bytearray(path.read_bytes())
        entry = packed.rindex(b"PK\x01\x02")
        packed[entry + 24 : entry + 28] = struct.pack("<I", size)
        path.write_bytes(packed)
    return path


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (
            "{'descr': '|u1', 'fortran_order': False, 'shape': (9000, 1, 8, 8)}",
            "does not match the size of the data",
        ),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (2**44, 8, 8)}", "not a readable"),
        (
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 8, 8)}",
            "does not match the size of the data",
        ),
        ("{'descr': '<f4', 'shape'", "not a readable"),
        ("[" * 100, "not a readable"),
    ],
)
def test_false_header_raises(trained, tmp_path, header, says):
    record = open_client(trained[0], MLP).record
    with pytest.raises(DataError, match=says) as fault:
        read_inputs([with_member(tmp_path / "x.npz", header, b"\0" * 64)], record)
    assert "\n" not in str(fault.value)


def test_huge_header_raises_before_unpacking(trained, tmp_path):
    record = open_client(trained[0], MLP).record
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (60000000, 1, 8, 8)}"
    path = with_member(tmp_path / "x.npz", header, size=129 + 60_000_000 * 64)
    with pytest.raises(DataError, match="15360000000"):
        read_inputs([path], record)


def test_input_size_is_limited_for_every_run(trained, tmp_path):
    record = open_client(trained[0], MLP).record
    record.settings["data.max-bytes"] = 10**15
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros((100_000, 8, 8), np.uint8))
    with pytest.raises(DataError, match=r"x\.npz: .*25599999.*25600000"):
        read_inputs([path], record, max_bytes=4 * 100_000 * 64 - 1)
    assert len(read_inputs([path], record, max_bytes=4 * 100_000 * 64)[1]) == 100_000
    images = tmp_path / "images"
    images.mkdir()
    for k in range(3):
        PIL.Image.new("L", (8, 8)).save(images / f"{k}.png")
    with pytest.raises(DataError, match="768"):
        read_inputs([images], record, max_bytes=767)
    assert len(read_inputs([images], record, max_bytes=768)[1]) == 3


def test_damaged_files_pipes_and_deep_directories_raise(trained, tmp_path):
    record = open_client(trained[0], MLP).record
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random((50, 8, 8)))
    packed = bytearray(path.read_bytes())
    packed[400:420] = b"\xff" * 20
    path.write_bytes(packed)
    with pytest.raises(DataError, match=r"\.npz"):
        read_inputs([path], record)
    for name in ("x.png", "pipe.npz"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match=f"{name}: "):
            read_inputs([tmp_path / name], record)
    deep = tmp_path / "deep"
    (deep / Path(*["a"] * 65)).mkdir(parents=True)
    with pytest.raises(DataError, match="deep: "):
        read_inputs([deep], record)


def probabilities_of(form, path, x):
    """Return the exported program's output from the library that reads it, without fedhet."""
    if form == "pt2":
        with torch.no_grad():
            return torch.export.load(path).module()(torch.from_numpy(x)).numpy()
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], {"x": x})[0]


@pytest.mark.parametrize("form", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_exported_program_gives_the_predictions_in_batches_of_any_size(trained, tmp_path, form):
    if form == "onnx":
        pytest.importorskip("onnxscript")
    client = open_client(trained[0], CNN)
    card = json.loads(export(client, form, tmp_path / f"m.{form}").read_text())
    for count in (1, 6):
        x = SCALED[:count]
        found = probabilities_of(form, tmp_path / f"m.{form}", x)
        wanted = client.predict(torch.from_numpy(x)).probabilities
        assert np.allclose(found, wanted, atol=1e-5)
        outside = [k for k in range(4) if k not in client.record.space]
        assert (found[:, outside] == 0).all()
    assert card["input"]["type"] == "float32"
    assert card["label_space"] == [card["classes"][k] for k in client.record.space]


def test_file_for_bytes_scales_them_itself(trained, tmp_path):
    client = open_client(trained[0], MLP)
    pixels = np.round(LEVELS * 255 / 16).astype(np.uint8)[:, None]
    wanted = client.predict(samples_for(client.record, pixels)).probabilities
    object.__setattr__(client, "record", with_storage(client.record, "bytes"))
    card = json.loads(export(client, "pt2", tmp_path / "m.pt2").read_text())
    assert card["input"] == {
        "name": "x", "shape": ["N", 1, 8, 8], "type": "uint8", "scaling": "in the file",
        "axes": ["N", "channel", "row", "column"], "channels": ["gray"], "size": "8 x 8 pixels",
        "values": "pixels of scikit-learn's digits (0 to 16) times 255 / 16",
    }  # fmt: skip
    assert np.allclose(probabilities_of("pt2", tmp_path / "m.pt2", pixels), wanted, atol=1e-6)


PATIENTS = ["age", "sex", "admitted", "dose", "died"]


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """A run on a table of 60 patients, and rows with values unknown to its schema."""
    root = tmp_path_factory.mktemp("patients")
    rows = [
        [
            "" if k % 7 == 0 else str(20 + k), "fm"[k % 2], f"2024-01-{k % 28 + 1:02d}",
            f"{k / 8:g}", ("no", "yes")[k * 5 % 3 > 0],
        ]
        for k in range(60)
    ]  # fmt: skip
    new = [
        ["33", "m", "2024-02-01T12:00", "1e3"],
        ["", "f", "20240105", "-2.5"],
        ["NULL", "x", "2024-01-31T23:00:00-05:00", "0"],
        ["51.5", "NA", "", "NaN"],
    ]
    for name, content in (("all", [PATIENTS, *rows]), ("new", [PATIENTS[:4], *new])):
        with (root / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(content)
    config = small(
        "local", dataset=f"table:{root / 'all.csv'}", target="died", clients=2, rounds=1,
        models="mlp", max_samples=0, max_test_samples=0, min_samples=5, partition="iid",
    )  # fmt: skip
    with without_figures():
        run(config, root / "run")
    return root


def test_onnx_file_of_a_table_and_the_example_loader_suffice(
    patients, tmp_path, monkeypatch, capsys
):
    """The loader has only model.onnx and new.csv, without fedhet or the card's file."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    client = open_client(patients / "run", "client-0")
    export(client, "onnx", tmp_path / "model.onnx").unlink()
    shutil.copy(patients / "new.csv", tmp_path)
    loader = (Path(__file__).parents[1] / "examples" / "predict_onnx.py").read_text()
    assert not re.search("(import|from) fedhet", loader)
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    exec(loader, found)
    wanted = client.predict(read_inputs([patients / "new.csv"], client.record)[1])
    assert np.allclose(found["probabilities"], wanted.probabilities, atol=1e-6)
    assert len(np.unique(wanted.probabilities[:, 0])) == 4
    assert capsys.readouterr().out == f"sex: unknown category 'x'\n{wanted.names}\n"


def test_table_is_encoded_in_the_program_and_described_in_each_file(patients, tmp_path):
    """The features of each row are computed by hand from the training rows."""
    client = open_client(patients / "run", "client-0")
    with (patients / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ages = np.array([float(row["age"]) for row in rows if row["age"]])
    encoder = Encoder(client.record.format.schema)
    x = torch.tensor([[33, 1, 19_754.5, 1e3], [np.nan, -1, 19_754.5, 0]], dtype=torch.float64)
    features = encoder(x).numpy()
    age, gone, f, m = features[:, 0], features[:, 1], features[:, 2], features[:, 3]
    columns = json.loads(export(client, "safetensors", tmp_path / "m").read_text())["input"]
    stated = {column["name"]: column for column in columns["columns"]}
    assert age == pytest.approx([(33 - stated["age"]["mean"]) / stated["age"]["deviation"], 0])
    assert ages.min() < stated["age"]["mean"] < ages.max()
    assert (gone.tolist(), f.tolist(), m.tolist()) == ([0, 1], [0, 0], [1, 0])
    assert columns["shape"] == ["N", features.shape[1]]
    assert stated["sex"]["values"] == ["f", "m"]
    with safe_open(tmp_path / "m", "pt") as file:
        assert json.loads(file.metadata()["card"])["input"] == columns
    card = export(client, "pt2", tmp_path / "m.pt2").read_text()
    files = {"card.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=files).module()
    assert files["card.json"] == card
    assert json.loads(card)["input"]["shape"] == ["N", 4]
    wanted = client.predict(torch.from_numpy(features)).probabilities
    assert np.allclose(program(x).detach().numpy(), wanted, atol=1e-6)


def test_card_of_a_text_model_says_how_tokens_are_made(tmp_path):
    """A program for texts expects tokens, which the card describes."""
    (tmp_path / "all.csv").write_text(
        "text,label\n" + "".join(f"word{k} again,{'ab'[k % 2]}\n" for k in range(40))
    )
    config = small(
        "local", dataset=f"text:{tmp_path / 'all.csv'}", clients=2, rounds=1, models="text-bag",
        max_samples=0, max_test_samples=0, min_samples=5, partition="iid", max_tokens=6,
    )  # fmt: skip
    with without_figures():
        run(config, tmp_path / "run")
    client = open_client(tmp_path / "run", "client-0")
    described = json.loads(export(client, "pt2", tmp_path / "m.pt2").read_text())["input"]
    assert described["shape"] == ["N", 6]
    assert described["padding"] == 0
    digests = [hashlib.blake2b(word.encode(), digest_size=8).digest() for word in ("word3", ",")]
    tokens = [1 + int.from_bytes(d, "big") % (described["vocabulary"] - 1) for d in digests]
    x = np.array([[*tokens, 0, 0, 0, 0]])
    assert "BLAKE2b" in described["tokens"]
    wanted = client.predict(samples_for(client.record, ["Word3,"])).probabilities
    assert np.allclose(probabilities_of("pt2", tmp_path / "m.pt2", x), wanted, atol=1e-6)


def test_exported_weights_equal_the_state_and_the_card_has_scores(trained, tmp_path):
    directory, summary = trained
    path = tmp_path / "m.safetensors"
    card = json.loads(export(open_client(directory, MLP), "safetensors", path).read_text())
    state = load_file(newest_state(directory, MLP))
    weights = load_file(path)
    assert {f"private/{name}" for name in weights} == {n for n in state if "private/" in n}
    assert all((state[f"private/{name}"] == value).all() for name, value in weights.items())
    scores = summary["accuracy"]
    assert card["accuracy"] == {p: scores[p]["private"]["per_client"][MLP] for p in scores}
    assert card["input"]["scaling"].startswith("x / 127.5 - 1")
    assert (card["method"], card["model"], card["dataset"]) == ("local", "mlp", "digits")
    assert str(directory) not in json.dumps(card)


def test_model_without_weights_raises(trained, tmp_path):
    client = open_client(trained[0], TREE)
    found = client.predict(samples_for(client.record, SCALED))
    assert np.allclose(found.probabilities.sum(1), 1)
    assert set(found.labels) <= set(client.record.space)
    for form in FORMATS:
        with pytest.raises(ModelError, match=r"fedhet predict") as fault:
            export(client, form, tmp_path / "m")
        assert "\n" not in str(fault.value)
    assert not (tmp_path / "m").exists()


def test_missing_onnx_raises(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    client = open_client(trained[0], MLP)
    with pytest.raises(ModelError, match=r"fedhet\[onnx\]"):
        export(client, "onnx", tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_untraceable_model_raises(trained, tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :4] * float(x.sum() > 0)

    client = open_client(trained[0], MLP)
    client._client.models["private"] = Odd()
    with pytest.raises(FedhetError, match=r"'mlp'.*pt2") as fault:
        export(client, "pt2", tmp_path / "m.pt2")
    assert "\n" not in str(fault.value)


def test_csv_names_are_not_formulas():
    names = ["=HYPERLINK(1)", "@SUM(1)", "+cmd", "-x", "-1", "+2.5e3", "cat", "a=b"]
    expected = ["'=HYPERLINK(1)", "'@SUM(1)", "'+cmd", "'-x", "-1", "+2.5e3", "cat", "a=b"]
    assert [csv_text(name) for name in names] == expected


def test_commands(trained, images, call, tmp_path):
    directory, _ = trained
    status, out, _ = call("predict", directory, MLP, images)
    assert status == 0
    assert "images/part-0/0.png" in out.replace("\n", "")
    named = images / "\x1b[31mred.png"
    shutil.copy(images / "part-0" / "0.png", named)
    status, out, _ = call("predict", directory, TREE, named, "--csv")
    assert status == 0
    assert "\ufffd[31mred.png" in out
    assert "\x1b" not in out
    status, out, _ = call("predict", directory, TREE, images / "part-0" / "0.png", "--csv")
    head, row = out.strip().splitlines()
    assert head == "sample,class,probability,0+1,2+3,4+5,6+7+8+9"
    assert row.startswith(f"{images}/part-0/0.png,")
    path = tmp_path / "m.safetensors"
    words = ("export", directory, MLP, "--format", "safetensors", "--out", path)
    status, out, _ = call(*words)
    assert status == 0
    assert f"card: {path}.json" in out
    for words, says in [
        (("predict", directory, "client-7", images), "client 'client-7' not found"),
        (("predict", directory, MLP, images, "--kind", "proxy"), "got 'proxy'"),
        (
            ("export", directory, MLP, "--format", "pickle", "--out", path),
            "expected one of safetensors",
        ),
    ]:
        status, _, error = call(*words)
        assert status == 2
        assert says in error
        assert len(error.strip().splitlines()) == 1


def site_folder(root):
    """A site's images as bytes, with two of the run's three classes."""
    for part, count in (("train", 12), ("test", 4)):
        for label, name in enumerate(["cat", "dog"]):
            folder = root / part / name
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = np.full((8, 8), 40 + 150 * label + k, np.uint8)
                PIL.Image.fromarray(pixels).save(folder / f"{k}.png")
    (root / "classes.txt").write_text("cat\ncow\ndog\n")
    return root


def test_site_predicts_from_its_own_state_folder(tmp_path, monkeypatch, call):
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))
    folder = site_folder(tmp_path / "data")
    config = small("local", models="mlp", num_classes=3, lr=0.05, local_epochs=5)
    about = {
        "name": "site-a",
        "data": f"imagefolder:{folder}",
        "state-dir": str(tmp_path / "state"),
    }
    client = config.method.client(config, read_node(about, config.run))
    envelope = Envelope("local-1", "local", 1, "server")
    instruction = encode(envelope, Knowledge())
    _, _, metrics = client.fit(instruction, {})
    assert metrics["accuracy.personal.private"] == 1.0
    shutil.rmtree(folder / "train")  # nothing of the data is needed
    status, out, _ = call("predict", tmp_path / "state", "site-a", folder / "test", "--csv")
    rows = [line.split(",") for line in out.strip().splitlines()[1:]]
    assert status == 0
    assert len(rows) == 8
    assert all(f"/{row[1]}/" in row[0] for row in rows)  # each in the folder of its class
    assert all(float(row[4]) == 0 for row in rows), "cow is outside the site's label space"
    path = tmp_path / "m.pt2"
    assert call("export", tmp_path / "state", "site-a", "--format", "pt2", "--out", path)[0] == 0
    card = json.loads((tmp_path / "m.pt2.json").read_text())
    assert (card["dataset"], card["label_space"]) == ("local data of a site", ["cat", "dog"])
    assert card["input"]["type"] == "uint8"
    assert str(folder) not in json.dumps(card)
    found = probabilities_of("pt2", path, np.full((1, 1, 8, 8), 190, np.uint8))
    assert found.argmax() == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deployed_sites_predict_as_the_run_evaluated(tmp_path):
    from fedhet.config.resolve import resolve
    from fedhet.deployment.control import submit
    from fedhet.deployment.local import LocalDeployment

    config = small("felo", clients=2, rounds=1, join_timeout=300.0)
    with LocalDeployment(tmp_path / "deployment", nodes=2) as deployment:
        placed = resolve({**config.flat(), "out": str(tmp_path / "deployed")})
        submit(placed, deployment.connection, lambda line: None)
    summary = json.loads((tmp_path / "deployed" / "summary.json").read_text())
    with pytest.raises(StateError, match="sites"):
        open_client(tmp_path / "deployed", "client-0")
    for k in range(2):
        name = f"client-{k}"
        client = open_client(tmp_path / "deployment" / "state" / f"site-{k}", name)
        scores = summary["accuracy"]["common"]["private"]["per_client"]
        assert client.accuracy()["common"] == scores[name]


@pytest.mark.parametrize("kind", ["text", "signal"])
def test_predictions_of_texts_and_signals_equal_the_evaluation(kind, tmp_path, monkeypatch):
    """Predict the common test set from its files: sentences, and arrays."""
    folder, directory = tmp_path / "data", tmp_path / "run"
    write_example(kind, folder)
    models = "text-bag" if kind == "text" else "signal-cnn2"
    few = {"dataset": f"{kind}:{folder}", "models": models, "max_test_samples": 0, "lr": 0.01}
    summary = run(small("local", clients=2, **few), directory)
    if kind == "text":
        with (folder / "test.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        x, names = [row["text"] for row in rows], [row["label"] for row in rows]
    else:
        with np.load(folder / "test.npz") as file:
            x, names = file["x"], [str(label) for label in file["y"]]
    found = open_client(directory, "client-1")
    said = found.predict(samples_for(found.record, x))
    right = np.mean([said.classes[k] == name for k, name in zip(said.labels, names, strict=True)])
    common = summary["accuracy"]["common"]["private"]["per_client"]["client-1"]
    assert right == pytest.approx(common)
    with pytest.raises(DataError, match="expects"):
        samples_for(found.record, np.zeros((2, 5), np.float32))
    if kind == "text":
        for number, text in enumerate(x[:3]):
            (tmp_path / f"{number}.txt").write_text(text)
        names, read = read_inputs([tmp_path / f"{n}.txt" for n in range(3)], found.record)
        assert [Path(name).name for name in names] == ["0.txt", "1.txt", "2.txt"]
        assert torch.equal(read, samples_for(found.record, x[:3]))
        monkeypatch.chdir(tmp_path)
        assert torch.equal(read_inputs([Path("0.txt")], found.record)[1], read[:1])
        rows, read = read_inputs([folder / "test.csv"], found.record)
        assert rows[0] == "row 1"
        assert torch.equal(read, samples_for(found.record, x))
        size = sum((tmp_path / f"{n}.txt").stat().st_size for n in range(3))
        with pytest.raises(DataError, match="memory"):
            read_inputs([tmp_path / f"{n}.txt" for n in range(3)], found.record, max_bytes=size - 1)
