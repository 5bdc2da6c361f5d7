"""Datasets, partitions, the cache of decoded images, .npz files, and directories of sites."""

from __future__ import annotations

import hashlib
import random
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision.datasets
from pydantic import ValidationError

from fedhet.base.errors import DataError, FedhetError, SettingsError
from fedhet.base.seeding import derive, numpy_rng
from fedhet.config.resolve import check, resolve
from fedhet.data.partition import partition
from fedhet.data.site import site_data
from fedhet.data.sources import dataset_names, images
from fedhet.data.spec import DataSpec, stratified
from fedhet.data.store import RunData, load
from fedhet.learning.devices import scaled
from fedhet.settings.run import DataSettings
from fedhet.settings.schema import build
from fedhet.wire.identity import client_name

KINDS = get_args(DataSettings.model_fields["partition"].annotation)
PARTITIONS = tuple(kind for kind in KINDS if kind != "superclasses")
"""Those that assign every row; the other is tested in test_superclass.py."""

DIGITS = DataSpec(clients=8)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache the decoded images of a test in its own directory."""
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fault(spec: DataSpec) -> str:
    """Return the single line of the error that `validate` raises."""
    with pytest.raises(FedhetError) as caught:
        RunData(spec).validate()
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- partitions -----------------------------------------------------------------------------


def digest(parts: tuple[np.ndarray, ...]) -> str:
    return hashlib.sha256(b"".join(part.tobytes() + b"|" for part in parts)).hexdigest()


@pytest.mark.parametrize("kind", PARTITIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_partition_is_disjoint_and_covers_the_training_set(kind: str, seed: int) -> None:
    spec = DIGITS.replace(partition=kind, seed=seed)
    parts, rows = RunData(spec).partition(), len(load(spec).train)
    every = np.concatenate(parts)
    left_over = rows % (spec.clients * spec.shards) if kind == "shards" else 0
    assert len(parts) == spec.clients
    assert len(np.unique(every)) == len(every) == rows - left_over
    assert every.min() >= 0
    assert every.max() < rows
    assert min(map(len, parts)) >= spec.min_samples


def test_partitions_have_the_expected_skew() -> None:
    counts = {
        kind: np.array(list(RunData(DIGITS.replace(partition=kind)).label_counts().values()))
        for kind in PARTITIONS
    }
    assert (counts["iid"] > 0).all()
    assert (counts["classes"] > 0).sum(axis=1).tolist() == [2] * DIGITS.clients
    assert (counts["classes"] > 0).any(axis=0).all(), "every class is with somebody"
    assert (counts["shards"] > 0).sum(axis=1).max() <= 4
    assert counts["dirichlet"].std() > counts["iid"].std()


@pytest.mark.parametrize("kind", PARTITIONS)
def test_partition_depends_only_on_the_seed(kind: str) -> None:
    spec = DIGITS.replace(partition=kind)
    again, other = spec.replace(test_fraction=0.3), spec.replace(seed=1)
    np.random.seed(7)
    assert digest(RunData(spec).partition()) == digest(RunData(again).partition())
    assert digest(RunData(spec).partition()) != digest(RunData(other).partition())


@pytest.mark.parametrize(
    ("changes", "made_by"),
    [
        ({"partition": "iid"}, lambda flwr, seed: flwr.IidPartitioner(8)),
        ({}, lambda flwr, seed: flwr.DirichletPartitioner(8, "label", 0.5, 10, False, False, seed)),
        (  # its first draws give a client less than 35 samples
            {"alpha": 0.2, "min_samples": 35},
            lambda flwr, seed: flwr.DirichletPartitioner(8, "label", 0.2, 35, False, False, seed),
        ),
        (
            {"partition": "shards", "shards": 3},
            lambda flwr, seed: flwr.ShardPartitioner(8, "label", 3, shuffle=False, seed=seed),
        ),
        (
            {"partition": "classes", "classes_per_client": 3},
            lambda flwr, seed: flwr.PathologicalPartitioner(
                8, "label", 3, shuffle=False, seed=seed
            ),
        ),
    ],
    ids=["iid", "dirichlet", "dirichlet-again", "shards", "classes"],
)
def test_partitions_equal_flwr_datasets(changes, made_by) -> None:
    import datasets
    from flwr_datasets import partitioner as flwr

    labels = load(DIGITS).train.y.numpy()
    for seed in range(3):
        spec = DIGITS.replace(seed=seed, **changes)
        theirs: list[np.ndarray] = []
        for attempt in range(20):
            order = numpy_rng(seed, "partition", attempt, "order").permutation(len(labels))
            partitioner = made_by(flwr, derive(seed, "partition", attempt))
            partitioner.dataset = datasets.Dataset.from_dict(
                {"label": labels[order], "index": order}
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of draws that are repeated
                try:
                    parts = [partitioner.load_partition(k) for k in range(spec.clients)]
                except ValueError:
                    continue
            theirs = [np.sort(part.with_format("numpy")["index"][:]) for part in parts]
            held = np.unique(labels[np.concatenate(theirs)])
            if min(map(len, theirs)) >= spec.min_samples and len(held) == 10:
                break
        ours = partition(load(spec), spec)
        assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]


PROBE = """
import random, socket
import numpy as np
import torch
from tests.test_data import DIGITS, PARTITIONS, digest
from fedhet.data.store import RunData

def refuse(*_, **__):
    raise AssertionError("network")

socket.socket.connect = socket.getaddrinfo = refuse
random.seed(5); np.random.seed(5); torch.manual_seed(5)
before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
for kind in PARTITIONS:
    print(digest(RunData(DIGITS.replace(partition=kind)).partition()))
RunData(DIGITS).client(0)
after = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
assert before[0] == after[0], "random"
assert before[1] == after[1], "numpy"
assert torch.equal(before[2], after[2]), "torch"
"""


def test_fresh_process_draws_the_same_without_network_or_global_random_state() -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    here = [digest(RunData(DIGITS.replace(partition=kind)).partition()) for kind in PARTITIONS]
    assert done.stdout.split() == here


def test_partition_keeps_global_random_state_and_warnings() -> None:
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RunData(DIGITS.replace(alpha=0.06, clients=12, seed=11)).partition()
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_impossible_partition_raises() -> None:
    message = fault(DIGITS.replace(clients=40, alpha=0.01, min_samples=30))
    assert "data.alpha = 0.01, data.min-samples = 30, clients = 40" in message
    assert "Raise data.alpha, or lower data.min-samples or clients" in message
    message = fault(DIGITS.replace(clients=200))
    assert message == (
        "clients = 200 with data.min-samples = 10: expected 2000 samples in digits, got 1438 "
        "samples. Lower one of the two settings."
    )
    message = fault(DIGITS.replace(partition="shards", shards=500))
    assert "expected 4000 shards in digits, got 1438 samples" in message
    message = fault(DIGITS.replace(partition="classes", classes_per_client=11))
    assert message == (
        "data.classes-per-client must be at most 10, the number of classes of digits, got 11"
    )
    message = fault(DIGITS.replace(partition="iid", clients=500, min_samples=1))
    assert message.startswith(
        "client-438: with data.test-fraction = 0.2, expected at least 2 training samples and 1 "
        "test sample, got 2 samples"
    )


def test_classes_without_a_client_are_excluded() -> None:
    spec = DIGITS.replace(partition="classes", clients=2)
    held = np.array(list(RunData(spec).label_counts().values())).sum(axis=0)
    assert (held > 0).sum() == 4


def test_client_names_are_padded() -> None:
    assert client_name(7, 100) == "client-07"
    assert client_name(0, 10) == "client-0"
    assert list(RunData(DIGITS.replace(clients=11)).label_counts())[::10] == [
        "client-00",
        "client-10",
    ]


# --- datasets and clients --------------------------------------------------------------------


def as_set(x: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


def test_common_test_set_of_digits_does_not_depend_on_the_seed() -> None:
    first, other = load(DIGITS), load(DIGITS.replace(seed=9, clients=3))
    assert first.test is not None
    assert other.test is not None
    assert torch.equal(first.test.x, other.test.x)
    assert len(first.train) + len(first.test) == 1797
    assert len(first.test) == 359
    shares = first.test.y.bincount() / torch.cat([first.train.y, first.test.y]).bincount()
    assert torch.allclose(shares, torch.tensor(0.2), atol=0.01)
    assert not as_set(first.train.x) & as_set(first.test.x)
    assert first.format.shape == (1, 8, 8)
    assert first.format.classes == tuple("0123456789")
    assert first.train.x.min() == -1
    assert first.train.x.max() == 1


def test_client_data_is_the_clients_rows_split_once() -> None:
    store = RunData(DIGITS)
    data, rows = store.client(3), store.partition()[3]
    assert data.name == "client-3"
    assert data.format.shape == (1, 8, 8)
    assert len(data.train) + len(data.test) == len(rows)
    assert len(data.test) == round(0.2 * len(rows))
    whole = load(DIGITS).train.take(rows)
    assert as_set(data.train.x) | as_set(data.test.x) == as_set(whole.x)
    assert not as_set(data.train.x) & as_set(data.test.x)
    assert data.common is store.common_test is store.client(4).common
    other = RunData(DIGITS.replace(test_fraction=0.5)).client(3)
    assert len(other.test) == round(0.5 * len(rows))
    counts = RunData(DIGITS).label_counts()["client-3"]
    assert counts == torch.cat([data.train.y, data.test.y]).bincount(minlength=10).tolist()


def test_client_index_is_checked() -> None:
    with pytest.raises(SettingsError, match=r"0 to 7.*8"):
        RunData(DIGITS).client(8)


def test_max_samples_takes_a_stratified_subset() -> None:
    small = load(DIGITS.replace(max_samples=200, max_test_samples=50))
    assert small.test is not None
    assert (len(small.train), len(small.test)) == (200, 50)
    assert small.train.y.bincount().tolist() == pytest.approx([20] * 10, abs=1)
    other = load(DIGITS.replace(max_samples=200, max_test_samples=50, seed=1))
    assert other.test is not None
    assert not torch.equal(small.train.x, other.train.x)
    assert torch.equal(small.test.x, other.test.x)
    assert len(load(DIGITS.replace(max_samples=10**6)).train) == 1438


def test_stratified_keeps_shares_of_unequal_classes() -> None:
    labels = np.repeat(np.arange(4), [800, 150, 49, 1])
    rows = stratified(labels, 100, np.random.default_rng(0))
    assert len(np.unique(rows)) == 100
    assert np.bincount(labels[rows], minlength=4).tolist() == pytest.approx([80, 15, 5, 0], abs=1)


def test_scaling() -> None:
    x = torch.tensor([[0, 255, 51]], dtype=torch.uint8)
    assert torch.allclose(scaled(x), torch.tensor([[-1.0, 1.0, -0.6]]))
    assert x.dtype == torch.uint8
    kept = torch.tensor([[3.5]])
    assert scaled(kept) is kept


def test_unknown_names_and_values_raise() -> None:
    assert "did you mean 'cifar10'?" in fault(DIGITS.replace(dataset="cifar-10"))
    for path in ("hospitals/", "t.csv"):
        told = fault(DIGITS.replace(dataset=path))
        assert "needs its format, as in table:PATH" in told
        assert "did you mean" not in told
    assert "needs its format, as in table:PATH" in fault(DIGITS.replace(dataset="data/p.csv"))
    assert "expected one of breast-cancer, cifar10," in fault(DIGITS.replace(dataset="svhn"))
    assert fault(DIGITS.replace(dataset="npz")) == (
        "setting 'data.dataset': expected npz:DIR, got 'npz'"
    )
    assert dataset_names()[:2] == ["breast-cancer", "cifar10"]
    assert dataset_names()[-2:] == ["table:PATH", "text:PATH"]


@pytest.mark.parametrize("name", dataset_names())
def test_every_dataset_is_documented(name: str) -> None:
    assert f"`{name}`" in (Path(__file__).parent.parent / "docs" / "data.md").read_text()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("partition", "dirichlt", "one of dirichlet, iid, shards, classes, superclasses"),
        ("alpha", 0.0, "number > 0"),
        ("alpha", float("nan"), "number > 0"),
        ("clients", 0, "integer >= 1"),
        ("test-fraction", 1.0, "number >= 0 and < 1"),
        ("classes-per-client", 0, "integer >= 1"),
        ("seed", -1, "integer >= 0"),
    ],
)
def test_value_out_of_range_raises(name: str, value: object, rule: str) -> None:
    said = f"setting '{name}': expected {rule}"
    with pytest.raises(SettingsError) as caught:
        build(DataSpec, {name: value})
    assert str(caught.value).startswith(said)
    field = name.replace("-", "_")
    with pytest.raises(ValidationError, match=field):
        DataSpec(**{field: value})
    full = name if name in ("clients", "seed") else f"data.{name}"
    with pytest.raises(SettingsError) as caught:
        resolve({full: value})
    assert str(caught.value).startswith(said.replace(f"'{name}'", f"'{full}'"))


def test_spec_is_a_value_object() -> None:
    other = DIGITS.replace(seed=3)
    assert (other.seed, DIGITS.seed) == (3, 0)
    assert (other, hash(other)) == (DataSpec(clients=8, seed=3), hash(DataSpec(clients=8, seed=3)))
    resolved = other.replace(validation_fraction=0.0)
    assert DataSpec.for_run(resolve({"clients": 8, "seed": 3}).run) == resolved != DIGITS
    with pytest.raises(ValidationError, match="frozen"):
        other.seed = 4  # type: ignore[misc]
    with pytest.raises(ValidationError, match="sed"):
        DataSpec(sed=4)  # type: ignore[call-arg]


def test_valid_data_is_accepted() -> None:
    RunData(DIGITS).validate()
    check(resolve({"clients": 8}))


# --- torchvision -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_missing_torchvision_data_raises(name: str, tmp_path: Path) -> None:
    message = fault(DIGITS.replace(dataset=name, data_dir=str(tmp_path / "none")))
    assert f"dataset = '{name}'" in message
    assert str(tmp_path / "none") in message
    assert "--set download=true" in message
    assert "--set dataset=digits" in message


def test_compressed_torchvision_data_raises(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte.gz").touch()
    message = fault(DIGITS.replace(dataset="fashion-mnist", data_dir=str(tmp_path)))
    assert message == (
        f"data.dataset = 'fashion-mnist': compressed files in {raw}. Unpack them with `gunzip "
        f"{raw}/*.gz`."
    )


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def test_mnist_is_read_from_its_files(tmp_path: Path) -> None:
    raw, rng = tmp_path / "MNIST" / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    images = rng.integers(0, 256, (60, 28, 28), dtype=np.uint8)
    for part, rows in (("train", slice(0, 40)), ("t10k", slice(40, 60))):
        labels = (np.arange(60) % 10).astype(np.uint8)[rows]
        write_idx(raw / f"{part}-images-idx3-ubyte", images[rows])
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels)
    spec = DataSpec(dataset="mnist", data_dir=str(tmp_path), clients=2, partition="iid")
    data = load(spec)
    assert data.test is not None
    assert data.format.shape == (1, 28, 28)
    assert data.train.x.dtype == torch.uint8
    assert torch.equal(data.train.x[:, 0], torch.from_numpy(images[:40]))
    assert data.test.y.tolist() == [*range(10)] * 2
    client = RunData(spec).client(0)
    assert client.train.x.dtype == torch.uint8
    assert client.format.stored == "bytes"


def test_cifar_has_channels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)

    def fake(root: str, train: bool, download: bool) -> Any:
        return SimpleNamespace(data=images, targets=[0, 1] * 10, classes=["cat", "dog"])

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fake)
    data = load(DataSpec(dataset="cifar10", data_dir="faked"))
    assert data.format.shape == (3, 32, 32)
    assert data.format.classes == ("cat", "dog")
    assert data.train.x.is_contiguous()
    assert torch.equal(data.train.x[4, 2], torch.from_numpy(images[4, :, :, 2]))


# --- npz -------------------------------------------------------------------------------------


def write_clients(root: Path, clients: int = 3, shape: tuple[int, ...] = (4,)) -> DataSpec:
    rng = np.random.default_rng(0)
    for part, rows in (("train", 6), ("test", 3)):
        (root / part).mkdir(parents=True)
        for k in range(clients):
            x = rng.normal(size=(rows + k, *shape))
            np.savez(root / part / f"{k}.npz", x=x, y=np.arange(rows + k) % (k + 2))
    return DataSpec(dataset=f"npz:{root}", clients=clients)


def test_npz_clients_round_trip(tmp_path: Path) -> None:
    spec = write_clients(tmp_path)
    np.savez(tmp_path / "common.npz", x=np.zeros((5, 4)), y=np.array([0, 1, 2, 3, 3]))
    RunData(spec).validate()
    data = RunData(spec).client(2)
    with np.load(tmp_path / "train" / "2.npz") as train, np.load(tmp_path / "test/2.npz") as test:
        assert torch.equal(data.train.x, torch.from_numpy(train["x"].astype(np.float32)))
        assert torch.equal(data.test.x, torch.from_numpy(test["x"].astype(np.float32)))
        assert data.train.y.tolist() == train["y"].tolist()
    assert data.format.classes == ("0", "1", "2", "3")
    assert data.common is not None
    assert len(data.common) == 5
    assert RunData(spec).label_counts()["client-0"] == [5, 4, 0, 0]
    assert sum(map(len, RunData(spec).partition())) == len(load(spec).train) == 33


def test_npz_images(tmp_path: Path) -> None:
    spec = write_clients(tmp_path, clients=1, shape=(5, 6))
    assert RunData(spec).client(0).format.shape == (1, 5, 6)
    assert RunData(spec).client(0).common is None


def test_npz_with_another_number_of_clients(tmp_path: Path) -> None:
    spec = write_clients(tmp_path)
    message = fault(spec.replace(clients=10))
    assert message.startswith("clients must be 3, the number of clients in npz:")
    assert message.endswith("got 10")
    assert "data.max-samples must be 0" in fault(spec.replace(max_samples=5))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": np.array([[None, 1]] * 4), "y": [0, 1, 0, 1]}, "pickled objects are unsupported"),
        ({"data": np.ones((4, 4)), "y": [0, 1, 0, 1]}, "array 'x' not found, got data, y"),
        ({"x": np.full((4, 4), np.nan), "y": [0, 1, 0, 1]}, "got NaN or infinite values"),
        ({"x": np.full((4, 4), 1e300), "y": [0, 1, 0, 1]}, "got NaN or infinite values"),
        ({"x": np.ones((4, 4)), "y": [0, 1, 0]}, "the same length, got 4 and 3"),
        ({"x": np.ones((4, 4)), "y": [0, 1, 0, -1]}, "labels in y must be 0 to 65535, got -1"),
        (
            {"x": np.ones((4, 4)), "y": [0, 1, 0, 10**9]},
            "labels in y must be 0 to 65535, got 1000000000",
        ),
        ({"x": np.ones((4, 4)), "y": [0.0, 1, 0, 1]}, "y must be integers [N], got float64"),
        ({"x": np.ones((4, 4)), "y": [[0], [1], [0], [1]]}, "got int64 [4, 1]"),
        ({"x": np.ones(4), "y": [0, 1, 0, 1]}, "got float64 [4]"),
        ({"x": np.ones((4, 4), dtype=complex), "y": [0, 1, 0, 1]}, "got complex128 [4, 4]"),
        ({"x": np.ones((4, 32, 32, 3)), "y": [0, 1, 0, 1]}, "[N, C, H, W] (channels first)"),
        (
            {"x": np.ones((4, 5)), "y": [0, 1, 0, 1]},
            "samples must have shape (4,), as in 0.npz, got (5,)",
        ),
        ({"x": np.ones((4, 4), dtype=np.uint8), "y": [0, 1, 0, 1]}, "samples must have type"),
        ({"x": np.ones((1, 4)), "y": [0]}, "expected at least 2 samples, got 1"),
    ],
)
def test_invalid_npz_raises_with_the_file(
    tmp_path: Path, arrays: dict[str, Any], expected: str
) -> None:
    spec = write_clients(tmp_path)
    path = tmp_path / "train" / "1.npz"
    np.savez(path, **arrays)
    message = fault(spec)
    assert message.startswith(f"{path}: ")
    assert expected in message


def test_npz_without_an_archive_raises(tmp_path: Path) -> None:
    spec = write_clients(tmp_path)
    path = tmp_path / "test" / "0.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert str(path) in fault(spec)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    assert f"{path}: not a readable .npz file" in fault(spec)
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert f"{path}: not a readable .npz file" in fault(spec)


def test_npz_files_must_be_numbered(tmp_path: Path) -> None:
    spec = write_clients(tmp_path)
    (tmp_path / "test" / "1.npz").rename(tmp_path / "test" / "b.npz")
    assert f"{tmp_path / 'test' / '1.npz'}: file not found" in fault(spec)
    assert "train.npz: file not found" in fault(spec.replace(dataset=f"npz:{tmp_path / 'nowhere'}"))


# --- image folders ---------------------------------------------------------------------------


def write_images(
    root: Path,
    classes: tuple[str, ...] = ("cat", "ant", "dog"),
    each: int = 4,
    mode: str = "RGB",
    size: tuple[int, int] = (6, 5),
) -> Path:
    """Write PNGs in which every pixel is the alphabetical index of the class times 10."""
    for label, name in enumerate(sorted(classes)):
        (root / name).mkdir(parents=True)
        for row in range(each):
            color = (10 * label, row, 255) if mode == "RGB" else 10 * label
            PIL.Image.new(mode, size, color).save(root / name / f"{row}.png")
    return root


def test_tree_is_decoded_in_the_order_of_class_names(tmp_path: Path) -> None:
    write_images(tmp_path / "tree" / "train")
    write_images(tmp_path / "tree" / "test", each=2)
    spec = DataSpec(
        dataset=f"imagefolder:{tmp_path / 'tree'}", clients=2, partition="iid", min_samples=3
    )
    data = load(spec)
    assert data.test is not None
    assert data.format.classes == ("ant", "cat", "dog")
    assert data.format.shape == (3, 5, 6)
    assert data.train.x.dtype == torch.uint8
    assert data.train.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert torch.equal(data.train.x[:, 0, 0, 0], 10 * data.train.y)
    assert data.train.x[:, 1, 4, 5].tolist() == [0, 1, 2, 3] * 3
    assert torch.equal(data.test.x[:, 0, 0, 0], 10 * data.test.y)
    RunData(spec).validate()
    assert RunData(spec).client(0).train.x[0, 2, 0, 0] == 255


def test_tree_without_parts_has_no_common_test_set(tmp_path: Path) -> None:
    spec = DataSpec(dataset=f"imagefolder:{write_images(tmp_path / 'tree')}", clients=1)
    assert load(spec).test is None
    assert RunData(spec).common_test is None
    assert len(RunData(spec).client(0).test) == 2


def test_cache_is_written_once_and_mapped(tmp_path: Path, cache_dir: Path) -> None:
    root = write_images(tmp_path / "tree")
    files = sorted(map(str, root.glob("*/*")))
    first = images.decode(files, DataSpec())
    (cached,) = cache_dir.glob("*.npy")
    made = cached.stat().st_mtime_ns
    second = images.decode(files, DataSpec())
    assert cached.stat().st_mtime_ns == made
    assert torch.equal(first, second)
    assert isinstance(images._open(cached, len(files)), np.memmap)
    second[0] = 99
    assert torch.equal(images.decode(files, DataSpec()), first), "no write reaches the file"
    assert not list(cache_dir.glob("*.tmp"))


def test_cache_notices_changed_files_and_damage(tmp_path: Path, cache_dir: Path) -> None:
    root = write_images(tmp_path / "tree")
    files = sorted(map(str, root.glob("*/*")))
    images.decode(files, DataSpec())
    (cached,) = cache_dir.glob("*.npy")
    cached.write_bytes(cached.read_bytes()[:-10])
    assert images.decode(files, DataSpec())[-1, 0, 0, 0] == 20
    PIL.Image.new("RGB", (6, 5), (77, 0, 0)).save(files[-1])
    assert images.decode(files, DataSpec())[-1, 0, 0, 0] == 77
    assert images.decode(files, DataSpec(image_size=8)).shape == (12, 3, 8, 8)


def test_cache_is_built_once_by_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_images(tmp_path / "tree", each=40)
    files = sorted(map(str, root.glob("*/*")))
    built, decoded = [], images.decode_blocks

    def counted(*args: Any) -> Iterator[images.Pixels]:
        built.append(1)
        return decoded(*args)

    monkeypatch.setattr(images, "decode_blocks", counted)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: images.decode(files, DataSpec()), range(6)))
    assert len(built) == 1
    assert all(torch.equal(result, results[0]) for result in results)


def test_unwritable_cache_directory_raises(tmp_path: Path, cache_dir: Path) -> None:
    cache_dir.write_text("a file where the folder should be")
    message = fault(DataSpec(dataset=f"imagefolder:{write_images(tmp_path / 'tree')}"))
    assert message.startswith(f"{cache_dir}: cannot store the decoded images")
    assert "FEDHET_CACHE_DIR" in message


def test_max_samples_decodes_only_the_subset(tmp_path: Path, cache_dir: Path) -> None:
    root = write_images(tmp_path / "tree", each=20)
    data = load(DataSpec(dataset=f"imagefolder:{root}", max_samples=9))
    assert data.train.y.bincount().tolist() == [3, 3, 3]
    assert torch.equal(data.train.x[:, 0, 0, 0], 10 * data.train.y)
    (cached,) = cache_dir.glob("*.npy")
    assert len(np.load(cached)) == 9


def test_gray_trees_stay_gray_and_mixed_ones_become_rgb(tmp_path: Path) -> None:
    gray = write_images(tmp_path / "gray", mode="L")
    assert load(DataSpec(dataset=f"imagefolder:{gray}")).format.shape == (1, 5, 6)
    mixed = write_images(tmp_path / "mixed", mode="L")
    PIL.Image.new("RGB", (6, 5), (1, 2, 3)).save(mixed / "dog" / "3.png")
    data = load(DataSpec(dataset=f"imagefolder:{mixed}"))
    assert data.train.x[-1, :, 0, 0].tolist() == [1, 2, 3]
    deep = write_images(tmp_path / "deep", mode="I;16")
    assert load(DataSpec(dataset=f"imagefolder:{deep}")).format.shape == (1, 5, 6)


def test_invalid_image_raises_with_the_file(tmp_path: Path, cache_dir: Path) -> None:
    root = write_images(tmp_path / "tree", each=10)
    spec = DataSpec(dataset=f"imagefolder:{root}", clients=2, min_samples=3)
    odd = root / "cat" / "2.png"
    PIL.Image.new("RGB", (7, 9)).save(odd)
    message = fault(spec)
    assert message.startswith(
        f"{odd}: expected 6 x 5 pixels, the size of the first image, got 7 x 9"
    )
    assert "Set data.image-size" in message
    assert load(spec.replace(image_size=4)).format.shape == (3, 4, 4)
    noise = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    PIL.Image.fromarray(noise).save(odd)
    odd.write_bytes(odd.read_bytes()[:80])
    assert fault(spec).startswith(f"{odd}: not a readable image")
    odd.write_bytes(b"not an image at all")
    assert fault(spec).startswith(f"{odd}: not a readable image")
    assert not list(cache_dir.glob("*.tmp"))


def test_invalid_tree_raises(tmp_path: Path) -> None:
    absent = DataSpec(dataset=f"imagefolder:{tmp_path / 'absent'}")
    assert fault(absent) == f"{tmp_path / 'absent'}: directory not found"
    (tmp_path / "empty").mkdir()
    assert "expected directories, as in" in fault(
        absent.replace(dataset=f"imagefolder:{tmp_path / 'empty'}")
    )
    root = tmp_path / "tree"
    write_images(root / "train")
    write_images(root / "test", classes=("ant", "dogs"))
    message = fault(absent.replace(dataset=f"imagefolder:{root}"))
    assert message == (
        f"{root / 'test' / 'dogs'}: unknown class 'dogs'; did you mean 'dog'? "
        "Rename the directory, or remove it."
    )
    (root / "train" / "elk").mkdir()
    message = fault(absent.replace(dataset=f"imagefolder:{root}"))
    assert message == f"{root / 'train' / 'elk'}: no images found"
    single = write_images(tmp_path / "single", classes=("ant",))
    assert "expected at least 2 classes, got 1" in fault(
        absent.replace(dataset=f"imagefolder:{single}")
    )


# --- real sites ------------------------------------------------------------------------------


SITE = DataSpec(test_fraction=0.25)


def test_site_with_arrays(tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 3
    np.savez(tmp_path / "train.npz", x=x, y=y)
    alone = site_data(f"npz:{tmp_path}", spec=SITE, classes=5, name="north")
    assert (len(alone.train), len(alone.test)) == (15, 5)
    assert as_set(alone.train.x) | as_set(alone.test.x) == as_set(torch.from_numpy(x))
    assert alone.format.classes == tuple("01234")
    assert alone.common is None
    assert alone.name == "north"
    np.savez(tmp_path / "test.npz", x=x[:4], y=y[:4])
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")
    both = site_data(f"npz:{tmp_path}", spec=SITE, classes=4, name="south")
    assert (len(both.train), len(both.test)) == (20, 4)
    assert both.format.classes == ("a", "b", "c", "d")


def test_site_with_images(tmp_path: Path) -> None:
    root = tmp_path / "site"
    write_images(root / "train", classes=("cat", "dog"))
    site: dict[str, Any] = {"spec": SITE, "name": "north"}
    alone = site_data(f"imagefolder:{root}", classes=2, **site)
    assert alone.format.classes == ("cat", "dog")
    assert len(alone.test) == 2
    write_images(root / "test", classes=("dog",), each=3)
    with pytest.raises(DataError, match=r"4 classes.*2"):
        site_data(f"imagefolder:{root}", classes=4, **site)
    (root / "classes.txt").write_text("elk\ndog\ncat\nant\n")
    ordered = site_data(f"imagefolder:{root}", classes=4, **site)
    assert ordered.format.classes == ("elk", "dog", "cat", "ant")
    assert sorted(ordered.train.y.tolist()) == [1] * 4 + [2] * 4
    assert ordered.test.y.tolist() == [1] * 3
    cats = ordered.train.y == 2
    assert torch.equal(ordered.train.x[cats, 0, 0, 0], torch.zeros(4)), "cat was written 0"


def test_site_with_images_that_have_no_class(tmp_path: Path) -> None:
    root = tmp_path / "site"
    write_images(root / "train", classes=("cat", "dog"))
    site: dict[str, Any] = {"spec": SITE, "name": "north", "classes": 2}
    before = site_data(f"imagefolder:{root}", **site)
    assert before.unlabeled is None
    write_images(root / "train" / "unlabeled", classes=("",), each=3)
    write_images(root / "train" / "unlabeled", classes=("march", "may"), each=1)
    read = site_data(f"imagefolder:{root}", unlabeled=True, **site)
    assert read.format.classes == ("cat", "dog")
    assert read.unlabeled is not None
    assert read.unlabeled.x.shape == (5, 3, 5, 6)
    assert read.unlabeled.x.dtype == torch.uint8
    colors = read.unlabeled.x[:, :2, 0, 0]  # (class's place * 10, row)
    assert sorted(map(tuple, colors.tolist())) == [
        (0, 0), (0, 0), (0, 1), (0, 2), (10, 0),
    ]  # fmt: skip
    assert read.unlabeled.y.tolist() == [-1] * 5
    assert read.num_unused_unlabeled == 0
    aside = site_data(f"imagefolder:{root}", **site)
    assert (aside.num_unused_unlabeled, len(aside.unlabeled or ())) == (5, 0)
    for found in (read, aside):  # the labeled part is that of a folder without
        assert torch.equal(found.train.x, before.train.x)
        assert torch.equal(found.test.y, before.test.y)
        assert found.space == (0, 1)


def test_site_faults_of_images_that_have_no_class(tmp_path: Path) -> None:
    root = tmp_path / "site"

    def site_fault(**changes: Any) -> str:
        site: dict[str, Any] = {"spec": SITE, "classes": 2, "name": "north", "unlabeled": True}
        with pytest.raises(DataError) as caught:
            site_data(f"imagefolder:{root}", **{**site, **changes})
        return str(caught.value)

    write_images(root / "train", classes=("cat", "dog"))
    folder = root / "train" / "unlabeled"
    folder.mkdir()
    assert site_fault() == site_fault(unlabeled=False) == f"{folder}: no images found"
    odd = folder / "odd.png"
    PIL.Image.new("RGB", (3, 3)).save(odd)
    assert site_fault().startswith(
        f"{odd}: expected 6 x 5 pixels, the size of the first image, got 3 x 3"
    )
    (root / "classes.txt").write_text("cat\nunlabeled\n")
    assert "the class name 'unlabeled' is reserved" in site_fault()
    (root / "classes.txt").unlink()
    write_images(root / "test", classes=("cat", "unlabeled"), each=1)
    assert f"{root / 'test' / 'unlabeled' / '0.png'}: test images must be labeled" in site_fault()
    shutil.rmtree(root / "test")
    (root / "unlabeled").mkdir()
    assert site_fault().startswith(f"{root / 'unlabeled'}: unexpected directory")
    assert f"Move it into {root / 'train'}" in site_fault()


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def test_site_faults(tmp_path: Path) -> None:
    def site_fault(root: Path, classes: int = 3, form: str = "npz") -> str:
        with pytest.raises(DataError) as caught:
            site_data(f"{form}:{root}", spec=SITE, classes=classes, name="north")
        return str(caught.value)

    absent = tmp_path / "absent"
    assert site_fault(absent) == f"{absent}: file or directory not found (data of north)"
    assert f"{tmp_path / 'train.npz'}: file not found" in site_fault(tmp_path)
    assert "models.num-classes must be the number of classes, at least 2, got 0" in site_fault(
        tmp_path, 0
    )
    np.savez(tmp_path / "train.npz", x=np.ones((6, 2)), y=np.arange(6) % 4)
    assert site_fault(tmp_path) == (
        f"{tmp_path / 'train.npz'}: labels in y must be 0 to 2 (the run has 3 classes), got 3 "
        "in sample 3"
    )
    np.savez(tmp_path / "test.npz", x=np.ones((6, 3)), y=np.arange(6) % 4)
    assert "samples must have shape (2,), as in train.npz, got (3,)" in site_fault(tmp_path, 4)
    (tmp_path / "test.npz").unlink()
    np.savez(tmp_path / "train.npz", x=np.ones((2, 2)), y=np.arange(2))
    assert "north" in site_fault(tmp_path, 4)
    assert "got 2 samples" in site_fault(tmp_path, 4)
    np.savez(tmp_path / "test.npz", x=np.ones((3, 2)), y=np.arange(3))
    np.savez(tmp_path / "train.npz", x=np.ones((1, 2)), y=np.arange(1))
    assert site_fault(tmp_path) == "north: expected at least 2 training samples, got 1"
    (tmp_path / "test.npz").unlink()
    (tmp_path / "classes.txt").write_text("a\na\nb\n")
    assert "expected 3 different class names" in site_fault(tmp_path)
    (tmp_path / "classes.txt").unlink()
    (tmp_path / "train.npz").unlink()
    np.savez(_made(tmp_path / "train") / "0.npz", x=np.ones((2, 2)), y=np.arange(2))
    np.savez(_made(tmp_path / "test") / "0.npz", x=np.ones((2, 2)), y=np.arange(2))
    assert "got one file for each client" in site_fault(tmp_path)
    with pytest.raises(SettingsError, match="table:PATH"):
        site_data(str(tmp_path), spec=SITE, classes=3, name="north")
