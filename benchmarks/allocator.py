"""Page faults, CPU time and memory of a training loop, by allocator settings.

    python -m benchmarks.allocator [--steps 60]

A small CNN is trained on batches of 64 images of 28 × 28 pixels, in the main thread and in another
thread. The allocator uses glibc's defaults, or settings of fedhet (`fedhet.engines.connection`).
Page faults and CPU time hardly depend on other load on the machine.
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
    """Train in this process, and return measurements by name.

    `faults` is the number of page faults per step, `user` and `system` are the CPU time per step in
    milliseconds, and `peak` is the peak resident memory in MB.
    """
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
    """Measure in the main thread or in another thread, and print the measurements as JSON."""
    if place == "main":
        print(json.dumps(measured(steps)))
    else:
        worker = threading.Thread(target=lambda: print(json.dumps(measured(steps))))
        worker.start()
        worker.join()


def main() -> None:
    """Print a line for each thread and allocator setting."""
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
