"""The papers' settings, their presets and the pages that compare them with the defaults."""

import pytest

from fedhet.base.errors import SettingsError
from fedhet.config import reference
from fedhet.config.reference import differences, experiments
from fedhet.config.resolve import resolve
from fedhet.config.sources import read_preset
from fedhet.methods.registry import find_method, shipped_names

OF_PAPERS = sorted(name for name in shipped_names() if find_method(name).spec.paper != "no paper")
CLAIMED = {name: each.preset for name, each in experiments().items() if each.preset}
FEDAVG = """
[fedavg]
what = "MNIST (Section 3)"
preset = "fedavg-mnist"
"""
WRITTEN = f"{FEDAVG}[fedavg.settings]\n"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that puts a text in the place of the file."""

    def write(text):
        file = tmp_path / "paper_settings.toml"
        file.write_text(text)
        monkeypatch.setattr(reference, "PAPER_SETTINGS", file)
        forget()

    def forget():
        experiments.cache_clear()
        reference._tables.cache_clear()

    yield write
    forget()


def test_every_method_that_has_a_paper_is_compared_with_it():
    assert sorted(experiments()) == OF_PAPERS


@pytest.mark.usefixtures("encoders")
@pytest.mark.parametrize(("method", "preset"), CLAIMED.items(), ids=CLAIMED)
def test_a_preset_has_the_values_of_its_paper_and_no_setting_without_a_source(method, preset):
    given = read_preset(preset)
    assert given.pop("method") == method
    printed = experiments()[method]
    assert given.keys() <= printed.settings.keys()
    found, expected = resolve({"method": method, **given}).flat(), printed.values()
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("name", OF_PAPERS)
def test_a_page_has_a_row_for_each_default_that_differs(name):
    """The defaults are read from the declarations; the rest, from the file."""
    defaults = resolve({"method": name}).flat()
    differ = {
        setting
        for setting, each in experiments()[name].settings.items()
        if each.words or each.value != defaults[setting]
    }
    section = reference._paper(name)[-1] if differ else ""
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert {row.split("`")[1] for row in rows} == differ
    assert len(rows) == len(differ)
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))


def test_a_row_names_the_default_the_paper_its_section_and_the_reason(written):
    entry = '{ value = 100, source = "Section 3", why = "ten take a minute" }'
    written(f"{WRITTEN}clients = {entry}\nrounds = {{ words = 'many', source = 'Table 2' }}\n")
    with pytest.raises(SettingsError, match=r"'fedavg', 'rounds': expected 'why'.*10"):
        differences("fedavg")
    written(f"{WRITTEN}clients = {entry}\nrounds = {{ value = 10, source = 'Table 2' }}\n")
    assert differences("fedavg") == [
        ("`clients`", "`10`", "`100` (Section 3)", "ten take a minute")
    ]
    assert reference._paper("fedavg")[-1].endswith(
        "| `clients` | `10` | `100` (Section 3) | ten take a minute |"
    )


def test_a_reason_holds_for_every_method_unless_one_has_its_own(written):
    text = f"[why]\nclients = 'shared'\n{WRITTEN}clients = {{ value = 9, source = 'Table 2'%s }}"
    written(text % "")
    assert differences("fedavg")[0][-1] == "shared"
    written(text % ", why = 'own'")
    assert differences("fedavg")[0][-1] == "own"


def test_each_shared_reason_is_used():
    """So that none stays behind, or under a mistyped name."""
    used = {row[0].strip("`") for name in OF_PAPERS for row in differences(name)}
    assert reference._tables()["why"].keys() <= used


def test_a_reason_without_a_difference_is_a_fault(written):
    """Such as one that stays behind when a default becomes the paper's."""
    written(f"{WRITTEN}clients = {{ value = 10, source = 'Table 2', why = 'ten' }}")
    with pytest.raises(SettingsError, match="'fedavg', 'clients': 'why' must be absent"):
        differences("fedavg")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{WRITTEN}client = {{ value = 9, source = 'Table 2' }}", "client"),
        (f"{WRITTEN}'fedprox.mu' = {{ value = 1.0, source = 'Table 2' }}", "fedprox.mu"),
        (f"{WRITTEN}clients = {{ value = 'nine', source = 'Table 2' }}", "clients"),
        (f"{WRITTEN}clients = {{ value = 9 }}", "'fedavg', 'clients': Field required"),
        (f"{WRITTEN}clients = {{ value = 9, source = '' }}", "'fedavg', 'clients'"),
        (f"{WRITTEN}clients = {{ source = 'Table 2' }}", "either 'value' or 'words'"),
        (
            f"{WRITTEN}clients = {{ value = 9, words = 'nine', source = 'Table 2' }}",
            "either 'value' or 'words'",
        ),
        (f"{WRITTEN}clients = {{ value = 9, source = 'Table 2', reason = '' }}", "'clients'"),
        (FEDAVG.replace("[fedavg]", "[fedavgg]"), "fedavg"),
        (FEDAVG.replace("fedavg-mnist", "fedavg-mnits"), "did you mean 'fedavg-mnist'"),
        ("[fedavg]\nwhat = 'MNIST'", "either 'preset' or 'without'"),
        (f"{FEDAVG}without = 'no data'", "either 'preset' or 'without'"),
        ("[fedavg]\npreset = 'fedavg-mnist'", "'fedavg', 'what': Field required"),
    ],
)
def test_a_fault_in_the_file_is_named(written, text, message):
    written(text)
    with pytest.raises(SettingsError, match=message):
        experiments()
