"""Images as bytes, scaled batch by batch, and datasets mapped by several processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import client_info
from torch import nn

from fedhet.base.errors import DataError, StateError
from fedhet.data import store
from fedhet.data.dataset import Split, concatenate
from fedhet.data.public import check_no_overlap
from fedhet.data.shared import read_dataset
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.learning.devices import Compute
from fedhet.learning.training import (
    CrossEntropy,
    evaluate,
    logits_of,
    optimization_for,
    train_epochs,
)
from fedhet.models.classical import Refitted
from fedhet.settings.run import TrainingSettings

RNG = np.random.default_rng(0)
BYTES = torch.from_numpy(RNG.integers(0, 256, (60, 1, 8, 8), dtype=np.uint8))
FLOATS = torch.from_numpy(BYTES.numpy().astype(np.float32) / np.float32(127.5) - np.float32(1))
LABELS = torch.arange(60) % 3


# --- bytes ----------------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize("channels_last", [False, True])
def test_bytes_give_the_same_training_and_evaluation_as_numbers(channels_last):
    found = []
    for x in (BYTES, FLOATS):
        model, seen = network(), []
        compute = Compute(torch.device("cpu"), channels_last=channels_last, eval_batch=16)
        compute.place(model)

        def noted(images, seen=seen):
            seen.append((images.dtype, images.min().item(), images.max().item()))
            return images + 0.25

        train_epochs(
            compute.to_device(x),
            LABELS,
            CrossEntropy(model),
            optimization_for(model.parameters(), TrainingSettings(), compute),
            epochs=2,
            batch_size=16,
            generator=torch.Generator().manual_seed(1),
            compute=compute,
            augment=noted,
        )
        score = evaluate(model, x, LABELS, compute)
        found.append((model.state_dict(), logits_of(model, x, compute), score, seen))
    (state, logits, score, seen), (wanted, wanted_logits, wanted_score, wanted_seen) = found
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert torch.equal(logits, wanted_logits)
    assert score == wanted_score
    assert seen == wanted_seen
    assert {kind for kind, _, _ in seen} == {torch.float32}
    assert min(low for _, low, _ in seen) == -1.0
    assert max(high for _, _, high in seen) == 1.0


def test_classifier_without_gradients_sees_scaled_rows():
    seen = []

    class Noting:
        def fit(self, x, y):
            seen.append(x)

        def predict(self, x):
            seen.append(x)
            return np.zeros(len(x), np.int64)

    model = Refitted("noting", Noting, 3, 0)
    model.fit(BYTES, LABELS)
    model(BYTES[:5])
    np.testing.assert_array_equal(seen[0], FLOATS.flatten(1).numpy())
    np.testing.assert_array_equal(seen[1], FLOATS[:5].flatten(1).numpy())


def test_samples_that_are_stored_differently_are_scaled_before_they_are_joined():
    assert concatenate(BYTES, BYTES[:3]).dtype == torch.uint8
    mixed = concatenate(BYTES[:4], FLOATS[4:6])
    assert torch.equal(mixed, FLOATS[:6])


def test_overlap_is_found_for_every_storage_type():
    own = Split(FLOATS[:10], LABELS[:10])
    with pytest.raises(DataError, match=r"4 of 10 .*north"):
        check_no_overlap(Split(BYTES[6:20], LABELS[6:20]), own, "north")
    check_no_overlap(Split(BYTES[10:20], LABELS[10:20]), own, "north")


# --- shared ---------------------------------------------------------------------------------


def clients_of(folder: Path) -> str:
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        for client in range(2):
            x = RNG.integers(0, 256, (12, 8, 8), dtype=np.uint8)
            np.savez(folder / part / f"{client}.npz", x=x, y=np.arange(12) % 3)
    return f"npz:{folder}"


def texts_of(folder: Path) -> str:
    folder.mkdir()
    rows = ["text,label,who", *(f"word{n % 7} word{n},{'ab'[n % 2]},p{n % 4}" for n in range(40))]
    (folder / "train.csv").write_text("\n".join(rows))
    (folder / "test.csv").write_text("\n".join(rows[:9]))
    return f"text:{folder}"


def specs(folder: Path):
    joined = (("0", "1", "2"), ("3", "4", "5", "6"), ("7", "8", "9"))
    return {
        "share": DataSpec(dataset="digits", clients=2, public_fraction=0.2, superclasses=joined),
        "unused": DataSpec(dataset="digits", clients=2, max_samples=300, public_dataset="unused"),
        "clients": DataSpec(dataset=clients_of(folder / "npz"), clients=2),
        "other": DataSpec(
            dataset="digits", clients=2, public_dataset=f"npz:{folder / 'npz'}", public_samples=9
        ),
        "persons": DataSpec(dataset=texts_of(folder / "csv"), clients=2, by="who", min_samples=2),
    }  # fmt: skip


def described(store: RunData) -> list[object]:
    """Return all data of a run's clients as plain values."""
    data, spec = store.dataset, store.spec
    rows: list[object] = [
        data.name, data.format, data.parts, data.columns,
        None if data.subclasses is None else data.subclasses.tolist(),
        None if data.groups is None else data.groups.tolist(),
    ]  # fmt: skip
    splits = [data.train, data.test, data.public]
    for index in range(2):
        own = store.client(index)
        rows += [own.name, own.space, own.format.stored, own.format.shape]
        splits += [own.train, own.test, own.common]
    if spec.public_dataset or spec.public_fraction:
        splits.append(
            store.public_set(client_info(data.format.kind, data.format.shape), labeled=False)
        )
    for split in splits:
        rows.append(split and (str(split.x.dtype), split.x.tolist(), split.y.tolist()))
    return rows


@pytest.mark.parametrize("name", ["share", "unused", "clients", "other", "persons"])
def test_mapped_samples_equal_the_samples_read(tmp_path, monkeypatch, name):
    spec = specs(tmp_path)[name]
    written = RunData(spec)
    wanted = described(written)
    written.share(tmp_path / "decoded")

    def unread(*_, **__):
        raise AssertionError("read or drawn again")

    monkeypatch.setattr(store, "load", unread)
    monkeypatch.setattr(store, "partition", unread)
    mapped = RunData(spec, tmp_path / "decoded")
    assert described(mapped) == wanted
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "decoded" / "0.safetensors") in maps
    assert str(tmp_path / "decoded" / "samples.npy") in maps
    mapped.forget()
    assert described(mapped) == wanted


def shared(folder: Path, **changes: object) -> RunData:
    """Return a store that maps the files of another store."""
    spec = DataSpec(dataset="digits", **changes)
    RunData(spec).share(folder)
    return RunData(spec, folder)


def test_clients_samples_are_parts_of_the_file_not_copies(tmp_path):
    data = shared(tmp_path, clients=3, test_fraction=0.25)
    parts = [split.x for index in range(3) for own in [data.client(index)]
             for split in (own.train, own.test)]  # fmt: skip
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    first = parts[0].data_ptr()
    assert [part.data_ptr() - first for part in parts] == [
        sum(part.nbytes for part in parts[:number]) for number in range(6)
    ]


def test_client_that_changes_its_samples_changes_no_others(tmp_path):
    data = shared(tmp_path, clients=2)
    written = (tmp_path / "samples.npy").read_bytes()
    data.client(0).train.x.zero_()
    assert (tmp_path / "samples.npy").read_bytes() == written


@pytest.mark.parametrize("damage", [b"", b"no array", None])
def test_broken_file_of_samples_raises(tmp_path, damage):
    data = shared(tmp_path, clients=2)
    path = tmp_path / "samples.npy"
    path.write_bytes(path.read_bytes()[:-9] if damage is None else damage)
    with pytest.raises(StateError, match=r"samples\.npy"):
        data.client(0)


def test_store_reads_what_is_written_after_it_was_made(tmp_path):
    spec = DataSpec(dataset="digits", clients=2)
    data = RunData(spec, tmp_path)
    with pytest.raises(StateError, match=r"0\.safetensors"):
        data.client(0)
    RunData(spec).share(tmp_path)
    assert len(data.client(0).train) == len(RunData(spec).client(0).train)


@pytest.mark.parametrize("content", [b"", b"\x08" + b"\x00" * 7 + b"{}      ", b"x" * 100])
def test_broken_file_raises(tmp_path, content):
    path = tmp_path / "0.safetensors"
    path.write_bytes(content)
    with pytest.raises(StateError) as caught:
        read_dataset(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards", "classes"])
def test_rows_of_clients_equal_the_drawn_rows(tmp_path, monkeypatch, kind):
    data = shared(tmp_path, clients=4, partition=kind, min_samples=2)
    wanted = [rows.tolist() for rows in RunData(data.spec).partition()]

    def drawn(dataset, spec):
        raise AssertionError("drawn again")

    monkeypatch.setattr(store, "partition", drawn)
    assert [rows.tolist() for rows in data.partition()] == wanted
    with pytest.raises(AssertionError, match="drawn again"):
        RunData(data.spec.replace(seed=5)).partition()
    (tmp_path / "partition.safetensors").write_bytes(b"x")
    with pytest.raises(StateError, match="rows"):
        RunData(data.spec, tmp_path).partition()


def test_run_on_ray_leaves_no_copy_of_the_data(tmp_path):
    """Its results equal a run in one process, which writes no copy."""
    import fedhet

    scores = {}
    for backend in ("inline", "ray"):
        result = fedhet.run(
            "local", clients=2, rounds=1, models="mlp", dataset=clients_of(tmp_path / backend),
            backend=backend, settings={"local-epochs": 1}, out=tmp_path / f"run-{backend}",
            progress=False,
        )  # fmt: skip
        assert not (result.directory / "decoded").exists()
        partition = json.loads((result.directory / "partition.json").read_text())
        scores[backend] = (partition["counts"], len(result.history))
    assert scores["ray"] == scores["inline"]
