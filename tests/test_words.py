"""Words of the command line: suggestions for wrong names, help, lists, and completion."""

import os
import re
import subprocess
import sys

import click
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from fedhet.base.errors import ModelError, SettingsError
from fedhet.cli import app
from fedhet.cli.options import complete_method, complete_preset, complete_setting, console, errors
from fedhet.cli.training import _resume_hint
from fedhet.config.sources import preset_names
from fedhet.methods.registry import find_method
from fedhet.models.user_model import import_user_model
from fedhet.runs.display import line_display
from fedhet.runs.progress import duration
from fedhet.runs.records import PastRound, RunSeconds, Summary
from fedhet.runs.units import console_for
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import SYNONYMS, UNSUPPORTED

COMMANDS = typer.main.get_command(app).commands


def said_by(*words):
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    plain = re.sub("[─│╭╮╰╯]", " ", result.output)
    return result, " ".join(plain.split())


# --- what is meant ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("dirichlet-alpha", "data.alpha"),
        ("epochs", "training.local-epochs"),
        ("num-clients", "clients"),
        ("num_clients", "clients"),
        ("learning-rate", "training.lr"),
        ("train.learning_rate", "training.lr"),
        ("batch", "training.batch-size"),
    ],
)
def test_synonym_suggests_the_setting(word, name):
    # felo has no setting `epochs`; velo and feddf have one.
    result = CliRunner().invoke(app, ["run", "felo", "--set", f"{word}=1"])
    assert str(result.exception) == f"unknown setting '{word}'; did you mean '{name}'?"


def test_synonyms_refer_to_existing_settings():
    shared = RunSettings.fields()
    assert set(SYNONYMS.values()) <= shared.keys()
    leaves = {name.rpartition(".")[2] for name in shared}
    assert not (SYNONYMS.keys() | UNSUPPORTED.keys()) & (shared.keys() | leaves)
    assert not SYNONYMS.keys() & UNSUPPORTED.keys()


def test_setting_of_the_method_precedes_a_synonym():
    result = CliRunner().invoke(app, ["run", "velo", "--set", "epochs=-1"])
    assert "'velo.epochs': expected integer >= 1" in str(result.exception)


@pytest.mark.parametrize(
    ("option", "way"),
    [
        ("--epochs", "use --set training.local-epochs=VALUE"),
        ("--lr", "use --set training.lr=VALUE"),
        ("--num-clients", "use --clients VALUE"),
        ("--data.alpha", "use --set data.alpha=VALUE"),
    ],
)
def test_option_named_like_a_setting_suggests_set(option, way):
    result, said = said_by("run", "felo", option, "1")
    assert result.exit_code == 2
    assert f"No such option '{option}'; {way}" in said


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (["sweep", "felo", "rounds=1,2", "--seed", "1"], "use --seeds"),
        (["sweep", "felo", "rounds=1,2", "--resume", "DIR"], "interrupted runs always resume"),
        (["table", "felo", "--seed", "1"], "use --seeds"),
        (["table", "felo", "--rounds", "1"], "use --set rounds=VALUE"),
        (["partition", "--seed", "1"], "use --set seed=VALUE"),
        (["deploy-local", "felo", "--backend", "ray"], "use --set engine.backend=VALUE"),
    ],
)
def test_hint_names_an_option_of_the_command(words, way):
    result, said = said_by(*words)
    assert result.exit_code == 2
    assert f"No such option '{words[-2]}'; {way}" in said


def test_other_options_get_the_hint_of_click():
    assert "--preset" in said_by("run", "felo", "--presett", "demo")[1]
    assert "write" not in said_by("compare", "--epochs", "1")[1]  # it takes no settings


@pytest.mark.parametrize("open_console", [lambda: console, lambda: errors, console_for])
def test_dataset_between_colons_is_not_an_emoji(open_console, capsys):
    open_console().print("felo on table:cat: 3 clients", markup=False)
    assert "felo on table:cat: 3 clients" in "".join(capsys.readouterr())


def test_command_is_suggested_once():
    result, said = said_by("runn")
    assert result.exit_code == 2
    assert said.count("Did you mean") == 1
    assert "'run'?" in said


def test_missing_module_suggests_pythonpath():
    for look, kind in ((import_user_model, ModelError), (find_method, SettingsError)):
        for name in ("mymodels_absent.part", "mymodels_absent.part:tiny"):
            if (":" in name) == (look is import_user_model):
                with pytest.raises(kind, match=r"PYTHONPATH=\."):
                    look(name)


def test_missing_dependency_does_not_suggest_pythonpath(tmp_path, monkeypatch):
    (tmp_path / "mymodels_broken.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError) as caught:
        import_user_model("mymodels_broken:tiny")
    assert "surely_not_installed" in str(caught.value)
    assert "PYTHONPATH" not in str(caught.value)


# --- help and lists ---------------------------------------------------------------------------


def test_every_option_is_described_and_shows_its_default():
    for name, command in COMMANDS.items():
        for each in command.params:
            assert each.help, f"{name}: {each.name}"
            if isinstance(each, click.Option) and not (each.is_flag or each.required):
                assert each.show_default, f"{name}: {each.name}"
                empty = each.default in (None, "", [], ())
                assert isinstance(each.show_default, str) or not empty, f"{name}: {each.name}"


def test_settings_are_listed_by_section_without_limits_that_only_reject_typos():
    _, said = said_by("settings")
    places = [said.index(part) for part in ("[data]", "[models]", "[training]", "[engine]")]
    assert places == sorted(places)
    assert "1000000" not in said
    assert "number > 0 and <= 1 " in said  # an end that is meant stays
    assert all(name in said for name in RunSettings.fields())
    assert "1000000" not in said_by("methods", "felo")[1]


# --- completion -------------------------------------------------------------------------------


def test_completion():
    assert [name for name, _ in complete_method("fedmd")] == ["fedmd"]
    assert dict(complete_preset("de")) == {"demo": preset_names()["demo"]}
    assert [name for name, _ in complete_preset("demo,ii")] == ["demo,iid"]
    assert ("training.local-epochs=" in dict(complete_setting("training.")),) == (True,)
    assert [name for name, _ in complete_setting("local-ep")] == ["local-epochs="]
    # Several settings end in alpha: only their full names are allowed.
    assert "alpha=" not in dict(complete_setting("al"))
    assert {"data.alpha="} == {n for n, _ in complete_setting("data.al")}
    assert [n for n, _ in complete_setting("partition=s")] == [
        "partition=shards",
        "partition=superclasses",
    ]
    assert [n for n, _ in complete_setting("data.download=")] == [
        "data.download=true",
        "data.download=false",
    ]
    assert complete_setting("lr=") == []


def test_completion_imports_no_heavy_library():
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('HEAVY', {'torch', 'flwr', 'pandas', 'sklearn', 'ray',"
        " 'matplotlib'} & {m.partition('.')[0] for m in sys.modules}))\n"
        "sys.argv = ['fedhet']\n"
        "from fedhet.cli import main\n"
        "main()"
    )
    words = {"COMP_WORDS": "fedhet run fedmd", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **words, "_FEDHET_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["fedmd", "HEAVY", "set()"], done.stderr


# --- a run's lines ----------------------------------------------------------------------------


def test_notices_of_several_runs_are_labeled(capsys):
    line_display(Console(width=200), "training.lr=0.1").notice("odd")
    line_display(Console(width=200)).notice("odd")
    assert capsys.readouterr().out.splitlines() == ["training.lr=0.1: note: odd", "note: odd"]


def test_duration_separates_start_and_rounds():
    history = [PastRound(round=1, seconds=3.0), PastRound(round=2, seconds=1.0)]
    summary = Summary(method="felo", dataset="digits", seed=0, rounds=2, history=history)
    assert duration(summary) == "2 rounds in 0.0 s"
    seconds = RunSeconds(total=11.0, start=7.0)
    summary = summary.model_copy(update={"seconds": seconds})
    assert duration(summary) == "2 rounds in 11.0 s: 7.0 s to start, 2.0 s per round"


def test_interrupted_run_suggests_resume(tmp_path):
    run = tmp_path / "run"
    assert _resume_hint(run) == "training had not started"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "config.toml").write_text("")
    assert _resume_hint(run) == (f"no round has finished; restart with `fedhet run --resume {run}`")
    (run / "metrics.jsonl").write_text("{}\n")
    said = _resume_hint(run)
    assert f"resume with `fedhet run --resume {run}`" in said
    assert f"show the results so far with `fedhet report {run}`" in said
    spaced = run.rename(tmp_path / "a run")
    assert f"`fedhet run --resume '{spaced}'`" in _resume_hint(spaced)
