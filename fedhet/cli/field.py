"""The command `table field`: every method by architectures and split."""

from __future__ import annotations

from collections.abc import Sequence

from fedhet.base.errors import SettingsError
from fedhet.cli.making import Wanted, make_runs, raise_faults, show_plan
from fedhet.cli.options import console, say
from fedhet.cli.table import printed
from fedhet.field import FieldPlan, collect, plan_field, read_field, write_field, write_latex
from fedhet.field.declaration import NAME
from fedhet.field.write import LEGEND, matrix, ranks
from fedhet.methods.registry import all_methods, find_method
from fedhet.papers.source import SIZES
from fedhet.runs.directory import make_parent


def make_field(methods: Sequence[str], wanted: Wanted) -> None:
    """Make the missing runs, one seed after the other, and write the table after each.

    `methods`: none means all.
    """
    plan = _planned(methods or [*all_methods()[0]], wanted)
    if wanted.dry_run:
        show_plan(plan.runs)
        return
    make_parent(wanted.out)
    faults: dict[str, str] = {}
    for seed in plan.seeds:
        runs = [run for run in plan.runs if run.values["seed"] == seed]
        faults |= make_runs(f"{NAME}, {plan.size}, seed {seed}", runs, wanted)
        _write(plan, wanted)
    raise_faults(faults)


def _planned(methods: Sequence[str], wanted: Wanted) -> FieldPlan:
    size = wanted.size
    if size not in SIZES:
        raise SettingsError(f"'--size {size}': table '{NAME}' has {', '.join(SIZES)}")
    for name in methods:
        find_method(name)
    return plan_field(read_field(), size, methods, wanted.seeds, wanted.runs, wanted.over)


def _write(plan: FieldPlan, wanted: Wanted) -> None:
    results = collect(plan)
    for measure in ("personal", "common"):
        say(f"accuracy, {measure}")
        console.print(printed(matrix(results, measure)))
    say(LEGEND)
    console.print(printed(ranks(results)))
    say(f"table: {write_field(results, wanted.out)}")
    if wanted.latex:
        say(f"for a paper: {write_latex(results, wanted.out)}")
