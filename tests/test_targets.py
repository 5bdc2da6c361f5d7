"""Numeric targets of images, signals, texts, arrays, and Python functions."""

import math
import os
import re

import numpy as np
import pytest
import torch
from federation import records, run
from PIL import Image
from typer.testing import CliRunner

from fedhet.base.errors import DataError, SettingsError
from fedhet.cli import app
from fedhet.config.resolve import resolve
from fedhet.data.dataset import Format
from fedhet.data.declaration import Declaration
from fedhet.data.schemas import read_schema
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.inference.client import open_client, read_inputs
from fedhet.tasks import Regression

COUNT = 36
SMALL = {
    "clients": 3, "rounds": 2, "engine.backend": "inline", "engine.precision": "float32",
    "data.task": "regression", "data.partition": "iid", "training.local-epochs": 1,
}  # fmt: skip


def disks(count=COUNT, seed=0):
    """Return images [N, 8, 8] of bright squares, and their sides in mm."""
    rng = np.random.default_rng(seed)
    sides = rng.integers(1, 7, count)
    x = rng.integers(0, 60, (count, 8, 8)).astype(np.uint8)
    for image, side in zip(x, sides, strict=True):
        image[:side, :side] = 200
    return x, 2.5 * sides


def pulses(count=COUNT, seed=0):
    """Return signals [N, 1, 32] and their rates."""
    rng = np.random.default_rng(seed)
    rates = rng.uniform(40, 140, count)
    time = np.arange(32) / 8
    x = np.sin(2 * np.pi * rates[:, None] / 60 * time) + 0.1 * rng.standard_normal((count, 32))
    return x[:, None].astype(np.float32), rates


def plant_images(root, count=COUNT, seed=0, extra=()):
    """Write images and labels.csv with a target and an owner, and return the targets."""
    root.mkdir(parents=True, exist_ok=True)
    x, y = disks(count, seed)
    lines = ["site,file,size"]
    for number, (pixels, size) in enumerate(zip(x, y, strict=True)):
        Image.fromarray(pixels).save(root / f"{number:02}.png")
        lines.append(f"{'abc'[number % 3]},{number:02}.png,{size}")
    (root / "labels.csv").write_text("\n".join([*lines, *extra]) + "\n")
    return y


def spec(path="", **changes):
    values = {"task": "regression", "clients": 3, "partition": "iid", **changes}
    return DataSpec(dataset=path, **values)


def check_scale(dataset, numbers, test=None):
    """Check the scale and the targets of a dataset, with numpy's mean and deviation."""
    numbers = np.asarray(numbers, np.float64).reshape(len(numbers), -1)
    assert isinstance(dataset.format.task, Regression)
    np.testing.assert_allclose(dataset.format.task.means, numbers.mean(0), rtol=1e-12)
    np.testing.assert_allclose(dataset.format.task.deviations, numbers.std(0), rtol=1e-12)
    scaled = (numbers - numbers.mean(0)) / numbers.std(0)
    np.testing.assert_allclose(dataset.train.y.numpy(), scaled, rtol=1e-5, atol=1e-6)
    if test is not None:
        test = np.asarray(test, np.float64).reshape(len(test), -1)
        scaled = (test - numbers.mean(0)) / numbers.std(0)
        np.testing.assert_allclose(dataset.test.y.numpy(), scaled, rtol=1e-5, atol=1e-6)


# --- images ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))


def test_label_table_has_the_targets_of_images(tmp_path):
    y = plant_images(tmp_path / "d" / "train")
    test = plant_images(tmp_path / "d" / "test", 9, 1)
    data = RunData(spec(f"imagefolder:{tmp_path / 'd'}", target="size"))
    check_scale(data.dataset, y, test)
    np.testing.assert_array_equal(data.dataset.train.x[:, 0].numpy(), disks()[0])
    assert (data.dataset.format.classes, data.dataset.format.kind) == (("size",), "image")
    data.validate()
    scales = [data.client(k).format.task for k in range(3)]
    assert scales == [data.dataset.format.task] * 3


def test_schema_next_to_a_label_table_has_the_notation(tmp_path):
    y = plant_images(tmp_path / "d")
    path = tmp_path / "d" / "labels.csv"
    path.write_text(re.sub(r"png,(.*)", r"png,\1 mm", path.read_text()))
    dataset = spec(f"imagefolder:{tmp_path / 'd'}", target="size")
    with pytest.raises(DataError, match=r"row 1, column 'size': '15\.0 mm'"):
        _ = RunData(dataset).dataset
    schema = 'target = "size"\ntask = "regression"\n[targets.size]\ntype = "number"\nunit = "mm"\n'
    (tmp_path / "d" / "schema.toml").write_text(schema)
    check_scale(RunData(dataset.replace(target="")).dataset, y)


def test_rows_may_be_in_any_order_and_files_in_directories(tmp_path):
    y = plant_images(tmp_path / "d")
    (tmp_path / "d" / "sub").mkdir()
    os.rename(tmp_path / "d" / "03.png", tmp_path / "d" / "sub" / "03.png")
    path = tmp_path / "d" / "labels.csv"
    header, *rows = path.read_text().replace("03.png", "./sub/03.png").splitlines()
    path.write_text("\n".join([header, *reversed(rows)]))
    dataset = RunData(spec(f"imagefolder:{tmp_path / 'd'}", target="size")).dataset
    check_scale(dataset, y[::-1])
    np.testing.assert_array_equal(dataset.train.x[:, 0].numpy(), disks()[0][::-1])


def test_column_of_a_label_table_names_the_owners(tmp_path):
    y = plant_images(tmp_path / "d")
    place = f"imagefolder:{tmp_path / 'd'}"
    data = RunData(spec(place, target="size", by="site"))
    assert data.owners() == {"client-0": "a", "client-1": "b", "client-2": "c"}
    assert [len(part) for part in data.partition()] == [12, 12, 12]
    check_scale(data.dataset, y)
    for k in range(3):
        client = data.client(k)
        both = torch.cat([client.train.y, client.test.y])
        np.testing.assert_allclose(
            np.sort(client.format.task.in_units(both)[:, 0]), np.sort(y[k::3]), rtol=1e-5
        )
    few = RunData(spec(place, target="size", by="site", max_samples=20, min_samples=2)).dataset
    assert len(few.train) == len(few.groups) == 20
    names = np.array([few.group_names[group] for group in few.groups])
    rows = [disks()[0].tolist().index(x[0].tolist()) for x in few.train.x.numpy()]
    assert names.tolist() == ["abc"[row % 3] for row in rows]
    np.testing.assert_allclose(few.format.task.in_units(few.train.y)[:, 0], y[rows], rtol=1e-5)


def test_label_table_replaces_the_names_of_directories(tmp_path):
    root = tmp_path / "d"
    for name in ("cat", "dog"):
        plant_images(root / name, 8, len(name))
        (root / name / "labels.csv").unlink()
    rows = [f"{name}/{k:02}.png,{k % 3}" for name in ("cat", "dog") for k in range(8)]
    (root / "labels.csv").write_text("\n".join(["file,size", *rows]))
    place = f"imagefolder:{root}"
    by_table = RunData(spec(place, task="auto", min_samples=2)).dataset
    assert by_table.format.classes == ("0", "1", "2")
    assert by_table.train.y.tolist() == [k % 3 for _ in range(2) for k in range(8)]
    check_scale(RunData(spec(place)).dataset, [k % 3 for _ in range(2) for k in range(8)])
    plant_images(tmp_path / "flat")
    with pytest.raises(DataError, match=r"data\.target.*site, size"):
        _ = RunData(spec(f"imagefolder:{tmp_path / 'flat'}", task="auto")).dataset
    labels = RunData(spec(f"imagefolder:{tmp_path / 'flat'}", task="auto", target="site")).dataset
    assert labels.format.classes == ("a", "b", "c")
    assert labels.format.schema is None


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("04.png", "44.png", r"labels.csv: row 5, column 'file': '44.png' not found"),
        ("04.png", "../04.png", r"row 5, column 'file': '../04.png' not found"),
        ("04.png", "05.png", r"row 6, column 'file': '05.png' is already in row 5"),
        ("b,04.png,", "#", r"got none for '04.png'. Add the row"),
        ("04.png,{}", "04.png,", r"row 5, column 'size': the target is missing"),
        ("04.png,{}", "04.png,nan", r"row 5, column 'size': the target is missing"),
        ("04.png,{}", "04.png,inf", r"row 5, column 'size': 'inf' is not a number"),
        ("04.png,{}", "04.png,1e300", r"row 5, column 'size': '1e300' is not a number"),
        ("04.png,{}", "04.png,large", r"row 5, column 'size': 'large' is not a number"),
        ("04.png,{}", '04.png,"3,5 mm"', r"row 5, column 'size': '3,5 mm' is not a number"),
        ("04.png,{}", "04.png,3.5 cm", r"row 5, column 'size': '3.5 cm' is not a number"),
        ("file,size", "name,size", r"column 'file' not found, got 'site', 'name', 'size'"),
        ("file,size", "file,length", r"column 'size' not found"),
    ],
)
def test_invalid_row_of_a_label_table_raises(tmp_path, old, new, fault):
    y = plant_images(tmp_path / "d")
    path = tmp_path / "d" / "labels.csv"
    text = path.read_text()
    if new == "#":
        text = "\n".join(line for line in text.splitlines() if "04.png" not in line)
    else:
        old = old.format(f"{y[4]}")
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    with pytest.raises(DataError, match=fault) as error:
        _ = RunData(spec(f"imagefolder:{tmp_path / 'd'}", target="size")).dataset
    assert str(error.value).startswith(f"{path}: ")


def test_each_part_needs_a_label_table(tmp_path):
    plant_images(tmp_path / "d" / "train")
    plant_images(tmp_path / "d" / "test", 9, 1)
    (tmp_path / "d" / "test" / "labels.csv").unlink()
    with pytest.raises(DataError, match=r"test/labels\.csv: "):
        _ = RunData(spec(f"imagefolder:{tmp_path / 'd'}", target="size")).dataset


# --- arrays, signals, texts, and functions --------------------------------------------------------


def test_arrays_of_clients_share_one_scale(tmp_path):
    rng = np.random.default_rng(0)
    trained = []
    for part, count in (("train", 12), ("test", 4)):
        (tmp_path / part).mkdir()
        for k in range(3):
            y = rng.normal(100 * k, 1 + k, (count, 2))
            trained += [y] if part == "train" else []
            x = rng.random((count, 5), np.float32)
            np.savez(tmp_path / part / f"{k}.npz", x=x, y=y)
    data = RunData(spec(f"npz:{tmp_path}", target="stay,dose mg"))
    every, dataset = np.concatenate(trained), data.dataset
    assert dataset.format.classes == ("stay", "dose mg")
    np.testing.assert_allclose(dataset.format.task.means, every.mean(0), rtol=1e-12)
    np.testing.assert_allclose(dataset.format.task.deviations, every.std(0), rtol=1e-12)
    for k in range(3):
        own = data.client(k)
        np.testing.assert_allclose(own.format.task.in_units(own.train.y), trained[k], rtol=1e-4)
    with pytest.raises(DataError, match=r"0\.npz: y .*3"):
        _ = RunData(spec(f"npz:{tmp_path}", target="a,b,c")).dataset
    rule = r"0.npz: y must be integers \[N\], got float64 \[12, 2\]. Set data.task to regression"
    with pytest.raises(DataError, match=rule):
        _ = RunData(spec(f"npz:{tmp_path}", task="auto")).dataset


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (math.nan, r"1.npz: sample 3, column 'y': the target is missing"),
        (math.inf, r"1.npz: sample 3, column 'y': expected a number up to ±1e\+15, got inf"),
        (-1e300, r"1.npz: sample 3, column 'y': expected a number up to ±1e\+15, got -1e\+300"),
    ],
)
def test_invalid_number_in_an_array_raises(tmp_path, value, fault):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        for k in range(2):
            y = np.arange(12.0) + k
            y[3] = value if (part, k) == ("train", 1) else 3.0
            np.savez(tmp_path / part / f"{k}.npz", x=np.ones((12, 5)), y=y)
    with pytest.raises(DataError, match=fault):
        _ = RunData(spec(f"npz:{tmp_path}", clients=2)).dataset


def test_texts_have_numeric_targets(tmp_path):
    lines = ["text,days,site", *(f"word{k} of text,{k % 7 + 0.5},{'ab'[k % 2]}" for k in range(30))]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    numbers = [k % 7 + 0.5 for k in range(30)]
    data = RunData(spec(f"text:{tmp_path}", label_column="days", by="site", clients=2))
    check_scale(data.dataset, numbers)
    assert (data.dataset.format.kind, data.dataset.format.classes) == ("text", ("days",))
    assert data.owners() == {"client-0": "a", "client-1": "b"}
    as_classes = RunData(spec(f"text:{tmp_path}", label_column="days", task="auto")).dataset
    assert torch.equal(as_classes.train.x, data.dataset.train.x)
    (tmp_path / "train.csv").write_text("\n".join([*lines, " ,1,a"]))
    with pytest.raises(DataError, match="row 31, column 'text'"):
        _ = RunData(spec(f"text:{tmp_path}", target="days")).dataset


def test_function_may_return_numbers(tmp_path, monkeypatch):
    (tmp_path / "own_numbers.py").write_text(
        "import numpy as np, torch\n"
        "from fedhet import Dataset, Format, Split\n"
        "from fedhet.tasks import Regression\n"
        "x = np.arange(150, dtype=np.float32).reshape(30, 5)\n"
        "def pair(): return x, x[:, 0] / 7\n"
        "def named(): return {'train': (x, x[:, :2]), 'test': (x[:5], x[:5, :2]),\n"
        "                     'classes': ('a', 'b')}\n"
        "def made(shape=(30, 1)):\n"
        "    y = torch.zeros(shape)\n"
        "    task = Regression((5.0,), (2.0,))\n"
        "    form = Format('table', (5,), ('a',), task)\n"
        "    return Dataset('d', Split(torch.tensor(x), y), None, form)\n"
        "def flat(): return made((30,))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    x = np.arange(150.0).reshape(30, 5)
    dataset = RunData(spec("python:own_numbers:pair")).dataset
    check_scale(dataset, np.float32(x[:, 0]) / np.float32(7))
    assert (dataset.format.classes, dataset.format.kind) == (("y",), "table")
    assert resolve(
        {"method": "fedavg", "data.dataset": "python:own_numbers:pair", "data.task": "regression"}
    ).run.models.pool == ("mlp",)
    named = RunData(spec("python:own_numbers:named")).dataset
    check_scale(named, x[:, :2], x[:5, :2])
    assert named.format.classes == ("a", "b")
    made = RunData(spec("python:own_numbers:made")).dataset
    assert (made.format.task.means, made.format.task.deviations) == ((5.0,), (2.0,))
    with pytest.raises(DataError, match=r"train\.y.*float32 \[30, 1\]"):
        _ = RunData(spec("python:own_numbers:flat")).dataset
    with pytest.raises(DataError, match=r"data\.task.*regression"):
        _ = RunData(spec("python:own_numbers:pair", task="auto")).dataset
    with pytest.raises(SettingsError, match=r"imagefolder:PATH with labels.csv, text:PATH"):
        _ = RunData(spec("digits")).dataset


def test_scale_is_part_of_what_clients_agree_on():
    first, same, other = (
        Format("table", (3,), ("a",), Regression((mean,), (2.0,))).digest
        for mean in (5.0, 5.0, 6.0)
    )
    assert first == same != other
    assert Format("table", (3,), ("a", "b")).digest == Format("table", (4,), ("a", "b")).digest


# --- runs -----------------------------------------------------------------------------------------


def write_kind(kind, root):
    """Write a small data set of a kind, and return its settings and its models."""
    if kind == "image":
        plant_images(root / "train")
        plant_images(root / "test", 9, 1)
        place, pool = f"imagefolder:{root}", ["cnn2", "mlp", "resnet10"]
        return {"data.dataset": place, "data.target": "size", "models.pool": pool}
    root.mkdir()
    if kind == "signal":
        for part, count in (("train", COUNT), ("test", 9)):
            x, y = pulses(count, len(part))
            np.savez(root / f"{part}.npz", x=x, y=y)
        pool = ["signal-cnn2", "signal-gru", "mlp"]
        return {"data.dataset": f"signal:{root}", "data.target": "rate", "models.pool": pool}
    if kind == "text":
        for part, count in (("train", COUNT), ("test", 9)):
            rows = [f"{'good ' * (k % 5)}day {k},{k % 5}" for k in range(count)]
            (root / f"{part}.csv").write_text("\n".join(["text,label", *rows]))
        pool = ["text-bag", "text-cnn"]
        return {"data.dataset": f"text:{root}", "models.pool": pool, "data.max-tokens": 8,
                "data.vocabulary": 64}  # fmt: skip
    for part, count in (("train", 12), ("test", 4)):
        (root / part).mkdir()
        for k in range(3):
            x, y = disks(count, k)
            np.savez(root / part / f"{k}.npz", x=x, y=y)
    return {"data.dataset": f"npz:{root}", "models.pool": ["cnn2", "mlp"]}


@pytest.mark.parametrize("kind", ["image", "signal", "text", "npz"])
def test_each_kind_is_trained_and_predicted(kind, tmp_path):
    settings = write_kind(kind, tmp_path / "data")
    config = resolve({"method": "local", **SMALL, **settings})
    summary = run(config, tmp_path / "run")
    assert summary["metric"] == "rmse"
    data = RunData.for_run(config.run)
    protocol = "personal" if kind == "npz" else "common"
    last = records(tmp_path / "run")[-1]["metrics"]["rmse"]
    for k in range(3):
        name = f"client-{k}"
        client, own = open_client(tmp_path / "run", name), data.client(k)
        split = own.test if kind == "npz" else data.dataset.test
        x = split.x if kind == "text" else split.scaled().x
        predicted = client.predict(x)
        assert predicted.values.shape == (len(split), 1)
        assert predicted.targets == data.dataset.format.classes
        truth = split.y.double().numpy() * own.format.task.deviations + own.format.task.means
        error = math.sqrt(((predicted.values - truth) ** 2).mean())
        scored = client.scores()[protocol]["rmse"]
        assert scored == pytest.approx(error, rel=1e-4)
        recorded = last[protocol]["private"]["per_client"][name]
        assert recorded == pytest.approx(error, rel=1e-3)
    if kind == "image":
        _, x = read_inputs([tmp_path / "data" / "test"], client.record)
        np.testing.assert_allclose(client.predict(x).values, predicted.values, rtol=1e-4, atol=1e-4)
        assert client.record.format.schema.targets[0].name == "size"
    shown = CliRunner().invoke(
        app, ["partition", *[f"--set={k}={','.join(v) if isinstance(v, list) else v}"
                             for k, v in {**SMALL, **settings}.items() if k[:4] == "data"],
              "--clients=3"]
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert "client-2" in shown.output


# --- sites ----------------------------------------------------------------------------------------


def make_site(kind, root, schema):
    """Write a site's directory, and return its numbers."""
    root.mkdir()
    (root / "schema.toml").write_text(schema.read_text())
    if kind == "image":
        return plant_images(root / "train", 12, 5)
    x, y = pulses(12, 5)
    if kind == "signal":
        np.savez(root / "train.npz", x=x, y=y)
    else:
        rows = [f"text {k},{number!r}" for k, number in enumerate(y.tolist())]
        (root / "train.csv").write_text("\n".join(["text,y", *rows]))
    return y


@pytest.mark.parametrize("kind", ["image", "signal", "text"])
def test_site_has_the_scale_of_its_schema(kind, tmp_path):
    if kind == "image":
        every = plant_images(tmp_path / "all")
        source, target = tmp_path / "all" / "labels.csv", "size"
    else:
        x, every = pulses()
        source, target = tmp_path / "all.npz", "y"
        np.savez(source, x=x, y=every)
    schema = tmp_path / "schema.toml"
    call = ["schema", str(source), "--target", target, "--task", "regression", "--out", str(schema)]
    done = CliRunner().invoke(app, [*call, "--targets-only"])
    assert done.exit_code == 0, done.output
    column = read_schema(schema).targets[0]
    np.testing.assert_allclose((column.mean, column.deviation), (every.mean(), every.std()))
    site = tmp_path / "site"
    numbers = make_site(kind, site, schema)
    settings = spec(sample_kind=kind, max_tokens=8, vocabulary=64)
    place = {"image": "imagefolder", "signal": "signal", "text": "text"}[kind] + f":{site}"
    data = site_data(place, spec=settings, classes=0, name="site-a")
    both = np.concatenate([data.train.y.numpy(), data.test.y.numpy()])[:, 0]
    wanted = (numbers - every.mean()) / every.std()
    np.testing.assert_allclose(np.sort(both), np.sort(wanted), rtol=1e-4, atol=1e-5)
    assert (data.format.kind, data.format.classes) == (kind, (target,))

    declared = {"image": "shape = [1, 8, 8]\n", "signal": "shape = [1, 32]\n", "text": ""}[kind]
    (site / "site.toml").write_text(declared)
    private = Declaration.from_files(place, 2**24)
    assert (private.names, private.kind.name) == ((target,), kind)
    read = private.read_data(place, "site-a")
    assert read.format.task == Regression((column.mean,), (column.deviation,))
    assert len(read.train) + len(read.test) == 12

    (site / "schema.toml").unlink()
    rule = r"schema.toml: file not found, expected the scale of the targets, which all sites share"
    with pytest.raises(DataError, match=rule):
        site_data(place, spec=settings, classes=0, name="site-a")


def test_site_may_list_its_classes_in_a_label_table(tmp_path):
    plant_images(tmp_path / "site" / "train", 12)
    settings = spec(task="auto", target="site")
    data = site_data(f"imagefolder:{tmp_path / 'site'}", spec=settings, classes=3, name="site-a")
    assert data.format.classes == ("a", "b", "c")
    with pytest.raises(DataError, match=r"4 classes.*3"):
        site_data(f"imagefolder:{tmp_path / 'site'}", spec=settings, classes=4, name="site-a")
    (tmp_path / "site" / "classes.txt").write_text("d\nc\nb\na\n")
    data = site_data(f"imagefolder:{tmp_path / 'site'}", spec=settings, classes=4, name="site-a")
    assert (data.format.classes, data.space) == (("d", "c", "b", "a"), (1, 2, 3))
    assert torch.bincount(torch.cat([data.train.y, data.test.y])).tolist() == [0, 4, 4, 4]


def test_arrays_have_the_unit_of_a_schema_in_another_notation(tmp_path):
    rows = [f'"{number},5 mm"' for number in range(12)]
    (tmp_path / "all.csv").write_text("\n".join(["size", *rows]))
    (tmp_path / "schema.toml").write_text(
        'target = "size"\ntask = "regression"\n'
        '[targets.size]\ntype = "number"\ndecimal = ","\nunit = "mm"\n'
    )
    done = CliRunner().invoke(app, ["schema", str(tmp_path / "all.csv"), "--targets-only"])
    assert done.exit_code == 0, done.output
    x, y = pulses(12)
    np.savez(tmp_path / "train.npz", x=x, y=y)
    data = site_data(f"signal:{tmp_path}", spec=spec(), classes=1, name="site-a")
    assert data.format.classes == ("size",)
    both = np.concatenate([data.train.y.numpy(), data.test.y.numpy()])[:, 0]
    numbers = np.arange(12) + 0.5
    wanted = np.sort((y - numbers.mean()) / numbers.std())
    np.testing.assert_allclose(np.sort(both), wanted, rtol=1e-4, atol=1e-5)
