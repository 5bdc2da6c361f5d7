"""Threshold secret sharing: Shamir, How to Share a Secret, Communications of the ACM, 1979.

The secret is the value at 0 of a random polynomial of degree t - 1 modulo the prime 2^521 - 1, and
share k is the polynomial's value at k. Any t shares determine the secret; fewer shares reveal
nothing about the secret.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations

PRIME = 2**521 - 1
SECRET_BYTES, SHARE_BYTES = 32, 66
MAX_WRONG = 2
"""Maximum number of wrong shares that are detected, if enough correct shares remain."""
MAX_SEARCHED = 64
"""Maximum number of shares of which all pairs are excluded in turn to find two wrong shares."""


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

    One wrong share is found if the other shares determine the secret. Two wrong shares are found if
    there are at most `MAX_SEARCHED` shares and the others determine the secret, or if two shares
    more than necessary are right.

    For k shares, this function computes at most k + 2 values from O(k) multiplications, or about
    k^2 / 2 values if k is at most `MAX_SEARCHED`. The Lagrange weights take O(k^2) multiplications
    for each new set of numbers.

    Returns:
        The secret, and the numbers of wrong shares.

    Raises:
        ValueError: If the shares do not determine a secret.
        DealerError: If they consistently determine another value.
    """
    numbers = tuple(shares)
    terms = [
        weight * int.from_bytes(share, "big") % PRIME
        for weight, share in zip(_weights(numbers), shares.values(), strict=True)
    ]
    moments = [sum(terms) % PRIME]
    for _ in range(2 * MAX_WRONG):
        terms = [term * number for term, number in zip(terms, numbers, strict=True)]
        moments.append(sum(terms) % PRIME)
    for value, wrong in _candidates(numbers, moments):
        if value < 1 << (8 * SECRET_BYTES):
            secret = value.to_bytes(SECRET_BYTES, "big")
            if is_secret(secret):
                return secret, wrong
    # Shares on a polynomial of degree len(shares) - 2 yield the same value without any one share.
    # If not all pairs are searched, two wrong shares may have this property.
    is_searched = len(numbers) <= MAX_SEARCHED
    if len(numbers) > 1 and not moments[1] and (is_searched or not moments[2]):
        raise DealerError(f"{len(shares)} shares determine a value that is not the secret")
    raise ValueError(f"{len(shares)} shares do not determine the secret")


def _candidates(
    numbers: tuple[int, ...], moments: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield possible values at 0, and the shares that are wrong if the value is the secret.

    Moment p is the sum of weight * share * number^p over all shares. If share `a` is excluded, the
    weight of share `j` is multiplied by 1 - j / a, so the value is a combination of the moments.
    For right shares, all moments from 1 to the number of unnecessary shares are 0. These moments
    are therefore the power sums of the wrong shares, which determine the numbers of two shares
    (Peterson's algorithm for Reed-Solomon codes).
    """
    value, first, second, third, fourth = moments
    yield value, ()
    if not (first or second) or len(numbers) < 2:  # No exclusion would change the value.
        return
    inverses = {number: pow(number, -1, PRIME) for number in numbers}
    pairs: Iterable[tuple[int, int]] = ()
    if first:
        for number in numbers:
            yield (value - inverses[number] * first) % PRIME, (number,)
    if len(numbers) <= MAX_SEARCHED:
        pairs = combinations(numbers, 2) if len(numbers) > 2 else ()
    elif divisor := (second**2 - first * third) % PRIME:
        inverse = pow(divisor, -1, PRIME)
        total = (second * third - first * fourth) * inverse % PRIME
        product = (third**2 - second * fourth) * inverse % PRIME
        pairs = [(a, total - a) for a in numbers if a < total - a and total - a in inverses]
        pairs = [(a, b) for a, b in pairs if a * b == product]
    for a, b in pairs:
        excluded = (inverses[a] + inverses[b]) * first - inverses[a] * inverses[b] * second
        yield (value - excluded) % PRIME, (a, b)


@lru_cache(maxsize=8)
def _weights(numbers: tuple[int, ...]) -> list[int]:
    """Return the Lagrange weights of shares; the weighted sum is the polynomial's value at 0."""
    weights, product = [], math.prod(numbers)
    for number in numbers:
        denominator = math.prod(other - number for other in numbers if other != number)
        weights.append(product // number * pow(denominator, -1, PRIME) % PRIME)
    return weights
