"""The commands, settings, and code in README and the first pages work in a clone."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

from fedhet import report
from fedhet.cli import main, training
from fedhet.deployment import local
from fedhet.settings.schema import as_text

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()


def section(page: str, title: str) -> str:
    """Return a section of a page in docs/, without its subsections."""
    text = (ROOT / "docs" / page).read_text()
    (found,) = re.findall(rf"^##? {title}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return found


START = (ROOT / "docs" / "start.md").read_text()
PAGES = [
    README,
    START,
    section("guide.md", "Settings"),
    section("data.md", "Data"),
    section("models.md", "Custom models"),
]


def blocks(language: str, text: str = "\n".join(PAGES)) -> list[str]:
    """Return the code blocks in a language, also those in a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.M | re.S)
    return [textwrap.dedent(text) for _, text in found]


def commands() -> list[list[str]]:
    """Return every command of the pages, in words, without comments."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    parts = [part for line in lines for part in line.split("#")[0].split("&&") if part.strip()]
    return [shlex.split(part) for part in parts]


FEDHET = [words for words in commands() if "fedhet" in words[:2]]
ONCE = {" ".join(words): words for words in FEDHET}.values()
OTHERS = [
    "source .venv/bin/activate",
    "source env/bin/activate",
    "python3 -m venv env",
    f"pip install fedhet-{PROJECT['version']}-py3-none-any.whl",
]


def test_only_known_commands_are_used():
    assert len(FEDHET) >= 10
    for words in commands():
        if words[0] == "make":
            target = rf"^{words[1]}:.*##"
            assert re.search(target, (ROOT / "Makefile").read_text(), re.M), words
        elif words not in FEDHET:
            assert " ".join(words) in OTHERS


@pytest.mark.parametrize("words", ONCE, ids=" ".join)
def test_command_is_accepted_as_printed(words, tmp_path, monkeypatch):
    """Each command runs in a directory like a clone; training is only resolved."""
    taken = []
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        training, "train_one", lambda given, *_: taken.append(training.complete(given))
    )
    monkeypatch.setattr(
        training, "train_seeds", lambda given, *_: taken.append(training.complete(given[0]))
    )
    monkeypatch.setattr(local, "deploy_local", lambda config, *_: taken.append(config))
    monkeypatch.setattr(report, "write_all", lambda directory: None)
    monkeypatch.setattr(training, "show_run", lambda run: None)
    if words[0].startswith("PYTHONPATH="):
        monkeypatch.syspath_prepend(str(tmp_path / words[0].partition("=")[2]))
        words = words[1:]
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


def test_compared_runs_are_created_before():
    made = {words[words.index("--out") + 1] for words in FEDHET if "--out" in words}
    compared = {
        name
        for words in FEDHET
        if words[1] == "compare"
        for name in itertools.takewhile(lambda word: not word.startswith("--"), words[2:])
    }
    assert compared
    assert compared <= made


def test_examples_equal_those_of_the_pages():
    (toml, *_) = (block for block in blocks("toml") if "experiment" in block)
    assert tomllib.loads(toml) == tomllib.loads((ROOT / "examples/experiment.toml").read_text())
    code = (ROOT / "examples" / "mymodels.py").read_text()
    own = [block for block in blocks("python") if block.startswith("# mymodels.py")]
    assert own
    for block in own:
        functions = block[min(block.find(word) for word in ("def ", "class ") if word in block) :]
        assert functions.strip() in code


def test_python_example_equals_the_command():
    (first,) = (block for block in blocks("python", README) if block.startswith("import fedhet"))
    compile(first, "README.md", "exec")
    by_hand = next(words for words in FEDHET if words[:4] == ["fedhet", "run", "felo", "--clients"])
    calls = (node for node in ast.walk(ast.parse(first)) if isinstance(node, ast.Call))
    (call,) = (node for node in calls if ast.unparse(node.func) == "fedhet.run")
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    options = dict(zip(by_hand[3::2], by_hand[4::2], strict=True))
    assert {f"--{name}": as_text(value) for name, value in given.items()} == options


def test_citation_names_this_version():
    version = PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (bibtex,) = blocks("bibtex")
    fields = dict(re.findall(r"(\w+) *= \{+([^}]*)\}", bibtex))
    assert (citation["version"], fields["version"]) == (version, version)
    assert (citation["title"], citation["license"]) == (fields["title"], fields["license"])


def test_table_of_extras_equals_pyproject():
    rows = re.findall(r"^\| (`.*?) \| ", START, re.M)
    listed = re.findall(r"`([a-z]+)`", " ".join(rows))
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])
