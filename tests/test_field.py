"""`fedhet table field`: ranks and costs of every method by architectures and split."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re

import numpy as np
import pytest
from scipy import stats
from synthetic import lines_of, make
from typer.testing import CliRunner

from fedhet.base.errors import SettingsError, StateError
from fedhet.cli import app
from fedhet.config.resolve import check, resolve
from fedhet.experiments.claims import MEASURED
from fedhet.experiments.field import (
    FieldRecord,
    collect,
    costs,
    critical,
    every,
    matrix,
    ranked,
    ranks,
    recommendations,
    write_latex,
)
from fedhet.experiments.plan import SIZES, plan_field, read_field
from fedhet.methods.registry import all_methods, find_method
from fedhet.models import build
from fedhet.report.tables import Cells
from tools.results import pages

METHODS = ("central", "local", "fedavg", "felo", "fedmd")
CELLS = list(
    itertools.product(("homogeneous", "three", "nine"), ("IID", "Dirichlet 0.5", "Dirichlet 0.1"))
)
DEMSAR = """
0.763 0.768 0.771 0.798
0.599 0.591 0.590 0.569
0.954 0.971 0.968 0.967
0.628 0.661 0.654 0.657
0.882 0.888 0.886 0.898
0.936 0.931 0.916 0.931
0.661 0.668 0.609 0.685
0.583 0.583 0.563 0.625
0.775 0.838 0.866 0.875
1.000 1.000 1.000 1.000
0.940 0.962 0.965 0.962
0.619 0.666 0.614 0.669
0.972 0.981 0.9751 0.975
0.957 0.978 0.946 0.970
"""
"""Demšar 2006, Table 6: AUC of C4.5 and three variants on 14 data sets; voting's tie as ranked."""


def table_of(text: str):
    import pandas as pd

    rows = [[float(each) for each in line.split()] for line in text.split("\n") if line]
    return pd.DataFrame(rows, columns=["C4.5", "m", "cf", "m+cf"])


# What is planned


@pytest.mark.parametrize("size", SIZES)
def test_method_runs_everywhere_or_declares_limits(size, tmp_path):
    methods = all_methods()[0]
    plan = plan_field(read_field(), size, [*methods], [0], tmp_path)
    # In whose first rounds the accuracy may reach its share of central's.
    assert all(run.config.run.evaluate_from == 1 for run in plan.runs)
    assert plan.cells == CELLS
    assert [(each.method, each.cell) for each in plan.every] == [*itertools.product(methods, CELLS)]
    for each in plan.every:
        alike = each.cell[0] == "homogeneous"
        spec = methods[each.method].spec
        assert bool(each.refused) == ((spec.one_model or spec.submodels) and not alike)
        assert bool(each.runs) != bool(each.refused)
        assert not each.refused or re.match(r"setting 'models.pool': .*one model", each.refused)
    pools = {run.config.run.models.pool for run in plan.runs if run.values["method"] == "local"}
    assert sorted(map(len, map(set, pools))) == [1, 3, 9]
    assert len({run.directory for run in plan.runs}) == len(plan.runs)
    (own,) = {run.config.run.models.pool for run in plan.runs if run.values["method"] == "um-pfssl"}
    layers = build(*own, (1, 28, 28), 10, seed=0).modules()
    assert any(getattr(layer, "p", 0) > 0 for layer in layers), "a network with dropout"


def test_tiny_table_fits_its_data(tmp_path):
    plan = plan_field(read_field(), "tiny", ["local", "fedgems"], [0], tmp_path)
    checked = [run for run in plan.runs if "IID" in run.label]
    assert len(checked) == 6
    for run in checked:
        check(resolve(run.values))  # It raises FedhetError if the table does not fit.


def test_one_seed_is_complete_before_the_next_begins(tmp_path):
    plan = plan_field(read_field(), "tiny", METHODS, [3, 1], tmp_path)
    seeds = [run.values["seed"] for run in plan.runs]
    assert seeds == [3] * (len(seeds) // 2) + [1] * (len(seeds) // 2)
    assert len(seeds) == 2 * (5 * 9 - 6)


def test_method_of_fixed_rounds_has_as_many_epochs_as_the_others(tmp_path):
    plan = plan_field(read_field(), "tiny", ["local", "cofed"], [0], tmp_path)
    local, cofed = (next(e for e in plan.every if e.method == m) for m in ("local", "cofed"))
    run, fixed = local.runs[0].config.run, cofed.runs[0].config.run
    assert (run.rounds, fixed.rounds) == (6, 2)
    assert fixed.rounds * fixed.training.local_epochs == run.rounds * run.training.local_epochs


def test_unknown_setting_raises(tmp_path):
    with pytest.raises(SettingsError, match=r"training\.lr"):
        plan_field(read_field(), "tiny", METHODS, [0], tmp_path, {"training.lr": -1})
    with pytest.raises(SettingsError, match="felo"):
        plan_field(read_field(), "tiny", ["fello"], [0], tmp_path)


# What is measured


def made(tmp_path, tops, seeds=(0, 1)):
    """Write synthetic runs with the accuracies `tops` by method, and return the results."""
    plan = plan_field(read_field(), "tiny", [*tops], seeds, tmp_path)
    for number, each in enumerate(plan.every):
        for seed, run in each.runs.items():
            run.directory.parent.mkdir(parents=True, exist_ok=True)
            kinds = {"central": ("global",), "felo": ("private", "global")}
            make(
                run.directory,
                method=each.method,
                seed=seed,
                top=tops[each.method],
                noise=number,
                protocols=("common", "personal"),
                kinds=kinds.get(each.method, ("private",)),
            )
    return collect(plan)


def test_accuracies_are_those_of_the_headline_models(tmp_path):
    results = made(tmp_path, {"central": 0.9, "local": 0.5, "felo": 0.7})
    for each in results.plan.every:
        for seed, run in each.runs.items():
            last = lines_of(run.directory)[-1]["accuracy"]
            own = "global" if each.method == "central" else "private"
            shared = "private" if each.method == "local" else "global"
            for measure, protocol, kind, statistic in (
                ("personal", "personal", shared, "mean"),
                ("worst client", "personal", shared, "worst"),
                ("common", "common", shared, "mean"),
                ("common, own models", "common", own, "mean"),
            ):
                found = results.by_seed(each.method, each.cell, measure)[seed]
                assert found == pytest.approx(last[protocol][kind][statistic])
    row = {r[0].text: r for r in matrix(results, "common").rows}["felo"]
    values = 100 * results.by_seed("felo", CELLS[0], "common")
    assert row[1].text == f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


@pytest.mark.parametrize("protocol", ["personal", "common"])
def test_costs_end_at_nine_tenths_of_the_ceiling(protocol, tmp_path):
    results = made(tmp_path, {"central": 0.6, "local": 0.2, "felo": 0.8})
    reached = 0
    for each in results.plan.every:
        for seed, run in each.runs.items():
            ceiling = next(
                e.runs[seed].directory
                for e in results.plan.every
                if (e.method, e.cell) == ("central", each.cell)
            )
            target = 0.9 * lines_of(ceiling)[-1]["accuracy"][protocol]["global"]["mean"]
            kind = "private" if each.method == "local" else "global"
            sent = seconds = 0.0
            expected = (math.nan, math.nan)
            for line in lines_of(run.directory):
                sent += line["bytes_up"] + line["bytes_down"]
                seconds += line["seconds"]["total"]
                if line["accuracy"][protocol][kind]["mean"] >= target:
                    expected = (sent, seconds)
                    break
            if each.method == "central":  # it sends nothing in a federation
                expected = (math.nan, expected[1])
            found = [
                results.by_seed(each.method, each.cell, f"{cost} to 90 %, {protocol}")[seed]
                for cost in ("bytes", "time")
            ]
            assert found == pytest.approx(expected, nan_ok=True)
            reached += not math.isnan(expected[1])
    assert 0 < reached < len(results.plan.runs)
    cells = {row[0].text: dict(zip(costs(results).headers, row, strict=True)) for row in
             costs(results).rows}  # fmt: skip
    assert cells["local"][f"bytes to 90 %, {protocol}"].text == "—"
    assert cells["felo"]["bytes"].value > 0
    assert cells["central"]["bytes"].text == "—"


def test_unfinished_runs_are_excluded(tmp_path):
    results = made(tmp_path, {"local": 0.5, "felo": 0.7, "fd": 0.6, "fedhe": 0.4})
    (results.plan.every[0].runs[1].directory / "summary.json").unlink()
    later = collect(results.plan)
    assert later.finished == results.finished - 1
    assert "local" in results.rankings["common", "all"].ranks
    assert "local" not in later.rankings["common", "all"].ranks
    assert "local" in later.rankings["common", "nine"].ranks


# Ranks


def test_ranks_and_critical_difference_equal_demsar():
    found = ranked(table_of(DEMSAR))
    assert found.ranks.round(3).to_dict() == {"m+cf": 1.964, "m": 2.0, "cf": 2.893, "C4.5": 3.143}
    assert found.critical == pytest.approx(1.25, abs=0.005)
    assert critical(2, 10) == pytest.approx(1.960 * math.sqrt(2 * 3 / 60), abs=1e-3)
    assert critical(10, 30) == pytest.approx(3.164 * math.sqrt(10 * 11 / 180), abs=1e-3)
    assert not found.behind("C4.5")  # 1.179
    assert not found.behind("m+cf")


def test_friedmans_p_is_corrected_for_ties():
    scores = table_of(DEMSAR).to_numpy()
    n, k = scores.shape
    places = np.array([stats.rankdata(row) for row in scores])
    ties = sum(c**3 - c for row in scores for c in np.unique(row, return_counts=True)[1])
    numerator = 12 / (n * k * (k + 1)) * (places.sum(0) ** 2).sum() - 3 * n * (k + 1)
    statistic = numerator / (1 - ties / (n * (k**3 - k)))
    assert ranked(table_of(DEMSAR)).p == pytest.approx(stats.chi2.sf(statistic, k - 1))


def test_method_without_every_score_is_not_ranked_and_seeds_narrow_the_difference():
    scores = table_of(DEMSAR)
    scores.loc[3, "cf"] = math.nan
    found = ranked(scores, seeds=4)
    assert set(found.ranks.index) == {"C4.5", "m", "m+cf"}
    assert found.critical_by_seed == pytest.approx(found.critical / 2)
    assert ranked(scores[["m", "cf", "C4.5"]]) is None, "two methods are no ranking"
    assert ranked(scores[:1]) is None


def test_ranks_exclude_the_ceiling_and_incomplete_methods(tmp_path):
    tops = {"central": 0.9, "local": 0.2, "fedavg": 0.5, "felo": 0.8, "fd": 0.6}
    results = made(tmp_path, tops)
    everywhere = results.rankings["common", "all"]
    assert [*everywhere.ranks.index] == ["felo", "fd", "local"]
    assert everywhere.cells == 9
    alike = results.rankings["common", "homogeneous"]
    assert [*alike.ranks.index] == ["felo", "fd", "fedavg", "local"]
    found = {row[0].text: row for row in ranks(results).rows}
    assert "†" in found["local"][1].text
    assert "†" not in found["felo"][1].text
    assert found["fedavg"][1].text == "—"
    assert "central" not in found


# What is shown


def test_every_row_has_a_score_or_a_reason(tmp_path):
    cells: Cells = every(made(tmp_path, {"central": 0.9, "fedavg": 0.5, "felo": 0.8}))
    for row in (dict(zip(cells.headers, row, strict=True)) for row in cells.rows):
        could = row["method"].text != "fedavg" or row["architectures"].text == "homogeneous"
        assert ("one model for all clients" in row["why not"].text) == (not could)
        assert ("±" in row["common"].text) == could
        assert row["test samples, common"].text == ("359" if could else "—")
        assert row["test samples, personal"].text == "—", "the synthetic runs have not recorded it"


def test_in_latex_the_best_of_each_cell_is_bold(tmp_path):
    results = made(tmp_path / "runs", {"central": 0.9, "local": 0.2, "felo": 0.7})
    text = write_latex(results, tmp_path).read_text()
    personal = text.split(r"\end{tabular}")[0]
    rows = {line.split(" & ")[0]: line for line in personal.splitlines() if " & " in line}
    assert rows["central"].count(r"\textbf") == 9
    assert rows["felo"].count(r"\underline") == 9
    assert text.count(r"\toprule") == 4


SMALL = ("--set", "data.dataset=breast-cancer", "--set", "models.pool=mlp", "--set", "rounds=1",
         "--set", "training.local-epochs=1", "--set", "data.alpha=1", "--set",
         "data.partition=iid", "--methods", "local,central,fedavg")  # fmt: skip


def call(*words):
    return (
        CliRunner().invoke(app, ["table", "field", *map(str, words)], catch_exceptions=False).output
    )


def test_table_is_made_once_and_has_a_page_that_filters(tmp_path):
    said = call("--seeds", "0,1", "--out", tmp_path, "--latex", *SMALL)
    assert said.count("\ntable: ") == 2, "after each seed"
    rows = list(csv.DictReader((tmp_path / "field-tiny.csv").open()))
    assert len(rows) == 3 * 9 * 2
    assert {row["personal model"] for row in rows} == {"private", "global"}
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/summary.json")}
    assert len(runs) == 3 * 2, "all cells have these settings, and share their runs"
    assert not [*tmp_path.glob("runs/*/*/report.html")], "a table's runs have no page"
    page = (tmp_path / "field-tiny.html").read_text()
    for protocol in ("common", "personal"):
        counts = set()
        for path in runs:
            tested = [json.loads(line) for line in (path.parent / "metrics.jsonl").open()][-1]
            each = np.array([*tested["tested"][protocol].values()])
            factor = 1 if protocol == "common" else len(each)
            counts.add(round(factor * len(each) / (1 / each).sum(), 6))
        found = {round(float(row[f"test samples, {protocol}"]), 6) for row in rows}
        assert found == counts
    tested = "Each accuracy of a run has 114 test samples."
    assert tested in page
    assert all(tested in (tmp_path / f"field-tiny.{form}").read_text() for form in ("md", "tex"))
    assert 'data-rows="every"' in page
    assert '<div id="every">' in page
    assert (tmp_path / "field-tiny.tex").exists()
    again = call("--seeds", "0,1", "--out", tmp_path, *SMALL)
    assert "seed 0  " not in again
    assert all(path.stat().st_mtime_ns == before for path, before in runs.items())
    text = (tmp_path / "field-tiny.md").read_text()
    assert "54 of 54 runs are finished" in text
    made = "fedhet table field --size tiny --seeds 0,1 --methods local,central,fedavg --set data."
    assert f"\n{made}" in text
    assert made in page


def test_plan_is_shown_without_training(tmp_path):
    said = call("--seeds", "0", "--out", tmp_path, "--dry-run", "--methods", "fedavg")
    assert said.count("to do  fedavg, homogeneous") == 3
    assert "three" not in said
    assert not [*tmp_path.iterdir()]


def test_methods_option_is_only_for_this_table(tmp_path):
    with pytest.raises(SettingsError, match="--methods"):
        CliRunner().invoke(app, ["table", "felo-2", "--methods", "felo"], catch_exceptions=False)
    with pytest.raises(SettingsError, match=r"'--size'.*paper"):
        call("--size", "huge")


def test_csv_has_the_numbers_of_the_runs(tmp_path):
    call("--seeds", "0", "--out", tmp_path, *SMALL)
    row = next(r for r in csv.DictReader((tmp_path / "field-tiny.csv").open())
               if r["method"] == "fedavg")  # fmt: skip
    run = next(tmp_path.glob("runs/fedavg-*/seed-0/summary.json"))
    found = json.loads(run.read_text())
    assert float(row["personal"]) == found["accuracy"]["personal"]["global"]["mean"]
    assert float(row["common"]) == found["accuracy"]["common"]["global"]["mean"]
    assert float(row["bytes"]) == found["bytes_up"] + found["bytes_down"]


# Recommendations in docs/methods.md


DOCS = MEASURED.parents[2] / "docs"
RECORD = json.loads((MEASURED / "field-tiny.json").read_text())


def accuracies(method, protocol, pools):
    """Return the accuracy of each run by cell and seed, in percent, from the record."""
    runs = {}
    for row in RECORD["rows"]:
        run = dict(zip(RECORD["columns"], row, strict=True))
        if run["method"] == method and run["architectures"] in pools:
            runs[run["architectures"], run["split"], run["seed"]] = 100 * run[protocol]
    return runs


def test_the_finished_table_is_shown_in_full(tmp_path):
    rows = [row for row in RECORD["rows"] if row[0] in ("central", "local", "fedavg", "fedbn")]
    (tmp_path / "field-tiny.json").write_text(json.dumps(RECORD | {"rows": rows}))
    said = call("--show", "--out", tmp_path)
    for method in ("local", "fedavg"):
        line = next(line for line in said.splitlines() if line.startswith(method))
        runs = accuracies(method, "personal", ("homogeneous",))
        each = [value for (_, split, _), value in runs.items() if split == "IID"]
        assert f"{np.mean(each):.1f} ± {np.std(each, ddof=1):.1f}" in line
    for words in ("Mean rank", "Difference in accuracy from local", "peak memory", "No method was"):
        assert words in " ".join(said.split()), words
    assert RECORD["hardware"] in said
    with pytest.raises(StateError, match=r"field: no finished table found in .*nowhere"):
        call("--show", "--out", tmp_path / "nowhere")


def difference_of(method, protocol, pools):
    """Return the mean difference to local, its standard error, and the interval's half width."""
    ours, local = (accuracies(name, protocol, pools) for name in (method, "local"))
    if ours.keys() != local.keys():
        return None
    by_seed: dict[int, list[float]] = {}
    for cell, accuracy in local.items():
        by_seed.setdefault(cell[-1], []).append(ours[cell] - accuracy)
    values = np.array([np.mean(each) for each in by_seed.values()])
    count = [
        run[f"test samples, {protocol}"]
        for run in (dict(zip(RECORD["columns"], row, strict=True)) for row in RECORD["rows"])
        if run["method"] in (method, "local") and run["architectures"] in pools
    ]
    n, d = min(count), abs(values.mean()) / 100
    floor = 100 * math.sqrt((n * d + 1 - (n * d) ** 2 / (n + 2)) / (n + 2) ** 2)
    seed = values.std(ddof=1) / math.sqrt(len(values))
    error = math.hypot(seed, floor)
    degrees = error**4 / (seed**4 / (len(values) - 1) + floor**4 / (n - 1))
    return values.mean(), error, stats.t.ppf(0.975, degrees) * error


def rows_of(page):
    text = (DOCS / page).read_text().split("<!-- make reference, measured -->")[1]
    text = text.split("<!-- end -->")[0]
    return [[c.strip() for c in r.split("|")[1:-1]] for r in text.splitlines() if r[:1] == "|"][2:]


def needs(method, field):
    return getattr(find_method(method).spec, field)


@pytest.mark.parametrize("row", rows_of("methods.md"), ids=lambda row: f"{row[0]}, {row[1]}")
def test_recommended_methods_are_better_than_local_beyond_the_noise(row):
    situation, protocol, text, noisy, better, count = row
    pools = ("homogeneous",) if situation.startswith("one") else ("three", "nine")
    public = not re.search("no public data", situation)
    candidates = {
        name
        for name in {run[0] for run in RECORD["rows"]} - {"local", "central", "um-pfssl"}
        if needs(name, "needs_public") == public
    }
    if "without weights" in situation:
        contracts = ("instructions", "replies")
        candidates = {n for n in candidates if not any(needs(n, c).weights for c in contracts)}
    found = {name: difference_of(name, protocol, pools) for name in sorted(candidates)}
    clear = {name: d for name, d in found.items() if d and d[0] > d[2]}
    first = sorted(clear, key=lambda name: -clear[name][0])[:3]
    place = RECORD["columns"].index(f"{protocol} model")
    kinds = {run[0]: run[place] for run in RECORD["rows"]}
    expected = [f"{n} {clear[n][0]:+.1f} ± {clear[n][1]:.1f} ({kinds[n]})" for n in first]
    assert text == (", ".join(expected) or "local (no method is clearly better)")
    assert better == f"{len(clear)} of {sum(d is not None for d in found.values())}"
    least = max((d[0] for d in clear.values()), default=0)
    larger = {n for n, d in found.items() if d and d[0] > least and n not in clear}
    named = {part.split()[0] for part in noisy.split(", ")} - {"—", "–"}
    assert named <= larger
    assert len(named) == min(2, len(larger))
    assert int(count) == 3 * len(pools) * len(RECORD["seeds"])


def test_generated_pages_equal_the_record():
    for path, text in pages(DOCS.parent).items():
        assert path.read_text() == text, f"{path}: run `make reference`"


def test_table_of_equal_methods_recommends_none(tmp_path):
    tops = {"local": 0.7, "felo": 0.7, "fedmd": 0.7, "fedavg": 0.2}
    results = made(tmp_path, tops, seeds=range(5))
    for row in recommendations(results).rows:
        assert row[2].text == "local (no method is clearly better)"
        assert row[4].text.startswith("0 of ")


def test_record_has_the_numbers_of_the_runs(tmp_path):
    results = made(tmp_path, {"local": 0.5, "felo": 0.7})
    record = FieldRecord.model_validate_json(FieldRecord.from_results(results).to_json())
    for name, cell in itertools.product(("local", "felo"), CELLS):
        for measure in ("personal", "common", "bytes"):
            expected = results.by_seed(name, cell, measure)
            found = record.results.by_seed(name, cell, measure)
            assert [*found.index] == [*expected.index]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
