"""Results of a run, read from its directory.

In an interrupted run, `summary.json` may be missing, and the last line of `metrics.jsonl` may be
truncated. A StateError that names the file is raised if any other required file is missing, or if a
file is malformed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from fedhet.base.disk import read_toml_tables
from fedhet.base.errors import StateError
from fedhet.base.metrics import ACCURACY, is_shown, metric_of
from fedhet.methods.registry import find_method, shipped_names
from fedhet.methods.spec import metric_title
from fedhet.report.differences import effective_samples
from fedhet.runs import directory
from fedhet.runs.measures import Tail, selection_basis, tail_of
from fedhet.runs.records import (
    HELD_OUT,
    HELD_OUT_EPOCH,
    NAN,
    OWN_DATA,
    VALIDATION,
    Confusion,
    ConfusionMatrix,
    Generated,
    Headline,
    Origin,
    Partition,
    Ratio,
    RoundRecord,
    Score,
    Summary,
)
from fedhet.runs.units import natural, printable

TEST_SETS = {
    "common": "common test set", "personal": "own test split", VALIDATION: "validation split",
}  # fmt: skip
"""Names of the evaluated samples, by protocol."""
MEANING = {
    "common": "on the test set common to all clients",
    "personal": "on each client's own test split",
    VALIDATION: "on samples held out from each client's training samples, which select rounds and "
    "settings",
    "private": "the client's private model",
    "local": "the client's model after only local training, before any exchange",
    "proxy": "the model that a client exchanges instead of its private model",
    "ensemble": "the mean of the predictions of a client's private model and its proxy",
    "global": "the server's averaged models",
    "server": "a model that only the server has",
    HELD_OUT: "the model offered to held-out clients, which never train",
    HELD_OUT_EPOCH: "the same model after one local epoch",
}
"""Descriptions of the protocols and of common kinds of models."""
STATISTICS = ("mean", "std", "worst", "tail")
"""Statistics of a score over clients; see `Run.statistic`."""
STAGES = ("train", "evaluate", "server", "overhead")


@dataclass(frozen=True)
class Run:
    """Results of a run, with scores for one metric, by default the headline metric."""

    path: Path
    settings: Mapping[str, object]
    """Settings of the run, by full name."""
    records: tuple[RoundRecord, ...]
    summary: Summary | None
    """Summary of the run, or None if it is unfinished."""
    partition: Partition | None
    origin: Origin
    notes: tuple[str, ...]
    baseline: Run | None
    """Baseline run of another method that was trained together with this run, or None."""
    method: str
    dataset: str
    seed: int | None
    planned: int
    """Planned number of rounds."""
    models: Mapping[str, str]
    """Model of each client. If the run is unfinished, clients may be missing."""
    confusion: Confusion | None = None
    """Confusion matrices of the headline models, or None if they were not recorded."""
    generated: Generated | None = None
    """Texts generated after the last round, or None for other tasks than language modeling."""
    metric: str = ACCURACY
    """Metric for `scores` and all derived values; see `with_metric`."""

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.summary is not None

    def title_of(self, metric: str) -> str:
        """Return the title of a method's metric."""
        is_shipped = self.method in shipped_names()  # Do not import a user's method.
        return metric_title(metric, find_method(self.method).spec.metrics if is_shipped else {})

    @property
    def done(self) -> int:
        """Number of the last recorded round."""
        return self.records[-1].round

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """Names of all clients in the run's files, in natural order."""
        names = {*self.models, *self.samples}
        for record in self.records:
            names.update(record.asked, record.answered, record.failed)
        for protocol, kind in self.columns:
            names.update(self.last(protocol, kind).per_client if kind != "server" else ())
        return tuple(sorted(names, key=natural))

    @cached_property
    def last_evaluated(self) -> RoundRecord | None:
        """Last record with scores for the metric."""
        evaluated = (each for each in reversed(self.records) if each.scores.get(self.metric))
        return next(evaluated, None)

    @property
    def scores(self) -> Mapping[str, Mapping[str, Score]]:
        """Scores in the last round or, if the run is unfinished, in the last evaluated round."""
        if self.summary:
            return self.summary.scores.get(self.metric, {})
        return self.last_evaluated.scores[self.metric] if self.last_evaluated else {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Reported names of all metrics other than the headline metric, e.g. `recall.3`."""
        names = self.last_evaluated.scores if self.last_evaluated else ()
        return tuple(name for name in names if name != self.headline_metric)

    @cached_property
    def headline_metric(self) -> str:
        """Name of the headline metric: accuracy, or the first metric if there is no accuracy."""
        evaluated = (record.metric for record in reversed(self.records) if record.scores)
        return next(evaluated, ACCURACY)

    @property
    def metric_title(self) -> str:
        """Title of the metric, e.g. "accuracy"."""
        return metric_of(self.metric).title

    def with_metric(self, metric: str) -> Run:
        """Return a copy of the run with scores for another metric."""
        return self if metric == self.metric else replace(self, metric=metric)

    @cached_property
    def extra_metrics(self) -> tuple[tuple[str, Run], ...]:
        """Metrics to display in addition to the headline metric, as pairs (title, run).

        Each run is a copy of this run with the scores for the metric.
        """
        shown = filter(is_shown, self.metrics)
        return tuple((metric_of(name).title, self.with_metric(name)) for name in shown)

    @cached_property
    def declared_headline(self) -> Headline:
        """Headline that the method declares, or that the run has recorded for a custom method."""
        if self.method in shipped_names():  # Do not import a user's method.
            return Headline.declared_by(find_method(self.method).spec)
        return self.origin.headline or Headline()

    @cached_property
    def protocols(self) -> tuple[str, ...]:
        """Evaluated protocols, with the headline protocol first."""
        evaluated = [name for name, kinds in self.scores.items() if kinds]
        return self.declared_headline.ordered_protocols(evaluated)

    @property
    def headline(self) -> str:
        """Protocol of the headline score, or "" if the run was not evaluated."""
        return next(iter(self.protocols), "")

    def kinds(self, protocol: str) -> tuple[str, ...]:
        """Return the kinds of models evaluated under a protocol, with the headline kind first."""
        return self.declared_headline.ordered_kinds(protocol, self.scores.get(protocol, {}))

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """All (protocol, kind) pairs with scores, with the headline pair first."""
        return tuple((name, kind) for name in self.protocols for kind in self.kinds(name))

    @cached_property
    def selection(self) -> tuple[str, str] | None:
        """Protocol and kind of the score on which rounds and runs are selected, or None."""
        return self.declared_headline.selection(self.scores)

    @property
    def selection_basis(self) -> str:
        """Description of the samples on which rounds and runs are selected."""
        return selection_basis(self.records, self.settings.get("data.validation-fraction"))

    @property
    def selection_note(self) -> str:
        """Sentence about early stopping and `keep-best`, or "" if the run uses neither."""
        used = " and ".join(n for n in ("early-stopping", "keep-best") if self.settings.get(n))
        if not used or self.selection is None:
            return ""
        kind = self.selection[1]
        models = "" if kind == self.columns[0][1] else f", by the score of the {kind} models"
        return f"{used}: rounds are selected on {self.selection_basis}{models}"

    @property
    def relative(self) -> tuple[str, Ratio] | None:
        """Pair of a protocol and the ratios of private to local accuracy in the last evaluation.

        The headline protocol is preferred. The result is None if there are no ratios.
        """
        ratios = self.last_evaluated.relative if self.last_evaluated else {}
        return next(((name, ratios[name]) for name in self.protocols if name in ratios), None)

    def majority(self, protocol: str) -> Mapping[str, float]:
        """Return each client's score for a constant prediction (see `fedhet.tasks`).

        The result is empty for metrics other than the headline metric.
        """
        if self.metric != self.headline_metric or self.last_evaluated is None:
            return {}
        return self.last_evaluated.majority.get(protocol, {})

    def last(self, protocol: str, kind: str) -> Score:
        """Return the scores in the last round, or an empty score if the round was not evaluated."""
        return self.scores.get(protocol, {}).get(kind, Score())

    def test_samples(self, protocol: str, kind: str) -> float | None:
        """Return the number of test samples behind a mean score, or None if it is unknown."""
        names = [*self.last(protocol, kind).per_client]
        recorded = self.last_evaluated.tested.get(protocol, {}) if self.last_evaluated else {}
        if protocol == "common" and names == ["server"]:  # The server evaluates its own model.
            names = [*recorded]
        is_known = recorded.keys() >= {*names}
        return effective_samples([recorded[name] for name in names], protocol) if is_known else None

    @cached_property
    def class_names(self) -> list[str]:
        """Printable names of the classes of the confusion matrices; numbers if unknown."""
        if self.confusion is None:
            return []
        names, count = self.confusion.classes, len(self.confusion.matrices[0].counts)
        return [printable(n) for n in (names if len(names) == count else map(str, range(count)))]

    @cached_property
    def confusion_matrices(self) -> dict[str, ConfusionMatrix]:
        """Confusion matrices to show, by title.

        Global models have a matrix for each architecture. The matrices of all other kinds of models
        are added.
        """
        if self.confusion is None:
            return {}
        kind, matrices = self.confusion.kind, self.confusion.matrices
        if kind == "global" and len(matrices) > 1:
            return {f"{kind} model, {printable(each.model)}": each for each in matrices}
        clients = [name for each in matrices for name in each.clients]
        total = ConfusionMatrix(
            clients=clients,
            samples=sum(each.samples for each in matrices),
            counts=np.sum([each.counts for each in matrices], axis=0).tolist(),
        )
        summed = kind not in ("global", "server") and len(clients) > 1
        return {
            f"{kind} models, sum of {len(clients)} clients" if summed else f"{kind} model": total
        }

    def tail(self, protocol: str, kind: str) -> Tail:
        """Return the mean score over the last fifth of the recorded rounds.

        The mean is computed from the records, because summaries from older versions lack it.
        """
        return tail_of(self.records, protocol, kind, self.metric)

    def statistic(self, name: str, protocol: str, kind: str) -> float:
        """Return "mean", "std" or "worst" over clients in the last round, or the mean "tail"."""
        if name == "tail":
            return self.tail(protocol, kind).mean
        return float(getattr(self.last(protocol, kind), name))

    @property
    def baseline_column(self) -> tuple[str, str] | None:
        """Protocol and kind of the baseline's score to compare with the headline score."""
        if self.baseline is None or not self.columns:
            return None
        protocol = self.headline
        return next(((protocol, kind) for kind in self.baseline.kinds(protocol)), None)

    def client_count(self, protocol: str, kind: str) -> str:
        """Format the number of clients in a mean score, e.g. "2 of 3", or "" for a server model."""
        count, all_clients = len(self.last(protocol, kind).per_client), len(self.clients)
        if kind == "server":
            return ""
        return str(count) if count == all_clients else f"{count} of {all_clients}"

    @property
    def has_clock(self) -> bool:
        """Whether the run has a simulated clock."""
        return not math.isnan(self.records[-1].clock)

    def curve(self, protocol: str, kind: str) -> pd.DataFrame:
        """Return the mean, std and worst score in each evaluated round."""
        scores = {r.round: r.score(self.metric, protocol, kind) for r in self.records}
        rows = {number: (s.mean, s.std, s.worst) for number, s in scores.items() if s}
        index = pd.Index(rows, name="round", dtype=int)
        columns = ["mean", "std", "worst"]
        return pd.DataFrame([*rows.values()], index, columns=columns, dtype=float)

    def by_client(self, protocol: str, kind: str) -> pd.DataFrame:
        """Return the score of each client (column) in each evaluated round (row)."""
        rows = {
            record.round: score.per_client
            for record in self.records
            if (score := record.score(self.metric, protocol, kind))
        }
        frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
        return frame.rename_axis(index="round")

    def round_of(self, target: float, protocol: str, kind: str) -> int | None:
        """Return the first evaluated round in which a mean score reached the target.

        The result is None if the score never reached the target. It is also None if the score
        already exceeds the target in the first evaluation, and this is later than in round 1.
        """
        means = self.curve(protocol, kind)["mean"].dropna()
        sign = -1 if metric_of(self.metric).lower_is_better else 1
        reached = means.index[sign * means >= sign * target]
        if not len(reached) or reached[0] == means.index[0] > 1:
            return None
        return int(reached[0])

    @property
    def epochs(self) -> float:
        """Mean number of a client's passes over its own labeled samples, or NaN if unknown."""
        known = [record.epochs for record in self.records if math.isfinite(record.epochs)]
        return sum(known) / max(1, len(self.clients)) if known else NAN

    @cached_property
    def costs(self) -> pd.DataFrame:
        """Bytes and seconds in each round; `bytes`, `epsilon` and `clock` are cumulative.

        `epsilon` is the maximum over clients, or NaN without differential privacy. `clock` is in
        simulated seconds, or NaN without a simulated clock. `seconds` is wall-clock time, with one
        additional column per stage (see `fedhet.runs.records.Seconds`).
        """
        rows = [
            {"bytes_up": record.bytes_up, "bytes_down": record.bytes_down, **dict(record.seconds)}
            for record in self.records
        ]
        frame = pd.DataFrame(rows, index=_rounds(self.records)).rename(columns={"total": "seconds"})
        epsilon = [max(record.epsilon.values(), default=NAN) for record in self.records]
        total_bytes = (frame["bytes_up"] + frame["bytes_down"]).cumsum()
        clock = [record.clock for record in self.records]
        return frame.assign(bytes=total_bytes, epsilon=epsilon, clock=clock)

    @property
    def losses(self) -> pd.DataFrame:
        """Training loss of each client (column) in each round that has a recorded loss (row)."""
        with_loss = [record for record in self.records if record.loss]
        rows = [record.loss.per_client for record in with_loss if record.loss]
        return pd.DataFrame(rows, index=_rounds(with_loss), dtype=float)

    @property
    def mean_loss(self) -> pd.Series:
        """Mean training loss in each round that has a recorded loss."""
        means = [record.loss.mean if record.loss else NAN for record in self.records]
        return pd.Series(means, index=_rounds(self.records), dtype=float).dropna()

    @cached_property
    def method_metrics(self) -> pd.DataFrame:
        """Metrics of the method (columns, in order of occurrence) in each round (row)."""
        rows = [record.method for record in self.records]
        return pd.DataFrame(rows, index=_rounds(self.records), dtype=float)

    @cached_property
    def totals(self) -> pd.Series:
        """Bytes and wall-clock seconds of the run, in total and by stage.

        `start` is the part of `seconds` before the first round, or NaN if unknown. `clock` and
        `epsilon` are the values in the last round. `seconds_a_round` is the mean over rounds.
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
        """Number of samples on each client; empty if the label counts are unknown."""
        counts = self.partition.counts if self.partition else {}
        return {name: sum(row) for name, row in counts.items()}

    @cached_property
    def failures(self) -> pd.DataFrame:
        """Rounds in which a client failed or did not reply, by client and reason."""
        rows = []
        for record in self.records:  # A late reply is not a failure.
            replied = {*record.answered, *record.failed, *record.late}
            silent = dict.fromkeys(set(record.asked) - replied, "no reply")
            failures = {**record.failed, **silent}
            rows += [(client, reason, record.round) for client, reason in failures.items()]
        frame = pd.DataFrame(rows, columns=["client", "reason", "rounds"])
        grouped = frame.groupby(["client", "reason"])["rounds"].agg(list).reset_index()
        return grouped.sort_values("client", key=lambda names: names.map(natural), kind="stable")


def load_run(path: Path | str, *, with_baseline: bool = True) -> Run:
    """Read the results of a run and, if it has one, of its baseline.

    Raises StateError if a file is missing, truncated or malformed.
    """
    root = Path(path)
    if not root.is_dir():
        raise StateError(f"run directory {root} not found")
    with directory.reading(root / "config.toml"):
        tables = read_toml_tables(root / "config.toml")
    settings: Mapping[str, object] = pd.json_normalize(tables, sep=".").to_dict("records")[0]
    records, notes = directory.read_records(root / "metrics.jsonl")
    if not records:
        raise StateError(f"{root / 'metrics.jsonl'}: no complete round found")
    summary = directory.read_if_exists(root / "summary.json", Summary)
    if summary and summary.last_round < records[-1].round:
        notes.append(
            f"ignored summary.json: it ends at round {summary.last_round}, but metrics.jsonl "
            f"at round {records[-1].round}"
        )
        summary = None
    partition = directory.read_if_exists(root / "partition.json", Partition)
    origin, baseline = directory.read_if_exists(root / "run.json", Origin) or Origin(), None
    if with_baseline:
        with contextlib.suppress(StateError):  # The baseline may not have recorded a round yet.
            baseline = load_run(root / directory.BASELINE, with_baseline=False)
    confusion = generated = None
    if summary:  # The matrices and texts belong to the last round.
        confusion = directory.read_if_exists(root / "confusion.json", Confusion)
        generated = directory.read_if_exists(root / "generated.json", Generated)
    dataset = summary.dataset if summary else str(settings.get("data.dataset", "?"))
    seed = summary.seed if summary else settings.get("seed")
    rounds = summary.rounds if summary else settings.get("rounds")
    run = Run(
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
        confusion=confusion,
        generated=generated,
    )
    return run.with_metric(run.headline_metric)


def where(protocol: str) -> str:
    """Describe the test set of a protocol, e.g. "on the common test set"."""
    name = TEST_SETS.get(protocol, protocol)
    return f"on the {name}" if protocol == "common" else f"on each client's {name}"


def client_with(value: float, values: Mapping[str, float]) -> str:
    """Return the client with the given value, such as the worst, or "" if no value is valid.

    The name belongs to the recorded statistic, whatever the direction of the metric. Ties are
    resolved by the natural order of the names.
    """
    distances = pd.Series(values, index=sorted(values, key=natural), dtype=float).sub(value).abs()
    return str(distances.idxmin()) if distances.notna().any() else ""


def _rounds(records: Sequence[RoundRecord]) -> pd.Index:
    return pd.Index([record.round for record in records], name="round", dtype=int)
