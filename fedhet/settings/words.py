"""Names that other libraries and papers have for settings which have another name here."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

_MEANT = {
    "clients": "num-clients n-clients num-users users num-parties parties num-supernodes",
    "rounds": "num-rounds n-rounds comm-rounds communication-rounds global-rounds global-epochs "
    "num-server-rounds",
    "fraction": "frac client-fraction sample-fraction fraction-fit fraction-train join-ratio "
    "participation participation-rate",
    "seed": "random-seed rng-seed manual-seed",
    "evaluate-every": "eval-every eval-interval eval-gap test-every test-gap",
    "early-stopping": "early-stop stop-patience early-stopping-patience",
    "keep-best": "save-best",
    "out": "output output-dir out-dir log-dir logdir save-dir",
    "data.dataset": "data dataset-name",
    "data.data-dir": "data-path data-root dataset-dir root",
    "data.partition": "split partitioner partitioning partition-type iid non-iid",
    "data.alpha": "dirichlet dirichlet-alpha dir-alpha concentration heterogeneity",
    "data.test-fraction": "test-size test-split test-ratio val-fraction",
    "data.public-dataset": "public public-data proxy-data proxy-dataset",
    "models.pool": "model network net arch architecture architectures backbone",
    "training.local-epochs": "epochs epoch num-epochs local-epoch local-ep",
    "training.batch-size": "batch batchsize bs minibatch local-batch-size local-bs",
    "training.lr": "learning-rate learningrate client-lr local-lr step-size eta",
    "training.optimizer": "optim opt optimiser local-optimizer",
    "training.weight-decay": "wd l2 weightdecay",
    "training.clip": "grad-clip clip-grad gradient-clipping max-norm",
    "training.schedule": "scheduler lr-schedule lr-scheduler",
    "training.decay": "lr-decay gamma",
    "training.augment": "augmentation data-augmentation transform transforms",
    "engine.device": "gpu cuda accelerator",
    "engine.precision": "amp fp16 bf16 half mixed-precision dtype",
    "engine.threads": "num-threads torch-threads",
    "engine.gpus-per-client": "num-gpus gpus",
    "engine.cpus-per-client": "num-cpus cpus",
    "engine.round-timeout": "client-timeout call-timeout",
    "engine.track": "wandb mlflow tracker tracking report-to",
    "pace.drop-outs": "dropouts drop-rate failure-rate",
    "pace.stragglers": "straggler straggler-rate",
    "pace.over-selection": "over-commitment overcommitment overselection",
    "pace.enough": "min-responses k-of-n min-replies quorum",
    "pace.grace": "grace-period wait-time-after-min-received",
    "pace.max-age": "staleness max-staleness",
    "pace.select": "selection client-selection sampler",
    "metrics": "metric",
    "attack.attackers": "malicious byzantine num-attackers num-malicious",
}
MEANT = MappingProxyType({word: name for name, words in _MEANT.items() for word in words.split()})
"""A setting's full name, by another name for it."""
_RECORDS = "a run always writes metrics.jsonl and TensorBoard's files into its directory"
ABSENT = MappingProxyType(
    {
        **dict.fromkeys(("logger", "tensorboard"), _RECORDS),
        "num-workers": "data is decoded once and kept in memory; there are no loader processes",
        "verbose": "Flower's log is in the run's directory, in flower.log",
    }
)
"""Settings of other projects, and what fedhet has instead."""


def meant(name: str, known: Collection[str]) -> str:
    """Return the setting among `known` that another name stands for, or ""."""
    target = MEANT.get(_word(name), "")
    return target if target in known else ""


def instead(name: str) -> str:
    """Return what replaces a setting that does not exist, or ""."""
    return ABSENT.get(_word(name), "")


def _word(name: str) -> str:
    """Return the last part of a name as settings are spelled: `train.num_epochs` is num-epochs."""
    return name.rpartition(".")[2].strip("-").replace("_", "-").lower()
