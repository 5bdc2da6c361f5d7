"""Ends a command that trains at once when the user interrupts it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from fedhet.cli.options import console, errors
from fedhet.engines.ray.connection import abandon


@contextlib.contextmanager
def ending_at_once(hint: Callable[[], str]) -> Iterator[None]:
    """End the process on Ctrl-C at once, with a line that ends in what `hint` then returns.

    Flower's threads would wait for their clients. A separate thread reads the signals: Python runs
    handlers only in the main thread, which may be blocked where no signal wakes it.
    """
    heard, sender = socket.socketpair()
    sender.setblocking(False)
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_on_interrupt, args=(heard, hint), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, handler)
        sender.close()


def end_at_once(status: int) -> None:
    """End the process without waiting for a Ray that is starting."""
    abandon()
    os._exit(status)


def _end_on_interrupt(heard: socket.socket, hint: Callable[[], str]) -> None:
    """Read signal numbers as they arrive; end the process on SIGINT."""
    with heard:
        while number := heard.recv(1):
            if number[0] == signal.SIGINT:
                console.show_cursor(True)
                errors.print(f"\nfedhet: interrupted; {hint()}", markup=False, soft_wrap=True)
                os._exit(130)
