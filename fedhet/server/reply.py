"""Client replies before the method receives them, in memory or on disk.

A reply is decoded once, when it arrives, into a `CallOutcome`. `Codec.replies` converts it to the
`Reply` that the method receives, in the round that uses it.

The weights in a reply are written to a file. When they are used, they are mapped from the file one
tensor at a time, so the server's memory does not grow with the number of clients.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from fedhet.algorithms.rounds import staleness_weight
from fedhet.base.arrays import Array, OnDemand
from fedhet.base.disk import Folder
from fedhet.base.errors import (
    REPLY,
    FedhetError,
    KnowledgeError,
    StateError,
    error_reason,
    error_text,
)
from fedhet.runs.measures import Measured
from fedhet.server.calls import CallOutcome
from fedhet.wire.contract import Contract
from fedhet.wire.encodings import STATISTICS
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

Magnitudes = Mapping[str, float]
"""Root mean square of each floating-point part (`part_of`) of a reply."""
ALIGNMENT = 64
"""Alignment of the tensors in a file of weights, in bytes."""


@dataclass(frozen=True)
class Reply:
    """A client's decoded reply to a training instruction."""

    client: ClientInfo
    knowledge: Knowledge
    """Content of the reply."""
    measured: Measured
    """Metrics and durations that the client reported."""
    cached_magnitudes: Magnitudes | None = field(default=None, repr=False)
    """Magnitudes of `knowledge`, if they were measured when the reply arrived."""
    age: int = 0
    """Number of rounds since the client received its instruction; 0 if the reply is not late."""
    sent: Knowledge | None = field(default=None, repr=False)
    """Content of the client's instruction, or None if it was not kept."""
    clients: tuple[str, ...] = ()
    """Names of the clients whose replies are summed in this reply; empty for a single client."""
    is_scaled: bool = False
    """Whether the client's update has already been multiplied by `freshness` (asynchronous
    rounds)."""

    @property
    def samples(self) -> int:
        """The client's number of training samples, as reported when it joined.

        With a robust aggregation rule, the number is 1, so that all clients have the same weight.
        """
        return self.client.samples

    @property
    def freshness(self) -> float:
        """Weight of the reply given its age; 1 if the reply is not late."""
        return staleness_weight(self.age)

    @property
    def update_factor(self) -> float:
        """Factor for the reply's age in an average of weights; 1 if the update is scaled."""
        return 1.0 if self.is_scaled else self.freshness

    @property
    def weight(self) -> float:
        """Weight of the reply in a sample-weighted average of weights, reduced if it is late."""
        return self.samples * self.update_factor

    def magnitudes(self) -> Magnitudes:
        """Return the root mean square of each floating-point part of the reply."""
        if self.cached_magnitudes is not None:
            return self.cached_magnitudes
        return magnitudes_of(self.knowledge)

    def with_knowledge(self, knowledge: Knowledge) -> Reply:
        """Return a copy of this reply with other content."""
        return replace(self, knowledge=knowledge, cached_magnitudes=None)

    def with_equal_weight(self, counts: Iterable[str]) -> Reply:
        """Return a copy without claimed numbers of samples, which would be weights in averages.

        The client's number of samples and all values of the tensors in `counts` become 1. The
        factor for the reply's age remains.
        """
        tensors = self.knowledge.tensors
        ones = {name: np.ones_like(tensors[name]) for name in counts if name in tensors}
        client = replace(self.client, samples=1)
        return replace(self, client=client, knowledge=self.knowledge.replacing(ones))


def medians(replies: Iterable[Magnitudes]) -> dict[str, float]:
    """Return the median magnitude of each part over several replies."""
    parts: dict[str, list[float]] = {}
    for magnitudes in replies:
        for part, size in magnitudes.items():
            parts.setdefault(part, []).append(size)
    return {part: float(median(sizes)) for part, sizes in sorted(parts.items())}


STATISTICS_OF = "statistics of "
"""Prefix of the name of the part that contains a field's batch normalization statistics."""


def part_of(tensor: str) -> str:
    """Return the part of a reply that a tensor belongs to: by default, the tensor's field.

    Statistics of batch normalization (`running_mean`, `running_var`) are a separate part, because
    variances are squares of activations and are often much larger than all weights.
    """
    field, _, name = tensor.partition("/")
    return f"{STATISTICS_OF}{field}" if name.endswith(STATISTICS) else field


def magnitudes_of(knowledge: Knowledge) -> Magnitudes:
    """Return the root mean square of each floating-point part of a reply.

    The result is infinity if the squares of a part overflow.
    """
    parts: dict[str, list[Array]] = {}
    for name, value in knowledge.tensors.items():
        if np.issubdtype(value.dtype, np.floating) and value.size:
            parts.setdefault(part_of(name), []).append(value)

    def sum_of_squares(value: Array) -> float:
        flat = value.ravel() if value.dtype.itemsize > 2 else value.ravel().astype(np.float32)
        return float(np.vdot(flat, flat))

    with np.errstate(over="ignore"):
        totals = {part: sum(map(sum_of_squares, values)) for part, values in parts.items()}
    return {
        part: float(np.sqrt(total / sum(value.size for value in parts[part])))
        for part, total in totals.items()
    }


@contextlib.contextmanager
def from_outside(sender: str) -> Iterator[None]:
    """Convert errors to KnowledgeError in a `with` block that reads data from `sender`.

    Any exception is caught, because no list of exceptions would be complete. A reply may exhaust
    the memory or the recursion limit, or cause an exception in a library, and must not end the
    round.
    """
    try:
        yield
    except FedhetError:
        raise
    except Exception as error:
        fault = f"cannot be read ({type(error).__name__}: {error_text(error)})"
        raise KnowledgeError(sender, REPLY, fault) from error


class ReplySpool:
    """Directory that contains the weights of a round's replies, in at most one file per client."""

    def __init__(self, directory: Path, contract: Contract) -> None:
        """Create the spool.

        Args:
            directory: Path of the directory, which is created with the first reply.
            contract: Contract of the replies, which declares the tensors that are weights.
        """
        self._directory = Folder(directory, directory.parent, private=True)
        self._weights = tuple(f"{name}/" for name in contract.weights)

    def put(self, outcome: CallOutcome) -> CallOutcome:
        """Write the weights of a reply to disk, and measure the magnitudes of the reply.

        Each access to a weight maps it from the file, until the spool is cleared. Other tensors
        stay in memory. A failed outcome is returned unchanged. Raises OSError if writing fails.
        """
        if outcome.error:
            return outcome
        client, start = outcome.client, 0
        tensors, sources = outcome.knowledge.tensors, dict[str, Array | Callable[[], Array]]()
        try:
            written = self._directory.open(client, os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(written, "wb") as file:
                for name, value in tensors.items():
                    if name.startswith(self._weights) and value.size:
                        order: Literal["C", "F"] = "C" if value.flags.c_contiguous else "F"
                        file.seek(start)
                        file.write(value.ravel(order).view(np.uint8).data)
                        where = value.dtype, value.shape, order, start
                        sources[name] = partial(self._mapped, client, *where)
                        start += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
                    else:
                        sources[name] = value.copy()
        except OSError:
            self._directory.remove([client])
            raise
        knowledge = Knowledge(OnDemand(sources), outcome.knowledge.scalars)
        return replace(outcome, knowledge=knowledge, magnitudes=magnitudes_of(outcome.knowledge))

    @contextlib.contextmanager
    def open_replies(self) -> Iterator[None]:
        """Keep the replies readable during the `with` block, and remove them afterward."""
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove all replies, including replies left behind by a killed server process."""
        self._directory.clear()

    def _mapped(
        self,
        client: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        order: Literal["C", "F"],
        start: int,
    ) -> Array:
        """Map a tensor from a client's file.

        Raises StateError if there is no such file, and KnowledgeError if the file is too short.
        """
        path = self._directory.path / client
        try:
            return np.asarray(np.memmap(path, dtype, "r", start, shape, order))
        except OSError as error:
            raise StateError(
                f"cannot read the reply of {client}: {error_reason(error)}. A method "
                "that uses the weights of a reply after the round must copy them."
            ) from error
        except ValueError as error:
            end = start + math.prod(shape) * dtype.itemsize
            fault = f"its file has changed: expected at least {end} bytes ({error})"
            raise KnowledgeError(client, "payload", fault) from None
