"""Metrics of a model's predictions on a test split, computed with scikit-learn.

To add a metric, add it to `METRICS`. Classes without test samples are excluded from means over
classes. A metric that is undefined on the split, such as the AUC of a single class, is omitted, so
that no metric is ever NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from fedhet.base.arrays import Array
from fedhet.base.errors import closest

ACCURACY, RMSE, R2, COVERAGE = "accuracy", "rmse", "r2", "coverage"
MACRO_AUC = "macro-auc"
PERPLEXITY, TOKEN_ACCURACY = "perplexity", "token-accuracy"
CLASSIFICATION, REGRESSION, MULTI_LABEL = "classification", "regression", "multi-label"
CAUSAL_LM = "causal-lm"
BINS = 15
"""Number of bins for the calibration error (Guo et al., ICML 2017)."""
MIN_LIKELIHOOD = 2.0**-52
"""Lower bound for the likelihood of the true class in the test loss."""
MAX_ERROR = 1e16
"""Maximum error of a prediction, in the target's unit."""
MAX_LABELS = 1000
"""Maximum number of labels in a multi-label task."""
MAX_CONFUSION = 200
"""Maximum number of classes for which a confusion matrix is counted."""
MAX_PERPLEXITY = 1e16
"""Maximum perplexity of a test set."""
NO_LABEL = "no label has both positive and negative test samples"
MIN_ACCURACY = 1e-12
"""Smallest valid accuracy above 0, far below one correct prediction in a billion samples. It keeps
ratios finite."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model on a test split of N samples and C classes or K target columns.

    In multi-label tasks, the K columns of the truth are 1, 0, or NaN if the label is missing.
    """

    truth: Array
    """True class of each sample, of shape [N], or true targets, of shape [N, K]."""
    predicted: Array
    """Predicted class of each sample, or predicted targets, of the same shape."""
    probabilities: Array = field(default_factory=lambda: np.zeros((0, 0)))
    """Probabilities of the classes or labels, of shape [N, C], in float64; empty if the targets are
    numbers."""
    intervals: Array | None = None
    """Lower and upper bounds of the predicted intervals, of shape [N, K, 2], if predicted."""
    deviations: Array | None = None
    """Standard deviations [K] by which `errors` are divided if several target columns may have
    different units, or None if errors are not divided."""

    @property
    def present(self) -> Array:
        """Classes with test samples, in ascending order."""
        return np.unique(self.truth)

    @property
    def errors(self) -> Array:
        """Errors of the predicted targets, of shape [N, K]."""
        errors: Array = self.truth - self.predicted
        return errors if self.deviations is None else errors / self.deviations

    def target(self, column: int) -> Predictions:
        """Return the predictions of a single target column."""
        part = slice(column, column + 1)
        intervals = None if self.intervals is None else self.intervals[:, part]
        return Predictions(self.truth[:, part], self.predicted[:, part], intervals=intervals)


def recalls(predictions: Predictions) -> dict[str, float]:
    """Return the recall of each class with test samples."""
    from sklearn.metrics import recall_score

    scores = recall_score(
        predictions.truth, predictions.predicted, labels=predictions.present, average=None
    )
    return {
        str(label): float(score) for label, score in zip(predictions.present, scores, strict=True)
    }


def macro_f1(predictions: Predictions) -> float:
    """Return the F1 score, averaged over the classes with test samples."""
    from sklearn.metrics import f1_score

    wanted = {"labels": predictions.present, "average": "macro", "zero_division": 0}
    return float(f1_score(predictions.truth, predictions.predicted, **wanted))


def auc(predictions: Predictions) -> float | None:
    """Return the one-vs-rest AUC, averaged over the classes with test samples."""
    from sklearn.metrics import roc_auc_score

    if len(predictions.present) < 2:
        return None
    scores = [
        roc_auc_score(predictions.truth == label, predictions.probabilities[:, label])
        for label in predictions.present
    ]
    return float(np.mean(scores))


def test_loss(predictions: Predictions) -> float:
    """Return the mean cross-entropy, with likelihoods clipped to at least `MIN_LIKELIHOOD`."""
    truth = predictions.truth[:, None]
    likelihoods = np.take_along_axis(predictions.probabilities, truth, axis=1)
    return float(-np.log(likelihoods.clip(MIN_LIKELIHOOD, 1.0)).mean())


def perplexity(predictions: Predictions) -> float:
    """Return the exponential of the mean cross-entropy of the predicted tokens.

    The probabilities have a single column, the likelihood of the token that follows, which is
    clipped to at least 1 / `MAX_PERPLEXITY`.
    """
    likelihoods = predictions.probabilities[:, 0].clip(1 / MAX_PERPLEXITY, 1.0)
    return float(np.exp(-np.log(likelihoods).mean()))


def calibration_error(predictions: Predictions) -> float:
    """Return the expected calibration error, |accuracy - mean confidence| averaged over bins.

    Each bin is weighted by its number of samples.
    """
    from sklearn.calibration import calibration_curve

    correct = predictions.truth == predictions.predicted
    confidence = predictions.probabilities.max(1)
    accuracy, stated = calibration_curve(correct, confidence, pos_label=True, n_bins=BINS)
    inner = np.linspace(0.0, 1.0, BINS + 1)[1:-1]
    counts = np.bincount(np.searchsorted(inner, confidence), minlength=BINS)
    return float(np.abs(accuracy - stated) @ counts[counts > 0] / len(correct))


def rmse(predictions: Predictions) -> float:
    """Return the root mean squared error, averaged over the target columns."""
    return min(float(np.sqrt((predictions.errors**2).mean(0)).mean()), MAX_ERROR)


def mae(predictions: Predictions) -> float:
    """Return the mean absolute error, averaged over the target columns."""
    return min(float(np.abs(predictions.errors).mean()), MAX_ERROR)


def r2(predictions: Predictions) -> float | None:
    """Return the coefficient of determination, averaged over the target columns.

    Returns None if a column is constant. The result is clipped to at least -`MAX_ERROR`.
    """
    truth, errors = predictions.truth, predictions.truth - predictions.predicted
    if (truth.min(0) == truth.max(0)).any():
        return None
    total = ((truth - truth.mean(0)) ** 2).sum(0)
    return max(float((1 - (errors**2).sum(0) / total).mean()), -MAX_ERROR)


def coverage(predictions: Predictions) -> float | None:
    """Return the fraction of the targets inside their predicted intervals (bounds included).

    Returns None if there are no intervals.
    """
    if predictions.intervals is None:
        return None
    lower, upper = predictions.intervals[..., 0], predictions.intervals[..., 1]
    return float(((lower <= predictions.truth) & (predictions.truth <= upper)).mean())


LabelScore = Callable[[Array, Array, Array], float]
"""Function that computes a score from the truth [N], the predicted labels [N], and their
probabilities [N]."""


def label_scores(predictions: Predictions, score: LabelScore) -> dict[str, float]:
    """Return the score of each label that has a positive and a negative test sample.

    A score includes only the samples whose label is not missing.
    """
    scores = {}
    for label, truth in enumerate(predictions.truth.T):
        rows = ~np.isnan(truth)
        if len(np.unique(truth[rows])) == 2:
            parts = (predictions.predicted[rows, label], predictions.probabilities[rows, label])
            scores[str(label)] = float(score(truth[rows], *parts))
    return scores


def label_auc(truth: Array, predicted: Array, probabilities: Array) -> float:
    """Return the AUC of one label."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth, probabilities))


def label_f1(truth: Array, predicted: Array, probabilities: Array) -> float:
    """Return the F1 score of one label."""
    from sklearn.metrics import f1_score

    return float(f1_score(truth, predicted, zero_division=0))


def label_precision(truth: Array, predicted: Array, probabilities: Array) -> float:
    """Return the average precision of one label."""
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(truth, probabilities))


def mean_over_labels(predictions: Predictions, score: LabelScore) -> float | None:
    """Return the mean of `label_scores`, or None if no label has a score."""
    scores = label_scores(predictions, score)
    return float(np.mean(list(scores.values()))) if scores else None


def micro_auc(predictions: Predictions) -> float | None:
    """Return the AUC over all non-missing labels of all samples, or None if it is undefined."""
    present = ~np.isnan(predictions.truth)
    truth, likely = predictions.truth[present], predictions.probabilities[present]
    return label_auc(truth, truth, likely) if len(np.unique(truth)) == 2 else None


@dataclass(frozen=True)
class Metric:
    """Metric of a model on a test split."""

    name: str
    title: str
    """Label in tables and figures."""
    compute: Callable[[Predictions], float | Mapping[str, float] | None]
    """Function that returns the metric's value, its values by class number, or None if
    undefined."""
    lowest: float = 0.0
    highest: float = 1.0
    """Upper bound of valid values. The server rejects values below `lowest` or above `highest`."""
    min_positive: float = 0.0
    """Smallest valid value above 0."""
    lower_is_better: bool = False
    has_unit: bool = False
    """Whether values have the unit of a target, and thus any magnitude."""
    task: str = CLASSIFICATION
    """Name of the task whose predictions the metric scores."""
    by_class: bool = False
    """Whether the metric has a value per class, reported as `recall.0`, `recall.1`, ..."""
    by_target: bool = False
    """Whether the metric is also reported for each of several targets, as `rmse.0`, ..."""
    undefined_if: str = "the predictions are not finite"
    """Condition under which the metric is undefined on a test set."""

    @property
    def noun(self) -> str:
        """Noun for a model's outputs: "class", "label", or "target"."""
        return "target" if self.by_target else "label" if self.task == MULTI_LABEL else "class"

    @property
    def is_fraction(self) -> bool:
        """Whether values range from 0 to 1."""
        return (self.lowest, self.highest) == (0.0, 1.0)


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            ACCURACY, "accuracy", lambda p: float(np.mean(p.truth == p.predicted)),
            min_positive=MIN_ACCURACY,
        ),
        Metric(
            "balanced-accuracy", "balanced accuracy",
            lambda p: float(np.mean(list(recalls(p).values()))),
        ),
        Metric("macro-f1", "macro F1", macro_f1),
        Metric("auc", "AUC", auc, undefined_if="all test samples have the same class"),
        Metric("test-loss", "test loss", test_loss, highest=37.0, lower_is_better=True),
        Metric("calibration-error", "calibration error", calibration_error, lower_is_better=True),
        Metric("recall", "recall", recalls, by_class=True),
        Metric(
            RMSE, "RMSE", rmse, highest=MAX_ERROR, lower_is_better=True, has_unit=True,
            task=REGRESSION, by_target=True,
        ),
        Metric(
            "mae", "MAE", mae, highest=MAX_ERROR, lower_is_better=True, has_unit=True,
            task=REGRESSION, by_target=True,
        ),
        Metric(
            R2, "R²", r2, lowest=-MAX_ERROR, task=REGRESSION, by_target=True,
            undefined_if="a target has the same value in all test samples",
        ),
        Metric(COVERAGE, "coverage", coverage, task=REGRESSION, by_target=True),
        Metric(
            MACRO_AUC, "macro AUC", partial(mean_over_labels, score=label_auc), task=MULTI_LABEL,
            undefined_if=NO_LABEL,
        ),
        Metric("micro-auc", "micro AUC", micro_auc, task=MULTI_LABEL, undefined_if=NO_LABEL),
        Metric(
            "f1", "F1", partial(mean_over_labels, score=label_f1), task=MULTI_LABEL,
            undefined_if=NO_LABEL,
        ),
        Metric(
            "average-precision", "average precision",
            partial(mean_over_labels, score=label_precision), task=MULTI_LABEL,
            undefined_if=NO_LABEL,
        ),
        Metric(
            "scored-labels", "scored labels", lambda p: float(len(label_scores(p, label_f1))),
            highest=MAX_LABELS, task=MULTI_LABEL,
        ),
        Metric(
            "label-auc", "AUC", partial(label_scores, score=label_auc), task=MULTI_LABEL,
            by_class=True,
        ),
        Metric(
            "label-f1", "F1", partial(label_scores, score=label_f1), task=MULTI_LABEL,
            by_class=True,
        ),
        Metric(
            "label-precision", "average precision", partial(label_scores, score=label_precision),
            task=MULTI_LABEL, by_class=True,
        ),
        Metric(
            PERPLEXITY, "perplexity", perplexity, lowest=1.0, highest=MAX_PERPLEXITY,
            lower_is_better=True, task=CAUSAL_LM, undefined_if="no token is predicted",
        ),
        Metric(
            TOKEN_ACCURACY, "token accuracy", lambda p: float(np.mean(p.truth == p.predicted)),
            task=CAUSAL_LM, undefined_if="no token is predicted",
        ),
    )
}  # fmt: skip
"""All metrics, by their name in the setting `metrics`. A package that defines a task can add
metrics."""


def select_metrics(names: Iterable[str]) -> tuple[str, ...]:
    """Return the metrics in `names`, in the order of `METRICS`.

    Includes accuracy unless a metric of another task is named. Raises ValueError if a name is
    unknown.
    """
    selected = {*names}
    if all(METRICS[name].task == CLASSIFICATION for name in selected & METRICS.keys()):
        selected.add(ACCURACY)
    for name in sorted(selected - set(METRICS)):
        close = closest(name, METRICS)
        hint = f" (did you mean '{close}'?)" if close else ""
        raise ValueError(f"unknown metric '{name}'{hint}, expected names from {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in selected)


def measure(metrics: Sequence[str], predictions: Predictions) -> dict[str, float]:
    """Return the values of the metrics by reported name; undefined metrics are omitted."""
    values: dict[str, float | None] = {}
    for name in metrics:
        metric = METRICS[name]
        value = metric.compute(predictions)
        if isinstance(value, Mapping):
            values |= {f"{name}.{label}": each for label, each in value.items()}
            continue
        values[name] = value
        targets = predictions.truth.shape[1] if metric.by_target else 1
        for column in range(targets if targets > 1 else 0):
            of_target = metric.compute(predictions.target(column))
            assert not isinstance(of_target, Mapping)
            values[f"{name}.{column}"] = of_target
    return {name: value for name, value in values.items() if value is not None}


def measured_names(metrics: Sequence[str], classes: int) -> list[str]:
    """Return the reported names of the metrics for a number of classes or target columns."""
    names = []
    for name in metrics:
        metric = METRICS[name]
        names += [] if metric.by_class else [name]
        if metric.by_class or (metric.by_target and classes > 1):
            names += [f"{name}.{label}" for label in range(classes)]
    return names


def metric_of(name: str) -> Metric:
    """Return the metric for a reported name such as `auc` or `recall.3`.

    Higher values of an unknown metric are assumed to be better.
    """
    kind, _, label = name.partition(".")
    metric = METRICS.get(kind) or Metric(name, name, METRICS[ACCURACY].compute)
    of = f"{metric.title} of {metric.noun} {label}"
    return replace(metric, name=name, title=of) if label else metric


def in_order(name: str) -> tuple[int, int]:
    """Return a reported name's sort key: its position in `METRICS`, and then its label."""
    kind, _, label = name.partition(".")
    return list(METRICS).index(kind), int(label or -1)


def is_shown(name: str) -> bool:
    """Return whether the main tables show a metric. They omit metrics of a single output."""
    return "." not in name
