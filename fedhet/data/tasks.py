"""Prediction tasks, which define the targets, losses, predictions, and scores of models.

Another package can define a task as a subclass of `Task` in one file, and declare the subclass in
the entry point group `fedhet.tasks`. `data.task` selects the task of a run. Methods that support a
task also support tasks that extend it.

PyTorch is imported lazily, because `fedhet schema` does not need it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import entry_points
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, InstanceOf, PlainSerializer

from fedhet.algorithms import Reduction
from fedhet.base.arrays import Array
from fedhet.base.disk import parse_json
from fedhet.base.errors import DataError, SettingsError, describe_error, nearest
from fedhet.base.metrics import (
    ACCURACY,
    COVERAGE,
    MACRO_AUC,
    MAX_LABELS,
    METRICS,
    MULTI_LABEL,
    R2,
    RMSE,
    Predictions,
    measure,
)
from fedhet.data.values import (
    MISSING_TARGET,
    Distinct,
    Words,
    class_words,
    is_missing,
    is_missing_number,
    label_text,
    parse_numbers,
)
from fedhet.settings.schema import invalid_setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedhet.data.cells import Cells
    from fedhet.data.spec import DataSpec, Split
    from fedhet.data.tables import TableSchema
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
LOSS, CLASSES, LIKELIHOOD = "loss", "classes", "likelihood"
"""Properties of tasks on which methods rely (see `Task.properties`)."""
QUANTILE = "quantile"
LOSSES = ("squared", "huber", "absolute", QUANTILE)
"""Losses for regression, as in `data.loss`."""
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
    has_lists: ClassVar[bool] = False
    """Whether a value of the target column may be a list."""
    rule: ClassVar[str] = "prediction = output"
    """Formula that converts a model's outputs to predictions, for model cards."""

    # Settings of a run.

    def with_settings(self, settings: DataSettings) -> Task:
        """Return the task with the loss of a run. Raises SettingsError for an unsupported loss."""
        if settings.loss != AUTO:
            raise invalid_setting("data.loss", settings.loss, AUTO, f"the task is {self.name}")
        return self

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

        - `LOSS`: a loss and a divergence. All tasks have both.
        - `CLASSES`: one class per sample (`has_distribution`).
        - `LIKELIHOOD`: a loss that is a likelihood (`has_likelihood`).
        - The names of the task and of the tasks that it extends.
        """
        names = {getattr(base, "name", "") for base in type(self).__mro__} - {""}
        known = {LOSS: True, CLASSES: self.has_distribution, LIKELIHOOD: self.has_likelihood}
        return frozenset(names | {name for name, holds in known.items() if holds})

    # Targets of a table. `Dataset.classes` and `TableSchema.outputs` name the outputs.

    @classmethod
    @abstractmethod
    def infer(
        cls, cells: Cells, spec: DataSpec, report: Callable[[str], object]
    ) -> Mapping[str, Any]:
        """Return the fields of the table's schema that describe the targets.

        `report` is called with log lines about the targets. Raises DataError if the targets are
        invalid.
        """

    @classmethod
    def of_schema(cls, schema: TableSchema) -> Task:
        """Return the task for the targets of a table."""
        return cls()

    @abstractmethod
    def encode(self, schema: TableSchema, cells: Cells) -> Tensor:
        """Return the targets [N, ...] of a table. Raises DataError if a target is invalid."""

    # Training and evaluation.

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
    metrics = (ACCURACY,)
    constant = ("majority", "always predicting the most frequent class of the test set")
    min_outputs = 2
    has_distribution = True
    has_likelihood = True

    @property
    def any_model(self) -> bool:
        """True, because classifiers without gradients exist."""
        return True

    @classmethod
    def infer(
        cls, cells: Cells, spec: DataSpec, report: Callable[[str], object]
    ) -> Mapping[str, Any]:
        """Return the field `classes`: the sorted distinct values of the target column."""
        labels = [v for v in cells.column(spec.target) if not is_missing(v, spec.missing)]
        exact, distinct = spec.target in spec.categories, {*labels}
        lists = [
            label
            for mark in (LIST_MARKS if spec.task == AUTO else "")
            for label in distinct
            if mark in label and are_lists(distinct, mark)
        ]
        if lists:
            raise DataError(
                f"{cells.path}: target column {spec.target!r}: expected one class in each row, got "
                f"{min(lists)!r}. Set data.task to multi-label if the values are lists of labels, "
                "or to classification if each value is a class."
            )
        # If the task is set explicitly, numbers are treated as classes.
        many = {} if spec.task == AUTO else {"max_numbers": MAX_CLASSES}
        classes, spelled = class_words(labels, cells.path, spec.target, exact=exact, **many)
        if not 2 <= len(classes) <= MAX_CLASSES:
            raise DataError(
                f"{cells.path}: target column {spec.target!r}: expected 2 to {MAX_CLASSES} "
                f"classes, got {len(classes)} distinct values"
            )
        respelled = [f"{text!r} as {word!r}" for text, word in spelled.items() if text != word]
        if respelled:
            report(f"{spec.target}: target, read {', '.join(respelled[:5])}")
        return {"classes": classes}

    def encode(self, schema: TableSchema, cells: Cells) -> Tensor:
        """Return the class indices [N] of the rows."""
        import torch

        words, values = Words(schema.classes), Distinct.of(cells.column(schema.target))
        places = np.zeros(len(values.texts), np.int64)
        for number, value in enumerate(values.texts):
            place = words.place(value)
            if place is None:
                fault = f"unknown class {value!r}{nearest(value, schema.classes)}"
                fault = "the label is missing" if is_missing(value, schema.missing) else fault
                raise cells.fault(schema.target, values.row(number), fault)
            places[number] = place
        return torch.from_numpy(places[values.codes])

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
    metrics = (RMSE, "mae", R2, COVERAGE)
    noun = "target columns"
    constant = ("constant", "always predicting the mean target of the test set")
    has_likelihood = True
    rule = "prediction = output * deviations + means, of task"

    @classmethod
    def infer(
        cls, cells: Cells, spec: DataSpec, report: Callable[[str], object]
    ) -> Mapping[str, Any]:
        """Return the task, and the target columns with their means and standard deviations."""
        from fedhet.data.tables import infer_column

        columns = []
        for name in target_names(cells, spec):
            column = infer_column(name, cells, spec, report, target=True)
            columns.append(column.model_copy(update={"missing": False}))
        return {"task": cls.name, "targets": tuple(columns)}

    @classmethod
    def of_schema(cls, schema: TableSchema) -> Regression:
        """Return the task, with the means and standard deviations of the target columns."""
        columns = schema.targets
        return cls(tuple(c.mean for c in columns), tuple(c.deviation for c in columns))

    def encode(self, schema: TableSchema, cells: Cells) -> Tensor:
        """Return the standardized targets [N, K]."""
        import torch

        encoded = np.empty((len(cells), len(schema.targets)), np.float32)
        for place, column in enumerate(schema.targets):
            values = Distinct.of(cells.column(column.name))
            written, unit = column.written or "1234.5", column.unit
            if column.name in cells.typed:  # Values of a numeric type have no notation.
                written, unit = "1234.5", ""
            numbers = parse_numbers(values.texts, written, unit)
            absent = np.array([is_missing(text, schema.missing) for text in values.texts], bool)
            for invalid in np.flatnonzero(np.isnan(numbers) | absent).tolist():
                text = values.texts[invalid]
                fault = f"{text!r} is not a number, expected the notation of the other targets"
                if absent[invalid] or is_missing_number(text):
                    fault = MISSING_TARGET
                raise cells.fault(column.name, values.row(invalid), fault)
            encoded[:, place] = ((numbers - column.mean) / column.deviation)[values.codes]
        return torch.from_numpy(encoded)

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
    # The AUC is the headline metric because it depends neither on a threshold nor on calibration,
    # and because its value for constant predictions does not depend on how rare a label is.
    metrics = (MACRO_AUC, "micro-auc", "f1", "average-precision", "scored-labels")
    noun = "labels"
    constant = ("constant", "always predicting each label's fraction of the test set")
    has_lists = True
    rule = "probability of each label = sigmoid(output)"

    @classmethod
    def infer(
        cls, cells: Cells, spec: DataSpec, report: Callable[[str], object]
    ) -> Mapping[str, Any]:
        """Return the task and the labels: the column names, or the sorted labels in the lists."""
        names = target_names(cells, spec)
        if len(names) == 1:
            values = Distinct.of(cells.column(spec.target))
            lists = _read_lists(cells, spec.target, values, spec.missing)
            words = [word for row in lists if row is not None for word in row]
            exact = spec.target in spec.categories
            names, _ = class_words(
                words, cells.path, spec.target, exact=exact, max_numbers=MAX_LABELS
            )
            if {*names} <= FLAGS.keys():
                raise DataError(
                    f"{cells.path}: target column {spec.target!r}: expected lists of labels, got "
                    "only 0 and 1. For several labels, list their columns in data.target. For one "
                    "label, set data.task to classification."
                )
            absent = np.array([row is None for row in lists], bool)[values.codes].sum()
            advice = "; write [] for a row without labels" if absent else ""
            report(f"{spec.target}: lists of {len(names)} labels; {absent} missing{advice}")
        if not 1 <= len(names) <= MAX_LABELS or len({*names}) < len(names):
            raise DataError(
                f"{cells.path}: data.target = {spec.target!r}: expected 1 to {MAX_LABELS} "
                f"different labels, got {len(names)} ({len({*names})} different)"
            )
        targets = cls()._targets(cells, names, spec.target, spec.missing)
        for place, name in enumerate(names):
            present = targets[~np.isnan(targets[:, place]), place]
            report(f"{name}: label, {int(present.sum())} of {len(present)} rows")
        return {"task": cls.name, "classes": names}

    def encode(self, schema: TableSchema, cells: Cells) -> Tensor:
        """Return the targets [N, L]: 1, 0, or NaN if the label is missing."""
        import torch

        targets = self._targets(cells, schema.classes, schema.target, schema.missing)
        return torch.from_numpy(targets)

    def _targets(
        self, cells: Cells, labels: Sequence[str], target: str, marks: Sequence[str]
    ) -> Array:
        from fedhet.data.spec import check_max_bytes

        check_max_bytes(4 * len(cells) * len(labels), cells.spec, cells.path)
        targets = np.full((len(cells), len(labels)), np.nan, np.float32)
        columns = tuple(name.strip() for name in target.split(","))
        if len(columns) > 1 and tuple(labels) == columns and target not in cells.columns:
            for place, name in enumerate(labels):
                values = Distinct.of(cells.column(name))
                for number, text in enumerate(values.texts):
                    flag = FLAGS.get(text.lower())
                    if flag is None and not is_missing(text, marks) and not is_missing_number(text):
                        fault = f"expected 0, 1, or a missing value, got {text!r}"
                        fault += ". If the value means that the label is missing, add it to "
                        raise cells.fault(name, values.row(number), f"{fault}data.missing.")
                    if flag is not None:
                        targets[values.codes == number, place] = flag
            return targets
        words, values = Words(labels), Distinct.of(cells.column(target))
        rows = np.full((len(values.texts), len(labels)), np.nan, np.float32)
        for number, row in enumerate(_read_lists(cells, target, values, marks)):
            if row is not None:
                rows[number] = 0
            for word in row or ():
                known = words.place(word)
                if known is None:
                    fault = f"unknown label {word!r}{nearest(word, labels)}"
                    raise cells.fault(target, values.row(number), fault)
                rows[number, known] = 1
        return rows[values.codes]

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


FLAGS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
"""Supported texts in the column of a label, in lower case, with their values."""
THRESHOLD = 0.5
"""Minimum probability of a predicted label."""


LIST_MARKS = ";|"
"""Characters that separate labels in lists; only the first character is accepted."""


def are_lists(texts: Collection[str], mark: str) -> bool:
    """Return whether texts look like lists separated by `mark`.

    In lists, the number of distinct labels is smaller than the number of texts.
    """
    parts = {part.strip() for text in texts for part in text.split(mark)}
    return len(parts) < len(texts) and any(mark in text for text in texts)


def label_list(text: str) -> list[str]:
    """Return the labels in a list such as `a;b` or `["a", "b"]`.

    Raises ValueError or RecursionError if a JSON list is invalid.
    """
    if not text.startswith("["):
        return [label for each in text.split(";") if (label := each.strip())]
    labels = [label_text(each) for each in parse_json(text)]
    if None in labels:
        raise ValueError("expected a list of labels, got a nested list, an object, or null")
    return [label.strip() for label in labels if label is not None]


def _read_lists(
    cells: Cells, column: str, values: Distinct, marks: Sequence[str]
) -> list[list[str] | None]:
    """Return the labels in each distinct value of a column, or None if the value is missing.

    Raises DataError if a value is invalid.
    """
    lists: list[list[str] | None] = []
    for mark in LIST_MARKS[1:]:
        if not any(text.startswith("[") for text in values.texts) and are_lists(values.texts, mark):
            raise DataError(
                f"{cells.path}: target column {column!r}: labels in a list must be separated by "
                f"';', got {next(text for text in values.texts if mark in text)!r:.80}. Replace "
                f"{mark!r} with ';'."
            )
    for number, text in enumerate(values.texts):
        try:
            lists.append(None if is_missing(text, marks) else label_list(text))
        except (ValueError, RecursionError) as error:
            fault = f'expected labels such as a;b or ["a", "b"], got {text!r:.80} ({error})'
            raise cells.fault(column, values.row(number), fault) from None
    return lists


def _bounded(numbers: Tensor) -> Array:
    """Convert a tensor to an array, clipped to ±`MAX_PREDICTION`. NaN becomes the maximum."""
    bounded: Array = numbers.detach().cpu().numpy().copy()
    bounded[np.isnan(bounded)] = MAX_PREDICTION
    return bounded.clip(-MAX_PREDICTION, MAX_PREDICTION)


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Classification, Regression, MultiLabel)
}
"""The tasks of this package, by name."""
CLASSIFICATION = Classification()


def target_names(cells: Cells, spec: DataSpec) -> tuple[str, ...]:
    """Return the target columns: `data.target`, split at commas unless a column has this name."""
    if spec.target in cells.columns.keys() | cells.unusable.keys():
        return (spec.target,)
    return tuple(name.strip() for name in spec.target.split(","))


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
            f"fedhet.data.tasks.Task whose 'name' is {name!r} and that uses only registered "
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
