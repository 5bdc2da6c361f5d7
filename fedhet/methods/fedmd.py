"""Declaration of FedMD: settings and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from fedhet.algorithms import DigestLoss, ScoreKind
from fedhet.methods.spec import PUBLIC_PREDICTIONS, MethodSpec, Sums
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Count, CountOrNone, MethodSettings
from fedhet.wire.contract import Contract, Sum, TensorField, all_or_none

MIN_SAMPLE = 2
"""Minimum number of public samples on which a client can train."""


class ConsensusSettings(MethodSettings):
    """Settings shared by FedMD and the methods that extend it."""

    exchanged: ClassVar[ScoreKind] = "logits"
    """Kind of scores that clients and server exchange; also the name of the message field."""

    if TYPE_CHECKING:
        public_epochs: int
        loss: DigestLoss
        digest_epochs: int

    sample: CountOrNone = Field(
        5000, description="number of public samples drawn for each round; 0 = all"
    )

    @field_validator("sample")
    @classmethod
    def _check_sample(cls, value: int) -> int:
        if 0 < value < MIN_SAMPLE:
            raise ValueError(f"expected 0 or at least {MIN_SAMPLE}")
        return value


class DigestSettings(ConsensusSettings):
    """Settings of methods whose clients train on the consensus in a separate phase."""

    digest_epochs: Count = Field(
        5, description="client training epochs on the consensus, per round"
    )


class SoftLabelSettings(ConsensusSettings):
    """Settings of methods whose clients send probabilities."""

    exchanged: ClassVar[ScoreKind] = "probabilities"

    public_epochs: CountOrNone = Field(
        0,
        description="client epochs on labeled public data before round 1; 0 = no epochs, so no "
        "labels are needed",
    )


class FedMdSettings(DigestSettings):
    """Settings of FedMD."""

    public_epochs: CountOrNone = Field(
        10,
        description="client epochs on labeled public data before round 1; 0 = no epochs, so no "
        "labels are needed",
    )
    loss: DigestLoss = Field(
        "mae",
        description="loss against the consensus: mean absolute or squared error of logits, or "
        "cross-entropy",
    )


def instructions(scores: ScoreKind) -> Contract:
    """Return the contract of instructions for a kind of scores."""
    consensus, probabilities = "consensus from the previous round", scores == "probabilities"
    agreed = all_or_none(
        TensorField(scores, "float32", ("R", "C"), consensus, distribution=probabilities),
        TensorField("rows", "uint", ("R",), "public samples of the consensus", ids="N"),
    )
    asked = TensorField("asked", "uint", ("Q",), "public samples to predict", ids="N")
    return Contract((*agreed, asked))


def replies(scores: ScoreKind) -> Contract:
    """Return the contract of replies for a kind of scores."""
    sent, probabilities = f"{scores} for the requested samples", scores == "probabilities"
    return Contract((TensorField(scores, "float32", ("Q", "C"), sent, distribution=probabilities),))


SPEC = MethodSpec(
    title="mean class scores on labeled public data",
    paper="Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation",
    headline="common",
    settings=FedMdSettings,
    needs_public=True,
    learns_last=True,
    defenses=ROBUST,
    instructions=instructions("logits"),
    replies=replies("logits"),
    privacy=PUBLIC_PREDICTIONS,
    sums=Sums((Sum(("logits",), "clients"),)),
)
