"""The environment of processes that are started here: variables that must be set before they are.

glibc gives the pages of freed memory back to the system, and takes them again, at every step of a
training loop: its threshold for that follows the sizes that are freed, up to 32 MiB at most, and
a batch's activations are larger. Thousands of page faults a step cost a tenth of the time and
more. Thresholds of a GiB keep the pages, and huge pages, where glibc has them (2.35) and the system
allows them, make the first faults fewer. What a process has freed stays with it, up to a GiB.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

TUNABLES = "GLIBC_TUNABLES"
KEEPING_PAGES = ":".join(
    (
        f"glibc.malloc.mmap_threshold={2**30}",
        f"glibc.malloc.trim_threshold={2**30}",
        "glibc.malloc.hugetlb=1",
    )
)
"""glibc reads it before a process begins; an older one ignores what it does not know."""


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
