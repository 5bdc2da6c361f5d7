"""Wall time of a round on Ray, relative to the clients' training time per worker.

    python -m benchmarks.engine_overhead [--clients 20] [--rounds 4] [--model resnet10]

Bound: 1.25, for models that train for at least a second per round. The first round is excluded,
because the workers load the data in it. The last round is excluded, because it evaluates all
clients.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.timing import records_of, show
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate


def main() -> None:
    """Print the median and the range of the rounds' ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="felo")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="resnet10")
    parser.add_argument("--epochs", type=int, default=10)
    chosen = parser.parse_args()
    config = resolve(
        {
            "method": chosen.method,
            "clients": chosen.clients,
            "rounds": chosen.rounds,
            "evaluate-every": chosen.rounds,
            "data.partition": "iid",
            "models.pool": chosen.model,
            "training.local-epochs": chosen.epochs,
        }
    )
    workers = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        simulate(config, directory)
        rounds = [record["seconds"] for record in records_of(directory)[1:-1]]
    a_client = min(r["train"] for r in rounds) / chosen.clients
    print(f"{chosen.clients} clients, {workers} workers, {a_client:.2f} s of training a client")
    values = sorted(r["total"] / (r["train"] / workers) for r in rounds)
    show(f"{chosen.method}, {chosen.model}: round / (training / workers)", values, 1.25)


if __name__ == "__main__":
    main()
