"""Clients of one process that train their local epochs at the same moment.

A client's half does not know that it is one of several. Each call has a thread of its own, of which
one runs at a time: until its local epochs are due, or it is done. Then the next one runs. When all
have stopped, the epochs of those that are alike are trained stacked (`stacking`), and one
after the other the calls go on with the result. What they would otherwise share, torch's global
generators, is exchanged at every change of turns, so that each draws what it would draw alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Generic, TypeVar

from fedhet.base.seeding import random_states, set_random_states
from fedhet.client_runtime.stacking import Work, alike, can_be_stacked, together

Result = TypeVar("Result")
_HERE = threading.local()


def guest_here() -> Guest[object] | None:
    """Return the guest whose call runs in this thread; None if it runs alone."""
    return getattr(_HERE, "guest", None)


def meet(calls: Sequence[Callable[[], Result]]) -> list[Result | Exception]:
    """Return what each call returns or raises; their local epochs are trained together."""
    guests = [Guest(call) for call in calls]
    for guest in guests:
        guest.go_on()
    while waiting := [guest for guest in guests if guest.work is not None]:
        _train(waiting)
        for guest in waiting:
            guest.go_on()
    return [guest.answer() for guest in guests]


class Guest(Generic[Result]):
    """A client's call, in a thread of its own that runs when it is its turn."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self.work: Work | None = None
        """The local epochs for which the call waits."""
        self.loss: float | None = None
        """Their mean loss, once they are trained; None: the client trains alone."""
        self.fault: Exception | None = None
        """What went wrong with them."""
        self.seconds = 0.0
        """The client's share of the time that they took."""
        self.states = random_states()
        """Torch's global generators as the call left them."""
        self._call = call
        self._answer: list[Result | BaseException] = []
        self._turn, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Let the call run until it waits for its local epochs, or is done."""
        outside = random_states()
        set_random_states(self.states)
        self.work = None
        self._turn.release()
        self._stopped.acquire()
        self.states = random_states()
        set_random_states(outside)

    def train(self, work: Work) -> float | None:
        """Return the loss of the local epochs; None if the client must train alone.

        Called in the guest's own thread; waits until the epochs of the others are due.
        """
        self.work, self.loss, self.fault, self.seconds = work, None, None, 0.0
        self._stopped.release()
        self._turn.acquire()
        if self.fault is not None:
            raise self.fault
        return self.loss

    def answer(self) -> Result | Exception:
        """Return what the call has returned or raised; raise what ends a process."""
        self._thread.join()  # so that nothing of an error stays in memory
        (answer,) = self._answer
        if isinstance(answer, BaseException) and not isinstance(answer, Exception):
            raise answer
        return answer

    def _run(self) -> None:
        _HERE.guest = self
        self._turn.acquire()
        try:
            self._answer.append(self._call())
        except BaseException as error:
            self._answer.append(error)
        finally:
            self._stopped.release()


def _train(waiting: Sequence[Guest[Result]]) -> None:
    """Train the epochs of guests that are alike; those that are like no other are left alone."""
    forms = {id(guest): alike(guest.work) for guest in waiting if guest.work is not None}
    numbers = {form: number for number, form in enumerate(dict.fromkeys(forms.values()))}
    ordered = sorted(waiting, key=lambda guest: numbers[forms[id(guest)]])
    for _, group in groupby(ordered, lambda guest: forms[id(guest)]):
        _train_alike(list(group))


def _train_alike(guests: Sequence[Guest[Result]]) -> None:
    works = [guest.work for guest in guests if guest.work is not None]
    if len(works) < 2 or not can_be_stacked(works):
        return
    outside, started = random_states(), time.perf_counter()
    set_random_states(guests[0].states)
    try:
        for guest, loss in zip(guests, together(works), strict=True):
            guest.loss = loss
    except Exception as error:
        for guest in guests:
            guest.fault = error
    guests[0].states = random_states()
    set_random_states(outside)
    for guest in guests:
        guest.seconds = (time.perf_counter() - started) / len(guests)
