"""User tables: the rule for the types of columns, schemas, sites, and rejected files."""

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
from fedhet.data.rows import read_table
from fedhet.data.schemas import TableSchema, read_schema
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load
from fedhet.data.tables import encode, infer_schema, labeled_split
from fedhet.inference.client import open_client, read_inputs

HEAD = ["age", "sex", "admitted", "ward", "died"]
ROWS = [
    ["40", "f", "2024-01-01", "a", "no"],
    ["", "m", "2024-01-03", "b", "yes"],
    ["60", "NA", "2024-01-05T12:00", "a", "no"],
    ["80", "m", "", "b", "yes"],
]


def write(path, rows=ROWS, head=HEAD):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([head, *rows])
    return path


def spec(place="", **changes):
    given = {"dataset": f"table:{place}", "target": "died", "clients": 2, "min_samples": 2}
    return DataSpec(**{**given, **changes})


def inferred(path, **changes):
    return infer_schema(read_table(path, spec(**changes)), spec(**changes))


def many(count, seed=0):
    rng = np.random.default_rng(seed)
    days = [
        datetime.date(2024, 1, 1) + datetime.timedelta(int(d)) for d in rng.integers(0, 99, count)
    ]
    return [
        [
            "" if rng.random() < 0.1 else str(rng.integers(20, 90)),
            str(rng.choice(["f", "m", "other"])), day.isoformat(),
            str(rng.choice(["a", "b", "c"])), str(rng.choice(["no", "yes"])),
        ]
        for day in days
    ]  # fmt: skip


def column_of(tmp_path, values, name="all.csv", **changes):
    """Return a table's only feature column, and its features."""
    rows = [[value, "ny"[k % 2]] for k, value in enumerate(values)]
    data = load(spec(write(tmp_path / name, rows, ["v", "died"]), **changes))
    return data.format.schema.columns[0], data.train.x.numpy()


def expected(values):
    """Return a numeric column (None if missing), centered and scaled, with a missing feature."""
    numbers = np.array([np.nan if v is None else v for v in values], float)
    own = np.nan_to_num((numbers - np.nanmean(numbers)) / np.nanstd(numbers))
    gone = np.isnan(numbers)
    return np.stack([own, gone], 1) if gone.any() else own[:, None]


# --- Features -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all.csv", "all.tsv"])
def test_features_equal_columns_by_hand(tmp_path, name):
    data = load(spec(write(tmp_path / name)))
    assert data.format.classes == ("no", "yes")
    assert data.train.y.tolist() == [0, 1, 0, 1]
    assert data.columns == (2, 3, 2, 2)
    ages, mean, deviation = [40, 60, 60, 80], 60, np.sqrt((400 + 0 + 400) / 3)
    days = [19723, 19725, 19727.5, (19723 + 19725 + 19727.5) / 3]
    spread = np.std(days[:3])
    by_hand = [
        [(ages[0] - mean) / deviation, 0, 1, 0, 0, (days[0] - days[3]) / spread, 0, 1, 0],
        [0, 1, 0, 1, 0, (days[1] - days[3]) / spread, 0, 0, 1],
        [0, 0, 0, 0, 1, (days[2] - days[3]) / spread, 0, 1, 0],
        [(ages[3] - mean) / deviation, 0, 0, 1, 0, 0, 1, 0, 1],
    ]
    np.testing.assert_allclose(data.train.x.numpy(), by_hand, atol=1e-5)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_all_formats_are_read_alike(tmp_path, ending):
    path, other = write(tmp_path / "all.csv", many(50)), tmp_path / f"all.{ending}"
    frame = pd.read_csv(path)
    if ending == "parquet":
        frame["admitted"] = pd.to_datetime(frame["admitted"])
        frame.to_parquet(other)
    else:
        frame.to_json(other, orient="records", lines=True)
    one, two = load(spec(path)), load(spec(other))
    np.testing.assert_allclose(one.train.x.numpy(), two.train.x.numpy(), atol=1e-6)
    assert one.train.y.equal(two.train.y)


def test_common_test_set_takes_the_schema_of_training(tmp_path):
    write(tmp_path / "train.csv")
    known = ["50", "f", "2024-01-01", "a", "yes"]
    write(tmp_path / "test.csv", [["50", "x", "2024-01-01", "c", "yes"], *[known] * 9])
    test = load(spec(tmp_path)).test
    assert test.y.tolist() == [1] * 10
    assert test.x[0, [1, 2, 3, 4]].tolist() == [0, 0, 0, 0]  # present, but neither f nor m
    assert test.x[0, -2:].tolist() == [0, 0]


@pytest.mark.parametrize("value", ["0.1", "36.6", "1.7"])
def test_column_of_equal_numbers_leaves_others_of_their_size(value, tmp_path):
    """Due to rounding, the mean of 60 values 0.1 is not 0.1, and the deviation is 1e-17."""
    rows = [[value, *row[1:]] for row in many(60)]
    write(tmp_path / "train.csv", rows)
    write(tmp_path / "test.csv", [[str(float(value) + 2), *rows[0][1:]]])
    data = load(spec(tmp_path))
    assert data.train.x[:, 0].eq(0).all()
    assert data.test.x[0, 0].item() == pytest.approx(2, abs=1e-5)


def test_times_in_different_zones_are_compared_as_moments(tmp_path):
    times = ["2024-01-01T12:00+00:00", "2024-01-01T12:00+05:00", "2024-01-02T12:00", "2024-01-02"]
    _, x = column_of(tmp_path, times)
    np.testing.assert_allclose(x, expected([12, 7, 36, 24]), atol=1e-5)


# --- The rule for the types -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2.5", "-3e2", "+.5"], "number"),
        ([" 1", "2 ", "NA", "", "#N/A", "null"], "number"),
        (["2024-01-31", "2024-01-31T10:00:00Z", ""], "date"),
        (["f", "m", "x1"], "category"),
        (["f", "m", "", "None"], "category"),
        (["true", "false"], "category"),
    ],
)
def test_column_has_the_type_of_all_its_values(tmp_path, values, kind):
    column, _ = column_of(tmp_path, values * 2)
    assert column.type == kind
    assert column.optional == any(value in ("", "NA") for value in values)


UNCLEAR = {
    "decimal commas": (["1,5", "2,25", "30"], 'decimal = ","'),
    "thousands": (["1,234", "12,000.5", "7"], 'thousands = ","'),
    "both separators": (["1.234,5", "12.000"], 'thousands = "."'),
    "a unit": (["12 kg", "3.5 kg"], 'unit = "kg"'),
    "days first": (["31.01.2024", "01.02.2024"], 'format = "%d.%m.%Y"'),
    "either order": (["03/02/2024", "04/05/2024"], 'format = "%m/%d/%Y"'),
    "clock times": (["12:30", "08:05"], 'format = "%H:%M"'),
    "a marker": (["12", "13.5", "14", "k.A."], 'missing = ["k.A."]'),
    "accountants' signs": (["(12)", "13", "(1)"], 'type = "category"'),
    "infinity": (["1", "2", "inf"], 'missing = ["inf"]'),
    "codes": (["1", "2", "X"], 'type = "number"'),
    "words with digits": (["w1", "w2", "w3"], 'type = "category"'),
    "two spellings": (["Yes", "no", "YES"], 'values = ["YES", '),
    "a comma and a marker": (
        ["84,9", "k.A.", "82,0", "7,5"],
        'type = "number", decimal = ",", missing = ["k.A."]',
    ),
    "two minus signs": (["-1", "\N{MINUS SIGN}1", "a"], 'values = ["-1"'),
    "an abbreviation": (["yes", "n", "no"], 'values = ["n", '),
    "many words": ([f"{chr(97 + k % 26)}{chr(97 + k // 26)}" for k in range(201)], '"ignore"'),
    "nothing": ([""], 'type = "ignore"'),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_column_of_an_unclear_type_raises_with_a_schema_line(tmp_path, call, case):
    values, line = UNCLEAR[case]
    values = [value for value in values for _ in range(2)]
    rows = [[value, str(k * 7 % 5), "ny"[k % 2]] for k, value in enumerate(values)]
    path = write(tmp_path / "all.csv", rows, ["v", "w", "died"])
    with pytest.raises(DataError) as fault:
        load(spec(path))
    assert "'v'" in str(fault.value)
    assert f"fedhet schema {path} --target died" in str(fault.value)
    assert "\n" not in str(fault.value)
    (note,) = fault.value.__notes__
    assert line in note
    assert call("schema", path, "--target", "died")[0] == 0
    text = (tmp_path / "schema.toml").read_text()
    assert 'type = "?"' in text
    assert "# 'v' contains" in text
    with pytest.raises(DataError, match=r"'\?'.*'v'"):
        load(spec(path))


def test_series_of_consecutive_days_is_a_date(tmp_path):
    days = [str(datetime.date(2024, 1, 1) + datetime.timedelta(k)) for k in range(40)]
    column, x = column_of(tmp_path, days)
    assert column.type == "date"
    np.testing.assert_allclose(x, expected(range(40)), atol=1e-5)


def test_every_unclear_column_is_named_at_once(tmp_path, call):
    rows = [[f"w{k}", "f", f"0{k % 9 + 1}/03/2024", "", "ny"[k % 2]] for k in range(40)]
    path = write(tmp_path / "all.csv", rows)
    status, _, told = call("run", "local", "--dataset", f"table:{path}", "--set", "target=died")
    assert status == 2
    for name in ("'age'", "'admitted'", "'ward'"):
        assert told.count(name) == 2  # in the list, and with the values
    with pytest.raises(DataError, match="'age'"):
        load(spec(path, exclude=["admitted", "ward"]))


@pytest.mark.parametrize(
    ("values", "is_named"),
    [
        (NUMBERS := [10_000 + 7919 * k % 89_999 for k in range(60)], True),
        ([f"{number}.0" for number in NUMBERS], True),
        ([*NUMBERS[:59], NUMBERS[0]], False),
        ([*NUMBERS[:59], 7], False),
        ([number + 0.5 for number in NUMBERS], False),
        (NUMBERS[:49], False),
    ],
)
def test_identifying_column_is_named_and_kept(values, is_named, tmp_path, caplog):
    column, _ = column_of(tmp_path, list(map(str, values)))
    assert column.type == "number"
    assert (f"'v': all {len(values)} values are different integers" in caplog.text) == is_named


@pytest.mark.parametrize("name", ["", "__index_level_0__", "case"])
@pytest.mark.parametrize("start", [0, 1, 500])
def test_column_that_counts_the_rows_is_no_feature(tmp_path, name, start):
    rows = [[str(start + k), str(k * 7 % 11), "ny"[k % 2]] for k in range(40)]
    for k in range(2):
        write(tmp_path / f"{k}.csv", rows, [name, "a", "died"])
    for place in (tmp_path, tmp_path / "0.csv"):
        if name == "case":
            with pytest.raises(DataError, match="'case'") as fault:
                load(spec(place))
            assert "which count the rows" in fault.value.__notes__[0]
        else:
            assert [column.name for column in load(spec(place)).format.schema.columns] == ["a"]


# --- Schemas --------------------------------------------------------------------------------------


def declared(tmp_path, values, lines, more=(), **changes):
    """Return a column that a schema declares, and its features."""
    text = f'target = "died"\n[columns.v]\n{lines}\n'
    (tmp_path / "schema.toml").write_text(text)
    return column_of(tmp_path, [*values, *more], target="", **changes)


@pytest.mark.parametrize(
    ("lines", "texts", "numbers"),
    [
        ('decimal = ","', ["1,5", "-2", ",5", "1e2", ""], [1.5, -2, 0.5, 100, None]),
        ('thousands = ","', ["1,234", "12,000.5", "7"], [1234, 12000.5, 7]),
        ('decimal = ","\nthousands = "."', ["1.234,5", "12.000", "3"], [1234.5, 12000, 3]),
        ('thousands = " "', ["1 234", "12 000.5", "3"], [1234, 12000.5, 3]),
        ('unit = "%"', ["12 %", "3.5%", "-1 %"], [12, 3.5, -1]),
        ('unit = "€"', ["€ 12", "€3.5"], [12, 3.5]),
        ('missing = ["-999", "k.A."]', ["12", "-999", "-999.0", "k.A."], [12, None, None, None]),
    ],
)
def test_numbers_are_read_in_the_declared_notation(tmp_path, lines, texts, numbers):
    column, x = declared(tmp_path, [*texts, "NA"] * 2, f'type = "number"\n{lines}')
    assert (column.type, column.optional) == ("number", True)
    np.testing.assert_allclose(x, expected([*numbers, None] * 2), atol=1e-5)


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ("%d.%m.%Y", ["31.01.2024", "01.02.2024", "05.02.2024"]),
        ("%m/%d/%y %H:%M", ["01/31/24 00:00", "02/01/24 00:00", "02/05/24 00:00"]),
        ("", ["2024-01-31", "2024-02-01", "2024-02-05"]),
    ],
)
def test_dates_are_read_in_the_declared_format(tmp_path, form, texts):
    column, x = declared(tmp_path, texts, f'type = "date"\nformat = "{form}"')
    assert column.mean == pytest.approx(np.mean([19753, 19754, 19758]))
    np.testing.assert_allclose(x, expected([0, 1, 5]), atol=1e-5)


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ('type = "number"', "4O"),
        ('type = "number"', "1,5"),
        ('type = "number"', "inf"),
        ('type = "number"', "1e300"),
        ('type = "number"', "1_000"),
        ('type = "number"', "?"),
        ('type = "number"\ndecimal = ","', "1.5"),
        ('type = "number"\nthousands = ","', "1,23"),
        ('type = "number"\nthousands = "."\ndecimal = ","', "1.2"),
        ('type = "number"\nunit = "kg"', "12"),
        ('type = "number"\nunit = "kg"', "12 g"),
        ('type = "date"', "2024-02-30"),
        ('type = "date"', "01.02.2024"),
        ('type = "date"\nformat = "%d.%m.%Y"', "1/2/2024"),
        ('type = "date"\nformat = "%d.%m.%Y"', "2024-01-01"),
    ],
)
def test_value_without_the_declared_form_is_an_error(tmp_path, lines, value):
    good = {"date": "2024-01-01", "kg": "1 kg"}
    text = next((each for key, each in good.items() if key in lines), "1")
    text = "01.01.2024" if "%d.%m" in lines else text
    with pytest.raises(DataError) as fault:
        declared(tmp_path, [text] * 5, lines, [value])
    assert f"all.csv: row 6, column 'v': {value!r} is not a " in str(fault.value)


def test_declared_categories_are_the_only_words(tmp_path):
    values = ["1", "2", "X"] * 4
    column, x = declared(tmp_path, values, 'type = "category"\nvalues = ["X", "1", "2", "3"]')
    assert column.values == ("X", "1", "2", "3")
    np.testing.assert_array_equal(x, np.eye(4)[[1, 2, 0] * 4])
    with pytest.raises(DataError, match=r"'v': 4 of 12 .*'Y'"):
        declared(tmp_path, ["1", "2", "Y"] * 4, 'type = "category"\nvalues = ["X", "1", "2"]')


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize("missing", [False, True])
def test_numbers_with_a_type_are_not_read_in_the_notation_of_the_schema(tmp_path, ending, missing):
    texts = ["1.234,5", "2,25", "12.000"] * 4
    declared(tmp_path, texts, 'type = "number"\ndecimal = ","\nthousands = "."')
    schema = load(spec(tmp_path / "all.csv")).format.schema
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


def test_command_writes_a_schema_and_completes_it(tmp_path, call):
    rows = [[*row[:2], f"{k % 7},5", *row[2:]] for k, row in enumerate(many(40))]
    path = write(tmp_path / "all.csv", rows, ["age", "sex", "level", "admitted", "ward", "died"])
    status, said, _ = call("schema", path, "--target", "died", "--exclude", "ward")
    assert status == 0
    assert "age: number, mean" in said
    assert "level: no clear type" in said
    out = tmp_path / "schema.toml"
    text = out.read_text().replace('type = "?"', 'type = "number"\ndecimal = ","')
    out.write_text(text)
    status, said, told = call("schema", path)
    assert status == 0, told
    assert "level: number, mean" in said
    schema = read_schema(out)
    assert schema.check_fitted(out) == schema
    assert [column.name for column in schema.columns] == ["age", "sex", "level", "admitted"]
    levels = [k % 7 + 0.5 for k in range(40)]
    assert schema.columns[2].scale == pytest.approx((np.mean(levels), np.std(levels)))
    assert load(spec(path, target="")).format.schema == schema
    status, _, told = call("schema", path, "--target", "sex")
    assert status == 2
    assert "'died'" in told
    with pytest.raises(SettingsError, match=r"'died'.*schema\.toml.*'sex'"):
        load(spec(path, target="sex"))


def test_schema_file_is_restored(tmp_path):
    schema = inferred(write(tmp_path / "all.csv", many(80)))
    (tmp_path / "s.toml").write_text(schema.to_toml())
    assert read_schema(tmp_path / "s.toml") == schema


def test_notation_of_a_site_does_not_change_the_task(tmp_path):
    schema = inferred(write(tmp_path / "all.csv", many(80)))
    first = schema.columns[0]
    for changes, is_same in (
        ({"decimal": ","}, True), ({"missing": ("?",)}, True), ({"mean": 1.0}, False),
        ({"optional": False}, False), ({"unit": "kg"}, False),
    ):  # fmt: skip
        columns = (first.model_copy(update=changes), *schema.columns[1:])
        other = schema.model_copy(update={"columns": columns})
        assert (other.digest == schema.digest) == is_same, changes
    assert schema.model_copy(update={"max_unknown": 0.5}).digest == schema.digest


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("target = 3", "target: Input should be a valid string"),
        ("[", "not valid TOML"),
        ('target = "a"\ncolumns.b.type = "word"', r"columns\.b\.type"),
        ('target = "a"\n[columns.b]\ntype = "number"\ndeviation = 0', "greater than 0"),
        ('target = "a"\n[columns.b]\ntype = "category"\ndecimal = ","', "decimal: expected only"),
        ('target = "a"\n[columns.b]\ntype = "number"\nthousands = "."', "thousands: expected"),
        ('target = "a"\n[columns.b]\ntype = "number"\nkind = "x"', r"columns\.b\.kind: unknown"),
        (
            'target = "a"\n[columns.c]\ntype = "date"\n[columns."b d"]\ntype = "number"\n'
            'decimal_sep = ","',
            r"columns\.\"b d\"\.decimal_sep: unknown field; did you mean 'decimal'\?",
        ),
        ('target = "a"\nall_missing = ["x"]', "all_missing: unknown field; did you"),
        ('target = "a"\ncolumns.b = 1', "b: expected a table"),
        ('target = "a"\ntask = "x"', "task"),
    ],
)
def test_broken_schema_raises(tmp_path, text, fault):
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(DataError, match=fault) as error:
        read_schema(tmp_path / "schema.toml")
    assert "\n" not in str(error.value)


# --- Columns, owners, and files -------------------------------------------------------------------


def test_columns_and_owners_are_chosen(tmp_path):
    path = write(tmp_path / "all.csv", many(60))
    data = load(spec(path, by="ward"))
    assert [column.name for column in data.format.schema.columns] == ["age", "sex", "admitted"]
    wards = [row[3] for row in many(60)]
    found = RunData(spec(path, by="ward", clients=3)).partition()
    assert [len(rows) for rows in found] == [wards.count(name) for name in "abc"]
    schema = load(spec(path, exclude=["ward", "sex"])).format.schema
    assert [column.name for column in schema.columns] == ["age", "admitted"]
    with pytest.raises(DataError, match=r"'wart'.*'ward'.*data\.exclude"):
        load(spec(path, exclude=["wart"]))


def test_owners_are_listed_and_small_owners_named(tmp_path, call, caplog):
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


@pytest.mark.parametrize("sites", [1, 4])
def test_table_memory_is_limited(tmp_path, sites):
    """The limit applies to the values of all files, and to the features."""
    names = [f"w{chr(97 + k % 26)}{chr(97 + k // 26)}" for k in range(150)]
    for site in range(sites):
        rows = [[names[k % 150], "f", "2024-01-01", "a", "ny"[k % 2]] for k in range(4000 // sites)]
        write(tmp_path / f"{site}.csv", rows)
    place = tmp_path / "0.csv" if sites == 1 else tmp_path
    features, last = 4 * 4000 * (150 + 1 + 1 + 1), 3 if sites > 1 else 0
    for allowed, fault in (
        (80_000 if sites == 1 else 100_000, rf"{last}\.csv: expected at most data.max-bytes"),
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


def test_each_file_is_a_client(tmp_path):
    for k, count in enumerate((20, 30)):
        write(tmp_path / f"site-{k}.csv", many(count, k))
    data = RunData(spec(tmp_path))
    assert [len(rows) for rows in data.partition()] == [20, 30]
    assert data.owners() == {"client-0": "site-0.csv", "client-1": "site-1.csv"}
    write(tmp_path / "site-2.csv", [row[1:] for row in many(9)], HEAD[1:])
    with pytest.raises(DataError, match=r"site-2\.csv: .*'age'.*site-0\.csv"):
        load(spec(tmp_path))
    with pytest.raises(SettingsError, match="has one file per client"):
        load(spec(tmp_path, by="ward"))


@pytest.mark.parametrize("site", [0, 1, 2])
@pytest.mark.parametrize(("column", "value"), [(0, "forty"), (4, "")])
def test_error_names_the_file_of_the_client(tmp_path, site, column, value):
    schema = inferred(write(tmp_path / "all.csv", many(80)))
    (tmp_path / "all.csv").unlink()
    (tmp_path / "schema.toml").write_text(schema.to_toml())
    for k, count in enumerate((20, 30, 25)):
        rows = many(count, k)
        if k == site:
            rows[-1][column] = value
        write(tmp_path / f"site-{k}.csv", rows)
    row = (20, 30, 25)[site]
    with pytest.raises(DataError, match=rf"site-{site}\.csv: row {row}, column '{HEAD[column]}'"):
        load(spec(tmp_path))


@pytest.mark.parametrize(("train", "test"), [("Train.csv", "Test.csv"), ("TRAIN.CSV", "test.csv")])
def test_names_of_parts_have_any_case(tmp_path, train, test):
    write(tmp_path / train, many(20))
    write(tmp_path / test, many(8, 1))
    data = load(spec(tmp_path))
    assert (len(data.train), len(data.test), data.groups) == (20, 8, None)


@pytest.mark.parametrize("names", [("test", "training"), ("a", "Testing"), ("a", "val")])
def test_part_is_no_client(tmp_path, names):
    for name in names:
        write(tmp_path / f"{name}.csv", many(20))
    odd = names[0] if names[0] == "test" else names[1]
    with pytest.raises(DataError, match=rf"{odd}\.csv: "):
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
    ("text", "fault"),
    [
        ("a,b,died\n1,2\n1,2,n\n", "Row #2: Expected 3 columns, got 2"),
        ("a,b,died\n1,2,n,4\n", "Row #2: Expected 3 columns, got 4"),
        ("age,died\n1,5,yes\n2,7,no\n", "Row #2: Expected 2 columns, got 3"),
        ("a,b,died\n", "no rows found"),
        ("", "not a readable table"),
        ("age, age,died\n1,2,n\n", "duplicate column 'age'"),
        ("sep=;\na;died\n1;n\n", "column 'died' not found, got 'sep='"),
    ],
)
def test_broken_csv_file_raises(tmp_path, text, fault):
    path = tmp_path / "all.csv"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        load(spec(path))
    assert fault in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "changes", "fault"),
    [
        (ROWS[:1] + [[*row[:4], ""] for row in ROWS], {}, "row 2, column 'died': the label is mi"),
        (ROWS, {"target": "dies"}, "column 'dies' not found, .*; did you mean 'died'"),
        (ROWS, {"target": ""}, "data.target must name the label column, one of age, sex"),
        (ROWS, {"exclude": HEAD[:4]}, "at least one feature column, got only 'died'"),
        (ROWS, {"by": "sex"}, "row 3, column 'sex': values of the column data.by must"),
        ([[*row[:4], "no"] for row in ROWS], {}, "expected 2 to 1000 classes, got 1 distinct"),
    ],
)
def test_error_names_row_and_column(tmp_path, rows, changes, fault):
    path = write(tmp_path / "all.csv", rows)
    with pytest.raises(DataError, match=fault) as error:
        load(spec(path, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("quoted", [False, True])
def test_separators_and_quotes_do_not_change_the_table(tmp_path, sign, end, quoted):
    head, rows = (
        ["age", "site", "died"],
        [[str(k * 7 % 50), "ns"[k % 2], "ny"[k // 2 % 2]] for k in range(40)],
    )
    mark = '"' if quoted else ""
    lines = [sign.join(f"{mark}{value}{mark}" for value in line) for line in [head, *rows]]
    (tmp_path / "a.csv").write_text("\ufeff" + end.join(lines) + end, newline="")
    data = load(spec(tmp_path / "a.csv"))
    assert [column.name for column in data.format.schema.columns] == ["age", "site"]
    assert data.train.x.equal(load(spec(write(tmp_path / "b.csv", rows, head))).train.x)


def test_many_columns_take_time_in_proportion(tmp_path):
    """Comparing all names of one table with each other would double the CPU time."""
    paths = {}
    for count in (2_000, 20_000):
        rows = [["1"] * count, ["2"] * count]
        paths[count] = write(tmp_path / f"{count}.csv", rows, [f"c{k}" for k in range(count)])

    def seconds(count, times):
        begun = time.process_time()
        for _ in range(times):
            assert len(read_table(paths[count], spec()).columns) == count
        return time.process_time() - begun

    seconds(2_000, 1)  # The first call also imports packages.
    assert seconds(20_000, 1) < 1.8 * seconds(2_000, 10)


@pytest.mark.parametrize("name", ["t.csv.gz", "T.CSV.GZ"])
def test_packed_table_is_read_whatever_the_case_of_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"age,died\n63,yes\n41,no\n"))
    assert read_table(tmp_path / name, spec()).column("age").rows() == ["63", "41"]


# --- Classes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "classes"),
    [
        ("01", ["0.0", "1.0"], ("0", "1")),
        ("01", [" 0", "01"], ("0", "1")),
        (["yes", "no"], ["yes ", "no"], ("no", "yes")),
        (["Yes", "No"], ["YES", "NO"], None),
        (["True", "False"], ["TRUE", "FALSE"], None),
        (["y", "n"], ["yes", "no"], None),
        (["True", "False"], ["1", "0"], None),
    ],
)
def test_class_in_two_spellings_is_merged_or_raises(tmp_path, one, other, classes):
    for name, words in (("a", one), ("b", other)):
        rows = [[str(k * 5 % 17), words[k // 2 % 2]] for k in range(20)]
        write(tmp_path / f"{name}.csv", rows, ["x", "died"])
    if classes is None:
        with pytest.raises(
            DataError, match=r"'died': .*(may be the same category|words for yes or no)"
        ):
            load(spec(tmp_path))
        return
    data = load(spec(tmp_path))
    assert data.format.classes == classes
    places = [classes.index(one[k // 2 % 2]) for k in range(20)]
    assert data.train.y.tolist() == places * 2


@pytest.mark.parametrize(
    "values", [[f"{k / 7:.3f}" for k in range(60)], [str(18 + k) for k in range(60)]]
)
@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_target_of_many_numbers_raises(tmp_path, values, ending):
    path = tmp_path / f"t.{ending}"
    frame = pd.DataFrame({"x": [k * 3 % 7 for k in range(60)], "died": list(map(float, values))})
    if ending == "csv":
        frame.to_csv(path, index=False)
    elif ending == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=True)
    with pytest.raises(DataError, match=r"60 .*data\.task"):
        load(spec(path))
    assert len(load(spec(path, task="classification")).format.classes) == 60


# --- Sites ----------------------------------------------------------------------------------------


def site(folder, rows, schema, head=HEAD):
    folder.mkdir()
    write(folder / "train.csv", rows, head)
    (folder / "schema.toml").write_text(schema)
    return folder


def test_site_without_a_schema_column_raises(tmp_path):
    schema = inferred(write(tmp_path / "all.csv", many(80)))
    text = schema.to_toml()
    folder = site(tmp_path / "a", many(30, 1), text)
    found = site_data(f"table:{folder}", spec=DataSpec(), classes=2, name="a")
    assert found.format.shape == (sum(schema.widths),)
    assert found.format.schema == schema
    other = site(tmp_path / "b", many(30, 2), text, ["age", "gender", *HEAD[2:]])
    with pytest.raises(DataError, match=r"train\.csv: .*'sex'"):
        site_data(f"table:{other}", spec=DataSpec(), classes=2, name="b")
    (other / "schema.toml").unlink()
    with pytest.raises(DataError, match=r"schema\.toml: "):
        site_data(f"table:{other}", spec=DataSpec(sample_kind="table"), classes=2, name="b")
    with pytest.raises(DataError, match=r"3 classes.*2"):
        site_data(f"table:{folder}", spec=DataSpec(), classes=3, name="a")
    (folder / "schema.toml").write_text(text.replace("deviation", "missing = ['x']\n# "))
    with pytest.raises(DataError, match=r"schema\.toml: .*'age'"):
        site_data(f"table:{folder}", spec=DataSpec(), classes=2, name="a")


def test_site_with_another_schema_has_another_task(tmp_path, monkeypatch):
    """Sites send a digest, so the server notices a different schema."""
    from types import SimpleNamespace

    from flwr.common import Code, GetPropertiesIns

    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "state"))
    schema = inferred(write(tmp_path / "all.csv", many(80)))
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
            node_config={"data": f"table:{folder}", "name": name}, run_config=config
        )
        said = client_fn(context).get_properties(GetPropertiesIns({}))
        assert said.status.code == Code.OK
        orders.append(said.properties["order"])
    assert orders[0] == orders[1] != orders[2]


def public_and_site(tmp_path, change, count=40):
    """Return the schema of a public table, and a site with changed words."""
    rng = np.random.default_rng(0)
    rows = [
        [str(rng.integers(30, 80)), str(rng.choice(["yes", "no"])), "01"[k % 2]]
        for k in range(count)
    ]
    head = ["age", "smoker", "died"]
    schema = inferred(write(tmp_path / "public.csv", rows, head))
    site_rows = [change(k, list(row)) for k, row in enumerate(rows)]
    return site(tmp_path / "site", site_rows, schema.to_toml(), head), schema, rows


def test_integers_with_decimals_are_the_schemas_classes(tmp_path):
    folder, schema, rows = public_and_site(tmp_path, lambda _, row: [*row[:2], f"{row[2]}.0"])
    found = labeled_split(schema, read_table(folder / "train.csv", spec()))
    assert found.x.equal(encode(schema, read_table(tmp_path / "public.csv", spec())))
    assert found.y.tolist() == [int(row[2]) for row in rows]


@pytest.mark.parametrize(
    ("words", "share"),
    [(["ja", "nein"], 1), (["YES", "NO"], 1), (["ja", "nein"], 0.3), ([""], 0.5)],
)
def test_site_with_unknown_words_raises(tmp_path, words, share):
    def foreign(k, row):
        return [row[0], words[k % len(words)] if k < share * 40 else row[1], *row[2:]]

    folder, _, _ = public_and_site(tmp_path, foreign)
    fault = rf"column 'smoker': {int(share * 40)} of 40 values, such as .*, are not in the schema"
    with pytest.raises(DataError, match=fault):
        site_data(f"table:{folder}", spec=DataSpec(), classes=2, name="a")
    text = (folder / "schema.toml").read_text()
    (folder / "schema.toml").write_text(text.replace("max_unknown = 0.2", "max_unknown = 1"))
    assert site_data(f"table:{folder}", spec=DataSpec(), classes=2, name="a").format.shape == (3,)


def test_few_unknown_words_are_counted_in_the_sites_log(tmp_path, caplog):
    folder, _, _ = public_and_site(
        tmp_path, lambda k, row: [row[0], "never" if k < 4 else row[1], *row[2:]]
    )
    caplog.set_level(logging.WARNING)
    site_data(f"table:{folder}", spec=DataSpec(), classes=2, name="a")
    assert "column 'smoker': 4 of 40 values, such as 'never', are not in the schema" in caplog.text


def test_file_is_predicted_with_the_schema_of_the_run(tmp_path, call):
    path = write(tmp_path / "all.csv", many(120))
    config = small(
        "felo", dataset=f"table:{path}", target="died", clients=2, models=["mlp"], max_samples=0,
        max_test_samples=0, partition="iid",
    )  # fmt: skip
    with without_figures():
        run(config, tmp_path / "run")
    path.unlink()  # a network needs no data
    record = open_client(tmp_path / "run", "client-0").record
    assert isinstance(record.format.schema, TableSchema)
    new = write(tmp_path / "new.csv", [row[:4] for row in many(5, 7)], HEAD[:4])
    names, x = read_inputs([new], record)
    assert names == [f"row {n}" for n in range(1, 6)]
    assert x.equal(encode(record.format.schema, read_table(new, spec())))
    status, out, _ = call("predict", tmp_path / "run", "client-0", new, "--csv")
    assert status == 0
    assert out.startswith("sample,class,probability,no,yes\nrow 1,")
    with pytest.raises(DataError, match="'sex'"):
        read_inputs([write(tmp_path / "b.csv", [["1"]], ["age"])], record)


def test_workers_that_map_the_data_have_the_schema(tmp_path):
    place = spec(write(tmp_path / "all.csv", many(60)), partition="iid")
    whole = RunData(place)
    (tmp_path / "shared").mkdir()
    whole.share(tmp_path / "shared")
    mapped = RunData(place, tmp_path / "shared")
    assert mapped.client(1).format.schema == whole.client(1).format.schema is not None


# --- Parquet and JSON lines -----------------------------------------------------------------------


def parquet(path, columns, **options):
    table = pa.table(
        {**columns, "died": pa.array((["n", "y"] * 40)[: len(next(iter(columns.values())))])}
    )
    pq.write_table(table, path, **options)
    return path


def test_parquet_values_are_converted_by_their_type(tmp_path):
    n, rng = 40, np.random.default_rng(0)
    numbers = rng.integers(0, 50, n)
    zone = datetime.timezone(datetime.timedelta(hours=5))
    moments = [datetime.datetime(2024, 1, 1 + int(v) % 20, tzinfo=zone) for v in numbers]
    columns = {
        "decimal": pa.array([Decimal(int(v)).scaleb(-1) for v in numbers], pa.decimal128(9, 1)),
        "bytes": pa.array([str(v).encode() for v in numbers]),
        "large": pa.array([str(v) for v in numbers], pa.large_string()),
        "dictionary": pa.array([str(v) for v in numbers]).dictionary_encode(),
        "half": pa.array(numbers.astype(np.float16)),
    }
    found = load(spec(parquet(tmp_path / "t.parquet", columns)))
    assert {column.type for column in found.format.schema.columns} == {"number"}
    np.testing.assert_allclose(found.train.x, np.repeat(expected(numbers), 5, 1), atol=1e-5)
    others = {
        "zoned": pa.array(moments, pa.timestamp("ns", "Asia/Karachi")),
        "flag": pa.array(numbers > 20),
        "words": pa.array(["abc"[v % 3].encode() for v in numbers]),
    }
    data = load(spec(parquet(tmp_path / "o.parquet", others)))
    assert [column.type for column in data.format.schema.columns] == [
        "date",
        "category",
        "category",
    ]
    assert data.format.schema.columns[2].values == ("a", "b", "c")
    np.testing.assert_allclose(data.train.x[:, :1], expected(numbers % 20), atol=1e-5)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([[1, 2], [3]] * 10), "lists"),
        (pa.array([{"sys": 1}, {"sys": 2}] * 10), "struct"),
        (pa.array([[("a", 1)]] * 20, pa.map_(pa.string(), pa.int64())), "map"),
        (pa.array([b"\xff\xfe", b"\x00"] * 10), "bytes that are not UTF-8 text"),
        (pa.array([datetime.timedelta(hours=1)] * 20, pa.duration("ms")), "duration"),
        (pa.nulls(20), "no values"),
    ],
)
def test_unsupported_parquet_values_raise(tmp_path, values, kind):
    numbers = pa.array([k * 7 % 60 for k in range(20)])
    path = parquet(tmp_path / "t.parquet", {"v": values, "x": numbers})
    with pytest.raises(DataError, match="'v'") as fault:
        load(spec(path))
    assert kind in fault.value.__notes__[0]
    assert load(spec(path, exclude=("v",))).train.x.shape == (20, 1)


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "dictionary"])
def test_small_parquet_file_of_a_huge_table_takes_little_memory(tmp_path, encoding):
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
    with pytest.raises(DataError):
        load(spec(path, max_bytes=100_000_000))
    assert time.process_time() - begun < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes
    assert pool.bytes_allocated() - used < 10_000_000


def test_rows_without_columns_of_a_parquet_file_are_counted_before_they_are_decoded(tmp_path):
    path = tmp_path / "t.parquet"
    codes = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int32)), pa.array(["a"]))
    pq.write_table(pa.table({"v": codes, "died": codes}), path)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"memory, got \d+"):
        read_table(path, spec(max_bytes=8_000_000))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"v": 1}\n{"v": "x"}', "Column(/v) changed from number to string in row 1"),
        ('{"v": 1, "v": 2}', "twice"),
        ('{"v": 1}\n[1]', "row 1"),
        ('{"v": 1', "row 0"),
    ],
)
def test_broken_json_file_raises(tmp_path, text, fault):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        read_table(path, spec())
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_columns_that_a_schema_lacks_are_named(tmp_path, caplog):
    path = write(tmp_path / "t.csv", many(80))
    (tmp_path / "schema.toml").write_text(inferred(path).to_toml())
    header, *rows = path.read_text().splitlines()
    lines = [f"{header},pulse", *(f"{row},{k}" for k, row in enumerate(rows))]
    path.write_text("\n".join(lines))
    load(spec(path, target=""))
    assert "not in schema.toml are not used: pulse" in caplog.text
    (tmp_path / "texts.csv").write_text("text,mood\n" + "a,good\nb,bad\n" * 4)
    place = f"text:{tmp_path / 'texts.csv'}"
    texts = DataSpec(dataset=place, label_column="mood", clients=2, min_samples=2)
    with pytest.raises(DataError, match=r"'died' not found.*schema\.toml"):
        load(texts)
