"""The command line, as users see it."""

import re
import signal
import subprocess
import sys
import time

import pytest
from federation import SMALL
from typer.testing import CliRunner

from fedhet.cli import app
from fedhet.config.resolve import resolve
from fedhet.config.sources import gather
from fedhet.settings.schema import as_text

OPTIONS = [f"--set={k}={as_text(v)}" for k, v in SMALL.items()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    parent = tmp_path_factory.mktemp("cli") / "felo"
    result = CliRunner().invoke(
        app, ["run", "felo", *OPTIONS, "--seeds", "0,1", "--out", str(parent)]
    )
    assert result.exit_code == 0, result.output
    return parent, result.output


def test_run_prints_a_table_and_writes_a_report(tmp_path):
    out = tmp_path / "one"
    result = CliRunner().invoke(app, ["run", "local", *OPTIONS, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "round   2  accuracy (common, private)" in result.output
    assert re.search(r"client-3 +cnn2", result.output)
    assert f"report: {out}/report.html" in result.output
    assert (out / "report.html").exists()
    assert (out / "figures" / "accuracy.png").exists()


def test_seeds_are_trained_and_compared(runs):
    parent, output = runs
    assert {p.name for p in parent.iterdir() if p.is_dir()} == {"seed-0", "seed-1"}
    assert (parent / "compare.html").exists()
    assert "±" in output


def test_complete_seeds_are_skipped(runs, call):
    parent, _ = runs
    before = (parent / "seed-0" / "metrics.jsonl").read_bytes()
    (parent / "compare.html").unlink()
    status, out, _ = call("run", "felo", *OPTIONS, "--seeds", "0,1", "--out", parent)
    assert status == 0
    assert "seed 0: already complete" in out
    assert "±" in out
    assert (parent / "compare.html").exists()
    assert (parent / "seed-0" / "metrics.jsonl").read_bytes() == before
    status, _, err = call("run", "local", *OPTIONS, "--seeds", "0,1", "--out", parent)
    assert status == 2
    assert "contains a run with 'method' = 'felo', got 'local'" in err


def test_compare(runs, call, tmp_path):
    parent, _ = runs
    status, out, _ = call("compare", parent, "--out", tmp_path / "c", "--target", "0.1")
    assert status == 0
    assert "felo" in out
    assert (tmp_path / "c" / "compare.html").exists()
    assert (tmp_path / "c" / "compare.md").exists()


def test_compare_keeps_earlier_comparisons(runs, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("compare", "compare-2", "compare-3"):
        _, out, _ = call("compare", runs[0])
        assert f"runs/{place}/compare.html" in out
        assert (tmp_path / "runs" / place / "compare.html").exists()


def test_interrupted_run_has_a_report(runs, call, tmp_path):
    import shutil

    parent, _ = runs
    cut = tmp_path / "cut"
    shutil.copytree(parent / "seed-0", cut)
    (cut / "summary.json").unlink()
    (cut / "report.html").unlink()
    status, out, _ = call("report", cut)
    assert status == 0
    assert "unfinished" in (cut / "report.html").read_text()
    assert str(cut / "report.html") in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "felo", "-s", "locl-epochs=2"], ["'locl-epochs'", "'training.local-epochs'?"]),
        (["run", "--preset", "felo-cifar10", "-s", "alpha=1"], ["data.alpha or felo.alpha"]),
        (["sweep", "velo", "alpha=1,2"], ["'alpha'", "data.alpha or velo.alpha"]),
        (["run", "felo", "--rounds", "many"], ["'rounds'", "'many'", "integer >= 1"]),
        (["run", "felo", "--models", "cnn2,resnt10"], ["'models.pool'", "resnt10", "resnet10"]),
        (["run", "felo", "--dataset", "digit"], ["'data.dataset'", "'digit'", "'digits'"]),
        (["run", "felo", "--preset", "dmo"], ["'dmo'", "did you mean 'demo'?"]),
        (["run", "felo", "-s", "device=cuda:7"], ["engine.device", "'cuda:7'", "cpu"]),
        (["run", "felo", "--seeds", "0,0"], ["--seeds", "0,0", "0,1,2"]),
        (["run", "felo", "--out", "a b"], ["out: ", "'a b'"]),
        (["run", "felo", "--rounds", "1", "-s", "rounds=x"], ["'rounds': duplicate"]),
        (["run", "felo", "--models", "mlp", "-s", "pool=cnn2"], ["'models.pool': duplicate"]),
        (["run", "felo", "--seed", "1", "-s", "seed=2"], ["'seed': duplicate"]),
        (["run", "felo", "--seed", "one"], ["'seed'", "'one'", "integer >= 0"]),
        (["run", "felo", "--seed", "1", "--seeds", "1,2"], ["cannot be combined with --seeds"]),
        (["run", "felo", "-s", "seed=1", "--seeds", "1,2"], ["cannot be combined with --seeds"]),
        (
            ["sweep", "felo", "lr=0.1,0.2", "-s", "seed=1", "--seeds", "1"],
            ["cannot be combined with --seeds"],
        ),
        (["run", "felo", "--config", "/nowhere.toml"], ["/nowhere.toml"]),
        (["report", "/nowhere"], ["/nowhere"]),
        (["methods", "velvet"], ["velvet"]),
    ],
)
def test_errors_have_one_line(call, words, says):
    status, _, error = call(*words)
    assert status == 2
    assert len(error.strip().splitlines()) == 1
    for word in says:
        assert word in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("models", "gems-resnet56"),
        ("presets demo", "training.local-epochs"),
        ("settings training", "training.local-epochs"),
        ("settings felo", "felo.feature-weight"),
        ("settings batch", "engine.eval-batch-size"),
        ("settings --toml", "[training]"),
        ("settings --toml", "[felo]"),
        ("partition -s alpha=0.1", "client-9"),
        ("partition -s data.alpha=0.1", "client-9"),
    ],
)
def test_list_commands_print(call, words, says):
    """test_start.py tests the other lists."""
    status, out, error = call(*words.split())
    assert status == 0, error
    assert says in out


def test_baseline_ignores_method_settings_of_a_preset(call, tmp_path):
    values = gather("local", "felo-cifar10", None, [])
    config = resolve(values)
    assert config.method.name == "local"
    assert config.run.clients == 20
    assert not [name for name in values if name.startswith("felo.")]
    # Settings given by the user are kept, so a setting of another method raises.
    assert gather("local", "felo-cifar10", None, ["felo.alpha=2"])["felo.alpha"] == 2


def test_later_source_of_settings_wins(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("clients = 7\n[training]\nlr = 0.25\nmomentum = 0.5\n[felo]\nalpha = 3\n")
    said = gather("felo", "felo-cifar10", mine, ["lr=0.75", "data.alpha=2"], rounds="4")
    assert (
        resolve(said).flat().items()
        >= {
            "clients": 7,  # of the file; of the preset 20
            "training.momentum": 0.5,
            "felo.alpha": 3.0,
            "training.lr": 0.75,  # of --set; of the file 0.25
            "data.alpha": 2.0,
            "rounds": 4,  # of a flag; of the preset 100
            "felo.feature-dim": 512,  # of the preset
            "training.batch-size": 10,
        }.items()
    )


def test_old_setting_name_raises_with_the_new_name(call, tmp_path):
    old = tmp_path / "config.toml"
    old.write_text('method = "felo"\nlocal-epochs = 1\n\n[felo]\nalpha = 1.0\n')
    for words in (["run", "felo"], ["partition"]):
        status, _, error = call(*words, "--config", old)
        assert status == 2
        assert error.split(maxsplit=1)[1].strip() == (
            "unknown setting 'local-epochs'; use its full name, 'training.local-epochs'"
        )


@pytest.mark.usefixtures("pages_alone")
def test_inline_backend_does_not_import_ray(tmp_path, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    status, _, fault = call("run", "local", *OPTIONS, "--out", tmp_path / "r")
    assert (status, (tmp_path / "r" / "summary.json").exists()) == (0, True), fault


@pytest.mark.usefixtures("pages_alone")
def test_custom_model_trains(tmp_path, call, monkeypatch):
    (tmp_path / "own_tiny_models.py").write_text(
        "from math import prod\n"
        "from torch import nn\n\n"
        "def tiny(shape, classes):\n"
        "    extractor = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 32), nn.ReLU())\n"
        "    return extractor, nn.Linear(32, classes)\n"
    )
    options = [o for o in OPTIONS if "models.pool=" not in o]
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [*options, "--models", "cnn2,own_tiny_models:tiny", "--out", tmp_path / "r"]
    status, said, fault = call("run", "felo", *words)
    assert (status, "own_tiny_models:tiny" in said) == (0, True), fault


@pytest.mark.parametrize(
    ("backend", "number"),
    [
        ("ray", signal.SIGINT),
        ("inline", signal.SIGINT),
        pytest.param("ray", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_signal_stops_a_run_at_once(tmp_path, backend, number):
    out = tmp_path / "cut"
    words = [o for o in OPTIONS if "rounds" not in o and "backend" not in o]
    command = [sys.executable, "-c", "from fedhet.cli import main; main()", "run", "local", *words]
    command += ["--rounds", "5000", "--backend", backend, "--out", str(out)]
    # Not pipes, which Ray's own processes would keep open for a moment longer.
    with (tmp_path / "out").open("w") as printed, (tmp_path / "err").open("w") as complained:
        process = subprocess.Popen(command, stdout=printed, stderr=complained)
        try:
            while "round   2" not in (tmp_path / "out").read_text():
                assert process.poll() is None, (tmp_path / "err").read_text()
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(timeout=60) == 128 + number
        finally:
            process.kill()
    error = (tmp_path / "err").read_text()
    assert f"show the results so far with `fedhet report {out}`" in error
    assert len(error.strip().splitlines()) == 1, "Ray would print a stack trace"
    result = CliRunner().invoke(app, ["report", str(out)])
    assert result.exit_code == 0, result.output


def test_report_rewrites_figures(runs, call):
    import shutil

    parent, _ = runs
    shutil.rmtree(parent / "seed-0" / "figures")
    assert call("report", parent / "seed-0")[0] == 0
    assert (parent / "seed-0" / "figures" / "accuracy.png").exists()


def test_unwritable_directory_raises(runs, call):
    parent, _ = runs
    status, _, error = call("compare", parent, "--out", "/proc/nowhere")
    assert status == 2
    assert len(error.strip().splitlines()) == 1
    assert "/proc/nowhere" in error


def test_nonempty_directory_is_unchanged(call, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    status, _, error = call("run", "local", *OPTIONS, "--out", tmp_path / "full")
    assert status == 2
    assert "is not empty" in error
