"""Randomness for differential privacy: Gaussian noise, Poisson sampling, and noised class means.

All bits come from AES-256 in counter mode, with a fresh key from the operating system. Therefore,
an attacker cannot remove the noise by searching for the seed. PyTorch's generators are not
cryptographic, and the CPU generator uses only 32 bits of its seed.

Noise is added to exact sums on a grid. `Grid` clips each vector, rounds its numbers toward zero to
multiples of a power of two, and sums these multiples as integers. Three properties follow:

- Rounding toward zero increases no number, so the norm of a rounded vector is still at most R. One
  vector changes the sum by at most R, and the noise need not compensate for rounding.
- The sum does not depend on the batch size, the order of the samples, or the device. A sum in
  floating point can change by many times R if one vector is added, because this vector changes the
  rounding of all later partial sums (Casacuberta et al., Widespread Underestimation of Sensitivity
  in Differentially Private Libraries and How to Fix It, CCS 2022).
- The last bits of a sum reveal nothing about the noise. In floating point, they reveal information
  about both (Ilya Mironov, On Significance of the Least Significant Bits for Differential Privacy,
  CCS 2012). For an integer q and Gaussian noise Z, q + round(Z) = round(q + Z), so rounding the
  noise is a postprocessing step of the Gaussian mechanism.

Felo, Velo, FedHe and FedProto send private class means, computed from clipped and noised sums. For
every class c, present or not, S_c = sum of f min(1, R / |f|) + N(0, z_f^2 R^2 I) and n_c = count +
N(0, z_n^2). Here, f are the features or logits of each sample, R is the clipping norm, and z_f and
z_n are the noise multipliers of sums and counts. Computing the mean S_c / n_c is postprocessing and
consumes no further budget. Classes with a small n_c are omitted, except at a site whose rows are
only sent in sums.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fedhet.algorithms.classwise import ClassMeans
from fedhet.base.errors import PrivacyError
from fedhet.privacy.accounting import Noise

CIPHER = "AES-256-CTR"
"""Name of the noise source in the ledger."""
RESOLUTION = 2**14
"""Minimum number of grid steps in each number of a vector with equal numbers and maximum norm.

Rounding changes a vector by at most norm / RESOLUTION.
"""
MARGIN = 1 - 2**-20
"""Factor that reduces the norm of clipped vectors. It exceeds the rounding errors of clipping."""
MAX_WIDTH = 2**28
"""Maximum number of numbers in a vector, so that the numbers on the grid fit into 32 bits."""
HOST_PART, DEVICE_PART = 2**14, 2**22
"""Number of noise values to draw at a time: on the host, where they fit into the CPU cache, and on
a device."""
BLOCK = 2**17
"""Number of values to clip and sum at a time on the host."""
DEVIATIONS = 3.0
"""Minimum noised count of a class that is sent, in standard deviations of the noise."""


@dataclass(frozen=True)
class Grid:
    """Grid on which vectors are clipped and summed, without rounding errors in the sum.

    The norm of each clipped and rounded vector is at most `norm`, for all inputs. Vectors with NaN
    or infinity become zeros. Sums are integers (int64), in units of `step`. They are computed on
    the host if the device does not support float64 (MPS).
    """

    norm: float
    """L2 norm to which vectors are clipped."""
    width: int = 1
    """Number of numbers in a vector."""

    def __post_init__(self) -> None:
        """Check the width. Raises PrivacyError if the integers could overflow."""
        if self.width > MAX_WIDTH:
            raise PrivacyError(
                f"differential privacy supports at most {MAX_WIDTH:,} trained parameters, got "
                f"{self.width:,}. Use a smaller model."
            )

    @property
    def step(self) -> float:
        """Distance between neighboring values of the grid, a power of two."""
        return 2.0 ** math.floor(math.log2(self.norm / (RESOLUTION * math.sqrt(self.width))))

    def sum_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Sum N vectors. A vector consists of one row of each part [N, ...].

        Returns the sums of the parts, each of shape [...].
        """
        shapes = [part.shape[1:] for part in parts]
        rows = [
            on_exact_device(part).reshape(len(part), shape.numel())
            for part, shape in zip(parts, shapes, strict=True)
        ]
        scaling = self._scaling(rows)
        return [
            torch.cat([scaling.rounded(block).sum(0) for block in _blocks(each)]).view(shape)
            for each, shape in zip(rows, shapes, strict=True)
        ]

    def sum_by_class(self, vectors: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Sum the vectors [N, D] with each label [N]. Returns the sums [C, D]."""
        vectors = on_exact_device(vectors)
        rounded = self._scaling([vectors]).rounded(vectors).long()
        return _by_class(rounded, labels, classes)

    def _scaling(self, parts: Sequence[Tensor]) -> _Scaling:
        """Return the scaling that clips N vectors, which consist of one row of each part [N, W]."""
        squares = sum(block.double().square_().sum(1) for part in parts for block in _blocks(part))
        lengths = torch.as_tensor(squares).sqrt()
        factors = (MARGIN * self.norm / lengths).clamp_max(1.0) / self.step
        is_finite = lengths.isfinite()
        return _Scaling(factors.float(), None if is_finite.all() else is_finite)


@dataclass(frozen=True)
class _Scaling:
    """Factors [N] that clip N vectors and convert them to units of a grid."""

    factors: Tensor
    is_finite: Tensor | None
    """Mask of the vectors without NaN or infinity, or None if all vectors are finite."""

    def rounded(self, block: Tensor) -> Tensor:
        """Scale the rows of a block [N, W], and round toward zero, as int32."""
        scaled = block * self.factors.unsqueeze(1)
        if self.is_finite is not None:
            scaled = torch.where(self.is_finite.unsqueeze(1), scaled, 0)
        return scaled.int()


def on_exact_device(values: Tensor) -> Tensor:
    """Return the values in float32, on the host if their device does not support float64."""
    device = values.device if values.device.type in ("cpu", "cuda") else torch.device("cpu")
    return values.detach().to(device, torch.float32)


def _blocks(part: Tensor) -> Iterator[Tensor]:
    """Split the columns of a part [N, W] into blocks of limited size."""
    size = BLOCK if part.device.type == "cpu" else DEVICE_PART
    yield from torch.split(part, max(1, size // max(1, len(part))), dim=1)


def _by_class(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Sum the integer rows [N, W] with each label [N]. The order of additions has no effect."""
    total = torch.zeros(classes, rows.shape[1], dtype=torch.int64, device=rows.device)
    return total.index_add_(0, labels.to(rows.device), rows)


class SecretNoise:
    """Cryptographic stream of Gaussian noise and Poisson samples.

    Create a new object for each use. Do not share an object between processes, because they would
    draw the same bits.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """Start a stream with `key` (32 bytes). The default key is random and never stored."""
        cipher = Cipher(algorithms.AES256(key or secrets.token_bytes(32)), modes.CTR(bytes(16)))
        self._stream = cipher.encryptor()

    def add(self, sums: Sequence[Tensor], noise: float, grid: Grid) -> list[Tensor]:
        """Add Gaussian noise to integer `sums` on a grid, and return the results in float32.

        The standard deviation is `noise * grid.norm`. Random bits are drawn on the host and
        transformed on the device of the sums.
        """
        flat = torch.cat([total.flatten() for total in sums])
        noised = torch.empty(len(flat), device=flat.device)
        size = HOST_PART if flat.device.type == "cpu" else DEVICE_PART
        width = noise * grid.norm / grid.step
        for part, result in zip(torch.split(flat, size), torch.split(noised, size), strict=True):
            drawn = self._gaussians(len(part), part.device).mul_(width).round_().long()
            # The sum of integers is exact. Later rounding errors are postprocessing.
            result.copy_(drawn.add_(part).double().mul_(grid.step))
        parts = torch.split(noised, [total.numel() for total in sums])
        return [part.view_as(total) for part, total in zip(parts, sums, strict=True)]

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


class ClippedClassSums:
    """Exact sums of clipped features and logits per class, and numbers of samples per class.

    One sample changes one row of each sum by at most `norm`, and one count by 1.
    """

    def __init__(self, classes: int, norm: float) -> None:
        """Create empty sums. `norm` is the clipping norm of features and of logits."""
        self._classes, self._norm = classes, norm
        self._grids: list[Grid] = []
        self._sums: list[Tensor] = []
        self._counts: Tensor | None = None

    def add(self, features: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch of features [N, D], logits [N, K] and labels [N]."""
        views = features, logits
        self._grids = [Grid(self._norm, view.shape[1]) for view in views]
        sums = [
            grid.sum_by_class(view, labels, self._classes)
            for grid, view in zip(self._grids, views, strict=True)
        ]
        ones = torch.ones(len(labels), 1, dtype=torch.int64, device=sums[0].device)
        counts = _by_class(ones, labels, self._classes)
        if self._counts is None:
            self._sums, self._counts = sums, counts
            return
        self._counts += counts
        for total, addend in zip(self._sums, sums, strict=True):
            total += addend

    def noised_means(
        self, noise: Noise, min_samples: int, secret: SecretNoise, required: Sequence[int] = ()
    ) -> ClassMeans:
        """Return noised class means.

        Omits classes whose noised count is below `min_samples` or does not clearly exceed the
        noise, except the `required` classes. The sum of a required class is divided by this limit
        if its noised count is smaller. At least one batch must have been added.
        """
        if self._counts is None:
            raise ValueError("no batch was added to the class sums")
        sums = [
            secret.add([total], noise.sums, grid)[0]
            for total, grid in zip(self._sums, self._grids, strict=True)
        ]
        grid = Grid(1.0)
        in_steps = self._counts.flatten() * round(1 / grid.step)
        noised = secret.add([in_steps], noise.counts, grid)[0]
        limit = max(float(min_samples), DEVIATIONS * noise.counts, 1.0)
        kept = noised >= limit
        kept[list(required)] = True
        noised.clamp_(min=limit)
        means = [(each[kept] / noised[kept].unsqueeze(1)).cpu().numpy() for each in sums]
        return ClassMeans(
            classes=kept.nonzero().flatten().cpu().numpy(),
            features=means[0],
            logits=means[1],
            counts=noised[kept].round().long().cpu().numpy(),
        )
