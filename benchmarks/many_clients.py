"""What a client costs where there are many: milliseconds of a round for each, at every count.

    python -m benchmarks.many_clients [--counts 100,1000] [--backend inline] [--rounds 12]
        [--repeats 3]

Clients of twenty synthetic images train an `mlp` for an epoch. A client's cost is that of the
process's CPU with `inline`, and with `ray` the time on the clock times the workers, in the rounds
after the first. The counts take turns, since a machine drifts; printed are the median over the
repeats and the least and the most. Bound: 1.2 of the first count's. Besides: the peak memory.
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
    """Write the images, uint8 [N, 28, 28], in one file; a few more are the common test set."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for part, count in (("train", IMAGES * clients), ("test", 50)):
        x = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        np.savez(folder / f"{part}.npz", x=x, y=np.arange(count) % 10)


def cost(clients: int, method: str, backend: str, rounds: int) -> dict[str, float]:
    """Run a federation; return a client's milliseconds a round, and the peak memory in MB."""
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
    """Print the costs, each count in a process of its own."""
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
