"""`fedhet table claims`, and the pages with claims, counted from the finished tables."""

from __future__ import annotations

import csv
import itertools
import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedhet.base.errors import SettingsError, StateError
from fedhet.cli import app
from fedhet.experiments import plan as planning
from fedhet.experiments.claims import MEASURED, read_finished, verdict_of
from fedhet.experiments.paper import collect
from fedhet.experiments.plan import paper_of, plan, read_table, table_names
from tools.results import pages

TABLES = Path(str(planning.FILES))
DOCS = Path(__file__).parent.parent / "docs"
KEYS = {"paper", "table", "size", "data", "claim", "bound", "verdict"}
VERDICTS = {"holds", "not-told-apart", "does-not-hold", "not-measured"}


def claims_of(table):
    return [*read_table(table).sentences]


def call(*words):
    return CliRunner().invoke(app, ["table", *map(str, words)], catch_exceptions=False)


DIFFERENCES = {"holds": 1.0, "within noise": 0.1, "does not hold": -1.0, "not measured": None}


def comparison(outcome, claim, place="IID", **changes):
    """Return a comparison in `felo-2` with three seeds and no test samples that has the outcome."""
    above, below = {0: ("Felo", "FedAvg"), 1: ("Velo", "Felo"), 2: ("Felo", "Velo")}[claim]
    base = {"claim": claims_of("felo-2")[claim], "where": place, "above": above, "below": below}
    return {**base, "difference": DIFFERENCES[outcome], "seed_error": 0.1, "seeds": 3, **changes}


def declared(table, each):
    """Return the declaration of a stored comparison, read from the table's file."""

    def states(claim):
        sides = claim.get("above", []), claim.get("below", [""])
        if "ascending" in claim:
            names = claim["ascending"]
            found = (each["below"], each["above"]) in itertools.pairwise(names)
        elif claim.get("together"):
            found = [each["above"], each["below"]] == [" + ".join(side) for side in sides]
        else:
            found = each["above"] in sides[0] and each["below"] in sides[1]
        return (
            claim["says"] == each["claim"]
            and found
            and each["where"] in claim.get("where", [each["where"]])
            and claim.get("ratio", False) == each.get("ratio", False)
        )

    claims = tomllib.loads((TABLES / f"{table}.toml").read_text())["claims"]
    (found,) = filter(states, claims)
    return found


def outcome_of(each, claim):
    """Return the outcome of a stored comparison, from its definition (for Student's t)."""
    value, error, samples = (each[key] for key in ("difference", "seed_error", "test_samples"))
    if value is None:
        return "not measured"
    is_ratio = each.get("ratio", False)
    variances, degrees = [error**2], [each["seeds"] - 1]
    if isinstance(samples, int):
        # The error of a value is the error of its difference from a perfect model.
        fraction = abs(value / each["unit"] - (1 if is_ratio or not each["below"] else 0))
        images = fraction * samples
        floor = max(images + 1 - images**2 / (samples + 2), 0) / (samples + 2) ** 2
        variances.append(each["unit"] ** 2 * floor)
        degrees.append(samples - 1)
    total = sum(variances)
    parts = sum(v**2 / d for v, d in zip(variances, degrees, strict=True))
    margin = stats.t.ppf(0.975, total**2 / parts if parts else 1) * np.sqrt(total)
    has_bound = "at_least" in claim or "at_most" in claim
    low = claim.get("at_least", -np.inf if has_bound else is_ratio)
    high = claim.get("at_most", np.inf)
    if value - margin > high or value + margin < low:
        return "does not hold"
    return "holds" if low < value - margin and value + margin < high else "within noise"


def write(folder, size, *outcomes, **changes):
    """Write a finished `felo-2`, with one comparison per claim, by number and outcome."""
    places = {number: iter(("IID", "Dirichlet 0.5")) for number in range(3)}
    found = [comparison(outcome, number, next(places[number])) for number, outcome in outcomes]
    content = {"table": "felo-2", "size": size, "seeds": [0, 1], "runs": 4, "finished": 4}
    columns = {"IID": (59.4, 0.4), "Dirichlet 0.5": (58.03, None)}
    content["cells"] = dict.fromkeys(("FedAvg", "Felo", "Velo"), columns)
    content["test_samples"] = dict.fromkeys(columns, {"tiny": 359}.get(size, "unknown"))
    text = json.dumps({**content, "comparisons": found, **changes})
    (folder / f"felo-2-{size}.json").write_text(text)


@pytest.fixture
def folder(tmp_path):
    """A directory with finished tables, namely `felo-2` in two sizes, and another file."""
    write(tmp_path, "tiny", (0, "holds"), (0, "holds"), (1, "within noise"), (1, "holds"))
    write(tmp_path, "small", (0, "holds"), (0, "does not hold"), (1, "not measured"))
    (tmp_path / "notes.json").write_text("{}")
    return tmp_path


# A claim over its places


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["holds"], "holds"),
        (["holds", "holds"], "holds"),
        (["holds", "within noise"], "not-told-apart"),
        (["holds", "not measured"], "not-told-apart"),
        (["within noise"], "not-told-apart"),
        (["holds", "holds", "does not hold"], "does-not-hold"),
        (["within noise", "not measured", "does not hold"], "does-not-hold"),
        (["not measured", "not measured"], "not-measured"),
        ([], "not-measured"),
    ],
)
def test_claim_must_hold_in_all_places(outcomes, verdict):
    assert verdict_of(outcomes) == verdict


@pytest.mark.parametrize(
    ("held", "failed", "noise", "missing", "verdict"),
    [
        (4, 2, 0, 0, "holds"),
        (3, 0, 3, 0, "not-told-apart"),
        (3, 3, 0, 0, "does-not-hold"),
        (3, 2, 1, 0, "not-told-apart"),
        (0, 3, 3, 0, "does-not-hold"),
        (2, 0, 0, 1, "holds"),
        (1, 0, 0, 2, "not-told-apart"),
        (0, 0, 0, 2, "not-measured"),
        (0, 0, 0, 0, "not-measured"),
    ],
)
def test_claim_about_most_comparisons_must_hold_in_more_than_half(
    held, failed, noise, missing, verdict
):
    outcomes = ["holds"] * held + ["does not hold"] * failed
    outcomes += ["within noise"] * noise + ["not measured"] * missing
    assert verdict_of(outcomes, most=True) == verdict


def test_one_test_image_in_every_seed_is_within_noise(folder):
    """Each seed differs by one of 359 images, so the spread over the seeds is zero."""
    one = comparison("holds", 1, difference=100 / 359, seed_error=0.0)
    write(folder, "tiny", comparisons=[one | {"test_samples": 359, "unit": 100}])
    found = json.loads(call("claims", "--json", "--out", folder).output)
    verdicts = {each["claim"]: each["verdict"] for each in found if each["size"] == "tiny"}
    assert verdicts[claims_of("felo-2")[1]] == "not-told-apart"
    assert "+0.28 ± 0.39" in call("felo-2", "--show", "--out", folder).output


def test_every_table_is_of_one_paper():
    assert Counter(map(paper_of, table_names())) == {
        "cofed": 5, "fedgems": 12, "fedlora": 5, "fedtype": 12, "felo": 4, "um-pfssl": 12,
    }  # fmt: skip


# The command


@pytest.mark.parametrize("words", [[], ["--out"]])
def test_claims_as_json_are_those_of_a_folder(words, folder, monkeypatch, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tables").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    found = json.loads(call("claims", "--json", *words, *([folder] if words else [])).output)
    assert all(set(each) == KEYS for each in found)
    first, second, third = claims_of("felo-2")
    assert {(each["size"], each["claim"]): each["verdict"] for each in found} == {
        ("tiny", first): "holds",
        ("tiny", second): "not-told-apart",
        ("tiny", third): "not-measured",
        ("small", first): "does-not-hold",
        ("small", second): "not-measured",
        ("small", third): "not-measured",
    }
    assert {(each["paper"], each["table"]) for each in found} == {("felo", "felo-2")}


def test_claims_are_counted_by_paper_and_size(folder):
    said = call("claims", "--out", folder).output
    rows = [line.split() for line in said.splitlines() if " of " in line and "felo" in line]
    assert [row[:2] + row[5:] for row in rows] == [
        ["felo", "tiny", "3", "1", "1", "0", "1"],
        ["felo", "small", "3", "0", "0", "1", "2"],
    ]
    assert rows[0][2:5] == ["1", "of", "3"], "felo-4 claims nothing"


def test_shipped_tables_are_used_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(call("claims", "--json").output)
    papers = {"cofed", "fedgems", "fedlora", "fedtype", "felo", "um-pfssl"}
    assert {each["paper"] for each in found} == papers
    assert {each["verdict"] for each in found} <= VERDICTS
    for each in found:
        content = json.loads((MEASURED / f"{each['table']}-{each['size']}.json").read_text())
        table = each["table"]
        stated = [
            (c, declared(table, c)) for c in content["comparisons"] if c["claim"] == each["claim"]
        ]
        places = [outcome_of(*pair) for pair in stated]
        counts = [places.count(word) for word in ("does not hold", "holds", "not measured")]
        failed, held, missing = counts
        needed = {c.get("holds_in") == "most" for _, c in stated} == {True}
        alike = ("not-measured" if missing == len(places) else "not-told-apart", "holds")
        holds = held > len(places) / 2 if needed else 0 < held == len(places)
        fails = failed >= len(places) / 2 > 0 if needed else failed
        expected = "does-not-hold" if fails else alike[holds]
        assert each["verdict"] == expected, each
    assert len(found) == len({(e["table"], e["size"], e["claim"]) for e in found})
    assert "the tables that come with fedhet" in call("claims").output


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "felo-2-tiny.json: truncated or not valid JSON"),
        ('{"table": "felo-2"}', "felo-2-tiny.json: size: Field required"),
    ],
)
def test_damaged_file_raises(text, fault, folder):
    (folder / "felo-2-tiny.json").write_text(text)
    with pytest.raises(StateError, match=fault):
        call("claims", "--out", folder)


def test_file_of_another_table_or_with_an_outcome_raises(folder):
    write(folder, "tiny", table="felo-3")
    with pytest.raises(StateError, match=r"felo-2-tiny\.json.*felo-3-tiny"):
        call("claims", "--out", folder)
    found = comparison("holds", 0)
    write(folder, "tiny", comparisons=[{**found, "outcome": "holds"}])
    with pytest.raises(StateError, match=r"comparisons\.0\.outcome"):
        call("claims", "--out", folder)


def test_directory_without_tables_raises(tmp_path):
    with pytest.raises(StateError):
        call("claims", "--out", tmp_path)
    with pytest.raises(SettingsError, match="'--json'"):
        call("felo-2", "--json")


# What comes with fedhet


@pytest.mark.parametrize("found", read_finished(MEASURED), ids=lambda each: each.file_name)
def test_shipped_results_match_the_claims(found, tmp_path):
    table = read_table(found.table)
    assert {each.claim for each in found.comparisons} <= set(claims_of(found.table))
    planned = plan(found.table, table, found.size, found.seeds, tmp_path, found.settings)
    assert found.runs == len(planned.runs)
    for each in found.comparisons:
        content = each.model_dump()
        assert "stated" not in content
        assert each.outcome == outcome_of(content, declared(found.table, content))
    fresh = [(c.claim, c.where, c.above, c.below, c.ratio) for c in found.comparisons]
    empty = collect(planned).result.comparisons
    assert fresh == [(c.claim, c.where, c.above, c.below, c.ratio) for c in empty]


def test_stored_comparison_has_the_bound_that_its_table_declares(tmp_path, monkeypatch, folder):
    """The same file is read with three declarations of its table."""
    (tmp_path / "tables").mkdir()
    source = (TABLES / "felo-2.toml").read_text()
    verdicts = []
    for bound in ("", "at_least = 0.9\n", "at_least = 1.5\n"):
        text = source.replace("[[claims]]\n", f"[[claims]]\n{bound}", 1)
        (tmp_path / "tables" / "felo-2.toml").write_text(text)
        monkeypatch.setattr(planning, "FILES", tmp_path / "tables")
        first = next(iter(json.loads(call("claims", "--json", "--out", folder).output)))
        verdicts.append((first["verdict"], first["bound"]))
    assert verdicts == [
        ("holds", "above 0"), ("not-told-apart", "at least 0.9"), ("does-not-hold", "at least 1.5"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"claim": "a is better"}, {"below": "Velo"}, {"where": "IID, CINIC-10"}, {"ratio": True}],
)
def test_stored_comparison_that_no_claim_declares_raises(changes, folder):
    write(folder, "tiny", comparisons=[comparison("holds", 0) | changes])
    with pytest.raises(StateError, match=r"felo-2-tiny\.json: .*Repeat `fedhet table felo-2 --si"):
        call("claims", "--out", folder)


def test_pages_follow_the_data(tmp_path, folder):
    (tmp_path / "docs" / "tables").mkdir(parents=True)
    names = ("results.md", "tables/felo.md")
    for name in names:
        (tmp_path / "docs" / name).write_text((DOCS / name).read_text())
    first = claims_of("felo-2")[0]

    def texts():
        return (pages(tmp_path, folder)[tmp_path / "docs" / name] for name in names)

    results, felo = texts()
    assert "| felo | small | 1 of 3 | 3 | 0 | 0 | 1 | 2 |" in results
    assert f"- {first} (*above 0*): **does not hold** on fashion-mnist (1/0/1)." in felo
    assert "| Felo | 59.4 (84.5) | 58.0 (60.4) |" in felo, "measured, and as the paper prints it"
    write(folder, "small", (0, "holds"), settings={"rounds": 3})
    results, felo = texts()
    assert "| felo | small | 1 of 3 | 3 | 1 | 0 | 0 | 2 |" in results
    assert "--set rounds=3" in felo
    assert results.startswith((DOCS / "results.md").read_text()[:300]), "the text by hand stays"


def test_finished_table_is_shown_in_full(folder):
    text = " ".join(call("felo-2", "--show", "--out", folder).output.split())
    assert text.count("Felo and Velo with one architecture, against FedAvg. Chan and Ngai") == 2
    assert text.count("59.40 ± 0.40 (84.45)") == 2
    assert text.count("+1.00 ± 0.10") == 4
    assert text.count("2 seeds, 359 test samples.") == 1
    assert text.count("2 seeds, unknown number of test samples.") == 1
    assert "fedhet table felo-2 --size small --seeds 0,1" in text
    assert f"does not hold on fashion-mnist: {claims_of('felo-2')[0]}" in text
    assert f"holds on digits: {claims_of('felo-2')[0]} (above 0)" in text
    assert "The first two columns are for CIFAR-10 in the paper." in text


def test_default_claims_are_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "every 10 rounds" in call("felo-4", "--show").output
    with pytest.raises(StateError):
        call("felo-4", "--show", "--out", tmp_path)
    with pytest.raises(SettingsError, match="'--show'"):
        call("claims", "--show")


def test_result_file_equals_the_measurements(tmp_path):
    words = ["--seeds", "0,1", "--out", tmp_path, "--set", "rounds=2", "--set", "clients=2"]
    made = call("felo-2", *words, "--set", "training.local-epochs=1")
    assert made.exit_code == 0
    (found,) = read_finished(tmp_path)
    assert (found.seeds, found.runs, found.finished) == ([0, 1], 12, 12)
    assert found.settings == {"rounds": 2, "clients": 2, "training.local-epochs": 1}
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found.made)
    assert found.hours is not None
    rows = list(csv.DictReader((tmp_path / "felo-2-tiny.csv").open()))
    known = {(r["row"], r["column"], r["seed"]): float(r["measured"]) for r in rows}
    assert any(each.difference for each in found.comparisons)
    for place in found.comparisons:
        ends = [(name, place.where) for name in (place.above, place.below)]
        each = np.subtract(*([known[*end, seed] for seed in "01"] for end in ends))
        assert place.difference == pytest.approx(each.mean(), abs=1e-4)
        assert place.seed_error == pytest.approx(each.std(ddof=1) / np.sqrt(2), abs=1e-4)
        assert (place.seeds, place.test_samples, place.unit) == (2, 359, 100)
        scored = (row for row in rows if not row["metric"].startswith("figure/"))
        assert {row["test_samples"] for row in scored} == {"359"}
    assert "--set rounds=2 --set clients=2" in (tmp_path / "felo-2-tiny.md").read_text()
    claims = json.loads(call("claims", "--out", tmp_path, "--json").output)
    assert [each["claim"] for each in claims] == claims_of("felo-2")
