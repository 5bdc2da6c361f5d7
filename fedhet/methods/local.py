"""The baseline in which each client trains alone: its declaration."""

from __future__ import annotations

from fedhet.methods.spec import MethodSpec

SPEC = MethodSpec(
    title="each client trains alone; the baseline of every table",
    paper="no paper",
    headline="common",
    any_model=True,
)
