"""A method is a file in strategies/, one in clients/, a test and a row in the README: all agree."""

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import Field

from fedhet.config.methods import Method, find_method, method_names
from fedhet.config.reference import reference
from fedhet.config.resolve import all_settings, defaults_toml, preset_names, read_preset, resolve
from fedhet.config.schema import MethodSettings
from fedhet.errors import SettingsError
from fedhet.wire.contract import ScalarField, TensorField, WeightsField

ROOT = Path(__file__).parent.parent
MATHEMATICS = ["losses", "classwise", "averaging", "training", "seeding", "uncertainty", "fixmatch"]


@pytest.mark.parametrize("name", method_names())
def test_a_method_is_whole(name):
    method = find_method(name)
    module = name.replace("-", "_")
    assert method.strategy.__module__ == f"strategies.{module}"
    assert method.client.__module__ == f"clients.{module}"
    assert method.headline in {"personal", "common"}
    assert method.title
    assert method.paper
    readme = (ROOT / "README.md").read_text()
    row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}` |"))
    assert f"strategies/{module}.py" in row
    assert f"clients/{module}.py" in row


@pytest.mark.parametrize("name", method_names())
def test_what_a_method_sends_is_described(name):
    method = find_method(name)
    for contract in (method.server_sends, method.client_sends):
        names = [field.name for field in contract.fields]
        assert len(set(names)) == len(names)
        for field in contract.fields:
            assert isinstance(field, TensorField | WeightsField | ScalarField)
            assert field.help
    assert all(info.description for info in method.settings().values())


def test_the_rooms_hold_methods_alone():
    shared = {"__init__", "base"}
    files = {p.stem for p in (ROOT / "strategies").glob("*.py")} - shared - {"courier", "roster"}
    assert files == {name.replace("-", "_") for name in method_names()}
    files = {p.stem for p in (ROOT / "clients").glob("*.py")} - shared - {"node", "open"}
    assert files == {name.replace("-", "_") for name in method_names()}


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(SettingsError, match=r"'fello' does not exist.*did you mean 'felo'\?"):
        find_method("fello")


def test_halves_must_not_declare_a_setting_differently():
    class Server(MethodSettings):
        width: int = Field(1, ge=1)

    class Client(MethodSettings):
        width: int = Field(2, ge=1)

    strategy = type("S", (), {"settings_type": Server})
    client = type("C", (), {"settings_type": Client})
    with pytest.raises(TypeError, match="declare 'width' differently"):
        Method("m", strategy, client).settings()


def test_pyproject_lists_every_setting_for_flower():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert listed == tomllib.loads(defaults_toml()), "run: make reference"


def test_the_reference_page_is_that_of_the_code():
    page = (ROOT / "docs" / "reference.md").read_text()
    assert page == reference(), "run: make reference"


def test_the_documents_have_no_gaps_and_no_dead_links():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        assert not re.search(r"\b[A-Z]+_(RESULTS|TABLE|NOTE)\b|TODO|FIXME", text), page
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_setting_has_a_line_of_help():
    assert all(info.description for info in all_settings().values())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_resolves_for_each_method(name):
    values = read_preset(name)
    assert preset_names()[name]
    resolve(values)


def test_fedhet_knows_no_method_but_by_name():
    for path in (ROOT / "fedhet").rglob("*.py"):
        if "_generated" in path.parts or path.name == "registry.py":
            continue
        imports = re.findall(
            r"^\s*(?:from|import) (strategies|clients)\.(\w+)", path.read_text(), re.M
        )
        methods = {name.replace("-", "_") for name in method_names()}
        assert not [module for _, module in imports if module in methods], path


def test_the_mathematics_imports_neither_flower_nor_the_wire():
    rooms = ("averaging", "classwise", "cvae", "helpers", "losses", "seeding", "selective")
    for name in (*rooms, "training", "uncertainty", "voting"):
        text = (ROOT / "fedhet" / f"{name}.py").read_text()
        assert not re.search(
            r"^\s*(?:from|import) (flwr|strategies|clients|fedhet\.knowledge)", text, re.M
        )
