"""The training loop, losses as modules, and evaluation. All methods train with `train_epochs`.

Data is held in tensors on the device and indexed directly, without a DataLoader; losses are summed
on the device and read once per epoch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from fedhet.base.errors import DataError
from fedhet.base.transfer import rows_of, to_device
from fedhet.learning.devices import CPU, Compute, evaluation_batch
from fedhet.settings.run import TrainingSettings

BatchLoss = Callable[[Tensor, Tensor], Tensor]
"""(x [N, ...], y [N]) -> the batch's mean loss, a scalar with gradient."""
Penalty = Callable[[], Tensor | float]
"""() -> a term of the loss that depends on the weights alone, a scalar; 0.0 without a gradient."""
Augment = Callable[[Tensor], Tensor]
"""Images [N, C, H, W] or tokens [N, L] of a batch -> randomly changed ones."""


class CrossEntropy(nn.Module):
    """Loss of supervised training: the cross-entropy of a network's logits.

    A loss that is a module, with the networks that it trains as submodules, can be compiled.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch x [N, ...], y [N], a scalar with gradient."""
        return nn.functional.cross_entropy(self.model(x).float(), y)


class LabelSpace(nn.Module):
    """A client's label space: selects the columns of its classes, and numbers the labels by them.

    A loss of these leaves the outputs of other classes without a gradient.
    """

    space: Tensor

    def __init__(self, space: Tensor) -> None:
        """`space` [S]: the client's classes, ascending."""
        super().__init__()
        self.register_buffer("space", space, persistent=False)

    def forward(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of logits [N, C] of the classes, and y [N] as their numbers."""
        return self.columns(logits), torch.searchsorted(self.space, y)

    def columns(self, logits: Tensor) -> Tensor:
        """Return the columns of logits [N, C] of the classes, [N, S]."""
        whole = self.space.shape[-1] == logits.shape[-1]
        return logits if whole else logits[:, self.space]


@dataclass
class Optimization:
    """An optimizer, for float16 its gradient scaler, and a bound on the gradient's norm."""

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    clip: float = 0.0
    """Greatest L2 norm of the gradient of all parameters; 0: any."""
    compiles: ClassVar[bool] = True
    """Whether the loss may be compiled."""
    alike: Callable[[Iterable[Tensor]], Optimization] | None = None
    """Returns another one of the same kind, with the same settings, over other parameters."""

    def batches(
        self, samples: int, batch_size: int, generator: torch.Generator, device: torch.device
    ) -> Iterable[Tensor]:
        """Return the indices of an epoch's batches: those of `batches`."""
        return batches(samples, batch_size, generator, device)

    def step(self, loss: Tensor | None, penalty: Tensor | float = 0.0) -> None:
        """Do one optimizer step on `loss` plus `penalty`; on no loss, of no samples, none."""
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
        """Return the parameters that the optimizer changes."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def decay_schedule(self, factor: float) -> Callable[[int], None]:
        """Return a function to call before each epoch, from 0, that lowers the learning rate.

        The rate of an epoch is that of now, times `factor` to the power of the epoch's number.
        """
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]

        def lower(epoch: int) -> None:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor**epoch

        return lower

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the optimizer's state for each parameter of `model`, as `<parameter>/<name>`."""
        return {
            f"{name}/{key}": value
            for name, parameter in model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; nothing if it does not fit the parameters of `model`."""
        parameters = dict(model.named_parameters())
        found = [(*name.rpartition("/")[::2], value) for name, value in state.items()]
        for name, _, value in found:
            if name not in parameters or value.shape not in (parameters[name].shape, ()):
                return
        for name, key, value in found:
            parameter = parameters[name]
            if value.shape == parameter.shape:  # a copy in the memory format of the parameter
                value = torch.empty_like(parameter, requires_grad=False).copy_(value)
            else:
                value = value.clone()
            self.optimizer.state[parameter][key] = value


def optimization_for(
    parameters: Iterable[Tensor], settings: TrainingSettings, compute: Compute
) -> Optimization:
    """Return a new optimizer over `parameters`, as configured in the settings."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": partial(torch.optim.SGD, momentum=settings.momentum),
    }
    is_fused = compute.device.type in ("cpu", "cuda")
    chosen = kinds[settings.optimizer](
        parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=is_fused
    )
    scaler = torch.amp.GradScaler(
        compute.device.type, enabled=compute.autocast_dtype is torch.float16
    )
    alike = partial(optimization_for, settings=settings, compute=compute)
    return Optimization(chosen, scaler, settings.clip, alike)


def batches(
    samples: int, batch_size: int, generator: torch.Generator, device: torch.device = CPU.device
) -> list[Tensor]:
    """Return the shuffled indices of one epoch, on `device`, divided into batches.

    A batch has batch_size samples, or 2 if that is more; the last has fewer, or one more.

    No batch has a single sample, which batch normalization cannot train on: a single remaining
    sample joins the previous batch. Raises DataError for fewer than two samples.
    """
    if samples < 2:
        raise DataError(f"training needs at least 2 samples, there is {samples}")
    order = to_device(torch.randperm(samples, generator=generator), device)
    cuts = list(range(0, samples, max(batch_size, 2)))
    if samples - cuts[-1] == 1 and len(cuts) > 1:
        cuts.pop()
    return [order[start:end] for start, end in zip(cuts, [*cuts[1:], samples], strict=True)]


class TrainOptions(TypedDict, total=False):
    """Options of `train_epochs` that a method may choose."""

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
    """Train with mini-batches, and return the mean loss of the last epoch.

    Args:
        x: Samples [N, ...] on the device, or on the host. Bytes are scaled batch by batch.
        y: Labels [N] on the device.
        loss_of: Mean loss of a batch.
        optimizing: Optimizer of the trained parameters.
        epochs: Number of passes over the samples.
        batch_size: Samples in a batch; see `batches`.
        generator: Source of the random order.
        compute: Device and precision.
        steps: Optimizer steps on each batch.
        after_batch: Called after the steps on each batch.
        before_epoch: Called with the number of each epoch, from 0.
        augment: Changes the samples of each batch.
        penalty: Term of the loss that depends only on the weights.
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
    """A model's accuracy and loss on a test split."""

    accuracy: float
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by their names; see `fedhet.models.evaluate_model`."""
    majority: float = math.nan
    """The accuracy of always predicting the split's most frequent class."""


@torch.inference_mode()
def evaluate(
    model: nn.Module, x: Tensor, y: Tensor, compute: Compute, kept: list[Tensor] | None = None
) -> Evaluation:
    """Return accuracy in [0, 1] and mean cross-entropy of `model` on x [N, ...], y [N], N >= 1.

    The logits of each batch are appended to `kept`, if it is given.
    """
    most_frequent = int(torch.bincount(y).max())  # before the device has batches to wait for
    correct = torch.zeros((), device=compute.device)
    loss = torch.zeros((), device=compute.device)
    with evaluating(model):
        size = evaluation_batch(model, x, compute)
        for start in range(0, len(y), size):
            part = slice(start, start + size)
            target = compute.to_device(y[part])
            with compute.autocast():
                logits = model(compute.to_inputs(x[part])).float()
            top, guess = logits.max(1)  # NaN if any logit is; argmax alone would guess a class
            correct += ((guess == target) & top.isfinite()).sum()
            loss += nn.functional.cross_entropy(logits, target, reduction="sum")
            if kept is not None:
                kept.append(logits)
    right, lost = torch.stack([correct, loss]).tolist()  # the host waits once for all batches
    return Evaluation(right / len(y), lost / len(y), majority=most_frequent / len(y))


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor, compute: Compute) -> Tensor:
    """Return the logits [N, C], float32, of `model` in evaluation mode on x [N, ...]."""
    with evaluating(model), compute.autocast():
        size = evaluation_batch(model, x, compute)
        parts = [model(compute.to_inputs(part)) for part in torch.split(x, size)]
    return torch.cat(parts).float()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, and restore the mode of each submodule afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Let batch norms in training mode use a batch's statistics without adding to their own."""
    norms: list[Any] = [m for m in model.modules() if getattr(m, "track_running_stats", False)]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def all_finite(model: nn.Module) -> bool:
    """Return whether all tensors in the state of `model` are finite."""
    found = [tensor.isfinite().all() for tensor in model.state_dict().values()]
    return bool(torch.stack(found).all()) if found else True
