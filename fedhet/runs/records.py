"""The schema of a run's files: metrics.jsonl, with a record per round, and summary.json.

These are the only declarations of the two files. When a file is read, unknown fields are ignored;
null stands for NaN, which JSON does not support.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Self

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
from fedhet.base.metrics import ACCURACY

LARGEST = 1e18
"""The largest number in a run's files: beyond every sum of what clients may report."""
ByPlace = dict[str, dict[str, dict[str, Annotated[float, Field(ge=-LARGEST, le=LARGEST)]]]]
"""protocol ("personal", "common") -> kind ("private", "proxy", …) -> client -> value."""
ByMetric = dict[str, ByPlace]
"""metric -> protocol -> kind -> client -> value."""

PROTOCOLS = ("personal", "common")
"""The test sets: a client's own test split, and one that all clients share."""
HELD_OUT, HELD_OUT_EPOCH = "unseen", "unseen-epoch"
"""What the method offers clients with which nobody has trained: as it is, and after an epoch."""
KINDS = ("private", "local", "proxy", "global", "server", HELD_OUT, HELD_OUT_EPOCH)
"""`local`: the private model after local training alone, before any knowledge was exchanged."""
MAX_ROUNDS = 1_000_000
NAN = float("nan")
READING = ConfigDict(extra="ignore", coerce_numbers_to_str=True)


def _or_nan(value: object) -> object:
    infinite = isinstance(value, float) and math.isinf(value)
    return NAN if value is None or infinite else value


def _bounded(value: float) -> float:
    if abs(value) > LARGEST:
        raise ValueError(f"is {value:g}, the largest allowed is {LARGEST:g}")
    return value


def _numbers(values: object) -> object:
    """Drop strings and tables, which other versions may have logged besides the numbers."""
    if not isinstance(values, Mapping):
        return values
    return {key: each for key, each in values.items() if not isinstance(each, str | dict | list)}


Number = Annotated[float, BeforeValidator(_or_nan), AfterValidator(_bounded)]
MAX_BYTES = 2**63 - 1
Whole = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Round = Annotated[int, Field(ge=0, le=MAX_ROUNDS)]
Text = Annotated[str, AfterValidator(one_line)]
"""A name or a reason, as one printable line: files may come from elsewhere."""
Figures = Annotated[dict[Text, Number], BeforeValidator(_numbers)]


class Score(BaseModel):
    """A value per client, with mean, standard deviation and worst value."""

    model_config = READING | ConfigDict(frozen=True)

    mean: Number = NAN
    std: Number = NAN
    worst: Number = NAN
    per_client: dict[Text, Number] = {}


class FinalScore(Score):
    """The last round's accuracies, with the mean of the last fifth of the rounds."""

    tail: Number = NAN
    """See `fedhet.runs.measures.tail_of`."""
    clients: Whole = 0
    """The number of clients that the mean is over; 0 for a model of the server."""


class Ratio(Score):
    """Each client's accuracy divided by the accuracy of its model after local training alone."""

    best: Number = NAN


Scores = dict[Text, dict[Text, Score]]
"""protocol -> kind -> accuracies of the clients' models."""
FinalScores = dict[Text, dict[Text, FinalScore]]
Loss = Annotated[
    Score | None,
    BeforeValidator(lambda loss: loss or None),
    PlainSerializer(lambda loss: loss.model_dump() if loss else {}),
]
"""None, written as {}: no client reported a loss."""


class Seconds(BaseModel):
    """Seconds by stage. `train` and `evaluate` are sums over clients; the others are wall time."""

    model_config = READING

    total: Number = 0.0
    train: Number = 0.0
    evaluate: Number = 0.0
    server: Number = 0.0
    overhead: Number = 0.0

    def add(self, other: Seconds) -> None:
        """Add the times of another record to this one."""
        for name, value in other:
            setattr(self, name, getattr(self, name) + value)

    def rounded(self) -> Self:
        """Return the times rounded to milliseconds; sums of rounds are at most what one may be."""
        return type(self)(**{name: round(min(value, LARGEST), 3) for name, value in self})


class RunSeconds(Seconds):
    """Seconds of a whole run; `total` begins before the first round, with the command."""

    start: Number = NAN
    """Of `total`, those before the first round; of a resumed run, before its next round."""


@pydantic.dataclasses.dataclass(config=READING)
class RoundRecord:
    """One line of metrics.jsonl; filled in during the round."""

    round: Round
    asked: list[Text] = field(default_factory=list)
    answered: list[Text] = field(default_factory=list)
    failed: dict[Text, Text] = field(default_factory=dict)
    """Client -> reason."""
    unevaluated: dict[Text, Text] = field(default_factory=dict)
    """Client -> why its models could not be evaluated."""
    late: list[Text] = field(default_factory=list)
    """The clients that were still at work when the round closed."""
    ages: dict[Text, Round] = field(default_factory=dict)
    """Of the clients that answered an earlier round than this: how many rounds ago it was."""
    clock: Number = NAN
    """Simulated seconds since the run began, of a run with a clock of its own."""
    absent: list[Text] = field(default_factory=list)
    """The clients that had joined and were not connected when the round began."""
    accuracy: Scores = field(default_factory=dict)
    relative: dict[Text, Ratio] = field(default_factory=dict)
    """By protocol."""
    majority: dict[Text, dict[Text, Number]] = field(default_factory=dict)
    """By protocol and client, the accuracy of always predicting the most frequent class."""
    metrics: dict[Text, Scores] = field(default_factory=dict)
    """The other metrics' scores, by metric."""
    loss: Loss = None
    """Training losses."""
    bytes_up: Whole = 0
    bytes_down: Whole = 0
    bytes_evaluation: Whole = 0
    """Those of the models sent to be evaluated; a run with `evaluate-every` sends fewer."""
    seconds: Seconds = field(default_factory=Seconds)
    method: Figures = field(default_factory=dict)
    """The method's own metrics of the round."""
    peak_memory_mb: Number = 0.0
    """The highest memory use that a client's process has reported so far, in MB."""
    epsilon: dict[Text, Number] = field(default_factory=dict)
    """What the run has cost each client's samples so far, of those that are protected."""

    @property
    def scores(self) -> dict[str, Scores]:
        """The scores by metric, accuracy first."""
        return {ACCURACY: self.accuracy, **self.metrics} if self.accuracy else {}

    def each(self, metric: str = ACCURACY) -> Iterator[tuple[str, str, Score]]:
        """Yield protocol, kind and score of a metric."""
        for protocol, kinds in self.scores.get(metric, {}).items():
            for kind, found in kinds.items():
                yield protocol, kind, found

    def score(self, metric: str, protocol: str, kind: str) -> Score | None:
        """Return a metric's score under a protocol, or None if it was not evaluated."""
        return self.scores.get(metric, {}).get(protocol, {}).get(kind)

    def set_scores(self, metric: str, scores: Scores) -> None:
        """Set the scores of a metric; an empty mapping sets nothing, except for the accuracy."""
        if metric == ACCURACY:
            self.accuracy = scores
        elif scores:
            self.metrics[metric] = scores


class PastRound(BaseModel):
    """A round in a summary's history: mean accuracies by protocol and kind, and its cost."""

    model_config = READING

    round: Round
    accuracy: dict[Text, dict[Text, Number]] = {}
    bytes_up: Whole = 0
    bytes_down: Whole = 0
    seconds: Number = NAN
    clock: Number = NAN
    """Simulated seconds since the run began; NaN, in the file null: it has no clock of its own."""

    @classmethod
    def of(cls, record: RoundRecord) -> PastRound:
        """Return the history's entry for a round."""
        means = {
            protocol: {kind: scores.mean for kind, scores in kinds.items()}
            for protocol, kinds in record.accuracy.items()
        }
        return cls(
            round=record.round, accuracy=means, bytes_up=record.bytes_up,
            bytes_down=record.bytes_down, seconds=round(record.seconds.total, 3),
            clock=record.clock,
        )  # fmt: skip


class Spent(BaseModel):
    """What a run has cost a client's samples: (epsilon, delta)-differential privacy."""

    model_config = READING

    epsilon: Number = NAN
    delta: Number = NAN


class Summary(BaseModel):
    """summary.json: a finished run. The accuracies are those of the last round, with the tail."""

    model_config = READING

    method: Text
    dataset: Text
    seed: Whole
    rounds: Round
    clients: Whole = 0
    models: dict[Text, Text] = {}
    """Client -> model."""
    training: dict[Text, Text] = {}
    """Client -> what it trains with: optimizer, learning rate, epochs and batch size."""
    headline: Text = ""
    """The protocol of the method's headline number."""
    accuracy: FinalScores = {}
    relative: dict[Text, Ratio] = {}
    metrics: dict[Text, FinalScores] = {}
    """The other metrics' scores, by metric."""
    privacy: dict[Text, Spent] = {}
    """Of the clients whose samples are protected."""
    history: list[PastRound] = []
    bytes_up: Whole = 0
    bytes_down: Whole = 0
    bytes_evaluation: Whole = 0
    """Those of the models sent to be evaluated."""
    seconds: RunSeconds = RunSeconds()
    peak_memory_mb: Number = NAN
    """The highest memory use of any process, of the server or of clients."""
    versions: dict[Text, Text] = {}

    @property
    def scores(self) -> dict[str, FinalScores]:
        """The scores by metric, accuracy first."""
        return {ACCURACY: self.accuracy, **self.metrics}

    @property
    def last_round(self) -> int:
        """The last round of the history."""
        return max((past.round for past in self.history), default=self.rounds)


OWN_DATA = "the sites' own data"
"""The data set of a run whose clients bring their own."""


class Origin(BaseModel):
    """run.json: the run's name, as clients know it, and how it was started."""

    model_config = READING

    run: Text = ""
    deployed: bool = False
    """Whether its clients were reached over the network; else it was simulated."""
    started: Text = ""
    """When it was started first, in UTC: 2026-11-23 18:40."""
    own_data: bool = False
    """Whether clients had data of their own, in place of parts of the run's data set."""
    models: dict[Text, Text] = {}
    """Client -> model, as known so far: an unfinished run has no summary."""
    classes: list[Text] = []
    """The names of the classes, or empty if the server does not know them."""
    fault: Text = ""
    """Why the run failed; empty while it goes on, and if it was stopped from outside."""


class Partition(BaseModel):
    """partition.json: how many samples of each class each client holds."""

    model_config = READING

    classes: list[Text]
    counts: dict[Text, list[Count]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for client, row in self.counts.items():
            if len(row) != len(self.classes):
                raise ValueError(
                    f"counts.{client}: {len(row)} counts for {len(self.classes)} classes"
                )
        return self
