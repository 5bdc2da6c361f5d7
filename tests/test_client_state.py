"""Client state: it is restored after each round, and no process overwrites another's state."""

import ast
import contextlib
import gc
import io
import itertools
import sys
import threading
import time

import numpy as np
import pytest
import torch
from flwr.client import NumPyClient
from flwr.common import FitIns, ndarrays_to_parameters
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fedhet.base.arrays import read_npy
from fedhet.base.disk import load_npz, map_npy
from fedhet.base.errors import StateError
from fedhet.client_runtime.state import ClientState, MessageClient, ReplyStore
from fedhet.data.sources.arrays import kind_of_arrays_in, read_arrays
from fedhet.data.spec import DataSpec
from fedhet.kinds import TABLE
from fedhet.learning.devices import CPU
from fedhet.models import Refitted
from fedhet.wire.knowledge import join
from fedhet.wire.knowledge import read_npy as read_tensor

IDENTITY = {"method": "felo", "model": "mlp", "task": "2 classes of shape [3]"}


def network():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    return model


def opened(root, identity=IDENTITY, setup=None, training_set=None, client="client-0"):
    """Open a client's state like a separate process."""
    return ClientState(
        root,
        client,
        identity,
        CPU,
        setup=setup or (lambda: {"private": network()}),
        training_set=training_set or (lambda: pytest.fail("nothing is refitted")),
    )


def weight(state):
    return state.models["private"][0].weight


def play(state, round, value, run="run-1"):
    """Take part in a round that sets the weights to `value`."""
    state.restore(run, before=round)
    state.begin_round()
    with torch.no_grad():
        weight(state).fill_(value)
    state.tensors["seen"] = torch.tensor([value])
    state.metadata |= {"participations": state.participations + 1, "note": f"round {round}"}
    state.save(round)


def test_new_client_has_the_state_of_setup(tmp_path):
    state = opened(tmp_path)
    state.restore("run-1", before=1)
    assert (weight(state) == 0.5).all()
    assert (state.participations, state.tensors, state.metadata) == (0, {}, {})
    assert not list(tmp_path.iterdir())


def test_state_is_restored_in_another_process(tmp_path):
    play(opened(tmp_path), 1, 1.0)
    one = opened(tmp_path)
    one.restore("run-1", before=2)
    one.begin_round()
    one.models["private"](torch.randn(5, 3))  # moves the running statistics and their counter
    one.tensors = {"a/b": torch.arange(3), "empty": torch.zeros(0, 2)}
    one.metadata = {"participations": 2, "share": 0.25, "name": "ü"}
    one.save(2)
    other = opened(tmp_path)
    other.restore("run-1", before=3)
    assert other.metadata == one.metadata
    assert other.participations == 2
    assert other.tensors.keys() == one.tensors.keys()
    assert all(torch.equal(other.tensors[name], one.tensors[name]) for name in one.tensors)
    state = other.models["private"].state_dict()
    assert state["1.num_batches_tracked"] == 1
    for name, tensor in one.models["private"].state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert other.folder == tmp_path / "run-1" / "client-0"


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("before", "expected"), [(1, 0.5), (2, 1.0), (3, 2.0), (9, 3.0)])
def test_client_continues_from_the_last_round(tmp_path, fresh, before, expected):
    state = opened(tmp_path)
    for round in (1, 2, 3):
        play(state, round, float(round))
    if fresh:
        state = opened(tmp_path)
    state.restore("run-1", before=before)
    assert (weight(state) == expected).all()
    assert state.participations == int(expected)
    assert [tensor.tolist() for tensor in state.tensors.values()] == (
        [[expected]] if before > 1 else []
    )


def test_states_of_runs_and_clients_are_separate(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    state.restore("run-2", before=2)
    assert (weight(state) == 0.5).all()
    other = opened(tmp_path, client="client-1")
    other.restore("run-1", before=2)
    assert (weight(other) == 0.5).all()


def test_current_state_is_not_read_again(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    model = state.models["private"]
    state.restore("run-1", before=2)
    assert state.models["private"] is model


def test_state_saved_by_another_process_is_read(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    play(opened(tmp_path), 2, 2.0)
    state.restore("run-1", before=3)
    assert (weight(state) == 2.0).all()
    assert state.metadata["note"] == "round 2"
    # A server that fell back: round 2 once more, by another process, and as different.
    play(opened(tmp_path), 2, 4.0)
    state.restore("run-1", before=3)
    assert (weight(state) == 4.0).all()


def test_failed_round_leaves_no_state(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    state.restore("run-1", before=2)
    state.begin_round()
    with torch.no_grad():
        weight(state).fill_(torch.nan)
    state.metadata["note"] = "half"
    state.restore("run-1", before=2)
    assert (weight(state) == 1.0).all()
    assert state.metadata["note"] == "round 1"


def test_failed_setup_is_repeated(tmp_path):
    faults = [RuntimeError("no memory")]

    def setup():
        if faults:
            raise faults.pop()
        return {"private": network()}

    state = opened(tmp_path, setup=setup)
    with pytest.raises(RuntimeError):
        state.restore("run-1", before=1)
    state.restore("run-1", before=1)
    assert (weight(state) == 0.5).all()


def test_late_save_keeps_the_newer_state(tmp_path):
    late = opened(tmp_path)
    late.restore("run-1", before=1)
    late.begin_round()
    play(opened(tmp_path), 1, 1.0)
    before = (tmp_path / "run-1" / "client-0" / "round-000001.safetensors").read_bytes()
    with pytest.raises(StateError, match="newer"):
        late.save(1)
    assert (tmp_path / "run-1" / "client-0" / "round-000001.safetensors").read_bytes() == before
    late.restore("run-1", before=2)
    assert (weight(late) == 1.0).all()


@pytest.mark.parametrize("name", IDENTITY)
def test_foreign_state_raises_with_its_name(tmp_path, name):
    play(opened(tmp_path), 1, 1.0)
    other = opened(tmp_path, identity={**IDENTITY, name: "another"})
    with pytest.raises(StateError) as caught:
        other.restore("run-1", before=2)
    assert f"{name} is {IDENTITY[name]!r}, expected this client's 'another'" in str(caught.value)
    with pytest.raises(StateError):  # and again: nothing of the failed attempt is taken for it
        other.restore("run-1", before=2)


def test_state_of_another_model_raises(tmp_path):
    play(opened(tmp_path), 1, 1.0)
    wide = opened(tmp_path, setup=lambda: {"private": nn.Sequential(nn.Linear(3, 5))})
    with pytest.raises(StateError, match=r"round-000001.*private"):
        wide.restore("run-1", before=2)


def test_unreadable_state_is_not_replaced_by_the_previous(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    wide = opened(tmp_path, setup=lambda: {"private": nn.Sequential(nn.Linear(3, 5))})
    wide.restore("run-1", before=1)
    wide.begin_round()
    wide.save(2)
    with torch.no_grad():
        weight(state).fill_(5.0)
    state.restore("run-1", before=3)
    assert (weight(state) == 1.0).all(), "read again: what is in memory is not of round 1"


def spoil(path, fault):
    """Damage a state, or replace it by another state."""
    folder, root = path.parent, path.parents[2]
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "no state":
        save_file({"w": torch.zeros(2)}, path)
    elif fault == "NaN":
        tensors = load_file(path)
        tensors["private/0.weight"][0, 0] = torch.nan
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file(tensors, path, metadata)
    elif fault == "of another client":
        play(opened(root, client="client-1"), 3, 7.0)
        path.write_bytes((folder.with_name("client-1") / path.name).read_bytes())
    elif fault == "of another run":
        play(opened(root), 3, 7.0, run="run-2")
        path.write_bytes((root / "run-2" / folder.name / path.name).read_bytes())
    else:
        assert fault == "of another round"
        path.write_bytes((folder / "round-000001.safetensors").read_bytes())


FAULTS = [
    "cut", "empty", "no state", "NaN", "of another client", "of another run", "of another round"
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_last_valid_state_is_used(tmp_path, fault, caplog):
    state = opened(tmp_path)
    for round in (1, 2, 3):
        play(state, round, float(round))
    spoil(state.folder / "round-000003.safetensors", fault)
    again = opened(tmp_path)
    play(again, 4, 4.0)
    assert again.metadata["participations"] == 3, "rounds 1, 2 and 4"
    assert "round-000003" in caplog.text
    assert "using the state of round 2" in caplog.text
    caplog.clear()
    play(again, 5, 5.0)
    fresh = opened(tmp_path)
    fresh.restore("run-1", before=6)
    assert (weight(fresh) == 5.0).all()
    assert not caplog.text


@pytest.mark.parametrize("fault", FAULTS[:4])
def test_client_without_a_valid_state_raises(tmp_path, fault):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    spoil(state.folder / "round-000001.safetensors", fault)
    with pytest.raises(StateError, match="round-000001"):
        opened(tmp_path).restore("run-1", before=2)


def test_other_files_among_the_states_are_kept(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    odd = [state.folder / f"round-{name}.safetensors" for name in ("x", "\u0663", "1" * 40, "-2")]
    for path in odd:
        path.touch()
    for round in (2, 3, 4, 5):
        play(opened(tmp_path), round, float(round))
    assert all(path.exists() for path in odd)


class Majority:
    """A classifier that predicts the most frequent class; `fitted` counts its fits."""

    fitted = 0

    def fit(self, x, y):
        type(self).fitted += 1
        self.found = max(set(y.tolist()), key=y.tolist().count)

    def predict(self, x):
        return torch.full((len(x),), self.found).numpy()


def test_classical_model_is_fitted_again_when_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(Majority, "fitted", 0)
    x, y = torch.zeros(5, 3), torch.tensor([0, 1, 1, 1, 0])

    def state():
        model = Refitted("majority", Majority, 2, seed=0)
        return opened(tmp_path, setup=lambda: {"private": model}, training_set=lambda: (x, y))

    one = state()
    one.restore("run-1", before=1)
    assert one.models["private"].predict(x).tolist() == [0] * 5  # it knows nothing yet
    one.metadata["participations"] = 1
    one.save(1)
    other = state()
    other.restore("run-1", before=2)
    assert Majority.fitted == 0
    for _ in range(2):
        assert other.models["private"].predict(x).tolist() == [1] * 5
        other.restore("run-1", before=2)
    assert Majority.fitted == 1


def test_open_state_counts_all_its_memory(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    assert sum(tensor.nbytes for tensor in state.held_tensors()) == 4 * (12 + 4 + 16) + 8 + 4


# --- the race of Python's `ast` -----------------------------------------------------------------


ROWS = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.array([0, 1, 1])}


class Echo(NumPyClient):
    """A client that returns the arrays of the message."""

    def fit(self, parameters, config):
        return parameters, 1, {}


def readers(root):
    """Return functions that read .npy headers, and return the values of the array x."""
    path = root / "train" / "0.npz"
    path.parent.mkdir()
    np.savez(path, **ROWS)
    np.save(root / "x.npy", ROWS["x"])
    replies = ReplyStore(root, "run-1", "client-0", "answer")
    replies.put(1, list(ROWS.values()))
    message, client = FitIns(ndarrays_to_parameters([ROWS["x"]]), {}), MessageClient(Echo())
    return {
        "stored reply": lambda: replies.get(1)[0],
        "data": lambda: read_arrays(path, ("x", "y"), DataSpec())["x"],
        "kind": lambda: ROWS["x"] if kind_of_arrays_in(str(root)) is TABLE else None,
        "mapped file": lambda: map_npy(root / "x.npy"),
        "message": lambda: read_tensor(client.fit(message).parameters.tensors[0], "client-0", "x"),
    }


def test_reply_is_joined_if_the_instruction_is():
    plain = ndarrays_to_parameters([ROWS["x"], np.arange(3, dtype=np.uint8), ROWS["x"]])
    client = MessageClient(Echo())
    assert client.fit(FitIns(plain, {})).parameters == plain
    assert client.fit(FitIns(join(plain), {})).parameters == join(plain)
    assert len(join(plain).tensors) == 1


NAMES = ("stored reply", "data", "kind", "mapped file", "message")


@pytest.mark.parametrize("name", NAMES)
def test_no_reader_uses_ast(name, tmp_path, monkeypatch):
    def disturbed(text):
        raise SystemError("AST constructor recursion depth mismatch (before=81, after=84)")

    read = readers(tmp_path)[name]
    monkeypatch.setattr(ast, "literal_eval", disturbed)
    np.testing.assert_array_equal(read(), ROWS["x"])


ARRAYS = [
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    np.array(7, np.int64),
    np.zeros((0, 3), np.float32),
    np.array(["a", "öß"]),
    np.array([b"xy", b""]),
    np.array([True, False]),
    np.array(["2024-02-29"], "M8[D]"),
    np.array(["", ""], "U0"),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    np.zeros((1,) * 12),
    np.arange(400_000.0),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_read_like_numpy(array, save, tmp_path):
    save(tmp_path / "both.npz", first=array, second=array[..., ::-1] if array.ndim else array)
    with np.load(tmp_path / "both.npz") as expected:
        found = load_npz(tmp_path / "both.npz")
        assert list(found) == expected.files
        for name, value in found.items():
            assert value.dtype == expected[name].dtype
            assert value.flags.f_contiguous == expected[name].flags.f_contiguous
            assert value.flags["W"]
            np.testing.assert_array_equal(value, expected[name])


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format_is_read(version):
    file = io.BytesIO()
    np.lib.format.write_array(file, ROWS["x"], version)
    file.seek(0)
    np.testing.assert_array_equal(read_npy(file), ROWS["x"])


@pytest.mark.parametrize("fault", ["object", "short", "header", "dtype", "magic", "empty"])
def test_damaged_array_raises(fault, tmp_path):
    file = io.BytesIO()
    np.save(file, np.array([{}] if fault == "object" else [1.0, 2.0]), allow_pickle=True)
    data = file.getvalue()
    damaged = {
        "short": data[:-1],
        "header": data.replace(b"'shape'", b"'shade'"),
        "dtype": data.replace(b"<f8", b"<f9"),
        "magic": b"x" + data[1:],
        "empty": b"",
    }.get(fault, data)
    with pytest.raises(ValueError, match=r"."):
        read_npy(io.BytesIO(damaged))
    (tmp_path / "x.npy").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"."):
        map_npy(tmp_path / "x.npy")


@pytest.mark.slow
def test_threads_that_use_ast_do_not_disturb_readers(tmp_path):
    """Garbage collection lets threads take turns within `ast`.

    On Python 3.11.7, most runs of this test fail if NumPy reads the headers.
    """
    reads, program = readers(tmp_path), "{'shape': (3, 4), 'descr': '<f4'}"
    done, faults, parsed = threading.Event(), [], itertools.count()

    def parse():
        while not done.is_set():
            with contextlib.suppress(SystemError):
                ast.parse(program)
            next(parsed)

    def read_often(read):
        try:
            for _ in range(1000):
                np.testing.assert_array_equal(read(), ROWS["x"])
        except Exception as error:
            faults.append(error)

    def take_turns(phase, info):
        time.sleep(0.0005)

    parsers = [threading.Thread(target=parse) for _ in range(2)]
    readings = [threading.Thread(target=read_often, args=(read,)) for read in reads.values()]
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(11)
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(take_turns)
    try:
        for thread in (*parsers, *readings):
            thread.start()
        for thread in readings:
            thread.join()
    finally:
        done.set()
        for thread in parsers:
            thread.join()
        gc.callbacks.remove(take_turns)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert faults == []
    assert next(parsed) > 1
