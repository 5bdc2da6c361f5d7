"""What the README prints works in a fresh clone: its commands, settings, code and citation."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

from fedhet import report
from fedhet.cli import main, shown, training
from fedhet.config.resolve import resolve
from fedhet.deployment import local
from fedhet.settings.text import as_text

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in a language, also those in a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", README, re.M | re.S)
    return [textwrap.dedent(text) for _, text in found]


def commands() -> list[list[str]]:
    """Return every command of the README, in words, without comments."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    parts = [part for line in lines for part in line.split("#")[0].split("&&") if part.strip()]
    return [shlex.split(part) for part in parts]


FEDHET = [words for words in commands() if "fedhet" in words[:2]]


def test_only_known_programs_are_called():
    assert len(FEDHET) >= 10
    for words in commands():
        if words[0] == "make":
            target = rf"^{words[1]}:.*##"
            assert re.search(target, (ROOT / "Makefile").read_text(), re.M), words
        elif words not in FEDHET:
            assert words == ["source", ".venv/bin/activate"]


@pytest.mark.parametrize("words", FEDHET, ids=" ".join)
def test_a_command_is_accepted_as_printed(words, tmp_path, monkeypatch):
    """Each is read in a folder that has what a clone has; what would train is only resolved."""
    taken = []
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train_one", lambda values, *_: taken.append(resolve(values)))
    monkeypatch.setattr(training, "train_seeds", lambda values, *_: taken.append(resolve(values)))
    monkeypatch.setattr(local, "deploy_local", lambda config, *_: taken.append(config))
    monkeypatch.setattr(report, "write", lambda directory: None)
    monkeypatch.setattr(shown, "show_run", lambda run: None)
    if words[0].startswith("PYTHONPATH="):
        monkeypatch.syspath_prepend(str(tmp_path / words[0].partition("=")[2]))
        words = words[1:]
    for kind in ("text", "signal"):  # the command before it has written this
        if f"{kind}:data/{kind}s" in words:
            call("fedhet", "example-data", kind, f"data/{kind}s", monkeypatch=monkeypatch)
    if words[1] == "compare":
        return  # the test below
    call(*words, *(["--dry-run"] if words[1] == "table" else []), monkeypatch=monkeypatch)
    assert taken or words[1] in ("table", "example-data")


def call(*words, monkeypatch):
    monkeypatch.setattr(sys, "argv", list(words))
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    assert not status, words


def test_what_is_compared_was_made_before():
    made = {words[words.index("--out") + 1] for words in FEDHET if "--out" in words}
    (compared,) = (words[2:] for words in FEDHET if words[1] == "compare")
    assert {*compared} <= made


def test_the_examples_are_those_of_the_readme():
    (toml, *_) = (block for block in blocks("toml") if "experiment" in block)
    assert tomllib.loads(toml) == tomllib.loads((ROOT / "examples/experiment.toml").read_text())
    code = (ROOT / "examples" / "mymodels.py").read_text()
    own = [block for block in blocks("python") if block.startswith("# mymodels.py")]
    assert len(own) == 2
    for block in own:
        functions = block[min(block.find(word) for word in ("def ", "class ") if word in block) :]
        assert functions.strip() in code


def test_the_python_is_that_of_the_commands():
    (first,) = (block for block in blocks("python") if block.startswith("import fedhet"))
    compile(first, "README.md", "exec")
    by_hand = next(words for words in FEDHET if "resnet10" in " ".join(words))
    calls = (node for node in ast.walk(ast.parse(first)) if isinstance(node, ast.Call))
    (call,) = (node for node in calls if ast.unparse(node.func) == "fedhet.run")
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    options = dict(zip(by_hand[3::2], by_hand[4::2], strict=True))
    assert {f"--{name}": as_text(value) for name, value in given.items()} == options


def test_the_citation_names_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (bibtex,) = blocks("bibtex")
    fields = dict(re.findall(r"(\w+) *= \{+([^}]*)\}", bibtex))
    assert (citation["version"], fields["version"]) == (version, version)
    assert (citation["title"], citation["license"]) == (fields["title"], fields["license"])
