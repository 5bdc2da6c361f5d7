"""Class means from clipped and noised sums: what Felo, Velo, FedHe and FedProto send privately.

For every class c, present or not: S_c = sum of f min(1, R / |f|) + N(0, z_f^2 R^2 I), and
n_c = count + N(0, z_n^2). The mean is S_c / n_c, left out where n_c is small: to divide what is
noised already costs nothing more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedhet.algorithms.classwise import ClassMeans
from fedhet.privacy.accounting import Noise
from fedhet.privacy.noise import SecretNoise

DEVIATIONS = 3.0
"""A class is sent if its noised count is at least this many standard deviations of the noise."""


def clipped(vectors: Tensor, norm: float) -> Tensor:
    """Return vectors [N, D], each scaled down to an L2 norm of at most `norm`.

    One that is not finite becomes zeros.
    """
    finite = torch.where(vectors.isfinite().all(1, keepdim=True), vectors, 0)
    lengths: Tensor = torch.linalg.vector_norm(finite, dim=1, keepdim=True)
    return finite * (norm / lengths).clamp_max(1.0)


def noised_means(
    features: Tensor,
    logits: Tensor,
    counts: Tensor,
    noise: Noise,
    norm: float,
    least: int,
    secret: SecretNoise,
) -> ClassMeans:
    """Return noised means from sums of clipped features [C, D] and logits [C, K], and counts [C].

    Only classes whose noised count is at least `least`, and exceeds the noise, are included.
    """
    # One sample changes one row of each sum, by at most `norm`, and one count, by 1.
    sums = [secret.add([each], noise.sums, norm)[0] for each in (features, logits)]
    number = secret.add([counts], noise.counts, 1.0)[0]
    kept = number >= max(float(least), DEVIATIONS * noise.counts, 1.0)
    means = [(each[kept] / number[kept].unsqueeze(1)).cpu().numpy() for each in sums]
    return ClassMeans(
        classes=kept.nonzero().flatten().cpu().numpy(),
        features=means[0],
        logits=means[1],
        counts=number[kept].round().long().cpu().numpy(),
    )
