"""Modules named in a received directory are imported only if the user trusts them by name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from federation import run, small, without_figures

import fedhet
from fedhet.base.errors import SettingsError
from fedhet.inference.client import open_client
from fedhet.inference.export import export

OWN = """
import pathlib
import numpy as np
import torch
pathlib.Path(__file__).with_suffix(".imported").touch()
def load():
    rng = np.random.default_rng(0)
    return rng.standard_normal((200, 6)).astype("float32"), rng.integers(0, 2, 200)
def wide(shape, classes):
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8))
    return extractor, torch.nn.Linear(8, classes)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Create a module on the path, and return a function that detects its import."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "theirs.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    marker = tmp_path / "modules" / "theirs.imported"

    def was_imported():
        found = marker.exists()
        marker.unlink(missing_ok=True)
        sys.modules.pop("theirs", None)
        return found

    yield was_imported
    sys.modules.pop("theirs", None)


def received(tmp_path, **changes):
    with without_figures():
        directory = run(small("local", clients=2, **changes), tmp_path / "run")
    return tmp_path / "run", directory


def test_untrusted_model_raises_with_its_name(tmp_path, own, call, monkeypatch):
    directory, _ = received(tmp_path, models=["theirs:wide"])
    assert own()
    image = directory / "x.npz"
    fedhet_commands = [
        ("predict", directory, "client-0", image),
        ("export", directory, "client-0", "--format", "pt2", "--out", tmp_path / "m.pt2"),
        ("run", "--resume", directory, "--rounds", "3"),
    ]
    for words in fedhet_commands:
        status, _, error = call(*words)
        assert status == 2
        assert "would import untrusted code, 'theirs:wide'" in error
        assert "--trust theirs" in error
        assert not own(), words
    for words in fedhet_commands[1:]:
        status, _, error = call(*words, "--trust", "others,theirs")
        assert status == 0, error
        assert own()
    monkeypatch.setenv("FEDHET_TRUST", "theirs:wide")
    assert open_client(directory, "client-0").network("private")


def test_from_python(tmp_path, own):
    directory, _ = received(tmp_path, models=["theirs:wide"])
    assert own()
    with pytest.raises(SettingsError, match="trust='theirs'"):
        fedhet.load(directory).model("client-0")
    with pytest.raises(SettingsError, match="untrusted"):
        fedhet.run(resume=directory, rounds=3, progress=False)
    assert not own()
    assert fedhet.load(directory, trust="theirs").model("client-0")
    assert own()


def test_untrusted_method_is_not_imported_for_its_settings(tmp_path, own, call):
    directory, _ = received(tmp_path, models=["mlp"])
    config = directory / "config.toml"
    config.write_text(config.read_text().replace('method = "local"', 'method = "theirs.local"'))
    for words in (("report", directory), ("run", "--resume", directory)):
        call(*words)
        assert not own(), words
    for record in directory.rglob("client.json"):
        record.write_text(record.read_text().replace('"method": "local"', '"method": "theirs.x"'))
    status, _, error = call("predict", directory, "client-0", "x.npz")
    assert (status, own()) == (2, False)
    assert "'method' would import untrusted code, 'theirs.x'" in error


def test_network_predicts_without_the_function_of_its_data(tmp_path, own):
    directory, _ = received(tmp_path, dataset="python:theirs:load", models=["mlp"])
    assert own()
    client = open_client(directory, "client-0")
    assert client.record.format.shape == (6,)
    assert not own()
    with pytest.raises(SettingsError, match="'theirs:load'"):
        client.accuracy()
    assert not own()
    card = export(client, "safetensors", tmp_path / "m.safetensors")
    assert "is unavailable on this machine" in json.loads(card.read_text())["accuracy_unknown"]
    assert not own()
    assert open_client(directory, "client-0", trust="theirs").accuracy()


@pytest.mark.parametrize("words", [["report", "."], ["methods"], ["predict", ".", "a", "b"]])
def test_nothing_is_imported_from_the_working_directory(tmp_path, words):
    for name in ("typer", "numpy", "rich", "pandas", "matplotlib", "pydantic"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the folder')")
    root = Path(fedhet.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "fedhet", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "imported from the folder" not in done.stdout + done.stderr
    assert not shutil.which("fedhet", path=str(tmp_path))
