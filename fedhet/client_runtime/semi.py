"""Learning from a client's unlabelled samples besides its labelled ones: `training.semi`.

Kihyuk Sohn et al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence,
NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor, nn

from fedhet.algorithms.distillation import confident_labels, unlabelled_loss
from fedhet.base.transfer import rows_of
from fedhet.data.spec import UNKNOWN, Split
from fedhet.kinds import Kind, Shape, check_changeable
from fedhet.learning.devices import Compute
from fedhet.learning.training import LossOfBatch, batches, evaluating
from fedhet.settings.run import TrainingSettings

Predict = Callable[[Tensor], Tensor]
"""Samples x [N, ...] -> logits [N, C] of the model that learns, in its current mode."""
LEAST_BATCH = 2
"""The fewest samples in a batch: batch normalisation has no statistics of a single one."""
LEAST_LABELLED = 8
"""At least an eighth of a batch is labelled, as in the paper, whose mu is 7."""


class FixMatch:
    """FixMatch's loss (Eqs. 3 and 4) around a supervised loss, for one round of a client.

    A step sees one batch, labelled and unlabelled in the client's proportion, but at least an
    eighth of it is labelled: a client with fewer labels sees them several times in an epoch.
    """

    def __init__(
        self,
        labelled: Split,
        unlabelled: Split,
        kind: Kind,
        shape: Shape,
        model: nn.Module,
        settings: TrainingSettings,
        compute: Compute,
        draws: Generator,
    ) -> None:
        """Take samples of `shape`; `model` is put into evaluation mode for pseudo-labels.

        Raises DataError for samples that cannot be augmented.
        """
        check_changeable(kind, shape, "FixMatch augments")
        self._weak, self._strong = (kind.changes()[name] for name in ("weak", "strong"))
        self._unlabelled, self._model, self._settings = unlabelled, model, settings
        self._compute, self._draws = compute, draws
        every = len(labelled) + len(unlabelled)
        steps = max(1, math.ceil(every / settings.batch_size))
        least = max(LEAST_BATCH, math.ceil(min(settings.batch_size, every) / LEAST_LABELLED))
        times = max(1, math.ceil(steps * least / max(1, len(labelled))))
        self._has_labels = len(labelled) > 0
        learned = labelled if self._has_labels else unlabelled
        rows = torch.arange(len(learned)).repeat(times)
        self.x, self.y = rows_of(learned.x, rows), rows_of(learned.y, rows)
        """The labelled samples of an epoch [N, ...], and their classes [N]."""
        self.batch_size = max(LEAST_BATCH, math.ceil(len(rows) / steps))
        """The labelled samples of a step."""
        self._batches = self._endless(max(LEAST_BATCH, math.ceil(len(unlabelled) / steps)))
        self._counts = torch.zeros(4, device=compute.device)
        """Counts of predictions, of pseudo-labels, of those of known class, and of wrong ones."""

    def augment(self, x: Tensor) -> Tensor:
        """Return weakly augmented samples [N, ...], as labelled ones are learned."""
        return self._compute.images(self._weak(x, self._draws))

    def joined_with(self, loss_of: LossOfBatch, predict: Predict) -> LossOfBatch:
        """Return `loss_of` a labelled batch, plus the weighted loss of the next unlabelled one.

        A client with only labelled or only unlabelled samples learns from those.
        """
        weight = self._settings.semi_weight
        if not self._has_labels:
            return lambda x, y: weight * self.loss(predict)
        if len(self._unlabelled) < LEAST_BATCH:
            return loss_of
        return lambda x, y: loss_of(x, y) + weight * self.loss(predict)

    def loss(self, predict: Predict) -> Tensor:
        """Return the loss of the next batch of unlabelled samples (Eq. 4), a scalar."""
        rows = next(self._batches)
        x = self._compute.images(self._unlabelled.x[rows])
        with torch.no_grad(), evaluating(self._model):
            guessed, confident = confident_labels(
                predict(self._compute.images(self._weak(x, self._draws))),
                self._settings.semi_threshold,
            )
        self._count(rows, guessed, confident)
        logits = predict(self._compute.images(self._strong(x, self._draws)))
        return unlabelled_loss(logits, guessed, confident)

    def figures(self) -> dict[str, float]:
        """Return the share of pseudo-labels among predictions, and of wrong ones among those."""
        seen, used, checked, wrong = self._counts.tolist()
        found = {"pseudo_labels": used / max(1, seen)}
        return found | ({"pseudo_error": wrong / checked} if checked else {})

    def _count(self, rows: Tensor, guessed: Tensor, confident: Tensor) -> None:
        truth = rows_of(self._unlabelled.y, rows)
        checked = confident & (truth != UNKNOWN)
        seen = torch.ones_like(confident)
        counted = torch.stack([seen, confident, checked, checked & (guessed != truth)])
        self._counts += counted.sum(1)

    def _endless(self, size: int) -> Iterator[Tensor]:
        """Yield rows of the unlabelled samples, batch after batch, in an order drawn each epoch."""
        while True:
            yield from batches(len(self._unlabelled), size, self._draws, self._unlabelled.x.device)
