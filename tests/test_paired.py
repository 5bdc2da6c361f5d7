"""The tail in reports, and paired differences, against numpy on the runs' files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from synthetic import Page, lines_of, make, rewrite, shown
from typer.testing import CliRunner

from fedhet.base.errors import SettingsError
from fedhet.cli import app
from fedhet.report import (
    compare,
    comparison_table,
    final_table,
    load_run,
    paired_table,
    write_comparison,
    write_report,
)
from fedhet.report.comparison_report import paired_cells

BOTH = ("common", "personal")


def make_seeds(root: Path, seeds: list[int], **changes: Any) -> list[Path]:
    """Write a run per seed into `root`."""
    return [make(root / f"seed-{seed}", seed=seed, **changes) for seed in seeds]


def mean_of(record: dict[str, Any], protocol: str = "common", kind: str = "private") -> float:
    """Return a round's mean over clients from the clients' values."""
    return float(np.mean([*record["accuracy"][protocol][kind]["per_client"].values()]))


def last_by_hand(run: Path) -> float:
    """Return the last round's mean over clients."""
    return mean_of(lines_of(run)[-1])


def tail_by_hand(run: Path, protocol: str = "common", kind: str = "private") -> float:
    """Return the mean over the last fifth of all rounds."""
    means = [mean_of(each, protocol, kind) for each in lines_of(run)]
    fifth = len(means) // 5 + (1 if len(means) % 5 else 0)
    return float(np.mean(means[-fifth:]))


# The tail


def test_a_run_of_an_older_version_has_its_tail_from_its_records(tmp_path: Path) -> None:
    path = make(tmp_path / "run", rounds=12, protocols=BOTH, kinds=("private", "proxy"))
    assert "tail" not in (path / "summary.json").read_text()
    run = load_run(path)
    text = shown(final_table(run))
    page = Page(write_report(load_run(path))).text
    row = next(line for line in text.splitlines() if line.strip().startswith("tail"))
    columns = [(p, k) for p in BOTH for k in ("private", "proxy")]
    wanted = [f"{tail_by_hand(path, *column):.4f}" for column in columns]
    assert re.findall(r"\d\.\d{4}", row) == wanted
    assert f"tail {wanted[0]} mean of rounds 10–12 best round" in page
    for (protocol, kind), tail in zip(columns, wanted, strict=True):
        where = "common test set" if protocol == "common" else "own test split"
        assert re.search(rf"{kind} {where} 0\.\d+ 0\.\d+ 0\.\d+ \(client-\d\) {tail} ", page)
    last = mean_of(lines_of(path)[-1])
    assert f"{last:.4f} mean accuracy of the private models" in page, "the headline is the last"


def test_a_written_tail_is_read_and_changes_nothing(tmp_path: Path) -> None:
    path = make(tmp_path / "run", rounds=6)
    before = shown(final_table(load_run(path)))
    tail = tail_by_hand(path)
    rewrite(path / "summary.json", lambda c: c["accuracy"]["common"]["private"].update(tail=tail))
    assert load_run(path).summary.accuracy["common"]["private"].tail == tail
    assert shown(final_table(load_run(path))) == before


def test_an_unfinished_runs_tail_is_of_the_rounds_so_far(tmp_path: Path) -> None:
    path = make(tmp_path / "run", rounds=6, finished=False, settings={"rounds": 50})
    assert load_run(path).tail("common", "private").rounds == (5, 6)
    assert "mean of rounds 5–6" in Page(write_report(load_run(path))).text
    one = make(tmp_path / "one", rounds=3)
    assert "mean of round 3 best" in Page(write_report(load_run(one))).text


def test_a_comparison_has_the_tail_of_every_protocol_and_kind(tmp_path: Path) -> None:
    runs = make_seeds(tmp_path / "felo", [0, 1, 2], rounds=11, protocols=BOTH)
    found = compare([tmp_path])
    write_comparison(found, tmp_path / "out")
    data = json.loads((tmp_path / "out" / "compare.json").read_text())["groups"][0]["accuracy"]
    for protocol in BOTH:
        tails = [tail_by_hand(run, protocol) for run in runs]
        assert data[protocol]["private"]["tail"] == {
            "mean": pytest.approx(np.mean(tails)),
            "std": pytest.approx(np.std(tails, ddof=1)),
            "n": 3,
        }
    tails = [tail_by_hand(run) for run in runs]
    page = Page(tmp_path / "out" / "compare.html").text
    assert all(f"{tail:.4f} {run}" in page for tail, run in zip(tails, runs, strict=True))
    lines = shown(comparison_table(found)).splitlines()
    place = next(line for line in lines if "tail" in line).index("tail") + 3
    row = next(line for line in lines if "felo" in line)
    assert row[: place + 1].endswith(f"{np.mean(tails):.4f}")


# Paired differences


def test_differences_are_paired_over_shared_seeds(tmp_path: Path) -> None:
    seeds = {"felo": [0, 1, 2, 4, 5], "local": [5, 4, 3, 1, 0], "velo": [0, 1, 2, 3, 4, 5]}
    top = {"felo": 0.8, "local": 0.6, "velo": 0.61}
    for number, (method, some) in enumerate(seeds.items()):
        make_seeds(tmp_path / method, some, method=method, top=top[method], rounds=7, noise=number)
    found = compare([tmp_path])
    write_comparison(found, tmp_path / "out")
    assert {(p.group.label, p.baseline.label) for p in found.pairs} == {
        ("felo", "local"), ("velo", "local"),
    }  # fmt: skip
    data = json.loads((tmp_path / "out" / "compare.json").read_text())["paired"]
    by_method = {pair["group"]: pair for pair in data}
    for method in ("felo", "velo"):
        shared = sorted(set(seeds[method]) & set(seeds["local"]))
        for part, value in (("last", last_by_hand), ("tail", tail_by_hand)):
            ours, theirs = (
                np.array([value(tmp_path / name / f"seed-{seed}") for seed in shared])
                for name in (method, "local")
            )
            each = ours - theirs
            se = np.sqrt(np.sum((each - each.mean()) ** 2) / (len(each) - 1) / len(each))
            numbers = by_method[method][part]
            assert numbers["n"] == len(shared)
            assert numbers["mean"] == pytest.approx(each.mean())
            assert numbers["seed_error"] == pytest.approx(se)
            images = 359 * abs(each.mean())  # of the 359 test images of digits
            floor = np.sqrt(images + 1 - images**2 / 361) / 361
            assert numbers["sample_error"] == pytest.approx(floor)
            assert numbers["se"] == pytest.approx(np.hypot(se, floor))
            variances = np.array([se**2, floor**2])
            degrees = variances.sum() ** 2 / (variances**2 @ [1 / (len(each) - 1), 1 / 358])
            margin = stats.t.ppf(0.975, degrees) * np.hypot(se, floor)
            assert numbers["margin"] == pytest.approx(margin)
            assert numbers["is_clear"] == (abs(each.mean()) > margin)
            assert numbers["samples"] == 359
            assert [int(seed) for seed in numbers["per_seed"]] == shared
            assert [*numbers["per_seed"].values()] == pytest.approx(each)
    assert by_method["felo"]["last"]["is_clear"], "0.2 apart, noise of 0.015"
    texts = [
        " ".join(shown(paired_table(found)).replace("\n", " ").split()),
        Page(tmp_path / "out" / "compare.html").text,
        (tmp_path / "out" / "compare.md").read_text(),
    ]
    last = by_method["felo"]["last"]
    assert f"| felo | local | 4 | 359 | {last['mean']:+.4f} ± {last['se']:.4f} † |" in texts[2]
    for text in texts:
        assert f"{last['mean']:+.4f}" in text
        assert f"± {last['se']:.4f} †" in text


def differing(root: Path, differences: list[float]) -> list[Path]:
    """Write a group per method, whose last accuracies differ by these numbers per seed."""
    for method in ("felo", "local"):
        for seed, difference in enumerate(differences):
            accuracy = 0.5 + (difference if method == "felo" else 0.0)
            path = make(root / method / f"{seed}", seed=seed, method=method, rounds=1, clients=1)
            (record,) = lines_of(path)
            score = {"mean": accuracy, "std": 0, "worst": 0, "per_client": {"client-0": accuracy}}
            record["accuracy"] = {"common": {"private": score}}
            (path / "metrics.jsonl").write_text(json.dumps(record))
            rewrite(path / "summary.json", lambda c, r=record: c.update(accuracy=r["accuracy"]))
    return [root / "felo", root / "local"]


@pytest.mark.parametrize(
    ("differences", "se", "clear"),
    [
        # Standard deviation and error by hand: of 0, 0.25, 0.5 they are 0.25 and 0.25 / √3.
        ([0.0, 0.25, 0.5], 0.25 / math.sqrt(3), False),
        ([-0.125, -0.25], 0.0625, False),  # three standard errors, but only two seeds
        ([0.25, 0.25, 0.25], 0.0, True),
        ([1 / 359, 1 / 359, 1 / 359], 0.0, False),  # one test image
        ([0.0, 0.0], 0.0, False),
    ],
)
def test_a_difference_is_marked_if_its_interval_excludes_zero(
    tmp_path: Path, differences: list[float], se: float, clear: bool
) -> None:
    found = compare(differing(tmp_path, differences))
    (pair,) = found.pairs
    assert pair.last.mean == pytest.approx(sum(differences) / len(differences))
    assert pair.last.seed_error == pytest.approx(se)
    assert pair.last.is_clear is clear
    table = shown(paired_table(found))
    assert table.count("†") == (3 if clear else 1), "two cells and the caption"


def test_a_small_p_value_is_a_bound_and_not_zero(tmp_path: Path) -> None:
    found = compare(differing(tmp_path, [0.25, 0.25, 0.25]), test="t")
    assert 0 < found.pairs[0].p < 0.0001
    write_comparison(found, tmp_path / "out")
    assert "< 0.0001" in shown(paired_table(found))
    page = Page(tmp_path / "out" / "compare.html").text
    assert "< 0.0001" in page
    assert "0.0000 Paired differences" not in page


def test_effective_numbers_of_test_samples_are_named_and_explained(tmp_path: Path) -> None:
    """Two clients with 10 and 30 test samples have 2 · 15 = 30 effective and 40 test samples."""
    for number, method in enumerate(("felo", "local")):
        for path in make_seeds(
            tmp_path / method, [0, 1], method=method, clients=2, rounds=1, noise=number,
            protocols=BOTH,
        ):  # fmt: skip
            (record,) = lines_of(path)
            record["tested"] = {"personal": {"client-0": 10, "client-1": 30}}
            (path / "metrics.jsonl").write_text(json.dumps(record))
    found = compare([tmp_path], protocol="personal")
    write_comparison(found, tmp_path / "out")
    texts = [
        " ".join(shown(comparison_table(found)).split()),
        Page(tmp_path / "out" / "compare.html").text,
        (tmp_path / "out" / "compare.md").read_text(),
    ]
    for text in texts:
        assert "own test split (30 effective test samples)" in text
        assert "Effective test samples: number of clients times the harmonic mean" in text
    assert "effective test samples" in paired_cells(found).headers


def test_the_baseline_is_named_or_local_or_the_first(tmp_path: Path) -> None:
    for number, (method, top) in enumerate({"felo": 0.8, "velo": 0.7, "local": 0.3}.items()):
        make_seeds(tmp_path / method, [0, 1], method=method, top=top, noise=number)
    paths = [tmp_path / method for method in ("velo", "local", "felo")]

    def sides(*args: Any, **options: Any) -> list[tuple[str, str]]:
        return [(p.group.label, p.baseline.label) for p in compare(*args, **options).pairs]

    assert sides(paths) == [("felo", "local"), ("velo", "local")]
    assert sides([paths[0], paths[2]]) == [("velo", "felo")]
    assert sides(paths, against="velo") == [("felo", "velo"), ("local", "velo")]
    assert sides([paths[0]]) == []
    with pytest.raises(SettingsError, match=r"^'?--against.*felo.*velo"):
        compare(paths, against="vel")


def test_of_several_baselines_each_group_has_the_most_alike(tmp_path: Path) -> None:
    for number, (method, alpha) in enumerate(
        (method, alpha) for method in ("felo", "local") for alpha in (0.1, 0.5)
    ):
        settings = {"data.alpha": alpha}
        folder = tmp_path / f"{method}-{alpha}"
        make_seeds(folder, [0, 1], method=method, settings=settings, noise=number)
    found = compare([tmp_path])
    assert {(p.group.label, p.baseline.label) for p in found.pairs} == {
        (f"felo alpha={alpha}", f"local alpha={alpha}") for alpha in (0.1, 0.5)
    }
    one = compare([tmp_path], against="local alpha=0.1")
    assert {p.baseline.label for p in one.pairs} == {"local alpha=0.1"}
    assert len(one.pairs) == 3


def test_a_setting_is_named_by_its_last_part_where_that_is_unique(tmp_path: Path) -> None:
    for lr, alpha in ((0.1, 1), (0.2, 2)):
        settings = {"training.lr": lr, "data.alpha": alpha, "felo.alpha": alpha}
        make(tmp_path / f"{lr}", method="felo", settings=settings)
    assert {group.label for group in compare([tmp_path]).groups} == {
        "felo data.alpha=1 alpha=1 lr=0.1", "felo data.alpha=2 alpha=2 lr=0.2"
    }  # fmt: skip


def test_other_kinds_can_be_compared(tmp_path: Path) -> None:
    kinds = ("private", "proxy")
    proxies = make_seeds(tmp_path / "fedtype", [0, 1, 2], method="fedtype", kinds=kinds, noise=1)
    alone = make_seeds(tmp_path / "local", [0, 1, 2], method="local", protocols=BOTH, noise=2)
    paths = [tmp_path / "fedtype", tmp_path / "local"]
    for baseline, kind, runs in (("local", "private", alone), ("fedtype", "private", proxies)):
        found = compare(paths, kind="proxy", against=f"{baseline}:{kind}", protocol="common")
        pair = next(pair for pair in found.pairs if pair.group.label == "fedtype")
        each = [
            mean_of(lines_of(a)[-1], kind="proxy") - mean_of(lines_of(b)[-1], kind=kind)
            for a, b in zip(proxies, runs, strict=True)
        ]
        assert pair.last.mean == pytest.approx(np.mean(each))
        assert pair.last.seed_error == pytest.approx(np.std(each, ddof=1) / math.sqrt(3))
        assert f"{baseline} (private)" in shown(paired_table(found))
    with pytest.raises(SettingsError, match=r"'local'.*private.*'proxy'"):
        compare(paths, against="local:proxy")
    with pytest.raises(SettingsError, match=r"^kind: .*'proxy'"):
        compare(paths, kind="proxy", protocol="personal")
    with pytest.raises(SettingsError, match=r"^protocol: .*'own'"):
        compare(paths, protocol="own")
    assert compare(paths, protocol="personal").headline == ("personal", "private")


def test_where_nothing_can_be_paired_the_reason_is_said(tmp_path: Path) -> None:
    for number, (method, seeds) in enumerate(
        {"local": [0, 1], "felo": [1, 2], "velo": [2], "cofed": [0, 1], "fedgems": [0, 1]}.items()
    ):
        other = {"dataset": "mnist"} if method == "cofed" else {}
        protocols = ("personal",) if method == "fedgems" else ("common",)
        folder = tmp_path / method
        make_seeds(folder, seeds, method=method, noise=number, protocols=protocols, **other)
    paths = [tmp_path / name for name in ("local", "felo", "velo", "cofed", "fedgems")]
    reasons = {p.group.label: p.fault for p in compare(paths).pairs}
    assert reasons == {
        "felo": "only 1 shared seed",
        "velo": "no shared seed",
        "cofed": "different datasets",
        "fedgems": "not evaluated",
    }
    found = compare(paths[:3])
    write_comparison(found, tmp_path / "out")
    assert paired_table(found) is None
    note = "no paired differences: no shared seed or only 1 shared seed"
    assert note in found.notes
    page = Page(tmp_path / "out" / "compare.html").text
    assert note in page
    assert "Paired differences" not in page
    data = json.loads((tmp_path / "out" / "compare.json").read_text())["paired"]
    assert {pair["group"]: pair["last"]["mean"] for pair in data} == {"felo": None, "velo": None}
    make_seeds(tmp_path / "more", [0, 1], method="um-pfssl", noise=9)
    mixed = compare([*paths, tmp_path / "more"])
    table = shown(paired_table(mixed))
    assert all(reason in table for reason in reasons.values())
    assert not any("no paired differences" in each for each in mixed.notes)


def test_the_command_prints_and_writes_them(tmp_path: Path) -> None:
    for number, method in enumerate(("felo", "local")):
        make_seeds(tmp_path / method, [0, 1, 2], method=method, protocols=BOTH, noise=number)
    out = tmp_path / "out"
    command = ["compare", str(tmp_path / "felo"), str(tmp_path / "local"), "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--protocol", "personal", "--against", "felo"])
    assert result.exit_code == 0, result.output
    assert "paired differences: personal private" in result.output
    (pair,) = json.loads((out / "compare.json").read_text())["paired"]
    assert (pair["group"], pair["against"]) == ("local", "felo")
    assert (pair["protocol"], pair["kind"]) == ("personal", "private")
    assert f"{pair['tail']['mean']:+.4f}" in result.output


# What is compared


def test_a_run_that_recorded_its_test_samples_has_that_number(tmp_path: Path) -> None:
    path = make(tmp_path / "run", dataset="digits", protocols=BOTH, clients=2, rounds=1)
    assert load_run(path).test_samples("common", "private") == 359, "the size of the digits"
    assert load_run(path).test_samples("personal", "private") is None
    (record,) = lines_of(path)
    record["tested"] = {
        "common": {"client-0": 100, "client-1": 100},
        "personal": {"client-0": 10, "client-1": 30},
    }
    (path / "metrics.jsonl").write_text(json.dumps(record))
    assert load_run(path).test_samples("common", "private") == pytest.approx(100)
    assert load_run(path).test_samples("personal", "private") == pytest.approx(30)
    del record["tested"]["common"]["client-1"]
    (path / "metrics.jsonl").write_text(json.dumps(record))
    assert load_run(path).test_samples("common", "private") is None, "one client's is unknown"


def test_an_unknown_number_of_test_samples_is_marked(tmp_path: Path) -> None:
    for number, method in enumerate(("felo", "local")):
        make_seeds(tmp_path / method, [0, 1, 2], method=method, dataset="table:x", noise=number)
    found = compare([tmp_path])
    (pair,) = found.pairs
    assert pair.last.sample_error == 0
    text = " ".join(shown(paired_table(found)).split())
    assert "unknown" in text
    assert "the difference can be one test sample" in text
    assert "unknown number of test samples" in " ".join(shown(comparison_table(found)).split())


def test_a_comparison_names_what_differs_besides_the_method(tmp_path: Path) -> None:
    """Splits are alike for runs of one noise and other for another, as are the models' names."""
    make_seeds(tmp_path / "felo", [0, 1], method="felo", rounds=1)
    make_seeds(tmp_path / "velo", [0, 1], method="velo", rounds=1)
    same = compare([tmp_path / "felo", tmp_path / "velo"]).notes
    assert not [note for note in same if "not only of methods" in note]
    runs = make_seeds(tmp_path / "local", [0, 1, 2], method="local", rounds=1, noise=3)
    for run in runs:
        rewrite(run / "summary.json", lambda c: c.update(models=dict.fromkeys(c["models"], "mlp")))
    notes = [n for n in compare([tmp_path]).notes if "not only of methods" in n]
    assert [note.partition(",")[0] for note in notes] == [
        "The seeds differ", "The models differ", "The data splits of seed 0 differ",
    ]  # fmt: skip
    seeds, models, splits = notes
    assert "0, 1, 2 (local)" in seeds
    assert "mlp (4) (local)" in models
    assert "cnn2 (2), mlp (2) (" in models
    assert re.search(r"split \d, 4 clients, [\d,]+ samples \(local\)", splits)
    assert "models differ" in " ".join(shown(comparison_table(compare([tmp_path]))).split())
    last = lines_of(runs[0])[-1]
    last["tested"] = {"common": {f"client-{number}": 7 for number in range(4)}}
    (runs[0] / "metrics.jsonl").write_text(json.dumps(last))
    found = " ".join(compare([tmp_path]).notes)
    assert "The test sets differ" in found
    assert "7 test samples (local)" in found
