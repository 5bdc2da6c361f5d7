"""The source `pfllib:DIR`: files as PFLlib and HtFLlib write them, and malicious pickles."""

import builtins
import contextlib
import io
import json
import os
import pickle
import pickletools
import re
import struct
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from fedhet.base.errors import DataError, SettingsError
from fedhet.data.sources import pfllib, read_source, sample_kind
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData

HEADER = b"{'descr': '|O', 'fortran_order': False, 'shape': (), }"
CLASSES = 3


def client(client: int, part: str, shape: tuple[int, ...] = (1, 28, 28)) -> dict:
    """Return the samples of a client, which differ from the samples of all other clients."""
    rows = 6 + client if part == "train" else 3
    rng = np.random.default_rng([client, len(part)])
    x = rng.uniform(-1, 1, (rows, *shape)).astype(np.float32)
    return {"x": x, "y": (np.arange(rows) + client) % CLASSES}


def federation(root: Path, clients: int = 2, data=client, config: object = None) -> DataSpec:
    """Write a federation with NumPy, as both libraries do, and return the settings to read it."""
    for part in ("train", "test"):
        (root / part).mkdir(parents=True, exist_ok=True)
        for k in range(clients):
            np.savez_compressed(root / part / f"{k}.npz", data=data(k, part))
    if config is None:
        statistic = [[[0, 3]] for _ in range(clients)]
        config = {
            "num_clients": clients, "num_classes": CLASSES, "non_iid": True, "balance": False,
            "partition": "dir", "Size of samples for labels in clients": statistic,
            "alpha": 0.1, "batch_size": 10,
        }  # fmt: skip
    (root / "config.json").write_text(json.dumps(config))
    return DataSpec(dataset=f"pfllib:{root}", clients=clients)


def write_pickle(path: Path, content: bytes, stated: int | None = None) -> Path:
    """Write an .npz file with the given pickle as the 0-dimensional array `data`."""
    header = HEADER.ljust(117) + b"\n"
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", member)
    if stated is not None:  # The central directory is at the end, and states the size.
        raw = path.read_bytes()
        size = struct.pack("<I", len(member))
        assert raw.count(size) >= 2
        path.write_bytes(raw.replace(size, struct.pack("<I", stated)))
    return path


def array_pickle(data: object, protocol: int = 4) -> bytes:
    """Return the pickle that NumPy writes for a value in a 0-dimensional array."""
    return pickle.dumps(np.array(data, dtype=object), protocol=protocol)


def fault(spec: DataSpec) -> str:
    with pytest.raises(DataError) as caught:
        read_source(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_clients(spec: DataSpec, clients: int, data=client) -> None:
    """Compare each client's training and test samples with its files."""
    run = RunData(spec)
    for k in range(clients):
        client = run.client(k)
        for split, part in ((client.train, "train"), (client.test, "test")):
            expected = data(k, part)
            order = np.argsort(split.x.numpy().reshape(len(split), -1)[:, 0])
            wanted = np.argsort(np.asarray(expected["x"]).reshape(len(split), -1)[:, 0])
            assert_array_equal(split.x.numpy()[order], np.asarray(expected["x"])[wanted])
            assert_array_equal(split.y.numpy()[order], np.asarray(expected["y"])[wanted])
            assert split.x.dtype == torch.float32


def test_each_client_gets_its_own_files(tmp_path: Path) -> None:
    spec = federation(tmp_path, clients=3)
    dataset = read_source(spec)
    assert dataset.parts == ((6, 3), (7, 3), (8, 3))
    assert (dataset.format.kind, dataset.format.shape) == ("image", (1, 28, 28))
    assert dataset.format.classes == ("0", "1", "2")
    check_clients(spec, 3)


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
@pytest.mark.parametrize("protocol", [3, 4])
def test_pickles_of_both_numpy_versions_are_read(tmp_path: Path, module: str, protocol: int):
    spec = federation(tmp_path)
    content = array_pickle(client(0, "train"), protocol)
    here = np.array(0).__reduce__()[0].__module__
    if protocol == 3:
        content = content.replace(f"c{here}\n".encode(), f"c{module}\n".encode())
    else:  # The name is preceded by its length. Frames state their sizes, so remove them.
        old, new = (b"\x8c" + bytes([len(name)]) + name.encode() for name in (here, module))
        content = re.sub(rb"(?s)\x95.{6}\x00\x00", b"", content).replace(old, new)
    assert module.encode() in content
    pickle.loads(content)  # The changed pickle is valid.
    write_pickle(tmp_path / "train" / "0.npz", content)
    check_clients(spec, 2)


def test_lists_numbers_and_other_dtypes_are_read(tmp_path: Path) -> None:
    """Camelyon17 and iWildCam are stored as lists of arrays, with lists of numbers."""

    def lists(k: int, part: str) -> dict:
        data = client(k, part)
        y = [int(label) for label in data["y"]] if k else [*data["y"]]  # np.int64 is a `scalar`.
        return {"x": [np.asfortranarray(each.astype(">f8")) for each in data["x"]], "y": tuple(y)}

    check_clients(federation(tmp_path, data=lists), 2)


@pytest.mark.parametrize(
    ("shape", "kind", "stored"),
    [
        ((5,), "table", (5,)),
        ((9, 1, 16), "signal", (9, 16)),
        ((9, 16), "signal", (9, 16)),
        ((3, 8, 8), "image", (3, 8, 8)),
    ],
)
def test_kind_follows_from_the_shape(tmp_path: Path, shape, kind, stored) -> None:
    spec = federation(tmp_path, data=lambda k, part: client(k, part, shape))
    format = read_source(spec).format
    assert (format.kind, format.shape, sample_kind(spec).name) == (kind, stored, kind)
    one = DataSpec(dataset=spec.dataset, clients=2, sample_kind="image")
    if kind == "signal" and len(shape) == 2:
        assert read_source(one).format.shape == (1, 9, 16)


def test_images_of_bytes_remain_bytes(tmp_path: Path) -> None:
    def images(k: int, part: str) -> dict:
        data = client(k, part)
        return {**data, "x": (127 * (data["x"] + 1)).astype(np.uint8)}

    dataset = read_source(federation(tmp_path, data=images))
    assert dataset.format.stored == "bytes"
    assert_array_equal(dataset.train.x[:6].numpy(), images(0, "train")["x"])


def test_config_must_agree_with_the_files(tmp_path: Path) -> None:
    spec = federation(tmp_path, clients=2, config={"num_clients": 3, "num_classes": 3})
    assert f"{tmp_path / 'config.json'}: num_clients must be 2" in fault(spec)
    federation(tmp_path, config={"num_clients": 2, "num_classes": 2})
    assert "labels in y must be 0 to 1 (the run has 2 classes), got 2" in fault(spec)
    federation(tmp_path, config={"num_clients": 2, "num_classes": 5})
    assert read_source(spec).format.classes == ("0", "1", "2", "3", "4")
    for classes in (-1, 10**9, "ten", True):
        federation(tmp_path, config={"num_clients": 2, "num_classes": classes})
        assert "config.json: num_classes must be 1 to 65536" in fault(spec)
    federation(tmp_path, config=[1])
    assert "config.json: not a readable JSON file" in fault(spec)
    for config in ({"num_clients": 2}, None):  # PFLlib's Shakespeare has no config.json.
        federation(tmp_path, config=config or {})
        if config is None:
            (tmp_path / "config.json").unlink()
        assert read_source(spec).format.classes == ("0", "1", "2")


def test_missing_files_and_other_numbers_of_clients_raise(tmp_path: Path) -> None:
    spec = federation(tmp_path, clients=3)
    with pytest.raises(DataError, match="clients must be 3, the number of clients in pfllib:"):
        RunData(spec.replace(clients=2)).client(0)
    (tmp_path / "test" / "1.npz").unlink()
    assert f"{tmp_path / 'test' / '1.npz'}: file not found" in fault(spec)
    assert "no .npz files found" in fault(spec.replace(dataset=f"pfllib:{tmp_path / 'no'}"))
    federation(tmp_path, clients=3)
    with pytest.raises(SettingsError, match=r"data\.max-samples"):
        read_source(spec.replace(max_samples=4))


def test_other_sources_name_this_source_and_the_reverse(tmp_path: Path, call) -> None:
    federation(tmp_path / "a")
    for source in ("npz", "signal"):
        command = ["run", "local", "--dataset", f"{source}:{tmp_path / 'a'}", "--clients", "2"]
        status, _, error = call(*command, "--out", str(tmp_path / "run"))
        assert status != 0
        assert "array 'x' not found, got data. Use pfllib:DIR" in error
    (tmp_path / "b" / "train").mkdir(parents=True)
    (tmp_path / "b" / "test").mkdir()
    for part in ("train", "test"):
        np.savez(tmp_path / "b" / part / "0.npz", **client(0, part))
    message = fault(DataSpec(dataset=f"pfllib:{tmp_path / 'b'}", clients=1))
    assert "array 'data' not found, got x, y. Use npz:DIR" in message


class Call:
    """Object whose unpickling calls a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def numpy_call(name: str, *args: object) -> bytes:
    """Return a pickle that calls a function of NumPy with the given arguments."""
    module, _, function = name.rpartition(".")
    body = b"c" + f"{module}\n{function}\n".encode()
    return b"\x80\x03" + body + pickle.dumps(args, 2)[2:-1] + b"R."


ARRAY = client(0, "train")


def with_state(shape: object, form: np.ndarray, content: object) -> bytes:
    """Return a pickled dictionary whose `x` has the given shape, dtype, and content."""

    class Stored:
        def __reduce__(self):
            function, args, _ = np.zeros(1).__reduce__()
            return function, args, (1, shape, form.dtype, False, content)

    return array_pickle({"x": Stored(), "y": ARRAY["y"]})


def nested() -> np.ndarray:
    objects = np.empty(6, dtype=object)
    objects[:] = [[1, 2]] * 6
    return objects


def laughs() -> list:
    """Return a list of 10**30 numbers that fits into a small pickle."""
    value: list = [1] * 10
    for _ in range(29):
        value = [value] * 10
    return value


MALICIOUS = {
    "system": array_pickle({"x": Call(os.system, "touch PATH"), "y": [0]}),
    "eval": array_pickle({"x": Call(eval, "open('PATH', 'w')"), "y": [0]}),
    "exec": array_pickle(Call(exec, "open('PATH', 'w')")),
    "popen": array_pickle([Call(subprocess.Popen, ["touch", "PATH"])]),
    "getattr": array_pickle({"x": Call(getattr, "a", "upper"), "y": [0]}),
    "numpy-load": numpy_call("numpy.load", "PATH"),
    "numpy-fromfile": array_pickle({"x": Call(np.fromfile, "/etc/passwd"), "y": [0]}),
    "memmap": array_pickle({"x": Call(np.memmap, "PATH", "u1", "w+"), "y": [0]}),
    "dotted": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",
    "attribute": b"\x80\x04\x8c\x05numpy\x8c\x12dtype.__subclasses__\x93)R.",
    "nested": array_pickle({"x": nested(), "y": ARRAY["y"]}),
    "nested-scalar": array_pickle({"x": np.array({"x": 1}, dtype=object), "y": ARRAY["y"]}),
    "structured": array_pickle({"x": np.zeros(3, "f4,f4"), "y": [0]}),
    "words": array_pickle({"x": np.array(["a", "b"]), "y": [0]}),
    "text": array_pickle({"x": "abc", "y": [0]}),
    "huge-shape": with_state((2**40, 2**20), np.zeros(1, np.float32), b"1234"),
    "negative-shape": with_state((-1, -4), np.zeros(1, np.uint8), b"1234"),
    "float-shape": with_state((4.0,), np.zeros(1, np.uint8), b"1234"),
    "list-content": with_state((2,), np.zeros(1, np.float32), [1, 2]),
    "reconstruct": numpy_call(pfllib.np.array(0).__reduce__()[0].__module__ + "._reconstruct", 9),
    "huge-reconstruct": array_pickle(
        {"x": Call(np.array(0).__reduce__()[0], np.ndarray, (2**50,), b"b"), "y": [0]}
    ),
    "laughs": array_pickle({"x": laughs(), "y": [0]}),
    "set": array_pickle({"x": {1, 2}, "y": [0]}),
    "far-memo": b"\x80\x03]r\xff\xff\xff\x7f.",
    "far-memo-1": b"\x80\x03]" + b"q\x00" * 3 + b"r\xff\xff\xff\x00.",
    "long": array_pickle({"x": [2**80], "y": [0]}),
    "persistent": b"\x80\x03U\x04PATHQ.",
    "extension": b"\x80\x03\x82\x01.",
    "instance": b"(S'touch PATH'\nios\nsystem\n.",
    "object": b"\x80\x03(cos\nsystem\nX\x0a\x00\x00\x00touch PATHo.",
    "newobj": b"\x80\x03cnumpy\nndarray\nK\x01\x85\x81.",
    "build": b"\x80\x03cnumpy\ndtype\n}X\x08\x00\x00\x00__call__K\x01sb.",
    "no-dictionary": array_pickle([1, 2]),
    "no-y": array_pickle({"x": [1.0]}),
    "bytes-size": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"1234.",
    "truncated": array_pickle(ARRAY)[:-40],
    "empty": b"",
    "stack": b"\x80\x04R.",
    "mark": b"\x80\x04t.",
    "memo": b"\x80\x04h\x07.",
    "nothing": b"\x80\x04.",
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_malicious_pickles_are_refused(tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = federation(tmp_path)
    path = write_pickle(tmp_path / "train" / "0.npz", MALICIOUS[name])
    message = fault(spec)
    assert message.startswith(f"{path}: ")
    assert "pickled dictionary with x and y" in message or "not a readable .npz file" in message
    assert not Path("PATH").exists()


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("system", f"a reference to {os.system.__module__}.system"),
        ("eval", "a reference to builtins.eval"),
        ("numpy-fromfile", "fromfile"),
        ("nested", "an array of objects"),
        ("huge-shape", "does not match the size of the data"),
        ("laughs", "list instead of an array or a number"),
        ("far-memo", "stored objects"),
        ("long", "more than 64 bits"),
        ("set", "the operation EMPTY_SET"),
    ],
)
def test_refusals_name_the_reason(tmp_path: Path, name: str, named: str) -> None:
    spec = federation(tmp_path)
    write_pickle(tmp_path / "train" / "0.npz", MALICIOUS[name])
    assert named in fault(spec)


def test_malicious_pickles_would_run_code_in_pickle(tmp_path: Path, monkeypatch) -> None:
    """The test above can fail: an ordinary unpickler creates the file."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(MALICIOUS["eval"])
    assert Path("PATH").exists()


def test_no_name_is_imported_or_called(tmp_path: Path, monkeypatch) -> None:
    """Reading a valid file does not call NumPy's functions for unpickling either."""
    spec = federation(tmp_path)
    real = builtins.__import__

    def importing(name, *args, **kwargs):
        assert "multiarray" not in name
        return real(name, *args, **kwargs)

    content = array_pickle(ARRAY)
    monkeypatch.setattr(builtins, "__import__", importing)
    value = pfllib.read_pickle(content)
    assert isinstance(value, pfllib._Call)
    monkeypatch.undo()
    check_clients(spec, 2)


def test_random_damage_raises_only_data_errors(tmp_path: Path) -> None:
    spec = federation(tmp_path)
    content, rng = array_pickle({"x": ARRAY["x"][:, 0, :3, 0], "y": ARRAY["y"]}), np.random
    draws = rng.default_rng(0)
    for _ in range(300):
        damaged = bytearray(content)
        for place in draws.integers(0, len(content), 3):
            damaged[place] = draws.integers(0, 256)
        write_pickle(tmp_path / "train" / "0.npz", bytes(damaged))
        with contextlib.suppress(DataError):
            read_source(spec)


def test_max_bytes_holds_before_decompression(tmp_path: Path, monkeypatch) -> None:
    """A compressed file of zeros is refused from its index, without reading it."""
    spec = federation(tmp_path).replace(max_bytes=10**6)
    zeros = {"x": np.zeros((10, 1, 500, 500), np.float32), "y": np.zeros(10, int)}
    path = tmp_path / "train" / "0.npz"
    np.savez_compressed(path, data=zeros)
    assert path.stat().st_size < 10**5
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    assert f"{path}: expected at most data.max-bytes = 1000000 bytes" in fault(spec)


def test_false_sizes_do_not_exceed_the_limit(tmp_path: Path, monkeypatch) -> None:
    spec = federation(tmp_path).replace(max_bytes=10**6)
    bomb = b"\x80\x04\x8e" + struct.pack("<Q", 10**8) + b"\0" * 10**8 + b"."
    write_pickle(tmp_path / "train" / "0.npz", bomb, stated=10**4)
    sizes, real = [], pfllib.read_pickle
    monkeypatch.setattr(
        pfllib, "read_pickle", lambda content: (sizes.append(len(content)), real(content))[1]
    )
    assert "not a readable .npz file" in fault(spec)
    assert all(size <= 10**4 for size in sizes)


def test_max_bytes_holds_after_conversion_and_for_all_clients(tmp_path: Path) -> None:
    def halves(k: int, part: str) -> dict:
        data = client(k, part)
        return {**data, "x": data["x"].astype(np.float16)}

    spec = federation(tmp_path, data=halves)
    needed = 6 * 784 * 4  # in float32, twice the size of the file
    assert f"{tmp_path / 'train' / '0.npz'}: expected" in fault(spec.replace(max_bytes=needed - 1))
    total = sum(8 * len(d["y"]) + 4 * d["x"].size for k in (0, 1) for d in _both(halves, k))
    assert f"{tmp_path}: expected at most" in fault(spec.replace(max_bytes=total - 1))
    assert len(read_source(spec.replace(max_bytes=total)).train) == 19


def _both(data, k: int) -> list[dict]:
    return [data(k, part) for part in ("train", "test")]


def test_lists_of_the_same_array_hold_the_limit(tmp_path: Path) -> None:
    spec, image = federation(tmp_path).replace(max_bytes=10**7), np.zeros((1, 500, 500), np.float32)
    write_pickle(
        tmp_path / "train" / "0.npz", array_pickle({"x": [image] * 10**5, "y": [0] * 10**5})
    )
    assert "expected at most data.max-bytes = 10000000 bytes in memory, got 10" in fault(spec)


def test_pickles_with_many_operations_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pfllib, "MAX_OPERATIONS", 1000)
    spec = federation(tmp_path)
    write_pickle(tmp_path / "train" / "0.npz", b"\x80\x04" + b"}" * 1000 + b".")
    assert "more than 1,000 operations" in fault(spec)
    count = len([*pickletools.genops(io.BytesIO(array_pickle(ARRAY)))])
    assert count < 200  # files of the libraries are far below the limit


def test_tokens_are_refused(tmp_path: Path) -> None:
    def tokens(k: int, part: str) -> dict:
        return {"x": np.ones((6, 80), np.int64), "y": np.arange(6) % CLASSES}

    message = fault(federation(tmp_path, data=tokens))
    assert "x must be floats or uint8, got int64 [6, 80]" in message
    assert "shakespeare:DIR" in message
