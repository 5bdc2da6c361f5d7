"""Makes the runs of a table: what is missing, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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

from fedhet.base.errors import FedhetError
from fedhet.cli.interrupt import ending_at_once
from fedhet.cli.jobs import counted, fault_of, side_by_side
from fedhet.cli.options import console, say
from fedhet.config.resolve import Config
from fedhet.papers.plan import PlannedRun, Values
from fedhet.runs.directory import forget_models
from fedhet.runs.log import Watcher
from fedhet.runs.records import RoundRecord
from fedhet.runs.units import plural

GOES_ON = "the same command continues the table"


@dataclass(frozen=True)
class Wanted:
    """What to make of a table, and how."""

    size: str
    seeds: Sequence[int]
    out: Path
    """The directory of the table; its runs are in `runs`."""
    over: Values
    """The settings that all runs have instead of the table's."""
    jobs: int = 1
    """The runs at once."""
    keep_models: bool = False
    """Whether finished runs keep their models; else, only their measurements."""
    dry_run: bool = False
    """Whether the runs are only listed."""
    latex: bool = False
    """Whether the table is written in LaTeX too."""

    @property
    def runs(self) -> Path:
        """The directory of the runs."""
        return self.out / "runs"


def show_plan(runs: Sequence[PlannedRun]) -> None:
    """Print which runs are finished, and the command of each."""
    for run in runs:
        say(f"{'finished' if run.finished else 'to do'}  {run.label}: {run.command}")


def raise_faults(faults: Mapping[str, str]) -> None:
    """Raise FedhetError that names the runs that failed, with their reasons; none: do nothing."""
    if faults:
        reasons = "; ".join(f"{label}: {fault}" for label, fault in faults.items())
        raise FedhetError(f"{plural(len(faults), 'run')} failed: {reasons}")


def make_runs(label: str, runs: Sequence[PlannedRun], wanted: Wanted) -> dict[str, str]:
    """Make the unfinished runs, `wanted.jobs` at once; return the errors of those that failed.

    They have no page of their own: it takes longer than a small run, and `fedhet report` writes it.
    """
    make, jobs = partial(_made, keep_models=wanted.keep_models), wanted.jobs
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
    fault = fault_of(run.config, run.directory.resolve(), watchers, report=False)
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
