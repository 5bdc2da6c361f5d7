"""FixAvg, client half: FixMatch on the client's labelled and unlabelled samples.

Sohn et al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clients.base import HetClient
from fedhet.algorithms.fixmatch import confident_labels, fixmatch_loss, strong, weak
from fedhet.arrays import grouped
from fedhet.data import UNKNOWN
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.training import LossOfBatch, evaluating
from fedhet.wire.contract import Contract, ScalarField, WeightsField
from fedhet.wire.knowledge import Knowledge
from strategies.fixavg import FixAvgSettings


class FixAvgClient(HetClient):
    """Trains on weakly augmented labelled and strongly augmented pseudo-labelled images."""

    settings: FixAvgSettings
    sends = Contract(
        (
            WeightsField("weights", "the model after training"),
            ScalarField(
                "confident", float, "share of unlabelled samples with a pseudo-label", low=0, high=1
            ),
            ScalarField(
                "pseudo_error",
                float,
                "share of these pseudo-labels that are wrong, where the truth is known",
                required=False,
                low=0,
                high=1,
            ),
        )
    )

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the model after training, and the averaged model as last received."""
        models = dict(self.models)
        if weights := knowledge.group("weights"):
            models["global"] = self.placed(self.build_model(), weights)
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train the local epochs, starting from the averaged model."""
        model = self.network
        load_weights(model, knowledge.group("weights"))
        model.train()
        x = torch.cat([self.x, self.unlabelled.x])
        truth = torch.cat([self.y, self.unlabelled.y])
        counts = torch.zeros(3, device=x.device)
        loss_of = self._loss(model, truth, counts, self.generator(round, "augment"))
        optimizing = self.optimization(model.parameters())
        generator, rows = self.generator(round, "batches"), torch.arange(len(x), device=x.device)
        self.train_epochs(
            x, rows, loss_of, optimizing, generator, before_epoch=lambda _: counts.zero_()
        )
        return Knowledge(grouped("weights", to_arrays(model)), self._figures(counts))

    def _loss(
        self, model: HetModel, truth: Tensor, counts: Tensor, draws: torch.Generator
    ) -> LossOfBatch:
        """Return the loss of images and their rows in `truth` [N]; the labelled rows come first.

        It adds to `counts`: pseudo-labels used, those of known truth, and those that are wrong.
        """
        chosen = self.settings
        labelled = torch.arange(len(truth), device=truth.device) < len(self.y)

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            weakly, known = weak(x, draws), labelled[rows]
            with torch.no_grad(), evaluating(model):
                guessed, confident = confident_labels(model(weakly), chosen.threshold)
            used = confident & ~known
            checked = used & (truth[rows] != UNKNOWN)
            wrong = checked & (guessed != truth[rows])
            counts.add_(torch.stack([used, checked, wrong]).sum(1))
            seen = torch.where(known.view(-1, 1, 1, 1), weakly, strong(x, draws))
            labels = torch.where(known, truth[rows], guessed)
            return fixmatch_loss(model(seen), labels, known, confident, chosen.unlabelled_weight)

        return loss_of

    def _figures(self, counts: Tensor) -> dict[str, float]:
        """Return how many pseudo-labels the last epoch used, and the share that is wrong."""
        used, checked, wrong = counts.tolist()
        found = {"confident": used / max(1, len(self.unlabelled))}
        return found | ({"pseudo_error": wrong / checked} if checked else {})
