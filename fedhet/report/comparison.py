"""What a comparison of runs consists of."""

from __future__ import annotations

from dataclasses import dataclass

from fedhet.base.metrics import ACCURACY, METRICS, Metric
from fedhet.report.groups import Column, Group, Spread
from fedhet.report.paired import Pair, Test
from fedhet.runs.units import percent, score


@dataclass(frozen=True)
class Comparison:
    """Groups, best first by the headline column, and notes for the reader."""

    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    target: float
    notes: tuple[str, ...]
    figures: tuple[str, ...] = ()
    """The methods' own metrics that are also drawn over rounds."""
    pairs: tuple[Pair, ...] = ()
    """The differences to the baseline, one pair a group."""
    metric: Metric = METRICS[ACCURACY]
    """What is compared; the runs' scores are of this metric."""
    test: Test = "none"
    """How the pairs were tested."""

    @property
    def headline(self) -> Column:
        """The protocol and kind by which the groups are ordered."""
        return self.columns[0]

    def bytes_to_target(self, group: Group) -> Spread:
        """Return the bytes that a group sent until it reached the target, over its runs."""
        return self._to_target(group, "bytes")

    def clock_to_target(self, group: Group) -> Spread:
        """Return the simulated seconds until a group reached the target, over its runs."""
        return self._to_target(group, "clock")

    def _to_target(self, group: Group, cost: str) -> Spread:
        lower = self.metric.lower_is_better
        return group.cost_to(cost, self.headline, self.target, lower_is_better=lower)

    @property
    def has_clock(self) -> bool:
        """Whether any group has a simulated clock."""
        return any(group.clock().n for group in self.groups)

    @property
    def said_target(self) -> str:
        """The target as it is shown: a percentage if the metric is a share."""
        return percent(self.target) if self.metric.highest == 1.0 else score(self.target)

    @property
    def beside_accuracy(self) -> str:
        """The metric's name after a comma, if it is not accuracy."""
        return "" if self.metric.name == ACCURACY else f", {self.metric.title}"

    @property
    def title(self) -> str:
        """The metric's name at the beginning of a title."""
        return self.metric.title[0].upper() + self.metric.title[1:]
