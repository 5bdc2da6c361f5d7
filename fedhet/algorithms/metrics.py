"""The metrics of a model's predictions on a test split, as scikit-learn defines them.

A class that the test split lacks has no part in any of them: it is left out of the means over
classes, and a metric that is not defined on the split (the AUC of a single class) is left out
altogether. So no metric is ever NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedhet.arrays import Array
from fedhet.settings.metrics import LEAST_LIKELIHOOD, RECALL

BINS = 15
"""Bins of the calibration error (Guo et al., On Calibration of Modern Neural Networks, 2017)."""


def measure(
    metrics: Sequence[str], truth: Array, predicted: Array, likely: Array
) -> dict[str, float]:
    """Return the metrics that are defined on a test split, by the names they are reported under.

    `truth` and `predicted` are classes [N], `likely` is each class's probability [N, C].
    """
    present = np.unique(truth)
    found: dict[str, float | None] = {}
    for name in metrics:
        if name == RECALL:
            recalls = _recalls(truth, predicted, present)
            found |= {f"{RECALL}.{label}": recalls[n] for n, label in enumerate(present)}
        elif name == "balanced-accuracy":
            found[name] = float(np.mean(_recalls(truth, predicted, present)))
        elif name == "macro-f1":
            found[name] = _macro_f1(truth, predicted, present)
        elif name == "auc":
            found[name] = _auc(truth, likely, present)
        elif name == "test-loss":
            found[name] = _test_loss(truth, likely)
        elif name == "calibration-error":
            found[name] = _calibration_error(truth == predicted, likely.max(1))
    return {name: value for name, value in found.items() if value is not None}


def _recalls(truth: Array, predicted: Array, present: Array) -> list[float]:
    """Return the share of each present class's samples that are predicted as it."""
    from sklearn.metrics import recall_score

    scores = recall_score(truth, predicted, labels=present, average=None)
    return [float(score) for score in scores]


def _macro_f1(truth: Array, predicted: Array, present: Array) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(truth, predicted, labels=present, average="macro", zero_division=0))


def _auc(truth: Array, likely: Array, present: Array) -> float | None:
    """Return the mean over the present classes of the AUC of each against the rest."""
    from sklearn.metrics import roc_auc_score

    if len(present) < 2:
        return None
    each = [roc_auc_score(truth == label, likely[:, label]) for label in present]
    return float(np.mean(each))


def _test_loss(truth: Array, likely: Array) -> float:
    """Return the mean cross-entropy, which the least likelihood bounds."""
    own = np.take_along_axis(likely, truth[:, None], axis=1)
    return float(-np.log(own.clip(LEAST_LIKELIHOOD, 1.0)).mean())


def _calibration_error(correct: Array, confidence: Array) -> float:
    """Return the expected calibration error: |share correct - mean confidence|, over the bins.

    A bin counts by its samples.
    """
    from sklearn.calibration import calibration_curve

    right, said = calibration_curve(correct, confidence, pos_label=True, n_bins=BINS)
    inner = np.linspace(0.0, 1.0, BINS + 1)[1:-1]
    counts = np.bincount(np.searchsorted(inner, confidence), minlength=BINS)
    return float(np.abs(right - said) @ counts[counts > 0] / len(correct))
