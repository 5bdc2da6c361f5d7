"""What is built of the project, by hatchling and by Flower, holds every module once."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project's tracked files, links as links, as in a fresh clone."""
    folder = tmp_path_factory.mktemp("project") / "fedhet"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def package_of(folder):
    """Return the files of the package, as paths in the project."""
    found = (path for path in (folder / "fedhet").rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix() for path in found if "__pycache__" not in path.parts
    }


def built(project, target, folder):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


def names_in(archive):
    names = archive.getnames() if isinstance(archive, tarfile.TarFile) else archive.namelist()
    assert len(set(names)) == len(names)
    return names


def test_the_wheel_holds_fedhet_and_no_other_package(project, tmp_path):
    with zipfile.ZipFile(built(project, "wheel", tmp_path)) as wheel:
        names = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert names == package_of(project)


def test_a_wheel_can_be_built_of_the_sdist(project, tmp_path):
    with tarfile.open(built(project, "sdist", tmp_path / "sdist")) as sdist:
        names = {name.partition("/")[2] for name in names_in(sdist)}
        sdist.extractall(tmp_path / "unpacked", filter="data")
    assert names >= package_of(project)
    assert {name.partition("/")[0] for name in names} >= {"README.md", "LICENSE", "tests", "docs"}
    assert not {"strategies", "clients"} & {name.partition("/")[0] for name in names}
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(built(unpacked, "wheel", tmp_path / "wheel")) as wheel:
        assert set(names_in(wheel)) >= package_of(project)


def test_flowers_bundle_holds_every_module(project):
    command = [str(Path(sys.executable).parent / "flwr"), "build"]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (file,) = project.glob("*.fab")
    with zipfile.ZipFile(file) as bundle:
        names = set(names_in(bundle))
    modules = {name for name in package_of(project) if name.endswith((".py", ".toml"))}
    assert names >= modules
    assert not {name for name in names if name.startswith(("strategies/", "clients/"))}
