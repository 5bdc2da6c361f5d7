"""The documentation: every page is listed, links work, and generated parts match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from docutils.utils.math.latex2mathml import tex2mathml
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from fedhet.base.metrics import ACCURACY, METRICS
from fedhet.cli import app
from fedhet.client_runtime.node import NodeSettings
from fedhet.methods.registry import find_method, shipped_names
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import kebab
from tools.reference import reference
from tools.results import pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^ *```(.*?)^ *```", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"^ *```math\n(.*?)^ *```|\$`(.+?)`\$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for a page's headings."""
    found: dict[str, int] = {}
    for title in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug + (f"-{n}" if n else "") for slug, most in found.items() for n in range(most + 1)}


def listed(page: Path) -> set[Path]:
    """Return the pages in the toctrees of a page, and in the toctrees of these pages."""
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names = [line for block in blocks for line in block.splitlines() if line and line[0] != ":"]
    found = {path for name in names for path in page.parent.glob(f"{name}.md")}
    return found.union(*(listed(each) for each in found))


def test_every_page_is_in_one_toctree():
    index = DOCS / "index.md"
    assert listed(index) | {index} == set(DOCS.rglob("*.md"))


def test_every_formula_renders():
    found = [(page, *match) for page in PAGES for match in FORMULA.findall(page.read_text())]
    assert len(found) > 25
    for page, block, inline in found:
        assert "<" in tex2mathml(block or inline), page  # it raises for what it does not know


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_have_no_placeholders_or_dead_links(page):
    text = prose(page)
    assert not re.search(r"\b[A-Z]+_(RESULTS|TABLE|NOTE)\b|TODO|FIXME", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target
        if DOCS in page.parents:  # what the site can show: a page, or a file to load
            assert found.is_file(), target
            assert DOCS in found.resolve().parents or found.suffix != ".md", target


def test_every_command_is_explained():
    commands = typer.main.get_command(app).commands
    page = (DOCS / "guide.md").read_text()
    rows = re.findall(r"^\| (`fedhet .*?) \|", page, re.MULTILINE)
    named = set(re.findall(r"`fedhet ([a-z-]+)", " ".join(rows)))
    assert named == set(commands)


SETTINGS = {*RunSettings.fields()}.union(*(find_method(m).settings() for m in shipped_names()))
TABLES = {name.partition(".")[0] for name in SETTINGS if "." in name}


FLOWERS = {"server": _parse_args_run_superlink, "node": _parse_args_run_supernode}
"""Parsers of Flower's programs, to which these commands pass their options."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_options_settings_and_benchmarks_of_a_page_exist(page):
    text = page.read_text()
    commands = typer.main.get_command(app).commands
    scripts = "\n".join(re.findall(r"^ *```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL))
    for name, words in re.findall(r"\bfedhet ([a-z-]+)([^#&|\n]*)", scripts.replace("\\\n", " ")):
        options = {option for each in commands[name].params for option in each.opts}
        if name in FLOWERS:
            options |= {*FLOWERS[name]()._option_string_actions}
        used = {*re.findall(r"(?<=\s)--?[a-z][a-z-]*", words)}
        assert used <= options | {"--help"}, name
    named = {*re.findall(r"`([a-z-]+\.(?!py`)[a-z-]+)(?:=[^`]*)?`", text)}
    assert {name for name in named if name.partition(".")[0] in TABLES} <= SETTINGS
    for name in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), name


def test_every_node_setting_is_explained():
    text = (DOCS / "operation.md").read_text()
    (table,) = re.findall(r"^## Node settings\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    assert named == {kebab(name) for name in NodeSettings.model_fields} - {"num-partitions"}


def test_every_metric_is_explained():
    text = (DOCS / "guide.md").read_text()
    (table,) = re.findall(r"^## Metrics\n.*?^\|---.*?\n(.*?)^$", text, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([a-z0-9-]+)`", cell)}
    assert named == METRICS.keys() - {ACCURACY}


def test_tests_named_in_pages_exist():
    """A page names `test_x.py::test_y`, or `::test_y` in the file named before."""
    named = 0
    for page in PAGES:
        module = ""
        for file, name in re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", page.read_text()):
            module = file or module
            if not file and not name:
                continue
            code = (ROOT / "tests" / module).read_text()
            assert not name or re.search(rf"^def {name}\(", code, re.MULTILINE), (page, name)
            named += 1
    assert named > 60


# --- what is made from the code ---------------------------------------------------------------


def test_generated_pages_are_current():
    made = reference(ROOT) | pages(ROOT)
    stale = [path for path, text in made.items() if path.read_text() != text]
    assert not stale, "run: make reference"


def test_generation_replaces_only_generated_parts():
    page = ROOT / "README.md"
    before, begin, rest = page.read_text().partition("<!-- make reference -->")
    made, end, after = rest.partition("<!-- end -->")
    assert begin
    assert end
    text = reference(ROOT)[page]
    assert text == before + begin + made + end + after
    for name in shipped_names():
        row = rf"^\| \[`{name}`\]\(docs/methods/{name}\.md\) \| \S"
        assert len(re.findall(row, made, re.MULTILINE)) == 1, name


@pytest.mark.parametrize("name", sorted(shipped_names()))
def test_method_has_a_page_with_its_paper_and_results(name):
    """The paper and the results are written by hand; settings and fields are generated."""
    text = " ".join((DOCS / "methods" / f"{name}.md").read_text().replace("*", "").split())
    by_hand = text.partition("<!-- Made")[0]
    method = find_method(name)
    authors, _, title = method.spec.paper.rpartition(", ")
    for words in (authors.split(",")[0].split(" ")[0], " ".join(title.split()[:3])):
        assert words.lower() in by_hand.lower(), words
    assert "## Results" in text.partition("<!-- end -->")[2]
    for name in method.settings():
        assert f"| `{name}=" in text
    for field in (*method.spec.instructions.fields, *method.spec.replies.fields):
        assert f"`{field.name}`" in text
