"""What a late answer is worth.

FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedhet.base.arrays import Array


def staleness_weight(age: int) -> float:
    """Return s(tau) = (1 + tau)^(-1/2), the weight of an answer that is `age` rounds old.

    FedBuff, Section 5.1 (polynomial, a = 1/2).
    """
    return float((1 + age) ** -0.5)


def buffered_rate(samples: Sequence[float], ages: Sequence[int], server_lr: float) -> float:
    """Return the factor of the mean change that makes an average FedBuff's step.

    An average with weights n_k s(tau_k) divides by their sum. FedBuff divides by the buffer's size
    (Algorithm 1, lines 8 to 12: w <- w + eta / K sum_k s(tau_k) Delta_k; here each client counts by
    its samples n_k), so that a buffer of old changes moves the weights less.
    """
    aged = [n * staleness_weight(age) for n, age in zip(samples, ages, strict=True)]
    return server_lr * sum(aged) / sum(samples) if sum(samples) > 0 else server_lr


def carried_over(now: Array, trained: Array, start: Array, rate: float, low: float | None) -> Array:
    """Return the server's tensor of now plus `rate` times a client's change of an older one.

    That is now + rate (trained - start), not below `low`; counters stay as the client has them.
    """
    if not np.issubdtype(trained.dtype, np.floating):
        return trained
    change = trained.astype(np.float64) - start
    moved = now + rate * change
    return np.asarray(moved if low is None else moved.clip(min=low), dtype=trained.dtype)
