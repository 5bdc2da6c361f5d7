"""Reading and writing of records, summaries and partitions as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedhet.base.disk import Folder, parsed, read_file, read_json, refuse_parts
from fedhet.base.errors import StateError, reason_of
from fedhet.runs.records import Origin, Partition, RoundRecord, Summary

T = TypeVar("T")
BASELINE = "baseline"
"""The folder in a run's directory of the run that it is compared with."""
PARTS_OF_A_RECORD = 20
"""Parts of a record that are there though its line does not name them."""


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
    refuse_parts(path, text, PARTS_OF_A_RECORD * text.count(b"\n"))
    lines = [(n, line) for n, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    records: dict[int, RoundRecord] = {}
    for number, line in lines:
        try:
            content = parsed(line.decode())
        except (ValueError, RecursionError) as error:
            if number != lines[-1][0]:
                raise StateError(f"{path}: line {number}: not valid JSON: {error}") from None
            note = "the last line of metrics.jsonl was cut short and is left out"
            return _in_order(records), [note]
        record = _validated(RoundRecord, content, f"{path}: line {number}")
        records[record.round] = record
    return _in_order(records), []


def _in_order(records: dict[int, RoundRecord]) -> list[RoundRecord]:
    return [records[number] for number in sorted(records)]


def read_summary(path: Path) -> Summary | None:
    """Return the summary of a run, or None if there is none yet. Raises StateError."""
    return read_validated(path, Summary) if path.exists() else None


def read_origin(path: Path) -> Origin:
    """Return how a run was started; simulated, if its file is not there. Raises StateError."""
    return read_validated(path, Origin) if path.exists() else Origin()


def read_partition(path: Path) -> Partition | None:
    """Return the label distribution, or None if it is not known. Raises StateError."""
    if not path.exists():
        return None
    found = read_validated(path, Partition)
    for client, row in found.counts.items():
        if len(row) != len(found.classes):
            raise StateError(
                f"{path}: counts.{client}: {len(row)} counts for {len(found.classes)} classes"
            )
    return found


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
