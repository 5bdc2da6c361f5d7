"""The settings that every run has, whatever its method, declared once, in tables.

Each part of the library reads its own table: the data `DataSettings`, the optimizer
`TrainingSettings`, and devices `ComputeSettings` (in engine.py). At the end: the training settings
that each client is assigned, and the clients with which nobody trains.
"""

from __future__ import annotations

from functools import cache
from math import gcd, lcm
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fedhet.base.metrics import ACCURACY, METRICS
from fedhet.base.seeding import numpy_rng
from fedhet.kinds import AUGMENTATIONS, IMAGE, KINDS
from fedhet.settings.defense import AttackSettings, DefenseSettings, PrivacySettings
from fedhet.settings.engine import EngineSettings, PaceSettings, WireSettings
from fedhet.settings.schema import (
    A_DATASET,
    A_FOLDER,
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
    Range,
    Scalar,
    Schema,
    Side,
    Tokens,
    Vocabulary,
    is_assigned,
    is_machine,
    machine,
    refused,
)

Optimizer = Literal["adam", "adamw", "sgd"]
if TYPE_CHECKING:
    Augmentation = str
    SampleKind = str
else:
    Augmentation = Literal[("none", *AUGMENTATIONS)]
    SampleKind = Literal[("auto", *KINDS)]


class DataSettings(Schema):
    """The data, its partition among clients, and its public and unlabeled parts."""

    dataset: Annotated[str, A_DATASET] = Field(
        "digits",
        description="a dataset's name, or a format and where the data lies, such as npz:DIR, as "
        "`fedhet datasets` lists them",
    )
    sample_kind: SampleKind = Field(
        "auto",
        description="the kind of samples; auto = that of 'dataset'; needed where sites have "
        "folders of their own, of which 'dataset' says nothing",
    )
    data_dir: Annotated[str, A_FOLDER] = machine("data", "the folder of torchvision's datasets")
    download: bool = machine(False, "whether a missing dataset may be downloaded")
    partition: Literal["dirichlet", "iid", "shards", "classes", "superclasses"] = Field(
        "dirichlet", description="how the training set is divided among the clients"
    )
    by: str = Field(
        "",
        description="text:FILE, table:FILE, or signal:DIR with train.npz: the column (array) that "
        "says to whom a sample belongs; each client is one person or site, those with the most "
        "samples first; empty = partitioned by 'partition'",
    )
    alpha: Positive = Field(
        0.5, description="concentration of the Dirichlet distribution; a smaller one is more skewed"
    )
    shards: Count = Field(2, description="partition = shards: shards of each client")
    classes_per_client: Count = Field(2, description="partition = classes: classes of each client")
    superclasses: Literal["cifar100"] | Annotated[tuple[Names, ...], Listed] = Field(
        (),
        description="lists of classes that are joined into superclasses, or cifar100 for those of "
        "CIFAR-100; none = not joined",
    )
    label_space: Range = Field(
        (6, 8), description="partition = superclasses: how many classes a client draws"
    )
    subclasses: Literal["all"] | Range = Field(
        "all", description="how many subclasses of each superclass a client holds; all is IID"
    )
    samples_per_class: Count = Field(
        50, description="partition = superclasses: samples of each class that a client holds"
    )
    min_samples: Count = Field(10, description="minimum number of samples of a client")
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.2,
        description="share of a client's samples held out as its own test split; 0 = none, which "
        "needs a common test set",
    )
    image_size: Side = Field(
        0,
        description="side to which images of imagefolder:DIR and hf:NAME are resized; 0 = not "
        "resized",
    )
    class_level: Annotated[int, Field(ge=0, le=4)] = Field(
        0,
        description="imagefolder:PATH, text:PATH: depth of the directories that name the class, "
        "below PATH or its train and test; 0 = 1, but refused if the tree can be read in two ways",
    )
    text_column: Names = Field(
        ("text",),
        description="the columns of the text, which are joined; numbers from 1 where the file has "
        "no header",
    )
    label_column: str = Field(
        "label", description="the column of the class; a number where the file has no header"
    )
    target: str = Field("", description="table:PATH: the column of the class")
    columns: Names = Field(
        (),
        description="table:PATH: the columns that are features; none = all but target and by",
    )
    categories: Names = Field(
        (),
        description="table:PATH: columns of words as they are written, such as codes; names the "
        "target, or the label column of texts, if its numbers are classes",
    )
    missing: Names = Field(
        (), description="table:PATH: further marks of missing values, such as -999"
    )
    decimal: Literal["auto", "point", "comma"] = Field(
        "auto",
        description="table:PATH: the decimal sign of numbers; auto = as the values show",
    )
    date_order: Literal["auto", "dmy", "mdy"] = Field(
        "auto",
        description="table:PATH: the order of day, month, and year in dates that are not ISO 8601; "
        "auto = as the values show",
    )
    tokenizer: str = Field(
        "words",
        description="words, which are numbered by their hashes; or a folder in $FEDHET_ENCODERS "
        "with the tokenizer.json of an encoder",
    )
    vocabulary: Vocabulary = Field(
        8192, description="tokenizer = words: size of the vocabulary; the same at every site"
    )
    max_tokens: Tokens = Field(
        128, description="maximum number of tokens of a text; the rest is cut off"
    )
    max_bytes: Bytes = machine(
        2 * 2**30,
        "maximum size in bytes of one dataset's arrays, images, texts or table; a larger one is "
        "refused before it is read",
    )
    max_samples: CountOrNone = Field(
        0, description="size of the seeded subset of the training set that is used; 0 = all"
    )
    max_test_samples: CountOrNone = Field(
        0, description="size of the seeded subset of the common test set that is used; 0 = all"
    )
    public_dataset: Annotated[str, A_DATASET] = Field(
        "",
        description="data that no client owns, named as 'dataset' is, generated (tables, texts), "
        "or unused (training samples that max-samples leaves out); empty = public-fraction",
    )
    public_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the training set that is public and no client's; 0 = none, or 0.2 "
        "for a method that needs public data and has no public-dataset",
    )
    public_samples: CountOrNone = Field(
        0, description="size of the seeded subset of public-dataset, or rows to generate; 0 = all"
    )
    labeled_alpha: NonNegative = Field(
        0.0,
        description="concentration of the Dirichlet distribution that divides a client's samples "
        "into labeled and unlabeled ones; 0 = all are labeled, or 0.5 for a method that needs "
        "unlabeled data",
    )
    held_out_clients: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the clients, drawn by the seed, with which nobody trains: after the "
        "last round they judge the model that the method offers them, as it is and after one local "
        "epoch; 0 = none",
    )
    min_labeled: CountOrNone = Field(
        2,
        description="minimum number of labeled and of unlabeled samples of a client; 0 = a "
        "client may lack either",
    )

    @model_validator(mode="after")
    def _public_data_has_one_source(self) -> DataSettings:
        if self.public_dataset and self.public_fraction:
            rule = f"0 with a 'data.public-dataset', which is {self.public_dataset!r}"
            raise refused("data.public-fraction", self.public_fraction, rule)
        return self


class ModelSettings(Schema):
    """The clients' models."""

    pool: Annotated[Names, A_MODEL] = Field(
        IMAGE.pool,
        description="the clients' models, as `fedhet models` lists them; this default, which is "
        "for images, is replaced by one for tables, texts or signals where the data is of that "
        "kind, and by one model for a method whose clients share one: `fedhet methods NAME` says "
        "which",
    )
    assignment: Literal["cycle", "shuffle"] = Field(
        "cycle",
        description="how the pool is assigned to the clients: in turn, or in turn and shuffled",
    )
    num_classes: CountOrNone = Field(
        0,
        description="number of classes; 0 = that of the data; a site with its own folder needs it",
    )


class TrainingSettings(Schema):
    """The clients' training; a server that trains its own model uses the same settings.

    A run may give a list of values for the first four. A client trains with those that
    `training_of` assigns to it, the server with the `first`.
    """

    local_epochs: Annotated[Count, Assigned] = Field(
        5, description="epochs over a client's data in a round"
    )
    batch_size: Annotated[Count, Assigned] = Field(32, description="samples of a minibatch")
    optimizer: Annotated[Optimizer, Assigned] = Field("adam", description="the clients' optimizer")
    lr: Annotated[Positive, Assigned] = Field(1e-3, description="learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of sgd")
    weight_decay: NonNegative = Field(0.0, description="weight decay")
    schedule: Literal["constant", "cosine", "step", "plateau"] = Field(
        "constant",
        description="how the learning rate changes over the rounds; plateau: it falls when the "
        "training loss (of FedGEMS' server, the error on public data) has stopped falling",
    )
    warm_up_rounds: CountOrNone = Field(
        0,
        description="number of first rounds in which the learning rate rises linearly to its full "
        "value",
    )
    milestones: Ascending = Field(
        (),
        description="schedule = step: rounds after which the learning rate falls, ascending; none "
        "= after half and after three quarters of the rounds",
    )
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="schedule = step or plateau: factor by which the learning rate falls"
    )
    patience: CountOrNone = Field(
        10,
        description="schedule = plateau: consecutive rounds without an improvement that are "
        "tolerated; the learning rate falls with the next one",
    )
    clip: NonNegative = Field(
        0.0,
        description="maximum norm of a step's gradient, which is scaled down to it; 0 = no limit",
    )
    augment: Augmentation = Field(
        "none",
        description="random changes to each training image: shifted by up to an eighth with black "
        "borders, mirrored, both, or both and two operations of RandAugment; to each training "
        "text: tokens left out and swapped",
    )
    keep_optimizer: bool = Field(
        False, description="keep the optimizer's state over rounds, with the private models"
    )
    semi: Literal["none", "fixmatch"] = Field(
        "none",
        description="how clients learn from unlabeled images or texts too; fixmatch: what the "
        "model predicts with confidence for a weakly augmented sample is the label of the strongly "
        "augmented one",
    )
    semi_threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.95, description="fixmatch: probability from which a prediction becomes a pseudo-label"
    )
    semi_weight: NonNegative = Field(
        1.0,
        description="fixmatch: weight of the mean loss of unlabeled samples against that of "
        "labeled ones",
    )

    def pools(self) -> dict[str, tuple[Scalar, ...]]:
        """Return the values of the settings that have several, in the order of declaration."""
        found = {k: getattr(self, k) for k, i in type(self).model_fields.items() if is_assigned(i)}
        return {name: values for name, values in found.items() if isinstance(values, tuple)}

    def first(self) -> TrainingSettings:
        """Return the settings with the first value of each."""
        return self.model_copy(update={name: pool[0] for name, pool in self.pools().items()})

    @property
    def follows_rounds(self) -> str:
        """Return the schedule if it depends on the number of the run's rounds, or ""."""
        follows = self.schedule == "cosine" or (self.schedule == "step" and not self.milestones)
        return self.schedule if follows else ""

    def describe(self) -> str:
        """Return a client's training in one line."""
        step = f"{self.optimizer}, lr {self.lr:g}"
        return f"{step}, epochs {self.local_epochs}, batch {self.batch_size}"


class RunSettings(Schema):
    """The settings that every run has, whatever its method."""

    method: Annotated[str, A_METHOD] = Field(
        "felo", description="the method, as `fedhet methods` lists them"
    )
    rounds: Count = Field(10, description="rounds of the federation")
    seed: CountOrNone = Field(0, description="the seed from which every random draw is derived")
    clients: Count = Field(10, description="number of clients")
    fraction: Fraction = Field(1.0, description="share of the clients that is sampled in a round")
    evaluate_every: Count = Field(
        1, description="rounds between evaluations; the last round is always evaluated"
    )
    evaluate_from: Count = machine(
        1, "the first round that may be evaluated, as in tables, which show the last rounds alone"
    )
    early_stopping: CountOrNone = Field(
        0,
        description="consecutive evaluations without an improvement of the headline accuracy after "
        "which one more round is the last; 0 = all rounds",
    )
    keep_best: bool = machine(
        False,
        "whether the clients' models of the round with the best headline accuracy are kept too",
    )
    metrics: Metrics = machine(
        (ACCURACY,),
        f"the metrics of an evaluation: {', '.join(METRICS)} (of each class)",
    )
    out: Annotated[str, A_FOLDER] = machine(
        "", "the run's directory; empty = runs/<method>-<dataset>-s<seed>-<time>"
    )
    resume: bool = machine(
        False, "continue the run in 'out' after its last complete round, if there is one"
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
    def _tables_fit_each_other(self) -> RunSettings:
        if self.resume and not self.out:
            raise refused("resume", True, "the run's directory in 'out'")
        rule = f"'clients', which is {self.clients}"
        if self.attack.kind != "none" and self.attack.attackers >= self.clients:
            raise refused("attack.attackers", self.attack.attackers, f"less than {rule}")
        if self.engine.min_clients > self.clients:
            raise refused("engine.min-clients", self.engine.min_clients, f"at most {rule}")
        return self


PLACE = frozenset({"out", "resume"})
"""Settings that say where a run lies; its config.toml leaves them out."""
ENDS = frozenset({"rounds", "early-stopping"})
"""Settings that say when a run ends; a resumed run may end later than planned."""


@cache
def where_it_ran() -> frozenset[str]:
    """Return the settings that say where and on what a run ran, not what it computes."""
    return frozenset(name for name, info in RunSettings.fields().items() if is_machine(info))


def training_of(run: RunSettings, client: int) -> TrainingSettings:
    """Return what client number `client` trains with: one value of each training setting.

    As `models.assignment` says, values are assigned in turn ("cycle"), or in turn and then shuffled
    by a draw of each setting's own ("shuffle").

    >>> lr = TrainingSettings(lr=[0.1, 0.01])
    >>> run = RunSettings(clients=4, models={"pool": ["mlp", "cnn2"]}, training=lr)
    >>> [training_of(run, client).lr for client in range(4)]
    [0.1, 0.01, 0.01, 0.1]
    """
    chosen, period, client = {}, max(1, len(run.models.pool)), client % run.clients
    for name, values in run.training.pools().items():
        place = client
        if run.models.assignment == "shuffle":
            place = int(numpy_rng(run.seed, "deal", name).permutation(run.clients)[client])
        chosen[name] = values[in_turn(place, len(values), period)]
        period *= len(values)
    return run.training.model_copy(update=chosen)


def held_out_clients(run: RunSettings) -> frozenset[int]:
    """Return the numbers of the held-out clients: a fraction 'data.held-out-clients' of all.

    If the fraction is positive, at least one client is held out, but never all.

    >>> held_out_clients(RunSettings(clients=10, data={"held-out-clients": 0.2}, seed=1))
    frozenset({9, 5})
    """
    return drawn_unseen(run.data.held_out_clients, run.clients, run.seed)


def drawn_unseen(share: float, clients: int, seed: int) -> frozenset[int]:
    """Return the numbers of a share of the clients, as `held_out_clients` does."""
    if not share:
        return frozenset()
    count = min(clients - 1, max(1, round(share * clients)))
    return frozenset(numpy_rng(seed, "unseen").permutation(clients)[:count].tolist())


def in_turn(place: int, size: int, period: int) -> int:
    """Return which of `size` values the client at `place` is assigned, 0 to size - 1.

    Values are assigned in turn, and move on by one where the combinations with what has been
    assigned before, which repeats after `period` clients, would start again: the first
    size * period clients have each combination once, and then all repeats.
    """
    moved = place // lcm(size, period) % gcd(size, period)
    return (place + moved) % size
