"""Client state: it is restored after each round, and no process overwrites another's state."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fedhet.base.errors import StateError
from fedhet.client_runtime.state import ClientState
from fedhet.learning.devices import CPU
from fedhet.models import Refitted

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


def test_a_new_client_has_what_setup_makes(tmp_path):
    state = opened(tmp_path)
    state.restore("run-1", before=1)
    assert (weight(state) == 0.5).all()
    assert (state.participations, state.tensors, state.metadata) == (0, {}, {})
    assert not list(tmp_path.iterdir())


def test_everything_comes_back_in_another_process(tmp_path):
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
def test_it_continues_from_the_last_round_before(tmp_path, fresh, before, expected):
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


def test_runs_and_clients_are_apart(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    state.restore("run-2", before=2)
    assert (weight(state) == 0.5).all()
    other = opened(tmp_path, client="client-1")
    other.restore("run-1", before=2)
    assert (weight(other) == 0.5).all()


def test_what_is_on_disk_is_not_read_again(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    model = state.models["private"]
    state.restore("run-1", before=2)
    assert state.models["private"] is model


def test_what_another_process_has_saved_meanwhile_is_read(tmp_path):
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


def test_a_round_that_failed_leaves_nothing_behind(tmp_path):
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


def test_a_setup_that_fails_is_tried_again(tmp_path):
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


def test_a_late_save_does_not_overwrite_a_newer_state(tmp_path):
    late = opened(tmp_path)
    late.restore("run-1", before=1)
    late.begin_round()
    play(opened(tmp_path), 1, 1.0)
    before = (tmp_path / "run-1" / "client-0" / "round-000001.safetensors").read_bytes()
    with pytest.raises(StateError, match="another worker has saved a newer state"):
        late.save(1)
    assert (tmp_path / "run-1" / "client-0" / "round-000001.safetensors").read_bytes() == before
    late.restore("run-1", before=2)
    assert (weight(late) == 1.0).all()


@pytest.mark.parametrize("name", IDENTITY)
def test_the_state_of_something_else_is_refused_by_name(tmp_path, name):
    play(opened(tmp_path), 1, 1.0)
    other = opened(tmp_path, identity={**IDENTITY, name: "another"})
    with pytest.raises(StateError) as caught:
        other.restore("run-1", before=2)
    assert f"{name} is {IDENTITY[name]!r}, expected this client's 'another'" in str(caught.value)
    with pytest.raises(StateError):  # and again: nothing of the failed attempt is taken for it
        other.restore("run-1", before=2)


def test_a_state_that_does_not_fit_the_model_is_named(tmp_path):
    play(opened(tmp_path), 1, 1.0)
    wide = opened(tmp_path, setup=lambda: {"private": nn.Sequential(nn.Linear(3, 5))})
    with pytest.raises(StateError, match=r"round-000001.* does not fit the model private"):
        wide.restore("run-1", before=2)


def test_a_state_that_could_not_be_read_is_not_taken_for_the_one_before(tmp_path):
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
def test_the_last_whole_state_is_used(tmp_path, fault, caplog):
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
def test_a_client_none_of_whose_states_is_whole_does_not_begin_anew(tmp_path, fault):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    spoil(state.folder / "round-000001.safetensors", fault)
    with pytest.raises(StateError, match="round-000001"):
        opened(tmp_path).restore("run-1", before=2)


def test_other_files_among_the_states_are_left_alone(tmp_path):
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


def test_a_model_without_gradients_is_fitted_again_once_it_is_asked(tmp_path, monkeypatch):
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


def test_an_open_state_counts_all_it_holds(tmp_path):
    state = opened(tmp_path)
    play(state, 1, 1.0)
    assert sum(tensor.nbytes for tensor in state.held_tensors()) == 4 * (12 + 4 + 16) + 8 + 4
