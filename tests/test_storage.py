"""Private state on disk: it is restored bit for bit, and crashes leave no partial state."""

import errno
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import fedhet.runs.storage
from fedhet.base.disk import Folder
from fedhet.base.errors import StateError
from fedhet.runs.storage import ClientStore, load, load_metadata, save

CPU = torch.device("cpu")
STATE = "round-000001.safetensors"
OLD = {"w": torch.full((1000,), 1.0)}, {"version": 1}
NEW = {"w": torch.full((1000,), 2.0)}, {"version": 2}


@pytest.fixture
def store(tmp_path):
    return ClientStore(tmp_path, "run-1", "client-0")


def identical(left, right):
    """Equal in type, shape and every bit, NaN included."""
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*raw)


def files(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


# --- round trips ----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.fc(x))


def trained_net():
    torch.manual_seed(3)
    model = Net()
    for _ in range(5):
        model(torch.randn(8, 3))
    return model


def test_model_with_counters_round_trips(store):
    model = trained_net()
    store.save(1, model.state_dict(), {"version": 1})
    tensors, _ = store.load(1)
    assert tensors["bn.num_batches_tracked"].item() == 5
    other = Net()
    other.load_state_dict(tensors)
    for name, tensor in model.state_dict().items():
        assert identical(other.state_dict()[name], tensor)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool]
DTYPES += [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 1)])
def test_every_dtype_round_trips(store, dtype, shape):
    generator = torch.Generator().manual_seed(1)
    high = 2 if dtype == torch.bool else 256
    # Random bits: NaN with payloads, infinities and subnormal numbers among them.
    raw = torch.randint(0, high, (240,), generator=generator, dtype=torch.uint8).view(dtype)
    tensor = raw[: torch.Size(shape).numel()].reshape(shape)
    store.save(1, {"t": tensor}, {})
    assert identical(store.load(1)[0]["t"], tensor)


LAYOUTS = {
    "transposed": lambda x: x.mT,
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "part of a larger one": lambda x: x[1:2],
    "needs a gradient": lambda x: x.clone().requires_grad_(),
    "a parameter": lambda x: nn.Parameter(x.clone()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout_round_trips(store, layout):
    tensor = LAYOUTS[layout](torch.randn(2, 4, 6, 8))
    store.save(1, {"t": tensor}, {})
    (loaded,) = store.load(1)[0].values()
    assert identical(loaded, tensor)
    assert not loaded.requires_grad


def tied():
    weight = torch.arange(6.0).reshape(2, 3)
    return {"encoder": weight, "decoder": weight}


def overlapping():
    base = torch.arange(10.0)
    return {"a": base[:7], "b": base[3:]}


def halves():
    base = torch.arange(10.0)
    return {"a": base[:5], "b": base[5:]}


def viewed():
    base = torch.arange(6.0)
    return {"a": base, "b": base.reshape(2, 3)}


def tied_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model.state_dict()


@pytest.mark.parametrize("make", [tied, overlapping, halves, viewed, tied_module])
def test_tensors_sharing_storage_round_trip(store, make):
    tensors = make()
    store.save(1, tensors, {})
    loaded, _ = store.load(1)
    assert loaded.keys() == tensors.keys()
    assert all(identical(loaded[name], tensors[name]) for name in tensors)


facts = st.dictionaries(
    st.text(max_size=10),
    st.one_of(st.integers(-(10**30), 10**30), st.floats(allow_nan=False), st.text(max_size=20)),
    max_size=5,
)
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20)


@settings(max_examples=60, derandomize=True)
@given(facts, st.dictionaries(names, st.integers(0, 3), max_size=4))
def test_metadata_and_names_round_trip(tmp_path_factory, kept, sizes):
    path = tmp_path_factory.getbasetemp() / "facts" / "state.safetensors"
    tensors = {name: torch.full((size,), float(size)) for name, size in sizes.items()}
    save(path, tensors, kept)
    loaded, came = load(path)
    assert came == kept == load_metadata(path)
    assert {name: type(value) for name, value in came.items()} == {
        name: type(value) for name, value in kept.items()
    }
    assert loaded.keys() == tensors.keys()
    assert all(identical(loaded[name], tensors[name]) for name in tensors)


def test_saving_again_replaces_the_state(store):
    for number in range(4):
        store.save(1, {f"t{number}": torch.tensor(number)}, {"version": number})
        tensors, facts = store.load(1)
        assert facts == store.metadata(1) == {"version": number}
        assert list(tensors) == [f"t{number}"]
    assert files(store.root) == [STATE]


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_last_three_rounds_are_kept_and_later_rounds_deleted(rounds):
    with tempfile.TemporaryDirectory() as root:
        store = ClientStore(Path(root), "run-1", "client-0")
        expected: list[int] = []
        for version, number in enumerate(rounds):
            store.save(number, {"w": torch.tensor(version)}, {"version": version})
            expected = [*[known for known in expected if known < number][-2:], number]
            assert store.rounds() == expected
            assert store.load(number)[0]["w"] == version == store.metadata(number)["version"]


def test_unknown_name_is_not_found(store):
    store.save(1, *OLD)
    (store.folder / "round-x.safetensors").touch()
    assert store.rounds() == [1]


def test_loaded_tensors_survive_the_next_save(store):
    """The file is mapped into memory, and a new state must not change an old tensor."""
    store.save(1, *OLD)
    old, _ = store.load(1)
    store.save(1, *NEW)
    assert torch.equal(old["w"], OLD[0]["w"])
    old["w"] += 5
    assert torch.equal(store.load(1)[0]["w"], NEW[0]["w"])


def test_states_of_clients_and_runs_are_separate(tmp_path):
    stores = [ClientStore(tmp_path, run, client) for run in ("a", "b") for client in ("c", "d")]
    for number, one in enumerate(stores):
        one.save(1, {}, {"version": number})
    assert [one.metadata(1) for one in stores] == [{"version": n} for n in range(4)]


def test_load_without_saved_state(store):
    assert store.rounds() == []
    for read in (store.metadata, lambda round: store.load(round)):
        with pytest.raises(StateError):
            read(1)
    assert files(store.root) == []


# --- names ----------------------------------------------------------------------------------

BAD = ["", ".", "..", "../x", "a/b", "/etc/passwd", ".ssh", "a\\..\\b", "x" * 101, "a\0b", "a\n"]


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_name_that_leaves_the_directory_raises(tmp_path, name):
    for run, client in ((name, "client-0"), ("run-1", name)):
        with pytest.raises(StateError) as caught:
            ClientStore(tmp_path, run, client)
        assert repr(name) in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    assert files(tmp_path) == []


@settings(max_examples=200, derandomize=True)
@given(st.text("ab./\\~\0\n-", max_size=6), st.text("ab./\\~\0\n-", max_size=6))
def test_states_are_stored_below_the_root(run, client):
    root = Path("/state")
    try:
        path = ClientStore(root, run, client).path(1)
    except StateError:
        return
    assert Path(os.path.normpath(path)).parts[:2] == root.parts
    assert len(Path(os.path.normpath(path)).parts) == 5


# --- what is no state -----------------------------------------------------------------------


def fault(path, read=lambda path: load(path)):
    """Return the single line of the StateError, which names the path."""
    with pytest.raises(StateError) as caught:
        read(path)
    message = str(caught.value)
    assert str(path) in message
    assert len(message.splitlines()) == 1
    return message


def test_truncated_file_raises(store):
    store.save(1, trained_net().state_dict(), {"version": 3, "method": "felo"})
    whole = store.path(1).read_bytes()
    for end in itertools.chain(range(0, len(whole) - 1, 7), [len(whole) - 1]):
        store.path(1).write_bytes(whole[:end])
        fault(store.path(1))
        fault(store.path(1), load_metadata)


def test_file_with_extra_bytes_raises(store):
    store.save(1, *OLD)
    store.path(1).write_bytes(store.path(1).read_bytes() + b"\0")
    fault(store.path(1))


@settings(max_examples=300, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_header_bytes_raise(tmp_path_factory, flips):
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    save(path, OLD[0], OLD[1])
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for position, value in flips:
        data[position % header] = value
    path.write_bytes(data)
    try:
        load(path)
    except StateError as error:
        message = str(error)
    else:
        return
    assert str(path) in message


GARBAGE = {
    "nothing": b"",
    "text": b"not a state\n" * 10,
    "zeros": bytes(1000),
    "a header of 2**63 bytes": b"\xff" * 7 + b"\x7f" + b"{}",
    "a header of 90 MB": (90 * 2**20).to_bytes(8, "little") + b"{}",
    "a pickle": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00N.",
    "a zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_file_raises(tmp_path, case):
    path = tmp_path / "state.safetensors"
    path.write_bytes(GARBAGE[case])
    fault(path)
    fault(path, load_metadata)


METADATA = {
    "none": None,
    "empty": {},
    "of another tool": {"format": "pt"},
    "no JSON": {"fedhet": "{"},
    "empty text": {"fedhet": ""},
    "a list": {"fedhet": "[]"},
    "a number": {"fedhet": "3"},
    "null": {"fedhet": "null"},
    "a number of 5000 digits": {"fedhet": '{"version": ' + "9" * 5000 + "}"},
    "100,000 brackets": {"fedhet": "[" * 100_000},
}


@pytest.mark.parametrize("case", METADATA)
def test_foreign_safetensors_file_raises(tmp_path, case):
    path = tmp_path / "state.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata=METADATA[case])
    fault(path)
    fault(path, load_metadata)


def test_directory_in_place_of_a_state_raises(tmp_path):
    path = tmp_path / "state.safetensors"
    path.mkdir()
    fault(path)
    assert "cannot write" in fault(path, lambda path: save(path, {}, {}))
    assert files(tmp_path) == []


def test_file_in_place_of_a_directory_raises(tmp_path):
    (tmp_path / "run-1").write_text("mine")
    one = ClientStore(tmp_path, "run-1", "client-0")
    assert "cannot write" in fault(one.path(1), lambda _: one.save(1, {}, {}))
    assert (tmp_path / "run-1").read_text() == "mine"


# --- a crash in the middle ------------------------------------------------------------------


def half_written(tensors, path, metadata):
    """Simulate a full disk after half of the file."""
    save_file(tensors, path, metadata=metadata)
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)
    raise OSError(errno.ENOSPC, "No space left on device")


def fails(*_args, **_options):
    raise OSError(errno.EIO, "Input/output error")


CRASHES = {
    "disk full": ("fedhet.runs.storage.save_file", half_written, "No space left"),
    "sync fails": ("fedhet.base.disk.os.fsync", fails, "Input/output error"),
    "rename fails": ("fedhet.base.disk.os.replace", fails, "Input/output error"),
    "no temporary file": ("fedhet.base.disk.os.open", fails, "Input/output error"),
}


@pytest.mark.parametrize("case", CRASHES)
@pytest.mark.parametrize("first", [True, False], ids=["first save", "a later save"])
def test_failed_write_keeps_the_previous_state(store, monkeypatch, case, first):
    if not first:
        store.save(1, *OLD)
        before = store.path(1).read_bytes()
    target, replacement, reason = CRASHES[case]
    with monkeypatch.context() as patch:
        patch.setattr(target, replacement)
        message = fault(store.path(1), lambda _: store.save(1, *NEW))
    assert reason in message
    assert files(store.root) == ([] if first else [STATE])
    if first:
        assert store.rounds() == []
    else:
        assert store.path(1).read_bytes() == before
        assert torch.equal(store.load(1)[0]["w"], OLD[0]["w"])
    store.save(1, *NEW)
    assert store.metadata(1) == NEW[1]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError, SystemExit])
def test_interrupted_write_keeps_the_previous_state(store, monkeypatch, raised):
    def interrupted(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise raised

    store.save(1, *OLD)
    with monkeypatch.context() as patch:
        patch.setattr(fedhet.runs.storage, "save_file", interrupted)
        with pytest.raises(raised):
            store.save(1, *NEW)
    assert files(store.root) == [STATE]
    assert store.load(1)[1] == OLD[1]


def test_write_cut_off_by_the_system_keeps_the_previous_state(tmp_path):
    """A real failure of write(2) in the middle of a file, in a separate process."""
    script = """
import resource, sys, torch
from pathlib import Path
from fedhet.base.errors import StateError
from fedhet.runs.storage import ClientStore
store = ClientStore(Path(sys.argv[1]), "run-1", "client-0")
store.save(1, {"w": torch.ones(100)}, {"version": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.save(1, {"w": torch.zeros(1_000_000)}, {"version": 2})
except StateError as error:
    assert str(store.path(1)) in str(error), error
else:
    raise SystemExit("nothing failed")
tensors, facts = store.load(1)
assert facts == {"version": 1} and tensors["w"].sum() == 100
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == [STATE]


def test_read_only_directory_raises(store):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    store.save(1, *OLD)
    folder = store.path(1).parent
    folder.chmod(0o500)
    try:
        fault(store.path(1), lambda _: store.save(1, *NEW))
        assert store.metadata(1) == OLD[1]
    finally:
        folder.chmod(0o700)


def test_replace_moves_only_finished_files(tmp_path):
    path = tmp_path / "deep" / "er" / "summary.json"
    with Folder(path.parent).replacing(path.name) as temporary:
        temporary.write_text("{}")
        assert temporary.parent.samefile(path.parent), "a rename is atomic within one file system"
        assert not path.exists()
    assert path.read_text() == "{}"
    assert files(tmp_path) == ["summary.json"]


KILLED = """
import os, random, signal, sys, torch
from pathlib import Path
from fedhet.runs.storage import ClientStore

torch.set_num_threads(1)
store = ClientStore(Path(sys.argv[1]), "run-1", "client-0")
draw = random.Random(7)
store.save(1, {"w": torch.zeros(60_000)}, {"version": 0})
least = 0
for _ in range(int(sys.argv[2])):
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        version = least
        while True:
            version += 1
            store.save(1, {"w": torch.full((60_000,), float(version))}, {"version": version})
            os.write(told, b"x")
    os.close(told)
    for _ in range(draw.randint(1, 3)):
        os.read(heard, 1)
        least += 1
    for _ in range(draw.randint(0, 40_000)):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(heard)
    tensors, facts = store.load(1)
    version = facts["version"]
    assert version >= least, (version, least)
    assert (tensors["w"] == version).all(), version
    least = version
print(least)
"""


@pytest.fixture(scope="module")
def after_kills(tmp_path_factory):
    """The directory of a writer that was killed 60 times, and the killer's observations."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, folder, "60"], capture_output=True, text=True, check=False
    )
    return folder, done


def test_killed_writer_leaves_a_complete_state(after_kills):
    _, done = after_kills
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 60


def test_save_deletes_leftovers_of_killed_writers(after_kills):
    """Each file may be as large as a model, so a client that restarts often would fill its disk."""
    folder, _ = after_kills
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9))
    ClientStore(folder, "run-1", "client-0").save(1, *OLD)
    assert files(folder) == [STATE]
