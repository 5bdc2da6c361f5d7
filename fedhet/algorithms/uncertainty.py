"""Uncertainty of predictions for unlabelled samples: UM-pFSSL's Eqs. 1, 5 and 9 to 14.

Yanhang Shi, Siguang Chen and Haijun Zhang, Uncertainty Minimization for Personalized Federated
Semi-Supervised Learning. N unlabelled samples, C classes, M helpers, T passes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.choices import Divergence, RelationKind
from fedhet.learning.devices import CPU, Compute
from fedhet.learning.training import evaluating

PROCESSOR_ROWS, ACCELERATOR_ROWS = 128, 1024
"""Samples times passes at once. The masks depend on it, so that no setting changes it."""

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def has_dropout(module: nn.Module) -> bool:
    """Return whether `module` has any dropout layer."""
    return any(isinstance(part, DROPOUTS) and part.p > 0 for part in module.modules())


@contextlib.contextmanager
def dropping(model: nn.Module) -> Iterator[None]:
    """Turn on dropout only: batch normalisation keeps using its running statistics."""
    with evaluating(model):
        for part in model.modules():
            if isinstance(part, DROPOUTS):
                part.train()
        yield


@torch.no_grad()
def predictive(
    model: nn.Module,
    x: Tensor,
    passes: int,
    compute: Compute = CPU,
    rows: int | None = None,
) -> Tensor:
    """Return the mean prediction over T = `passes` dropout masks on x [N, ...]: Eq. 9, [N, C].

    The passes are rows of one batch of at most `rows` rows (None: 128 on a processor, 1024 on an
    accelerator). Layers before the first dropout layer give the same output in every pass and run
    once. The masks are drawn from torch's global generator.
    """
    steady, noisy = split_at_dropout(model)
    rows = rows or (PROCESSOR_ROWS if compute.device.type == "cpu" else ACCELERATOR_ROWS)
    with dropping(model), compute.autocast():
        parts = [
            _mean_of_passes(noisy, steady(compute.images(part)), passes)
            for part in torch.split(x, max(1, rows // passes))
        ]
    return torch.cat(parts)


def _mean_of_passes(noisy: nn.Module, x: Tensor, passes: int) -> Tensor:
    logits: Tensor = noisy(x.repeat(passes, *[1] * (x.ndim - 1)))
    return logits.float().softmax(1).reshape(passes, len(x), logits.shape[1]).mean(0)


def split_at_dropout(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split `model` into the layers before its first dropout layer, and the rest."""
    layers = _layers(model)
    first = next((i for i, layer in enumerate(layers) if has_dropout(layer)), 0)
    return nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:])


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules that run in sequence; any module but a Sequential stays whole."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return [layer for part in module for layer in _layers(part)]
    return [module]


def entropy(predictions: Tensor) -> Tensor:
    """Return H of Eq. 10 for each row of `predictions` [..., C]: [...], from 0 to log C.

    A row of NaN (from a model whose outputs overflow) has infinite entropy: no certainty at all.
    """
    each: Tensor = torch.special.entr(predictions)
    return each.sum(-1).nan_to_num(nan=math.inf)


def most_certain(predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pseudo-labels of Eq. 11, [N, C], and the helper that gave each, [N].

    Each sample gets, of `predictions` [M, N, C], that of the helper with the lowest entropy on it.
    """
    helper = entropy(predictions).argmin(0)
    rows = torch.arange(predictions.shape[1], device=predictions.device)
    return predictions[helper, rows], helper


def certainty(entropies: Tensor, classes: int) -> float:
    """Return H-bar of Eq. 14, from 0 to 1, for the entropies [N] of one model.

    Uses the mean instead of the sum in Eq. 12: only then does the paper's 0 <= H-bar <= 1 hold. 0
    if there are no samples.
    """
    if len(entropies) == 0:
        return 0.0
    return min(max(1 - entropies.mean().item() / math.log(classes), 0.0), 1.0)


def relation(certainty: float, accuracy: float, labelled: float, kind: RelationKind) -> float:
    """Return Corr(k|j) of Eq. 13, from 0 to 1; `labelled` is mu_k, the labelled share (Eq. 2).

    `en` is the certainty alone, `ta` the accuracy alone: a factor that all helpers of a client
    share affects neither their order nor their weights.
    """
    if kind == "en":
        return certainty
    if kind == "ta":
        return accuracy
    return (1 - labelled) * certainty + labelled * accuracy


def aggregation_weights(relations: Tensor) -> Tensor:
    """Return each helper's weight in Algorithm 1, line 18: Corr over the sum of Corr, [M].

    The weights are equal if no helper is related at all.
    """
    total = relations.sum()
    if total <= 0:
        return torch.full_like(relations, 1 / len(relations))
    return relations / total


LEAST_PSEUDO = 1e-7
"""Lower bound of a pseudo-label's class probabilities, since the divergence takes their log."""


def pseudo_label_loss(logits: Tensor, pseudo: Tensor, divergence: Divergence) -> Tensor:
    """Return UM-pFSSL's Eq. 5 per sample, [N], for logits and pseudo-labels [N, C].

    Eq. 5 prints KL(own, pseudo-label) with the prediction first, as Eq. 4 does its cross-entropy;
    `forward` reads it as Eq. 4 is read: KL(pseudo || own), the divergence of knowledge
    distillation, as the paper calls it. `reverse` is KL(own || pseudo). The gradient flows into
    the logits only.
    """
    own = logits.float().log_softmax(1)
    target = pseudo.detach()
    log_target = target.clamp(min=LEAST_PSEUDO).log()
    if divergence == "forward":
        return (target * (log_target - own)).sum(1)
    return (own.exp() * (own - log_target)).sum(1)


def semi_supervised_loss(
    logits: Tensor, labels: Tensor, pseudo: Tensor, labelled: Tensor, divergence: Divergence
) -> Tensor:
    """Return UM-pFSSL's Eq. 1 for a batch, a scalar; `labels` [N], `pseudo` [N, C].

    mu L^s + (1 - mu) L^u with the means of Eqs. 4 and 5 equals the mean over all samples of their
    own term: cross-entropy if `labelled` [N], else the divergence. Up to a factor, this is also the
    sum of lines 22 and 23 of Algorithm 1.
    """
    supervised = F.cross_entropy(logits.float(), labels, reduction="none")
    unsupervised = pseudo_label_loss(logits, pseudo, divergence)
    return torch.where(labelled, supervised, unsupervised).mean()
