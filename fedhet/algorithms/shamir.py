"""Threshold secret sharing: Shamir, How to Share a Secret, Communications of the ACM, 1979.

The secret is the value at 0 of a random polynomial of degree t - 1 modulo the prime 2^521 - 1, and
share k is the polynomial's value at k. Any t shares determine the secret; fewer shares reveal
nothing about the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1
SECRET_BYTES, SHARE_BYTES = 32, 66


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret of 32 bytes into `count` shares, any `threshold` of which determine it.

    Returns:
        The shares 1 to `count`, of 66 bytes each.

    Raises:
        ValueError: If the secret has another size, or if `threshold` is not from 1 to `count`.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"expected 32 bytes and 1 <= threshold <= {count}, got {threshold}")
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
    """Reconstruct the secret from at least `threshold` shares, keyed by their numbers from 1.

    Raises:
        ValueError: If the shares do not determine a secret of 32 bytes. Too few shares or wrong
            shares raise this error, except with probability 2^-265.
    """
    secret = 0
    for number, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != number:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - number) % PRIME
        weight = numerator * pow(denominator, -1, PRIME)
        secret = (secret + int.from_bytes(share, "big") * weight) % PRIME
    if not shares or secret >= 1 << (8 * SECRET_BYTES):
        raise ValueError(f"{len(shares)} shares do not determine the secret")
    return secret.to_bytes(SECRET_BYTES, "big")
