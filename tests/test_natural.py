"""Naturally partitioned data: LEAF's JSON, WILDS' directories, and signals of persons."""

from __future__ import annotations

import csv
import json

import numpy as np
import PIL.Image
import pytest
import torch
from federation import run

from fedhet.base.errors import DataError, SettingsError
from fedhet.config.resolve import resolve
from fedhet.config.sources import preset_names, read_preset
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData

SIGNALS = [
    f"{what}_{axis}" for what in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
]  # fmt: skip


def store(dataset, clients=2, **changes):
    changes = {"min_samples": 1, "test_fraction": 0.25, **changes}
    return RunData(DataSpec(dataset=dataset, clients=clients, **changes))


def leaf(root, parts, users):
    """Write LEAF's files: {part: {file: {user: (x, y)}}}, or one file per user and part."""
    for part in parts:
        (root / part).mkdir(parents=True)
        for number, (user, (x, y)) in enumerate(users.items()):
            found = {"users": [user], "num_samples": [len(y)],
                     "user_data": {user: {"x": x, "y": y}}}  # fmt: skip
            (root / part / f"all_data_{number}.json").write_text(json.dumps(found))
    return root


# LEAF


def written_signs(rng, count):
    return rng.random((count, 784)).round(4).tolist(), rng.integers(0, 62, count).tolist()


def test_femnist_gives_each_writer_a_client(tmp_path):
    rng = np.random.default_rng(0)
    users = {name: written_signs(rng, n) for name, n in (("f0", 9), ("f1", 5), ("f2", 12))}
    leaf(tmp_path, ["train", "test"], users)
    data = store(f"femnist:{tmp_path}")
    assert data.dataset.format.shape == (1, 28, 28)
    assert len(data.dataset.format.classes) == 62
    assert data.dataset.format.classes[10] == "A"
    assert len(data.common_test) == 26
    sizes = [len(rows) for rows in data.partition()]
    assert sizes == [9, 12], "the two writers with the most samples"
    for index, user in enumerate(("f0", "f2")):
        own = data.client(index)
        every = torch.cat([own.train.x, own.test.x])
        x, y = users[user]
        expected = np.rint(255 * np.array(x)).astype(np.uint8).reshape(-1, 1, 28, 28)
        assert sorted(map(bytes, every.numpy())) == sorted(map(bytes, expected))
        assert sorted(torch.cat([own.train.y, own.test.y]).tolist()) == sorted(y)
    with pytest.raises(DataError, match=r"clients = 4.*3.*femnist"):
        store(f"femnist:{tmp_path}", 4).partition()


def test_shakespeare_reads_letters_and_predicts_the_next(tmp_path):
    play = "That, poor contempt, or claim'd thou slept so faithful, I may contrive our fathe"
    users = {"ROMEO": ([play, play[:40], "a~b"], list("rst")), "NURSE": (["x", "y"], ["\n", "}"])}
    leaf(tmp_path, ["train"], users)
    data = store(f"shakespeare:{tmp_path}", test_fraction=0.34)
    first = data.dataset.train
    assert data.common_test is None
    letters = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
    assert len(letters) == 80
    assert [letters[n - 1] for n in first.x[0].tolist()] == list(play)
    assert first.x[1].tolist()[40:] == [0] * 40
    assert first.x[2].tolist()[:3] == [letters.index("a") + 1, 81, letters.index("b") + 1]
    assert [letters[n] for n in first.y.tolist()] == [*"rst", "\n", "}"]
    assert data.dataset.format.shape == (0, 80, 82)
    assert len(data.dataset.format.classes) == 80


@pytest.mark.parametrize(
    ("name", "users", "fault"),
    [
        (
            "femnist",
            {"a": ([[0.1] * 783], [1])},
            "user 'a': expected 784 numbers per image, got 783",
        ),
        ("femnist", {"a": ([[1.5] * 784], [1])}, "user 'a': x must be in .0, 1."),
        ("femnist", {"a": ([[0.5] * 784], [62])}, "labels in y must be 0 to 61, got 62"),
        ("femnist", {"a": ([[0.5] * 784], [1, 2])}, "the same length, got 1 and 2"),
        ("femnist", {"a": ([["?"] * 784], [1])}, "user 'a': could not convert"),
        ("shakespeare", {"a": (["x" * 81], ["a"])}, "texts of 1 to 80 letters"),
        ("shakespeare", {"a": (["x"], ["ä"])}, "unknown letter in y, got 'ä'"),
    ],
)
def test_invalid_leaf_file_raises(name, users, fault, tmp_path):
    leaf(tmp_path, ["train"], users)
    with pytest.raises(DataError, match=fault):
        store(f"{name}:{tmp_path}").dataset  # noqa: B018


def test_other_files_raise_for_leaf(tmp_path):
    with pytest.raises(DataError, match=r"\.json"):
        store(f"femnist:{tmp_path}").dataset  # noqa: B018
    for text in ("[1]", "{", '{"users": []}', '{"user_data": [1]}', "[" * 100_000):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(DataError, match=r"a\.json: "):
            store(f"femnist:{tmp_path}").dataset  # noqa: B018
    (tmp_path / "a.json").write_text('{"user_data": {}}' + " " * 2000)
    with pytest.raises(DataError, match=r"data\.max-bytes"):
        store(f"femnist:{tmp_path}", max_bytes=1000).dataset  # noqa: B018


# WILDS


def picture(path, value, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path)


def metadata(root, rows):
    root.mkdir(parents=True, exist_ok=True)
    with (root / "metadata.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


@pytest.fixture
def tissue(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))
    rows = []
    for number in range(30):
        center, patient = number % 5, f"{number % 7:03d}"
        row = {"": number, "patient": patient, "node": 4, "x_coord": 32 * number, "y_coord": 64,
               "tumor": number // 3 % 2, "slide": 0, "center": center, "split": 0}  # fmt: skip
        rows.append(row)
        name = f"patch_patient_{patient}_node_4_x_{32 * number}_y_64.png"
        picture(tmp_path / "c" / "patches" / f"patient_{patient}_node_4" / name, number)
    metadata(tmp_path / "c", rows)
    return tmp_path / "c"


def test_camelyon17_gives_each_hospital_a_client_but_the_one_of_the_test(tissue):
    data = store(f"camelyon17:{tissue}", 4)
    assert data.dataset.format.shape == (3, 8, 8)
    assert data.dataset.format.classes == ("normal", "tumor")
    for index, center in enumerate((0, 1, 3, 4)):
        own = data.client(index)
        values = torch.cat([own.train.x, own.test.x])[:, 0, 0, 0]
        assert sorted(values.tolist()) == [n for n in range(30) if n % 5 == center]
        labels = torch.cat([own.train.y, own.test.y])
        assert sorted(zip(values.tolist(), labels.tolist(), strict=True)) == [
            (n, n // 3 % 2) for n in range(30) if n % 5 == center
        ]
    assert data.common_test.x[:, 0, 0, 0].tolist() == [n for n in range(30) if n % 5 == 2]


def test_subset_of_wilds_is_drawn_before_it_is_decoded(tissue, tmp_path, monkeypatch):
    data = store(f"camelyon17:{tissue}", 2, max_samples=12, max_test_samples=3)
    assert (len(data.dataset.train), len(data.common_test)) == (12, 3)
    drawn = torch.cat([data.dataset.train.x, data.common_test.x])[:, 0, 0, 0].tolist()
    for path in tissue.rglob("*.png"):
        if int(path.stem.split("_x_")[1].split("_")[0]) // 32 not in drawn:
            path.write_text("no image, and not read")
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "other"))
    again = store(f"camelyon17:{tissue}", 2, max_samples=12, max_test_samples=3)
    assert torch.equal(data.dataset.train.x, again.dataset.train.x)


def test_iwildcam_gives_each_camera_a_client(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))
    rows = []
    for number in range(24):
        part = ("train", "train", "test", "id_val")[number % 4]
        rows.append({"split": part, "location_remapped": number // 8 + 100, "y": number % 3,
                     "filename": f"{number}.jpg"})  # fmt: skip
        picture(tmp_path / "w" / "train" / f"{number}.jpg", number, (6 + number % 2, 8))
    metadata(tmp_path / "w", rows)
    data = store(f"iwildcam:{tmp_path / 'w'}", 3, image_size=8)
    assert [len(each) for each in data.partition()] == [4, 4, 4]
    assert len(data.common_test) == 6
    assert data.dataset.format.classes == ("0", "1", "2")
    values = data.client(1).train.x[:, 0, 0, 0].tolist()
    assert set(values) <= {8, 9, 12, 13}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"filename": "../../secret.png"}, "image paths must be below"),
        (
            {"filename": "/etc/passwd"},
            "not a readable image|no such file|file not found|must be below",
        ),
        ({"y": -1}, "labels in y must be 0 to 65535, got -1"),
        ({"location_remapped": ""}, "must not have missing values"),
        ({"split": "val"}, "no rows of the training set found"),
    ],
)
def test_invalid_wilds_metadata_raises(change, fault, tmp_path):
    row = {"split": "train", "location_remapped": 1, "y": 0, "filename": "a.png"}
    picture(tmp_path / "train" / "a.png", 3)
    metadata(tmp_path, [{**row, **change}])
    with pytest.raises(DataError, match=fault):
        store(f"iwildcam:{tmp_path}").dataset  # noqa: B018
    metadata(tmp_path, [{"split": "train", "y": 0}])
    with pytest.raises(DataError, match=r"y, location_remapped"):
        store(f"iwildcam:{tmp_path}").dataset  # noqa: B018


@pytest.fixture
def lesions(tmp_path, monkeypatch):
    """Write images with gray values 0 to 35.

    Center k of 3 has the values with remainder k, a quarter of them for tests.
    """
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))
    root = tmp_path / "isic"
    rows = []
    for n in range(36):
        fold, center = ("test" if n % 4 == 0 else "train"), n % 3
        name = f"ISIC_{n:07d}" + ("_downsampled" if n % 5 == 0 else "")
        rows.append({"image": name, "MEL": 0.0, "NV": 1.0, "target": n % 8, "center": center,
                     "fold": fold, "fold2": f"{fold}_{center}"})  # fmt: skip
        size = (10, 8 + n % 2)
        picture(root / "ISIC_2019_Training_Input_preprocessed" / f"{name}.jpg", 7 * n, size)
    metadata(root, rows)
    (root / "metadata.csv").rename(root / "train_test_split")
    return root


def test_fed_isic2019_gives_each_center_its_own_training_and_test_images(lesions):
    data = store(f"fed-isic2019:{lesions}", 3, image_size=8)
    assert data.dataset.format.shape == (3, 8, 8)
    assert data.dataset.format.classes == ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    assert data.common_test is None
    for center in range(3):
        own = data.client(center)
        for split, is_test in ((own.train, False), (own.test, True)):
            values = (split.x[:, 0, 4, 4].float() / 7).round().long().tolist()
            assert values == [n for n in range(36) if n % 3 == center and (n % 4 == 0) == is_test]
            assert split.y.tolist() == [n % 8 for n in values]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("ISIC_0000004", "../other"), "image paths must be below"),
        ((",4,1,test,", ",8,1,test,"), "target must be 0 to 7, got 8"),
        (
            ("test", "val"),
            "center 0: expected at least 2 training images and 1 test image, got 9 and 0",
        ),
        (("fold,", "part,"), "expected columns target, center, image, fold"),
    ],
)
def test_invalid_fed_isic2019_raises(change, fault, lesions):
    table = lesions / "train_test_split"
    text = table.read_text()
    assert change[0] in text
    table.write_text(text.replace(*change))
    with pytest.raises(DataError, match=fault):
        store(f"fed-isic2019:{lesions}", 3, image_size=8).dataset  # noqa: B018


def test_fed_isic2019_with_max_samples_raises(lesions):
    with pytest.raises(SettingsError, match=r"data\.max-samples"):
        store(f"fed-isic2019:{lesions}", 3, image_size=8, max_samples=5).dataset  # noqa: B018


# Persons


@pytest.fixture
def phones(tmp_path):
    rng = np.random.default_rng(1)
    (tmp_path / "activity_labels.txt").write_text("1 WALKING\n2 SITTING\n3 LAYING\n")
    for part, persons in (("train", (1, 3, 3, 1, 3, 5)), ("test", (2, 2, 4))):
        folder = tmp_path / part / "Inertial Signals"
        folder.mkdir(parents=True)
        np.savetxt(tmp_path / part / f"subject_{part}.txt", persons, "%d")
        np.savetxt(
            tmp_path / part / f"y_{part}.txt", [n % 3 + 1 for n in range(len(persons))], "%d"
        )
        for name in SIGNALS:
            np.savetxt(
                folder / f"{name}_{part}.txt", rng.normal(size=(len(persons), 128)), "%16.7e"
            )
    return tmp_path


def test_har_gives_each_person_of_the_training_part_a_client(phones):
    data = store(f"har:{phones}", 2)
    assert data.dataset.format.shape == (9, 128)
    assert data.dataset.format.classes == ("WALKING", "SITTING", "LAYING")
    assert [len(rows) for rows in data.partition()] == [2, 3], "persons 1 and 3"
    assert len(data.common_test) == 3
    for channel, name in enumerate(SIGNALS):
        table = np.loadtxt(phones / "train" / "Inertial Signals" / f"{name}_train.txt")
        found = data.dataset.train.x[:, channel].numpy()
        np.testing.assert_allclose(found, table, rtol=1e-6)
    assert data.dataset.train.y.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("activity_labels.txt", "WALKING\n", "one line for each activity"),
        ("train/y_train.txt", "1\n2\n3\n4\n1\n1\n", "activities must be numbered from 1 to 3"),
        ("train/y_train.txt", "1\n2\n", "must have the same number of windows"),
        ("train/subject_train.txt", "1.5\n1\n1\n1\n1\n1\n", "one integer per line"),
        ("train/Inertial Signals/body_acc_y_train.txt", "a b\n", "not a readable table"),
        ("train/Inertial Signals/body_acc_y_train.txt", "1 nan\n", "must be finite"),
    ],
)
def test_invalid_har_file_raises(file, text, fault, phones):
    (phones / file).write_text(text)
    with pytest.raises(DataError, match=fault):
        store(f"har:{phones}").dataset  # noqa: B018


def recording(activities, seed):
    """Return PAMAP2's table: time, activity, heart rate, and three units of 17 columns."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(len(activities), 54))
    table[:, 1] = activities
    return table


def test_pamap2_cuts_windows_of_one_activity(tmp_path):
    (tmp_path / "Protocol").mkdir()
    first = recording([1] * 600 + [0] * 300 + [24] * 256 + [1] * 255, 0)
    first[10:14, 4] = np.nan  # a gap of the hand's acceleration
    second = recording([4] * 800, 1)
    for name, table in (("subject101", first), ("subject102", second)):
        np.savetxt(tmp_path / "Protocol" / f"{name}.dat", table, "%.6f")
    data = store(f"pamap2:{tmp_path}")
    assert data.dataset.format.shape == (27, 256)
    assert data.common_test is None
    assert [len(rows) for rows in data.partition()] == [3, 3]
    names = [data.dataset.format.classes[label] for label in data.dataset.train.y.tolist()]
    assert names == ["lying", "lying", "rope jumping", *["walking"] * 3]
    x = data.dataset.train.x.numpy()
    np.testing.assert_allclose(x[1, 1], first[256:512, 5] / 9.81, atol=1e-5)
    np.testing.assert_allclose(x[2, 3], first[900:1156, 10], atol=1e-5)  # the hand's gyroscope
    np.testing.assert_allclose(x[3, 26], second[:256, 49] / 50, atol=1e-5)  # ankle, magnetometer z
    gap = np.interp(np.arange(9, 15), [9, 14], first[[9, 14], 4]) / 9.81
    np.testing.assert_allclose(x[0, 0, 9:15], gap, atol=1e-5)


def test_invalid_pamap2_file_raises(tmp_path):
    with pytest.raises(DataError, match=r"subject\*\.dat"):
        store(f"pamap2:{tmp_path}").dataset  # noqa: B018
    np.savetxt(tmp_path / "subject101.dat", recording([0] * 300, 0))
    with pytest.raises(DataError, match="256"):
        store(f"pamap2:{tmp_path}").dataset  # noqa: B018
    np.savetxt(tmp_path / "subject101.dat", np.zeros((3, 5)))
    with pytest.raises(DataError, match=r"54 columns.*5"):
        store(f"pamap2:{tmp_path}").dataset  # noqa: B018


# Runs


def test_run_trains_on_natural_data(phones, tmp_path):
    rng = np.random.default_rng(0)
    users = {f"f{n}": written_signs(rng, 12) for n in range(3)}
    leaf(tmp_path / "leaf", ["train", "test"], users)
    plays = {f"r{n}": (["to be or not"] * 8, list("abcdefgh")) for n in range(3)}
    leaf(tmp_path / "plays", ["train"], plays)
    for number, (place, pool, method, fraction) in enumerate(
        (
            (f"femnist:{tmp_path / 'leaf'}", ["cnn2", "mlp"], "felo", 0.25),
            (f"shakespeare:{tmp_path / 'plays'}", ["text-bag"], "fedavg", 0.25),
            (f"har:{phones}", ["signal-cnn2"], "local", 0.0),
        )
    ):
        config = resolve(
            {"method": method, "clients": 2, "rounds": 1, "data.dataset": place,
             "models.pool": pool, "data.min-samples": 2, "engine.backend": "inline",
             "data.test-fraction": fraction, "training.local-epochs": 1}
        )  # fmt: skip
        assert run(config, tmp_path / f"run-{number}")["rounds"] == 1


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("leaf-femnist", "femnist"), ("leaf-shakespeare", "shakespeare"), ("har", "har"),
        ("wilds-iwildcam", "iwildcam"), ("wilds-camelyon17", "camelyon17"), ("pamap2", "pamap2"),
    ],
)  # fmt: skip
def test_each_dataset_has_a_preset(preset, name):
    assert preset in preset_names()
    found = resolve({**read_preset(preset), "method": "felo"}).run
    assert found.data.dataset == f"{name}:data/{name}"
