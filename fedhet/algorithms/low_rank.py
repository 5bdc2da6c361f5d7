"""FedKD: changes of weights cut to the rank that keeps most of their energy.

Chuhan Wu, Fangzhao Wu, Lingjuan Lyu, Yongfeng Huang and Xing Xie, Communication-efficient federated
learning via knowledge distillation, Nature Communications 13, 2022, "Dynamic gradients
approximation".
"""

from __future__ import annotations

import numpy as np
import torch

from fedhet.base.arrays import Array


def energy_kept(round: int, rounds: int, start: float, end: float) -> float:
    """Return T(t) = T_start + (T_end - T_start) t (Eq. 9), t the share of rounds, from 1 / R to 1.

    So early rounds are approximated roughly, and late ones finely.
    """
    return start + (end - start) * round / rounds


def least_rank(singular: Array, energy: float) -> int:
    """Return the least K whose first squares, of [Q], sum to more than `energy` of all (Eq. 8).

    All that are not zero, if no K does; 0 for a matrix of zeros.
    """
    squares = np.cumsum(np.square(singular))
    if not squares.size or not squares[-1] > 0:
        return 0
    above = np.flatnonzero(squares > energy * squares[-1])
    return int(above[0]) + 1 if above.size else int(np.count_nonzero(singular))


def factors(matrix: Array, energy: float) -> tuple[Array, Array]:
    """Return U Sigma [P, K] and V [K, Q] of a matrix [P, Q], K the least rank for `energy`.

    Sigma travels in U (ours): the paper sends it as a matrix of its own. By PyTorch, whose threads
    the run sets; numpy's take thirty times as long for matrices as small as these.
    """
    wide = torch.from_numpy(matrix.astype(np.float64))
    u, singular, v = (each.numpy() for each in torch.linalg.svd(wide, full_matrices=False))
    rank = least_rank(singular, energy)
    left, right = u[:, :rank] * singular[:rank], v[:rank]
    return left.astype(matrix.dtype), right.astype(matrix.dtype)
