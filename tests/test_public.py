"""The public set: no client owns its samples, whatever its source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from federation import Server, client_info, fast, small
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image

from fedhet.base.errors import DataError, SettingsError
from fedhet.config.resolve import check, resolve
from fedhet.data.public import check_no_overlap
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load
from fedhet.methods.registry import find_method, shipped_names
from fedhet.settings.schema import build

DIGITS = DataSpec(dataset="digits", clients=5, public_fraction=0.2)
SHAPE = (1, 8, 8)
IMAGES = ("image", SHAPE)


def rows(x) -> set[bytes]:
    return {row.tobytes() for row in np.ascontiguousarray(x.numpy())}


def folder(path, x, y):
    for part in ("train", "test"):
        (path / part).mkdir(parents=True)
        np.savez(path / part / "0.npz", x=x, y=y)
    return f"npz:{path}"


@given(seed=st.integers(0, 100), share=st.floats(0.05, 0.6))
@hypothesis_settings(max_examples=10)
def test_public_fraction_belongs_to_no_client(seed, share):
    whole = load(DIGITS.replace(public_fraction=0.0))
    spec = DIGITS.replace(seed=seed, public_fraction=share, partition="iid")
    store = RunData(spec)
    public = store.public_set(client_info(*IMAGES), labeled=True)
    owned = np.concatenate(store.partition())
    assert len(public) == round(share * len(whole.train))
    assert len(public) + len(owned) == len(whole.train)
    # Digits holds no image twice, so that rows can be told apart by their pixels.
    seen = rows(public.x)
    assert len(seen) == len(public)
    for index in range(spec.clients):
        data = store.client(index)
        assert not seen & (rows(data.train.x) | rows(data.test.x))
    assert not seen & rows(store.common_test.x)


def test_public_fraction_is_taken_from_each_class():
    whole = np.bincount(load(DIGITS.replace(public_fraction=0.0)).train.y, minlength=10)
    public = np.bincount(
        RunData(DIGITS).public_set(client_info(*IMAGES), labeled=True).y, minlength=10
    )
    assert np.all(np.abs(public - 0.2 * whole) <= 1)


def test_public_fraction_depends_only_on_the_seed():
    one, same, other = (
        RunData(DIGITS.replace(seed=s)).public_set(client_info(*IMAGES), labeled=True)
        for s in (1, 1, 2)
    )
    assert rows(one.x) == rows(same.x) != rows(other.x)


def test_public_dataset_is_unchanged_and_truncated(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8)
    name = folder(tmp_path, x, np.arange(40) % 10)
    public = RunData(DIGITS.replace(public_fraction=0, public_dataset=name)).public_set(
        client_info("image", SHAPE), labeled=True
    )
    np.testing.assert_array_equal(public.x[:40].numpy(), x)


def test_unlabeled_public_data_has_one_class(tmp_path):
    """The number of samples does not matter, and `public-samples` also limits files."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8)
    name = folder(tmp_path, x, np.zeros(40, np.int64))
    spec = DIGITS.replace(public_fraction=0, public_dataset=name)
    assert len(RunData(spec).public_set(client_info(*IMAGES), labeled=False)) == 80
    one, same, other = (
        RunData(spec.replace(public_samples=30, seed=s))
        .public_set(client_info(*IMAGES), labeled=False)
        .x
        for s in (0, 0, 1)
    )
    assert len(one) == 30
    assert rows(one) == rows(same) != rows(other)
    with pytest.raises(DataError, match=r"2 classes.*1"):
        load(DIGITS.replace(dataset=name, public_fraction=0))


def test_digest_of_a_public_set_depends_only_on_samples_and_labels(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 1, 8, 8), dtype=np.uint8), np.arange(20) % 10
    pixel, label = x.copy(), y.copy()
    pixel[3, 0, 2, 2] ^= 1
    label[3] += 1
    digests = []
    for k, arrays in enumerate([(x, y), (x, y), (pixel, y), (x, label)]):
        spec = DIGITS.replace(public_fraction=0, public_dataset=folder(tmp_path / f"{k}", *arrays))
        digests.append(RunData(spec).public_digest(client_info(*IMAGES)))
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


@pytest.mark.parametrize("method", ["fedmd", "feddf", "cofed"])
def test_server_with_another_public_set_than_a_site_raises(method, tmp_path):
    config = small(method, **fast(method))
    shown = RunData.for_run(config.run).public_digest(client_info(*IMAGES))
    for digest in (shown, "0" * 16):
        server = Server(config, tmp_path / digest)
        infos = server.strategy.members
        first, *_ = infos
        infos[first] = replace(infos[first], info=replace(infos[first].info, public=digest))
        if digest == shown:
            assert len(server.strategy.public_set(labeled=False))
            continue
        with pytest.raises(DataError, match=f"client {first}"):
            server.strategy.public_set(labeled=False)


def test_unlabeled_public_images_are_in_one_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "images" / "any").mkdir(parents=True)
    for number in range(6):
        pixels = np.full((8, 8), 40 * number, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / "any" / f"{number}.png")
    name = f"imagefolder:{tmp_path / 'images'}"
    public = RunData(DIGITS.replace(public_fraction=0, public_dataset=name)).public_set(
        client_info("image", SHAPE), labeled=False
    )
    np.testing.assert_array_equal(public.x[:, 0, 0, 0], np.arange(6) * 40)


def test_public_set_of_another_shape_or_classes_raises(tmp_path):
    name = folder(tmp_path, np.zeros((6, 3), np.float32), np.arange(6) % 3)
    spec = DIGITS.replace(public_fraction=0, public_dataset=name)
    with pytest.raises(DataError, match=r"\[1, 8, 8\].*\[3\]"):
        RunData(spec).public_set(client_info(*IMAGES), labeled=False)
    with pytest.raises(DataError, match=r"10 classes.*3"):
        RunData(spec).public_set(client_info("table", (3,), 10), labeled=True)
    assert len(RunData(spec).public_set(client_info("table", (3,)), labeled=False)) == 12


def test_public_set_with_a_client_sample_raises():
    own = RunData(DIGITS).client(0).train
    with pytest.raises(DataError, match=r"3 of \d+ .*client-0"):
        check_no_overlap(own.take(np.array([0, 1, 2])), own, "client-0")
    check_no_overlap(
        RunData(DIGITS).public_set(client_info(*IMAGES), labeled=True), own, "client-0"
    )


OF_PUBLIC_DATA = sorted(n for n in shipped_names() if find_method(n).spec.needs_public)


@pytest.mark.parametrize("method", OF_PUBLIC_DATA)
def test_public_set_with_a_test_sample_raises(method, tmp_path):
    common = RunData.for_run(small(method).run).common_test
    for part in ("train", "test"):
        (tmp_path / "data" / part).mkdir(parents=True)
        np.savez(tmp_path / "data" / part / "0.npz", x=common.x.numpy(), y=common.y.numpy())
    config = small(method, public_dataset=f"npz:{tmp_path / 'data'}", **fast(method))
    with pytest.raises(DataError, match="100 of 100"):
        Server(config, tmp_path / "run")


@pytest.mark.parametrize("source", ["generated", "unused", ""])
@pytest.mark.parametrize("method", ["cofed", "feddf"])
def test_public_training_rows_may_equal_test_rows(method, source, tmp_path):
    """In a table with few distinct rows, they do so by chance."""
    for part, rows in (("train", 200), ("test", 40)):
        words = [f"{'rgb'[k % 3]},{'sml'[k % 7 % 3]},{k % 2}" for k in range(rows)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["color,size,y", *words]))
    changes = {"dataset": f"table:{tmp_path}", "data.target": "y", "models": "mlp", "clients": 2}
    changes |= {"public_dataset": source, "max_samples": 100, "public_samples": 30}
    strategy = Server(small(method, **changes, **fast(method)), tmp_path / "run").strategy
    public, common = strategy.public_set(labeled=False), strategy.common_test()
    assert {*map(tuple, public.x.tolist())} & {*map(tuple, common.x.tolist())}


def test_dataset_of_the_run_as_public_dataset_raises():
    config = resolve({"method": "local", "data.public-dataset": "digits"})
    with pytest.raises(DataError, match=r"digits.*public-fraction"):
        check(config)


def test_missing_public_set_raises():
    with pytest.raises(SettingsError, match=r"public data"):
        RunData(DIGITS.replace(public_fraction=0)).public_set(client_info(*IMAGES), labeled=True)


def test_generated_public_rows_have_no_labels():
    spec = DataSpec(dataset="breast-cancer", public_dataset="generated", public_samples=20)
    assert len(RunData(spec).public_set(client_info("table", (30,)), labeled=False)) == 20
    with pytest.raises(SettingsError, match=r"data\.public-dataset"):
        RunData(spec).public_set(client_info("table", (30,), 2), labeled=True)


def test_two_sources_of_public_data_raise():
    said = r"'data\.public-fraction': expected 0 with 'data.public-dataset' = .*, got 0.1"
    with pytest.raises(SettingsError, match=said):
        resolve({"data.public-dataset": "digits", "data.public-fraction": 0.1})
    with pytest.raises(SettingsError, match=said):
        build(DataSpec, {"public-dataset": "digits", "public-fraction": 0.1})
    with pytest.raises(SettingsError, match=said):
        DataSpec(public_dataset="digits", public_fraction=0.1)


def test_public_data_is_reserved_only_for_methods_that_need_it():
    def share(method, **said):
        named = {f"data.{name.replace('_', '-')}": value for name, value in said.items()}
        return DataSpec.for_run(resolve({"method": method, **named}).run).public_fraction

    assert share("local") == share("felo") == 0
    assert share("local", public_fraction=0.3) == share("fedgems", public_fraction=0.3) == 0.3
    assert share("fedgems") == share("cofed") == 0.2
    assert share("fedgems", public_dataset="mnist") == 0


def test_public_fraction_of_client_files_raises(tmp_path):
    name = folder(tmp_path, np.zeros((6, 3), np.float32), np.arange(6) % 3)
    with pytest.raises(SettingsError, match=r"data\.public-dataset"):
        load(DataSpec(dataset=name, clients=1, public_fraction=0.2))
