"""Randomness for differential privacy: Gaussian noise, Poisson sampling, and noised class means.

All bits come from AES-256 in counter mode, with a fresh key from the operating system. Therefore,
an attacker cannot remove the noise by searching for the seed. PyTorch's generators are not
cryptographic, and the CPU generator uses only 32 bits of its seed.

Noise is added on a grid, because the last bits of a floating-point sum of value and noise reveal
information about both (Ilya Mironov, On Significance of the Least Significant Bits for Differential
Privacy, CCS 2012). `SecretNoise.add` rounds the values to multiples of a power of two, rounds the
noise to the same grid, and adds both without rounding error. For values q on the grid and Gaussian
noise Z, q + round(Z) = round(q + Z), so rounding the noise is a postprocessing step of the Gaussian
mechanism. Rounding the values increases the L2 sensitivity of d values by at most sqrt(d) grid
widths. A larger standard deviation compensates for this increase.

Felo, Velo, FedHe and FedProto send private class means, computed from clipped and noised sums. For
every class c, present or not, S_c = sum of f min(1, R / |f|) + N(0, z_f^2 R^2 I) and n_c = count +
N(0, z_n^2). Here, f are the features or logits of each sample, R is the clipping norm, and z_f and
z_n are the noise multipliers of sums and counts. Computing the mean S_c / n_c is postprocessing and
consumes no further budget. Classes with a small n_c are omitted.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fedhet.algorithms.classwise import ClassMeans
from fedhet.privacy.accounting import Noise

CIPHER = "AES-256-CTR"
"""Name of the noise source in the ledger."""
GRID = 1024
"""Reciprocal of the maximum relative increase in the standard deviation, which compensates for
rounding."""
HOST_PART, DEVICE_PART = 2**14, 2**22
"""Number of values to process at a time: on the host, where they fit into the CPU cache, and on a
device."""
DEVIATIONS = 3.0
"""Minimum noised count of a class that is sent, in standard deviations of the noise."""


class SecretNoise:
    """Cryptographic stream of Gaussian noise and Poisson samples.

    Create a new object for each use. Do not share an object between processes, because they would
    draw the same bits.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """Start a stream with `key` (32 bytes). The default key is random and never stored."""
        cipher = Cipher(algorithms.AES256(key or secrets.token_bytes(32)), modes.CTR(bytes(16)))
        self._stream = cipher.encryptor()

    def add(self, values: Sequence[Tensor], noise: float, norm: float) -> list[Tensor]:
        """Add Gaussian noise to `values` that have the L2 sensitivity `norm`.

        The standard deviation is `noise * norm`, increased by a factor of at most 1 + 1 / GRID to
        compensate for rounding. Random bits are drawn on the host and transformed on the values'
        device.
        """
        if noise == 0:
            return list(values)
        flat = torch.cat([value.flatten() for value in values])
        root = math.sqrt(len(flat))
        grid = 2.0 ** math.floor(math.log2(norm / (GRID * root)))
        width = noise * (norm / grid + root)  # The standard deviation is in units of the grid.
        # MPS does not support float64.
        device = flat.device if flat.device.type in ("cpu", "cuda") else torch.device("cpu")
        for part in torch.split(flat, HOST_PART if device.type == "cpu" else DEVICE_PART):
            drawn = self._gaussians(len(part), device).mul_(width).round_()
            # All steps except the last copy are exact, because values are integers below 2**53 and
            # scales are powers of two.
            part.copy_(part.to(device, torch.float64).div_(grid).round_().add_(drawn).mul_(grid))
        sizes = [value.numel() for value in values]
        parts = torch.split(flat, sizes)
        return [part.view_as(value) for part, value in zip(parts, values, strict=True)]

    def sample(self, rows: int, rate: float) -> Tensor:
        """Draw a Poisson sample of row indices [B]; it contains each row with probability `rate`.

        The exact probability is `rate`, rounded down to a multiple of 2**-64.
        """
        if rate >= 1:
            return torch.arange(rows)
        bound = int(rate * 2**64) - 2**63  # The threshold is relative to the smallest int64.
        return (self._bits(rows) < bound).nonzero().flatten()

    def _gaussians(self, count: int, device: torch.device) -> Tensor:
        """Draw independent standard Gaussians [count] in float64 (Box and Muller 1958).

        The radius uses 63 random bits, and the angle uses 64. The tail thus extends to 9.4 standard
        deviations, beyond which the probability is 2**-63.
        """
        pairs = (count + 1) // 2
        bits = self._bits(2 * pairs)
        bits[:pairs] &= 2**63 - 1
        bits = bits.to(device)
        radius = bits[:pairs].double().add_(0.5).mul_(2.0**-63)
        radius.log_().mul_(-2).sqrt_()
        angle = bits[pairs:].double().mul_(math.pi * 2.0**-63)
        gaussians = torch.empty(2 * pairs, dtype=torch.float64, device=device)
        torch.cos(angle, out=gaussians[:pairs])
        torch.sin(angle, out=gaussians[pairs:])
        gaussians.view(2, pairs).mul_(radius)
        return gaussians[:count]

    def _bits(self, count: int) -> Tensor:
        """Return the next bits of the stream as uniform integers [count], int64."""
        # The cipher requires 15 bytes of buffer (one byte less than a block) in addition to its
        # output.
        buffer = bytearray(8 * count + 15)
        self._stream.update_into(bytes(8 * count), buffer)
        return torch.frombuffer(buffer, dtype=torch.int64, count=count)


def clipped(vectors: Tensor, norm: float) -> Tensor:
    """Clip each row of `vectors` [N, D] to an L2 norm of at most `norm`.

    Rows with NaN or infinity become zeros.
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
    min_samples: int,
    secret: SecretNoise,
) -> ClassMeans:
    """Compute noised class means from sums of clipped features [C, D] and logits [C, K].

    Omits classes whose noised count is below `min_samples` or does not clearly exceed the noise.
    """
    # One sample changes one row of each sum by at most `norm`, and one count by 1.
    sums = [secret.add([each], noise.sums, norm)[0] for each in (features, logits)]
    noised = secret.add([counts], noise.counts, 1.0)[0]
    kept = noised >= max(float(min_samples), DEVIATIONS * noise.counts, 1.0)
    means = [(each[kept] / noised[kept].unsqueeze(1)).cpu().numpy() for each in sums]
    return ClassMeans(
        classes=kept.nonzero().flatten().cpu().numpy(),
        features=means[0],
        logits=means[1],
        counts=noised[kept].round().long().cpu().numpy(),
    )
