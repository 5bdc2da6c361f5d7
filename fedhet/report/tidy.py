"""A comparison's numbers as one flat table, for pandas, R or a spreadsheet."""

from __future__ import annotations

import pandas as pd

from fedhet.report.comparison import Comparison
from fedhet.runs.units import path_text


def comparison_frame(comparison: Comparison) -> pd.DataFrame:
    """Return a row for each run, protocol and kind of model that it was evaluated with.

    `mean`, `std` and `worst` are over the clients in the last round, `tail` is the mean of the last
    fifth of the rounds; all of the metric that is compared.
    """
    rows = [
        {
            "run": group.label, "method": run.method, "dataset": run.dataset, "seed": run.seed,
            "rounds": run.done, "metric": comparison.metric.name,
            "protocol": protocol, "kind": kind,
            "mean": score.mean, "std": score.std, "worst": score.worst,
            "tail": run.tail(protocol, kind).mean,
            "bytes_up": run.totals["bytes_up"], "bytes_down": run.totals["bytes_down"],
            "seconds": run.totals["seconds"], "directory": path_text(run.path),
        }
        for group in comparison.groups
        for run in group.runs
        for protocol, kind in run.columns
        for score in [run.last(protocol, kind)]
    ]  # fmt: skip
    return pd.DataFrame(rows)
