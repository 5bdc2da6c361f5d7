"""A client's reply, as it passes from the wire to the method."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fedhet.base.errors import FedhetError, KnowledgeError, words_of
from fedhet.pace.staleness import staleness_weight
from fedhet.runs.measures import Measured
from fedhet.server.magnitudes import Magnitudes, magnitudes_of
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


@dataclass(frozen=True)
class Reply:
    """A client's reply."""

    client: ClientInfo
    knowledge: Knowledge
    measured: Measured
    known: Magnitudes | None = field(default=None, repr=False)
    """The magnitudes of `knowledge`, if they were measured when the reply arrived."""
    age: int = 0
    """The rounds since the client was asked; 0: it was asked in this round."""
    sent: Knowledge | None = field(default=None, repr=False)
    """What the client was sent to train on, if replies may be late."""

    @property
    def samples(self) -> int:
        """The client's number of training samples, as reported when it joined."""
        return self.client.samples

    @property
    def freshness(self) -> float:
        """The factor by which the reply counts for its age: 1 if it is not late."""
        return staleness_weight(self.age)

    @property
    def weight(self) -> float:
        """The reply's weight in an average by samples; one that is late counts less."""
        return self.samples * self.freshness

    def magnitudes(self) -> Magnitudes:
        """Return the root mean square of each floating-point field."""
        return magnitudes_of(self.knowledge) if self.known is None else self.known

    def with_knowledge(self, knowledge: Knowledge) -> Reply:
        """Return this reply with its knowledge replaced."""
        return replace(self, knowledge=knowledge, known=None)


@contextlib.contextmanager
def from_outside(sender: str) -> Iterator[None]:
    """Raise KnowledgeError for any error of the block, which reads what `sender` has sent.

    No list of exceptions is complete: memory, recursion, a library's own. One reply must not cost
    the others, and the reason is in the notice.
    """
    try:
        yield
    except FedhetError:
        raise
    except Exception as error:
        fault = f"cannot be read ({type(error).__name__}: {words_of(error)})"
        raise KnowledgeError(sender, "answer", fault) from error
