"""Models on disk by number and version, and stored payloads."""

import numpy as np
import pytest

from fedhet.base.errors import StateError
from fedhet.runs.storage import ModelStore


def model(seed):
    rng = np.random.default_rng(seed)
    return {"a.weight": rng.normal(size=(3, 2)).astype(np.float32), "a.count": np.array(seed)}


def test_stored_model_round_trips(tmp_path):
    shelf = ModelStore(tmp_path / "pool")
    assert shelf.contents() == []
    for key in ((3, 1), (3, 12), (10, 2)):
        shelf.put(key, model(sum(key)))
    assert shelf.contents() == [(3, 1), (3, 12), (10, 2)]
    for key in shelf.contents():
        for name, value in model(sum(key)).items():
            found = shelf.get(key)[name]
            np.testing.assert_array_equal(found, value)
            assert found.dtype == value.dtype
    assert (3, 12) in shelf
    assert (3, 2) not in shelf


def test_old_model_versions_are_deleted(tmp_path):
    shelf = ModelStore(tmp_path)
    for key in ((0, 1), (0, 2), (0, 9), (0, 10), (1, 1)):
        shelf.put(key, model(0))
    shelf.trim(0, 2)
    assert shelf.contents() == [(0, 9), (0, 10), (1, 1)]
    shelf.keep([(0, 9)])
    assert shelf.contents() == [(0, 9)]


def test_missing_model_raises_with_its_name(tmp_path):
    with pytest.raises(StateError, match="4-2"):
        ModelStore(tmp_path).get((4, 2))


def test_read_only_array_can_be_stored(tmp_path):
    value = np.frombuffer(np.arange(3, dtype=np.float32).tobytes(), np.float32)
    ModelStore(tmp_path).put((0, 0), {"x": value})
    np.testing.assert_array_equal(ModelStore(tmp_path).get((0, 0))["x"], [0, 1, 2])


def test_other_files_in_the_directory_are_kept(tmp_path):
    store = ModelStore(tmp_path)
    store.put((1, 2), {"w": np.ones(2)})
    for name in ("a-b", "1-2-3", "1-", "\u0663-1"):
        (tmp_path / f"{name}.safetensors").touch()
    assert store.contents() == [(1, 2)]
    store.keep([])
    assert len(list(tmp_path.iterdir())) == 4
