"""Quality of UM-pFSSL's helper ratings by entropy (Eq. 12) and by accuracy on local labels.

    python -m benchmarks.helper_ranking [--seeds 0,1,2] [--least 2,10,30] [--warm-up 1,5,20]
        [--rounds 1] [--preset semi-digits] [--data-dir DIR]

After the given rounds of UM-pFSSL (the first is the warm-up on labeled samples only), every client
rates the models of all other clients on its own samples, as in its search for helpers. The ratings
are compared with the models' accuracy on the client's test split, which a client would not know.

The columns are means over the clients: Spearman's correlation between rating and accuracy, and the
accuracy of the three models with the highest ratings. The rows vary the minimum number of labels
per client (`data.min-labeled`) and the epochs of the warm-up (`um-pfssl.warm-up`).
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import cast

import numpy as np
from scipy import stats

from benchmarks.over_local import federation
from fedhet.algorithms import RelationKind
from fedhet.algorithms.uncertainty import certainty, entropy, predictive, relation
from fedhet.base.seeding import seeded
from fedhet.client_runtime.node import open_client
from fedhet.clients.base import HetClient
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import read_preset
from fedhet.learning.training import evaluate

KINDS: tuple[RelationKind, ...] = ("en", "ta", "en+ta")
BEST = 3
"""Number of helpers that a client would choose."""


def clients_after(config: Config, folder: Path) -> list[HetClient]:
    """Execute all rounds of a federation, and return its clients."""
    play, nodes = federation(config, folder)
    for _ in range(config.run.rounds):
        play()
    return [cast(HetClient, open_client(config, node)) for node in nodes]


def ratings(client: HetClient, others: Sequence[HetClient]) -> dict[str, list[float]]:
    """Return a client's ratings of other models by kind; "worth" is a model's test accuracy."""
    found: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "worth")}
    x, test = client.unlabeled.x, client.samples.tests["personal"]
    share = len(client.y) / (len(client.y) + len(x))
    for number, other in enumerate(others):
        model = other.network
        with seeded(client.run.seed, client.info.name, "masks", number):
            answers = predictive(model, x, client.config.method_settings.flat()["passes"])
        sure = certainty(entropy(answers), client.info.classes)
        right = evaluate(model, client.x, client.y, client.compute).accuracy
        for kind in KINDS:
            found[kind].append(relation(sure, right, share, kind))
        found["worth"].append(evaluate(model, test.x, test.y, client.compute).accuracy)
    return found


def judged(config: Config) -> dict[str, tuple[float, float]]:
    """Return (mean correlation, mean test accuracy of the best-rated models) by kind of rating."""
    with tempfile.TemporaryDirectory() as folder:
        every = clients_after(config, Path(folder))
        rated = [ratings(c, [other for other in every if other is not c]) for c in every]
    found = {}
    for kind in (*KINDS, "worth"):
        rows = [(row[kind], row["worth"]) for row in rated]
        ranks = [stats.spearmanr(*row).statistic for row in rows if min(map(np.ptp, row)) > 0]
        tops = [fmean(np.array(row[1])[np.argsort(row[0])[-BEST:]]) for row in rows]
        found[kind] = fmean(ranks), fmean(tops)
    return found


def shown(values: list[float]) -> str:
    """Format the mean and the standard deviation over seeds."""
    return f"{fmean(values):.2f} ± {stdev(values) if len(values) > 1 else math.nan:.2f}"


def main() -> None:
    """Print a row for each number of labels and each number of warm-up epochs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--least", default="2,10,30")
    parser.add_argument("--warm-up", default="1,5,20")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--preset", default="semi-digits")
    parser.add_argument("--data-dir", default="data")
    chosen = parser.parse_args()
    logging.disable(logging.INFO)
    heads = [f"{kind}: {what}" for what in ("correlation", "best three") for kind in KINDS]
    print("| least labels | warm-up | " + " | ".join([*heads, "truly best three"]) + " |")
    print("|---:|---:|" + "---|" * (len(heads) + 1))
    for least, warm in product(chosen.least.split(","), chosen.warm_up.split(",")):
        settings = {
            **read_preset(chosen.preset), "method": "um-pfssl", "rounds": chosen.rounds,
            "data.data-dir": chosen.data_dir, "data.min-labeled": int(least),
            "um-pfssl.warm-up": int(warm), "engine.backend": "inline", "engine.device": "cpu",
        }  # fmt: skip
        seeds = [int(seed) for seed in chosen.seeds.split(",")]
        found = [judged(resolve({**settings, "seed": seed})) for seed in seeds]
        cells = [shown([each[kind][n] for each in found]) for n in (0, 1) for kind in KINDS]
        cells.append(shown([each["worth"][1] for each in found]))
        print(f"| {least} | {warm} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
