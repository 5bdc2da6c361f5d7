"""Declaration of FedMD: settings and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, get_args

from pydantic import Field, field_validator

from fedhet.algorithms import DigestLoss, ScoreKind
from fedhet.methods.spec import PUBLIC_PREDICTIONS, MethodSpec, Sums
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Count, CountOrNone, MethodSettings
from fedhet.tasks import Task
from fedhet.wire.contract import Contract, Sum, TensorField

MIN_SAMPLE = 2
"""Minimum number of public samples on which a client can train."""


class ConsensusSettings(MethodSettings):
    """Settings shared by FedMD and the methods that extend it."""

    exchanged: ClassVar[ScoreKind] = "logits"
    """Kind of scores that clients and server exchange; also the name of the message field.

    See `exchanged_in` for tasks without classes.
    """

    def exchanged_in(self, task: Task) -> ScoreKind:
        """Return the kind of scores of a task: `exchanged`, or logits if it has no classes."""
        return self.exchanged if task.has_distribution else "logits"

    def unused_in(self, task: Task) -> tuple[str, ...]:
        """Return the message fields that a task does not use, i.e. the other kinds of scores."""
        return tuple(kind for kind in get_args(ScoreKind) if kind != self.exchanged_in(task))

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
        description="client epochs on labeled public data before round 1; 0 = no epochs (no "
        "labels needed)",
    )


class FedMdSettings(DigestSettings):
    """Settings of FedMD."""

    public_epochs: CountOrNone = Field(
        10,
        description="client epochs on labeled public data before round 1; 0 = no epochs (no "
        "labels needed)",
    )
    loss: DigestLoss = Field(
        "mae",
        description="loss on the consensus: mean absolute or squared error of logits, or "
        "cross-entropy",
    )


def instructions(*kinds: ScoreKind, distribution: bool = True) -> Contract:
    """Build the instruction contract, with one optional field per kind of scores.

    A run sends only the kind that its task exchanges (see `ConsensusSettings.exchanged_in`).
    Probabilities in the consensus have the sum 1, unless `distribution` is false.
    """
    agreed: list[TensorField] = []
    for kind in kinds:
        consensus = f"consensus from the previous round{_condition(kind, kinds)}"
        agreed.append(
            TensorField(
                kind,
                "float32",
                ("R", "C"),
                consensus,
                required=False,
                distribution=distribution and kind == "probabilities",
                needs=("rows",),
            )
        )
    rows = "public samples of the consensus"
    agreed.append(TensorField("rows", "uint", ("R",), rows, ids="N", required=False, needs=kinds))
    asked = TensorField("asked", "uint", ("Q",), "public samples to predict", ids="N")
    return Contract((*agreed, asked))


def replies(*kinds: ScoreKind) -> Contract:
    """Build the reply contract, with one field per kind of scores, as in `instructions`."""
    return Contract(
        tuple(
            TensorField(
                kind,
                "float32",
                ("Q", "C"),
                f"{kind} for the requested samples{_condition(kind, kinds)}",
                distribution=kind == "probabilities",
            )
            for kind in kinds
        )
    )


def _condition(kind: ScoreKind, kinds: tuple[ScoreKind, ...]) -> str:
    if len(kinds) == 1:
        return ""
    return "; for classes" if kind == "probabilities" else "; outputs for other tasks"


SPEC = MethodSpec(
    title="mean class scores on labeled public data",
    paper="Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation",
    headline="common",
    paper_model="each party's model",
    needs_task="outputs",
    only_tasks="it exchanges one vector of outputs for each public sample",
    without_classes={"loss": ("mae", "mse")},
    settings=FedMdSettings,
    any_model="regression",
    needs_public=True,
    learns_last=True,
    defenses=ROBUST,
    instructions=instructions("logits"),
    replies=replies("logits"),
    privacy=PUBLIC_PREDICTIONS,
    sums=Sums((Sum(("logits",), "clients"),)),
)
