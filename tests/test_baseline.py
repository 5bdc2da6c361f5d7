"""`--against METHOD`: a baseline that is trained and shown in addition to the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from synthetic import Page, lines_of, make, shown

import fedhet
from fedhet.report import final_table, load_run, write_report

ROOT = Path(__file__).parent.parent
SMALL = [f"--set={each}" for each in ("max-samples=300", "min-samples=20", "local-epochs=1")]
SMALL += ["--rounds=2", "--clients=3", "--models=mlp,cnn2", "--backend=inline"]


pytestmark = pytest.mark.usefixtures("pages_alone")


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("method", ["felo", pytest.param("fedmd", marks=pytest.mark.slow)])
def test_baseline_uses_the_same_data(method, tmp_path, call):
    status, said, fault = call(
        "run", method, *SMALL, "--against", "local", "--out", tmp_path / "run"
    )
    assert status == 0, fault
    kinds = " (global against private)" if method == "felo" else ""
    assert f"against local{kinds}: " in said
    both = "clients better on the common test set; on each client's own test split"
    assert both in " ".join(said.split())
    share = ["--set=public-fraction=0.2"] if method == "fedmd" else []  # fedmd's own default
    status, _, fault = call("run", "local", *SMALL, *share, "--out", tmp_path / "alone")
    assert status == 0, fault
    beside, alone = summary_of(tmp_path / "run" / "baseline"), summary_of(tmp_path / "alone")
    assert beside["method"] == "local"
    assert beside["accuracy"] == alone["accuracy"]
    assert summary_of(tmp_path / "run")["method"] == method
    page = Page(tmp_path / "run" / "report.html")
    assert "against local" in page.text


def test_complete_run_gets_a_baseline(tmp_path, call):
    assert call("run", "felo", *SMALL, "--out", tmp_path / "run")[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    status, said, fault = call("run", "--resume", tmp_path / "run", "--against", "local")
    assert status == 0, fault
    assert "run: already complete" in said
    assert "against local (global against private): " in said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    baseline = summary_of(tmp_path / "run" / "baseline")
    result = fedhet.run(resume=tmp_path / "run", against="local", progress=False)
    assert result.baseline.summary.method == "local"
    assert summary_of(tmp_path / "run" / "baseline") == baseline


def test_each_seed_is_compared_with_its_own_baseline(tmp_path, call):
    status, said, fault = call(
        "run", "felo", *SMALL, "--seeds", "0,1", "--against", "local", "--out", tmp_path / "runs"
    )
    assert status == 0, fault
    for seed in (0, 1):
        assert summary_of(tmp_path / "runs" / f"seed-{seed}" / "baseline")["seed"] == seed
    assert "paired differences" in said
    assert re.search(r"felo\b.* local\b.* 2 ", said)


def test_invalid_baseline_raises_before_training(tmp_path, call):
    for against, says in (
        ("felo", "--against: expected a method other than the run's, got 'felo'"),
        ("locl", "did you mean 'local'?"),
        ("fedavg", "expected one model for all clients"),
    ):
        status, _, fault = call(
            "run", "felo", *SMALL, "--against", against, "--out", tmp_path / "run"
        )
        assert status == 2
        assert says in " ".join(fault.split())
        assert not (tmp_path / "run").exists()


def test_table_report_and_curves_show_both_runs(tmp_path: Path) -> None:
    path = make(tmp_path / "run", top=0.9)
    make(path / "baseline", method="local", top=0.6, seed=3)
    own, other = (
        lines_of(each)[-1]["accuracy"]["common"]["private"]["per_client"]
        for each in (path, path / "baseline")
    )
    a, b = (np.mean([*each.values()]) for each in (own, other))
    better = sum(own[name] > other[name] for name in own)
    sentence = f"{a - b:+.4f} ({a:.4f}, {b:.4f}), {better} of 4 clients better"
    text = " ".join(shown(final_table(load_run(path))).split())
    assert f"against local: {sentence}" in text
    for name, value in own.items():
        assert re.search(rf"{name} .*{value:.4f} +{other[name]:.4f}", text)
    page = Page(write_report(load_run(path)))
    assert f"against local {sentence}" in page.text
    assert re.search(r"fedhet run felo --config \S+ --against local", page.text)
    assert f"local {b:.3f}" in page.text  # the legend of the curve


def test_demo_has_a_baseline() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    assert "--against local" in recipe
