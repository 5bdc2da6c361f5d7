"""CPU time of commands that do not train, and wall time until the first round of a run.

    python -m benchmarks.start [--repeats 3] [--run]

Each command runs in a separate process. Bound: 0.7 s of CPU time (user and system), as the minimum
over the repeats, because other load can only increase the time. With --run, the benchmark also
measures the wall time until the first round of the demo on Ray: at most 8 s on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import verdict

BOUND = 0.7
BOUND_OF_A_RUN = 8.0
COMMANDS = (
    "--help",
    "--version",
    "run --help",
    "methods",
    "methods felo",
    "presets",
    "settings",
    "run felo --set lrr=1",
    "run felo --set lr=-1",
    "run fello",
)
COMPLETION = {
    "_FEDHET_COMPLETE": "complete_bash",
    "COMP_WORDS": "fedhet run felo --set local",
    "COMP_CWORD": "4",
}


def main() -> None:
    """Print the seconds of each command, and whether its bound holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", action="store_true", help="train a round of the demo as well")
    chosen = parser.parse_args()
    for words in COMMANDS:
        seconds = [cpu_seconds(words.split(), {}) for _ in range(chosen.repeats)]
        _show(f"fedhet {words}", min(seconds), BOUND)
    seconds = [cpu_seconds([], COMPLETION) for _ in range(chosen.repeats)]
    _show("completion of --set", min(seconds), BOUND)
    if chosen.run:
        _show("demo, Enter to the first round", seconds_to_the_first_round(), BOUND_OF_A_RUN)


def cpu_seconds(words: list[str], environment: dict[str, str]) -> float:
    """Return the user and system time of a command, including the start of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys; sys.argv[0] = 'fedhet'; from fedhet.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def seconds_to_the_first_round() -> float:
    """Return the wall time from the start of `fedhet run` to its first round, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["run", "felo", "--preset", "demo", "--rounds", "1", "--backend", "ray"]
        command = [sys.executable, "-m", "fedhet", *words, "--out", str(out)]
        subprocess.run(command, capture_output=True, check=True)
        found: float = json.loads((out / "summary.json").read_text())["seconds"]["start"]
        return found


def _show(name: str, seconds: float, bound: float) -> None:
    print(f"{name:<44} {seconds:6.2f} s  bound {bound:.1f} {verdict(seconds <= bound)}")


if __name__ == "__main__":
    main()
