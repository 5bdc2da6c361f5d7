"""Secret randomness for differential privacy: Gaussian noise and Poisson samples.

All bits come from AES-256 in counter mode, with a fresh key from the operating system. The noise
cannot be removed by searching for a seed, unlike the noise of PyTorch's generators: the CPU
generator uses only 32 bits of its seed, and no generator of PyTorch is cryptographic.

Noise is added on a grid, because floating-point addition of a value and of noise leaves traces of
both in the last bits of the sum (Ilya Mironov, On Significance of the Least Significant Bits for
Differential Privacy, CCS 2012). `SecretNoise.add` rounds the values to multiples of a power of two,
rounds the noise to the same grid, and adds the two without a rounding error. For values q on the
grid and Gaussian noise Z, q + round(Z) = round(q + Z): rounding the noise only postprocesses the
Gaussian mechanism. Rounding the values adds at most sqrt(d) grid widths to the L2 sensitivity of d
values, and the noise is widened to cover this.

Class means from clipped and noised sums: what Felo, Velo, FedHe and FedProto send privately.

For every class c, present or not: S_c = sum of f min(1, R / |f|) + N(0, z_f^2 R^2 I), and
n_c = count + N(0, z_n^2). The mean is S_c / n_c, left out where n_c is small: to divide what is
noised already costs nothing more.
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
"""Name of the source of noise in a ledger's entries."""
GRID = 1024
"""Reciprocal of the largest relative increase of the noise that covers the rounding to the grid."""
HOST_PART, DEVICE_PART = 2**14, 2**22
"""Number of values that receive noise at a time: the buffers fit into a CPU's cache."""
DEVIATIONS = 3.0
"""A class is sent if its noised count is at least this many standard deviations of the noise."""


class SecretNoise:
    """Cryptographic stream of Gaussian noise and Poisson samples.

    Create an object for each use. It must not be shared by processes: both would draw equal bits.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """Start the stream of `key` (32 bytes), by default of a new key that is never stored."""
        cipher = Cipher(algorithms.AES256(key or secrets.token_bytes(32)), modes.CTR(bytes(16)))
        self._stream = cipher.encryptor()

    def add(self, values: Sequence[Tensor], noise: float, norm: float) -> list[Tensor]:
        """Return `values` with Gaussian noise of standard deviation `noise * norm`.

        `norm` is the L2 sensitivity of all values together. The standard deviation is widened by
        at most 1 / GRID for rounding. The bits are drawn on the host, and become Gaussians on the
        values' device. Without noise (0), the values are returned unchanged.
        """
        if noise == 0:
            return list(values)
        flat = torch.cat([value.flatten() for value in values])
        root = math.sqrt(len(flat))
        grid = 2.0 ** math.floor(math.log2(norm / (GRID * root)))
        width = noise * (norm / grid + root)  # in units of the grid
        # MPS has no float64.
        device = flat.device if flat.device.type in ("cpu", "cuda") else torch.device("cpu")
        for part in torch.split(flat, HOST_PART if device.type == "cpu" else DEVICE_PART):
            drawn = self._gaussians(len(part), device).mul_(width).round_()
            # Integers below 2**53 and powers of two: these steps are exact, up to the last copy.
            part.copy_(part.to(device, torch.float64).div_(grid).round_().add_(drawn).mul_(grid))
        sizes = [value.numel() for value in values]
        parts = torch.split(flat, sizes)
        return [part.view_as(value) for part, value in zip(parts, values, strict=True)]

    def sample(self, rows: int, rate: float) -> Tensor:
        """Return a Poisson sample of `rows`: indices [B], each with probability `rate`.

        The probability is `rate` rounded down to a multiple of 2**-64.
        """
        if rate >= 1:
            return torch.arange(rows)
        bound = int(rate * 2**64) - 2**63  # a signed integer: the lowest is -2**63
        return (self._bits(rows) < bound).nonzero().flatten()

    def _gaussians(self, count: int, device: torch.device) -> Tensor:
        """Return independent standard Gaussians [count] in float64, by Box and Muller (1958).

        The radius comes from 63 random bits and the angle from 64, so that the tail reaches to
        9.4 standard deviations, beyond which the probability is 2**-63.
        """
        pairs = (count + 1) // 2
        bits = self._bits(2 * pairs)
        bits[:pairs] &= 2**63 - 1
        bits = bits.to(device)
        radius = bits[:pairs].double().add_(0.5).mul_(2.0**-63)
        radius.log_().mul_(-2).sqrt_()
        angle = bits[pairs:].double().mul_(math.pi * 2.0**-63)
        found = torch.empty(2 * pairs, dtype=torch.float64, device=device)
        torch.cos(angle, out=found[:pairs])
        torch.sin(angle, out=found[pairs:])
        found.view(2, pairs).mul_(radius)
        return found[:count]

    def _bits(self, count: int) -> Tensor:
        """Return the next bits of the stream as uniform integers [count], int64."""
        # The cipher requires a buffer that is a block, less a byte, larger than its output.
        found = bytearray(8 * count + 15)
        self._stream.update_into(bytes(8 * count), found)
        return torch.frombuffer(found, dtype=torch.int64, count=count)


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
