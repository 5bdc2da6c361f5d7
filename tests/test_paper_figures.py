"""Figures with the size and fonts of papers, and figures of samples and models."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from synthetic import make
from typer.testing import CliRunner

import fedhet
from fedhet.base.disk import Folder
from fedhet.cli import app
from fedhet.clients import fedtype
from fedhet.config.resolve import resolve
from fedhet.experiments.plan import read_table
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


# examples/paper_figures.py

FEW = {
    "clients": 3, "rounds": 2, "seed": 1, "data.dataset": "digits", "data.max-samples": 240,
    "data.max-test-samples": 80, "training.local-epochs": 2, "models.pool": ["cnn2-dropout"],
}  # fmt: skip


@pytest.fixture
def examples(monkeypatch):
    """Return the module of the example, and a function that sets the runs of all cells."""
    path = Path(__file__).parent.parent / "examples" / "paper_figures.py"
    spec = importlib.util.spec_from_file_location("paper_figures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(fedtype, "Reciprocity", fedtype.Reciprocity)  # The example replaces it.

    def cells(values):
        monkeypatch.setattr(module, "values_of", lambda _, row, *__: FEW | values[row])

    return module, cells


def reference_set(logits, calibration, u, penalty, k_reg):
    """Return the set of one sample with Eq. 6, in a loop over its labels."""
    scaled = [math.exp((z - max(logits)) / float(calibration.temperature)) for z in logits]
    p = [value / sum(scaled) for value in scaled]
    found = [
        y
        for y, own in enumerate(p)
        if own * u
        + sum(other for other in p if other > own)
        + penalty * max(sum(other >= own for other in p) - k_reg, 0)
        <= float(calibration.tau)
    ]
    return found or [max(range(len(p)), key=p.__getitem__)]


def test_sets_of_a_sample_follow_the_equation_and_leave_the_run_unchanged(
    examples, tmp_path, monkeypatch
):
    module, cells = examples
    own = {"method": "fedtype", "models.pool": ["mlp"], "fedtype.proxy": "mlp"}
    cells({"g1": own})
    expected, sets = [], module.prediction_sets

    def followed(logits, calibration, u, *, penalty, k_reg):
        first = reference_set(logits[0].tolist(), calibration, 0.5, float(penalty), k_reg)
        expected.append(first)
        return sets(logits, calibration, u, penalty=penalty, k_reg=k_reg)

    monkeypatch.setattr(module, "prediction_sets", followed)
    module.draw_sets("tiny", 1, tmp_path)
    rows = module.Recorded.rows
    assert [(r["client"], r["round"], r["epoch"]) for r in rows] == [
        (f"client-{client}", number, epoch)
        for number in (1, 2) for client in range(3) for epoch in (1, 2)
    ]  # fmt: skip
    counts = load_run(tmp_path / "sets").partition.counts
    for row, private, proxy in zip(rows, expected[::2], expected[1::2], strict=True):
        classes = [label for label, count in enumerate(counts[row["client"]]) if count]
        assert row["private"] == [classes[place] for place in private]
        assert row["proxy"] == [classes[place] for place in proxy]
        assert row["label"] in classes
    monkeypatch.undo()
    plain = fedhet.run(settings={**FEW, **own, "engine.backend": "inline"}, out=tmp_path / "plain")
    recorded = fedhet.load(tmp_path / "sets")
    assert plain.to_frame().equals(recorded.to_frame())
    assert plain.method_metrics.equals(recorded.method_metrics)
    epochs = pd.read_csv(tmp_path / "epochs.csv").set_index("epoch")
    for epoch in (1, 2):
        last = [r for r in rows if (r["round"], r["epoch"]) == (2, epoch)]
        for name in ("accuracy", "proxy_set"):
            assert epochs.loc[epoch, name] == pytest.approx(np.mean([r[name] for r in last]))
    table = pd.read_csv(tmp_path / "sets.csv")
    shown = [r for r in rows if r["client"] == "client-0" and r["epoch"] == 2]
    assert table["private"].tolist() == [str(r["private"]) for r in shown]
    assert (tmp_path / "sets.png").exists()


@pytest.mark.slow
def test_features_are_of_the_most_accurate_client(examples, tmp_path):
    module, cells = examples
    relations = {"TA": "ta", "EN": "en", "EN + TA": "en+ta"}
    own = {"method": "um-pfssl", "data.labeled-alpha": 0.5}
    cells({row: {**own, "um-pfssl.relation": name} for row, name in relations.items()})
    module.draw_features("tiny", 1, tmp_path)
    numbers = pd.read_csv(tmp_path / "features.csv").set_index("relation")
    for row in relations:
        result = fedhet.load(tmp_path / f"features-{row.replace(' + ', '-')}")
        last = load_run(result.directory).last("personal", "private").per_client
        assert last[numbers.loc[row, "client"]] == max(last.values())
        x, y, _ = result.test()
        right = result.predict(numbers.loc[row, "client"], x).labels == y
        assert numbers.loc[row, "accuracy"] == pytest.approx(right.mean())
    assert (tmp_path / "features.png").exists()


@pytest.mark.slow
def test_confusion_is_of_all_clients_test_splits_and_of_mean_probabilities(examples, tmp_path):
    module, cells = examples
    methods = {"UM-pFSSL": "um-pfssl", "FixAvg": "fedavg", "FixProx": "fedprox", "FixBN": "fedbn"}
    cells({row: {"method": name, "data.labeled-alpha": 0.5} for row, name in methods.items()})
    module.draw_confusion("tiny", 1, tmp_path)
    numbers = pd.read_csv(tmp_path / "confusion.csv")
    runs = {row: fedhet.load(tmp_path / f"um-pfssl-1-{row}") for row in methods}
    clients = [f"client-{n}" for n in range(3)]
    ours = sum(runs["UM-pFSSL"].confusion(c, protocol="personal").to_numpy() for c in clients)
    mixed = np.zeros_like(ours)
    for client in clients:
        x, y, _ = runs["FixAvg"].test(client)
        with torch.no_grad():
            parts = [runs[m].model(client, "global")(x).softmax(1) for m in module.MIX]
        for truth, guessed in zip(y, torch.stack(parts).mean(0).argmax(1), strict=True):
            mixed[truth, guessed] += 1
    assert ours.sum() == mixed.sum()
    for name, counts in (("UM-pFSSL", ours), ("Mix", mixed)):
        rows = numbers[(numbers["data"] == "digits") & (numbers["method"] == name)]
        known = counts.sum(1) > 0
        assert rows["class"].tolist() == np.arange(10)[known].tolist()
        recalls = np.diag(counts)[known] / counts.sum(1)[known]
        assert rows["accuracy"].tolist() == pytest.approx(recalls.tolist())
    assert (tmp_path / "confusion.png").exists()


@pytest.mark.parametrize(
    ("table", "rows", "column", "alpha"),
    [
        ("fedtype-7", ("g1",), "accuracy", 0.5),
        ("um-pfssl-3", ("TA", "EN", "EN + TA"), "FMNIST or digits, α = 5", 5),
        ("um-pfssl-1", ("UM-pFSSL", "FixAvg", "FixProx", "FixBN"), "α = 0.5", 0.5),
        ("um-pfssl-6", ("UM-pFSSL", "FixAvg", "FixProx", "FixBN"), "α = 0.5", 0.5),
        ("um-pfssl-7", ("UM-pFSSL", "FixAvg", "FixProx", "FixBN"), "α = 0.5", 0.5),
    ],
)
def test_figures_of_samples_use_the_runs_of_tables(examples, table, rows, column, alpha):
    module, _ = examples
    for row, size in product(rows, read_table(table).sizes):
        values = module.values_of(table, row, column, size, 3)
        assert values["seed"] == 3
        assert resolve(values).flat()["data.alpha"] == alpha
