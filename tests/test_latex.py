"""Tables for papers: LaTeX with booktabs rules, CSV, and tested differences."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from synthetic import lines_of, make
from typer.testing import CliRunner

from fedhet.cli import app
from fedhet.report import compare
from fedhet.report.comparison_report import comparison_latex
from fedhet.report.tables import SPECIAL, Cell, Cells, tabular

TOPS = {"local": 0.5, "felo": 0.9, "fedhe": 0.7}


def parsed(text: str) -> list[dict[str, str]]:
    """Return the rows of the first tabular by header, and check the place of its rules."""
    inside = re.search(r"\\begin\{tabular\}\{([lr]+)\}\n(.*?)\\end\{tabular\}", text, re.S)
    layout, lines = inside[1], inside[2].splitlines()
    assert (lines[0], lines[2], lines[-1]) == (r"\toprule", r"\midrule", r"\bottomrule")
    rows = [line.removesuffix(r" \\").split(" & ") for line in (lines[1], *lines[3:-1])]
    assert all(line.endswith(r" \\") for line in (lines[1], *lines[3:-1]))
    assert {len(row) for row in rows} == {len(layout)}
    assert all(text.count("{") == text.count("}") for row in rows for text in row)
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, (method, top) in enumerate(TOPS.items()):
        for seed in (0, 1, 2):
            path = tmp_path / "runs" / f"{method}-{seed}"
            make(path, method=method, seed=seed, top=top, noise=number)
    return tmp_path / "runs"


def last(run: Path) -> float:
    return float(
        np.mean([*lines_of(run)[-1]["accuracy"]["common"]["private"]["per_client"].values()])
    )


def by_hand(runs: Path) -> dict[str, list[float]]:
    return {method: [last(runs / f"{method}-{s}") for s in (0, 1, 2)] for method in TOPS}


def error_of(differences: np.ndarray) -> tuple[float, float]:
    """Return the error over seeds and the 359 test images, and the degrees of freedom."""
    images = 359 * abs(differences.mean())
    parts = np.array([
        differences.var(ddof=1) / len(differences), (images + 1 - images**2 / 361) / 361**2
    ])  # fmt: skip
    degrees = parts.sum() ** 2 / (parts**2 @ [1 / (len(differences) - 1), 1 / 358])
    return np.sqrt(parts.sum()), degrees


def test_marks_of_best_second_and_clear_values(runs: Path) -> None:
    values = by_hand(runs)
    order = sorted(values, key=lambda method: -np.mean(values[method]))
    rows = {row["run"].split()[0]: row["common private"] for row in
            parsed(comparison_latex(compare([runs])))}  # fmt: skip
    assert set(rows) == set(TOPS)
    for place, method in enumerate(order):
        mean, std = np.mean(values[method]), np.std(values[method], ddof=1)
        text = rf"{mean:.4f} $\pm$ {std:.4f}"
        differences = np.subtract(values[method], values["local"])
        if method != "local" and abs(differences.mean()) > 1.96 * error_of(differences)[0]:
            text += r"$^\dagger$"
        looks = [r"\textbf{%s}", r"\underline{%s}", "%s"]
        assert rows[method] == looks[place].replace("%s", text)
    assert any("dagger" in text for text in rows.values())


def test_caption_explains_the_marks_the_seeds_and_the_unit(runs: Path) -> None:
    first, second = re.findall(r"\\caption\{(.*)\}\n", comparison_latex(compare([runs])))
    assert "359 test samples" in first
    assert "Number of seeds: 3." in first
    assert r"$^\dagger$: the 95 \% confidence interval of the paired difference from local" in first
    assert "over the n shared seeds and the test samples" in second
    assert all("Scores are fractions, not percentages." in text for text in (first, second))
    assert comparison_latex(compare([runs])).count(r"\begin{table}") == 2


def test_lowest_is_bold_if_lower_is_better() -> None:
    column = [Cell("2", 2.0), Cell("1", 1.0), Cell("–"), Cell("3", 3.0), Cell("1", 1.0)]
    names = [Cell(text) for text in "abcde"]
    rows = parsed(tabular(Cells({"n": names, "loss": column}), {"loss": -1}))
    expected = [r"\underline{2}", r"\textbf{1}", "--", "3", r"\textbf{1}"]
    assert [row["loss"] for row in rows] == expected
    rows = parsed(tabular(Cells({"n": names, "loss": column})))
    assert [row["loss"] for row in rows] == ["2", "1", "--", "3", "1"]


def test_missing_or_equal_values_are_not_marked() -> None:
    for cells in (
        [Cell("x"), Cell("y")],
        [Cell("1", 1.0), Cell("1", 1.0)],
        [Cell("n", np.nan)] * 2,
    ):
        rows = parsed(tabular(Cells({"n": cells, "s": cells}), {"s": 1}))
        assert [row["s"] for row in rows] == [cell.text for cell in cells]


def test_table_columns_fit_a_paper(tmp_path: Path) -> None:
    for method in ("felo", "local"):
        kinds, both = ("private", "local", "global"), ("common", "personal")
        make(tmp_path / method, method=method, kinds=kinds, protocols=both)
    text = comparison_latex(compare([tmp_path]))
    assert list(parsed(text)[0]) == [
        "run", "model", "common headline", "worst client", "bytes up", "bytes down"
    ]  # fmt: skip
    omitted = next(line for line in text.splitlines() if line.startswith("% Columns only in"))
    assert "personal global" in omitted
    assert "bytes up" not in omitted
    make(tmp_path / "third", method="felo", dataset="wine", kinds=kinds, protocols=both)
    assert list(parsed(comparison_latex(compare([tmp_path])))[0])[:2] == ["run", "dataset"]


def test_special_characters_are_escaped() -> None:
    assert "a_b & 5% of $x #1 {y} ~ ^ \\".translate(SPECIAL) == (
        r"a\_b \& 5\% of \$x \#1 \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{}"
    )
    assert "0.1 ± 0.2 †".translate(SPECIAL) == r"0.1 $\pm$ 0.2 $^\dagger$"


def test_command_writes_tables_and_tests_differences(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["compare", str(runs), "--out", str(out), "--latex", "--csv", "--test", "t"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (out / "compare.tex").read_text() == comparison_latex(compare([runs], test="t"))
    values = by_hand(runs)
    p = {}
    for method in ("felo", "fedhe"):
        differences = np.subtract(values[method], values["local"])
        error, degrees = error_of(differences)
        p[method] = 2 * stats.t.sf(abs(differences.mean()) / error, degrees)
    small, large = sorted(p, key=p.get)
    corrected = {small: 2 * p[small], large: max(2 * p[small], p[large])}
    pairs = json.loads((out / "compare.json").read_text())["paired"]
    found = {pair["group"].split()[0]: pair["p"] for pair in pairs}
    assert found == pytest.approx({m: min(1.0, v) for m, v in corrected.items()}, rel=1e-6)
    assert "Holm" in (out / "compare.md").read_text()
    assert "Holm" in (out / "compare.html").read_text()
    rows = list(csv.DictReader((out / "compare.csv").open()))
    assert len(rows) == 9
    for row in rows:
        run = Path(row["directory"])
        assert float(row["mean"]) == pytest.approx(last(run))
        assert run.name == f"{row['method']}-{row['seed']}"
        assert (row["protocol"], row["kind"], row["metric"]) == ("common", "private", "accuracy")


def test_no_other_file_is_written_without_the_option(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["compare", str(runs), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert not {"compare.tex", "compare.csv"} & {path.name for path in out.iterdir()}
    assert "Holm" not in (out / "compare.md").read_text()
    assert {pair["p"] for pair in json.loads((out / "compare.json").read_text())["paired"]} == {
        None
    }
    wrong = CliRunner().invoke(app, ["compare", str(runs), "--test", "z"])
    assert wrong.exit_code != 0
