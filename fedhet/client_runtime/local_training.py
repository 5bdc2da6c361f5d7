"""Local training on a client: optimizer, schedule, semi-supervised loss, and fault injection.

The batch loop is `fedhet.learning.training.train_epochs`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fedhet.algorithms.distillation import confident_labels, unlabeled_loss
from fedhet.algorithms.rounds import is_hit
from fedhet.base.arrays import group, grouped
from fedhet.base.errors import DropOutError, StateError
from fedhet.base.seeding import torch_generator
from fedhet.base.transfer import rows_of
from fedhet.client_runtime.state import ClientState
from fedhet.data.dataset import UNKNOWN, Split
from fedhet.kinds import KINDS, Kind, Shape, augmentation, check_changeable
from fedhet.learning.devices import Compute
from fedhet.learning.training import (
    Augment,
    BatchLoss,
    Optimization,
    Penalty,
    Plateau,
    TrainOptions,
    all_finite,
    batches,
    evaluating,
    rate_factor,
)
from fedhet.runs.measures import WORK
from fedhet.settings.run import RunSettings, TrainingSettings
from fedhet.wire.identity import ClientInfo

OPTIMIZER = "optimizer"
"""State group and metadata key for the optimizer state, if `training.keep-optimizer` is set."""
PLATEAU = "plateau"
"""Prefix of the metadata keys for the `plateau` schedule."""
Predict = Callable[[Tensor], Tensor]
"""Function that maps samples x [N, ...] to the logits [N, C] of the model being trained.

The function does not change the mode of the model (training or evaluation)."""
MIN_BATCH = 2
"""Minimum batch size, because batch normalization cannot compute statistics of a single sample."""
BATCH_PER_LABELED = 8
"""Maximum number of samples in a step per labeled sample: 7 unlabeled samples (mu in the paper),
and the labeled sample itself."""


class LocalTrainer:
    """Trainer that applies a client's training settings in each round. `begin` starts a round.

    Data needed in later rounds, such as optimizer state, is kept in the client's saved state.
    """

    def __init__(
        self, run: RunSettings, info: ClientInfo, state: ClientState, compute: Compute
    ) -> None:
        """Create the trainer.

        Raises DataError if `training.augment` does not support the samples.
        """
        self._seed, self._rounds, self._client = run.seed, run.rounds, info.name
        self._state, self._compute = state, compute
        self._kind, self._shape = KINDS[info.kind], info.shape
        self._augmentation = augmentation(run.training.augment, self._kind, self._shape)
        self._optimizing: Optimization | None = None
        """Optimizer whose state `end` saves, or None if no state must be saved."""
        self._samples, self._is_simulated = info.samples, run.pace.is_simulated
        self.work = 0
        """Number of training samples processed in the round; a sample counts once per epoch."""
        self.epochs = 0.0
        """Number of passes over the client's own labeled samples in the round."""
        self.begin(1)

    def begin(self, round: int) -> None:
        """Begin a round. Resets the counters, and seeds the random augmentations."""
        self._round, self._optimizing = round, None
        self.work, self.epochs = 0, 0.0
        self.draws = torch_generator(self._seed, self._client, round, "augment")
        """Random generator for the round's augmentations."""

    def work_metrics(self) -> dict[str, float]:
        """Return the number of processed samples as a metric, if the clock is simulated."""
        return {WORK: float(self.work or self._samples)} if self._is_simulated else {}

    def end(self, settings: TrainingSettings, loss: float | None) -> None:
        """Update the client's state at the end of a round. `loss` is the training loss, if known.

        Raises StateError if training diverged; the last saved state remains valid.
        """
        models = self._state.models.values()
        for model in models:
            # Free the gradients, because they use as much memory as the weights.
            model.zero_grad()
        if not all(map(all_finite, models)) or not math.isfinite(loss or 0.0):
            raise StateError(
                f"training diverged (loss {loss}). The client's last saved models are unchanged. "
                "Reduce 'training.lr'."
            )
        self._save_optimizer(settings.optimizer)
        if settings.schedule == "plateau" and loss is not None:
            plateau = self._plateau.after(loss, patience=settings.patience, decay=settings.decay)
            self._state.metadata |= {
                f"{PLATEAU}.{name}": value for name, value in vars(plateau).items()
            }

    def rate_factor(self, settings: TrainingSettings) -> float:
        """Return the round's factor for the learning rate."""
        return rate_factor(settings, self._round, self._rounds, self._plateau)

    def keep(self, optimizing: Optimization, settings: TrainingSettings) -> None:
        """Restore the optimizer's saved state, and let `end` save it, if `keep-optimizer` is set.

        Only the state for the private model is saved, because other models, such as proxies, are
        replaced in each round.
        """
        if not settings.keep_optimizer:
            return
        self._save_optimizer(settings.optimizer)
        if self._state.metadata.get(OPTIMIZER) == settings.optimizer:
            saved = group(self._state.tensors, OPTIMIZER)
            optimizing.load_state(self._state.models["private"], saved)
        self._optimizing = optimizing

    def options(
        self,
        settings: TrainingSettings,
        samples: int,
        augment: bool | Augment,
        chosen: TrainOptions,
        own: float = 0.0,
    ) -> dict[str, Any]:
        """Return options for `train_epochs`, and count the samples and the epochs.

        Options in `chosen` override the settings. `augment` is an augmentation function, or True to
        use `training.augment`. `own` is the fraction of the client's own samples in an epoch.
        """
        epochs = chosen.get("epochs") or settings.local_epochs
        size = chosen.get("batch_size") or settings.batch_size
        self.work += epochs * samples * chosen.get("steps", 1)
        self.epochs += epochs * own * chosen.get("steps", 1)
        change = (self.augment if augment else None) if isinstance(augment, bool) else augment
        common = {"epochs": epochs, "batch_size": size, "augment": change}
        return {**chosen, **common, "compute": self._compute}

    @property
    def augment(self) -> Augment | None:
        """Function that augments a batch of images, or None if augmentation is off."""
        change = self._augmentation
        if change is None:
            return None
        return lambda x: self._compute.to_inputs(change(x, self.draws))

    @property
    def _plateau(self) -> Plateau:
        metadata = self._state.metadata
        saved = {
            k: metadata[f"{PLATEAU}.{k}"] for k in vars(Plateau()) if f"{PLATEAU}.{k}" in metadata
        }
        return Plateau(**saved)  # type: ignore[arg-type]

    def _save_optimizer(self, optimizer: str) -> None:
        """Copy the optimizer's state, if kept between rounds, into the client's state."""
        if self._optimizing is None:
            return
        saved = grouped(OPTIMIZER, self._optimizing.state(self._state.models["private"]))
        tensors = self._state.tensors.items()
        remaining = {k: v for k, v in tensors if not k.startswith(f"{OPTIMIZER}/")}
        self._state.tensors = remaining | saved
        self._state.metadata[OPTIMIZER] = optimizer


class FixMatch:
    """FixMatch loss (Eqs. 3 and 4) for one round of a client, enabled by `training.semi`.

    Kihyuk Sohn et al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and
    Confidence, NeurIPS 2020.

    Each step uses one batch of labeled and one batch of unlabeled samples, in the same ratio as in
    the client's data. At least an eighth of the samples in a step are labeled. If the client has
    too few labeled samples for this, it repeats labeled samples within an epoch.
    """

    def __init__(
        self,
        labeled: Split,
        unlabeled: Split,
        kind: Kind,
        shape: Shape,
        model: nn.Module,
        settings: TrainingSettings,
        compute: Compute,
        draws: Generator,
    ) -> None:
        """Prepare the batches for a round. Raises DataError if the samples cannot be augmented.

        `model` predicts the pseudo-labels, in evaluation mode.
        """
        check_changeable(kind, shape, "FixMatch supports")
        self._weak, self._strong = (kind.changes()[name] for name in ("weak", "strong"))
        self._unlabeled, self._model, self._settings = unlabeled, model, settings
        self._compute, self._draws = compute, draws
        total = len(labeled) + len(unlabeled)
        steps = max(1, math.ceil(total / settings.batch_size))
        min_labeled = min(settings.batch_size, total) / BATCH_PER_LABELED
        min_labeled = max(MIN_BATCH, math.ceil(min_labeled))
        repeats = max(1, math.ceil(steps * min_labeled / max(1, len(labeled))))
        self._has_labels = len(labeled) > 0
        samples = labeled if self._has_labels else unlabeled
        rows = torch.arange(len(samples)).repeat(repeats)
        self.x, self.y = rows_of(samples.x, rows), rows_of(samples.y, rows)
        """Labeled samples [N, ...] for one epoch, and their labels [N]."""
        self.batch_size = max(MIN_BATCH, math.ceil(len(rows) / steps))
        """Number of labeled samples per step."""
        size = max(MIN_BATCH, math.ceil(len(unlabeled) / steps))
        # Yield unlabeled batches indefinitely, reshuffled every epoch.
        epochs = (batches(len(unlabeled), size, draws, unlabeled.x.device) for _ in count())
        self._batches = chain.from_iterable(epochs)
        self._counts = torch.zeros(4, device=compute.device)
        """Numbers of predictions, of pseudo-labels, of pseudo-labels with a known true label, and
        of wrong pseudo-labels."""

    def augment(self, x: Tensor) -> Tensor:
        """Apply the weak augmentation to labeled samples x [N, ...]."""
        return self._compute.to_inputs(self._weak(x, self._draws))

    def combined_loss(
        self, loss_of: BatchLoss, penalty: Penalty | None, predict: Predict
    ) -> BatchLoss:
        """Return a loss function for labeled batches that adds the loss of an unlabeled batch.

        The loss of the unlabeled batch is weighted. If the client has only labeled or only
        unlabeled samples, the function returns only the loss of these samples. `penalty` depends
        only on the weights, and is added to the loss.
        """
        weight, extra = self._settings.semi_weight, penalty or (lambda: 0.0)
        if not self._has_labels:
            return lambda x, y: weight * self.loss(predict) + extra()
        labeled = loss_of if penalty is None else lambda x, y: loss_of(x, y) + extra()
        if len(self._unlabeled) < MIN_BATCH:
            return labeled
        return lambda x, y: labeled(x, y) + weight * self.loss(predict)

    def loss(self, predict: Predict) -> Tensor:
        """Return the loss of the next batch of unlabeled samples, as a scalar (Eq. 4)."""
        rows = next(self._batches)
        x = self._compute.to_inputs(self._unlabeled.x[rows])
        with torch.no_grad(), evaluating(self._model):
            labels, confident = confident_labels(
                predict(self._compute.to_inputs(self._weak(x, self._draws))),
                self._settings.semi_threshold,
            )
        truth = rows_of(self._unlabeled.y, rows)
        has_truth, predicted = confident & (truth != UNKNOWN), torch.ones_like(confident)
        masks = torch.stack([predicted, confident, has_truth, has_truth & (labels != truth)])
        self._counts += masks.sum(1)
        logits = predict(self._compute.to_inputs(self._strong(x, self._draws)))
        return unlabeled_loss(logits, labels, confident)

    def metrics(self) -> dict[str, float]:
        """Return the fraction of predictions used as pseudo-labels, and their error rate."""
        predicted, used, with_truth, wrong = self._counts.tolist()
        metrics = {"pseudo_labels": used / max(1, predicted)}
        return metrics | ({"pseudo_error": wrong / with_truth} if with_truth else {})


class EpochMeans:
    """Running means over the batches in an epoch. They stay on the device until they are read."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self._names, self._count = names, 0
        self._sums = torch.zeros(len(names), device=device)

    def clear(self, epoch: int = 0) -> None:
        """Reset the means at the start of an epoch."""
        self._count = 0
        self._sums.zero_()

    @torch.no_grad()
    def add(self, means: Tensor, samples: int) -> None:
        """Add the means over a batch of `samples` samples, in the order of the names."""
        self._count += samples
        self._sums += means.detach().float() * samples

    def by_name(self) -> dict[str, float]:
        """Return the means by name, or an empty dictionary if no batch was added."""
        if not self._count:
            return {}
        return dict(zip(self._names, (self._sums / self._count).tolist(), strict=True))


@contextlib.contextmanager
def injected_faults(run: RunSettings, client: str, round: int) -> Iterator[None]:
    """Inject the faults configured by `pace.drop-outs` and `pace.stragglers` into the block.

    For a straggler, the block takes `pace.slowdown` times as long. If the clock is simulated
    (`fedhet.server.pace`), the clock adds this time instead. Raises DropOutError before the block
    if the client drops out of the round.
    """
    if is_hit(run.seed, client, round, "drop-out", run.pace.drop_outs):
        raise DropOutError(f"dropped out of round {round} ('pace.drop-outs')")
    started = time.perf_counter()
    yield
    straggles = is_hit(run.seed, client, round, "straggler", run.pace.stragglers)
    if straggles and not run.pace.is_simulated:
        time.sleep((run.pace.slowdown - 1) * (time.perf_counter() - started))
