"""Size of a reply with each encoding, and the CPU time to encode and decode it.

    python -m benchmarks.encoding_step

The reply contains a model's weights, changed by random noise with a standard deviation of 0.01. The
size is relative to float32. The times are in milliseconds of one core per million numbers, as the
minimum of five repetitions.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from flwr.common import ndarrays_to_parameters

from fedhet.base.arrays import Arrays, grouped
from fedhet.methods.fedavg import REPLIES
from fedhet.models import build, to_arrays
from fedhet.settings.engine import WireSettings
from fedhet.wire.encodings import Coder, rules_of
from fedhet.wire.knowledge import (
    PLAIN,
    Envelope,
    Knowledge,
    Packing,
    decode,
    digest_of,
    encode,
    payload_bytes,
)

MODELS = {"cnn2": (1, 28, 28), "cnn3": (3, 32, 32), "resnet10": (3, 32, 32)}
ENVELOPE = Envelope("run", "fedavg", 1, "a")
TRIES = 5


def weights(model: str) -> tuple[Arrays, Arrays]:
    """Return a model's weights before and after random changes that imitate a client's training."""
    rng = np.random.default_rng(0)
    base = grouped("weights", to_arrays(build(model, MODELS[model], 10, seed=0)))
    own = {
        name: value + rng.normal(0, 0.01, value.shape).astype(value.dtype)
        if value.dtype == np.float32
        else value
        for name, value in base.items()
    }
    return base, own


def step(coder: Coder, base: Arrays, own: Arrays) -> tuple[int, float, float]:
    """Return the size of a reply in bytes, and the seconds to encode and to decode it."""
    started = time.process_time()
    encoded, _ = coder.reply(("a", 1), own, base, {})
    message = encode(ENVELOPE, Knowledge(own), Packing(encoded, digest_of(base)))
    sent = time.process_time()
    decode(message, "a", lambda envelope, digest: base)
    size = payload_bytes(ndarrays_to_parameters(message))
    return size, sent - started, time.process_time() - sent


def main() -> None:
    """Print a row for each model and encoding."""
    print(
        "| model | numbers | encoding | bytes | encode, ms | decode, ms |\n|---" + "|---" * 5 + "|"
    )
    for model in MODELS:
        base, own = weights(model)
        count = sum(value.size for value in own.values())
        plain = payload_bytes(ndarrays_to_parameters(encode(ENVELOPE, Knowledge(own), PLAIN)))
        for encoding in ("float16", "int8", "top-k"):
            rules = rules_of(WireSettings(encoding=encoding))
            assert rules is not None
            steps = [step(Coder(rules, REPLIES, 0), base, own) for _ in range(TRIES)]
            size, *seconds = (min(each) for each in zip(*steps, strict=True))
            times = " | ".join(f"{1e9 * each / count:.0f}" for each in seconds)
            print(f"| {model} | {count:,} | {encoding} | {size / plain:.3f} | {times} |")


if __name__ == "__main__":
    main()
