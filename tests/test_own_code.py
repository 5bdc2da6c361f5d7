"""Errors in custom methods and models: their location, and their effect."""

import json

import pytest
from federation import records

BROKEN = """
from torch import nn

class Tired(nn.Module):
    def forward(self, x):
        if self.training and len(x) > 2:  # a check of the model has two
            raise TypeError("my own bug")
        return x.flatten(1)

def tired(shape, classes):
    return nn.Sequential(Tired(), nn.LazyLinear(8)), nn.Linear(8, classes)

def fixed(shape, classes):  # its features cannot be given another width
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8)), nn.Sequential(nn.Linear(8, classes))

class Unfit:  # as scikit-learn's, without gradients
    def fit(self, x, y):
        raise OSError("no more patience")

    def predict(self, x):
        return 0 * x[:, 0]

def unfit(shape, classes):
    return Unfit()

class Halves(Unfit):
    def fit(self, x, y):
        return self

def halves(shape, classes):  # its predictions are no whole numbers
    return Halves()
"""
LINE = BROKEN.splitlines().index('            raise TypeError("my own bug")') + 1
FIT = BROKEN.splitlines().index('        raise OSError("no more patience")') + 1


@pytest.fixture
def own(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_broken_nets.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return "my_broken_nets:tired"


def words(own, tmp_path, backend, *more):
    small = [f"--set={each}" for each in ("max-samples=200", "min-samples=20", "local-epochs=1")]
    common = ["--rounds=2", "--clients=2", f"--models={own},mlp", f"--backend={backend}"]
    return ["run", "local", *small, *common, f"--out={tmp_path / 'run'}", *more]


@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_error_in_user_code_ends_a_simulation_with_its_location(own, tmp_path, call, backend):
    status, said, fault = call(*words(own, tmp_path, backend))
    assert status == 2, said
    one_line = " ".join(fault.split())
    assert f"TypeError: my own bug (my_broken_nets.py, line {LINE})" in one_line
    assert 'raise TypeError("my own bug")' in one_line
    assert "fedhet/clients" not in fault  # not one's own
    whole = (tmp_path / "run" / "flower.log").read_text()
    assert "fedhet/clients/base.py" in whole
    assert f'my_broken_nets.py", line {LINE}' in whole
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_failing_classical_model_ends_a_simulation(own, tmp_path, call, backend):
    model = own.replace("tired", "unfit")
    status, said, fault = call(*words(model, tmp_path, backend))
    assert status == 2, said
    one_line = " ".join(fault.split())
    place = f"my_broken_nets.py, line {FIT}"
    assert f"model '{model}' cannot be fitted: OSError: no more patience ({place})" in one_line
    assert 'raise OSError("no more patience")' in one_line
    assert not (tmp_path / "run" / "summary.json").exists()


def test_model_that_predicts_no_classes_ends_a_simulation(own, tmp_path, call):
    model = own.replace("tired", "halves")
    status, said, fault = call(*words(model, tmp_path, "inline"))
    assert status == 2, said
    assert f"code failed: model '{model}': predictions must be integers" in " ".join(fault.split())
    assert ".py" not in fault  # nothing of one's own was on the way


def test_failure_of_scikit_learn_affects_one_client(own, tmp_path, call, monkeypatch):
    from sklearn.tree import DecisionTreeClassifier

    def failing(self, x, y):
        raise ValueError("a tree of stone")

    monkeypatch.setattr(DecisionTreeClassifier, "fit", failing)
    status, said, _ = call(*words("sk-tree", tmp_path, "inline"))
    assert status == 0, said
    assert "cannot be fitted: ValueError: a tree of stone" in " ".join(said.split())


def test_other_clients_continue_without_strict(own, tmp_path, call):
    status, said, _ = call(*words(own, tmp_path, "inline", "--no-strict"))
    assert status == 0
    assert said.count('raise TypeError("my own bug")') == 1
    assert [sorted(record["failed"]) for record in records(tmp_path / "run")] == [["client-0"]] * 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"]["common"]["private"]["per_client"].keys() == {"client-1"}


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_unsupported_custom_model_raises_before_round_1(own, tmp_path, call, backend):
    model = own.replace("tired", "fixed")
    _, _, *settings = words(model, tmp_path, backend)
    status, said, fault = call("run", "felo", *settings)
    assert status == 2, said
    assert (
        f"model '{model}': the classifier must be an nn.Linear to adapt 8 features to 64"
        in " ".join(fault.split())
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


GREEDY = """
import os
from pathlib import Path

import torch
from torch import nn

class Greedy(nn.Module):
    def forward(self, x):
        place = Path(os.environ["FEDHET_TEST_PLACE"])
        if self.training and len(x) > 2 and not place.exists():
            if not os.environ.get("FEDHET_TEST_ALWAYS"):
                place.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return x.flatten(1)

def greedy(shape, classes):
    return nn.Sequential(Greedy(), nn.LazyLinear(8)), nn.Linear(8, classes)
"""


@pytest.fixture
def greedy(tmp_path, monkeypatch, own):
    (tmp_path / "mine" / "my_greedy_nets.py").write_text(GREEDY)
    monkeypatch.setenv("FEDHET_TEST_PLACE", str(tmp_path / "place"))
    return "my_greedy_nets:greedy"


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_client_out_of_gpu_memory_is_called_alone(greedy, tmp_path, call, backend):
    status, said, fault = call(*words(greedy, tmp_path, backend))
    assert status == 0, fault
    again = "client-0 ran out of GPU memory and is called again without other clients"
    assert " ".join((said + fault).split()).count(again) == 1
    assert [record["failed"] for record in records(tmp_path / "run")] == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_client_that_does_not_fit_alone_fails(greedy, tmp_path, call, monkeypatch, backend):
    monkeypatch.setenv("FEDHET_TEST_ALWAYS", "yes")
    status, _, fault = call(*words(greedy, tmp_path, backend))
    assert status == 0, fault
    for record in records(tmp_path / "run"):
        assert list(record["failed"]) == ["client-0"]
        assert "does not fit in GPU memory, even without other clients (CUDA out of" in str(
            record["failed"]
        )
