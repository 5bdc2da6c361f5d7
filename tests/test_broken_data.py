"""Damaged and malicious data files: each causes one line of output, and uses little memory."""

import contextlib
import gzip
import io
import os
import re
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from pydantic import ValidationError
from test_tabular import write_adult

from fedhet.base.errors import DataError
from fedhet.data.site import site_data
from fedhet.data.sources.images import decode
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load

SITE = DataSpec(test_fraction=0.25)
ROWS = {"x": np.ones((8, 3), np.float32), "y": np.arange(8) % 2}


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))


def fault(call):
    """Return the single printable line of the DataError."""
    with pytest.raises(DataError) as caught:
        call()
    assert str(caught.value).isprintable()
    return str(caught.value)


def site(folder, spec=SITE, classes=2):
    return site_data(f"npz:{folder}", spec=spec, classes=classes, name="site")


# --- npz ------------------------------------------------------------------------------------


def saved(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def archive(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def header(text, size=118):
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n"


GOOD = {f"{name}.npy": saved(value) for name, value in ROWS.items()}
NPY_OF = b"{'descr': '<f4', 'fortran_order': False, 'shape': %s, }"
MEMBERS = {
    "no array": {"x": b"not an array", "y.npy": GOOD["y.npy"]},
    "an empty member": {**GOOD, "x.npy": b""},
    "text": {**GOOD, "x.npy": b"hello" * 100},
    "a header that is no Python": {**GOOD, "x.npy": header(b"{'descr': '<f4', 'shape': ((((((")},
    "a header of brackets": {**GOOD, "x.npy": header(b"(" * 9000, 9100)},
    "a header that is code": {**GOOD, "x.npy": header(b"__import__('os').system('true')")},
    "a header that lacks a key": {**GOOD, "x.npy": header(b"{'descr': '<f4'}")},
    "a type that there is not": {
        **GOOD,
        "x.npy": header(NPY_OF.replace(b"<f4", b"<q9") % b"(8, 3)"),
    },
    "more rows than bytes": {**GOOD, "x.npy": header(NPY_OF % b"(9, 3)") + bytes(96)},
    "fewer rows than bytes": {**GOOD, "x.npy": header(NPY_OF % b"(7, 3)") + bytes(96)},
    "rows below 0": {**GOOD, "x.npy": header(NPY_OF % b"(-8, -3)") + bytes(96)},
    "10^18 rows": {**GOOD, "x.npy": header(NPY_OF % b"(1000000000000000000, 3)") + bytes(96)},
    "a pickle": {**GOOD, "x.npy": saved(np.array([None] * 8))},
    "version 3": {**GOOD, "x.npy": b"\x93NUMPY\x03\x00" + GOOD["x.npy"][8:]},
}


@pytest.mark.parametrize("case", MEMBERS)
def test_member_without_an_array_raises(tmp_path, case):
    path = archive(tmp_path / "train.npz", MEMBERS[case])
    tracemalloc.start()
    try:
        message = fault(lambda: site(tmp_path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message.startswith(f"{path}: ")
    assert peak < 4_000_000


def patched(path, change):
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def damage_stream(data):
    at = data.index(b"x.npy") + 40
    data[at : at + 20] = b"\xff" * 20


def set_field(offset, value):
    def change(data):
        for start, more in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
            at = data.index(start) + offset + more
            data[at : at + 2] = value.to_bytes(2, "little")

    return change


ZIPS = {
    "a damaged stream": damage_stream,
    "an unknown compression": set_field(8, 99),
    "encrypted": set_field(6, 1),
    "cut": lambda data: data.__delitem__(slice(len(data) // 2, None)),
    "empty": bytearray.clear,
}


@pytest.mark.parametrize("case", ZIPS)
def test_damaged_archive_raises(tmp_path, case):
    path = archive(tmp_path / "train.npz", GOOD)
    patched(path, ZIPS[case])
    assert fault(lambda: site(tmp_path)).startswith(f"{path}: not a readable .npz file (")


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("deep"), zlib.error("bad"), KeyError(1)]
)
def test_library_errors_name_the_file(tmp_path, monkeypatch, error):
    path = archive(tmp_path / "train.npz", GOOD)

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(zipfile.ZipFile, "open", fails)
    message = fault(lambda: site(tmp_path))
    assert message.startswith(f"{path}: not a readable .npz file ({type(error).__name__}")


def test_oversized_archive_raises_before_unpacking(tmp_path):
    """Zeros compress to a thousandth of their size."""
    rows = 100_000
    path = tmp_path / "train.npz"
    np.savez_compressed(path, x=np.zeros((rows, 1, 8, 8), np.uint8), y=np.zeros(rows, np.uint8))
    assert path.stat().st_size < 50_000
    takes = rows * 64 + rows * 8  # bytes stay bytes, labels become int64
    tracemalloc.start()
    try:
        message = fault(lambda: site(tmp_path, SITE.replace(max_bytes=takes - 1)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    limit = f"expected at most data.max-bytes = {takes - 1} bytes in memory"
    assert message == f"{path}: {limit}, got {takes}"
    assert peak < 1_000_000
    assert len(site(tmp_path, SITE.replace(max_bytes=takes)).train) == 75_000


def test_converted_values_count_as_float32(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.zeros((1000, 50), np.int8), y=np.arange(1000) % 2)
    takes = 1000 * 50 * 4 + 1000 * 8
    assert "bytes in memory" in fault(lambda: site(tmp_path, SITE.replace(max_bytes=takes - 1)))
    assert len(site(tmp_path, SITE.replace(max_bytes=takes)).train) == 750


def test_size_limit_covers_the_files_of_all_clients(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        for k in range(2):
            np.savez(tmp_path / part / f"{k}.npz", **ROWS)
    each = 8 * 3 * 4 + 8 * 8
    spec = DataSpec(dataset=f"npz:{tmp_path}", clients=2, max_bytes=4 * each)
    assert len(load(spec).train) == 32
    message = fault(lambda: load(spec.replace(max_bytes=4 * each - 1)))
    assert message == (
        f"{tmp_path}: expected at most data.max-bytes = {4 * each - 1} bytes in memory, "
        f"got {4 * each}"
    )


# --- tables ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e400", "1e16", "-1e300"])
def test_invalid_number_raises(tmp_path, number):
    dataset = write_adult(tmp_path)
    path = tmp_path / "adult.data"
    first, _, rest = path.read_text().partition(",")
    assert first.strip().isdecimal()
    path.write_text(f"{number},{rest}")
    message = fault(lambda: load(DataSpec(dataset=dataset)))
    assert "numbers must be finite" in message
    assert "finite and up to ±1e+15" in message


def test_endless_field_raises(tmp_path):
    """A text array would use four bytes per character of the longest field for each field."""
    dataset = write_adult(tmp_path)
    with (tmp_path / "adult.data").open("a") as file:
        file.write(", ".join(["w" * 100_000] * 15) + "\n")
    tracemalloc.start()
    try:
        message = fault(lambda: load(DataSpec(dataset=dataset)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "a numeric column contains a word" in message
    assert len(message) < 300
    assert peak < 20_000_000


def test_archive_of_a_large_table_raises(tmp_path):
    dataset = write_adult(tmp_path)
    path = tmp_path / "adult.data.gz"
    path.write_bytes(gzip.compress(b"\n" * 5_000_000))
    (tmp_path / "adult.data").unlink()
    message = fault(lambda: load(DataSpec(dataset=dataset, max_bytes=1_000_000)))
    assert re.match(rf"{path}: expected .* bytes in memory, got 1\d{{6}}$", message)


@pytest.mark.parametrize("at", [12, 40, 100])
def test_damaged_archive_of_a_table_raises(tmp_path, at):
    dataset = write_adult(tmp_path)
    path = tmp_path / "adult.data"
    packed = bytearray(gzip.compress(path.read_bytes()))
    packed[at : at + 8] = b"\xff" * 8
    path.unlink()
    path.with_name("adult.data.gz").write_bytes(packed)
    assert "adult.data.gz: not a readable table" in fault(lambda: load(DataSpec(dataset=dataset)))


# --- image folders --------------------------------------------------------------------------


def tree(root, classes=("ant", "cat", "dog"), each=2):
    for name in classes:
        (root / name).mkdir(parents=True)
        for row in range(each):
            PIL.Image.new("RGB", (6, 5), (row, 0, 0)).save(root / name / f"{row}.png")
    return root


def folder(root, **changes):
    return DataSpec(dataset=f"imagefolder:{root}", clients=1, min_samples=1, **changes)


LINKS = {
    "a class to another": ("elk", "cat"),
    "a class to another that follows": ("bee", "cat"),
    "a class to all of it": ("elk", "."),
    "unlabeled samples to their parent": ("unlabeled/more", ".."),
    "unlabeled samples to themselves": ("unlabeled/more", "."),
    "unlabeled samples to a class": ("unlabeled/more", "../cat"),
}


@pytest.mark.parametrize("case", LINKS)
@pytest.mark.parametrize("part", ["", "train"])
def test_symlink_back_into_the_data_raises(tmp_path, case, part):
    root = tree(tmp_path / "tree" / part)
    place, target = LINKS[case]
    (root / place).parent.mkdir(exist_ok=True)
    (root / place).symlink_to(target, target_is_directory=True)
    message = fault(lambda: load(folder(tmp_path / "tree")))
    assert message.startswith(f"{root / place}: a symlink leads to")
    assert "files are already part of the data" in message


@pytest.mark.parametrize(("part", "other"), [("train", "test"), ("test", "train")])
def test_symlink_to_the_other_part_raises(tmp_path, part, other):
    for name in ("train", "test"):
        tree(tmp_path / "tree" / name)
    (tmp_path / "tree" / part / "ant" / "0.png").unlink()
    (tmp_path / "tree" / part / "ant" / "1.png").unlink()
    (tmp_path / "tree" / part / "ant").rmdir()
    (tmp_path / "tree" / part / "ant").symlink_to(tmp_path / "tree" / other / "cat")
    message = fault(lambda: load(folder(tmp_path / "tree")))
    assert message.startswith(f"{tmp_path / 'tree' / part / 'ant'}: a symlink leads to")


def test_symlinks_to_a_parent_are_not_followed(tmp_path):
    """Each level would double the number of visited files, up to the system limit of 40 links."""
    root = tree(tmp_path / "tree")
    (root / "unlabeled").mkdir()
    for number in range(6):
        (root / "unlabeled" / f"more{number}").symlink_to("..")
    assert "symlink leads to" in fault(lambda: load(folder(root)))


def test_unlabeled_images_belong_to_one_client(tmp_path):
    train = tree(tmp_path / "site" / "train")
    (train / "unlabeled").symlink_to("cat")
    with pytest.raises(DataError, match="already"):
        site_data(
            f"imagefolder:{tmp_path / 'site'}", spec=SITE, classes=3, name="s", unlabeled=True
        )


@pytest.mark.parametrize("part", ["", "train"])
def test_symlinks_to_other_directories_are_followed(tmp_path, part):
    root = tree(tmp_path / "here" / part)
    tree(tmp_path / "there", ("elks",))
    (root / "elk").symlink_to(tmp_path / "there" / "elks")
    data = load(folder(tmp_path / "here"))
    assert data.format.classes == ("ant", "cat", "dog", "elk")
    assert np.bincount(data.train.y).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("name", [b"caf\xe9", b"a\x1b[2Jb", b"a\nb", "a\u202eb".encode()])
def test_unprintable_class_raises(tmp_path, name):
    root = tree(tmp_path / "tree")
    os.rename(os.fsencode(root / "cat"), os.fsencode(root) + b"/" + name)
    message = fault(lambda: RunData(folder(root)).validate())
    assert "the name must be printable UTF-8 text" in message


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\u202eb"])
def test_unprintable_class_in_a_list_raises(tmp_path, name):
    np.savez(tmp_path / "train.npz", **ROWS)
    (tmp_path / "classes.txt").write_text(f"{name}\ndog\n")
    assert "classes.txt: class name" in fault(lambda: site(tmp_path))
    (tmp_path / "classes.txt").write_text("chat épais\ndog\n")
    assert site(tmp_path).format.classes == ("chat épais", "dog")


def test_file_name_outside_utf_8_raises(tmp_path):
    root = tree(tmp_path / "tree", each=3)
    odd = os.fsencode(root / "cat") + b"/caf\xe9.png"
    os.rename(root / "cat" / "0.png", odd)
    assert len(load(folder(root)).train) == 9
    Path(os.fsdecode(odd)).write_bytes(b"no image")
    assert r"caf\udce9.png: not a readable image" in fault(lambda: load(folder(root)))


def test_oversized_images_are_not_decoded(tmp_path, monkeypatch):
    root = tree(tmp_path / "tree")
    takes = 6 * 3 * 40 * 40
    spec = folder(root, image_size=40)
    message = fault(lambda: load(spec.replace(max_bytes=takes - 1)))
    limit = f"expected at most data.max-bytes = {takes - 1} bytes in memory"
    assert message == f"{root / 'ant' / '0.png'} and the other images: {limit}, got {takes}"
    assert not list((tmp_path / "cache").glob("*.npy"))
    assert load(spec.replace(max_bytes=takes)).train.x.nbytes == takes
    assert "bytes in memory" in fault(lambda: load(folder(root, image_size=65_535)))


def test_image_of_many_pixels_is_not_decoded(tmp_path):
    """Black pixels compress to a thousandth, and `data.image-size` would reduce them again."""
    root = tree(tmp_path / "tree")
    PIL.Image.new("L", (2000, 1500)).save(root / "cat" / "9.png")
    assert (root / "cat" / "9.png").stat().st_size < 10_000
    spec = folder(root, image_size=4)
    tracemalloc.start()
    try:
        message = fault(lambda: load(spec.replace(max_bytes=10_000_000)))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert "got 96000000 to decode 8 images of 2000 x 1500 pixels" in message
    assert len(load(spec.replace(max_bytes=100_000_000)).train) == 7


def test_image_side_is_limited():
    with pytest.raises(ValidationError, match="65535"):
        DataSpec(image_size=65_536)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "webp", "jpeg", "ppm"])
def test_damaged_image_raises_in_every_format(tmp_path, suffix, monkeypatch):
    """A damaged image is decoded or rejected, and no other error is raised."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    rng = np.random.default_rng(0)
    image = PIL.Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    stream, odd, refused = io.BytesIO(), tmp_path / f"odd.{suffix}", 0
    image.save(stream, suffix)
    for attempt in range(40):
        data = bytearray(stream.getvalue())
        for _ in range(1 + attempt % 4):
            data[rng.integers(len(data))] = rng.integers(256)
        if attempt % 3 == 0:
            del data[rng.integers(len(data)) :]
        odd.write_bytes(data)
        with contextlib.suppress(DataError):
            assert decode([str(odd)], DataSpec(image_size=4)).shape[2:] == (4, 4)
            continue
        refused += 1
    assert refused > 3
