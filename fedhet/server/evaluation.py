"""Evaluates the server's own models."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fedhet.data.spec import Split
from fedhet.learning.devices import compute_for
from fedhet.models.evaluation import judge
from fedhet.runs.measures import Measured, placed
from fedhet.settings.run import RunSettings


def measured_on(common: Split, models: Mapping[str, nn.Module], run: RunSettings) -> Measured:
    """Return what the server's own models score, by kind, on the common test set."""
    compute = compute_for(run.engine)
    return Measured(
        placed(
            {
                ("common", kind): judge(model, common, compute, run.metrics)
                for kind, model in models.items()
            }
        )
    )
