"""Tests of paired differences over seeds, with Holm's correction for the number of them.

SciPy is imported when a test is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from fedhet.base.errors import SettingsError
from fedhet.report.paired import DIGITS, Pair, Test
from fedhet.runs.records import NAN


def read_test(name: str) -> Test:
    """Return the test of that name. Raises SettingsError for one that there is not."""
    for known in get_args(Test):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise SettingsError(f"'--test {name}' is not allowed: it takes {', '.join(get_args(Test))}")


def tested(pairs: Sequence[Pair], test: Test) -> tuple[Pair, ...]:
    """Return pairs with the corrected p of their differences in the last round."""
    values = [p_value([*pair.last.per_seed.values()], test) for pair in pairs]
    return tuple(replace(pair, p=p) for pair, p in zip(pairs, holm(values), strict=True))


def p_value(differences: Sequence[float], test: Test) -> float:
    """Return the two-sided p of differences whose centre would be 0; NaN if none can be said.

    The paired t-test takes them as normal; Wilcoxon's signed-rank test takes them as symmetric and
    cannot go below 2^(1-n) for n seeds: 0.25 for three, 0.0625 for five.
    """
    from scipy import stats

    differences = [round(each, DIGITS) for each in differences]
    if test == "none" or len(differences) < 2 or not any(differences):
        return NAN
    if test == "wilcoxon":
        return float(stats.wilcoxon(differences).pvalue)
    if len(set(differences)) == 1:  # without any spread nothing is known of it
        return NAN
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Return p values with Holm's correction: the chance of one false finding among all is p.

    Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979. The i-th smallest of m is
    multiplied by m - i + 1, and is no smaller than those before it. NaN stays and does not count.
    """
    known = sorted((value, place) for place, value in enumerate(values) if not math.isnan(value))
    found, largest = list(values), 0.0
    for rank, (value, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        found[place] = largest
    return found
