"""CPU time of the server per client and round in milliseconds, by number of clients.

    python -m benchmarks.server_scale [--counts 100,1000,5000,10000] [--methods felo,fedavg]
        [--rounds 4] [--repeats 3]

The clients immediately return the recorded replies of a real client under their own names. A round
thus contains only the server's work, and a cost that is quadratic in the number of clients is
visible. The numbers of clients alternate, each in a separate process. The benchmark prints the
median, minimum and maximum over the repeats, the time per client for the introductions and for the
end of the run, and the peak memory. Bound: 1.2 times the time with the first number of clients.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.recorded import parts_in, record, server_with
from benchmarks.timing import ProcessTimes, apart, verdict
from fedhet.config.resolve import resolve

BOUND, MODEL = 1.2, "mlp"


def cost(clients: int, method: str, rounds: int) -> dict[str, float]:
    """Return the server's milliseconds per client, by stage, and its peak memory in MB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {
            "method": method, "clients": clients, "rounds": rounds, "out": str(folder / "run"),
            "evaluate-every": rounds + 1, "models.pool": MODEL, "training.local-epochs": 1,
            "data.partition": "iid", "data.min-samples": 1, "data.test-fraction": 0.0,
            "data.max-test-samples": 20, "engine.backend": "inline",
        }  # fmt: skip
        config = resolve(settings)
        record(resolve({**settings, "clients": 20}), folder)
        parts, times = parts_in(folder), ProcessTimes()
        server = server_with(config, folder / "run", folder, lambda: parts, [times])
        server.set_max_workers(2)
        begun = time.process_time()
        server.fit(rounds, None)
        ended = time.process_time()
    each = 1000 / clients
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "round": each * float(median(np.diff(times.at)[1:-1])),
        "introduction": each * (times.at[0] - begun),
        "end": each * (ended - times.at[-1]),
        "megabytes": peak,
    }


def main() -> None:
    """Print the times by method and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", default="100,1000,5000,10000")
    parser.add_argument("--methods", default="felo,fedavg,fedproto,fedhe,local")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    counts = [int(count) for count in chosen.counts.split(",")]
    for method in chosen.methods.split(","):
        found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
        for _, count in product(range(chosen.repeats), counts):
            found[count].append(apart(cost, count, method, chosen.rounds))
        first = median(each["round"] for each in found[counts[0]])
        for count in counts:
            print(line_of(method, count, found[count], first), flush=True)


def line_of(method: str, count: int, found: list[dict[str, float]], first: float) -> str:
    """Format the measurements for a number of clients as one line."""
    times = sorted(each["round"] for each in found)
    ratio = median(times) / first
    middle = {name: median(each[name] for each in found) for name in found[0]}
    return (
        f"{method}, {count} clients: {median(times):.2f} ms ({times[0]:.2f} to {times[-1]:.2f}) a "
        f"client and round, {ratio:.2f} of the first (bound {BOUND} {verdict(ratio <= BOUND)}); "
        f"introductions {middle['introduction']:.2f} ms, end {middle['end']:.2f} ms each; "
        f"{middle['megabytes']:.0f} MB"
    )


if __name__ == "__main__":
    main()
