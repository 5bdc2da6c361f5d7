"""Reports in a real browser: figures, color schemes, sorting, and no overflow.

Positions come from matplotlib's marks, and values come from the run's files.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import UNSAFE, lines_of, make, rewrite

from fedhet.report import compare, load_run, write_comparison, write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
ALERT = '"><img src=x onerror="document.title=1">'
"""A client's name that would change the page's title if it were markup."""
NAMES = ("ward-10", "ward-9", UNSAFE, ALERT)

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(not BROWSER, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of four clients, two of them with malicious names, and its report."""
    path = tmp_path_factory.mktemp("page") / "run"
    make(path, names=NAMES, rounds=6, kinds=("private", "proxy"), protocols=("common", "personal"))
    rows = lines_of(path)
    for row in rows:
        row["bytes_up"], row["bytes_down"] = 40 * row["round"], 10 ** (3 + row["round"] // 2)
        row["method"] |= {"once": 0.25} if row["round"] == 2 else {}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewrite(path / "summary.json", lambda content: content.update(dataset=ALERT))
    return write_report(load_run(path))


class Opened:
    """A page in a tab, which collects errors, dialogs, and requests for files in `faults`."""

    def __init__(self, browser: Any, path: Path, width: int = 1400, scheme: str = "light") -> None:
        size = {"width": width, "height": 900}
        self.tab = browser.new_page(viewport=size, color_scheme=scheme)
        self.faults: list[str] = []
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.on("console", lambda said: self.faults.append(said.text))
        self.tab.on("dialog", lambda dialog: self.faults.append(dialog.message))
        self.tab.on("request", lambda request: self._asked(request.url, path))
        self.tab.goto(path.as_uri())

    def _asked(self, url: str, path: Path) -> None:
        if url != path.as_uri():
            self.faults.append(url)

    def figure(self, title: str) -> Any:
        return self.tab.locator("figure.figure", has=self.tab.get_by_text(title, exact=True))

    def marks(self, title: str, count: int) -> list[list[tuple[float, float]]]:
        """Return the centers of the `count` markers of each line in a figure."""
        lines = []
        for part in self.figure(title).locator("svg g:has(> use)").all():
            if part.locator("use").count() == count:
                part.scroll_into_view_if_needed()
                boxes = [use.bounding_box() for use in part.locator("use").all()]
                lines.append([(b["x"] + b["width"] / 2, b["y"] + b["height"] / 2) for b in boxes])
        return lines


@pytest.fixture(scope="module")
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    page = Opened(browser, report)
    yield page
    assert page.faults == []
    page.tab.close()


ACCURACY = "Accuracy on the common test set"


def test_a_figure_shows_the_values_of_each_round(opened: Opened, report: Path) -> None:
    """The markers of a curve are at its values, and the legend shows the last value."""
    rows = [row["accuracy"]["common"] for row in lines_of(report.parent)]
    lines = opened.marks(ACCURACY, 6)
    curves = []
    for kind in ("private", "proxy"):
        values = np.array([[*row[kind]["per_client"].values()] for row in rows])
        curves += [values.mean(axis=1), values.min(axis=1)]
        last = f"{kind}\N{EN SPACE}{values[-1].mean():.3f}"
        texts = opened.figure(ACCURACY).locator("svg text").all_text_contents()
        assert last in texts
    places = np.array(lines)
    slope, foot = np.polyfit(np.ravel(curves), places[..., 1].ravel(), 1)
    assert slope < 0
    assert np.abs(foot + slope * np.array(curves) - places[..., 1]).max() < 1.0
    steps = np.diff(places[..., 0], axis=1)
    assert np.ptp(steps) < 1.0


def test_bytes_have_a_linear_axis(opened: Opened, report: Path) -> None:
    title = "Cumulative bytes sent"
    up, down = (
        np.cumsum([r[f"bytes_{d}"] for r in lines_of(report.parent)]) for d in ("up", "down")
    )
    heights = np.array(opened.marks(title, 6))[..., 1]
    slope, foot = np.polyfit(down, heights[1], 1)
    for values, line in zip((up, down), heights, strict=True):
        assert np.abs(foot + slope * values - line).max() < 1.0
    texts = opened.figure(title).locator("svg text").all_text_contents()
    assert {f"up\N{EN SPACE}{up[5]} B", f"down\N{EN SPACE}{down[5] / 1e6:.2f} MB"} <= {*texts}


def test_markup_in_names_remains_text(opened: Opened) -> None:
    labels = opened.figure("Labels: samples per class (at most 29)").locator("svg text")
    assert "ward-10" in labels.all_text_contents()
    assert opened.tab.locator("img").count() == 0
    assert ALERT in opened.tab.title()


def test_figures_have_the_fonts_and_the_colors_of_the_page(browser: Any, report: Path) -> None:
    colors = {
        "light": {"rgb(0, 114, 178)", "rgb(213, 94, 0)", "rgb(29, 35, 41)"},
        "dark": {"rgb(63, 151, 218)", "rgb(239, 131, 68)", "rgb(228, 232, 236)"},
    }
    style = "parts => parts.map(part => getComputedStyle(part)[NAME])"
    for scheme, expected in colors.items():
        page = Opened(browser, report, scheme=scheme)
        svg = page.figure(ACCURACY).locator("svg")
        lines = svg.locator("path").evaluate_all(style.replace("NAME", "'stroke'"))
        texts = svg.locator("text").evaluate_all(style.replace("NAME", "'fill'"))
        other = {"light": "dark", "dark": "light"}[scheme]
        assert expected <= {*lines, *texts}
        assert not colors[other] & {*lines, *texts}
        fonts = svg.locator("text").evaluate_all(style.replace("NAME", "'fontFamily'"))
        assert {*fonts} == {page.tab.evaluate("getComputedStyle(document.body).fontFamily")}
        page.tab.close()


def test_a_tables_column_sorts_both_ways(opened: Opened, report: Path) -> None:
    last = lines_of(report.parent)[-1]["accuracy"]["common"]["private"]["per_client"]
    ranked = sorted(NAMES, key=lambda name: last[name])
    table = opened.tab.locator("table.sortable", has_text="common private").first
    names = table.locator("tbody td:first-child")
    button = table.get_by_role("button", name="common private")
    button.click()
    assert names.all_inner_texts() == ranked[::-1]
    button.click()
    assert names.all_inner_texts() == ranked
    table.get_by_role("button", name="client").click()
    found = names.all_inner_texts()
    assert found.index("ward-9") < found.index("ward-10")


def test_single_measurements_are_in_a_table(opened: Opened) -> None:
    table = opened.tab.locator(".once")
    rows = [row.inner_text().split("\t") for row in table.locator("tbody tr").all()]
    assert rows == [["odd", "—", ""], ["once", "0.25", "2"]]
    assert opened.tab.locator(".card svg").count() == 1  # classes_covered, over rounds


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_overflows_and_the_schemes_differ(
    browser: Any, report: Path, tmp_path: Path, width: int
) -> None:
    for seed in (0, 1):
        names = ("a" * 60, "b")
        make(tmp_path / f"long-{seed}", seed=seed, names=names, rounds=3, method="felo")
        make(tmp_path / f"other-{seed}", seed=seed, rounds=3, method="local")
    write_comparison(compare([tmp_path]), tmp_path / "out")
    with_baseline = make(tmp_path / "with", rounds=3, method="felo")
    make(with_baseline / "baseline", rounds=3, method="local")
    beside = write_report(load_run(with_baseline))
    backgrounds = []
    for path in (report, beside, tmp_path / "out" / "compare.html"):
        for scheme in ("light", "dark"):
            page = Opened(browser, path, width, scheme)
            assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
            style = "getComputedStyle(document.body)"
            colors = page.tab.evaluate(f"[{style}.backgroundColor, {style}.color]")
            backgrounds.append(tuple(colors))
            assert page.faults == []
            page.tab.close()
    assert backgrounds[0] != backgrounds[1]


def test_a_phone_shows_every_clients_accuracy_without_scrolling(browser: Any, report: Path) -> None:
    page = Opened(browser, report, width=390)
    table = page.tab.locator(
        ".table", has=page.tab.get_by_text("Clients in the last round", exact=True)
    )
    headers = table.locator("thead th").all_inner_texts()
    first = next(n for n, text in enumerate(headers) if "common private" in text.lower())
    for row in table.locator("tbody tr").all():
        box = row.locator("th, td").nth(first).bounding_box()
        assert box["x"] + box["width"] <= 390
    page.tab.close()


def matrix_of(path: Path) -> np.ndarray:
    content = json.loads((path / "confusion.json").read_text())
    return np.sum([each["counts"] for each in content["matrices"]], axis=0)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("size", [2, 10, 100])
def test_a_confusion_matrix_is_readable(
    browser: Any, tmp_path: Path, size: int, width: int
) -> None:
    path = make(tmp_path / "run", confusion=size)
    counts = matrix_of(path)
    page = Opened(browser, write_report(load_run(path)), width)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    title = "Confusion matrix: private models, sum of 4 clients"
    svg = page.figure(title).locator("svg")
    right = f"{np.trace(counts):,} of {counts.sum():,} correct"
    assert page.figure(title).locator(".plot").get_attribute("aria-label").endswith(right)
    texts = svg.locator("text").all_text_contents()
    in_cells = [text for text in texts if text.isdigit() or text == "<1"]
    assert len(in_cells) == (np.count_nonzero(counts) if size <= 12 else 0)
    # The labels of the axes do not overlap.
    labels = [each for each in svg.locator("text").all() if "class " in str(each.text_content())]
    matrix = svg.locator("image").bounding_box()
    bottom = matrix["y"] + matrix["height"]
    boxes = [each.bounding_box() for each in labels]
    rows = [box for box in boxes if box["y"] + box["height"] / 2 < bottom]
    assert len(rows) >= min(size, 20)
    ends = sorted((box["y"], box["y"] + box["height"]) for box in rows)
    assert all(
        below[0] - top[0] > 0.7 * (top[1] - top[0]) for top, below in itertools.pairwise(ends)
    )
    # The most frequent errors, from numpy.
    errors = counts - np.diag(np.diag(counts))
    table = page.tab.locator(".table", has_text="Most frequent confusions")
    first = table.locator("tbody tr").first.locator("td").all_inner_texts()
    row, column = (int(name.split()[1]) for name in first[:2])
    assert int(first[2]) == errors[row, column] == errors.max()
    assert page.faults == []
    page.tab.close()


def test_the_counts_of_a_confusion_matrix_are_in_a_table(browser: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "run", confusion=10)
    counts = matrix_of(path)
    page = Opened(browser, write_report(load_run(path)), 1280)
    details = page.tab.locator("details", has_text="Counts")
    details.locator("summary").press("Enter")
    rows = details.locator("tbody tr").all()
    assert [each.locator("th").inner_text() for each in rows] == [f"class {n}" for n in range(10)]
    found = [[int(text) for text in each.locator("td").all_inner_texts()] for each in rows]
    assert found == counts.tolist()
    page.tab.close()


def test_global_models_have_a_confusion_matrix_for_each_architecture(
    browser: Any, tmp_path: Path
) -> None:
    path = make(tmp_path / "run", confusion=3, kinds=("global",))
    page = Opened(browser, write_report(load_run(path)), 1280)
    captions = page.tab.locator("figcaption").all_inner_texts()
    assert [text for text in captions if text.startswith("Confusion")] == [
        "Confusion matrix: global model, cnn2", "Confusion matrix: global model, mlp",
    ]  # fmt: skip
    page.tab.close()


def test_no_label_is_cut_and_no_line_starts_with_a_separator(browser: Any, tmp_path: Path) -> None:
    """Labels remain inside their figures, bars, and tiles, also with long notes."""
    path = make(tmp_path / "run", rounds=120, finished=False)
    rows = lines_of(path)
    for row in rows:
        row["seconds"] = {
            "total": 59.0, "train": 4000.0, "evaluate": 1000.0, "server": 1200.0, "overhead": 0.1,
        }  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = write_report(load_run(path))
    for width in (390, 1280):
        page = Opened(browser, report, width)
        svg = page.figure("Time by stage").locator("svg")
        outer = svg.bounding_box()
        texts = {
            str(each.text_content()): each.bounding_box() for each in svg.locator("text").all()
        }
        assert any("total of clients" in text for text in texts)
        assert "training 65%" in texts
        assert not any(text.startswith("evaluation ") for text in texts), "wider than its part"
        for box in texts.values():
            assert outer["x"] <= box["x"]
            assert box["x"] + box["width"] <= outer["x"] + outer["width"]
        for value in page.tab.locator(".card .value").all():
            assert value.bounding_box()["height"] < 40
        overflow = "each => each.scrollWidth - each.clientWidth"
        assert all(card.evaluate(overflow) <= 0 for card in page.tab.locator(".card").all())
        parts = page.tab.locator(".facts span").all()
        before = "each => getComputedStyle(each, '::before').content"
        assert {each.evaluate(before) for each in parts} == {"none"}
        page.tab.close()


def test_a_comparison_stays_inside_its_column_and_shows_all_in_a_wide_window(
    browser: Any, tmp_path: Path
) -> None:
    for method in ("felo", "local"):
        both = ("common", "personal")
        make(tmp_path / method, method=method, kinds=("private", "local", "global"), protocols=both)
    write_comparison(compare([tmp_path]), tmp_path / "out")
    page = Opened(browser, tmp_path / "out" / "compare.html", width=1280)
    main = page.tab.locator("header").bounding_box()
    for table in page.tab.locator(".table").all():
        box = table.bounding_box()
        assert box["x"] >= main["x"] - 1
        assert box["x"] + box["width"] <= main["x"] + main["width"] + 1
    page.tab.set_viewport_size({"width": 1440, "height": 900})
    table = page.tab.locator(".table", has=page.tab.locator(".dense"))
    assert table.count() == 1
    assert table.evaluate("each => each.scrollWidth - each.clientWidth") == 0
    page.tab.close()
