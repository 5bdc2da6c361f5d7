"""What a model scores on a test split: the metrics that a run asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedhet.base.metrics import ACCURACY, Predictions, measure
from fedhet.data.spec import Split
from fedhet.learning.devices import Compute
from fedhet.learning.training import Evaluation, evaluate
from fedhet.models import Refitted

Evaluations = dict[tuple[str, str], Evaluation]
"""Evaluations by protocol ("personal", "common") and kind of model ("private", "proxy", ...)."""


def judge_all(
    models: Mapping[str, nn.Module],
    splits: Mapping[str, Split],
    compute: Compute,
    metrics: Sequence[str],
) -> Evaluations:
    """Evaluate models, by kind, on every test split, by protocol."""
    return {
        (protocol, kind): judge(model, split, compute, metrics)
        for protocol, split in splits.items()
        for kind, model in models.items()
    }


def judge(
    model: nn.Module, split: Split, compute: Compute, metrics: Sequence[str] = (ACCURACY,)
) -> Evaluation:
    """Return a model's score on a split of at least one sample, with its `metrics`.

    A model whose outputs are not all numbers has its accuracy alone.
    """
    kept: list[Tensor] | None = None if set(metrics) <= {ACCURACY} else []
    score = evaluate(model, split.x, split.y, compute, kept)
    if kept:
        logits = torch.cat(kept).double().cpu()
        if logits.amax(1).isfinite().all() and not logits.isnan().any():
            truth, predicted = split.y.cpu().numpy(), logits.argmax(1).numpy()
            if isinstance(model, Refitted):
                likely = model.probabilities(compute.images(split.x)).double().cpu().clip(0.0, 1.0)
            else:
                likely = logits.softmax(1)
            made = Predictions(truth, predicted, likely.numpy())
            return replace(score, metrics=measure(metrics, made))
    return score
