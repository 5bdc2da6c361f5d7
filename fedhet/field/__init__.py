"""One table of all methods: each by architectures and split, ranked, with what it costs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedhet.field.declaration import FieldTable, read_field

if TYPE_CHECKING:
    from fedhet.field.plan import FieldPlan as FieldPlan
    from fedhet.field.plan import plan_field as plan_field
    from fedhet.field.results import FieldResults as FieldResults
    from fedhet.field.results import collect as collect
    from fedhet.field.write import write_field as write_field
    from fedhet.field.write import write_latex as write_latex

__all__ = [
    "FieldPlan", "FieldResults", "FieldTable", "collect", "plan_field", "read_field",
    "write_field", "write_latex",
]  # fmt: skip

# Import lazily: plans need PyTorch, results need pandas and matplotlib, a list needs none of them.
_HOMES = {
    "FieldPlan": "plan", "plan_field": "plan",
    "FieldResults": "results", "collect": "results",
    "write_field": "write", "write_latex": "write",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
