"""UM-pFSSL: uncertainty of predictions on unlabeled samples, and selection of helpers.

Yanhang Shi, Siguang Chen and Haijun Zhang, Uncertainty Minimization for Personalized Federated
Semi-Supervised Learning, Eqs. 1, 5 and 9 to 14, Algorithms 2 and 3.

Each client's model has a number in the server's pool. The number also identifies the model as a
helper. A client's helper list always contains the client's model. Helpers are ranked by the
relation Corr (Eq. 13), and by number if their relations are equal.

Shapes: N unlabeled samples, C classes, M helpers, T dropout passes.
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

CPU_ROWS, GPU_ROWS = 128, 1024
"""Maximum number of samples times passes in a batch, on a CPU and on a GPU. The limits are
constants, because the dropout masks depend on the batch size."""

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def has_dropout(module: nn.Module) -> bool:
    """Return whether a module has a dropout layer with a positive rate."""
    return any(isinstance(part, DROPOUTS) and part.p > 0 for part in module.modules())


@contextlib.contextmanager
def dropping(model: nn.Module) -> Iterator[None]:
    """Enable dropout in the block. All other layers, e.g. batch norms, are in evaluation mode."""
    with evaluating(model):
        for part in model.modules():
            if isinstance(part, DROPOUTS):
                part.train()
        yield


@torch.no_grad()
def predictive(
    model: nn.Module, x: Tensor, passes: int, compute: Compute = CPU, rows: int | None = None
) -> Tensor:
    """Return the mean predictions [N, C] over several dropout masks (Eq. 9).

    The layers before the first dropout layer run only once, because their outputs are the same in
    each pass. PyTorch's global generator samples the masks.

    Args:
        model: Model with dropout.
        x: Samples, of shape [N, ...].
        passes: Number T of dropout masks.
        compute: Device and precision.
        rows: Maximum number of samples times passes in a batch, or None for the device's default.
    """
    deterministic, stochastic = split_at_dropout(model)
    rows = rows or (CPU_ROWS if compute.device.type == "cpu" else GPU_ROWS)
    with dropping(model), compute.autocast():
        means = []
        for part in torch.split(x, max(1, rows // passes)):
            hidden = deterministic(compute.to_inputs(part))
            logits = stochastic(hidden.repeat(passes, *[1] * (hidden.ndim - 1)))
            probabilities = logits.float().softmax(1)
            means.append(probabilities.reshape(passes, len(hidden), logits.shape[1]).mean(0))
    return torch.cat(means)


def split_at_dropout(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split a model into the layers before its first dropout layer and the remaining layers."""

    # Flatten nested `nn.Sequential` modules, because a dropout layer may be inside them.
    def layers_of(module: nn.Module) -> list[nn.Module]:
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            return [layer for part in module for layer in layers_of(part)]
        return [module]

    layers = layers_of(model)
    first = next((i for i, layer in enumerate(layers) if has_dropout(layer)), 0)
    return nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:])


def entropy(predictions: Tensor) -> Tensor:
    """Return the entropy H [...] of predictions [..., C], from 0 to log C (Eq. 10).

    The entropy is infinite for NaN predictions, i.e. if the model's outputs overflow.
    """
    terms: Tensor = torch.special.entr(predictions)
    return terms.sum(-1).nan_to_num(nan=math.inf)


def most_certain(predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pseudo-labels [N, C] (Eq. 11) and the helpers [N] that predicted them.

    The pseudo-label of a sample is the lowest-entropy prediction among the helpers' `predictions`
    [M, N, C].
    """
    helper = entropy(predictions).argmin(0)
    rows = torch.arange(predictions.shape[1], device=predictions.device)
    return predictions[helper, rows], helper


def certainty(entropies: Tensor, classes: int) -> float:
    """Return the certainty H-bar (Eq. 14), from 0 to 1, for the entropies [N] of one model.

    This uses the mean instead of the sum in Eq. 12, because the paper requires 0 <= H-bar <= 1.
    Returns 0 if there are no samples.
    """
    if len(entropies) == 0:
        return 0.0
    return min(max(1 - entropies.mean().item() / math.log(classes), 0.0), 1.0)


def relation(certainty: float, accuracy: float, labeled: float, kind: RelationKind) -> float:
    """Return the relation Corr(k|j) between a client and a helper, from 0 to 1 (Eq. 13).

    Args:
        certainty: Certainty H-bar of the helper on the client's unlabeled samples (Eq. 14).
        accuracy: Test accuracy of the helper, measured on the client's labeled samples.
        labeled: Labeled fraction mu_k of the client's samples (Eq. 2).
        kind: "en+ta" is Eq. 13, "en" is the certainty alone, and "ta" is the accuracy alone. "en"
            and "ta" omit the factor in Eq. 13, which affects neither the ranks nor the weights.
    """
    if kind == "en":
        return certainty
    if kind == "ta":
        return accuracy
    return (1 - labeled) * certainty + labeled * accuracy


def aggregation_weights(relations: Tensor) -> Tensor:
    """Return the helpers' weights [M], Corr / sum of Corr (Algorithm 1, line 18).

    The weights are equal if Corr is 0 for all helpers.
    """
    total = relations.sum()
    if total <= 0:
        return torch.full_like(relations, 1 / len(relations))
    return relations / total


MIN_PSEUDO = 1e-7
"""Lower bound for the probabilities in a pseudo-label before their logarithm is computed."""


def pseudo_label_loss(logits: Tensor, pseudo: Tensor, divergence: Divergence) -> Tensor:
    """Return the divergence (Eq. 5) for each sample, of shape [N].

    Eq. 5 is printed as KL(model, pseudo-label), and Eq. 4 also has the prediction first. However,
    the paper calls Eq. 5 the divergence used in knowledge distillation, which is KL(pseudo-label ||
    model). The gradient flows only into the logits.

    Args:
        logits: Logits of the model, of shape [N, C].
        pseudo: Pseudo-labels, of shape [N, C].
        divergence: "forward" is KL(pseudo-label || model), and "reverse" is KL(model ||
            pseudo-label).
    """
    log_p = logits.float().log_softmax(1)
    target = pseudo.detach()
    log_target = target.clamp(min=MIN_PSEUDO).log()
    if divergence == "forward":
        return (target * (log_target - log_p)).sum(1)
    return (log_p.exp() * (log_p - log_target)).sum(1)


def semi_supervised_loss(
    logits: Tensor, labels: Tensor, pseudo: Tensor, labeled: Tensor, divergence: Divergence
) -> Tensor:
    """Return the loss (Eq. 1) of a batch, as a scalar.

    The loss mu L^s + (1 - mu) L^u, with the means of Eqs. 4 and 5, equals the mean over all samples
    of the cross-entropy (labeled) or the divergence (unlabeled). Up to a factor, it is the sum of
    lines 22 and 23 of Algorithm 1.

    Args:
        logits: Logits of the model, of shape [N, C].
        labels: Labels, of shape [N], ignored for unlabeled samples.
        pseudo: Pseudo-labels, of shape [N, C], ignored for labeled samples.
        labeled: Mask of the labeled samples, of shape [N].
        divergence: Direction of the divergence in Eq. 5.
    """
    supervised = F.cross_entropy(logits.float(), labels, reduction="none")
    unsupervised = pseudo_label_loss(logits, pseudo, divergence)
    return torch.where(labeled, supervised, unsupervised).mean()


Key = tuple[int, int]
"""Number of a model in the pool, and its version, i.e. the round in which it was uploaded."""
CANDIDATE, FILL, REFRESH = range(3)
"""Roles of sent models: candidate for the helper list (Algorithm 3), addition to an incomplete list
(Algorithm 1, line 16), and newer version of a helper (Algorithm 2)."""


@dataclass(frozen=True)
class Helper:
    """Model in a client's helper list."""

    number: int
    """Number of the model in the server's pool."""
    version: int
    """Round in which the model was uploaded."""
    relation: float
    """Corr(k|j) of this version, measured on the client's data."""


@dataclass(frozen=True)
class Plan:
    """Plan for one client in one round, with the models to send."""

    train: bool
    warm_up: bool
    candidates: Sequence[Key]
    fill: Sequence[Key]
    refresh: Sequence[Key]

    @property
    def models(self) -> list[Key]:
        """Keys of all models to send."""
        return [*self.candidates, *self.fill, *self.refresh]

    @property
    def roles(self) -> list[int]:
        """Role of each model in `models`."""
        counts = len(self.candidates), len(self.fill), len(self.refresh)
        return np.repeat([CANDIDATE, FILL, REFRESH], counts).tolist()

    @property
    def is_idle(self) -> bool:
        """Whether the client has nothing to do in the round, and is therefore not called."""
        return not (self.train or self.warm_up or self.models)


def ranked(helpers: Iterable[Helper]) -> list[Helper]:
    """Sort helpers by relation, then by number, lowest first."""
    return sorted(helpers, key=lambda helper: (helper.relation, helper.number))


def replaceable(helpers: Sequence[Helper], own: int, replace: int) -> list[Helper]:
    """Return the set Re (Algorithm 3): the `replace` lowest-ranked helpers, except model `own`."""
    return [helper for helper in ranked(helpers)[:replace] if helper.number != own]


def refreshable(helpers: Sequence[Helper], own: int, replace: int) -> list[Helper]:
    """Return the set Up (Algorithm 2): the helpers not in `replaceable`, except model `own`."""
    return [helper for helper in ranked(helpers)[replace:] if helper.number != own]


def replaced(
    helpers: Sequence[Helper], candidates: Iterable[Helper], own: int, replace: int
) -> list[Helper]:
    """Replace helpers with candidates (Algorithm 3), and return the ranked list.

    Each candidate is compared with the replaceable helper that has the lowest relation, and
    replaces this helper if the candidate's relation is higher. Candidates that are already in the
    list are skipped.

    Args:
        helpers: Current list.
        candidates: Candidates with their relations.
        own: Number of the client's model.
        replace: Number of lowest-ranked helpers that can be replaced.
    """
    slots = replaceable(helpers, own, replace)
    numbers = {helper.number for helper in helpers}
    remaining = [helper for helper in helpers if helper not in slots]
    for candidate in candidates:
        if candidate.number in numbers or not slots:
            continue
        numbers.add(candidate.number)
        lowest = ranked(slots)[0]
        if candidate.relation > lowest.relation:
            slots[slots.index(lowest)] = candidate
    return ranked([*remaining, *slots])


def refreshed(helpers: Iterable[Helper], newer: Mapping[int, Helper]) -> list[Helper]:
    """Update helpers to newer versions (Algorithm 2, lines 7 to 11), and return the ranked list."""
    return ranked(
        newer[h.number] if h.number in newer and newer[h.number].version > h.version else h
        for h in helpers
    )


def filled(helpers: Sequence[Helper], more: Iterable[Helper], size: int) -> list[Helper]:
    """Fill a helper list up to `size` entries (Algorithm 1, line 16), and return it ranked."""
    full = {helper.number: helper for helper in helpers}
    for helper in more:
        if len(full) < size:
            full.setdefault(helper.number, helper)
    return ranked(full.values())


def to_arrays(helpers: Sequence[Helper]) -> dict[str, Array]:
    """Convert a helper list to arrays of shape [M]."""
    return {
        "numbers": np.array([helper.number for helper in helpers], np.int64),
        "versions": np.array([helper.version for helper in helpers], np.int64),
        "relations": np.array([helper.relation for helper in helpers], np.float64),
    }


def from_arrays(arrays: Mapping[str, Array]) -> list[Helper]:
    """Convert arrays from `to_arrays` to a helper list."""
    columns = (arrays[name].tolist() for name in ("numbers", "versions", "relations"))
    return [Helper(*row) for row in zip(*columns, strict=True)]
