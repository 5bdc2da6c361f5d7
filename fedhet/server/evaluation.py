"""Evaluates the server's own models."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fedhet.data import Split
from fedhet.devices import compute_for
from fedhet.models.evaluation import judge
from fedhet.runs.measures import Measured
from fedhet.settings.run import RunSettings


def measured_on(common: Split, models: Mapping[str, nn.Module], run: RunSettings) -> Measured:
    """Return what the server's own models score, by kind, on the common test set."""
    compute = compute_for(run.engine)
    scores = {kind: judge(model, common, compute, run.measured) for kind, model in models.items()}
    return Measured(
        {("common", kind): score.accuracy for kind, score in scores.items()},
        None,
        0.0,
        0.0,
        0.0,
        metrics={
            (name, "common", kind): value
            for kind, score in scores.items()
            for name, value in score.metrics.items()
        },
    )
