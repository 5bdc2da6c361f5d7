"""Tabular data: scikit-learn's breast cancer, Adult from files like UCI's, generated rows."""

import gzip
from collections import Counter

import numpy as np
import pytest
import sklearn.datasets
import torch
from federation import client_info, settings

from fedhet.base.errors import DataError, SettingsError
from fedhet.client_runtime.node import read_node
from fedhet.config.resolve import check, resolve
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load

JOBS = ("Private", "?", "State-gov")
ROWS = ("table", (17,))


def adult_rows(count, seed, stop=""):
    rng = np.random.default_rng(seed)
    rows = []
    for n in range(count):
        age, hours = rng.integers(17, 90), rng.integers(1, 99)
        job, sex = JOBS[rng.integers(3)], ("Male", "Female")[rng.integers(2)]
        label = (">50K" if n % 4 == 0 else "<=50K") + stop
        rows.append(
            f"{age}, {job}, {rng.integers(1000)}, HS-grad, 9, Divorced, Sales, Husband, White, "
            f"{sex}, {rng.integers(2) * 5000}, 0, {hours}, United-States, {label}"
        )
    return rows


def write_adult(folder, zipped=False):
    texts = {
        "adult.data": "\n".join([*adult_rows(80, 0), "", ""]),
        "adult.test": "\n".join(["|1x3 Cross validator", *adult_rows(40, 1, "."), ""]),
    }
    for name, text in texts.items():
        if zipped:
            with gzip.open(folder / f"{name}.gz", "wt") as file:
                file.write(text)
        else:
            (folder / name).write_text(text)
    return f"adult:{folder}"


def test_breast_cancer_is_scaled_by_its_training_set():
    dataset = load(DataSpec(dataset="breast-cancer"))
    assert dataset.train.x.shape == (455, 30)
    assert len(dataset.test) == 114
    assert dataset.format.classes == ("malignant", "benign")
    np.testing.assert_allclose(dataset.train.x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(dataset.train.x.std(0, unbiased=False), 1, atol=1e-4)


@pytest.mark.parametrize("zipped", [False, True])
def test_adult_equals_the_published_data(tmp_path, zipped):
    dataset = load(DataSpec(dataset=write_adult(tmp_path, zipped)))
    assert (len(dataset.train), len(dataset.test)) == (80, 40)
    assert dataset.format.classes == ("<=50K", ">50K")
    assert dataset.train.y.tolist() == [int(n % 4 == 0) for n in range(80)]
    assert dataset.test.y.tolist() == [int(n % 4 == 0) for n in range(40)]
    # Six numbers; then the eight columns of words, of which two have several categories here.
    assert dataset.columns == (1,) * 6 + (3, 1, 1, 1, 1, 1, 2, 1)
    assert dataset.train.x.shape[1] == sum(dataset.columns)
    ages = np.array([int(row.split(",")[0]) for row in adult_rows(80, 0)])
    np.testing.assert_allclose(dataset.train.x[:, 0], (ages - ages.mean()) / ages.std(), atol=1e-4)
    jobs = [row.split(", ")[1] for row in adult_rows(80, 0)]
    expected = [[float(job == name) for name in sorted(JOBS)] for job in jobs]
    assert dataset.train.x[:, 6:9].tolist() == expected


def test_unknown_category_has_no_feature(tmp_path):
    write_adult(tmp_path)
    (tmp_path / "adult.test").write_text(adult_rows(1, 5)[0].replace("Sales", "Astronaut"))
    dataset = load(DataSpec(dataset=f"adult:{tmp_path}"))
    assert dataset.test.x[0, 11] == 0  # the one feature of `occupation`, which is Sales


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("adult.data", "1, 2, 3", "expected 15 columns in each row, got at most 3"),
        ("adult.data", "", "not a readable table"),
        ("adult.data", adult_rows(1, 0)[0].replace("9,", "nine,", 1), "contains a word"),
        ("adult.test", adult_rows(1, 0)[0].replace("50K", "60K"), "got '>60K'"),
    ],
)
def test_malformed_file_raises(tmp_path, name, text, fault):
    write_adult(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=fault) as caught:
        load(DataSpec(dataset=f"adult:{tmp_path}"))
    assert str(tmp_path) in str(caught.value)


def test_missing_files_raise(tmp_path):
    with pytest.raises(DataError, match=r"adult\.data.*download=true"):
        load(DataSpec(dataset=f"adult:{tmp_path}"))


def test_openml_copy_is_downloaded_if_allowed(tmp_path, monkeypatch):
    import pandas

    rows = [row.split(", ") for row in adult_rows(90, 3)]
    frame = pandas.DataFrame(rows).replace("?", None)
    sampled = {}

    def fetch(**arguments):
        sampled.update(arguments)
        return sklearn.utils.Bunch(frame=frame)

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    dataset = load(DataSpec(dataset=f"adult:{tmp_path}", download=True))
    assert sampled["data_home"] == str(tmp_path)
    assert (len(dataset.train), len(dataset.test)) == (60, 30)
    assert dataset.format.classes == ("<=50K", ">50K")
    assert dataset.columns[6] == 3  # None is the category '?'


def test_failed_download_raises(tmp_path, monkeypatch):
    def fetch(**_):
        raise OSError("no network")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    with pytest.raises(DataError, match="OpenML"):
        load(DataSpec(dataset=f"adult:{tmp_path}", download=True))


def generated_spec(folder, **changes):
    chosen = {"public_dataset": "generated", "public_samples": 400, "clients": 2, **changes}
    return DataSpec(dataset=write_adult(folder), partition="iid", **chosen)


def test_generated_columns_are_permutations_of_the_training_sets(tmp_path):
    """The authors' script uses `v(randperm(end, n_public))`, so no value is drawn twice."""
    whole = load(generated_spec(tmp_path)).train.x
    widths = list(load(generated_spec(tmp_path)).columns)
    for size in (80, 50, 200):
        public = (
            RunData(generated_spec(tmp_path, public_samples=size))
            .public_set(client_info(*ROWS), labeled=False)
            .x
        )
        orders = set()
        for real, made in zip(*(torch.split(x, widths, 1) for x in (whole, public)), strict=True):
            there = Counter(map(tuple, real.tolist()))
            drawn = Counter(map(tuple, made.tolist()))
            least, most = size // 80, -(-size // 80)
            assert sum(drawn.values()) == size
            assert all(least * there[v] <= drawn[v] <= most * there[v] for v in there)
            assert drawn.keys() <= there.keys()
            orders.add(tuple(map(tuple, made.tolist())))
        assert len(orders) > 3, "columns are permuted alike"
    # Two columns of the same training values, in two orders: the draws are not shared.
    fnlwgt, age = (
        RunData(generated_spec(tmp_path))
        .public_set(client_info(*ROWS), labeled=False)
        .x[:80, [1, 0]]
        .T
    )
    rows = {tuple(row) for row in whole[:, [1, 0]].tolist()}
    assert not {*zip(fnlwgt.tolist(), age.tolist(), strict=True)} <= rows


def test_unused_rows_belong_to_no_client(tmp_path):
    spec = DataSpec(
        dataset=write_adult(tmp_path), partition="iid", clients=2, max_samples=40, min_samples=2,
        public_dataset="unused",
    )  # fmt: skip
    RunData(spec).validate()
    whole = load(spec.replace(max_samples=0, public_dataset="")).train
    used, left = load(spec).train, RunData(spec).public_set(client_info(*ROWS, 2), labeled=True)
    assert (len(used), len(left), len(whole)) == (40, 40, 80)
    rows = [Counter(map(tuple, split.x.tolist())) for split in (used, left, whole)]
    assert rows[0] + rows[1] == rows[2]
    labeled = {tuple(x): y for x, y in zip(whole.x.tolist(), whole.y.tolist(), strict=True)}
    assert [labeled[tuple(x)] for x in left.x.tolist()] == left.y.tolist()
    few = RunData(spec.replace(public_samples=12)).public_set(client_info(*ROWS), labeled=False)
    assert len(few) == 12
    assert not Counter(map(tuple, few.x.tolist())) - rows[1]
    # What the clients hold is what they hold with generated rows.
    generated = spec.replace(public_dataset="generated", public_samples=5)
    for index in (0, 1):
        one, other = (RunData(s).client(index).train.x for s in (spec, generated))
        assert torch.equal(one, other)
    assert not torch.equal(
        RunData(spec.replace(seed=1)).public_set(client_info(*ROWS), labeled=False).x, left.x
    )


def test_unused_rows_of_a_joined_dataset_are_the_rest():
    spec = DataSpec(
        dataset="digits", max_samples=700, public_dataset="unused",
        superclasses=[["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"], ["8", "9"]],
    )  # fmt: skip
    used, left = (
        x.flatten(1).numpy()
        for x in (
            load(spec).train.x,
            RunData(spec).public_set(client_info("image", (1, 8, 8), 5), labeled=True).x,
        )
    )
    whole = load(spec.replace(max_samples=0)).train.x.flatten(1).numpy()
    assert len(used) + len(left) == len(whole)
    rows = [Counter(map(bytes, part)) for part in (used, left, whole)]
    assert rows[0] + rows[1] == rows[2]


@pytest.mark.parametrize("most", [0, 80, 100])
def test_unused_rows_without_a_limit_raise(tmp_path, most):
    spec = DataSpec(dataset=write_adult(tmp_path), max_samples=most, public_dataset="unused")
    with pytest.raises(SettingsError, match=rf"data\.max-samples.*80.*{most}"):
        RunData(spec).public_set(client_info(*ROWS), labeled=False)


def test_run_may_learn_from_unused_rows(tmp_path):
    """Duplicates of a client's rows are no leak, because Adult has some."""
    write_adult(tmp_path)
    rows = adult_rows(60, 0)
    (tmp_path / "adult.data").write_text("\n".join(rows + rows))
    chosen = {
        "data.dataset": f"adult:{tmp_path}", "data.partition": "iid", "data.max-samples": 60,
        "data.public-dataset": "unused", "models.pool": "sk-tree", "clients": 2,
    }  # fmt: skip
    config = resolve({**settings("cofed"), **chosen})
    check(config)
    node = read_node({"partition-id": 0, "num-partitions": 2}, config.run, str(tmp_path / "state"))
    assert len(config.method.client(config, node).public) == 60


def test_generated_rows_depend_only_on_the_seed(tmp_path):
    spec = generated_spec(tmp_path)
    one, same, other = (
        RunData(generated_spec(tmp_path, seed=s)).public_set(client_info(*ROWS), labeled=False).x
        for s in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert RunData(spec).client(0).space == (0, 1)


def test_generated_rows_of_bytes_are_stored_as_the_clients_are(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        x = rng.integers(0, 256, (20, 5), dtype=np.uint8)
        np.savez(tmp_path / part / "0.npz", x=x, y=np.arange(20) % 3)
    spec = DataSpec(
        dataset=f"npz:{tmp_path}", clients=1, public_dataset="generated", public_samples=50
    )
    public, own = (
        RunData(spec).public_set(client_info("table", (5,)), labeled=False).x,
        RunData(spec).client(0),
    )
    assert public.dtype == own.train.x.dtype == torch.uint8
    held = torch.cat([own.train.x, own.test.x])
    for column in range(5):
        assert set(public[:, column].tolist()) <= set(held[:, column].tolist())


def test_generated_rows_without_a_table_or_number_raise():
    generated = {"method": "local", "data.public-dataset": "generated"}
    with pytest.raises(SettingsError, match=r"\[1, 8, 8\]"):
        check(resolve({**generated, "data.public-samples": 5}))
    chosen = {**generated, "data.dataset": "breast-cancer", "models.pool": "mlp"}
    with pytest.raises(SettingsError, match=r"public-samples.*1"):
        check(resolve(chosen))
