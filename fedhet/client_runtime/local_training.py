"""A client's training in a round: its recipe, unlabeled samples, measurements, and faults.

The batch loop is `fedhet.learning.training.train_epochs`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fedhet.algorithms.distillation import confident_labels, unlabeled_loss
from fedhet.algorithms.rounds import Plateau, rate_factor
from fedhet.base.arrays import group, grouped
from fedhet.base.errors import DropOutError, StateError
from fedhet.base.seeding import numpy_rng, torch_generator
from fedhet.base.transfer import rows_of
from fedhet.client_runtime.state import ClientState
from fedhet.data.spec import UNKNOWN, Split
from fedhet.kinds import KINDS, Kind, Shape, augmentation, check_changeable
from fedhet.learning.devices import Compute
from fedhet.learning.training import (
    Augment,
    BatchLoss,
    Optimization,
    Penalty,
    TrainOptions,
    all_finite,
    batches,
    evaluating,
    optimization_for,
)
from fedhet.runs.measures import WORK
from fedhet.settings.run import RunSettings, TrainingSettings
from fedhet.wire.identity import ClientInfo

OPTIMIZER = "optimizer"
"""The group of tensors, and the fact, of the optimizer that `training.keep-optimizer` keeps."""
PLATEAU = "plateau"
"""The prefix of the metadata of the schedule `plateau`."""
Predict = Callable[[Tensor], Tensor]
"""Samples x [N, ...] -> logits [N, C] of the model that learns, in its current mode."""
MIN_BATCH = 2
"""The fewest samples in a batch: batch normalization has no statistics of a single one."""
MIN_LABELED = 8
"""At least an eighth of a batch is labeled, as in the paper, whose mu is 7."""


class LocalTrainer:
    """Applies a client's training settings in the round that `begin` names.

    What it needs from earlier rounds is in the client's saved state.
    """

    def __init__(
        self, run: RunSettings, info: ClientInfo, state: ClientState, compute: Compute
    ) -> None:
        """Raise DataError if `training.augment` is not for the client's samples."""
        self._seed, self._rounds, self._client = run.seed, run.rounds, info.name
        self._state, self._compute = state, compute
        self._kind, self._shape = KINDS[info.kind], info.shape
        self._change = augmentation(run.training.augment, self._kind, self._shape)
        self._optimizing: Optimization | None = None
        """The optimizer whose state is to be kept."""
        self._samples, self._is_simulated = info.samples, run.pace.is_simulated
        self.work = 0
        """The samples that the round's training has used, each time that it used one."""
        self.begin(1)

    def begin(self, round: int) -> None:
        """Begin a round: its learning rate, and its random draws."""
        self._round, self._optimizing = round, None
        self.work = 0
        self.draws = torch_generator(self._seed, self._client, round, "augment")
        """The generator of the round's augmentations."""

    def counted(self) -> dict[str, float]:
        """Return the samples that the round's training has used, if a simulated clock needs it."""
        return {WORK: float(self.work or self._samples)} if self._is_simulated else {}

    def end(self, settings: TrainingSettings, loss: float | None) -> None:
        """Add to the client's state what later rounds need; `loss` is the training loss.

        Raises StateError if training diverged; the state saved before remains.
        """
        models = self._state.models.values()
        for model in models:
            model.zero_grad()  # gradients take as much as weights while the client waits
        if not all(map(all_finite, models)) or not math.isfinite(loss or 0.0):
            raise StateError(
                f"training diverged (loss {loss}): the client keeps its earlier models; "
                "a smaller 'training.lr' may help"
            )
        self._keep(settings.optimizer)
        if settings.schedule == "plateau" and loss is not None:
            now = self._plateau.after(loss, patience=settings.patience, decay=settings.decay)
            self._state.metadata |= {
                f"{PLATEAU}.{name}": value for name, value in vars(now).items()
            }

    def round_optimization(
        self, settings: TrainingSettings, parameters: Iterable[nn.Parameter]
    ) -> Optimization:
        """Return an optimizer over `parameters`, at the round's rate; with its kept state, if any.

        Only its state for the private model is kept: other models, such as a proxy, are replaced
        in each round.
        """
        factor = rate_factor(settings, self._round, self._rounds, self._plateau)
        now = settings.model_copy(update={"lr": settings.lr * factor})
        made = optimization_for(parameters, now, self._compute)
        if settings.keep_optimizer:
            self._keep(settings.optimizer)
            if self._state.metadata.get(OPTIMIZER) == settings.optimizer:
                made.load_state(
                    self._state.models["private"], group(self._state.tensors, OPTIMIZER)
                )
            self._optimizing = made
        return made

    def options(
        self,
        settings: TrainingSettings,
        samples: int,
        augment: bool | Augment,
        chosen: TrainOptions,
    ) -> dict[str, Any]:
        """Return the options of `train_epochs` for so many samples, and count these as used.

        Those not chosen are the settings'. `augment` may be whether samples change as
        `training.augment` says, or a function that changes them.
        """
        epochs = chosen.get("epochs") or settings.local_epochs
        size = chosen.get("batch_size") or settings.batch_size
        self.work += epochs * samples * chosen.get("steps", 1)
        change = (self.augment if augment else None) if isinstance(augment, bool) else augment
        own = {"epochs": epochs, "batch_size": size, "augment": change, "compute": self._compute}
        return {**chosen, **own}

    @property
    def augment(self) -> Augment | None:
        """Return the function that changes the images of a batch; None if they do not change."""
        change = self._change
        if change is None:
            return None
        return lambda x: self._compute.to_inputs(change(x, self.draws))

    @property
    def _plateau(self) -> Plateau:
        metadata = self._state.metadata
        known = {
            k: metadata[f"{PLATEAU}.{k}"] for k in vars(Plateau()) if f"{PLATEAU}.{k}" in metadata
        }
        return Plateau(**known)  # type: ignore[arg-type]

    def _keep(self, optimizer: str) -> None:
        """Replace the kept state by that of the round's optimizer, if it is to be kept."""
        if self._optimizing is None:
            return
        found = grouped(OPTIMIZER, self._optimizing.state(self._state.models["private"]))
        kept = self._state.tensors.items()
        others = {k: v for k, v in kept if not k.startswith(f"{OPTIMIZER}/")}
        self._state.tensors = others | found
        self._state.metadata[OPTIMIZER] = optimizer


class FixMatch:
    """FixMatch's loss (Eqs. 3 and 4) around a supervised loss, for one round of a client.

    Kihyuk Sohn et al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and
    Confidence, NeurIPS 2020: `training.semi`, learning from unlabeled samples too.

    A step sees one batch, labeled and unlabeled in the client's proportion, but at least an
    eighth of it is labeled: a client with fewer labels sees them several times in an epoch.
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
        """Take samples of `shape`; `model` is put into evaluation mode for pseudo-labels.

        Raises DataError for samples that cannot be augmented.
        """
        check_changeable(kind, shape, "FixMatch augments")
        self._weak, self._strong = (kind.changes()[name] for name in ("weak", "strong"))
        self._unlabeled, self._model, self._settings = unlabeled, model, settings
        self._compute, self._draws = compute, draws
        every = len(labeled) + len(unlabeled)
        steps = max(1, math.ceil(every / settings.batch_size))
        least = max(MIN_BATCH, math.ceil(min(settings.batch_size, every) / MIN_LABELED))
        times = max(1, math.ceil(steps * least / max(1, len(labeled))))
        self._has_labels = len(labeled) > 0
        learned = labeled if self._has_labels else unlabeled
        rows = torch.arange(len(learned)).repeat(times)
        self.x, self.y = rows_of(learned.x, rows), rows_of(learned.y, rows)
        """The labeled samples of an epoch [N, ...], and their classes [N]."""
        self.batch_size = max(MIN_BATCH, math.ceil(len(rows) / steps))
        """The labeled samples of a step."""
        size = max(MIN_BATCH, math.ceil(len(unlabeled) / steps))
        # Batch after batch, in an order drawn each epoch.
        epochs = (batches(len(unlabeled), size, draws, unlabeled.x.device) for _ in count())
        self._batches = chain.from_iterable(epochs)
        self._counts = torch.zeros(4, device=compute.device)
        """Counts of predictions, of pseudo-labels, of those of known class, and of wrong ones."""

    def augment(self, x: Tensor) -> Tensor:
        """Return weakly augmented samples [N, ...], as labeled ones are learned."""
        return self._compute.to_inputs(self._weak(x, self._draws))

    def joined_with(
        self, loss_of: BatchLoss, penalty: Penalty | None, predict: Predict
    ) -> BatchLoss:
        """Return the loss of a labeled batch, plus the weighted one of the next unlabeled batch.

        A client with only labeled or only unlabeled samples learns from those. `penalty` is a
        term of the weights alone, which is added to the loss of a labeled batch.
        """
        weight = self._settings.semi_weight
        if not self._has_labels:
            return lambda x, y: weight * self.loss(predict)
        labeled = loss_of if penalty is None else lambda x, y: loss_of(x, y) + penalty()
        if len(self._unlabeled) < MIN_BATCH:
            return labeled
        return lambda x, y: labeled(x, y) + weight * self.loss(predict)

    def loss(self, predict: Predict) -> Tensor:
        """Return the loss of the next batch of unlabeled samples (Eq. 4), a scalar."""
        rows = next(self._batches)
        x = self._compute.to_inputs(self._unlabeled.x[rows])
        with torch.no_grad(), evaluating(self._model):
            guessed, confident = confident_labels(
                predict(self._compute.to_inputs(self._weak(x, self._draws))),
                self._settings.semi_threshold,
            )
        truth = rows_of(self._unlabeled.y, rows)
        checked, seen = confident & (truth != UNKNOWN), torch.ones_like(confident)
        counted = torch.stack([seen, confident, checked, checked & (guessed != truth)])
        self._counts += counted.sum(1)
        logits = predict(self._compute.to_inputs(self._strong(x, self._draws)))
        return unlabeled_loss(logits, guessed, confident)

    def metrics(self) -> dict[str, float]:
        """Return the share of pseudo-labels among predictions, and of wrong ones among those."""
        seen, used, checked, wrong = self._counts.tolist()
        found = {"pseudo_labels": used / max(1, seen)}
        return found | ({"pseudo_error": wrong / checked} if checked else {})


class EpochMeans:
    """Named sums over an epoch's batches, which stay on the device until they are read."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self._names, self._count = names, 0
        self._sums = torch.zeros(len(names), device=device)

    def clear(self, epoch: int = 0) -> None:
        """Begin an epoch: forget all batches."""
        self._count = 0
        self._sums.zero_()

    @torch.no_grad()
    def add(self, means: Tensor, samples: int) -> None:
        """Add a batch of `samples`, by its means of each of the names."""
        self._count += samples
        self._sums += means.detach().float() * samples

    def read(self) -> dict[str, float]:
        """Return the means by name; nothing if there was no batch."""
        if not self._count:
            return {}
        return dict(zip(self._names, (self._sums / self._count).tolist(), strict=True))


def drops_out(run: RunSettings, client: str, round: int) -> bool:
    """Return whether a client drops out of a round."""
    return _is_hit(run, client, round, "drop-out", run.pace.drop_outs)


def straggles(run: RunSettings, client: str, round: int) -> bool:
    """Return whether a client takes longer for a round."""
    return _is_hit(run, client, round, "straggler", run.pace.stragglers)


@contextlib.contextmanager
def injected_faults(run: RunSettings, client: str, round: int) -> Iterator[None]:
    """Make the block take 'pace.slowdown' times as long if the client straggles in the round.

    With a simulated clock that is the clock's part (`fedhet.server.pace`), and no time is lost.
    Raises DropOutError, before the block, if the client drops out of the round.
    """
    if drops_out(run, client, round):
        raise DropOutError(f"drops out of round {round} ('pace.drop-outs')")
    started = time.perf_counter()
    yield
    if straggles(run, client, round) and not run.pace.is_simulated:
        time.sleep((run.pace.slowdown - 1) * (time.perf_counter() - started))


def _is_hit(run: RunSettings, client: str, round: int, what: str, share: float) -> bool:
    return share > 0 and bool(numpy_rng(run.seed, client, round, what).random() < share)
