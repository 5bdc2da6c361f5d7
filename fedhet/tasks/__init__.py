"""Prediction tasks, which define the targets, losses, predictions, and scores of models.

Another package can define a task as a subclass of `Task` in one file, and declare the subclass in
the entry point group `fedhet.tasks`. `data.task` selects the task of a run. Methods that support a
task also support tasks that extend it.

PyTorch is imported lazily, because `fedhet schema` does not need it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import entry_points
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, InstanceOf, PlainSerializer

from fedhet.algorithms import Reduction
from fedhet.base.arrays import Array
from fedhet.base.errors import SettingsError, describe_error, nearest
from fedhet.base.metrics import (
    ACCURACY,
    CAUSAL_LM,
    COVERAGE,
    MACRO_AUC,
    METRICS,
    MULTI_LABEL,
    PERPLEXITY,
    R2,
    RMSE,
    TOKEN_ACCURACY,
    Predictions,
    measure,
)
from fedhet.settings.schema import invalid_setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedhet.data.dataset import Split
    from fedhet.learning.devices import Compute
    from fedhet.learning.training import Evaluation, LabelSpace
    from fedhet.settings.run import DataSettings

    OutputLoss = Callable[[Tensor, Tensor], Tensor]

GROUP = "fedhet.tasks"
"""Entry point group of the tasks in installed packages."""
AUTO = "auto"
"""Value of `data.task` that selects classification, but rejects measurements as targets."""
MAX_CLASSES = 1000
"""Maximum number of classes of a table."""
MAX_PREDICTION = 1e15
"""Maximum magnitude of predictions when scores are computed. NaN is replaced with this value."""
NUM_STRATA = 10
"""Number of equally sized groups of samples that replace the classes if targets are numbers."""
LOSS, OUTPUTS, CLASSES, LIKELIHOOD = "loss", "outputs", "classes", "likelihood"
"""Properties of tasks on which methods rely (see `Task.properties`)."""
QUANTILE = "quantile"
LOSSES = ("squared", "huber", "absolute", QUANTILE)
"""Losses for regression, as in `data.loss`."""
NOT_PREDICTED = -100
"""Target of a token that is not predicted, such as a token of a prompt."""
Index = npt.NDArray[np.int64]
T = TypeVar("T", "Tensor", Array)


class Task(ABC):
    """Prediction task, with the scale of its targets.

    A subclass is a frozen dataclass. Its fields are stored with a client's models, so they must be
    JSON-serializable.
    """

    name: ClassVar[str]
    """Name in `data.task`."""
    metrics: ClassVar[tuple[str, ...]]
    """Default metrics of a run, as names in `METRICS`. The first metric is the headline metric."""
    noun: ClassVar[str] = "classes"
    """Noun for the outputs of a model."""
    constant: ClassVar[tuple[str, str]]
    """Name and description of the constant prediction whose score is recorded as a baseline."""
    min_outputs: ClassVar[int] = 1
    """Minimum number of outputs."""
    has_distribution: ClassVar[bool] = False
    """Whether the softmax of a model's outputs is a distribution over classes."""
    has_likelihood: ClassVar[bool] = False
    """Whether the default loss is a negative log-likelihood of a sample, up to constants."""
    targets: ClassVar[Literal["class", "numbers", "labels", "tokens"]]
    """Form of the targets: a class index [N] int64; K numbers [N, K] float32; several labels [N, L]
    float32, which are 1, 0, or NaN if the label is missing; or the next token of each token [N, L]
    int64, which is NOT_PREDICTED if the token is not predicted."""
    rule: ClassVar[str] = "prediction = output"
    """Formula that converts a model's outputs to predictions, for model cards."""

    # Settings of a run.

    def with_settings(self, settings: DataSettings) -> Task:
        """Return the task with the loss of a run. Raises SettingsError for an unsupported loss."""
        if settings.loss != AUTO:
            raise invalid_setting("data.loss", settings.loss, AUTO, f"the task is {self.name}")
        return self

    def default_pool(self, settings: DataSettings) -> tuple[str, ...]:
        """Return the default pool of models, or () for the default of the samples' kind."""
        return ()

    def outputs(self, targets: int) -> int:
        """Return the number C of a model's outputs for a number of classes or target columns."""
        return targets

    def defines(self, metric: str) -> bool:
        """Return whether a metric of the task is defined for the task's loss."""
        return True

    @property
    def any_model(self) -> bool:
        """Whether models without gradients can learn the targets."""
        return False

    @property
    def properties(self) -> frozenset[str]:
        """Properties on which methods rely, as in `MethodSpec.needs_task`.

        - `LOSS`: a loss. All tasks have one.
        - `OUTPUTS`: one vector of outputs per sample, and a divergence between such vectors.
        - `CLASSES`: one class per sample (`has_distribution`).
        - `LIKELIHOOD`: a loss that is a likelihood (`has_likelihood`).
        - The names of the task and of the tasks that it extends.
        """
        names = {getattr(base, "name", "") for base in type(self).__mro__} - {""}
        known = {CLASSES: self.has_distribution, LIKELIHOOD: self.has_likelihood}
        held = {name for name, holds in known.items() if holds}
        return frozenset(names | held | {LOSS, OUTPUTS})

    @classmethod
    def with_scale(cls, means: Sequence[float], deviations: Sequence[float]) -> Task:
        """Return the task for numeric targets with these means and standard deviations [K]."""
        return cls()

    def standardize(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Convert numeric targets [N, K] in their units to the targets of the loss.

        Raises ValueError if a number is not a valid target.
        """
        return numbers.astype(np.float32)

    # Training and evaluation.

    def for_sample_gradients(self) -> Task:
        """Return the task with a loss that is a mean over samples, as DP-SGD requires."""
        return self

    @abstractmethod
    def loss(self, reduction: Reduction = "mean") -> OutputLoss:
        """Return the loss function.

        The function maps (float32 outputs [N, C], targets [N, ...]) to the mean loss of a batch or,
        with the reduction "none", to the loss of each sample, of shape [N].
        """

    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the error [N] of each sample, which decides whether FedGEMS counts it as correct.

        The default is the loss.
        """
        return self.loss("none")(outputs, targets)

    @abstractmethod
    def divergence(self, reduction: Reduction = "mean") -> OutputLoss:
        """Return the loss function for learning from another model's outputs (distillation).

        The function maps (teacher outputs [N, C], student outputs [N, C]) to the mean loss of a
        batch or, with the reduction "none", to the loss of each sample, of shape [N]. No
        gradient flows into the teacher.
        """

    def restriction(self, space: Tensor) -> LabelSpace:
        """Return a module that restricts outputs and targets to a client's classes `space`.

        By default, the module has no effect.
        """
        from fedhet.learning.training import AllOutputs

        return AllOutputs(space)

    @abstractmethod
    def evaluate(
        self,
        model: nn.Module,
        split: Split,
        compute: Compute,
        metrics: Sequence[str],
        probabilities: Callable[[Tensor], Tensor] | None = None,
    ) -> Evaluation:
        """Evaluate a model on a split with at least one sample, and compute `metrics`.

        The result has no metrics if the headline metric is undefined on the split.
        For a model without gradients, `probabilities` maps inputs to class probabilities.
        """

    @abstractmethod
    def decode(self, outputs: Tensor) -> Tensor:
        """Convert outputs [N, C] to predictions [N, ...], such as class probabilities [N, C]."""

    def average(self, outputs: Tensor) -> Tensor:
        """Combine the outputs of several models [M, N, C] into outputs [N, C] of an ensemble.

        The decoded result is the mean of the models' decoded predictions. The default assumes that
        `decode` is an affine function.
        """
        return outputs.mean(0)

    # Draws of samples.

    @abstractmethod
    def strata(self, targets: Tensor, names: Sequence[str]) -> tuple[tuple[str, ...], Index]:
        """Group samples for partitions and stratified draws.

        Returns:
            The names of the groups, and the group [N] of each sample.
        """


@dataclass(frozen=True)
class Classification(Task):
    """Prediction of one class for each sample. Targets are class indices [N] int64."""

    name = "classification"
    targets = "class"
    metrics = (ACCURACY,)
    constant = ("majority", "always predicting the most frequent class of the test set")
    min_outputs = 2
    has_distribution = True
    has_likelihood = True

    @property
    def any_model(self) -> bool:
        """True, because classifiers without gradients exist."""
        return True

    def loss(self, reduction: Reduction = "mean") -> OutputLoss:
        """Return the cross-entropy as the loss function."""
        from torch.nn.functional import cross_entropy

        return cross_entropy if reduction == "mean" else partial(cross_entropy, reduction=reduction)

    def divergence(self, reduction: Reduction = "mean") -> OutputLoss:
        """Return KL(teacher || student) of the class probabilities as the loss function."""
        from fedhet.algorithms.distillation import distillation_loss, divergences

        return distillation_loss if reduction == "mean" else divergences

    def restriction(self, space: Tensor) -> LabelSpace:
        """Return a module that restricts logits and labels to the client's label space."""
        from fedhet.learning.training import LabelSpace

        return LabelSpace(space)

    def evaluate(
        self,
        model: nn.Module,
        split: Split,
        compute: Compute,
        metrics: Sequence[str],
        probabilities: Callable[[Tensor], Tensor] | None = None,
    ) -> Evaluation:
        """Compute accuracy, loss, and `metrics`.

        If an output is not finite, the result has no metrics other than the accuracy.
        """
        import torch

        from fedhet.learning.training import evaluate

        batches: list[Tensor] | None = None if set(metrics) <= {ACCURACY} else []
        score = evaluate(model, split.x, split.y, compute, batches)
        if not batches:
            return score
        logits = torch.cat(batches).double().cpu()
        if not logits.amax(1).isfinite().all() or logits.isnan().any():
            return score
        likely = logits.softmax(1)
        if probabilities is not None:
            likely = probabilities(compute.to_inputs(split.x)).double().cpu().clip(0.0, 1.0)
        labels, predicted = split.y.cpu().numpy(), logits.argmax(1).numpy()
        predictions = Predictions(labels, predicted, likely.numpy())
        return replace(score, metrics=measure(metrics, predictions))

    def decode(self, outputs: Tensor) -> Tensor:
        """Return the class probabilities of logits."""
        return outputs.softmax(1)

    def average(self, outputs: Tensor) -> Tensor:
        """Return the logarithm of the mean class probabilities."""
        return outputs.log_softmax(2).logsumexp(0) - math.log(len(outputs))

    def strata(self, targets: Tensor, names: Sequence[str]) -> tuple[tuple[str, ...], Index]:
        """Group the samples by class."""
        return tuple(names), targets.numpy()


@dataclass(frozen=True)
class Regression(Task):
    """Prediction of one or several numbers for each sample.

    Targets [N, K] float32 are standardized with the mean and the standard deviation of their column
    in the schema. Scores are in the target's unit. With the quantile loss, a model has one output
    for each of the Q quantiles of each target, in the order [K, Q].

    Raises ValueError if a field is invalid.
    """

    means: tuple[float, ...] = ()
    """Mean of each of the K columns; () = the targets are not standardized."""
    deviations: tuple[float, ...] = ()
    loss_name: str = "squared"
    """Name of the loss, as in `data.loss`."""
    delta: float = 1.0
    """Error above which the Huber loss is linear, in standard deviations of the target."""
    quantiles: tuple[float, ...] = ()
    """Levels of the Q quantiles, ascending; () for all losses other than the quantile loss."""

    name = "regression"
    targets = "numbers"
    metrics = (RMSE, "mae", R2, COVERAGE)
    noun = "target columns"
    constant = ("constant", "always predicting the mean target of the test set")
    has_likelihood = True
    rule = "prediction = output * deviations + means, of task"

    @classmethod
    def with_scale(cls, means: Sequence[float], deviations: Sequence[float]) -> Regression:
        """Return the task with the means and the standard deviations of the targets."""
        return cls(tuple(means), tuple(deviations))

    def standardize(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Standardize targets [N, K] with the means and the standard deviations."""
        scaled = (numbers - np.array(self.means)) / np.array(self.deviations)
        return np.asarray(scaled, np.float32)

    def __post_init__(self) -> None:
        numbers = (*self.means, *self.deviations, self.delta)
        if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
            raise ValueError(f"expected finite numbers, got {numbers}")
        if len(self.means) != len(self.deviations) or min((*self.deviations, self.delta)) <= 0:
            raise ValueError(
                "expected a positive standard deviation for each mean, and a positive delta, got "
                f"means = {self.means}, deviations = {self.deviations}, delta = {self.delta}"
            )
        levels, needed = self.quantiles, self.loss_name == QUANTILE
        is_ascending = all(low < high for low, high in pairwise((0, *levels, 1)))
        if self.loss_name not in LOSSES or bool(levels) != needed or not is_ascending:
            raise ValueError(
                f"loss_name: expected one of {', '.join(LOSSES)}; quantiles: expected ascending "
                f"values between 0 and 1 if loss_name is {QUANTILE!r}, and otherwise none; got "
                f"loss_name = {self.loss_name!r}, quantiles = {levels}"
            )

    @property
    def any_model(self) -> bool:
        """Whether the loss is squared, the only loss that models without gradients support."""
        return self.loss_name == "squared"

    @property
    def properties(self) -> frozenset[str]:
        """Properties on which methods rely. Only the squared loss is a (Gaussian) likelihood."""
        return super().properties - ({LIKELIHOOD} if self.loss_name != "squared" else set())

    def with_settings(self, settings: DataSettings) -> Regression:
        """Return the task with the loss and the quantiles of a run."""
        name = "squared" if settings.loss == AUTO else settings.loss
        quantiles = settings.quantiles if name == QUANTILE else ()
        return replace(self, loss_name=name, delta=settings.huber_delta, quantiles=quantiles)

    def outputs(self, targets: int) -> int:
        """Return the number K of targets or, with the quantile loss, K * Q."""
        return targets * max(1, len(self.quantiles))

    def defines(self, metric: str) -> bool:
        """Return whether a metric is defined; the coverage requires at least two quantiles."""
        return metric != COVERAGE or len(self.quantiles) > 1

    def point(self, quantiles: T) -> T:
        """Compute predictions [...] from ascending quantiles [..., Q].

        A prediction is the quantile whose level is closest to 0.5, or the mean of the two closest
        quantiles.
        """
        distances = [abs(level - 0.5) for level in self.quantiles]
        closest = [q for q, far in enumerate(distances) if far <= min(distances) + 1e-9]
        return (quantiles[..., closest[0]] + quantiles[..., closest[-1]]) / 2

    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared errors [N] of the standardized predictions, regardless of the loss."""
        from fedhet.algorithms.distillation import squared_errors

        if self.quantiles:
            shape = (len(outputs), -1, len(self.quantiles))
            outputs = self.point(outputs.reshape(shape).sort(2).values)
        return squared_errors(outputs, targets)

    def decode(self, outputs: Tensor) -> Tensor:
        """Convert standardized outputs to the targets' units, in float64.

        The result has the shape [N, K] or, with the quantile loss, [N, K, Q]. The quantiles of a
        target are sorted, because the outputs of a model can cross.
        """
        if not self.quantiles:
            return self._in_unit(outputs)
        by_target = outputs.reshape(outputs.shape[0], -1, len(self.quantiles)).sort(2).values
        return self._in_unit(by_target.transpose(1, 2)).transpose(1, 2)

    def average(self, outputs: Tensor) -> Tensor:
        """Return the mean of the outputs, with the quantiles of each model in ascending order."""
        if self.quantiles:
            by_target = outputs.reshape(*outputs.shape[:2], -1, len(self.quantiles))
            outputs = by_target.sort(3).values.flatten(2)
        return outputs.mean(0)

    def _in_unit(self, values: Tensor) -> Tensor:
        """Convert standardized values [..., K] to the targets' units, in float64."""
        numbers = values.double()
        if self.means:
            numbers = numbers * numbers.new_tensor(self.deviations)
            numbers = numbers + numbers.new_tensor(self.means)
        return numbers

    def in_units(self, targets: Tensor) -> Array:
        """Convert standardized targets [N, K] to their units, and bound their magnitude."""
        return _bounded(self._in_unit(targets))

    def loss(self, reduction: Reduction = "mean") -> OutputLoss:
        """Return the loss function, which averages over the standardized targets and the quantiles.

        The quantile loss (pinball loss) is from Koenker and Bassett, Regression Quantiles,
        Econometrica 1978.
        """
        from torch.nn import functional

        from fedhet.algorithms.distillation import pinball_errors, squared_errors

        if self.loss_name == "squared":
            return functional.mse_loss if reduction == "mean" else squared_errors
        errors: OutputLoss = partial(functional.l1_loss, reduction="none")
        if self.loss_name == "huber":
            errors = partial(functional.huber_loss, delta=self.delta, reduction="none")
        elif self.loss_name == QUANTILE:
            errors = partial(pinball_errors, levels=self.quantiles)

        def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
            by_output = errors(outputs, targets).flatten(1)
            return by_output.mean() if reduction == "mean" else by_output.mean(1)

        return loss_of

    def divergence(self, reduction: Reduction = "mean") -> OutputLoss:
        """Return the mean squared error between standardized outputs as the loss function.

        The function does not depend on `data.loss`. Ba and Caruana, Do Deep Nets Really Need to be
        Deep?, NeurIPS 2014, Eq. 1, train a student in this way. The papers of the methods define
        their losses only for classes. For quantiles, the error approximates the squared
        2-Wasserstein distance between the predicted distributions, which is the mean squared
        difference of their quantiles.
        """
        from fedhet.algorithms.distillation import squared_errors

        if reduction == "none":
            return lambda teacher, student: squared_errors(student, teacher.detach())
        return lambda teacher, student: squared_errors(student, teacher.detach()).mean()

    def evaluate(
        self,
        model: nn.Module,
        split: Split,
        compute: Compute,
        metrics: Sequence[str],
        probabilities: Callable[[Tensor], Tensor] | None = None,
    ) -> Evaluation:
        """Compute the loss and `metrics`. Non-finite predictions are clipped to large values."""
        from fedhet.learning.training import Evaluation, logits_of

        outputs, truth = logits_of(model, split.x, compute), self.in_units(split.y)
        loss = float(self.loss()(outputs, split.y.to(outputs.device)))
        predicted, intervals = _bounded(self.decode(outputs)), None
        if self.quantiles:
            intervals = predicted[..., [0, -1]] if len(self.quantiles) > 1 else None
            predicted = self.point(predicted)
        has_several = truth.shape[1] > 1 and self.deviations
        deviations = np.array(self.deviations) if has_several else None
        made = partial(Predictions, truth, deviations=deviations)
        scores = measure(metrics, made(predicted, intervals=intervals))
        headline = self.metrics[0]
        baseline = measure([headline], made(np.broadcast_to(truth.mean(0), truth.shape)))
        majority = baseline.get(headline, math.nan)
        return Evaluation(math.nan, loss, scores, majority, len(split))

    def strata(self, targets: Tensor, names: Sequence[str]) -> tuple[tuple[str, ...], Index]:
        """Group the samples into tenths by the value of the first target, in ascending order."""
        values = self.in_units(targets)[:, 0]
        order = np.argsort(values, kind="stable")
        unit = float(values.std()) * 1e-6 or 1.0  # Round, because float32 targets are not exact.
        groups, tenths = np.empty(len(values), np.int64), []
        for number, rows in enumerate(np.array_split(order, min(NUM_STRATA, len(order)))):
            groups[rows] = number
            low, high = (round(values[rows[end]] / unit) * unit for end in (0, -1))
            tenths.append(f"{names[0]} {low:.4g} to {high:.4g}")
        return tuple(tenths), groups


@dataclass(frozen=True)
class MultiLabel(Task):
    """Prediction of several labels, any number of which may apply to a sample.

    Targets [N, L] float32 are 1, 0, or NaN if the label is missing. A model's outputs [N, L] are
    the logits of the labels. In a table, each label has a column of 0 and 1, or one column lists
    the labels of each row.
    """

    name = MULTI_LABEL
    targets = "labels"
    # The AUC is the headline metric because it depends neither on a threshold nor on calibration,
    # and because its value for constant predictions does not depend on how rare a label is.
    metrics = (MACRO_AUC, "micro-auc", "f1", "average-precision", "scored-labels")
    noun = "labels"
    constant = ("constant", "always predicting each label's fraction of the test set")
    rule = "probability of each label = sigmoid(output)"

    def loss(self, reduction: Reduction = "mean") -> OutputLoss:
        """Return the mean binary cross-entropy of each sample's non-missing labels as the loss.

        A sample without any non-missing label has the loss 0. The loss of a batch is the mean over
        its samples, not over all non-missing labels, because DP-SGD requires that the gradient of a
        sample does not depend on how many labels of other samples are missing.
        """
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits

        def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
            present = ~targets.isnan()
            truth = targets.nan_to_num()
            losses = binary_cross_entropy_with_logits(outputs, truth, reduction="none")
            losses = torch.where(present, losses, 0.0)
            by_sample = losses.sum(1) / present.sum(1).clamp(min=1)
            return by_sample.mean() if reduction == "mean" else by_sample

        return loss_of

    def divergence(self, reduction: Reduction = "mean") -> OutputLoss:
        """Return the loss function: the mean KL(teacher || student) of Bernoulli distributions.

        Each label has one Bernoulli distribution. The papers of the methods define their losses
        only for a single distribution over classes.
        """
        from torch.nn.functional import binary_cross_entropy_with_logits

        def divergence_of(teacher: Tensor, student: Tensor) -> Tensor:
            teacher = teacher.detach().float()
            likely = teacher.sigmoid()
            cross = binary_cross_entropy_with_logits(student.float(), likely, reduction="none")
            own = binary_cross_entropy_with_logits(teacher, likely, reduction="none")
            by_sample = (cross - own).mean(1)
            return by_sample.mean() if reduction == "mean" else by_sample

        return divergence_of

    def evaluate(
        self,
        model: nn.Module,
        split: Split,
        compute: Compute,
        metrics: Sequence[str],
        probabilities: Callable[[Tensor], Tensor] | None = None,
    ) -> Evaluation:
        """Compute the loss and `metrics`. A probability of NaN counts as a wrong prediction.

        Without a label that has positive and negative samples, the result has no metrics.
        """
        from fedhet.learning.training import Evaluation, logits_of

        outputs, truth = logits_of(model, split.x, compute), split.y.double().cpu().numpy()
        loss = float(self.loss()(outputs, split.y.to(outputs.device)))
        likely = self.decode(outputs.double()).cpu().numpy()
        likely = np.where(np.isnan(likely), 1 - np.nan_to_num(truth), likely)
        present, headline = ~np.isnan(truth), self.metrics[0]
        fractions = np.nansum(truth, 0) / present.sum(0).clip(1)
        constant = self._predictions(truth, np.broadcast_to(fractions, truth.shape))
        if not (baseline := measure([headline], constant)):
            return Evaluation(math.nan, loss)
        scores = measure(metrics, self._predictions(truth, likely))
        return Evaluation(math.nan, loss, scores, baseline[headline], len(split))

    @staticmethod
    def _predictions(truth: Array, likely: Array) -> Predictions:
        return Predictions(truth, (likely >= THRESHOLD).astype(np.float64), likely)

    def decode(self, outputs: Tensor) -> Tensor:
        """Return the probabilities [N, L] of the labels."""
        return outputs.sigmoid()

    def average(self, outputs: Tensor) -> Tensor:
        """Return the logits of the mean probabilities."""
        from torch.nn.functional import logsigmoid

        return logsigmoid(outputs).logsumexp(0) - logsigmoid(-outputs).logsumexp(0)

    def strata(self, targets: Tensor, names: Sequence[str]) -> tuple[tuple[str, ...], Index]:
        """Group the samples by their rarest label. The last group has samples without labels."""
        applies = targets.cpu().numpy() == 1
        counts = applies.sum(0)
        rarest = np.where(applies, counts, len(applies) + 1).argmin(1)
        groups = np.where(applies.any(1), rarest, len(names)).astype(np.int64)
        return (*names, "no label"), groups


THRESHOLD = 0.5
"""Minimum probability of a predicted label."""


def _bounded(numbers: Tensor) -> Array:
    """Convert a tensor to an array, clipped to ±`MAX_PREDICTION`. NaN becomes the maximum."""
    bounded: Array = numbers.detach().cpu().numpy().copy()
    bounded[np.isnan(bounded)] = MAX_PREDICTION
    return bounded.clip(-MAX_PREDICTION, MAX_PREDICTION)


@dataclass(frozen=True)
class CausalLanguageModeling(Task):
    """Prediction of the next token at each position of a text.

    Targets [N, L] int64 are token ids of the model, aligned with the outputs: the target at
    position t is token t + 1 of the text, or NOT_PREDICTED. A model's outputs [N, L', V] are
    logits, where L' <= L because trailing padding is removed.
    """

    per_sample: bool = False
    """Whether the loss of a batch is the mean over its texts of each text's mean loss, and not the
    mean over all of its predicted tokens."""

    name = CAUSAL_LM
    targets = "tokens"
    metrics = (PERPLEXITY, TOKEN_ACCURACY)
    noun = "targets"
    constant = ("unigram", "always predicting the frequencies of the tokens in the test set")
    has_likelihood = True
    rule = "probability of each next token = softmax(output)"

    @property
    def properties(self) -> frozenset[str]:
        """Properties on which methods rely. A text has outputs for each token, not one vector."""
        return super().properties - {OUTPUTS, LIKELIHOOD}

    def default_pool(self, settings: DataSettings) -> tuple[str, ...]:
        """Return the base model whose tokenizer the run uses, with adapters of rank 8."""
        return (f"causal-lora8:{settings.tokenizer}",)

    def for_sample_gradients(self) -> CausalLanguageModeling:
        """Return the task whose loss gives each text the same weight.

        A mean over the tokens of a batch would let the gradient of a text depend on the lengths of
        the other texts.
        """
        return replace(self, per_sample=True)

    def loss(self, reduction: Reduction = "mean") -> OutputLoss:
        """Return the mean cross-entropy of the predicted tokens as the loss function.

        The mean over a batch is the same as in transformers, unless `per_sample` is set. A batch or
        a text without predicted tokens has the loss 0.
        """

        def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
            losses, predicted = self._by_token(outputs, targets)
            if reduction == "mean" and not self.per_sample:
                return losses.sum() / predicted.sum().clamp(min=1)
            by_sample = losses.sum(1) / predicted.sum(1).clamp(min=1)
            return by_sample.mean() if reduction == "mean" else by_sample

        return loss_of

    @staticmethod
    def _by_token(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, L'], 0 if it is not predicted, and the mask [N, L']."""
        from torch.nn.functional import cross_entropy

        targets = targets[:, : outputs.shape[1]]  # The remaining targets belong to padding.
        losses = cross_entropy(
            outputs.transpose(1, 2), targets, ignore_index=NOT_PREDICTED, reduction="none"
        )
        return losses, targets != NOT_PREDICTED

    def divergence(self, reduction: Reduction = "mean") -> OutputLoss:
        """Raise NotImplementedError, because the task lacks the property `OUTPUTS`."""
        raise NotImplementedError("causal-lm has no divergence between outputs of a sample")

    def evaluate(
        self,
        model: nn.Module,
        split: Split,
        compute: Compute,
        metrics: Sequence[str],
        probabilities: Callable[[Tensor], Tensor] | None = None,
    ) -> Evaluation:
        """Compute the mean loss of all predicted tokens, and `metrics`.

        Without predicted tokens, or if an output is not finite, the result has no metrics.
        """
        import torch

        from fedhet.learning.devices import evaluation_batch
        from fedhet.learning.training import Evaluation, evaluating

        truths, tops, likelihoods = [], [], []
        with torch.inference_mode(), evaluating(model):
            size = evaluation_batch(model, split.x, compute, smallest=1)
            for start in range(0, len(split), size):
                rows = slice(start, start + size)
                targets = compute.to_device(split.y[rows])
                with compute.autocast():
                    outputs = model(compute.to_inputs(split.x[rows])).float()
                losses, predicted = self._by_token(outputs, targets)
                truths.append(targets[:, : outputs.shape[1]][predicted].cpu())
                tops.append(outputs.argmax(2)[predicted].cpu())
                likelihoods.append(losses[predicted].double().neg().cpu())
        truth, logs = torch.cat(truths).numpy(), torch.cat(likelihoods)
        if not len(truth):
            return Evaluation(math.nan, math.nan)
        loss = float(-logs.mean())
        if not math.isfinite(loss):
            return Evaluation(math.nan, loss)
        # A single column: the probability of the token that follows.
        likely = logs.exp().numpy()[:, None]
        scores = measure(metrics, Predictions(truth, torch.cat(tops).numpy(), likely))
        frequencies = np.unique(truth, return_counts=True)[1] / len(truth)
        unigram = float(np.exp(-(frequencies * np.log(frequencies)).sum()))
        return Evaluation(math.nan, loss, scores, unigram, len(split))

    def decode(self, outputs: Tensor) -> Tensor:
        """Return the probabilities [N, L, V] of the next tokens."""
        return outputs.softmax(2)

    def strata(self, targets: Tensor, names: Sequence[str]) -> tuple[tuple[str, ...], Index]:
        """Return a single group, because texts have no classes."""
        return ("texts",), np.zeros(len(targets), np.int64)


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Classification, Regression, MultiLabel, CausalLanguageModeling)
}
"""The tasks of this package, by name."""
CLASSIFICATION = Classification()


@cache
def find_task(name: str) -> type[Task]:
    """Return a task by its name in `data.task`, from this package or an installed package.

    Raises SettingsError if the task is unknown or cannot be loaded.
    """
    name = Classification.name if name == AUTO else name
    if name in TASKS:
        return TASKS[name]
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name not in installed:
        known = (AUTO, *TASKS, *sorted(installed))
        raise SettingsError(
            f"setting 'data.task': expected one of {', '.join(known)}, got {name!r}"
            f"{nearest(name, known)}"
        )
    try:
        task = installed[name].load()
    except Exception as error:  # A third-party module may raise any exception.
        raise SettingsError(
            f"setting 'data.task' = {name!r}: cannot import {installed[name].value!r}: "
            f"{describe_error(error)}"
        ) from error
    unknown = [metric for metric in getattr(task, "metrics", [""]) if metric not in METRICS]
    if not (isinstance(task, type) and issubclass(task, Task)) or task.name != name or unknown:
        raise SettingsError(
            f"setting 'data.task' = {name!r}: {installed[name].value} must be a subclass of "
            f"fedhet.tasks.Task whose 'name' is {name!r} and that uses only registered "
            f"metrics, got {task!r}"
        )
    return task


def task_for(settings: DataSettings) -> Task:
    """Return the task of a run's settings, without the scale of its targets.

    Raises SettingsError if the task is unknown or does not support the loss.
    """
    return find_task(settings.task)().with_settings(settings)


def task_of(stored: Task | Mapping[str, Any]) -> Task:
    """Restore a task from the result of `stored_task`. Raises ValueError if it is invalid."""
    if isinstance(stored, Task):
        return stored
    if not isinstance(stored, Mapping):
        raise ValueError(f"expected the fields of a task, got {stored!r:.80}")
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
    try:
        return find_task(str(fields.pop("name", Classification.name)))(**fields)
    except (TypeError, SettingsError) as error:  # A name or a type is invalid.
        raise ValueError(str(error)) from None


def stored_task(task: Task) -> dict[str, Any]:
    """Return the name and the JSON-serializable fields of a task."""
    return {"name": task.name, **asdict(task)}  # type: ignore[call-overload]


AnyTask = Annotated[InstanceOf[Task], BeforeValidator(task_of), PlainSerializer(stored_task)]
"""Type of a task in a pydantic model."""
