"""What a model scores on a test split: its accuracy, and the metrics that a run asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedhet.algorithms.metrics import measure
from fedhet.arrays import Array
from fedhet.data import Split
from fedhet.devices import Compute
from fedhet.models import Refitted
from fedhet.training import Score, evaluate


def judge(model: nn.Module, split: Split, compute: Compute, metrics: Sequence[str] = ()) -> Score:
    """Return a model's score on a split of at least one sample, with `metrics` beside accuracy.

    A model whose outputs are not all numbers has its accuracy alone.
    """
    if not metrics:
        return evaluate(model, split.x, split.y, compute)
    kept: list[Tensor] = []
    score = evaluate(model, split.x, split.y, compute, kept)
    logits = torch.cat(kept).double().cpu()
    if bool(logits.isnan().any()) or not bool(logits.amax(1).isfinite().all()):
        return score
    likely = _likelihoods(model, split, logits, compute)
    truth, predicted = split.y.cpu().numpy(), logits.argmax(1).numpy()
    return replace(score, metrics=measure(metrics, truth, predicted, likely))


def _likelihoods(model: nn.Module, split: Split, logits: Tensor, compute: Compute) -> Array:
    """Return each class's probability [N, C], float64."""
    if isinstance(model, Refitted):
        likely = model.probabilities(compute.images(split.x)).double().cpu().clip(0.0, 1.0)
    else:
        likely = logits.softmax(1)
    found: Array = likely.numpy()
    return found
