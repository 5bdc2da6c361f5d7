"""One table of all methods: each by architectures and split, ranked, with what it costs."""

from fedhet.field.declaration import FieldTable, read_field
from fedhet.field.plan import FieldPlan, plan_field
from fedhet.field.results import FieldResults, collect
from fedhet.field.write import write_field, write_latex

__all__ = [
    "FieldPlan", "FieldResults", "FieldTable", "collect", "plan_field", "read_field",
    "write_field", "write_latex",
]  # fmt: skip
