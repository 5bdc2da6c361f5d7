"""The metrics by which models are judged: their names, ranges and directions.

How they are computed is in `fedhet.algorithms.metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhet.errors import nearest

ACCURACY = "accuracy"
RECALL = "recall"
"""The metric that has a value for each class: `recall.0`, `recall.1`, ..."""
LEAST_LIKELIHOOD = 2.0**-52
"""What the test loss takes for the likelihood of a true class that a model finds less likely."""


@dataclass(frozen=True)
class Metric:
    """A metric of a model on a test split."""

    name: str
    title: str
    """As tables and figures call it."""
    highest: float = 1.0
    """The end of its range, which begins at 0."""
    lower_is_better: bool = False


METRICS = {
    metric.name: metric
    for metric in (
        Metric(ACCURACY, "accuracy"),
        Metric("balanced-accuracy", "balanced accuracy"),
        Metric("macro-f1", "macro F1"),
        Metric("auc", "AUC"),
        Metric("test-loss", "test loss", highest=37.0, lower_is_better=True),
        Metric("calibration-error", "calibration error", lower_is_better=True),
        Metric(RECALL, "recall"),
    )
}
"""Every metric by the name that the setting `metrics` takes."""


def beside_accuracy(text: str) -> tuple[str, ...]:
    """Return the metrics in a comma-separated text, without accuracy, in the order of `METRICS`.

    Raises ValueError for a name that is no metric's.
    """
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    for name in wanted:
        if name not in METRICS:
            known = ", ".join(METRICS)
            raise ValueError(f"it takes some of {known}, comma-separated{nearest(name, METRICS)}")
    return tuple(name for name in METRICS if name in wanted and name != ACCURACY)


def measured_names(metrics: Sequence[str], classes: int) -> list[str]:
    """Return the names under which the metrics are reported: recall has one for each class."""
    recalls = [f"{RECALL}.{label}" for label in range(classes)]
    return [each for name in metrics for each in (recalls if name == RECALL else [name])]


def metric_of(name: str) -> Metric:
    """Return the metric of a reported name, such as `auc` or `recall.3`; unknown ones rank high."""
    kind, _, label = name.partition(".")
    found = METRICS.get(kind, Metric(name, name))
    return Metric(name, f"{found.title} of class {label}") if label else found


def in_order(name: str) -> tuple[int, int]:
    """Return a sort key of reported names: in the order of `METRICS`, recalls by class."""
    kind, _, label = name.partition(".")
    return list(METRICS).index(kind), int(label or 0)


def is_shown(name: str) -> bool:
    """Tell whether a reported metric has a column in a run's tables; recalls have their own."""
    return not name.startswith(f"{RECALL}.")
