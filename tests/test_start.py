"""Which commands import no heavy library, as they read the methods' declarations alone.

Time depends on the machine; what is imported does not. `benchmarks/start.py` measures the time.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedhet.config.values import validated
from fedhet.data import DataSpec, load
from fedhet.errors import SettingsError
from fedhet.methods.registry import shipped_names

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
        [sys.executable, "-P", "-c", AFTERWARDS, *words],
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


def test_a_new_setting_is_known_to_the_commands_at_once(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fedhet", tmp_path / "fedhet", ignore=ignored)
    declaration = tmp_path / "fedhet" / "methods" / "felo.py"
    old, new = "    alpha: ", '    novel: Count = Field(3, description="a new one")\n    alpha: '
    assert old in declaration.read_text()
    declaration.write_text(declaration.read_text().replace(old, new))
    _, said, modules = imported_by("methods", "felo", PYTHONPATH=str(tmp_path))
    assert "felo.novel" in said
    assert "a new one" in said
    assert not modules & HEAVY
    status, said, _ = imported_by("run", "felo", "--set", "novel=0", PYTHONPATH=str(tmp_path))
    assert status == 2
    assert "'felo.novel' = 0 is not allowed: it takes an integer >= 1" in said


def test_the_first_check_sorts_the_values():
    values = {"method": "felo", "rounds": 3, "felo.alpha": 0.5, "training.lr": 0.1}
    found = validated(values)
    assert (found.method.name, found.run.rounds, found.run.training.lr) == ("felo", 3, 0.1)
    assert found.own.flat()["alpha"] == 0.5


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"method": 1}, "'method' = 1 is not allowed"),
        ({"method": "felo", "felo.alpha": "much"}, "'felo.alpha' = 'much'"),
        ({"method": "felo", "felo.weighting": "votes"}, "one of clients, samples"),
        ({"method": "felo", "cofed.iterations": 7}, "is not one of felo, the run's method"),
        ({"method": "felo", "nope": 1}, "unknown setting 'nope'"),
    ],
)
def test_the_first_check_refuses(values, fault):
    with pytest.raises(SettingsError, match=fault):
        validated(values)


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
