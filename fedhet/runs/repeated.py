"""Calls that follow changes, but not each of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONG, SHARE = 0.05, 0.02
"""Seconds from which a call takes long, as what is shown of thousands of clients does, and the most
of the time that such calls may take."""


class Repeated:
    """Calls a function after changes, at most once in so many seconds, in a thread of its own.

    A call that takes long is followed by a rest in proportion.
    """

    def __init__(self, function: Callable[[], None], seconds: float) -> None:
        self._function, self._seconds = function, seconds
        self._changed, self._ended = threading.Event(), threading.Event()
        self._calling = threading.Lock()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def note(self) -> None:
        """Take note of a change."""
        self._changed.set()
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Call the function once more, and no more after that."""
        self._ended.set()
        self._changed.set()
        with self._calling:
            self._function()

    def _repeat(self) -> None:
        rest = self._seconds
        while self._changed.wait() and not self._ended.is_set():
            self._changed.clear()
            started = time.thread_time()
            with self._calling:
                if not self._ended.is_set():
                    self._function()
            taken = time.thread_time() - started
            self._ended.wait(rest)
            # From the second call on, as the first also imports.
            rest = max(self._seconds, taken / SHARE if taken > LONG else 0.0)
