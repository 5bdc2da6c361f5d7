"""What freed memory costs a training loop: page faults, processor time and memory by allocator.

    python -m benchmarks.allocator [--steps 60]

A small CNN takes steps on batches of 64 images of 28 × 28, in the main thread and in another one,
with glibc's defaults and with what fedhet sets for them (`fedhet.engines.connection`).
Page faults and seconds of the processor hardly depend on what else a machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading

from fedhet.engines.connection import KEEPING_PAGES, TUNABLES

TRIED = {
    "glibc's defaults": "",
    "both thresholds at 1 GiB": KEEPING_PAGES.rpartition(":")[0],
    "huge pages": KEEPING_PAGES.rpartition(":")[2],
    "all three (fedhet's)": KEEPING_PAGES,
}


def measured(steps: int) -> dict[str, float]:
    """Train here; return what a step costs, and the peak of resident memory in MB."""
    import torch
    from torch.nn import functional as F

    from fedhet.models import build

    torch.set_num_threads(1)
    model = build("cnn3", (1, 28, 28), 10, seed=0).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.rand(64, 1, 28, 28).contiguous(memory_format=torch.channels_last)
    y = torch.arange(64) % 10
    before = resource.getrusage(resource.RUSAGE_SELF)
    for step in range(steps + 5):
        if step == 5:
            before = resource.getrusage(resource.RUSAGE_SELF)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "faults": (after.ru_minflt - before.ru_minflt) / steps,
        "user": 1000 * (after.ru_utime - before.ru_utime) / steps,
        "system": 1000 * (after.ru_stime - before.ru_stime) / steps,
        "peak": after.ru_maxrss / 1024,
    }


def child(place: str, steps: int) -> None:
    """Print what is measured, in the main thread or in another one."""
    if place == "main":
        print(json.dumps(measured(steps)))
    else:
        worker = threading.Thread(target=lambda: print(json.dumps(measured(steps))))
        worker.start()
        worker.join()


def main() -> None:
    """Print a line for each allocator and thread."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--child", choices=["main", "other"])
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen.child, chosen.steps)
        return
    for place in ("main", "other"):
        for name, value in TRIED.items():
            words = ["--child", place, "--steps", str(chosen.steps)]
            said = subprocess.check_output(
                [sys.executable, "-m", "benchmarks.allocator", *words],
                env={**os.environ, TUNABLES: value, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            found = json.loads(said)
            print(
                f"{place:5} thread, {name:24}: {found['faults']:7.0f} faults, {found['user']:.1f} "
                f"ms + {found['system']:.1f} ms in the kernel a step; {found['peak']:.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
