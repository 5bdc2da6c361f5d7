"""Reads the server's instructions, and writes a client's measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from flwr.common import NDArrays, Scalar

from fedhet.methods.registry import Method
from fedhet.models.evaluation import Evaluations
from fedhet.runs.measures import Measured, peak_memory_mb, placed
from fedhet.wire.contract import Contract, Sizes
from fedhet.wire.identity import SERVER
from fedhet.wire.knowledge import Bases, Envelope, Knowledge, decode, expect, no_bases


def read_instruction(
    arrays: NDArrays,
    method: Method,
    sizes: Callable[[], Sizes],
    *,
    may_be_empty: bool = False,
    bases: Bases = no_bases,
    max_bytes: int | None = None,
) -> tuple[Envelope, Knowledge]:
    """Return the server's message. Raises KnowledgeError if it violates the method's contract.

    `may_be_empty`: an instruction to evaluate may be empty. `bases` and `max_bytes` are `decode`'s.
    """
    envelope, knowledge = decode(arrays, SERVER, bases, max_bytes)
    expect(envelope, run=None, method=method.name, round=None, sender=SERVER)
    if knowledge.tensors or knowledge.scalars or not may_be_empty:
        contract: Contract = method.spec.instructions
        contract.check(SERVER, knowledge.tensors, knowledge.scalars, sizes())
    return envelope, knowledge


def best_round(config: Mapping[str, Scalar]) -> int:
    """Return the best round so far, whose models are to be kept; 0 if the server names none."""
    found = config.get("best", 0)
    return found if isinstance(found, int) else 0


def own_loss(scores: Evaluations) -> float:
    """Return the private model's loss on the client's own test split; 0 if there is none."""
    own = scores.get(("personal", "private"))
    return own.loss if own is not None and math.isfinite(own.loss) else 0.0


def measures(
    scores: Evaluations,
    loss: float | None,
    train_seconds: float,
    eval_seconds: float,
    figures: Mapping[str, float] | None = None,
) -> Measured:
    """Return a client's measurements; `loss` is the training loss."""
    majority = {
        protocol: score.majority
        for (protocol, _), score in scores.items()
        if not math.isnan(score.majority)
    }
    return Measured(
        placed(scores), loss, train_seconds, eval_seconds, peak_memory_mb(), dict(figures or {}),
        majority=majority,
    )  # fmt: skip
