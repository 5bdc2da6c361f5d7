"""Time per client and round in milliseconds, by number of clients.

    python -m benchmarks.many_clients [--counts 100,1000] [--backend inline] [--rounds 12]
        [--repeats 3]

Clients with twenty synthetic images each train an `mlp` for one epoch. The time is the CPU time of
the process with `inline`, and the wall time multiplied by the number of workers with `ray`; the
first round is excluded. The numbers of clients alternate, because the speed of a machine drifts.
The benchmark prints the median, minimum and maximum over the repeats, and the peak memory. Bound:
1.2 times the time with the first number of clients.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.timing import ProcessTimes, apart, records_of, verdict
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate

IMAGES, BOUND = 20, 1.2


def write_images(folder: Path, clients: int) -> None:
    """Write uint8 training images [N, 28, 28] for all clients, and a few common test images."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for part, count in (("train", IMAGES * clients), ("test", 50)):
        x = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        np.savez(folder / f"{part}.npz", x=x, y=np.arange(count) % 10)


def cost(clients: int, method: str, backend: str, rounds: int) -> dict[str, float]:
    """Run a federation, and return the milliseconds per client and round and the peak MB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "images", clients)
        config = resolve(
            {
                "method": method,
                "clients": clients,
                "rounds": rounds,
                "evaluate-every": rounds + 1,
                "data.dataset": f"signal:{folder / 'images'}",
                "data.partition": "iid",
                "data.min-samples": 2,
                "models.pool": "mlp",
                "training.local-epochs": 1,
                "engine.backend": backend,
            }
        )
        times = ProcessTimes()
        simulate(config, folder / "run", [times])
        totals = [record["seconds"]["total"] for record in records_of(folder / "run")[1:-1]]
    if backend == "inline":
        spent = float(np.median(np.diff(times.at[1:-1])))
    else:
        spent = float(np.median(totals)) * (os.cpu_count() or 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"milliseconds": 1000 * spent / clients, "megabytes": peak}


def main() -> None:
    """Print the time and memory for each number of clients, measured in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", default="100,1000")
    parser.add_argument("--method", default="felo")
    parser.add_argument("--backend", default="inline", choices=["inline", "ray"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    counts = [int(count) for count in chosen.counts.split(",")]
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for _, count in product(range(chosen.repeats), counts):
        found[count].append(apart(cost, count, chosen.method, chosen.backend, chosen.rounds))
    first = median(each["milliseconds"] for each in found[counts[0]])
    for count in counts:
        times = sorted(each["milliseconds"] for each in found[count])
        ratio = median(times) / first
        print(
            f"{count} clients: {median(times):.1f} ms ({times[0]:.1f} to {times[-1]:.1f}) a client "
            f"and round, {ratio:.2f} of the first (bound {BOUND} {verdict(ratio <= BOUND)}); "
            f"{max(each['megabytes'] for each in found[count]):.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
