"""A run's directory: its files, its lock, and what a run may be resumed with.

Records, summaries and partitions are JSON; their schema is in `fedhet.runs.records`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedhet.base.disk import (
    Folder,
    check_json_size,
    check_no_symlinks,
    parse_json,
    read_file,
    read_json,
)
from fedhet.base.errors import StateError, reason_of
from fedhet.config.sources import read_toml
from fedhet.runs.measures import headline_mean
from fedhet.runs.records import Origin, RoundRecord, Summary
from fedhet.settings.run import ENDS, PLACE, where_it_ran
from fedhet.wire.identity import is_name

if TYPE_CHECKING:
    from fedhet.config.resolve import Config

T = TypeVar("T")
BASELINE = "baseline"
"""The folder in a run's directory of the run that it is compared with."""
PARTS_OF_A_RECORD = 20
"""Parts of a record that are there though its line does not name them."""
LOCK = "run.lock"
"""The file that a run's process locks."""
LOCK_PAUSES = (0.05, 0.05, 0.0)
"""Seconds after each try to lock it: who asks for a run's status has it locked for a moment."""
WITH_MODELS = ("state", "checkpoints", "inbox", "late", "pool")
"""The folders of a run's directory that hold models or replies: most of what it takes on disk."""


def record_line(record: RoundRecord) -> str:
    """Return a record as a line of metrics.jsonl, with null for what is not finite.

    What only some rounds have is left out if there is none.
    """
    content = _finite(TypeAdapter(RoundRecord).dump_python(record))
    sometimes = "majority", "metrics", "unevaluated", "absent", "late", "ages", "clock", "epsilon"
    for name in sometimes:
        if not content[name]:
            del content[name]
    return json.dumps(content, allow_nan=False) + "\n"


def summary_text(summary: Summary) -> str:
    """Return a summary as the text of summary.json; what only some runs have is left out if empty.

    These are `relative`, `metrics`, `training` and `privacy`, and each round's `clock`.
    """
    names = "relative", "metrics", "training", "privacy"
    empty = {name for name in names if not getattr(summary, name)}
    content = _finite(summary.model_dump(exclude=empty))
    for past in content["history"]:
        if past["clock"] is None:
            del past["clock"]
    return json.dumps(content, indent=1, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def append(path: Path, line: str) -> None:
    """Append a line to a file and sync it; it is not written through a link. Raises StateError."""
    try:
        with os.fdopen(Folder(path.parent).open(path.name, os.O_WRONLY | os.O_APPEND), "a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StateError(f"cannot write {path}: {reason_of(error)}") from None


def read_records(path: Path) -> tuple[list[RoundRecord], list[str]]:
    """Return the rounds of metrics.jsonl in order, and notes on what was left out.

    A truncated last line is left out. If a round was repeated after a resume, the later record
    counts. Raises StateError, which names the line, for any other fault.
    """
    with reading(path):
        text = read_file(path)
    check_json_size(path, text, PARTS_OF_A_RECORD * text.count(b"\n"))
    lines = [(n, line) for n, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    records: dict[int, RoundRecord] = {}
    notes: list[str] = []
    for number, line in lines:
        try:
            content = parse_json(line.decode())
        except (ValueError, RecursionError) as error:
            if number != lines[-1][0]:
                raise StateError(f"{path}: line {number}: not valid JSON: {error}") from None
            notes.append("the last line of metrics.jsonl was cut short and is left out")
            break
        record = _validated(RoundRecord, content, f"{path}: line {number}")
        records[record.round] = record
    return [records[number] for number in sorted(records)], notes


def read_known(path: Path, schema: type[T]) -> T | None:
    """Return what a JSON file holds, of a schema, or None if it is absent. Raises StateError."""
    return read_validated(path, schema) if path.exists() else None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a StateError that names `path` if it cannot be read inside the block."""
    try:
        yield
    except FileNotFoundError:
        raise StateError(
            f"{path}: absent; either no round was finished, or {path.parent} is not the directory "
            "of a run"
        ) from None
    except OSError as error:
        raise StateError(f"{path}: unreadable: {reason_of(error)}") from None


def read_validated(path: Path, schema: type[T]) -> T:
    """Return what a JSON file holds, of a schema. Raises StateError that names file and field."""
    with reading(path):
        content = read_json(path)
    return _validated(schema, content, str(path))


def _validated(schema: type[T], content: object, where: str) -> T:
    try:
        return TypeAdapter(schema).validate_python(content)
    except ValidationError as error:
        first: Any = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "content"
        raise StateError(f"{where}: {field}: {first['msg']}") from None


def create(directory: Path) -> None:
    """Create the directory of a new run. Raises StateError if it is not empty."""
    if (directory / "config.toml").exists():
        raise StateError(
            f"{directory} already contains a run: give another directory with --out, or resume "
            "the run with --resume (in a deployment: --set resume=true)"
        )
    make_folder(directory)
    if any(directory.iterdir()):
        raise StateError(f"{directory} is not empty; give another directory with --out")


def make_folder(directory: Path) -> None:
    """Create a folder for runs, unless it exists and can be read. Raises StateError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        next(directory.iterdir(), None)
    except OSError as error:
        raise StateError(f"cannot make the folder {directory}: {reason_of(error)}") from None


def delete_models(directory: Path) -> None:
    """Remove a run's models and what it would resume from; what it measured stays."""
    for name in WITH_MODELS:
        shutil.rmtree(directory / name, ignore_errors=True)


def claimed(directory: Path) -> IO[str]:
    """Return an open lock file of the directory; the system releases it when the process ends.

    Raises StateError if another process has locked the run, or if a link lies in its directory.
    """
    check_no_symlinks(directory)
    file = os.fdopen(Folder(directory).open(LOCK, os.O_RDWR), "r+")
    for pause in LOCK_PAUSES:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        time.sleep(pause)
    file.close()
    raise StateError(f"the run in {directory} is still running in another process")


def is_claimed(directory: Path) -> bool:
    """Return whether a process has locked the run in a directory: it is under way."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_same(config: Config, directory: Path) -> None:
    """Raise StateError unless `directory` holds a run of the same experiment that can be resumed.

    What is not part of the experiment may differ: where and on what it runs, and when it ends. A
    complete run can be resumed with more rounds.
    """
    if is_complete(config, directory):
        advice = "it can be resumed with more --rounds"
        if len(read_records(directory / "metrics.jsonl")[0]) < config.run.rounds:
            advice = "it was stopped early, and can be resumed with --set early-stopping=0"
        raise StateError(
            f"the run in {directory} is complete; there is nothing to resume: {advice}"
        )


def is_complete(config: Config, directory: Path) -> bool:
    """Return whether `directory` holds a run of the same experiment that has no rounds left.

    Raises StateError if it is of another experiment, or was to have more rounds.
    """
    if not (directory / "config.toml").exists():
        return False
    there = read_toml(directory / "config.toml")
    here = {name: value for name, value in config.flat().items() if name not in PLACE}
    for name in sorted(here.keys() | there.keys(), key=lambda name: (name != "method", name)):
        if here.get(name) != there.get(name) and name not in where_it_ran() | ENDS:
            raise StateError(
                f"{directory} contains a run with '{name}' = {there.get(name)!r}, not "
                f"{here.get(name)!r}: resume it with its own settings, or start another run in "
                "another directory"
            )
    rounds, planned = config.run.rounds, there.get("rounds")
    if isinstance(planned, int) and rounds < planned:
        raise StateError(
            f"{directory} contains a run with 'rounds' = {planned}, not {rounds}: a run can be "
            "resumed with more rounds, not with fewer"
        )
    if not (directory / "summary.json").exists():
        return False
    found = read_records(directory / "metrics.jsonl")[0]
    return len(found) >= last_round(found, config)


def last_round(records: Sequence[RoundRecord], config: Config) -> int:
    """Return the last round of a run, as far as it is known after `records`.

    With early stopping it is the one after that in which the headline accuracy has not risen for so
    many evaluations. It follows from the records alone, so that a run that was cut off ends alike.
    """
    rounds, patience = config.run.rounds, config.run.early_stopping
    best, waited = -math.inf, 0
    for record in records if patience else ():
        mean = headline_mean(record, config.method.spec.headline)
        if mean is None:
            continue
        best, waited = (mean, 0) if mean > best else (best, waited + 1)
        if waited >= patience:
            return min(record.round + 1, rounds)
    return rounds


def read_run_name(directory: Path) -> str:
    """Return the run's name, as clients know it. Raises StateError."""
    path = directory / "run.json"
    name = read_validated(path, Origin).run
    if not is_name(name):
        raise StateError(f"{path}: {name!r} cannot name a run")
    return name
