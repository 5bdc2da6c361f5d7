"""Directory of a run: files, lock, and checks before a run is resumed.

`fedhet.runs.records` contains the schemas of the JSON files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
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
from fedhet.base.errors import StateError, error_reason
from fedhet.base.metrics import metric_of
from fedhet.config.sources import DATASETS, read_toml
from fedhet.runs.measures import selection_means
from fedhet.runs.records import Headline, Origin, Partition, RoundRecord, Summary
from fedhet.settings.run import ENDS, PLACE, where_it_ran
from fedhet.wire.identity import is_name

if TYPE_CHECKING:
    from fedhet.config.resolve import Config
    from fedhet.data.store import RunData

T = TypeVar("T")
BASELINE = "baseline"
"""Subdirectory for a run's baseline run."""
MAX_ADDED_PARTS = 20
"""Maximum number of JSON values that defaults add to a parsed record."""
LOCK = "run.lock"
"""Name of the file that a run's process locks."""
_WRITTEN_FIRST = re.compile(r"run\.(lock|json)|\.(run\.json|config\.toml)\.[0-9a-f]+")
"""Names of files that a run writes before config.toml, including temporary files."""
LOCK_PAUSES = (0.05, 0.05, 0.0)
"""Seconds to wait after each failed attempt to lock the file, because a status query may hold the
lock briefly."""
MODEL_DIRECTORIES = ("state", "checkpoints", "inbox", "late", "pool")
"""Subdirectories with models or replies, which use most of a run's disk space."""


def record_line(record: RoundRecord) -> str:
    """Serialize a record to a line of metrics.jsonl, with null for NaN and infinity.

    Optional fields are omitted if they are empty.
    """
    content = _finite(TypeAdapter(RoundRecord).dump_python(record))
    optional = (
        "majority", "tested", "metrics", "unevaluated", "absent", "late", "ages", "clock", "epochs",
        "epsilon",
    )  # fmt: skip
    for name in optional:
        if not content[name]:
            del content[name]
    return json.dumps(content, allow_nan=False) + "\n"


def summary_text(summary: Summary) -> str:
    """Serialize a summary to the text of summary.json, without optional fields that are empty."""
    optional = (
        "owners", "relative", "metrics", "training", "test_samples", "privacy", "metric",
        "commit",
    )  # fmt: skip
    empty = {name for name in optional if not getattr(summary, name)}
    content = _finite(summary.model_dump(exclude=empty))
    for past in content["history"]:
        if past["clock"] is None:
            del past["clock"]
        if not past["metrics"]:
            del past["metrics"]
    return json.dumps(content, indent=1, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def append(path: Path, line: str) -> None:
    """Append a line to a file and sync it.

    Raises StateError if the file is a symlink or cannot be written.
    """
    try:
        with os.fdopen(Folder(path.parent).open(path.name, os.O_WRONLY | os.O_APPEND), "a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StateError(f"cannot write {path}: {error_reason(error)}") from None


def parse_record(line: str, where: str) -> RoundRecord:
    """Parse a line of metrics.jsonl.

    Raises ValueError or RecursionError if the line is not valid JSON, and StateError if it is no
    record. The latter starts with `where`.
    """
    return _validated(RoundRecord, parse_json(line), where)


def read_records(path: Path) -> tuple[list[RoundRecord], list[str]]:
    """Read metrics.jsonl. Return its records sorted by round, and notes for the user.

    A truncated last line is skipped with a note. If a round was repeated after a resume, the later
    record is used. Raises StateError with the line number if any other line is invalid.
    """
    with reading(path):
        text = read_file(path)
    check_json_size(path, text, MAX_ADDED_PARTS * text.count(b"\n"))
    lines = [(n, line) for n, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    records: dict[int, RoundRecord] = {}
    notes: list[str] = []
    for number, line in lines:
        try:
            record = parse_record(line.decode(), f"{path}: line {number}")
        except (ValueError, RecursionError) as error:
            if number != lines[-1][0]:
                raise StateError(f"{path}: line {number}: not valid JSON: {error}") from None
            notes.append("skipped the last line of metrics.jsonl, which is truncated")
            break
        records[record.round] = record
    return [records[number] for number in sorted(records)], notes


def read_if_exists(path: Path, schema: type[T]) -> T | None:
    """Read and validate a JSON file, or return None if it does not exist.

    Raises StateError if the file is invalid.
    """
    return read_validated(path, schema) if path.exists() else None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors raised while the block reads `path` to a StateError that names the path."""
    try:
        yield
    except FileNotFoundError:
        fault = f"either no round has finished, or {path.parent} is not a run directory"
        if seeds := sorted(each.name for each in path.parent.glob("seed-*") if each.is_dir()):
            fault = f"{path.parent} contains a run for each seed. Pass one of {', '.join(seeds)}."
        raise StateError(f"{path} not found: {fault}") from None
    except OSError as error:
        raise StateError(f"cannot read {path}: {error_reason(error)}") from None


def read_validated(path: Path, schema: type[T]) -> T:
    """Read and validate a JSON file.

    Raises StateError, which names the file and the field, if the file is invalid.
    """
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
    """Create the directory of a new run. Raises StateError if the directory is not empty.

    The directory may contain the files of a run that ended before it wrote its settings.
    """
    if (directory / "config.toml").exists():
        raise StateError(
            f"{directory} already contains a run. Choose another directory with --out, or resume "
            "the run with --resume (in a deployment: --set resume=true)."
        )
    make_directory(directory)
    if not all(_WRITTEN_FIRST.fullmatch(path.name) for path in directory.iterdir()):
        raise StateError(f"{directory} is not empty. Choose another directory with --out.")


def make_directory(directory: Path) -> None:
    """Create a directory if it does not exist, and check that it is readable.

    Raises StateError if the directory cannot be created or read.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        next(directory.iterdir(), None)
    except OSError as error:
        raise StateError(f"cannot create directory {directory}: {error_reason(error)}") from None


def delete_models(directory: Path) -> None:
    """Delete a run's models, replies and checkpoints, but keep its records."""
    for name in MODEL_DIRECTORIES:
        shutil.rmtree(directory / name, ignore_errors=True)


def lock(directory: Path) -> IO[str]:
    """Lock a run's directory until the process ends, and return the open lock file.

    Raises StateError if another process has locked the run, or if the directory contains a symlink.
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


def is_locked(directory: Path) -> bool:
    """Return whether a process has locked the run, i.e. whether the run is in progress."""
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


def open_data(config: Config, directory: Path) -> RunData:
    """Return the data of the run in `directory`, which must not have changed since the run started.

    Reading changed data raises StateError. A new run has no recorded data, and neither has a run of
    an older version.
    """
    from fedhet.data.store import RunData  # Import lazily, because it imports PyTorch.

    recorded = read_if_exists(directory / "partition.json", Partition)
    return RunData.for_run(config.run, digest=recorded.digest if recorded else "")


def with_places(config: Config, directory: Path) -> Config:
    """Return `config` with the absolute paths of the data with which the run started.

    A relative path belongs to the directory in which the run started. If the data is no longer at
    its recorded place, for example because it has moved together with the run, `config` is returned
    unchanged.
    """
    from fedhet.data.sources import paths_of

    here, given = data_places(config), config.flat()
    recorded = {
        name: place
        for name, place in _recorded_places(directory).items()
        if name in here and given[name] != here[name] != place
    }
    found = _with_data(config, recorded) if recorded else config
    return found if all(path.exists() for path in paths_of(found.run.data)) else config


def with_given_places(config: Config, directory: Path) -> Config:
    """Return `config` with the paths of the data as in config.toml, if they are the same places."""
    recorded, here = _recorded_places(directory), data_places(config)
    saved = read_toml(directory / "config.toml")
    same = {
        name: saved[name] for name in here if name in saved and recorded.get(name) == here[name]
    }
    return _with_data(config, same)


def _recorded_places(directory: Path) -> Mapping[str, str]:
    recorded = read_if_exists(directory / "partition.json", Partition)
    return recorded.places if recorded else {}


def _with_data(config: Config, places: Mapping[str, object]) -> Config:
    table = {name.partition(".")[2].replace("-", "_"): place for name, place in places.items()}
    return config.replacing(data=config.run.data.model_copy(update=table))


def data_places(config: Config) -> dict[str, str]:
    """Return the absolute values of the settings that locate the data, by name."""
    from fedhet.config.resolve import absolute  # Import lazily, because it imports PyTorch.

    values = absolute(config).flat()
    return {name: str(values[name]) for name in (*DATASETS, "data.data-dir")}


def check_same(config: Config, directory: Path) -> None:
    """Check that `config` can resume the run in `directory`. Raises StateError if it cannot.

    Settings that concern the machine or the end of the run may differ. A complete run can be
    resumed with more rounds.
    """
    if is_complete(config, directory):
        advice = "To continue it, increase --rounds."
        if len(read_records(directory / "metrics.jsonl")[0]) < config.run.rounds:
            advice = "It was stopped early; to continue it, add --set early-stopping=0."
        raise StateError(f"the run in {directory} is already complete. {advice}")


def is_complete(config: Config, directory: Path) -> bool:
    """Return whether `directory` contains a complete run of the same experiment.

    Raises StateError if the directory contains another experiment, or a run with more rounds.
    """
    if not (directory / "config.toml").exists():
        return False
    saved = read_toml(directory / "config.toml")
    flat = with_given_places(config, directory).flat()
    current = {name: value for name, value in flat.items() if name not in PLACE}
    for name in sorted(current.keys() | saved.keys(), key=lambda name: (name != "method", name)):
        if current.get(name) != saved.get(name) and name not in where_it_ran() | ENDS:
            raise StateError(
                f"{directory} contains a run with '{name}' = {saved.get(name)!r}, got "
                f"{current.get(name)!r}. Resume the run with its original settings, or choose "
                "another directory for a new run."
            )
    rounds, planned = config.run.rounds, saved.get("rounds")
    if isinstance(planned, int) and rounds < planned:
        raise StateError(
            f"{directory}: 'rounds' must be at least {planned} to resume this run, got {rounds}"
        )
    if not (directory / "summary.json").exists():
        return False
    records = read_records(directory / "metrics.jsonl")[0]
    return len(records) >= last_round(records, config)


def last_round(records: Sequence[RoundRecord], config: Config) -> int:
    """Return the number of a run's last round, computed from the records so far.

    If the score in `selection_means` has not improved for `early-stopping` evaluations, the run
    ends one round later. The number depends only on the records, so that a resumed run ends at the
    same round.
    """
    rounds, patience = config.run.rounds, config.run.early_stopping
    best, waited = -math.inf, 0
    lower = any(metric_of(record.metric).lower_is_better for record in records)
    means = selection_means(records, Headline.declared_by(config.method.spec)) if patience else {}
    for number, mean in means.items():
        value = -mean if lower else mean
        best, waited = (value, 0) if value > best else (best, waited + 1)
        if waited >= patience:
            return min(number + 1, rounds)
    return rounds


def read_run_name(directory: Path) -> str:
    """Return the name of the run, as used in messages. Raises StateError if run.json is invalid."""
    path = directory / "run.json"
    name = read_validated(path, Origin).run
    if not is_name(name):
        raise StateError(f"{path}: invalid run name {name!r}")
    return name
