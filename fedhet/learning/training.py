"""Training loop, loss modules, and evaluation. All methods train with `train_epochs`.

The learning rate is multiplied by a factor for each round (`rate_factor`). Data is stored in
tensors and indexed directly, without a DataLoader. Losses are summed on the device and read once
per epoch.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from fedhet.base.arrays import Array
from fedhet.base.errors import DataError
from fedhet.base.metrics import MAX_CONFUSION
from fedhet.base.transfer import rows_of, to_device
from fedhet.learning.devices import CPU, Compute, evaluation_batch
from fedhet.settings.run import TrainingSettings

BatchLoss = Callable[[Tensor, Tensor], Tensor]
"""Function that maps a batch x [N, ...], y [N] to its mean loss, a scalar with gradient."""
Penalty = Callable[[], Tensor | float]
"""Function that returns a penalty on the weights alone: a scalar with gradient, or 0.0."""
Augment = Callable[[Tensor], Tensor]
"""Function that randomly augments images [N, C, H, W] or tokens [N, L]."""
MILESTONES = (0.5, 0.75)
"""Default milestones, as fractions of the rounds (He et al., Deep Residual Learning, 2016)."""
MIN_CHANGE = 1e-4
"""Minimum relative decrease that counts as an improvement (the default of ReduceLROnPlateau)."""


class SupervisedLoss(nn.Module):
    """Loss of a network on labeled samples, as defined by its task.

    A loss can be compiled if it is a module with the trained networks as submodules.
    """

    def __init__(self, model: nn.Module, loss_of: BatchLoss) -> None:
        super().__init__()
        self.model, self._loss_of = model, loss_of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch x [N, ...], y [N, ...]."""
        return self._loss_of(self.model(x).float(), y)


class CrossEntropy(SupervisedLoss):
    """Cross-entropy loss of a network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, nn.functional.cross_entropy)


class LabelSpace(nn.Module):
    """Module that restricts logits and labels to a client's label space.

    A loss computed from its outputs has no gradient with respect to the logits of other classes.
    """

    space: Tensor

    def __init__(self, space: Tensor) -> None:
        """Create the module for the classes `space` [S], ascending."""
        super().__init__()
        self.register_buffer("space", space, persistent=False)

    def forward(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [N, S] of the label space, and the labels [N] as indices into it."""
        return self.columns(logits), torch.searchsorted(self.space, y)

    def columns(self, logits: Tensor) -> Tensor:
        """Select the columns [N, S] of the label space from logits [N, C]."""
        has_all_classes = self.space.shape[-1] == logits.shape[-1]
        return logits if has_all_classes else logits[:, self.space]


class AllOutputs(LabelSpace):
    """Unrestricted label space, for tasks other than classification."""

    def forward(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and the targets unchanged."""
        return logits, y


class _Eager(torch.optim.Optimizer):
    """Optimizer whose steps are never compiled, so that it does not import PyTorch's compiler.

    PyTorch wraps these methods to exclude them from compiled graphs. The wrappers import the
    compiler, which takes longer than a small run.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class SGD(_Eager, torch.optim.SGD):
    """PyTorch's SGD, without its import of the compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class Adam(_Eager, torch.optim.Adam):
    """PyTorch's Adam, without its import of the compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(_Eager, torch.optim.AdamW):
    """PyTorch's AdamW, without its import of the compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


@dataclass
class Optimization:
    """Optimizer with a gradient scaler (for float16) and gradient clipping."""

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    clip: float = 0.0
    """Maximum L2 norm of the gradient of all parameters, or 0 for no limit."""
    compiles: ClassVar[bool] = True
    """Whether the loss may be compiled."""

    def batches(
        self, samples: int, batch_size: int, generator: torch.Generator, device: torch.device
    ) -> Iterable[Tensor]:
        """Return the sample indices of each batch in an epoch, using the function `batches`."""
        return batches(samples, batch_size, generator, device)

    def step(self, loss: Tensor | None, penalty: Tensor | float = 0.0) -> None:
        """Take an optimizer step on `loss + penalty`, unless `loss` is None (empty batch)."""
        if loss is None:
            return
        loss = loss + penalty if isinstance(penalty, Tensor) else loss
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def decay_schedule(self, factor: float) -> Callable[[int], None]:
        """Return a function that sets the learning rate for an epoch to `lr * factor**epoch`."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]

        def set_rate(epoch: int) -> None:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor**epoch

        return set_rate

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the optimizer state for the parameters of `model`, keyed `<parameter>/<name>`."""
        return {
            f"{name}/{key}": value
            for name, parameter in model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Restore an optimizer state from `state` if it matches the parameters of `model`."""
        parameters = dict(model.named_parameters())
        entries = [(*name.rpartition("/")[::2], value) for name, value in state.items()]
        for name, _, value in entries:
            if name not in parameters or value.shape not in (parameters[name].shape, ()):
                return
        for name, key, value in entries:
            parameter = parameters[name]
            if value.shape == parameter.shape:  # Copy in the memory format of the parameter.
                value = torch.empty_like(parameter, requires_grad=False).copy_(value)
            else:
                value = value.clone()
            self.optimizer.state[parameter][key] = value


def optimization_for(
    parameters: Iterable[Tensor],
    settings: TrainingSettings,
    compute: Compute,
    factor: float = 1.0,
) -> Optimization:
    """Create the optimizer configured in `settings` for `parameters`.

    `factor` is the round's factor for the learning rate, as returned by `rate_factor`.
    """
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": Adam,
        "adamw": AdamW,
        "sgd": partial(SGD, momentum=settings.momentum),
    }
    is_fused = compute.device.type in ("cpu", "cuda")
    optimizer = kinds[settings.optimizer](
        parameters, lr=settings.lr * factor, weight_decay=settings.weight_decay, fused=is_fused
    )
    scaler = torch.amp.GradScaler(
        compute.device.type, enabled=compute.autocast_dtype is torch.float16
    )
    return Optimization(optimizer, scaler, settings.clip)


@dataclass(frozen=True)
class Plateau:
    """State of a ReduceLROnPlateau schedule.

    Attributes:
        best: Lowest value so far.
        waited: Number of rounds since the last improvement.
        factor: Current factor for the learning rate.
    """

    best: float = math.inf
    waited: int = 0
    factor: float = 1.0

    def after(self, value: float, *, patience: int, decay: float) -> Plateau:
        """Return the state after a round with the given loss or error."""
        if value < self.best * (1 - MIN_CHANGE):
            return Plateau(value, 0, self.factor)
        if self.waited < patience:
            return Plateau(self.best, self.waited + 1, self.factor)
        return Plateau(self.best, 0, self.factor * decay)


NO_PLATEAU = Plateau()


def rate_factor(
    settings: TrainingSettings, round: int, rounds: int, plateau: Plateau = NO_PLATEAU
) -> float:
    """Return the factor, in (0, 1], for the learning rate in `round` (counted from 1).

    Except with the schedule `plateau`, the factor depends only on the round number, and not on how
    often a client was sampled. The formulas are the same as in torch.optim.lr_scheduler, with
    rounds instead of epochs.
    """
    warm_up = settings.warm_up_rounds
    factor = min(1.0, round / (warm_up + 1))  # The factor is linear during the warm-up, then 1.
    # The factor is 1 in the first round after the warm-up and near 0 at the end.
    if settings.schedule == "cosine":
        angle = math.pi * max(0, round - warm_up - 1) / max(1, rounds - warm_up)
        factor *= (1 + math.cos(angle)) / 2
    elif settings.schedule == "step":
        ends = settings.milestones or [max(1, int(s * rounds)) for s in MILESTONES]
        # Count the milestones that have passed.
        factor *= settings.decay ** bisect_left(ends, round)
    elif settings.schedule == "plateau":
        factor *= plateau.factor
    return factor


def batches(
    samples: int, batch_size: int, generator: torch.Generator, device: torch.device = CPU.device
) -> list[Tensor]:
    """Shuffle the sample indices of one epoch and split them into batches.

    No batch has a single sample, because batch normalization cannot train on a single sample. The
    minimum batch size is 2, and a single remaining sample is added to the last batch. Raises
    DataError if there are fewer than two samples.
    """
    if samples < 2:
        raise DataError(f"training requires at least 2 samples, got {samples}")
    order = to_device(torch.randperm(samples, generator=generator), device)
    cuts = list(range(0, samples, max(batch_size, 2)))
    if samples - cuts[-1] == 1 and len(cuts) > 1:
        cuts.pop()
    return [order[start:end] for start, end in zip(cuts, [*cuts[1:], samples], strict=True)]


class TrainOptions(TypedDict, total=False):
    """Options for `train_epochs` that a method may set."""

    epochs: int
    batch_size: int
    steps: int
    after_batch: Callable[[], None]
    before_epoch: Callable[[int], object]
    penalty: Penalty


def train_epochs(
    x: Tensor,
    y: Tensor,
    loss_of: BatchLoss,
    optimizing: Optimization,
    *,
    epochs: int,
    batch_size: int,
    generator: torch.Generator,
    compute: Compute,
    steps: int = 1,
    after_batch: Callable[[], None] | None = None,
    before_epoch: Callable[[int], object] | None = None,
    augment: Augment | None = None,
    penalty: Penalty | None = None,
) -> float:
    """Train with mini-batches, and return the mean loss over the last epoch.

    Args:
        x: Samples [N, ...] on the device or on the host. uint8 images are scaled batch by batch.
        y: Labels [N] on the device.
        loss_of: Function that returns the mean loss of a batch.
        optimizing: Optimizer for the trained parameters.
        epochs: Number of passes over the samples.
        batch_size: Number of samples in a batch; see `batches`.
        generator: Random generator for the order of the samples.
        compute: Device and precision.
        steps: Number of optimizer steps on each batch.
        after_batch: Called after the steps on each batch.
        before_epoch: Called with the number of each epoch, from 0.
        augment: Function that augments the samples in each batch.
        penalty: Function that returns a penalty on the weights alone.
    """
    loss_of = compute.compiled(loss_of) if optimizing.compiles else loss_of
    mean = math.nan
    for epoch in range(epochs):
        if before_epoch is not None:
            before_epoch(epoch)
        total = torch.zeros((), device=compute.device)
        for index in optimizing.batches(len(y), batch_size, generator, x.device):
            target = rows_of(y, index)
            inputs = compute.to_inputs(x[index])
            inputs = inputs if augment is None or not len(index) else augment(inputs)
            for _ in range(steps):
                with compute.autocast():
                    loss = loss_of(inputs, target) if len(index) else None
                    extra = 0.0 if penalty is None else penalty()
                optimizing.step(loss, extra)
            if after_batch is not None:
                after_batch()
            if loss is not None:
                total += (loss + extra).detach() * len(index)
        mean = total.item() / len(y)
    return mean


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on a test split."""

    accuracy: float
    """Accuracy, or NaN if the task is not classification."""
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by name; see `fedhet.models.evaluate_model`."""
    majority: float = math.nan
    """Headline score of a constant prediction: the most frequent class or the mean (regression)."""
    samples: int = 0
    """Number of test samples, or 0 if it is unknown."""
    confusion: Array | None = field(default=None, compare=False)
    """Number of samples of each true class (row) and predicted class (column), of shape [C, C].

    Predictions with a logit that is not finite are not counted. None if the task is not
    classification, or if there are more than `MAX_CONFUSION` classes."""


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    compute: Compute,
    all_logits: list[Tensor] | None = None,
) -> Evaluation:
    """Return the accuracy in [0, 1] and the mean cross-entropy of `model` on x [N, ...], y [N].

    There must be at least one sample. If `all_logits` is not None, the logits of each batch are
    appended to the list. The trace of the confusion matrix is the number of correct predictions.
    """
    # Read the count before the batches are queued, so that its copy to the host does not wait for
    # them.
    most_frequent = int(torch.bincount(y).max())
    correct = torch.zeros((), device=compute.device)
    loss = torch.zeros((), device=compute.device)
    pairs: Tensor | None = None
    with evaluating(model):
        size = evaluation_batch(model, x, compute)
        for start in range(0, len(y), size):
            part = slice(start, start + size)
            target = compute.to_device(y[part])
            with compute.autocast():
                logits = model(compute.to_inputs(x[part])).float()
            top, predicted = logits.max(1)  # Unlike argmax, max is NaN if a logit is NaN.
            valid = top.isfinite()
            correct += ((predicted == target) & valid).sum()
            if (classes := logits.shape[1]) <= MAX_CONFUSION:
                if pairs is None:
                    pairs = torch.zeros(classes**2, dtype=torch.int32, device=compute.device)
                pairs.index_add_(0, target * classes + predicted, valid.int())
            loss += nn.functional.cross_entropy(logits, target, reduction="sum")
            if all_logits is not None:
                all_logits.append(logits)
    num_correct, total = torch.stack([correct, loss]).tolist()  # Synchronize once for all batches.
    confusion = None if pairs is None else pairs.cpu().numpy().reshape(classes, classes)
    return Evaluation(
        num_correct / len(y), total / len(y), majority=most_frequent / len(y), samples=len(y),
        confusion=confusion,
    )  # fmt: skip


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor, compute: Compute) -> Tensor:
    """Compute the float32 logits [N, C] of `model` in evaluation mode on x [N, ...]."""
    with evaluating(model), compute.autocast():
        size = evaluation_batch(model, x, compute)
        parts = [model(compute.to_inputs(part)) for part in torch.split(x, size)]
    return torch.cat(parts).float()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, and restore the mode of each submodule on exit."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Prevent batch norms from updating their running statistics in training mode."""
    norms: list[Any] = [m for m in model.modules() if getattr(m, "track_running_stats", False)]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def all_finite(model: nn.Module) -> bool:
    """Return whether all tensors in the state dict of `model` are finite."""
    finite = [tensor.isfinite().all() for tensor in model.state_dict().values()]
    return bool(torch.stack(finite).all()) if finite else True
