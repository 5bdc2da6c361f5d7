"""Directories of images and texts: the layout, label tables, owners, and the decoding of files.

The expected result for a layout is written by hand: the number of samples per class, and the log
line about other files. The expected result for an image is what viewers show.
"""

import io
import logging
import os
import struct

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from federation import run, small
from typer.testing import CliRunner

from fedhet.base.errors import DataError, SettingsError
from fedhet.cli import app
from fedhet.data.folders import Walk, _warn_once
from fedhet.data.site import site_data
from fedhet.data.sources.images import IMAGES, decode
from fedhet.data.sources.texts import read_files
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load
from fedhet.inference.client import _files_in


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Cache decoded images in a directory of the test, and log each line again."""
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    _warn_once.cache_clear()


def png(value=0, size=(3, 2), **options):
    stream = io.BytesIO()
    PIL.Image.new("RGB", size, (value, 0, 0)).save(stream, "PNG", **options)
    return stream.getvalue()


PICTURE = png()


def plant(root, *names, content=PICTURE):
    """Write files: "cat/*3.png" stands for cat/0.png to cat/2.png, "cat/" for a directory."""
    for name in names:
        before, star, after = name.partition("*")
        count, _, ending = after.partition(".")
        for number in range(int(count)) if star else [""]:
            path = root / (f"{before}{number}.{ending}".rstrip(".") if star else name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if name.endswith("/") else path.write_bytes(content)
    return root


def spec_of(root, kind="imagefolder", **changes):
    return DataSpec(**{"dataset": f"{kind}:{root}", "max_tokens": 4, "vocabulary": 32, **changes})


def counted(split, classes):
    """Return the number of samples of each class, or None if there is no split."""
    if split is None:
        return None
    numbers = np.bincount(split.y.numpy(), minlength=len(classes)).tolist()
    return dict(zip(classes, numbers, strict=True))


AB = {"a": 2, "b": 2}
FLAT = ("a/*2.png", "b/*2.png")
TRAIN = ("train/a/*2.png", "train/b/*2.png")
LAYOUTS = {  # files -> images of each training class, of each test class, the log line
    "flat": (FLAT, AB, None, ""),
    "parts": ((*TRAIN, "test/a/*1.png", "test/b/*1.png"), AB, {"a": 1, "b": 1}, ""),
    "without a test set": (TRAIN, AB, None, ""),
    "a test class is missing or empty": ((*TRAIN, "test/b/*1.png", "test/a/"), AB,
        {"a": 0, "b": 1}, ""),
    "hidden and of the system": ((*FLAT, ".ipynb_checkpoints/*2.png", "a/.ipynb_checkpoints/*1.png",
        "a/@eaDir/*1.png", "a/Thumbs.db", "b/desktop.ini", "$RECYCLE.BIN/*1.png", "b/._0.png",
        "lost+found/*1.png", ".DS_Store", "__MACOSX/train/a/._0.png"), AB, None, ""),
    "endings": (("a/*1.PNG", "a/*1.gif", "b/*1.jfif", "b/*1.Jpe"), AB, None, ""),
    "files of other types": ((*TRAIN, "train/a/*3.dcm", "train/b/*2.heic", "train/a/*1.TXT",
        "x.csv", "README", "train/b/IMG0001"), AB, None,
        "9 files are not used as images: 3 .dcm, 2 without an extension, 2 .heic, 1 .csv, 1 .txt"),
    "a description of the data": ((*TRAIN, "classes.txt", "schema.toml", "site.toml"), AB, None,
        ""),
    "unlabeled samples": ((*TRAIN, "train/unlabeled/*3.png", "train/unlabeled/more/*1.png"), AB,
        None, "4 images without a class are used only at sites"),
    "classes that are named like parts": (("train/train/*2.png", "train/val/*2.png"),
        {"train": 2, "val": 2}, None, ""),
    "a name with a part in it": (("train_station/*1.png", "test_tube/*2.png"),
        {"test_tube": 2, "train_station": 1}, None, ""),
}  # fmt: skip


OF_IMAGES = ("endings", "files of other types")
"""Layouts whose files have the endings of images, so that texts have no such layout."""


@pytest.mark.parametrize(
    ("kind", "case"),
    [*(("imagefolder", c) for c in LAYOUTS), *(("text", c) for c in LAYOUTS if c not in OF_IMAGES)],
)
def test_directory_of_the_layout_is_read(tmp_path, case, kind, caplog):
    names, train, test, said = LAYOUTS[case]
    content = PICTURE
    if kind == "text":
        names, content = [name.replace(".png", ".txt") for name in names], b"a word"
        said = said.replace("images", ".txt files")
    data = load(spec_of(plant(tmp_path / "tree", *names, content=content), kind))
    assert (counted(data.train, data.format.classes), counted(data.test, data.format.classes)) == (
        train,
        test,
    )
    assert data.groups is None
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(said)
    assert all(said in line and "\n" not in line for line in lines)


REFUSED = {  # files -> the first path that does not fit, and the fix
    "a validation part": ((*TRAIN, "val/a/*1.png"), "val", "Rename it to test, or remove it"),
    "a third part": ((*TRAIN, "test/a/*1.png", "valid/a/*1.png"), "valid",
        "Merge it with test, or remove it"),
    "other names of parts": (("Training/a/*1.png", "Testing/a/*1.png"), "Testing",
        "Rename it to test"),
    "capitals": (("TRAIN/a/*1.png", "TEST/a/*1.png"), "TEST", "Rename it to test"),
    "names of parts without classes": (("training/*1.png", "testing/*1.png"), "testing",
        "Rename it to test"),
    "a directory next to the parts": ((*TRAIN, "raw/*1.png"), "raw", "Move it into {}/train"),
    "test among the classes": (("a/*1.png", "b/*1.png", "test/*3.png"), "a",
        "Move it into {}/train"),
    "unlabeled samples next to the parts": ((*TRAIN, "unlabeled/*1.png"), "unlabeled",
        "Move it into {}/train"),
    "a sample next to the parts": ((*TRAIN, "*1.png"), "0.png", "Move it below {}/train"),
    "a table next to the parts": ((*TRAIN, "test/a/*1.png", "labels.csv"), "labels.csv",
        "Move its rows to a label table in train and test"),
    "a sample next to the classes": ((*FLAT, "*3.png"), "0.png",
        "Move it into a class directory, or list the files in {}/labels.csv"),
    "a part without classes": ((*TRAIN, "test/*2.png"), "test/0.png", "{}/test/labels.csv"),
    "owners": (("h1/a/*2.png", "h1/b/*2.png", "h2/a/*1.png"), "h1/a",
        "set data.by to folder"),
    "owners in a part": (("train/h1/a/*2.png", "train/h2/b/*2.png"), "train/h1/a",
        "set data.by to folder"),
    "samples without a class": ((*FLAT, "unsup/*1.png"), "unsup", "Rename it to unlabeled"),
    "a wrapper": (("archive/a/*1.png", "archive/b/*1.png"), "archive/a", "use {}/archive as the"),
    "a wrapper of parts": (("x/train/a/*1.png", "x/test/a/*1.png"), "x/test", "use {}/x as the"),
    "masks": (("a/images/*2.png", "a/masks/*2.png"), "a/images", "Move its files into {}/a"),
    "a class with directories": ((*FLAT, "a/more/*1.png"), "a/more", "Move its files into {}/a"),
    "a copy next to the classes": ((*FLAT, "cells/a/*1.png"), "cells/a", "into {}/cells"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("at_site", [False, True])
def test_other_layout_raises_with_path_and_fix(tmp_path, case, at_site):
    names, path, fix = REFUSED[case]
    root = plant(tmp_path / "tree", *names)
    with pytest.raises(DataError) as caught:
        site_data(
            f"imagefolder:{root}", spec=spec_of(root), classes=2, name="s"
        ) if at_site else load(spec_of(root))
    message = str(caught.value)
    assert message.startswith(f"{root / path}: unexpected ")
    assert f"expected {root}[/train|/test]/CLASS/FILE" in message
    assert fix.format(root) in message
    assert "\n" not in message


NOTHING = {
    "an empty class": ((*FLAT, "c/"), "{}/c: no images found"),
    "a class of other files": ((*FLAT, "c/*2.dcm"), "{}/c: expected images (.jpg"),
    "a test class of other files": ((*TRAIN, "test/a/*1.png", "test/b/*2.dcm"), "only 2 .dcm"),
    "an empty test part": ((*TRAIN, "test/a/"), "{}/test: no images found"),
    "a test part of other files": ((*TRAIN, "test/*2.json"), "{}/test: expected directories"),
    "no training part": (("test/a/*1.png",), "{}/train: directory not found"),
    "an unknown test class": ((*TRAIN, "test/A/*1.png"), "{}/test/A: unknown class 'A'"),
    "empty unlabeled samples": ((*TRAIN, "train/unlabeled/"), "{}/train/unlabeled: no images"),
    "unlabeled test samples": ((*TRAIN, "test/a/*1.png", "test/unlabeled/*1.png"),
        "{}/test/unlabeled/0.png: test images must be labeled. Move them into {}/train/unlabeled"),
    "no directory": (("x.json",), "{}: expected directories"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTHING)
def test_part_or_class_without_samples_raises(tmp_path, case):
    names, fault = NOTHING[case]
    root = plant(tmp_path / "tree", *names)
    with pytest.raises(DataError) as caught:
        load(spec_of(root))
    assert fault.replace("{}", str(root)) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- owners ---------------------------------------------------------------------------------------

OWNED = ("train/north/a/*6.png", "train/north/b/*4.png", "train/east/a/*8.png", "test/any/b/*2.png")


@pytest.mark.parametrize("kind", ["imagefolder", "text"])
def test_directory_of_each_owner_is_a_client(tmp_path, kind):
    ending, content = (".png", PICTURE) if kind == "imagefolder" else (".txt", b"a word")
    names = [name.replace(".png", ending) for name in OWNED]
    root = plant(tmp_path / "tree", *names, content=content)
    spec = spec_of(root, kind, by="folder", clients=2, min_samples=2)
    data = RunData(spec)
    assert data.owners() == {"client-0": "east", "client-1": "north"}
    assert (data.dataset.format.classes, data.dataset.group_names) == (
        ("a", "b"),
        ("east", "north"),
    )
    assert data.label_counts() == {"client-0": [8, 0], "client-1": [6, 4]}
    assert counted(data.common_test, "ab") == {"a": 0, "b": 2}
    few = load(spec.replace(max_samples=9))
    assert (len(few.train), len(few.groups), few.group_names) == (9, 9, ("east", "north"))
    labels = {(group, int(y)) for group, y in zip(few.groups, few.train.y, strict=True)}
    assert (0, 1) not in labels  # east has no sample of b
    flat = plant(tmp_path / "flat", *(name.removeprefix("train/") for name in names[:3]),
                 content=content)  # fmt: skip
    assert (
        RunData(spec_of(flat, kind, by="folder", clients=2, min_samples=2)).owners()
        == data.owners()
    )


def test_pixels_of_a_client_are_of_its_directory(tmp_path):
    root = tmp_path / "tree"
    for value, owner in enumerate(("x", "y")):
        plant(root, f"{owner}/a/*3.png", f"{owner}/b/*3.png", content=png(10 * value))
    data = RunData(spec_of(root, by="folder", clients=2, min_samples=2))
    for number in range(2):
        client = data.client(number)
        red = {*client.train.x[:, 0].unique().tolist(), *client.test.x[:, 0].unique().tolist()}
        assert red == {10 * number}


def test_owners_are_trained_and_listed(tmp_path):
    root = tmp_path / "tree"
    for value, owner in enumerate(("east", "north", "south")):
        for name, low in (("a", 0), ("b", 120)):
            for k in range(8):
                picture = png(low + value + k, size=(8, 8))
                plant(root, f"train/{owner}/{name}/{k}.png", content=picture)
        plant(root, f"test/{owner}/a/0.png", content=png(value, size=(8, 8)))
    options = ["--dataset", f"imagefolder:{root}", "--set", "by=folder", "--clients", "3"]
    shown = CliRunner().invoke(app, ["partition", *options])
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.output.splitlines() if line.startswith("client-")]
    assert rows == [[f"client-{k}", name, "16", "8", "8"] for k, name in
                    enumerate(("east", "north", "south"))]  # fmt: skip
    config = small(
        "fml", dataset=f"imagefolder:{root}", by="folder", clients=3, min_samples=2, rounds=1
    )
    summary = run(config, tmp_path / "run")
    assert summary["owners"] == {"client-0": "east", "client-1": "north", "client-2": "south"}


REFUSED_OWNERS = {
    "classes without owners": (FLAT, "a/0.png", "unset data.by"),
    "a directory below": (("h1/a/*1.png", "h1/b/x/*1.png"), "h1/b/x", "its files into {}/h1/b"),
    "a part below": (("h1/train/a/*1.png", "h1/test/a/*1.png"), "h1/test/a", "{}/h1/test"),
    "a test set without owners": (("train/h1/a/*1.png", "test/a/*1.png"), "test/a/0.png", "unset"),
    "a sample of an owner": (("h1/a/*1.png", "h1/*1.png"), "h1/0.png", "into a class directory"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_OWNERS)
def test_other_layout_of_owners_raises(tmp_path, case):
    names, path, fix = REFUSED_OWNERS[case]
    root = plant(tmp_path / "tree", *names)
    with pytest.raises(DataError) as caught:
        load(spec_of(root, by="folder"))
    assert str(caught.value).startswith(f"{root / path}: unexpected ")
    assert f"expected {root}[/train|/test]/OWNER/CLASS/FILE" in str(caught.value)
    assert fix.format(root) in str(caught.value)


def test_directories_have_no_column_of_owners(tmp_path):
    root = plant(tmp_path / "tree", *FLAT)
    with pytest.raises(SettingsError, match=r"data\.by.*'site'"):
        load(spec_of(root, by="site"))


# --- sites and single directories -----------------------------------------------------------------


@pytest.mark.parametrize("part", ["train", "."])
def test_site_reads_a_directory_as_a_simulation_does(tmp_path, part):
    root = tmp_path / "tree"
    for value in range(8):
        plant(root, f"{part}/{'ab'[value % 2]}/{value}.png", content=png(value))
    spec = spec_of(root, test_fraction=0.25)
    whole = load(spec).train
    site = site_data(f"imagefolder:{root}", spec=spec.replace(by="folder"), classes=2, name="s")
    pairs = [(split.x[:, 0, 0, 0].tolist(), split.y.tolist()) for split in (site.train, site.test)]
    both = sorted(pair for reds, labels in pairs for pair in zip(reds, labels, strict=True))
    assert both == sorted(zip(whole.x[:, 0, 0, 0].tolist(), whole.y.tolist(), strict=True))
    assert both == [(value, value % 2) for value in range(8)]


def test_site_may_lack_samples_of_a_class(tmp_path):
    root = plant(tmp_path / "site", "train/a/*4.png", "train/b/*4.png")
    spec = spec_of(root, test_fraction=0.25)
    (root / "classes.txt").write_text("b\na\nc\n")
    found = site_data(f"imagefolder:{root}", spec=spec, classes=3, name="s")
    labels = [*found.train.y.tolist(), *found.test.y.tolist()]
    assert (found.format.classes, sorted(labels)) == (("b", "a", "c"), [0] * 4 + [1] * 4)
    (root / "classes.txt").unlink()
    with pytest.raises(DataError, match=r"3 classes.*2"):
        site_data(f"imagefolder:{root}", spec=spec, classes=3, name="s")
    plant(root, "train/c/", "train/unlabeled/*3.png")
    found = site_data(f"imagefolder:{root}", spec=spec, classes=3, name="s", unlabeled=True)
    assert (found.format.classes, found.space, len(found.unlabeled)) == (("a", "b", "c"), (0, 1), 3)
    plant(root, "train/c/*2.dcm")
    with pytest.raises(DataError, match=r"train/c: .*2 \.dcm"):
        site_data(f"imagefolder:{root}", spec=spec, classes=3, name="s")


@pytest.mark.parametrize("name", ["loop.png", "pipe.png"])
def test_special_file_raises(tmp_path, name):
    root = plant(tmp_path / "tree", *FLAT)
    path = root / "b" / name
    os.mkfifo(path) if name == "pipe.png" else path.symlink_to(name)
    with pytest.raises(DataError, match=rf"b/{name}: "):
        load(spec_of(root))


def test_unreadable_directory_raises(tmp_path, monkeypatch):
    root, scandir = plant(tmp_path / "tree", *FLAT), os.scandir

    def refused(path):
        if os.path.basename(path) == "b":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match=r"b: .*Permission denied"):
        load(spec_of(root))


def test_working_directory_may_be_the_data(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(plant(tmp_path / "tree", *TRAIN, "schema.toml"))
    assert counted(load(spec_of(".")).train, "ab") == AB
    assert not caplog.records
    monkeypatch.chdir(plant(tmp_path / "flat", "*4.png"))
    (tmp_path / "flat" / "labels.csv").write_text(
        "file,y\n" + "\n".join(f"{k}.png,{'ab'[k % 2]}" for k in range(4))
    )
    assert counted(load(spec_of(".")).train, "ab") == AB


def test_files_for_prediction_are_found_and_counted(tmp_path, caplog):
    root = plant(tmp_path / "new", "*2.png", "deep/x/*1.jfif", ".hidden/*1.png", "*3.dcm")
    found = _files_in([root], IMAGES)
    assert [os.path.basename(path) for path in found] == ["0.png", "1.png", "0.jfif"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3 files are not used as images: 3 .dcm" in line
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(DataError, match="new/link/new"):
        _files_in([root], IMAGES)


def test_nested_directories_of_any_depth_are_listed(tmp_path):
    path = tmp_path / "deep"
    for _ in range(400):
        path = path / "d"
    path.mkdir(parents=True)
    (path / "x.png").write_bytes(PICTURE)
    assert Walk(IMAGES).below(tmp_path / "deep") == [str(path / "x.png")]


# --- label tables ---------------------------------------------------------------------------------

TABLES = {  # name of the table -> its content
    "labels.csv": "file,y\na/0.png,cat\nb/0.png,dog\n1.png,dog\n",
    "labels.tsv": "file\ty\na/0.png\tcat\nb/0.png\tdog\n1.png\tdog\n",
    "metadata.csv": "file_name,y\na/0.png,cat\nb/0.png,dog\n1.png,dog\n",
    "metadata.jsonl": "\n".join(
        f'{{"file_name": "{file}", "y": "{y}"}}'
        for file, y in (("a/0.png", "cat"), ("b/0.png", "dog"), ("1.png", "dog"))
    ),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("part", ["train", "."])
def test_label_table_has_the_classes_of_its_files(tmp_path, name, part, caplog):
    root = tmp_path / "tree"
    plant(root, f"{part}/a/0.png", f"{part}/b/0.png", f"{part}/1.png", f"{part}/unlabeled/*2.png")
    (root / part / name).write_text(TABLES[name])
    data = load(spec_of(root))
    assert counted(data.train, data.format.classes) == {"cat": 1, "dog": 2}
    site = site_data(f"imagefolder:{root}", spec=spec_of(root), classes=2, name="s", unlabeled=True)
    assert (site.format.classes, len(site.unlabeled)) == (("cat", "dog"), 2)
    lines = [record.getMessage() for record in caplog.records]
    assert ["2 images without a class" in line for line in lines] == [True]


def test_label_table_is_not_chosen_among_several(tmp_path):
    root = plant(tmp_path / "tree", "a/0.png", "b/0.png", "1.png")
    for name in ("labels.csv", "metadata.csv"):
        (root / name).write_text(TABLES[name])
    with pytest.raises(DataError, match=r"labels\.csv and metadata\.csv"):
        load(spec_of(root))
    (root / "labels.csv").unlink()
    (root / "metadata.csv").write_text(TABLES["labels.csv"])
    with pytest.raises(DataError, match=r"metadata\.csv: .*'file_name'.*'file'"):
        load(spec_of(root))


# --- images -----------------------------------------------------------------------------------


def shown(path, **changes):
    return decode([str(path)], DataSpec(**changes))[0].numpy()


RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (4, 6, 3), np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["png", "webp", "tiff"])
def test_image_is_rotated_by_exif_data(tmp_path, orientation, format):
    turned = {  # EXIF 2.3, 4.6.4: where row 0 and column 0 of the stored image are seen
        1: COLORS, 2: COLORS[:, ::-1], 3: COLORS[::-1, ::-1], 4: COLORS[::-1],
        5: COLORS.transpose(1, 0, 2), 6: COLORS[::-1].transpose(1, 0, 2),
        7: COLORS[::-1, ::-1].transpose(1, 0, 2), 8: COLORS[:, ::-1].transpose(1, 0, 2),
    }  # fmt: skip
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "webp" else {}
    PIL.Image.fromarray(COLORS).save(tmp_path / f"a.{format}", exif=exif, **options)
    assert np.array_equal(shown(tmp_path / f"a.{format}").transpose(1, 2, 0), turned[orientation])


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_uncompressed_gray_tiff_is_turned(tmp_path, orientation, kind):
    gray = COLORS[..., 0]
    turned = {5: gray.T, 6: gray[::-1].T, 7: gray[::-1, ::-1].T, 8: gray[:, ::-1].T}
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    stored = gray.astype(kind) * (257 if kind is np.uint16 else 1)
    PIL.Image.fromarray(stored).save(tmp_path / "a.tiff", exif=exif)
    assert np.array_equal(shown(tmp_path / "a.tiff")[0], turned[orientation])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_transparent_pixels_are_white(tmp_path, mode):
    alpha = np.array([[0, 255, 51]], np.uint8)
    values = np.array([[10, 200, 100]], np.uint8)
    if mode in ("RGBA", "LA"):
        channels = [values] * (len(mode) - 1) + [alpha]
        image, options = PIL.Image.fromarray(np.stack(channels, -1), mode), {}
        expected = [255, 200, 255 + round((100 - 255) * 51 / 255)]
    else:  # one value or color that is transparent
        image = PIL.Image.fromarray(values, "L").convert(mode)
        key = (10, 10, 10) if mode == "RGB" else image.getpixel((0, 0))
        options, expected = {"transparency": key}, [255, 200, 100]
    image.save(tmp_path / "a.png", **options)
    found = shown(tmp_path / "a.png")
    assert np.abs(found[0, 0].astype(int) - expected).max() <= 1
    assert (found == found[:1]).all()


def test_sixteen_bits_are_scaled_by_their_range(tmp_path):
    values = np.array([[0, 257, 1000, 4095, 65535]], np.uint16)
    for name in ("a.png", "a.tiff", "a.pgm"):
        image = PIL.Image.fromarray(values)
        image.save(tmp_path / name)
        assert shown(tmp_path / name).tolist() == [[[0, 1, 4, 16, 255]]], name
    PIL.Image.fromarray(COLORS[..., 0]).save(tmp_path / "b.png")
    both = decode([str(tmp_path / "a.png"), str(tmp_path / "b.png")], DataSpec(image_size=2))
    assert both.shape == (2, 1, 2, 2), "gray images of 8 and of 16 bits stay gray"


def uncompressed_tiff(values, photometric):
    """Return a TIFF file with one strip, as in TIFF 6.0, Section 4."""
    height, width = values.shape
    data, bits = values.tobytes(), 8 * values.itemsize
    tags = {
        256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height,
        279: len(data),
    }  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    start, count = struct.pack("<I", 8 + len(data)), struct.pack("<H", len(tags))
    return b"II*\0" + start + data + count + entries + bytes(4)


@pytest.mark.parametrize("kind", ["u1", "<u2"])
@pytest.mark.parametrize("photometric", [0, 1])
def test_gray_tiff_may_define_zero_as_white(tmp_path, kind, photometric):
    levels = np.array([[0, 1, 100, 255], [7, 30, 200, 254]])
    stored = (levels * (257 if kind == "<u2" else 1)).astype(kind)
    (tmp_path / "a.tif").write_bytes(uncompressed_tiff(stored, photometric))
    expected = levels if photometric else 255 - levels
    assert shown(tmp_path / "a.tif").tolist() == [expected.tolist()]


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_values_without_a_range_raise(tmp_path, kind):
    PIL.Image.fromarray(np.ones((2, 2), kind)).save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match=r"a\.tiff: .*16 bits"):
        shown(tmp_path / "a.tiff")


def test_bilevel_and_palette_images(tmp_path):
    bits = np.array([[0, 255, 255]], np.uint8)
    PIL.Image.fromarray(bits).convert("1").save(tmp_path / "a.png")
    assert shown(tmp_path / "a.png").tolist() == [bits.tolist()] * 3
    quantized = PIL.Image.fromarray(COLORS).quantize(16)
    quantized.save(tmp_path / "b.gif")
    palette = np.array(quantized.getpalette()).reshape(-1, 3)
    expected = palette[np.asarray(quantized)]
    assert shown(tmp_path / "b.gif").transpose(1, 2, 0).tolist() == expected.tolist()


def test_first_frame_of_an_animation_is_read(tmp_path):
    frames = [PIL.Image.new("RGB", (3, 2), (value, 0, 0)) for value in (250, 5)]
    for ending in ("gif", "png", "webp", "tiff"):
        path = tmp_path / f"a.{ending}"
        options = {"lossless": True} if ending == "webp" else {}
        frames[0].save(path, save_all=True, append_images=frames[1:], **options)
        assert shown(path)[0, 0, 0] == 250, ending


def test_cmyk_is_shown_by_subtraction(tmp_path):
    """JPEG files from print shops contain inverted values, as written by Adobe."""
    inks = np.zeros((8, 8, 4), np.uint8)
    inks[..., 0], inks[..., 3] = 255, 51  # cyan, and a fifth of black
    for name, options in (("a.jpg", {"quality": 100}), ("a.tiff", {})):
        PIL.Image.fromarray(inks, "CMYK").save(tmp_path / name, **options)
        found = shown(tmp_path / name)[:, 4, 4].astype(int)
        assert np.abs(found - [0, 204, 204]).max() <= 3, name


def test_only_formats_of_pictures_are_decoded(tmp_path):
    """Pillow would run Ghostscript on a file that begins like EPS, regardless of its name."""
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(DataError, match=r"a\.png"):
        shown(tmp_path / "a.png")
    (tmp_path / "b.jpg").write_bytes(PICTURE)  # a PNG file that somebody has renamed
    assert shown(tmp_path / "b.jpg").shape == (3, 2, 3)


def test_picture_larger_than_pillow_allows_is_named(tmp_path):
    header = bytearray(png(1))
    header[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    (tmp_path / "huge.png").write_bytes(header)
    with pytest.raises(DataError, match=r"huge\.png"):
        shown(tmp_path / "huge.png", image_size=2)


# --- texts ------------------------------------------------------------------------------------

TEXT = "Zoë's café – “naïve”"


def tokens(path):
    return read_files([str(path)], DataSpec(max_tokens=12)).tolist()


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be"]
)
def test_one_text_in_every_encoding(tmp_path, encoding):
    text = f"{TEXT} " + "and plain words " * 9
    mark = "\ufeff" if encoding[-2:] in ("le", "be") else ""
    (tmp_path / "plain").write_text(text, encoding="utf-8")
    (tmp_path / encoding).write_bytes((mark + text).encode(encoding))
    assert tokens(tmp_path / encoding) == tokens(tmp_path / "plain")


@pytest.mark.parametrize(
    "encoding", ["cp1252", "cp1251", "koi8-r", "shift-jis", "gb18030", "utf-16-le", "utf-32-be"]
)
def test_other_encoding_raises(tmp_path, encoding):
    text = "日本語の文章です" if encoding in ("shift-jis", "gb18030") else "Это не латинский текст"
    text = TEXT if encoding == "cp1252" else "plain words" if "utf" in encoding else text
    path = plant(tmp_path, "c/a.txt", content=(text * 9).encode(encoding)) / "c" / "a.txt"
    with pytest.raises(DataError, match=r"a\.txt: .*Save the file in UTF-8"):
        tokens(path)


def test_binary_file_raises_as_text(tmp_path):
    path = plant(tmp_path, "c/a", content=bytes(range(200)) + bytes(300)) / "c" / "a"
    with pytest.raises(DataError, match="UTF-8"):
        tokens(path)


def test_site_names_the_format_of_its_files(tmp_path, caplog):
    root = plant(tmp_path / "site", "train/a/*4.png", "train/b/*4.png")
    plant(root, "train/a/*4.txt", "train/b/*9.txt", content=b"a cat")
    spec = DataSpec(test_fraction=0.25)
    found = site_data(f"imagefolder:{root}", spec=spec, classes=2, name="s")
    assert found.format.shape == (3, 2, 3)
    assert "13 files are not used as images: 13 .txt" in caplog.text
    found = site_data(f"text:{root}", spec=spec, classes=2, name="s")
    assert found.format.shape == (0, 128, 8192)
    assert len(found.train) + len(found.test) == 13


def test_counts_appear_only_in_the_log(tmp_path, caplog):
    """The counts are only in this machine's log, and in no object that is sent."""
    root = plant(tmp_path / "site", "train/a/*4.png", "train/b/*4.png", "train/a/*7.dcm")
    found = site_data(f"imagefolder:{root}", spec=DataSpec(test_fraction=0.25), classes=2, name="s")
    assert [record.name for record in caplog.records] == ["fedhet"]
    assert caplog.records[0].levelno == logging.WARNING
    assert "dcm" not in repr(vars(found))
