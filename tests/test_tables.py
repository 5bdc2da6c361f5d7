"""Tables of the user's own: what columns become, sites with one schema, and what is refused."""

import csv
import datetime
import tracemalloc

import numpy as np
import pandas as pd
import pytest
from federation import run, small, without_figures

from fedhet.client_app import client_fn
from fedhet.data import DataSpec, RunData, load, site_data
from fedhet.data.tables import TableSchema, found_schema, read_schema, read_table
from fedhet.errors import DataError, SettingsError
from fedhet.inference import open_client, read_inputs

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
    write(tmp_path / "test.csv", [["50", "x", "2024-01-01", "c", "yes"]])
    test = load(spec(tmp_path)).test
    assert test.y.tolist() == [1]
    assert test.x[0, [1, 2, 3, 4]].tolist() == [0, 0, 0, 0]  # there, and none of f and m
    assert test.x[0, -2:].tolist() == [0, 0]


@pytest.mark.parametrize("value", ["0.1", "36.6", "1.7"])
def test_a_column_of_equal_numbers_leaves_others_of_their_size(value, tmp_path):
    """Rounding gives 60 times 0.1 a mean that is not 0.1, and a deviation of 1e-17."""
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


def test_codes_are_words(tmp_path):
    path = write(tmp_path / "all.csv")
    (age, *_) = load(spec(path, categories=["age"])).schema.columns
    assert (age.kind, age.categories) == ("category", ("40", "60", "80"))


@pytest.mark.parametrize("sites", [1, 4])
def test_a_table_takes_no_more_memory_than_is_allowed(tmp_path, sites):
    """Neither its cells, of all files together, nor its features, of which words have many."""
    names = [f"w{k}" for k in range(150)]
    for site in range(sites):
        rows = [[names[k % 150], "f", "2024-01-01", "a", "ny"[k % 2]] for k in range(4000 // sites)]
        write(tmp_path / f"{site}.csv", rows)
    place = tmp_path / "0.csv" if sites == 1 else tmp_path
    features, last = 4 * 4000 * (150 + 1 + 1 + 1), 1 if sites > 1 else 0
    for allowed, fault in ((400_000, rf"{last}\.csv: takes"), (features - 1, f"takes {features}")):
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
    parts = RunData(spec(tmp_path)).partition()
    assert [len(rows) for rows in parts] == [20, 30]
    write(tmp_path / "site-2.csv", [row[1:] for row in many(9)], HEAD[1:])
    with pytest.raises(DataError, match=r"site-2.csv: has no column 'age', which site-0.csv has"):
        load(spec(tmp_path))
    with pytest.raises(SettingsError, match="holds a file for each client"):
        load(spec(tmp_path, by="ward"))


@pytest.mark.parametrize(
    ("rows", "changes", "fault"),
    [
        ([["x", *ROWS[0][1:]], *ROWS[1:]], {"columns": ["age"]}, None),  # words, then: categories
        ([[*row[:4], ""] for row in ROWS[:1]] + ROWS, {}, "line 2, column 'died': has no class"),
        (ROWS, {"target": "dies"}, "no column 'dies', only .*; did you mean 'died'"),
        (ROWS, {"target": ""}, "data.target must name the column of the class, of age, sex"),
        (ROWS, {"columns": ["agee"]}, "no column 'agee', only .*; did you mean 'age'"),
        (ROWS, {"columns": ["died"]}, "columns besides 'died'"),
        (ROWS, {"by": "sex"}, "line 4, column 'sex': is empty, but data.by names it"),
        ([["", *row[1:]] for row in ROWS], {}, "the column 'age' is empty; leave it out"),
        ([[*row[:4], "no"] for row in ROWS], {}, "'died' has 1 different values"),
        ([[f"id{k}", *ROWS[k % 4][1:]] for k in range(300)], {}, "'age' has 300 different words"),
        ([ROWS[0][:3], *ROWS], {}, "line 2 has 3 columns, the first has 5"),
        ([], {}, "holds no rows"),
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
        ("age", 0, "inf", "number up to 1e+15 either way"),
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
    for row in rows[:4]:  # more than a tenth: words
        row[place] = "unknown"
    words = found_schema(read_table(path := write(path, rows), spec(path)), spec(path)).columns
    assert {column.name: column.kind for column in words}[name] == "category"


def test_times_in_different_zones_are_compared_as_moments(tmp_path):
    times = ["2024-01-01T12:00+00:00", "2024-01-01T12:00+05:00", "2024-01-02T12:00", "2024-01-02"]
    rows = [[*row[:2], time, *row[3:]] for row, time in zip(ROWS, times, strict=True)]
    found = load(spec(write(tmp_path / "all.csv", rows), columns=["admitted"])).train.x[:, 0]
    hours = np.array([12, 7, 36, 24])
    np.testing.assert_allclose(found, (hours - hours.mean()) / hours.std(), atol=1e-5)


@pytest.mark.parametrize("second", ["age", " age"])
def test_a_header_with_one_name_twice_is_refused(tmp_path, second):
    path = write(tmp_path / "all.csv", head=["age", second, "admitted", "ward", "died"])
    with pytest.raises(DataError, match="has two columns 'age'"):
        load(spec(path))


@pytest.mark.parametrize("value", ["abc", "inf", "1e300", "1_000"])
def test_a_sites_number_that_is_none(tmp_path, value):
    schema = found_schema(read_table(write(tmp_path / "a.csv"), spec()), spec())
    path = write(tmp_path / "b.csv", [*ROWS, [value, *ROWS[0][1:]]])
    with pytest.raises(DataError, match=r"b.csv: line 6, column 'age': '.*' (is not|must be)"):
        schema.labelled(read_table(path, spec()))


def site(folder, rows, schema, head=HEAD):
    folder.mkdir()
    write(folder / "train.csv", rows, head)
    (folder / "schema.toml").write_text(schema)
    return folder


def test_sites_share_a_schema_and_a_site_that_differs_is_told_its_column(tmp_path):
    train = write(tmp_path / "all.csv", many(80))
    schema = found_schema(read_table(train, spec()), spec())
    text = schema.to_toml()
    (tmp_path / "s.toml").write_text(text)
    assert read_schema(tmp_path / "s.toml") == schema
    folder = site(tmp_path / "a", many(30, 1), text)
    found = site_data(str(folder), spec=DataSpec(), classes=2, name="a")
    assert found.shape == (sum(schema.widths),)
    assert found.schema == schema
    other = site(tmp_path / "b", many(30, 2), text, ["age", "gender", *HEAD[2:]])
    with pytest.raises(DataError, match=r"train\.csv: has no column 'sex'"):
        site_data(str(other), spec=DataSpec(), classes=2, name="b")
    (other / "schema.toml").unlink()
    with pytest.raises(DataError, match=r"`fedhet schema` writes: .*No such file"):
        site_data(str(other), spec=DataSpec(sample_kind="table"), classes=2, name="b")
    with pytest.raises(DataError, match=r"has 2 classes, the run has 3"):
        site_data(str(folder), spec=DataSpec(), classes=3, name="a")


def test_a_site_with_another_schema_has_another_task(tmp_path, monkeypatch):
    """The sites describe themselves by a digest, so that the server sees that one differs."""
    from types import SimpleNamespace

    from flwr.common import Code, GetPropertiesIns

    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "state"))
    schema = found_schema(read_table(write(tmp_path / "all.csv", many(80)), spec()), spec())
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
    assert x.equal(record.table.encode(read_table(new, spec())))
    status, out, _ = call("predict", tmp_path / "run", "client-0", new, "--csv")
    assert status == 0
    assert out.startswith("sample,class,probability,no,yes\nline 2,")
    with pytest.raises(DataError, match="has no column 'sex'"):
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
