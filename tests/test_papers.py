"""`fedhet table`: the list of tables, their plans, measurements, and output."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
from interruption import CutOff
from matplotlib.figure import Figure
from synthetic import make
from test_presets import ALGORITHM_1
from typer.testing import CliRunner

from fedhet.base.errors import FedhetError, SettingsError
from fedhet.cli import app
from fedhet.cli import training as command
from fedhet.cli.options import read_seeds
from fedhet.config.resolve import resolve
from fedhet.config.sources import read_preset
from fedhet.experiments import plan as planning
from fedhet.experiments.output import (
    as_markdown,
    curves,
    overview,
    write_latex,
    write_results,
)
from fedhet.experiments.output import cells as table_cells
from fedhet.experiments.paper import TableResult, collect
from fedhet.experiments.plan import (
    SIZES,
    PaperTable,
    as_options,
    paper_of,
    plan,
    read_table,
    table_names,
    tables_of,
)
from fedhet.methods.registry import find_method

TABLE = """
title = "Two methods"
source = "A paper, Table 7"
metric = "common/private"

[sizes.tiny]
says = "Very small."
[sizes.tiny.settings]
clients = 2
rounds = 2
"data.dataset" = "breast-cancer"
"models.pool" = "mlp"
"training.local-epochs" = 1
"engine.backend" = "inline"

[[columns]]
name = "own"
metric = "personal/private"

[[columns]]
name = "all"

[[columns]]
name = "all, longer"
every = { settings = { rounds = 3 } }

[[rows]]
name = "alone"
method = "local"
printed = { all = [50.0, 1.5], own = 60.0 }

[[rows]]
name = "together"
method = "fedavg"
every = { settings = { "training.lr" = 0.01 } }
printed = { all = 70.0 }

[[places]]
name = "together"
columns = ["all", "all, longer"]
paper = { settings = { "training.lr" = 0.5 } }

[[claims]]
says = "together is better"
above = ["together"]
below = ["alone"]
"""


def table(text=TABLE):
    return PaperTable.model_validate(tomllib.loads(text))


# The tables that there are


@pytest.mark.usefixtures("encoders")
@pytest.mark.parametrize("name", table_names())
def test_every_cell_of_every_table_resolves(name, tmp_path):
    found = read_table(name)
    assert {"small", "paper"} <= set(found.sizes)
    assert found.claims or found.notes
    for size in found.sizes:
        planned = plan(name, found, size, [0], tmp_path)
        assert len({run.directory.parent.name for run in planned.runs}) == len(planned.runs)
        for run in planned.runs:
            resolve(run.values)
        assert {cell.row.name for cell in planned.cells} == {r.name for r in found.rows_in(size)}


def test_the_caption_of_a_table_names_the_rounds_of_its_numbers():
    """The pages, the caption, and the metrics of the cells agree for each table and size."""
    page = " ".join(Path("docs/tables.md").read_text().split())
    means = set(
        re.findall(r"`([^`]+)`", re.search(r"last round, or in (.*?) to the mean", page)[1])
    )
    fifth, found = "mean over the last fifth of the rounds", set()
    for name in table_names():
        table = tomllib.loads((planning.FILES / f"{name}.toml").read_text())
        parts = [table, *table["rows"], *table["columns"]]
        metrics = [part["metric"] for part in parts if "metric" in part]
        over_rounds = re.compile(r"target/.*|figure/\w+/mean")
        shown = {m.split("/")[-1] == "tail" for m in metrics if not over_rounds.fullmatch(m)}
        found |= {name} if shown == {True} else set()
        assert len(shown) == 1
        for size in table["sizes"]:
            legend = read_table(name).legend(size)
            assert (fifth in legend, "in the last round" in legend) == (
                shown == {True},
                not all(shown),
            )
        stated = " ".join(table.get("notes", []))
        assert not ("in the last round" in stated and shown == {True})
        assert not (fifth in stated and shown == {False})
    assert found == means


@pytest.mark.parametrize("name", table_names())
def test_printed_numbers_have_the_unit_of_the_table(name):
    found = read_table(name)
    columns = {column.name: column for column in found.columns}
    for row in found.rows:
        for column, printed in row.printed.items():
            both = printed if isinstance(printed, list) else [printed]
            assert all(value >= 0 for value in both)
            metric = row.metric or columns[column].metric or found.metric
            if not metric.startswith(("figure/", "bytes/", "target/")):
                assert both[0] > 2 if found.unit == "percent" else both[0] < 5


# How many tables and figures each paper has.
PARTS = re.compile(r"(Table|Fig)(?:s?\.|s)? ([0-9IVX]+[ab]?(?:(?:,? and |, )[0-9IVX]+[ab]?)*)")
HAS = {
    "FedType": (range(1, 10), range(1, 9)),
    "Felo and Velo": (range(1, 5), range(1, 6)),
    "UM-pFSSL": ("I II III IV V VI VII".split(), range(1, 12)),
    "CoFED": (range(1, 3), range(1, 12)),
    "FedGEMS": (range(1, 14), "1 2 3 4a 4b 5a 5b 6 7".split()),
}
SHORT = {
    "fedtype": "FedType", "felo": "Felo and Velo", "um-pfssl": "UM-pFSSL",
    "cofed": "CoFED", "fedgems": "FedGEMS", "fedlora": "FedLoRA",
}  # fmt: skip


def parts_in(text):
    """Return the tables and figures in a text: "Table 2, Figs. 10 and 11" has three."""
    return {
        (kind, number)
        for kind, numbers in PARTS.findall(text)
        for number in re.split(r",? and |, ", numbers)
    }


def test_every_table_and_figure_is_reproduced_or_listed_as_missing():
    text = (Path(__file__).parent.parent / "docs" / "tables.md").read_text()
    shown = {
        (SHORT[paper_of(name)], part)
        for name in table_names()
        for part in parts_in(read_table(name).source)
    }
    # The list of figures by other commands names a paper and its parts, as in "FedType, Fig. 7: ".
    missing = [
        (paper, part)
        for paper, parts in (
            *re.findall(r"^- ([\w -]+): (.*)$", text, re.MULTILINE),
            *re.findall(r"^- ([\w -]+), ([^:\n]*): ", text, re.MULTILINE),
        )
        if paper in HAS
        for part in parts_in(parts)
    ]
    assert len(set(missing)) == len(missing)
    assert not set(missing) & shown
    assert {*missing} | shown == {
        (paper, (kind, str(number)))
        for paper, both in HAS.items()
        for kind, numbers in zip(("Table", "Fig"), both, strict=True)
        for number in numbers
    }


def at_the_papers_size(paper, tmp_path):
    """Yield the runs of a paper's tables in the size `paper`, with table and label."""
    for name in tables_of(paper):
        for run in plan(name, read_table(name), "paper", [0], tmp_path).runs:
            yield f"{name}: {run.label}", resolve(run.values).flat()


def test_felo_and_velo_settings_equal_the_paper(tmp_path):
    """Eq. 1 and Algorithm 2: all features are kept, and decoded features are always sent."""
    found = [each for each in at_the_papers_size("felo", tmp_path) if "elo" in each[1]["method"]]
    assert {values["method"] for _, values in found} == {"felo", "velo"}
    for label, values in found:
        own = values["method"]
        weights = [values[f"{own}.{name}"] for name in ("alpha", "feature-weight", "logit-weight")]
        assert weights == [1, 1, 1], label
        assert values.get("velo.min-separation", 0) == 0, label
        assert values.get("velo.memory", 2000) >= 20 * 100, label


@pytest.mark.usefixtures("encoders")
def test_fedtype_settings_equal_algorithm_1(tmp_path):
    """Rows of Table 2 or Fig. 3 may replace a part of the algorithm.

    Each of the five epochs (Appendix F) has all training samples, for all methods of a table.
    """
    printed = ALGORITHM_1 | {"fedtype.epoch-data": "full"}
    replaced = {"backward": ("symmetric", "topk"), "eta": ("one",), "g": ("g2", "g3", "g4")}
    runs = [r for r in at_the_papers_size("fedtype", tmp_path) if r[1]["method"] == "fedtype"]
    others = []
    for label, values in runs:
        differs = {key for key, value in printed.items() if values[key] != value}
        assert differs <= {f"fedtype.{name}" for name in replaced}, label
        assert len(differs) < 2, label
        others += [(key.partition(".")[2], values[key]) for key in differs]
    assert set(others) == {(k, v) for k, each in replaced.items() for v in each}


@pytest.mark.usefixtures("encoders")
@pytest.mark.parametrize("size", SIZES)
def test_rows_with_fedtype_have_equal_epochs_data_and_shared_models(size, tmp_path):
    """FedType holds out a tenth of all samples (7:2:1), i.e. an eighth of the training samples."""
    for name in tables_of("fedtype"):
        runs = plan(name, read_table(name), size, [0], tmp_path).runs
        seen = [resolve(run.values).flat() for run in runs]
        own = [values for values in seen if values["method"] == "fedtype"]
        proxies = {values["fedtype.proxy"] for values in own}
        assert {values["fedtype.epoch-data"] for values in own} == {"full"}
        assert len({values["training.local-epochs"] for values in seen}) == 1
        held = 0.1 / 0.8 if own[0]["fedtype.calibrate-on"] == "held" else 0.0
        assert held == (0.125 if size == "paper" else 0.0)
        for values in seen:
            if values["method"] != "fedtype":
                assert values["data.validation-fraction"] == pytest.approx(held), name
            if values["method"] == "fml":
                assert {values["fml.meme"]} == proxies


# FedGEMS, Table 13: optimizer, learning rate, batch, epochs at clients on their own data, rounds.
# Two rows of a method are its homogeneous and its heterogeneous column, where these differ. All
# have weight decay 0.0001. FedGKT's "client epochs of public data" is its clients' only number.
TABLE_13 = {
    "fedgems": ("adam", 0.001, 256, 1, 200),
    "fedavg": ("adam", 0.001, 64, 20, 200),
    "fedmd": ("adam", 0.001, 64, 2, 200),
    "feddf": ("adam", 0.001, 64, 40, 100),
    "cronus": ("adam", 0.001, 64, 1, 200),
    "ds-fl": ("adam", 0.001, 64, 1, 300),
    "local": ("adam", 0.001, 256, 1, 200),
    "central": ("adam", 0.001, 256, 1, 200),
    ("fedgkt", "iid"): ("adam", 0.001, 256, 1, 200),
    ("fedgkt", "dirichlet"): ("sgd", 0.005, 256, 1, 200),
}
# The same table, "client epochs of public data" and "server epochs". Samples: Table 6 counts the
# logits of all public samples, 25,000 x 10 x 4 bytes of 16 clients = 15,625 KiB, for each of them.
TABLE_13_PUBLIC = {
    "fedgems": {"public-epochs": 1, "server-epochs": 1},
    "fedmd": {"digest-epochs": 1, "sample": 0},
    "feddf": {"epochs": 5, "lr": 0.001, "batch-size": 64},
    "cronus": {"sample": 0},
    "ds-fl": {"digest-epochs": 1, "server-epochs": 2, "sample": 0},
    ("fedgkt", "iid"): {"server-epochs": 20},
    ("fedgkt", "dirichlet"): {"server-epochs": 40},
}
SHARED = ("training.optimizer", "training.lr", "training.batch-size", "training.local-epochs")


def test_fedgems_settings_equal_table_13(tmp_path):
    """In Table 4, all epochs are 1 according to Section 4.4."""
    ones = {"training.local-epochs", "ds-fl.server-epochs", "fedgkt.server-epochs"}
    seen = set()
    for label, values in at_the_papers_size("fedgems", tmp_path):
        if label.startswith("fedgems-4:"):
            assert {values[name] for name in ones & values.keys()} == {1}, label
            continue
        method = values["method"]
        key = method if method in TABLE_13 else (method, values["data.partition"])
        seen.add(key)
        *others, rounds = TABLE_13[key]
        rounds = 1 if "first round" in label else rounds  # Fig. 3
        assert [values[name] for name in SHARED] == others, label
        assert values["rounds"] == rounds, label
        assert values["training.weight-decay"] == 0.0001, label
        for name, value in TABLE_13_PUBLIC.get(key, {}).items():
            assert values[f"{method}.{name}"] == value, (label, name)
    assert seen == TABLE_13.keys()


# What a table plans


def test_later_settings_override_earlier_settings(tmp_path):
    found = plan("x", table(), "tiny", [4], tmp_path)
    by_place = {(c.row.name, c.column.name): c for c in found.cells}
    assert list(by_place) == list(
        itertools.product(("alone", "together"), ("own", "all", "all, longer"))
    )
    values = by_place["together", "all, longer"].runs[4].values
    assert values["rounds"] == 3
    assert values["training.lr"] == 0.01
    assert values["method"] == "fedavg"
    assert values["seed"] == 4
    assert "training.lr" not in by_place["alone", "all"].runs[4].values
    assert by_place["alone", "own"].metric == "personal/private"
    assert by_place["alone", "all"].metric == "common/private"
    assert (by_place["alone", "all"].printed, by_place["alone", "all"].printed_spread) == (50, 1.5)
    assert by_place["together", "all, longer"].printed is None


def test_settings_of_a_place_apply_only_to_its_cells(tmp_path):
    text = TABLE.replace("paper = { settings", "tiny = { settings")
    found = plan("x", table(text), "tiny", [0], tmp_path, {"training.lr": 0.2})
    assert found.replaced == [
        "'together' has training.lr = 0.2 instead of 0.01",
        "'together' has training.lr = 0.2 instead of 0.5",
    ]
    cells = plan("x", table(text), "tiny", [0], tmp_path).cells
    rates = {(c.row.name, c.column.name): c.runs[0].values.get("training.lr") for c in cells}
    assert rates == {
        ("alone", "own"): None,
        ("alone", "all"): None,
        ("alone", "all, longer"): None,
        ("together", "own"): 0.01,
        ("together", "all"): 0.5,
        ("together", "all, longer"): 0.5,
    }


def test_cells_of_equal_settings_share_their_runs(tmp_path):
    found = plan("x", table(), "tiny", [0, 1], tmp_path)
    assert len(found.runs) == 8  # two methods, two lengths, two seeds
    one, two, other = found.cells[:3]
    assert one.runs[0].directory == two.runs[0].directory != other.runs[0].directory


def test_tables_share_the_runs_of_equal_settings(tmp_path):
    one = plan("x", table(), "tiny", [0], tmp_path)
    text = TABLE.replace('"Very small."', '"x"').replace(
        "clients = 2", 'clients = 2\n"training.weight-decay" = 0.0'
    )
    other = plan("y", table(text), "tiny", [0], tmp_path)
    assert [r.directory for r in one.runs] == [r.directory for r in other.runs]


def test_run_directory_does_not_depend_on_the_machine(tmp_path):
    def names(**over):
        over = {name.replace("_", "."): value for name, value in over.items()}
        found = plan("x", table(), "tiny", [0], tmp_path, over)
        return [run.directory for run in found.runs]

    assert names() == names(engine_backend="ray") == names(engine_threads=2)
    assert names() != names(training_lr=0.5)


def test_presets_and_settings_of_other_methods(tmp_path):
    text = TABLE.replace('says = "Very small."', 'says = "x"\npreset = "felo-cifar10"')
    found = plan("x", table(text), "tiny", [0], tmp_path)
    values = found.runs[0].values
    preset = read_preset("felo-cifar10")
    assert values["training.lr"] == preset["training.lr"]
    assert values["clients"] == 2 != preset["clients"]
    assert not any(name.startswith("felo.") for name in values)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('metric = "common/private"', 'metric = "commn/private"', "expected PROTOCOL/KIND"),
        ('metric = "common/private"', 'metric = "common/private/median"', "expected PROTOCOL"),
        ('metric = "common/private"', 'metric = "bytes/sideways"', "bytes/up.down"),
        ('metric = "common/private"', 'metric = "common/private@0"', "expected @ROUND or @PERC"),
        ('metric = "common/private"', 'metric = "common/private@101%"', "expected @ROUND or @PER"),
        ('metric = "common/private"', 'metric = "common/private/tail@2"', "other than tail"),
        ('metric = "common/private"', 'metric = "@2"', "expected PROTOCOL/KIND"),
        ('metric = "personal/private"', 'metric = "@2.5"', "expected @ROUND or @PERCENT"),
        ('metric = "personal/private"', 'metric = "bytes/up@2"', "expected @ROUND or @PERCENT"),
        ('metric = "common/private"', 'metric = "bytes/up/worst"', "bytes/up.down"),
        (
            "printed = { all = 70.0 }",
            "printed = { al = 70.0 }",
            "expected one of own, all, all, longer",
        ),
        ('above = ["together"]', 'above = ["felo"]', "expected one of alone, together, got 'felo'"),
        ('name = "own"', 'name = "all"', "names must be unique"),
        ('title = "Two methods"', 'titel = "Two methods"', "title: Field required"),
        (
            'columns = ["all", "all, longer"]',
            'columns = ["al"]',
            "expected one of own, all, all, longer",
        ),
        ('name = "together"\ncolumns', 'name = "apart"\ncolumns', "expected one of alone"),
        ("[[claims]]", "[[claims]]\nat_least = 2\nat_most = 1", "at_least < at_most, got 2 and 1"),
        ("[[claims]]", "[[claims]]\nat_most = -1\nat_least = -1", "at_least < at_most, got -1"),
        ('below = ["alone"]', "", "expected below, or a bound of the values in above"),
        ('below = ["alone"]', "ratio = true\nat_least = 2", "expected below"),
        ("[[claims]]", '[[claims]]\nascending = ["alone", "together"]', "either above .* or asc"),
        ('above = ["together"]\nbelow = ["alone"]', 'ascending = ["alone"]', "at least 2 names"),
        (
            'above = ["together"]\nbelow = ["alone"]',
            'ascending = ["alone", "felo"]',
            "expected one of alone, together, got 'felo'",
        ),
        (
            "[[claims]]",
            '[[claims]]\nsays = "together is better"\nholds_in = "most"\nabove = ["alone"]\n'
            'below = ["together"]\n\n[[claims]]',
            "expected one value of holds_in",
        ),
    ],
)
def test_invalid_table_raises(old, new, fault, tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(TABLE.replace(old, new, 1))
    monkeypatch.setattr(planning, "FILES", tmp_path)
    with pytest.raises(SettingsError, match=f"table 'mine': .*{fault}"):
        read_table("mine")


def test_unknown_table_raises_with_a_suggestion():
    with pytest.raises(SettingsError, match=r"'felo2'.*'felo-2'"):
        tables_of("felo2")


def test_name_selects_a_table_a_paper_or_all():
    known = table_names()
    assert tables_of("all") == known
    assert tables_of("felo-2") == ["felo-2"]
    assert tables_of("felo") == [name for name in known if name.startswith("felo")]
    assert len(tables_of("um-pfssl")) == 12
    assert tables_of("adapters") == ["fedlora-adapters-agnews", "fedlora-adapters-cifar10"]
    for wrong in ("fel", "felo-", "", "2", "adapter"):
        with pytest.raises(SettingsError, match="unknown table"):
            tables_of(wrong)


# What is measured


def place(directory, **changes):
    """Write a synthetic run to the directory that a table expects."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    changes = {"protocols": ("common", "personal"), **changes}
    made = make(directory.parent / "made", **changes)
    made.rename(directory)


def written(tmp_path, tops, text=TABLE, **changes):
    """Write synthetic runs with the accuracies `tops` [row][seed]; return the results."""
    found = plan("x", table(text), "tiny", [0, 1, 2], tmp_path)
    for row, cell in {c.row.name: c for c in found.cells if c.column.name == "all"}.items():
        for seed, top in enumerate(tops[row]):
            if top is not None:
                place(cell.runs[seed].directory, seed=seed, top=top, **changes)
    return collect(found)


def accuracy(cell, seed, protocol="common"):
    lines = (cell.runs[seed].directory / "metrics.jsonl").read_text().splitlines()
    return 100 * json.loads(lines[-1])["accuracy"][protocol]["private"]["mean"]


def test_means_and_spreads_are_of_the_last_round_in_percent(tmp_path):
    results = written(tmp_path, {"alone": [0.3, 0.4, 0.5], "together": [0.6, 0.7, None]})
    cell, measured = results.cells["alone", "all"].cell, results.cells["alone", "all"].values
    assert measured.tolist() == pytest.approx([accuracy(cell, seed) for seed in range(3)])
    assert set(results.cells["together", "all"].values.index) == {0, 1}
    own = results.cells["alone", "own"].values
    assert own[1] == pytest.approx(accuracy(cell, 1, "personal"))
    assert results.cells["alone", "all, longer"].values.empty
    assert results.result.finished == 5


def test_table_names_the_samples_that_selected_rounds(tmp_path):
    tops = {"alone": [0.3, None, None], "together": [0.6, None, None]}
    plain = written(tmp_path / "plain", tops)
    assert plain.result.selected == []
    assert '"selected"' not in plain.result.to_json()
    chosen = {"early-stopping": 3, "data.validation-fraction": 0.1}
    found = written(tmp_path / "runs", tops, protocols=("common", "validation"), settings=chosen)
    sentence = "early-stopping: rounds are selected on validation, 10 % of each client's training"
    assert f" {sentence} samples." in found.result.about(table())
    assert sentence in found.result.to_json()
    assert sentence in as_markdown(found.result, table())


@pytest.mark.parametrize(
    ("tops", "outcome"),
    [
        ({"alone": [0.3, 0.3, 0.3], "together": [0.9, 0.9, 0.9]}, "holds"),
        ({"alone": [0.9, 0.9, 0.9], "together": [0.3, 0.3, 0.3]}, "does not hold"),
        ({"alone": [0.3, 0.9, 0.6], "together": [0.6, 0.6, 0.62]}, "within noise"),
        ({"alone": [0.3, None, None], "together": [0.9, None, None]}, "not measured"),
    ],
)
def test_claim_holds_if_the_interval_excludes_zero(tops, outcome, tmp_path):
    results = written(tmp_path, tops)
    found = next(each for each in results.result.comparisons if each.where == "all")
    assert found.outcome == outcome
    if outcome == "holds":
        ours, theirs = (results.cells[row, "all"].values for row in ("together", "alone"))
        each = np.array([ours[seed] - theirs[seed] for seed in range(3)])
        assert found.difference == pytest.approx(each.mean(), abs=1e-4)
        assert found.seed_error == pytest.approx(each.std(ddof=1) / np.sqrt(3), abs=1e-4)
        assert found.test_samples == 359, "of digits, the dataset of the synthetic runs"
        assert found.measured.se > found.seed_error


def claimed(lines):
    """Return the table with another claim about the column `all`."""
    return (
        TABLE.partition("[[claims]]")[0]
        + f"""
[[claims]]
says = "all that glitters"
where = ["all"]
{lines}
"""
    )


PAIR = 'above = ["together"]\nbelow = ["alone"]\n'
TOPS = {"alone": [0.3, 0.31, 0.32], "together": [0.9, 0.9, 0.92]}


@pytest.mark.parametrize(
    ("lines", "formula", "bound", "outcome"),
    [
        (PAIR, lambda a, b: b - a, "above 0", "holds"),
        (PAIR + "at_least = 90", lambda a, b: b - a, "at least 90", "does not hold"),
        (PAIR + "at_most = 90", lambda a, b: b - a, "at most 90", "holds"),
        (PAIR + "at_most = -2.5", lambda a, b: b - a, "at most -2.5", "does not hold"),
        (PAIR + "at_least = 10\nat_most = 90", lambda a, b: b - a, "10 to 90", "holds"),
        (PAIR + "ratio = true", lambda a, b: b.mean() / a.mean(), "ratio above 1", "holds"),
        (
            PAIR + "ratio = true\nat_least = 0.06\nat_most = 0.1",
            lambda a, b: b.mean() / a.mean(),
            "ratio 0.06 to 0.1",
            "does not hold",
        ),
        ('above = ["alone"]\nat_most = 95', lambda a, b: a, "value at most 95", "holds"),
        ('above = ["alone"]\nat_least = 99', lambda a, b: a, "value at least 99", "does not hold"),
        (
            'ascending = ["alone", "together"]',
            lambda a, b: b - a,
            "above 0, at each step",
            "holds",
        ),
        (
            'above = ["together"]\nbelow = ["alone", "alone"]\ntogether = true\nat_most = 99',
            lambda a, b: b - 2 * a,
            "at most 99, for sums",
            "holds",
        ),
        (PAIR + 'holds_in = "most"', lambda a, b: b - a, "above 0, in most comparisons", "holds"),
        (PAIR + 'holds_in = "all"', lambda a, b: b - a, "above 0, in all comparisons", "holds"),
    ],
)
def test_claim_states_a_quantity_and_its_bound(lines, formula, bound, outcome, tmp_path):
    results = written(tmp_path / "runs", TOPS, claimed(lines))
    alone, together = (results.cells[row, "all"].values.to_numpy() for row in TOPS)
    (found,) = results.result.comparisons
    assert found.difference == pytest.approx(np.mean(formula(alone, together)), abs=1e-4)
    assert (found.stated.bound, found.outcome) == (bound, outcome)
    assert found.measured.se > found.seed_error or found.ratio, "few test samples"
    write_results(results, tmp_path)
    latex = write_latex(results, tmp_path).read_text()
    texts = [(tmp_path / f"x-tiny.{kind}").read_text() for kind in ("md", "html")]
    assert f"| all that glitters | {bound} | 1 |" in texts[0] or outcome != "holds"
    assert all(text.count(bound) >= count for text, count in zip(texts, (2, 1), strict=True))
    assert f"all that glitters & {bound} & all: " in latex


def test_value_of_an_accuracy_has_the_error_of_a_fraction(tmp_path):
    lines = 'above = ["alone"]\nat_least = 5'
    same = {row: [0.3, 0.3, 0.3] for row in TOPS}
    (found,) = written(tmp_path, same, claimed(lines)).result.comparisons
    p = found.difference / 100
    seeds = found.seed_error**2
    assert found.measured.se == pytest.approx(
        math.sqrt(seeds + 1e4 * p * (1 - p) / found.test_samples), rel=0.02
    )


def test_ratio_of_accuracies_has_the_error_of_the_fewest_discordant_samples(tmp_path):
    """Agresti and Min, from the counts [both, first only, second only, neither]."""
    tops = {"alone": [0.8, 0.81, 0.8], "together": [0.9, 0.9, 0.91]}
    (found,) = written(tmp_path, tops, claimed(PAIR + "ratio = true")).result.comparisons
    discordant = (found.difference - 1) * found.test_samples
    counts = np.array([found.test_samples - discordant, discordant, 0, 0]) + 0.5
    p, value = counts / counts.sum(), np.array([0, 1, -1, 0])
    floor = (p @ value**2 - (p @ value) ** 2) / counts.sum()
    assert found.measured.se == pytest.approx(math.sqrt(found.seed_error**2 + floor))


def test_steps_of_a_sequence_are_compared_in_order(tmp_path):
    rows = "".join(f'\n[[rows]]\nname = "r{k}"\nmethod = "local"\n' for k in range(4))
    text = f'{TABLE}\n[[claims]]\nsays = "up"\nwhere = ["all"]\nascending = ["r2", "r0", "r3"]\n'
    text = text.replace("[[places]]", f"{rows}\n[[places]]")
    found = collect(plan("x", table(text), "tiny", [0], tmp_path)).result.comparisons
    steps = [(each.above, each.below) for each in found if each.claim == "up"]
    assert steps == [("r0", "r2"), ("r3", "r0")]


SETTINGS = {
    "FedHe, FedMD and FedGKT are worse in non-IID CIFAR-10, with its 20 clients, than in non-IID "
    "CINIC-10, with 10",
    "For simpler datasets such as FMNIST and Fed-ISIC19, η is 1 more often than for CIFAR-10 and "
    "CIFAR-100",
    "As printed: ε = 0.90 has the lowest accuracy of server and clients",
    "While F exceeds 30, the performance improvement effect gradually weakens",
}
"""Sentences with numbers that are settings, or values whose number is compared."""
MAGNITUDE = re.compile(
    r"(?<![-\w])\d|\b(around|about|marginal|consistent|continuous|always|significant|noticeabl|huge"
    r"|great|hal(f|ve)|comparable|generally|most of|most (samples|classifiers))|(?<!more )obvious"
)


def test_every_claim_about_a_magnitude_declares_more_than_a_direction():
    claims = [claim for name in table_names() for claim in read_table(name).claims]
    stated = [claim for claim in claims if MAGNITUDE.search(claim.says)]
    assert len(stated) > 40
    assert {claim.says for claim in stated} >= SETTINGS
    for claim in stated:
        low, high = claim.bounds
        is_direction = high == math.inf and low == claim.ratio
        scope = claim.ascending or claim.together or claim.holds_in
        others = [each for each in claims if each.says == claim.says and each is not claim]
        has_bound = any(each.bounds != (each.ratio, math.inf) for each in others)
        assert not is_direction or scope or has_bound or claim.says in SETTINGS, claim.says
        if re.search("around|about|marginal|halves", claim.says):
            assert math.isfinite(low + high), claim.says
        if "%" in claim.says:
            assert not is_direction, claim.says


def test_table_in_latex_marks_the_best_and_what_is_clear(tmp_path):
    tops = {"alone": [0.3, 0.3, 0.3], "together": [0.9, 0.9, 0.9]}
    results = written(tmp_path / "runs", tops)
    text = write_latex(results, tmp_path).read_text()
    scores, _, tested = text.partition(r"\end{tabular}")
    rows = {line.split(" & ")[0]: line for line in scores.splitlines() if " & " in line}
    better, worse = (results.cells[row, "all"].values.mean() for row in ("together", "alone"))
    assert rf"\textbf{{{better:.2f} $\pm$" in rows["together"]
    assert rf"\underline{{{worse:.2f} $\pm$" in rows["alone"]
    assert r"Kendall's $\tau$ & -- & 1.00 & -- &" in scores, "no contest of numbers of its own"
    first = next(each for each in results.result.comparisons if each.where == "all")
    found = next(line for line in tested.splitlines() if line.count(" & all: "))
    assert rf"{first.difference:+.2f} $\pm$" in found
    assert found.count(r"$^\dagger$") == 1


def test_claims_of_columns_compare_within_a_row(tmp_path):
    claim = """
[[claims]]
says = "own is easier"
of = "columns"
above = ["own"]
below = ["all"]
where = ["alone"]
"""
    found = plan("x", table(TABLE + claim), "tiny", [0, 1], tmp_path)
    own = [each for each in collect(found).result.comparisons if each.claim == "own is easier"]
    assert [(each.where, each.above, each.below, each.outcome) for each in own] == [
        ("alone", "own", "all", "not measured")
    ]


@pytest.mark.parametrize("better", [0, 1])
def test_kendalls_tau_compares_the_order_of_rows(better, tmp_path):
    tops = [[0.4] * 3, [0.8] * 3]
    results = written(tmp_path, {"alone": tops[better], "together": tops[1 - better]})
    assert results.result.agreement["all"] == (1.0 if better == 0 else -1.0)
    assert results.result.agreement["own"] is None  # one of its rows has a printed number


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("common/global", lambda last: 100 * last["accuracy"]["common"]["global"]["mean"]),
        ("common/global/worst", lambda last: 100 * last["accuracy"]["common"]["global"]["worst"]),
        ("common/global/std", lambda last: 100 * last["accuracy"]["common"]["global"]["std"]),
        ("figure/classes_covered", lambda last: last["method"]["classes_covered"]),
        ("figure/nothing", lambda last: math.nan),
        ("figure/nothing@2", lambda last: math.nan),
        ("relative/common", lambda last: math.nan),
    ],
)
def test_cell_formats(metric, expected, tmp_path):
    text = TABLE.replace('metric = "common/private"', f'metric = "{metric}"')
    found = plan("x", table(text), "tiny", [0], tmp_path)
    cell = next(c for c in found.cells if c.column.name == "all")
    place(cell.runs[0].directory, kinds=("private", "global"))
    lines = (cell.runs[0].directory / "metrics.jsonl").read_text().splitlines()
    value = collect(found).cells[cell.row.name, "all"].values.mean()
    assert value == pytest.approx(expected(json.loads(lines[-1])), nan_ok=True)


def at_rounds(tmp_path, metric, own, everywhere, change=lambda number, record: None):
    """Return a cell's value and its records, for the metrics of the table and of two columns."""
    text = TABLE.replace('metric = "common/private"', f'metric = "{metric}"', 1)
    text = text.replace('metric = "personal/private"', f'metric = "{own}"')
    text = text.replace('name = "all"\n', f'name = "all"\nmetric = "{everywhere}"\n')
    found = plan("x", table(text), "tiny", [0], tmp_path)
    directory = found.cells[0].runs[0].directory
    place(directory, rounds=7)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for number, record in enumerate(records, 1):
        change(number, record)
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    results = collect(found)
    values = [results.cells["alone", name].values.mean() for name in ("own", "all")]
    return values, records, results


@pytest.mark.parametrize(
    ("first", "second", "rounds"),
    [("@1", "@4", (1, 4)), ("@50%", "@100%", (4, 7)), ("@14%", "@15%", (1, 2)), ("@7", "", (7, 7))],
)
def test_metric_of_a_round_is_of_its_record(first, second, rounds, tmp_path):
    """A percentage of seven rounds is rounded up. A column may state only its round."""
    metrics = "common/private", f"personal/private{first}", f"common/private/worst{second}"
    values, records, results = at_rounds(tmp_path, *metrics)
    accuracies = [records[number - 1]["accuracy"] for number in rounds]
    expected = [accuracies[0]["personal"]["private"]["mean"]]
    expected.append(accuracies[1]["common"]["private"]["worst"])
    assert values == pytest.approx([100 * each for each in expected])
    legend = results.plan.table.legend("tiny")
    assert "in the last round, unless a row or column states another" in legend
    assert results.result.test_samples["all"] == 359


def test_column_states_the_round_of_its_rows_metrics(tmp_path):
    values, records, results = at_rounds(tmp_path, "figure/classes_covered", "@2", "@60%")
    assert values == [2, 5]
    assert [records[n]["method"]["classes_covered"] for n in (1, 4)] == values
    assert results.cells["alone", "own"].cell.metric == "figure/classes_covered@2"


def test_round_without_its_metric_has_the_last_earlier_value(tmp_path):
    def change(number, record):
        if number != 3:
            record["accuracy"], record["method"] = {}, {}

    values, records, _ = at_rounds(
        tmp_path, "common/private", "common/private@5", "figure/classes_covered@5", change
    )
    assert values == pytest.approx([100 * records[2]["accuracy"]["common"]["private"]["mean"], 3])
    values, _, results = at_rounds(
        tmp_path / "b", "common/private", "common/private@2", "figure/classes_covered@2", change
    )
    assert all(math.isnan(value) for value in values), "no earlier round has the metric"
    assert results.result.cells["alone"]["own"] == (None, None)


@pytest.mark.parametrize("way", ["up", "down", "both"])
def test_bytes_are_the_mean_over_rounds_in_kib(way, tmp_path):
    text = TABLE.replace('metric = "common/private"', f'metric = "bytes/{way}"')
    found = plan("x", table(text), "tiny", [0], tmp_path)
    cell = next(c for c in found.cells if c.column.name == "all")
    directory = cell.runs[0].directory
    place(directory)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for number, record in enumerate(records, 1):
        ways = ("up", "down") if way == "both" else (way,)
        for each in ways:
            record[f"bytes_{each}"] = 1024 * number**2 // len(ways)
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    results = collect(found)
    squares = [number**2 for number in range(1, len(records) + 1)]
    assert results.cells[cell.row.name, "all"].values.mean() == pytest.approx(np.mean(squares))


def test_column_in_percent_of_a_row(tmp_path):
    """The values of each seed are divided by the row's value of the same seed."""
    text = TABLE.replace(
        'name = "all"\n', 'name = "all"\nmetric = "bytes/up"\npercent_of = "alone"\n'
    )
    found = plan("x", table(text), "tiny", [0, 1, 2], tmp_path)
    cells = {cell.row.name: cell for cell in found.cells if cell.column.name == "all"}
    sent: dict[str, list[float]] = {}
    for row, cell in cells.items():
        for seed in (0, 1) if row == "together" else (0, 1, 2):
            directory = cell.runs[seed].directory
            place(directory, seed=seed, noise=len(row))
            lines = (directory / "metrics.jsonl").read_text().splitlines()
            sent.setdefault(row, []).append(sum(json.loads(line)["bytes_up"] for line in lines))
    cells = collect(found).cells
    assert cells["alone", "all"].values.tolist() == [100, 100, 100]
    ratios = [100 * a / b for a, b in zip(sent["together"], sent["alone"], strict=False)]
    assert cells["together", "all"].values.tolist() == pytest.approx(ratios)
    assert all(abs(each - 100) > 1 for each in ratios)
    with pytest.raises(ValueError, match="column 'all', percent_of: expected one of alone"):
        table(text.replace('percent_of = "alone"', 'percent_of = "apart"'))


def test_stored_result_without_a_column_shows_its_printed_numbers(tmp_path):
    results = written(tmp_path, {"alone": [0.3, 0.3, 0.3], "together": [0.9, 0.9, 0.9]})
    for row in results.result.cells.values():
        del row["all"]
    shown = table_cells(results.result, results.plan.table)
    assert [cell.text for cell in shown.columns["all"][:2]] == ["– (50.00)", "– (70.00)"]


def test_markdown_shows_measured_and_printed(tmp_path):
    results = written(tmp_path, {"alone": [0.3, 0.3, 0.3], "together": [0.9, 0.9, 0.9]})
    text = as_markdown(results.result, results.plan.table)
    row = next(line for line in text.splitlines() if line.startswith("| alone"))
    own, everywhere, longer = row.split("|")[2:5]
    assert "(60.00)" in own
    assert "(50.00)" in everywhere
    assert "±" in everywhere
    assert longer.strip() == "–"
    assert "| holds |" in text
    summary = next(line for line in text.splitlines() if line.startswith("| claim | bound | holds"))
    assert summary == "| claim | bound | holds | within noise | does not hold | not measured |"
    counts = text[text.index(summary) :].splitlines()[2].split("|")[3:-1]
    said = [line.split("|")[-2].strip() for line in text.splitlines() if line.count("|") == 8]
    names = ("holds", "within noise", "does not hold", "not measured")
    assert [int(count) for count in counts] == [said.count(name) for name in names]
    assert text.count("<details>") == text.count("</details>") == 1
    assert "6 of 12 runs are finished" in text


# Costs, curves, and changes after a measurement


def test_costs_are_the_epochs_and_the_bytes_of_a_client(mine):
    """Two clients train in 2 or 3 rounds. FedAvg sends its model, and local sends nothing."""
    call("mine", "--seeds", "0", "--out", mine, "--latex")
    costs = json.loads((mine / "mine-tiny.json").read_text())["costs"]
    assert [costs[row]["epochs"] for row in ("alone", "together")] == [[2, 3], [2, 3]]
    assert costs["alone"]["bytes_up"][1] < 2000
    for row in csv.DictReader((mine / "mine-tiny.csv").open()):
        rounds = 3 if row["column"] == "all, longer" else 2
        (directory,) = {
            cell.runs[0].directory
            for cell in plan("mine", table(), "tiny", [0], mine / "runs").cells
            if (cell.row.name, cell.column.name) == (row["row"], row["column"])
        }
        lines = [*map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())]
        assert float(row["epochs"]) == rounds == len(lines)
        for way in ("bytes_up", "bytes_down"):
            by_hand = sum(line[way] for line in lines) / 2
            assert float(row[way]) == pytest.approx(by_hand, abs=0.01)
            low, high = costs[row["row"]][way]
            assert low - 0.01 <= by_hand <= high + 0.01
        if row["row"] == "together":
            weights = 4 * ((30 + 1) * 128 + (128 + 1) * 2)  # 30 features, 128 units, 2 classes
            assert rounds * weights < float(row["bytes_up"]) < rounds * (weights + 3000)
    for name in ("md", "html", "tex"):
        text = (mine / f"mine-tiny.{name}").read_text()
        assert "Epochs: passes of a client over its own labeled samples" in text
        for word in ("epochs", "up", "down"):
            assert re.search(rf"(\| |<th[^>]*>|& ){word}", text), (name, word)
    row = next(r for r in (mine / "mine-tiny.md").read_text().splitlines() if "| together" in r)
    assert row.split("|")[5].strip() == "2–3"
    low, high = (each / 1000 for each in costs["together"]["bytes_up"])
    assert row.split("|")[6].strip() == f"{low:.1f} kB–{high:.1f} kB"


def test_table_without_costs_has_no_columns_of_costs(tmp_path):
    results = written(tmp_path, {"alone": [0.3, 0.4, 0.5], "together": [0.6, 0.7, 0.8]})
    shown = as_markdown(results.result, table())
    assert "| up | down |" in shown
    bare = results.result.model_copy(update={"costs": {}, "digests": {}, "comparisons": []})
    assert "costs" not in bare.to_json()
    again = TableResult.model_validate_json(bare.to_json())
    assert again == bare
    shown = as_markdown(again, table())
    assert "| up | down |" not in shown
    assert "Epochs" not in shown
    kept = results.result.model_copy(update={"comparisons": []})
    assert TableResult.model_validate_json(kept.to_json()) == kept


def test_rows_with_other_settings_than_measured_are_named(tmp_path):
    result = written(tmp_path, {"alone": [0.3], "together": [0.6]}).result
    assert "settings changed" not in result.about(table())
    longer = TABLE.replace('"training.lr" = 0.01', '"training.lr" = 0.02')
    sentence = "Measured before the settings changed: “together”."
    assert sentence in result.about(table(longer))
    assert sentence in as_markdown(result, table(longer))
    every = table(TABLE.replace("rounds = 2", "rounds = 4"))
    assert "Measured before the settings changed: all rows." in result.about(every)
    same = {
        "another column": TABLE.replace("[[rows]]", '[[columns]]\nname = "more"\n[[rows]]', 1),
        "evaluation": TABLE.replace("rounds = 2", 'rounds = 2\n"evaluate-from" = 1'),
        "a default": TABLE.replace("rounds = 2", 'rounds = 2\n"training.weight-decay" = 0.0'),
    }
    for text in same.values():
        assert "settings changed" not in result.about(table(text))


def test_row_whose_method_has_other_defaults_is_named(tmp_path, monkeypatch):
    text = TABLE.replace('method = "fedavg"', 'method = "fedprox"')
    found = plan("x", table(text), "tiny", [0], tmp_path)
    before = {row: found.digest(row, ["all"]) for row in ("alone", "together")}
    field = find_method("fedprox").settings()["fedprox.mu"]
    monkeypatch.setattr(field, "default", 0.5)
    assert found.digest("together", ["all"]) != before["together"]
    assert found.digest("alone", ["all"]) == before["alone"]


@pytest.mark.parametrize(
    ("first", "target", "expected"),
    [(1, 0.5, 4), (1, 0.15, 1), (1, 0.9, None), (3, 0.5, 4), (3, 0.25, None), (3, 0.35, None)],
)
def test_bytes_to_a_target_need_the_rounds_before_it(first, target, expected, tmp_path):
    """Accuracies are 0.2, 0.3, 0.4, 0.55 and 0.5. Rounds before `first` are not evaluated."""
    text = TABLE.replace('"common/private"', f'"target/common/private/{target}"')
    found = plan("x", table(text), "tiny", [0], tmp_path)
    cell = next(c for c in found.cells if c.column.name == "all")
    directory = cell.runs[0].directory
    place(directory, rounds=5)
    path, means = directory / "metrics.jsonl", [0.2, 0.3, 0.4, 0.55, 0.5]
    lines = [*map(json.loads, path.read_text().splitlines())]
    for number, (line, mean) in enumerate(zip(lines, means, strict=True), 1):
        line["bytes_up"] = number * 2**20
        line["accuracy"]["common"]["private"]["mean"] = mean
        if number < first:
            line["accuracy"] = {}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    results = collect(found)
    values = results.cells[cell.row.name, "all"].values
    assert values.tolist() == ([] if expected is None else [expected * (expected + 1) / 2])
    assert results.result.test_samples["all"] is None


@pytest.mark.parametrize(
    "metric", ["target/common/private", "target/common/private/2", "figure/a/b"]
)
def test_unknown_form_of_a_metric_raises(metric):
    with pytest.raises(ValueError, match="target/PROTOCOL/KIND/SCORE"):
        table(TABLE.replace('"common/private"', f'"{metric}"'))


CURVES = TABLE.replace('metric = "common/private"', 'metric = "common/private"\ncurves = true')


def test_table_of_curves_has_figures_over_rounds_and_bytes(tmp_path):
    text = CURVES.replace('name = "all"\n', 'name = "all"\nmetric = "figure/classes_covered"\n')
    found = plan("x", table(text), "tiny", [0, 1], tmp_path / "runs")
    for cell in found.cells[:2] + found.cells[3:5]:
        for seed, run in cell.runs.items():
            if not run.directory.exists():
                place(run.directory, seed=seed)
    results, out = collect(found), tmp_path / "out"
    write_results(results, out)
    names = {path.name for path in out.glob("*.png")}
    assert names == {f"x-tiny-{n}.png" for n in ("own-curves", "own-costs", "all-classes_covered")}
    page = (out / "x-tiny.html").read_text()
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert [title.partition(":")[0] for title in titles] == ["own", "own", "all"]
    assert page.count("<svg") >= 3
    for drawing in curves(results)[:2]:
        figure = Figure()
        drawing.draw(figure)
        (ax,) = figure.axes
        drawn = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
        for cell in found.cells[0], found.cells[3]:
            lines = [
                [json.loads(line) for line in (run.directory / "metrics.jsonl").open()]
                for run in cell.runs.values()
            ]
            means = np.mean(
                [[r["accuracy"]["personal"]["private"]["mean"] for r in run] for run in lines], 0
            )
            assert drawn[cell.row.name] == pytest.approx(means)
    plain = collect(plan("x", table(), "tiny", [0, 1], tmp_path / "runs"))
    assert not curves(plain), "only a table of curves has figures"


def test_tables_of_curves_evaluate_from_the_first_round(tmp_path):
    found = set()
    for name in table_names():
        shown = read_table(name)
        for size in SIZES if shown.curves else ():
            found.add(name)
            for cell in plan(name, shown, size, [0], tmp_path).cells:
                if not cell.metric.startswith("figure/"):
                    assert cell.runs[0].config.run.evaluate_from <= 1, (name, size)
    assert found >= {"fedgems-4", "felo-figures-4-5", "cofed-2", "fedgems-figure-3"}


def test_tables_that_share_runs_with_curves_also_evaluate_early(tmp_path):
    """Otherwise, the same federation would be trained twice."""
    runs = {
        name: {run.directory for run in plan(name, read_table(name), "small", [0], tmp_path).runs}
        for name in ("felo-figures-4-5", "felo-3", "felo-4")
    }
    assert len(runs["felo-figures-4-5"] & runs["felo-3"]) == 4
    assert runs["felo-figures-4-5"] & runs["felo-4"]


def test_metric_of_a_place_applies_to_its_cells():
    text = TABLE.replace(
        'columns = ["all", "all, longer"]', 'columns = ["all, longer"]\nmetric = "figure/odd/mean"'
    )
    found = table(text)
    metrics = {
        (row.name, column.name): found.metric_of(row, column)
        for row in found.rows
        for column in found.columns
    }
    assert metrics["together", "all, longer"] == "figure/odd/mean"
    assert metrics["together", "all"] == metrics["alone", "all, longer"] == "common/private"


def test_mean_of_a_methods_metric_over_the_rounds(tmp_path):
    text = TABLE.replace('"common/private"', '"figure/classes_covered/mean"')
    found = plan("x", table(text), "tiny", [0], tmp_path)
    cell = next(c for c in found.cells if c.column.name == "all")
    place(cell.runs[0].directory, rounds=5)
    assert collect(found).cells[cell.row.name, "all"].values.tolist() == [3.0]


def test_relative_accuracy_on_writers_own_tests_is_a_number(tmp_path):
    """CoFED's Fig. 3: the clients have their own test sets, and there is no common test set."""
    rng = np.random.default_rng(0)
    for name, clients in (("femnist", 2), ("kannada", 1)):
        for part, count in (("train", 40), ("test", 20)):
            (tmp_path / name / part).mkdir(parents=True)
            for client in range(clients):
                y = np.arange(count) % 4
                x = rng.normal(y[:, None, None, None], 0.3, (count, 1, 28, 28)).astype(np.float32)
                np.savez(tmp_path / name / part / f"{client}.npz", x=x, y=y)
    over = {
        "clients": 2, "training.local-epochs": 1, "engine.backend": "inline",
        "data.dataset": f"npz:{tmp_path / 'femnist'}", "models.pool": ["cofed-cnn1"],
        "data.public-dataset": f"npz:{tmp_path / 'kannada'}",
    }  # fmt: skip
    words = shlex.split(" ".join(as_options(over)))
    options = ("--size", "paper", "--seeds", "0", "--rows", "FEMNIST", "--out", tmp_path / "out")
    made = call("cofed-figures-2-3-5", *options, *words)
    assert made.exit_code == 0, made.output
    cells = json.loads((tmp_path / "out/cofed-figures-2-3-5-paper.json").read_text())["cells"]
    mean, best, worst = (cells["FEMNIST"][name][0] for name in ("mean", "best", "worst"))
    assert 0 < worst <= mean <= best
    (path,) = (tmp_path / "out/runs").glob("cofed-*/seed-0/metrics.jsonl")
    last = json.loads(path.read_text().splitlines()[-1])["accuracy"]["personal"]
    ratios = [
        last["private"]["per_client"][name] / last["local"]["per_client"][name]
        for name in last["local"]["per_client"]
    ]
    assert (mean, best, worst) == pytest.approx(
        (np.mean(ratios), max(ratios), min(ratios)), abs=1e-4
    )


# The command


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "mine.toml").write_text(TABLE)
    monkeypatch.setattr(planning, "FILES", tmp_path / "tables")
    return tmp_path / "out"


def call(*words):
    return CliRunner().invoke(app, ["table", *map(str, words)], catch_exceptions=False)


def test_finished_runs_of_a_table_are_not_repeated(mine):
    first = call("mine", "--seeds", "0,1", "--out", mine)
    assert first.exit_code == 0
    assert "8 of 8" in first.output
    page = (mine / "mine-tiny.html").read_text()
    assert "A paper, Table 7" in page
    rows = list(csv.DictReader((mine / "mine-tiny.csv").open()))
    assert len(rows) == 12
    assert all(0 < float(row["measured"]) <= 100 for row in rows)
    made = {p: p.stat().st_mtime_ns for p in (mine / "runs").glob("*/*/summary.json")}
    assert len(made) == 8
    assert not [path for run in made for path in run.parent.rglob("*.safetensors")], "no models"
    assert not (mine / "mine-tiny.tex").exists()
    second = call("mine", "--seeds", "0,1,2", "--out", mine, "--latex")
    assert (mine / "mine-tiny.tex").read_text().startswith(r"% \usepackage{booktabs}")
    assert second.output.count(", seed 2") == 4
    assert "seed 0" not in second.output
    assert all(path.stat().st_mtime_ns == before for path, before in made.items())


def test_interrupted_run_of_a_table_is_continued(mine, monkeypatch):
    train = command.train
    cutting = lambda config, directory, _: train(config, directory, [CutOff(2, "before")])  # noqa: E731
    monkeypatch.setattr(command, "train", cutting)
    with pytest.raises(FedhetError, match=r"4 runs.*seed 0: CutError"):
        call("mine", "--seeds", "0", "--out", mine)
    monkeypatch.setattr(command, "train", train)
    cut = next((mine / "runs").glob("*/seed-0/metrics.jsonl"))
    before = cut.read_text()
    assert before.count("\n") == 1
    assert call("mine", "--seeds", "0", "--out", mine).exit_code == 0
    assert cut.read_text().startswith(before)


def test_run_of_another_table_is_not_repeated(mine, monkeypatch):
    def beaten(config, directory, watchers):
        calls.append(directory)
        for path in (mine / "runs").glob("*/seed-0/later"):
            path.rename(path.with_name("summary.json"))  # what ends meanwhile
        return train(config, directory, watchers)

    calls, train = [], command.train
    found = plan("mine", table(), "tiny", [0], mine / "runs")
    others = found.runs[1:]
    monkeypatch.setattr(command, "train", beaten)
    for run in others:
        place(run.directory, seed=0)
        (run.directory / "summary.json").rename(run.directory / "later")
    call("mine", "--seeds", "0", "--out", mine)
    assert calls == [found.runs[0].directory]


def test_models_are_kept_with_the_option(mine):
    call("mine", "--seeds", "0", "--out", mine, "--set", "rounds=1", "--keep-models")
    for name in ("state", "checkpoints"):
        assert len(list((mine / "runs").glob(f"*/seed-0/{name}"))) == 2


def test_replaced_settings_of_rows_and_columns_are_noted(mine):
    given = ["--set", "rounds=5", "--set", "lr=0.01", "--set", "clients=3", "--dry-run"]
    said = call("mine", "--seeds", "0", "--out", mine, *given).output
    assert "mine: 'all, longer' has rounds = 5 instead of 3, as set with --set" in said
    assert said.count("with --set") == 1  # the row's rate is the same, clients are the size's


@pytest.mark.slow
def test_parallel_runs_give_the_same_metrics(mine):
    call("mine", "--seeds", "0", "--out", mine / "one")
    call("mine", "--seeds", "0", "--out", mine / "two", "--jobs", "2")
    one, two = ((mine / name / "mine-tiny.csv").read_text() for name in ("one", "two"))
    assert one == two


def test_only_the_rounds_that_a_table_shows_are_evaluated(mine):
    over = ["--seeds", "0", "--set", "rounds=6"]
    source = planning.FILES / "mine.toml"
    source.write_text(TABLE.replace('"common/private"', '"common/private/tail"'))
    call("mine", *over, "--out", mine / "late")
    call("mine", *over, "--out", mine / "every", "--set", "evaluate-from=1")
    late, every = ((mine / name / "mine-tiny.csv").read_text() for name in ("late", "every"))
    assert late == every
    evaluated = {
        name: {
            tuple(
                r["round"] for r in map(json.loads, path.read_text().splitlines()) if r["accuracy"]
            )
            for path in (mine / name).glob("runs/*/seed-0/metrics.jsonl")
        }
        for name in ("late", "every")
    }
    assert evaluated == {"late": {(5, 6)}, "every": {(1, 2, 3, 4, 5, 6)}}


@pytest.mark.parametrize(
    ("over", "first"),
    [
        ({"rounds": 10}, 9),
        ({"rounds": 11}, 9),
        ({"rounds": 10, "early-stopping": 2}, 1),
        ({"rounds": 10, "keep-best": True}, 1),
        ({"rounds": 10, "evaluate-from": 4}, 4),
    ],
)
def test_table_evaluates_from_its_tail_on_unless_earlier_rounds_count(over, first, tmp_path):
    (run, *_) = plan("x", table(), "tiny", [0], tmp_path, over).runs
    assert run.config.run.evaluate_from == first
    other = plan("x", table(), "tiny", [0], tmp_path, {**over, "evaluate-from": 1}).runs[0]
    assert other.config.run.evaluate_from == 1
    assert other.directory != run.directory, "a run without the scores of early rounds is not used"


def test_relative_accuracy_of_cofed_uses_the_first_round(tmp_path):
    planned = plan("cofed-2", read_table("cofed-2"), "tiny", [0], tmp_path)
    found = {run.values["method"]: run.config.run.evaluate_from for run in planned.runs}
    assert found["cofed"] == 1
    planned = plan("cofed-figure-6", read_table("cofed-figure-6"), "tiny", [0], tmp_path)
    assert {run.config.run.evaluate_from for run in planned.runs} == {1}


def test_failed_run_is_named_and_others_finish(mine, monkeypatch):
    def failing(config, directory, watchers):
        if config.run.method == "fedavg":
            raise SettingsError("no luck")
        return train(config, directory, watchers)

    train = command.train
    monkeypatch.setattr(command, "train", failing)
    with pytest.raises(FedhetError, match=r"2 runs.*seed 0: no luck"):
        call("mine", "--seeds", "0", "--out", mine)
    assert len(list((mine / "runs").glob("local-*/seed-0/summary.json"))) == 2
    assert (mine / "mine-tiny.md").exists()


def test_several_tables_share_runs_and_have_an_overview(mine):
    folder = mine.parent / "tables"
    (folder / "mine.toml").rename(folder / "mine-1.toml")
    (folder / "mine-2.toml").write_text(TABLE.replace('says = "Very small."', 'says = "Also."'))
    assert call("mine", "--seeds", "0", "--out", mine, "--dry-run").output.count("to do  ") == 4
    said = call("mine", "--seeds", "0", "--out", mine).output
    assert said.count(", seed 0") == 4
    text = (mine / "mine-tiny.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| mine-")]
    assert [line.split("|")[3].strip() for line in lines[:2]] == ["4 of 4", "4 of 4"]
    assert text.count("## ") == 2
    assert (mine / "mine-1-tiny.md").read_text() in text
    with pytest.raises(SettingsError, match="'min'"):
        call("min")


def test_overview_counts_the_claims(tmp_path):
    found = written(tmp_path, {"alone": [0.3, 0.3, 0.3], "together": [0.9, 0.9, 0.9]})
    cells = overview([found])
    row = dict(zip(cells.headers, (cell.text for cell in next(iter(cells.rows))), strict=True))
    assert row["runs"] == "6 of 12"
    outcomes = [each.outcome for each in found.result.comparisons]
    for name in ("holds", "within noise", "does not hold", "not measured"):
        assert row[name] == str(outcomes.count(name))
    assert int(row["holds"]) > 0


def test_seeds_can_be_a_range(mine):
    said = call("mine", "--seeds", "0-2", "--out", mine, "--dry-run").output
    assert said == call("mine", "--seeds", "0,1,2", "--out", mine, "--dry-run").output
    assert read_seeds("0-2, 7, 9-9") == [0, 1, 2, 7, 9]
    assert read_seeds("0-999") == list(range(1000))


def test_plan_is_shown_without_training(mine):
    said = call("mine", "--seeds", "0", "--out", mine, "--dry-run", "--set", "rounds=1").output
    assert said.count("to do  ") == 2  # 'rounds' makes the long column's runs the others'
    assert "fedhet run fedavg" in said
    assert "--set rounds=1" in said
    assert not mine.exists()


def test_some_rows_of_a_table_are_made_and_the_table_stays_whole(mine):
    some = ("mine", "--seeds", "0", "--out", mine, "--rows")
    said = call(*some, "tog, together", "--dry-run").output
    assert said.count("to do  together") == said.count("to do  ") == 2
    call(*some, "together")
    assert [path.name[:6] for path in (mine / "runs").iterdir()] == ["fedavg", "fedavg"]
    text = (mine / "mine-tiny.md").read_text()
    assert "2 of 4 runs are finished" in text
    assert "| alone | –" in text


def test_tables_without_the_size_are_skipped(tmp_path):
    said = call("um-pfssl", "--seeds", "0", "--out", tmp_path / "out", "--dry-run").output
    for name in ("um-pfssl-2", "um-pfssl-6", "um-pfssl-7"):
        assert f"skipped table '{name}': expected small, paper, got 'tiny'" in said
    assert said.count("skipped") == 3
    assert "to do  FedAvg-SL" in said


def test_all_tables_are_listed():
    said = call().output
    assert all(name in said for name in table_names())


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["felo-2", "--size", "huge"], "'--size': table 'felo-2': expected tiny, small, paper"),
        (["um-pfssl-2"], "'--size': table 'um-pfssl-2': expected small, paper, got 'tiny'"),
        (["felo-2", "--seeds", "0,0"], "--seeds: expected a list without duplicates"),
        (["felo-2", "--seeds", "0-2,1"], "--seeds: expected a list without duplicates"),
        (["felo-2", "--seeds", "2-0"], "or a range, such as 0-2, of at most 1000 seeds"),
        (["felo-2", "--seeds", "0-1000"], "at most 1000 seeds, got '0-1000'"),
        (["felo-2", "--seeds", "0-1-2"], "--seeds: expected a list"),
        (["felo-2", "--seeds", "-1"], "--seeds: expected a list"),
        (["felo-2", "--set", "lr=-1"], "'training.lr': expected number"),
        (["felo-2", "--rows", "Felo,alone"], "'--rows': expected rows of felo-2 .FedAvg"),
        (["field", "--rows", "felo"], "'--rows': supported only for paper tables"),
        (["felo-2", "--set", "seed=7"], "use --seeds"),
        (["felo-2", "--set", "out=here"], "use --out"),
    ],
)
def test_invalid_options_raise(words, fault):
    with pytest.raises(SettingsError, match=fault):
        call(*words)
