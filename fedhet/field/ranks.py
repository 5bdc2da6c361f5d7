"""Ranks of methods over cells, with Friedman's test and Nemenyi's critical difference.

Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 2006. SciPy is imported
when ranks are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

ALPHA = 0.05


@dataclass(frozen=True)
class Ranking:
    """The mean ranks of k methods over N cells; the best method has the lowest."""

    ranks: pd.Series
    """By method, ascending; methods that are equal in a cell share the mean of their places."""
    cells: int
    p: float
    """Of Friedman's test, that the methods do not differ."""
    critical: float
    """Two methods differ if their mean ranks do by more than this (Demšar, section 3.2.2)."""
    critical_by_seed: float
    """The same with each seed of a cell as a data set of its own, which the seeds are not quite."""

    def behind(self, method: str) -> bool:
        """Return whether a method is clearly behind the best."""
        return bool(self.ranks[method] - self.ranks.iloc[0] > self.critical)


def ranked(scores: pd.DataFrame, seeds: int = 1) -> Ranking | None:
    """Rank methods by scores [N cells, methods], the highest first; None for less than 3 of them.

    A method that lacks a score is left out. `seeds` are the runs whose mean each score is.
    """
    from scipy import stats

    known = scores.dropna(axis="columns")
    count, cells = known.shape[1], len(known)
    if count < 3 or cells < 2:
        return None
    ranks = known.rank(axis="columns", ascending=False).mean().sort_values(kind="stable")
    p = float(stats.friedmanchisquare(*(known[name] for name in known)).pvalue)
    return Ranking(ranks, cells, p, critical(count, cells), critical(count, cells * seeds))


def critical(methods: int, cells: int) -> float:
    """Return Nemenyi's critical difference: q sqrt(k (k + 1) / (6 N)).

    q is the studentized range of k groups and infinite degrees of freedom, divided by sqrt 2.
    """
    from scipy import stats

    q = float(stats.studentized_range.ppf(1 - ALPHA, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * cells))
