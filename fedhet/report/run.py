"""A run's directory, read and checked.

Whatever is absent, truncated or malformed earns a StateError that names the file. Two things are
forgiven, because a run that was interrupted leaves them: a missing `summary.json`, and a last
line of `metrics.jsonl` that was cut short.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from fedhet.errors import StateError
from fedhet.report.units import natural

PROTOCOLS = {"common": "common test set", "personal": "own test split"}
KINDS = ("private", "local", "proxy", "global", "server")
STAGES = ("train", "evaluate", "server", "overhead")
NAN = float("nan")

Number = Annotated[float, BeforeValidator(lambda value: NAN if value is None else value)]
M = TypeVar("M", bound="Part")


def _numbers(values: object) -> object:
    """Keep what is a number: a method may log other things beside its figures."""
    if not isinstance(values, dict):
        return values
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def _versions(values: object) -> object:
    return {k: str(v) for k, v in values.items()} if isinstance(values, dict) else values


class Part(BaseModel):
    """A frozen piece of a file; fields that this version does not know are left aside."""

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)


class Score(Part):
    """Accuracies of one kind of model under one protocol, over the clients."""

    mean: Number = NAN
    std: Number = NAN
    worst: Number = NAN
    per_client: dict[str, Number] = {}

    @property
    def worst_client(self) -> str:
        """The name of the client with the lowest accuracy, or ""."""
        known = {name: value for name, value in self.per_client.items() if math.isfinite(value)}
        return min(known, key=lambda name: (known[name], natural(name)), default="")


class Ratio(Score):
    """Each client's accuracy over that of its model after training alone."""

    best: Number = NAN

    @property
    def best_client(self) -> str:
        """The name of the client that gained most, or ""."""
        known = {name: value for name, value in self.per_client.items() if math.isfinite(value)}
        return min(known, key=lambda name: (-known[name], natural(name)), default="")


Accuracy = dict[str, dict[str, Score]]
"""Protocol to kind of model to its scores."""


class Loss(Part):
    """Training losses of a round."""

    mean: Number = NAN
    per_client: dict[str, Number] = {}


class Record(Part):
    """One round: a line of `metrics.jsonl`."""

    round: int
    asked: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    failed: dict[str, str] = {}
    accuracy: Accuracy = {}
    relative: dict[str, Ratio] = {}
    loss: Loss = Loss()
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, Number] = {}
    method: Annotated[dict[str, float], BeforeValidator(_numbers)] = {}

    def score(self, protocol: str, kind: str) -> Score | None:
        """Return the round's scores, or None if it was not evaluated so."""
        return self.accuracy.get(protocol, {}).get(kind)


class _Past(Part):
    round: int


class Summary(Part):
    """What `summary.json` says beyond the rounds' records."""

    method: str
    dataset: str
    seed: int
    rounds: int
    clients: int = 0
    models: dict[str, str] = {}
    headline: str = ""
    accuracy: Accuracy = {}
    history: tuple[_Past, ...] = ()
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, Number] = {}
    peak_memory_mb: Number = NAN
    versions: Annotated[dict[str, str], BeforeValidator(_versions)] = {}

    @property
    def last_round(self) -> int:
        """The round that the summary closes with."""
        return max((past.round for past in self.history), default=self.rounds)


class Labels(Part):
    """How many samples of each class each client holds: `partition.json`."""

    classes: tuple[str, ...]
    counts: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Failure:
    """One client's failure for one reason, and the rounds in which it struck."""

    client: str
    reason: str
    rounds: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """A run as its directory tells it; `summary` is None while it is unfinished."""

    path: Path
    settings: Mapping[str, object]
    records: tuple[Record, ...]
    summary: Summary | None
    labels: Labels | None
    notes: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Did the run reach its end?"""
        return self.summary is not None

    @property
    def method(self) -> str:
        """The method's name."""
        return self.summary.method if self.summary else str(self.settings.get("method", "?"))

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return self.summary.dataset if self.summary else str(self.settings.get("dataset", "?"))

    @property
    def seed(self) -> int | None:
        """The seed, if it is known."""
        seed = self.summary.seed if self.summary else self.settings.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def done(self) -> int:
        """The last round that the records hold."""
        return self.records[-1].round

    @property
    def planned(self) -> int:
        """The rounds that the run was to have."""
        rounds = self.summary.rounds if self.summary else self.settings.get("rounds")
        return rounds if isinstance(rounds, int) else self.done

    @property
    def models(self) -> Mapping[str, str]:
        """Each client's model, where the summary tells."""
        return self.summary.models if self.summary else {}

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """Every client that the run knows of, in natural order."""
        names = set(self.models) | set(self.labels.counts if self.labels else ())
        for record in self.records:
            names.update(record.asked, record.answered, record.failed)
        for kinds in self.accuracy.values():
            for kind, scores in kinds.items():
                names.update(scores.per_client if kind != "server" else ())
        return tuple(sorted(names, key=natural))

    @cached_property
    def last_evaluated(self) -> Record | None:
        """The last record that holds accuracies."""
        return next((record for record in reversed(self.records) if record.accuracy), None)

    @property
    def accuracy(self) -> Accuracy:
        """The accuracies of the last round, or of the last one evaluated if unfinished."""
        if self.summary and self.summary.accuracy:
            return self.summary.accuracy
        return self.last_evaluated.accuracy if self.last_evaluated else {}

    @property
    def protocols(self) -> tuple[str, ...]:
        """The protocols under which the run was judged, the headline one first."""
        names = [name for name, kinds in self.accuracy.items() if kinds]
        wanted = self.summary.headline if self.summary else str(self.settings.get("headline", ""))
        order = [wanted, *PROTOCOLS]
        return tuple(sorted(names, key=lambda name: (_place(name, order), name)))

    @property
    def headline(self) -> str:
        """The protocol of the headline number, or "" if nothing was evaluated."""
        return next(iter(self.protocols), "")

    def kinds(self, protocol: str) -> tuple[str, ...]:
        """Return the kinds of model judged under a protocol, `private` first."""
        names = self.accuracy.get(protocol, {})
        return tuple(sorted(names, key=lambda name: (_place(name, KINDS), name)))

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Every (protocol, kind) of the last round, the headline first."""
        return tuple((name, kind) for name in self.protocols for kind in self.kinds(name))

    @property
    def relative(self) -> tuple[str, Ratio] | None:
        """The protocol, the headline one if it can be, and the last ratios to training alone."""
        found = self.last_evaluated.relative if self.last_evaluated else {}
        return next(((name, found[name]) for name in self.protocols if name in found), None)

    def last(self, protocol: str, kind: str) -> Score:
        """Return the last round's scores; empty ones where there are none."""
        return self.accuracy.get(protocol, {}).get(kind, Score())

    def curve(self, protocol: str, kind: str) -> list[tuple[int, Score]]:
        """Return (round, scores) of every round that was evaluated so."""
        scores = ((record.round, record.score(protocol, kind)) for record in self.records)
        return [(number, found) for number, found in scores if found is not None]

    @property
    def bytes_up(self) -> int:
        """Payload bytes from the clients to the server, in all."""
        return self.summary.bytes_up if self.summary else sum(r.bytes_up for r in self.records)

    @property
    def bytes_down(self) -> int:
        """Payload bytes from the server to the clients, in all."""
        return self.summary.bytes_down if self.summary else sum(r.bytes_down for r in self.records)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by stage and in total."""
        if self.summary and self.summary.seconds:
            return self.summary.seconds
        known = [record.seconds for record in self.records]
        return {
            stage: math.fsum(seconds.get(stage, 0.0) for seconds in known)
            for stage in ("total", *STAGES)
            if any(stage in seconds for seconds in known)
        }

    @cached_property
    def samples(self) -> Mapping[str, int]:
        """Each client's number of samples, where the label counts are known."""
        return {name: sum(row) for name, row in self.labels.counts.items()} if self.labels else {}

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        """Every failure, by client and reason; who was asked and stayed silent is one too."""
        rounds: dict[tuple[str, str], list[int]] = {}
        for record in self.records:
            silent = set(record.asked) - set(record.answered) - set(record.failed)
            lost = {**record.failed, **dict.fromkeys(silent, "no answer")}
            for client, reason in lost.items():
                rounds.setdefault((client, reason), []).append(record.round)
        ordered = sorted(rounds.items(), key=lambda item: (natural(item[0][0]), item[1]))
        return tuple(Failure(*who, tuple(numbers)) for who, numbers in ordered)


def load_run(path: Path | str) -> Run:
    """Read a run's directory.

    Raises StateError, which names the file, for one that is absent, truncated or malformed.
    """
    root = Path(path)
    if not root.is_dir():
        raise StateError(f"{root}: no such run directory")
    settings = _settings(root / "config.toml")
    records, notes = _records(root / "metrics.jsonl")
    summary = _optional(root / "summary.json", Summary)
    if summary and summary.last_round < records[-1].round:
        notes.append(f"summary.json ends at round {summary.last_round}, metrics.jsonl goes on")
        summary = None
    labels = _optional(root / "partition.json", Labels)
    if labels:
        _check_counts(root / "partition.json", labels)
    return Run(root, settings, records, summary, labels, tuple(notes))


def flatten(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested settings under dotted names: `{"felo": {"alpha": 1}}` has `felo.alpha`."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _place(name: str, order: Iterable[str]) -> int:
    names = list(order)
    return names.index(name) if name in names else len(names)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise StateError(
            f"{path}: absent; either no round was finished, or {path.parent} is no run's directory"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{path}: unreadable: {error}") from None


def _settings(path: Path) -> Mapping[str, object]:
    try:
        return flatten(tomllib.loads(_read(path)))
    except tomllib.TOMLDecodeError as error:
        raise StateError(f"{path}: not valid TOML: {error}") from None


def _optional(path: Path, model: type[M]) -> M | None:
    if not path.exists():
        return None
    try:
        content = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise StateError(f"{path}: truncated or not valid JSON: {error}") from None
    return _validated(model, content, str(path))


def _validated(model: type[M], content: object, where: str) -> M:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first: Any = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "content"
        raise StateError(f"{where}: {field}: {first['msg']}") from None


def _records(path: Path) -> tuple[tuple[Record, ...], list[str]]:
    """Return the rounds in order; of a round that was repeated after a resume, the later one."""
    lines = [(n, line) for n, line in enumerate(_read(path).split("\n"), 1) if line.strip()]
    records: dict[int, Record] = {}
    notes: list[str] = []
    for number, line in lines:
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            if number != lines[-1][0]:
                raise StateError(f"{path}: line {number}: not valid JSON: {error}") from None
            notes.append("the last line of metrics.jsonl was cut short and is left out")
            continue
        record = _validated(Record, content, f"{path}: line {number}")
        records[record.round] = record
    if not records:
        raise StateError(f"{path}: holds no complete round")
    return tuple(records[number] for number in sorted(records)), notes


def _check_counts(path: Path, labels: Labels) -> None:
    for client, row in labels.counts.items():
        if len(row) != len(labels.classes):
            raise StateError(
                f"{path}: counts.{client}: {len(row)} counts for {len(labels.classes)} classes"
            )
