"""The metrics of a model's predictions on a test split, accuracy first, as scikit-learn has them.

To add a metric, add it to `METRICS`. A class that the test split lacks has no part in any metric:
it is left out of the means over classes. A metric that is not defined on the split, such as the AUC
of a single class, is left out altogether, so that no metric is ever NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedhet.base.arrays import Array
from fedhet.base.errors import nearest

ACCURACY = "accuracy"
BINS = 15
"""Bins of the calibration error (Guo et al., On Calibration of Modern Neural Networks, 2017)."""
MIN_LIKELIHOOD = 2.0**-52
"""The test loss's likelihood of a true class that a model finds less likely than that."""
MIN_ACCURACY = 1e-12
"""The least accuracy besides 0: far below one of a billion samples; keeps ratios finite."""


@dataclass(frozen=True)
class Predictions:
    """A model's predictions on a test split of N samples and C classes."""

    truth: Array
    """The classes [N]."""
    predicted: Array
    """The predicted classes [N]."""
    likely: Array
    """Each class's probability [N, C], float64."""

    @property
    def present(self) -> Array:
        """The classes that the split has, ascending."""
        return np.unique(self.truth)


def recalls(made: Predictions) -> dict[str, float]:
    """Return the share of each present class's samples that are predicted as it."""
    from sklearn.metrics import recall_score

    scores = recall_score(made.truth, made.predicted, labels=made.present, average=None)
    return {str(label): float(score) for label, score in zip(made.present, scores, strict=True)}


def macro_f1(made: Predictions) -> float:
    """Return the mean over the present classes of the F1 score."""
    from sklearn.metrics import f1_score

    wanted = {"labels": made.present, "average": "macro", "zero_division": 0}
    return float(f1_score(made.truth, made.predicted, **wanted))


def auc(made: Predictions) -> float | None:
    """Return the mean over the present classes of the AUC of each against the rest."""
    from sklearn.metrics import roc_auc_score

    if len(made.present) < 2:
        return None
    each = [roc_auc_score(made.truth == label, made.likely[:, label]) for label in made.present]
    return float(np.mean(each))


def test_loss(made: Predictions) -> float:
    """Return the mean cross-entropy, which the least likelihood bounds."""
    own = np.take_along_axis(made.likely, made.truth[:, None], axis=1)
    return float(-np.log(own.clip(MIN_LIKELIHOOD, 1.0)).mean())


def calibration_error(made: Predictions) -> float:
    """Return the expected calibration error: |share correct - mean confidence|, over the bins.

    A bin counts by its samples.
    """
    from sklearn.calibration import calibration_curve

    correct, confidence = made.truth == made.predicted, made.likely.max(1)
    right, said = calibration_curve(correct, confidence, pos_label=True, n_bins=BINS)
    inner = np.linspace(0.0, 1.0, BINS + 1)[1:-1]
    counts = np.bincount(np.searchsorted(inner, confidence), minlength=BINS)
    return float(np.abs(right - said) @ counts[counts > 0] / len(correct))


@dataclass(frozen=True)
class Metric:
    """A metric of a model on a test split."""

    name: str
    title: str
    """As tables and figures call it."""
    compute: Callable[[Predictions], float | Mapping[str, float] | None]
    """(predictions) -> the value, the value of each class by its number, or None: not defined."""
    lowest: float = 0.0
    highest: float = 1.0
    """The bounds of its values; the server rejects others."""
    min_positive: float = 0.0
    """The smallest value above 0."""
    lower_is_better: bool = False
    by_class: bool = False
    """Whether each class has a value of its own, reported as `recall.0`, `recall.1`, ..."""

    @property
    def is_fraction(self) -> bool:
        """Whether its values are fractions, from 0 to 1."""
        return (self.lowest, self.highest) == (0.0, 1.0)


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            ACCURACY, "accuracy", lambda made: float(np.mean(made.truth == made.predicted)),
            min_positive=MIN_ACCURACY,
        ),
        Metric(
            "balanced-accuracy", "balanced accuracy",
            lambda made: float(np.mean(list(recalls(made).values()))),
        ),
        Metric("macro-f1", "macro F1", macro_f1),
        Metric("auc", "AUC", auc),
        Metric("test-loss", "test loss", test_loss, highest=37.0, lower_is_better=True),
        Metric("calibration-error", "calibration error", calibration_error, lower_is_better=True),
        Metric("recall", "recall", recalls, by_class=True),
    )
}  # fmt: skip
"""Every metric by the name that the setting `metrics` takes."""


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """Return accuracy and the metrics in `names`, in the order of `METRICS`.

    Raises ValueError for a name that is not a metric's.
    """
    wanted = {ACCURACY, *names}
    for name in sorted(wanted - set(METRICS)):
        raise ValueError(f"it takes some of {', '.join(METRICS)}{nearest(name, METRICS)}")
    return tuple(name for name in METRICS if name in wanted)


def measure(metrics: Sequence[str], made: Predictions) -> dict[str, float]:
    """Return those of the metrics that are defined, by the names under which they are reported."""
    found: dict[str, float] = {}
    for name in metrics:
        value = METRICS[name].compute(made)
        if isinstance(value, Mapping):
            found |= {f"{name}.{label}": each for label, each in value.items()}
        elif value is not None:
            found[name] = value
    return found


def measured_names(metrics: Sequence[str], classes: int) -> list[str]:
    """Return the names under which the metrics are reported: some have one for each class."""
    return [
        f"{name}.{label}" if METRICS[name].by_class else name
        for name in metrics
        for label in range(classes if METRICS[name].by_class else 1)
    ]


def metric_of(name: str) -> Metric:
    """Return the metric of a reported name, such as `auc` or `recall.3`; unknown ones rank high."""
    kind, _, label = name.partition(".")
    found = METRICS.get(kind) or Metric(name, name, METRICS[ACCURACY].compute)
    return replace(found, name=name, title=f"{found.title} of class {label}") if label else found


def in_order(name: str) -> tuple[int, int]:
    """Return a sort key of reported names: in the order of `METRICS`, then by class."""
    kind, _, label = name.partition(".")
    return list(METRICS).index(kind), int(label or 0)


def is_shown(name: str) -> bool:
    """Return whether a reported metric has a column in a run's tables; one by class has its own."""
    return "." not in name
