"""Libraries that print every other library's messages, kept from doing so."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def root_handlers_kept() -> Iterator[None]:
    """Remove what the block adds to Python's root logger, as Opacus and absl do."""
    before = list(logging.root.handlers)
    try:
        yield
    finally:
        logging.root.handlers[:] = before
