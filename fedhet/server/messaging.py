"""What a strategy sends its instructions and collects the answers with, made for one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fedhet.base.arrays import Array, Arrays
from fedhet.config.resolve import Config
from fedhet.methods.spec import MethodSpec
from fedhet.runs.log import RunLog
from fedhet.runs.storage import Facts
from fedhet.server.codec import Exchange
from fedhet.server.dispatch import Dispatch
from fedhet.server.pace import Collector
from fedhet.server.published import Publisher, publisher_of
from fedhet.server.reply import LateReplies, ReplySpool
from fedhet.server.round import RoundState
from fedhet.server.selection import Selecting

PACE = "pace"
"""The fact of a checkpoint that holds who is at work, and what is known for the selection."""


@dataclass(frozen=True)
class Messaging:
    """The parts, from the choice of clients to their answers."""

    selecting: Selecting
    exchange: Exchange
    publisher: Publisher
    spool: ReplySpool
    dispatch: Dispatch
    late: LateReplies
    collector: Collector

    @classmethod
    def of(cls, config: Config, spec: MethodSpec, log: RunLog, state: RoundState) -> Messaging:
        """Return the parts for a run."""
        run, limit = config.run, int(config.run.engine.max_payload_mb * 1e6)
        publisher = publisher_of(run, spec)
        exchange = Exchange(
            *(log.run_name, config.method, limit, state, log.metrics),
            remember=run.pace.may_be_late and spec.late != "refused",
            max_age=run.pace.max_age,
            publisher=publisher,
        )
        spool = ReplySpool(log.directory / "inbox", limit, spec.replies, exchange.bases_of)
        used = spool if spec.large_messages or spec.replies.weights else None
        at_once = (run.engine.in_flight or log.workers) if spec.large_messages else None
        dispatch = Dispatch(exchange, log.client_answered, used, at_once)
        late = LateReplies(log.directory, log.run_name)
        collector = Collector(run, exchange, late, used)
        return cls(Selecting(run), exchange, publisher, spool, dispatch, late, collector)

    def clear(self, *, resumed: bool) -> None:
        """Remove the replies that an earlier process has left; a resumed run uses late ones."""
        self.spool.clear()
        if not resumed:
            self.late.restore({})

    def state(self) -> tuple[dict[str, Array], dict[str, str]]:
        """Return the tensors and facts that a checkpoint needs to go on."""
        parts = {"collector": self.collector.to_dict(), "selection": self.selecting.to_dict()}
        return self.publisher.state_dict(), {PACE: json.dumps(parts), **self.publisher.facts()}

    def load(self, tensors: Arrays, facts: Facts) -> Mapping[str, Array]:
        """Restore what `state` returned; return the tensors that are the method's own.

        Raises ValueError, TypeError or LookupError.
        """
        parts = json.loads(str(facts[PACE]))
        self.collector.load_dict(parts["collector"])
        self.selecting.load_dict(parts["selection"])
        return self.publisher.load(tensors, facts)
