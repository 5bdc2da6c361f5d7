"""Aggregation of LoRA adapters with different ranks.

For each adapted layer, a client k with n_k samples has factors B_k [P, r_k] and A_k [r_k, Q], and
p_k = n_k / sum of n. R is the largest rank. The scaling factor s of the products is the same for
all clients, so it cancels. All sums are computed in float64.

- `padded_average` implements FedIT (Zhang et al. 2024), with zero padding if ranks differ.
- `product_norm` computes HetLoRA's weights (Cho et al. 2024), which replace p_k.
- `product_average` implements FlexLoRA (Bai et al. 2024), with an SVD of the averaged products.
- `level_average` implements raFLoRA (Wu et al. 2026), based on third-party code. It averages each
  rank level over the clients that have this level.
- `stacked` implements FLoRA (Wang et al. 2024), and `residual` implements FedEx-LoRA (Singhal et
  al. 2024). Their results are merged into the frozen weights.

A rank level consists of a column of B and the corresponding row of A. Unlike in the papers, a rank
level that no reply contains keeps its previous value, except in `product_average`: the average of
the products has no such level, so its part of the product is lost. FFA-LoRA (Sun et al. 2024)
freezes A, so the padded average of B is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.algorithms import LORA_A, LORA_B
from fedhet.algorithms.local_models import LocalModel, Weights
from fedhet.algorithms.weights import average_weights
from fedhet.base.arrays import Array, Arrays

Factors = tuple[Array, Array]
"""Factors B [P, r] and A [r, Q] of an adapter."""
Value = TypeVar("Value")


def factors_of(state: Mapping[str, Value]) -> dict[str, tuple[Value, Value]]:
    """Return the factors (B, A) in a state dict, keyed by the path of their layer."""
    paths = [name.removesuffix(LORA_B) for name in state if name.endswith(LORA_B)]
    return {path: (state[path + LORA_B], state[path + LORA_A]) for path in paths}


def padded_average(
    parts: Sequence[tuple[Array, float]], before: Array, axis: int, rank: int
) -> Array:
    """Average one factor over clients; rank levels that a client lacks count as zeros.

    Args:
        parts: The clients' factors, with their weights.
        before: The previous average, of the largest rank R.
        axis: Axis of the rank: 0 for A, 1 for B.
        rank: Largest rank in this round's replies. Higher rank levels keep their previous value.
    """
    models = [({"": padded(value, before.shape)}, weight) for value, weight in parts]
    average = average_weights(models)[""]
    later = (slice(None),) * axis + (slice(rank, None),)
    average[later] = before[later]
    return average


def product_norm(factors: Sequence[Factors]) -> float:
    """Return the joint Frobenius norm of a client's products BA in all layers."""
    squares = 0.0
    for b, a in factors:
        wide_b, wide_a = b.astype(np.float64), a.astype(np.float64)
        squares += float(((wide_b.T @ wide_b) * (wide_a @ wide_a.T)).sum())
    return math.sqrt(max(squares, 0.0))


def product_average(parts: Sequence[tuple[Factors, float]], before: Factors) -> Factors:
    """Return the best rank-R approximation of the average of the products B_k A_k, as factors.

    B contains the first R columns of U Sigma, and A the first R rows of the transposed V, in
    descending order of the singular values. As in FlexLoRA, the result does not depend on the
    previous product: if no client has a rank level, its part of the product is lost.
    """
    total = sum(weight for _, weight in parts)
    return truncated([(b * (weight / total), a) for (b, a), weight in parts], before)


def level_average(parts: Sequence[tuple[Factors, float]], before: Factors) -> Factors:
    """Return the best rank-R approximation of the sum of the averaged rank levels, as factors.

    The clients' ranks divide an adapter into levels. Each level is averaged only over the clients
    whose rank includes it, so that clients with lower ranks do not shrink the average.
    """
    largest = before[1].shape[0]
    ends = sorted({a.shape[0] for (_, a), _ in parts} | {largest})
    terms: list[Factors] = []
    for start, end in zip([0, *ends], ends, strict=False):
        level = slice(start, end)
        having = [(b, a, weight) for (b, a), weight in parts if a.shape[0] >= end]
        total = sum(weight for *_, weight in having)
        terms += [(b[:, level] * (weight / total), a[level]) for b, a, weight in having]
        if not having:
            terms.append((before[0][:, level], before[1][level]))
    return truncated(terms, before)


def stacked(parts: Sequence[tuple[Factors, float]]) -> Factors:
    """Return the average of the products B_k A_k, as factors whose rank is the sum of the ranks.

    B is [B_1, ..., B_K], and A contains the rows of p_1 A_1, ..., p_K A_K.
    """
    total = sum(weight for _, weight in parts)
    b = np.concatenate([b for (b, _), _ in parts], axis=1)
    scaled = [a.astype(np.float64) * (weight / total) for (_, a), weight in parts]
    return b, np.concatenate(scaled).astype(b.dtype)


def residual(parts: Sequence[tuple[Factors, float]], average: Factors) -> Factors:
    """Return the average of the products B_k A_k minus the product of the `average` B A.

    With the client j that has the lowest rank, the difference is the sum over all other clients of
    p_k (B_k - B) (A_k - A_j), because the sum of p_k (B_k - B) is 0. Of the factors, padded with
    zeros, only the first r_k rank levels contribute to the term of client k.
    """
    total = sum(weight for _, weight in parts)
    reference = min(range(len(parts)), key=lambda k: parts[k][0][1].shape[0])
    _, first = parts[reference][0]
    lefts, rights = [average[0][:, :0]], [average[1][:0]]
    for k, ((b, a), weight) in enumerate(parts):
        if k != reference:
            mean = average[0][:, : b.shape[1]].astype(np.float64)
            lefts.append(((b - mean) * (weight / total)).astype(b.dtype))
            rights.append(a - padded(first, a.shape))
    return np.concatenate(lefts, axis=1), np.concatenate(rights)


def compacted(factors: Arrays, rank: int) -> dict[str, Array]:
    """Replace factors B [P, R] and A [R, Q] with factors of equal product and of a lower rank.

    One of the new factors is the product, and the other is the identity matrix, padded with zeros
    to `rank`, which must be at least min(P, Q) for all layers.
    """
    replaced: dict[str, Array] = {}
    for path, (b, a) in factors_of(factors).items():
        product = (b.astype(np.float64) @ a.astype(np.float64)).astype(b.dtype)
        rows, columns = product.shape
        left, right = np.eye(rows, dtype=b.dtype), product
        if columns < rows:
            left, right = product, np.eye(columns, dtype=b.dtype)
        replaced[path + LORA_B] = padded(left, (rows, rank))
        replaced[path + LORA_A] = padded(right, (rank, columns))
    return replaced


def levels(factors: Arrays, start: int, end: int | None = None) -> dict[str, Array]:
    """Return the rank levels from `start` to `end` of all factors."""
    level = slice(start, end)
    return {
        name: np.ascontiguousarray(value[:, level] if name.endswith(LORA_B) else value[level])
        for name, value in factors.items()
    }


def renamed(
    tensors: Mapping[str, Value], old: tuple[str, str], new: tuple[str, str]
) -> dict[str, Value]:
    """Return the tensors whose names end with a suffix in `old`, with the suffix in `new`."""
    return {
        name.removesuffix(before) + after: value
        for name, value in tensors.items()
        for before, after in zip(old, new, strict=True)
        if name.endswith(before)
    }


def truncated(terms: Sequence[Factors], before: Factors) -> Factors:
    """Return the truncated SVD of a sum of products, as factors U Sigma [P, R] and V' [R, Q].

    Computes the SVD of the small matrix between the QR factors of the stacked terms, instead of the
    SVD of the product [P, Q]. If the rank of the sum is less than R, the missing rows of A are
    taken from `before`, with zeros in B, so that clients can train them.
    """
    left = torch.from_numpy(np.concatenate([b for b, _ in terms], axis=1).astype(np.float64))
    right = torch.from_numpy(np.concatenate([a for _, a in terms], axis=0).astype(np.float64))
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, sigma, v = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    b, a = (q_left @ (u * sigma)).numpy(), (v @ q_right.T).numpy()
    # An SVD is unique only up to signs, so make the largest entry of each row of A positive.
    signs = np.sign(a[np.arange(len(a)), np.abs(a).argmax(1)])
    b, a = b * np.where(signs == 0, 1, signs), a * np.where(signs == 0, 1, signs)[:, None]
    rank = min(before[1].shape[0], len(a))
    new_b, new_a = np.zeros_like(before[0]), before[1].copy()
    new_b[:, :rank], new_a[:rank] = b[:, :rank], a[:rank]
    return new_b, new_a


def singular_values(b: Array, a: Array) -> Array:
    """Return the singular values [r] of the product BA, in descending order."""
    _, left = torch.linalg.qr(torch.from_numpy(b.astype(np.float64)))
    _, right = torch.linalg.qr(torch.from_numpy(a.astype(np.float64)).T)
    values: Array = torch.linalg.svdvals(left @ right.T).numpy()
    return values


def top_energy(factors: Sequence[Factors], rank: int) -> float:
    """Return the fraction of the products' energy in their first `rank` singular directions.

    The result is the mean over the layers whose product is not zero, or 1 if all products are zero.
    A value near 1 means that the products have almost collapsed to this rank.
    """
    squares = [np.square(singular_values(b, a)) for b, a in factors]
    shares = [float(each[:rank].sum() / each.sum()) for each in squares if each.sum() > 0]
    return float(np.mean(shares)) if shares else 1.0


def padded(value: Array, shape: tuple[int, ...]) -> Array:
    """Pad a factor with zeros to `shape`, or return it unchanged if it has this shape."""
    if value.shape == shape:
        return value
    whole = np.zeros(shape, value.dtype)
    whole[tuple(map(slice, value.shape))] = value
    return whole


class PrunedModel(LocalModel):
    """Model whose adapters are pruned if training shrinks their last rank levels (HetLoRA).

    The regularizer is the sum over layers of ||B[:, k:]|| ||A[k:]||, where r is the rank and k is
    max(1, floor(gamma r)).
    """

    def __init__(
        self, model: nn.Module, anchor: Weights, rank: int, gamma: float, weight: float
    ) -> None:
        super().__init__(model, anchor)
        self._factors = list(factors_of(dict(model.named_parameters())).values())
        self._rank, self._kept, self._weight = rank, max(1, int(gamma * rank)), weight
        self._before = self._tail().item()

    @property
    def rank(self) -> int:
        """Rank after training: k if the last levels have shrunk, otherwise r."""
        return self._kept if self._tail().item() < self._before else self._rank

    def regularizer(self) -> Tensor:
        """Return the term that shrinks the last rank levels."""
        return self._weight * self._tail()

    def _tail(self) -> Tensor:
        kept = slice(self._kept, None)
        norms = [b[:, kept].norm() * a[kept].norm() for b, a in self._factors]
        return torch.stack(norms).sum()
