"""The environment of processes that are started here, and the code that Ray's workers import.

glibc gives the pages of freed memory back to the system, and takes them again, at every step of a
training loop: its threshold for that follows the sizes that are freed, up to 32 MiB at most, and
a batch's activations are larger. Thousands of page faults a step cost a tenth of the time and
more. Thresholds of a GiB keep the pages, and huge pages, where glibc has them (2.35) and the system
allows them, make the first faults fewer. What a process has freed stays with it, up to a GiB.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
KEEPING_PAGES = ":".join(
    (
        f"glibc.malloc.mmap_threshold={2**30}",
        f"glibc.malloc.trim_threshold={2**30}",
        "glibc.malloc.hugetlb=1",
    )
)
"""glibc reads it before a process begins; an older one ignores what it does not know."""
CARRIED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "FLWR_TELEMETRY_ENABLED",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    TUNABLES,
)
"""Environment variables that a cluster's workers inherit from this process, besides FEDHET_*."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders in which packages are installed."""


def for_training() -> dict[str, str]:
    """Return the variables of a process that trains, besides those that it inherits.

    What the user has set stays.
    """
    return {} if TUNABLES in os.environ else {TUNABLES: KEEPING_PAGES}


@contextlib.contextmanager
def inherited(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block: processes that are started in it inherit them."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def for_workers() -> dict[str, str]:
    """Return the environment variables that the workers on all machines of a cluster get.

    A machine's own PYTHONPATH comes after the folders of the user's modules here, from which a
    module that is sent may import others.
    """
    carried = {k: v for k, v in os.environ.items() if k in CARRIED or k.startswith("FEDHET_")}
    path = os.pathsep.join([*own_paths(), "${PYTHONPATH}"])
    return {**for_training(), **carried, "PYTHONPATH": path}


def code_of(modules: Iterable[str]) -> list[str]:
    """Return the folder or the file of each module's top-level package, Python's own left out."""
    library, found = Path(sysconfig.get_path("stdlib")).resolve(), []
    for name in dict.fromkeys(module.partition(".")[0] for module in modules):
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        place = Path(next(iter(spec.submodule_search_locations or [spec.origin or "built-in"])))
        installed = not INSTALLED.isdisjoint(place.parts)
        is_pythons = place.resolve().is_relative_to(library) and not installed
        if (place.suffix == ".py" or place.is_dir()) and not is_pythons:
            found.append(str(place))
    return found


def own_paths() -> list[str]:
    """Return the folders from which modules are imported that are not installed.

    What is installed may lie elsewhere on another machine.
    """
    library = Path(sysconfig.get_path("stdlib")).resolve()
    found = [Path(path or ".").resolve() for path in sys.path]
    own = [
        str(path)
        for path in found
        if path.is_dir() and INSTALLED.isdisjoint(path.parts) and not path.is_relative_to(library)
    ]
    return list(dict.fromkeys(own))
