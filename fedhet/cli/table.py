"""The command `table`: tables of papers, next to their printed numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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

from fedhet.cli.interrupt import ending_at_once
from fedhet.cli.jobs import counted, fault_of, side_by_side
from fedhet.cli.listing import listing
from fedhet.cli.options import console, say
from fedhet.config.resolve import Config, resolve
from fedhet.errors import FedhetError, SettingsError
from fedhet.papers import (
    SIZES,
    Plan,
    Results,
    collect,
    each_once,
    overview,
    plan,
    read_table,
    table_names,
    tables_of,
    write_latex,
    write_overview,
    write_results,
)
from fedhet.papers.plan import PlannedRun, Values
from fedhet.papers.write import LEGEND, cells, claims
from fedhet.report.tables import Cells
from fedhet.runs.directory import forget_models, make_parent
from fedhet.runs.log import Watcher
from fedhet.runs.records import RoundRecord
from fedhet.runs.units import plural

GOES_ON = "the same command continues the table"


def list_tables() -> None:
    """Print the available tables, and how many runs each takes."""
    console.print(_listed())


def make_tables(
    word: str,
    size: str,
    seeds: list[int],
    out: Path,
    jobs: int,
    over: Values,
    *,
    keep_models: bool,
    dry_run: bool,
    latex: bool = False,
) -> None:
    """Make the missing runs of tables, and show the tables; if `dry_run`, list the runs.

    Unless `keep_models`, the models of finished runs are deleted; their measurements are kept.
    """
    plans = [_planned(name, size, seeds, out / "runs", over) for name in tables_of(word)]
    runs = each_once(run for found in plans for run in found.runs)
    for run in runs:
        resolve(run.values)  # all are checked before the first one starts
    if dry_run:
        for run in runs:
            say(f"{'finished' if run.finished else 'to do'}  {run.label}: {run.command}")
        return
    make_parent(out)
    faults = _make(f"{word}, {size}", runs, jobs, partial(_made, keep_models=keep_models))
    made = [collect(found) for found in plans]
    for results in made:
        _show(results)
        say(f"table: {write_results(results, out)}")
        if latex:
            say(f"for a paper: {write_latex(results, out)}")
    if len(made) > 1:
        console.print(_printed(overview(made)))
        write_overview(made, out / f"{word}-{size}.md")
        say(f"all of them: {out / f'{word}-{size}.md'}")
    if faults:
        reasons = "; ".join(f"{label}: {fault}" for label, fault in faults.items())
        raise FedhetError(f"{plural(len(faults), 'run')} failed: {reasons}")


def _planned(name: str, size: str, seeds: list[int], runs: Path, over: Values) -> Plan:
    table = read_table(name)
    if size not in SIZES or size not in table.sizes:
        raise SettingsError(f"'--size {size}': table '{name}' has {', '.join(table.sizes)}")
    return plan(name, table, size, seeds, runs, over)


def _listed() -> Table:
    rows = []
    for name in table_names():
        table = read_table(name)
        counts = {s: len(plan(name, table, s, [0], Path()).runs) for s in table.sizes}
        sizes = ", ".join(f"{size} {count}" for size, count in counts.items())
        rows.append((name, table.title, table.source, sizes))
    return listing("table", "what it is", "source", "runs a seed", rows=rows)


def _make(
    label: str, runs: Sequence[PlannedRun], jobs: int, make: Callable[..., str]
) -> dict[str, str]:
    """Make the unfinished runs; return the errors of those that failed."""
    todo = [run for run in runs if not run.finished]
    count, faults = len(runs), dict[str, str]()
    with _progress() as progress, ending_at_once(lambda: GOES_ON):
        whole = progress.add_task(label, total=count, completed=count - len(todo))
        made = _one_by_one(todo, make, progress) if jobs == 1 else side_by_side(todo, jobs, make)
        first = count - len(todo) + 1
        for number, (left, (run, fault)) in enumerate(counted(made, len(todo)), first):
            progress.advance(whole)
            label = f"{run.label}, seed {run.values['seed']}"
            if fault:
                faults[label] = fault
            if not console.is_terminal:
                say(f"{number} of {count}  {label}{': ' if fault else ''}{fault}{left}")
    return faults


def _one_by_one(
    todo: Sequence[PlannedRun], make: Callable[..., str], progress: Progress
) -> Iterator[tuple[PlannedRun, str]]:
    for run in todo:
        task = progress.add_task(run.label, total=None)
        yield run, make(run, watchers=[_Rounds(progress, task)])
        progress.remove_task(task)


def _made(run: PlannedRun, *, keep_models: bool, watchers: Sequence[Watcher] = ()) -> str:
    """Make or resume a run; return why it failed, or ""."""
    if run.finished:  # for another table that is made at the same time
        return ""
    fault = fault_of(run.config, run.directory.resolve(), watchers)
    if not (fault or keep_models):
        forget_models(run.directory)
    return fault


class _Rounds(Watcher):
    """Shows the rounds of a run as a bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Start the bar."""
        seed = f", seed {config.run.seed}"
        label = self._progress.tasks[-1].description
        self._progress.update(self._task, total=config.run.rounds, description=label + seed)

    def round_finished(self, record: RoundRecord) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=record.round)


def _progress() -> Progress:
    return Progress(
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


def _show(results: Results) -> None:
    console.print(_printed(cells(results)))
    say(LEGEND)
    if results.verdicts:
        console.print(_printed(claims(results)))


def _printed(found: Cells) -> Table:
    rows = [[cell.text for cell in row] for row in found.rows]
    return listing(*found.headers, rows=rows, words=found.words)
