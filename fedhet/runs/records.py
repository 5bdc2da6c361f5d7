"""Schemas of a run's files, mainly metrics.jsonl (one record per round) and summary.json.

Unknown fields in a file are ignored. NaN is written as null, because JSON does not support NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Self

import pydantic.dataclasses
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from fedhet.base.errors import one_line
from fedhet.base.metrics import ACCURACY, MAX_CONFUSION
from fedhet.runs.units import position

if TYPE_CHECKING:
    from fedhet.methods.spec import MethodSpec

LARGEST = 1e18
"""Largest permitted number in a run's files. It exceeds any sum of values that clients may
report."""
ByPlace = dict[str, dict[str, dict[str, Annotated[float, Field(ge=-LARGEST, le=LARGEST)]]]]
"""Values by protocol ("personal", "common"), kind ("private", "proxy", …), and client."""
ByMetric = dict[str, ByPlace]
"""Values by metric, protocol, kind, and client."""

PERSONAL, COMMON = "personal", "common"
PROTOCOLS = (PERSONAL, COMMON)
"""Protocols, i.e. test sets: a client's personal test split, and the test set common to all
clients."""
VALIDATION = "validation"
"""Protocol of the samples that a client holds out from training. Sweeps, early stopping, and
`keep-best` select on their scores."""
EVALUATED = (*PROTOCOLS, VALIDATION)
"""All protocols under which models are evaluated."""
HELD_OUT, HELD_OUT_EPOCH = "unseen", "unseen-epoch"
"""Kinds of models offered to held-out clients: unchanged, and after one local epoch."""
KINDS = ("private", "local", "proxy", "ensemble", "global", "server", HELD_OUT, HELD_OUT_EPOCH)
"""Kinds of models; `local` is the private model before any exchange of knowledge."""
MAX_ROUNDS = 1_000_000
NAN = float("nan")
READING = ConfigDict(extra="ignore", coerce_numbers_to_str=True)


def _or_nan(value: object) -> object:
    is_infinite = isinstance(value, float) and math.isinf(value)
    return NAN if value is None or is_infinite else value


def _bounded(value: float) -> float:
    if abs(value) > LARGEST:
        raise ValueError(f"magnitude must be at most {LARGEST:g}, got {value:g}")
    return value


def _numbers(values: object) -> object:
    """Drop strings and tables from metrics, because other versions of fedhet may record them."""
    if not isinstance(values, Mapping):
        return values
    return {key: each for key, each in values.items() if not isinstance(each, str | dict | list)}


Number = Annotated[float, BeforeValidator(_or_nan), AfterValidator(_bounded)]
MAX_BYTES = 2**63 - 1
Integer = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Round = Annotated[int, Field(ge=0, le=MAX_ROUNDS)]
Text = Annotated[str, AfterValidator(one_line)]
"""Untrusted text, converted to one printable line."""
Metrics = Annotated[dict[Text, Number], BeforeValidator(_numbers)]


class Score(BaseModel):
    """Values of all clients, with mean, standard deviation and worst value."""

    model_config = READING | ConfigDict(frozen=True)

    mean: Number = NAN
    std: Number = NAN
    worst: Number = NAN
    per_client: dict[Text, Number] = {}


class FinalScore(Score):
    """Scores in the last round, with the mean over the last fifth of the rounds."""

    tail: Number = NAN
    """Mean over the last fifth of the rounds (see `fedhet.runs.measures.tail_of`)."""
    clients: Integer = 0
    """Number of clients in the mean; 0 for a server model."""


class Ratio(Score):
    """Ratio of each client's accuracy to its accuracy after only local training."""

    best: Number = NAN


Scores = dict[Text, dict[Text, Score]]
"""Scores of the clients' models, by protocol and kind."""
FinalScores = dict[Text, dict[Text, FinalScore]]
Loss = Annotated[
    Score | None,
    BeforeValidator(lambda loss: loss or None),
    PlainSerializer(lambda loss: loss.model_dump() if loss else {}),
]
"""Training losses, or None (written as {}) if no client reported a loss."""


class Headline(BaseModel):
    """Protocol and kinds of models whose scores represent a method.

    All displays and comparisons use `column`. Selections by score use `selection`.
    """

    model_config = READING | ConfigDict(frozen=True)

    protocol: Text = "common"
    kinds: dict[Text, Text] = {}
    """Kind of the deployed model, by protocol; the default is `private`."""

    @classmethod
    def declared_by(cls, spec: MethodSpec) -> Self:
        """Return the headline that a method declares."""
        return cls(protocol=spec.headline, kinds=dict(spec.deployed))

    def ordered_protocols(self, evaluated: Iterable[str]) -> tuple[str, ...]:
        """Sort protocols, with the declared protocol first and the validation samples last."""
        order = [self.protocol, *reversed(PROTOCOLS)]
        return tuple(sorted(evaluated, key=lambda name: position(name, order)))

    def ordered_kinds(self, protocol: str, evaluated: Iterable[str]) -> tuple[str, ...]:
        """Sort kinds of models, with the deployed model first and the initial model last.

        On validation samples, the deployed model is the model of the declared test set.
        """
        protocol = self.protocol if protocol == VALIDATION else protocol
        order = [self.kinds.get(protocol, "private"), *KINDS]
        return tuple(sorted(evaluated, key=lambda kind: (kind == "local", position(kind, order))))

    def column(self, evaluated: Mapping[str, Iterable[str]]) -> tuple[str, str] | None:
        """Return the protocol and the kind of the headline score, or None without scores.

        Args:
            evaluated: Evaluated kinds, by protocol. If the declared protocol or the deployed model
                was not evaluated, the next protocol or kind replaces it.
        """
        tests = (name for name in evaluated if evaluated[name] and name != VALIDATION)
        for protocol in self.ordered_protocols(tests):
            return protocol, self.ordered_kinds(protocol, evaluated[protocol])[0]
        return None

    def selection(self, evaluated: Mapping[str, Iterable[str]]) -> tuple[str, str] | None:
        """Return the protocol and the kind of the score on which rounds and runs are selected.

        The result is `column` if no validation samples were evaluated.
        """
        if kinds := evaluated.get(VALIDATION):
            return VALIDATION, self.ordered_kinds(VALIDATION, kinds)[0]
        return self.column(evaluated)


class Seconds(BaseModel):
    """Duration of each stage, in seconds.

    `train` and `evaluate` are sums over clients; all other durations are wall time.
    """

    model_config = READING

    total: Number = 0.0
    train: Number = 0.0
    evaluate: Number = 0.0
    server: Number = 0.0
    overhead: Number = 0.0

    def add(self, other: Seconds) -> None:
        """Add the durations in `other` to this object."""
        for name, value in other:
            setattr(self, name, getattr(self, name) + value)

    def rounded(self) -> Self:
        """Return a copy rounded to milliseconds, with each time limited to LARGEST."""
        return type(self)(**{name: round(min(value, LARGEST), 3) for name, value in self})


class RunSeconds(Seconds):
    """Duration of each stage of a run, in seconds.

    `total` is measured from the start of the command, and includes the time before the first round.
    """

    start: Number = NAN
    """Part of `total` before the first round or, in a resumed run, before the next round."""


@pydantic.dataclasses.dataclass(config=READING)
class RoundRecord:
    """Record of a round, filled in during the round and stored as one line in metrics.jsonl."""

    round: Round
    asked: list[Text] = field(default_factory=list)
    """Clients sampled for training."""
    answered: list[Text] = field(default_factory=list)
    """Clients whose replies were accepted."""
    failed: dict[Text, Text] = field(default_factory=dict)
    """Reason for a client's failure, by client."""
    unevaluated: dict[Text, Text] = field(default_factory=dict)
    """Reason why a client's models could not be evaluated, by client."""
    late: list[Text] = field(default_factory=list)
    """Clients that had not replied when the round closed."""
    ages: dict[Text, Round] = field(default_factory=dict)
    """Age in rounds of each late reply that was accepted in this round, by client."""
    clock: Number = NAN
    """Simulated seconds since the start of the run; NaN without a simulated clock."""
    absent: list[Text] = field(default_factory=list)
    """Registered clients that were not connected at the start of the round."""
    accuracy: Scores = field(default_factory=dict)
    relative: dict[Text, Ratio] = field(default_factory=dict)
    """Ratios of private to local accuracy, by protocol."""
    majority: dict[Text, dict[Text, Number]] = field(default_factory=dict)
    """Headline score of a constant prediction (the most frequent class or the mean target), by
    protocol and client."""
    tested: dict[Text, dict[Text, Count]] = field(default_factory=dict)
    """Number of test samples, by protocol and client. `server` is the server's name."""
    metrics: dict[Text, Scores] = field(default_factory=dict)
    """Scores other than accuracy, by metric."""
    loss: Loss = None
    """Training losses of the clients."""
    bytes_up: Integer = 0
    bytes_down: Integer = 0
    bytes_evaluation: Integer = 0
    """Bytes of models sent for evaluation; `evaluate-every` can reduce this number."""
    epochs: Number = NAN
    """Passes over own labeled samples, summed over the clients; NaN if no client reported any."""
    seconds: Seconds = field(default_factory=Seconds)
    method: Metrics = field(default_factory=dict)
    """Metrics of the method in this round."""
    peak_memory_mb: Number = 0.0
    """Highest memory usage reported by a client's process so far, in MB."""
    epsilon: dict[Text, Number] = field(default_factory=dict)
    """Privacy budget consumed by the run so far, for each client with differential privacy."""

    @property
    def scores(self) -> dict[str, Scores]:
        """Scores by metric, with the headline metric first."""
        return {ACCURACY: self.accuracy, **self.metrics} if self.accuracy else self.metrics

    @property
    def metric(self) -> str:
        """Name of the headline metric: accuracy, or the first metric if there is no accuracy."""
        return next(iter(self.scores), ACCURACY)

    def each(self, metric: str = ACCURACY) -> Iterator[tuple[str, str, Score]]:
        """Yield (protocol, kind, score) for each score of a metric."""
        for protocol, kinds in self.scores.get(metric, {}).items():
            for kind, score in kinds.items():
                yield protocol, kind, score

    def score(self, metric: str, protocol: str, kind: str) -> Score | None:
        """Return the score for a metric, protocol and kind, or None if it was not evaluated."""
        return self.scores.get(metric, {}).get(protocol, {}).get(kind)

    def set_scores(self, metric: str, scores: Scores) -> None:
        """Set the scores for a metric. Empty scores are set only for the accuracy."""
        if metric == ACCURACY:
            self.accuracy = scores
        elif scores:
            self.metrics[metric] = scores


class PastRound(BaseModel):
    """Round in a summary's history, with mean accuracies, bytes and duration."""

    model_config = READING

    round: Round
    accuracy: dict[Text, dict[Text, Number]] = {}
    """Mean accuracy by protocol and kind."""
    metrics: dict[Text, dict[Text, dict[Text, Number]]] = {}
    """Means of the headline metric if it is not the accuracy, by metric, protocol and kind."""
    bytes_up: Integer = 0
    bytes_down: Integer = 0
    seconds: Number = NAN
    clock: Number = NAN
    """Simulated seconds since the start of the run; NaN (null) without a simulated clock."""

    @classmethod
    def from_record(cls, record: RoundRecord) -> PastRound:
        """Create the history entry of a round."""
        metric = record.metric
        means = {
            protocol: {kind: scores.mean for kind, scores in kinds.items()}
            for protocol, kinds in record.scores.get(metric, {}).items()
        }
        others = {} if metric == ACCURACY else {metric: means}
        return cls(
            round=record.round, accuracy={} if others else means, metrics=others,
            bytes_up=record.bytes_up,
            bytes_down=record.bytes_down, seconds=round(record.seconds.total, 3),
            clock=record.clock,
        )  # fmt: skip


class ConsumedBudget(BaseModel):
    """Privacy budget (epsilon at delta) that a run has consumed for a client."""

    model_config = READING

    epsilon: Number = NAN
    delta: Number = NAN


class Summary(BaseModel):
    """Summary of a finished run (summary.json), with the scores in the last round."""

    model_config = READING

    method: Text
    dataset: Text
    seed: Integer
    rounds: Round
    clients: Integer = 0
    models: dict[Text, Text] = {}
    """Model of each client, by client name."""
    owners: dict[Text, Text] = {}
    """Person or site that each simulated client represents, if known."""
    training: dict[Text, Text] = {}
    """Optimizer, learning rate, epochs and batch size of each client, as text."""
    test_samples: dict[Text, Count] = {}
    """Number of test samples by protocol, or empty if the sites have their own data. The numbers
    for "personal" and "validation" are sums over all clients."""
    headline: Text = ""
    """Protocol of the method's headline score."""
    headline_kinds: dict[Text, Text] = {}
    """Kind of the model to which the headline score belongs, by evaluated protocol."""
    metric: Text = ""
    """Headline metric, or "" for accuracy."""
    accuracy: FinalScores = {}
    relative: dict[Text, Ratio] = {}
    metrics: dict[Text, FinalScores] = {}
    """Scores other than accuracy, by metric."""
    privacy: dict[Text, ConsumedBudget] = {}
    """Consumed privacy budget of each client with differential privacy."""
    history: list[PastRound] = []
    bytes_up: Integer = 0
    bytes_down: Integer = 0
    bytes_evaluation: Integer = 0
    """Bytes of models sent for evaluation."""
    seconds: RunSeconds = RunSeconds()
    peak_memory_mb: Number = NAN
    """Highest memory usage of any server or client process, in MB."""
    versions: dict[Text, Text] = {}
    commit: Text = ""
    """Commit of fedhet's source code, with "+" if files have changed; empty for an installed
    package."""
    hardware: dict[Text, Text] = {}
    """Names of the processor ("cpu") and, if it was used, of the GPU ("gpu") of the server's or the
    simulation's machine."""

    @property
    def scores(self) -> dict[str, FinalScores]:
        """Scores by metric, with the headline metric first."""
        return self.metrics if self.metric else {ACCURACY: self.accuracy, **self.metrics}

    @property
    def last_round(self) -> int:
        """Number of the last round in the history."""
        return max((past.round for past in self.history), default=self.rounds)


OWN_DATA = "the sites' own data"
"""Name of the dataset if the clients read their own data."""


class Origin(BaseModel):
    """Name and origin of a run (run.json)."""

    model_config = READING

    run: Text = ""
    """Name of the run, as used in messages."""
    deployed: bool = False
    """Whether the run was deployed over a network rather than simulated."""
    started: Text = ""
    """Time of the first start in UTC, such as 2026-11-23 18:40."""
    own_data: bool = False
    """Whether the clients read their own data instead of partitions of the run's dataset."""
    models: dict[Text, Text] = {}
    """Models of the clients that have joined so far, for runs without a summary."""
    classes: list[Text] = []
    """Class names, or empty if the server does not know them."""
    fault: Text = ""
    """Reason for the failure of the run, or "" if the run has not failed."""
    headline: Headline | None = None
    """Headline that the method declares."""


class Partition(BaseModel):
    """Samples of the clients by class, their owners, and facts of the dataset (partition.json)."""

    model_config = READING

    classes: list[Text]
    counts: dict[Text, list[Count]]
    owners: dict[Text, Text] = {}
    """Person or site of each client, e.g. from the column `data.by`; empty if unknown."""
    test_samples: dict[Text, Count] = {}
    """Number of test samples by protocol; for "personal" and "validation", the sum over all
    clients."""
    digest: Text = ""
    """Digest of the dataset (see `RunData.digest`), or "" if an older version wrote the file."""
    places: dict[Text, Text] = {}
    """Absolute values of the settings that locate the data, such as `data.dataset`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for client, row in self.counts.items():
            if len(row) != len(self.classes):
                raise ValueError(
                    f"counts.{client}: expected {len(self.classes)} counts, got {len(row)}"
                )
        return self


class ConfusionMatrix(BaseModel):
    """Confusion matrix of one or several models on the common test set."""

    model_config = READING

    model: Text = ""
    """Architecture, or "" for the server's own model."""
    clients: list[Text] = []
    """Clients whose models the matrix describes, or `["server"]`."""
    samples: Count
    """Number of predictions, including predictions that are not finite and thus not counted."""
    counts: list[list[Count]]
    """Number of samples of each true class (row) and predicted class (column), [C, C]."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.counts) > MAX_CONFUSION:
            raise ValueError(f"counts: expected at most {MAX_CONFUSION} rows")
        if any(len(row) != len(self.counts) for row in self.counts):
            raise ValueError(f"counts: expected {len(self.counts)} columns in each row")
        return self


class GeneratedText(BaseModel):
    """Beginning of a test text, and its continuation by a language model."""

    model_config = READING

    prompt: str
    text: str


class Generated(BaseModel):
    """Texts generated by a client's language model after the last round (generated.json)."""

    model_config = READING

    client: Text
    kind: Text
    protocol: Text
    """Test set from which the prompts are taken."""
    texts: list[GeneratedText]


class Confusion(BaseModel):
    """Confusion matrices of a run's headline models after the last round (confusion.json)."""

    model_config = READING

    kind: Text
    """Kind of the models."""
    classes: list[Text] = []
    """Class names, or empty if they are unknown."""
    matrices: list[ConfusionMatrix] = Field(min_length=1)
    """A matrix for each architecture. The counts are sums over the clients, except for the same
    model on all clients."""
    without: list[Text] = []
    """Clients whose matrices are not available."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({len(each.counts) for each in self.matrices}) > 1:
            raise ValueError("matrices: expected the same number of classes in all matrices")
        return self
