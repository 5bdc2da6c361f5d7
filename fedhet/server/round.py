"""The round that is going on, as the server records it.

Who was asked, who answered, what they measured, what it took: everything is entered here, from
whichever thread, and nothing else keeps a record of it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fedhet.errors import FedhetError, KnowledgeError
from fedhet.runs.records import Accuracy, Measured, RoundRecord, relative, spread, summarise


@dataclass(frozen=True)
class Selection:
    """Who takes part in a round: who trains, and who is asked without training."""

    training: tuple[str, ...]
    assisting: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return the names of all, sorted."""
        return sorted((*self.training, *self.assisting))


class RoundState:
    """A round's record while it goes on, and the clients' latest accuracies over rounds."""

    def __init__(self, workers: int, notice: Callable[[str], None]) -> None:
        """`workers`: how many clients train at once; `notice` tells a person what went wrong."""
        self.record = RoundRecord(0)
        self.selection = Selection(())
        self._workers = workers
        self._notice = notice
        self._lock = threading.Lock()
        self._accuracy: Accuracy = {}
        self._changed: set[str] = set()
        """Clients whose models have changed since they were last evaluated."""
        self._losses: dict[str, float] = {}
        self._absent: set[str] = set()
        self._started = self._waiting_since = self._waiting = 0.0
        self._peak_memory_mb = 0.0

    def start(self, number: int) -> None:
        """Begin a round."""
        with self._lock:
            self.record, self._losses, self._absent = RoundRecord(number), {}, set()
            self._started, self._waiting = time.perf_counter(), 0.0

    def ask(self, selection: Selection) -> None:
        """Note who takes part."""
        self.selection, self.record.asked = selection, selection.names

    def sent(self, size: int) -> None:
        """Count the bytes of a message to a client."""
        with self._lock:
            self.record.bytes_down += size

    def received(self, size: int) -> None:
        """Count the bytes of a message from a client."""
        with self._lock:
            self.record.bytes_up += size

    def wait(self) -> None:
        """Note that the clients are at work, and the server is not."""
        self._waiting_since = time.perf_counter()

    def go_on(self) -> None:
        """Note that the answers are there."""
        self._waiting += time.perf_counter() - self._waiting_since

    def changed(self, names: Iterable[str]) -> None:
        """Note that these clients' models are no longer those that were evaluated last."""
        self._changed |= set(names)

    def to_evaluate(self, name: str) -> bool:
        """Tell whether a client's latest accuracy is not of its present models."""
        return name in self._changed

    def present(self, names: Collection[str]) -> list[str]:
        """Return, sorted, those of `names` that have not failed to answer in this round."""
        return sorted(set(names) - self._absent)

    def measured(self, name: str, measured: Measured) -> None:
        """Enter what a client measured."""
        with self._lock:
            for (protocol, kind), accuracy in measured.accuracy.items():
                self._accuracy.setdefault(protocol, {}).setdefault(kind, {})[name] = accuracy
            if measured.accuracy:
                self._changed.discard(name)
            if measured.loss is not None:
                self._losses[name] = measured.loss
            self.record.seconds.train += measured.train_seconds
            self.record.seconds.evaluate += measured.evaluate_seconds
            self._peak_memory_mb = max(self._peak_memory_mb, measured.memory_mb)

    def figures(self, figures: Mapping[str, float]) -> None:
        """Enter figures of the method's own, or of an attack."""
        self.record.method |= figures

    def absent(self, name: str, reason: str) -> None:
        """Note that a client has not answered."""
        self._absent.add(name)
        self._drop(name, reason)

    @contextlib.contextmanager
    def dropping(self, name: str) -> Iterator[None]:
        """Drop a client from the round for what is found wrong with its reply in the block."""
        try:
            yield
        except KnowledgeError as error:
            self._drop(name, f"{error.field}: {error.fault}")
        except FedhetError as error:
            self._drop(name, str(error))

    def _drop(self, name: str, reason: str) -> None:
        self.record.failed[name] = reason
        self._notice(f"client {name} is dropped from round {self.record.round}: {reason}")

    def close(self, *, evaluated: bool) -> RoundRecord:
        """End the round and return its record; with accuracies if it was evaluated.

        Statistics leave out clients whose accuracy is not of their present models.
        """
        record = self.record
        if evaluated:
            record.accuracy = summarise(self._accuracy, without=self._changed)
            record.relative = relative(self._accuracy, without=self._changed)
        record.loss = spread(self._losses) if self._losses else None
        record.peak_memory_mb = self._peak_memory_mb
        seconds = record.seconds
        seconds.total = time.perf_counter() - self._started
        seconds.server = seconds.total - self._waiting
        at_once = max(1, min(self._workers, len(record.asked)))
        lost = self._waiting - (seconds.train + seconds.evaluate) / at_once
        seconds.overhead = max(lost, 0.0)
        return record

    def to_json(self) -> str:
        """Return what must be known of the clients after the round, for its checkpoint."""
        return json.dumps({"accuracy": self._accuracy, "changed": sorted(self._changed)})

    def load_json(self, text: str) -> None:
        """Take back what `to_json` returned. Raises ValueError, KeyError or TypeError."""
        known = json.loads(text)
        self._accuracy, self._changed = known["accuracy"], set(known["changed"])
