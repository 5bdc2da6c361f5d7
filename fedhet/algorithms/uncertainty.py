"""UM-pFSSL: the uncertainty of predictions for unlabeled samples, and a client's helpers.

Yanhang Shi, Siguang Chen and Haijun Zhang, Uncertainty Minimization for Personalized Federated
Semi-Supervised Learning: Eqs. 1, 5 and 9 to 14, and Algorithms 2 and 3. N unlabeled samples,
C classes, M helpers, T passes.

Helpers have the numbers of the server's pool; the client itself is in its own list and is never
removed. Ranks are by Corr (Eq. 13), ties by number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms import Divergence, RelationKind
from fedhet.base.arrays import Array
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
    """Turn on dropout only: batch normalization keeps using its running statistics."""
    with evaluating(model):
        for part in model.modules():
            if isinstance(part, DROPOUTS):
                part.train()
        yield


@torch.no_grad()
def predictive(
    model: nn.Module, x: Tensor, passes: int, compute: Compute = CPU, rows: int | None = None
) -> Tensor:
    """Return the mean prediction over T = `passes` dropout masks on x [N, ...]: Eq. 9, [N, C].

    The passes are rows of one batch of at most `rows` rows (None: 128 on a processor, 1024 on an
    accelerator). Layers before the first dropout layer give the same output in every pass and run
    once. The masks are drawn from torch's global generator.
    """
    steady, noisy = split_at_dropout(model)
    rows = rows or (PROCESSOR_ROWS if compute.device.type == "cpu" else ACCELERATOR_ROWS)
    with dropping(model), compute.autocast():
        means = []
        for part in torch.split(x, max(1, rows // passes)):
            before = steady(compute.to_inputs(part))
            logits = noisy(before.repeat(passes, *[1] * (before.ndim - 1)))
            likely = logits.float().softmax(1)
            means.append(likely.reshape(passes, len(before), logits.shape[1]).mean(0))
    return torch.cat(means)


def split_at_dropout(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split `model` into the layers before its first dropout layer, and the rest."""

    def layers_of(module: nn.Module) -> list[nn.Module]:  # that run in sequence
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            return [layer for part in module for layer in layers_of(part)]
        return [module]

    layers = layers_of(model)
    first = next((i for i, layer in enumerate(layers) if has_dropout(layer)), 0)
    return nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:])


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


def relation(certainty: float, accuracy: float, labeled: float, kind: RelationKind) -> float:
    """Return Corr(k|j) of Eq. 13, from 0 to 1; `labeled` is mu_k, the labeled share (Eq. 2).

    `en` is the certainty alone, `ta` the accuracy alone: a factor that all helpers of a client
    share affects neither their order nor their weights.
    """
    if kind == "en":
        return certainty
    if kind == "ta":
        return accuracy
    return (1 - labeled) * certainty + labeled * accuracy


def aggregation_weights(relations: Tensor) -> Tensor:
    """Return each helper's weight in Algorithm 1, line 18: Corr over the sum of Corr, [M].

    The weights are equal if no helper is related at all.
    """
    total = relations.sum()
    if total <= 0:
        return torch.full_like(relations, 1 / len(relations))
    return relations / total


MIN_PSEUDO = 1e-7
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
    log_target = target.clamp(min=MIN_PSEUDO).log()
    if divergence == "forward":
        return (target * (log_target - own)).sum(1)
    return (own.exp() * (own - log_target)).sum(1)


def semi_supervised_loss(
    logits: Tensor, labels: Tensor, pseudo: Tensor, labeled: Tensor, divergence: Divergence
) -> Tensor:
    """Return UM-pFSSL's Eq. 1 for a batch, a scalar; `labels` [N], `pseudo` [N, C].

    mu L^s + (1 - mu) L^u with the means of Eqs. 4 and 5 equals the mean over all samples of their
    own term: cross-entropy if `labeled` [N], else the divergence. Up to a factor, this is also the
    sum of lines 22 and 23 of Algorithm 1.
    """
    supervised = F.cross_entropy(logits.float(), labels, reduction="none")
    unsupervised = pseudo_label_loss(logits, pseudo, divergence)
    return torch.where(labeled, supervised, unsupervised).mean()


Key = tuple[int, int]
"""A model's number in the pool and its version, the round in which it was uploaded."""
CANDIDATE, FILL, REFRESH = range(3)
"""Roles of the models sent: to be compared (Algorithm 3), to fill the list (Algorithm 1, line 16),
to replace an older version of a helper (Algorithm 2)."""


@dataclass(frozen=True)
class Helper:
    """A model in a client's list."""

    number: int
    """The model's number in the server's pool."""
    version: int
    """The round in which the model was uploaded."""
    relation: float
    """Corr(k|j) of this version with the client's data."""


@dataclass(frozen=True)
class Plan:
    """The plan for one client in a round; models by number and version."""

    train: bool
    warm_up: bool
    candidates: Sequence[Key]
    fill: Sequence[Key]
    refresh: Sequence[Key]

    @property
    def models(self) -> list[Key]:
        """Return the models to send."""
        return [*self.candidates, *self.fill, *self.refresh]

    @property
    def roles(self) -> list[int]:
        """Return the role of each model sent."""
        counts = len(self.candidates), len(self.fill), len(self.refresh)
        return np.repeat([CANDIDATE, FILL, REFRESH], counts).tolist()

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to ask of the client."""
        return not (self.train or self.warm_up or self.models)


def ranked(helpers: Iterable[Helper]) -> list[Helper]:
    """Return the helpers by rank, the least related first."""
    return sorted(helpers, key=lambda helper: (helper.relation, helper.number))


def replaceable(helpers: Sequence[Helper], own: int, replace: int) -> list[Helper]:
    """Return Re of Algorithm 3: the helpers of the `replace` lowest ranks, without the client."""
    return [helper for helper in ranked(helpers)[:replace] if helper.number != own]


def refreshable(helpers: Sequence[Helper], own: int, replace: int) -> list[Helper]:
    """Return Up of Algorithm 2: helpers above the `replace` lowest ranks, without the client."""
    return [helper for helper in ranked(helpers)[replace:] if helper.number != own]


def replaced(
    helpers: Sequence[Helper], candidates: Iterable[Helper], own: int, replace: int
) -> list[Helper]:
    """Return the list after Algorithm 3, ranked.

    Each candidate is compared with the least related replaceable helper, and replaces it if more
    related. Candidates that are already in the list are skipped.
    """
    places = replaceable(helpers, own, replace)
    known = {helper.number for helper in helpers}
    staying = [helper for helper in helpers if helper not in places]
    for candidate in candidates:
        if candidate.number in known or not places:
            continue
        known.add(candidate.number)
        least = ranked(places)[0]
        if candidate.relation > least.relation:
            places[places.index(least)] = candidate
    return ranked([*staying, *places])


def refreshed(helpers: Iterable[Helper], newer: Mapping[int, Helper]) -> list[Helper]:
    """Return the list after Algorithm 2, lines 7 to 11, ranked: with newer versions of helpers."""
    return ranked(
        newer[h.number] if h.number in newer and newer[h.number].version > h.version else h
        for h in helpers
    )


def filled(helpers: Sequence[Helper], more: Iterable[Helper], size: int) -> list[Helper]:
    """Return the list, filled up from `more` to at most `size` (Algorithm 1, line 16), ranked."""
    full = {helper.number: helper for helper in helpers}
    for helper in more:
        if len(full) < size:
            full.setdefault(helper.number, helper)
    return ranked(full.values())


def to_arrays(helpers: Sequence[Helper]) -> dict[str, Array]:
    """Return a list as arrays [helpers]; `from_arrays` is the inverse."""
    return {
        "numbers": np.array([helper.number for helper in helpers], np.int64),
        "versions": np.array([helper.version for helper in helpers], np.int64),
        "relations": np.array([helper.relation for helper in helpers], np.float64),
    }


def from_arrays(arrays: Mapping[str, Array]) -> list[Helper]:
    """Return the list from the arrays that `to_arrays` returned."""
    columns = (arrays[name].tolist() for name in ("numbers", "versions", "relations"))
    return [Helper(*row) for row in zip(*columns, strict=True)]
