"""What is known of the methods without importing them, and which commands import no heavy library.

Time depends on the machine; what is imported does not. `benchmarks/start.py` measures the time.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedhet.config.declared import declarations_json, declared, declared_by
from fedhet.config.values import read_values
from fedhet.data import DataSpec, load
from fedhet.errors import SettingsError
from fedhet.methods.registry import find_method, shipped_names
from fedhet.settings.portable import from_data, to_data
from fedhet.settings.schema import build, takes

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "torchvision", "matplotlib", "flwr", "pandas", "sklearn", "ray", "tensorboard"}
AFTERWARDS = """
import atexit, sys
atexit.register(lambda: print("IMPORTED", *sorted({m.partition(".")[0] for m in sys.modules})))
from fedhet.cli import main
main()
"""


def imported_by(*words, **environment):
    """Run a command in a new process; return its status, output and top-level modules."""
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said, _, modules = done.stdout.rpartition("IMPORTED ")
    assert modules, done.stderr
    return done.returncode, said + done.stderr, set(modules.split())


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--help"], 0, "deploy-local"),
        (["--version"], 0, "0."),
        (["run", "--help"], 0, "--resume"),
        (["methods"], 0, "class-wise features and logits"),
        (["methods", "felo"], 0, "felo.share-weights"),
        (["presets"], 0, "felo-cifar10"),
        (["settings"], 0, "engine.round-timeout"),
        (["run", "felo", "--set", "lrr=1"], 2, "did you mean 'training.lr'?"),
        (["run", "felo", "--set", "lr=-1"], 2, "'training.lr' = -1"),
        (["run", "felo", "--set", "felo.alpha=-1"], 2, "'felo.alpha' = -1 is not allowed"),
        (["run", "fello"], 2, "did you mean 'felo'?"),
        (["sweep", "felo", "felo.alpha=1,-1"], 2, "'felo.alpha' = -1 is not allowed"),
        (["deploy-local", "felo", "--set", "lr=-1"], 2, "'training.lr' = -1"),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, list) else "",
)
def test_a_command_that_does_not_train_imports_nothing_heavy(words, status, says):
    found, said, modules = imported_by(*words)
    assert found == status, said
    assert says in said
    assert "fedhet" in modules
    assert not modules & HEAVY


def test_one_that_trains_does():
    _, _, modules = imported_by("models")
    assert "torch" in modules  # or the list above would prove nothing


def test_a_declaration_imports_neither_pytorch_nor_flower():
    """So that commands read the declarations themselves."""
    modules = [f"fedhet.methods.{name.replace('-', '_')}" for name in sorted(shipped_names())]
    lines = [f"import {module}" for module in modules]
    lines += ["import sys", "print(*{name.partition('.')[0] for name in sys.modules})"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(done.stdout.split())
    assert "fedhet" in imported
    assert not imported & HEAVY


def test_the_file_of_declarations_is_that_of_the_code():
    written = (ROOT / "fedhet" / "_generated" / "methods.json").read_text()
    assert json.loads(written) == json.loads(declarations_json()), "run: make reference"


@pytest.mark.parametrize("name", sorted(shipped_names()))
def test_what_is_read_from_the_file_is_what_the_code_declares(name):
    """Each setting by the words of an error and by its default; the rest as it is."""
    from_file, method = declared(name), find_method(name)
    of_code = method.settings()
    assert from_file.settings().keys() == of_code.keys()
    for key, info in from_file.settings().items():
        assert takes(info) == takes(of_code[key]), key
        assert (info.default, info.description) == (of_code[key].default, of_code[key].description)
        assert type(info.default) is type(of_code[key].default), key
    spec = method.spec
    assert (from_file.title, from_file.paper) == (spec.title, spec.paper)
    assert from_file.any_model == spec.any_model
    assert from_file.table == method.table
    assert [n for n, _, _ in from_file.client_sends] == [f.name for f in method.spec.replies.fields]
    assert [n for n, _, _ in from_file.server_sends] == [
        f.name for f in method.spec.instructions.fields
    ]


@pytest.mark.parametrize("name", sorted(shipped_names()))
def test_the_defaults_pass_the_first_check(name):
    """And so do the values of the class itself, by which the file's rules are no stricter."""
    defaults = find_method(name).spec.settings().flat()
    assert build(declared(name).schema, defaults).flat() == defaults


def test_a_table_survives_the_way_through_json():
    schema = find_method("fedproto").spec.settings  # it has `lambda`, which Python reserves
    data = json.loads(json.dumps(to_data(schema)))
    again = from_data("again", data)
    assert to_data(again) == data
    assert "lambda" in again.fields()
    with pytest.raises(SettingsError, match="'lambda' = -1 is not allowed"):
        build(again, {"lambda": -1})


def test_the_first_check_sorts_the_values():
    values = {"method": "felo", "rounds": 3, "felo.alpha": 0.5, "training.lr": 0.1}
    found = read_values(values)
    assert (found.method, found.run.rounds, found.run.training.lr) == ("felo", 3, 0.1)
    assert found.own == {"alpha": 0.5}


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"method": 1}, "'method' = 1 is not allowed"),
        ({"method": "felo", "felo.alpha": "much"}, "'felo.alpha' = 'much'"),
        ({"method": "felo", "felo.weighting": "votes"}, "one of clients, samples"),
        ({"method": "felo", "cofed.iterations": 7}, "is not of this run's method, which is felo"),
        ({"method": "felo", "nope": 1}, "unknown setting 'nope'"),
    ],
)
def test_the_first_check_refuses(values, fault):
    with pytest.raises(SettingsError, match=fault):
        read_values(values)


def test_a_method_that_the_file_lacks_is_imported(monkeypatch):
    found = declared_by(find_method("local"))
    monkeypatch.setattr("fedhet.config.declared._written", dict)
    declared.cache_clear()
    try:
        assert declared("local") == found
    finally:
        declared.cache_clear()


def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    theirs = load_digits()
    dataset = load(DataSpec(dataset="digits"))
    assert dataset.test is not None
    ours = {
        (label, tuple(((image + 1) * 8).flatten().tolist()))
        for split in (dataset.train, dataset.test)
        for image, label in zip(split.x.numpy(), split.y.tolist(), strict=True)
    }
    expected = {
        (int(label), tuple(row)) for row, label in zip(theirs.data, theirs.target, strict=True)
    }
    assert ours == expected
    assert len(dataset.train) + len(dataset.test) == 1797
    assert dataset.classes == tuple(map(str, theirs.target_names))
