"""Ends a command that trains at once when a signal interrupts it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from fedhet.cli.options import console, errors
from fedhet.engines.ray.connection import abandon

ENDING = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended by SIGHUP",
}
"""The signals that end a command, each with the words for it."""


@contextlib.contextmanager
def ending_at_once(hint: Callable[[], str]) -> Iterator[None]:
    """End the process at once on Ctrl-C, SIGTERM or SIGHUP, with a line that ends in `hint()`.

    Clusters and containers send SIGTERM, and a closed terminal sends SIGHUP; both stay ignored if
    they already were, as under nohup. Flower's threads would wait for their clients. A separate
    thread reads the signals: Python runs handlers only in the main thread, which may be blocked
    where no signal wakes it.
    """
    heard, sender = socket.socketpair()
    sender.setblocking(False)
    ignored = {each for each in ENDING if signal.getsignal(each) is signal.SIG_IGN}
    caught = ENDING.keys() - (ignored - {signal.SIGINT})
    before = {each: signal.signal(each, lambda *_: None) for each in caught}
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_on_signal, args=(heard, hint), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for each, handler in before.items():
            signal.signal(each, handler or signal.SIG_DFL)
        sender.close()


def end_at_once(status: int) -> None:
    """End the process without waiting for a Ray that is starting."""
    abandon()
    os._exit(status)


def _end_on_signal(heard: socket.socket, hint: Callable[[], str]) -> None:
    """Read signal numbers as they arrive; end the process on one in `ENDING`."""
    with heard:
        while received := heard.recv(1):
            number = received[0]
            if number not in ENDING:
                continue
            try:
                console.show_cursor(True)
                words = ENDING[signal.Signals(number)]
                errors.print(f"\nfedhet: {words}; {hint()}", markup=False, soft_wrap=True)
            finally:  # the terminal may be gone
                os._exit(128 + number)
