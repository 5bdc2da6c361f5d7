"""Trees of images and texts in common layouts, and their decoding.

The expected result for a layout is written by hand: the number of samples per class, and notes
about other files. The expected result for an image is what viewers show.
"""

import io
import logging
import os
import struct

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from fedhet.base.errors import DataError
from fedhet.data.class_folders import _warn_once, find_tree, part_of
from fedhet.data.images import IMAGES, decode
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.data.store import load
from fedhet.data.texts import TEXTS, read_files
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


def counted(part):
    return {name: len(paths) for name, paths in part.items()} if part is not None else None


AB = {"a": 2, "b": 2}
FLAT = ("a/*2.png", "b/*2.png")
LAYOUTS = {  # files -> images of each training class, of each test class, what is said of the rest
    "brain tumor MRI": (("Training/a/*2.png", "Training/b/*2.png", "Testing/a/*1.png",
        "Testing/b/*1.png"), AB, {"a": 1, "b": 1}, ""),
    "capitals": (("TRAIN/a/*2.png", "TRAIN/b/*2.png", "TEST/a/*1.png", "TEST_SIMPLE/a/*3.png"), AB,
        {"a": 1}, "3 in TEST_SIMPLE (next to TRAIN)"),
    "chest X-ray": (("x/train/a/*2.png", "x/train/b/*2.png", "x/val/a/*3.png", "x/test/a/*1.png",
        "x/.DS_Store", "__MACOSX/x/train/a/._0.png", "x/train/.DS_Store"), AB, {"a": 1},
        "3 in val (test is the common test set)"),
    "validation is the test": (("train/a/*2.png", "train/b/*2.png", "valid/b/*1.png"), AB,
        {"b": 1}, "using valid as the common test set"),
    "a test set without labels": (("train/a/*2.png", "train/b/*2.png", "val/b/*1.png",
        "test/*4.png"), AB, {"b": 1}, "4 in test (val is the common test set)"),
    "scenes": (("seg_train/seg_train/a/*2.png", "seg_train/seg_train/b/*2.png",
        "seg_test/seg_test/b/*1.png", "seg_pred/seg_pred/*5.png"), AB, {"b": 1},
        "5 in seg_pred (next to seg_train)"),
    "sets": (("training_set/training_set/a/*2.png", "training_set/training_set/b/*2.png",
        "test_set/test_set/a/*1.png", "test_set/test_set/b/*1.png"), AB, {"a": 1, "b": 1}, ""),
    "doubled": (("data/data/a/*2.png", "data/data/b/*2.png", "data/README.txt"), AB, None,
        "1 .txt"),
    "tools": ((*FLAT, ".ipynb_checkpoints/*2.png", "a/.ipynb_checkpoints/*1.png", "a/@eaDir/*1.png",
        "a/Thumbs.db", "b/desktop.ini", "$RECYCLE.BIN/*1.png", "lost+found/*1.png", "b/._0.png"),
        AB, None, "1 Thumbs.db (created by other programs)"),
    "endings": (("a/*1.PNG", "a/*1.gif", "b/*1.jfif", "b/*1.Jpe"), AB, None, ""),
    "files of all kinds": ((*FLAT, "a/*3.dcm", "b/*2.heic", "b/*1.nii.gz", "a/*1.txt", "x.csv",
        "b/IMG0001"), AB, None, "3 .dcm (DICOM: convert them to 8-bit or 16-bit PNG)"),
    "loose": ((*FLAT, "*3.png"), AB, None, "3 images (outside of the class directories)"),
    "masks of each class": (("a/images/*2.png", "a/masks/*2.png", "b/images/*2.png",
        "b/masks/*1.png"), AB, None, "3 in masks (masks or annotations)"),
    "a class in batches": (("a/*1.png", "a/more/*1.png", "b/*2.png"), AB, None, ""),
    "classes doubled": (("a/a/*2.png", "b/b/*2.png"), AB, None, ""),
    "without a class": (("train/a/*2.png", "train/b/*2.png", "train/Unlabeled/*4.png"), AB, None,
        ""),
    "a test class is missing or empty": (("train/a/*2.png", "train/b/*2.png", "test/b/*1.png",
        "test/a/", "test/c/"), AB, {"a": 0, "b": 1}, ""),
    "a class named train": (("train/train/*2.png", "train/bus/*2.png"), {"train": 2, "bus": 2},
        None, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_is_read_and_every_other_file_is_counted(tmp_path, case, caplog):
    names, train, test, said = LAYOUTS[case]
    tree = find_tree(plant(tmp_path / "tree", *names), IMAGES)
    tree.unused.report(tree.root, IMAGES)
    assert tree.classes == tuple(sorted(train))
    assert (counted(tree.train), counted(tree.test)) == (train, test)
    lines = [record.getMessage() for record in caplog.records]
    assert any(said in line for line in lines) if said else not lines
    total = sum(len(files) for _, _, files in os.walk(tree.root))
    used = sum(train.values()) + sum((test or {}).values())
    apart = len(tree.unlabeled or ())
    assert total == used + len(tree.unused) + apart, "each file is used or counted"
    assert all("\n" not in line for line in lines)


REFUSED = {
    "hospitals first": (("h1/a/*2.png", "h1/b/*2.png", "h2/a/*1.png", "h2/b/*1.png"),
        "either h1, h2 or a, b, because"),
    "hospitals below the part": (("train/h1/a/*2.png", "train/h2/b/*2.png", "test/h1/a/*1.png"),
        "either h1, h2 or a, b"),
    "parts below hospitals": (("h1/train/a/*1.png", "h1/test/a/*1.png", "h2/train/b/*1.png"),
        "test and train must be at the top of the tree"),
    "parts below classes": (("a/Train/*1.png", "b/Train/*1.png"), "Train must be at the top"),
    "organs first": (("colon/colon_aca/*1.png", "colon/colon_n/*1.png", "lung/lung_n/*1.png"),
        "either colon, lung or colon_aca, colon_n, lung_n"),
    "a copy next to the classes": (("a/*1.png", "b/*1.png", "cells/a/*1.png", "cells/b/*1.png"),
        "duplicate name of a class directory. Move or remove it"),
    "images and labels": (("images/*3.png", "labels/*3.png"), "look like parts of a dataset"),
    "pieces": (("images_part_1/*1.png", "images_part_2/*1.png", "metadata.csv"),
        "look like parts of a dataset, not like classes (images_part_1, images_part_2)"),
    "a table of labels": (("train/*3.png", "train.csv"),
        "expected one directory of images for each class, got 3 images outside of class "
        "directories. A label table must be "),
    "test among the classes": (("a/*1.png", "b/*1.png", "test/*3.png"), "ambiguous directory"),
    "train among the classes": (("bus/*1.png", "plane/*1.png", "train/*3.png"),
        "If train is a class, move all class directories into"),
    "no training part": (("test/a/*1.png", "val/a/*1.png"), "no directory of training images"),
    "two training parts": (("train/a/*1.png", "Training/a/*1.png"),
        "expected one train directory, got Training and train. Remove or rename"),
    "an empty class": (("a/*1.png", "b/*1.png", "c/"), "expected images (.jpg"),
    "a class of other files": (("a/*1.png", "b/*2.dcm"), "got only 2 .dcm (DICOM: convert"),
    "a test set without classes": (("train/a/*1.png", "train/b/*1.png", "test/*2.png"),
        "expected one directory of images for each class, got 2 images outside of"),
    "LEAF": (("train/*2.json", "test/*2.json"), "one directory of images for each class"),
    "nothing": (("x.txt",), "got no directories"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_is_ambiguous_or_without_classes_is_one_line(tmp_path, case):
    names, fault = REFUSED[case]
    with pytest.raises(DataError) as caught:
        find_tree(plant(tmp_path / "tree", *names), IMAGES)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_says_which_directories_are_the_classes(tmp_path):
    root = plant(tmp_path / "tree", "h1/a/*2.png", "h1/b/*2.png", "h2/a/*1.png", "h2/x.png")
    spec = DataSpec(dataset=f"imagefolder:{root}")
    found = {level: load(spec.replace(class_level=level)) for level in (1, 2)}
    assert (found[1].classes, found[1].train.y.tolist()) == (("h1", "h2"), [0] * 4 + [1] * 2)
    assert (found[2].classes, found[2].train.y.tolist()) == (("a", "b"), [0] * 3 + [1] * 2)


def test_a_site_decides_by_its_list_of_classes(tmp_path):
    root = plant(tmp_path, "Training/a/2021/*4.png", "Training/b/2021/*4.png", "Training/b/*3.txt")
    spec = DataSpec(test_fraction=0.25)
    (root / "classes.txt").write_text("b\na\nc\n")
    found = site_data(str(root), spec=spec, classes=3, name="s")
    labels = [*found.train.y.tolist(), *found.test.y.tolist()]
    assert (found.classes, sorted(labels)) == (("b", "a", "c"), [0] * 4 + [1] * 4)
    (root / "classes.txt").unlink()
    with pytest.raises(DataError, match="list the classes in classes"):
        site_data(str(root), spec=spec.replace(class_level=1), classes=2, name="s")
    plant(root, "Training/a/x.png", "Training/b/x.png", "Training/unlabeled/*3.png", "Training/c/")
    found = site_data(str(root), spec=spec, classes=3, name="s", unlabeled=True)
    assert (found.classes, found.space) == (("a", "b", "c"), (0, 1))
    assert len(found.unlabeled) == 3


def test_names_of_parts():
    exact = ("Training", "TEST", "valid", "validation", "Testing", "val")
    assert [part_of(name) for name in exact] == ["train", "test", "val", "val", "test", "val"]
    assert [part_of(name) for name in ("tests", "trains", "seg_train", "")] == [""] * 4
    assert [part_of(name, any_word=True) for name in ("seg_train", "Test Data", "train-test")] == [
        "train", "test", "",
    ]  # fmt: skip


def test_a_name_with_a_part_in_it_may_be_a_class(tmp_path):
    tree = find_tree(plant(tmp_path, "train_station/*1.png", "test_tube/*2.png"), IMAGES)
    assert counted(tree.train) == {"train_station": 1, "test_tube": 2}


def test_a_symlink_to_nothing_and_a_pipe(tmp_path, caplog):
    root = plant(tmp_path / "tree", *FLAT)
    os.mkfifo(root / "a" / "pipe.png")
    tree = find_tree(root, IMAGES)
    assert str(tree.unused) == "1 pipe.png (not a regular file)"
    (root / "b" / "loop.png").symlink_to("loop.png")
    with pytest.raises(DataError, match=r"loop\.png: not a readable image"):
        load(DataSpec(dataset=f"imagefolder:{root}"))


def test_a_directory_that_cannot_be_read(tmp_path, monkeypatch):
    root, scandir = plant(tmp_path / "tree", *FLAT), os.scandir

    def refused(path):
        if os.path.basename(path) == "b":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match=r"b: not a readable directory \(Permission denied\)"):
        find_tree(root, IMAGES)


def test_files_for_prediction_are_found_and_counted(tmp_path, caplog):
    root = plant(tmp_path / "new", "*2.png", "deep/*1.jfif", ".hidden/*1.png", "*3.dcm")
    (root / "link").symlink_to(tmp_path)
    found = _files_in([root], IMAGES)
    assert [os.path.basename(path) for path in found] == ["0.png", "1.png", "0.jfif"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "5 files are not used as images: 3 .dcm (DICOM" in line


# --- images -----------------------------------------------------------------------------------


def shown(path, **changes):
    return decode([str(path)], DataSpec(**changes))[0].numpy()


RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (4, 6, 3), np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["png", "webp", "tiff"])
def test_an_image_is_turned_as_its_exif_data_says(tmp_path, orientation, format):
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
def test_an_uncompressed_gray_tiff_is_turned(tmp_path, orientation, kind):
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
def test_zero_is_white_if_a_gray_tiff_says_so(tmp_path, kind, photometric):
    levels = np.array([[0, 1, 100, 255], [7, 30, 200, 254]])
    stored = (levels * (257 if kind == "<u2" else 1)).astype(kind)
    (tmp_path / "a.tif").write_bytes(uncompressed_tiff(stored, photometric))
    expected = levels if photometric else 255 - levels
    assert shown(tmp_path / "a.tif").tolist() == [expected.tolist()]


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_values_without_a_range_are_refused(tmp_path, kind):
    PIL.Image.fromarray(np.ones((2, 2), kind)).save(tmp_path / "a.tiff")
    with pytest.raises(
        DataError, match=r"a\.tiff: expected 8 or 16 bits per channel, .* whose range is unknown"
    ):
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


def test_of_an_animation_the_first_frame_is_read(tmp_path):
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
    with pytest.raises(DataError, match=r"a\.png: not a readable image"):
        shown(tmp_path / "a.png")
    (tmp_path / "b.jpg").write_bytes(PICTURE)  # a PNG file that somebody has renamed
    assert shown(tmp_path / "b.jpg").shape == (3, 2, 3)


def test_a_picture_larger_than_pillow_allows_is_named(tmp_path):
    header = bytearray(png(1))
    header[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    (tmp_path / "huge.png").write_bytes(header)
    with pytest.raises(DataError, match=r"huge\.png: not a readable image"):
        shown(tmp_path / "huge.png", image_size=2)


# --- texts ------------------------------------------------------------------------------------

TEXT = "Zoë's café – “naïve”"


def tokens(path):
    return read_files([str(path)], DataSpec(max_tokens=12)).tolist()


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"]
)
def test_one_text_in_every_encoding(tmp_path, encoding, caplog):
    text = f"{TEXT} " + "and plain words " * 9
    for name in ("plain", encoding):
        (tmp_path / "c" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "c" / "plain").write_text(text, encoding="utf-8")
    (tmp_path / "c" / encoding).write_bytes(text.encode(encoding))
    assert tokens(tmp_path / "c" / encoding) == tokens(tmp_path / "c" / "plain")
    said = "1 of 1 texts are not in UTF-8 and were decoded as Windows-1252" in caplog.text
    assert said == (encoding == "cp1252")


@pytest.mark.parametrize("encoding", ["cp1251", "koi8-r", "shift-jis", "gb18030"])
def test_another_alphabet_is_refused_and_not_misread(tmp_path, encoding):
    text = "日本語の文章です" if encoding in ("shift-jis", "gb18030") else "Это не латинский текст"
    path = plant(tmp_path, "c/a.txt", content=(text * 9).encode(encoding)) / "c" / "a.txt"
    with pytest.raises(DataError, match=r"a\.txt: not valid UTF-8 text .*iconv -f"):
        tokens(path)


def test_a_binary_file_is_no_text(tmp_path):
    path = plant(tmp_path, "c/a", content=bytes(range(200)) + bytes(300)) / "c" / "a"
    with pytest.raises(DataError, match="not valid UTF-8 text"):
        tokens(path)


TEXT_TREES = {
    "20 newsgroups": (("20news-bydate/20news-bydate-train/alt.atheism/*3", "20news-bydate/"
        "20news-bydate-train/sci.med/*2", "20news-bydate/20news-bydate-test/sci.med/*1"),
        {"alt.atheism": 3, "sci.med": 2}, {"sci.med": 1}, ""),
    "aclImdb": (("train/pos/*2.txt", "train/neg/*2.txt", "train/unsup/*5.txt", "train/urls_pos.txt",
        "train/labeledBow.feat", "test/pos/*1.txt", "test/urls_pos.txt", "imdb.vocab", "README"),
        {"neg": 2, "pos": 2}, {"pos": 1}, "2 .txt files (outside of the class directories)"),
    "SpamAssassin": (("ham/00001.7c53336b37003a9286aba55d2945844c", "ham/cmds",
        "spam/00001.317e78fa8ee2f54cd4890fdc09ba8176"), {"ham": 1, "spam": 1}, None,
        "1 without an extension"),
    "Enron mail": (("ham/1.", "ham/2.", "spam/1."), {"ham": 2, "spam": 1}, None, ""),
    "Enron spam": (("ham/*2.txt", "spam/*2.TXT", "Summary.txt"), {"ham": 2, "spam": 2}, None,
        "1 .txt files (outside of the class directories)"),
    "pages": (("a/*2.txt", "b/*2.txt", "a/index.html", "b/LICENSE"), {"a": 2, "b": 2}, None,
        "1 .html"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXT_TREES)
def test_a_tree_of_texts(tmp_path, case, caplog):
    names, train, test, said = TEXT_TREES[case]
    root = plant(tmp_path / "tree", *names, content=b"a few words")
    data = load(DataSpec(dataset=f"text:{root}", max_tokens=4))
    tree = find_tree(root, TEXTS)
    assert (counted(tree.train), counted(tree.test)) == (train, test)
    assert len(data.train) == sum(train.values())
    assert (said in caplog.text) if said else not caplog.records
    assert len(caplog.records) <= 1


def test_images_with_texts_next_to_them_are_images(tmp_path, caplog):
    root = plant(tmp_path, "train/a/*4.png", "train/b/*4.png")
    plant(root, "train/a/*4.txt", "train/b/*9.txt", content=b"a cat")
    spec = DataSpec(test_fraction=0.25)
    found = site_data(str(root), spec=spec, classes=2, name="s")
    assert found.shape == (3, 2, 3)
    assert "13 files are not used as images: 13 .txt" in caplog.text
    for name in ("a", "b"):
        for path in (root / "train" / name).glob("*.png"):
            path.unlink()
    found = site_data(str(root), spec=spec, classes=2, name="s")
    assert found.shape == (0, 128, 8192)


def test_nothing_of_the_counts_leaves_the_log(tmp_path, caplog):
    """The counts are only in this machine's log, and in no object that is sent."""
    root = plant(tmp_path, "train/a/*4.png", "train/b/*4.png", "train/a/*7.dcm")
    found = site_data(str(root), spec=DataSpec(test_fraction=0.25), classes=2, name="s")
    assert [record.name for record in caplog.records] == ["fedhet"]
    assert caplog.records[0].levelno == logging.WARNING
    assert "dcm" not in repr(vars(found))
