"""Comparisons of synthetic runs, checked against numbers worked out here from the same files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import UNSAFE, Page, lines_of, make, rewrite, shown

from fedhet.base.errors import SettingsError, StateError
from fedhet.report import compare, comparison_table, write_comparison


def test_groups_are_labeled_by_their_differences(tmp_path: Path) -> None:
    for seed in range(3):
        make(tmp_path / f"a{seed}", seed=seed, table={"share-weights": True, "alpha": 1.0})
        make(tmp_path / "deep" / f"b{seed}", seed=seed, table={"share-weights": False, "alpha": 1})
        where = {"out": f"x{seed}", "engine.device": f"cuda:{seed}", "engine.threads": seed + 1}
        make(tmp_path / f"v{seed}", seed=seed, method="velo", settings=where)
    found = compare([tmp_path])
    assert {group.label: group.seeds for group in found.groups} == {
        "felo share-weights=true": (0, 1, 2),
        "felo share-weights=false": (0, 1, 2),
        "velo": (0, 1, 2),
    }


@pytest.mark.parametrize(
    ("clocks", "labels"),
    [
        (["/a/slow.csv", "/a/fast.csv", "none"], {"slow.csv", "fast.csv", "none"}),
        (["/a/slow.csv", "/b/slow.csv"], {"/a/slow.csv", "/b/slow.csv"}),
        (["/a/slow.csv", ""], {"slow.csv", "none"}),
    ],
)
def test_label_shortens_unambiguous_paths(
    tmp_path: Path, clocks: list[str], labels: set[str]
) -> None:
    for k, clock in enumerate(clocks):
        make(tmp_path / f"r{k}", settings={"pace.clock": clock})
    found = {group.label for group in compare([tmp_path]).groups}
    assert found == {f"felo clock={label}" for label in labels}


def test_runs_in_different_directories_form_one_group(tmp_path: Path) -> None:
    for seed in range(2):
        where = {
            "engine.join-timeout": 60.0 + seed,
            "engine.min-clients": seed,
            "engine.in-flight": seed,
            "out": f"r{seed}",
        }
        make(tmp_path / f"r{seed}", seed=seed, settings=where)
    make(tmp_path / "other", settings={"fraction": 0.5})
    found = {group.label: group.seeds for group in compare([tmp_path]).groups}
    assert len(found) == 2
    assert found["felo"] == (0, 1)
    assert found["felo fraction=0.5"] == (0,)


def test_comparison_statistics(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"r{n}", seed=n, protocols=("common", "personal")) for n in range(3)]
    low = make(tmp_path / "low", method="local", top=0.6)
    found = compare([low, *runs])
    assert [group.label for group in found.groups] == ["felo", "local"]
    assert found.columns == (("common", "private"), ("personal", "private"))
    group = found.groups[0]
    for protocol in ("common", "personal"):
        last = [lines_of(run)[-1]["accuracy"][protocol]["private"] for run in runs]
        means = [each["mean"] for each in last]
        spread = group.score((protocol, "private"))
        assert spread.mean == pytest.approx(np.mean(means))
        assert spread.std == pytest.approx(np.std(means, ddof=1))
        worst = np.mean([min(each["per_client"].values()) for each in last])
        assert group.score((protocol, "private"), "worst").mean == pytest.approx(worst)
    sent = [sum(each["bytes_up"] for each in lines_of(run)) for run in runs]
    assert group.total("bytes_up").mean == pytest.approx(np.mean(sent))
    assert group.total("seconds").mean == pytest.approx(10.0)
    assert math.isnan(found.groups[1].score(("common", "private")).std)
    local = next(line for line in shown(comparison_table(found)).splitlines() if "local" in line)
    assert "±" not in local
    assert "—" in local


def cost(run: Path, target: float) -> float:
    """Return the bytes until the first round whose mean reached the target."""
    total = 0
    for each in lines_of(run):
        total += each["bytes_up"] + each["bytes_down"]
        if np.mean([*each["accuracy"]["common"]["private"]["per_client"].values()]) >= target:
            return float(total)
    return math.inf


def test_bytes_to_a_target(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"r{n}", seed=n, rounds=12) for n in range(3)]
    for target, fraction in ((0.5, 0.5), (50, 0.5), (0.62, 0.62)):
        found = compare(runs, target=target)
        spread = found.to_target(found.groups[0], "bytes")
        assert found.target == fraction
        assert spread.n == 3
        assert spread.mean == pytest.approx(np.mean([cost(run, fraction) for run in runs]))
    never = compare(runs, target=99.5)
    assert never.to_target(never.groups[0], "bytes").n == 0
    row = next(line for line in shown(comparison_table(never)).splitlines() if "felo" in line)
    assert row.split()[-3] == "—"


def test_bytes_to_target_use_the_selected_kind(tmp_path: Path) -> None:
    runs = [make(tmp_path / name, method=name, rounds=6) for name in ("felo", "fedgems")]
    lines = lines_of(runs[1])
    for number, line in enumerate(lines):
        reached = {"mean": 0.1 * number, "std": 0.0, "worst": 0.0, "per_client": {"server": 0.1}}
        line["accuracy"]["common"]["server"] = reached
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def judge(summary: dict[str, Any]) -> None:
        summary["accuracy"] = lines[-1]["accuracy"]

    rewrite(runs[1] / "summary.json", judge)
    found = compare(runs, target=0.3, kind="server")
    assert found.headline == ("common", "server")
    assert [group.method for group in found.groups] == ["fedgems", "felo"]
    cost = sum(line["bytes_up"] + line["bytes_down"] for line in lines[:4])
    assert found.to_target(found.groups[0], "bytes").mean == cost
    assert found.to_target(found.groups[1], "bytes").n == 0
    assert any(
        "Last, because their server models were not evaluated on the common test set: felo" in note
        for note in found.notes
    )
    found = compare(runs)
    assert found.headline == ("common", "headline")
    assert [group.resolved(found.headline)[1] for group in found.groups] == ["private", "server"]
    write_comparison(found, tmp_path / "out")
    gap = found.groups[0].score(found.headline).mean - found.groups[1].score(found.headline).mean
    page = Page(tmp_path / "out" / "compare.html").text
    assert f"next fedgems (server), {gap:.4f} below" in page, "the compared kinds are named"
    with pytest.raises(SettingsError, match=r"^kind: .*private.*server.*sever"):
        compare(runs, kind="sever")


def test_default_target_is_reached_by_all_runs(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"r{n}", seed=n, top=0.5 + 0.1 * n) for n in range(4)]
    found = compare(runs)
    lowest = min(lines_of(run)[-1]["accuracy"]["common"]["private"]["mean"] for run in runs)
    assert 0.9 * lowest - 0.001 < found.target <= 0.9 * lowest
    assert found.to_target(found.groups[0], "bytes").n == 4
    assert any(f"bytes to {100 * found.target:.4g} %" in note for note in found.notes)


def test_runs_without_a_finite_score_are_compared(tmp_path: Path) -> None:
    def unknown(content: Any) -> Any:
        if isinstance(content, dict):
            return {name: unknown(each) for name, each in content.items()}
        return None

    for name in ("a", "b"):
        path = make(tmp_path / name, finished=False, settings={"note": name})
        lines = [{**line, "accuracy": unknown(line["accuracy"])} for line in lines_of(path)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = write_comparison(compare([tmp_path / "a", tmp_path / "b"]), tmp_path / "out")
    (page,) = (Page(file) for file in files if file.suffix == ".html")
    assert "— mean accuracy of" in " ".join(page.text.split())


@pytest.mark.parametrize("target", [0, -1, 101, math.nan])
def test_target_out_of_range_raises(tmp_path: Path, target: float) -> None:
    with pytest.raises(SettingsError, match=r"^target: "):
        compare([make(tmp_path / "run")], target=target)


def test_runs_that_do_not_match_are_noted(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", method="velo", dataset="mnist", rounds=3)
    make(tmp_path / "c", method="fedtype", protocols=("personal",), headline="personal")
    make(tmp_path / "d", method="cofed", finished=False, settings={"rounds": 9})
    make(tmp_path / "e", seed=1, finished=False, rounds=5)
    make(tmp_path / "f", method="gone", seed=2)
    (tmp_path / "f" / "metrics.jsonl").unlink()
    make(tmp_path / "z")
    found = compare([tmp_path])
    write_comparison(found, tmp_path / "out")
    notes = "\n".join(found.notes)
    for words in (
        "different datasets are not comparable: digits, mnist.",
        "The runs have different numbers of rounds: 3, 5.",
        "Last, because their private models were not evaluated on the common test set: fedtype.",
        "d: unfinished, 5 of 9 rounds; its last round is shown",
        "e: unfinished, 5 of 5 rounds; skipped",
        f"skipped: {tmp_path / 'f' / 'metrics.jsonl'} not found",
        "has the same seed",
    ):
        assert words in notes, words
    assert [group.label for group in found.groups][-1] == "fedtype"
    felo = next(group for group in found.groups if group.method == "felo")
    assert felo.seeds == (0,)
    assert "cofed *" in shown(comparison_table(found))


def test_comparison_is_written(tmp_path: Path) -> None:
    for seed in range(2):
        make(tmp_path / "runs" / f"a{seed}", seed=seed, settings={"note": f"a|b{UNSAFE}"})
        make(tmp_path / "runs" / f"b{seed}", seed=seed, settings={"note": "plain"}, top=0.7)
    found = compare([tmp_path / "runs"])
    files = {file.name: file for file in write_comparison(found, tmp_path / "out")}
    assert set(files) == {"compare.png", "compare.html", "compare.md", "compare.json"}
    assert files["compare.png"].read_bytes().startswith(b"\x89PNG")
    page = Page(files["compare.html"])
    page.assert_self_contained()
    assert UNSAFE in page.text
    first, _ = files["compare.md"].read_text().split("\n\n", 1)
    table = first.splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert len(table) == 4
    data = json.loads(files["compare.json"].read_text(), parse_constant=pytest.fail)
    best = data["groups"][0]["accuracy"]["common"]["private"]
    assert best["mean"] == pytest.approx(found.groups[0].score(("common", "private")).mean)
    curve = data["groups"][0]["curve"]
    runs = [lines_of(run.path) for run in found.groups[0].runs]
    means = [[each["accuracy"]["common"]["private"]["mean"] for each in run] for run in runs]
    assert curve["mean"] == pytest.approx(np.mean(means, axis=0))
    assert curve["std"] == pytest.approx(np.std(means, axis=0, ddof=1))


def test_settings_of_other_methods_are_no_difference(tmp_path: Path) -> None:
    felo = make(tmp_path / "felo", table={"alpha": 1.0})
    local = make(tmp_path / "local", method="local", settings={"data.alpha": 0.1})
    write_comparison(compare([felo, local]), tmp_path / "out")
    text = Page(tmp_path / "out" / "compare.html").text
    differing, _, shared = text.partition("Settings shared by all")
    assert "data.alpha 0.5 0.1" in differing
    assert "felo.alpha" not in differing
    assert "felo.alpha 1 " in shared


def test_metrics_of_a_method_are_compared(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"felo-{seed}", seed=seed) for seed in range(2)]
    runs.append(make(tmp_path / "local", method="local"))
    names = sorted(lines_of(runs[0])[0]["method"])
    local = lines_of(runs[2])
    for line in local:
        line["method"] = {}
    (runs[2] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in local))
    out = tmp_path / "out"
    write_comparison(compare(runs, figures=f"{names[0]}, {names[1]}"), out)
    assert {f"compare-{name}.png" for name in names[:2]} <= {path.name for path in out.iterdir()}
    assert names[1] in Page(out / "compare.html").text
    groups = {
        each["method"]: each for each in json.loads((out / "compare.json").read_text())["groups"]
    }
    drawn = [[line["method"][names[0]] for line in lines_of(run)] for run in runs[:2]]
    curve = groups["felo"]["figures"][names[0]]
    assert curve["mean"] == pytest.approx(np.mean(drawn, axis=0))
    assert curve["std"] == pytest.approx(np.std(drawn, axis=0, ddof=1))
    assert groups["local"]["figures"][names[0]]["rounds"] == []
    with pytest.raises(SettingsError, match=rf"^--figures: .*{names[0]}x"):
        compare(runs, figures=names[0] + "x")


def test_many_groups_are_drawn(tmp_path: Path) -> None:
    for number in range(14):
        make(
            tmp_path / f"r{number}",
            rounds=2,
            settings={"data.alpha": 0.1 * number},
            partition=False,
        )
    found = compare([tmp_path])
    write_comparison(found, tmp_path / "out")
    assert len(found.groups) == 14
    assert (tmp_path / "out" / "compare.html").stat().st_size > 10_000


def test_missing_runs_raise(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError, match="empty"):
        compare([tmp_path / "empty"])
    bare = make(tmp_path / "bare", protocols=(), finished=False)
    with pytest.raises(StateError, match="evaluated"):
        compare([bare])
    (bare / "metrics.jsonl").unlink()
    with pytest.raises(StateError, match=r"metrics\.jsonl"):
        compare([bare])
