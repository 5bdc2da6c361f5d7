"""Figures with the size and fonts of papers."""

from __future__ import annotations

import re
from dataclasses import replace

import matplotlib as mpl
import pytest
from synthetic import make
from typer.testing import CliRunner

from fedhet.base.disk import Folder
from fedhet.cli import app
from fedhet.report import load_run
from fedhet.report.figures import drawings, write_figures


def call(*words):
    found = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert found.exit_code == 0
    return found.output


def inches(path):
    box = re.search(rb"/MediaBox \[\s*0 0 ([\d.]+) ([\d.]+)\s*\]", path.read_bytes())
    return tuple(float(side) / 72 for side in box.groups())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("paper") / "run"
    return make(path, protocols=("common", "personal"), kinds=("private", "global"))


def test_figures_of_a_run_have_column_or_text_width(run):
    assert str(run / "figures" / "paper") in call("report", run, "--paper").replace("\n", "")
    files = {file.stem: file for file in (run / "figures" / "paper").iterdir()}
    wanted = {drawing.name: drawing for drawing in drawings(load_run(run))}
    assert set(files) == {*wanted, "method"}
    widths = {name: inches(file)[0] for name, file in files.items()}
    assert widths["accuracy"] == pytest.approx(6.75, abs=0.01), "two test sets"
    assert widths["loss"] == pytest.approx(3.25, abs=0.01)
    assert {round(width, 2) for width in widths.values()} == {3.25, 6.75}
    for name, drawing in wanted.items():
        height = drawing.height * widths[name] / drawing.width
        assert inches(files[name])[1] == pytest.approx(height, abs=0.01)


def test_fonts_are_serif_and_embedded_as_truetype(run):
    call("report", run, "--paper")
    for file in (run / "figures" / "paper").iterdir():
        content = file.read_bytes()
        fonts = set(re.findall(rb"/BaseFont /([\w+-]+)", content))
        assert fonts
        assert all(b"STIXGeneral" in font for font in fonts), (file.name, fonts)
        assert b"/Type3" not in content
        assert b"/FontFile2" in content
        assert b"CreationDate" not in content


def test_text_has_its_printed_size(run):
    sizes = []

    def drawn(figure, original):
        original(figure)
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(mpl.text.Text) if text.get_text().strip()]
        sizes.extend(text.get_fontsize() for text in texts)

    for drawing in drawings(load_run(run)):
        within = replace(drawing, draw=lambda figure, d=drawing: drawn(figure, d.draw))
        within.write_for_paper(Folder(run / "sizes"))
    assert min(sizes) >= 7.0
    assert max(sizes) <= 8.0


def test_other_figures_are_unchanged(run, tmp_path):
    write_figures(load_run(run))
    before = {file.name: file.read_bytes() for file in (run / "figures").glob("*.svg")}
    call("report", run, "--paper")
    assert {f.name: f.read_bytes() for f in (run / "figures").glob("*.svg")} == before
    assert all(b"STIX" not in content for content in before.values())


def test_figures_of_a_comparison_have_column_width(tmp_path):
    for seed in (0, 1):
        for method in ("felo", "local"):
            make(tmp_path / "runs" / f"{method}-{seed}", method=method, seed=seed)
    out = tmp_path / "out"
    assert "paper figures: " in call("compare", tmp_path / "runs", "--out", out, "--paper")
    files = {file.stem: file for file in (out / "paper").iterdir()}
    assert set(files) == {"finals", "curves", "costs"}
    assert {round(inches(file)[0], 2) for file in files.values()} == {3.25}
    assert not (tmp_path / "out2").exists()
    call("compare", tmp_path / "runs", "--out", tmp_path / "out2")
    assert not (tmp_path / "out2" / "paper").exists()
