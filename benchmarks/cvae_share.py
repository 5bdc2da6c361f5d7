"""Wall time of a round with Velo's CVAE, relative to the same round without the CVAE's time.

    python -m benchmarks.cvae_share [--rounds 6] [--backend ray]

Bound: 1.05, in the default setup (ten clients, five architectures, digits). The benchmark measures
the additional time of Velo's server over Felo's within each round, because two separate runs would
differ by more. The first round is excluded, because the workers load the data in it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.timing import records_of, seconds, show
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate
from fedhet.strategies.base import Reply
from fedhet.strategies.felo import FeloStrategy
from fedhet.strategies.velo import VeloStrategy


def watch(strategy: type[FeloStrategy], spent: dict[int, float], sign: int) -> None:
    """Patch `strategy` to add the seconds of each aggregation, times `sign`, to `spent[round]`."""
    aggregate = strategy.aggregate

    def timed(self: FeloStrategy, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        results: list[Mapping[str, float]] = []
        took = seconds(lambda: results.append(aggregate(self, round, replies)))
        # Velo's aggregation calls Felo's aggregation. The other patch subtracts Felo's time.
        spent[round] += sign * took
        return results[0]

    setattr(strategy, "aggregate", timed)  # noqa: B010  mypy rejects an assignment


def main() -> None:
    """Print the median and the range of the rounds' ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--backend", default="ray")
    chosen = parser.parse_args()
    spent: dict[int, float] = defaultdict(float)
    watch(FeloStrategy, spent, -1)
    watch(VeloStrategy, spent, 1)
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
