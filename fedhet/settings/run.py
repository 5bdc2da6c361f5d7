"""Settings that every run has, regardless of its method.

Each table is read by one part of the library: for example, `DataSettings` by the data sources and
`TrainingSettings` by the optimizer. `EngineSettings` and `PaceSettings` are declared in engine.py.
The functions at the end assign training settings to clients and select the held-out clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from math import gcd, lcm
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fedhet.base.metrics import ACCURACY, METRICS
from fedhet.base.seeding import numpy_rng
from fedhet.kinds import AUGMENTATIONS, IMAGE, KINDS
from fedhet.settings.defense import AttackSettings, DefenseSettings, PrivacySettings
from fedhet.settings.engine import DRAWN_CLOCK, EngineSettings, PaceSettings, WireSettings
from fedhet.settings.schema import (
    A_DATASET,
    A_DIRECTORY,
    A_METHOD,
    A_MODEL,
    Ascending,
    Assigned,
    Bytes,
    Count,
    CountOrNone,
    Fraction,
    Listed,
    Metrics,
    Names,
    NonNegative,
    Positive,
    Quantiles,
    Range,
    Scalar,
    Schema,
    Side,
    Tokens,
    Vocabulary,
    invalid_setting,
    is_assigned,
    is_machine,
    kebab,
    machine_field,
    plain,
)

Optimizer = Literal["adam", "adamw", "sgd"]
_METRICS: dict[str, list[str]] = {}
for _name, _metric in METRICS.items():
    _each = f" (per {_metric.noun})" if _metric.by_class else ""
    _METRICS.setdefault(_metric.task, []).append(f"{_name}{_each}")
if TYPE_CHECKING:
    Augmentation = str
    SampleKind = str
else:
    Augmentation = Literal[("none", *AUGMENTATIONS)]
    SampleKind = Literal[("auto", *KINDS)]


class DataSettings(Schema):
    """Settings for data, its partition among the clients, and its public and unlabeled parts."""

    dataset: Annotated[str, A_DATASET] = Field(
        "digits",
        description="name of a dataset, or a format with a path, such as npz:DIR (see `fedhet "
        "datasets`)",
    )
    sample_kind: SampleKind = Field(
        "auto",
        description="kind of the samples; auto = the kind of 'dataset'. Required if sites read "
        "tables, texts, or signals from local directories",
    )
    data_dir: Annotated[str, A_DIRECTORY] = machine_field(
        "data", "directory of torchvision datasets"
    )
    download: bool = machine_field(False, "whether to download missing datasets")
    partition: Literal["dirichlet", "iid", "shards", "classes", "superclasses"] = Field(
        "dirichlet",
        description="partitioning scheme that divides the training set among the clients",
    )
    by: str = Field(
        "",
        description="text:FILE, table:FILE, labels.csv, hf:NAME: column with the owner of each "
        "sample; npz:DIR, signal:DIR: array with the owners in train.npz; folder = "
        "imagefolder:PATH, text:PATH: directory above the class directory. Each client gets the "
        "samples of one owner. If there are more owners than clients, the owners with the most "
        "samples are used; empty = use "
        "'partition'",
    )
    alpha: Positive = Field(
        0.5, description="concentration of the Dirichlet distribution; smaller = more skewed"
    )
    shards: Count = Field(2, description="partition = shards: shards per client")
    classes_per_client: Count = Field(2, description="partition = classes: classes per client")
    superclasses: Literal["cifar100"] | Annotated[tuple[Names, ...], Listed] = Field(
        (),
        description="lists of classes that form superclasses, or cifar100 for the superclasses of "
        "CIFAR-100; empty = no superclasses",
    )
    label_space: Range = Field(
        (6, 8), description="partition = superclasses: number of classes per client"
    )
    subclasses: Literal["all"] | Range = Field(
        "all",
        description="partition = superclasses: number of subclasses per superclass and client; all "
        "= IID",
    )
    samples_per_class: Count = Field(
        50, description="partition = superclasses: samples per class and client"
    )
    min_samples: Count = Field(10, description="minimum number of samples per client")
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.2,
        description="fraction of each client's samples held out as a local test split; 0 = none, "
        "which requires a common test set",
    )
    validation_fraction: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = Field(
        "auto",
        description="fraction of each client's training samples held out for validation. Sweeps, "
        "'early-stopping', and 'keep-best' select on these samples; 0 = none, so they select on "
        "test data; auto = 0.1 in sweeps and with 'early-stopping' or 'keep-best', or 0 in other "
        "runs and with differential privacy or secure aggregation",
    )
    image_size: Side = Field(
        0,
        description="imagefolder:DIR, hf:NAME: side length of resized images, in pixels; 0 = no "
        "resizing",
    )
    text_column: Names = Field(
        ("text",),
        description="names of the text columns, or their numbers (from 1) if the file has no "
        "header; the texts of several columns are joined",
    )
    label_column: str = Field(
        "label", description="label column: its name, or its number if the file has no header"
    )
    task: str = Field(
        "auto",
        description=f"{', '.join(_METRICS)}, or a task of an installed package; "
        "auto = classification, or an error if the target has more than 20 different numbers or "
        "lists labels",
    )
    target: str = Field(
        "",
        description="table:PATH, labels.csv: label column, comma-separated target columns, or a "
        "column with lists of labels; texts: the same, but use 'label-column' for "
        "classification; arrays: names of the targets",
    )
    loss: Literal["auto", "squared", "huber", "absolute", "quantile"] = Field(
        "auto",
        description="regression: loss on the standardized targets; auto = squared; quantile = "
        "predict the quantiles in 'quantiles'",
    )
    huber_delta: Positive = Field(
        1.0,
        description="loss = huber: error above which the loss is linear, in standard deviations of "
        "the target",
    )
    quantiles: Quantiles = Field(
        (0.1, 0.5, 0.9),
        description="loss = quantile: ascending levels of the predicted quantiles. The quantile "
        "closest to 0.5 is the prediction; the first and the last quantile form an interval",
    )
    exclude: Names = Field((), description="table:PATH: columns that are not features")
    tokenizer: str = Field(
        "words",
        description="tokenizer of texts: words (a hash of each word), or a directory in "
        "$FEDHET_ENCODERS with the tokenizer.json of an encoder",
    )
    vocabulary: Vocabulary = Field(
        8192, description="tokenizer = words: vocabulary size; must be the same at every site"
    )
    max_tokens: Tokens = Field(
        128, description="maximum number of tokens per text; longer texts are truncated"
    )
    max_bytes: Bytes = machine_field(
        2 * 2**30,
        "maximum size of a dataset in memory, in bytes; a larger dataset is rejected before it is "
        "loaded",
    )
    max_samples: CountOrNone = Field(
        0, description="number of samples drawn from the training set; 0 = all"
    )
    max_test_samples: CountOrNone = Field(
        0, description="number of samples drawn from the common test set; 0 = all"
    )
    public_dataset: Annotated[str, A_DATASET] = Field(
        "",
        description="public data, which no client owns: a value as for 'dataset', generated "
        "(tables and texts), or unused (training samples that 'max-samples' does not select); "
        "empty = use 'public-fraction'",
    )
    public_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="fraction of the training set reserved as public data; 0 = none, or 0.2 if the "
        "method needs public data and 'public-dataset' is empty",
    )
    public_samples: CountOrNone = Field(
        0,
        description="number of public samples drawn from 'public-dataset' or generated; 0 = all",
    )
    labeled_alpha: NonNegative = Field(
        0.0,
        description="concentration of the Dirichlet distribution that splits each client's samples "
        "into labeled and unlabeled; 0 = all labeled, or 0.5 if the method needs unlabeled data",
    )
    label_noise: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="classification, in simulations: probability that a client's training label is "
        "replaced by another class at random; 0 = no wrong labels",
    )
    held_out_clients: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="fraction of clients held out from training; after the last round, they "
        "evaluate the method's model for new clients, before and after one local epoch; 0 = none",
    )
    min_labeled: CountOrNone = Field(
        2,
        description="minimum number of labeled samples and of unlabeled samples per client; 0 = no "
        "minimum",
    )

    @property
    def validation(self) -> float:
        """Validation fraction, where "auto", which `config.resolve` replaces, counts as 0."""
        return 0.0 if self.validation_fraction == "auto" else self.validation_fraction

    @model_validator(mode="after")
    def _check_together(self) -> DataSettings:
        if self.public_dataset and self.public_fraction:
            expected = f"0 with 'data.public-dataset' = {self.public_dataset!r}"
            raise invalid_setting("data.public-fraction", self.public_fraction, expected)
        for loss, name in (("huber", "huber_delta"), ("quantile", "quantiles")):
            value = getattr(self, name)
            if self.loss != loss and value != type(self).model_fields[name].default:
                given = f"with 'data.{kebab(name)}' = {plain(value)}"
                raise invalid_setting("data.loss", self.loss, f"{loss!r} {given}")
        return self


class ModelSettings(Schema):
    """Settings for the clients' models."""

    pool: Annotated[Names, A_MODEL] = Field(
        IMAGE.pool,
        description="models to assign to the clients (see `fedhet models`). The default is for "
        "images; `fedhet methods NAME` shows a method's defaults for all kinds of data",
    )
    assignment: Literal["cycle", "shuffle"] = Field(
        "cycle",
        description="assignment of models to clients: in turn (cycle), or in turn and then "
        "shuffled (shuffle)",
    )
    num_classes: CountOrNone = Field(
        0,
        description="number of classes; 0 = taken from the data. Required if sites read their data "
        "from local directories",
    )


class TrainingSettings(Schema):
    """Settings for local training. A server that trains a model also uses these settings.

    The first four settings accept a list of values. Each client uses the values that `training_of`
    assigns to it, and the server uses the first value in each list.
    """

    local_epochs: Annotated[Count, Assigned] = Field(
        5, description="number of local training epochs per round"
    )
    batch_size: Annotated[Count, Assigned] = Field(32, description="minibatch size")
    optimizer: Annotated[Optimizer, Assigned] = Field("adam", description="optimizer")
    lr: Annotated[Positive, Assigned] = Field(1e-3, description="learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of SGD")
    weight_decay: NonNegative = Field(0.0, description="weight decay")
    schedule: Literal["constant", "cosine", "step", "plateau"] = Field(
        "constant",
        description="learning rate schedule over the rounds; plateau = reduce the rate when the "
        "training loss (on FedGEMS' server, the error on public data) stops decreasing",
    )
    warm_up_rounds: CountOrNone = Field(
        0,
        description="number of initial rounds with linear warm-up of the learning rate",
    )
    milestones: Ascending = Field(
        (),
        description="schedule = step: ascending list of rounds after which the learning rate is "
        "reduced; empty = after 1/2 and 3/4 of the rounds",
    )
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="schedule = step, plateau: factor by which the learning rate is multiplied"
    )
    patience: CountOrNone = Field(
        10,
        description="schedule = plateau: number of consecutive rounds without improvement before "
        "the learning rate is reduced",
    )
    clip: NonNegative = Field(
        0.0,
        description="maximum norm of the gradient (gradient clipping); 0 = no clipping",
    )
    augment: Augmentation = Field(
        "none",
        description="augmentation of training samples. crop: translation of images by up to 1/8 "
        "of their size, with black borders; flip: horizontal flip; randaugment: crop, flip, and "
        "two RandAugment operations; tokens: random deletion and swaps of tokens",
    )
    keep_optimizer: bool = Field(
        False, description="whether to keep the optimizer state of private models across rounds"
    )
    semi: Literal["none", "fixmatch"] = Field(
        "none",
        description="semi-supervised learning from unlabeled images or texts; fixmatch = confident "
        "predictions for weakly augmented samples become labels of strongly augmented samples",
    )
    semi_threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.95, description="fixmatch: minimum probability of a pseudo-label"
    )
    semi_weight: NonNegative = Field(
        1.0,
        description="fixmatch: weight of the mean loss on unlabeled samples, relative to the "
        "loss on labeled samples",
    )

    def pools(self) -> dict[str, tuple[Scalar, ...]]:
        """Return the lists of values to assign to clients, in the order of declaration."""
        names = [name for name, info in type(self).model_fields.items() if is_assigned(info)]
        values = {name: getattr(self, name) for name in names}
        return {name: pool for name, pool in values.items() if isinstance(pool, tuple)}

    def first(self) -> TrainingSettings:
        """Return the server's settings: a copy with the first value of each list."""
        return self.model_copy(update={name: pool[0] for name, pool in self.pools().items()})

    @property
    def follows_rounds(self) -> str:
        """Name of the schedule if it depends on the total number of rounds, otherwise ""."""
        follows = self.schedule == "cosine" or (self.schedule == "step" and not self.milestones)
        return self.schedule if follows else ""

    def describe(self) -> str:
        """Return a one-line description of a client's training."""
        step = f"{self.optimizer}, lr {self.lr:g}"
        return f"{step}, epochs {self.local_epochs}, batch {self.batch_size}"


class RunSettings(Schema):
    """Settings that every run has, regardless of its method."""

    method: Annotated[str, A_METHOD] = Field(
        "felo", description="method to run (see `fedhet methods`)"
    )
    rounds: Count = Field(10, description="number of rounds")
    seed: CountOrNone = Field(0, description="seed for all random draws")
    clients: Count = Field(10, description="number of clients")
    fraction: Fraction = Field(1.0, description="fraction of clients sampled per round")
    evaluate_every: Count = Field(
        1, description="evaluation interval, in rounds; the last round is always evaluated"
    )
    evaluate_from: Count = machine_field(
        1, "first round to evaluate, for tables that show only the last rounds"
    )
    early_stopping: CountOrNone = Field(
        0,
        description="patience of early stopping: number of consecutive evaluations without "
        "improvement of the headline metric on validation data ('data.validation-fraction'), after "
        "which the run ends with one more round; 0 = no early stopping",
    )
    keep_best: bool = machine_field(
        False,
        "whether to also keep the client models from the round with the best headline metric on "
        "validation data ('data.validation-fraction')",
    )
    metrics: Metrics = machine_field(
        (ACCURACY,),
        "evaluation metrics; accuracy = the default metrics of the task. "
        + "; ".join(f"{task}: {', '.join(names)}" for task, names in _METRICS.items()),
    )
    out: Annotated[str, A_DIRECTORY] = machine_field(
        "", "run directory; empty = runs/<method>-<dataset>-s<seed>-<time>"
    )
    resume: bool = machine_field(
        False, "whether to resume an existing run in 'out' after its last complete round"
    )
    data: DataSettings = DataSettings()
    models: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    pace: PaceSettings = PaceSettings()
    engine: EngineSettings = EngineSettings()
    attack: AttackSettings = AttackSettings()
    defense: DefenseSettings = DefenseSettings()
    privacy: PrivacySettings = PrivacySettings()
    wire: WireSettings = WireSettings()

    @model_validator(mode="after")
    def _check_tables(self) -> RunSettings:
        attackers, min_clients = self.attack.attackers, self.engine.min_clients
        limit = f"'clients' = {self.clients}"
        if self.resume and not self.out:
            raise invalid_setting("resume", True, "the run directory in 'out'")
        if self.attack.kind != "none" and attackers >= self.clients:
            raise invalid_setting("attack.attackers", attackers, f"less than {limit}")
        if min_clients > self.clients:
            raise invalid_setting("engine.min-clients", min_clients, f"at most {limit}")
        return self


def _evaluations(run: RunSettings) -> int:
    """Return the number of evaluated rounds; the last round is always evaluated."""
    every, first = run.evaluate_every, max(run.evaluate_from, 1)
    due = run.rounds // every - (first - 1) // every if first <= run.rounds else 0
    return due + (run.rounds % every != 0 or first > run.rounds)


EFFECTIVE_IF: Mapping[str, tuple[str, Callable[[RunSettings], bool]]] = {
    "fraction": ("with several clients", lambda run: run.clients > 1),
    "early-stopping": (
        "with more evaluations than its value", lambda run: run.early_stopping < _evaluations(run)
    ),
    "keep-best": ("with several evaluations", lambda run: _evaluations(run) > 1),
    "models.assignment": (
        "with several models or training settings",
        lambda run: len(run.models.pool) > 1 or bool(run.training.pools()),
    ),
    **dict.fromkeys(
        ("engine.cpus-per-client", "engine.gpus-per-client"),
        ("if 'engine.backend' is not inline", lambda run: run.engine.backend != "inline"),
    ),
    "data.partition": ("without 'data.by'", lambda run: not run.data.by),
    "data.alpha": (
        "if 'data.partition' is dirichlet, and without 'data.by'",
        lambda run: run.data.partition == "dirichlet" and not run.data.by,
    ),
    "data.shards": (
        "if 'data.partition' is shards, and without 'data.by'",
        lambda run: run.data.partition == "shards" and not run.data.by,
    ),
    "data.classes-per-client": (
        "if 'data.partition' is classes, and without 'data.by'",
        lambda run: run.data.partition == "classes" and not run.data.by,
    ),
    **dict.fromkeys(
        ("data.label-space", "data.subclasses", "data.samples-per-class"),
        (
            "if 'data.partition' is superclasses, and without 'data.by'",
            lambda run: run.data.partition == "superclasses" and not run.data.by,
        ),
    ),
    "data.public-samples": (
        "with 'data.public-dataset'", lambda run: bool(run.data.public_dataset)
    ),
    "data.min-labeled": ("with unlabeled data", lambda run: run.data.labeled_alpha > 0),
    "training.momentum": (
        "if 'training.optimizer' is sgd", lambda run: "sgd" in plain(run.training.optimizer)
    ),
    **dict.fromkeys(
        ("training.schedule", "training.keep-optimizer"),
        ("with several rounds", lambda run: run.rounds > 1),
    ),
    "training.milestones": (
        "if 'training.schedule' is step", lambda run: run.training.schedule == "step"
    ),
    "training.decay": (
        "if 'training.schedule' is step or plateau",
        lambda run: run.training.schedule in ("step", "plateau"),
    ),
    "training.patience": (
        "if 'training.schedule' is plateau", lambda run: run.training.schedule == "plateau"
    ),
    **dict.fromkeys(
        ("training.semi-threshold", "training.semi-weight"),
        ("with 'training.semi'", lambda run: run.training.semi != "none"),
    ),
    "pace.over-selection": (
        "if not all clients are sampled ('fraction')", lambda run: run.fraction < 1
    ),
    "pace.grace": (
        "with fewer replies ('pace.min-replies')", lambda run: run.pace.min_replies != 1
    ),
    "pace.max-age": ("if replies can be late", lambda run: run.pace.may_be_late),
    **dict.fromkeys(
        ("pace.spread", "pace.sample-ms", "pace.mbit"),
        ("if 'pace.clock' is log-normal", lambda run: run.pace.clock == DRAWN_CLOCK),
    ),
    "pace.slowdown": ("with 'pace.stragglers'", lambda run: run.pace.stragglers > 0),
    **dict.fromkeys(
        ("attack.scale", "attack.direction"),
        ("with 'attack.kind'", lambda run: run.attack.kind != "none"),
    ),
    "defense.malicious-fraction": (
        "with a robust 'defense.average'", lambda run: run.defense.average != "mean"
    ),
    **dict.fromkeys(
        ("privacy.delta", "privacy.max-grad-norm", "privacy.class-clip"),
        ("with 'privacy.epsilon' or 'privacy.noise-multiplier'", lambda run: run.privacy.is_on),
    ),
    "wire.keep": ("if 'wire.encoding' is top-k", lambda run: run.wire.encoding == "top-k"),
}  # fmt: skip
"""Settings that have no effect in some runs: when they have an effect, as text and as a test.

A run notes each such setting whose value is not the default. Values that contradict another setting
are errors instead: see the validators of each table, and `fedhet.config.resolve`."""


def without_effect(run: RunSettings, *, has_scores: bool) -> list[str]:
    """Return a message for each changed setting that has no effect in a run.

    `has_scores` tells whether the run can measure any score of a model.
    """
    values, fields = run.flat(), RunSettings.fields()
    unused = {
        name: when
        for name, (when, is_effective) in EFFECTIVE_IF.items()
        if not is_effective(run) and values[name] != plain(fields[name].default)
    }
    if not has_scores:
        evaluating = ("early-stopping", "keep-best", "evaluate-every", "evaluate-from")
        changed = [name for name in evaluating if values[name] != fields[name].default]
        unused |= dict.fromkeys(changed, "with scores, which this run does not have")
    return [
        f"'{name}' = {json.dumps(values[name])} has no effect: it applies only {when}"
        for name, when in unused.items()
    ]


PLACE = frozenset({"out", "resume"})
"""Settings that locate a run's directory; config.toml does not store them."""
ENDS = frozenset({"rounds", "early-stopping"})
"""Settings that determine the last round; a resumed run may change them."""


@cache
def where_it_ran() -> frozenset[str]:
    """Return the names of the settings declared with `machine_field`."""
    return frozenset(name for name, info in RunSettings.fields().items() if is_machine(info))


def training_of(run: RunSettings, client: int) -> TrainingSettings:
    """Return the training settings of client number `client`, with one value for each setting.

    If `models.assignment` is "cycle", clients cycle through the values of each setting. If it is
    "shuffle", the result is also shuffled, independently for each setting.

    >>> lr = TrainingSettings(lr=[0.1, 0.01])
    >>> run = RunSettings(clients=4, models={"pool": ["mlp", "cnn2"]}, training=lr)
    >>> [training_of(run, client).lr for client in range(4)]
    [0.1, 0.01, 0.01, 0.1]
    """
    assigned, period, client = {}, max(1, len(run.models.pool)), client % run.clients
    for name, values in run.training.pools().items():
        place = client
        if run.models.assignment == "shuffle":
            place = int(numpy_rng(run.seed, "deal", name).permutation(run.clients)[client])
        assigned[name] = values[cyclic_index(place, len(values), period)]
        period *= len(values)
    return run.training.model_copy(update=assigned)


def held_out_clients(run: RunSettings) -> frozenset[int]:
    """Return the indices of the held-out clients, as set by 'data.held-out-clients'.

    If the fraction is positive, at least one client is held out, but never all of them.

    >>> held_out_clients(RunSettings(clients=10, data={"held-out-clients": 0.2}, seed=1))
    frozenset({9, 5})
    """
    return draw_held_out(run.data.held_out_clients, run.clients, run.seed)


def draw_held_out(fraction: float, clients: int, seed: int) -> frozenset[int]:
    """Draw the indices of the held-out clients, a fraction `fraction` of all `clients`."""
    if not fraction:
        return frozenset()
    count = min(clients - 1, max(1, round(fraction * clients)))
    return frozenset(numpy_rng(seed, "unseen").permutation(clients)[:count].tolist())


def cyclic_index(place: int, size: int, period: int) -> int:
    """Return the index, from 0 to size - 1, of the value assigned to the client at `place`.

    Clients cycle through the values. The values of the previously assigned settings repeat after
    `period` clients, so the cycle is shifted by one whenever the same combinations would start
    again. The first size * period clients thus have each combination exactly once.
    """
    shift = place // lcm(size, period) % gcd(size, period)
    return (place + shift) % size
