"""Velo's CVAE: a round's wall time with it over the same round less what it took.

    python -m benchmarks.cvae_share [--rounds 6] [--backend ray]

Bound: 1.05, in the default set-up (ten clients, five architectures, digits). What Velo's server
does beyond Felo's is timed inside the round: two runs side by side would differ by more. The first
round, in which the workers load the data, is left out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.timing import records_of, seconds, show
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate
from fedhet.strategies.velo import VeloStrategy

STEPS = ("_keep", "_train", "_synthesise", "_measure")
"""What Velo's server does beyond Felo's; each takes the round first."""


def watch(name: str, spent: dict[int, float]) -> None:
    """Add what each call of a step of Velo's takes to the seconds `spent` in its round."""
    step: Callable[..., Any] = getattr(VeloStrategy, name)

    def timed(self: VeloStrategy, round: int, *rest: Any) -> Any:
        results: list[Any] = []
        spent[round] += seconds(lambda: results.append(step(self, round, *rest)))
        return results[0]

    setattr(VeloStrategy, name, timed)


def main() -> None:
    """Print the ratio of each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--backend", default="ray")
    chosen = parser.parse_args()
    spent: dict[int, float] = defaultdict(float)
    for name in STEPS:
        watch(name, spent)
    config = resolve({"method": "velo", "rounds": chosen.rounds, "engine.backend": chosen.backend})
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        simulate(config, directory)
        total = {r["round"]: r["seconds"]["total"] for r in records_of(directory)[1:]}
    largest = max(spent[round] for round in total)
    print(f"the CVAE took at most {1000 * largest:.0f} ms of a round")
    values = sorted(total[round] / (total[round] - spent[round]) for round in total)
    show("velo: round / the round less the CVAE", values, 1.05)


if __name__ == "__main__":
    main()
