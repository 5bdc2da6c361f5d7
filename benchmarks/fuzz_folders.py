"""Fuzz test of commands that read damaged files of a run and of a client's state.

    python -m benchmarks.fuzz_folders FOLDER [--count 1000] [--seed 0]

Each case is a copy of a small run in which one file is damaged, or replaced by a symlink, a pipe or
a directory. A command that reads this file (`report`, `compare`, `run --resume`, `predict`,
`export`, `status`, or the pages of `watch`) must finish within 30 s of CPU time and 2 GB of memory,
without a traceback, and write only into the directory of the case. FOLDER/done contains the number
of finished cases, so that the next call continues after these cases. FOLDER/found.jsonl contains
the findings.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer.main
from markupsafe import Markup

from fedhet import cli, report
from fedhet.base.errors import FedhetError
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate
from fedhet.report.style import Chart, Drawing
from fedhet.report.watch import Pages
from fedhet.runs.log import Watcher

LIMIT_BYTES, LIMIT_SECONDS, CHUNK = 2 * 2**30, 30, 250
MEMORY = 3
"""Exit status of a process that exceeded the memory limit."""
DRAWN = 50
"""Figures are drawn in one case out of this number, because drawing takes most of the time."""
SETTINGS: dict[str, object] = {
    "method": "fedavg", "clients": 2, "rounds": 3, "data.max-samples": 120,
    "data.max-test-samples": 40, "data.partition": "iid", "models.pool": ["mlp"],
    "training.local-epochs": 1, "engine.backend": "inline", "engine.precision": "float32",
}  # fmt: skip
ODD: list[Any] = [
    0, -1, 1, 10**18, -(10**18), 10**400, 2**31, 1e308, float("nan"), float("inf"), "", None,
    "\x1b[31m\n", "../..", "/etc/passwd", True, [], {}, [[]] * 100, {"a": {"b": {}}},
    "ü\ud800", "x" * 9999,
]  # fmt: skip
BYTES = [
    b"\0",
    b"\xff",
    b"[",
    b"{",
    b'"',
    b"\n",
    b"9" * 5000,
    b"[" * 100_000,
    b"a." * 1000,
    b"1e999",
]
INPUT = "x.npz"
"""File with the samples to predict, in the run's directory, so that it may be damaged as well."""
FILES = (
    "config.toml", "run.json", "metrics.jsonl", "summary.json", "partition.json", "status.json",
    "state/*/client-0/client.json", "state/*/client-0/round-000002.safetensors",
    "checkpoints/round-000002.safetensors", INPUT,
)  # fmt: skip


class _CutError(Exception):
    pass


class _CutOff(Watcher):
    def round_started(self, number: int, asked: object) -> None:
        if number == 3:
            raise _CutError


def main() -> None:
    """Test cases in chunks, each in a separate process, and print the number of findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print(f"{tried(chosen.folder, chosen.count, chosen.seed)} findings in {chosen.folder}")


def tried(folder: Path, count: int, seed: int = 0) -> int:
    """Test the remaining cases up to `count`, and return the number of findings of all cases."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # A child would wait for threads that exist only in its parent.
    # Build the commands once, because Typer would spend a quarter of each call on building them.
    cli.app = typer.main.get_command(cli.app)  # type: ignore[assignment]
    whole, done = folder / "whole", folder / "done"
    if not whole.exists():
        with contextlib.suppress(_CutError), contextlib.redirect_stdout(io.StringIO()):
            simulate(resolve(SETTINGS | {"rounds": 2}), folder / "finished")
            simulate(resolve(SETTINGS), whole, [_CutOff()])
        for name in ("summary.json", "status.json"):
            shutil.copy(folder / "finished" / name, whole)
        np.savez_compressed(whole / INPUT, x=np.zeros((3, 8, 8), np.uint8))
    first = int(done.read_text()) if done.exists() else 0
    for start in range(first, count, CHUNK):
        _chunk(folder, range(start, min(start + CHUNK, count)), seed)
    found = folder / "found.jsonl"
    return len(found.read_text().splitlines()) if found.exists() else 0


def _chunk(folder: Path, numbers: range, seed: int) -> None:
    """Test cases in a child process.

    A case that ends the process is a finding, and a new child continues with the next case.
    """
    if (child := os.fork()) == 0:
        # Allow more than LIMIT_BYTES, because RLIMIT_DATA also counts reserved memory.
        resource.setrlimit(resource.RLIMIT_DATA, (4 * LIMIT_BYTES, 4 * LIMIT_BYTES))
        status = 1
        try:
            status = _tried_here(folder, numbers, seed)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        number = int((folder / "now").read_text())
        _note(folder, number, f"the process ended with status {status}")
        (folder / "done").write_text(str(number + 1))
        if rest := numbers[numbers.index(number) + 1 :]:
            _chunk(folder, rest, seed)


def _tried_here(folder: Path, numbers: range, seed: int) -> int:
    """Test cases in this process. Return 0, or MEMORY after a case that used too much memory."""
    for number in numbers:
        (folder / "now").write_text(str(number))
        if fault := case(folder, number, seed):
            _note(folder, number, fault)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > LIMIT_BYTES:
            return MEMORY
        (folder / "done").write_text(str(number + 1))
    return 0


def _note(folder: Path, number: int, fault: str) -> None:
    with (folder / "found.jsonl").open("a") as file:
        file.write(json.dumps({"case": number, "fault": fault}) + "\n")


def case(folder: Path, number: int, seed: int) -> str:
    """Test one case, and return a description of the fault, or "" if there is none."""
    draw, place = random.Random(f"{seed}-{number}"), folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    run, mine = place / "run", place / "mine"
    shutil.copytree(folder / "whole", run)
    mine.mkdir()
    (mine / "letter").write_text("mine")
    what = draw.choice(FILES)
    path = next(run.glob(what))
    how = _damage(draw, path, mine)
    words = _command(draw, what, run, place / "out")
    began = time.process_time()
    fault = _call(words, place, drawn=number % DRAWN == 0)
    seconds = time.process_time() - began
    if fault == "" and seconds > LIMIT_SECONDS:
        fault = f"took {seconds:.0f} s"
    if {p.name: p.read_text() for p in mine.iterdir()} != {"letter": "mine"}:
        fault = "a file outside was touched"
    return f"{words[0]} {what} {how}: {fault}" if fault else ""


def _command(draw: random.Random, what: str, run: Path, out: Path) -> list[str]:
    """Return a command that reads the damaged file."""
    use = [
        ["predict", str(run), "client-0", str(run / INPUT)],
        ["export", str(run), "client-0", "--format", "safetensors", "--out", str(out / "model")],
    ]
    show = [["report", str(run)], ["compare", str(run), "--out", str(out)]]
    watch = [["status", str(run), "--json"], ["watch", str(run)]]
    resume = [["run", "--resume", str(run)]]
    if what == INPUT:
        return use[0]
    if what.startswith("state"):
        return draw.choice([*use, *use, *resume])
    if what.startswith("checkpoints"):
        return resume[0]
    if what == "status.json":
        return draw.choice(watch)
    if what == "run.json":
        return draw.choice([*use, *resume])
    return draw.choice([*show, *show, *watch, *resume, *use])


def _damage(draw: random.Random, path: Path, mine: Path) -> str:
    """Damage a file in a random way, and return the kind of damage."""
    content = path.read_bytes()
    if draw.random() < 0.06:
        path.unlink()
        return _replace(draw, path, mine)
    if draw.random() < 0.5 and path.suffix not in (".toml", ".npz"):
        path.write_bytes(_in_values(draw, path, content))
        return "a value"
    for _ in range(draw.choice([1, 1, 2, 8])):
        content = _in_bytes(draw, content)
    path.write_bytes(content)
    return "bytes"


def _replace(draw: random.Random, path: Path, mine: Path) -> str:
    how = draw.choice(["link", "pipe", "folder", "nothing", "device", "itself"])
    if how == "link":
        path.symlink_to(mine / "letter")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "device":
        path.symlink_to("/dev/zero")
    elif how == "itself":
        path.symlink_to(path)
    return how


def _in_bytes(draw: random.Random, content: bytes) -> bytes:
    at, length = draw.randrange(len(content) + 1), draw.choice([1, 1, 4, 30, 1000])
    put = draw.choice([b"", draw.randbytes(length), draw.choice(BYTES), content[at : at + length]])
    cut = draw.choice([0, 1, length, len(content)])
    return content[:at] + put + content[at + cut :]


def _in_values(draw: random.Random, path: Path, content: bytes) -> bytes:
    """Replace a value in a JSON file, or in a safetensors header, with an odd value."""
    if path.suffix == ".safetensors":
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        if draw.random() < 0.5:
            facts = json.loads(header["__metadata__"]["fedhet"])
            header["__metadata__"]["fedhet"] = json.dumps(_odd(draw, facts))
        else:
            header = _odd(draw, header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[end:]
    if path.suffix == ".jsonl":
        lines = content.decode().splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(_odd(draw, json.loads(lines[at])))
        return "\n".join([*lines, ""]).encode()
    return json.dumps(_odd(draw, json.loads(content))).encode()


def _odd(draw: random.Random, value: Any) -> Any:
    """Return a JSON value in which a random part is replaced with an odd value."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        kept = {k: v for k, v in value.items() if k != name}
        if draw.random() < 0.1:
            return kept | {str(draw.choice(ODD)): value[name]}
        return value | {name: _odd(draw, value[name])}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], _odd(draw, value[at]), *value[at + 1 :]]
    return draw.choice(ODD)


def _call(words: list[str], place: Path, *, drawn: bool) -> str:
    """Run a command in this process. Return its traceback, the files written elsewhere, or ""."""
    sys.argv = ["fedhet", *words]
    said, found = io.StringIO(), ""
    with contextlib.ExitStack() as within:
        within.enter_context(contextlib.redirect_stdout(said))
        within.enter_context(contextlib.redirect_stderr(said))
        outside = within.enter_context(_watched(place))
        within.enter_context(_alarm())
        if not drawn:
            within.enter_context(_undrawn())
        try:
            _page(Path(words[1])) if words[0] == "watch" else cli.main()
        except SystemExit:
            pass
        except BaseException:
            found = traceback.format_exc()[-1500:]
    if "Traceback" in said.getvalue():
        found = said.getvalue()[-1500:]
    return found or (f"wrote {outside[:3]}" if outside else "")


def _page(run: Path) -> None:
    """Build the pages of a run, and the list of runs, as `fedhet watch` serves them."""
    for folder, path in ((run, "/"), (run, f"/status/{run.name}"), (run.parent, "/")):
        pages = Pages(folder)
        if path != "/" and not pages.single:
            continue  # A directory without settings is not a run, and has no status.
        with contextlib.suppress(FedhetError, OSError):  # The server shows the message.
            pages.page(path, {})


@contextlib.contextmanager
def _undrawn() -> Iterator[None]:
    before = report.write_figures, report.write_report, report.write_comparison  # type: ignore
    chart, Drawing.chart = Drawing.chart, lambda drawing: Chart("", Markup())  # type: ignore
    report.write_figures = report.write_report = lambda run: None  # type: ignore
    report.write_comparison = lambda found, out: []  # type: ignore
    try:
        yield
    finally:
        report.write_figures, report.write_report, report.write_comparison = before  # type: ignore
        Drawing.chart = chart  # type: ignore[method-assign]


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("took too long")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(4 * LIMIT_SECONDS)  # Stop blocked cases, but allow for other load on the machine.
    try:
        yield
    finally:
        signal.alarm(0)


_watching: list[Callable[[str, tuple[Any, ...]], None]] = []


@contextlib.contextmanager
def _watched(place: Path) -> Iterator[list[str]]:
    """Yield a list that collects the files opened for writing outside `place`."""
    written: list[str] = []
    allowed = (str(place), "/proc/self/", "/dev/null")

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(given[0], str) or not (given[2] or 0) & 3:
            return
        if given[0].startswith("/") and not given[0].startswith(allowed):
            written.append(given[0])

    if not _watching:
        sys.addaudithook(lambda event, given: _watching and _watching[-1](event, given))
    _watching.append(watch)
    try:
        yield written
    finally:
        _watching.pop()


if __name__ == "__main__":
    main()
