"""The papers' settings, their presets, and the pages that compare them with defaults."""

import re

import pytest

from fedhet.config.resolve import resolve
from fedhet.config.sources import preset_names, read_preset, settings_of, validate
from fedhet.methods.registry import find_method, shipped_names
from tools import reference
from tools.reference import differences, paper_settings

OF_PAPERS = sorted(name for name in shipped_names() if find_method(name).spec.paper != "no paper")
CLAIMED = {n: each["preset"] for n, each in paper_settings().items() if each.get("preset")}


def values(method):
    """Return the paper's settings that have a value."""
    settings = paper_settings()[method].get("settings", {})
    return {name: each["value"] for name, each in settings.items() if "value" in each}


def test_every_method_with_a_paper_is_compared():
    assert sorted(paper_settings()) == sorted([*OF_PAPERS, "why"])


@pytest.mark.parametrize("method", OF_PAPERS)
def test_every_paper_setting_has_a_source(method):
    paper = paper_settings()[method]
    assert paper.keys() <= {"what", "preset", "without", "settings"}
    assert paper["what"]
    assert bool(paper.get("preset")) != bool(paper.get("without"))
    assert {*filter(None, paper.get("preset", "").split(","))} <= preset_names().keys()
    settings = paper.get("settings", {})
    assert settings.keys() <= settings_of(method).keys()
    for each in settings.values():
        assert each.keys() <= {"value", "words", "source", "why"}
        assert ("value" in each) != bool(each.get("words"))
        assert each["source"]
    validate({**values(method), "method": method})


@pytest.mark.usefixtures("encoders")
@pytest.mark.parametrize(("method", "preset"), CLAIMED.items(), ids=CLAIMED)
def test_preset_equals_the_sourced_settings(method, preset):
    given = read_preset(preset)
    assert given.pop("method") == method
    # Weights by all samples are the papers' averages, without fedhet's protection.
    assert given.pop("engine.samples-cap", 0) == 0
    assert given.keys() <= paper_settings()[method]["settings"].keys()
    found, expected = resolve({"method": method, **given}).flat(), values(method)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("name", OF_PAPERS)
def test_every_differing_default_has_a_reason(name):
    """The defaults come from the declarations, and everything else from the file."""
    defaults = resolve({"method": name}).flat()
    settings = paper_settings()[name].get("settings", {})
    differ = {n for n, each in settings.items() if "words" in each or each["value"] != defaults[n]}
    rows = differences(name)
    assert {row[0].strip("`") for row in rows} == differ
    assert len(rows) == len(differ)
    assert all(cell.strip() for row in rows for cell in row)
    page = reference._method(find_method(name))
    for setting, _, paper, _ in rows:
        if setting.startswith(f"`{name}."):
            first = rf"^\| {setting.rstrip('`')}=[^|]* \|"
            assert re.search(rf"{first} {re.escape(paper)} \| ", page, re.MULTILINE)
    for stale in settings.keys() - differ:  # a reason that stays when a default becomes the paper's
        assert "why" not in settings[stale]


def test_row_contains_default_paper_value_section_and_reason(tmp_path, monkeypatch):
    file = tmp_path / "paper_settings.toml"
    file.write_text(
        "[why]\nclients = 'shared'\nseed = 'shared'\n[fedavg]\nwhat = 'MNIST'\n[fedavg.settings]\n"
        "clients = { value = 100, source = 'Section 3', why = 'ten take a minute' }\n"
        "rounds = { value = 10, source = 'Table 2' }\n"
        "seed = { words = 'five', source = 'Table 1' }\n"
    )
    monkeypatch.setattr(reference, "PAPER_SETTINGS", file)
    paper_settings.cache_clear()
    try:
        assert differences("fedavg") == [
            ("`seed`", "`0`", "five (Table 1)", "shared"),
            ("`clients`", "`10`", "`100` (Section 3)", "ten take a minute"),
        ]
    finally:
        paper_settings.cache_clear()


def test_each_shared_reason_is_used():
    """No reason may be left over or have a mistyped name."""
    used = {row[0].strip("`") for name in OF_PAPERS for row in differences(name)}
    assert paper_settings()["why"].keys() <= used
