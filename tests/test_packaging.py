"""Packages built by hatchling and by Flower contain every module once."""

import contextlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import psutil
import pytest
import tomli_w
from flwr.cli.build import build_fab_from_disk
from packaging.version import Version

from fedhet.deployment.control import program
from fedhet.deployment.local import end_trees, free_port

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project's tracked files with their symlinks, like a fresh clone."""
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


def test_wheel_contains_only_fedhet(project, tmp_path):
    with zipfile.ZipFile(built(project, "wheel", tmp_path)) as wheel:
        names = {name for name in names_in(wheel) if ".dist-info/" not in name}
        (program,) = (each for each in wheel.infolist() if each.filename.endswith("clientapp"))
    assert names == package_of(project)
    assert program.external_attr >> 16 & 0o111, "Flower starts this program"


def test_wheel_can_be_built_of_the_sdist(project, tmp_path):
    with tarfile.open(built(project, "sdist", tmp_path / "sdist")) as sdist:
        names = {name.partition("/")[2] for name in names_in(sdist)}
        sdist.extractall(tmp_path / "unpacked", filter="data")
    assert names >= package_of(project)
    assert {name.partition("/")[0] for name in names} >= {"README.md", "LICENSE", "tests", "docs"}
    assert not {"strategies", "clients"} & {name.partition("/")[0] for name in names}
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(built(unpacked, "wheel", tmp_path / "wheel")) as wheel:
        assert set(names_in(wheel)) >= package_of(project)


@pytest.fixture(scope="module")
def bundle(project):
    """The app bundle (FAB) that `flwr run` sends and unpacks, as an open archive."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(project))) as archive:
        yield archive


def test_flower_bundle_contains_the_package_except_type_stubs(project, bundle):
    """Flower silently drops files by suffix, such as templates, styles, and fonts."""
    names = set(names_in(bundle))
    unused = (".pyi", "/flwr-clientapp")  # `fedhet node`, which needs the latter, is installed
    assert names >= {name for name in package_of(project) if not name.endswith(unused)}
    assert not {name for name in names if name.startswith(("strategies/", "clients/"))}


@contextlib.contextmanager
def superlink(folder, environment):
    """Start Flower's server for simulations on a separate port; yield a working directory."""
    port = free_port()
    connection = {"address": f"127.0.0.1:{port}", "insecure": True}
    superlinks = {"superlink": {"default": "here", "here": connection}}
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(tomli_w.dumps(superlinks))
    (folder / "empty").mkdir()
    words = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    command = [program("flower-superlink"), *words, "--disable-runtime-dependency-installation"]
    with (folder / "superlink.log").open("wb") as log:
        process = psutil.Popen(
            command, cwd=folder / "empty", env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            time.sleep(0.2)
        yield folder / "empty"
    finally:
        end_trees([process])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flwr_run_of_the_unpacked_bundle_completes_with_its_table_and_page(bundle, tmp_path):
    """Start the app like a user of Flower; the installed fedhet must not write the report."""
    app = tmp_path / "app"
    bundle.extractall(app)
    (template,) = (path for path in app.rglob("template.html*"))
    template.write_text(template.read_text().replace("<head>", "<head><!-- of the bundle -->"))
    hidden = {"PYTHONPATH", "FEDHET_LOG", "FEDHET_LOG_LEVEL"}
    environment = {
        **{name: value for name, value in os.environ.items() if name not in hidden},
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1", "FEDHET_STATE_DIR": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    out = tmp_path / "a-run"

    def flwr(*words):
        done = subprocess.run(
            [program("flwr"), *words], cwd=tmp_path / "empty", env=environment,
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with superlink(tmp_path, environment):
        settings = f'rounds=1 models.pool="mlp" training.local-epochs=1 out="{out}"'
        federation = "num-supernodes=2 client-resources-num-cpus=1"
        words = ["--run-config", settings, "--federation-config", federation, "--format", "json"]
        run = json.loads(flwr("run", str(app), *words))["run-id"]
        log = flwr("log", run, "--stream")
        # `flwr run --stream` and `flwr log` exit with 0 even if the run has failed.
        (listed,) = json.loads(flwr("list", "--run-id", run, "--format", "json"))["runs"]
    assert listed["status"] == "finished:completed", log
    summary = json.loads((out / "summary.json").read_text())
    assert summary["clients"] == 2
    assert 0 < summary["accuracy"]["personal"]["private"]["mean"] <= 1
    assert f"report, on the server: {out / 'report.html'}" in log
    assert "private" in log  # the table's row
    assert "Traceback" not in log
    page = (out / "report.html").read_text()
    assert "<!-- of the bundle -->" in page
    assert "<svg" in page


def test_classifiers_name_the_tested_versions_of_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    classified = [each.removeprefix(prefix) for each in project["classifiers"] if prefix in each]
    (row,) = re.findall(
        r"^\| Linux, x86-64 \| (.*) \|$", (ROOT / "docs/start.md").read_text(), re.M
    )
    assert row == ", ".join(classified)
    assert classified[0] == Version(project["requires-python"].removeprefix(">=")).base_version
