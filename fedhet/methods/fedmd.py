"""FedMD: its settings, and the messages between its halves."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from fedhet.algorithms import DigestLoss, ScoreKind
from fedhet.methods.spec import PUBLIC_PREDICTIONS, MethodSpec
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Count, CountOrNone, MethodSettings
from fedhet.wire.contract import Contract, TensorField, all_or_none

MIN_SAMPLE = 2
"""The smallest number of public samples that a client can train on."""


class ConsensusSettings(MethodSettings):
    """Settings of the methods that extend FedMD; each adds its own."""

    exchanged: ClassVar[ScoreKind] = "logits"
    """What travels, and the name of its field."""

    if TYPE_CHECKING:
        public_epochs: int
        loss: DigestLoss
        digest_epochs: int

    sample: CountOrNone = Field(
        5000, description="public samples drawn for each round, from which all learn; 0 = all"
    )

    @field_validator("sample")
    @classmethod
    def _sample_can_be_trained_on(cls, value: int) -> int:
        if 0 < value < MIN_SAMPLE:
            raise ValueError(f"it takes 0 or at least {MIN_SAMPLE}")
        return value


class DigestSettings(ConsensusSettings):
    """Settings of the methods whose clients learn the consensus by itself."""

    digest_epochs: Count = Field(
        5, description="a client's epochs of training on the consensus, per round"
    )


class SoftLabelSettings(ConsensusSettings):
    """Settings of the methods whose clients reply with probabilities."""

    exchanged: ClassVar[ScoreKind] = "probabilities"

    public_epochs: CountOrNone = Field(
        0,
        description="a client's epochs on the public data's labels before its first round; 0, as "
        "in the paper: public data needs no labels",
    )


class FedMdSettings(DigestSettings):
    """Settings of FedMD."""

    public_epochs: CountOrNone = Field(
        10,
        description="a client's epochs on the labeled public data before its first round "
        "(transfer learning); 0: none, and the public data needs no labels",
    )
    loss: DigestLoss = Field(
        "mae",
        description="distance from the consensus: mean absolute or squared error of the scores "
        "that travel, or cross-entropy between the probabilities",
    )


def instructions(scores: ScoreKind) -> Contract:
    """Return the contract of the instructions where clients reply with such scores."""
    consensus, probabilities = "the consensus of the last round", scores == "probabilities"
    known = all_or_none(
        TensorField(scores, "float32", ("R", "C"), consensus, distribution=probabilities),
        TensorField("rows", "uint", ("R",), "the public samples of the consensus", ids="N"),
    )
    asked = TensorField("asked", "uint", ("Q",), "the public samples to predict", ids="N")
    return Contract((*known, asked))


def replies(scores: ScoreKind) -> Contract:
    """Return the contract of replies with such scores."""
    sent, probabilities = "of the samples asked for", scores == "probabilities"
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
)
