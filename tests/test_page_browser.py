"""Reports in a real browser: toggling a series, sorting, hovering, and no overflow.

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

    def marks(self, title: str, series: int) -> list[tuple[float, float]]:
        """Return the centers of the first line's markers in a figure, from left to right."""
        parts = self.figure(title).locator(f"svg g[data-series='{series}']").all()
        line = max(parts, key=lambda part: part.locator("use").count())
        line.scroll_into_view_if_needed()
        boxes = [use.bounding_box() for use in line.locator("use").all()]
        return sorted((b["x"] + b["width"] / 2, b["y"] + b["height"] / 2) for b in boxes)

    def hover(self, place: tuple[float, float]) -> list[str]:
        """Point at a position, and return the lines that appear."""
        self.tab.mouse.move(*place)
        tip = self.tab.locator(".tip")
        return tip.locator("div").all_inner_texts() if tip.is_visible() else []

    def dots(self) -> list[tuple[float, float]]:
        """Return the centers of the dots that the report draws at the pointer."""
        boxes = [dot.bounding_box() for dot in self.tab.locator(".marks circle").all()]
        return [(b["x"] + b["width"] / 2, b["y"] + b["height"] / 2) for b in boxes]


@pytest.fixture(scope="module")
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    page = Opened(browser, report)
    yield page
    assert page.faults == []
    page.tab.close()


ACCURACY = "Accuracy on the common test set"


def test_pointing_at_a_round_shows_its_values(opened: Opened, report: Path) -> None:
    places = opened.marks(ACCURACY, 0)
    assert len(places) == 6
    for place, row in zip(places, lines_of(report.parent), strict=True):
        found = row["accuracy"]["common"]
        values = {
            name: np.array([*found[name]["per_client"].values()]) for name in ("private", "proxy")
        }
        lines = opened.hover(place)
        assert lines[0] == f"round {row['round']}"
        assert {*lines[1:]} == {
            *(f"{name}  {each.mean():.4f}" for name, each in values.items()),
            *(f"{name}, worst  {each.min():.4f}" for name, each in values.items()),
        }
        # The dot lies on matplotlib's mark: the page's axes are the figure's.
        nearest = min(np.hypot(x - place[0], y - place[1]) for x, y in opened.dots())
        assert nearest < 1.0


def test_bytes_have_a_linear_axis_and_true_values(opened: Opened, report: Path) -> None:
    title = "Cumulative bytes sent"
    up, down = (
        np.cumsum([r[f"bytes_{d}"] for r in lines_of(report.parent)]) for d in ("up", "down")
    )
    assert up[-1] == 840
    places = opened.marks(title, 1)
    heights = np.array([place[1] for place in places])
    slope, foot = np.polyfit(down, heights, 1)
    assert np.abs(foot + slope * down - heights).max() < 1.0
    for place in places:
        opened.hover(place)
        assert min(np.hypot(x - place[0], y - place[1]) for x, y in opened.dots()) < 1.0
    assert opened.hover(places[0])[1:] == ["up  40 B", "down  1.00 kB"]
    assert opened.hover(places[5])[1:] == [f"up  {up[5]} B", f"down  {down[5] / 1e6:.2f} MB"]
    assert opened.hover((2.0, 2.0)) == []


def test_a_series_is_switched_off_and_on(opened: Opened) -> None:
    figure = opened.figure(ACCURACY)
    key = figure.get_by_role("button", name="proxy")
    parts = figure.locator("svg [data-series='1']")
    other = figure.locator("svg [data-series='0']")
    assert parts.count() == 3  # the mean, the worst client, the band
    place = opened.marks(ACCURACY, 0)[2]
    assert all(part.is_visible() for part in parts.all())
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    assert not any(part.is_visible() for part in parts.all())
    assert all(part.is_visible() for part in other.all())
    assert [line.split()[0] for line in opened.hover(place)] == ["round", "private", "private,"]
    key.click()
    assert key.get_attribute("aria-pressed") == "true"
    assert all(part.is_visible() for part in parts.all())
    assert len(opened.hover(place)) == 5


def test_every_clients_curve_is_found_by_pointing(opened: Opened, report: Path) -> None:
    """Each client's last point shows its name; markup in names remains text."""
    figure = opened.figure("Accuracy per client: private model, common test set")
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg").bounding_box()
    chart = json.loads(figure.locator("svg").get_attribute("data-chart"))[0]
    last = lines_of(report.parent)[-1]["accuracy"]["common"]["private"]["per_client"]
    assert {curve["name"] for curve in chart["curves"]} == {*NAMES, "mean"}
    view = [float(n) for n in figure.locator("svg").get_attribute("viewBox").split()]
    left, top, right, bottom = chart["box"]
    (x0, x1, _), (y0, y1, _) = chart["x"], chart["y"]
    for name, value in last.items():
        x = left + (right - left) * (6 - x0) / (x1 - x0)
        y = bottom - (bottom - top) * (value - y0) / (y1 - y0)
        place = box["x"] + x * box["width"] / view[2], box["y"] + y * box["height"] / view[3]
        assert opened.hover(place) == [name, "round 6", f"{value:.4f}"]
    assert opened.tab.locator(".marks polyline").count() == 1
    assert opened.tab.locator("img, .tip script, .tip img").count() == 0
    assert ALERT in opened.tab.title()


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


def test_what_was_measured_once_is_in_a_table(opened: Opened) -> None:
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


def test_a_wide_window_shows_all_columns_of_a_comparison(browser: Any, tmp_path: Path) -> None:
    for method in ("felo", "local"):
        both = ("common", "personal")
        make(tmp_path / method, method=method, kinds=("private", "local", "global"), protocols=both)
    write_comparison(compare([tmp_path]), tmp_path / "out")
    page = Opened(browser, tmp_path / "out" / "compare.html", width=1440)
    table = page.tab.locator(".table", has=page.tab.locator(".dense"))
    assert table.count() == 1
    assert table.evaluate("each => each.scrollWidth - each.clientWidth") == 0
    page.tab.close()


def test_a_comparison_is_pointed_at_and_switched(browser: Any, tmp_path: Path) -> None:
    runs = [
        make(tmp_path / m, method=m, rounds=4, top=t) for m, t in (("felo", 0.8), ("local", 0.5))
    ]
    write_comparison(compare(runs), tmp_path / "out")
    page = Opened(browser, tmp_path / "out" / "compare.html")
    title = "Accuracy: private model, common test set"
    place = page.marks(title, 0)[1]
    rows = [lines_of(run)[1]["accuracy"]["common"]["private"]["mean"] for run in runs]
    assert page.hover(place) == ["round 2", f"felo  {rows[0]:.4f}", f"local  {rows[1]:.4f}"]
    page.figure(title).get_by_role("button", name="felo").click()
    assert page.hover(place) == ["round 2", f"local  {rows[1]:.4f}"]
    sent = sum(row["bytes_up"] + row["bytes_down"] for row in lines_of(runs[1])[:1])
    place = page.marks("Accuracy by bytes sent", 1)[0]
    first = lines_of(runs[1])[0]["accuracy"]["common"]["private"]["mean"]
    assert page.hover(place) == ["local", f"{sent / 1000:.2f} kB", f"{first:.4f}"]
    assert page.faults == []
    page.tab.close()


def matrix_of(path: Path) -> np.ndarray:
    content = json.loads((path / "confusion.json").read_text())
    return np.sum([each["counts"] for each in content["matrices"]], axis=0)


def cell_center(page: Opened, title: str, row: int, column: int) -> tuple[float, float]:
    """Return the center of a matrix's cell on the page, computed from the tick labels."""
    svg = page.figure(title).locator("svg")
    svg.scroll_into_view_if_needed()
    chart = json.loads(svg.get_attribute("data-chart"))[0]
    view = [float(n) for n in svg.get_attribute("viewBox").split()]
    box, (left, top, right, bottom) = svg.bounding_box(), chart["box"]
    size = len(chart["cells"]["names"])
    x = left + (right - left) * (column + 0.5) / size
    y = top + (bottom - top) * (row + 0.5) / size
    return box["x"] + x * box["width"] / view[2], box["y"] + y * box["height"] / view[3]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("size", [2, 10, 100])
def test_a_confusion_matrix_is_readable_and_names_its_cells(
    browser: Any, tmp_path: Path, size: int, width: int
) -> None:
    path = make(tmp_path / "run", confusion=size)
    counts = matrix_of(path)
    page = Opened(browser, write_report(load_run(path)), width)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    title = "Confusion matrix: private models, sum of 4 clients"
    for row, column in ((0, 0), (size - 1, 0), (size // 2, size // 2)):
        count, total = counts[row, column], counts[row].sum()
        assert page.hover(cell_center(page, title, row, column)) == [
            f"true: class {row}",
            f"predicted: class {column}",
            f"{count:,} of {total:,} ({100 * count / total:.{digits(count / total)}f} %)",
        ]
    svg = page.figure(title).locator("svg")
    right = f"{np.trace(counts):,} of {counts.sum():,} correct"
    assert svg.get_attribute("aria-label").endswith(right)
    texts = svg.locator("text").all_text_contents()
    in_cells = [text for text in texts if text.isdigit() or text == "<1"]
    assert len(in_cells) == (np.count_nonzero(counts) if size <= 12 else 0)
    # The labels of the axes do not overlap.
    labels = [each for each in svg.locator("text").all() if "class " in str(each.text_content())]
    left, bottom = cell_center(page, title, size - 1, 0)
    boxes = [each.bounding_box() for each in labels]
    rows = [box for box in boxes if box["x"] < left and box["y"] + box["height"] / 2 < bottom + 2]
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


def digits(fraction: float) -> int:
    """Return the number of decimals of a percentage with three significant digits."""
    return 2 - int(np.floor(np.log10(100 * fraction))) if fraction else 2


def test_a_confusion_matrix_is_reached_with_the_keyboard(browser: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "run", confusion=10)
    counts = matrix_of(path)
    page = Opened(browser, write_report(load_run(path)), 1280)
    svg = page.figure("Confusion matrix: private models, sum of 4 clients").locator("svg")
    svg.focus()
    tip = page.tab.locator(".tip")
    assert tip.get_attribute("role") == "status"
    for key in ("ArrowRight", "ArrowDown", "ArrowUp", "ArrowUp", "ArrowRight"):
        page.tab.keyboard.press(key)
    lines = tip.locator("div").all_inner_texts()
    assert lines[:2] == ["true: class 0", "predicted: class 2"]
    assert lines[2].startswith(f"{counts[0, 2]} of {counts[0].sum()} ")
    page.tab.keyboard.press("Escape")
    assert not tip.is_visible()
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


def test_a_comparison_stays_inside_its_column(browser: Any, tmp_path: Path) -> None:
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
    page.tab.close()
