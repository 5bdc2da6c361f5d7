"""Threshold secret sharing: Shamir, How to Share a Secret, Communications of the ACM, 1979.

The secret is the value at 0 of a random polynomial of degree t - 1 modulo the prime 2^521 - 1, and
share k is the polynomial's value at k. Any t shares determine the secret; fewer shares reveal
nothing about the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import combinations

PRIME = 2**521 - 1
SECRET_BYTES, SHARE_BYTES = 32, 66
MAX_WRONG = 2
"""Maximum number of wrong shares that are detected, if enough correct shares remain."""


class DealerError(ValueError):
    """Raised if all shares are consistent, but determine a value that is not the secret.

    More shares than necessary lie on one polynomial, so the party that split the secret is at
    fault, and not a party that holds a share.
    """


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


def join(
    shares: Mapping[int, bytes], is_secret: Callable[[bytes], bool] = lambda secret: True
) -> tuple[bytes, tuple[int, ...]]:
    """Reconstruct the secret from shares, keyed by number (from 1). Up to two shares may be wrong.

    If the value computed from all shares is not the secret, one or two shares are excluded so that
    the remaining shares determine the secret. `is_secret` recognizes the secret, e.g. by a
    commitment. The size of a value does not suffice for this purpose: a value computed from too few
    shares exceeds 32 bytes, except with probability 2^-265, but anyone who knows a share's Lagrange
    weight can change the share so that the value changes by 1.

    Returns:
        The secret, and the numbers of wrong shares.

    Raises:
        ValueError: If the shares do not determine a secret.
        DealerError: If they consistently determine another value.
    """
    numbers = tuple(shares)
    weighted = [
        weight * int.from_bytes(share, "big") % PRIME
        for weight, share in zip(_weights(numbers), shares.values(), strict=True)
    ]
    # If share `a` is excluded, the weight of share `j` is multiplied by 1 - j / a.
    moments = [
        sum(term * number**power for term, number in zip(weighted, numbers, strict=True)) % PRIME
        for power in range(MAX_WRONG + 1)
    ]
    inverses = {number: pow(number, -1, PRIME) for number in numbers}
    values: list[int] = []
    for count in range(min(MAX_WRONG + 1, len(numbers))):
        for wrong in combinations(numbers, count):
            product = [1]  # Coefficients of the product of 1 - x / a.
            for number in wrong:
                shifted = [0, *(-inverses[number] * each for each in product)]
                product = [a + b for a, b in zip([*product, 0], shifted, strict=True)]
            secret = sum(a * b for a, b in zip(product, moments, strict=False)) % PRIME
            values += [secret] if count < MAX_WRONG else []
            if secret < 1 << (8 * SECRET_BYTES):
                value = secret.to_bytes(SECRET_BYTES, "big")
                if is_secret(value):
                    return value, wrong
    # Shares on a polynomial of degree len(shares) - 2 yield the same value without any one share.
    if len(numbers) > 1 and len({*values}) == 1:
        raise DealerError(f"{len(shares)} shares determine a value that is not the secret")
    raise ValueError(f"{len(shares)} shares do not determine the secret")


@lru_cache(maxsize=8)
def _weights(numbers: tuple[int, ...]) -> list[int]:
    """Return the Lagrange weights of shares; the weighted sum is the polynomial's value at 0."""
    weights = []
    for number in numbers:
        numerator = denominator = 1
        for other in numbers:
            if other != number:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - number) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return weights
