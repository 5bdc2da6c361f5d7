"""What a comparison of runs consists of."""

from __future__ import annotations

from dataclasses import dataclass

from fedhet.report.groups import Column, Group
from fedhet.report.paired import Pair


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

    @property
    def headline(self) -> Column:
        """The protocol and kind by which the groups are ordered."""
        return self.columns[0]
