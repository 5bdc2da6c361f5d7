"""Reports of synthetic runs against numbers computed here from the same files."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from synthetic import UNSAFE, Page, lines_of, make, rewrite, shown

from fedhet.base.errors import StateError
from fedhet.cli.options import listings
from fedhet.inference.client import recorded_confusion
from fedhet.report import (
    compare,
    final_table,
    load_run,
    write_all,
    write_comparison,
    write_figures,
    write_report,
)
from fedhet.report.comparison_report import comparison_cells
from fedhet.report.figures import drawings
from fedhet.report.style import Drawing, disambiguate
from fedhet.report.tables import Blocks, Cell, Cells, remarks
from fedhet.runs.units import human_bytes, human_seconds, natural, spans

FIGURES = {"accuracy", "bytes", "time", "loss", "labels", "clients", "method", "client-curves"}


# Reading a run


def test_run_is_read_as_written(tmp_path: Path) -> None:
    path = make(tmp_path / "run", table={"alpha": 1.0, "share-weights": True})
    run = load_run(path)
    records = lines_of(path)
    assert (run.method, run.dataset, run.seed) == ("felo", "digits", 0)
    assert (run.planned, run.done) == (5, 5)
    assert run.finished
    assert run.clients == ("client-0", "client-1", "client-2", "client-3")
    assert run.settings["felo.share-weights"] is True
    assert run.totals["bytes_up"] == sum(each["bytes_up"] for each in records)
    assert (
        run.last("common", "private").mean == records[-1]["accuracy"]["common"]["private"]["mean"]
    )
    counts = json.loads((path / "partition.json").read_text())["counts"]
    assert run.samples == {name: sum(row) for name, row in counts.items()}


def test_unfinished_run_is_read_from_its_records(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False, settings={"rounds": 9})
    run, records = load_run(path), lines_of(path)
    assert not run.finished
    assert (run.done, run.planned) == (5, 9)
    assert run.totals["bytes_down"] == sum(each["bytes_down"] for each in records)
    assert run.totals["seconds"] == pytest.approx(10.0)
    assert run.headline == "common"


def test_an_unfinished_runs_data_set_is_read_from_its_settings(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False)
    (path / "config.toml").write_text('method = "velo"\n[data]\ndataset = "mnist"\n')
    run = load_run(path)
    assert (run.method, run.dataset, run.seed, run.planned) == ("velo", "mnist", None, 5)


def test_a_cut_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False)
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text[:-40])
    run = load_run(path)
    assert run.done == 4
    assert any("truncated" in note for note in run.notes)


def test_repeated_round_counts_once_as_written_last(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False)
    again = lines_of(path)[2] | {"bytes_up": 7}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    run = load_run(path)
    assert [each.round for each in run.records] == [1, 2, 3, 4, 5]
    assert run.records[2].bytes_up == 7


def test_a_summary_that_the_records_have_overtaken_does_not_count(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    more = lines_of(path)[-1] | {"round": 6}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(more) + "\n")
    run = load_run(path)
    assert not run.finished
    assert run.done == 6
    assert any("ignored summary.json: it ends at round 5" in note for note in run.notes)


def broken(path: Path, name: str, content: str | bytes | None) -> None:
    target = path / name
    if content is None:
        target.unlink()
    elif isinstance(content, bytes):
        target.write_bytes(content)
    else:
        target.write_text(content)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.toml", None, "not found"),
        ("config.toml", "method = ", "not valid TOML"),
        ("config.toml", "x = " + "9" * 5000, "not valid TOML"),
        ("config.toml", "x = " + "[" * 5000, "not valid TOML"),
        ("config.toml", b"\xff", "not valid UTF-8"),
        ("metrics.jsonl", None, "not found"),
        ("metrics.jsonl", "", "no complete round"),
        ("metrics.jsonl", '{"round": 1', "no complete round"),
        ("metrics.jsonl", '{"round": 1\n{"round": 2}\n', "line 1: not valid JSON"),
        ("metrics.jsonl", '{"round": 1}\n{"round": "two"}\n', "line 2: round: "),
        ("metrics.jsonl", "[1]\n", "line 1: content: "),
        ("summary.json", '{"method": "felo"', "truncated or not valid JSON"),
        ("summary.json", '{"method": "felo"}', "dataset: "),
        (
            "partition.json",
            '{"classes": ["a"], "counts": {"x": [1, 2]}}',
            "expected 1 counts, got 2",
        ),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, name: str, content: str | bytes | None, said: str
) -> None:
    path = make(tmp_path / "run")
    broken(path, name, content)
    with pytest.raises(StateError) as caught:
        load_run(path)
    message = str(caught.value)
    assert str(path / name) in message
    assert said in message
    assert "\n" not in message


def test_an_absent_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="nowhere"):
        load_run(tmp_path / "nowhere")


def test_failures_are_gathered_and_silence_is_one(tmp_path: Path) -> None:
    path = make(tmp_path / "run", failed={n: {"client-1": "out of memory"} for n in (2, 3, 5)})
    text = (path / "metrics.jsonl").read_text().splitlines()
    first = json.loads(text[0])
    first["answered"].remove("client-3")
    (path / "metrics.jsonl").write_text("\n".join([json.dumps(first), *text[1:]]))
    assert load_run(path).failures.to_numpy().tolist() == [
        ["client-1", "out of memory", [2, 3, 5]],
        ["client-3", "no reply", [1]],
    ]


# The table of a run


def test_the_table_has_every_clients_numbers(tmp_path: Path) -> None:
    path = make(tmp_path / "run", protocols=("common", "personal"), kinds=("private", "proxy"))
    text, last = shown(final_table(load_run(path))), lines_of(path)[-1]["accuracy"]
    columns = [(p, k) for p in ("common", "personal") for k in ("private", "proxy")]
    for name in (f"client-{n}" for n in range(4)):
        row = next(line for line in text.splitlines() if name in line)
        wanted = [f"{last[p][k]['per_client'][name]:.4f}" for p, k in columns]
        assert re.findall(r"\d\.\d{4}", row) == wanted
    for part, work in (("mean", np.mean), ("std", np.std), ("worst", np.min)):
        row = next(line for line in text.splitlines() if line.strip().startswith(part))
        values = [[*last[p][k]["per_client"].values()] for p, k in columns]
        assert re.findall(r"\d\.\d{4}", row) == [f"{work(each):.4f}" for each in values]
    # Of five rounds the last fifth is the last round.
    row = next(line for line in text.splitlines() if line.strip().startswith("tail"))
    assert re.findall(r"\d\.\d{4}", row) == [f"{last[p][k]['mean']:.4f}" for p, k in columns]


def test_of_many_clients_the_ends_are_shown(tmp_path: Path) -> None:
    path = make(tmp_path / "run", clients=40, rounds=2)
    text = shown(final_table(load_run(path)))
    each = lines_of(path)[-1]["accuracy"]["common"]["private"]["per_client"]
    ranked = sorted(each, key=lambda name: -each[name])
    assert re.findall(r"client-\d+", text) == ranked[:5] + ranked[-5:]
    assert "30 not shown" in text


def test_no_name_steers_the_terminal(tmp_path: Path) -> None:
    path = make(tmp_path / "run", names=("\x1b[31mred", "[bold]b[/bold]", "c"))
    text = shown(final_table(load_run(path)))
    assert "\x1b" not in text
    assert "[bold]b[/bold]" in text


def test_run_is_written_and_returned(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    run = write_all(path)
    assert run.path == path
    assert {file.stem for file in (path / "figures").iterdir()} == FIGURES
    assert "felo on digits" in Page(path / "report.html").text


# Figures


@pytest.mark.parametrize(("clients", "rounds"), [(1, 1), (3, 7), (100, 200)])
def test_figures_at_every_size(tmp_path: Path, clients: int, rounds: int) -> None:
    path = make(tmp_path / "run", clients=clients, rounds=rounds)
    before = dict(mpl.rcParams)
    files = write_figures(load_run(path))
    # A single client has no curve of its own, and a single round is none.
    wanted = FIGURES - ({"client-curves"} if clients == rounds == 1 else set())
    assert {file.stem for file in files} == wanted
    assert len([*(path / "figures").iterdir()]) == 2 * len(wanted)
    for file in files:
        assert file.parent == path / "figures"
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size > 3_000
        ids = re.findall(r' id="([^"]+)"', file.with_suffix(".svg").read_text())
        assert len(ids) == len({*ids})
    assert dict(mpl.rcParams) == before


def test_figures_do_not_depend_on_the_users_matplotlibrc() -> None:
    drawing = Drawing("x", lambda figure: figure.subplots().plot([0, 1], [0, 1]) and None)
    before = drawing.chart().svg
    with mpl.rc_context({"text.usetex": True, "lines.marker": "o"}):
        assert drawing.chart().svg == before


def test_figures_follow_what_is_there(tmp_path: Path) -> None:
    path = make(tmp_path / "run", partition=False, protocols=(), finished=False)
    text = [json.dumps(each | {"loss": {}, "seconds": {}}) for each in lines_of(path)]
    (path / "metrics.jsonl").write_text("\n".join(text))
    assert {file.stem for file in write_figures(load_run(path))} == {"bytes", "time", "method"}
    assert "This run has not been evaluated" in Page(write_report(load_run(path))).text


def test_pyplot_stays_untouched() -> None:
    code = "import sys, fedhet.report as r; print({'matplotlib.pyplot', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# The page of a run


def test_the_page_tells_the_run(tmp_path: Path) -> None:
    path = make(
        tmp_path / "run",
        protocols=("personal", "common"),
        failed={2: {"client-1": "timed out"}, 3: {"client-1": "timed out"}},
        table={"alpha": 1.0},
    )
    page = Page(write_report(load_run(path)))
    last = lines_of(path)[-1]["accuracy"]["common"]["private"]
    each = last["per_client"]
    worst = min(each, key=lambda name: each[name])
    sent = sum(record["bytes_up"] for record in lines_of(path))
    for words in (
        "felo on digits",
        "4 clients",
        f"{np.mean([*each.values()]):.4f} mean accuracy of the private models on the common",
        f"worst client {min(each.values()):.4f} ({worst})",
        f"sent up {human_bytes(sent)}",
        "wall time 10.0 s",
        "peak memory 512 MB",
        "failed replies 2 of 20 requested",
        "client-1 2 2–3 timed out",
        "classes with an average 5",
        "felo.alpha 1",
        f"fedhet run felo --config {path}/config.toml",
        "flwr 1.39.0",
    ):
        assert words in page.text, words
    page.assert_self_contained()
    assert page.tags.count("svg") >= len(FIGURES)


def test_the_start_and_the_rounds_are_told_apart(tmp_path: Path) -> None:
    """The run has five rounds of 2 s, and 3 s before the first; old runs lack this value."""
    old, new = make(tmp_path / "old", seed=1), make(tmp_path / "new", method="velo")
    summary = json.loads((new / "summary.json").read_text())
    summary["seconds"] |= {"total": 13.0, "start": 3.0}
    (new / "summary.json").write_text(json.dumps(summary))
    assert (
        "wall time 13.0 s 3.00 s to start, 2.00 s per round"
        in Page(write_report(load_run(new))).text
    )
    page = Page(write_report(load_run(old))).text
    assert "wall time 10.0 s 2.00 s per round" in page
    assert "to start" not in page
    groups = {group.method: group for group in compare([old, new]).groups}
    assert groups["velo"].total("start").mean == pytest.approx(3.0)
    assert math.isnan(groups["felo"].total("start").mean)
    found = comparison_cells(compare([old, new]))
    rows = {row[0].text: [cell.text for cell in row] for row in found.rows}
    assert list(found.headers[-3:]) == ["time", "start", "per round"]
    assert {name: row[-3:] for name, row in rows.items()} == {
        "felo": ["10.0 s", "—", "2.00 s"],
        "velo": ["13.0 s", "3.00 s", "2.00 s"],
    }


def test_the_page_says_what_the_method_is_and_when_it_ran(tmp_path: Path) -> None:
    path = make(tmp_path / "first-run")
    (path / "run.json").write_text(json.dumps({"run": "felo-1", "started": "2026-11-23 18:40"}))
    page = Page(write_report(load_run(path)))
    assert "seed 0 2026-11-23 18:40 UTC first-run" in page.text
    assert "Chan and Ngai, Exploiting Features and Logits" in page.text
    assert "private: the client's private model" in page.text
    labels = " ".join(value for name, value in page.attributes if name == "aria-label")
    last = lines_of(path)[-1]["accuracy"]["common"]["private"]["mean"]
    assert f"accuracy over 5 rounds, in the last round: common private {last:.3f}" in labels
    assert page.tags.count("caption") == page.tags.count("table") - 1  # not of the settings
    heads = page.tags.count("th")
    assert page.attributes.count(("scope", "col")) == heads
    other = make(tmp_path / "other", method="not_installed.anything")
    assert "Chan" not in Page(write_report(load_run(other))).text


def test_bytes_have_a_linear_axis_from_zero(tmp_path: Path) -> None:
    every = {each.name: each for each in drawings(load_run(make(tmp_path / "run")))}
    figure = Figure()
    every["bytes"].draw(figure)
    ax = figure.axes[0]
    assert ax.get_yscale() == "linear"
    assert ax.get_ylim()[0] == 0


def deployment(root: Path) -> Path:
    """A deployment of three sites with their own data; one site leaves and has no last score."""
    path = make(root, names=("north", "south", "west"), rounds=4)
    origin = {"run": "felo-1", "deployed": True, "own_data": True}
    (path / "run.json").write_text(json.dumps(origin))
    records = lines_of(path)
    for gone in records[1:3]:
        gone["absent"] = ["west"]
    for place in (records[-1]["accuracy"], json.loads((path / "summary.json").read_text())):
        kept = place.get("accuracy", place)["common"]["private"]["per_client"]
        kept.pop("west")
        if "history" in place:
            (path / "summary.json").write_text(json.dumps(place))
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_a_deployment_is_not_said_to_be_the_run_of_a_data_set(tmp_path: Path) -> None:
    path = deployment(tmp_path / "run")
    page = Page(write_report(load_run(path))).text
    assert "felo on the sites' own data" in page
    assert "digits" not in page.partition("Reproduce this run")[0]
    command = f"fedhet submit felo --server HOST:PORT --ca FILE --config {path}/config.toml"
    assert command in page
    assert "fedhet run" not in page


def test_a_mean_says_how_many_clients_it_is_over_and_who_was_away(tmp_path: Path) -> None:
    path = deployment(tmp_path / "run")
    page, table = Page(write_report(load_run(path))).text, shown(final_table(load_run(path)))
    assert "clients 2 of 3" in page
    away = "west was not connected in rounds 2–3"
    assert away in page
    assert away in table
    assert re.search(r"clients +2 of 3", table)
    whole = make(tmp_path / "whole", clients=3)
    assert re.search(r"clients +3 ?\n", shown(final_table(load_run(whole))))


def test_models_below_the_most_frequent_class_are_named(tmp_path: Path) -> None:
    path = make(tmp_path / "run", clients=3, rounds=2)
    each = lines_of(path)[-1]["accuracy"]["common"]["private"]["per_client"]
    last = [json.dumps(line) for line in lines_of(path)]
    shares = {
        name: accuracy + (0.01 if name == "client-1" else -0.03) for name, accuracy in each.items()
    }
    last[-1] = json.dumps({**json.loads(last[-1]), "majority": {"common": shares}})
    (path / "metrics.jsonl").write_text("\n".join(last) + "\n")
    page, table = Page(write_report(load_run(path))).text, shown(final_table(load_run(path)))
    below = (
        "less accurate than always predicting the most frequent class: client-1 (common private)"
    )
    mean = f"{np.mean([*shares.values()]):.4f}"
    assert below in page
    assert f"most frequent class {mean}" in " ".join(page.split())
    assert below in table
    assert re.search(rf"majority +{mean}", table)
    assert "majority: always predicting the most frequent class of the test set" in table


def test_table_is_legible_in_a_narrow_terminal(tmp_path: Path) -> None:
    kinds, protocols = ("private", "proxy", "global"), ("personal", "common")
    path = make(tmp_path / "run", kinds=kinds, protocols=protocols)
    file = io.StringIO()
    Console(width=60, file=file).print(final_table(load_run(path)))
    text, last = file.getvalue(), lines_of(path)[-1]["accuracy"]
    assert max(map(len, text.splitlines())) <= 60
    for protocol in protocols:
        for kind in kinds:
            for value in last[protocol][kind]["per_client"].values():
                assert f" {value:.4f}" in text, (protocol, kind)
    assert "…" not in text


def test_the_table_says_what_its_columns_are(tmp_path: Path) -> None:
    path = make(tmp_path / "run", kinds=("private", "global"))
    text = " ".join(shown(final_table(load_run(path))).split())
    assert (
        "common: on the test set common to all clients; global: the server's averaged models; "
        "private: the client's private model; tail: mean" in text
    )
    assert "personal:" not in text


def test_the_page_escapes_whatever_a_run_says(tmp_path: Path) -> None:
    names = (UNSAFE, 'x" onload="alert(1)', "$\\frac{", "</svg></style><b>")
    path = make(
        tmp_path / "run",
        names=names,
        method="felo",
        settings={"note": UNSAFE, "models.pool": "</script><script>"},
        failed={1: {UNSAFE: UNSAFE}},
    )
    rewrite(path / "summary.json", lambda content: content.update(dataset=UNSAFE))
    rewrite(path / "summary.json", lambda content: content.update(versions={UNSAFE: UNSAFE}))
    rewrite(path / "summary.json", lambda content: content["models"].update({UNSAFE: UNSAFE}))
    rewrite(path / "partition.json", lambda content: content.update(classes=[UNSAFE] * 10))
    page = Page(write_report(load_run(path)))
    page.assert_self_contained()
    assert "b" not in page.tags
    assert UNSAFE in page.text
    assert write_figures(load_run(path))


def test_the_page_of_an_unfinished_run_says_so(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False, settings={"rounds": 9})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "asked": ["cl')
    page = Page(write_report(load_run(path)))
    assert "unfinished: 5 of 9 rounds" in page.text
    assert "truncated" in page.text
    assert "round 5, the last so far" in page.text


def test_large_and_small_pages(tmp_path: Path) -> None:
    small = Page(write_report(load_run(make(tmp_path / "small", clients=1, rounds=1))))
    assert "1 client 1 model 1 round seed 0" in small.text
    large = make(tmp_path / "large", clients=100, rounds=200)
    page = Page(write_report(load_run(large)))
    assert all(f"client-{n}" in page.text for n in range(100))
    assert (large / "report.html").stat().st_size < 1_500_000


def test_gaps_and_missing_numbers_are_drawn_as_such(tmp_path: Path) -> None:
    path = make(tmp_path / "run", rounds=7, finished=False, protocols=("common", "personal"))
    records = lines_of(path)
    for each in records:
        if each["round"] % 3:
            each["accuracy"] = {}
    records[5]["accuracy"]["common"]["private"] |= {"worst": None, "std": math.nan}
    records[5]["accuracy"]["common"]["private"]["per_client"]["client-1"] = None
    records[2]["accuracy"]["personal"]["private"]["mean"] = math.nan
    records[4]["loss"] = {"mean": math.inf, "per_client": {"client-0": math.nan}}
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    run = load_run(path)
    assert run.curve("common", "private").index.tolist() == [3, 6]
    assert {file.stem for file in write_figures(run)} == FIGURES
    page = Page(write_report(load_run(path)))
    assert "round 6, the last so far" in page.text
    assert "std over clients —" in page.text
    found = compare([path])
    write_comparison(found, tmp_path / "out")
    assert len(found.groups) == 1


# How numbers read


def test_units() -> None:
    sizes = (0, 999, 1000, 12_345, 999_600, 123_456_789, math.nan)
    assert [human_bytes(size) for size in sizes] == [
        "0 B", "999 B", "1.00 kB", "12.3 kB", "1.00 MB", "123 MB", "—",
    ]  # fmt: skip
    times = (0.123, 59.96, 245, 7980, 7199.6)
    assert [human_seconds(each) for each in times] == [
        "0.12 s", "1 min 00 s", "4 min 05 s", "2 h 13 min", "2 h 00 min",
    ]  # fmt: skip
    assert sorted(["client-10", "client-2", "a"], key=natural) == ["a", "client-2", "client-10"]
    assert spans([1, 2, 3, 7]) == "1–3, 7"


@pytest.mark.parametrize(
    "names",
    [
        ["felo pool=cnn2,mlp,resnet10 lr=0.001", "felo pool=cnn2,cnn3,mlp,resnet10 lr=0.001"],
        ["felo pool=cnn2,mlp", "felo pool=cnn2,mlp"],
        ["alike" * 9 + "x" + "alike" * 9, "alike" * 9 + "y" + "alike" * 9],
        ["a", "b" * 60],
    ],
)
def test_short_labels_differ_wherever_a_difference_begins(names: list[str]) -> None:
    found = disambiguate(names, 22)
    assert all(len(label) <= 22 for label in found)
    words = "=" in names[0]  # within a single word there is nothing to begin at
    assert not words or len(set(found)) == len(set(names))


def test_a_deployments_page_says_how_many_clients_never_took_part(tmp_path: Path) -> None:
    path = deployment(tmp_path / "run")
    settings = path / "config.toml"
    text = settings.read_text()
    settings.write_text("clients = 5\n" + re.sub(r"(?m)^clients = .*\n", "", text))
    line = "2 of 5 clients never took part; see the run's log"
    assert line in Page(write_report(load_run(path))).text
    (path / "run.json").write_text("{}")
    assert "never took part" not in Page(write_report(load_run(path))).text


@pytest.mark.parametrize("width", [40, 60, 80, *range(125, 150), 200])
def test_no_name_and_no_number_is_lost_whatever_the_width(width):
    """Names consist of letters that occur nowhere else, and numbers of digits."""
    names, texts = ["a" * 30, "b" * 30], ["C" * 30, "D" * 30]
    columns = {"e": [Cell(name) for name in names], "f": [Cell(text) for text in texts]}
    columns |= {f"x{n} y": [Cell(f"0.{n:03d}1"), Cell(f"0.{n:03d}2")] for n in range(13)}
    file = io.StringIO()
    Console(width=width, file=file).print(Blocks(Cells(columns, words=2), "title"))
    text = file.getvalue()
    for name in (*names, *texts):
        assert text.count(name[0]) >= 30
        assert text.count(name[0]) % 30 == 0
    for n in range(13):
        assert f"0.{n:03d}1" in text
        assert f"0.{n:03d}2" in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 80, 140, 1000])
@pytest.mark.parametrize("classes", [1, 62, 300])
def test_partition_of_many_classes_shows_all_of_them(width, classes):
    headers = ["client", "samples", *(f"class-{n}" for n in range(classes))]
    rows = [[f"client-{k}", f"62{k}", *(f"{k + 1}{n:04d}" for n in range(classes))] for k in (0, 1)]
    file = io.StringIO()
    for table in listings(headers, rows, 2, width):
        Console(width=width, file=file).print(table)
    words = file.getvalue().split()
    assert {*headers, *rows[0], *rows[1]} == {*words}
    assert words.count("client-0") == words.count("620") == words.count("client")
    assert max(map(len, file.getvalue().splitlines())) <= width


# Confusion matrices


def told(path: Path) -> str:
    """Return the text of the section on the confusion matrix."""
    text = Page(write_report(load_run(path))).text
    return text.partition("Confusion matrix")[2].partition("Cost")[0]


def test_a_report_says_why_there_is_no_confusion_matrix(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    assert "has not recorded its confusion matrix" in told(path)
    many = [f"c{number}" for number in range(201)]
    row = {f"client-{number}": [1] * 201 for number in range(4)}
    rewrite(path / "partition.json", lambda content: content.update(classes=many, counts=row))
    assert "the data has 201 classes; the limit is 200" in told(path)
    personal = make(tmp_path / "personal", protocols=("personal",))
    reason = (
        "The run has no common test set, so there is no confusion matrix of all clients. For a "
        f"client's own test split, use fedhet confusion {personal} CLIENT --protocol personal."
    )
    assert reason in told(personal)
    with pytest.raises(StateError) as caught:
        recorded_confusion(load_run(personal))
    assert str(caught.value) == f"{personal}: {reason}"
    deployed = make(tmp_path / "deployed", partition=False)
    (deployed / "run.json").write_text(json.dumps({"deployed": True}))
    assert "stay at the sites" in told(deployed)


def test_report_counts_predictions_and_clients_without_a_matrix(tmp_path: Path) -> None:
    path = make(tmp_path / "run", confusion=3)

    def change(content: dict) -> None:
        content["without"] = ["client-7"]
        content["matrices"][0]["samples"] += 4

    rewrite(path / "confusion.json", change)
    text = told(path)
    assert "4 predictions are not finite" in text
    assert "The matrices of 1 client are not available." in text
    rewrite(path / "confusion.json", lambda content: content["matrices"][0]["counts"].pop())
    with pytest.raises(StateError, match=r"confusion\.json: matrices\.0: "):
        load_run(path)
    rewrite(path / "confusion.json", lambda content: content["matrices"].pop(0))
    content = json.loads((path / "confusion.json").read_text())
    content["matrices"].append({"samples": 1, "counts": [[1]]})
    (path / "confusion.json").write_text(json.dumps(content))
    with pytest.raises(StateError, match=r"confusion\.json|classes"):
        load_run(path)


# Metrics that are undefined for some clients


def test_metric_that_is_undefined_for_clients_has_one_line(tmp_path: Path) -> None:
    path = make(tmp_path / "run", settings={"metrics": ["accuracy", "auc", "recall"]})
    rows = lines_of(path)
    for row in rows:
        scores = row["accuracy"]["common"]["private"]
        kept = {name: scores["per_client"][name] for name in ("client-1", "client-3")}
        one = {"mean": 0.5, "std": 0.0, "worst": 0.5, "per_client": kept}
        row["metrics"] = {"auc": {"common": {"private": one}}}
        row["metrics"]["recall.0"] = {"common": {"private": one}}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewrite(path / "summary.json", lambda content: content.update(metrics=rows[-1]["metrics"]))
    line = (
        "AUC (common private) is undefined for 2 of 4 clients, because all test samples have the "
        "same class: client-0, client-2"
    )
    assert [each for each in remarks(load_run(path)) if "undefined" in each] == [line]
    assert line in Page(write_report(load_run(path))).text
    for row in rows:
        row["metrics"] = {}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewrite(path / "summary.json", lambda content: content.update(metrics={}))
    (found,) = [each for each in remarks(load_run(path)) if "undefined" in each]
    assert "undefined for 4 of 4 clients" in found
    assert found.endswith("client-0, client-1, client-2, …")


def test_report_names_the_commit_and_the_hardware(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    rewrite(
        path / "summary.json",
        lambda content: content.update(commit="abc123+", hardware={"cpu": "Abacus", "gpu": UNSAFE}),
    )
    text = Page(write_report(load_run(path))).text
    assert "fedhet 0.1.0 (commit abc123+)" in text
    assert f"· Abacus · {UNSAFE}" in text
