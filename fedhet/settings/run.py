"""The settings that every run has, whatever its method, declared once, in tables.

Each part of the library reads its own table: data reads `DataSettings`, the optimiser
`TrainingSettings`, and devices `ComputeSettings` (in engine.py).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fedhet.kinds import AUGMENTATIONS, IMAGE, KINDS
from fedhet.metrics import ACCURACY, METRICS
from fedhet.settings.engine import EngineSettings
from fedhet.settings.schema import (
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
)

Optimizer = Literal["adam", "adamw", "sgd"]
if TYPE_CHECKING:
    SampleKind = str
    Augmentation = str
else:
    SampleKind = Literal[("auto", *KINDS)]
    Augmentation = Literal[("none", *AUGMENTATIONS)]


class DataSettings(Schema):
    """The data, its partition among clients, and its public and unlabelled parts."""

    dataset: str = Field(
        "digits",
        description="a dataset's name, or a format and where the data lies, such as npz:DIR, as "
        "`fedhet datasets` lists them",
    )
    sample_kind: SampleKind = Field(
        "auto",
        description="what a sample is; auto = as 'dataset' says; for sites with folders of their "
        "own, of which 'dataset' says nothing",
    )
    data_dir: str = machine("data", "where torchvision's datasets lie")
    download: bool = machine(False, "may a missing dataset be downloaded?")
    partition: Literal["dirichlet", "iid", "shards", "classes", "superclasses"] = Field(
        "dirichlet", description="how the training set is divided among the clients"
    )
    by: str = Field(
        "",
        description="text:FILE, or signal:DIR with train.npz: the column (array) that says whose a "
        "sample is; each client is one person or site, those with the most samples first; "
        "empty = as 'partition' says",
    )
    alpha: Positive = Field(0.5, description="Dirichlet's concentration; smaller is more skewed")
    shards: Count = Field(2, description="shards a client, for partition = shards")
    classes_per_client: Count = Field(2, description="classes a client, for partition = classes")
    superclasses: Literal["cifar100"] | Annotated[tuple[Names, ...], Listed] = Field(
        (),
        description="lists of classes that are joined into superclasses, or cifar100 for those of "
        "CIFAR-100; none = not joined",
    )
    label_space: Range = Field(
        (6, 8), description="classes that a client draws, for partition = superclasses"
    )
    subclasses: Literal["all"] | Range = Field(
        "all", description="subclasses that a client holds of each superclass; all is IID"
    )
    samples_per_class: Count = Field(
        50, description="samples a client holds of each, for partition = superclasses"
    )
    min_samples: Count = Field(10, description="least samples that a client may be assigned")
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.2,
        description="share of a client's samples kept as its own test split; 0 = none, where there "
        "is a common test set",
    )
    image_size: Side = Field(
        0,
        description="side to which images of imagefolder:DIR and hf:NAME are resized; 0 = as it is",
    )
    text_column: Names = Field(
        ("text",),
        description="the columns of the text, which are joined; numbers from 1 where the file has "
        "no header",
    )
    label_column: str = Field(
        "label", description="the column of the class; a number where the file has no header"
    )
    tokenizer: str = Field(
        "words",
        description="words, each a number by its hash; or the folder in $FEDHET_ENCODERS with the "
        "tokenizer.json of an encoder",
    )
    vocabulary: Vocabulary = Field(
        8192, description="tokenizer = words: numbers that words may have; the same at every site"
    )
    max_tokens: Tokens = Field(128, description="tokens of a text that are read; the rest is cut")
    max_bytes: Bytes = machine(
        2 * 2**30,
        "most bytes that the arrays, images, texts or the table of one dataset may take; more "
        "is refused before it is read",
    )
    max_samples: CountOrNone = Field(
        0, description="train on a seeded subset of this size; 0 = all"
    )
    max_test_samples: CountOrNone = Field(
        0, description="evaluate on a seeded subset of the common test set; 0 = all"
    )
    public_dataset: str = Field(
        "",
        description="data that no client owns, named as 'dataset' is, or generated (tables), or "
        "unused (training samples that max-samples leaves out); empty = public-fraction",
    )
    public_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the training set kept from the clients as public data; 0 = none, or "
        "0.2 for a method that needs it and has no public-dataset",
    )
    public_samples: CountOrNone = Field(
        0, description="a seeded subset of public-dataset, or rows to generate; 0 = all"
    )
    labelled_alpha: NonNegative = Field(
        0.0,
        description="Dirichlet's concentration of each client's labelled and unlabelled share; "
        "0 = all is labelled, or 0.5 for a method that needs unlabelled data",
    )
    labelled_least: CountOrNone = Field(
        2,
        description="least samples of a client's labelled and of its unlabelled part; 0 = a client "
        "may have no labels, or nothing else",
    )

    @model_validator(mode="after")
    def _public_data_has_one_source(self) -> DataSettings:
        if self.public_dataset and self.public_fraction:
            raise ValueError(
                f"setting 'data.public-fraction' = {self.public_fraction} is not allowed: it takes "
                f"0 with a 'data.public-dataset', which is {self.public_dataset!r}"
            )
        return self


class ModelSettings(Schema):
    """The clients' models."""

    pool: Names = Field(
        IMAGE.pool,
        description="the models, as `fedhet models` lists them; left at this default, the pool is "
        "one for tables where the data is a table (texts, signals: likewise), and a method's own "
        "where all its clients must have one model: `fedhet methods NAME` says which",
    )
    assignment: Literal["cycle", "shuffle"] = Field(
        "cycle",
        description="how the pool is assigned to the clients: in turn, or in turn and then "
        "shuffled",
    )
    num_classes: CountOrNone = Field(
        0, description="classes of the task; 0 = as the data has it; a site's own folder needs it"
    )


class TrainingSettings(Schema):
    """The clients' training; a server that trains its own model uses the same settings.

    A run may give a list of values for the first four. What trains has one value of each: a client
    those that `settings.assignment.training_of` assigns to it, the server the `first`.
    """

    local_epochs: Annotated[Count, Assigned()] = Field(
        5, description="epochs over a client's data a round"
    )
    batch_size: Annotated[Count, Assigned()] = Field(32, description="samples a minibatch")
    optimizer: Annotated[Optimizer, Assigned()] = Field(
        "adam", description="the clients' optimiser"
    )
    lr: Annotated[Positive, Assigned()] = Field(1e-3, description="learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of sgd")
    weight_decay: NonNegative = Field(0.0, description="weight decay")
    schedule: Literal["constant", "cosine", "step", "plateau"] = Field(
        "constant",
        description="how the learning rate follows the round; plateau: by 'decay' once the "
        "training loss (of FedGEMS' server, the error on public data) has stopped falling",
    )
    warm_up_rounds: CountOrNone = Field(
        0, description="first rounds, in which the learning rate rises linearly to its full value"
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
        description="schedule = plateau: rounds without an improvement, after which the learning "
        "rate falls with the next",
    )
    clip: NonNegative = Field(
        0.0, description="greatest norm of a step's gradient, which is scaled down to it; 0 = any"
    )
    augment: Augmentation = Field(
        "none",
        description="random changes to each training image: shifted by up to an eighth with black "
        "borders, mirrored, both, or both and two operations of RandAugment; to each training "
        "text: tokens left out and swapped",
    )
    keep_optimizer: bool = Field(
        False, description="keep the optimiser's state over rounds, with the private models"
    )
    semi: Literal["none", "fixmatch"] = Field(
        "none",
        description="learn from unlabelled images or texts too: those that the model is sure of "
        "when they are changed a little are learned changed a lot (FixMatch)",
    )
    semi_threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.95, description="likelihood from which a prediction becomes a pseudo-label"
    )
    semi_weight: NonNegative = Field(
        1.0, description="weight of the unlabelled images' mean loss against that of labelled ones"
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
        """Return what a client trains with, in one line."""
        step = f"{self.optimizer}, lr {self.lr:g}"
        return f"{step}, epochs {self.local_epochs}, batch {self.batch_size}"


class AttackSettings(Schema):
    """Poisoned replies, for experiments on robustness."""

    kind: Literal["none", "paf", "lie", "ofom"] = Field(
        "none", description="how some of the clients' logits or weights are poisoned each round"
    )
    attackers: CountOrNone = Field(
        0, description="clients poisoned a round; 0 = as FedGEMS has it: 1, or 2 for ofom"
    )
    scale: Positive = Field(
        10.0, description="paf, ofom: length of what is added, in lengths of the benign mean"
    )
    direction: Literal["round", "run"] = Field(
        "round",
        description="paf, ofom: is the direction of what is added drawn for each round, or once "
        "for the run?",
    )

    @model_validator(mode="after")
    def _attackers_attack(self) -> AttackSettings:
        if self.attackers and self.kind == "none":
            raise ValueError(
                f"setting 'attack.attackers' = {self.attackers} is not allowed: it takes 0 without "
                "an 'attack.kind'"
            )
        return self


class RunSettings(Schema):
    """The settings that every run has, whatever its method."""

    method: str = Field("felo", description="the method, as `fedhet methods` lists them")
    rounds: Count = Field(10, description="rounds of the federation")
    seed: CountOrNone = Field(0, description="the seed from which every random draw is derived")
    clients: Count = Field(10, description="number of clients")
    fraction: Fraction = Field(1.0, description="share of the clients sampled each round")
    evaluate_every: Count = Field(
        1, description="rounds between evaluations; the last round is always evaluated"
    )
    early_stopping: CountOrNone = Field(
        0,
        description="evaluations running without a rise of the headline accuracy, after which one "
        "more round is the last; 0 = all rounds",
    )
    keep_best: bool = machine(
        False, "keep the clients' models of the round with the best headline accuracy too"
    )
    metrics: Metrics = machine(
        (ACCURACY,),
        f"what is measured of the models in an evaluation: {', '.join(METRICS)} (of each class)",
    )
    out: str = machine("", "the run's directory; empty = runs/<method>-<dataset>-s<seed>-<time>")
    resume: bool = machine(
        False, "continue the run in 'out' after its last complete round, if there is one"
    )
    data: DataSettings = DataSettings()
    models: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    engine: EngineSettings = EngineSettings()
    attack: AttackSettings = AttackSettings()

    @model_validator(mode="after")
    def _a_run_to_resume_is_named(self) -> RunSettings:
        if self.resume and not self.out:
            raise ValueError(
                "setting 'resume' = True is not allowed: it takes the run's directory in 'out'"
            )
        return self

    @model_validator(mode="after")
    def _no_more_than_all_clients(self) -> RunSettings:
        if self.attack.kind != "none" and self.attack.attackers >= self.clients:
            raise ValueError(
                f"setting 'attack.attackers' = {self.attack.attackers} is not allowed: "
                f"it takes less than 'clients', which is {self.clients}"
            )
        if self.engine.min_clients > self.clients:
            raise ValueError(
                f"setting 'engine.min-clients' = {self.engine.min_clients} is not allowed: "
                f"it takes at most 'clients', which is {self.clients}"
            )
        return self


PLACE = frozenset({"out", "resume"})
"""Settings that locate a run; its config.toml leaves them out."""
ENDS = frozenset({"rounds", "early-stopping"})
"""Settings that say when a run ends; a resumed run may end later than planned."""


@cache
def where_it_ran() -> frozenset[str]:
    """Return the settings that define where and on what a run ran, not what it computes."""
    return frozenset(name for name, info in RunSettings.fields().items() if is_machine(info))
