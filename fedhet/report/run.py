"""A run, read from its directory.

A file that is absent, truncated or malformed raises a StateError that names it. An interrupted run
is accepted: it may lack `summary.json`, and the last line of `metrics.jsonl` may be truncated.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from fedhet.base.disk import read_toml_tables
from fedhet.base.errors import StateError
from fedhet.base.metrics import ACCURACY, is_shown, metric_of
from fedhet.methods.registry import find_method, shipped_names
from fedhet.methods.spec import metric_title
from fedhet.runs import directory
from fedhet.runs.measures import Tail, tail_of
from fedhet.runs.records import (
    HELD_OUT,
    HELD_OUT_EPOCH,
    KINDS,
    NAN,
    OWN_DATA,
    Origin,
    Partition,
    Ratio,
    RoundRecord,
    Score,
    Summary,
)
from fedhet.runs.units import natural, position

TEST_SETS = {"common": "common test set", "personal": "own test split"}
"""Protocol -> the data on which a model is evaluated."""
MEANING = {
    "common": "on the test set that all clients share",
    "personal": "on each client's own test split",
    "private": "a client's own model",
    "local": "a client's model after local training alone, before any exchange",
    "proxy": "the model that a client exchanges in place of its own",
    "global": "the model that the server forms, one for each architecture",
    "server": "a model that the server alone has",
    HELD_OUT: "what the method offers a client with which nobody has trained, as it is",
    HELD_OUT_EPOCH: "the same after one local epoch",
}
"""What the protocols are, and the kinds of model that several methods have."""
STATISTICS = ["mean", "std", "worst"]
STAGES = ("train", "evaluate", "server", "overhead")


@dataclass(frozen=True)
class Run:
    """A run as read from its directory, and one of its metrics; `summary` is None if unfinished."""

    path: Path
    settings: Mapping[str, object]
    """The settings by their full names."""
    records: tuple[RoundRecord, ...]
    summary: Summary | None
    partition: Partition | None
    origin: Origin
    notes: tuple[str, ...]
    baseline: Run | None
    """A run of another method that was trained beside this one, to compare it with."""
    method: str
    dataset: str
    seed: int | None
    planned: int
    """The planned number of rounds."""
    models: Mapping[str, str]
    """Each client's model; of an unfinished run, as far as it is known."""
    metric: str = ACCURACY
    """The metric of `scores` and of all that is derived from them; see `measuring`."""

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.summary is not None

    def title_of(self, figure: str) -> str:
        """Return what one of the method's own figures is called."""
        shipped = self.method in shipped_names()  # a method of one's own would be imported
        return metric_title(figure, find_method(self.method).spec.metrics if shipped else {})

    @property
    def done(self) -> int:
        """The last round that was recorded."""
        return self.records[-1].round

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """All clients in the run's files, in natural order."""
        names = {*self.models, *self.samples}
        for record in self.records:
            names.update(record.asked, record.answered, record.failed)
        for protocol, kind in self.columns:
            names.update(self.last(protocol, kind).per_client if kind != "server" else ())
        return tuple(sorted(names, key=natural))

    @cached_property
    def last_evaluated(self) -> RoundRecord | None:
        """The last record with scores of the metric."""
        found = (each for each in reversed(self.records) if each.scores.get(self.metric))
        return next(found, None)

    @property
    def scores(self) -> Mapping[str, Mapping[str, Score]]:
        """The metric's scores in the last round, or in the last one evaluated if unfinished."""
        if self.summary:
            return self.summary.scores.get(self.metric, {})
        return self.last_evaluated.scores[self.metric] if self.last_evaluated else {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics measured besides accuracy, by their reported names, such as `recall.3`."""
        return tuple(self.last_evaluated.metrics) if self.last_evaluated else ()

    def measuring(self, metric: str) -> Run:
        """Return the run with the scores of another metric."""
        return self if metric == self.metric else replace(self, metric=metric)

    @cached_property
    def besides(self) -> tuple[tuple[str, Run], ...]:
        """The title of each metric that is shown besides accuracy, and the run with its scores."""
        shown = filter(is_shown, self.metrics)
        return tuple((metric_of(name).title, self.measuring(name)) for name in shown)

    @cached_property
    def protocols(self) -> tuple[str, ...]:
        """The protocols under which the run was evaluated, the headline protocol first."""
        headline = self.summary.headline if self.summary else self.settings.get("headline")
        found = [name for name, kinds in self.scores.items() if kinds]
        return tuple(sorted(found, key=lambda name: position(name, [headline, *TEST_SETS])))

    @property
    def headline(self) -> str:
        """The protocol of the headline number, or "" if nothing was evaluated."""
        return next(iter(self.protocols), "")

    def kinds(self, protocol: str) -> tuple[str, ...]:
        """Return the kinds of model evaluated under a protocol, `private` first."""
        found = self.scores.get(protocol, {})
        return tuple(sorted(found, key=lambda name: position(name, KINDS)))

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Every (protocol, kind) of the last round, the headline first."""
        return tuple((name, kind) for name in self.protocols for kind in self.kinds(name))

    @property
    def relative(self) -> tuple[str, Ratio] | None:
        """The last ratios to local training, and their protocol: the headline one if possible."""
        found = self.last_evaluated.relative if self.last_evaluated else {}
        return next(((name, found[name]) for name in self.protocols if name in found), None)

    def majority(self, protocol: str) -> Mapping[str, float]:
        """Return, by client, the accuracy of always predicting the most frequent class.

        Empty for metrics other than accuracy.
        """
        if self.metric != ACCURACY or self.last_evaluated is None:
            return {}
        return self.last_evaluated.majority.get(protocol, {})

    def last(self, protocol: str, kind: str) -> Score:
        """Return the last round's scores; empty if there are none."""
        return self.scores.get(protocol, {}).get(kind, Score())

    def tail(self, protocol: str, kind: str) -> Tail:
        """Return the mean of the last fifth of the rounds; of those so far if unfinished.

        It is computed from the rounds' records, since summaries of older versions lack it.
        """
        return tail_of(self.records, protocol, kind, self.metric)

    @property
    def against(self) -> tuple[str, str] | None:
        """The protocol and kind of the baseline's models that the headline is compared with."""
        if self.baseline is None or not self.columns:
            return None
        (protocol, kind), found = self.columns[0], self.baseline.columns
        return next(
            (each for each in ((protocol, kind), (protocol, "private")) if each in found), None
        )

    def counted(self, protocol: str, kind: str) -> str:
        """Return over how many clients a mean is: "2 of 3"; "" for a model of the server."""
        found, all_clients = len(self.last(protocol, kind).per_client), len(self.clients)
        if kind == "server":
            return ""
        return str(found) if found == all_clients else f"{found} of {all_clients}"

    @property
    def has_clock(self) -> bool:
        """Whether the run has a simulated clock."""
        return not math.isnan(self.records[-1].clock)

    def curve(self, protocol: str, kind: str) -> pd.DataFrame:
        """Return mean, std and worst score of every round that has this protocol and kind."""
        found = {record.round: record.score(self.metric, protocol, kind) for record in self.records}
        rows = {number: (s.mean, s.std, s.worst) for number, s in found.items() if s}
        index = pd.Index(rows, name="round", dtype=int)
        return pd.DataFrame([*rows.values()], index, columns=STATISTICS, dtype=float)

    def by_client(self, protocol: str, kind: str) -> pd.DataFrame:
        """Return each client's accuracy in the evaluated rounds, with one column per client."""
        rows = {
            record.round: score.per_client
            for record in self.records
            if (score := record.score(ACCURACY, protocol, kind))
        }
        frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
        return frame.rename_axis(index="round")

    @cached_property
    def costs(self) -> pd.DataFrame:
        """Bytes and seconds of each round; `bytes`, `epsilon` and `clock` are cumulative.

        `epsilon` is the largest of the clients', NaN if no client's samples are protected. `clock`
        is in simulated seconds, NaN without a simulated clock. `seconds` is wall-clock time, with
        one column per stage; see `fedhet.runs.records.Seconds`.
        """
        rows = [
            {"bytes_up": record.bytes_up, "bytes_down": record.bytes_down, **dict(record.seconds)}
            for record in self.records
        ]
        frame = pd.DataFrame(rows, index=_rounds(self.records)).rename(columns={"total": "seconds"})
        spent = [max(record.epsilon.values(), default=NAN) for record in self.records]
        so_far = (frame["bytes_up"] + frame["bytes_down"]).cumsum()
        clock = [record.clock for record in self.records]
        return frame.assign(bytes=so_far, epsilon=spent, clock=clock)

    @property
    def losses(self) -> pd.DataFrame:
        """The training loss of each round that has one, with one column per client."""
        known = [record for record in self.records if record.loss]
        rows = [record.loss.per_client for record in known if record.loss]
        return pd.DataFrame(rows, index=_rounds(known), dtype=float)

    @property
    def mean_loss(self) -> pd.Series:
        """The mean training loss of each round that has one."""
        means = [record.loss.mean if record.loss else NAN for record in self.records]
        return pd.Series(means, index=_rounds(self.records), dtype=float).dropna()

    @cached_property
    def figures(self) -> pd.DataFrame:
        """The method's own metrics of each round, one column each, in order of occurrence."""
        rows = [record.method for record in self.records]
        return pd.DataFrame(rows, index=_rounds(self.records), dtype=float)

    @cached_property
    def totals(self) -> pd.Series:
        """Sums of `costs` over the run: bytes up and down, wall-clock seconds, and by stage.

        `seconds` is that of the whole run, and `start` its part before the first round; NaN if not
        known. `clock` and `epsilon` are those of the last round, `seconds_a_round` is a mean.
        """
        if self.summary is None:
            sums = {**self.costs.drop(columns="bytes").sum(), "start": NAN}
        else:
            sums = dict(self.summary.seconds)
            sums |= {"seconds": sums["total"], "bytes_up": self.summary.bytes_up}
            sums["bytes_down"] = self.summary.bytes_down
        last = self.costs[["clock", "epsilon"]].iloc[-1]
        return pd.Series({**sums, **last, "seconds_a_round": self.costs["seconds"].mean()})

    @cached_property
    def samples(self) -> Mapping[str, int]:
        """Each client's number of samples, if the label counts are known."""
        counts = self.partition.counts if self.partition else {}
        return {name: sum(row) for name, row in counts.items()}

    @cached_property
    def failures(self) -> pd.DataFrame:
        """The rounds of every failure by client and reason, including requests without a reply."""
        rows = []
        for record in self.records:  # late clients are no failures
            replied = {*record.answered, *record.failed, *record.late}
            silent = dict.fromkeys(set(record.asked) - replied, "no answer")
            lost = {**record.failed, **silent}
            rows += [(*client_and_reason, record.round) for client_and_reason in lost.items()]
        frame = pd.DataFrame(rows, columns=["client", "reason", "rounds"])
        found = frame.groupby(["client", "reason"])["rounds"].agg(list).reset_index()
        return found.sort_values("client", key=lambda names: names.map(natural), kind="stable")


def load_run(path: Path | str, *, with_baseline: bool = True) -> Run:
    """Read a run's directory, and that of its baseline if there is one.

    Raises StateError, which names the file, if one is absent, truncated or malformed.
    """
    root = Path(path)
    if not root.is_dir():
        raise StateError(f"{root}: no such run directory")
    with directory.reading(root / "config.toml"):
        tables = read_toml_tables(root / "config.toml")
    settings: Mapping[str, object] = pd.json_normalize(tables, sep=".").to_dict("records")[0]
    records, notes = directory.read_records(root / "metrics.jsonl")
    if not records:
        raise StateError(f"{root / 'metrics.jsonl'}: holds no complete round")
    summary = directory.read_if_exists(root / "summary.json", Summary)
    if summary and summary.last_round < records[-1].round:
        notes.append(f"summary.json ends at round {summary.last_round}, metrics.jsonl continues")
        summary = None
    partition = directory.read_if_exists(root / "partition.json", Partition)
    origin, baseline = directory.read_if_exists(root / "run.json", Origin) or Origin(), None
    if with_baseline:
        with contextlib.suppress(StateError):  # until it has recorded a round
            baseline = load_run(root / directory.BASELINE, with_baseline=False)
    dataset = summary.dataset if summary else str(settings.get("data.dataset", "?"))
    seed = summary.seed if summary else settings.get("seed")
    rounds = summary.rounds if summary else settings.get("rounds")
    return Run(
        path=root,
        settings=settings,
        records=tuple(records),
        summary=summary,
        partition=partition,
        origin=origin,
        notes=tuple(notes),
        baseline=baseline,
        method=summary.method if summary else str(settings.get("method", "?")),
        dataset=OWN_DATA if origin.own_data else dataset,
        seed=seed if isinstance(seed, int) else None,
        planned=rounds if isinstance(rounds, int) else records[-1].round,
        models=summary.models if summary else origin.models,
    )


def lowest(values: Mapping[str, float]) -> str:
    """Return the client with the lowest value, ties by natural order, or ""."""
    known = pd.Series(values, index=sorted(values, key=natural), dtype=float).dropna()
    return str(known.idxmin()) if len(known) else ""


def highest(values: Mapping[str, float]) -> str:
    """Return the client with the highest value, ties by natural order, or ""."""
    return lowest({name: -value for name, value in values.items()})


def _rounds(records: Sequence[RoundRecord]) -> pd.Index:
    return pd.Index([record.round for record in records], name="round", dtype=int)
