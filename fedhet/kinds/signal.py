"""Signals [C, T]: channels and steps of time."""

from __future__ import annotations

from pathlib import Path

from fedhet.errors import DataError
from fedhet.kinds.base import Array, Kind, Shape, finite

_ALLOWED = "of signals x must be [N, channels, time] or [N, time], finite numbers"


class Signal(Kind):
    """Several channels over time, float32."""

    name, plural, data = "signal", "signals", "signals"
    wanted = "signals [C, T] (signal:DIR)"
    pool = "signal-cnn2,signal-cnn3,signal-gru,signal-resnet,mlp"
    model, large_model = "signal-cnn2", "signal-resnet"

    def fits(self, shape: Shape) -> bool:
        """Tell whether a sample of `shape` is a signal."""
        return len(shape) == 2

    def side(self, shape: Shape) -> int:
        """Return the steps of time."""
        return shape[1]

    def minimum(self, side: int) -> str:
        """Return the words for signals with a minimum of steps."""
        return f"{self.wanted} of {side} steps or more"

    def checked(self, x: Array, where: Path | str) -> Array:
        """Return signals [N, C, T] float32, of [N, C, T] or, with a single channel, [N, T].

        Raises DataError, which names `where`, for anything else.
        """
        shape = list(x.shape)
        if x.ndim not in (2, 3) or x.dtype.kind not in "iuf" or min(shape[1:]) < 1:
            raise DataError(f"{where}: {_ALLOWED}; it is {x.dtype} {shape}")
        samples = finite(x, where, _ALLOWED)
        return samples[:, None] if samples.ndim == 2 else samples
