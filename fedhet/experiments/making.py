"""Creation of tables: executes missing runs, one by one or in parallel, and writes the results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedhet.base.errors import FedhetError, SettingsError, StateError
from fedhet.cli.options import console, listing, say
from fedhet.cli.training import error_of, exit_on_signal, run_parallel, with_time_left
from fedhet.config.resolve import Config, resolve
from fedhet.experiments import claims, field, output, paper
from fedhet.experiments.plan import (
    FIELD,
    SIZES,
    PaperTable,
    PlannedRun,
    Values,
    about,
    command_of,
    each_once,
    plan,
    plan_field,
    read_field,
    read_table,
    table_names,
    tables_of,
)
from fedhet.methods.registry import find_method
from fedhet.report.tables import Cells
from fedhet.runs.directory import delete_models, make_directory
from fedhet.runs.log import Watcher
from fedhet.runs.records import RoundRecord
from fedhet.runs.units import plural

GOES_ON = "the same command continues the table"
MEANING = (
    "A claim holds if it holds in all comparisons of its table, and does not hold if it fails in "
    "one. If its bound names most comparisons, more than half must hold. A comparison holds if its "
    "95 % confidence interval over seeds and test samples is within the bound, and fails if it is "
    "outside."
)


@dataclass(frozen=True)
class Wanted:
    """Options that the user has passed to `fedhet table`."""

    size: str
    seeds: Sequence[int]
    out: Path
    """Directory of the table; its runs are in the subdirectory `runs`."""
    over: Values
    """Settings that override the table's settings in all runs."""
    jobs: int = 1
    """Number of runs to execute in parallel."""
    keep_models: bool = False
    """Whether finished runs keep their models."""
    dry_run: bool = False
    """Whether to list the runs without executing them."""
    latex: bool = False
    """Whether to also write LaTeX files."""


def make_tables(word: str, rows: Sequence[str], wanted: Wanted) -> None:
    """Execute the missing runs for the tables that `word` selects, and print and write the tables.

    If `rows` is not empty, only rows whose names start with a word in `rows` are trained.
    """
    plans, size, names = [], wanted.size, tables_of(word)
    for name in names:
        table = read_table(name)
        if size not in table.sizes:
            problem = f"table '{name}': expected {', '.join(table.sizes)}, got {size!r}"
            if size not in SIZES or len(names) == 1:
                raise SettingsError(f"'--size': {problem}")
            say(f"skipped {problem}")
            continue
        plans.append(plan(name, table, size, wanted.seeds, wanted.out / "runs", wanted.over))
    known = list(dict.fromkeys(cell.row.name for planned in plans for cell in planned.cells))
    for start in rows:
        if not any(name.startswith(start) for name in known):
            rows_known = "; ".join(known)
            raise SettingsError(f"'--rows': expected rows of {word} ({rows_known}), got {start!r}")
    for planned in plans:
        for notice in planned.replaced:
            say(f"{planned.name}: {notice}, as set with --set")
    runs = each_once(run for planned in plans for run in planned.runs_of(rows))
    for run in runs:
        resolve(run.values)  # Check the settings of all runs before the first run starts.
    if wanted.dry_run:
        show_plan(runs)
        return
    out = wanted.out
    make_directory(out)
    faults = make_runs(f"{word}, {wanted.size}", runs, wanted)
    finished = [paper.collect(planned) for planned in plans]
    for results in finished:
        show_result(results.result, results.plan.table)
        say(f"table: {output.write_results(results, out)}")
        if wanted.latex:
            say(f"LaTeX table: {output.write_latex(results, out)}")
    if len(finished) > 1:
        console.print(printed(output.overview(finished)))
        output.write_overview(finished, out / f"{word}-{wanted.size}.md")
        say(f"overview: {out / f'{word}-{wanted.size}.md'}")
    raise_faults(faults)


def make_field(methods: Sequence[str], wanted: Wanted) -> None:
    """Execute the missing runs for the table of all methods, and write the table after each seed.

    An empty list of methods means all methods.
    """
    size = wanted.size
    if size not in SIZES:
        raise SettingsError(f"'--size': expected one of {', '.join(SIZES)}, got {size!r}")
    field_table = read_field()
    methods = methods or field_table.methods()
    for name in methods:
        find_method(name)
    planned = plan_field(field_table, size, methods, wanted.seeds, wanted.out / "runs", wanted.over)
    if wanted.dry_run:
        show_plan(planned.runs)
        return
    make_directory(wanted.out)
    faults: dict[str, str] = {}
    for seed in planned.seeds:
        runs = [run for run in planned.runs if run.values["seed"] == seed]
        faults |= make_runs(f"{FIELD}, {size}, seed {seed}", runs, wanted)
        results = field.collect(planned)
        show_accuracies(results)
        say(f"table: {field.write_field(results, wanted.out)}")
        if wanted.latex:
            say(f"LaTeX table: {field.write_latex(results, wanted.out)}")
    raise_faults(faults)


def show_accuracies(results: field.FieldResults) -> None:
    """Print the accuracies and the mean ranks in the table of all methods."""
    for measure in ("personal", "common"):
        say(f"accuracy, {measure}")
        console.print(printed(field.matrix(results, measure)))
    say(field.LEGEND)
    console.print(printed(field.ranks(results)))


def show_field(folder: Path | None, default: Path) -> None:
    """Print the finished tables of all methods in full: accuracies, differences, costs, and notes.

    `claims.field_records` selects the directory. Raises StateError if no finished table is found.
    """
    records = claims.field_records(folder, default)
    if not records:
        raise StateError(
            f"{FIELD}: no finished table found in {folder or default}. Run `fedhet table {FIELD}`."
        )
    for record in records:
        results = record.results
        say(f"{results.plan.table.title}. {about(results.plan, results.finished)}")
        say(" ".join(filter(None, (results.made, results.hardware, command_of(results.plan)))))
        show_accuracies(results)
        say(field.RANKS)
        for cells, legend in (
            (field.differences(results), field.DIFFERENCES),
            (field.costs(results), field.COST),
        ):
            console.print(printed(cells))
            say(legend)
        for note in results.plan.table.notes:
            say(f"- {note}")


def show_result(result: paper.TableResult, table: PaperTable) -> None:
    """Print a table's numbers and the outcome of every comparison."""
    console.print(printed(output.cells(result, table)))
    say(output.legend(result, table))
    say(result.about(table))
    if result.comparisons:
        console.print(printed(output.claims(result)))
        say(output.DIFFERENCES)


def show_tables(word: str, folder: Path | None, default: Path) -> None:
    """Print finished tables in full: numbers, comparisons, the claims' verdicts, and notes.

    `claims.find_finished` selects the directory. Raises StateError if no finished table is found.
    """
    results, _ = claims.find_finished(folder, default, tables_of(word))
    if not results:
        raise StateError(
            f"{word}: no finished table found in {folder or default}. Run `fedhet table {word}`."
        )
    for result in results:
        table = read_table(result.table)
        say(f"{table.title}. {table.source}.")
        say(" ".join(filter(None, (result.made, result.hardware, result.command))))
        show_result(result, table)
        for claim in claims.claims_in([result]):
            say(f"{claim.on_data()}: {claim.says} ({claim.bound})")
        for note in (*table.notes, *filter(None, [result.remark])):
            say(f"- {note}")


def show_claims(folder: Path | None, default: Path, *, as_json: bool) -> None:
    """Print the number of claims by verdict in the finished tables, or all claims as JSON.

    `claims.find_finished` selects the directory. Raises StateError if `folder` contains no table.
    """
    results, where = claims.find_finished(folder, default, table_names())
    if folder and not results:
        raise StateError(
            f"{folder}: no finished table found. Run `fedhet table NAME --out {folder}`."
        )
    tested = claims.claims_in(results)
    if as_json:
        listed = [
            {"paper": each.paper, "table": each.result.table, "size": each.result.size,
             "data": each.result.data, "claim": each.says, "bound": each.bound,
             "verdict": each.verdict}
            for each in tested
        ]  # fmt: skip
        say(json.dumps(listed, ensure_ascii=False))
        return
    say(where)
    console.print(printed(claims.counted(tested)))
    say(MEANING)


def printed(cells: Cells) -> Table:
    """Format a table for the terminal."""
    rows = [[cell.text for cell in row] for row in cells.rows]
    return listing(*cells.headers, rows=rows, words=cells.words)


def show_plan(runs: Sequence[PlannedRun]) -> None:
    """Print the state and the command of each run."""
    for run in runs:
        say(f"{'finished' if run.finished else 'to do'}  {run.label}: {run.command}")


def raise_faults(faults: Mapping[str, str]) -> None:
    """Raise FedhetError with the failed runs and the reasons, if any run failed."""
    if faults:
        reasons = "; ".join(f"{label}: {fault}" for label, fault in faults.items())
        raise FedhetError(f"{plural(len(faults), 'run')} failed: {reasons}")


def make_runs(label: str, runs: Sequence[PlannedRun], wanted: Wanted) -> dict[str, str]:
    """Execute the unfinished runs, `wanted.jobs` in parallel, and return errors by run.

    Reports are not written, because writing a report can take longer than a small run; `fedhet
    report` writes them later.
    """
    make, jobs = partial(_made, keep_models=wanted.keep_models), wanted.jobs

    def one_by_one() -> Iterator[tuple[PlannedRun, str]]:
        for run in todo:
            task = progress.add_task(run.label, total=None)
            yield run, make(run, watchers=[_Rounds(progress, task)])
            progress.remove_task(task)

    todo = [run for run in runs if not run.finished]
    count, faults = len(runs), dict[str, str]()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        speed_estimate_period=3600,
        disable=not console.is_terminal,
    )
    with progress, exit_on_signal(lambda: GOES_ON):
        whole = progress.add_task(label, total=count, completed=count - len(todo))
        made = one_by_one() if jobs == 1 else run_parallel(todo, jobs, make)
        first = count - len(todo) + 1
        for number, (left, (run, fault)) in enumerate(with_time_left(made, len(todo)), first):
            progress.advance(whole)
            label = f"{run.label}, seed {run.values['seed']}"
            if fault:
                faults[label] = fault
            if not console.is_terminal:
                say(f"{number} of {count}  {label}{': ' if fault else ''}{fault}{left}")
    return faults


def _made(run: PlannedRun, *, keep_models: bool, watchers: Sequence[Watcher] = ()) -> str:
    """Execute or resume a run. Return an error message, or "" if it succeeded."""
    if run.finished:  # Another process may have executed the same run.
        return ""
    fault = error_of(run.config, run.directory.resolve(), watchers, report=False)
    if not (fault or keep_models):
        delete_models(run.directory)
    return fault


class _Rounds(Watcher):
    """Progress bar over the rounds of a run."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Set the length and the label of the bar."""
        seed = f", seed {config.run.seed}"
        label = self._progress.tasks[-1].description
        self._progress.update(self._task, total=config.run.rounds, description=label + seed)

    def round_finished(self, record: RoundRecord) -> None:
        """Advance the bar."""
        self._progress.update(self._task, completed=record.round)
