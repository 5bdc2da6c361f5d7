"""The command `table field`: every method by architectures and split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedhet.cli.making import make_runs, raise_faults, show_plan
from fedhet.cli.options import console, say
from fedhet.cli.table import printed
from fedhet.errors import SettingsError
from fedhet.field import FieldPlan, collect, plan_field, read_field, write_field, write_latex
from fedhet.field.declaration import NAME
from fedhet.field.write import LEGEND, matrix, ranks
from fedhet.methods.registry import all_methods, find_method
from fedhet.papers.plan import Values
from fedhet.papers.source import SIZES
from fedhet.runs.directory import make_parent


def make_field(
    size: str,
    methods: Sequence[str],
    seeds: list[int],
    out: Path,
    jobs: int,
    over: Values,
    *,
    keep_models: bool,
    dry_run: bool,
    latex: bool = False,
) -> None:
    """Make the missing runs, one seed after the other, and write the table after each.

    `methods`: none means all. If `dry_run`, the runs are listed.
    """
    plan = _planned(size, methods or [*all_methods()[0]], seeds, out / "runs", over)
    if dry_run:
        show_plan(plan.runs)
        return
    make_parent(out)
    faults: dict[str, str] = {}
    for seed in plan.seeds:
        runs = [run for run in plan.runs if run.values["seed"] == seed]
        label = f"{NAME}, {size}, seed {seed}"
        faults |= make_runs(label, runs, jobs, keep_models=keep_models)
        _write(plan, out, latex=latex)
    raise_faults(faults)


def _planned(
    size: str, methods: Sequence[str], seeds: list[int], runs: Path, over: Values
) -> FieldPlan:
    if size not in SIZES:
        raise SettingsError(f"'--size {size}': table '{NAME}' has {', '.join(SIZES)}")
    for name in methods:
        find_method(name)
    return plan_field(read_field(), size, methods, seeds, runs, over)


def _write(plan: FieldPlan, out: Path, *, latex: bool) -> None:
    results = collect(plan)
    for measure in ("personal", "common"):
        say(f"accuracy, {measure}")
        console.print(printed(matrix(results, measure)))
    say(LEGEND)
    console.print(printed(ranks(results)))
    say(f"table: {write_field(results, out)}")
    if latex:
        say(f"for a paper: {write_latex(results, out)}")
