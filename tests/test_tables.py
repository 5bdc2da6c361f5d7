"""User tables: types of columns, sites with a shared schema, and rejected files."""

import csv
import datetime
import gzip
import json
import logging
import resource
import time
import tracemalloc
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from federation import run, small, without_figures

import fedhet
from fedhet.base.errors import DataError, SettingsError
from fedhet.client_runtime.app import client_fn
from fedhet.data.cells import read_table
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load
from fedhet.data.tables import TableSchema, encode, infer_schema, labeled_split, read_schema
from fedhet.inference.client import open_client, read_inputs

HEAD = ["age", "sex", "admitted", "ward", "died"]
ROWS = [
    ["40", "f", "2024-01-01", "a", "no"],
    ["", "m", "2024-01-03", "b", "yes"],
    ["60", "NA", "2024-01-05T12:00", "a", "no"],
    ["80", "m", "?", "b", "yes"],
]


def write(path, rows=ROWS, head=HEAD):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([head, *rows])
    return path


def spec(place="", **changes):
    given = {"dataset": f"table:{place}", "target": "died", "clients": 2, "min_samples": 2}
    return DataSpec(**{**given, **changes})


def many(count, seed=0):
    rng = np.random.default_rng(seed)
    days = [
        datetime.date(2024, 1, 1) + datetime.timedelta(int(d)) for d in rng.integers(0, 99, count)
    ]
    return [
        [
            "" if rng.random() < 0.1 else str(rng.integers(20, 90)),
            str(rng.choice(["f", "m", "na"])), day.isoformat(), str(rng.choice(["a", "b", "c"])),
            str(rng.choice(["no", "yes"])),
        ]
        for day in days
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["all.csv", "all.tsv"])
def test_columns_become_features_as_by_hand(tmp_path, name):
    data = load(spec(write(tmp_path / name)))
    assert data.classes == ("no", "yes")
    assert data.train.y.tolist() == [0, 1, 0, 1]
    assert data.columns == (2, 3, 2, 2)
    ages, mean, deviation = [40, 60, 60, 80], 60, np.sqrt((400 + 0 + 400) / 3)
    days = [19723, 19725, 19727.5, (19723 + 19725 + 19727.5) / 3]
    spread = np.std(days[:3])
    expected = [
        [(ages[0] - mean) / deviation, 0, 1, 0, 0, (days[0] - days[3]) / spread, 0, 1, 0],
        [0, 1, 0, 1, 0, (days[1] - days[3]) / spread, 0, 0, 1],
        [0, 0, 0, 0, 1, (days[2] - days[3]) / spread, 0, 1, 0],
        [(ages[3] - mean) / deviation, 0, 0, 1, 0, 0, 1, 0, 1],
    ]
    np.testing.assert_allclose(data.train.x.numpy(), expected, atol=1e-5)


def test_parquet_reads_as_csv_does(tmp_path):
    path = write(tmp_path / "all.csv", many(50))
    frame = pd.read_csv(path)
    frame["admitted"] = pd.to_datetime(frame["admitted"])
    frame.to_parquet(tmp_path / "all.parquet")
    one, other = load(spec(path)), load(spec(tmp_path / "all.parquet"))
    np.testing.assert_allclose(one.train.x.numpy(), other.train.x.numpy(), atol=1e-6)
    assert one.train.y.equal(other.train.y)


def test_a_common_test_set_takes_the_schema_of_training(tmp_path):
    write(tmp_path / "train.csv")
    known = ["50", "f", "2024-01-01", "a", "yes"]
    write(tmp_path / "test.csv", [["50", "x", "2024-01-01", "c", "yes"], *[known] * 9])
    test = load(spec(tmp_path)).test
    assert test.y.tolist() == [1] * 10
    assert test.x[0, [1, 2, 3, 4]].tolist() == [0, 0, 0, 0]  # there, and none of f and m
    assert test.x[0, -2:].tolist() == [0, 0]


@pytest.mark.parametrize("value", ["0.1", "36.6", "1.7"])
def test_a_column_of_equal_numbers_leaves_others_of_their_size(value, tmp_path):
    """Due to rounding, the mean of 60 values 0.1 is not 0.1, and the deviation is 1e-17."""
    rows = [[value, *row[1:]] for row in many(60)]
    write(tmp_path / "train.csv", rows)
    write(tmp_path / "test.csv", [[str(float(value) + 2), *rows[0][1:]]])
    data = load(spec(tmp_path))
    assert data.train.x[:, 0].eq(0).all()
    assert data.test.x[0, 0].item() == pytest.approx(2, abs=1e-5)


def test_columns_and_owners_are_chosen(tmp_path):
    path = write(tmp_path / "all.csv", many(60))
    data = load(spec(path, by="ward"))
    assert [column.name for column in data.schema.columns] == ["age", "sex", "admitted"]
    wards = [row[3] for row in many(60)]
    found = RunData(spec(path, by="ward", clients=3)).partition()
    assert [len(rows) for rows in found] == [wards.count(name) for name in "abc"]
    assert load(spec(path, columns=["ward"])).train.x.shape == (60, 3)


def test_who_is_which_client_is_shown_and_who_is_none_is_named(tmp_path, call, caplog):
    wards = ["north"] * 30 + ["east"] * 12 + ["west"] * 20 + ["south"] * 13
    rows = [[*row[:3], ward, row[4]] for row, ward in zip(many(75), wards, strict=True)]
    path = write(tmp_path / "all.csv", rows)
    words = ["--dataset", f"table:{path}", "--clients", "3"]
    words += ["--set", "target=died", "--set", "by=ward"]
    status, said, told = call("partition", *words)
    assert status == 0, told
    owners = {"client-0": "north", "client-1": "south", "client-2": "west"}
    counts = {"client-0": "30", "client-1": "13", "client-2": "20"}
    head, *lines = [line.split() for line in said.splitlines()]
    assert head == ["client", "owner", "samples", "no", "yes"]
    assert [line[:3] for line in lines] == [[c, owners[c], counts[c]] for c in owners]
    named = f"clients = 3 excludes the 1 of 4 owners with the fewest samples in table:{path}: "
    assert caplog.messages == [named + "east"]
    out = tmp_path / "run"
    small = ["--rounds=1", "--set=local-epochs=1", "--backend=inline", f"--out={out}"]
    status, said, told = call("run", "local", *words, *small)
    assert status == 0, told
    shown = [line.split()[:2] for line in said.splitlines() if line.startswith(" client-")]
    assert shown == [list(pair) for pair in owners.items()]
    assert caplog.messages.count(named + "east") == 2
    for file in ("summary.json", "partition.json"):
        assert json.loads((out / file).read_text())["owners"] == owners
    assert "north" in (out / "report.html").read_text()
    assert fedhet.load(out).clients["owner"].to_dict() == owners


def test_a_column_is_excluded_by_its_name(tmp_path):
    path = write(tmp_path / "all.csv", many(60))
    for changes in ({}, {"columns": ["age", "sex", "admitted", "ward"]}):
        schema = load(spec(path, exclude=["ward", "sex"], **changes)).schema
        assert [column.name for column in schema.columns] == ["age", "admitted"]
    with pytest.raises(DataError, match=r"'wart' not found, .*'ward'\? \(data\.exclude\)"):
        load(spec(path, exclude=["wart"]))


def test_every_column_in_doubt_is_named_at_once(tmp_path, call):
    rows = [[f"w{k}", "f", f"0{k % 9 + 1}/03/2024", "", "ny"[k % 2]] for k in range(40)]
    path = write(tmp_path / "all.csv", rows)
    status, _, told = call("schema", path, "--target", "died")
    assert status == 2
    *each, last = told.splitlines()
    assert last == f"fedhet: {path}: 3 columns are unsuitable: 'age', 'admitted', 'ward'"
    assert [line.startswith(f"{path}: ") for line in each] == [True] * 3
    for line, fault in zip(each, ("a different word", "ambiguous date", "no values"), strict=True):
        assert fault in line
    with pytest.raises(DataError, match=r"column 'age': .*Exclude it with data\.exclude\.$"):
        load(spec(path, exclude=["admitted", "ward"]))
    out = tmp_path / "schema.toml"
    words = ("--exclude", "age,admitted,ward", "--out", out)
    assert call("schema", path, "--target", "died", *words)[0] == 0
    assert [column.name for column in read_schema(out).columns] == ["sex"]
    out.write_text('target = "a"\nclasses = ["x"]\ncolumns = [1]')
    with pytest.raises(DataError, match=r"classes: .*; columns"):
        read_schema(out)


@pytest.mark.parametrize(
    ("values", "is_named"),
    [
        ([*range(10_000, 10_060)], None),  # numbers the rows, so it is excluded
        (NUMBERS := [10_000 + 7919 * k % 89_999 for k in range(60)], True),
        ([f"{number}.0" for number in NUMBERS], True),
        ([*NUMBERS[:59], NUMBERS[0]], False),
        ([*NUMBERS[:59], 7], False),
        ([number + 0.5 for number in NUMBERS], False),
        (NUMBERS[:49], False),
    ],
)
def test_a_column_that_may_identify_is_named_but_stays(values, is_named, tmp_path, caplog):
    rows = [[str(value), *row[1:]] for value, row in zip(values, many(len(values)), strict=True)]
    schema = load(spec(write(tmp_path / "all.csv", rows))).schema
    named = f"column 'age': all {len(values)} values are different integers of equal length. If"
    assert [named in line for line in caplog.messages] == {
        None: [False], True: [True], False: []
    }[is_named]  # fmt: skip
    assert (schema.columns[0].name == "age") == (is_named is not None)


def test_codes_are_words(tmp_path):
    path = write(tmp_path / "all.csv")
    (age, *_) = load(spec(path, categories=["age"])).schema.columns
    assert (age.kind, age.categories) == ("category", ("40", "60", "80"))


@pytest.mark.parametrize("sites", [1, 4])
def test_a_table_takes_no_more_memory_than_is_allowed(tmp_path, sites):
    """The limit applies to the cells of all files, and to the features."""
    names = [f"w{k}" for k in range(150)]
    for site in range(sites):
        rows = [[names[k % 150], "f", "2024-01-01", "a", "ny"[k % 2]] for k in range(4000 // sites)]
        write(tmp_path / f"{site}.csv", rows)
    place = tmp_path / "0.csv" if sites == 1 else tmp_path
    features, last = 4 * 4000 * (150 + 1 + 1 + 1), 1 if sites > 1 else 0
    for allowed, fault in (
        (400_000, rf"{last}\.csv: expected at most data.max-bytes"),
        (features - 1, f"got {features}"),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match=fault):
                load(spec(place, max_bytes=allowed))
            assert tracemalloc.get_traced_memory()[1] < 2 * allowed + 2_500_000
        finally:
            tracemalloc.stop()
    assert len(load(spec(place, max_bytes=features)).train) == 4000


def test_a_file_for_each_site_is_a_client_each(tmp_path):
    for k, count in enumerate((20, 30)):
        write(tmp_path / f"site-{k}.csv", many(count, k))
    data = RunData(spec(tmp_path))
    assert [len(rows) for rows in data.partition()] == [20, 30]
    assert data.owners() == {"client-0": "site-0.csv", "client-1": "site-1.csv"}
    write(tmp_path / "site-2.csv", [row[1:] for row in many(9)], HEAD[1:])
    with pytest.raises(DataError, match=r"site-2.csv: column 'age' of site-0.csv not found"):
        load(spec(tmp_path))
    with pytest.raises(SettingsError, match="has one file per client"):
        load(spec(tmp_path, by="ward"))


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        ((0, 0), "forty", "column 'age': 'forty' is not a number"),
        ((1, 0), "forty", "column 'age': 'forty' is not a number"),
        ((2, 4), "", "column 'died': the label is missing"),
    ],
)
def test_a_fault_names_the_file_of_its_client(tmp_path, place, value, fault):
    site, column = place
    for k, count in enumerate((20, 30, 25)):
        rows = many(count, k)
        if k == site:
            rows[-1][column] = value
        write(tmp_path / f"site-{k}.csv", rows)
        if k == site:
            line = count + 1
    with pytest.raises(DataError, match=rf"site-{site}\.csv: line {line}, {fault}"):
        load(spec(tmp_path))


@pytest.mark.parametrize(("train", "test"), [("Train.csv", "Test.csv"), ("TRAIN.CSV", "test.csv")])
def test_the_names_of_parts_have_any_case(tmp_path, train, test):
    write(tmp_path / train, many(20))
    write(tmp_path / test, many(8, 1))
    data = load(spec(tmp_path))
    assert (len(data.train), len(data.test), data.groups) == (20, 8, None)


@pytest.mark.parametrize("names", [("test", "training"), ("a", "Testing"), ("a", "val")])
def test_a_part_is_no_client(tmp_path, names):
    for name in names:
        write(tmp_path / f"{name}.csv", many(20))
    odd = names[0] if names[0] == "test" else names[1]
    with pytest.raises(DataError, match=rf"{odd}\.csv: the name of a part of the data, but"):
        load(spec(tmp_path))


def test_tables_that_are_not_read_are_named(tmp_path, caplog):
    for name in ("train", "test", "val", "._train"):
        write(tmp_path / f"{name}.csv", many(20))
    assert len(load(spec(tmp_path)).train) == 20
    assert "only train.csv and test.csv are read; not used: val.csv" in caplog.messages[-1]
    (tmp_path / "train.csv").rename(tmp_path / "east.csv")
    (tmp_path / "val.csv").rename(tmp_path / "north.csv")
    (tmp_path / "test.csv").unlink()  # The hidden file is no client.
    assert load(spec(tmp_path)).group_names == ("east.csv", "north.csv")


@pytest.mark.parametrize(
    ("rows", "changes", "fault"),
    [
        ([["x", *ROWS[0][1:]], *ROWS[1:]], {"columns": ["age"]}, None),  # words, then: categories
        ([[*row[:4], ""] for row in ROWS[:1]] + ROWS, {}, "line 2, column 'died': the label is m"),
        (ROWS, {"target": "dies"}, "column 'dies' not found, .*; did you mean 'died'"),
        (ROWS, {"target": ""}, "data.target must name the label column, one of age, sex"),
        (ROWS, {"columns": ["agee"]}, "column 'agee' not found, .*; did you mean 'age'"),
        (ROWS, {"columns": ["died"]}, "feature columns other than the target 'died'"),
        (ROWS, {"by": "sex"}, "line 4, column 'sex': values of the column data.by must"),
        ([["", *row[1:]] for row in ROWS], {}, "column 'age': no values found. Exclude it"),
        ([[*row[:4], "no"] for row in ROWS], {}, "expected 2 to 1000 classes, got 1 distinct"),
        ([[f"id{k}", *ROWS[k % 4][1:]] for k in range(300)], {}, "at most 200 categories, got 300"),
        ([ROWS[0][:3], *ROWS], {}, "line 2: expected 5 columns, got 3"),
        ([], {}, "no rows found"),
    ],
)  # fmt: skip
def test_a_fault_names_its_line_and_column(tmp_path, rows, changes, fault):
    path = write(tmp_path / "all.csv", rows)
    if fault is None:
        assert load(spec(path, **changes)).schema.columns[0].kind == "category"
        return
    with pytest.raises(DataError, match=fault) as error:
        load(spec(path, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "place", "value", "noun"),
    [
        ("age", 0, "4O", "number"),
        ("age", 0, "inf", "number up to ±1e+15"),
        ("admitted", 2, "2024-02-30", "date such as 2026-01-31"),
    ],
)
def test_a_column_with_one_odd_value_is_not_taken_for_words(tmp_path, name, place, value, noun):
    rows = many(30)
    rows[12][place] = value
    path = write(tmp_path / "all.csv", rows)
    with pytest.raises(DataError) as fault:
        load(spec(path))
    assert f"{path}: line 14, column '{name}': '{value}' is not a {noun}" in str(fault.value)
    load(spec(path, categories=(name,)))
    for row in rows[:4]:  # more than a tenth, which no rule explains
        row[place] = "pos"
    rows[12][place] = "pos"
    with pytest.raises(DataError, match=f"column '{name}': 5 of .* values, such as 'pos', cannot"):
        load(spec(write(path, rows)))
    found = load(spec(path, missing=("pos",))).schema.columns
    kinds = {column.name: (column.kind, column.missing) for column in found}
    assert kinds[name] == ("number" if name == "age" else "date", True)


def test_times_in_different_zones_are_compared_as_moments(tmp_path):
    times = ["2024-01-01T12:00+00:00", "2024-01-01T12:00+05:00", "2024-01-02T12:00", "2024-01-02"]
    rows = [[*row[:2], time, *row[3:]] for row, time in zip(ROWS, times, strict=True)]
    found = load(spec(write(tmp_path / "all.csv", rows), columns=["admitted"])).train.x[:, 0]
    hours = np.array([12, 7, 36, 24])
    np.testing.assert_allclose(found, (hours - hours.mean()) / hours.std(), atol=1e-5)


@pytest.mark.parametrize("second", ["age", " age"])
def test_a_header_with_one_name_twice_is_refused(tmp_path, second):
    path = write(tmp_path / "all.csv", head=["age", second, "admitted", "ward", "died"])
    with pytest.raises(DataError, match="duplicate column 'age'"):
        load(spec(path))


@pytest.mark.parametrize("value", ["abc", "inf", "1e300", "1_000"])
def test_a_sites_number_that_is_none(tmp_path, value):
    schema = infer_schema(read_table(write(tmp_path / "a.csv"), spec()), spec())
    path = write(tmp_path / "b.csv", [*ROWS, [value, *ROWS[0][1:]]])
    with pytest.raises(DataError, match=r"b.csv: line 6, column 'age': '.*' (is not|must be)"):
        labeled_split(schema, read_table(path, spec()))


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize("missing", [False, True])
def test_numbers_with_a_type_are_not_read_in_the_notation_of_the_schema(tmp_path, ending, missing):
    texts = ["1.234,5", "2,25", "12.000"] * 4
    source = write(tmp_path / "a.csv", [[text, "ny"[k % 2]] for k, text in enumerate(texts)], "vd")
    schema = infer_schema(read_table(source, spec(target="d")), spec(target="d"))
    assert schema.columns[0].written == "1.234,5"
    numbers = [12.345, 1.5, 1234.5, None if missing else 2.0]
    frame, path = pd.DataFrame({"v": numbers, "d": list("nyny")}), tmp_path / f"b.{ending}"
    if ending == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=True)
    mean, deviation = np.mean([1234.5, 2.25, 12000]), np.std([1234.5, 2.25, 12000])
    x = [(mean if number is None else number) for number in numbers]
    encoded = encode(schema, read_table(path, spec()))[:, 0]
    np.testing.assert_allclose(encoded, (np.array(x) - mean) / deviation, atol=1e-5)


def site(folder, rows, schema, head=HEAD):
    folder.mkdir()
    write(folder / "train.csv", rows, head)
    (folder / "schema.toml").write_text(schema)
    return folder


def test_sites_share_a_schema_and_a_site_that_differs_is_told_its_column(tmp_path):
    train = write(tmp_path / "all.csv", many(80))
    schema = infer_schema(read_table(train, spec()), spec())
    text = schema.to_toml()
    (tmp_path / "s.toml").write_text(text)
    assert read_schema(tmp_path / "s.toml") == schema
    folder = site(tmp_path / "a", many(30, 1), text)
    found = site_data(str(folder), spec=DataSpec(), classes=2, name="a")
    assert found.shape == (sum(schema.widths),)
    assert found.schema == schema
    other = site(tmp_path / "b", many(30, 2), text, ["age", "gender", *HEAD[2:]])
    with pytest.raises(DataError, match=r"train\.csv: column 'sex' not found"):
        site_data(str(other), spec=DataSpec(), classes=2, name="b")
    (other / "schema.toml").unlink()
    with pytest.raises(DataError, match=r"cannot read the table schema: .*No such file"):
        site_data(str(other), spec=DataSpec(sample_kind="table"), classes=2, name="b")
    with pytest.raises(DataError, match=r"expected the 3 classes of the run, got 2"):
        site_data(str(folder), spec=DataSpec(), classes=3, name="a")


def test_a_site_with_another_schema_has_another_task(tmp_path, monkeypatch):
    """Sites send a digest, so the server notices a different schema."""
    from types import SimpleNamespace

    from flwr.common import Code, GetPropertiesIns

    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "state"))
    schema = infer_schema(read_table(write(tmp_path / "all.csv", many(80)), spec()), spec())
    moved = schema.model_copy(
        update={
            "columns": (schema.columns[0].model_copy(update={"mean": 1.0}), *schema.columns[1:])
        }
    )
    orders = []
    for name, own in (("a", schema), ("b", schema), ("c", moved)):
        folder = site(tmp_path / name, many(30, 1), own.to_toml())
        config = {"method": "local", "models.pool": "mlp", "models.num-classes": 2}
        context = SimpleNamespace(
            node_config={"data": str(folder), "name": name}, run_config=config
        )
        said = client_fn(context).get_properties(GetPropertiesIns({}))
        assert said.status.code == Code.OK
        orders.append(said.properties["order"])
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("target = 3", "target: Input should be a valid string"),
        ("[", "not valid TOML"),
        ('target = "a"\nclasses = ["x", "y"]\ncolumns = [{name = "b", kind = "word"}]', "kind"),
        (
            'target = "a"\nclasses = ["x", "y"]\n'
            'columns = [{name = "b", kind = "number", deviation = 0}]',
            "greater than 0",
        ),
    ],
)
def test_a_broken_schema_is_one_line(tmp_path, text, fault):
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(DataError, match=fault):
        read_schema(tmp_path / "schema.toml")


def test_a_file_is_predicted_by_what_the_run_was_trained_with(tmp_path, call):
    path = write(tmp_path / "all.csv", many(120))
    config = small(
        "felo", dataset=f"table:{path}", target="died", clients=2, models=["mlp"], max_samples=0,
        max_test_samples=0, partition="iid",
    )  # fmt: skip
    with without_figures():
        run(config, tmp_path / "run")
    path.unlink()  # a network needs no data
    record = open_client(tmp_path / "run", "client-0").record
    assert isinstance(record.table, TableSchema)
    new = write(tmp_path / "new.csv", [row[:4] for row in many(5, 7)], HEAD[:4])
    names, x = read_inputs([new], record)
    assert names == [f"line {n}" for n in range(2, 7)]
    assert x.equal(encode(record.table, read_table(new, spec())))
    status, out, _ = call("predict", tmp_path / "run", "client-0", new, "--csv")
    assert status == 0
    assert out.startswith("sample,class,probability,no,yes\nline 2,")
    with pytest.raises(DataError, match="column 'sex' not found"):
        read_inputs([write(tmp_path / "b.csv", [["1"]], ["age"])], record)


def test_workers_that_map_the_data_have_the_schema(tmp_path):
    place = spec(write(tmp_path / "all.csv", many(60)), partition="iid")
    whole = RunData(place)
    (tmp_path / "shared").mkdir()
    whole.share(tmp_path / "shared")
    mapped = RunData(place, tmp_path / "shared")
    assert mapped.client(1).schema == whole.client(1).schema is not None


def test_the_command_writes_a_schema(tmp_path, call):
    out = tmp_path / "schema.toml"
    words = ("schema", write(tmp_path / "all.csv"), "--target", "died", "--columns", "age,sex")
    status, said, _ = call(*words, "--out", out)
    assert status == 0
    assert "age: number, mean 60 ± 16.33, may be missing" in said
    assert [column.name for column in read_schema(out).columns] == ["age", "sex"]
    words = ("schema", tmp_path / "all.csv", "--target", "died", "--columns", "admitted")
    assert "admitted: date, mean 2024-01-03 ± 1.841 days" in call(*words, "--out", out)[1]


# --- How values are written ---------------------------------------------------------------------

NUMBERS = [f"{k * 7 % 97 + 100}" for k in range(40)]


def column_of(tmp_path, values, name="all.csv", **changes):
    """Return the type of a table's only column, and its features."""
    rows = [[value, "ny"[k % 2]] for k, value in enumerate(values)]
    data = load(spec(write(tmp_path / name, rows, ["v", "died"]), **changes))
    return data.schema.columns[0], data.train.x.numpy()


def expected(values):
    """Return a numeric column (None if missing), centered and scaled, with a missing feature."""
    numbers = np.array([np.nan if v is None else v for v in values], float)
    own = np.nan_to_num((numbers - np.nanmean(numbers)) / np.nanstd(numbers))
    gone = np.isnan(numbers)
    return np.stack([own, gone], 1) if gone.any() else own[:, None]


@pytest.mark.parametrize(
    "mark",
    ["None", "#N/A", "<NA>", "-", ".", "NaT", "#NV", "#N/D", "#DIV/0!", "#WERT!", "#¡VALOR!", "\\N",
     "NULL", "--", "missing", "unknown", "1.#IND", "(null)", ".A", "k.A.", "Err:502", "n.d."],
)  # fmt: skip
@pytest.mark.parametrize("fraction", [2, 20])
def test_a_mark_of_a_missing_number_is_no_word(tmp_path, mark, fraction):
    values = [mark if k % fraction == 0 else text for k, text in enumerate(NUMBERS)]
    column, x = column_of(tmp_path, values)
    assert (column.kind, column.missing) == ("number", True)
    numbers = [None if text == mark else float(text) for text in values]
    np.testing.assert_allclose(x, expected(numbers), atol=1e-5)


@pytest.mark.parametrize("mark", ["None", "-", "unknown", "#DIV/0!"])
def test_among_words_such_a_mark_is_a_word(tmp_path, mark):
    column, _ = column_of(tmp_path, ["mild", mark, "severe"] * 5)
    assert column.categories == tuple(sorted(["mild", mark, "severe"]))


@pytest.mark.parametrize("mark", ["-999", "-999.0"])
@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_an_integer_that_marks_missing_values_may_have_decimals(tmp_path, mark, ending):
    numbers, path = [1.5, -999.0, 2.0, 7.0], tmp_path / f"a.{ending}"
    frame = pd.DataFrame(
        {"v": numbers * 3, "w": ["-999", "b", "b", "c"] * 3, "died": list("nny") * 4}
    )
    if ending == "csv":
        frame.to_csv(path, index=False)
    elif ending == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=True)
    data = load(spec(path, missing=(mark,)))
    number, word = data.schema.columns
    assert (number.missing, word.categories, word.missing) == (True, ("b", "c"), True)
    np.testing.assert_allclose(data.train.x[:, :2], expected([1.5, None, 2, 7] * 3), atol=1e-5)
    # In a table with points between thousands, 9.000 is not the marker 9.
    rows = [[text, "ny"[k % 2]] for k, text in enumerate(["9.000", "9", "1.234,5", "9,00"] * 3)]
    data = load(spec(write(tmp_path / "b.csv", rows, ["v", "died"]), missing=("9",)))
    read = expected([9000, None, 1234.5, None] * 3)
    np.testing.assert_allclose(data.train.x, read, atol=1e-5)


def test_a_marker_is_no_target_of_a_site(tmp_path):
    rows = [["1", "3"], ["2", "4"], ["4", "5"]]
    source = write(tmp_path / "a.csv", rows, ["v", "died"])
    of_run = spec(task="regression", missing=("-999",))
    schema = infer_schema(read_table(source, of_run), of_run)
    other = write(tmp_path / "b.csv", [*rows, ["5", "-999.0"]], ["v", "died"])
    with pytest.raises(DataError, match=r"b\.csv: line 5, column 'died': the target"):
        labeled_split(schema, read_table(other, of_run))


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["11,9", "9,4", "3"], [11.9, 9.4, 3]),
        (["1.234,5", "12", "1.000"], [1234.5, 12, 1000]),
        (["1,234.5", "12", "1,000"], [1234.5, 12, 1000]),
        (["1,234,567", "1,000", "12"], [1234567, 1000, 12]),
        (["1\u202f234,5", "2\u00a0000", "12"], [1234.5, 2000, 12]),
        (["1'234.5", "2’000", "12"], [1234.5, 2000, 12]),
        (["\u22125", "+7", "1e-3"], [-5, 7, 0.001]),
        (["-1,5E+03", "2,5", "0"], [-1500, 2.5, 0]),
        (["12 %", "7.5%", "100 %"], [12, 7.5, 100]),
        (["€ 1.200,50", "€3,20", "-€5,00"], [1200.5, 3.2, -5]),
        (["$1,200.50", "$3", "($5.25)"], [1200.5, 3, -5.25]),
        (["5 mg/dl", "7.5 mg/dl", "10 mg/dl"], [5, 7.5, 10]),
        (['="007"', '="12"', '="3"'], [7, 12, 3]),
        (["12-", "7", ".5"], [-12, 7, 0.5]),
        (["0,123", "0,5", "1,000"], [0.123, 0.5, 1]),
        (["1 days 02:00:00", "0 days 00:00:30", "2 days"], [93600, 30, 172800]),
        (["18:30", "09:15", "00:00"], [66600, 33300, 0]),
    ],
)  # fmt: skip
def test_numbers_of_other_countries_and_tools(tmp_path, texts, numbers):
    column, x = column_of(tmp_path, texts * 4)
    assert column.kind == "number"
    np.testing.assert_allclose(x, expected(numbers * 4), atol=1e-5)
    other = write(tmp_path / "other.csv", [[text, "n"] for text in texts], ["v", "died"])
    schema = load(spec(tmp_path / "all.csv")).schema  # a site reads the same numbers by the schema
    np.testing.assert_allclose(
        encode(schema, read_table(other, spec())), expected(numbers * 4)[:3], atol=1e-5
    )


def test_what_may_be_meant_in_two_ways_is_decided_by_other_columns_or_a_setting(tmp_path):
    texts, numbers = ["1,234", "2,500", "987"], [1.234, 2.5, 987]
    with pytest.raises(
        DataError, match=r"line 2, column 'v': ambiguous number '1,234': .* Set data.decimal to"
    ):
        column_of(tmp_path, texts * 4)
    _, x = column_of(tmp_path, texts * 4, decimal="comma")
    np.testing.assert_allclose(x, expected(numbers * 4), atol=1e-5)
    _, x = column_of(tmp_path, texts * 4, decimal="point")
    np.testing.assert_allclose(x, expected([1234, 2500, 987] * 4), atol=1e-5)
    rows = [
        [text, other, "ny"[k % 2]]
        for k, (text, other) in enumerate(zip(texts * 4, ["0,5", "1,25", "3"] * 4, strict=True))
    ]
    data = load(spec(write(tmp_path / "b.csv", rows, ["v", "w", "died"])))
    np.testing.assert_allclose(data.train.x[:, :1], expected(numbers * 4), atol=1e-5)


def test_integers_below_and_above_a_thousand_have_points_in_a_table_of_decimal_commas(tmp_path):
    others = {",": ["0,5", "1,25", "3"], ".": ["0.5", "1.25", "3"]}
    for sign, thousand in ((",", 1000), (".", 1)):
        numbers = [0, 950, 1.234 * thousand, -12.5 * thousand]
        rows = [
            [text, other, "ny"[k % 2]]
            for k, (text, other) in enumerate(
                zip(["0", "950", "1.234", "-12.500"] * 3, others[sign] * 4, strict=True)
            )
        ]
        data = load(spec(write(tmp_path / "a.csv", rows, ["v", "w", "died"])))
        np.testing.assert_allclose(data.train.x[:, :1], expected(numbers * 3), atol=1e-5)
    # Digits without a point show that a file does not group thousands.
    rows = [[*row[:-2], other, row[-1]] for row, other in zip(rows, others[","] * 4, strict=True)]
    rows[0][0] = "4711"
    data = load(spec(write(tmp_path / "a.csv", rows, ["v", "w", "died"])))
    numbers = [4711, *(numbers * 3)[1:]]
    np.testing.assert_allclose(data.train.x[:, :1], expected(numbers), atol=1e-5)


@pytest.mark.parametrize(
    ("texts", "days"),
    [
        (["13/03/2004", "01/02/2004", "03/04/2004"], [41, 0, 62]),
        (["03/13/2004", "02/01/2004", "04/03/2004"], [41, 0, 62]),
        (["01.03.2004", "01.02.2004", "03.04.2004"], [29, 0, 62]),
        (["2004/03/01", "2004/2/1", "2004/04/03"], [29, 0, 62]),
        (["1 March 2004", "Feb 1, 2004", "03-Apr-2004"], [29, 0, 62]),
        (["31/01/2004 18:00", "01/02/2004 06:00", "NaT"], [-0.5, 0, None]),
        (["31JAN2004:12:00:00", "01FEB2004:00:00:00", "."], [-0.5, 0, None]),
    ],
)
def test_dates_of_other_orders(tmp_path, texts, days):
    column, x = column_of(tmp_path, texts * 4)
    assert column.kind == "date"
    np.testing.assert_allclose(x, expected(days * 4), atol=1e-5)


def test_an_order_of_dates_in_doubt_is_refused(tmp_path):
    texts = ["03/02/2004", "01/02/2004", "05/04/2004"]
    with pytest.raises(DataError, match=r"begin with the day or the month. Set data.date-order"):
        column_of(tmp_path, texts * 4)
    _, x = column_of(tmp_path, texts * 4, date_order="mdy")
    np.testing.assert_allclose(x, expected([60, 0, 123] * 4), atol=1e-5)
    with pytest.raises(DataError, match="invalid date '"):
        column_of(tmp_path, ["31/12/99", "01/02/45"] * 4)


def test_codes_stay_words_and_measurements_with_unknown_words_are_refused(tmp_path):
    codes, _ = column_of(tmp_path, ["1", "2", "3", "X"] * 10)
    assert codes.categories == ("1", "2", "3", "X")
    for odd in ("neg", "<5"):
        values = [odd if k % 5 == 0 else text for k, text in enumerate(NUMBERS)]
        with pytest.raises(
            DataError, match=f"8 of 40 values, such as '{odd}', cannot be read as a number"
        ):
            column_of(tmp_path, values)
        assert column_of(tmp_path, values, missing=(odd,))[0].kind == "number"
        assert column_of(tmp_path, values, categories=("v",))[0].kind == "category"
    with pytest.raises(
        DataError, match="'v': expected categories, got a different word in each of 40 rows"
    ):
        column_of(tmp_path, [f"P{text}x{k}" for k, text in enumerate(NUMBERS)])


# --- Rows' numbers, separators, and headers -----------------------------------------------------


def noise(count=60):
    rng = np.random.default_rng(3)
    return pd.DataFrame(
        {"a": rng.normal(size=count).round(3), "y": np.repeat(["n", "j"], count // 2)}
    )


INDEXES = {
    "unnamed": lambda f: f,
    "0 to n - 1": lambda f: f.reset_index(names="case"),
    "1 to n": lambda f: f.assign(nr=range(1, len(f) + 1)),
    "shuffled": lambda f: f.assign(row_number=range(len(f))).sample(frac=1, random_state=0),
    "floats": lambda f: f.assign(k=np.arange(len(f), dtype=float)),
    "restarts": lambda f: f.assign(k=[*range(20), *range(40)]),
    "an id": lambda f: f.assign(patient_id=[f"P{k * 37 % 1000}" for k in range(len(f))]),
}


@pytest.mark.parametrize("case", INDEXES)
@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "jsonl"])
def test_a_column_that_numbers_the_rows_is_no_feature(tmp_path, case, ending, caplog):
    frame, path = INDEXES[case](noise()), tmp_path / f"t.{ending}"
    index = case == "unnamed"
    if ending == "parquet":
        frame.to_parquet(path, index=True)
    elif ending == "jsonl":
        (frame.reset_index() if index else frame).to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=index, sep="\t" if ending == "tsv" else ",")
    data = load(spec(path, target="y"))
    assert [column.name for column in data.schema.columns] == ["a"]
    if not (index and ending == "parquet"):  # a range is no column of the file
        assert "is excluded, because " in caplog.text
    other = set(frame.columns) - {"a", "y"}
    if other:  # unless it is asked for by name
        named = (
            load(spec(path, target="y", columns=("a", *other), categories=tuple(other)[:0]))
            if case not in ("an id",)
            else None
        )
        assert named is None or len(named.schema.columns) == 2


@pytest.mark.parametrize("by", ["", "site"])
@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_separators_trailing_ones_and_row_names_do_not_depend_on_who_owns_a_row(
    tmp_path, by, sign, end
):
    rows = [
        [
            str(30 + k * 7 % 50),
            f"{k * 3 % 11},5".replace(",", "." if sign == "," else ","),
            "ns"[k % 2],
            "ny"[k // 2 % 2],
        ]
        for k in range(40)
    ]
    head = ["age", "level", "site", "died"]
    forms = {
        "plain": [head, *rows],
        "trailing": [[*head, "", ""], *([*row, "", ""] for row in rows), [""] * 6],
        "trailing in rows": [head, *([*row, ""] for row in rows)],
        "row names": [head, *([f"r{k}", *row] for k, row in enumerate(rows))],
        "index": [["", *head], *([str(k), *row] for k, row in enumerate(rows))],
        "quoted": [[f'"{n}"' for n in head], *([f'"{v}"' for v in row] for row in rows)],
    }
    found = []
    for name, lines in forms.items():
        path = tmp_path / f"{name}.csv"
        path.write_text("\ufeff" + end.join(sign.join(line) for line in lines) + end, newline="")
        data = load(spec(path, by=by, columns=()))
        names = [column.name for column in data.schema.columns]
        assert names == ["age", "level", *([] if by else ["site"])], name
        assert data.schema.columns[1].kind == "number"
        found.append(data.train.x)
    assert all(x.equal(found[0]) for x in found)
    marked = tmp_path / "sep.csv"
    marked.write_text(f"sep={sign}\n" + "\n".join(sign.join(line) for line in forms["plain"]))
    assert load(spec(marked, by=by)).train.x.equal(found[0])


def test_many_columns_take_time_in_proportion(tmp_path):
    """Comparing twice 20,000 names with each other would take 200 million comparisons."""
    head = [f"c{k}" for k in range(20_000)]
    path = write(tmp_path / "wide.csv", [["1"] * 20_000, ["2"] * 20_000], head)
    begun = time.process_time()
    assert len(read_table(path, spec()).columns) == 20_000
    assert time.process_time() - begun < 2


# --- Classes and categories in several spellings ------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "classes"),
    [
        ("01", ["0.0", "1.0"], ("0", "1")),
        ("01", [" 0", "01"], ("0", "1")),
        (["Yes", "No"], ["YES", "NO"], ("NO", "YES")),
        (["yes", "no"], ["Yes ", "no"], None),
        (["True", "False"], ["TRUE", "FALSE"], None),
        (["yes", "no"], ["1", "0"], "several words for yes or no"),
        (["y", "n"], ["yes", "no"], "several words for yes or no"),
        (["True", "False"], ["1", "0"], "several words for yes or no"),
    ],
)
def test_a_class_in_two_spellings_is_one_or_refused(tmp_path, one, other, classes):
    for name, words in (("a", one), ("b", other)):
        rows = [[str(k * 5 % 17), words[k % 2], words[k // 2 % 2]] for k in range(20)]
        write(tmp_path / f"{name}.csv", rows, ["x", "w", "died"])
    if isinstance(classes, str):
        with pytest.raises(DataError, match=classes):
            load(spec(tmp_path))
        assert len(load(spec(tmp_path, categories=("died", "w"))).classes) == 4
        return
    data = load(spec(tmp_path))
    assert len(data.classes) == 2
    assert classes is None or data.classes == classes
    if one != "01":
        assert len(data.schema.columns[1].categories) == 2
    by_hand = [k // 2 % 2 for k in range(20)] * 2
    assert data.train.y.tolist() in (by_hand, [1 - y for y in by_hand])


@pytest.mark.parametrize(
    "values",
    [
        [f"{k / 7:.3f}" for k in range(60)],
        [str(18 + k) for k in range(60)],
        [f"{k},5" for k in range(60)],
    ],
)
@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_a_target_of_many_numbers_is_refused(tmp_path, values, ending):
    rows, path = (
        [[str(k * 3 % 7), value] for k, value in enumerate(values)],
        tmp_path / f"t.{ending}",
    )
    if ending == "csv":
        write(path, rows, ["x", "died"])
    else:
        numbers = values if "," in values[0] else [float(value) for value in values]
        frame = pd.DataFrame({"x": [int(row[0]) for row in rows], "died": numbers})
        frame.to_parquet(path) if ending == "parquet" else frame.to_json(
            path, orient="records", lines=True
        )
    with pytest.raises(
        DataError, match=r"60 different numbers from .* to .* Set data.task to regression"
    ):
        load(spec(path))
    assert len(load(spec(path, categories=("died",))).classes) == 60


def test_a_text_file_with_many_numbers_as_labels_is_refused_and_booleans_are_labels(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [json.dumps({"text": f"note {k}", "label": k / 8}) for k in range(60)]
    path.write_text("\n".join(lines))
    with pytest.raises(
        DataError, match=r"expected classes, got 60 different numbers from 0 to 7.375"
    ):
        load(DataSpec(dataset=f"text:{path}"))
    assert len(load(DataSpec(dataset=f"text:{path}", categories=("label",))).classes) == 60
    for value, classes in ((bool, ("false", "true")), (float, ("0", "1")), (int, ("0", "1"))):
        path.write_text(
            "\n".join(json.dumps({"text": f"note {k}", "label": value(k % 2)}) for k in range(9))
        )
        data = load(DataSpec(dataset=f"text:{path}"))
        assert (data.classes, data.train.y.tolist()) == (classes, [k % 2 for k in range(9)])
    path.write_text('{"text": "a", "label": null}')
    with pytest.raises(
        DataError,
        match="line 1, column 'label': expected text, a number, true, or false, got NoneType",
    ) as fault:
        load(DataSpec(dataset=f"text:{path}"))
    assert "did you mean" not in str(fault.value)


def public_and_site(tmp_path, change, count=40):
    """Return the schema of a public table, and a site with changed words."""
    rng = np.random.default_rng(0)
    rows = [
        [
            str(rng.integers(30, 80)),
            str(rng.choice(["yes", "no"])),
            str(rng.choice(["True", "False"])),
            "01"[k % 2],
        ]
        for k in range(count)
    ]
    head = ["age", "smoker", "diabetes", "died"]
    schema = infer_schema(read_table(write(tmp_path / "public.csv", rows, head), spec()), spec())
    site_rows = [change(k, list(row)) for k, row in enumerate(rows)]
    return site(tmp_path / "site", site_rows, schema.to_toml(), head), schema, rows


def test_a_sites_spelling_is_the_schemas_word_and_it_is_said(tmp_path, caplog):
    def shout(_, row):
        return [row[0], row[1].capitalize(), row[2].upper(), f"{row[3]}.0"]

    folder, schema, rows = public_and_site(tmp_path, shout)
    found = labeled_split(schema, read_table(folder / "train.csv", spec()))
    assert found.x.equal(encode(schema, read_table(tmp_path / "public.csv", spec())))
    assert found.y.tolist() == [int(row[3]) for row in rows]
    assert "column 'smoker': read 'No' as 'no'" in caplog.text or "'Yes' as 'yes'" in caplog.text
    assert "column 'diabetes': read" in caplog.text


@pytest.mark.parametrize(
    ("words", "share"), [(["ja", "nein"], 1), (["Y", "N"], 1), (["ja", "nein"], 0.3), ([""], 0.5)]
)
def test_a_site_whose_words_are_unknown_is_refused(tmp_path, words, share):
    def foreign(k, row):
        return [row[0], words[k % len(words)] if k < share * 40 else row[1], *row[2:]]

    folder, _, _ = public_and_site(tmp_path, foreign)
    fault = rf"column 'smoker': {int(share * 40)} of 40 values, such as .*, are not in the schema"
    with pytest.raises(DataError, match=fault):
        site_data(str(folder), spec=DataSpec(), classes=2, name="a")
    text = (folder / "schema.toml").read_text()
    (folder / "schema.toml").write_text(text.replace("max_unknown = 0.2", "max_unknown = 1"))
    assert site_data(str(folder), spec=DataSpec(), classes=2, name="a").shape == (5,)


def test_few_unknown_words_are_counted_in_the_sites_log(tmp_path, caplog):
    folder, schema, _ = public_and_site(
        tmp_path, lambda k, row: [row[0], "never" if k < 4 else row[1], *row[2:]]
    )
    caplog.set_level(logging.WARNING)
    site_data(str(folder), spec=DataSpec(), classes=2, name="a")
    assert "column 'smoker': 4 of 40 values, such as 'never', are not in the schema" in caplog.text
    limit = schema.model_copy(update={"max_unknown": 0.5})
    assert limit.digest == schema.digest  # the features are the same


# --- Parquet ------------------------------------------------------------------------------------


def parquet(path, columns, **options):
    table = pa.table(
        {**columns, "died": pa.array((["n", "y"] * 40)[: len(next(iter(columns.values())))])}
    )
    pq.write_table(table, path, **options)
    return path


def test_parquet_values_are_converted_by_their_type(tmp_path):
    n, rng = 40, np.random.default_rng(0)
    numbers = rng.integers(0, 50, n)
    hours = [datetime.timedelta(hours=int(v)) for v in numbers]
    zone = datetime.timezone(datetime.timedelta(hours=5))
    moments = [datetime.datetime(2024, 1, 1 + int(v) % 20, tzinfo=zone) for v in numbers]
    columns = {
        "decimal": pa.array([Decimal(int(v)).scaleb(-1) for v in numbers], pa.decimal128(9, 1)),
        "bytes": pa.array([str(v).encode() for v in numbers]),
        "fixed": pa.array([f"{v:02}".encode() for v in numbers], pa.binary(2)),
        "large": pa.array([str(v) for v in numbers], pa.large_string()),
        "dictionary": pa.array([str(v) for v in numbers]).dictionary_encode(),
        "wait": pa.array(hours, pa.duration("ms")),
        "half": pa.array(numbers.astype(np.float16)),
        "time": pa.array([datetime.time(int(v) % 24, 30) for v in numbers], pa.time64("us")),
    }
    found = load(spec(parquet(tmp_path / "t.parquet", columns)))
    assert {column.kind for column in found.schema.columns} == {"number"}
    scaled = expected(numbers)
    for k in range(7):
        np.testing.assert_allclose(found.train.x[:, k : k + 1], scaled, atol=1e-5)
    np.testing.assert_allclose(found.train.x[:, 7:], expected(numbers % 24), atol=1e-5)
    others = {
        "zoned": pa.array(moments, pa.timestamp("ns", "Asia/Karachi")),
        "flag": pa.array(numbers > 20),
        "words": pa.array([f"w{v % 3}".encode() for v in numbers]),
    }
    data = load(spec(parquet(tmp_path / "o.parquet", others)))
    assert [column.kind for column in data.schema.columns] == ["date", "category", "category"]
    assert data.schema.columns[2].categories == ("w0", "w1", "w2")
    np.testing.assert_allclose(data.train.x[:, :1], expected(numbers % 20), atol=1e-5)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([[1, 2], [3]] * 10), "list"),
        (pa.array([{"sys": 1}, {"sys": 2}] * 10), "struct"),
        (pa.array([[("a", 1)]] * 20, pa.map_(pa.string(), pa.int64())), "map"),
        (pa.array([b"\xff\xfe", b"\x00"] * 10), "bytes that are not UTF-8 text"),
        (pa.nulls(20), "no values found"),
    ],
)  # fmt: skip
def test_parquet_values_without_a_meaning_are_refused_by_name(tmp_path, values, kind):
    path = parquet(tmp_path / "t.parquet", {"v": values, "x": pa.array(range(0, 60, 3))})
    with pytest.raises(DataError, match=rf"column 'v'.*{kind}"):
        load(spec(path))
    assert load(spec(path, columns=("x",))).train.x.shape == (20, 1)


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "dictionary"])
def test_a_small_parquet_file_of_a_huge_table_takes_little_memory(tmp_path, encoding):
    """2,000 times 3 MB: the file has less than a kilobyte, and the table would have 6 GB."""
    text = pa.array(["x" * 3_000_000]).dictionary_encode().dictionary
    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2000, np.int32)), text)
    if encoding == "DELTA_BYTE_ARRAY":  # PLAIN of all rows takes the writer 6 GB
        values = pa.chunked_array([values.slice(0, 100).cast(pa.string())])
    options = (
        {} if encoding == "dictionary" else {"use_dictionary": False, "column_encoding": encoding}
    )
    if encoding == "PLAIN":
        values = pa.array(["x" * 3_000_000] * 40)
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"died": values}), path, compression="zstd", **options)
    assert path.stat().st_size < 20_000
    pool = pa.default_memory_pool()
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    used = pool.bytes_allocated()
    with pytest.raises(
        DataError, match=r"at most data.max-bytes|at most 1000 characters, got 3,000,000"
    ):
        load(spec(path, max_bytes=100_000_000))
    assert time.process_time() - begun < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes
    assert pool.bytes_allocated() - used < 10_000_000


def test_rows_without_columns_of_a_parquet_file_are_counted_before_they_are_decoded(tmp_path):
    path = tmp_path / "t.parquet"
    codes = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int32)), pa.array(["a"]))
    pq.write_table(pa.table({"v": codes, "died": codes}), path)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"bytes in memory, got \d+"):
        read_table(path, spec(max_bytes=8_000_000))


def test_decimal_commas_without_quotes_are_no_row_names(tmp_path):
    (tmp_path / "t.csv").write_text("age,died\n1,5,yes\n1,7,no\n2,5,no\n")
    with pytest.raises(DataError, match=r"t\.csv: line 2: expected 2 columns, got 3\. The first"):
        read_table(tmp_path / "t.csv", spec())
    (tmp_path / "t.csv").write_text("age,died\n1,5,yes\n2,7,no\n3,5,no\n")
    assert read_table(tmp_path / "t.csv", spec()).column("age") == ["5", "7", "5"]


@pytest.mark.parametrize("name", ["t.csv.gz", "T.CSV.GZ"])
def test_a_packed_table_is_read_whatever_the_case_of_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"age,died\n63,yes\n41,no\n"))
    cells = read_table(tmp_path / name, spec())
    assert cells.column("age") == ["63", "41"]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_line_of_json_takes_no_more_memory_than_is_allowed(tmp_path, ending):
    path = tmp_path / f"t{ending}"
    line = '{"v": [' + "[]," * 300_000 + "[]]}"
    path.write_bytes(gzip.compress(line.encode()) if ending.endswith("gz") else line.encode())
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="line 1 has more than 65,535 characters"):
            read_table(path, spec(max_bytes=1_500_000))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


# --- Reports ------------------------------------------------------------------------------------


def test_the_command_and_the_runs_log_say_what_each_column_was_taken_for_and_why(tmp_path, call):
    rows = [
        [f"{k}", f"{k % 7},5", ["", "yes", "YES"][k % 3], f"{k % 28 + 1}/03/2004", "ny"[k % 2]]
        for k in range(40)
    ]
    path = write(tmp_path / "all.csv", rows, ["id", "level", "smoker", "seen", "died"])
    status, said, _ = call("schema", path, "--target", "died", "--out", tmp_path / "s.toml")
    assert status == 0
    assert "id: excluded, because all its values are different" in said
    assert "level: number, mean" in said
    assert "(numbers with a decimal comma, such as '0,5')" in said
    assert "read 'yes' as 'YES'" in said or "read 'YES' as 'yes'" in said
    assert "14 of 40 are missing ('')" in said
    assert "order dd/mm/yyyy, as '13/03/2004' shows" in said
    notes = load(spec(path)).notes
    assert all(note in said for note in notes)
    assert len(notes) == 4
    for option in ("--decimal", "comma"), ("--date-order", "dmy"), ("--missing", "-999"):
        assert (
            call("schema", path, "--target", "died", "--out", tmp_path / "s.toml", *option)[0] == 0
        )
