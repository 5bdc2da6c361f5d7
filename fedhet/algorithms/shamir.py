"""Threshold secret sharing: Shamir, How to Share a Secret, Communications of the ACM, 1979.

The secret is the value at 0 of a random polynomial of degree t - 1 modulo the prime 2^521 - 1, and
share k is the polynomial's value at k. Any t shares determine the secret; fewer shares reveal
nothing about the secret.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from functools import lru_cache

PRIME = 2**521 - 1
SECRET_BYTES, SHARE_BYTES = 32, 66


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret of 32 bytes into `count` shares; any `threshold` shares determine it.

    Returns:
        The shares 1 to `count`, of 66 bytes each.

    Raises:
        ValueError: If the secret has another size, or if `threshold` is not from 1 to `count`.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(
            f"expected a secret of 32 bytes and 1 <= threshold <= {count}, got "
            f"{len(secret)} bytes and threshold {threshold}"
        )
    polynomial = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    polynomial.append(int.from_bytes(secret, "big"))  # The constant term comes last.
    shares = []
    for point in range(1, count + 1):
        value = 0
        for coefficient in polynomial:
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def join(shares: Mapping[int, bytes]) -> bytes:
    """Reconstruct the secret from at least t correct shares, keyed by number (from 1).

    Check the result, e.g. against a commitment: too few or wrong shares yield another value.

    Raises:
        ValueError: If the value has more than 32 bytes, as for too few or wrong shares, except with
            probability 2^-265.
    """
    value = _moment(shares, 0)
    if value >= 1 << (8 * SECRET_BYTES):
        raise ValueError(f"{len(shares)} shares do not determine the secret")
    return value.to_bytes(SECRET_BYTES, "big")


def has_spare(shares: Mapping[int, bytes]) -> bool:
    """Return whether one share more than necessary lies on the polynomial of the other shares.

    Correct shares have this property if there are more than t of them.
    """
    return len(shares) > 1 and not _moment(shares, 1)


def _moment(shares: Mapping[int, bytes], power: int) -> int:
    """Return the sum of weight * share * number^power over all shares.

    Moment 0 is the value at 0 of the polynomial through all shares. Without share `a`, the weight
    of share `j` is multiplied by 1 - j / a, so the value changes by -1 / a times moment 1.
    """
    numbers = tuple(shares)
    total: int = sum(
        weight * int.from_bytes(share, "big") * number**power
        for weight, (number, share) in zip(_weights(numbers), shares.items(), strict=True)
    )
    return total % PRIME


@lru_cache(maxsize=8)
def _weights(numbers: tuple[int, ...]) -> list[int]:
    """Return the Lagrange weights of shares; the weighted sum is the polynomial's value at 0."""
    weights, product = [], math.prod(numbers)
    for number in numbers:
        denominator = math.prod(other - number for other in numbers if other != number)
        weights.append(product // number * pow(denominator, -1, PRIME) % PRIME)
    return weights
