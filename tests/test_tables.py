"""Tabular data: scikit-learn's breast cancer, Adult from files like UCI's, generated rows."""

import gzip

import numpy as np
import pytest
import sklearn.datasets
import torch

from fedhet.config.resolve import check, resolve
from fedhet.data import DataSpec, client_data, load, public_set, validate
from fedhet.errors import DataError, SettingsError

JOBS = ("Private", "?", "State-gov")


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
    assert dataset.classes == ("malignant", "benign")
    np.testing.assert_allclose(dataset.train.x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(dataset.train.x.std(0, unbiased=False), 1, atol=1e-4)


@pytest.mark.parametrize("zipped", [False, True])
def test_adult_as_it_is_published(tmp_path, zipped):
    dataset = load(DataSpec(dataset=write_adult(tmp_path, zipped)))
    assert (len(dataset.train), len(dataset.test)) == (80, 40)
    assert dataset.classes == ("<=50K", ">50K")
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


def test_a_category_that_training_lacks_is_none_of_its_features(tmp_path):
    write_adult(tmp_path)
    (tmp_path / "adult.test").write_text(adult_rows(1, 5)[0].replace("Sales", "Astronaut"))
    dataset = load(DataSpec(dataset=f"adult:{tmp_path}"))
    assert dataset.test.x[0, 11] == 0  # the one feature of `occupation`, which is Sales


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("adult.data", "1, 2, 3", "row 1 has 3 columns, Adult has 15"),
        ("adult.data", "", "holds no rows"),
        ("adult.data", adult_rows(1, 0)[0].replace("9,", "nine,", 1), "holds a word"),
        ("adult.test", adult_rows(1, 0)[0].replace("50K", "60K"), "the class '>60K'"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, name, text, fault):
    write_adult(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=fault) as caught:
        load(DataSpec(dataset=f"adult:{tmp_path}"))
    assert str(tmp_path) in str(caught.value)


def test_absent_files_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"adult.data and adult.test.*download=true"):
        load(DataSpec(dataset=f"adult:{tmp_path}"))


def test_openmls_copy_where_it_may_be_downloaded(tmp_path, monkeypatch):
    import pandas

    rows = [row.split(", ") for row in adult_rows(90, 3)]
    frame = pandas.DataFrame(rows).replace("?", None)
    asked = {}

    def fetch(**arguments):
        asked.update(arguments)
        return sklearn.utils.Bunch(frame=frame)

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    dataset = load(DataSpec(dataset=f"adult:{tmp_path}", download=True))
    assert asked["data_home"] == str(tmp_path)
    assert (len(dataset.train), len(dataset.test)) == (60, 30)
    assert dataset.classes == ("<=50K", ">50K")
    assert dataset.columns[6] == 3  # None is the category '?'


def test_a_failed_download_is_one_line(tmp_path, monkeypatch):
    def fetch(**_):
        raise OSError("no network")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    with pytest.raises(DataError, match="cannot be downloaded from OpenML: no network"):
        load(DataSpec(dataset=f"adult:{tmp_path}", download=True))


def generated_spec(folder, **changes):
    chosen = {"public_dataset": "generated", "public_samples": 400, "clients": 2, **changes}
    return DataSpec(dataset=write_adult(folder), partition="iid", **chosen)


def test_generated_rows_hold_each_columns_own_values(tmp_path):
    spec = generated_spec(tmp_path)
    validate(spec)
    train, public = load(spec).train.x, public_set(spec, (17,), None).x
    assert public.shape == (400, 17)
    for real, made in zip(
        *(torch.split(x, list(load(spec).columns), 1) for x in (train, public)), strict=True
    ):
        valid = {tuple(row) for row in real.tolist()}
        assert {tuple(row) for row in made.tolist()} <= valid
        # As frequent as in the training set, to five standard errors.
        assert torch.all((made.mean(0) - real.mean(0)).abs() <= 5 * real.std(0) / 20 + 1e-6)
    # Columns are drawn apart: some row is nobody's.
    assert not {tuple(row) for row in public.tolist()} <= {tuple(row) for row in train.tolist()}


def test_generated_rows_hang_on_the_seed_alone(tmp_path):
    spec = generated_spec(tmp_path)
    one, same, other = (
        public_set(generated_spec(tmp_path, seed=s), (17,), None).x for s in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert client_data(spec, 0).space == (0, 1)


def test_generated_rows_of_bytes_are_scaled_as_the_clients_are(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        x = rng.integers(0, 256, (20, 5), dtype=np.uint8)
        np.savez(tmp_path / part / "0.npz", x=x, y=np.arange(20) % 3)
    spec = DataSpec(
        dataset=f"npz:{tmp_path}", clients=1, public_dataset="generated", public_samples=50
    )
    public, own = public_set(spec, (5,), None).x, client_data(spec, 0)
    assert public.dtype == torch.float32
    held = torch.cat([own.train.x, own.test.x])
    for column in range(5):
        assert set(public[:, column].tolist()) <= set(held[:, column].tolist())


def test_generated_rows_need_a_table_and_a_number():
    generated = {"method": "local", "data.public-dataset": "generated"}
    with pytest.raises(SettingsError, match=r"for tables.*\[1, 8, 8\]"):
        check(resolve({**generated, "data.public-samples": 5}))
    chosen = {**generated, "data.dataset": "breast-cancer", "models.pool": "mlp"}
    with pytest.raises(SettingsError, match=r"public-samples = 0: must be at least 1"):
        check(resolve(chosen))
