"""DS-FL strategy: FedMD with probabilities, entropy reduction, and a server model.

Sohei Itahara, Takayuki Nishio, Yusuke Koda, Masahiro Morikura and Koji Yamamoto,
Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative
Training with Non-IID Private Data, IEEE Transactions on Mobile Computing, arXiv:2008.06180.

In regression (not in the paper), clients send outputs, and the consensus is their plain mean,
because numbers have no entropy to reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fedhet.algorithms.consensus import entropy_reduced, mean_scores
from fedhet.algorithms.distillation import digest_losses
from fedhet.base.arrays import Array
from fedhet.config.resolve import Config
from fedhet.methods.ds_fl import SPEC, DsFlSettings
from fedhet.server.learner import Learner
from fedhet.strategies.base import Reply, ServerModel
from fedhet.strategies.fedmd import FedMdStrategy
from fedhet.wire.identity import ClientInfo


class DsFlStrategy(FedMdStrategy):
    """Strategy that sharpens the clients' mean probabilities and trains a server model on them."""

    spec = SPEC
    settings: DsFlSettings

    def init(self) -> None:
        """Start with an empty consensus, and build the server model."""
        super().init()
        self.learner = Learner(self.build_model(self.settings.server_model), self.run)

    def eval_models(self) -> Mapping[str, nn.Module]:
        return {"server": self.learner.model}

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Compute the consensus, and train the server model on it.

        Raises DivergedError if training diverged.
        """
        metrics = super().aggregate(round, replies)
        device, settings = self.learner.compute.device, self.settings
        exchanged = self._exchanged
        targets = torch.tensor(self.consensus, device=device)
        x = self.learner.compute.to_device(self.public.x[self.consensus_rows.astype("int64")])

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            logits = self.learner.model(x)
            return digest_losses(settings.loss, logits, targets[rows], exchanged).mean()

        numbers = torch.arange(len(targets), device=device)
        self.learner.train(round, x, numbers, loss_of, epochs=settings.server_epochs)
        return metrics

    def aggregate_scores(self, scores: Array) -> Array:
        """Return the consensus [R, C] from the clients' probabilities [K, R, C].

        The consensus is their mean (simple aggregation, SA), or their mean with reduced entropy
        (ERA).
        """
        if self.settings.aggregation == "sa":
            return mean_scores(scores)
        return entropy_reduced(scores, self.settings.temperature)

    def state_dict(self) -> dict[str, Array]:
        """Return the clients' latest probabilities and the server model."""
        return super().state_dict() | self.learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict(state)
        self.learner.load_state_dict(state)

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the server model."""
        return {"server": ServerModel.of_learner(config, state)}
