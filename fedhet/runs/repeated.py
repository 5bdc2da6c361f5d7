"""Calls that follow changes, but not each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Repeated:
    """Calls a function after changes, at most once in so many seconds, in a thread of its own."""

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
        while self._changed.wait() and not self._ended.is_set():
            self._changed.clear()
            with self._calling:
                if not self._ended.is_set():
                    self._function()
            self._ended.wait(self._seconds)
