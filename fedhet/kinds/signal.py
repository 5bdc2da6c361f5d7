"""Signals [C, T]: channels over steps of time, float32."""

from __future__ import annotations

from pathlib import Path

from fedhet.base.errors import DataError
from fedhet.kinds.base import Array, Kind, finite

_ALLOWED = "of signals x must be [N, channels, time] or [N, time], finite numbers"


def _checked(x: Array, where: Path | str) -> Array:
    """Return signals [N, C, T] float32, of [N, C, T] or, with a single channel, [N, T]."""
    shape = list(x.shape)
    if x.ndim not in (2, 3) or x.dtype.kind not in "iuf" or min(shape[1:]) < 1:
        raise DataError(f"{where}: {_ALLOWED}; it is {x.dtype} {shape}")
    samples = finite(x, where, _ALLOWED)
    return samples[:, None] if samples.ndim == 2 else samples


SIGNAL = Kind(
    name="signal",
    plural="signals",
    wanted="signals [C, T] (signal:DIR)",
    fits=lambda shape: len(shape) == 2,
    pool=("signal-cnn2", "signal-cnn3", "signal-gru", "signal-resnet", "mlp"),
    model="signal-cnn2",
    large_model="signal-resnet",
    side=lambda shape: shape[1],
    minimum=" of {} steps or more",
    checked=_checked,
)
