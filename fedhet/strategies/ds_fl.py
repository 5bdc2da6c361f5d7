"""DS-FL, server half: FedMD's round with probabilities, entropy reduction, and a server's model.

Sohei Itahara, Takayuki Nishio, Yusuke Koda, Masahiro Morikura and Koji Yamamoto,
Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative
Training with Non-IID Private Data, IEEE Transactions on Mobile Computing, arXiv:2008.06180.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedhet.algorithms.consensus import entropy_reduced, mean_scores
from fedhet.algorithms.distillation import DigestLoss, Scores, digest_loss
from fedhet.arrays import Array
from fedhet.models import ModelName, build
from fedhet.server.learner import Learner
from fedhet.settings.schema import Count, CountOrNone, Positive
from fedhet.strategies.base import Reply
from fedhet.strategies.fedmd import ConsensusSettings, FedMdStrategy
from fedhet.wire.scores import instructions


class DsFlSettings(ConsensusSettings):
    """Settings of DS-FL."""

    public_epochs: CountOrNone = Field(
        0,
        description="a client's epochs on the public data's labels before its first round; 0, as "
        "in the paper: public data needs no labels",
    )
    loss: DigestLoss = Field(
        "cross-entropy",
        description="distance from the consensus, for clients and server: cross-entropy with the "
        "soft labels, or mean absolute or squared error of the probabilities",
    )
    aggregation: Literal["era", "sa"] = Field(
        "era", description="the consensus: entropy reduction, or simple aggregation, the plain mean"
    )
    temperature: Positive = Field(
        0.1, description="T of entropy reduction, softmax(mean / T): the lower, the sharper"
    )
    server_model: ModelName = Field("cnn2", description="the server's own model")
    server_epochs: Count = Field(
        5, description="the server's epochs towards the consensus on public samples, a round"
    )


class DsFlStrategy(FedMdStrategy):
    """Sharpens the mean of the clients' probabilities, and trains its own model on it."""

    spec = replace(
        FedMdStrategy.spec,
        title="sharpened mean of soft labels on unlabelled public data, and a server's model",
        paper="Itahara et al., Distillation-Based Semi-Supervised Federated Learning (DS-FL)",
        settings=DsFlSettings,
        table_settings={"server_model": "mlp"},
        text_settings={"server_model": "text-cnn"},
        signal_settings={"server_model": "signal-cnn2"},
    )
    settings: DsFlSettings
    exchanged: ClassVar[Scores] = "probabilities"
    sends = instructions("probabilities")

    def init(self) -> None:
        """Start without a consensus, with a new model."""
        super().init()
        task = self.task
        model = build(self.settings.server_model, task.shape, task.classes, seed=self.run.seed)
        self.learner = Learner(model, self.run)

    def eval_models(self) -> Mapping[str, nn.Module]:
        """Return the server's model."""
        return {"server": self.learner.model}

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Form the consensus, and train the server's model on it. Raises DivergedError."""
        figures = super().aggregate(round, replies)
        self._distil(round)
        return figures

    def consensus(self, answers: Array) -> Array:
        """Return the consensus [R, C] of K clients' probabilities [K, R, C]: ERA, or SA."""
        if self.settings.aggregation == "sa":
            return mean_scores(answers)
        return entropy_reduced(answers, self.settings.temperature)

    def state_dict(self) -> dict[str, Array]:
        """Return the last probabilities, and the server's model."""
        return super().state_dict() | self.learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self.learner.load_state_dict(state)

    def _distil(self, round: int) -> None:
        device = self.learner.compute.device
        targets = torch.tensor(self.agreed, device=device)
        x = self.learner.compute.held(self.public.x[self.rows.astype("int64")])

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            logits = self.learner.model(x)
            return digest_loss(self.settings.loss, logits, targets[rows], self.exchanged)

        numbers = torch.arange(len(targets), device=device)
        self.learner.train(round, x, numbers, loss_of, epochs=self.settings.server_epochs)
