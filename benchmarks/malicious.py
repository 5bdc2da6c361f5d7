"""Accuracy that honest clients lose if some clients are malicious, by aggregation rule.

    python -m benchmarks.malicious --out DIR [--methods a,b] [--averages mean,filter]
        [--seeds 3,4,5] [--attacks none,flip] [--study replies] [--tables]

Every method trains small models on digits, without an attack and with malicious clients. In the
study "replies", one of five clients multiplies its replies by -1, 10 or 900, or alternately by 3
and -3, lets them drift, or adds 20 to one value in the smallest tensor ("bias"). In the column
"refused", its replies are so large that they are rejected. This shows how much accuracy the
client's data contributes. In the study "claims", one or three of ten clients claim a hundred
million samples, and flip labels, plant a backdoor, multiply their replies by 3, or add 20 to one
value. Cells of backdoors end with the success rate: the percentage of honest clients' test images
that their models classify as the backdoor's class when they carry the trigger.

Existing runs in DIR are reused, so that the script can be stopped and restarted. With --tables, no
run is executed.

A cell is the loss of accuracy of the honest clients in percentage points, relative to the run with
the same seed that uses the mean and has no attack: the mean over the seeds, with its standard
error. If a method has several kinds of models, the cell shows the kind with the largest loss, under
the method's headline protocol.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.timing import mean_and_error
from fedhet.algorithms.rounds import malicious_clients
from fedhet.base.errors import FedhetError
from fedhet.client_runtime.samples import BACKDOOR_CLASS, with_trigger
from fedhet.clients.base import HetClient
from fedhet.config.resolve import Config, resolve
from fedhet.engines.simulate import simulate
from fedhet.kinds import IMAGE
from fedhet.learning.training import logits_of
from fedhet.methods.registry import find_method, method_names
from fedhet.models import Evaluations
from fedhet.wire.contract import floating
from fedhet.wire.knowledge import Knowledge

ROUNDS = 5
RATES = "backdoor.json"
"""File with the success rates of a run in the study "claims", by client and kind of model."""
Attacks = dict[str, dict[str, object]]
ATTACKS: Attacks = {
    "none": {},
    "refused": {"attack.kind": "scale", "attack.scale": 1e6},
    "x -1": {"attack.kind": "sign-flip"},
    "x 10": {"attack.kind": "scale", "attack.scale": 10.0},
    "alternating": {"attack.kind": "alternating", "attack.scale": 3.0},
    "drift": {"attack.kind": "drift", "attack.scale": 3.0},
    "x 900": {"attack.kind": "scale", "attack.scale": 900.0},
    "bias": {"attack.kind": "small-tensor", "attack.scale": 20.0},
}
CLAIMED: dict[str, object] = {"attack.claimed-samples": 10**8}
THREE: dict[str, object] = {**CLAIMED, "attack.attackers": 3}
CLAIMS: Attacks = {
    "none": {},
    "1 labels": {**CLAIMED, "attack.kind": "label-flip"},
    "1 backdoor": {**CLAIMED, "attack.kind": "backdoor"},
    "1 x 3": {**CLAIMED, "attack.kind": "scale", "attack.scale": 3.0},
    "1 bias": {**CLAIMED, "attack.kind": "small-tensor", "attack.scale": 20.0},
    "3 labels": {**THREE, "attack.kind": "label-flip"},
    "3 backdoor": {**THREE, "attack.kind": "backdoor"},
    "3 x 3": {**THREE, "attack.kind": "scale", "attack.scale": 3.0},
    "3 bias": {**THREE, "attack.kind": "small-tensor", "attack.scale": 20.0},
}


@dataclass(frozen=True)
class Study:
    """Number of clients, attacks, and settings of all runs of a study."""

    clients: int
    attacks: Attacks
    settings: dict[str, object]


STUDIES = {
    "replies": Study(5, ATTACKS, {}),
    "claims": Study(
        10,
        CLAIMS,
        {"defense.malicious-fraction": 0.3, "models.pool": ["mlp"]},
    ),
}
SMALL: dict[str, object] = {
    "rounds": ROUNDS,
    "evaluate-every": ROUNDS,
    "data.alpha": 1.0,
    "training.local-epochs": 2,
    "engine.backend": "inline",
    "engine.device": "cpu",
    "engine.precision": "float32",
    "models.pool": ["cnn2", "mlp"],
}
OWN: dict[str, dict[str, object]] = {
    "cofed": {"rounds": 2},
    "fedgems": {"fedgems.server-model": "cnn2"},
    "um-pfssl": {"um-pfssl.warm-up": 5, "um-pfssl.passes": 3},
    "velo": {"velo.epochs": 10},
}


def config_of(study: Study, method: str, attack: str, average: str, seed: int) -> Config:
    """Return the settings of a run. Raises SettingsError if the average is unsupported."""
    own = {**SMALL, "clients": study.clients, **study.settings, **OWN.get(method, {})}
    own |= study.attacks[attack]
    if (
        len(pool := find_method(method).spec.pool(IMAGE)) == 1
        and "models.pool" not in study.settings
    ):
        own["models.pool"] = list(pool)
    return resolve({**own, "method": method, "seed": seed, "defense.average": average})


def can_be_struck(method: str, attack: str) -> bool:
    """Return whether an attack can change a tensor in the replies of the method's clients."""
    return attack == "none" or (
        bool(floating(find_method(method).spec.replies)) and method != "central"
    )


def run(config: Config, directory: Path) -> None:
    """Execute a run unless it exists."""
    if (directory / "summary.json").exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    rates: dict[str, dict[str, float]] = {}
    evaluation = HetClient.evaluation

    def measured(client: HetClient, knowledge: Knowledge) -> Evaluations:
        rates[client.info.name] = success_rates(client, knowledge)
        return evaluation(client, knowledge)

    with contextlib.ExitStack() as without:
        for name in ("write_figures", "write_report"):
            without.enter_context(patch(f"fedhet.report.{name}", lambda run: None))
        if config.run.clients == STUDIES["claims"].clients:
            without.enter_context(patch.object(HetClient, "evaluation", measured))
        simulate(config, directory)
    (directory / RATES).write_text(json.dumps(rates))
    for name in ("checkpoints", "state", "tensorboard", "pool"):
        shutil.rmtree(directory / name, ignore_errors=True)


def success_rates(client: HetClient, knowledge: Knowledge) -> dict[str, float]:
    """Return the percentage of marked test images with the backdoor's class, by kind of model."""
    tests = client.tests.get("common") or client.tests["personal"]
    images = with_trigger(tests.x[tests.y != BACKDOOR_CLASS])
    return {
        kind: 100 * float((logits.argmax(1) == BACKDOOR_CLASS).double().mean())
        for kind, model in client.eval_models(knowledge).items()
        for logits in [logits_of(model, images, client.compute)]
    }


def place(out: Path, method: str, attack: str, average: str, seed: int) -> Path:
    """Return the directory of a run."""
    return out / f"{method}-{attack.replace(' ', '')}-{average}-{seed}"


def attackers(study: Study, attack: str, seed: int) -> Set[str]:
    """Return the names of the malicious clients."""
    count = study.attacks[attack].get("attack.attackers", 1)
    assert isinstance(count, int)
    return malicious_clients(seed, [f"client-{k}" for k in range(study.clients)], count)


def honest(directory: Path, method: str, malicious: Set[str]) -> dict[str, float] | None:
    """Return honest clients' mean accuracy in percent by kind of model, or None without a run."""
    file = directory / "summary.json"
    if not file.exists():
        return None
    accuracy: dict[str, Any] = json.loads(file.read_text())["accuracy"]
    found = accuracy[find_method(method).spec.headline]
    each = {
        kind: [v for n, v in of["per_client"].items() if n not in malicious]
        for kind, of in found.items()
    }
    return {kind: 100 * fmean(values) for kind, values in each.items() if values}


def losses(
    out: Path, study: Study, method: str, attack: str, average: str, seeds: Sequence[int]
) -> list[float]:
    """Return the loss of each seed in percentage points, for the kind with the largest loss."""
    pairs = [
        (
            honest(place(out, method, "none", "mean", seed), method, malicious),
            honest(place(out, method, attack, average, seed), method, malicious),
        )
        for seed in seeds
        for malicious in [attackers(study, attack, seed)]
    ]
    both = [(before, after) for before, after in pairs if before and after]
    kinds = set.intersection(*({*a} & {*b} for a, b in both)) if both else set()
    by_kind = [[before[kind] - after[kind] for before, after in both] for kind in sorted(kinds)]
    return max(by_kind, key=fmean, default=[])


def successes(
    out: Path, study: Study, method: str, attack: str, average: str, seeds: Sequence[int]
) -> list[float]:
    """Return each seed's mean success rate over the honest clients, for the most affected kind."""
    found = []
    for seed in seeds:
        file = place(out, method, attack, average, seed) / RATES
        if "backdoor" in attack and file.exists():
            rates: dict[str, dict[str, float]] = json.loads(file.read_text())
            honest_rates = [rates[n] for n in sorted(rates.keys() - attackers(study, attack, seed))]
            kinds = set.intersection(*(set(each) for each in honest_rates))
            found.append(max(fmean(each[kind] for each in honest_rates) for kind in kinds))
    return found


def cell(values: Sequence[float], rates: Sequence[float] = ()) -> str:
    """Format the mean of the losses with its standard error, and the mean of the success rates."""
    if not values:
        return "–"
    if len(values) == 1:
        text = f"{values[0]:.1f}"
    else:
        text = "{:.1f} ± {:.1f}".format(*mean_and_error([*values]))
    return f"{text} ({fmean(rates):.0f} %)" if rates else text


def table(
    out: Path, study: Study, methods: Sequence[str], averages: Sequence[str], seeds: Sequence[int]
) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    yield f"| method | average | {' | '.join(study.attacks)} |"
    yield "|---|---|" + "---|" * len(study.attacks)
    for method, average in product(methods, averages):
        cells = [
            cell(
                *(each(out, study, method, attack, average, seeds) for each in (losses, successes))
            )
            for attack in study.attacks
        ]
        if any(each != "–" for each in cells):
            yield f"| `{method}` | {average} | {' | '.join(cells)} |"


def main() -> None:
    """Execute the missing runs, and print the table."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--methods", default=",".join(method_names()))
    words.add_argument("--averages", default="mean,filter")
    words.add_argument("--attacks", default="")
    words.add_argument("--seeds", default="3,4,5")
    words.add_argument("--study", choices=STUDIES, default="replies")
    words.add_argument("--tables", action="store_true")
    given = words.parse_args()
    methods, averages = given.methods.split(","), given.averages.split(",")
    seeds, study = [int(seed) for seed in given.seeds.split(",")], STUDIES[given.study]
    attacks = given.attacks.split(",") if given.attacks else [*study.attacks]
    wanted = [] if given.tables else product(seeds, attacks, averages, methods)
    for seed, attack, average, method in wanted:
        if can_be_struck(method, attack):
            with contextlib.suppress(FedhetError):
                config = config_of(study, method, attack, average, seed)
                run(config, place(given.out, method, attack, average, seed))
    print("\n".join(table(given.out, study, methods, averages, seeds)))


if __name__ == "__main__":
    main()
