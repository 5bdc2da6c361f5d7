"""External data and models: MedMNIST, the Hugging Face Hub, and pools with multiples."""

import json

import numpy as np
import PIL.Image
import pytest
from federation import run, small

from fedhet.base.errors import DataError, SettingsError
from fedhet.config.resolve import absolute, resolve
from fedhet.config.sources import parse_pairs
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load
from fedhet.models import assign


def spec(dataset, **changes):
    return DataSpec(dataset=dataset, **changes)


# --- MedMNIST ---------------------------------------------------------------------------------


def medmnist(path, channels=0, sizes=(60, 12, 20), side=8, **changes):
    """Write a file in MedMNIST's format, and return its arrays."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, size in zip(("train", "val", "test"), sizes, strict=True):
        shape = (size, side, side) + ((channels,) if channels else ())
        arrays[f"{part}_images"] = rng.integers(0, 256, shape, np.uint8)
        arrays[f"{part}_labels"] = np.arange(size, dtype=np.uint8)[:, None] % 3
    arrays |= changes
    np.savez_compressed(path, **{k: v for k, v in arrays.items() if v is not None})
    return arrays


@pytest.mark.parametrize("channels", [0, 3])
def test_medmnist_file_is_read(tmp_path, channels):
    arrays = medmnist(tmp_path / "pathmnist.npz", channels)
    found = load(spec(f"medmnist:{tmp_path}/pathmnist.npz"))
    assert found.format.classes == ("0", "1", "2")
    assert (len(found.train), len(found.test)) == (72, 20)
    assert found.format.shape == (3 if channels else 1, 8, 8)
    for image, row in ((arrays["train_images"][5], 5), (arrays["val_images"][2], 62)):
        pixels = image.transpose(2, 0, 1) if channels else image[None]
        assert found.train.x[row].tolist() == pixels.tolist()
    assert found.train.y[60:].tolist() == arrays["val_labels"][:, 0].tolist()
    assert found.test.x[3, 0, 1, 2] == arrays["test_images"][3][1][2].reshape(-1)[0]


def objects(count):
    return np.array([{}] * count)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"val_labels": None}, "array 'val_labels' not found, got .*; MedMNIST files contain"),
        ({"train_labels": np.zeros((60, 14), np.uint8)}, "multi-label datasets are unsupp"),
        ({"train_images": np.zeros((60, 8, 8, 8), np.uint8)}, "volumes are unsupported"),
        ({"train_images": np.zeros((60, 8, 8), np.float32)}, "must be uint8"),
        ({"test_images": np.zeros((20, 9, 9), np.uint8)}, "test_images: samples must have shape"),
        ({"test_images": np.zeros((19, 8, 8), np.uint8)}, "in test, got 19 images and 20 labels"),
        ({"val_labels": -np.ones((12, 1), np.int8)}, "must be 0 to 65535, got -1"),
        ({"val_labels": objects(12)}, "pickled objects are unsupported"),
    ],
)
def test_invalid_file_raises(tmp_path, changes, fault):
    medmnist(tmp_path / "x.npz", **changes)
    with pytest.raises(DataError, match=fault):
        load(spec(f"medmnist:{tmp_path}/x.npz"))


def test_missing_broken_or_oversized_file_raises(tmp_path):
    with pytest.raises(DataError, match="Download"):
        load(spec(f"medmnist:{tmp_path}/none.npz"))
    (tmp_path / "odd.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"\.npz"):
        load(spec(f"medmnist:{tmp_path}/odd.npz"))
    medmnist(tmp_path / "x.npz")
    with pytest.raises(DataError, match=r"data\.max-bytes = 1000 bytes"):
        load(spec(f"medmnist:{tmp_path}/x.npz", max_bytes=1000))


def test_run_on_medmnist(tmp_path):
    medmnist(tmp_path / "bloodmnist.npz", channels=3, sizes=(120, 20, 30))
    config = small(
        "felo", dataset=f"medmnist:{tmp_path}/bloodmnist.npz", rounds=1, clients=2, max_samples=0,
        models="mlp", partition="iid",
    )  # fmt: skip
    summary = run(config, tmp_path / "run")
    assert set(summary["accuracy"]) == {"personal", "common"}


# --- the Hugging Face Hub ---------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A directory that the library `datasets` reads, with a separate cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    from datasets import ClassLabel, Dataset, Features, Image, Value

    rng = np.random.default_rng(0)
    folder = tmp_path / "hub"
    folder.mkdir()

    def write(split, count, side=8, mode="L", names=("cat", "dog"), size_of=None):
        shape = (side, side) if mode == "L" else (side, side, 3)
        images = [PIL.Image.fromarray(rng.integers(0, 256, shape, np.uint8)) for _ in range(count)]
        if size_of:
            images[-1] = images[-1].resize(size_of)
        rows = {
            "picture": images,
            "label": [number % len(names) for number in range(count)],
            "text": [f"word {number}" for number in range(count)],
        }
        features = Features(
            picture=Image(), label=ClassLabel(names=list(names)), text=Value("string")
        )
        Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")
        return images

    return folder, write


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_of_the_hub_are_read(hub, mode):
    folder, write = hub
    images, tests = write("train", 30, mode=mode), write("test", 10, mode=mode)
    found = load(spec(f"hf:{folder}"))
    assert found.format.classes == ("cat", "dog")
    assert (len(found.train), len(found.test)) == (30, 10)
    for x, image in ((found.train.x[7], images[7]), (found.test.x[2], tests[2])):
        pixels = np.asarray(image)
        expected = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
        assert x.tolist() == expected.tolist()
    assert found.train.y.tolist() == [number % 2 for number in range(30)]


def test_column_of_a_hub_dataset_names_owners(tmp_path, monkeypatch):
    from datasets import Dataset, DatasetDict, Image

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    images = [PIL.Image.new("L", (4, 4), row) for row in range(24)]
    columns = {"image": images, "label": [row % 2 for row in range(24)]}
    columns["ward"] = [f"ward {row % 3}" for row in range(24)]
    rows = Dataset.from_dict(columns).cast_column("image", Image())
    (tmp_path / "files").mkdir()
    rows.to_parquet(tmp_path / "files" / "train.parquet")
    rows.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": rows, "test": rows.select([0, 1])}).save_to_disk(tmp_path / "both")
    monkeypatch.chdir(tmp_path)
    for place in ("files", "./saved", "both", f"{tmp_path}/saved"):
        given = spec(f"hf:{place}", by="ward", clients=3, min_samples=2)
        data = RunData(given)
        assert data.dataset.group_names == ("ward 0", "ward 1", "ward 2")
        for index in range(3):
            values = data.dataset.train.take(data.partition()[index]).x[:, 0, 0, 0]
            assert values.tolist() == list(range(index, 24, 3))
        assert (data.common_test is not None) == (place == "both")
    with pytest.raises(DataError, match=r"'wards'.*data\.by"):
        load(spec("hf:files", by="wards"))


def test_saved_datasets_do_not_lead_to_other_files(tmp_path):
    from datasets import Dataset, Image

    rows = Dataset.from_dict({"image": [PIL.Image.new("L", (4, 4))] * 4, "label": [0, 1, 0, 1]})
    rows = rows.cast_column("image", Image())
    rows.save_to_disk(tmp_path / "other")
    rows.save_to_disk(tmp_path / "saved")
    state = tmp_path / "saved" / "state.json"
    (file,) = (tmp_path / "other").glob("*.arrow")
    for path in (f"../other/{file.name}", str(file)):
        state.write_text(
            json.dumps({**json.loads(state.read_text()), "_data_files": [{"filename": path}]})
        )
        with pytest.raises(DataError, match="outside"):
            load(spec(f"hf:{tmp_path / 'saved'}"))
    (tmp_path / "saved" / file.name).unlink()
    (tmp_path / "saved" / file.name).symlink_to(file)
    state.write_text((tmp_path / "other" / "state.json").read_text())
    with pytest.raises(DataError, match="outside"):
        load(spec(f"hf:{tmp_path / 'saved'}"))


def test_missing_test_split_gives_no_common_test_set(hub):
    folder, write = hub
    write("train", 10)
    assert load(spec(f"hf:{folder}")).test is None


def test_images_of_several_sizes_are_resized_or_refused(hub):
    folder, write = hub
    write("train", 6, size_of=(5, 9))
    with pytest.raises(DataError, match=r"image 5: .*5 x 9.*data\.image-size"):
        load(spec(f"hf:{folder}"))
    assert load(spec(f"hf:{folder}", image_size=4)).format.shape == (1, 4, 4)


def test_texts_of_the_hub_are_read(hub):
    folder, write = hub
    write("train", 6)
    found = load(spec(f"hf:{folder}", sample_kind="text"))
    assert found.format.shape[2] == 8192
    assert len(set(map(tuple, found.train.x.tolist()))) == 6
    with pytest.raises(DataError, match=r"'words'.*data\.text-column"):
        load(spec(f"hf:{folder}", sample_kind="text", text_column="words"))


def test_another_column_may_hold_the_classes(hub):
    folder, write = hub
    write("train", 6)
    assert len(load(spec(f"hf:{folder}", label_column="text")).format.classes) == 6
    assert load(spec(f"hf:{folder}", label_column="none")).format.classes == ("cat", "dog")


def test_oversized_dataset_raises(hub):
    folder, write = hub
    write("train", 6)
    with pytest.raises(DataError, match=r"data\.max-bytes = 100 bytes"):
        load(spec(f"hf:{folder}", max_bytes=100))


CARDS = {
    "the directory above": "data_files: ../secret.parquet",
    "an absolute path": "data_files: {outside}/secret.parquet",
    "a home directory": "data_files: ~/secret.parquet",
    "a glob above": "data_files: [x/../../*.parquet]",
    "a split of its own": "data_files: [{{split: train, path: ../*.parquet}}]",
    "a base directory": "data_dir: ../outside",
    "a page": "data_files: {{train: http://127.0.0.1:9/secret.parquet}}",
    "the hub": "data_files: hf://datasets/nobody/nothing/a.parquet",
    "a page by way of an archive": "data_files: zip://a.csv::https://127.0.0.1:9/a.zip",
}


@pytest.fixture
def outside(tmp_path, hub, monkeypatch):
    """A directory with data that a dataset must not read, without network access."""

    def refused(*_):
        raise AssertionError("connects to the network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(f"socket.socket.{name}", refused)
    monkeypatch.setattr("socket.getaddrinfo", refused)
    _, write = hub
    write("secret", 6)
    folder = tmp_path / "outside"
    folder.mkdir()
    (tmp_path / "hub" / "secret.parquet").rename(folder / "secret.parquet")
    (tmp_path / "secret.parquet").symlink_to(folder / "secret.parquet")
    PIL.Image.new("L", (8, 8)).save(folder / "secret.png")
    return folder


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("download", [True, False])
def test_card_with_outside_paths_raises(hub, outside, card, file, download):
    folder, write = hub
    write("train", 6)
    lines = f"configs:\n- config_name: default\n  {CARDS[card]}\n".format(outside=outside)
    (folder / file).write_text(f"---\n{lines}---\n" if file == "README.md" else lines)
    with pytest.raises(DataError, match="path") as found:
        load(spec(f"hf:{folder}", download=download))
    assert str(folder / file) in str(found.value)


def test_symlink_out_of_the_dataset_raises(hub, outside):
    folder, write = hub
    faults = {"train.parquet": "is outside of the dataset", "train": "cannot be"}
    for name, fault in faults.items():  # the library does not follow symlinks to directories
        (folder / name).symlink_to(outside / ("secret.parquet" if "." in name else "."))
        with pytest.raises(DataError, match=fault):
            load(spec(f"hf:{folder}"))
        (folder / name).unlink()
    write("train", 6)
    (folder / "README.md").symlink_to(outside / "secret.png")
    with pytest.raises(DataError, match=r"README\.md: "):
        load(spec(f"hf:{folder}"))


@pytest.mark.parametrize("path", ["{outside}/secret.png", "http://127.0.0.1:9/a.png", "hf://a/b"])
def test_row_with_an_outside_image_raises(hub, outside, path):
    from datasets import ClassLabel, Dataset, Features, Image

    folder, _ = hub
    features = Features(picture=Image(), label=ClassLabel(names=["cat", "dog"]))
    pictures = [{"path": path.format(outside=outside), "bytes": None}] * 2
    rows = Dataset.from_dict({"picture": pictures, "label": [0, 1]}, features=features)

    import pyarrow.parquet

    pyarrow.parquet.write_table(rows.data.table, folder / "train.parquet")
    with pytest.raises(DataError, match="outside"):
        load(spec(f"hf:{folder}"))


def test_image_table_with_an_outside_file_raises(hub, outside):
    folder, _ = hub
    for name in ("a.png", "b.png"):
        PIL.Image.new("L", (8, 8)).save(folder / name)
    table = folder / "metadata.csv"
    table.write_text("file_name,label\na.png,cat\nb.png,dog\n")
    assert load(spec(f"hf:{folder}")).format.classes == ("cat", "dog")
    table.write_text("file_name,label\na.png,cat\n../outside/secret.png,dog\n")
    with pytest.raises(DataError, match="outside"):
        load(spec(f"hf:{folder}"))


def test_missing_dataset_suggests_download():
    with pytest.raises(DataError, match=r"--set download=true") as caught:
        load(spec("hf:nobody/nothing-of-this-name"))
    assert len(str(caught.value).splitlines()) == 1


def test_hub_name_is_unchanged(tmp_path):
    named = absolute(resolve({"data.dataset": "hf:nobody/nothing"}))
    assert named.run.data.dataset == "hf:nobody/nothing"
    local = absolute(resolve({"data.dataset": f"hf:{tmp_path}/../{tmp_path.name}"}))
    assert local.run.data.dataset == f"hf:{tmp_path}"


# --- multiples in a pool ----------------------------------------------------------------------


def test_pool_may_repeat_a_model():
    pool = parse_pairs(["models.pool=cnn2*3, mlp ,sk-tree * 2"])["models.pool"]
    assert pool == ("cnn2",) * 3 + ("mlp",) + ("sk-tree",) * 2
    config = small("felo", models=["cnn2", "cnn2", "cnn2", "mlp"], clients=8)
    assert assign(config.run.models.pool, 8, 0) == ["cnn2", "cnn2", "cnn2", "mlp"] * 2


@pytest.mark.parametrize("pool", ["cnn2*0", "cnn2*", "*3", "cnn2*x", "cnn2*1.5", "cnn2*1001"])
def test_invalid_multiple_raises(pool):
    with pytest.raises(SettingsError, match=r"VALUE\*N"):
        parse_pairs([f"models.pool={pool}"])


def test_one_model_for_all_may_be_given_as_a_multiple():
    assert small("fedavg", models=["mlp"] * 3).run.models.pool == ("mlp",) * 3
    with pytest.raises(SettingsError, match="one model"):
        small("fedavg", models=["mlp", "mlp", "cnn2"])


@pytest.mark.parametrize("pool", ["cnn2,,mlp", ",cnn2", "cnn2, ,mlp", "cnn2,"])
def test_empty_name_in_a_pool_raises(pool):
    with pytest.raises(SettingsError, match=r"'models\.pool'"):
        parse_pairs([f"models.pool={pool}"])
