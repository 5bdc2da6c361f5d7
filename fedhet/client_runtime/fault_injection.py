"""Simulated faults of clients: a client drops out of a round, or takes longer for it.

Both depend on seed, client and round only, and not on how the simulation is run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from fedhet.base.errors import DropOutError
from fedhet.base.seeding import numpy_rng
from fedhet.settings.run import RunSettings


def drops_out(run: RunSettings, client: str, round: int) -> bool:
    """Return whether a client drops out of a round."""
    return _is_hit(run, client, round, "drop-out", run.pace.drop_outs)


def straggles(run: RunSettings, client: str, round: int) -> bool:
    """Return whether a client takes longer for a round."""
    return _is_hit(run, client, round, "straggler", run.pace.stragglers)


@contextlib.contextmanager
def injected_faults(run: RunSettings, client: str, round: int) -> Iterator[None]:
    """Make the block take 'pace.slowdown' times as long if the client straggles in the round.

    With a simulated clock that is the clock's part (`fedhet.pace.clock`), and no time is lost.
    Raises DropOutError, before the block, if the client drops out of the round.
    """
    if drops_out(run, client, round):
        raise DropOutError(f"drops out of round {round} ('pace.drop-outs')")
    started = time.perf_counter()
    yield
    if straggles(run, client, round) and not run.pace.is_simulated:
        time.sleep((run.pace.slowdown - 1) * (time.perf_counter() - started))


def _is_hit(run: RunSettings, client: str, round: int, what: str, share: float) -> bool:
    return share > 0 and bool(numpy_rng(run.seed, client, round, what).random() < share)
