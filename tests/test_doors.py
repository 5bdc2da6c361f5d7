"""Files that a user provides: every function that opens such a file names it and its fault."""

import ast
import contextlib
import gzip
import io
import json
import os
import re
import threading
import zlib
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)
from safetensors.torch import save_file
from test_tabular import write_adult

from fedhet.base.disk import read_file
from fedhet.base.errors import FedhetError
from fedhet.config.sources import read_toml
from fedhet.data.declaration import DECLARATION, Declaration
from fedhet.data.rows import read_table
from fedhet.data.schemas import read_schema
from fedhet.data.site import read_class_names
from fedhet.data.spec import DataSpec
from fedhet.data.store import load
from fedhet.data.texts import VARIABLE, read_configuration, vocabulary_size
from fedhet.data.texts import _tokenizer as _tokenizer_of
from fedhet.deployment import certs, control
from fedhet.methods.registry import find_method
from fedhet.models.libraries import weight_files
from fedhet.models.user_model import import_user_model
from fedhet.privacy.ledger import read_ledger
from fedhet.runs import storage
from fedhet.server.pace import read_devices

pytestmark = pytest.mark.filterwarnings("ignore")
CSV = "size,color,kind\n" + "".join(f"{n % 7},red,{'ab'[n % 2]}\n" for n in range(60))
CARD = "configs:\n- config_name: default\n  data_files: train.parquet\n"
SCHEMA = 'target = "kind"\nclasses = ["a", "b"]\n[columns.size]\ntype = "number"\n'


def put(path, content):
    """Write text, bytes, or JSON to a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def reads(dataset, **settings):
    """Return a function that reads a dataset."""
    return lambda: load(DataSpec(dataset=str(dataset), clients=2, min_samples=1, **settings))


DOORS = {}
"""Function for each door, by name. It writes an intact file in a directory, and returns the path of
the file and a function that reads the file."""


def door(function):
    DOORS[function.__name__.removeprefix("_").replace("_", "-")] = function
    return function


# --- settings, keys, and certificates


@door
def _settings(root):
    path = put(root / "run.toml", 'method = "fedavg"\n# comment\nrounds = 3\n')
    return path, lambda: read_toml(path)


@door
def _schema(root):
    path = put(root / "schema.toml", SCHEMA)
    return path, lambda: read_schema(path)


@door
def _declaration(root):
    put(root / "train.npz", b"")
    path = put(root / DECLARATION, "num-classes = 2\nshape = [3]\nrows = 100\n")
    return path, lambda: Declaration.from_files(f"npz:{root}", 10**9)


@door
def _class_names(root):
    path = put(root / "classes.txt", "cat\ndog\n")
    return path, lambda: read_class_names(root, 2)


def _made(root, *arguments):
    certs.make(root, [], ["ann"], 10)
    return root


@door
def _certificate(root):
    path = _made(root) / certs.SERVER_CERTIFICATE
    return path, lambda: certs.renew(root, [], 10)


@door
def _authority(root):
    path = _made(root) / certs.CA_CERTIFICATE
    return path, lambda: certs.renew(root, [], 10)


@door
def _server_key(root):
    path = _made(root) / certs.SERVER_KEY
    return path, lambda: certs.read_server(root)


@door
def _authority_key(root):
    path = _made(root) / certs.CA_KEY
    return path, lambda: certs.renew(root, [], 10)


@door
def _node_key(root):
    path = _made(root) / certs.NODES / "ann.pub"
    return path, lambda: control._public_key(path)


@door
def _publisher_key(root):
    path = certs.make_publisher_key(root, "uni")[0]
    return path, lambda: certs.read_publisher_key(path)


@door
def _publishers(root):
    path = certs.make_publisher_key(root, "uni")[1]
    return path, lambda: certs.read_publishers(path)


@door
def _devices(root):
    path = put(root / "devices.csv", "client,sample-ms,mbit\nann,3,10\nbob,4,20\n")
    return path, lambda: read_devices(path)


# --- tables and texts


@door
def _csv(root):
    path = put(root / "all.csv", CSV)
    return path, reads(f"table:{path}", target="kind")


@door
def _packed_csv(root):
    path = put(root / "all.csv.gz", gzip.compress(CSV.encode()))
    return path, reads(f"table:{path}", target="kind")


@door
def _tsv(root):
    path = put(root / "all.tsv", CSV.replace(",", "\t"))
    return path, reads(f"table:{path}", target="kind")


@door
def _jsonl(root):
    rows = [json.dumps({"size": n % 7 + 0.5, "kind": "ab"[n % 2]}) for n in range(61)]
    path = put(root / "all.jsonl", "\n".join(rows))
    return path, reads(f"table:{path}", target="kind")


@door
def _parquet(root):
    import pandas as pd

    path = root / "all.parquet"
    sizes = [n % 7 + 0.5 for n in range(60)]
    pd.DataFrame({"size": sizes, "kind": ["a", "b"] * 30}).to_parquet(path)
    return path, reads(f"table:{path}", target="kind")


@door
def _train_table(root):
    path = put(root / "train.csv", CSV)
    return path, reads(f"table:{root}", target="kind")


@door
def _labels(root):
    for n in range(8):
        PIL.Image.new("L", (4, 4), n).save(root / f"{n}.png")
    rows = "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(8))
    path = put(root / "labels.csv", f"file,label\n{rows}")
    return path, reads(f"imagefolder:{root}")


@door
def _text_table(root):
    path = put(root / "all.csv", "text,label\n" + "a good day,1\na bad day,0\n" * 20)
    return path, reads(f"text:{path}")


@door
def _next_token(root):
    path = put(root / "all.txt", "the cat sat on the mat. " * 200)
    return path, reads(f"next-token:{path}", max_tokens=8, vocabulary=64)


@door
def _text_file(root):
    for label in "ab":
        for n in range(4):
            path = put(root / label / f"{n}.txt", f"text {n} of {label}")
    return path, reads(f"text:{root}")


# --- arrays and images


@door
def _npz(root):
    path = root / "train.npz"
    np.savez(path, x=np.ones((40, 3), np.float32), y=np.arange(40) % 2)
    return path, reads(f"npz:{root}")


@door
def _medmnist(root):
    path, x, y = root / "some.npz", np.zeros((6, 8, 8), np.uint8), np.arange(6)[:, None] % 2
    parts = ("train", "val", "test")
    np.savez(path, **{f"{p}_images": x for p in parts}, **{f"{p}_labels": y for p in parts})
    return path, reads(f"medmnist:{path}")


@door
def _image(root):
    for label in "ab":
        (root / label).mkdir()
        for n in range(4):
            path = root / label / f"{n}.png"
            PIL.Image.new("RGB", (4, 4), (n, 0, 0)).save(path)
    return path, reads(f"imagefolder:{root}")


# --- directories of the library datasets


@door
def _hub_csv(root):
    path = put(root / "train.csv", "text,label\n" + "a good day,1\na bad day,0\n" * 20)
    return path, reads(f"hf:{root}", sample_kind="text")


@door
def _hub_jsonl(root):
    rows = [json.dumps({"text": "a day", "label": n % 2}) for n in range(41)]
    path = put(root / "train.jsonl", "\n".join(rows))
    return path, reads(f"hf:{root}", sample_kind="text")


def _hub(root):
    from datasets import Dataset, Image

    images = [PIL.Image.new("L", (4, 4), n) for n in range(12)]
    rows = Dataset.from_dict({"image": images, "label": [n % 2 for n in range(12)]})
    return rows.cast_column("image", Image())


@door
def _hub_parquet(root):
    path = root / "train.parquet"
    _hub(root).to_parquet(path)
    return path, reads(f"hf:{root}")


@door
def _hub_card(root):
    _hub(root).to_parquet(root / "train.parquet")
    path = put(root / "README.md", f"---\nlicense: mit\n{CARD}---\n# Data\n")
    return path, reads(f"hf:{root}")


@door
def _hub_yaml(root):
    _hub(root).to_parquet(root / "train.parquet")
    path = put(root / ".huggingface.yaml", CARD)
    return path, reads(f"hf:{root}")


def _saved(root, name):
    from datasets import DatasetDict

    rows = _hub(root)
    DatasetDict({"train": rows, "test": rows.select(range(4))}).save_to_disk(root / "saved")
    (path,) = (root / "saved").glob(name)
    return path, reads(f"hf:{root / 'saved'}")


@door
def _saved_splits(root):
    return _saved(root, "dataset_dict.json")


@door
def _saved_state(root):
    return _saved(root, "train/state.json")


@door
def _saved_info(root):
    return _saved(root, "train/dataset_info.json")


@door
def _saved_rows(root):
    return _saved(root, "train/*.arrow")


# --- federations of other libraries


def _pfllib_root(root):
    for part in ("train", "test"):
        (root / part).mkdir(parents=True)
        for k in range(2):
            data = {"x": np.ones((6, 3), np.float32), "y": np.arange(6) % 2}
            np.savez_compressed(root / part / f"{k}.npz", data=data)
    put(root / "config.json", {"num_clients": 2, "num_classes": 2})
    return reads(f"pfllib:{root}")


@door
def _pfllib_data(root):
    read = _pfllib_root(root)
    return root / "train" / "1.npz", read


@door
def _pfllib_config(root):
    read = _pfllib_root(root)
    return root / "config.json", read


# --- published datasets


@door
def _leaf(root):
    users = {u: {"x": [[0.5] * 784] * 9, "y": [0, 1, 1] * 3} for u in "abc"}
    path = put(root / "train" / "all.json", {"user_data": users})
    return path, reads(f"femnist:{root}")


@door
def _har(root):
    names = [f"{w}_{a}" for w in ("body_acc", "body_gyro", "total_acc") for a in "xyz"]
    for name in names:
        put(root / "train" / "Inertial Signals" / f"{name}_train.txt", ("1.5 " * 128 + "\n") * 6)
    put(root / "train" / "subject_train.txt", "1\n1\n1\n2\n2\n2\n")
    put(root / "train" / "y_train.txt", "1\n2\n1\n2\n1\n2\n")
    return put(root / "activity_labels.txt", "1 WALKING\n2 SITTING\n"), reads(f"har:{root}")


@door
def _har_signals(root):
    _, read = _har(root)
    return root / "train" / "Inertial Signals" / "body_acc_x_train.txt", read


@door
def _wilds(root):
    rows = [f"{n % 2},{n % 3},train,{n}.jpg" for n in range(12)]
    for n in range(12):
        (root / "train").mkdir(exist_ok=True)
        PIL.Image.new("RGB", (4, 4)).save(root / "train" / f"{n}.jpg")
    path = put(root / "metadata.csv", "\n".join(["y,location_remapped,split,filename", *rows]))
    return path, reads(f"iwildcam:{root}")


@door
def _pamap2(root):
    table = np.ones((2400, 54))
    table[:, 1] += np.arange(2400) // 600 % 2  # activity
    path = root / "Protocol" / "subject101.dat"
    path.parent.mkdir()
    np.savetxt(path, table, "%.3f")
    return path, reads(f"pamap2:{root}")


@door
def _adult(root):
    dataset = write_adult(root)
    return root / "adult.data", reads(dataset)


@door
def _mnist(root):
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (6, 28, 28))
        put(raw / f"{part}-images-idx3-ubyte", header + bytes(6 * 28 * 28))
        put(raw / f"{part}-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 6]) + bytes([0, 1] * 3))
    return raw / "train-images-idx3-ubyte", reads("mnist", data_dir=str(root))


# --- encoders and weights


@door
def _configuration(root):
    path = put(root / "config.json", {"model_type": "bert"})
    return path, lambda: read_configuration(path)


@door
def _tokenizer(root):
    from tokenizers import Tokenizer, models

    path = root / "words-of" / "tokenizer.json"
    path.parent.mkdir()
    Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).save(str(path))
    os.environ[VARIABLE] = str(root)  # The fixture restores it.
    _tokenizer_of.cache_clear()
    return path, lambda: vocabulary_size(DataSpec(tokenizer="words-of"))


@door
def _weights(root):
    path = put(root / "model.safetensors", b"")
    save_file({"w": torch.zeros(4)}, path)
    return path, lambda: [path.read_bytes() for path in weight_files(str(root))]


# --- directories of runs and of private states


@door
def _state(root):
    path = root / "round-000001.safetensors"
    storage.save(path, {"w": torch.zeros(4)}, {"round": 1})
    return path, lambda: storage.load(path)


@door
def _privacy_ledger(root):
    line = {
        "at": "2026-11-24T08:30:00",
        "run": "r",
        "round": 1,
        "method": "fedavg",
        "client": "a",
        "data": "d",
        "noise": 1.0,
        "sampling": 0.1,
        "count": 3,
    }
    path = put(root / "a.jsonl", json.dumps(line) + "\n" + json.dumps(line) + "\n")
    return path, lambda: read_ledger(path)


# --- faults


def _around(content, extra):
    return content[: len(content) // 2] + extra + content[len(content) // 2 :]


def _replaced(make):
    def damage(path, content):
        path.unlink()
        make(path)

    return damage


TEXT_FAULTS = {
    "binary": lambda path, content: path.write_bytes(bytes(range(256)) * 8),
    "Latin-1": lambda path, content: path.write_bytes(_around(content, b"\xe9")),
    "UTF-16 without a mark": lambda path, content: path.write_bytes(
        content.decode().encode("utf-16-le")
    ),
    "a null character": lambda path, content: path.write_bytes(_around(content, b"\0")),
}
FAULTS = {
    "empty": lambda path, content: path.write_bytes(b""),
    "truncated": lambda path, content: path.write_bytes(content[: len(content) * 2 // 3 - 2]),
    "a directory": _replaced(lambda path: path.mkdir()),
    "a symlink to no file": _replaced(lambda path: path.symlink_to(path.with_name("absent"))),
    "a pipe": _replaced(lambda path: os.mkfifo(path, 0o600)),
    **TEXT_FAULTS,
}


@contextlib.contextmanager
def feeding(path):
    """Close the other end of a pipe whenever a reader opens it, so that a reader does not wait."""
    ended = False

    def feed():
        while not ended:
            os.close(os.open(path, os.O_WRONLY))

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended = True
        while thread.is_alive():
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            thread.join(0.01)


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    root = tmp_path / "files"
    root.mkdir()
    monkeypatch.setenv(VARIABLE, str(root))
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


SOUND = {
    ("settings", "empty"), ("settings", "truncated"), ("csv", "truncated"), ("tsv", "truncated"),
    ("train-table", "truncated"), ("next-token", "truncated"), ("text-file", "empty"),
    ("text-file", "truncated"), ("hub-card", "empty"), ("hub-card", "truncated"),
    ("hub-yaml", "empty"), ("pamap2", "truncated"),
    # Only the header of the weights is read here, and an incomplete line was never released.
    ("weights", "empty"), ("weights", "truncated"),
    ("privacy-ledger", "empty"), ("privacy-ledger", "truncated"),
}  # fmt: skip
"""Doors and faults that leave a valid file."""
BINARY = {
    "certificate", "authority", "server-key", "authority-key", "node-key", "publisher-key",
    "packed-csv", "parquet", "npz", "pfllib-data", "medmnist", "image", "hub-parquet", "hub-csv",
    "hub-jsonl", "saved-rows", "saved-splits", "saved-state", "saved-info", "mnist", "weights",
    "state", "privacy-ledger",
}  # fmt: skip
"""Doors whose files are not text, or text that a library or fedhet has written or decodes."""
FOUND_IN_DIRECTORY = {"hub-parquet", "hub-csv", "hub-jsonl", "mnist"}
"""Doors that search a directory for regular files, and name the directory if they find none."""


def refusal(read):
    """Return the message of the FedhetError, which must be one printable line, or ""."""
    try:
        read()
    except FedhetError as error:
        message = str(error)
    else:
        return ""
    assert message.isprintable()
    return message


@pytest.mark.parametrize("name", DOORS)
def test_intact_file_is_read(name, tmp_path):
    assert refusal(DOORS[name](tmp_path / "files")[1]) == ""


@pytest.mark.parametrize("name", DOORS)
def test_faulty_file_is_named(name, tmp_path):
    for fault, damage in FAULTS.items():
        if fault in TEXT_FAULTS and name in BINARY:
            continue
        root = tmp_path / "files" / fault.replace(" ", "-")
        root.mkdir()
        path, read = DOORS[name](root)
        damage(path, path.read_bytes())
        with feeding(path) if fault == "a pipe" else contextlib.nullcontext():
            message = refusal(read)
        case = f"{name}, {fault}: {message!r}"
        assert (message == "") == ((name, fault) in SOUND), case
        if not message:
            continue
        assert str(root if name in FOUND_IN_DIRECTORY else path.name) in message, case
        assert " at 0x" not in message, case
        assert "See https" not in message, case
        if fault == "a pipe" and name not in FOUND_IN_DIRECTORY | {"adult"}:
            assert "regular file" in message, case
        if fault in TEXT_FAULTS:
            assert "ave the file in UTF-8" in message, case


def bomb(side):
    """Return a small PNG file whose header states a large image."""
    image = io.BytesIO()
    PIL.Image.new("L", (1, 1)).save(image, "png")
    content = bytearray(image.getvalue())
    content[16:24] = side.to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


def encrypted(root):
    """Return a private key that needs a password."""
    key = ec.generate_private_key(ec.SECP256R1())
    kind = BestAvailableEncryption(b"secret")
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, kind)


CONTENTS = {
    "a duplicate key": ("settings", b"rounds = 1\nrounds = 2\n", "TOML: Cannot overwrite"),
    "a table as a list": ("schema", b"target = ['kind']\n", "target: Input should be"),
    "a key as a certificate": (
        "certificate", lambda root: (root / certs.SERVER_KEY).read_bytes(),
        "expected a certificate in PEM format, got a damaged or unsupported 'PRIVATE KEY'",
    ),
    "a certificate as a key": (
        "authority-key", lambda root: (root / certs.CA_CERTIFICATE).read_bytes(),
        "expected an unencrypted private key in PEM format, got .* 'CERTIFICATE'",
    ),
    "an encrypted key": (
        "authority-key", encrypted,
        "expected an unencrypted private key .* 'ENCRYPTED PRIVATE KEY'",
    ),
    "a YAML scalar": ("publishers", b"some text", "expected at least one publisher, got a str"),
    "a YAML list": ("hub-yaml", b"[1, [2]]", "expected a mapping, got a list"),
    "JSON without splits": ("saved-splits", b"[1]", "not a readable list of splits"),
    "JSON without files": ("saved-state", b'{"_data_files": 1}', "not a readable saved dataset"),
    "a JSON list as a description": ("saved-info", b"[]", "'list' object"),
    "a JSON list as a configuration": ("configuration", b"[]", "expected an object, got a list"),
    "a JSON list as a tokenizer": ("tokenizer", b"[]", "not a readable tokenizer"),
    "a JSON list as a dataset": ("leaf", b"[]", "not a readable LEAF file"),
    "an unknown CSV row": ("hub-csv", b"text,label\na,0\nb,1,2,3\n", "ParserError: .* line 3"),
    "incomplete JSON": ("hub-jsonl", b'{"text": "a", "label": 0}\n{"te', "ArrowInvalid: JSON"),
    "an unclosed quote": ("csv", b'size,color,kind\n1,"red,a\n2,red,b\n', "Expected 3 columns"),
    "a decompression bomb": ("image", bomb(60_000), "exceeds limit"),
}  # fmt: skip
"""Door, content in the right container, and pattern of the fault, by case."""


@pytest.mark.parametrize("case", CONTENTS)
def test_unsuitable_content_is_named(case, tmp_path):
    name, content, fault = CONTENTS[case]
    path, read = DOORS[name](tmp_path / "files")
    path.write_bytes(content if isinstance(content, bytes) else content(tmp_path / "files"))
    message = refusal(read)
    assert path.name in message
    assert re.search(fault, message), message


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    "name",
    ["settings", "schema", "class-names", "devices", "csv", "tsv", "jsonl", "labels", "text-table",
     "next-token", "har", "leaf", "wilds", "configuration", "publishers"],
)  # fmt: skip
def test_text_with_byte_order_mark_is_read(name, encoding, tmp_path):
    """Windows' editors and Excel write these files."""
    path, read = DOORS[name](tmp_path / "files")
    path.write_bytes(path.read_text("utf-8").encode(encoding))
    assert refusal(read) == ""


def test_table_in_utf_16_equals_the_table_in_utf_8(tmp_path):
    text = CSV.replace("red", "rot-grün")
    tables = [
        read_table(put(tmp_path / f"{encoding}.csv", text.encode(encoding)), DataSpec())
        for encoding in ("utf-8", "utf-16", "utf-32")
    ]
    for table in tables[1:]:
        assert {k: v.rows() for k, v in table.columns.items()} == {
            k: v.rows() for k, v in tables[0].columns.items()
        }


@pytest.mark.parametrize("place", ["data", "model", "method"])
def test_module_that_exits_is_an_error(place, tmp_path, monkeypatch):
    """A script that parses arguments, for example, ends the process when it is imported."""
    module = f"exits_at_import_{place}"
    put(tmp_path / f"{module}.py", "raise SystemExit(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    imports = {
        "data": lambda: load(DataSpec(dataset=f"python:{module}:data")),
        "model": lambda: import_user_model(f"{module}:build"),
        "method": lambda: find_method(f"{module}.x"),
    }
    assert module in refusal(imports[place])


def test_directory_is_closed_after_the_error(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(IsADirectoryError, match=tmp_path.name):
            read_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


# --- the list of doors

ROOT = Path(__file__).parent.parent
OPENERS = {
    "DatasetCard", "DictReader", "ParquetFile", "ZipFile", "create_default_context", "decode_text",
    "fetch_openml", "from_pretrained", "from_str", "fromfile", "genfromtxt", "import_module",
    "input_stream", "load", "load_breast_cancer", "load_dataset", "load_dataset_builder",
    "load_file", "load_from_disk", "load_npz", "loads", "loadtxt", "map_npy", "memmap",
    "memory_map", "open", "open_csv", "parse_json", "read_array", "read_bytes", "read_csv",
    "read_file", "read_json", "read_metadata", "read_npy", "read_parquet", "read_pem", "read_text",
    "read_toml_tables", "reader", "safe_load", "safe_open", "text_in",
}  # fmt: skip
"""Functions that open or parse a file."""


def calls_of_openers():
    """Return the module and the innermost function of each call of an opener in fedhet."""
    calls = set()

    def visit(module, node, owner):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                called = child.func
                name = getattr(called, "attr", getattr(called, "id", ""))
                if name in OPENERS:
                    calls.add((module, owner))
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            visit(module, child, child.name if is_function else owner)

    for path in sorted((ROOT / "fedhet").rglob("*.py")):
        if "_generated" not in path.parts:
            module = path.relative_to(ROOT / "fedhet").as_posix()
            visit(module, ast.parse(path.read_text("utf-8")), "")
    return calls


def listed_doors():
    """Return the modules and functions in CONTRIBUTING.md; a module alone stands for all of it."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition("\n## Doors\n")[2].partition("\n## ")[0]
    doors, module = set(), ""
    for name in re.findall(r"`([\w./]+)`", section):
        if name.endswith(".py"):
            module = name
            doors.add((module, ""))
        else:
            doors.discard((module, ""))
            doors.add((module, name))
    return doors


def test_every_door_is_listed():
    doors, calls = listed_doors(), calls_of_openers()
    unlisted = {(m, f) for m, f in calls if (m, f) not in doors and (m, "") not in doors}
    assert not unlisted, "add these functions to 'Doors' in CONTRIBUTING.md"
    assert {m for m, function in doors if not function} <= {m for m, _ in calls}
    for module, function in doors:
        defined = ast.walk(ast.parse((ROOT / "fedhet" / module).read_text("utf-8")))
        names = {each.name for each in defined if isinstance(each, ast.FunctionDef)}
        assert function in names | {""}, f"{module} has no function {function}"
