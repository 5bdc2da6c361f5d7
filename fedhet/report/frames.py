"""The rounds of a run as data frames, indexed by round."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fedhet.base.metrics import ACCURACY
from fedhet.runs.records import NAN, RoundRecord

STATISTICS = ["mean", "std", "worst"]


def scores(records: Sequence[RoundRecord], metric: str = ACCURACY) -> pd.DataFrame:
    """Return a metric over the clients, one row per round, protocol and kind of model."""
    rows = [
        (record.round, protocol, kind, score.mean, score.std, score.worst)
        for record in records
        for protocol, kind, score in record.each(metric)
    ]
    frame = pd.DataFrame(rows, columns=["round", "protocol", "kind", *STATISTICS])
    return frame.astype(dict.fromkeys(STATISTICS, float)).set_index("round")


def by_client(records: Sequence[RoundRecord], protocol: str, kind: str) -> pd.DataFrame:
    """Return each client's accuracy in the evaluated rounds, with one column per client."""
    rows = {
        record.round: score.per_client
        for record in records
        if (score := record.score(ACCURACY, protocol, kind))
    }
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
    return frame.rename_axis(index="round")


def costs(records: Sequence[RoundRecord]) -> pd.DataFrame:
    """Return bytes and seconds of each round; `bytes`, `epsilon` and `clock` are cumulative.

    `epsilon` is the largest of the clients', NaN if no client's samples are protected. `clock` is
    in simulated seconds, NaN without a simulated clock.

    `seconds` is wall-clock time, with one column per stage; see `fedhet.runs.records.Seconds`.
    """
    rows = [
        {"bytes_up": record.bytes_up, "bytes_down": record.bytes_down, **dict(record.seconds)}
        for record in records
    ]
    frame = pd.DataFrame(rows, index=_rounds(records)).rename(columns={"total": "seconds"})
    spent = [max(record.epsilon.values(), default=NAN) for record in records]
    so_far = (frame["bytes_up"] + frame["bytes_down"]).cumsum()
    return frame.assign(bytes=so_far, epsilon=spent, clock=[record.clock for record in records])


def losses(records: Sequence[RoundRecord]) -> pd.DataFrame:
    """Return the training loss of each round that has one, with one column per client."""
    known = [record for record in records if record.loss]
    rows = [record.loss.per_client for record in known if record.loss]
    return pd.DataFrame(rows, index=_rounds(known), dtype=float)


def mean_loss(records: Sequence[RoundRecord]) -> pd.Series:
    """Return the mean training loss of each round that has one."""
    means = [record.loss.mean if record.loss else NAN for record in records]
    return pd.Series(means, index=_rounds(records), dtype=float).dropna()


def figures(records: Sequence[RoundRecord]) -> pd.DataFrame:
    """Return the method's own metrics, one column each, in order of first occurrence."""
    rows = [record.method for record in records]
    return pd.DataFrame(rows, index=_rounds(records), dtype=float)


def over_seeds(each: Sequence[pd.Series]) -> pd.DataFrame:
    """Return mean and sample standard deviation of several runs' curves, NaN for a single run.

    Only rounds for which every run has a value are kept.
    """
    table = pd.concat([curve.dropna() for curve in each], axis=1, join="inner").sort_index()
    return pd.DataFrame({"mean": table.mean(axis=1), "std": table.std(axis=1)})


def _rounds(records: Sequence[RoundRecord]) -> pd.Index:
    return pd.Index([record.round for record in records], name="round", dtype=int)
