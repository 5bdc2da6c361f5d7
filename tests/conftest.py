"""Parallel test runs in memory: one worker per file, and one process-starting test at a time."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
import torch

# Before fedhet.cli reads it: a test runner's workers may set the width of a terminal.
os.environ.pop("COLUMNS", None)

from fedhet.algorithms import feature_models, local_models
from fedhet.cli import main
from fedhet.engines import connection
from fedhet.learning import training

MEMORY = Path("/dev/shm")
MIN_FREE = 4 * 2**30
"""Free bytes in memory that a test run needs: the files of all tests together have 2 GB."""


def use_memory() -> None:
    """Let this process and its children write temporary files to memory, if it has enough space.

    Runs sync many small files, for which tests would otherwise wait most of the time. Processes
    for parallel tests inherit the choice.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free >= MIN_FREE:
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None


use_memory()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker a core, and one thread in each
os.environ.setdefault("RAY_worker_niceness", "0")  # else its workers wait for the other tests

FAILED = pytest.StashKey[bool]()

hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

PROCESSES = {
    "test_cli",
    "test_cluster_hosts",
    "test_shared_cache",
    "test_deploy",
    "test_faults",
    "test_hosts",
    "test_import_name",
    "test_external_methods",
    "test_run",
    "test_slow",
}
"""Files whose tests start Ray or a deployment, each of which wants the machine."""


ALLOWED_SKIPS = {
    "needs a GPU": "machines for continuous integration have no GPU",
    "PyTorch without CUDA has no list of its kernels": "the same; PyTorch may be built for CPUs",
    "no network namespaces here": "only root may create them, and not in every container",
    "root may write anywhere": "as root, no directory is read-only",
    "glibc's allocator": "macOS has no glibc",
}
"""Beginnings of the reasons for which a test may be skipped in continuous integration, and why no
installation would help. With CI set, any other skipped test fails."""


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skipped test or file into a failure if its reason is not in `ALLOWED_SKIPS`."""
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    where = report.longrepr
    reason = str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")
    if not reason.startswith(tuple(ALLOWED_SKIPS)):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped: {reason}. With CI set, install what the test needs, or list the reason in "
            "ALLOWED_SKIPS (tests/conftest.py)."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_skip(report)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[FAILED] = bool(session.testsfailed)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Delete the files of a test run without failures from memory."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.option.basetemp or config.stash.get(FAILED, True):
        return
    directory = config._tmp_path_factory.getbasetemp()
    if directory.is_relative_to(MEMORY):
        shutil.rmtree(directory, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Reset settings that a test may have changed.

    The number of threads affects sums and times.
    """
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.path.stem
        group = "processes" if name in PROCESSES else name
        item.add_marker(pytest.mark.xdist_group(group))


EPS = 1e-4
"""Adam's eps in the tests that compare a step with a reference."""


@pytest.fixture
def steady_adam(monkeypatch):
    """Give Adam and AdamW an eps well above rounding errors, in the code and in the references.

    Adam divides by the square root of v. If a gradient is zero but for rounding, the default eps of
    1e-8 turns the rounding error, which differs between processors, into a step of up to `lr`.
    """
    for module in (torch.optim, training, feature_models, local_models):
        for name in {"Adam", "AdamW"} & vars(module).keys():
            plain = getattr(module, name)

            def begin(self, *args, plain=plain, **options):
                plain.__init__(self, *args, **{"eps": EPS, **options})

            monkeypatch.setattr(module, name, type(name, (plain,), {"__init__": begin}))
    return EPS


@pytest.fixture
def encoders(tmp_path, monkeypatch):
    """A directory of encoders with only the files that the check of settings reads."""
    for name in ("distilbert", "unilm", "unilm-4", "minilm", "vit-cifar5", "news"):
        folder = tmp_path / "encoders" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"vocab_size": 30522}')
        (folder / "model.safetensors").touch()
    monkeypatch.setenv("FEDHET_ENCODERS", str(tmp_path / "encoders"))


@pytest.fixture
def pages_alone(monkeypatch):
    """Let runs end with their page, without image files, which take longer than a small run."""
    monkeypatch.setattr("fedhet.report.write_figures", lambda run: None)


@pytest.fixture
def call(monkeypatch, capsys):
    """A function that runs `fedhet` in this process, and returns the exit status and the output."""

    def ended(status):  # in place of this process, the Ray that is starting ends
        connection._stop_if_unused()
        connection.BACKGROUND.submit(int).result()
        sys.exit(status)

    def run(*words):
        monkeypatch.setattr("fedhet.cli.exit_at_once", ended)
        monkeypatch.setattr(sys, "argv", ["fedhet", *map(str, words)])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
